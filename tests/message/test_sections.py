"""Slicing of messages and batches: byte-exact sections, read fields, hostile input."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.message.codec import (
    DecodeError,
    Described,
    Int,
    Symbol,
    Timestamp,
    Ubyte,
    Uint,
    Ulong,
    Value,
    decode_value,
    encode_map,
    encode_value,
)
from postbus.message.envelope import LEAST_BYTES, Envelope
from postbus.message.sections import (
    BATCH_FORMAT,
    BROKER_ANNOTATIONS,
    MAX_TTL_MS,
    MalformedMessage,
    explode_batch,
    slice_message,
)
from tests.message.wire_values import (
    BODY,
    MESSAGE_IDS,
    all_captured,
    captured,
    messages,
    properties,
    section,
)

SCHEDULED = Symbol("x-opt-scheduled-enqueue-time")
PARTITION_KEY = Symbol("x-opt-partition-key")
VIA_PARTITION_KEY = Symbol("x-opt-via-partition-key")
DAY_MS = 86_400_000


def fields(envelope: Envelope) -> dict[str, object]:
    """Return the fields that the broker read, without sections and defaults."""
    empty = Envelope()
    names = set(Envelope.__slots__) - {"properties", "application_properties", "body", "size_bytes"}
    return {
        name: getattr(envelope, name)
        for name in sorted(names)
        if getattr(envelope, name) != getattr(empty, name)
    }


def bare(envelope: Envelope) -> bytes:
    return envelope.properties + envelope.application_properties + envelope.body


# --- sections ------------------------------------------------------------------------------------


def test_plain_message_is_its_body() -> None:
    envelope = slice_message(BODY)
    assert fields(envelope) == {}
    assert bare(envelope) == envelope.body == BODY
    assert envelope.size_bytes == LEAST_BYTES > len(BODY)
    large = section(0x75, bytes(LEAST_BYTES))
    assert slice_message(large).size_bytes == len(large)


def test_every_section_is_cut_out_as_it_came() -> None:
    header = section(0x70, [True, Ubyte(7), Uint(5_000), True, Uint(3)])
    own = section(0x73, ["id", b"user", "to"])
    application = section(0x74, {"a": 1, "b": Described(Symbol("com.microsoft:timespan"), 5)})
    footer = section(0x78, {Symbol("f"): 1})
    data = (
        header
        + section(0x71, {Symbol("d"): 1})
        + section(0x72, {Symbol("x-client"): 5})
        + own
        + application
        + BODY
        + BODY
        + footer
    )
    envelope = slice_message(data)
    assert envelope.properties == own
    assert envelope.application_properties == application
    assert envelope.body == BODY + BODY + footer
    assert envelope.size_bytes == len(data)
    assert fields(envelope) == {
        "annotation_count": 1,
        "annotations": encode_value(Symbol("x-client")) + encode_value(5),
        "delivery_annotations": b"\0\0\0\x02" + encode_value(Symbol("d")) + encode_value(1),
        "is_durable": True,
        "message_id": encode_value("id"),
        "priority": 7,
        "ttl_ms": 5_000,
    }


@pytest.mark.parametrize(
    "descriptor",
    [
        lambda code: encode_value(Ulong(code)),
        lambda code: b"\x80" + code.to_bytes(8, "big"),
        lambda code: encode_value(Symbol(NAMES[code])),
        lambda code: b"\xb3" + struct.pack(">I", len(NAMES[code])) + NAMES[code].encode(),
    ],
    ids=["smallulong", "ulong", "symbol", "long symbol"],
)
def test_sections_are_known_by_every_form_of_descriptor(descriptor: Value) -> None:
    parts = {
        code: b"\x00" + descriptor(code) + encode_value(value)
        for code, value in (
            (0x70, [True]),
            (0x71, {}),
            (0x72, {PARTITION_KEY: "k"}),
            (0x73, ["id"]),
            (0x74, {"a": 1}),
            (0x75, b"x"),
            (0x78, {}),
        )
    }
    envelope = slice_message(b"".join(parts.values()))
    assert envelope.is_durable
    assert envelope.partition_key == b"k"
    assert envelope.message_id == encode_value("id")
    assert envelope.properties == parts[0x73]
    assert envelope.application_properties == parts[0x74]
    assert envelope.body == parts[0x75] + parts[0x78]


NAMES = {
    0x70: "amqp:header:list",
    0x71: "amqp:delivery-annotations:map",
    0x72: "amqp:message-annotations:map",
    0x73: "amqp:properties:list",
    0x74: "amqp:application-properties:map",
    0x75: "amqp:data:binary",
    0x76: "amqp:amqp-sequence:list",
    0x77: "amqp:amqp-value:*",
    0x78: "amqp:footer:map",
}


@pytest.mark.parametrize("name", sorted(set(all_captured()) - {"python_batch"}))
def test_captured_messages_keep_every_octet_of_the_bare_message(name: str) -> None:
    data = captured(name)
    envelope = slice_message(data)
    assert bare(envelope) in data
    again = slice_message(bare(envelope))
    assert bare(again) == bare(envelope)
    assert again.message_id == envelope.message_id
    assert again.session_id == envelope.session_id


@given(messages())
def test_bare_message_comes_out_as_it_went_in(data: bytes) -> None:
    envelope = slice_message(data)
    out = bare(envelope)
    assert data.endswith(out)
    again = slice_message(out)
    assert bare(again) == out
    assert (again.message_id, again.session_id) == (envelope.message_id, envelope.session_id)


def test_delivery_annotations_are_kept_at_any_position() -> None:
    """The Python client writes them last."""
    late = section(0x71, {Symbol("d"): 1})
    kept = (2).to_bytes(4, "big") + encode_value(Symbol("d")) + encode_value(1)
    own = properties(message_id="m")
    for body in (b"", BODY, BODY + section(0x78, {})):
        for data in (own + body + late, late + own + body):
            envelope = slice_message(data)
            assert envelope.body == body
            assert envelope.delivery_annotations == kept
    assert slice_message(own + BODY).delivery_annotations == b""


@pytest.mark.parametrize("octets", ["a3 10", "a1 10", "b3 00000010", "b1 00000010"])
def test_a_lock_token_of_the_client_is_dropped_in_every_encoding(octets: str) -> None:
    entry = bytes.fromhex(octets) + b"x-opt-lock-token" + encode_value("mine")
    other = encode_value(Symbol("d")) + b"\x40"
    for entries, kept in ((entry, b""), (entry + other, b"\0\0\0\x02" + other)):
        data = b"\x00\x53\x71" + encode_map(entries, 1 + bool(kept))
        assert slice_message(data + BODY).delivery_annotations == kept
        assert slice_message(BODY + data).delivery_annotations == kept


@pytest.mark.parametrize("broken", ["45", "c0 01 00", "c1 02 01 40", "c1 02 02 40"])
def test_delivery_annotations_that_are_no_map_are_refused(broken: str) -> None:
    own = b"\x00\x53\x71" + bytes.fromhex(broken)
    for data in (own + BODY, BODY + own):
        with pytest.raises(DecodeError):
            slice_message(data)


def test_sections_out_of_order_are_refused() -> None:
    late = section(0x71, {Symbol("d"): 1})
    for data in (BODY + late + BODY, section(0x74, {}) + late + section(0x72, {})):
        with pytest.raises(DecodeError):
            slice_message(data)


def test_captures_of_the_python_client_are_read() -> None:
    session = slice_message(captured("python_session_ttl"))
    assert session.session_id == b"customer-4"
    assert session.message_id == encode_value("order-17")
    assert session.ttl_ms == 300_000
    scheduled = slice_message(captured("python_scheduled"))
    assert scheduled.scheduled_ms == 1_767_323_045_000
    assert scheduled.partition_key == "pk-é".encode()
    assert scheduled.annotation_count == 2
    rich = slice_message(captured("python_value_body"))
    assert (rich.is_durable, rich.priority, rich.ttl_ms) == (True, 7, 1_000)
    assert slice_message(captured("python_no_body")).body == b""


# --- message id, session id, keys ----------------------------------------------------------------


@given(MESSAGE_IDS)
def test_message_id_keeps_its_type(message_id: Value) -> None:
    envelope = slice_message(properties(message_id=message_id) + BODY)
    assert envelope.message_id == encode_value(message_id)


@pytest.mark.parametrize("count", range(14))
def test_session_id_is_found_in_property_lists_of_any_length(count: int) -> None:
    values: list[Value] = ["id", b"me", "to", "s", "r", "c", Symbol("t"), Symbol("e")]
    values += [Timestamp(5), Timestamp(3), "session", Uint(7), "r-session"]
    header = section(0x70, [None, None, LARGEST])
    envelope = slice_message(header + section(0x73, values[:count]) + BODY)
    assert envelope.session_id == (b"session" if count > 10 else None)
    assert envelope.ttl_ms == (2 if count > 9 else LARGEST)
    assert envelope.message_id == (encode_value("id") if count else None)


@pytest.mark.parametrize("text", ["", "s", "żółw", "x" * 300])
def test_keys_and_session_id_are_utf8(text: str) -> None:
    data = section(0x72, {PARTITION_KEY: text, VIA_PARTITION_KEY: text + "v"})
    envelope = slice_message(data + properties(group_id=text) + BODY)
    assert envelope.session_id == text.encode()
    assert envelope.partition_key == text.encode()
    assert envelope.via_partition_key == f"{text}v".encode()


def test_null_keys_are_no_keys() -> None:
    data = section(0x72, {PARTITION_KEY: None, VIA_PARTITION_KEY: None, SCHEDULED: None})
    envelope = slice_message(data + properties(message_id=None, subject="s") + BODY)
    assert fields(envelope) == {
        "annotation_count": 3,
        "annotations": data[6:],
    }


# --- annotations ---------------------------------------------------------------------------------


def test_annotations_the_broker_owns_are_dropped_however_their_keys_are_encoded() -> None:
    value = encode_value("forged")
    entries = [encode_value(Symbol("first")) + encode_value(1)]
    for key in sorted(BROKER_ANNOTATIONS):
        size = struct.pack(">I", len(key))
        entries += [
            b"\xa3" + size[3:] + key + value,
            b"\xa1" + size[3:] + key + value,
            b"\xb3" + size + key + value,
            b"\xb1" + size + key + value,
        ]
    entries.append(encode_value(Symbol("last")) + encode_value([1, {}]))
    data = b"\x00\x53\x72" + encode_map(b"".join(entries), len(entries))
    envelope = slice_message(data + BODY)
    assert envelope.annotations == entries[0] + entries[-1]
    assert envelope.annotation_count == 2


def test_annotations_the_broker_reads_are_kept_for_the_receiver() -> None:
    pairs = {
        PARTITION_KEY: "k",
        VIA_PARTITION_KEY: "v",
        SCHEDULED: Timestamp(1_700_000_000_000),
        Ulong(5): "number key",
    }
    envelope = slice_message(section(0x72, pairs) + BODY)
    assert envelope.annotation_count == 4
    assert decode_value(encode_map(envelope.annotations, 4))[0] == pairs
    assert envelope.scheduled_ms == 1_700_000_000_000


# --- time to live --------------------------------------------------------------------------------

LARGEST = Uint(0xFFFF_FFFF)
START = Timestamp(1_700_000_000_000)


@pytest.mark.parametrize(
    ("header_ttl", "expiry", "creation", "expected"),
    [
        (None, None, None, None),
        (Uint(0), None, None, 0),
        (Uint(200), None, None, 200),
        (Uint(60_000), None, None, 60_000),
        (Uint(60_000), Timestamp(START + 5), START, 60_000),
        (None, Timestamp(START + 90 * DAY_MS), START, None),
        (LARGEST, Timestamp(START + 90 * DAY_MS), START, 90 * DAY_MS),
        (LARGEST, None, START, 0xFFFF_FFFF),
        (LARGEST, Timestamp(START + 90 * DAY_MS), None, 0xFFFF_FFFF),
        (None, Timestamp(START + 90 * DAY_MS), None, None),
        (LARGEST, START, Timestamp(START + 1), 0),
        (LARGEST, Timestamp(2**63 - 1), Timestamp(-(2**63)), MAX_TTL_MS),
    ],
)
def test_time_to_live_is_the_header_s_or_beyond_its_maximum_that_of_the_times(
    header_ttl: Uint | None,
    expiry: Timestamp | None,
    creation: Timestamp | None,
    expected: int | None,
) -> None:
    header = section(0x70, [False, None, header_ttl, False, Uint(0)])
    times = properties(message_id="m", absolute_expiry_time=expiry, creation_time=creation)
    assert slice_message(header + times + BODY).ttl_ms == expected
    if header_ttl is None:
        assert slice_message(times + BODY).ttl_ms == expected


@pytest.mark.parametrize(
    ("octets", "expected"),
    [
        ("45", (False, None, None)),
        ("c0 02 01 41", (True, None, None)),
        ("c0 02 01 42", (False, None, None)),
        ("c0 02 01 40", (False, None, None)),
        ("c0 03 01 56 01", (True, None, None)),
        ("d0 00000006 00000001 56 00", (False, None, None)),
        ("c0 05 02 56 01 50 09", (True, 9, None)),
        ("c0 04 03 40 40 43", (False, None, 0)),
        ("c0 05 03 41 40 52 c8", (True, None, 200)),
        ("c0 0a 05 41 40 70 00000001 42 43", (True, None, 1)),
    ],
)
def test_header_is_read_in_every_encoding(
    octets: str, expected: tuple[bool, int | None, int | None]
) -> None:
    envelope = slice_message(b"\x00\x53\x70" + bytes.fromhex(octets) + BODY)
    assert (envelope.is_durable, envelope.priority, envelope.ttl_ms) == expected


# --- malformed -----------------------------------------------------------------------------------

MALFORMED = {
    "no descriptor": b"\x40",
    "cut in the descriptor": b"\x00\x53",
    "section unknown": section(0x79, []) + BODY,
    "section below the header": section(0x10, []) + BODY,
    "section named wrongly": b"\x00\xa3\x01a\x45" + BODY,
    "descriptor is an int": b"\x00\x54\x70\x45" + BODY,
    "descriptor is a list": b"\x00\x45\x45" + BODY,
    "header twice": section(0x70, []) * 2 + BODY,
    "properties before annotations": properties(message_id="a") + section(0x72, {}) + BODY,
    "header after the body": BODY + section(0x70, []),
    "properties after the body": BODY + properties(message_id="a"),
    "two kinds of body": BODY + section(0x76, []),
    "two values": section(0x77, 1) * 2,
    "body after the footer": BODY + section(0x78, {}) + BODY,
    "two footers": section(0x78, {}) * 2,
    "data is a string": section(0x75, "text"),
    "sequence is a map": section(0x76, {}),
    "footer is a list": section(0x78, []),
    "data is cut off": BODY[:-1],
    "garbage after the body": BODY + b"\x01",
    "header is a map": section(0x70, {}) + BODY,
    "annotations are a list": section(0x72, []) + BODY,
    "delivery annotations are null": section(0x71, None) + BODY,
    "properties are a map": section(0x73, {"a": 1}) + BODY,
    "application properties are a list": section(0x74, [1]) + BODY,
    "application properties are odd": b"\x00\x53\x74\xc1\x02\x01\x40" + BODY,
    "annotations are odd": b"\x00\x53\x72\xc1\x02\x01\x40" + BODY,
    "annotations are longer than their entries": b"\x00\x53\x72\xc1\x04\x02\x40\x40\x40" + BODY,
    "annotations have more entries than octets": b"\x00\x53\x72\xc1\x03\xfe\x40\x40" + BODY,
    "properties are longer than their fields": b"\x00\x53\x73\xc0\x02\x00\x40" + BODY,
    "durable is a string": section(0x70, ["yes"]) + BODY,
    "priority is an int": section(0x70, [None, Int(4)]) + BODY,
    "ttl is a long": section(0x70, [None, None, 5]) + BODY,
    "header field leaves its section": b"\x00\x53\x70\xc0\x05\x03\x40\x40\x70\x00" + BODY,
    "message id is an int": properties(message_id=Int(1)) + BODY,
    "message id is a symbol": properties(message_id=Symbol("a")) + BODY,
    "message id is not UTF-8": b"\x00\x53\x73\xc0\x04\x01\xa1\x01\xff" + BODY,
    "long message id is not UTF-8": b"\x00\x53\x73\xc0\x07\x01\xb1\0\0\0\x01\xff" + BODY,
    "message id leaves its section": b"\x00\x53\x73\xc0\x04\x01\xa1\x05a" + BODY,
    "session id is binary": properties(group_id=b"s") + BODY,
    "session id is not UTF-8": properties(group_id="?").replace(b"?", b"\xff") + BODY,
    "partition key is no UTF-8 in a binary": section(0x72, {PARTITION_KEY: b"\xc3"}) + BODY,
    "partition key is a symbol": section(0x72, {PARTITION_KEY: Symbol("k")}) + BODY,
    "partition key is not UTF-8": section(0x72, {PARTITION_KEY: "?"}).replace(b"?", b"\xc3") + BODY,
    "scheduled time is a string": section(0x72, {SCHEDULED: "now"}) + BODY,
    "scheduled time is true": section(0x72, {SCHEDULED: True}) + BODY,
    "scheduled time is a ulong": section(0x72, {SCHEDULED: Ulong(2**64 - 1)}) + BODY,
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        slice_message(data)


@given(messages(), st.data())
def test_cut_messages_are_refused_or_lack_whole_sections(data: bytes, draw: st.DataObject) -> None:
    if not data:
        return
    cut = data[: draw.draw(st.integers(0, len(data) - 1))]
    try:
        envelope = slice_message(cut)
    except DecodeError:
        return
    assert cut.endswith(bare(envelope))


@given(st.data())
def test_mutated_messages_are_sliced_or_refused(data: st.DataObject) -> None:
    octets = bytearray(data.draw(messages() | st.sampled_from(list(all_captured().values()))))
    for _ in range(data.draw(st.integers(1, 4)) if octets else 0):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    check_slices(bytes(octets))


def check_slices(data: bytes) -> None:
    """Slice data as a message and as a batch: each is refused, or all its sections are in it."""
    with contextlib.suppress(DecodeError):
        assert all(part in data for part in parts_of(slice_message(data)))
    with contextlib.suppress(DecodeError):
        members = explode_batch(data)
        assert members
        assert all(part in data for member in members for part in parts_of(member))


def parts_of(envelope: Envelope) -> tuple[bytes, bytes, bytes]:
    return envelope.properties, envelope.application_properties, envelope.body


@given(st.binary(max_size=80))
def test_any_bytes_are_sliced_or_refused(data: bytes) -> None:
    for prefix in (b"", b"\x00\x53\x70", b"\x00\x53\x72\xc1", b"\x00\x53\x73\xc0"):
        check_slices(prefix + data)


# --- batches -------------------------------------------------------------------------------------


def test_batch_format_is_the_number_clients_send() -> None:
    assert BATCH_FORMAT == 2_147_563_264


def test_captured_batch_holds_its_members_in_order() -> None:
    members = explode_batch(captured("python_batch"))
    assert [decode_value(member.message_id or b"")[0] for member in members] == [
        "m-0",
        "m-1",
        "m-2",
    ]
    indexes = [decode_value(member.application_properties)[0].value for member in members]
    assert indexes == [{"index": 0}, {"index": 1}, {"index": 2}]
    assert [member.body[5:] for member in members] == [b"member 0", b"member 1", b"member 2"]


@pytest.mark.slow
@given(st.lists(messages(), min_size=1, max_size=5), st.booleans())
def test_members_of_a_batch_equal_the_messages_alone(inner: list[bytes], is_led: bool) -> None:
    batch = b"".join(section(0x75, message) for message in inner)
    if is_led:
        lead = section(0x72, {PARTITION_KEY: "other"}) + properties(message_id="lead", group_id="g")
        batch = section(0x70, [True]) + lead + batch + section(0x78, {})
    for member, message in zip(explode_batch(batch), inner, strict=True):
        alone = slice_message(message)
        for name in Envelope.__slots__:
            assert getattr(member, name) == getattr(alone, name)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        section(0x70, []),
        section(0x77, BODY),
        section(0x76, [BODY]),
        section(0x75, "text"),
        section(0x75, BODY) + section(0x75, BODY[:-1]),
        section(0x75, BODY) + b"\x00",
        section(0x75, BODY)[:-1],
    ],
)
def test_malformed_batches_are_refused_whole(data: bytes) -> None:
    with pytest.raises(DecodeError):
        explode_batch(data)


def test_malformed_message_is_a_decode_error() -> None:
    assert issubclass(MalformedMessage, DecodeError)
    assert issubclass(DecodeError, ValueError)
