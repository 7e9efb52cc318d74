"""Brokers that end, under a client that sends and receives all the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from e2e.tests.bus import Bus
from e2e.tests.cluster import Space, wait_for
from e2e.tests.figures import record
from e2e.tests.manifests import queue
from e2e.tests.traffic import LOCK, traffic

pytestmark = pytest.mark.alone

REFUSED_S: Final = 15.0
"""Sends are refused no longer than that."""


@pytest.fixture(scope="module")
def rolled(operator: None) -> Iterator[Bus]:
    """A bus whose broker these tests end."""
    space = Space.make("faults")
    bus = Bus.make(space, "e2e-bus")
    rules = [{"name": "app", "rights": ["Send", "Listen"]}]
    space.apply(queue("orders", "e2e-bus", authorizationRules=rules, lockDuration=LOCK))
    try:
        bus.wait_ready()
        space.wait_ready("sbq/orders")
        yield bus
    finally:
        bus.end()
        space.close()


def delete_pod(bus: Bus) -> None:
    bus.space.kubectl("delete", "pod", bus.broker, "--wait=false")


def force_delete_pod(bus: Bus) -> None:
    bus.space.kubectl("delete", "pod", bus.broker, "--grace-period=0", "--force", "--wait=false")


def change_memory(bus: Bus) -> None:
    resources = {"limits": {"memory": "640Mi"}}
    bus.space.patch("sbns/e2e-bus", {"spec": {"operatorSpec": {"resources": resources}}})


def annotate_pods(bus: Bus) -> None:
    template = {"annotations": {"example.test/roll": "1"}}
    bus.space.patch("sbns/e2e-bus", {"spec": {"operatorSpec": {"podTemplate": template}}})


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(delete_pod, marks=pytest.mark.smoke),
        force_delete_pod,
        change_memory,
        annotate_pods,
    ],
)
def test_no_message_is_lost_and_sends_go_on_when_a_broker_is(
    rolled: Bus, fault: Callable[[Bus], Any]
) -> None:
    space = rolled.space
    pod = f"pod/{rolled.broker}"
    before = space.get(pod)["metadata"]["uid"]
    with traffic(space, "orders-queue-app") as client:
        fault(rolled)
        wait_for(lambda: space.uid_if_ready(pod), lambda found: found not in {"", before}, 120)
    client.check()
    what = fault.__name__.replace("_", " ")
    record(f"sends refused after: {what}", client.account["refused_for"], REFUSED_S)
    space.wait_ready("sbns/e2e-bus")
