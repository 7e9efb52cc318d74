"""The commit of a change of the catalog or of a table beside it (ADR 27).

Only the owner of partition 0 changes it, in a transaction that is fenced like its commits. The
change commits only if the catalog still has the version on which it was decided, and no caller with
a higher epoch has called since. Every write to a table of the catalog uses `changing`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from postbus.store.errors import Connection, StoreError, StoreUnavailable
from postbus.store.fenced import fenced
from postbus.store.postgres import Store

CATALOG_PARTITION: Final = 0
"""The owner of this partition changes the catalog."""


class CatalogMoved(StoreUnavailable):
    """The catalog changed since the change was decided; read it and try again."""


class CallerOutdated(StoreError):
    """Another caller has sent a higher epoch, `highest`."""

    def __init__(self, highest: int) -> None:
        self.highest = highest
        super().__init__(f"another caller has sent epoch {highest}")


class CatalogFence(NamedTuple):
    """The conditions under which a change commits.

    `epoch` is that of partition 0, `version` the catalog's; `caller_epoch` None: the caller sent
    none.
    """

    epoch: int
    version: int
    caller_epoch: int | None = None


class CatalogChange(NamedTuple):
    """A change in progress. `version` and `entity_no`: the first of the reserved ones."""

    connection: Connection
    version: int
    entity_no: int
    now_ms: int


@asynccontextmanager
async def changing(
    store: Store, fence: CatalogFence, versions: int = 1, numbers: int = 0
) -> AsyncIterator[CatalogChange]:
    """Raise the catalog's version by `versions`, reserve entity numbers, commit at the end.

    Raises StoreUnavailable, its kinds Fenced and CatalogMoved, and CallerOutdated.
    """
    await store.open()
    async with fenced(store, CATALOG_PARTITION, fence.epoch) as connection:
        row = await connection.fetchrow(RAISE_VERSION, versions, numbers, fence.version)
        if row is None:
            raise CatalogMoved
        highest = row["caller_epoch"] or 0
        if fence.caller_epoch is not None and fence.caller_epoch < highest:
            raise CallerOutdated(highest)
        yield CatalogChange(
            connection,
            row["version"] - versions + 1,
            row["next_entity_no"] - numbers,
            row["now_ms"],
        )


RAISE_VERSION: Final = """
update postbus.catalog_version
set version = version + $1::integer, next_entity_no = next_entity_no + $2::integer
where version = $3
returning version, next_entity_no, (extract(epoch from clock_timestamp()) * 1000)::bigint as now_ms,
          (select epoch from postbus.caller_epoch) as caller_epoch
"""
