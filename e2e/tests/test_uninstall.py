"""The operator goes before what it manages, then the definitions go; last of all modules.

The commands are those of the guide to Kubernetes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import pytest
from e2e.tests.bus import Bus
from e2e.tests.cluster import SYSTEM, TAG, Refused, Space, buses_elsewhere, kubectl, run, wait_for
from e2e.tests.conftest import install_operator, uninstall_operator, wait_for_operator
from e2e.tests.figures import record
from e2e.tests.guide import blocks
from e2e.tests.manifests import bus as bus_manifest
from e2e.tests.manifests import queue

pytestmark = pytest.mark.last

NAME: Final = "e2e-bus"
RELEASED_S: Final = 10.0
DEFINITIONS_S: Final = 60.0


def command(beginning: str) -> str:
    """Return the line of the guide that begins so."""
    [line] = [
        line for block in blocks() for line in block.splitlines() if line.startswith(beginning)
    ]
    return line


@pytest.fixture
def reinstalled(operator: None) -> Iterator[None]:
    yield
    install_operator()
    wait_for_operator()


def wait_until_stopped() -> None:
    wait_for(
        lambda: kubectl("--namespace", SYSTEM, "get", "pods", "--output=name"),
        lambda found: not found,
        60,
    )


@pytest.mark.smoke
def test_operator_first_then_the_way_out(space: Space, reinstalled: None) -> None:
    bus = Bus.make(space, NAME)
    space.apply(queue("orders", NAME), queue("kept", NAME))
    bus.wait_ready()
    space.wait_ready("sbq/orders", "sbq/kept")
    uninstall_operator()
    wait_until_stopped()
    try:
        bus.send("kept", "without an operator")
        assert bus.texts("kept", 1) == ["without an operator"]
        space.start_deletion("sbq/orders", f"sbns/{NAME}")
        assert space.exists("sbq/orders")
        start = time.monotonic()
        run("bash", "-euo", "pipefail", "-c", command("kubectl get postbus -A -o go-template"))
        space.wait("delete", "sbq/orders", f"sbns/{NAME}", limit_s=RELEASED_S)
        record("released without an operator", time.monotonic() - start, RELEASED_S)
        assert space.exists("sbq/kept")
        space.start_deletion("sbq/kept")
        run("bash", "-euo", "pipefail", "-c", command("kubectl get postbus -A -o go-template"))
        space.wait("delete", "sbq/kept", limit_s=RELEASED_S)
    finally:
        bus.end()


def test_operator_for_one_cluster_namespace_leaves_others_alone(
    space: Space, reinstalled: None
) -> None:
    other = Space.make("other")
    uninstall_operator()
    try:
        line = command("helm upgrade --install postbus charts/postbus")
        line = line.replace("watchNamespaces={shop}", f"watchNamespaces={{{space.name}}}")
        run("bash", "-euc", f"{line} --set image.tag={TAG}")
        wait_for_operator()
        for each in (space, other):
            each.apply(bus_manifest(NAME), queue("orders", NAME))
        space.wait_ready(f"sbns/{NAME}", "sbq/orders")
        assert "status" not in other.get(f"sbns/{NAME}")
        bus = Bus(space, NAME)
        bus.send("orders", "hello")
        assert bus.texts("orders", 1) == ["hello"]
        bus.end()
        space.delete("sbq/orders", f"sbns/{NAME}")
        uninstall_operator()
    finally:
        other.close()


def test_definitions_last(space: Space, operator: None) -> None:
    """Deletes every bus of the cluster, so it does nothing where others have some."""
    if buses_elsewhere():
        pytest.skip("there are buses of others")
    space.apply(bus_manifest(NAME), queue("orders", NAME))
    space.wait_ready(f"sbns/{NAME}", "sbq/orders")
    start = time.monotonic()
    run("bash", "-euc", command("kubectl delete crd"))
    record("definitions deleted with their resources", time.monotonic() - start, DEFINITIONS_S)
    with pytest.raises(Refused, match="doesn't have a resource type"):
        kubectl("get", "queues.postbus.dev")
    run("helm", "uninstall", "postbus-crds", "--namespace", "default")
