"""The network between one broker and Postgres, which can be cut in several ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import Enum
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

CHUNK = 64 * 1024


class Cut(Enum):
    """Behaviour of connections while the network is cut."""

    RESET = "reset"  # they break at once, and new ones too
    VANISH = "vanish"  # bytes of both directions are lost silently
    DEAF = "deaf"  # answers are lost: statements are executed, with unknown result
    LATE = "late"  # bytes are held, and arrive when the cut is over


class Network:
    """Stands between a broker and the server's socket.

    A connection that lost a byte never works again: after the cut the server sees its end, the
    broker must detect it itself.
    """

    def __init__(self, path: Path) -> None:
        """`path` is the socket of the server."""
        self.cut: Cut | None = None
        self._path = path
        self._healed = asyncio.Event()
        self._healed.set()
        self._pairs: set[_Pair] = set()

    def start_cut(self, cut: Cut) -> None:
        """Cut it, or cut it in another way."""
        self.cut = cut
        self._healed.clear()
        for pair in self._pairs:
            pair.suffer(cut)

    def heal(self) -> None:
        self.cut = None
        self._healed.set()
        for pair in self._pairs:
            pair.heal()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection of the broker."""
        pair = _Pair(reader, writer)
        self._pairs.add(pair)
        try:
            if self.cut is not None:
                pair.suffer(self.cut)
            if self.cut is Cut.LATE:
                await self._healed.wait()
            if not pair.is_lost:
                pair.server = await asyncio.open_unix_connection(str(self._path))
            await pair.carry(self._healed)
        except OSError:
            pass
        finally:
            self._pairs.discard(pair)
            pair.abort()

    def close(self) -> None:
        for pair in self._pairs:
            pair.abort()


class _Pair:
    """A connection of the broker and the one to the server that belongs to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.is_lost = False
        self._is_deaf = False
        self._is_late = False
        self._reader = reader
        self._writer = writer

    def suffer(self, cut: Cut) -> None:
        match cut:
            case Cut.RESET:
                self.abort()
            case Cut.VANISH:
                self.is_lost = True
            case Cut.DEAF:
                self._is_deaf = True
            case Cut.LATE:
                self._is_late = True

    def heal(self) -> None:
        self._is_late = False
        if (self.is_lost or self._is_deaf) and self.server is not None:
            self.is_lost = True
            self.server[1].transport.abort()

    def abort(self) -> None:
        self._writer.transport.abort()
        if self.server is not None:
            self.server[1].transport.abort()

    async def carry(self, healed: asyncio.Event) -> None:
        """Carry bytes both ways until both ends are gone."""
        from_server = (
            [] if self.server is None else [self._pump(self.server[0], self._writer, healed)]
        )
        to_server = self._pump(
            self._reader, None if self.server is None else self.server[1], healed
        )
        await asyncio.gather(to_server, *from_server, return_exceptions=True)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter | None,
        healed: asyncio.Event,
    ) -> None:
        is_answer = target is self._writer
        with suppress(OSError):  # a reset ends it as an end does: a process was killed
            while data := await source.read(CHUNK):
                if self._is_late:
                    await healed.wait()
                if target is not None and not (self.is_lost or (is_answer and self._is_deaf)):
                    target.write(data)
                    await target.drain()
        if self._is_late:
            await healed.wait()
        if target is not None and not (self.is_lost or (is_answer and self._is_deaf)):
            target.close()  # else the end is hidden, too


@asynccontextmanager
async def network_to(dsn: str) -> AsyncIterator[tuple[Network, str]]:
    """Return a network to the server of `dsn`, and the address of the same database over it."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    path = Path(query["host"][0]) / f".s.PGSQL.{query.get('port', ['5432'])[0]}"
    network = Network(path)
    server = await asyncio.start_server(network.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield network, urlunsplit(parts._replace(query=f"host=127.0.0.1&port={port}"))
    finally:
        server.close()
        network.close()
