"""Partitioned entities of other tiers: limits of a premium namespace, and sixteen partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusMessage,
)
from azure.servicebus.exceptions import (
    MessageSizeExceededError,
    ServiceBusError,
)

from postbus.contract.entities import Sku
from postbus.process.embedded import EmbeddedPostgres
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import ACCEPTED, RawClient
from tests.edge.sdk.sdk_steps import (
    LONG_S,
    bodies_of,
    peek_all,
    send,
    send_each,
    start_wide,
    take,
    total,
)
from tests.edge.sdk.test_sdk_partitioned import keyed, place_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wide_premium(postgres_server: EmbeddedPostgres) -> Iterator[BusThread]:
    bus = start_wide(postgres_server, "edge_wide_premium", 2, Sku.PREMIUM)
    yield bus
    bus.stop()


@pytest.mark.behaviour("S144", "S212", "S213")
def test_messages_and_batches_of_a_partitioned_premium_namespace(wide_premium: BusThread) -> None:
    queue = wide_premium.queue(enable_partitioning=True)
    with wide_premium.client() as client, client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("x" * 1_000_000))
        with pytest.raises((MessageSizeExceededError, ServiceBusError, ValueError)):
            sender.send_messages(ServiceBusMessage("x" * 1_050_000))
        with pytest.raises((MessageSizeExceededError, ServiceBusError, ValueError)):
            sender.send_messages([ServiceBusMessage("x" * 350_000) for _ in range(3)])
    assert total(wide_premium, queue).active == 1
    with RawClient(wide_premium.port, RULES[0].name, RULES[0].keys.primary) as raw:
        raw.attach_sender(queue)
        big = keyed(b"x" * 1_100_000, "k")
        pieces = [big[start : start + 60_000] for start in range(0, len(big), 60_000)]
        raw.write(
            *(raw.transfer(0, piece, more=piece is not pieces[-1]) for piece in pieces),
        )
        assert not takes(raw, 0)
    assert total(wide_premium, queue).active == 1


def takes(raw: RawClient, delivery_id: int) -> bool:
    """Return whether the broker accepts a delivery; it may also end the link."""
    while True:
        found = raw.read()
        if found.code == 0x15 and found.fields[1] == delivery_id:
            return int(found.fields[4].descriptor) == ACCEPTED
        if found.code == 0x16:
            return False


@pytest.mark.behaviour("S178", "S188")
def test_sixteen_partitions(postgres_server: EmbeddedPostgres) -> None:
    bus = start_wide(postgres_server, "edge_sixteen", 16, Sku.STANDARD)
    try:
        plain = bus.queue(enable_partitioning=True)
        queue = bus.queue(enable_partitioning=True, requires_session=True)
        with bus.client() as client:
            send(client, plain, *(f"m{number}" for number in range(48)))
            places = Counter(place_of(each.sequence_number) for each in peek_all(client, plain))
            assert set(places) == set(range(16))
            assert sum(places.values()) == total(bus, plain).active == 48
            sessions = [f"s{number}" for number in range(40)]
            send_each(client, queue, {session: {"session_id": session} for session in sessions})
            assert sorted(client.list_queue_sessions(queue)) == sorted(sessions)
            assert bodies_of(take(client, queue, 1, session_id="s17")) == ["s17"]
            with client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION) as receiver:
                assert receiver.receive_messages(1, max_wait_time=LONG_S)
            assert total(bus, queue).active == 39
    finally:
        bus.stop()
