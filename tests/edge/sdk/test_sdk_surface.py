"""Every public operation of azure-servicebus is either used by these tests or has a reason."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from azure.servicebus import (
    AutoLockRenewer,
    ServiceBusClient,
    ServiceBusReceiver,
    ServiceBusSender,
    ServiceBusSession,
    aio,
)

SYNC = (ServiceBusClient, ServiceBusSender, ServiceBusReceiver, ServiceBusSession, AutoLockRenewer)
ASYNC = (
    aio.ServiceBusClient,
    aio.ServiceBusSender,
    aio.ServiceBusReceiver,
    aio.ServiceBusSession,
    aio.AutoLockRenewer,
)

LOCAL = "touches nothing of the broker"

REASONS = {
    ("ServiceBusClient", "close"): "called by the client's context manager",
    ("ServiceBusReceiver", "close"): "called by the receiver's context manager",
    ("ServiceBusSender", "close"): "called by the sender's context manager",
    ("AutoLockRenewer", "close"): "called by the renewer's context manager",
    ("ServiceBusReceiver", "client_identifier"): LOCAL,
    ("ServiceBusSender", "client_identifier"): LOCAL,
    ("ServiceBusReceiver", "next"): "Python 2's name for iteration",
}
"""(class, member) -> why no test calls it."""


def members(kind: type) -> list[str]:
    return [
        name
        for name, value in inspect.getmembers(kind)
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    ]


def sources(is_async: bool) -> str:
    names = ["test_sdk_async.py"] if is_async else []
    if not is_async:
        names = [
            path.name
            for path in Path(__file__).parent.glob("test_sdk_*.py")
            if path.name not in ("test_sdk_async.py", Path(__file__).name)
        ]
        names += ["../bus_thread.py", "../amqp/test_connections.py"]
    return "\n".join((Path(__file__).parent / name).read_text() for name in names)


@pytest.mark.parametrize("is_async", [False, True])
def test_every_operation_is_called_or_has_a_reason(is_async: bool) -> None:
    text = sources(is_async)
    missing = []
    for kind in ASYNC if is_async else SYNC:
        for name in members(kind):
            if kind.__name__ == "ServiceBusSession" or (kind.__name__, name) in REASONS:
                continue
            if not re.search(rf"\b{name}\b", text):
                missing.append(f"{kind.__name__}.{name}")
    assert missing == []


def test_reasons_name_existing_members() -> None:
    known = {(kind.__name__, name) for kind in (*SYNC, *ASYNC) for name in members(kind)}
    assert set(REASONS) - known == {("ServiceBusReceiver", "next")} - known
