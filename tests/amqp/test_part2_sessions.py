"""AMQP 1.0 part 2, 2.5: begin, end, windows, delivery ids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.amqp import conditions
from postbus.amqp.conditions import AmqpSessionError
from postbus.amqp.events import (
    DeliveriesUpdated,
    SessionBegun,
    SessionEnded,
    TransferReceived,
    UnknownDeliveries,
)
from postbus.amqp.limits import Limits
from postbus.amqp.performatives import ACCEPTED, Accepted
from postbus.amqp.serial import MAX_UNKNOWN
from postbus.message.codec import Described, Symbol, Uint, Ulong, encode_value
from tests.amqp.wire import ACCEPTED as ACCEPTED_VALUE
from tests.amqp.wire import (
    ATTACH,
    BASE,
    BEGIN,
    CLOSE,
    DISPOSITION,
    END,
    FLOW,
    RELEASED,
    SOURCE,
    TARGET,
    TRANSFER,
    Client,
    error_of,
    frame,
    performative,
)

TAG = b"0123456789abcdef"


def test_begin_is_answered_with_the_full_list() -> None:
    client = Client(Limits(incoming_window=5_000, handle_max=1_023)).open()
    client.send(BEGIN, None, Uint(7), Uint(100), Uint(100), channel=5)
    (event,) = client.events
    assert isinstance(event, SessionBegun)
    body = (
        b"\x60\x00\x05" + b"\x70\x40\x00\x00\x00" + b"\x70\x00\x00\x13\x88"
        + b"\x70\x7f\xff\xff\xff" + b"\x70\x00\x00\x03\xff" + b"\x40" * 3
    )  # fmt: skip
    head = b"\x00\x53\x11\xc0" + bytes((len(body) + 1, 8))
    assert client.reply(BEGIN).raw == frame(0, head + body)
    assert list(client.engine.sessions.values()) == [event.session]


def test_each_session_has_a_channel_of_ours_that_is_used_again() -> None:
    client = Client().open()
    sessions = [client.begin(channel) for channel in (9, 3, 7)]
    assert [each.channel for each in sessions] == [0, 1, 2]
    client.send(END, channel=3)
    assert client.events == [SessionEnded(sessions[1])]
    assert client.reply(END).raw == frame(1, b"\x00\x53\x17\xc0\x02\x01\x40")
    assert client.begin(3).channel == 1
    assert client.begin(4).channel == 3


def test_our_end_has_an_error_and_frames_that_cross_it_are_ignored() -> None:
    client = Client().open()
    session = client.begin()
    client.sender()
    client.receiver()
    session.end(AmqpSessionError(conditions.ILLEGAL_STATE, "oops"))
    assert error_of(client.reply(END).fields[0]) == (conditions.ILLEGAL_STATE, "oops")
    session.end()
    assert client.transfer(0) == []
    assert client.transfer(1, b"x" * 10_000, more=True) == []
    assert client.dispose(BASE) == []
    assert client.flow(handle=1, credit=9, is_echo=True) == []
    assert client.send(ATTACH, "x", Uint(8), True, None, None, SOURCE, TARGET) == []
    assert client.send(END) == []
    assert client.engine.data_to_send() == []
    assert client.begin().channel == 0


def test_begin_on_a_channel_with_an_unanswered_end_frees_our_channel() -> None:
    client = Client().open()
    client.begin().end()
    client.engine.data_to_send()
    assert client.begin().channel == 0


def test_frames_behind_an_end_of_the_peer_are_ignored() -> None:
    client = Client().open()
    client.begin()
    client.send(END)
    client.engine.data_to_send()
    assert client.transfer(0) == []
    assert client.dispose(BASE) == []
    assert client.send(END) == []
    assert client.engine.data_to_send() == []


def test_begin_twice_closes() -> None:
    client = Client().open()
    client.begin()
    client.send(BEGIN, None, Uint(0), Uint(1), Uint(1))
    client.expect_closed(conditions.ILLEGAL_STATE)


def test_close_in_the_middle_of_a_session_is_answered_on_channel_zero() -> None:
    client = Client().open()
    client.begin(channel=6)
    client.send(CLOSE, channel=6)
    assert client.reply(CLOSE).channel == 0


# --- the peer's window ---------------------------------------------------------------------------


def test_transfers_wait_for_the_window_and_ids_are_consecutive_over_links() -> None:
    client = Client().open()
    session = client.begin(window=2)
    one, two = client.receiver("a", 1), client.receiver("b", 2)
    client.flow(window=2)
    for number in range(6):
        (one, two)[number % 2].send(TAG, (b"%d" % number,), is_settled=False)
    assert [each.payload for each in client.replies()] == [b"0", b"1"]
    assert session.held_count == 4
    client.flow(next_incoming=BASE + 2, window=3)
    replies = client.replies()
    assert [each.payload for each in replies] == [b"2", b"3", b"4"]
    assert [each.fields[1] for each in replies] == [BASE + 2, BASE + 3, BASE + 4]
    assert [each.fields[0] for each in replies] == [0, 1, 0]
    client.flow(next_incoming=BASE + 3, window=3)  # two are still on the way
    assert [each.payload for each in client.replies()] == [b"5"]
    assert session.held_count == 0
    assert sorted(session.unsettled) == [BASE + number for number in range(6)]


def test_a_long_delivery_stops_at_the_window_and_goes_on() -> None:
    client = Client().open(max_frame_bytes=512)
    session = client.begin(window=0)
    link, other = client.receiver("a", 1), client.receiver("b", 2)
    client.flow(window=0)
    payload = random.Random(1).randbytes(2_000)
    link.send(TAG, (payload[:5], payload[5:]), is_settled=False)
    other.send(TAG, (b"after",), is_settled=False)
    assert client.replies() == []
    received, got = 0, b""
    for _ in range(20):
        client.flow(next_incoming=BASE + received, window=1)
        for reply in client.replies():
            assert reply.code == TRANSFER
            received += 1
            got += reply.payload
            if reply.fields[0] == 0:
                first = [BASE, TAG, 0] if received == 1 else [None, None, None]
                assert reply.fields[1:4] == first
                assert reply.fields[5] is (len(got) < 2_000)
            else:
                assert reply.fields[1] == BASE + 1
        assert session.held_count == (2 if len(got) < 2_000 else int(len(got) == 2_000))
    assert got == payload + b"after"


def test_detach_in_the_middle_of_a_long_delivery_drops_the_rest() -> None:
    client = Client().open(max_frame_bytes=512)
    session = client.begin(window=1)
    link, other = client.receiver("a", 1), client.receiver("b", 2)
    client.flow(window=1)
    link.send(TAG, (b"x" * 2_000,), is_settled=False)
    link.send(TAG, (b"y",), is_settled=False)
    other.send(TAG, (b"z",), is_settled=False)
    assert len(client.replies()) == 1
    assert (session.held_count, session.held_of(link), session.held_of(other)) == (3, 1, 1)
    link.detach()
    client.engine.data_to_send()
    client.flow(next_incoming=BASE + 1, window=100)
    (last,) = client.replies()
    assert (last.payload, last.fields[1]) == (b"z", BASE + 1)
    assert session.held_count == 0


def test_drain_is_answered_after_deliveries_held_for_the_window() -> None:
    client = Client().open()
    client.begin(window=0)
    link = client.receiver(credit=10)
    client.flow(window=0)
    link.send(TAG, (b"1",), is_settled=True)
    client.flow(handle=1, delivery_count=0, credit=10, window=0, is_drain=True)
    assert link.is_draining
    assert link.credit == 9
    link.drained()
    assert client.replies() == []
    client.flow(window=5)
    sent, drained = client.replies()
    assert sent.payload == b"1"
    assert drained.fields[4:9] == [0, 10, 0, None, True]


def test_echo_counts_written_deliveries_only() -> None:
    client = Client().open()
    client.begin(window=0)
    link = client.receiver(credit=10)
    client.flow(window=0)
    link.send(TAG, (b"1",), is_settled=True)
    client.flow(handle=1, delivery_count=0, credit=10, window=0, is_echo=True)
    assert client.reply(FLOW).fields[4:7] == [0, 0, 10]
    assert (link.limit, link.credit) == (10, 9)


def test_echo_of_endless_credit_with_an_absurd_count_fits_its_field() -> None:
    client = Client().open()
    client.begin(window=0)
    link = client.receiver(credit=10)
    client.flow(window=0)
    link.send(TAG, (b"1",), is_settled=True)
    client.flow(handle=1, delivery_count=77, credit=2**32 - 1, window=0, is_echo=True)
    assert client.reply(FLOW).fields[4:7] == [0, 0, 2**32 - 1]


def test_flow_without_next_incoming_id_counts_from_the_start() -> None:
    client = Client().open()
    client.begin(window=1)
    link = client.receiver()
    client.flow(next_incoming=None, window=1)
    link.send(TAG, (b"1",), is_settled=True)
    link.send(TAG, (b"2",), is_settled=True)
    assert len(client.replies()) == 1
    client.flow(next_incoming=None, window=1)
    assert client.replies() == []
    client.flow(next_incoming=None, window=2)
    assert len(client.replies()) == 1


def test_absurd_next_incoming_id_is_taken_as_up_to_date() -> None:
    client = Client().open()
    client.begin(window=1)
    link = client.receiver()
    client.flow(next_incoming=BASE + 2**31 - 5, window=2)
    for _ in range(3):
        link.send(TAG, (b"1",), is_settled=True)
    assert len(client.replies()) == 2


# --- our window ----------------------------------------------------------------------------------


def test_our_window_is_refreshed_before_it_closes() -> None:
    client = Client(Limits(incoming_window=8)).open()
    client.begin()
    client.sender(credit=1_000)
    open_until = 8
    for number in range(100):
        assert number < open_until
        client.transfer(number)
        for reply in client.replies():
            assert reply.code == FLOW
            assert reply.fields[0] == number + 1
            assert reply.fields[4:7] == [None, None, None]
            open_until = reply.fields[0] + reply.fields[1]


def test_session_flow_with_echo_is_answered_with_the_full_list() -> None:
    client = Client(Limits(incoming_window=5_000)).open()
    client.begin()
    assert client.flow(is_echo=True) == []
    body = (
        b"\x43" + b"\x70\x00\x00\x13\x88" + b"\x70\x40\x00\x00\x00" + b"\x70\x7f\xff\xff\xff"
        + b"\x40" * 4 + b"\x42\x42\x40"
    )  # fmt: skip
    head = b"\x00\x53\x13\xc0" + bytes((len(body) + 1, 11))
    assert client.reply(FLOW).raw == frame(0, head + body)


def test_flow_for_an_unknown_link_concerns_the_session_only() -> None:
    client = Client().open()
    client.begin()
    assert client.flow(handle=77, credit=5, is_echo=True) == []
    assert client.reply(FLOW).fields[4] is None


@pytest.mark.parametrize(
    "fields",
    [
        (Uint(0), None, Uint(0), Uint(1)),
        (Uint(0), "x", Uint(0), Uint(1)),
        ("x", Uint(1), Uint(0), Uint(1)),
        (Uint(0), Uint(1), Uint(0), Uint(1), "h"),
        (Uint(0), Uint(1), Uint(0), Uint(1), Uint(1), "c"),
        (Uint(0), Uint(1), Uint(0), Uint(1), Uint(1), None, -1),
    ],
)
def test_malformed_flow_closes(fields: tuple[object, ...]) -> None:
    client = Client().open()
    client.begin()
    client.receiver()
    client.send(FLOW, *fields)
    client.expect_closed(conditions.DECODE_ERROR)


# --- dispositions --------------------------------------------------------------------------------


def with_unsettled(count: int) -> Client:
    client = Client().open()
    client.begin()
    link = client.receiver(credit=count)
    for number in range(count):
        link.send(number.to_bytes(16, "big"), (b"m",), is_settled=False)
    client.engine.data_to_send()
    return client


def updated(client: Client) -> list[int]:
    found = []
    for event in client.events:
        if isinstance(event, DeliveriesUpdated):
            assert event.tags == [
                (number - BASE).to_bytes(16, "big") for number in event.delivery_ids
            ]
            found += [number - BASE for number in event.delivery_ids]
    return found


def unknown(client: Client) -> list[tuple[int, int]]:
    return [
        (event.first - BASE, event.last - BASE)
        for event in client.events
        if isinstance(event, UnknownDeliveries)
    ]


def test_outcome_of_one_delivery_is_reported_once_and_answered_settled() -> None:
    client = with_unsettled(2)
    client.dispose(BASE + 1)
    (event,) = client.events
    assert isinstance(event, DeliveriesUpdated)
    assert (event.delivery_ids, event.state, event.is_settled) == ([BASE + 1], ACCEPTED, False)
    assert client.dispose(BASE + 1) == []
    assert client.dispose(BASE + 1, is_settled=True) == []
    assert client.engine.data_to_send() == []
    event.link.settle(BASE + 1, BASE + 1, ACCEPTED)
    body = b"\x42\x70\x40\x00\x00\x01\x70\x40\x00\x00\x01\x41\x00\x53\x24\x45\x42"
    reply = client.reply(DISPOSITION)
    assert reply.raw == frame(0, b"\x00\x53\x15\xc0" + bytes((len(body) + 1, 6)) + body)
    client.dispose(BASE + 1)
    assert unknown(client) == [(1, 1)]
    (lost,) = client.events
    assert isinstance(lost, UnknownDeliveries)
    lost.session.settle_unknown(lost.first, lost.last, ACCEPTED)
    assert client.reply(DISPOSITION).raw == reply.raw


def test_neighbours_with_one_outcome_are_one_event() -> None:
    client = with_unsettled(6)
    one = [client_frame(number, ACCEPTED_VALUE) for number in (0, 1, 2)]
    two = [client_frame(number, RELEASED) for number in (3, 4)]
    client.feed(b"".join(one + two))
    assert [event.delivery_ids for event in client.events] == [  # type: ignore[union-attr]
        [BASE, BASE + 1, BASE + 2],
        [BASE + 3, BASE + 4],
    ]


def client_frame(number: int, state: Described) -> bytes:
    return frame(0, performative(DISPOSITION, True, Uint(BASE + number), None, False, state))


def test_range_reports_known_and_unknown_apart() -> None:
    client = with_unsettled(6)
    client.dispose(BASE + 1, BASE + 1, is_settled=True)
    client.dispose(BASE + 4, BASE + 4, is_settled=True)
    client.dispose(BASE + 0, BASE + 8)
    assert updated(client) == [0, 2, 3, 5]
    assert unknown(client) == [(1, 1), (4, 4), (6, 8)]
    client.dispose(BASE + 0, BASE + 8)
    assert updated(client) == []


def test_settled_range_forgets_deliveries_and_ignores_unknown_ones() -> None:
    client = with_unsettled(3)
    client.dispose(BASE, BASE + 100, is_settled=True, state=None)
    assert updated(client) == [0, 1, 2]
    assert unknown(client) == []
    assert client.dispose(BASE, is_settled=True) == []


def test_non_terminal_state_is_no_event() -> None:
    client = with_unsettled(2)
    received = Described(Ulong(0x23), [Uint(0), Ulong(0)])
    for state in (None, received):
        assert client.dispose(BASE, state=state) == []
    client.dispose(BASE)
    assert updated(client) == [0]


@pytest.mark.parametrize(
    ("first", "last", "expected", "lost"),
    [
        (0, 2**32 - 1, [0, 1, 2], []),
        (BASE + 2, BASE + 0, [], [(2, 2 + MAX_UNKNOWN - 1)]),
        (BASE + 3, BASE + 2**31, [], [(3, 3 + MAX_UNKNOWN - 1)]),
        (0, BASE - 1, [], [(-BASE, -BASE + MAX_UNKNOWN - 1)]),
        (BASE - 10, BASE + 1, [0, 1], [(-10, -1)]),
        (0, BASE + 1, [0, 1], []),
        (2**32 - 1, BASE + 1, [0, 1], []),
    ],
)
def test_hostile_range_is_clamped(
    first: int, last: int, expected: list[int], lost: list[tuple[int, int]]
) -> None:
    client = with_unsettled(3)
    client.dispose(first, last)
    assert updated(client) == expected
    assert unknown(client) == lost


def test_hostile_range_without_unsettled_deliveries() -> None:
    client = with_unsettled(0)
    client.dispose(0, 2**32 - 1)
    assert unknown(client) == [(-BASE, -BASE + MAX_UNKNOWN - 1)]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(-20, 40), st.integers(0, 50))
def test_ranges_are_those_of_a_simple_model(settled: list[bool], first: int, size: int) -> None:
    client = with_unsettled(len(settled))
    for number, is_settled in enumerate(settled):
        if is_settled:
            client.dispose(BASE + number, is_settled=True)
    client.dispose(BASE + first, BASE + first + size)
    known = {number for number, is_settled in enumerate(settled) if not is_settled}
    wanted = set(range(first, first + size + 1))
    assert updated(client) == sorted(known & wanted)
    reported = {each for low, high in unknown(client) for each in range(low, high + 1)}
    assert reported == wanted - known


def test_ids_wrap_at_two_to_the_32() -> None:
    client = Client().open()
    session = client.begin()
    session._next_delivery_id = session._next_outgoing_id = 2**32 - 2
    client.flow(next_incoming=2**32 - 2)
    link = client.receiver()
    client.flow(next_incoming=2**32 - 2)
    for _ in range(4):
        link.send(TAG, (b"m",), is_settled=False)
    ids = [reply.fields[1] for reply in client.replies()]
    assert ids == [2**32 - 2, 2**32 - 1, 0, 1]
    client.dispose(2**32 - 1, 0)
    (event,) = client.events
    assert isinstance(event, DeliveriesUpdated)
    assert event.delivery_ids == [2**32 - 1, 0]
    link.settle(2**32 - 1, 0, ACCEPTED)
    assert sorted(session.unsettled) == [1, 2**32 - 2]


def test_disposition_of_a_sender_is_ignored() -> None:
    client = with_unsettled(1)
    assert client.send(DISPOSITION, False, Uint(BASE), None, True, ACCEPTED_VALUE) == []


@pytest.mark.parametrize(
    "fields",
    [(True,), (True, None), (True, "x"), (True, Uint(1), "x"), (True, Uint(1), -1)],
)
def test_malformed_disposition_closes(fields: tuple[object, ...]) -> None:
    client = with_unsettled(1)
    client.send(DISPOSITION, *fields)
    client.expect_closed(conditions.DECODE_ERROR)


def test_hot_frames_with_other_descriptors_are_the_same() -> None:
    client = with_unsettled(2)
    client.sender("s", 5)
    fields = [True, Uint(BASE), None, False, ACCEPTED_VALUE]
    symbolic = Described(Symbol("amqp:disposition:list"), fields)
    client.feed(frame(0, encode_value(symbolic)))
    assert updated(client) == [0]
    transfer = Described(Symbol("amqp:transfer:list"), [Uint(5), Uint(0), b"t", None, True])
    client.feed(frame(0, encode_value(transfer) + b"payload"))
    (event,) = client.events
    assert isinstance(event, TransferReceived)
    assert (event.payload, event.is_settled) == (b"payload", True)
    assert isinstance(ACCEPTED, Accepted)
