"""A plugin of pytest that writes down which public methods of azure-servicebus are called.

`pytest -p tests.sdk.python_calls --calls FOLDER`: methods of the clients are wrapped before any
test uses them; "worked" is a call that returned. Each process that runs tests, a worker of xdist or
pytest alone, writes a file of its own. Their shape: as `coverage.read_calls` wants it.
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
from azure.core.async_paging import AsyncItemPaged
from azure.core.paging import ItemPaged

CLIENTS = {
    "": (
        azure.servicebus.ServiceBusClient,
        azure.servicebus.ServiceBusSender,
        azure.servicebus.ServiceBusReceiver,
        azure.servicebus.ServiceBusSession,
        azure.servicebus.ServiceBusMessageBatch,
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
    """Return a method that counts; one that returns pages worked when it fetched one of them."""
    finishing = counted_as_worked(method, count)

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        count["tried"] += 1
        result = finishing(*arguments, **named)
        if isinstance(result, ItemPaged | AsyncItemPaged):
            count["worked"] -= 1
            fetch, *rest = result._args
            result._args = (counted_as_worked(fetch, count), *rest)
        return result

    return call


def counted_as_worked(method: Callable[..., Any], count: dict[str, int]) -> Callable[..., Any]:
    """Return a method that has worked when it returns, or when what it returns was awaited."""

    async def awaited(work: Any) -> Any:
        result = await work
        count["worked"] += 1
        return result

    def call(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if inspect.iscoroutine(result):
            return awaited(result)
        count["worked"] += 1
        return result

    return call


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", help="Folder to write the calls of azure-servicebus to.")


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
    folder = config.getoption("--calls")
    only_hands_out = config.pluginmanager.has_plugin("dsession")
    if folder is None or only_hands_out:
        return
    # xdist gives a worker this attribute, which its type does not have.
    worker: dict[str, str] = getattr(config, "workerinput", {"workerid": "alone"})
    file = Path(folder) / f"{worker['workerid']}.json"
    file.write_text(json.dumps({"methods": calls}))
