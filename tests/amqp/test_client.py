"""The client role: its frames, its reading of a broker's answers, and its errors."""

from __future__ import annotations

import pytest

from postbus.amqp.client import ClientConnection, ClientSession
from postbus.amqp.conditions import AmqpError, AmqpLinkError
from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveriesAnswered,
    DeliveriesUpdated,
    Event,
    LinkAttached,
    LinkDetached,
    LinkDrained,
    LinkFlowed,
    SaslInitReceived,
    SessionBegun,
    SessionEnded,
    TransferReceived,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.amqp.performatives import ACCEPTED, Modified, Rejected
from postbus.message.codec import Array, Described, Symbol, Ubyte, Uint, Ulong, Ushort
from tests.amqp.wire import (
    AMQP_HEADER,
    ATTACH,
    BEGIN,
    CLOSE,
    DETACH,
    DISPOSITION,
    FLOW,
    OPEN,
    SASL_HEADER,
    SASL_INIT,
    SASL_MECHANISMS,
    SASL_OUTCOME,
    SOURCE,
    TARGET,
    frame,
    performative,
)
from tests.amqp.wire import Client as Hand


class Broker(Hand):
    """Feeds a client engine by hand, as a broker would."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.engine: ClientConnection = ClientConnection(
            container_id="client", limits=Limits(), hostname="host", **settings
        )
        self.engine.start()

    def authenticate(self) -> Broker:
        assert self.header() == SASL_HEADER
        offered = Array(0xA3, [Symbol("PLAIN"), Symbol("ANONYMOUS")])
        self.feed(SASL_HEADER + frame(0, performative(SASL_MECHANISMS, offered), 1))
        return self

    def open(self) -> Broker:  # type: ignore[override]
        self.authenticate()
        self.engine.data_to_send()
        self.feed(frame(0, performative(SASL_OUTCOME, Ubyte(0)), 1) + AMQP_HEADER)
        self.send(OPEN, "broker", None, Uint(1_000), Ushort(9), Uint(30_000))
        self.engine.data_to_send()
        return self

    def session(self, window: int = 100) -> ClientSession:
        session = self.engine.begin()
        self.send(BEGIN, Ushort(session.channel), Uint(50), Uint(window), Uint(9), Uint(255))
        self.engine.data_to_send()
        return session

    def answer(self, name: str, handle: int, *, is_receiver: bool, source: object = SOURCE) -> None:
        self.send(
            ATTACH, name, Uint(handle), is_receiver, Ubyte(1), Ubyte(0), source, TARGET,
            None, None, Uint(7), Ulong(1_000), None, None, {Symbol("x"): 1},
        )  # fmt: skip


def test_opens_step_by_step() -> None:
    broker = Broker(mechanism="PLAIN", initial_response=b"\0rule\0key").authenticate()
    init = broker.reply(SASL_INIT)
    assert init.fields == ["PLAIN", b"\0rule\0key", "host"]
    assert broker.feed(frame(0, performative(SASL_OUTCOME, Ubyte(0)), 1)) == []
    assert broker.header() == AMQP_HEADER
    opened = broker.reply(OPEN)
    assert opened.fields[:5] == ["client", "host", 65_536, 4_095, 240_000]
    assert len(opened.fields) == 10
    assert not broker.engine.is_opened
    broker.feed(AMQP_HEADER)
    (event,) = broker.send(OPEN, "broker", None, Uint(1_000), Ushort(9), Uint(30_000))
    assert event == ConnectionOpened("broker", None, {})
    assert broker.replies() == []
    assert broker.engine.remote_container_id == "broker"


def test_single_mechanism_may_be_a_bare_symbol() -> None:
    broker = Broker()
    broker.header()
    offer = frame(0, performative(SASL_MECHANISMS, Symbol("ANONYMOUS")), 1)
    assert broker.feed(SASL_HEADER + offer) == []
    assert broker.reply(SASL_INIT).fields == ["ANONYMOUS", None, "host"]


@pytest.mark.parametrize(
    ("answer", "condition"),
    [
        (b"HTTP/1.1", "amqp:connection:framing-error"),
        (AMQP_HEADER, "amqp:connection:framing-error"),
        (
            SASL_HEADER + frame(0, performative(SASL_MECHANISMS, Array(0xA3, [Symbol("X")])), 1),
            "amqp:not-implemented",
        ),
        (
            SASL_HEADER + frame(0, performative(SASL_OUTCOME, Ubyte(1)), 1),
            "amqp:unauthorized-access",
        ),
        (
            SASL_HEADER + frame(0, performative(SASL_INIT, Symbol("X")), 1),
            "amqp:connection:framing-error",
        ),
        (SASL_HEADER + frame(0, performative(OPEN, "b")), "amqp:connection:framing-error"),
    ],
)
def test_gives_up_before_open_without_a_close(answer: bytes, condition: str) -> None:
    broker = Broker()
    broker.header()
    (event,) = broker.feed(answer)
    assert isinstance(event, ConnectionClosed)
    assert event.error is not None
    assert event.error.condition == condition
    assert broker.engine.is_closed
    assert broker.replies() == []


def test_second_outcome_closes_after_our_open() -> None:
    broker = Broker().open()
    broker.feed(frame(0, performative(SASL_OUTCOME, Ubyte(0)), 1))
    broker.expect_closed("amqp:connection:framing-error")


def test_session_is_begun_and_used_before_its_answer() -> None:
    broker = Broker().open()
    session = broker.engine.begin()
    link = session.attach_sender("s", "q")
    begun, attached = broker.replies()
    assert (begun.code, begun.channel) == (BEGIN, 0)
    assert begun.fields[:5] == [None, 0, 5_000, 0x7FFF_FFFF, 1_023]
    assert len(begun.fields) == 8
    assert attached.fields[:3] == ["s", 0, False]
    assert attached.fields[6] == Described(Ulong(0x29), ["q"])
    (event,) = broker.send(BEGIN, Ushort(0), Uint(50), Uint(100), Uint(9), Uint(1), channel=3)
    assert event == SessionBegun(session)
    assert session.remote_channel == 3
    assert not link.is_attached
    assert broker.engine.begin().channel == 1


def test_unsolicited_begin_closes() -> None:
    broker = Broker().open()
    broker.send(BEGIN, Ushort(4), Uint(50), Uint(100), Uint(9))
    broker.expect_closed("amqp:illegal-state")
    broker = Broker().open()
    broker.send(BEGIN, None, Uint(50), Uint(100), Uint(9))
    broker.expect_closed("amqp:decode-error")


def test_session_begun_after_the_close_writes_no_frame() -> None:
    """An owner may act on an event that came in one read with the close."""
    broker = Broker().open()
    waiting = broker.engine.begin()
    broker.engine.data_to_send()
    broker.send(CLOSE, None)
    assert waiting.is_ended
    broker.engine.data_to_send()
    session = broker.engine.begin()
    link = session.attach_receiver("r", "q")
    link.grant(5)
    assert session.is_ended
    assert broker.replies() == []


def test_attach_is_answered() -> None:
    broker = Broker().open()
    session = broker.session()
    receiver = session.attach_receiver("r", "q", properties={"com.microsoft:timeout": Uint(5)})
    attach = broker.reply(ATTACH)
    assert attach.fields[13] == {"com.microsoft:timeout": 5}
    assert attach.fields[4] == 1
    broker.answer("r", 4, is_receiver=False)
    assert broker.events == [LinkAttached(receiver)]
    assert (receiver.remote_handle, receiver.delivery_count) == (4, 7)
    assert (receiver.snd_settle_mode, receiver.rcv_settle_mode) == (1, 0)
    assert receiver.properties == {"x": 1}
    assert receiver.source is not None
    assert receiver.source.address == "q"
    receiver.grant(5)
    flow = broker.reply(FLOW)
    assert flow.fields[:7] == [50, 5_000, 0, 0x7FFF_FFFF, 0, 7, 5]
    broker.answer("r", 4, is_receiver=False)  # answers nothing
    assert broker.events == []
    session.attach_receiver("r2", "q")
    broker.engine.data_to_send()
    (ended,) = broker.send(
        ATTACH, "r2", Uint(4), False, None, None, SOURCE, TARGET, None, None, Uint(0)
    )
    assert isinstance(ended, SessionEnded)
    assert broker.replies()[-1].fields[0].value[0] == "amqp:session:handle-in-use"


def test_a_name_can_be_attached_once() -> None:
    session = Broker().open().session()
    session.attach_receiver("n", "q")
    session.attach_sender("n", "q")
    with pytest.raises(AmqpError, match="a link of this name is attached"):
        session.attach_sender("n", "q")


def test_termini_are_written_as_given() -> None:
    broker = Broker().open()
    session = broker.session()
    coordinator = Described(Ulong(0x30), [])
    session.attach_sender("tx", coordinator, source="here")
    attach = broker.reply(ATTACH)
    assert attach.fields[5] == Described(Ulong(0x28), ["here"])
    assert attach.fields[6] == coordinator
    filters = {Symbol("com.microsoft:session-filter"): None}
    source = Described(Ulong(0x28), ["q", *[None] * 6, filters])
    session.attach_receiver("s", source)
    attach = broker.reply(ATTACH)
    assert attach.fields[5] == source
    assert attach.fields[6] == Described(Ulong(0x29), [None])


def test_refused_attach_has_its_error() -> None:
    broker = Broker().open()
    session = broker.session()
    link = session.attach_receiver("r", "q")
    broker.engine.data_to_send()
    broker.answer("r", 0, is_receiver=False, source=None)
    assert broker.events == [LinkAttached(link)]
    assert link.source is None
    error = Described(Ulong(0x1D), [Symbol("amqp:not-found"), "no such queue", None])
    (event,) = broker.send(DETACH, Uint(0), True, error)
    assert isinstance(event, LinkDetached)
    assert event.is_closed
    assert event.error is not None
    assert (event.error.condition, event.error.description) == ("amqp:not-found", "no such queue")
    assert broker.reply(DETACH).fields == [0, True, None]


def test_link_given_up_before_its_answer_stays_gone() -> None:
    broker = Broker().open()
    session = broker.session()
    link = session.attach_sender("s", "q")
    link.detach(AmqpLinkError("amqp:internal-error", "changed my mind"))
    assert [each.code for each in broker.replies()] == [ATTACH, DETACH]
    broker.answer("s", 0, is_receiver=True)
    assert broker.events == []
    assert broker.send(DETACH, Uint(0), True, None) == []
    assert not link.is_attached
    assert broker.replies() == []


def test_flow_of_a_sender_moves_the_count() -> None:
    broker = Broker().open()
    session = broker.session()
    link = session.attach_receiver("r", "q")
    broker.answer("r", 0, is_receiver=False)
    link.grant(10)
    session.drain(link)
    flow = broker.replies()[-1]
    assert (flow.fields[5], flow.fields[6], flow.fields[8]) == (7, 10, True)
    window = (Uint(0), Uint(100), Uint(50), Uint(9), Uint(0))
    assert broker.send(FLOW, *window, Uint(9), Uint(8), None, False) == []
    assert (link.delivery_count, link.credit) == (9, 8)
    assert broker.send(FLOW, *window, Uint(17), Uint(0), None, True) == [LinkDrained(link)]
    assert (link.delivery_count, link.credit) == (17, 0)
    assert broker.send(FLOW, *window, Uint(3), Uint(0), None, False) == []  # never backwards
    assert link.delivery_count == 17


@pytest.mark.parametrize(
    ("state", "is_settled", "code"),
    [(ACCEPTED, False, 0x24), (ACCEPTED, True, 0x24), (Modified(), False, 0x27)],
)
def test_dispositions_leave_in_the_form_asked_for(
    state: object, is_settled: bool, code: int
) -> None:
    broker = Broker().open()
    session = broker.session()
    session.dispose(5, 9, state, is_settled=is_settled)  # type: ignore[arg-type]
    fields = broker.reply(DISPOSITION).fields
    assert fields[:4] == [True, 5, 9, is_settled]
    assert fields[4].descriptor == code
    rejected = Described(Ulong(0x25), [Described(Ulong(0x1D), [Symbol("a:b"), "text", None])])
    (event,) = broker.send(DISPOSITION, False, Uint(5), None, True, rejected)
    assert event == DeliveriesAnswered(session, 5, 5, Rejected("a:b", "text", None), True)


# --- a whole conversation -----------------------------------------------------------------------


def test_send_receive_and_settle_against_the_broker_engine() -> None:
    client = ClientConnection(container_id="c", limits=Limits(512), hostname="h")
    broker = Connection(container_id="b", limits=Limits(512))
    heard: dict[str, list[Event]] = {"client": [], "broker": []}

    def pump() -> None:
        is_moving = True
        while is_moving:
            data = b"".join(client.data_to_send())
            for event in one_by_one(broker.receive_data(data, 1)):
                heard["broker"].append(event)
                if isinstance(event, SaslInitReceived):
                    broker.accept_sasl()
                elif isinstance(event, LinkAttached) and isinstance(event.link, IncomingLink):
                    event.link.accept(max_message_bytes=1 << 20, credit=2)
                elif isinstance(event, LinkAttached) and isinstance(event.link, OutgoingLink):
                    event.link.accept()
            answer = b"".join(broker.data_to_send())
            heard["client"] += one_by_one(client.receive_data(answer, 1))
            is_moving = bool(data or answer)

    client.start()
    pump()
    session = client.begin()
    sender = session.attach_sender("s", "q")
    receiver = session.attach_receiver("r", "q")
    pump()
    assert (sender.credit, sender.is_attached, receiver.is_attached) == (2, True, True)
    body = bytes(range(256)) * 40
    sender.send(b"tag", (body, b"!"), is_settled=False)
    receiver.grant(3)
    pump()
    taken = next(each for each in heard["broker"] if isinstance(each, TransferReceived))
    assert (taken.payload, taken.delivery_tag) == (body + b"!", b"tag")
    taken.link.settle(taken.delivery_id, taken.delivery_id, ACCEPTED)
    flowed = next(each for each in heard["broker"] if isinstance(each, LinkFlowed))
    flowed.link.send(b"k" * 16, (body,), is_settled=False)
    pump()
    got = heard["client"][-1]
    assert isinstance(got, TransferReceived)
    assert got.payload == body
    assert heard["client"][-2] == DeliveriesUpdated(sender, [0], [b"tag"], ACCEPTED, True)
    session.dispose(got.delivery_id, got.delivery_id, ACCEPTED)
    pump()
    flowed.link.settle(got.delivery_id, got.delivery_id, ACCEPTED)
    pump()
    answered = DeliveriesAnswered(session, got.delivery_id, got.delivery_id, ACCEPTED, True)
    assert heard["client"][-1] == answered
    session.end()
    client.close()
    pump()
    assert [type(each) for each in heard["broker"][-2:]] == [SessionEnded, ConnectionClosed]
