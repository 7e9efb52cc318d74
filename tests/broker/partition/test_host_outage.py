"""A simulated outage of the store behaves like a real one, and ends on time."""

from __future__ import annotations

import pytest

from postbus.broker.partition.ownership import HostStatus
from postbus.broker.partition.recovery import INTERRUPTED, Recovery
from postbus.entity.commands import Done, Enqueue, Enqueued, Refusal, Refused, Reply, Tick
from postbus.store.errors import Connection, StoreUnavailable
from postbus.store.incarnation import boottime_s
from postbus.store.postgres import Store
from tests.broker.partition.test_host import Sink, add, message, until
from tests.broker.partition.test_host_order import served

OUTAGE_S = 2.0
"""Below the time for which a commit confirms ownership: the tests advance the clock by it."""


class Seconds:
    """Real seconds plus an offset of the test."""

    def __init__(self) -> None:
        self.more_s = 0.0

    def __call__(self) -> float:
        return boottime_s() + self.more_s


class Stopwatch:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def assert_away(reply: Reply, store: Store) -> None:
    """Check that a command was refused, and that the refusal names the store and the reason."""
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.NOT_APPLIED
    assert reply.detail == f"the store at {store.where} is unavailable: {INTERRUPTED}"


@pytest.mark.slow
async def test_sends_are_refused_during_an_outage_and_accepted_messages_survive(
    store: Store,
) -> None:
    seconds = Seconds()
    async with served(store, monotonic_s=seconds) as (host, entity_no):
        sink = Sink()
        assert await host.call(Enqueue(entity_no, [message()])) == Enqueued([1])
        await add(host, entity_no, 1, sink, limit=1)
        queued: list[Reply] = []
        host.submit(Enqueue(entity_no, [message()]), queued.append)
        host.interrupt(OUTAGE_S)
        assert [reply.refusal for reply in queued if isinstance(reply, Refused)] == [
            Refusal.NOT_APPLIED
        ]
        assert (host.status, sink.resets) == (HostStatus.LOADING, 1)
        assert_away(await host.call(Enqueue(entity_no, [message()])), store)
        assert INTERRUPTED in str(host.trouble)
        seconds.more_s = OUTAGE_S
        await until(lambda: host.is_loaded)
        assert await host.call(Tick()) == Done()
        assert (host.trouble, host.reload_count) == (None, 1)
        again = Sink()
        await add(host, entity_no, 2, again)
        await until(lambda: len(again.deliveries) == 1)
        assert again.deliveries[0].sequence == 1
        reply = await host.call(Enqueue(entity_no, [message()]))
        assert isinstance(reply, Enqueued)


@pytest.mark.slow
async def test_an_unused_partition_cannot_be_loaded_either(store: Store) -> None:
    seconds = Seconds()
    async with served(store, monotonic_s=seconds) as (host, _):
        host.interrupt(OUTAGE_S)
        assert host.status is HostStatus.UNCLAIMED
        assert_away(await host.call(Tick()), store)
        seconds.more_s = OUTAGE_S
        await until(lambda: host.is_loaded)


@pytest.mark.slow
async def test_a_partition_that_is_being_loaded_starts_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = Seconds()
    async with served(store, monotonic_s=seconds) as (host, _):
        connect = store.connect_writer

        async def connect_and_interrupt(partition_id: int) -> Connection:
            monkeypatch.setattr(store, "connect_writer", connect)
            host.interrupt(OUTAGE_S)
            return await connect(partition_id)

        monkeypatch.setattr(store, "connect_writer", connect_and_interrupt)
        assert_away(await host.call(Tick()), store)
        assert not host.is_loaded
        seconds.more_s = OUTAGE_S
        await until(lambda: host.is_loaded)


def test_an_interruption_ends_on_time_despite_the_backoff() -> None:
    stopwatch = Stopwatch()
    recovery = Recovery(stopwatch)
    recovery.interrupt(10.0)
    waits = []
    while stopwatch.now < 10.0:
        with pytest.raises(StoreUnavailable, match=INTERRUPTED):
            recovery.check_interruption()
        recovery.failed(None)
        waits.append(recovery.wait_s)
        stopwatch.now += recovery.wait_s
    assert stopwatch.now == pytest.approx(10.0)
    assert len(waits) < 20
    recovery.check_interruption()


def test_a_shorter_interruption_does_not_shorten_a_longer_one() -> None:
    stopwatch = Stopwatch()
    recovery = Recovery(stopwatch)
    recovery.interrupt(10.0)
    recovery.interrupt(1.0)
    stopwatch.now = 9.9
    with pytest.raises(StoreUnavailable):
        recovery.check_interruption()
