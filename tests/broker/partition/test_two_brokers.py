"""Two brokers of different names on one database: neither undoes decisions of the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import asyncpg
import pytest

from postbus.assembly.bus import Bus, BusError
from postbus.broker.access.caller_fence import CallerTooOld
from postbus.broker.administration import DeletePolicy
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.broker.partition.host import Host
from postbus.contract.entities import (
    NamespaceProperties,
    QueueProperties,
    Sku,
    SkuProperties,
    limits_of,
)
from postbus.contract.namespace import NamespaceDefinition
from postbus.entity.commands import Refusal, Tick
from tests.assembly.test_bus import TAKE
from tests.broker.brokers_rig import Brokers, brokers_on, definition, peek, send
from tests.broker.putting import NEW, a_queue
from tests.store.driving import wait_until
from tests.store.relay import relaying

pytestmark = pytest.mark.slow

PREMIUM = NamespaceDefinition(sku=SkuProperties(name=Sku.PREMIUM))
AUDITED = b"insert into postbus.audit"
"""The first statement to the store before manifests change entities."""


@pytest.fixture
async def brokers(database: str) -> AsyncIterator[Brokers]:
    async with brokers_on(database) as made:
        yield made


async def create(bus: Bus, queue: str) -> int:
    made = await bus.administration.put(a_queue(queue, QueueProperties()), NEW)
    return made.entity_no


async def own(bus: Bus) -> None:
    """Return when this bus has all partitions in use, and partition 0."""

    async def is_ours() -> bool:
        return bus._opened is not None and bus._opened.directory.catalog.epoch is not None

    await wait_until(is_ours, 30)


async def rows(dsn: str, sql: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetch(sql)
    finally:
        await connection.close()


async def test_queue_made_after_the_standby_started_survives_a_clean_takeover(
    brokers: Brokers,
) -> None:
    first = await brokers.start("first")
    second = await brokers.start("second")
    await create(first, "orders")
    await send(first, "orders", *"abcde")
    await first.stop()
    await own(second)
    assert await peek(second, "orders") == [*"abcde"]


async def test_queue_deleted_after_the_standby_started_does_not_come_back(
    brokers: Brokers, database: str
) -> None:
    first = await brokers.start("first")
    number = await create(first, "orders")
    await send(first, "orders", *"abc")
    second = await brokers.start("second")
    assert second.administration.find("orders") is not None
    await first.administration.delete("orders")
    await create(first, "orders")
    await send(first, "orders", "new")
    await first.stop()
    await own(second)
    found = second.administration.find("orders")
    assert found is not None
    assert found.entity_no > number
    assert await peek(second, "orders") == ["new"]
    (home,) = found.partitions
    copies = await rows(database, f"select entity_no from partition_{home}.entity")
    assert [copy["entity_no"] for copy in copies] == [found.entity_no]


async def test_standby_follows_the_catalog_without_writing(brokers: Brokers) -> None:
    first = await brokers.start("first", "declared")
    second = await brokers.start("second", "declared", "another")
    await create(first, "orders")

    async def is_known() -> bool:
        return second.administration.find("orders") is not None

    await wait_until(is_known, 10)
    refusals = await asyncio.gather(
        second.administration.put(a_queue("mine", QueueProperties()), NEW),
        second.administration.delete("orders"),
        return_exceptions=True,
    )
    for refusal in refusals:
        assert isinstance(refusal, DirectoryRefusal)
        assert refusal.refused.refusal is Refusal.NOT_APPLIED
        assert "owned by first" in str(refusal)
    assert first.administration.find("another") is None
    await first.stop()
    await own(second)

    async def is_declared() -> bool:
        return second.administration.find("another") is not None

    await wait_until(is_declared, 10)
    assert await create(second, "mine")


async def test_standby_applies_its_manifests_when_it_takes_over(
    brokers: Brokers,
) -> None:
    first = await brokers.start("first")
    second = await brokers.start("second", "of-the-start")
    await second.redefine(definition("read-again"))
    await first.stop()
    await own(second)

    async def is_declared() -> bool:
        return second.administration.find("read-again") is not None

    await wait_until(is_declared, 10)
    assert second.administration.find("of-the-start") is None


async def test_standby_has_the_tier_that_the_owner_is_given(brokers: Brokers) -> None:
    first = await brokers.start("first")
    second = await brokers.start("second")
    await create(first, "orders")
    await first.administration.put_namespace(PREMIUM)

    async def is_premium() -> bool:
        return second.administration.properties.sku.name is Sku.PREMIUM

    await wait_until(is_premium, 10)
    await first.stop()
    await own(second)
    assert second.administration.limits == limits_of(Sku.PREMIUM, 16)
    await create(second, "large")
    await send(second, "large", "x" * 600_000)


async def test_standby_changes_the_tier_to_that_of_its_manifest_when_it_takes_over(
    brokers: Brokers,
) -> None:
    first = await brokers.start("first", "orders")
    await send(first, "orders", *"abc")
    premium = replace(definition("large"), properties=NamespaceProperties(sku=PREMIUM.sku))
    second = await brokers.start_with("second", premium, brokers.sealing_key())
    assert second.administration.properties.sku.name is Sku.STANDARD
    await first.stop()
    await own(second)

    async def is_declared() -> bool:
        return second.administration.find("large") is not None

    await wait_until(is_declared, 10)
    assert second.administration.properties.sku.name is Sku.PREMIUM
    assert await peek(second, "orders") == [*"abc"]
    await send(second, "large", "x" * 600_000)


async def test_owner_that_became_a_standby_applies_manifests_it_reads_then(
    brokers: Brokers, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await brokers.start("first", "of-the-start")
    assert bus._opened is not None
    catalog = bus._opened.directory.catalog
    await rows(database, TAKE.format(home=0))

    async def is_taken() -> bool:
        return catalog.epoch is None

    await wait_until(is_taken, 10)
    await bus.redefine(definition("read-again"))
    waiting = [each for each in caplog.records if "not applied yet" in each.message]
    assert ["owned by taker" in str(getattr(each, "why", "")) for each in waiting] == [True]
    assert bus.administration.find("read-again") is None

    async def is_declared() -> bool:
        return bus.administration.find("read-again") is not None

    await wait_until(is_declared, 30)  # the taker never beats, so it is dead after a while


async def test_manifests_that_wait_for_the_store_outlive_a_reading_that_failed_on_it(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("postbus.assembly.defining.OWN_LOOK_S", 3.0)
    lost = ("postbus side", AUDITED)
    async with relaying(database) as (relay, through), brokers_on(through) as brokers:
        relay.deafen_at = lost
        bus = await brokers.start("first", "of-the-start")
        assert "not applied yet" in caplog.text
        relay.deafen_at = lost
        with pytest.raises(BusError, match="the store is unavailable"):
            await bus.redefine(definition("read-again"))
        assert bus.administration.find("of-the-start") is None

        async def is_declared() -> bool:
            return bus.administration.find("of-the-start") is not None

        await wait_until(is_declared, 10)
        assert bus.administration.find("read-again") is None


async def test_standby_does_not_reap_a_restored_entity(brokers: Brokers) -> None:
    first = await brokers.start("first")
    number = await create(first, "kept")
    await send(first, "kept", "a")
    await first.administration.delete("kept", policy=DeletePolicy.RETAIN)
    second = await brokers.start("second")
    await first.administration.restore(number)
    second.administration._now_ms = lambda: 1 << 60
    await second.administration.reap()
    await first.stop()
    await own(second)
    assert await peek(second, "kept") == ["a"]


async def test_deletion_by_a_broker_that_wakes_up_is_not_written(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All partitions agreed to an idle deletion; since then another owner stored a message."""
    first = await brokers.start("first")
    number = await create(first, "orders")
    catalog = first.administration._directory.catalog
    decided, goes_on = asyncio.Event(), asyncio.Event()
    write: Callable[..., object] = catalog.store.delete

    async def delete_late(*given: object) -> object:
        decided.set()
        await goes_on.wait()
        return await write(*given)  # type: ignore[misc]

    monkeypatch.setattr(catalog.store, "delete", delete_late)
    deletion = asyncio.ensure_future(
        first.administration.delete("orders", policy=DeletePolicy.DELETE_IF_EMPTY)
    )
    await decided.wait()
    for host in first._hosts:  # as if it had been away for longer than its partitions wait
        await host.stop()
    second = await brokers.start("second")
    await own(second)
    await send(second, "orders", "accepted")
    goes_on.set()
    with pytest.raises(DirectoryRefusal):
        await deletion
    found = second.administration.find("orders")
    assert found is not None
    assert found.entity_no == number
    await second._hosts[found.partitions[0]].call(Tick())
    assert await peek(second, "orders") == ["accepted"]


async def test_older_caller_is_refused_where_another_owner_admitted_a_newer_one(
    brokers: Brokers, database: str
) -> None:
    bus = await brokers.start("first")
    assert bus._opened is not None
    async with bus._opened.fence.admitted(2):
        await create(bus, "a")
    await rows(database, "update postbus.caller_epoch set epoch = 3")  # as another owner would
    with pytest.raises(CallerTooOld, match="a caller had epoch 3"):
        async with bus._opened.fence.admitted(2):
            await create(bus, "b")
    assert bus.administration.find("b") is None


async def test_newer_caller_waits_for_the_changes_of_an_older_one(brokers: Brokers) -> None:
    bus = await brokers.start("first")
    assert bus._opened is not None
    fence = bus._opened.fence
    order: list[str] = []

    async def change_later() -> None:
        async with fence.admitted(3):
            order.append("newer")
            await create(bus, "last")

    async with fence.admitted(2):
        newer = asyncio.ensure_future(change_later())
        for number in range(20):  # time for one that does not wait
            await create(bus, f"queue-{number}")
        order.append("older")
    await newer
    assert order == ["older", "newer"]


async def test_broker_that_resumes_claims_no_partition_of_the_new_owner(
    brokers: Brokers, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has claimed partition 0 and claims the rest a moment later."""
    first = await brokers.start("first", "orders", "more", "others")

    async def has_loaded() -> bool:  # a start does not wait for all partitions for long
        return any(host.is_loaded for host in first._hosts[1:])

    await wait_until(has_loaded, 30)
    homes = [host.partition_id for host in first._hosts[1:] if host.is_loaded]
    wakes_up, goes_on = asyncio.Event(), asyncio.Event()
    beats = first._hosts[0]._store.beats
    beat, open_journal = beats._beat, Host._open_journal

    async def beat_late(started: float) -> None:
        await wakes_up.wait()
        await beat(started)

    async def open_late(host: Host) -> object:
        if host not in first._hosts and host.partition_id in homes:
            await goes_on.wait()
        return await open_journal(host)

    monkeypatch.setattr(Host, "_open_journal", open_late)
    monkeypatch.setattr(beats, "_beat", beat_late)
    second = await brokers.start("second", "orders")
    identity = beats.identity
    await rows(database, "update postbus.broker set ended_by = 'x' where broker_name = 'first'")
    await own(second)
    wakes_up.set()

    async def waits() -> bool:
        troubles = [first._hosts[home].trouble or "" for home in (0, *homes)]
        return all("waits: owned by second" in trouble for trouble in troubles)

    await wait_until(waits, 10)
    assert beats.identity not in (None, identity)
    goes_on.set()

    async def has_all() -> bool:
        return all(second._hosts[home].is_loaded for home in homes)

    await wait_until(has_all, 10)
