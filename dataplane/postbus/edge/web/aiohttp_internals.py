"""Undocumented parts of aiohttp that Postbus depends on.

All other modules use names that aiohttp documents. Any release of aiohttp may change these, so
pyproject.toml has a ceiling: the first minor version that was not tested. To raise it, run
tests/edge/web/test_aiohttp_internals.py with that version.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import StreamReader, web
from aiohttp._websocket.helpers import websocket_mask as unmask
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import _ErrInfo

__all__ = ["AiohttpConnection", "MalformedRequest", "unmask"]

MalformedRequest: Final = HttpProcessingError
"""Error of the parser; aiohttp answers 400 itself and logs it, with the line in question."""


class AiohttpConnection(web.RequestHandler):
    """The protocol of one HTTP client; exposes state that aiohttp hides.

    It also breaks the reference cycles of tracebacks and of waiting requests, so that a closed
    connection is freed without the garbage collector.
    """

    __slots__ = ()

    @property
    def is_answering(self) -> bool:
        """True while a handler is running."""
        return self._request_in_progress

    @property
    def has_waiting_requests(self) -> bool:
        """True if heads were read that wait for a handler."""
        return bool(self._messages)

    @property
    def is_upgraded(self) -> bool:
        """True if the last head requested an upgrade: bytes after it are kept unread."""
        return self._upgraded

    @property
    def head_count(self) -> int:
        """Number of heads read so far, malformed ones included."""
        return self._request_count

    @property
    def newest_body(self) -> StreamReader | None:
        """Body of the last waiting request; it may be incomplete."""
        return self._messages[-1][1] if self._messages else None

    def detach(self) -> bytes:
        """Leave the transport open and unowned; return the bytes behind the last head.

        Call it in a handler of an upgraded connection. The response of that handler is dropped.
        """
        early, self._message_tail = self._message_tail, b""
        self.transport = None  # connection_lost would close it
        self.connection_lost(None)
        return early

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the client."""
        super().data_received(data)
        self._drop_traceback()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Drop waiting requests."""
        super().connection_lost(exc)
        self._messages.clear()
        self._message_tail = b""

    async def start(self) -> None:
        """Answer requests until the connection ends."""
        try:
            await super().start()
        except asyncio.CancelledError as error:
            error.__traceback__ = None  # it refers to frames of tasks that refer to it
            raise

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer."""
        finished = await super().finish_response(request, resp, start_time)
        self._drop_traceback()  # it may have read the bytes behind a refused upgrade
        return finished

    def _drop_traceback(self) -> None:
        """Free the frames referenced by the error of a malformed request."""
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            self._messages[-1][0].exc.__traceback__ = None
