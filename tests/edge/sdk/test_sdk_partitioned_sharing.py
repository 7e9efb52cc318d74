"""Partitioned queues with the SDK: keys of messages, and sharing between receivers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from azure.servicebus import ServiceBusClient

from postbus.broker.partition.host import Host
from postbus.contract.entities import Sku
from postbus.entity.commands import Command, SetDemand
from postbus.process.embedded import EmbeddedPostgres
from tests.edge.bus_thread import BusThread
from tests.edge.sdk.sdk_steps import (
    SOON_S,
    bodies_of,
    peek_all,
    receive,
    send,
    send_each,
    start_wide,
    take,
)
from tests.edge.sdk.test_sdk_partitioned import place_of

pytestmark = pytest.mark.slow

PARTITIONS = 4
LOCK_MS = 30_000


@pytest.fixture(scope="module")
def running_bus(postgres_server: EmbeddedPostgres) -> Iterator[BusThread]:
    bus = start_wide(postgres_server, "edge_sharing", PARTITIONS, Sku.STANDARD)
    yield bus
    bus.stop()


@pytest.fixture
def queue(bus: BusThread) -> str:
    return bus.queue(enable_partitioning=True, lock_duration_ms=LOCK_MS)


def places(client: ServiceBusClient, queue: str) -> dict[str, int]:
    """Return body -> partition of the messages in a queue."""
    return {str(each): place_of(each.sequence_number) for each in peek_all(client, queue)}


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.behaviour("S173", "S175")
def test_a_message_id_is_the_key_where_duplicates_are_detected_unless_there_is_another(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(enable_partitioning=True, requires_duplicate_detection=True)
    keys = [f"k{n}" for n in range(12)]
    messages = {f"id/{key}": {"message_id": key} for key in keys}
    messages |= {f"key/{key}": {"message_id": f"a{key}", "partition_key": key} for key in keys}
    messages |= {f"session/{key}": {"message_id": f"b{key}", "session_id": key} for key in keys}
    send_each(client, queue, messages)
    found = places(client, queue)
    for key in keys:
        assert found[f"id/{key}"] == found[f"key/{key}"] == found[f"session/{key}"]
    assert set(found.values()) == set(range(PARTITIONS))


@pytest.mark.behaviour("S176")
def test_a_message_id_places_nothing_where_duplicates_are_not_detected(
    client: ServiceBusClient, queue: str
) -> None:
    send_each(client, queue, {f"{n}": {"message_id": "same"} for n in range(PARTITIONS)})
    assert sorted(places(client, queue).values()) == list(range(PARTITIONS))


# --- receivers ------------------------------------------------------------------------------------


def note_demands(bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the partitions that receivers ask, which grows."""
    noted: list[int] = []

    def noting(host: Host) -> Callable[..., None]:
        submit = host.submit

        def note(command: Command, *more: object) -> None:
            if isinstance(command, SetDemand) and command.limit:
                noted.append(host.partition_id)
            submit(command, *more)

        return note

    for host in bus._hosts:
        monkeypatch.setattr(host, "submit", noting(host))
    return noted


@pytest.mark.behaviour("S157", "S207", "S224")
def test_the_next_receive_asks_a_partition_that_is_known_to_have_more(
    bus: BusThread, client: ServiceBusClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, queue, *(str(n) for n in range(2 * PARTITIONS)))
    with client.get_queue_receiver(queue) as receiver:
        receive(receiver, 1)
        noted = note_demands(bus, monkeypatch)
        receive(receiver, 1)
        assert len(noted) == 1


@pytest.mark.behaviour("S158")
def test_messages_fetched_by_a_closed_client_are_free_when_its_locks_end(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    sent = [str(n) for n in range(2 * PARTITIONS)]
    send(client, queue, *sent)
    first = bodies_of(take(client, queue, 1, prefetch_count=PARTITIONS))
    bus.advance(LOCK_MS + 1_000)
    assert sorted(first + bodies_of(take(client, queue, 2 * PARTITIONS - 1))) == sent


@pytest.mark.behaviour("S209", "S210")
def test_messages_locked_by_another_client_come_when_its_locks_end(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    sent = [str(n) for n in range(2 * PARTITIONS)]
    send(client, queue, *sent)
    with client.get_queue_receiver(queue) as holder, client.get_queue_receiver(queue) as other:
        receive(holder, 2 * PARTITIONS)
        assert other.receive_messages(1, max_wait_time=SOON_S) == []
        bus.advance(LOCK_MS + 1_000)
        assert sorted(bodies_of(receive(other, 2 * PARTITIONS))) == sent


@pytest.mark.behaviour("S164")
def test_a_page_of_a_browser_ends_with_its_partition(client: ServiceBusClient, queue: str) -> None:
    sent = [str(n) for n in range(3 * PARTITIONS)]
    send_each(client, queue, {body: {} for body in sent})
    with client.get_queue_receiver(queue) as receiver:
        pages = []
        while page := receiver.peek_messages(2):
            pages.append(bodies_of(page))
    assert sorted(itertools.chain(*pages)) == sorted(sent)
    assert {len(page) for page in pages[:-1]} == {1, 2}
