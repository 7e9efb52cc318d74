"""Administration on top of several partitions, as one bus process has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from postbus.broker.administration import Administration
from postbus.broker.catalog.change_tasks import ChangeTasks
from postbus.broker.catalog.namespace import Namespace
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.broker.partition.clock import EntityClock
from postbus.contract.namespace import NamespaceDefinition
from postbus.entity.commands import Refusal
from postbus.store.namespace import NamespaceStore
from postbus.store.postgres import Store
from postbus.store.tombstones import TombstoneStore
from tests.broker.partition_rig import Bus, running


def administration_of(
    bus: Bus,
    store: Store,
    start: Any = None,
    declared: NamespaceDefinition = NamespaceDefinition(),  # noqa: B008 - never changed
    **options: Any,
) -> Administration:
    return Administration(
        bus.directory,
        bus.hosts,
        TombstoneStore(store),
        Namespace("test-bus", declared, NamespaceStore(store), bus.directory),
        ChangeTasks(start or bus.hosts[0].start),
        **{"now_ms": bus.hosts[0].clock, **options},
    )


@asynccontextmanager
async def administered(
    store: Store, partition_count: int = 4, clock: EntityClock | None = None, **options: Any
) -> AsyncIterator[tuple[Administration, Bus]]:
    async with running(store, partition_count=partition_count, clock=clock) as bus:
        yield administration_of(bus, store, **options), bus


async def refusal_of(work: Any) -> Refusal:
    """Return the refusal of a change; it must have a reason."""
    with pytest.raises(DirectoryRefusal) as caught:
        await work
    assert str(caught.value)
    return caught.value.refused.refusal
