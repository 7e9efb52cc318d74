"""Frames that look alike are taken together, with the same effect as one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    DeliveriesUpdated,
    Event,
    TransferReceived,
    TransfersReceived,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, Link, OutgoingLink
from postbus.amqp.session import Session
from postbus.message.codec import Uint
from tests.amqp.wire import (
    ACCEPTED,
    BASE,
    DETACH,
    DISPOSITION,
    RELEASED,
    TRANSFER,
    Client,
    frame,
    performative,
)

MAX_MESSAGE_BYTES = 40
SENT = 12

IDS = st.sampled_from([300, 301, 302, 70_000, 0xFFFF_FFFF, 7])
TAGS = st.sampled_from([b"tag1", b"tag2", b"", b"t" * 16, b"t" * 32])
PAYLOADS = st.sampled_from([b"", b"x", b"y" * MAX_MESSAGE_BYTES, b"z" * (MAX_MESSAGE_BYTES + 1)])

ACCEPTING = ([ACCEPTED], [ACCEPTED, False])


def transfer(handle: int, number: int, payload: bytes, *fields: Any) -> bytes:
    return frame(0, performative(TRANSFER, Uint(handle), Uint(number), *fields) + payload)


def outcome(first: int, count: int, *fields: Any) -> bytes:
    return frame(0, performative(DISPOSITION, True, Uint(first), Uint(first + count), *fields))


TRANSFERS = st.builds(
    lambda handle, number, payload, tag, is_settled, more: transfer(
        handle, number, payload, tag, Uint(0), is_settled, more
    ),
    st.sampled_from([0, 0, 0, 1, 2, 9]), IDS, PAYLOADS, TAGS, st.sampled_from([False, False, True]),
    st.sampled_from([False, False, False, True]),
)  # fmt: skip
USUAL_TRANSFERS = st.builds(
    lambda number, payload: transfer(0, number, payload, b"tag1", Uint(0), False, False),
    IDS,
    PAYLOADS,
)
DELIVERIES = st.integers(BASE - 1, BASE + SENT + 1)
OUTCOMES = st.builds(
    lambda first, count, is_settled, state: outcome(first, count, is_settled, *state),
    DELIVERIES, st.sampled_from([0, 0, 0, 2]), st.booleans(),
    st.sampled_from([*ACCEPTING, [RELEASED]]),
)  # fmt: skip
USUAL_OUTCOMES = st.builds(lambda first: outcome(first, 0, True, ACCEPTED), DELIVERIES)
OTHERS = st.sampled_from(
    [
        frame(0, b""),
        frame(3, performative(TRANSFER, Uint(0))),
        frame(0, performative(DETACH, Uint(2))),
    ]
)


class OneByOne(Connection):
    """An engine that parses each frame for itself."""

    def _take_alike(self, session: Session, data: bytes, pos: int, events: list[Event]) -> int:
        del session, data, events
        return pos


def begun(kind: type[Connection]) -> Client:
    """Return a client with three senders, two receivers and unsettled deliveries of both."""
    client = Client()
    client.engine = kind(container_id="postbus", limits=Limits(), delivery_id_base=BASE)
    client.open()
    client.begin()
    for handle in range(3):
        client.sender(f"s{handle}", handle, size=MAX_MESSAGE_BYTES)
    links = [client.receiver(f"r{handle}", handle) for handle in (3, 4)]
    for number in range(SENT):
        links[number // 4 % 2].send(number.to_bytes(16, "big"), (b"m",), is_settled=False)
    client.engine.data_to_send()
    return client


def shown(client: Client) -> list[Any]:
    """Return what an owner sees of the last events, links by name and outcomes one by one."""
    found: list[Any] = []
    for event in client.events:
        if isinstance(event, DeliveriesUpdated):
            same = (event.link.name, event.state, event.is_settled)
            pairs = zip(event.delivery_ids, event.tags, strict=True)
            found += [(*same, *each) for each in pairs]
        elif isinstance(event, TransferReceived):
            found.append((event.link.name, *event[1:]))
        else:
            values = [getattr(event, name) for name in event.__slots__]
            texts = [repr(each) for each in values if not isinstance(each, Session | Link)]
            found.append((type(event).__name__, *texts))
    return found


def state_of(client: Client) -> list[Any]:
    engine = client.engine
    found: list[Any] = [engine.is_closed, engine.partial_bytes]
    for session in engine.sessions.values():
        unsettled = {number: (link.name, tag) for number, (link, tag) in session.unsettled.items()}
        found += [session.is_ended, unsettled]
        for link in session.links.values():
            found += [link.name, link.delivery_count, link.is_attached]
            if isinstance(link, IncomingLink):
                found += [link.credit, bytes(link.partial)]
            elif isinstance(link, OutgoingLink):
                found.append(link.open_count)
    return found


def compare(*pieces: bytes) -> None:
    """Feed the same to an engine that takes runs and to one that does not."""
    together, alone = begun(Connection), begun(OneByOne)
    for piece in pieces:
        together.feed(piece)
        alone.feed(piece)
        assert shown(together) == shown(alone)
        assert together.engine.data_to_send() == alone.engine.data_to_send()
        assert state_of(together) == state_of(alone)


@settings(max_examples=300)
@given(
    frames=st.lists(
        st.one_of(USUAL_TRANSFERS, USUAL_OUTCOMES, TRANSFERS, OUTCOMES, OTHERS), max_size=14
    ),
    damage=st.none() | st.tuples(st.integers(0, 2_000), st.integers(0, 255)),
    cuts=st.lists(st.integers(1, 400), max_size=3),
)
def test_runs_have_the_effect_of_single_frames(
    frames: list[bytes], damage: tuple[int, int] | None, cuts: list[int]
) -> None:
    data = bytearray(b"".join(frames))
    if damage is not None and data:
        data[damage[0] % len(data)] = damage[1]
    pieces, rest = [], bytes(data)
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    compare(*pieces, rest)


def usual(first: int, count: int) -> bytes:
    numbers = range(first, first + count)
    return b"".join(transfer(0, each, b"x", b"tag1", Uint(0), False, False) for each in numbers)


USUAL = [transfer(0, 300, b"xy", b"tag1", Uint(0), False, False), outcome(BASE, 0, False, ACCEPTED)]


@pytest.mark.parametrize("whole", USUAL, ids=["transfer", "outcome"])
def test_a_frame_with_a_wrong_octet_ends_a_run(whole: bytes) -> None:
    for index, octet in enumerate(whole):
        for other in {octet ^ 1, octet ^ 0x80, (octet + 1) & 0xFF, (octet - 1) & 0xFF}:
            damaged = whole[:index] + bytes([other]) + whole[index + 1 :]
            compare(whole, damaged + whole + b"\xa0" * 200)


@pytest.mark.parametrize("is_settled", [True, False])
def test_outcomes_of_several_links_and_repeated_ones(is_settled: bool) -> None:
    numbers = [*range(BASE, BASE + SENT), BASE + 1, BASE + SENT]
    data = b"".join(outcome(each, 0, is_settled, ACCEPTED) for each in numbers)
    compare(data, data)


def test_transfers_of_one_read_are_one_event_after_the_first() -> None:
    client = begun(Connection)
    client.engine.receive_data(usual(300, 1), 1)
    (event,) = client.engine.receive_data(usual(301, 5), 1)
    assert isinstance(event, TransfersReceived)
    assert event.delivery_ids == [301, 302, 303, 304, 305]
    assert (event.tags, event.payloads) == ([b"tag1"] * 5, [b"x"] * 5)
    singles = [each for each in one_by_one([event]) if isinstance(each, TransferReceived)]
    assert [each.delivery_id for each in singles] == event.delivery_ids


def test_a_run_refreshes_the_incoming_window() -> None:
    client = Client(Limits(incoming_window=10))
    client.open()
    client.begin()
    client.sender()
    client.feed(usual(300, 4))
    assert client.replies() == []
    client.feed(usual(304, 4))
    flow = client.reply(0x13)
    assert flow.fields[:2] == [8, 10]
