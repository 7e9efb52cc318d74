"""The engine against Qpid Proton's, bytes both ways in memory, cut at random places."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import proton
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.amqp.conditions import AmqpConnectionError, AmqpLinkError, AmqpSessionError
from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveriesUpdated,
    Event,
    LinkAttached,
    LinkDetached,
    LinkFlowed,
    SaslInitReceived,
    SessionBegun,
    SessionEnded,
    TransferReceived,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.amqp.performatives import ACCEPTED, RELEASED, Modified, Rejected
from postbus.message.delivery import encode_prefix
from postbus.message.sections import slice_message

MEBIBYTE = 1 << 20


def tag_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Pair:
    """A Proton client and the engine, joined by two byte streams."""

    def __init__(
        self,
        seed: int = 0,
        *,
        client_frame: int = 65_536,
        limits: Limits | None = None,
        credit: int = 1_000,
        window_frames: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.engine = Connection(
            container_id="postbus",
            limits=limits or Limits(max_message_bytes=64 * MEBIBYTE),
            delivery_id_base=0x4000_0000,
        )
        self.collector = proton.Collector()
        self.client = proton.Connection()
        self.client.container = "client"
        self.client.hostname = "host"
        self.client.collect(self.collector)
        self.transport = proton.Transport()
        self.transport.max_frame_size = client_frame
        sasl = self.transport.sasl()
        sasl.allowed_mechs("ANONYMOUS")
        self.transport.bind(self.client)
        self.client.open()
        self.session = self.client.session()
        if window_frames is not None:
            self.session.incoming_capacity = window_frames * client_frame
        self.session.open()
        self.credit = credit
        self.events: list[Event] = []
        self.client_events: list[tuple[proton.EventType, Any]] = []
        self.on_event: Callable[[Event], None] = lambda _event: None

    # --- pumping --------------------------------------------------------------------------------

    def pump(self) -> None:
        """Carry bytes until both sides are silent."""
        while True:
            moved = self._to_engine()
            moved |= self._to_client()
            while (event := self.collector.peek()) is not None:
                self.client_events.append((event.type, event.context))
                self.collector.pop()
            if not moved:
                return

    def _cuts(self, data: bytes) -> Iterator[bytes]:
        pos = 0
        while pos < len(data):
            step = self.random.choice((1, 3, 7, 8, 64, 1_000, 65_536, MEBIBYTE))
            yield data[pos : pos + step]
            pos += step

    def _to_engine(self) -> bool:
        size = self.transport.pending()
        if size <= 0:
            return False
        data = bytes(self.transport.peek(size))
        self.transport.pop(size)
        for piece in self._cuts(data):
            self._feed(piece)
        return True

    def _feed(self, piece: bytes) -> None:
        for event in one_by_one(self.engine.receive_data(piece, 1)):
            self.events.append(event)
            if isinstance(event, SaslInitReceived):
                self.engine.accept_sasl()
                self._feed(b"")
            elif isinstance(event, LinkAttached):
                self.on_attach(event)
            self.on_event(event)

    def on_attach(self, event: LinkAttached) -> None:
        if isinstance(event.link, IncomingLink):
            event.link.accept(max_message_bytes=64 * MEBIBYTE, credit=self.credit)
        elif isinstance(event.link, OutgoingLink):
            event.link.accept()

    def _to_client(self) -> bool:
        data = b"".join(self.engine.data_to_send())
        for piece in self._cuts(data):
            rest = piece
            while rest:
                free_bytes = self.transport.capacity()
                assert free_bytes > 0, self.transport.condition
                self.transport.push(rest[:free_bytes])
                rest = rest[free_bytes:]
        return bool(data)

    # --- ready-made -----------------------------------------------------------------------------

    def sender(self, name: str = "s") -> tuple[Any, IncomingLink]:
        sender = self.session.sender(name)
        sender.source.address, sender.target.address = "here", "q"
        sender.open()
        self.pump()
        return sender, self.of(LinkAttached)[-1].link

    def receiver(self, name: str = "r", credit: int = 1_000) -> tuple[Any, OutgoingLink]:
        receiver = self.session.receiver(name)
        receiver.source.address, receiver.target.address = "q", "here"
        receiver.open()
        receiver.flow(credit)
        self.pump()
        return receiver, self.of(LinkAttached)[-1].link

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    def client_saw(self, kind: proton.EventType) -> list[Any]:
        return [context for each, context in self.client_events if each == kind]


def read_all(receiver: Any) -> list[tuple[Any, bytes]]:
    """Take the complete deliveries: (delivery, payload); they stay unsettled."""
    found = []
    while (delivery := receiver.current) is not None and not delivery.partial:
        # proton's delivery tags are text in Python; the raw bytes come by way of surrogates
        found.append((delivery, receiver.recv(delivery.pending) or b""))
        receiver.advance()
    return found


def test_connection_opens_and_closes_both_ways() -> None:
    for closes_first in ("client", "engine"):
        pair = Pair()
        pair.pump()
        (opened,) = pair.of(ConnectionOpened)
        assert (opened.container_id, opened.hostname) == ("client", "host")
        assert pair.client.remote_container == "postbus"
        assert pair.client_saw(proton.Event.CONNECTION_REMOTE_OPEN)
        assert pair.client_saw(proton.Event.SESSION_REMOTE_OPEN)
        assert len(pair.of(SessionBegun)) == 1
        assert pair.transport.remote_idle_timeout == 240.0
        if closes_first == "client":
            pair.client.condition = proton.Condition("test:x", "because")
            pair.client.close()
            pair.pump()
            (closed,) = pair.of(ConnectionClosed)
            assert (closed.error.condition, closed.error.description) == ("test:x", "because")
            assert pair.client_saw(proton.Event.CONNECTION_REMOTE_CLOSE)
        else:
            pair.engine.close(AmqpConnectionError("amqp:connection:forced", "going down"))
            pair.pump()
            condition = pair.client.remote_condition
            assert (condition.name, condition.description) == (
                "amqp:connection:forced",
                "going down",
            )
        assert pair.engine.is_closed


PROPERTY_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**64 - 1).map(proton.ulong),
    st.integers(-(2**15), 2**15 - 1).map(proton.short),
    st.floats(allow_nan=False),
    st.uuids(),
)
PLAIN_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), max_size=40)
MESSAGES = st.builds(
    dict,
    id=st.none() | PLAIN_TEXT | st.uuids() | st.integers(0, 2**64 - 1).map(proton.ulong),
    subject=st.none() | PLAIN_TEXT,
    group_id=st.none() | PLAIN_TEXT,
    durable=st.booleans(),
    ttl=st.sampled_from([0, 1, 60]),
    properties=st.dictionaries(st.text(min_size=1, max_size=20), PROPERTY_VALUES, max_size=6),
    annotations=st.dictionaries(
        st.sampled_from(["x-opt-partition-key", "x-mine", "y"]).map(proton.symbol),
        PLAIN_TEXT,
        max_size=3,
    ),
    body=st.one_of(
        st.binary(max_size=3_000), st.text(max_size=300), st.lists(PROPERTY_VALUES, max_size=4)
    ),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(MESSAGES, min_size=1, max_size=5), st.integers(0, 2**32), st.integers(512, 70_000))
def test_messages_of_proton_come_through_and_go_back_unchanged(
    drawn: list[dict[str, Any]], seed: int, client_frame: int
) -> None:
    pair = Pair(seed, client_frame=client_frame)
    sender, _ = pair.sender()
    receiver, outgoing = pair.receiver()
    messages = []
    for fields in drawn:
        message = proton.Message(inferred=True)
        for name, value in fields.items():
            setattr(message, name, value)
        messages.append(message)
        sender.send(message)
    pair.pump()
    transfers = pair.of(TransferReceived)
    assert [each.payload for each in transfers] == [each.encode() for each in messages]
    for number, each in enumerate(transfers):
        envelope = slice_message(each.payload)
        prefix = encode_prefix(
            envelope,
            sequence=number + 1,
            enqueued_ms=1_700_000_000_000,
            delivery_count=number,
            ttl_ms=envelope.ttl_ms,
            locked_until_ms=1_700_000_060_000,
            lock_token=tag_of(number),
        )
        parts = (prefix, envelope.properties, envelope.application_properties, envelope.body)
        outgoing.send(tag_of(number), parts, is_settled=False)
    pair.pump()
    back = read_all(receiver)
    assert len(back) == len(messages)
    for number, ((_, payload), message) in enumerate(zip(back, messages, strict=True)):
        copy = proton.Message()
        copy.decode(payload)
        assert (copy.id, copy.subject, copy.group_id) == (
            message.id,
            message.subject,
            message.group_id,
        )
        assert (copy.durable, copy.ttl, copy.delivery_count) == (
            message.durable,
            message.ttl,
            number,
        )
        assert (copy.properties or {}) == (message.properties or {})
        assert copy.body == message.body
        assert copy.annotations["x-opt-sequence-number"] == number + 1
        for key, value in (message.annotations or {}).items():
            assert copy.annotations[key] == value


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (ACCEPTED, proton.Delivery.ACCEPTED),
        (RELEASED, proton.Delivery.RELEASED),
        (Modified(True, True, None), proton.Delivery.MODIFIED),
        (Rejected("amqp:not-allowed", "no"), proton.Delivery.REJECTED),
        (Rejected(), proton.Delivery.REJECTED),
    ],
)
def test_outcomes_of_sends_reach_the_client(state: Any, expected: int) -> None:
    pair = Pair()
    sender, link = pair.sender()
    deliveries = [sender.send(proton.Message(body=number)) for number in range(5)]
    pair.pump()
    ids = [each.delivery_id for each in pair.of(TransferReceived)]
    assert ids == list(range(5))
    link.settle(ids[0], ids[2], state)
    link.settle(ids[4], ids[4], state)
    pair.pump()
    settled = [delivery.settled for delivery in deliveries]
    assert settled == [True, True, True, False, True]
    assert deliveries[0].remote_state == expected
    if state == Rejected("amqp:not-allowed", "no"):
        condition = deliveries[0].remote.condition
        assert (condition.name, condition.description) == ("amqp:not-allowed", "no")


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (proton.Delivery.ACCEPTED, ACCEPTED),
        (proton.Delivery.RELEASED, RELEASED),
        (proton.Delivery.REJECTED, Rejected()),
        (proton.Delivery.MODIFIED, Modified(False, False, None)),
    ],
)
@pytest.mark.parametrize("is_settled", [True, False])
def test_outcomes_of_receives_reach_the_engine(
    outcome: int, expected: Any, is_settled: bool
) -> None:
    pair = Pair()
    receiver, link = pair.receiver()
    for number in range(4):
        link.send(tag_of(number), (b"\x00\x53\x77\x40",), is_settled=False)
    pair.pump()
    deliveries = [delivery for delivery, _ in read_all(receiver)]
    for delivery in deliveries:
        delivery.update(outcome)
        if is_settled:
            delivery.settle()
    pair.pump()
    updates = pair.of(DeliveriesUpdated)
    assert [tag for each in updates for tag in each.tags] == [tag_of(n) for n in range(4)]
    assert {repr(each.state) for each in updates} == {repr(expected)}
    assert {each.is_settled for each in updates} == {is_settled}
    session = link.session
    if not is_settled:
        assert len(session.unsettled) == 4
        ids = [number for each in updates for number in each.delivery_ids]
        link.settle(ids[0], ids[-1], expected)
        pair.pump()
        assert all(delivery.settled for delivery in deliveries)
        assert {delivery.remote_state for delivery in deliveries} == {outcome}
    assert session.unsettled == {}


@pytest.mark.slow
@pytest.mark.parametrize("client_frame", [512, 4_096, 1_000_000])
def test_ten_megabytes_both_ways_in_many_frames(client_frame: int) -> None:
    body = random.Random(1).randbytes(10_000_000)
    pair = Pair(client_frame=client_frame, limits=Limits(16_384, max_message_bytes=1 << 24))
    sender, incoming = pair.sender()
    receiver, outgoing = pair.receiver()
    message = proton.Message(body=body, inferred=True)
    for _ in range(2):
        sender.send(message)
    pair.pump()
    transfers = pair.of(TransferReceived)
    assert len(transfers) == 2
    assert incoming.delivery_count == 2
    assert pair.engine.partial_bytes == 0
    for number, each in enumerate(transfers):
        assert hashlib.sha256(each.payload).digest() == hashlib.sha256(message.encode()).digest()
        outgoing.send(tag_of(number), (each.payload[:9], each.payload[9:]), is_settled=True)
    pair.pump()
    back = read_all(receiver)
    assert [payload == transfers[0].payload for _, payload in back] == [True, True]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.lists(st.integers(0, 6_000), min_size=1, max_size=40),
)
def test_a_small_window_of_the_client_is_kept(
    seed: int, window_frames: int, sizes: list[int]
) -> None:
    """Proton closes with a window violation when it gets more than its window."""
    pair = Pair(seed, client_frame=512, window_frames=window_frames)
    receivers = [pair.receiver(name) for name in ("a", "b")]
    expected: dict[str, list[int]] = {"a": [], "b": []}
    for number, size in enumerate(sizes):
        receiver, link = receivers[number % 2]
        link.send(tag_of(number), (b"x" * size,), is_settled=False)
        expected[receiver.name].append(size)
    got: dict[str, list[int]] = {"a": [], "b": []}
    parts: dict[str, int] = {"a": 0, "b": 0}
    idle_rounds = 0
    while idle_rounds < 3:
        pair.pump()
        progress = False
        for receiver, _ in receivers:
            while (delivery := receiver.current) is not None:
                data = receiver.recv(delivery.pending) if delivery.pending else b""
                progress |= bool(data)
                parts[receiver.name] += len(data or b"")
                if delivery.partial:
                    break
                got[receiver.name].append(parts[receiver.name])
                parts[receiver.name] = 0
                receiver.advance()
                progress = True
        idle_rounds = 0 if progress else idle_rounds + 1
    assert pair.transport.condition is None
    assert got == expected
    assert receivers[0][1].session.held_count == 0


def test_credit_limits_and_counts() -> None:
    pair = Pair(credit=3)
    sender, incoming = pair.sender()
    assert sender.credit == 3
    for number in range(5):
        sender.send(proton.Message(body=number))
    pair.pump()
    assert len(pair.of(TransferReceived)) == 3
    assert (incoming.delivery_count, incoming.credit) == (3, 0)
    incoming.grant(10)
    pair.pump()
    assert len(pair.of(TransferReceived)) == 5
    assert sender.credit == 8
    receiver, outgoing = pair.receiver(credit=4)
    assert (outgoing.limit, outgoing.credit) == (4, 4)
    outgoing.send(tag_of(1), (b"\x00\x53\x77\x40",), is_settled=True)
    receiver.flow(6)
    pair.pump()
    assert (outgoing.limit, outgoing.sent, outgoing.credit) == (10, 1, 9)


def test_drain_is_answered_with_the_credit_given_up() -> None:
    pair = Pair()
    receiver, link = pair.receiver(credit=0)
    receiver.drain(10)
    pair.pump()
    assert isinstance(pair.events[-1], LinkFlowed)
    assert link.is_draining
    link.send(tag_of(1), (b"\x00\x53\x77\x40",), is_settled=True)
    link.drained()
    pair.pump()
    assert receiver.credit == 1  # the message that waits in the client
    assert len(read_all(receiver)) == 1
    assert receiver.credit == 0
    assert not receiver.draining()
    receiver.drain(0)
    receiver.flow(5)
    pair.pump()
    assert link.credit == 5


def test_aborted_delivery_is_dropped_and_takes_credit() -> None:
    pair = Pair(credit=10, limits=Limits(512))
    sender, link = pair.sender()
    delivery = sender.delivery("1")
    sender.stream(b"x" * 2_000)
    pair.pump()
    assert pair.engine.partial_bytes > 0
    delivery.abort()
    pair.pump()
    assert pair.engine.partial_bytes == 0
    assert pair.of(TransferReceived) == []
    sender.send(proton.Message(body="after"))
    pair.pump()
    (transfer,) = pair.of(TransferReceived)
    assert transfer.payload == proton.Message(body="after").encode()
    assert link.credit == sender.credit


def test_detach_and_end_both_ways() -> None:
    pair = Pair()
    sender, incoming = pair.sender()
    receiver, outgoing = pair.receiver()
    sender.close()
    pair.pump()
    (detached,) = pair.of(LinkDetached)
    assert detached.link is incoming
    assert detached.is_closed
    assert sender.state & proton.Endpoint.REMOTE_CLOSED
    outgoing.detach(AmqpLinkError("amqp:link:detach-forced", "idle"))
    pair.pump()
    condition = receiver.remote_condition
    assert (condition.name, condition.description) == ("amqp:link:detach-forced", "idle")
    receiver.close()
    pair.pump()
    assert len(pair.of(LinkDetached)) == 1
    # the handle is free again
    _, again = pair.receiver("again")
    again.send(tag_of(1), (b"\x00\x53\x77\x40",), is_settled=True)
    session = again.session
    session.end(AmqpSessionError("amqp:internal-error", "oops"))
    pair.pump()
    assert pair.session.remote_condition.name == "amqp:internal-error"
    pair.session.close()
    pair.session = pair.client.session()
    pair.session.open()
    pair.sender("fresh")
    pair.session.close()
    pair.pump()
    assert len(pair.of(SessionEnded)) == 1
    assert pair.engine.sessions == {}


def test_refused_attach_has_a_null_terminus_and_a_closing_detach() -> None:
    pair = Pair()
    error = AmqpLinkError("amqp:not-found", "no such queue")
    pair.on_attach = lambda event: event.link.refuse(error)  # type: ignore[method-assign]
    sender, _ = pair.sender()
    receiver, _ = pair.receiver()
    assert sender.remote_target.type == proton.Terminus.UNSPECIFIED
    assert receiver.remote_source.type == proton.Terminus.UNSPECIFIED
    for link in (sender, receiver):
        assert link.remote_condition.name == "amqp:not-found"
        assert link.state & proton.Endpoint.REMOTE_CLOSED
        link.close()
    pair.pump()
    assert pair.transport.condition is None
    assert not pair.engine.is_closed


def test_many_sessions_and_links() -> None:
    pair = Pair()
    pair.pump()
    sessions = [pair.client.session() for _ in range(20)]
    senders = []
    for session in sessions:
        session.open()
        for number in range(20):
            sender = session.sender(f"s{number}")
            sender.target.address = "q"
            sender.open()
            senders.append(sender)
    pair.pump()
    for number, sender in enumerate(senders):
        sender.send(proton.Message(body=number))
    pair.pump()
    assert len(pair.of(TransferReceived)) == 400
    for each in pair.of(TransferReceived):
        each.link.settle(each.delivery_id, each.delivery_id, ACCEPTED)
    pair.pump()
    assert pair.transport.condition is None
