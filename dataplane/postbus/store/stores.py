"""The databases of a bus: which partition lives where, and that the list is what it always was.

Partition `n` lives in database `n % count` of the list; the first one has the catalog too. Each
database remembers its place, since under another list partitions would be looked for where they
are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

from postbus.store.errors import StoreError, StoreMisconfigured
from postbus.store.incarnation import Broker
from postbus.store.postgres import Store


class Stores:
    """All databases of one bus, in the order they were named."""

    def __init__(
        self, dsns: Sequence[str], *, unsafe: bool = False, broker: Broker | None = None
    ) -> None:
        self._stores = [Store(dsn, unsafe=unsafe, broker=broker) for dsn in dsns]

    @property
    def first(self) -> Store:
        """The database with the catalog."""
        return self._stores[0]

    def home_of(self, partition_id: int) -> Store:
        """Return the database of a partition."""
        return self._stores[partition_id % len(self._stores)]

    def when_asked_to_end(self, on_asked: Callable[[str], None]) -> None:
        """Tell `on_asked` by whom, once for each database, when we are asked to end."""
        for store in self._stores:
            store.beats.on_asked = on_asked

    async def open(self) -> None:
        """Check and migrate every database, and their places in the list.

        Raises StoreUnavailable, StoreMisconfigured, SchemaTooNew; a note says which database.
        """
        identities: list[UUID] = []
        for ordinal, store in enumerate(self._stores):
            try:
                await store.open()
                identity = await _identity_of(store)
                if identity in identities:
                    raise StoreMisconfigured(
                        f"it is the same as database {identities.index(identity) + 1}; "
                        "name each database once"
                    )
                identities.append(identity)
                await _record_place(store, identities[0], ordinal, len(self._stores))
            except (StoreError, OSError) as error:
                if len(self._stores) > 1:
                    error.add_note(f"database {ordinal + 1} of {len(self._stores)}")
                if where := store.where:
                    error.add_note(where)
                raise

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


async def _identity_of(store: Store) -> UUID:
    async with store.aside() as connection:
        identity = await connection.fetchval("select identity from postbus.store")
    assert isinstance(identity, UUID)
    return identity


async def _record_place(store: Store, bus: UUID, ordinal: int, count: int) -> None:
    """Remember the place of a new database, compare that of another."""
    async with store.aside() as connection, connection.transaction():
        row = await connection.fetchrow(READ_PLACE)
        assert row is not None
        if row["bus_identity"] is None:
            await connection.execute(WRITE_PLACE, bus, ordinal, count)
        elif tuple(row) != (bus, ordinal, count):
            raise StoreMisconfigured(
                f"it was made as database {row['ordinal'] + 1} of {row['database_count']} of "
                f"a bus, and is named as {ordinal + 1} of {count}; name the databases of that bus, "
                "all of them in their first order, or move the messages to a new bus"
            )


READ_PLACE: Final = "select bus_identity, ordinal, database_count from postbus.store for update"
WRITE_PLACE: Final = """
update postbus.store set bus_identity = $1, ordinal = $2, database_count = $3
"""
