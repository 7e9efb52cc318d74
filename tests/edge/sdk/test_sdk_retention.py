"""A queue with a history of settled messages, with the unmodified azure-servicebus SDK (ADR 18).

Clients see no difference; the tables hold the messages until their time has passed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusSubQueue,
)

from postbus.broker.partition import host as host_module
from postbus.entity.outcomes import Settling
from tests.edge.bus_thread import BusThread
from tests.store.driving import connected, wait_until

pytestmark = pytest.mark.slow

HOUR_MS = 3_600_000
LONG_S = 10


def use(client: ServiceBusClient, queue: str) -> list[object]:
    """Let messages leave in every way; return the client's view."""
    seen: list[object] = []
    with client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage(f"m{number}") for number in range(6)])
        sender.send_messages(ServiceBusMessage(bytes(20_000), message_id="large"))
    with client.get_queue_receiver(queue) as receiver:
        batch: list[ServiceBusReceivedMessage] = []
        while len(batch) < 7:
            batch += receiver.receive_messages(7 - len(batch), max_wait_time=LONG_S)
        first, second, third, fourth, *rest = batch
        receiver.complete_message(first)
        receiver.dead_letter_message(second, reason="broken")
        receiver.defer_message(third)
        receiver.abandon_message(fourth)
        receiver.dead_letter_message(rest.pop(), reason="too large")
        for message in rest:
            receiver.complete_message(message)
        seen += [(str(peeked), peeked.delivery_count) for peeked in receiver.peek_messages(20)]
        [deferred] = receiver.receive_deferred_messages([third.sequence_number])
        receiver.complete_message(deferred)
    delete = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client.get_queue_receiver(queue, receive_mode=delete) as receiver:
        seen += [str(taken) for taken in receiver.receive_messages(1, max_wait_time=LONG_S)]
        assert receiver.peek_messages(20) == []
    dead_letters = ServiceBusSubQueue.DEAD_LETTER
    with client.get_queue_receiver(queue, sub_queue=dead_letters) as receiver:
        dead = receiver.peek_messages(20)
        seen += [(each.dead_letter_reason, len(b"".join(each.body))) for each in dead]
        [taken] = receiver.receive_messages(1, max_wait_time=LONG_S)
        receiver.complete_message(taken)
    return seen


async def kept(bus: BusThread, *queues: str) -> Counter[Settling]:
    """Return how many rows of queues are settled, by reason, in all partitions."""
    found = map(bus._directory.find, queues)
    entities = [entry.entity_no for entry in found if entry is not None]
    async with connected(bus._dsn) as look:
        rows = [
            row["how"]
            for partition in (0, 1)
            if await look.fetchval(f"select to_regclass('partition_{partition}.settled')")
            for row in await look.fetch(
                f"select how from partition_{partition}.settled where entity_no = any($1)", entities
            )
        ]
    return Counter(map(Settling, rows))


async def test_retention_is_invisible_to_clients_and_expired_rows_are_deleted(
    bus: BusThread, client: ServiceBusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "CLOCK_SAMPLE_S", 0.1)
    plain, queue = bus.queue(), bus.queue(historyRetention="PT1H")
    assert use(client, queue) == use(client, plain)
    counts = replace(bus.counts(queue), accessed_ms=0)
    assert counts == replace(bus.counts(plain), accessed_ms=0)
    expected = Counter({Settling.COMPLETED: 5, Settling.DEAD_LETTERED: 2, Settling.RECEIVED: 1})
    assert await kept(bus, queue, plain) == expected
    for name in (queue, plain):
        bus.reload(name)
        assert bus.counts(name).dead_letter == 1
        assert bus.counts(name).active == 0
    with client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
        [left] = receiver.peek_messages(20)
        assert left.dead_letter_reason == "too large"
        assert b"".join(left.body) == bytes(20_000)
    assert await kept(bus, queue, plain) == expected
    bus.advance(HOUR_MS + 1)

    async def is_empty() -> bool:
        return not await kept(bus, queue, plain)

    await wait_until(is_empty)
    with client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
        [left] = receiver.receive_messages(1, max_wait_time=LONG_S)
        assert b"".join(left.body) == bytes(20_000)
        receiver.complete_message(left)
    bus.change(queue)  # without a history settled messages are deleted at once

    await wait_until(is_empty)
