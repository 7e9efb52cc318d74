"""Several databases of one bus: places of partitions, and errors of a changed list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from postbus.process.embedded import EmbeddedPostgres
from postbus.store.addresses import fixed
from postbus.store.connections import CONNECT_S
from postbus.store.errors import StoreMisconfigured, StoreUnavailable
from postbus.store.postgres import Store
from postbus.store.stores import Stores
from tests.conftest import dsn_of, make_database, run_psql
from tests.store.driving import make_partition
from tests.store.relay import relaying

NAMES = ("several_1", "several_2", "several_3")


@pytest.fixture
def dsns(postgres_server: EmbeddedPostgres) -> Iterator[list[str]]:
    """Return three databases that were never used."""
    for name in NAMES:
        make_database(postgres_server, name)
    yield [dsn_of(postgres_server, name) for name in NAMES]
    for name in NAMES:
        run_psql(postgres_server, f"drop database {name} with (force)")


async def open_stores(*dsns: str) -> None:
    stores = Stores(dsns)
    try:
        await stores.open()
    finally:
        await stores.close()


def test_partitions_are_spread_over_the_databases() -> None:
    stores = Stores(["postgresql://a/1", "postgresql://a/2", "postgresql://a/3"])
    homes = [stores.home_of(partition_id) for partition_id in range(16)]
    assert homes[0] is stores.first
    assert homes[:3] == homes[3:6] == homes[12:15]
    assert len(set(homes[:3])) == 3


async def test_the_same_list_opens_again(dsns: list[str]) -> None:
    await open_stores(*dsns)
    await open_stores(*dsns)


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0, 2), (1,), (2, 1, 0)])
async def test_another_list_is_refused(dsns: list[str], order: tuple[int, ...]) -> None:
    await open_stores(*dsns)
    with pytest.raises(StoreMisconfigured, match=r"was created as database \d of 3 of a bus"):
        await open_stores(*(dsns[index] for index in order))
    await open_stores(*dsns)


async def test_a_bus_does_not_grow_by_a_longer_list(dsns: list[str]) -> None:
    await open_stores(dsns[0])
    with pytest.raises(StoreMisconfigured, match="database 1 of 1 of a bus"):
        await open_stores(dsns[0], dsns[1])


async def test_a_database_is_named_once(dsns: list[str]) -> None:
    with pytest.raises(StoreMisconfigured, match="the same as database 1"):
        await open_stores(dsns[0], dsns[0])


async def test_missing_first_database_fails_the_opening(dsns: list[str]) -> None:
    with pytest.raises(StoreUnavailable) as trouble:
        await open_stores(away(dsns[0]), dsns[1])
    number, where = trouble.value.__notes__
    assert (number, where.startswith("/nowhere")) == ("database 1 of 2", True)


async def test_missing_other_database_joins_later(dsns: list[str]) -> None:
    stores = Stores([dsns[0], away(dsns[1]), dsns[2]])
    try:
        await stores.open()
        assert [store.outage.is_on for store in stores.all] == [False, True, False]
        with pytest.raises(StoreUnavailable):
            await stores.home_of(1).open()
        stores.home_of(1)._address = fixed(dsns[0])  # it is replaced by another one
        with pytest.raises(StoreMisconfigured, match="the same as database 1"):
            await stores.home_of(1).open()
        assert "cannot be used (since" in str(stores.home_of(1).outage.text)
        stores.home_of(1)._address = fixed(dsns[1])
        await make_partition(stores.home_of(1), 1)
        assert stores.home_of(1).outage.text is None
    finally:
        await stores.close()
    await open_stores(*dsns)


async def test_concurrent_openings_of_a_database_share_one_attempt(dsns: list[str]) -> None:
    async with relaying(dsns[0]) as (relay, through):
        relay.is_silent = True
        store = Store(through)
        began = time.monotonic()
        results = await asyncio.gather(*(store.open() for _ in range(8)), return_exceptions=True)
        assert time.monotonic() - began < 2 * CONNECT_S
        assert {type(each) for each in results} == {StoreUnavailable}
        relay.is_silent = False
        await asyncio.gather(*(store.open() for _ in range(8)))
        await store.close()


def away(dsn: str) -> str:
    return dsn.replace("host=", "host=/nowhere")


async def test_error_names_the_database(dsns: list[str]) -> None:
    with pytest.raises(StoreMisconfigured) as trouble:
        await open_stores(dsns[0], dsns[1].replace("several_2", "absent"))
    assert trouble.value.__notes__[0] == "database 2 of 2"
