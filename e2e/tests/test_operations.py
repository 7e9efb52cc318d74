"""The commands of the guides about operations and backup, on the bus of the quickstart.

In one module, because all of them name that bus.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from e2e.tests.bus import Bus
from e2e.tests.cluster import ROOT, Space, run, wait_for
from e2e.tests.guide import quickstart

GUIDES: Final = ROOT / "docs" / "guides"
OPERATIONS: Final = GUIDES / "kubernetes-operations.md"
BACKUP: Final = GUIDES / "backup.md"
SECRET: Final = "orders-queue-app"


def blocks(guide: Path) -> list[str]:
    text = guide.read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def shop(operator: None) -> Iterator[Space]:
    """The bus of the quickstart, which the guide names."""
    made = Space("shop")
    # That of the quickstart may still end.
    made.kubectl("wait", "--for=delete", "namespace/shop", "--timeout=90s")
    run("bash", "-euc", quickstart().apply)
    try:
        made.wait_ready("sbns/shop-bus", "sbq/orders")
        yield made
    finally:
        made.close()


def test_commands_of_the_guide_work_on_a_cluster(shop: Space) -> None:
    shown = {}
    for line in "".join(blocks(OPERATIONS)).splitlines():
        # No container of the operator has ended before.
        shown[line] = run("bash", "-euc", line.replace(" --previous", ""))
    [status] = [text for line, text in shown.items() if line.endswith("postbus status")]
    assert re.search(r"^ready +yes$", status, re.MULTILINE)
    [pods] = [text for line, text in shown.items() if line.endswith("--output=wide")]
    assert "shop-bus-broker-0" in pods
    assert "shop-bus-store-main-0" in pods
    [rights] = [text for line, text in shown.items() if "can-i" in line]
    assert re.search(r"^queues\.postbus\.dev/status .*patch", rights, re.MULTILINE)


def test_a_bus_is_restored_after_its_cluster_namespace_was_lost(
    shop: Space, tmp_path: Path
) -> None:
    on_clusters = [each for each in blocks(BACKUP) if each.startswith("kubectl ")]
    backup, secrets, restore = on_clusters
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
    wanted = {name: known[name] for name in ("connectionString", "ca.crt")}
    # The new bus made keys, which the operator replaces by those of the backup.
    wait_for(lambda: bus.secret(SECRET), lambda found: wanted.items() <= found.items(), 60)
    bus.end()
