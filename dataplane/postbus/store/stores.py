"""The databases of a bus: location of partitions, and a check that the list is unchanged.

Partition `n` is in database `n % count` of the list; the first one also has the catalog. Each
database records its position, since with another list partitions would be looked for in the wrong
database. A database that is unavailable at the start is checked before its first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final
from uuid import UUID

from postbus.store.addresses import Address, Addresses, Read
from postbus.store.errors import Connection, StoreError, StoreMisconfigured, StoreUnavailable
from postbus.store.incarnation import Broker
from postbus.store.postgres import Store


class Stores:
    """All databases of one bus, in configured order."""

    def __init__(
        self,
        dsns: Sequence[str],
        *,
        read: Read | None = None,
        unsafe: bool = False,
        broker: Broker | None = None,
        pipelined: bool = True,
    ) -> None:
        """`read` reads the addresses again when a connection cannot be opened; see `Addresses`."""
        self._identities: dict[int, UUID] = {}
        addresses = Addresses(dsns, read)
        self.all = [
            Store(
                Address(addresses, ordinal),
                unsafe=unsafe,
                broker=broker,
                pipelined=pipelined,
                check=partial(self._check, ordinal),
            )
            for ordinal in range(len(dsns))
        ]

    @property
    def first(self) -> Store:
        """The database with the catalog."""
        return self.all[0]

    def home_of(self, partition_id: int) -> Store:
        """Return the database of a partition."""
        return self.all[partition_id % len(self.all)]

    def act_as(self, broker: Broker) -> None:
        """Claim partitions as this broker; only before the first claim."""
        for store in self.all:
            store.beats.broker = broker

    def when_asked_to_end(self, on_asked: Callable[[str], None]) -> None:
        """Call `on_asked` with the requester, once for each database, when we are asked to end."""
        for store in self.all:
            store.beats.on_asked = on_asked

    async def open(self) -> None:
        """Check and migrate every database that answers, and check their positions in the list.

        Raises StoreUnavailable when the first is unavailable, without which nothing works; for any
        of them StoreMisconfigured, SchemaTooNew. A note on the exception names the database.
        """
        await self._open(0)
        results = await asyncio.gather(
            *(self._open(ordinal) for ordinal in range(1, len(self.all))), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, StoreUnavailable):
                raise result

    async def _open(self, ordinal: int) -> None:
        store = self.all[ordinal]
        try:
            await store.open()
        except (StoreError, OSError) as error:
            if len(self.all) > 1:
                error.add_note(f"database {ordinal + 1} of {len(self.all)}")
            if where := store.where:
                error.add_note(where)
            raise

    async def _check(self, ordinal: int, connection: Connection) -> None:
        """Compare a database with the others and with its recorded position."""
        identity = await connection.fetchval("select identity from postbus.store")
        assert isinstance(identity, UUID)
        for other, known in self._identities.items():
            if known == identity and other != ordinal:
                raise StoreMisconfigured(
                    f"it is the same as database {other + 1}; list each database once"
                )
        self._identities[ordinal] = identity
        await _record_place(connection, self._identities[0], ordinal, len(self.all))

    async def close(self) -> None:
        await asyncio.gather(*(store.close() for store in self.all))


async def _record_place(connection: Connection, bus: UUID, ordinal: int, count: int) -> None:
    """Record the position of a new database, or compare that of an existing one."""
    async with connection.transaction():
        row = await connection.fetchrow(READ_PLACE)
        assert row is not None
        if row["bus_identity"] is None:
            await connection.execute(WRITE_PLACE, bus, ordinal, count)
        elif tuple(row) != (bus, ordinal, count):
            raise StoreMisconfigured(
                f"it was created as database {row['ordinal'] + 1} of {row['database_count']} of "
                f"a bus, but is listed as {ordinal + 1} of {count}; list all databases of that "
                "bus in their original order, or move the messages to a new bus"
            )


READ_PLACE: Final = "select bus_identity, ordinal, database_count from postbus.store for update"
WRITE_PLACE: Final = """
update postbus.store set bus_identity = $1, ordinal = $2, database_count = $3
"""
