"""Shortens the fixed pauses of the Python SDK.

The SDK sleeps 50 ms between two looks whether a link is open, and up to a second when a receiver
is closed. Its retries and time limits stay as they are. Examples, guides and `make test-sdk` run
the SDK in processes of their own, with all its pauses.
"""

from __future__ import annotations

import asyncio
import sys
import time

MODULES = (
    "_pyamqp._connection",
    "_pyamqp.aio._client_async",
    "_pyamqp.aio._connection_async",
    "_pyamqp.aio._session_async",
    "_pyamqp.client",
    "_pyamqp.session",
    "_servicebus_receiver",
    "_servicebus_sender",
    "_session_browser",
    "aio._servicebus_receiver_async",
    "aio._servicebus_sender_async",
    "aio._session_browser_async",
)
PAUSES_S = {1: 0.01, 0.1: 0.002, 0.05: 0.002}
"""Length of a pause in the SDK -> length in tests."""


def wait_briefly(duration_s: float) -> None:
    time.sleep(PAUSES_S.get(duration_s, duration_s))


async def wait_briefly_in_loop(duration_s: float) -> None:
    await asyncio.sleep(PAUSES_S.get(duration_s, duration_s))


class ShortTime:
    """The module `time` with short pauses."""

    sleep = staticmethod(wait_briefly)

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


class ShortAsyncio:
    """The module `asyncio` with short pauses."""

    sleep = staticmethod(wait_briefly_in_loop)

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)


def shorten_sdk_pauses() -> None:
    """Change the modules of the SDK that are loaded."""
    for name in MODULES:
        module = sys.modules.get(f"azure.servicebus.{name}")
        if getattr(module, "time", None) is time:
            module.time = ShortTime()
        if getattr(module, "asyncio", None) is asyncio:
            module.asyncio = ShortAsyncio()
