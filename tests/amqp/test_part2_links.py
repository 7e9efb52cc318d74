"""AMQP 1.0 part 2, 2.6: attach, detach, credit, drain."""

from __future__ import annotations

import struct

import pytest

from postbus.amqp import conditions
from postbus.amqp.conditions import AmqpLinkError
from postbus.amqp.events import LinkAttached, LinkDetached, LinkFlowed, SessionEnded
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.message.codec import Described, Symbol, Ubyte, Uint, Ulong, encode_value
from tests.amqp.wire import (
    ATTACH,
    BASE,
    DETACH,
    END,
    FLOW,
    SOURCE,
    TARGET,
    TRANSFER,
    Client,
    error_of,
    frame,
    performative,
)

TAG = b"0123456789abcdef"
ERROR = AmqpLinkError(conditions.NOT_FOUND, "no such queue")
FILTERS = {Symbol("com.microsoft:session-filter"): Described(Ulong(0x137000000C), "s1")}


def ready() -> Client:
    client = Client().open()
    client.begin()
    return client


def raw_attach(source: bytes, target: bytes, *, is_receiver: bool, width: int = 1) -> bytes:
    """An attach with termini in forms our own encoder would not choose."""
    fields = [
        encode_value("x"), b"\x52\x07", b"\x41" if is_receiver else b"\x42", b"\x50\x00",
        b"\x50\x01", source, target, b"\x40", b"\x42", b"\x43",
    ]  # fmt: skip
    body = b"".join(fields)
    if width == 1:
        head = b"\xc0" + bytes((len(body) + 1, len(fields)))
    else:
        head = b"\xd0" + struct.pack(">II", len(body) + 4, len(fields))
    return frame(0, b"\x00\x53\x12" + head + body)


def test_accepting_a_sender_writes_the_full_attach_and_a_flow() -> None:
    client = ready()
    link = client.attach("x", 7, is_receiver=False)
    assert isinstance(link, IncomingLink)
    link.accept(max_message_bytes=262_144, credit=1_000, properties={"a:b": Ulong(3)})
    attach, flow = client.replies()
    body = (
        b"\xa1\x01x" + b"\x43" + b"\x41" + b"\x50\x00" + b"\x50\x00"
        + encode_value(SOURCE) + encode_value(TARGET) + b"\x40" + b"\x42" + b"\x40"
        + b"\x80\x00\x00\x00\x00\x00\x04\x00\x00" + b"\x40\x40"
        + b"\xc1\x08\x02\xa3\x03a:b\x53\x03"
    )  # fmt: skip
    head = b"\x00\x53\x12\xc0" + bytes((len(body) + 1, 14))
    assert attach.raw == frame(0, head + body)
    assert (flow.code, flow.fields) == (
        FLOW,
        [0, 5_000, BASE, 0x7FFF_FFFF, 0, 0, 1_000, None, False, False, None],
    )
    assert link.is_attached
    assert link.credit == 1_000


def test_accepting_a_receiver_writes_the_full_attach() -> None:
    client = ready()
    link = client.attach("x", 7, is_receiver=True)
    assert isinstance(link, OutgoingLink)
    link.accept()
    body = (
        b"\xa1\x01x" + b"\x43" + b"\x42" + b"\x50\x00" + b"\x50\x01"
        + encode_value(SOURCE) + encode_value(TARGET) + b"\x40" + b"\x42" + b"\x43"
        + b"\x40" * 4
    )  # fmt: skip
    head = b"\x00\x53\x12\xc0" + bytes((len(body) + 1, 14))
    assert client.reply(ATTACH).raw == frame(0, head + body)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("is_receiver", [True, False])
def test_termini_are_echoed_byte_for_byte(is_receiver: bool, width: int) -> None:
    client = ready()
    descriptor = b"\x80\x00\x00\x00\x00\x00\x00\x00\x28"
    fields = b"\xd0\x00\x00\x00\x0b\x00\x00\x00\x01\xb1\x00\x00\x00\x02ab"
    source = b"\x00" + descriptor + fields
    target = b"\x00\xa3\x10amqp:target:list\xc0\x05\x01\xa1\x02cd"
    (event,) = client.feed(raw_attach(source, target, is_receiver=is_receiver, width=width))
    assert isinstance(event, LinkAttached)
    link = event.link
    assert link.source is not None
    assert link.target is not None
    assert (link.source.address, link.target.address) == ("ab", "cd")
    assert (link.snd_settle_mode, link.rcv_settle_mode) == (0, 1)
    if isinstance(link, IncomingLink):
        link.accept(max_message_bytes=1, credit=1)
    elif isinstance(link, OutgoingLink):
        link.accept()
    reply = client.replies()[0]
    assert source + target in reply.raw
    assert reply.fields[3:5] == [0, 1]


def test_coordinator_and_filters_and_dynamic_are_seen() -> None:
    client = ready()
    coordinator = Described(Ulong(0x30), [])
    client.send(ATTACH, "c", Uint(0), False, None, None, SOURCE, coordinator)
    (event,) = client.events
    assert isinstance(event, LinkAttached)
    assert isinstance(event.link, IncomingLink)
    assert event.link.target is not None
    assert event.link.target.is_coordinator
    assert event.link.target.address is None
    assert (event.link.snd_settle_mode, event.link.rcv_settle_mode) == (2, 0)
    source = Described(Ulong(0x28), ["q", None, None, None, True, None, None, FILTERS])
    client.send(ATTACH, "f", Uint(1), True, None, None, source, None, properties := None)
    assert properties is None
    (event,) = client.events
    assert isinstance(event, LinkAttached)
    link = event.link
    assert link.source is not None
    assert link.source.filters == FILTERS
    assert link.source.is_dynamic
    assert link.target is None
    assert not link.source.is_coordinator


def test_terminus_that_is_no_terminus_is_none() -> None:
    client = ready()
    client.send(ATTACH, "c", Uint(0), False, None, None, "text", ["list"])
    (event,) = client.events
    assert isinstance(event, LinkAttached)
    assert isinstance(event.link, IncomingLink)
    assert event.link.source is None
    assert event.link.target is None


def test_link_properties_used_by_the_owner_are_reported_by_name() -> None:
    client = ready()
    client.engine.link_properties = frozenset({"com.microsoft:timeout"})
    properties = {Symbol("com.microsoft:timeout"): Uint(5_000), Ulong(1): None}
    client.send(ATTACH, "c", Uint(0), True, None, None, SOURCE, TARGET, *[None] * 6, properties)
    (event,) = client.events
    assert isinstance(event, LinkAttached)
    assert event.link.properties == {"com.microsoft:timeout": 5_000}


@pytest.mark.parametrize("is_receiver", [True, False])
def test_refusal_is_an_attach_with_null_terminus_and_a_closing_detach(is_receiver: bool) -> None:
    client = ready()
    link = client.attach("x", 7, is_receiver=is_receiver)
    link.refuse(ERROR)
    attach, detach = client.replies()
    assert attach.code == ATTACH
    assert attach.fields[5:7] == ([None, TARGET] if is_receiver else [SOURCE, None])
    assert detach.code == DETACH
    assert detach.fields[:2] == [attach.fields[1], True]
    assert error_of(detach.fields[2]) == (conditions.NOT_FOUND, "no such queue")
    text = b"\xa3\x0eamqp:not-found\xa1\x0dno such queue\x40"
    inner = b"\x00\x53\x1d\xc0" + bytes((len(text) + 1, 3)) + text
    body = b"\x43\x41" + inner
    assert detach.raw == frame(0, b"\x00\x53\x16\xc0" + bytes((len(body) + 1, 3)) + body)
    # the client's own detach crosses; no frame follows, and a later answer is too late
    assert client.send(DETACH, Uint(7), False) == []
    link.refuse(ERROR)
    link.detach()
    if is_receiver:
        link.accept()
    else:
        link.accept(max_message_bytes=1, credit=1)
    assert client.engine.data_to_send() == []


def test_peer_detaches_before_the_attach_is_answered() -> None:
    for is_receiver in (True, False):
        client = ready()
        link = client.attach("x", 7, is_receiver=is_receiver)
        client.send(DETACH, Uint(7), True)
        assert client.events == [LinkDetached(link, True, None)]
        attach, detach = client.replies()
        assert (attach.code, detach.code) == (ATTACH, DETACH)
        assert detach.fields == [0, True, None]
        link.accept() if is_receiver else link.accept(max_message_bytes=1, credit=1)
        assert client.engine.data_to_send() == []


@pytest.mark.parametrize("is_closed", [True, False])
def test_detach_of_the_peer_is_answered_in_kind(is_closed: bool) -> None:
    client = ready()
    link = client.receiver("x", 7)
    link.send(TAG, (b"m",), is_settled=False)
    client.engine.data_to_send()
    error = Described(Ulong(0x1D), [Symbol("a:b"), None, None])
    client.send(DETACH, Uint(7), is_closed, error)
    (event,) = client.events
    assert isinstance(event, LinkDetached)
    assert event.link is link
    assert event.is_closed is is_closed
    assert event.error is not None
    assert (event.error.condition, event.error.description) == ("a:b", "")
    assert client.reply(DETACH).fields == [0, is_closed, None]
    assert link.session.unsettled == {}
    assert client.send(DETACH, Uint(7), is_closed) == []
    # name and handle are free at once
    assert client.receiver("x", 7).handle == 0


def test_our_handle_stays_taken_until_the_peer_detaches_too() -> None:
    client = ready()
    one = client.receiver("a", 1)
    one.detach(ERROR)
    assert client.receiver("b", 2).handle == 1
    client.send(DETACH, Uint(1), True)
    assert client.events == []
    assert client.receiver("c", 1).handle == 0


def test_peer_that_attaches_again_without_answering_our_detach() -> None:
    client = ready()
    client.receiver("a", 1).detach(ERROR)
    assert client.receiver("a", 1).handle == 0


def test_frames_that_cross_our_detach_are_ignored() -> None:
    client = ready()
    link = client.sender("s", 3)
    link.detach(ERROR)
    client.engine.data_to_send()
    assert client.transfer(0, handle=3) == []
    assert client.flow(handle=3, credit=1) == []
    assert client.engine.data_to_send() == []
    client.send(DETACH, Uint(3), True)
    (ended,) = client.transfer(0, handle=3)
    assert isinstance(ended, SessionEnded)
    assert error_of(client.reply(END).fields[0])[0] == conditions.UNATTACHED_HANDLE


def test_link_of_the_same_name_and_direction_is_stolen() -> None:
    client = ready()
    old = client.receiver("x", 1)
    other_way = client.sender("x", 2)
    new = client.attach("x", 3, is_receiver=True)
    detached, attached = client.events
    assert isinstance(detached, LinkDetached)
    assert detached.link is old
    assert detached.error is not None
    assert detached.error.condition == conditions.STOLEN
    assert attached == LinkAttached(new)
    reply = client.reply(DETACH)
    assert error_of(reply.fields[2])[0] == conditions.STOLEN
    assert other_way.is_attached
    (session,) = client.engine.sessions.values()
    assert list(session.links.values()) == [other_way, new]


def test_handle_in_use_ends_the_session() -> None:
    client = ready()
    client.receiver("a", 1)
    client.send(ATTACH, "b", Uint(1), True, None, None, SOURCE, TARGET)
    (ended,) = client.events
    assert isinstance(ended, SessionEnded)
    assert error_of(client.reply(END).fields[0])[0] == conditions.HANDLE_IN_USE


@pytest.mark.parametrize(
    "fields",
    [
        (None, Uint(0), True),
        ("x", None, True),
        ("x", Uint(0), None),
        ("x", Uint(0), True, Ubyte(3)),
        ("x", Uint(0), True, None, Ubyte(2)),
        ("x", Uint(0), False, None, None, SOURCE, TARGET, None, None, "0"),
    ],
)
def test_malformed_attach_closes(fields: tuple[object, ...]) -> None:
    client = ready()
    client.send(ATTACH, *fields)
    client.expect_closed(conditions.DECODE_ERROR)


@pytest.mark.parametrize("fields", [(), (None,), ("x",)])
def test_malformed_detach_closes(fields: tuple[object, ...]) -> None:
    client = ready()
    client.send(DETACH, *fields)
    client.expect_closed(conditions.DECODE_ERROR)


def test_attach_without_a_list_closes_the_connection() -> None:
    client = ready()
    client.feed(frame(0, b"\x00\x53\x12\xc1\x01\x00"))
    client.expect_closed(conditions.DECODE_ERROR)
    client = ready()
    client.feed(frame(0, b"\x00\x53\x12\x45"))
    client.expect_closed(conditions.DECODE_ERROR)


# --- credit --------------------------------------------------------------------------------------


def test_credit_counts_deliveries_in_flight() -> None:
    client = ready()
    link = client.receiver(credit=5)
    assert (link.limit, link.sent, link.credit) == (5, 0, 5)
    for _ in range(3):
        link.send(TAG, (b"m",), is_settled=True)
    client.flow(handle=1, delivery_count=1, credit=5)
    assert client.events == [LinkFlowed(link)]
    assert (link.limit, link.sent, link.credit) == (6, 3, 3)
    client.flow(handle=1, delivery_count=0, credit=1)
    assert link.credit == 0
    client.flow(handle=1, delivery_count=3, credit=2**32 - 1)
    assert link.limit == 3 + 2**32 - 1
    client.flow(handle=1, delivery_count=3)
    assert link.credit == 0


def test_absurd_delivery_count_is_taken_as_ours() -> None:
    client = ready()
    link = client.receiver(credit=5)
    client.flow(handle=1, delivery_count=1_000, credit=7)
    assert link.credit == 7


def test_flow_before_the_answer_is_kept_and_not_reported() -> None:
    client = ready()
    link = client.attach("r", 1, is_receiver=True)
    assert client.flow(handle=1, credit=5, is_echo=True) == []
    assert client.reply(FLOW).fields[4] is None  # a handle the peer has not seen is not named
    assert link.limit == 5
    link.grant(3) if isinstance(link, IncomingLink) else link.drained()
    assert client.engine.data_to_send() == []


def test_drain_gives_up_remaining_credit() -> None:
    client = ready()
    link = client.receiver(credit=10)
    link.send(TAG, (b"m",), is_settled=True)
    client.engine.data_to_send()
    client.flow(handle=1, delivery_count=1, credit=9, is_drain=True, is_echo=True)
    assert link.is_draining
    assert client.engine.data_to_send() == []  # the answer to the drain is the echo
    link.drained()
    reply = client.reply(FLOW)
    assert reply.fields == [
        0, 5_000, BASE + 1, 0x7FFF_FFFF, 0, 10, 0, None, True, False, None,
    ]  # fmt: skip
    assert (link.credit, link.is_draining, link.limit, link.sent) == (0, False, 1, 1)
    client.flow(handle=1, delivery_count=10, credit=2)
    assert link.credit == 2
    client.flow(handle=1, delivery_count=10, credit=0, is_drain=True)
    link.drained()
    assert client.reply(FLOW).fields[5:9] == [10, 0, None, True]


def test_echo_has_our_view_of_the_link() -> None:
    client = ready()
    client.receiver(credit=10)
    client.sender("s", 2, credit=20)
    client.flow(handle=1, delivery_count=0, credit=10, is_echo=True)
    assert client.reply(FLOW).fields[4:9] == [0, 0, 10, None, False]
    client.transfer(0, handle=2)
    client.flow(handle=2, is_echo=True)
    assert client.reply(FLOW).fields[4:9] == [1, 1, 19, None, False]


def test_grant_sets_the_credit() -> None:
    client = ready()
    link = client.sender(credit=2)
    for number in range(3):  # credit is not enforced: some clients start without looking at it
        client.transfer(number)
    assert link.credit == -1
    client.flow(handle=0, is_echo=True)
    assert client.reply(FLOW).fields[5:7] == [3, 0]
    link.grant(50)
    assert client.reply(FLOW).fields[4:7] == [0, 3, 50]


def test_transfer_after_the_end_of_a_link_is_not_sent() -> None:
    client = ready()
    link = client.receiver()
    link.detach()
    client.engine.data_to_send()
    link.send(TAG, (b"m",), is_settled=False)
    assert link.sent == 0
    assert client.engine.data_to_send() == []


def test_engine_has_the_identity_of_the_peer() -> None:
    client = ready()
    assert client.engine.remote_container_id == "client"
    assert performative(TRANSFER) == b"\x00\x53\x14\x45"
