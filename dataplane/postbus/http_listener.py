"""Listens for HTTP beside the bus: what metrics and the control API have in common."""

from __future__ import annotations

import ssl

from aiohttp import web


class HttpListener:
    """One port with an application behind it; start it once."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(
        self, app: web.Application, host: str, port: int, context: ssl.SSLContext | None = None
    ) -> None:
        """Listen, 0 takes any free port; raises OSError when the port cannot be had."""
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
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
