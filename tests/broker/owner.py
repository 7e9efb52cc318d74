"""A directory without running partitions: definitions change, no partition follows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from postbus.broker.catalog.directory import Directory
from postbus.contract.entities import LIMITS, NamespaceLimits, Sku
from postbus.entity.commands import Command, Reply
from postbus.store.catalog import CatalogStore


@dataclass
class Owner:
    """A partition that we own in the epoch of new tables and that is not loaded."""

    epoch: int | None = 0
    is_loaded: bool = False
    reload_count: int = 0
    trouble: str | None = None

    async def call(self, command: Command) -> Reply:
        raise AssertionError(command)


def directory_of(
    catalog: CatalogStore, partition_count: int, limits: NamespaceLimits = LIMITS[Sku.STANDARD]
) -> Directory:
    directory = Directory(catalog, replace(limits, partition_count=partition_count))
    directory.follow([Owner() for _ in range(partition_count)])
    return directory
