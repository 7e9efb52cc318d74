"""The column that holds an envelope."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.message.codec import Ulong, encode_value
from postbus.message.envelope import LEAST_BYTES, Envelope, SharedBody
from postbus.message.rows import (
    ANNOTATED_FORMAT,
    FORMAT,
    UnknownRowFormat,
    pack_envelope,
    unpack_envelope,
)
from postbus.message.sections import MAX_TTL_MS, slice_message
from tests.message.wire_values import BODY, MESSAGE_IDS, all_captured, messages, properties, section

LONG = st.integers(-(2**63), 2**63 - 1)
KEYS = st.none() | st.binary(max_size=600)

ENVELOPES = st.builds(
    Envelope,
    is_durable=st.booleans(),
    priority=st.none() | st.integers(0, 255),
    ttl_ms=st.none() | st.integers(0, MAX_TTL_MS),
    annotations=st.binary(min_size=1, max_size=300),
    annotation_count=st.integers(1, 2**31),
    scheduled_ms=st.none() | LONG,
    partition_key=KEYS,
    via_partition_key=KEYS,
    message_id=st.none() | MESSAGE_IDS.map(encode_value),
    session_id=KEYS,
    hop_count=st.integers(0, 255),
    properties=st.just(b""),
    application_properties=st.binary(max_size=50),
    body=st.binary(max_size=50),
    origin_sequence=st.none() | st.integers(1, 2**63 - 1),
    dead_letter_source=st.none() | st.binary(max_size=300),
    delivery_annotations=st.just(b"") | st.binary(min_size=4, max_size=300),
)


def restored(envelope: Envelope) -> Envelope:
    return unpack_envelope(
        pack_envelope(envelope), envelope.application_properties or None, envelope.body or None
    )


def assert_equal(left: Envelope, right: Envelope) -> None:
    for name in set(Envelope.__slots__) - {"size_bytes"}:
        assert getattr(left, name) == getattr(right, name), name


@given(ENVELOPES)
def test_every_field_comes_back(envelope: Envelope) -> None:
    assert_equal(restored(envelope), envelope)


@given(messages())
def test_sliced_messages_come_back(data: bytes) -> None:
    envelope = slice_message(data)
    assert_equal(restored(envelope), envelope)


@pytest.mark.parametrize("name", sorted(set(all_captured()) - {"python_batch"}))
def test_captured_messages_come_back(name: str) -> None:
    envelope = slice_message(all_captured()[name])
    assert_equal(restored(envelope), envelope)


@pytest.mark.parametrize(
    "field",
    [
        {"priority": 0},
        {"ttl_ms": 0},
        {"scheduled_ms": 0},
        {"partition_key": b""},
        {"via_partition_key": b"v"},
        {"session_id": b"\x00\xc3\xa9"},
        {"hop_count": 4},
        {"origin_sequence": 1},
        {"origin_sequence": (5 << 48) + 3},
        {"dead_letter_source": b"orders/Subscriptions/s"},
        {"message_id": encode_value(Ulong(7))},
        {"annotations": b"\x43\x40", "annotation_count": 1},
        {"delivery_annotations": b"\0\0\0\x02\x43\x40"},
    ],
    ids=str,
)
def test_each_field_alone_comes_back(field: dict[str, object]) -> None:
    for durable in (False, True):
        own = properties(message_id="other") if "message_id" in field else b""
        envelope = Envelope(is_durable=durable, body=BODY, properties=own, **field)
        assert_equal(restored(envelope), envelope)


def test_envelope_without_the_id_of_its_properties_stays_without() -> None:
    envelope = Envelope(properties=properties(message_id="m"), ttl_ms=1)
    assert restored(envelope).message_id is None


def test_broken_first_property_is_no_message_id() -> None:
    """Rows may be older than the check that refuses such a section."""
    own = b"\x00\x53\x73\xc0\x04\x01\xa0\x05a"
    assert restored(Envelope(properties=own)).message_id is None


@pytest.mark.parametrize("size", [0, 5, 200, 300])
def test_message_id_of_the_properties_is_not_stored_twice(size: int) -> None:
    own = properties(message_id="m" * size, subject="s")
    blob = pack_envelope(slice_message(own + BODY))
    assert len(blob) == 2 + len(own)
    with_life = pack_envelope(slice_message(section(0x70, [True, None, None]) + own + BODY))
    assert len(with_life) == 2 + len(own)


def test_plain_message_is_two_octets_and_its_properties() -> None:
    assert pack_envelope(slice_message(BODY)) == bytes((FORMAT, 0))
    own = properties(subject="s")
    assert pack_envelope(slice_message(own + BODY)) == bytes((FORMAT, 0)) + own
    assert pack_envelope(slice_message(section(0x70, [True]) + BODY)) == bytes((FORMAT, 1))


def test_size_of_a_restored_envelope_counts_its_stored_parts() -> None:
    envelope = slice_message(properties(message_id="m") + section(0x74, {"a": "x" * 100}) + BODY)
    assert restored(envelope).size_bytes == envelope.size_bytes + 2
    assert restored(slice_message(BODY)).size_bytes == LEAST_BYTES


def test_rows_from_before_forwarding_still_unpack() -> None:
    """Written by a release that knew neither numbers of topics nor sources of dead letters."""
    plain = unpack_envelope(bytes.fromhex("0101 005373c00401a10161"), None, b"b")
    assert (plain.message_id, plain.is_durable, plain.body) == (b"\xa1\x01a", True, b"b")
    keys = unpack_envelope(bytes.fromhex("0124 00000000000003e8 000173 ffff ffff"), None, None)
    assert (keys.ttl_ms, keys.session_id, keys.partition_key) == (1_000, b"s", None)
    for envelope in (plain, keys):
        assert envelope.origin_sequence is None
        assert envelope.dead_letter_source is None
        assert envelope.hop_count == 0


def test_fields_of_memory_only_are_not_stored() -> None:
    envelope = Envelope(body=BODY, shared=SharedBody(len(BODY)))
    assert pack_envelope(envelope) == bytes((FORMAT, 0))
    assert restored(envelope).shared is None


def test_row_of_a_later_format_is_refused() -> None:
    with pytest.raises(UnknownRowFormat, match="newer version"):
        unpack_envelope(bytes((ANNOTATED_FORMAT + 1, 0)), None, None)
