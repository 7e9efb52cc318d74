"""Plain commits in one message to the server, on the connection of a writer.

A commit is the deletes, a COPY with the rows, and one Sync: an implicit transaction of one round
trip. The driver opens the connection and runs all other statements on it; this module stands
between its transport and the driver, and sends a commit when the driver does nothing (ADR 49).
Called by `writer.py`. Protocol: PostgreSQL manual, chapters 55.2 "Extended Query" and 55.7
"Message Formats".
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import asyncpg

from postbus.entity.outcomes import InsertMessage
from postbus.message.rows import COPY_HEAD, COPY_TAIL, pack_copy_rows
from postbus.store.errors import Connection

COPY: Final = """
copy message (row_key, enqueued_ms, envelope, application_properties, body)
from stdin (format binary)
"""
DELETE_RANGE: Final = "delete from message where row_key >= $1::bigint and row_key < $2::bigint"
DELETE_KEYS: Final = "delete from message where row_key = any ($1::bigint[])"
RANGE_KEYS: Final = 16
"""Keys that a range must have on average: with fewer, one statement with all keys costs less."""

_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_HEAD: Final = struct.Struct(">ci")
_RANGE: Final = struct.Struct(">iqiq")
_ARRAY: Final = struct.Struct(">iiiii")
_INT8_OID: Final = 20

_SYNC: Final = b"S" + _I32.pack(4)
_EXECUTE: Final = b"E" + _I32.pack(9) + b"\0" + _I32.pack(0)
_COPY_DONE: Final = b"c" + _I32.pack(4)
_NO_RESULTS: Final = _I16.pack(0)
_ONE_BINARY: Final = _I16.pack(1) + _I16.pack(1)

_ERROR, _NOTICE, _STATUS, _NOTIFICATION, _READY = b"ENSAZ"
_FOR_DRIVER: Final = frozenset((_NOTICE, _STATUS, _NOTIFICATION))


class _Driver(Protocol):
    """The part of `asyncio.Protocol` that the driver's protocol gets."""

    def data_received(self, data: bytes) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class PipelinedCommits(asyncio.Protocol):
    """Commits of rows and deletes on the driver's connection, between its own statements.

    It stands between transport and driver, which gets whole messages only: so no half of a notice
    is left in the driver when a commit begins.
    """

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        """Only `on` calls this."""
        self._connection = connection
        self._transport = transport
        self._driver = cast("_Driver", transport.get_protocol())
        self._statements: list[object] = []  # the driver closes those that nobody holds
        self._rest = b""
        self._error: asyncpg.PostgresError | None = None
        self._answer: asyncio.Future[None] | None = None

    @classmethod
    async def on(cls, connection: Connection) -> PipelinedCommits | None:
        """Prepare commits on a connection; None if this driver does not show its transport."""
        transport = getattr(connection, "_transport", None)
        driver = getattr(connection, "_protocol", None)
        if driver is None or getattr(transport, "get_protocol", lambda: None)() is not driver:
            return None
        commits = cls(connection, cast("asyncio.Transport", transport))
        for name, sql in (("c", COPY), ("r", DELETE_RANGE), ("k", DELETE_KEYS)):
            commits._statements.append(await connection.prepare(sql, name=f"postbus_{name}"))
        commits._transport.set_protocol(commits)
        return commits

    async def commit(self, message: bytes) -> None:
        """Send the bytes of a commit and wait until it is durable.

        Raises asyncpg's errors: of the server if it refused the commit as a whole, of the
        connection if it ended before the answer, so that the outcome is unknown. A commit whose
        answer nobody waits for ends the connection.
        """
        assert self._answer is None, "a connection has one commit at a time"
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(message)
            await self._answer
        except asyncio.CancelledError:
            self._connection.terminate()
            raise
        finally:
            self._answer = None

    # --- from the transport -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Pass whole messages to the driver, or read the answer to a commit."""
        if self._rest:
            data = self._rest + data
        start, size = 0, len(data)
        is_drivers = self._answer is None
        while size - start >= 5:
            end = start + 1 + int.from_bytes(data[start + 1 : start + 5], "big")
            if end > size:
                break
            if not is_drivers:
                self._take(data[start], data[start:end])
            start = max(end, start + 5)
        self._rest = data[start:]
        if is_drivers and start:
            self._driver.data_received(data[:start])

    def _take(self, kind: int, message: bytes) -> None:
        """Read a message of the answer; what the server says beside it is the driver's."""
        if kind == _READY:
            self._finish(None)
        elif kind == _ERROR:
            self._error = self._error or _error_of(message)
        elif kind in _FOR_DRIVER:
            self._driver.data_received(message)

    def _finish(self, error: Exception | None) -> None:
        """Report the outcome; the first error of the server comes before any other."""
        error, self._error = self._error or error, None
        if self._answer is None or self._answer.done():
            return
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on; a commit without an answer fails."""
        self._driver.connection_lost(exc)
        ended = "the connection ended during a commit"
        self._finish(asyncpg.ConnectionDoesNotExistError(ended))

    def pause_writing(self) -> None:
        """Pass it on: one commit at a time needs no pause of its own."""
        self._driver.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._driver.resume_writing()


def message_of(inserts: Sequence[InsertMessage], deletes: Sequence[int]) -> bytes:
    """Return the bytes of a commit. Raises struct.error if a number does not fit its column."""
    parts: list[bytes] = []
    if deletes:
        parts += _deletes(deletes)
    if inserts:
        parts += _copy(inserts)
    parts.append(_SYNC)
    return b"".join(parts)


def key_ranges(keys: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open ranges of exactly these keys, which are sorted and differ."""
    first, last = keys[0], keys[-1]
    if last - first + 1 == len(keys):
        return [(first, last + 1)]
    ranges: list[tuple[int, int]] = []
    end = first
    for key in keys:
        if key != end:
            ranges.append((first, end))
            first = key
        end = key + 1
    ranges.append((first, end))
    return ranges


def _deletes(deletes: Sequence[int]) -> list[bytes]:
    keys = sorted(deletes)
    ranges = key_ranges(keys)
    parts: list[bytes] = []
    if len(ranges) * RANGE_KEYS <= len(keys):
        for first, end in ranges:
            parts += (_BIND_RANGE, _RANGE.pack(8, first, 8, end), _NO_RESULTS, _EXECUTE)
        return parts
    packed = struct.pack(">" + "iq" * len(keys), *[part for key in keys for part in (8, key)])
    array = _ARRAY.pack(1, 0, _INT8_OID, len(keys), 1) + packed
    bind = b"\0postbus_k\0" + _ONE_BINARY + _I16.pack(1) + _I32.pack(len(array))
    size = 4 + len(bind) + len(array) + len(_NO_RESULTS)
    return [_HEAD.pack(b"B", size), bind, array, _NO_RESULTS, _EXECUTE]


def _copy(inserts: Sequence[InsertMessage]) -> list[bytes]:
    rows = pack_copy_rows(inserts)
    data = _HEAD.pack(b"d", 4 + len(COPY_HEAD) + len(rows) + len(COPY_TAIL))
    return [_BIND_COPY, _EXECUTE, data, COPY_HEAD, rows, COPY_TAIL, _COPY_DONE]


def _bind_of(name: bytes, parameters: bytes, size: int) -> bytes:
    """Return the head of a Bind whose parameters take `size` bytes."""
    bind = b"\0" + name + b"\0" + parameters
    return _HEAD.pack(b"B", 4 + len(bind) + size + len(_NO_RESULTS)) + bind


_BIND_COPY: Final = _bind_of(b"postbus_c", _I16.pack(0) * 2, 0) + _NO_RESULTS
_BIND_RANGE: Final = _bind_of(b"postbus_r", _ONE_BINARY + _I16.pack(2), _RANGE.size)


def _error_of(message: bytes) -> asyncpg.PostgresError:
    """Return the driver's exception for an ErrorResponse."""
    fields: dict[str, str] = {}
    for field in message[5:].split(b"\0"):
        if field:
            fields[chr(field[0])] = field[1:].decode("utf-8", "replace")
    error: Any = asyncpg.PostgresError.new(fields)
    return cast("asyncpg.PostgresError", error)
