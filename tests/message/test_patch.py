"""Merges of application properties, and the limits of properties."""

from __future__ import annotations

import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.message.codec import (
    Array,
    DecodeError,
    Described,
    Int,
    Symbol,
    Timestamp,
    Uint,
    Ulong,
    Value,
    decode_value,
    encode_value,
)
from postbus.message.envelope import Envelope
from postbus.message.patch import (
    DEAD_LETTER_DESCRIPTION,
    DEAD_LETTER_REASON,
    MAX_ID_CHARS,
    MAX_PROPERTIES_BYTES,
    MAX_PROPERTY_BYTES,
    PropertiesTooLarge,
    check_properties,
    give_message_id,
    merge_properties,
)
from postbus.message.sections import slice_message
from tests.message.wire_values import ANY_SCALAR, BODY, TEXTS, properties, same, section

SIMPLE = st.dictionaries(TEXTS, ANY_SCALAR, max_size=6)


def pairs_of(data: bytes) -> dict[Value, Value]:
    described, after = decode_value(data)
    assert after == len(data)
    assert described.descriptor == 0x74
    pairs: dict[Value, Value] = described.value
    return pairs


@given(SIMPLE, SIMPLE)
def test_merge_is_a_dict_update(old: dict[str, Value], changes: dict[str, Value]) -> None:
    merged = merge_properties(section(0x74, old), changes)
    assert same(pairs_of(merged), {**old, **changes})
    assert slice_message(merged + BODY).application_properties == merged


def test_properties_of_a_message_without_any() -> None:
    changes = {DEAD_LETTER_REASON: "why", DEAD_LETTER_DESCRIPTION: "because"}
    assert merge_properties(b"", changes) == section(0x74, changes)
    assert merge_properties(b"", {}) == section(0x74, {})


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"\x00\x53\x73\x45",
        b"\x00\x53\x73\xc0\x01\x00",
        properties(user_id=b"user", to="to"),
        b"\x00\x80" + (0x73).to_bytes(8, "big") + b"\xd0\0\0\0\x05\0\0\0\x01\x40",
        properties(to="t" * 240),
    ],
    ids=["none", "empty", "empty list", "others", "long forms", "grows out of the short form"],
)
def test_an_id_is_put_before_the_other_fields(before: bytes) -> None:
    envelope = slice_message(before + BODY)
    size_bytes = envelope.size_bytes
    give_message_id(envelope, encode_value("i" * 32))
    again = slice_message(envelope.properties + BODY)
    assert again.message_id == envelope.message_id == encode_value("i" * 32)
    fields = decode_value(envelope.properties)[0].value
    assert fields[1:] == (decode_value(before)[0].value[1:] if before else [])
    assert envelope.size_bytes == size_bytes + len(envelope.properties) - len(before)


def test_unchanged_sections_are_copied_as_bytes_and_in_order() -> None:
    """Long forms, described types and keys that are no strings stay as the client wrote them."""
    entries = [
        b"\xb1\x00\x00\x00\x01a" + b"\x81" + (5).to_bytes(8, "big"),
        encode_value("span") + encode_value(Described(Symbol("com.microsoft:timespan"), 5)),
        encode_value("old") + encode_value(1),
        encode_value(Ulong(9)) + encode_value("number key"),
        encode_value("z") + b"\x56\x01",
    ]
    body = b"".join(entries)
    map32 = b"\xd1" + struct.pack(">II", len(body) + 4, 10) + body
    long_descriptor = b"\x00\x80" + (0x74).to_bytes(8, "big")
    for before in (b"\x00\x53\x74" + map32, long_descriptor + map32):
        merged = merge_properties(before, {"new": Int(1), "old": "2"})
        entries[2] = encode_value("old") + encode_value("2")
        expected = b"".join(entries) + encode_value("new") + encode_value(Int(1))
        assert merged == b"\x00\x53\x74\xc1" + bytes((len(expected) + 1, 12)) + expected


def test_symbol_key_of_the_same_name_is_replaced() -> None:
    assert pairs_of(merge_properties(section(0x74, {Symbol("a"): 1}), {"a": 2})) == {"a": 2}


def test_repeated_key_is_replaced_once() -> None:
    twice = b"\x00\x53\x74\xc1\x0b\x04" + b"\xa1\x01a\x55\x01" * 2
    assert merge_properties(twice, {"a": 2}) == section(0x74, {"a": 2})


@given(st.dictionaries(TEXTS, st.text(max_size=200), min_size=1, max_size=200))
def test_large_merges_are_well_formed(changes: dict[str, Value]) -> None:
    try:
        merged = merge_properties(section(0x74, {"kept": None}), changes)
    except PropertiesTooLarge:
        return
    assert same(pairs_of(merged), {"kept": None, **changes})


def test_merge_keeps_the_limit() -> None:
    capacity = len(merge_properties(b"", {"a": "x" * 300}))
    assert merge_properties(b"", {"a": "x" * 300}, capacity)
    with pytest.raises(PropertiesTooLarge, match="limit"):
        merge_properties(b"", {"a": "x" * 301}, capacity)


@pytest.mark.parametrize("value", [[], {}, Array(0x50, []), Described(Ulong(1), 1), object()])
def test_only_simple_values_are_merged(value: Value) -> None:
    with pytest.raises(TypeError):
        merge_properties(b"", {"a": value})


BROKEN = [
    b"\x00",
    b"\x00\x53\x74",
    b"\x00\x53\x74\xc1\x00",
    b"\x00\x53\x74\xd1\x00\x00\x00\x00",
    b"\x00\x53\x74\xd1\x00\x00\x00\x03\x00\x00\x00",
    b"\x00\x53\x74\x45",
    b"\x00\x53\x74\xc1\x02\x01\x40",
    b"\x00\x53\x74\xc1\x02\x02\x40",
    b"\x00\x53\x74\xc1\x04\x02\x40\x40\x40",
    b"\x00\x53\x74\xc1\x04\x02\xa1\x01\xff",
    b"\x00\x53\x74\xd1\xff\xff\xff\xff\x00\x00\x00\x02",
]


@pytest.mark.parametrize("data", BROKEN, ids=bytes.hex)
def test_broken_sections_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        merge_properties(data, {"a": 1})


@given(st.binary(max_size=40))
def test_any_section_is_merged_or_refused(data: bytes) -> None:
    for head in (b"\x00\x53\x74\xc1", b"\x00\x53\x74\xd1\x00\x00\x00", b""):
        try:
            merged = merge_properties(head + data, {"a": 1})
        except DecodeError:
            continue
        found, end = decode_value(merged)
        assert isinstance(found, Described)
        assert (found.value["a"], end) == (1, len(merged))


# --- limits --------------------------------------------------------------------------------------


def complaint(data: bytes) -> str | None:
    return check_properties(slice_message(data + BODY))


@pytest.mark.parametrize("character", ["x", "é", "𝄞"])
def test_ids_and_keys_have_at_most_128_characters(character: str) -> None:
    fits, long = character * MAX_ID_CHARS, character * (MAX_ID_CHARS + 1)
    keys = ("x-opt-partition-key", "x-opt-via-partition-key")
    for text, is_refused in ((fits, False), (long, True)):
        found = [
            complaint(properties(message_id=text)),
            complaint(properties(group_id=text)),
            *(complaint(section(0x72, {Symbol(key): text})) for key in keys),
            check_properties(Envelope(session_id=text.encode())),
        ]
        assert [each is not None for each in found] == [is_refused] * 5
    assert complaint(properties(message_id=b"x" * MAX_ID_CHARS)) is None
    assert "message id" in str(complaint(properties(message_id=b"x" * (MAX_ID_CHARS + 1))))


def test_other_properties_do_not_count_as_the_message_id() -> None:
    for message_id in ("m", uuid.UUID(int=5), Ulong(2**63), None):
        assert complaint(properties(message_id=message_id, subject="s" * 5_000)) is None


def test_session_id_and_partition_key_must_agree() -> None:
    key = Symbol("x-opt-partition-key")
    assert complaint(section(0x72, {key: "a"}) + properties(group_id="a")) is None
    assert "differs" in str(complaint(section(0x72, {key: "a"}) + properties(group_id="b")))


def test_one_property_has_at_most_32_kib() -> None:
    fits, long = "x" * MAX_PROPERTY_BYTES, "x" * (MAX_PROPERTY_BYTES + 1)
    assert complaint(section(0x74, {"a": 1, "b": fits})) is None
    assert "'b'" in str(complaint(section(0x74, {"a": 1, "b": long})))
    name = "n" * 40_000
    assert len(str(complaint(section(0x74, {name: long[:20_000], "b": 1})))) < 200


def test_all_properties_have_at_most_64_kib() -> None:
    many = {str(number): "x" * 1_000 for number in range(70)}
    assert "together" in str(complaint(section(0x74, many)))
    half = section(0x74, dict(list(many.items())[:40]))
    assert complaint(half) is None
    assert complaint(properties(subject="s" * 20_000) + half) is None
    assert "together" in str(complaint(properties(subject="s" * 30_000) + half))
    assert "larger" in str(complaint(properties(subject="s" * MAX_PROPERTIES_BYTES)))


def test_broken_properties_are_a_complaint_and_no_exception() -> None:
    envelope = Envelope(application_properties=b"\x00\x53\x74\xc1\x02\x02" + bytes(40_000))
    assert check_properties(envelope) == "The application properties are malformed."


def test_usual_messages_are_within_the_limits() -> None:
    usual = {"a": 1, "b": Timestamp(5), "c": uuid.UUID(int=1), "d": Uint(7)}
    assert complaint(b"") is None
    assert complaint(properties(message_id="m", group_id="s") + section(0x74, usual)) is None
