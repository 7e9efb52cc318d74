"""A relay before Postgres: counts what a client says, and can swallow all bytes without a word."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

CHUNK = 64 * 1024


class Relay:
    """Stands between clients and the server's socket.

    `said` counts the messages of clients by `application_name` and type byte. While `is_silent`,
    nothing goes through and nobody is told: a host that lost its power, a cut network.
    """

    def __init__(self, path: Path) -> None:
        self.said: dict[str, Counter[str]] = {}
        self.is_silent = False
        self._path = path
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        if self.is_silent:
            await self._swallow(reader)
            return
        from_server, to_server = await asyncio.open_unix_connection(str(self._path))
        self._writers.add(to_server)
        spoken = _Spoken(self.said)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, to_server, spoken))
                both.create_task(self._pump(from_server, writer, None))
        except* (OSError, asyncio.IncompleteReadError):
            pass

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, spoken: _Spoken | None
    ) -> None:
        while data := await source.read(CHUNK):
            if self.is_silent:
                continue
            if spoken is not None:
                spoken.feed(data)
            target.write(data)
            await target.drain()
        if not self.is_silent:  # an end is not told either
            target.close()

    async def _swallow(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(CHUNK):
            pass

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Spoken:
    """Reads the messages of one client. Source: PostgreSQL manual, 55.7 message formats."""

    def __init__(self, said: dict[str, Counter[str]]) -> None:
        self._said = said
        self._name: str | None = None
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head = 0 if self._name is None else 1
            if len(self._buffer) < head + 4:
                return
            end = head + int.from_bytes(self._buffer[head : head + 4])
            if len(self._buffer) < end:
                return
            message, self._buffer = self._buffer[:end], self._buffer[end:]
            if self._name is None:
                self._start(message[4:])
            else:
                self._said.setdefault(self._name, Counter())[chr(message[0])] += 1

    def _start(self, body: bytes) -> None:
        if body[:4] != b"\x00\x03\x00\x00":  # it asks for TLS first
            return
        words = body[4:].rstrip(b"\0").split(b"\0")
        pairs = dict(zip(words[::2], words[1::2], strict=False))
        self._name = pairs.get(b"application_name", b"").decode()


@asynccontextmanager
async def relaying(dsn: str) -> AsyncIterator[tuple[Relay, str]]:
    """Return a relay to the server of `dsn`, and the address of the same database through it."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    port = query.get("port", ["5432"])[0]
    name = f".s.PGSQL.{port}"
    relay = Relay(Path(query["host"][0]) / name)
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        server = await asyncio.start_unix_server(relay.serve, f"{folder}/{name}")
        try:
            yield relay, dsn.replace(query["host"][0], folder)
        finally:
            server.close()
            await relay.close()
