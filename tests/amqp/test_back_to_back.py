"""Two engines, client and broker, joined by byte streams that are cut at any place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from postbus.amqp.client import ClientConnection, ClientSession
from postbus.amqp.conditions import AmqpLinkError, AmqpSessionError
from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    ConnectionClosed,
    DeliveriesAnswered,
    DeliveriesUpdated,
    Event,
    LinkAttached,
    LinkDetached,
    LinkDrained,
    LinkFlowed,
    SaslInitReceived,
    SessionEnded,
    TransferReceived,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, Link, OutgoingLink
from postbus.amqp.performatives import ACCEPTED, RELEASED, DeliveryState, Modified, Rejected
from postbus.amqp.session import Session

STATES: list[DeliveryState] = [
    ACCEPTED,
    RELEASED,
    Modified(True, False, None),
    Rejected("com.microsoft:message-lock-lost", "gone", None),
    Rejected(),
]


@dataclass
class Route:
    """One link: the deliveries of its sending side and of its receiving side."""

    client: Link
    broker: Link | None = None
    sent: list[bytes] = field(default_factory=list)
    got: list[bytes] = field(default_factory=list)
    undecided: list[int] = field(default_factory=list)
    is_broken: bool = False

    @property
    def sender(self) -> OutgoingLink | None:
        for link in (self.client, self.broker):
            if isinstance(link, OutgoingLink):
                return link
        return None

    @property
    def receiver(self) -> IncomingLink | None:
        for link in (self.client, self.broker):
            if isinstance(link, IncomingLink):
                return link
        return None


class Pair:
    """A client and a broker with their streams and the outcomes on both sides."""

    def __init__(self, client_limits: Limits, broker_limits: Limits) -> None:
        self.broker = Connection(container_id="broker", limits=broker_limits)
        self.client = ClientConnection(
            container_id="client", limits=client_limits, hostname="host", delivery_id_base=2**32 - 5
        )
        self.to_broker = b""
        self.to_client = b""
        self.routes: dict[str, Route] = {}
        self.attaching: list[Link] = []
        self.draining: list[OutgoingLink] = []
        self.drained: list[IncomingLink] = []
        self.closed: list[ConnectionClosed] = []
        self.outcomes: dict[bytes, DeliveryState] = {}  # tag -> outcome of the receiving side
        self.outcome_by_tag: dict[
            bytes, DeliveryState | None
        ] = {}  # tag -> outcome at the sending side
        self.answered: list[int] = []
        self.client.start()

    # --- streams --------------------------------------------------------------------------------

    def carry_to_broker(self, size: int) -> bool:
        self.to_broker += b"".join(self.client.data_to_send())
        piece, self.to_broker = self.to_broker[:size], self.to_broker[size:]
        for event in one_by_one(self.broker.receive_data(piece, 1)):
            self.on_broker(event)
            if isinstance(event, SaslInitReceived):
                self.broker.accept_sasl()
                for later in one_by_one(self.broker.receive_data(b"", 1)):
                    self.on_broker(later)
        return bool(piece)

    def carry_to_client(self, size: int) -> bool:
        self.to_client += b"".join(self.broker.data_to_send())
        piece, self.to_client = self.to_client[:size], self.to_client[size:]
        for event in one_by_one(self.client.receive_data(piece, 1)):
            self.on_client(event)
        return bool(piece)

    def pump(self) -> None:
        """Carry everything, with the broker giving due answers, until both are silent."""
        is_moving = True
        while is_moving:
            is_moving = self.carry_to_broker(1 << 20) | self.carry_to_client(1 << 20)
            is_moving |= self.accept_all() | self.answer_drains()

    # --- the broker's owner ---------------------------------------------------------------------

    def on_broker(self, event: Event) -> None:
        match event:
            case LinkAttached(link):
                assert link.name in self.routes
                self.routes[link.name].broker = link
                self.attaching.append(link)
            case LinkFlowed(link) if link.is_draining:
                self.draining.append(link)
            case DeliveriesUpdated(link, ids, tags, state, is_settled):
                self.outcome_by_tag.update(dict.fromkeys(tags, state))
                if not is_settled and state is not None:
                    assert ids == sorted(ids)
                    for each in ids:
                        link.settle(each, each, state)
            case _:
                self.on_either(event)

    def accept_all(self) -> bool:
        found, self.attaching = self.attaching, []
        for link in found:
            if isinstance(link, IncomingLink):
                link.accept(max_message_bytes=1 << 20, credit=3)
            elif isinstance(link, OutgoingLink):
                link.accept()
        return bool(found)

    def answer_drains(self) -> bool:
        found, self.draining = self.draining, []
        for link in found:
            if link.is_draining:
                link.drained()
        return bool(found)

    # --- the client's owner ---------------------------------------------------------------------

    def on_client(self, event: Event) -> None:
        match event:
            case DeliveriesUpdated(_, _, tags, state, is_settled):
                assert is_settled
                self.outcome_by_tag.update(dict.fromkeys(tags, state))
            case DeliveriesAnswered(_, first, last, state, is_settled):
                assert is_settled
                assert first == last
                self.answered.append(first)
            case LinkDrained(link):
                assert link.credit == 0
                self.drained.append(link)
            case _:
                self.on_either(event)

    def on_either(self, event: Event) -> None:
        match event:
            case TransferReceived(link, delivery_id, tag, _, is_settled, _, payload):
                route = self.routes[link.name]
                route.got.append(payload)
                assert payload == route.sent[len(route.got) - 1]
                assert int.from_bytes(tag, "big") & 0xFFFF == len(route.got) - 1
                if not is_settled:
                    route.undecided.append(delivery_id)
            case LinkDetached(link):
                self.routes[link.name].is_broken = True
            case SessionEnded(session):
                self.break_session(session)
            case ConnectionClosed():
                self.closed.append(event)

    def break_session(self, session: Session) -> None:
        for route in self.routes.values():
            ends = (route.client.session, route.broker.session if route.broker else None)
            route.is_broken |= session in ends


SENDING = {
    "number": st.integers(0, 50),
    "size": st.sampled_from([0, 1, 100, 450, 600, 3_000, 9_000]),
    "count": st.integers(1, 5),
    "is_settled": st.booleans(),
    "message_format": st.sampled_from([0, 0, 0x80013700]),
}


def small_limits(frame_bytes: int, window: int) -> Limits:
    return Limits(max_frame_bytes=frame_bytes, incoming_window=window, channel_max=7, handle_max=15)


class BackToBack(RuleBasedStateMachine):
    """Any order of calls on both engines keeps order, counts and windows, and closes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names = 0
        self.sessions: list[ClientSession] = []

    @initialize(
        client_frame=st.sampled_from([512, 700, 4_096]),
        broker_frame=st.sampled_from([512, 700, 4_096]),
        client_window=st.integers(2, 9),
        broker_window=st.integers(2, 9),
    )
    def connect(
        self, client_frame: int, broker_frame: int, client_window: int, broker_window: int
    ) -> None:
        self.pair = Pair(
            small_limits(client_frame, client_window), small_limits(broker_frame, broker_window)
        )
        self.pair.pump()
        self.begin()
        for is_sender in (True, False, False):
            self.attach(0, is_sender, 0)
        self.pair.pump()
        for number in range(3):
            self.grant(number, 9)

    # --- choosing -------------------------------------------------------------------------------

    def whole_routes(self, kind: type[Link]) -> list[Route]:
        """Routes on which both ends are attached, by the client's kind of link."""
        return [
            route
            for route in self.pair.routes.values()
            if not route.is_broken
            and isinstance(route.client, kind)
            and route.client.is_attached
            and route.broker is not None
            and route.broker.is_attached
        ]

    def pick_session(self, number: int) -> ClientSession | None:
        alive = [each for each in self.sessions if not each.is_ended]
        return alive[number % len(alive)] if alive else None

    # --- life cycle -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.sessions) < 3)
    @rule()
    def begin(self) -> None:
        self.sessions.append(self.pair.client.begin())

    @rule(number=st.integers(0, 50), is_sender=st.booleans(), mode=st.integers(0, 2))
    def attach(self, number: int, is_sender: bool, mode: int) -> None:
        session = self.pick_session(number)
        if (
            session is None
            or session._handle_count - len(session._free_handles) > 8
            or self.names > 60
        ):
            return
        self.names += 1
        name = f"link-{self.names}"
        link: Link
        if is_sender:
            link = session.attach_sender(name, "queue", snd_settle_mode=mode)
        else:
            link = session.attach_receiver(name, "queue", snd_settle_mode=mode)
        self.pair.routes[name] = Route(link)

    @rule()
    def accept(self) -> None:
        self.pair.accept_all()

    @rule()
    def refuse(self) -> None:
        if self.pair.attaching:
            link = self.pair.attaching.pop()
            self.pair.routes[link.name].is_broken = True
            link.refuse(AmqpLinkError("amqp:not-found", "no such queue"))

    @rule(number=st.integers(0, 50), by_broker=st.booleans(), chance=st.integers(0, 4))
    def detach(self, number: int, by_broker: bool, chance: int) -> None:
        if chance != 2:
            return
        alive = [each for each in self.pair.routes.values() if not each.is_broken]
        if alive:
            route = alive[number % len(alive)]
            link = route.broker if by_broker else route.client
            if link is not None:
                route.is_broken = True
                link.detach(AmqpLinkError("amqp:link:detach-forced", "enough"))

    @rule(number=st.integers(0, 50), by_broker=st.booleans(), chance=st.integers(0, 9))
    def end(self, number: int, by_broker: bool, chance: int) -> None:
        if chance != 5:
            return
        session: Session | None = self.pick_session(number)
        if by_broker:
            ours = list(self.pair.broker.sessions.values())
            session = ours[number % len(ours)] if ours else None
        if session is not None and len(self.sessions) < 3:
            self.pair.break_session(session)
            session.end(AmqpSessionError("amqp:internal-error", "enough"))

    # --- traffic --------------------------------------------------------------------------------

    @rule(**SENDING)
    def send_from_client(self, **how: Any) -> None:
        self.send(from_broker=False, **how)

    @rule(**SENDING)
    def send_from_broker(self, **how: Any) -> None:
        self.send(from_broker=True, **how)

    def send(
        self,
        number: int,
        size: int,
        count: int,
        is_settled: bool,
        from_broker: bool,
        message_format: int,
    ) -> None:
        routes = self.whole_routes(IncomingLink if from_broker else OutgoingLink)
        if not routes:
            return
        route = routes[number % len(routes)]
        link = route.sender
        assert link is not None
        for _ in range(min(count, link.credit)):
            place = len(route.sent)
            payload = b"%06d" % place + bytes(size)
            tag = (int(link.name[5:]) << 16 | place).to_bytes(16, "big")
            route.sent.append(payload)
            link.send(
                tag,
                (payload[:3], b"", payload[3:]),
                is_settled=is_settled,
                message_format=message_format,
            )

    @rule(number=st.integers(0, 50), credit=st.sampled_from([9, 30, 2, 0]))
    def grant(self, number: int, credit: int) -> None:
        routes = self.whole_routes(Link)
        if routes:
            receiver = routes[number % len(routes)].receiver
            assert receiver is not None
            receiver.grant(credit)

    @rule(number=st.integers(0, 50), state=st.sampled_from(STATES), is_settled=st.booleans())
    def decide(self, number: int, state: DeliveryState, is_settled: bool) -> None:
        routes = [each for each in self.whole_routes(Link) if each.undecided]
        if not routes:
            return
        route = routes[number % len(routes)]
        delivery_id = route.undecided.pop(number % len(route.undecided))
        receiver = route.receiver
        assert receiver is not None
        if isinstance(receiver.session, ClientSession):
            receiver.session.dispose(delivery_id, delivery_id, state, is_settled=is_settled)
        else:
            receiver.settle(delivery_id, delivery_id, state)

    @rule(number=st.integers(0, 50))
    def drain(self, number: int) -> None:
        routes = self.whole_routes(IncomingLink)
        if routes:
            link = routes[number % len(routes)].receiver
            assert link is not None
            assert isinstance(link.session, ClientSession)
            link.session.drain(link)

    # --- the wire -------------------------------------------------------------------------------

    @rule(size=st.sampled_from([1, 5, 8, 40, 300, 5_000]), to_broker=st.booleans())
    def carry(self, size: int, to_broker: bool) -> None:
        if to_broker:
            self.pair.carry_to_broker(size)
        else:
            self.pair.carry_to_client(size)

    @rule()
    def settle_down(self) -> None:
        pair = self.pair
        pair.pump()
        assert pair.closed == []
        for route in pair.routes.values():
            if route.is_broken:
                continue
            sender, receiver = route.sender, route.receiver
            assert sender is not None
            assert receiver is not None
            assert route.got == route.sent
            assert sender.session.held_count == 0
            assert sender.credit == max(receiver.credit, 0)
            assert sender.delivery_count % 2**32 == receiver.delivery_count % 2**32
            waiting = [each for each, _ in sender.session.unsettled.values() if each is sender]
            assert len(waiting) == len(route.undecided)
        assert pair.client.partial_bytes == 0
        assert pair.broker.partial_bytes == 0

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.settle_down()
        for session in self.sessions:
            session.end()
        self.pair.pump()
        assert self.pair.broker.sessions == {}
        assert self.pair.client.sessions == {}
        self.pair.client.close()
        self.pair.pump()
        assert [each.error for each in self.pair.closed] == [None]


BackToBack.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestBackToBack = pytest.mark.slow(BackToBack.TestCase)
