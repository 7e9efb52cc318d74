"""A host at its bounds: commands that wait, messages paged out, sinks that are gone, a stop."""

from __future__ import annotations

import pytest

from postbus.broker.partition import waiting
from postbus.broker.partition.host import Host
from postbus.entity.commands import (
    Delivery,
    Disposition,
    Enqueue,
    Enqueued,
    Peek,
    Peeked,
    Refusal,
    Refused,
    Reply,
    Settle,
    SubQueue,
    Tick,
)
from postbus.entity.window import WindowBudget
from postbus.message.envelope import Envelope
from postbus.store.postgres import Store
from tests.broker.partition.test_host import Sink, add, message, until
from tests.broker.partition.test_host_order import CUT, served
from tests.store.driving import connected

pytestmark = pytest.mark.slow


class Worker(Sink):
    """Completes all deliveries."""

    def __init__(self, host: Host, entity_no: int) -> None:
        super().__init__()
        self.host = host
        self.entity_no = entity_no

    def deliver(self, deliveries: list[Delivery]) -> None:
        super().deliver(deliveries)
        tokens = [delivery.lock_token for delivery in deliveries]
        self.host.submit(Settle(self.entity_no, SubQueue.ACTIVE, tokens, Disposition.COMPLETE))


def numbered(number: int) -> Envelope:
    body = b"\x00\x53\x75\xa0\xf0" + b"%04d" % number * 60
    return Envelope(body=body, size_bytes=len(body))


async def test_waiting_commands_are_bounded_and_run_in_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "WAITING_LIMIT", 3)
    replies: list[Reply] = []
    async with served(store) as (host, entity_no):
        for count in range(1, 5):  # of different sizes, so that the replies differ
            host.submit(Enqueue(entity_no, [message()] * count), replies.append)
        assert [r.refusal for r in replies if isinstance(r, Refused)] == [Refusal.BUSY]
        await until(lambda: len(replies) == 4)
        assert replies[1:] == [Enqueued([1]), Enqueued([2, 3]), Enqueued([4, 5, 6])]
        await host.stop()
        late = await host.call(Enqueue(entity_no, [message()]))
        assert isinstance(late, Refused)
        assert late.refusal is Refusal.NOT_APPLIED


async def test_two_reloads_reset_each_sink_once(store: Store, database: str) -> None:
    async with served(store) as (host, entity_no), connected(database) as other:
        first, second = Sink(), Sink()
        for life, sink in enumerate((first, second), 1):
            await add(host, entity_no, life, sink)
            await other.execute(CUT)
            await until(lambda life=life: host.reload_count == life)  # type: ignore[misc]
            await host.call(Tick())
        assert (first.resets, second.resets) == (1, 1)


async def test_deliveries_without_a_sink_go_to_another_consumer(store: Store) -> None:
    async with served(store) as (host, entity_no):
        gone, other = Sink(), Sink()
        await add(host, entity_no, 1, gone, limit=1)
        host.unregister_sink(1)
        await host.call(Enqueue(entity_no, [message()]))
        await add(host, entity_no, 2, other)
        await until(lambda: len(other.deliveries) == 1)
        assert gone.deliveries == []
        assert (other.deliveries[0].sequence, other.deliveries[0].delivery_count) == (1, 0)


async def test_a_backlog_beyond_the_budget_is_paged_and_stays_in_order(store: Store) -> None:
    budget = WindowBudget(8_192)
    async with served(store, budget=budget) as (host, entity_no):
        for number in range(1, 61):
            await host.call(Enqueue(entity_no, [numbered(number)]))
        assert budget.used_bytes <= budget.limit_bytes < 60 * 240
        seen: list[tuple[int, bytes]] = []
        while len(seen) < 60:
            peeked = await host.call(Peek(entity_no, SubQueue.ACTIVE, len(seen) + 1, 60, 1 << 20))
            assert isinstance(peeked, Peeked)
            assert peeked.messages
            seen += [(found.sequence, found.envelope.body) for found in peeked.messages]
        wanted = [(number, numbered(number).body) for number in range(1, 61)]
        assert seen == wanted
        worker = Worker(host, entity_no)
        await add(host, entity_no, 1, worker, limit=60)
        await until(lambda: len(worker.deliveries) == 60)
        assert [(d.sequence, d.envelope.body) for d in worker.deliveries] == wanted


async def test_a_stop_records_outstanding_deliveries(store: Store) -> None:
    async with served(store) as (host, entity_no):
        await host.call(Enqueue(entity_no, [message()]))
        sink = Sink()
        await add(host, entity_no, 1, sink)
        await until(lambda: len(sink.deliveries) == 1)
        assert sink.deliveries[0].delivery_count == 0
    async with served(store) as (host, entity_no):
        sink = Sink()
        await add(host, entity_no, 1, sink)
        await until(lambda: len(sink.deliveries) == 1)
        assert sink.deliveries[0].delivery_count == 1
