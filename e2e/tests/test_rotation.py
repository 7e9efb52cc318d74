"""Keys are rotated under a client that sends all the time, and no send is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError
from e2e.tests.bus import Bus
from e2e.tests.cluster import SYSTEM, kubectl, wait_for
from e2e.tests.conftest import wait_for_operator
from e2e.tests.manifests import queue
from e2e.tests.traffic import traffic

OVERLAP_S: Final = 40
"""Time between the steps; by default minutes, for kubelets that update mounted Secrets late."""


@pytest.fixture(scope="module")
def short_overlap(operator: None) -> Iterator[None]:
    set_overlap(f"={OVERLAP_S}")
    try:
        yield
    finally:
        set_overlap("-")


def set_overlap(value: str) -> None:
    kubectl(
        "--namespace", SYSTEM, "set", "env", "deployment/postbus-operator",
        f"POSTBUS_OPERATOR_ROTATION_S{value}",
    )  # fmt: skip
    wait_for_operator()


@pytest.mark.parametrize("which", ["primary", "secondary"])
def test_rotation_refuses_no_client(shared: Bus, short_overlap: None, which: str) -> None:
    space, name = shared.space, f"rotated-{which}"
    reference, secret = f"sbq/{name}", f"{name}-queue-app"
    rules = [{"name": "app", "rights": ["Send", "Listen"]}]
    space.apply(queue(name, shared.name, authorizationRules=rules))
    space.wait_ready(reference)
    before = shared.secret(secret)
    with traffic(space, secret, f"rotation-{which}") as client:
        space.kubectl("annotate", reference, f"postbus.dev/rotate={which}")
        space.wait_condition(reference, "SecretsSynced", "True", "Rotating")
        refresh(shared, f"rotation-{which}", secret)
        space.wait_condition(reference, "SecretsSynced", "True", "Synced", OVERLAP_S + 60)
        refresh(shared, f"rotation-{which}", secret)
    client.check()
    assert client.account["troubles"] == [], client.account
    after = shared.secret(secret)
    assert after[f"{which}Key"] != before[f"{which}Key"]
    other = "secondaryKey" if which == "primary" else "primaryKey"
    assert after[other] == before[other]
    assert "KeysRotated" in space.events(name)
    assert is_refused(shared, name, before[f"{which}ConnectionString"])
    assert not is_refused(shared, name, after[f"{which}ConnectionString"])


def refresh(bus: Bus, pod: str, secret: str) -> None:
    """Wait until a pod has the Secret of now; a changed annotation makes kubelet look at once."""
    bus.space.kubectl("annotate", f"pod/{pod}", "example.test/look=now", "--overwrite")
    wanted = bus.secret(secret)["primaryKey"]
    wait_for(
        lambda: bus.space.kubectl("exec", pod, "--", "cat", "/bus/primaryKey"),
        lambda found: found == wanted,
        120,
    )


def is_refused(bus: Bus, name: str, connection_string: str) -> bool:
    try:
        with (
            bus.connected(connection_string, f"{name}-queue-app") as client,
            client.get_queue_sender(name) as sender,
        ):
            sender.send_messages(ServiceBusMessage("one more"))
    except ServiceBusError:  # the SDK calls a refused key a connection error here
        return True
    return False
