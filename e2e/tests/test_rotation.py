"""Keys are rotated under a client that sends all the time, and no send is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError
from e2e.tests.bus import Bus
from e2e.tests.cluster import SYSTEM, kubectl, wait_for
from e2e.tests.conftest import wait_for_operator
from e2e.tests.manifests import queue
from e2e.tests.traffic import LOCK, traffic

KEYS: Final = ("primary", "secondary")

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


def test_rotation_refuses_no_client(shared: Bus, short_overlap: None) -> None:
    """Both keys at once, of a queue each: most of a rotation is its overlap."""
    space = shared.space
    rules = [{"name": "app", "rights": ["Send", "Listen"]}]
    fields = {"authorizationRules": rules, "lockDuration": LOCK}
    space.apply(*(queue(f"rotated-{key}", shared.name, **fields) for key in KEYS))
    space.wait_ready(*(f"sbq/rotated-{key}" for key in KEYS))
    before = {key: shared.secret(secret_of(key)) for key in KEYS}
    with ExitStack() as running:
        clients = {
            key: running.enter_context(traffic(space, secret_of(key), f"rotation-{key}"))
            for key in KEYS
        }
        for key in KEYS:
            space.kubectl("annotate", f"sbq/rotated-{key}", f"postbus.dev/rotate={key}")
        for key in KEYS:
            space.wait_condition(f"sbq/rotated-{key}", "SecretsSynced", "True", "Rotating")
            refresh(shared, f"rotation-{key}", secret_of(key))
        for key in KEYS:
            limit_s = OVERLAP_S + 60
            space.wait_condition(f"sbq/rotated-{key}", "SecretsSynced", "True", "Synced", limit_s)
            refresh(shared, f"rotation-{key}", secret_of(key))
    for key, client in clients.items():
        client.check()
        assert client.account["troubles"] == [], client.account
        name, after = f"rotated-{key}", shared.secret(secret_of(key))
        changed = {
            each for each in ("primaryKey", "secondaryKey") if after[each] != before[key][each]
        }
        assert changed == {f"{key}Key"}
        assert "KeysRotated" in space.events(name)
        assert is_refused(shared, name, before[key][f"{key}ConnectionString"])
        assert not is_refused(shared, name, after[f"{key}ConnectionString"])


def secret_of(key: str) -> str:
    return f"rotated-{key}-queue-app"


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
