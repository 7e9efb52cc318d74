"""Loading of partitions before the first client connects, and obstacles to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from postbus.assembly.loading import load_partitions
from postbus.broker.partition.host import Host
from postbus.entity.commands import Command, Done, Reply, Tick
from postbus.store.stores import Stores
from tests.store.driving import connected, make_partition, wait_until


class RecordingHost:
    """Takes the place of a partition's host and records its commands."""

    partition_id = 0

    def __init__(self) -> None:
        self.commands: list[Command] = []

    async def call(self, command: Command) -> Reply:
        self.commands.append(command)
        return Done()


@pytest.fixture
async def stores(database: str) -> AsyncIterator[Stores]:
    made = Stores([database])
    await make_partition(made.first, 0)
    yield made
    await made.close()


async def test_an_unavailable_partition_is_loaded_again(
    stores: Stores, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server fails in a way that was not foreseen: the bus continues."""
    host = RecordingHost()
    async with connected(database) as look:
        await look.execute("insert into seen values (1, 0, 0, '')")
        await look.execute("alter table seen rename to unseen")
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(
                load_partitions([cast(Host, host)], stores, set(), tasks), name="start"
            )

            async def is_reported() -> bool:
                return "cannot read whether" in caplog.text

            await wait_until(is_reported)
            assert not host.commands
            await look.execute("alter table unseen rename to seen")
            await loading
    assert host.commands == [Tick()]
