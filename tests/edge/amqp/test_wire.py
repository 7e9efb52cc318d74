"""The broker at its socket: frames in, frames out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from postbus.edge.amqp import sender_links
from postbus.message.codec import Described, Symbol, Uint, Ulong, decode_value, encode_value
from postbus.message.sections import BATCH_FORMAT, slice_message
from tests.edge.bus_thread import RULES, BusThread, sas_token
from tests.edge.raw_client import (
    ACCEPTED,
    ATTACH,
    BEGIN,
    CLOSE,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    MODIFIED,
    OPEN,
    REJECTED,
    RELEASED,
    TRANSFER,
    Frame,
    RawClient,
    described,
    frame,
    message,
)

ROOT = RULES[0]


@pytest.fixture
def raw(bus: BusThread) -> Iterator[RawClient]:
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        yield client


def error_of(sent: Frame, field: int) -> tuple[str, str]:
    """Return condition and description of a frame's error; it has three fields."""
    fields = sent.fields[field].value
    assert len(fields) == 3
    return str(fields[0]), str(fields[1])


def refusal(raw: RawClient, attached: Frame, terminus: int) -> tuple[str, str]:
    """Check that an attach was answered as clients expect of a refusal; return its error."""
    assert attached.fields[terminus] is None
    detached = raw.expect(DETACH)
    assert detached.fields[1] is True
    return error_of(detached, 2)


# --- set-up -------------------------------------------------------------------------------------


def test_open_and_begin_have_the_fields_that_clients_use(raw: RawClient) -> None:
    assert [str(name) for name in raw.mechanisms] == ["MSSBCBS", "PLAIN", "ANONYMOUS", "EXTERNAL"]
    container_id, _, max_frame_bytes, channel_max, idle_ms = raw.open.fields[:5]
    assert container_id
    assert max_frame_bytes >= 65_536
    assert channel_max > 0
    assert 120_000 <= idle_ms <= 240_000
    remote_channel, next_outgoing, window, _, handle_max = raw.begin.fields[:5]
    assert remote_channel == 0
    assert next_outgoing >= 0x4000_0000
    assert window >= 1_000
    assert handle_max >= 255


@pytest.mark.slow
@pytest.mark.parametrize("key", ["wrong", "", "s3nd="])
def test_wrong_password_is_refused_and_the_socket_closed(bus: BusThread, key: str) -> None:
    with RawClient(bus.port, ROOT.name, key) as client:
        assert client.outcome == 1
        assert client.is_hung_up()


def test_pipelined_set_up_is_understood(bus: BusThread, queue: str) -> None:
    """As the Python SDK does: headers, open, begin and attach without waiting."""
    source, target = described(0x28, "here"), described(0x29, queue)
    with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as plain:
        client = RawClient.__new__(RawClient)
        client.socket, client._rest = plain, b""
        password = f"\0{ROOT.name}\0{ROOT.keys.primary}".encode()
        client.write(
            b"AMQP\x03\x01\x00\x00",
            frame(0x41, Symbol("PLAIN"), password, kind=1),
            b"AMQP\x00\x01\x00\x00",
            frame(OPEN, "raw", "localhost"),
            frame(BEGIN, None, Uint(0), Uint(5_000), Uint(5_000)),
            frame(ATTACH, "s", Uint(0), False, None, None, source, target, None, None, Uint(0)),
        )
        client._exactly(8)
        client.read()
        client.read()
        client._exactly(8)
        assert [client.expect(code).code for code in (OPEN, BEGIN, ATTACH)] == [OPEN, BEGIN, ATTACH]
        client.write(client.transfer(0, message(b"x")))
        assert client.dispositions(1) == {0: ACCEPTED}


def test_garbage_closes_the_connection(bus: BusThread) -> None:
    with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as plain:
        plain.sendall(b"hello broker\r\n\r\n")
        received = b""
        while data := plain.recv(4_096):
            received += data
    assert received in (b"", b"AMQP\x03\x01\x00\x00")  # our protocol header, or nothing


# --- sending ------------------------------------------------------------------------------------


@pytest.mark.behaviour("S11", "S12", "S15")
def test_pipelined_transfers_are_each_settled(bus: BusThread, raw: RawClient, queue: str) -> None:
    attached = raw.attach_sender(queue)
    assert attached.fields[6].value[0] == queue
    assert attached.fields[10] == 256 * 1024
    flow = raw.read()
    assert flow.code == FLOW
    assert flow.fields[6] >= 1_000
    for start in range(0, 500, 100):
        raw.write(*[raw.transfer(start + n, message(b"x" * n)) for n in range(100)])
    assert raw.dispositions(500) == dict.fromkeys(range(500), ACCEPTED)
    assert bus.counts(queue).active == 500


FIRST_IDS = pytest.mark.parametrize("first", [0, 70_000])
"""Transfers with ids above 255, of four octets, are read as runs."""


@pytest.mark.behaviour("S12", "S16")
@FIRST_IDS
def test_one_bad_transfer_among_many_fails_alone(
    bus: BusThread, raw: RawClient, queue: str, first: int
) -> None:
    raw.attach_sender(queue)
    bad = {
        first + 17: b"\xffgarbage",
        first + 50: message(b"x" * 300_000),
        first + 60: b"\x00\x53\x70",
    }
    for number in range(first, first + 100):
        payload = bad.get(number, message(b"good"))
        pieces = [payload[at : at + 60_000] for at in range(0, len(payload), 60_000)]
        for piece in pieces[:-1]:
            raw.write(raw.transfer(number, piece, more=True))
        raw.write(raw.transfer(number, pieces[-1]))
    outcomes = raw.dispositions(100)
    assert {number for number, code in outcomes.items() if code == REJECTED} == set(bad)
    assert set(outcomes.values()) == {ACCEPTED, REJECTED}
    assert bus.counts(queue).active == 97


def test_deliveries_above_the_limit_of_unanswered_ones_are_refused(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = 70_000
    monkeypatch.setattr(sender_links, "MAX_UNANSWERED", 1)
    raw.attach_sender(queue)
    raw.write(raw.transfer(first, message(b"taken")))
    assert raw.dispositions(1) == {first: ACCEPTED}
    batch = encode_value(Described(Ulong(0x75), message(b"taken, and not answered yet")))
    raw.write(
        raw.transfer(first + 1, batch, message_format=BATCH_FORMAT),
        *[raw.transfer(each, message(b"refused")) for each in range(first + 2, first + 10)],
    )
    refused = dict.fromkeys(range(first + 2, first + 10), REJECTED)
    assert raw.dispositions(9) == refused | {first + 1: ACCEPTED}
    raw.write(raw.transfer(first + 10, message(b"taken")))
    assert raw.dispositions(1) == {first + 10: ACCEPTED}
    assert bus.counts(queue).active == 3


@pytest.mark.behaviour("S19")
def test_transfers_in_one_segment_and_in_single_bytes_are_all_read(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    raw.attach_sender(queue)
    raw.write(*[raw.transfer(number, message(b"small")) for number in range(50)])
    split = raw.transfer(50, message(b"slow"))
    raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(len(split)):
        raw.write(split[at : at + 1])
    assert len(raw.dispositions(51)) == 51
    assert bus.counts(queue).active == 51


@pytest.mark.behaviour("S22", "S23", "S24")
@FIRST_IDS
def test_pre_settled_transfers_get_no_outcome(
    bus: BusThread, raw: RawClient, queue: str, first: int
) -> None:
    raw.attach_sender(queue)
    raw.write(
        raw.transfer(first, message(b"one"), settled=True),
        raw.transfer(first + 1, message(b"two"), settled=True),
        raw.transfer(first + 2, message(b"x" * 50), settled=True),
        raw.transfer(first + 3, message(b"answered")),
    )
    assert raw.dispositions(1) == {first + 3: ACCEPTED}
    raw.write(
        raw.transfer(first + 4, message(b"one"), settled=True),
        raw.transfer(first + 5, b"\xffrefused", settled=True),
        raw.transfer(first + 6, message(b"answered")),
    )
    assert raw.dispositions(1) == {first + 6: ACCEPTED}
    assert bus.counts(queue).active == 6


def in_parts(raw: RawClient, delivery_id: int, payload: bytes, *, is_settled: bool) -> bytes:
    """Return the transfers of a long delivery; only the first part has the settled flag."""
    step = 30_000
    return b"".join(
        raw.transfer(
            delivery_id,
            payload[start : start + step],
            settled=is_settled and not start,
            more=start + step < len(payload),
        )
        for start in range(0, len(payload), step)
    )


@pytest.mark.behaviour("S24")
@pytest.mark.parametrize("size_bytes", [257 * 1024, 2 << 20])
def test_pre_settled_transfer_that_is_too_large_gets_no_outcome_and_the_link_goes_on(
    bus: BusThread, raw: RawClient, queue: str, size_bytes: int
) -> None:
    raw.attach_sender(queue)
    raw.write(in_parts(raw, 0, message(b"x" * size_bytes), is_settled=True))
    raw.write(raw.transfer(1, message(b"after")))
    assert raw.dispositions(1) == {1: ACCEPTED}
    assert bus.counts(queue).active == 1


@pytest.mark.behaviour("S22", "S23")
def test_pre_settled_batches_and_long_messages_can_be_received(raw: RawClient, queue: str) -> None:
    raw.attach_sender(queue)
    members = [encode_value(Described(Ulong(0x75), message(body))) for body in (b"one", b"two")]
    raw.write(
        raw.transfer(0, b"".join(members), settled=True, message_format=BATCH_FORMAT),
        in_parts(raw, 1, message(b"long" * 20_000), is_settled=True),
        raw.transfer(2, message(b"answered")),
    )
    assert raw.dispositions(1) == {2: ACCEPTED}
    raw.attach_receiver(queue, mode=1)
    raw.write(raw.flow(4))
    ends: list[bytes] = []
    while len(ends) < 4:
        found = raw.expect(TRANSFER)
        if not found.fields[5]:
            ends.append(found.payload[-3:])
    assert ends == [b"one", b"two", b"ong", b"red"]


def test_batch_is_one_delivery_and_atomic(bus: BusThread, raw: RawClient, queue: str) -> None:
    raw.attach_sender(queue)

    def batch(*members: bytes) -> bytes:
        return b"".join(encode_value(Described(Ulong(0x75), member)) for member in members)

    good = batch(message(b"one", "1"), message(b"two", "2"))
    bad = batch(message(b"three", "3"), message(b"four", "i" * 129))
    raw.write(raw.transfer(0, good, message_format=BATCH_FORMAT))
    raw.write(raw.transfer(1, bad, message_format=BATCH_FORMAT))
    raw.write(raw.transfer(2, b"\x00\x53\x75\xa0\x01x", message_format=BATCH_FORMAT))
    assert raw.dispositions(3) == {0: ACCEPTED, 1: REJECTED, 2: REJECTED}
    assert bus.counts(queue).active == 2


@pytest.mark.behaviour("S14")
def test_two_queues_on_one_connection_do_not_wait_for_each_other(
    bus: BusThread, raw: RawClient
) -> None:
    one, two = bus.queue(), bus.queue()
    raw.attach_sender(one, 0)
    raw.attach_sender(two, 1)
    frames = [raw.transfer(n, message(b"x"), handle=n % 2) for n in range(40)]
    raw.write(*frames)
    assert len(raw.dispositions(40)) == 40
    assert bus.counts(one).active == bus.counts(two).active == 20


@pytest.mark.behaviour("S20")
def test_ten_unsettled_sends_at_a_time_are_enough(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    raw.attach_sender(queue)
    for start in range(0, 100, 10):
        raw.write(*[raw.transfer(start + n, message(b"x")) for n in range(10)])
        assert len(raw.dispositions(10)) == 10
    assert bus.counts(queue).active == 100


def test_credit_is_renewed_for_ever(bus: BusThread, raw: RawClient, queue: str) -> None:
    raw.attach_sender(queue)
    credit = int(raw.read().fields[6])
    sent = 0
    for _ in range(6):
        raw.write(*[raw.transfer(sent + n, message(b"x")) for n in range(credit // 2)])
        sent += credit // 2
        settled, renewed = 0, False
        while settled < credit // 2 or not renewed:
            found = raw.read()
            if found.code == FLOW:
                renewed = renewed or found.fields[6] >= credit // 2
            else:
                settled += int(found.fields[2]) - int(found.fields[1]) + 1
    assert bus.counts(queue).active == sent > credit


# --- receiving ----------------------------------------------------------------------------------


def fill(raw: RawClient, queue: str, count: int, handle: int = 0) -> None:
    raw.attach_sender(queue, handle)
    raw.write(*[raw.transfer(n, message(b"x", f"id-{n}"), handle=handle) for n in range(count)])
    raw.dispositions(count)


def deliveries(raw: RawClient, count: int) -> list[Frame]:
    return [raw.expect(TRANSFER) for _ in range(count)]


@pytest.mark.behaviour("S48", "S49")
def test_each_settlement_is_answered_with_its_own_kind(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    fill(raw, queue, 5)
    raw.attach_receiver(queue)
    raw.write(raw.flow(5))
    found = deliveries(raw, 5)
    ids = [int(each.fields[1]) for each in found]
    assert ids == list(range(ids[0], ids[0] + 5))
    assert {len(each.fields[2]) for each in found} == {16}
    assert {each.fields[3] for each in found} == {0}
    info = {Symbol("DeadLetterReason"): "r", Symbol("own"): "p"}
    error = described(0x1D, Symbol("com.microsoft:dead-letter"), None, info)
    states = [
        described(ACCEPTED),
        described(RELEASED),
        described(MODIFIED, None, False),
        described(MODIFIED, None, True, {Symbol("changed"): 7}),
        described(REJECTED, error),
    ]
    raw.write(
        *[
            frame(DISPOSITION, True, Uint(each), None, False, state)
            for each, state in zip(ids, states, strict=True)
        ]
    )
    answers = {}
    while len(answers) < 5:
        fields = raw.expect(DISPOSITION).fields
        assert fields[0] is False
        assert fields[3] is True
        answers[int(fields[1])] = fields[4]
    assert [int(answers[each].descriptor) for each in ids] == [
        ACCEPTED, RELEASED, MODIFIED, MODIFIED, REJECTED,
    ]  # fmt: skip
    assert answers[ids[4]].value in ([], [None])
    counts = bus.counts(queue)
    assert (counts.active, counts.dead_letter) == (3, 1)


@pytest.mark.behaviour("S49")
def test_of_settlements_in_one_frame_the_lost_one_alone_is_refused(
    bus: BusThread, raw: RawClient
) -> None:
    queue = bus.queue()
    fill(raw, queue, 3)
    raw.attach_receiver(queue)
    ids: list[int] = []
    for count, lock_ms in enumerate((60_000, 10_000, 60_000)):
        bus.change(queue, lock_duration_ms=lock_ms)
        raw.write(raw.flow(1, count=count))
        ids.append(int(raw.expect(TRANSFER).fields[1]))
    bus.advance(10_001)
    raw.write(frame(DISPOSITION, True, Uint(ids[0]), Uint(ids[2]), False, described(ACCEPTED)))
    assert raw.dispositions(3) == {ids[0]: ACCEPTED, ids[1]: REJECTED, ids[2]: ACCEPTED}
    assert bus.counts(queue).active == 1


def test_dead_lettering_without_an_error_is_accepted(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    fill(raw, queue, 1)
    raw.attach_receiver(queue)
    raw.write(raw.flow(1))
    (delivery,) = deliveries(raw, 1)
    raw.write(frame(DISPOSITION, True, delivery.fields[1], None, False, described(REJECTED)))
    assert int(raw.expect(DISPOSITION).fields[4].descriptor) == REJECTED
    assert bus.counts(queue).dead_letter == 1


def test_settled_disposition_gets_no_answer(bus: BusThread, raw: RawClient, queue: str) -> None:
    fill(raw, queue, 2)
    raw.attach_receiver(queue)
    raw.write(raw.flow(2))
    first, second = deliveries(raw, 2)
    raw.write(
        frame(DISPOSITION, True, first.fields[1], None, True, described(ACCEPTED)),
        frame(DISPOSITION, True, second.fields[1], None, False, described(ACCEPTED)),
    )
    assert raw.expect(DISPOSITION).fields[1] == second.fields[1]
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S59", "S60")
def test_deliveries_of_a_broken_connection_cannot_be_settled_on_a_new_one(
    bus: BusThread, raw: RawClient
) -> None:
    queue = bus.queue(lock_duration_ms=30_000)
    fill(raw, queue, 1)
    raw.attach_receiver(queue)
    raw.write(raw.flow(1))
    (delivery,) = deliveries(raw, 1)
    raw.socket.close()
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as fresh:
        fresh.attach_receiver(queue)
        fresh.write(frame(DISPOSITION, True, delivery.fields[1], None, False, described(ACCEPTED)))
        state = fresh.expect(DISPOSITION).fields[4]
        assert int(state.descriptor) == REJECTED
        assert str(state.value[0].value[0]) == "com.microsoft:message-lock-lost"
        bus.advance(30_001)
        fresh.write(fresh.flow(1))
        (again,) = deliveries(fresh, 1)
        assert slice_message(again.payload).message_id == encode_value("id-0")


@pytest.mark.behaviour("S26")
def test_receive_and_delete_loses_messages_written_to_a_broken_connection(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    fill(raw, queue, 3)
    raw.attach_receiver(queue, mode=1)
    raw.write(raw.flow(2))
    found = deliveries(raw, 2)
    assert {each.fields[4] for each in found} == {True}
    raw.socket.close()
    assert bus.counts(queue).active == 1


def test_credit_right_behind_the_attach_counts(raw: RawClient, queue: str) -> None:
    """As Qpid Proton does: attach and flow in one segment, before the attach is answered."""
    raw.attach_sender(queue)
    raw.write(raw.transfer(0, message(b"x")))
    assert raw.dispositions(1) == {0: ACCEPTED}
    source, target = described(0x28, queue), described(0x29, "here")
    raw.write(frame(ATTACH, "r", Uint(1), True, None, None, source, target), raw.flow(5))
    raw.expect(ATTACH)
    assert raw.expect(TRANSFER).payload.endswith(b"x")


def test_drain_of_an_empty_queue_is_answered_at_once(raw: RawClient, queue: str) -> None:
    raw.attach_receiver(queue)
    raw.write(raw.flow(10), raw.flow(10, drain=True))
    flow = raw.read()
    assert flow.code == FLOW
    assert (flow.fields[4], flow.fields[5], flow.fields[6], flow.fields[8]) == (0, 10, 0, True)
    raw.write(raw.flow(0, count=10, drain=True))
    assert raw.read().fields[5] == 10


def test_drain_delivers_available_messages_first(raw: RawClient, queue: str) -> None:
    fill(raw, queue, 30)
    raw.attach_receiver(queue)
    raw.write(raw.flow(100, drain=True))
    for _ in range(30):
        assert raw.read().code == TRANSFER
    flow = raw.read()
    assert (flow.fields[5], flow.fields[6], flow.fields[8]) == (100, 0, True)


def test_no_more_than_credit_is_sent(bus: BusThread, raw: RawClient, queue: str) -> None:
    fill(raw, queue, 10)
    raw.attach_receiver(queue)
    raw.write(raw.flow(3))
    deliveries(raw, 3)
    assert raw.is_silent_until(END, frame(END))


def test_withdrawn_credit_stops_deliveries(raw: RawClient, queue: str) -> None:
    raw.attach_receiver(queue)
    raw.write(raw.flow(5), raw.flow(0))
    fill(raw, queue, 3)
    assert raw.is_silent_until(END, frame(END))


def test_window_of_the_session_holds_deliveries_back(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    fill(raw, queue, 50)
    raw.attach_receiver(queue)
    begin = int(raw.begin.fields[1])
    raw.write(raw.flow(50, window=2))
    assert len(deliveries(raw, 2)) == 2
    raw.write(raw.flow(48, count=2, window=100, next_incoming=begin + 2))
    assert len(deliveries(raw, 48)) == 48


def test_large_message_is_split_by_the_clients_frame_size(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    body = bytes(range(256)) * 900
    payload = message(body)
    raw.attach_sender(queue)
    raw.write(raw.transfer(0, payload[:60_000], more=True))
    raw.write(raw.transfer(0, payload[60_000:120_000], more=True))
    raw.write(
        raw.transfer(0, payload[120_000:170_000], more=True), raw.transfer(0, payload[170_000:])
    )
    raw.dispositions(1)
    raw.attach_receiver(queue)
    raw.write(raw.flow(1))
    parts = [raw.expect(TRANSFER)]
    while parts[-1].fields[5]:
        parts.append(raw.expect(TRANSFER))
    whole = b"".join(part.payload for part in parts)
    assert decode_value(slice_message(whole).body)[0].value == body


# --- refusals -----------------------------------------------------------------------------------


def test_unknown_entity_is_refused_at_the_attach(raw: RawClient) -> None:
    condition, text = refusal(raw, raw.attach_sender("nothing"), 6)
    assert condition == "amqp:not-found"
    assert "The messaging entity 'nothing' could not be found" in text
    assert "TrackingId:" in text
    condition, _ = refusal(raw, raw.attach_receiver("nothing"), 5)
    assert condition == "amqp:not-found"


@pytest.mark.parametrize(
    "address",
    ["{}", "/{}", "amqp://localhost:5672/{}", "amqps://ns.servicebus.windows.net/{}", "{}/"],
)
def test_addresses_of_every_client_lead_to_the_queue(
    raw: RawClient, queue: str, address: str
) -> None:
    written = address.format(queue.upper())
    attached = raw.attach_sender(written)
    assert attached.fields[6].value[0] == written


def test_percent_encoded_names_with_slashes_are_found(bus: BusThread, raw: RawClient) -> None:
    bus.queue("team/orders~v1")
    assert raw.attach_sender("/team%2Forders%7Ev1").fields[6] is not None
    assert raw.attach_receiver("team/orders~v1/$deadletterqueue").fields[5] is not None


@pytest.mark.behaviour("S247")
def test_dead_letter_queue_refuses_senders(raw: RawClient, queue: str) -> None:
    condition, _ = refusal(raw, raw.attach_sender(f"{queue}/$DeadLetterQueue"), 6)
    assert condition == "amqp:not-allowed"


@pytest.mark.parametrize(
    ("name", "value", "condition"),
    [
        ("com.microsoft:session-filter", None, "amqp:not-allowed"),
        ("com.microsoft:session-filter", "one", "amqp:not-allowed"),
        ("com.microsoft:session-filter", Described(Ulong(0x137000000C), "one"), "amqp:not-allowed"),
        ("apache.org:selector-filter:string", "a = 1", "amqp:not-implemented"),
    ],
)
def test_filters_are_refused_and_never_ignored(
    raw: RawClient, queue: str, name: str, value: object, condition: str
) -> None:
    attached = raw.attach_receiver(queue, filters={Symbol(name): value})
    assert refusal(raw, attached, 5)[0] == condition
    assert raw.attach_receiver(queue, 2).fields[5] is not None  # the session goes on


def test_an_undeclared_transaction_is_refused(raw: RawClient, queue: str) -> None:
    raw.attach_sender(queue)
    state = described(0x34, b"txn")
    payload = message(b"x")
    raw.write(
        frame(TRANSFER, Uint(0), Uint(0), b"t", Uint(0), False, False, None, state, payload=payload)
    )
    assert raw.dispositions(1) == {0: REJECTED}


@pytest.mark.behaviour("S8")
def test_key_without_the_right_is_refused_at_the_attach(bus: BusThread, queue: str) -> None:
    with RawClient(bus.port, "listener", "l1sten/+=") as listener:
        condition, text = refusal(listener, listener.attach_sender(queue), 6)
        assert condition == "amqp:unauthorized-access"
        assert "'Send' claim(s) are required" in text
        assert listener.attach_receiver(queue).fields[5] is not None
    with RawClient(bus.port, "sender", "s3nd=") as sender:
        condition, _ = refusal(sender, sender.attach_receiver(queue), 5)
        assert condition == "amqp:unauthorized-access"


def test_key_of_one_queue_opens_no_other(bus: BusThread, queue: str) -> None:
    bus.queue("scoped")
    with RawClient(bus.port, "of-one-queue", "only here") as client:
        assert client.attach_sender("scoped").fields[6] is not None
        condition, _ = refusal(client, client.attach_sender(queue, 3), 6)
        assert condition == "amqp:unauthorized-access"


# --- requests -----------------------------------------------------------------------------------


def request(
    raw: RawClient, node: str, message_id: object, properties: dict[str, object], body: object
) -> Frame:
    """Send a request on a fresh pair of links and return the response."""
    raw.attach_receiver(node, 21)
    raw.attach_sender(node, 20)
    payload = (
        encode_value(described(0x73, message_id, None, None, None, "answers"))
        + encode_value(Described(Ulong(0x74), properties))
        + encode_value(Described(Ulong(0x77), body))
    )
    raw.write(raw.flow(5, handle=21), raw.transfer(0, payload, handle=20, settled=True))
    return raw.expect(TRANSFER)


def response_parts(response: Frame) -> tuple[Any, dict[str, Any], Any]:
    """Return correlation id, application properties and body."""
    properties, at = decode_value(response.payload)
    application, at = decode_value(response.payload, at)
    body, _ = decode_value(response.payload, at)
    assert response.fields[4] is True
    return properties.value[5], application.value, body.value


@pytest.mark.parametrize("message_id", [Ulong(7), "text", b"binary"])
def test_token_response_echoes_the_id_with_its_type(
    bus: BusThread, raw: RawClient, queue: str, message_id: object
) -> None:
    token = sas_token(f"sb://localhost/{queue}", ROOT.name, ROOT.keys.primary, 4_000_000_000)
    properties = {
        "operation": "put-token",
        "type": "servicebus.windows.net:sastoken",
        "name": f"sb://localhost/{queue}",
    }
    response = request(raw, "$cbs", message_id, properties, token)
    correlation_id, found, _ = response_parts(response)
    assert correlation_id == message_id
    assert type(correlation_id) is type(message_id)
    assert found["status-code"] == 202
    assert type(found["status-code"]).__name__ == "Int"
    assert "error-condition" not in found


@pytest.mark.parametrize(
    ("audience", "body", "status"),
    [
        ("sb://localhost/{}", "SharedAccessSignature sr=x&sig=y&se=1&skn=z", 401),
        ("sb://localhost/{}", "garbage", 401),
        ("sb://localhost/{}", "eyJhbGciOiJIUzI1NiJ9.e30.jwt", 401),
        ("sb://localhost/absent", None, 404),
        ("sb://localhost/", None, 202),
        ("amqps://localhost:5671/{}/$management", None, 202),
        ("sb://localhost/{}/$DeadLetterQueue", None, 202),
    ],
)
def test_token_status(
    raw: RawClient, queue: str, audience: str, body: str | None, status: int
) -> None:
    if body is None:
        body = sas_token("http://localhost/", ROOT.name, "other key", 4_000_000_000)
    properties = {
        "operation": "put-token",
        "type": "servicebus.windows.net:sastoken",
        "name": audience.format(queue),
    }
    _, found, _ = response_parts(request(raw, "$cbs", "id", properties, body))
    assert found["status-code"] == status


@pytest.mark.parametrize(("link", "count"), [("receiver-1", 2), ("receiver-2", 3)])
def test_the_link_of_a_session_names_the_session_to_peek(
    bus: BusThread, client: ServiceBusClient, raw: RawClient, link: str, count: int
) -> None:
    queue = bus.queue(requires_session=True)
    with client.get_queue_sender(queue) as sender:
        for session in ("a", "b", "a"):
            sender.send_messages(ServiceBusMessage("x", session_id=session))
    raw.attach_receiver(queue, 1, filters={Symbol("com.microsoft:session-filter"): "a"})
    operation = {"operation": "com.microsoft:peek-message", "associated-link-name": link}
    fields = {"from-sequence-number": 1, "message-count": 10}
    _, _, body = response_parts(request(raw, f"{queue}/$management", Ulong(1), operation, fields))
    assert isinstance(body, dict)
    assert len(body["messages"]) == count


def test_unknown_management_operation_is_not_implemented(raw: RawClient, queue: str) -> None:
    properties = {"operation": "com.microsoft:get-runtime-info"}
    response = request(raw, f"{queue}/$management", Ulong(1), properties, {})
    _, found, _ = response_parts(response)
    assert found["statusCode"] == 501
    assert type(found["statusCode"]).__name__ == "Int"
    assert found["errorCondition"] == "amqp:not-implemented"
    assert type(found["errorCondition"]).__name__ == "Symbol"


def test_management_node_of_an_unknown_queue_is_refused(raw: RawClient) -> None:
    condition, _ = refusal(raw, raw.attach_sender("absent/$management"), 6)
    assert condition == "amqp:not-found"


@pytest.mark.parametrize(
    ("operation", "body", "status"),
    [
        ("peek-message", {"from-sequence-number": 1, "message-count": Uint(3)}, 204),
        ("peek-message", {"message-count": 3}, 400),
        ("peek-message", "no map", 400),
        ("renew-lock", {"lock-tokens": ["no uuid"]}, 400),
        ("cancel-scheduled-message", {"sequence-numbers": [9]}, 404),
        ("receive-by-sequence-number", {"sequence-numbers": [9]}, 404),
        ("schedule-message", {"messages": [{"message": b"\xff"}]}, 400),
        ("update-disposition", {"disposition-status": "odd", "lock-tokens": []}, 400),
        ("batch-delete-messages", {"message-count": 100}, 204),
        ("batch-delete-messages", {"message-count": 501}, 400),
    ],
)
def test_management_status(
    raw: RawClient, queue: str, operation: str, body: object, status: int
) -> None:
    properties = {"operation": f"com.microsoft:{operation}"}
    _, found, _ = response_parts(request(raw, f"{queue}/$management", "id", properties, body))
    assert found["statusCode"] == status


def test_batch_delete_takes_the_oldest(bus: BusThread, raw: RawClient, queue: str) -> None:
    fill(raw, queue, 5)
    properties = {"operation": "com.microsoft:batch-delete-messages"}
    body = {"message-count": 3}
    _, found, answer = response_parts(request(raw, f"{queue}/$management", "id", properties, body))
    assert found["statusCode"] == 200
    assert answer == {"message-count": 3}
    assert bus.counts(queue).active == 2


def test_management_needs_the_right_of_the_operation(bus: BusThread, queue: str) -> None:
    with RawClient(bus.port, "sender", "s3nd=") as sender:
        properties = {"operation": "com.microsoft:peek-message"}
        body = {"from-sequence-number": 1, "message-count": 1}
        response = request(sender, f"{queue}/$management", "id", properties, body)
        _, found, _ = response_parts(response)
        assert found["statusCode"] == 401
        assert found["errorCondition"] == "amqp:unauthorized-access"


def test_close_is_answered(raw: RawClient) -> None:
    raw.write(frame(CLOSE))
    assert raw.expect(CLOSE).code == CLOSE
    assert raw.is_hung_up()
