"""The client of the control API for all commands: it finds the bus, and says what to do.

Each failure becomes one sentence; no sentence contains a token.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, assert_never

from postbus.cli.client.contexts import NO_BUS_HERE, BusAddress
from postbus.cli.failures import ContextError, RefusedError
from postbus.client import control
from postbus.client.control import ANSWER_S, Failure, RequestFailed, RequestRefused, part

__all__ = [
    "ConflictError",
    "ControlClient",
    "NotFoundError",
    "UnavailableError",
    "part",
    "run_with",
]

T = TypeVar("T")


class NotFoundError(RefusedError):
    """The bus does not have the requested object."""


class ConflictError(RefusedError):
    """The request conflicts with the current state."""


class UnavailableError(RefusedError):
    """The bus or the store of an entity is unavailable."""


class ControlClient(control.ControlClient):
    """An open client; every method may raise `RefusedError` instead of the errors of its base."""

    def __init__(self, target: BusAddress) -> None:
        super().__init__(target.control, target.token(), _trusted(target))
        self._target = target

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send one request and return the JSON of its response, None if it is empty."""
        try:
            return await super().ask(method, path, body, query, headers)
        except RequestFailed as error:
            raise RefusedError(_explained(error.failure, self._target.control)) from None
        except RequestRefused as error:
            raise self._refusal(error) from None

    async def all_of(self, path: str, page: int = 500) -> list[dict[str, Any]]:
        """Return all items of a list, reading it page by page."""
        try:
            return await super().all_of(path, page)
        except RequestFailed as error:
            raise RefusedError(_explained(error.failure, self._target.control)) from None

    def _refusal(self, error: RequestRefused) -> RefusedError:
        target = self._target
        if error.status == 404:
            return NotFoundError(error.detail)
        if error.status == 409:
            return ConflictError(error.detail)
        if error.status == 503:
            return UnavailableError(error.detail)
        if error.status == 401 and target.is_guess:
            return RefusedError(
                f"{NO_BUS_HERE}; the bus at {target.control} belongs to another folder"
            )
        if error.status == 401 and target.context.token_file is None:
            return RefusedError(
                f"the bus at {target.control} requires a control token: set the file with it by"
                " postbus context set NAME --token-file FILE"
            )
        return RefusedError(error.detail)


def _trusted(target: BusAddress) -> ssl.SSLContext | None:
    path = target.context.ca_file
    if path is None or not target.control.startswith("https:"):
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError):
        raise ContextError(f"CA file {path}: contains no certificates (PEM)") from None


def _explained(failure: Failure, url: str) -> str:
    """Return what happened, and what to do."""
    match failure:
        case Failure.CERTIFICATE_UNTRUSTED:
            return (
                f"the certificate of {url} is not trusted: set its CA with"
                " postbus context set NAME --ca-file FILE"
            )
        case Failure.NO_TLS:
            return f"the server at {url} does not use TLS: try an address with http://"
        case Failure.NO_CONNECTION:
            return (
                f"no bus answers at {url}: start one with postbus dev, or select another"
                " with postbus context use"
            )
        case Failure.LATE:
            return f"the bus at {url} did not answer within {ANSWER_S:.0f} s"
        case Failure.CLOSED:
            is_plain = not url.startswith("https:")
            hint = "; if it uses TLS, the address starts with https://" if is_plain else ""
            return (
                f"the bus at {url} closed the connection without an answer; the request may"
                f" have taken effect{hint}"
            )
        case Failure.NOT_A_CONTROL_API:
            return (
                f"the server at {url} is not the control API of a bus: check the address with"
                " postbus context show"
            )
        case Failure.TOO_LONG:
            return (
                f"the server at {url} answers more than a bus does: check the address with"
                " postbus context show"
            )
        case _:
            assert_never(failure)


def run_with(target: BusAddress, work: Callable[[ControlClient], Awaitable[T]]) -> T:
    """Run work with an open client."""

    async def run() -> T:
        async with ControlClient(target) as client:
            return await work(client)

    return asyncio.run(run())
