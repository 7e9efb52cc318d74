"""A relay in front of Postgres: counts the messages of clients and can drop all bytes silently."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

CHUNK = 64 * 1024


class Relay:
    """Stands between clients and the server's socket.

    `client_messages` counts the messages of clients by `application_name` and type byte. While
    `is_silent`, no byte is forwarded and no end is reported: a host without power, a cut network.
    `pause_at` is an `application_name` and a text: the first such client that sends the text is
    paused just before it. `deafen_at` likewise: the server gets the text, but its answer is
    dropped.
    `open_count` is the number of clients.
    """

    def __init__(self, path: Path, tls: ssl.SSLContext | None = None) -> None:
        self.client_messages: dict[str, Counter[str]] = {}
        self.is_silent = False
        self.pause_at: tuple[str, bytes] | None = None
        self.deafen_at: tuple[str, bytes] | None = None
        self.paused = asyncio.Event()
        self.open_count = 0
        self._path = path
        self._tls = tls
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        if self.is_silent:
            while await reader.read(CHUNK):
                pass
            return
        if self._tls is not None:
            await reader.readexactly(8)  # it asks for TLS first
            writer.write(b"S")
            try:
                await writer.start_tls(self._tls)
            except OSError:
                return
        from_server, to_server = await asyncio.open_unix_connection(str(self._path))
        self._writers.add(to_server)
        client = _Client(self.client_messages)
        self.open_count += 1
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, to_server, client, is_from_client=True))
                both.create_task(self._pump(from_server, writer, client, is_from_client=False))
        except* OSError:
            pass
        finally:
            self.open_count -= 1

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        client: _Client,
        *,
        is_from_client: bool,
    ) -> None:
        while data := await source.read(CHUNK):
            if is_from_client:
                client.feed(data)
                if self.pause_at and self.pause_at[0] == client.name and self.pause_at[1] in data:
                    self.pause_at = None
                    client.is_paused = True
                    self.paused.set()
                if (
                    self.deafen_at
                    and self.deafen_at[0] == client.name
                    and self.deafen_at[1] in data
                ):
                    self.deafen_at = None
                    client.is_deaf = True
            elif client.is_deaf:
                target.transport.abort()
                return
            if not (self.is_silent or client.is_paused):
                target.write(data)
                await target.drain()
        if not (self.is_silent or client.is_paused):  # else the end is hidden, too
            target.close()

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Client:
    """Messages of one client. Source: PostgreSQL manual, 55.7 message formats."""

    def __init__(self, client_messages: dict[str, Counter[str]]) -> None:
        self._messages = client_messages
        self.name: str | None = None
        self.is_paused = False
        self.is_deaf = False
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head = 0 if self.name is None else 1
            if len(self._buffer) < head + 4:
                return
            end = head + int.from_bytes(self._buffer[head : head + 4])
            if len(self._buffer) < end:
                return
            message, self._buffer = self._buffer[:end], self._buffer[end:]
            if self.name is None:
                self._start(message[4:])
            else:
                self._messages.setdefault(self.name, Counter())[chr(message[0])] += 1

    def _start(self, body: bytes) -> None:
        if body[:4] != b"\x00\x03\x00\x00":  # it asks for TLS first
            return
        words = body[4:].rstrip(b"\0").split(b"\0")
        pairs = dict(zip(words[::2], words[1::2], strict=False))
        self.name = pairs.get(b"application_name", b"").decode()


@asynccontextmanager
async def relaying(
    dsn: str, *, over_tcp: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Relay, str]]:
    """Return a relay to the server of `dsn`, and the address of the same database through it.

    With `tls` it listens on TCP and ends TLS, which our builds of Postgres cannot.
    """
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    name = f".s.PGSQL.{query.get('port', ['5432'])[0]}"
    relay = Relay(Path(query["host"][0]) / name, tls)
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        if over_tcp or tls is not None:
            server: asyncio.Server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            through = urlunsplit(parts._replace(query=f"host=127.0.0.1&port={port}"))
        else:
            server = await asyncio.start_unix_server(relay.serve, f"{folder}/{name}")
            through = dsn.replace(query["host"][0], folder)
        try:
            yield relay, through
        finally:
            server.close()
            await relay.close()
