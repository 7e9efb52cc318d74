"""The client of the control API, for all commands.

Each failure becomes one sentence that says what to do; no sentence contains a token.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, TypeVar
from urllib.parse import quote

import aiohttp

from postbus.cli.client.contexts import NO_BUS_HERE, BusAddress
from postbus.cli.failures import ContextError, RefusedError

ANSWER_S: Final = 90.0
"""Longer than the bus itself waits for a request."""

CONNECT_S: Final = 10.0
T = TypeVar("T")


class NotFoundError(RefusedError):
    """The bus does not have the requested object."""


class ConflictError(RefusedError):
    """The request conflicts with the current state."""


class UnavailableError(RefusedError):
    """The bus or the store of an entity is unavailable."""


class ControlClient:
    """An open client; an asynchronous context manager. Every method may raise `RefusedError`."""

    def __init__(self, target: BusAddress) -> None:
        self._target = target
        self._url = target.control
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> ControlClient:
        token = self._target.token()
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(ANSWER_S, connect=CONNECT_S),
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(ssl=self._trust()),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    def _trust(self) -> ssl.SSLContext | bool:
        path = self._target.context.ca_file
        if path is None or not self._url.startswith("https:"):
            return True
        try:
            return ssl.create_default_context(cafile=path)
        except (OSError, ssl.SSLError):
            raise ContextError(f"CA file {path}: contains no certificates (PEM)") from None

    # --- asking ---------------------------------------------------------------------------------

    async def get(self, path: str, **query: object) -> Any:
        """Return the object at a path. Query values None are left out."""
        return await self.ask("GET", path, query=query)

    async def put(self, path: str, body: Mapping[str, object], **query: object) -> Any:
        """Create or replace a definition; repeating it changes nothing."""
        return await self.ask("PUT", path, body, query)

    async def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Run an operation."""
        return await self.ask("POST", path, body or {})

    async def delete(self, path: str, **query: object) -> Any:
        """Delete the object at a path."""
        return await self.ask("DELETE", path, query=query)

    async def all_of(self, path: str, page: int = 500) -> list[dict[str, Any]]:
        """Return all items of a list, reading it page by page."""
        found: list[dict[str, Any]] = []
        skip: int | None = 0
        while skip is not None:
            answer = await self.get(path, skip=skip, top=page)
            found += answer["items"]
            skip = answer["nextSkip"]
        return found

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Any:
        """Send one request and return the JSON of its response, None if it is empty."""
        asked = {
            name.replace("_", "-"): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in (query or {}).items()
            if value is not None
        }
        try:
            async with self._session.request(
                method, self._url + path, json=body, params=asked
            ) as response:
                text = await response.read()
                answer: Any = await response.json() if text else None
                if response.status < 400:
                    return answer
                raise self._refusal(response.status, answer)
        except aiohttp.ClientConnectorCertificateError:
            raise RefusedError(
                f"the certificate of {self._url} is not trusted: set its CA with"
                " postbus context set NAME --ca-file FILE"
            ) from None
        except aiohttp.ClientConnectorSSLError:
            raise RefusedError(
                f"the server at {self._url} does not use TLS: try an address with http://"
            ) from None
        except aiohttp.ClientConnectorError:
            raise RefusedError(
                f"no bus answers at {self._url}: start one with postbus dev, or select another"
                " with postbus context use"
            ) from None
        except TimeoutError:
            raise RefusedError(
                f"the bus at {self._url} did not answer within {ANSWER_S:.0f} s"
            ) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            hint = (
                ""
                if self._url.startswith("https:")
                else "; if it uses TLS, the address starts with https://"
            )
            raise RefusedError(
                f"the bus at {self._url} closed the connection without an answer; the request may"
                f" have taken effect{hint}"
            ) from None
        except (aiohttp.ClientError, ValueError, TypeError, KeyError):
            raise RefusedError(
                f"the server at {self._url} is not the control API of a bus: check the address with"
                " postbus context show"
            ) from None

    def _refusal(self, status: int, answer: dict[str, Any]) -> RefusedError:
        message = str(answer["detail"] if "detail" in answer else answer["error"])
        if status == 404:
            return NotFoundError(message)
        if status == 409:
            return ConflictError(message)
        if status == 503:
            return UnavailableError(message)
        if status == 401 and self._target.is_guess:
            return RefusedError(f"{NO_BUS_HERE}; the bus at {self._url} belongs to another folder")
        if status == 401 and self._target.context.token_file is None:
            return RefusedError(
                f"the bus at {self._url} requires a control token: set the file with it by"
                " postbus context set NAME --token-file FILE"
            )
        return RefusedError(message)


def part(name: str) -> str:
    """Return a name encoded as one segment of a path, including its slashes."""
    return quote(name, safe="")


def run_with(target: BusAddress, work: Callable[[ControlClient], Awaitable[T]]) -> T:
    """Run work with an open client."""

    async def run() -> T:
        async with ControlClient(target) as control:
            return await work(control)

    return asyncio.run(run())
