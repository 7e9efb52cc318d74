"""A transaction pooler: all clients share one connection, which is lent for a transaction each.

As small as it gets: it answers startups itself, drops their settings, and passes on the messages of
one client until the server says that it is outside of a transaction.
"""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

IDENTITY = (7, 7)
"""Process and key that clients get: a pooler cancels statements of its own accord."""
ENDS = {b"Q": b"Z", b"S": b"Z", b"H": b"TnE"}
"""Messages of a client that the server answers: query, sync, flush after a describe; and with which
message the answer ends.
"""


class Pooler:
    def __init__(self, server: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._from_server, self._to_server = server
        self._turn = asyncio.Lock()
        self._greeting = b""

    async def greet(self, user: str, database: str) -> None:
        """Log in to the server, and keep its parameters for clients."""
        words = f"user\0{user}\0database\0{database}\0\0".encode()
        self._to_server.write(struct.pack("!II", len(words) + 8, 196_608) + words)
        while (message := await read_message(self._from_server))[:1] != b"Z":
            if message[:1] == b"S":
                self._greeting += message

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        [length] = struct.unpack("!I", await reader.readexactly(4))
        await reader.readexactly(length - 4)
        ready = struct.pack("!cIII", b"K", 12, *IDENTITY) + b"Z\0\0\0\x05I"
        writer.write(b"R\0\0\0\x08\0\0\0\0" + self._greeting + ready)
        try:
            while (message := await read_message(reader))[:1] != b"X":
                async with self._turn:
                    await self._pass_on(message, reader, writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def _pass_on(
        self, message: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on messages from a first one to the end of its transaction."""
        while True:
            self._to_server.write(message)
            ends = ENDS.get(message[:1], b"")
            answer = b""
            while ends and (not answer or answer[:1] not in ends):
                answer = await read_message(self._from_server)
                writer.write(answer)
            if answer[:1] == b"Z" and answer.endswith(b"I"):
                return
            message = await read_message(reader)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(5)
    [length] = struct.unpack("!I", head[1:])
    return head + await reader.readexactly(length - 4)


@asynccontextmanager
async def pooling(dsn: str) -> AsyncIterator[str]:
    """Return the address of a database through a pooler."""
    parts = urlsplit(dsn)
    socket_folder = parse_qs(parts.query)["host"][0]
    name = ".s.PGSQL.5432"
    pooler = Pooler(await asyncio.open_unix_connection(str(Path(socket_folder) / name)))
    await pooler.greet(parts.username or "", parts.path.removeprefix("/"))
    with tempfile.TemporaryDirectory(prefix="pooler-") as folder:
        server = await asyncio.start_unix_server(pooler.serve, f"{folder}/{name}")
        try:
            yield dsn.replace(socket_folder, folder)
        finally:
            server.close()
            pooler._to_server.close()
