"""A plugin of pytest that writes down which public methods of azure-servicebus are called.

`pytest -p tests.sdk.python_calls --calls FILE`: methods of the clients are wrapped before any test
uses them; "worked" is a call that returned. Shape of the file: as `coverage.read_calls` wants it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import azure.servicebus
import azure.servicebus.aio
import azure.servicebus.aio.management
import azure.servicebus.management
import pytest

CLIENTS = {
    "": (
        azure.servicebus.ServiceBusClient,
        azure.servicebus.ServiceBusSender,
        azure.servicebus.ServiceBusReceiver,
        azure.servicebus.ServiceBusSession,
        azure.servicebus.AutoLockRenewer,
        azure.servicebus.management.ServiceBusAdministrationClient,
    ),
    "aio.": (
        azure.servicebus.aio.ServiceBusClient,
        azure.servicebus.aio.ServiceBusSender,
        azure.servicebus.aio.ServiceBusReceiver,
        azure.servicebus.aio.ServiceBusSession,
        azure.servicebus.aio.AutoLockRenewer,
        azure.servicebus.aio.management.ServiceBusAdministrationClient,
    ),
}
calls: dict[str, dict[str, int]] = {}


def public_methods() -> dict[str, tuple[type, str]]:
    """Return the name of each method in the table -> its class and name."""
    return {
        f"{prefix}{client.__name__}.{name}": (client, name)
        for prefix, clients in CLIENTS.items()
        for client in clients
        for name, value in inspect.getmembers_static(client)
        if not name.startswith("_") and not isinstance(value, property) and name != "next"
    }


def counted(method: Callable[..., Any], count: dict[str, int]) -> Callable[..., Any]:
    """Return a method that counts; one that returns an awaitable worked when that has."""

    async def awaited(work: Any) -> Any:
        result = await work
        count["worked"] += 1
        return result

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        count["tried"] += 1
        result = method(*arguments, **named)
        if inspect.iscoroutine(result):
            return awaited(result)
        count["worked"] += 1
        return result

    return call


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", help="File to write the calls of azure-servicebus to.")


def pytest_configure() -> None:
    for name, (client, method) in public_methods().items():
        found = inspect.getattr_static(client, method)
        count = calls[name] = {"tried": 0, "worked": 0}
        if isinstance(found, classmethod | staticmethod):
            wrapped: Any = type(found)(counted(found.__func__, count))
        else:
            wrapped = counted(found, count)
        setattr(client, method, wrapped)


def pytest_unconfigure(config: pytest.Config) -> None:
    file = config.getoption("--calls")
    if file is not None:
        Path(file).write_text(json.dumps({"methods": calls}))
