"""Duplicate detection with the unmodified SDK: exact within the window."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import MessageNotFoundError, ServiceBusError

from postbus.message.codec import Described, Ulong, encode_value
from tests.edge.amqp.test_transactions import TransactionClient, accepts
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import ACCEPTED, RawClient, described, message
from tests.edge.sdk.sdk_steps import (
    bodies_of,
    dead_letter,
    eventually,
    is_empty,
    named,
    path_of,
    peek_all,
    reload_all,
    send,
    send_together,
    take,
    total,
)

pytestmark = pytest.mark.slow

WINDOW_MS = 20_000


@pytest.fixture(params=[False, True], ids=["plain", "partitioned"])
def queue(bus: BusThread, request: pytest.FixtureRequest) -> str:
    """A queue that remembers ids for 20 s."""
    return detecting(bus, enable_partitioning=request.param)


def detecting(bus: BusThread, **properties: object) -> str:
    return bus.queue(
        requires_duplicate_detection=True,
        **{"duplicate_detection_history_time_window_ms": WINDOW_MS, **properties},
    )


def count(bus: BusThread, queue: str) -> int:
    return total(bus, queue).active


def with_id(message_id: object, body: bytes = b"m") -> bytes:
    """Encode a message with an id of an unusual AMQP type."""
    return encode_value(described(0x73, message_id)) + encode_value(Described(Ulong(0x75), body))


@pytest.mark.behaviour("S174", "S231")
def test_a_copy_is_accepted_and_dropped(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "first", "other")
    send(client, queue, "copy", message_id="first")
    with bus.client() as elsewhere:
        send(elsewhere, queue, "copy", message_id="first")
    assert count(bus, queue) == 2
    assert sorted(bodies_of(take(client, queue, 2))) == ["first", "other"]


def test_without_detection_copies_are_kept(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue()
    send(client, queue, "a", "b", message_id="same")
    assert count(bus, queue) == 2


def test_the_window_counts_from_the_first_copy(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender:

        def send_copy() -> int:
            sender.send_messages(ServiceBusMessage("m", message_id="id"))
            return count(bus, queue)

        assert send_copy() == 1
        bus.advance(WINDOW_MS - 5_000)
        assert send_copy() == 1
        bus.advance(5_100)  # the copy in between does not make the window longer
        assert send_copy() == 2
        bus.advance(WINDOW_MS - 5_000)
        assert send_copy() == 2


def test_a_window_of_seven_days(bus: BusThread, client: ServiceBusClient) -> None:
    day_ms = 86_400_000
    queue = detecting(bus, duplicate_detection_history_time_window_ms=7 * day_ms)
    send(client, queue, "id")
    bus.advance(7 * day_ms - 60_000)
    send(client, queue, "id")
    assert count(bus, queue) == 1
    bus.reload(queue)
    send(client, queue, "id")
    assert count(bus, queue) == 1
    bus.advance(60_100)
    send(client, queue, "id")
    assert count(bus, queue) == 2


def test_a_changed_window_counts_at_once(bus: BusThread, client: ServiceBusClient) -> None:
    queue = detecting(bus, duplicate_detection_history_time_window_ms=600_000)
    send(client, queue, "id")
    bus.advance(30_000)
    bus.change(
        queue,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window_ms=WINDOW_MS,
    )
    send(client, queue, "id")
    assert count(bus, queue) == 2


@pytest.mark.parametrize("fate", ["completed", "dead-lettered", "expired"])
def test_an_id_is_remembered_after_its_message_is_removed(
    bus: BusThread, client: ServiceBusClient, fate: str
) -> None:
    queue = detecting(bus)
    send(client, queue, "id", time_to_live=timedelta(seconds=5))
    match fate:
        case "completed":
            take(client, queue, 1)
        case "dead-lettered":
            dead_letter(client, queue, 1)
        case "expired":
            bus.advance(6_000)
            with client.get_queue_receiver(queue) as receiver:
                assert receiver.receive_messages(1, max_wait_time=0.5) == []
    send(client, queue, "id")
    assert count(bus, queue) == 0


# --- batches --------------------------------------------------------------------------------------


def test_copies_within_a_batch_are_dropped(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender:
        batch = sender.create_message_batch()
        for message_id, body in [("a", "a"), ("a", "copy"), ("b", "b"), ("a", "copy")]:
            batch.add_message(ServiceBusMessage(body, message_id=message_id, partition_key="k"))
        sender.send_messages(batch)
        sender.send_messages(batch)
    assert sorted(bodies_of(peek_all(client, queue))) == ["a", "b"]


def test_a_batch_of_known_and_new_ids(bus: BusThread, client: ServiceBusClient) -> None:
    queue = detecting(bus)
    send_together(client, queue, ["1", "2", "3"])
    send_together(client, queue, ["2", "4", "3", "5", "4"])
    assert bodies_of(take(client, queue, 5)) == ["1", "2", "3", "4", "5"]
    assert is_empty(bus, queue)


def test_thousands_of_ids_survive_a_restart(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    ids = [f"id-{number}" for number in range(3_000)]
    for round_no in range(3):
        with client.get_queue_sender(queue) as sender:
            for first in range(0, len(ids), 500):
                sender.send_messages(
                    [
                        ServiceBusMessage("m", message_id=each, partition_key=f"k{first}")
                        for each in ids[first : first + 500]
                    ]
                )
        assert count(bus, queue) == len(ids), round_no
        reload_all(bus)
    send(client, queue, "new")
    assert count(bus, queue) == len(ids) + 1


# --- restart --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_spread", [False, True])
def test_ids_and_their_times_survive_a_restart(
    bus: BusThread, client: ServiceBusClient, is_spread: bool
) -> None:
    queue = detecting(
        bus, enable_partitioning=is_spread, duplicate_detection_history_time_window_ms=600_000
    )
    send(client, queue, "early")
    bus.advance(300_000)
    send(client, queue, "late")
    reload_all(bus)
    send(client, queue, "early", "late")
    assert count(bus, queue) == 2
    bus.advance(301_000)
    send(client, queue, "early", "late")
    assert count(bus, queue) == 3
    reload_all(bus)
    send(client, queue, "early", "late")
    assert count(bus, queue) == 3


# --- scheduled ------------------------------------------------------------------------------------


def test_an_id_counts_when_its_message_is_scheduled(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    due = bus.now() + timedelta(minutes=5)
    with client.get_queue_sender(queue) as sender:
        (number,) = sender.schedule_messages(ServiceBusMessage("s", message_id="id"), due)
        (nothing,) = sender.schedule_messages(ServiceBusMessage("copy", message_id="id"), due)
        assert nothing != number
        assert nothing != 0
        sender.send_messages(ServiceBusMessage("copy", message_id="id"))
        assert (total(bus, queue).active, total(bus, queue).scheduled) == (0, 1)
        with pytest.raises((MessageNotFoundError, ServiceBusError)):
            sender.cancel_scheduled_messages(nothing)
        sender.cancel_scheduled_messages(number)
        sender.send_messages(ServiceBusMessage("copy", message_id="id"))
    assert is_empty(bus, queue)


def test_a_scheduled_message_is_no_duplicate_of_itself_when_it_is_due(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.schedule_messages(
            ServiceBusMessage("s", message_id="id"), bus.now() + timedelta(seconds=10)
        )
    bus.advance(11_000)
    assert bodies_of(take(client, queue, 1)) == ["s"]
    bus.advance(9_500)  # the window began when it was scheduled
    send(client, queue, "again", message_id="id")
    assert count(bus, queue) == 1


# --- message ids ----------------------------------------------------------------------------------


@pytest.fixture
def raw(bus: BusThread) -> RawClient:
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as opened:
        yield opened


def test_ids_of_all_types_are_compared_as_text(
    bus: BusThread, raw: RawClient, client: ServiceBusClient
) -> None:
    queue = detecting(bus)
    one = uuid.uuid4()
    raw.attach_sender(queue)
    ids: list[object] = [one, str(one), Ulong(7), "7", "A", "a", "\0", "ä", "a\u0308"]
    for number, message_id in enumerate(ids):
        raw.write(raw.transfer(number, with_id(message_id, b"%d" % number)))
    assert set(raw.dispositions(len(ids)).values()) == {ACCEPTED}
    kept = bodies_of(peek_all(client, queue))
    assert kept == ["0", "2", "4", "5", "6", "7", "8"]


def test_messages_without_id_are_never_duplicates(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    raw.attach_sender(queue)
    for number in range(5):
        raw.write(raw.transfer(number, message(b"m")))
    assert set(raw.dispositions(5).values()) == {ACCEPTED}
    assert count(bus, queue) == 5


def test_a_refused_message_leaves_no_id_behind(bus: BusThread, client: ServiceBusClient) -> None:
    queue = detecting(bus, requires_session=True)
    with pytest.raises(ServiceBusError):
        send(client, queue, "id")
    send(client, queue, "id", session_id="s")
    send(client, queue, "copy", message_id="id", session_id="s")
    send(client, queue, "copy", message_id="id", session_id="other")
    assert bodies_of(take(client, queue, 1, session_id="s")) == ["id"]
    assert is_empty(bus, queue)


def test_a_pre_settled_copy_is_dropped_too(bus: BusThread, raw: RawClient, queue: str) -> None:
    raw.attach_sender(queue)
    raw.write(
        raw.transfer(0, with_id("id"), settled=True),
        raw.transfer(1, with_id("id"), settled=True),
        raw.transfer(2, with_id("other")),
    )
    assert set(raw.dispositions(1)) == {2}
    eventually(bus, lambda: count(bus, queue) == 2)


def test_pipelined_copies_in_one_segment(bus: BusThread, raw: RawClient, queue: str) -> None:
    raw.attach_sender(queue)
    raw.write(*(raw.transfer(number, with_id(f"id{number % 10}")) for number in range(200)))
    assert set(raw.dispositions(200).values()) == {ACCEPTED}
    assert count(bus, queue) == 10


# --- transactions ---------------------------------------------------------------------------------


def test_ids_count_when_the_transaction_commits(bus: BusThread) -> None:
    queue = detecting(bus)
    with TransactionClient(bus) as raw:
        raw.attach_sender(queue)
        rolled_back = raw.declare()
        assert accepts(raw.send_in(rolled_back, with_id("id")), rolled_back)
        raw.discharge(rolled_back, fail=True)
        committed = raw.declare()
        for message_id in ("id", "id", "other"):
            assert accepts(raw.send_in(committed, with_id(message_id)), committed)
        assert int(raw.discharge(committed).descriptor) == ACCEPTED
        assert count(bus, queue) == 2
        third = raw.declare()
        assert accepts(raw.send_in(third, with_id("id")), third)
        assert int(raw.discharge(third).descriptor) == ACCEPTED
        assert count(bus, queue) == 2
        bus.reload(queue)
        raw.write(raw.transfer(raw.next_id(), with_id("other")))
        assert set(raw.dispositions(1).values()) == {ACCEPTED}
    assert count(bus, queue) == 2


def test_a_discharge_after_the_id_came_by_another_way_drops_the_copy(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = detecting(bus)
    with TransactionClient(bus) as raw:
        raw.attach_sender(queue)
        transaction = raw.declare()
        raw.send_in(transaction, with_id("id", b"late"))
        send(client, queue, "first", message_id="id")
        assert int(raw.discharge(transaction).descriptor) == ACCEPTED
    assert bodies_of(take(client, queue, 1)) == ["first"]
    assert is_empty(bus, queue)


# --- topics and forwarding ------------------------------------------------------------------------


@pytest.mark.parametrize("is_spread", [False, True])
def test_a_topic_drops_copies_before_it_fans_out(
    bus: BusThread, client: ServiceBusClient, is_spread: bool
) -> None:
    topic = bus.topic(
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window_ms=WINDOW_MS,
        enable_partitioning=is_spread,
    )
    for name in ("one", "two"):
        bus.subscription(topic, name)
    send(client, topic, "id", "id", "other", "id")
    for name in ("one", "two"):
        assert count(bus, path_of(topic, name)) == 2
    reload_all(bus)
    send(client, topic, "id")
    assert sorted(bodies_of(take(client, path_of(topic, "one"), 2))) == ["id", "other"]
    bus.subscription(topic, "three")
    send(client, topic, "id")
    assert is_empty(bus, path_of(topic, "three"))
    bus.advance(WINDOW_MS + 100)
    send(client, topic, "id")
    assert count(bus, path_of(topic, "three")) == 1


def test_duplicates_forwarded_by_several_queues_are_dropped_at_the_target(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target = detecting(bus)
    sources = [bus.queue(named(bus, number), forward_to=target) for number in range(2)]
    for source in sources:
        send_together(client, source, ["a", "b", f"last of {source}"])
    eventually(bus, lambda: count(bus, target) == 4)
    found = sorted(bodies_of(take(client, target, 4)))
    assert found == sorted(["a", "b", *(f"last of {source}" for source in sources)])
    for source in sources:
        assert total(bus, source).transfer_dead_letter == 0
