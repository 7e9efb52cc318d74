"""Listens for HTTP beside the bus: what metrics and the control API have in common."""

from __future__ import annotations

import logging
import ssl
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

QUIET_S: Final = 75.0
"""How long a connection may be without a request, or a head take to come."""


class HttpListener:
    """One port with an application behind it; start it once."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(
        self, app: web.Application, host: str, port: int, context: ssl.SSLContext | None = None
    ) -> None:
        """Listen, 0 takes any free port; raises OSError when the port cannot be had."""
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=PROTOCOL_LOG,
            shutdown_timeout=1.0,
            keepalive_timeout=QUIET_S,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=context).start()
        except BaseException:
            await self.stop()
            raise
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening; may be called twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()


def is_ours(record: logging.LogRecord) -> bool:
    """Keep what a client did wrong out of the log: it was told, and it may hold a secret."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


PROTOCOL_LOG: Final = logging.getLogger(f"{__name__}.protocol")
"""Where aiohttp logs what it cannot read; it shows the line in question."""

PROTOCOL_LOG.addFilter(is_ours)
