"""AMQP 1.0 part 2, 2.6.12 to 2.6.14 and 2.7.5: transfers of one and of many frames."""

from __future__ import annotations

import pytest

from postbus.amqp import conditions
from postbus.amqp.events import (
    LinkDetached,
    OversizeReceived,
    SessionEnded,
    TransferReceived,
)
from postbus.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    DeliveryState,
    Modified,
    Received,
    Rejected,
    TransactionalState,
    decode_state,
    encode_state,
)
from postbus.message.codec import Described, Symbol, Ubyte, Uint, Ulong, decode_value, encode_value
from tests.amqp.wire import ACCEPTED as ACCEPTED_VALUE
from tests.amqp.wire import (
    ATTACH,
    BASE,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    SOURCE,
    TRANSFER,
    Client,
    error_of,
    frame,
)

TAG = b"0123456789abcdef"


def ready(credit: int = 100, size: int = 1_000) -> Client:
    client = Client().open()
    client.begin()
    client.sender(credit=credit, size=size)
    return client


def received(client: Client) -> TransferReceived:
    (event,) = client.events
    assert isinstance(event, TransferReceived)
    return event


# --- in ------------------------------------------------------------------------------------------


def test_transfer_of_one_frame() -> None:
    client = ready()
    client.transfer(5, b"payload", tag=b"\1\2", is_settled=True)
    event = received(client)
    assert (event.delivery_id, event.delivery_tag, event.payload) == (5, b"\1\2", b"payload")
    assert (event.message_format, event.is_settled, event.state) == (0, True, None)
    assert (event.link.delivery_count, event.link.credit) == (1, 99)
    assert client.engine.data_to_send() == []


@pytest.mark.parametrize(
    "fields",
    [
        (Uint(0), Uint(1), b"t"),
        (Uint(0), Uint(1), b"t", None),
        (Uint(0), Uint(1), b"t", Uint(0), None, None),
        (Uint(0), Uint(1), b"t", Uint(0), False, False, None, None, None, None, None),
        (Uint(0), Uint(1), b"t", Uint(0), False, False, Ubyte(0), None, False, False, True),
    ],
)
def test_every_form_of_a_plain_transfer_is_the_same(fields: tuple[object, ...]) -> None:
    client = ready()
    client.send(TRANSFER, *fields, payload=b"p")
    event = received(client)
    assert (event.delivery_id, event.delivery_tag, event.payload) == (1, b"t", b"p")
    assert (event.message_format, event.is_settled) == (0, False)


def test_message_format_tag_and_state_are_reported() -> None:
    client = ready()
    state = Described(Ulong(0x34), [b"txn", None])
    client.send(
        TRANSFER, Uint(0), Uint(300), None, Uint(0x80013700), True, False, None, state, payload=b"p"
    )
    event = received(client)
    assert (event.delivery_id, event.delivery_tag) == (300, b"")
    assert event.message_format == 0x80013700
    assert event.state == TransactionalState(b"txn", None)


def test_frames_of_two_links_may_alternate() -> None:
    client = ready()
    client.sender("two", 1)
    client.transfer(0, b"a1", more=True)
    client.transfer(1, b"b1", handle=1, more=True)
    client.transfer(0, b"a2", more=True)
    client.transfer(None, b"b2", handle=1, tag=None, is_settled=True)
    event = received(client)
    assert (event.payload, event.delivery_id, event.is_settled) == (b"b1b2", 1, True)
    client.transfer(None, b"", tag=None, state=ACCEPTED_VALUE)
    event = received(client)
    assert (event.payload, event.delivery_tag, event.state) == (b"a1a2", b"t", ACCEPTED)
    assert client.engine.partial_bytes == 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_aborted_delivery_leaves_no_trace_and_gives_its_credit_back(at: int) -> None:
    client = ready(credit=10)
    for _ in range(at):
        assert client.transfer(0, b"x", more=True) == []
    assert client.transfer(0, b"y", is_aborted=True) == []
    assert client.engine.partial_bytes == 0
    assert client.reply(FLOW).fields[5:7] == [1, 10]
    client.transfer(1, b"z")
    event = received(client)
    assert event.payload == b"z"
    assert (event.link.delivery_count, event.link.credit) == (2, 9)


def test_oversize_delivery_is_dropped_and_reported() -> None:
    client = ready(size=10)
    client.transfer(0, b"x" * 11)
    (event,) = client.events
    assert isinstance(event, OversizeReceived)
    assert (event.delivery_id, event.is_settled) == (0, False)
    client.transfer(1, b"x" * 10)
    assert received(client).payload == b"x" * 10
    for _ in range(20):
        assert client.transfer(2, b"x" * 9, more=True) == []
        assert client.engine.partial_bytes <= 10
    client.transfer(2, b"", is_settled=True)
    (event,) = client.events
    assert isinstance(event, OversizeReceived)
    assert (event.delivery_id, event.is_settled) == (2, True)
    assert (event.link.delivery_count, event.link.credit) == (3, 97)
    client.transfer(3, b"ok")
    assert received(client).payload == b"ok"


@pytest.mark.behaviour("S24")
@pytest.mark.parametrize("settled_flags", [(True,), (True, False), (False, True)])
def test_oversize_delivery_is_settled_when_one_of_its_transfers_is(
    settled_flags: tuple[bool, ...],
) -> None:
    client = ready(size=10)
    for part, is_settled in enumerate(settled_flags, 1):
        client.transfer(0, b"x" * 11, is_settled=is_settled, more=part < len(settled_flags))
    (event,) = client.events
    assert isinstance(event, OversizeReceived)
    assert event.is_settled


def test_aborted_oversize_delivery_is_not_reported() -> None:
    client = ready(size=10)
    client.transfer(0, b"x" * 11, more=True)
    assert client.transfer(0, is_aborted=True) == []
    client.transfer(1, b"x" * 10)
    assert received(client).payload == b"x" * 10


def expect_detached(client: Client, condition: str) -> None:
    (event,) = client.events
    assert isinstance(event, LinkDetached)
    assert event.is_closed
    assert event.error is not None
    assert event.error.condition == condition
    reply = client.replies()[-1]
    assert reply.code == DETACH
    assert reply.fields[:2] == [0, True]
    assert error_of(reply.fields[2])[0] == condition
    assert not client.engine.is_closed
    assert client.engine.partial_bytes == 0


def test_first_frame_without_delivery_id_detaches() -> None:
    client = ready()
    client.transfer(None)
    expect_detached(client, conditions.INVALID_FIELD)


def test_new_delivery_inside_of_another_detaches() -> None:
    client = ready()
    client.transfer(0, more=True)
    client.transfer(1)
    expect_detached(client, conditions.INVALID_FIELD)


def test_transfer_before_the_attach_is_answered_refuses_the_link() -> None:
    client = Client().open()
    client.begin()
    link = client.attach("s", 0, is_receiver=False)
    client.transfer(0, b"x" * 5_000)
    assert client.unread == b""
    data = b"".join(client.engine.data_to_send())
    client.unread = data
    expect_detached(client, conditions.TRANSFER_LIMIT_EXCEEDED)
    client.unread = data
    attach, _ = client.replies()
    assert attach.code == ATTACH
    assert attach.fields[5:7] == [SOURCE, None]
    link.accept(max_message_bytes=1, credit=1)
    assert client.engine.data_to_send() == []


@pytest.mark.parametrize(
    ("handle", "condition"),
    [(1, conditions.ERRANT_LINK), (9, conditions.UNATTACHED_HANDLE)],
)
def test_transfer_on_a_wrong_handle_ends_the_session(handle: int, condition: str) -> None:
    client = ready()
    client.receiver("r", 1)
    client.transfer(0, handle=handle)
    (event,) = client.events
    assert isinstance(event, SessionEnded)
    assert error_of(client.reply(END).fields[0])[0] == condition


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (None, Uint(0), b"t"),
        (Uint(0), "0", b"t"),
        (Uint(0), Uint(0), "t"),
        (Uint(0), Uint(0), b"t" * 33),
        (Uint(0), Uint(0), b"t" * 33, Uint(0)),
        (Uint(0), Uint(0), b"t", -1),
        (*[None] * 12,),
    ],
)
def test_malformed_transfer_closes(fields: tuple[object, ...]) -> None:
    client = ready()
    client.send(TRANSFER, *fields)
    client.expect_closed(conditions.DECODE_ERROR)


@pytest.mark.parametrize(
    "body",
    [
        b"\x00\x53\x14\xc0", b"\x00\x53\x14\xc0\x05", b"\x00\x53\x14\xc0\x05\x04",
        b"\x00\x53\x14\xc0\x05\x04\x43\x43\xa0\x05",
        b"\x00\x53\x14\xc0\xff\x04\x43\x43\xa0\x01t\x43",
        b"\x00\x53\x14\x40\x40", b"\x00\x53\x14\xd0\x00\x00\x00\x00", b"\x00\x53\x15\xc0\x00\x00",
    ],
    ids=bytes.hex,
)  # fmt: skip
def test_cut_off_hot_frame_closes(body: bytes) -> None:
    for behind in (b"", b"\x40" * 64):
        client = ready()
        client.feed(frame(0, body) + behind)
        client.expect_closed(conditions.DECODE_ERROR)


# --- out -----------------------------------------------------------------------------------------


def test_hot_transfer_has_the_full_list() -> None:
    client = Client().open()
    client.begin()
    link = client.receiver("r", 1)
    link.send(TAG, (b"head", b"", b"body"), is_settled=False)
    body = (
        b"\x70\x00\x00\x00\x00" + b"\x70\x40\x00\x00\x00" + b"\xa0\x10" + TAG + b"\x43\x42\x42"
        + b"\x40\x40\x42\x42\x42"
    )  # fmt: skip
    head = b"\x00\x53\x14\xc0" + bytes((len(body) + 1, 11))
    reply = client.reply(TRANSFER)
    assert reply.raw == frame(0, head + body + b"headbody")
    assert reply.fields == [0, BASE, TAG, 0, False, False, None, None, False, False, False]
    link.send(TAG, (b"m",), is_settled=True)
    assert client.reply(TRANSFER).fields[4] is True
    assert list(link.session.unsettled) == [BASE]


def test_other_transfers_have_the_full_list_too() -> None:
    client = Client().open()
    client.begin()
    link = client.receiver("r", 1)
    link.send(b"short", (b"m",), is_settled=False, message_format=7)
    reply = client.reply(TRANSFER)
    assert reply.fields == [0, BASE, b"short", 7, False, False, None, None, False, False, False]
    assert [type(each) for each in reply.fields[:2]] == [Uint, Uint]
    assert reply.payload == b"m"
    link.send(TAG, (), is_settled=True)
    assert client.reply(TRANSFER).payload == b""


@pytest.mark.parametrize(
    ("state", "encoded"),
    [
        (ACCEPTED, "00532445"),
        (RELEASED, "00532645"),
        (Rejected(), "00532545"),
        (Modified(), "005327c00403424240"),
        (
            Rejected("a:b", "text"),
            "005325c013010053" + "1dc00d03" + "a303613a62" + "a10474657874" + "40",
        ),
        (Received(), "005323c003024344"),
        (TransactionalState(b"t", ACCEPTED), "005334c00802a0017400532445"),
    ],
)
def test_outcomes_have_their_full_lists(state: DeliveryState, encoded: str) -> None:
    client = ready()
    (session,) = client.engine.sessions.values()
    (link,) = session.links.values()
    link.settle(3, 4, state)  # type: ignore[attr-defined]
    reply = client.reply(DISPOSITION)
    assert reply.fields[:4] == [True, 3, 4, True]
    assert reply.fields[5] is False
    assert bytes.fromhex(encoded) in reply.raw
    assert encode_state(state).hex() == encoded
    assert decode_state(decode_value(encode_state(state))[0]) == state


@pytest.mark.parametrize(
    ("value", "state"),
    [
        (None, None),
        ("accepted", None),
        (Described(Ulong(0x99), []), None),
        (Described(None, []), None),
        (Described(Symbol("amqp:accepted:list"), []), ACCEPTED),
        (Described(Ulong(0x24), None), ACCEPTED),
        (Described(Ulong(0x27), [True]), Modified(True)),
        (Described(Ulong(0x27), [None, True, {Symbol("k"): 1}]), Modified(False, True, {"k": 1})),
        (Described(Ulong(0x27), [1, "x", []]), Modified()),
        (Described(Ulong(0x25), [None]), Rejected()),
        (Described(Ulong(0x25), ["no"]), Rejected()),
        (
            Described(Ulong(0x25), [Described(Ulong(0x1D), [Symbol("c"), "d", {"k": 1}])]),
            Rejected("c", "d", {"k": 1}),
        ),
        (Described(Ulong(0x25), [Described(Ulong(0x1D), [1, 2, 3])]), Rejected()),
        (Described(Ulong(0x34), ["no bytes"]), TransactionalState(b"", None)),
        (
            Described(Ulong(0x34), [b"t", Described(Ulong(0x34), [b"u", None])]),
            TransactionalState(b"t", None),
        ),
    ],
)
def test_states_are_read_leniently(value: object, state: DeliveryState | None) -> None:
    assert decode_state(decode_value(encode_value(value))[0]) == state


def test_no_state_is_null() -> None:
    assert encode_state(None) == b"\x40"
