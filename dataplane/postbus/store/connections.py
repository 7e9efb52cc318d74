"""Connections to a database: opening, lending to one user at a time, dropping.

Both sides detect a lost peer: TCP probes an idle peer after 3 s and gives up after 6 s, statements
have a timeout on the server and in the driver, and the server ends a transaction whose client is
silent. Called by `postgres.py`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, urlsplit

import asyncpg
from asyncpg.exceptions import ClientConfigurationError

from postbus.store.errors import CONNECTION_ERRORS, Connection, meaning_of, translated

CONNECT_S: Final = 5.0
IDLE_IN_TRANSACTION_MS: Final = 5_000
"""Maximum time that a transaction of a paused or disconnected client holds locks."""
KEEPALIVE_IDLE_S: Final = 3
KEEPALIVE_INTERVAL_S: Final = 1
KEEPALIVE_COUNT: Final = 3
UNACKNOWLEDGED_MS: Final = 6_000
"""Time without acknowledgement of sent bytes after which the connection ends. Our choice, as the
three above: the same six seconds, whether the connection was idle or not."""
SERVER_SETTINGS: Final = {
    "idle_in_transaction_session_timeout": str(IDLE_IN_TRANSACTION_MS),
    "tcp_keepalives_idle": str(KEEPALIVE_IDLE_S),
    "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL_S),
    "tcp_keepalives_count": str(KEEPALIVE_COUNT),
    "tcp_user_timeout": str(UNACKNOWLEDGED_MS),
}

TLS_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
"""Parameters of an address that name a file; the driver reads it for each connection."""

if TYPE_CHECKING:

    class DriverConnection(asyncpg.Connection[asyncpg.Record]):
        _transport: asyncio.Transport
        _top_xact: object | None

else:
    DriverConnection = asyncpg.Connection


class _Connection(DriverConnection):
    """The driver's connection, subclassed for access to its socket."""

    __slots__ = ()

    def keep_alive(self) -> None:
        """Enable detection of a silently lost peer, also during a statement."""
        found = self._transport.get_extra_info("socket")
        if found is None or found.family == socket.AF_UNIX:
            return
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
            ("TCP_KEEPCNT", KEEPALIVE_COUNT),
            ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
        ):
            if hasattr(socket, name):  # some systems lack some of them
                found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


REFUSED_SETTING: Final = "unsupported startup parameter"
"""Text of PgBouncer's error for a setting that Postgres itself takes."""

POOLER: Final = (
    "the address leads to a connection pooler, and the lock of a partition belongs to one"
    " connection: use the address of Postgres itself"
)


async def is_shared(dsn: str, connection: Connection, backend: int) -> bool:
    """Return whether a pooler gives the backend of an open connection to others, too.

    `backend` is the server's process behind the connection. A proxy that hides it is found out with
    a second connection: two that are open at once never have the same process on Postgres itself.
    """
    if connection.get_server_pid() == backend:
        return False
    second = await connect(dsn, "postbus setup", {})
    try:
        return bool(await second.fetchval("select pg_backend_pid()") == backend)
    finally:
        await second.close()


async def connect(
    dsn: str,
    purpose: str,
    settings: Mapping[str, str],
    *,
    statement_s: float | None = None,
    caches_statements: bool = False,
) -> Connection:
    """Open a connection; `purpose` is its application name on the server.

    The server cancels a statement after `statement_s`, the driver half a second later if the server
    is silent. Raises the driver's exceptions; a host or port that is none is one of them, too.
    """
    limits = {} if statement_s is None else {"statement_timeout": str(int(statement_s * 1_000))}
    try:
        made: _Connection = await asyncpg.connect(
            dsn,
            timeout=CONNECT_S,
            command_timeout=None if statement_s is None else statement_s + 0.5,
            server_settings={**SERVER_SETTINGS, **limits, **settings, "application_name": purpose},
            connection_class=_Connection,
            statement_cache_size=100 if caches_statements else 0,
        )
    except asyncpg.ProtocolViolationError as error:
        if REFUSED_SETTING in str(error):
            raise ClientConfigurationError(POOLER) from None
        raise
    except (ValueError, OverflowError) as error:
        if isinstance(error, CONNECTION_ERRORS):
            raise
        # Sockets and their name lookup raise these; their texts may contain parts of the address.
        raise ClientConfigurationError("the address has no valid host or port") from None
    made.keep_alive()
    return made


def unusable_file(dsn: str) -> str | None:
    """Return a sentence about a TLS file of an address that is unusable; the driver names none."""
    named = parse_qs(urlsplit(dsn).query)
    for name in TLS_FILES:
        for path in named.get(name, []):
            try:
                Path(path).open("rb").close()
                if name == "sslrootcert":
                    ssl.create_default_context(cafile=path)
            except ssl.SSLError:
                return f"{name} {path} is not a certificate in PEM form"
            except OSError as error:
                return f"{name} {path} cannot be read: {(error.strerror or '').lower()}"
    return None


def _is_in_transaction(connection: Connection) -> bool:
    """Return whether the server or driver has a transaction open that none of our blocks owns.

    A BEGIN that was cancelled or failed leaves one in the driver, and perhaps in the server: each
    later transaction would be a savepoint of it, and never be committed.
    """
    assert isinstance(connection, _Connection)
    if connection.is_closed():
        return False
    return connection._top_xact is not None or connection.is_in_transaction()


class SharedConnection:
    """One connection, opened at first use, lent to one user at a time, replaced when broken."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        async with self._lock:
            with translated():
                connection = self._connection
                if connection is None or connection.is_closed():
                    connection = self._connection = await self._connect()
                task = asyncio.current_task()
                assert task is not None
                cancellations = task.cancelling()
                try:
                    yield connection
                except (*CONNECTION_ERRORS, asyncio.CancelledError) as error:
                    connection.terminate()
                    if task.cancelling() > cancellations and isinstance(error, Exception):
                        # The driver's rollback failed, and its error replaced the cancellation.
                        raise asyncio.CancelledError from error
                    raise
                except AttributeError as error:  # perhaps of the driver, since `drop` was called
                    meaning = meaning_of(error, connection)
                    if meaning is None:
                        raise
                    raise meaning from error
                finally:
                    if _is_in_transaction(connection):
                        connection.terminate()

    def drop(self) -> None:
        """End the connection, even during a statement: its server does not answer."""
        if self._connection is not None:
            self._connection.terminate()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=2.0)
            except (*CONNECTION_ERRORS, asyncpg.PostgresError):
                connection.terminate()
