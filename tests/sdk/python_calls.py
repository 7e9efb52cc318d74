"""A plugin of pytest that writes down which public methods of a client in Python are called.

`pytest -p tests.sdk.python_calls --calls FOLDER --client NAME`: methods of its classes are wrapped
before any test uses them; "worked" is a call that returned. Each process that runs tests, a worker
of xdist or pytest alone, writes a file of its own. Their shape: as `coverage.read_calls` wants it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from azure.core.async_paging import AsyncItemPaged
from azure.core.paging import ItemPaged

AZURE = "azure-servicebus"
CLIENTS = {
    AZURE: [
        "azure.servicebus.ServiceBusClient",
        "azure.servicebus.ServiceBusSender",
        "azure.servicebus.ServiceBusReceiver",
        "azure.servicebus.ServiceBusSession",
        "azure.servicebus.ServiceBusMessageBatch",
        "azure.servicebus.AutoLockRenewer",
        "azure.servicebus.management.ServiceBusAdministrationClient",
        "azure.servicebus.aio.ServiceBusClient",
        "azure.servicebus.aio.ServiceBusSender",
        "azure.servicebus.aio.ServiceBusReceiver",
        "azure.servicebus.aio.ServiceBusSession",
        "azure.servicebus.aio.AutoLockRenewer",
        "azure.servicebus.aio.management.ServiceBusAdministrationClient",
    ],
    "kombu": ["kombu.transport.azureservicebus.Channel"],
    "python-qpid-proton": [
        "proton.utils.BlockingConnection",
        "proton.utils.BlockingSender",
        "proton.utils.BlockingReceiver",
    ],
}
NOT_FOR_USERS = ("_", "on_")  # prefixes of private names, and of methods called by an engine
OLD_NAMES = {"next"}  # Python 2's name for iteration

calls: dict[str, dict[str, int]] = {}


def public_methods(client: str) -> dict[str, tuple[type, str]]:
    """Return the name of each method in the table -> its class and name."""
    found: dict[str, tuple[type, str]] = {}
    for path in CLIENTS[client]:
        module, _, kind = path.rpartition(".")
        owner: type = getattr(importlib.import_module(module), kind)
        prefix = "aio." if ".aio." in path else ""
        for name, value in inspect.getmembers_static(owner):
            is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
            if is_method and not name.startswith(NOT_FOR_USERS) and name not in OLD_NAMES:
                found[f"{prefix}{kind}.{name}"] = owner, name
    return found


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
    """Return a method that counts as successful when it returns, or when its result was awaited."""

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
    parser.addoption("--calls", help="Folder for the recorded calls.")
    parser.addoption(
        "--client", default=AZURE, choices=list(CLIENTS), help="Client whose calls are recorded."
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, (owner, method) in public_methods(config.getoption("--client")).items():
        found = inspect.getattr_static(owner, method)
        count = calls[name] = {"tried": 0, "worked": 0}
        if isinstance(found, classmethod | staticmethod):
            wrapped: Any = type(found)(counted(found.__func__, count))
        else:
            wrapped = counted(found, count)
        setattr(owner, method, wrapped)


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.getoption("--calls")
    only_hands_out = config.pluginmanager.has_plugin("dsession")
    if folder is None or only_hands_out:
        return
    # xdist gives a worker this attribute, which its type does not have.
    worker: dict[str, str] = getattr(config, "workerinput", {"workerid": "alone"})
    file = Path(folder) / f"{worker['workerid']}.json"
    file.write_text(json.dumps({"methods": calls}))
