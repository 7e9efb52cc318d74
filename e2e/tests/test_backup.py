"""Backup and restore of a managed store, by the commands of the guide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from e2e.tests.bus import Bus
from e2e.tests.cluster import ROOT, Space, run
from e2e.tests.guide import quickstart

GUIDE: Final = ROOT / "docs" / "guides" / "backup.md"
SECRET: Final = "orders-queue-app"


def blocks() -> list[str]:
    """Return the blocks of the guide that concern a cluster: backup, Secrets, restore."""
    text = GUIDE.read_text(encoding="utf-8")
    found = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [each for each in found if each.startswith("kubectl ")]


@pytest.fixture
def shop(operator: None) -> Iterator[Space]:
    """The bus of the quickstart, which the guide names."""
    made = Space("shop")
    made.kubectl("wait", "--for=delete", "namespace/shop", "--timeout=90s")
    run("bash", "-euc", quickstart().apply)
    try:
        made.wait_ready("sbns/shop-bus", "sbq/orders")
        yield made
    finally:
        made.close()


def test_a_bus_is_restored_after_its_cluster_namespace_was_lost(
    shop: Space, tmp_path: Path
) -> None:
    backup, secrets, restore = blocks()
    bus = Bus(shop, "shop-bus")
    bus.send("orders", "in the backup")
    known = bus.secret(SECRET)
    run("bash", "-euc", f"cd {tmp_path}\n{backup}")
    bus.end()
    shop.kubectl("delete", "namespace", "shop", "--timeout=120s")
    run("bash", "-euc", f"cd {tmp_path}\n{secrets}")
    run("bash", "-euc", quickstart().apply)
    run("bash", "-euc", f"cd {tmp_path}\n{restore}")
    shop.kubectl("rollout", "status", "statefulset/shop-bus-broker", "--timeout=120s")
    shop.wait_ready("sbns/shop-bus", "sbq/orders")
    bus = Bus(shop, "shop-bus")
    assert bus.texts("orders", 1) == ["in the backup"]
    found = bus.secret(SECRET)
    for name in ("connectionString", "ca.crt"):
        assert found[name] == known[name]
    bus.end()
