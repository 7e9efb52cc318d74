"""Commits in one message to the server, on the connection of a writer.

A commit is the deletes or a statement, a COPY with the rows or the insert of a single one, and one
Sync: an implicit transaction of one round trip. The driver opens the connection and runs all other
statements on it; this module stands between its transport and the driver, and sends a commit when
the driver does nothing (ADR 49).
Called by `writer.py`. Protocol: PostgreSQL manual, chapters 55.2 "Extended Query" and 55.7
"Message Formats".
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

import asyncpg

from postbus.entity.outcomes import InsertMessage
from postbus.message.rows import COPY_HEAD, COPY_TAIL, pack_copy_columns
from postbus.message.runs import pack_copy_rows
from postbus.store.errors import Connection
from postbus.store.statements import DELETE, DELETE_ONE, INSERT_ONE

COPY: Final = """
copy message (row_key, enqueued_ms, envelope, application_properties, body)
from stdin (format binary)
"""
COPY_BODIES: Final = """
copy message (row_key, enqueued_ms, envelope, application_properties, body, body_id)
from stdin (format binary)
"""
DELETE_RANGE: Final = "delete from message where row_key >= $1::bigint and row_key < $2::bigint"
END_PREPARING: Final = "select 1"
"""The driver ends no transaction after a prepare: we would hold table locks while idle."""
NAMES: Final = {
    "postbus_c": COPY,
    "postbus_b": COPY_BODIES,
    "postbus_i": INSERT_ONE,
    "postbus_r": DELETE_RANGE,
    "postbus_k": DELETE,
    "postbus_d": DELETE_ONE,
}
RANGE_KEYS: Final = 16
"""Keys that a range must have on average: with fewer, one statement with all keys costs less."""

_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_HEAD: Final = struct.Struct(">ci")
_KEY: Final = struct.Struct(">iq")
_RANGE: Final = struct.Struct(">iqiq")
_ARRAY: Final = struct.Struct(">iiiii")
_EMPTY_ARRAY: Final = struct.Struct(">iii")
_INT8, _BYTEA = 20, 17
_ELEMENTS: Final = {1016: (_INT8, "q"), 1007: (23, "i"), 1005: (21, "h"), 1001: (_BYTEA, "")}
"""Array types of arguments: their elements, by number and struct's letter. Source: pg_type.dat."""

_SYNC: Final = b"S" + _I32.pack(4)
_EXECUTE: Final = b"E" + _I32.pack(9) + b"\0" + _I32.pack(0)
_COPY_DONE: Final = b"c" + _I32.pack(4)
_NO_RESULTS: Final = _I16.pack(0)
_ONE_BINARY_FORMAT: Final = _I16.pack(1) + _I16.pack(1)

_ERROR, _NOTICE, _STATUS, _NOTIFICATION, _READY, _ROW = b"ENSAZD"
_FOR_DRIVER: Final = frozenset((_NOTICE, _STATUS, _NOTIFICATION))


class Prepared(NamedTuple):
    """A prepared statement with arrays as parameters. `types`: (element's number, letter)."""

    name: bytes
    types: tuple[tuple[int, str], ...]

    def bind(self, arguments: Sequence[object]) -> bytes:
        """Return the Bind and Execute for lists of these types.

        Raises struct.error if a number does not fit its type.
        """
        parts: list[bytes] = []
        for (element, letter), values in zip(self.types, arguments, strict=True):
            array = _array(element, letter, cast("Sequence[Any]", values))
            parts += (_I32.pack(len(array)), array)
        packed = b"".join(parts)
        head = _bind_of(self.name, _ONE_BINARY_FORMAT + _I16.pack(len(self.types)), len(packed) + 4)
        return b"".join((head, packed, _ONE_BINARY_FORMAT, _EXECUTE))


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
        self._held: list[object] = []  # the driver closes statements that nobody holds
        self._prepared: dict[str, Prepared] = {}
        self._rest = b""
        self._error: asyncpg.PostgresError | None = None
        self._result: bytes | None = None
        self._answer: asyncio.Future[bytes | None] | None = None

    @classmethod
    async def on(cls, connection: Connection) -> PipelinedCommits | None:
        """Prepare commits on a connection; None if this driver does not show its transport."""
        transport = getattr(connection, "_transport", None)
        driver = getattr(connection, "_protocol", None)
        if driver is None or getattr(transport, "get_protocol", lambda: None)() is not driver:
            return None
        commits = cls(connection, cast("asyncio.Transport", transport))
        for name, sql in NAMES.items():
            commits._held.append(await connection.prepare(sql, name=name))
        await connection.execute(END_PREPARING)
        commits._transport.set_protocol(commits)
        return commits

    async def prepared(self, sql: str) -> Prepared:
        """Return a statement whose parameters are arrays, prepared at its first use."""
        found = self._prepared.get(sql)
        if found is None:
            name = f"postbus_x{len(self._prepared)}"
            statement = await self._connection.prepare(sql, name=name)
            self._held.append(statement)
            types = tuple(_ELEMENTS[each.oid] for each in statement.get_parameters())
            found = self._prepared[sql] = Prepared(name.encode(), types)
        return found

    async def commit(self, message: bytes) -> bytes | None:
        """Send the bytes of a commit and wait until it is durable.

        Return the first column of the statement's row, None if it is null or missing. Raises
        asyncpg's errors: of the server if it refused the commit as a whole, of the connection if it
        ended before the answer, so that the outcome is unknown. A commit whose answer nobody waits
        for ends the connection.
        """
        if self._connection.is_closed():  # nothing would end the wait
            raise asyncpg.InterfaceError("the connection is closed")
        assert self._answer is None, "a connection has one commit at a time"
        self._answer = asyncio.get_running_loop().create_future()
        self._result = None
        try:
            self._transport.write(message)
            return await self._answer
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
        elif kind == _ROW:
            self._result = _first_column(message)
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
            self._answer.set_result(self._result)
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


def message_of(
    *, deletes: Sequence[int] = (), statement: bytes = b"", rows: Sequence[bytes] = ()
) -> bytes:
    """Return the bytes of a commit: deletes or a bound statement, then the rows.

    Raises struct.error if a number does not fit its column.
    """
    before = _deletes(deletes) if deletes else [statement]
    return b"".join((*before, *rows, _SYNC))


def rows_of(inserts: Sequence[InsertMessage]) -> Sequence[bytes]:
    """Return the messages for rows whose bodies are all in them."""
    if not inserts:
        return ()
    data = pack_copy_rows(inserts)
    if len(inserts) > 1:
        return _copy(_BIND_COPY, data)
    # the columns of a row for COPY are encoded as the parameters of a Bind
    bind = _bind_of(b"postbus_i", _ONE_BINARY_FORMAT, len(data) + len(_NO_RESULTS))
    return bind, data, _NO_RESULTS, _EXECUTE


def rows_with_bodies(
    inserts: Sequence[InsertMessage],
    envelopes: Sequence[bytes],
    bodies: Sequence[bytes | None],
    body_ids: Sequence[int | None],
) -> Sequence[bytes]:
    """Return the messages for rows of packed envelopes, with bodies in them or beside them."""
    return _copy(_BIND_COPY_BODIES, pack_copy_columns(inserts, envelopes, bodies, body_ids))


def _copy(bind: bytes, rows: bytes) -> Sequence[bytes]:
    head = _HEAD.pack(b"d", 4 + len(COPY_HEAD) + len(rows) + len(COPY_TAIL))
    return bind, _EXECUTE, head, COPY_HEAD, rows, COPY_TAIL, _COPY_DONE


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
    if len(deletes) == 1:
        return [_BIND_KEY, _KEY.pack(8, deletes[0]), _NO_RESULTS, _EXECUTE]
    keys = sorted(deletes)
    ranges = key_ranges(keys)
    parts: list[bytes] = []
    if len(ranges) * RANGE_KEYS <= len(keys):
        for first, end in ranges:
            parts += (_BIND_RANGE, _RANGE.pack(8, first, 8, end), _NO_RESULTS, _EXECUTE)
        return parts
    return [_BY_KEYS.bind([keys])]


def _array(element: int, letter: str, values: Sequence[Any]) -> bytes:
    """Return an array in Postgres' binary format, without nulls."""
    count = len(values)
    if not count:
        return _EMPTY_ARRAY.pack(0, 0, element)
    head = _ARRAY.pack(1, 0, element, count, 1)
    if element == _BYTEA:
        return head + b"".join([part for each in values for part in (_I32.pack(len(each)), each)])
    size = struct.calcsize(f">{letter}")
    return head + struct.pack(
        ">" + f"i{letter}" * count, *[part for each in values for part in (size, each)]
    )


def _first_column(message: bytes) -> bytes | None:
    """Return the first column of a DataRow."""
    if message[5:7] == b"\0\0":
        return None
    size = int.from_bytes(message[7:11], "big", signed=True)
    return None if size < 0 else message[11 : 11 + size]


def _bind_of(name: bytes, formats: bytes, size: int) -> bytes:
    """Return the head of a Bind; `size`: of parameters and formats of results, which follow."""
    bind = b"\0" + name + b"\0" + formats
    return _HEAD.pack(b"B", 4 + len(bind) + size) + bind


_BIND_COPY: Final = _bind_of(b"postbus_c", _NO_RESULTS * 2, 2) + _NO_RESULTS
_BIND_COPY_BODIES: Final = _bind_of(b"postbus_b", _NO_RESULTS * 2, 2) + _NO_RESULTS
_BIND_KEY: Final = _bind_of(b"postbus_d", _ONE_BINARY_FORMAT + _I16.pack(1), _KEY.size + 2)
_BIND_RANGE: Final = _bind_of(b"postbus_r", _ONE_BINARY_FORMAT + _I16.pack(2), _RANGE.size + 2)
_BY_KEYS: Final = Prepared(b"postbus_k", ((_INT8, "q"),))


def _error_of(message: bytes) -> asyncpg.PostgresError:
    """Return the driver's exception for an ErrorResponse."""
    fields: dict[str, str] = {}
    for field in message[5:].split(b"\0"):
        if field:
            fields[chr(field[0])] = field[1:].decode("utf-8", "replace")
    error: Any = asyncpg.PostgresError.new(fields)
    return cast("asyncpg.PostgresError", error)
