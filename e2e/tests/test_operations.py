"""The commands of the guide about operations on Kubernetes, on a bus that runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest
from e2e.tests.cluster import ROOT, Space, run
from e2e.tests.guide import quickstart

GUIDE: Final = ROOT / "docs" / "guides" / "kubernetes-operations.md"


def commands() -> list[str]:
    text = GUIDE.read_text(encoding="utf-8")
    found = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines()]


@pytest.fixture
def shop(operator: None) -> Iterator[Space]:
    """The bus of the quickstart, which the guide names."""
    made = Space("shop")
    # A test before may have left it behind while it ends.
    made.kubectl("wait", "--for=delete", "namespace/shop", "--timeout=90s")
    run("bash", "-euc", quickstart().apply)
    try:
        made.wait_ready("sbns/shop-bus", "sbq/orders")
        yield made
    finally:
        made.close()


def test_commands_of_the_guide_work_on_a_cluster(shop: Space) -> None:
    shown = {}
    for line in commands():
        # No container of the operator has ended before.
        shown[line] = run("bash", "-euc", line.replace(" --previous", ""))
    [status] = [text for line, text in shown.items() if line.endswith("postbus status")]
    assert re.search(r"^ready +yes$", status, re.MULTILINE)
    [pods] = [text for line, text in shown.items() if line.endswith("--output=wide")]
    assert "shop-bus-broker-0" in pods
    assert "shop-bus-store-main-0" in pods
    [rights] = [text for line, text in shown.items() if "can-i" in line]
    assert re.search(r"^queues\.postbus\.dev/status .*patch", rights, re.MULTILINE)
