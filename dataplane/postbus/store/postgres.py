"""The database of a store: required settings, and connections shared by its partitions.

One connection for reads, one for reads of ranges, one for short side work and one for VACUUM serve
all partitions of a store, opened at first use. Each partition opens its own writers
(`connect_writer`) and is claimed on one of them, so that nothing else in the store holds up a
claim. Connections are direct: a transaction pooler would break the fence (ADR 22). Nothing here
knows the meaning of a row.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import asyncpg

from postbus.store.addresses import Address, fixed, target_of
from postbus.store.beats import ANSWER_S, Beats
from postbus.store.connections import (
    POOLER,
    SharedConnection,
    connect,
    is_shared,
    unusable_file,
)
from postbus.store.errors import (
    COMMIT_MS,
    CONNECTION_ERRORS,
    Connection,
    Fenced,
    SchemaTooNew,
    StoreError,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
    as_store_error,
    translated,
)
from postbus.store.incarnation import Broker, this_process
from postbus.store.migrate import (
    partition_holds_anything,
    prepare_store,
    schema_of,
)
from postbus.store.outage import Outage
from postbus.store.upkeep_limits import UpkeepLimits

__all__ = [
    "Fenced",
    "SchemaTooNew",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreMisconfigured",
    "StoreUnavailable",
]

logger = logging.getLogger(__name__)

MIN_SERVER_VERSION: Final = 150_000
READ_S: Final = 10.0
"""Timeout of reads: 1000 rows take milliseconds; after more a retry is better."""
SIDE_S: Final = 10.0
"""The same for side work: longer work is split into parts."""
SETUP_S: Final = 60.0
"""The same for creating and migrating the tables of the store."""
PLAN_SETTINGS: Final = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}
"""After VACUUM of a nearly empty table, a cached plan may filter all rows instead of using the key:
50 times slower. Source: measured with Postgres 15; tests/store/test_upkeep.py."""


class Store:
    """One Postgres database with one or more partitions.

    `unsafe` accepts servers that may lose confirmed commits (fsync off and the like); `broker`
    claims partitions. `check` is awaited on a connection before the store is used. `pipelined`:
    plain commits of several rows are one message (ADR 49), and not statements of the driver.
    """

    def __init__(
        self,
        dsn: str | Address,
        *,
        unsafe: bool = False,
        broker: Broker | None = None,
        check: Callable[[Connection], Awaitable[None]] | None = None,
        upkeep_limits: UpkeepLimits | None = None,
        pipelined: bool = True,
    ) -> None:
        self.pipelined = pipelined
        self._address = fixed(dsn) if isinstance(dsn, str) else dsn
        self._dsn = self._address.dsn  # of the last attempt to connect
        self._identity: UUID | None = None
        self._checked_target: object = None
        self._unsafe = unsafe
        self._check = check
        self._opening = asyncio.Lock()
        self._failure_count = 0
        self._opening_error: Exception | None = None
        self.is_open = False
        self.upkeep_limits = upkeep_limits or UpkeepLimits()
        self.outage = Outage(self.where)
        self.commits_under_way = 0  # of all partitions, counted by their journals
        self.commits_begun = 0
        self._synchronous_commit = "on"
        self._read = SharedConnection(self._connect_read)
        self._side = SharedConnection(self._connect_side)
        self._vacuum = SharedConnection(self._connect_vacuum)
        self._bulk = SharedConnection(self._connect_bulk)
        broker = broker or Broker("broker-0", this_process())
        self.beats = Beats(self._connect_beat, broker, self._drop_shared, outage=self.outage)

    @property
    def where(self) -> str:
        """Host and port, or the folder of a socket, for messages; "" if the DSN has none."""
        try:
            parts = urlsplit(self._dsn)
            if parts.hostname:
                return f"{parts.hostname}:{parts.port or 5432}"
            return parse_qs(parts.query).get("host", [""])[0]
        except ValueError:  # several hosts
            return ""

    async def open(self) -> None:
        """Check the server's settings and migrate the tables; cheap when done before.

        Concurrent callers share one attempt. Raises StoreUnavailable, StoreMisconfigured,
        SchemaTooNew.
        """
        if self.is_open:
            return
        failure_count = self._failure_count
        async with self._opening:
            if self.is_open:
                return
            if self._failure_count != failure_count and self._opening_error is not None:
                raise self._opening_error
            try:
                await self._prepare()
            except (StoreError, asyncpg.PostgresError) as error:
                self._failure_count += 1
                self._opening_error = error
                self.outage.failed(error)
                raise
            self.is_open = True
            self.outage.ended()

    async def _prepare(self) -> None:
        shared = SharedConnection(self._connect_setup)
        try:
            async with shared.use() as connection:
                await self._check_server(connection)
                await prepare_store(connection)
                if self._check is not None:
                    await self._check(connection)
                self._identity = await connection.fetchval(IDENTITY)
        finally:
            await shared.close()

    async def holds_anything(self, partition_id: int) -> bool:
        """Return whether a partition has tables, and rows of an entity in one of them."""
        await self.open()
        async with self._side.use() as connection:
            return await partition_holds_anything(connection, partition_id)

    async def sample_clock_ms(self) -> int:
        """Return database time in milliseconds since the epoch."""
        async with self._read.use() as connection:
            return int(await connection.fetchval(CLOCK))

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        """Lend the read connection; its failures are raised as StoreUnavailable."""
        async with self._read.use() as connection:
            yield connection

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[Connection]:
        """Lend the side connection (staging, catalog, DDL)."""
        async with self._side.use() as connection:
            yield connection

    @asynccontextmanager
    async def bulk(self) -> AsyncIterator[Connection]:
        """Lend the connection for reads of ranges, which no receiver waits for."""
        async with self._bulk.use() as connection:
            yield connection

    @asynccontextmanager
    async def vacuuming(self) -> AsyncIterator[Connection]:
        """Lend the connection for VACUUM, which may take minutes."""
        async with self._vacuum.use() as connection:
            yield connection

    async def connect_writer(self, partition_id: int) -> Connection:
        """Open a connection for commits of one partition; the caller owns it."""
        settings = PLAN_SETTINGS | {
            "search_path": schema_of(partition_id),
            "statement_timeout": str(COMMIT_MS),
            "synchronous_commit": self._synchronous_commit,
        }
        with translated():
            return await self._connect(f"postbus writer {partition_id}", settings)

    async def close(self) -> None:
        """End our life in the store and close shared connections; a later use opens them again."""
        await self.beats.stop()
        for shared in (self._read, self._side, self._vacuum, self._bulk):
            await shared.close()

    def _drop_shared(self) -> None:
        """Drop the shared connections, so that nothing waits for a database that is gone."""
        for shared in (self._read, self._side, self._vacuum, self._bulk):
            shared.drop()

    async def _connect(
        self,
        purpose: str,
        settings: Mapping[str, str],
        *,
        statement_s: float | None = None,
        caches_statements: bool = False,
    ) -> Connection:
        """Open a connection to the current address; after a failure look for a changed one.

        An address that is refused counts as unavailable if it may change.
        """
        self._use_current_address()
        dsn, target = self._dsn, target_of(self._dsn)
        try:
            connection = await connect(
                dsn,
                purpose,
                settings,
                statement_s=statement_s,
                caches_statements=caches_statements,
            )
        except (asyncpg.PostgresError, *CONNECTION_ERRORS) as error:
            self._address.read_again()
            why = self._temporary_reason(error, dsn)
            if why is None:
                raise
            raise StoreUnavailable(why) from error
        try:
            await self._check_target(connection, target)
        except BaseException:
            connection.terminate()
            self._address.read_again()
            raise
        return connection

    def _use_current_address(self) -> None:
        """Use the address as it is now; of another target drop all connections to the former one,
        so that never two of them are written at a time.
        """
        before, self._dsn = self._dsn, self._address.dsn
        if before != self._dsn and target_of(before) != target_of(self._dsn):
            logger.warning("the address of a database has changed", extra={"store": self.where})
            self.outage.where = self.where
            self._drop_shared()
            self.beats.abandon(StoreUnavailable("the address of the database has changed"))

    async def _check_target(self, connection: Connection, target: object) -> None:
        """Refuse another store than the one that was opened; checked once for each target."""
        may_differ = self._address.may_change and self._identity is not None
        if may_differ and target != self._checked_target:
            await self._check_server(connection)
            try:
                identity = await connection.fetchval(IDENTITY)
            except asyncpg.UndefinedTableError:
                identity = None
            if identity != self._identity:
                raise StoreMisconfigured(
                    "the new address leads to another store: correct it in POSTBUS_STORES_FILE"
                )
        if target != target_of(self._dsn):
            raise StoreUnavailable("the address of the database has changed meanwhile")
        self._checked_target = target

    def _temporary_reason(self, error: Exception, dsn: str) -> str | None:
        """Return why a refusal may pass although the driver's error does not say so, else None."""
        is_of_file = isinstance(error, FileNotFoundError | PermissionError | ssl.SSLError)
        if is_of_file and (text := unusable_file(dsn)):
            return text
        if not (self._address.may_change and isinstance(as_store_error(error), StoreMisconfigured)):
            return None
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        problem = f" ({self._address.problem})" if self._address.problem else ""
        return f"{line}; waiting for another address in POSTBUS_STORES_FILE{problem}"

    async def _connect_beat(self) -> Connection:
        settings = {"synchronous_commit": self._synchronous_commit}
        return await self._connect("postbus beat", settings, statement_s=ANSWER_S - 0.5)

    async def _connect_read(self) -> Connection:
        settings = PLAN_SETTINGS | {"default_transaction_read_only": "on"}
        return await self._connect(
            "postbus reader", settings, statement_s=READ_S, caches_statements=True
        )

    async def _connect_bulk(self) -> Connection:
        settings = PLAN_SETTINGS | {"default_transaction_read_only": "on"}
        return await self._connect(
            "postbus bulk", settings, statement_s=READ_S, caches_statements=True
        )

    async def _connect_side(self) -> Connection:
        return await self._connect("postbus side", {"jit": "off"}, statement_s=SIDE_S)

    async def _connect_setup(self) -> Connection:
        return await self._connect("postbus setup", {"jit": "off"}, statement_s=SETUP_S)

    async def _connect_vacuum(self) -> Connection:
        return await self._connect("postbus vacuum", {})

    async def _check_server(self, connection: Connection) -> None:
        row = await connection.fetchrow(SERVER_SETTINGS)
        assert row is not None
        if row["version"] < MIN_SERVER_VERSION:
            raise StoreMisconfigured(
                f"Postgres {row['version'] // 10_000} is too old; "
                f"use {MIN_SERVER_VERSION // 10_000} or newer"
            )
        if await is_shared(self._dsn, connection, row["backend"]):
            raise StoreMisconfigured(POOLER)
        self._synchronous_commit = row["synchronous_commit"]
        risky = [name for name in DURABILITY if row[name] == "off"]
        if risky and not self._unsafe:
            raise StoreMisconfigured(
                f"the server runs with {', '.join(f'{name}=off' for name in risky)} and may lose "
                "confirmed messages; switch it on, or accept the risk with --unsafe"
            )
        if risky:
            logger.warning("the store may lose confirmed messages", extra={"off": risky})


DURABILITY: Final = ("fsync", "full_page_writes", "synchronous_commit")
SERVER_SETTINGS: Final = """
select current_setting('server_version_num')::int as version,
       pg_backend_pid() as backend,
       current_setting('fsync') as fsync,
       current_setting('full_page_writes') as full_page_writes,
       current_setting('synchronous_commit') as synchronous_commit
"""
IDENTITY: Final = "select identity from postbus.store"
CLOCK: Final = "select (extract(epoch from clock_timestamp()) * 1000)::bigint"
