"""The client of the control API. Errors say what happened; its callers say what to do about it.

Source of paths, bodies and answers: `docs/openapi.json`. No error contains a token.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp

from postbus.contract.control import ProblemType

ANSWER_S: Final = 90.0
"""Longer than the bus itself waits for a request."""

CONNECT_S: Final = 10.0

KEEP_ALIVE_S: Final = 3.0
"""An idle connection is closed after that. The operator has a client for each of hundreds of buses,
and 80 KiB for each connection."""

MAX_ANSWER: Final = 64 * 1024 * 1024
"""Bytes of an answer. Our choice: sixteen times the largest body that a bus takes."""

MAX_DETAIL: Final = 4_096
"""Characters of the text of a refusal."""

MAX_ITEMS: Final = 1_000_000
"""Items of a list that is read page by page."""


class Failure(Enum):
    """Reasons for a missing answer. After LATE and CLOSED the request may have taken effect."""

    NO_CONNECTION = "no connection"
    CERTIFICATE_UNTRUSTED = "the certificate is not trusted"
    NO_TLS = "the server does not use TLS"
    LATE = "no answer in time"
    CLOSED = "the connection was closed without an answer"
    NOT_A_CONTROL_API = "the answer is not that of a control API"
    TOO_LONG = "the answer is too long for a control API"


class RequestFailed(Exception):
    """A request without an answer of a bus."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.value)
        self.failure = failure


class RequestRefused(Exception):
    """A problem that a bus answered (RFC 9457); the text is its `detail`.

    `type` is None if this version does not know it.
    """

    def __init__(self, status: int, type: ProblemType | None, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.type = type
        self.detail = detail


class ControlClient:
    """An open client; an asynchronous context manager.

    Every method may raise `RequestFailed` or `RequestRefused`.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        trusted: ssl.SSLContext | None = None,
        server_name: str | None = None,
        max_answer: int = MAX_ANSWER,
    ) -> None:
        """`trusted` None: the certificates that the system trusts.

        `server_name`: the name in the certificate, if it is not that of `url`. `max_answer`: bytes
        of the longest answer.
        """
        self._url = url
        self._token = token
        self._trusted = trusted
        self._server_name = server_name
        self._max_answer = max_answer
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(ANSWER_S, connect=CONNECT_S),
            headers={"Accept-Encoding": "identity"}
            | ({} if self._token is None else {"Authorization": f"Bearer {self._token}"}),
            connector=aiohttp.TCPConnector(
                ssl=self._trusted or True, keepalive_timeout=KEEP_ALIVE_S
            ),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

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
            if len(found) > MAX_ITEMS or not (answer["items"] or answer["nextSkip"] is None):
                raise RequestFailed(Failure.TOO_LONG)
            skip = answer["nextSkip"]
        return found

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send one request and return the JSON of its response, None if it is empty."""
        asked = {
            name.replace("_", "-"): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in (query or {}).items()
            if value is not None
        }
        try:
            async with self._session.request(
                method,
                self._url + path,
                json=body,
                params=asked,
                server_hostname=self._server_name,
                headers=headers,
                allow_redirects=False,
            ) as response:
                text = await self._read(response)
                answer: Any = json.loads(text) if text else None
                if response.status < 300:
                    return answer
                raise _refusal(response.status, answer)
        except aiohttp.ClientConnectorCertificateError:
            raise RequestFailed(Failure.CERTIFICATE_UNTRUSTED) from None
        except aiohttp.ClientConnectorSSLError:
            raise RequestFailed(Failure.NO_TLS) from None
        except aiohttp.ClientConnectorError:
            raise RequestFailed(Failure.NO_CONNECTION) from None
        except TimeoutError:
            raise RequestFailed(Failure.LATE) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            raise RequestFailed(Failure.CLOSED) from None
        except (aiohttp.ClientError, ValueError, TypeError, KeyError, RecursionError):
            raise RequestFailed(Failure.NOT_A_CONTROL_API) from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body; what does not fit is never in memory."""
        text = bytearray()
        async for piece in response.content.iter_any():
            text += piece
            if len(text) > self._max_answer:
                raise RequestFailed(Failure.TOO_LONG)
        return bytes(text)


def _refusal(status: int, answer: dict[str, Any]) -> RequestRefused:
    known = {each.value: each for each in ProblemType}
    detail = answer["detail"] if "detail" in answer else answer["error"]
    return RequestRefused(status, known.get(answer.get("type", "")), str(detail)[:MAX_DETAIL])


def part(name: str) -> str:
    """Return a name encoded as one segment of a path, including its slashes."""
    return quote(name, safe="")
