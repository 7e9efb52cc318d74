"""The sections before the bare message, and the forms of a lock token."""

from __future__ import annotations

import itertools
import uuid

import proton
import pytest
from azure.servicebus._pyamqp._decode import decode_payload
from hypothesis import given
from hypothesis import strategies as st

from postbus.message.codec import (
    Described,
    Int,
    Symbol,
    Timestamp,
    Ubyte,
    Uint,
    Ulong,
    Value,
    decode_value,
    encode_value,
)
from postbus.message.delivery import (
    encode_message,
    encode_prefix,
    token_to_uuid,
    uuid_to_token,
    with_times,
)
from postbus.message.envelope import Envelope
from postbus.message.patch import merge_properties
from postbus.message.rows import pack_envelope, unpack_envelope
from postbus.message.sections import MAX_TTL_MS, slice_message
from tests.message.wire_values import (
    BODY,
    all_captured,
    captured,
    messages,
    properties,
    same,
    section,
)

SEQUENCE = 2**48 + 7
ENQUEUED_MS = 1_700_000_000_000
LOCKED_MS = 1_700_000_060_000
TOKEN = bytes(range(16))


def client_annotations(**pairs: Value) -> dict[str, Value]:
    """Return the envelope's fields for annotations of these names."""
    entries = [encode_value(Symbol(key)) + encode_value(value) for key, value in pairs.items()]
    return {"annotations": b"".join(entries), "annotation_count": len(entries)}


def sections_of(data: bytes) -> dict[int, Value]:
    """Decode all sections, which must carry the short form of the descriptor."""
    found: dict[int, Value] = {}
    pos = 0
    while pos < len(data):
        assert data[pos : pos + 2] == b"\x00\x53"
        section, pos = decode_value(data, pos)
        found[int(section.descriptor)] = section.value
    return found


def expected_sections(
    envelope: Envelope,
    own: dict[str, Value],
    *,
    delivery_count: int,
    ttl_ms: int | None,
    locked_until_ms: int | None,
    state: int | None,
    lock_token: bytes | None,
) -> dict[int, Value]:
    annotations: dict[Value, Value] = {
        Symbol("x-opt-sequence-number"): SEQUENCE,
        Symbol("x-opt-enqueued-time"): Timestamp(ENQUEUED_MS),
    }
    if locked_until_ms is not None:
        annotations[Symbol("x-opt-locked-until")] = Timestamp(locked_until_ms)
    if state is not None:
        annotations[Symbol("x-opt-message-state")] = Int(state)
    annotations.update({Symbol(key): value for key, value in own.items()})
    header = [
        envelope.is_durable,
        None if envelope.priority is None else Ubyte(envelope.priority),
        None if ttl_ms is None else Uint(min(ttl_ms, 2**32 - 1)),
        False,
        Uint(delivery_count),
    ]
    expected: dict[int, Value] = {0x70: header, 0x72: annotations}
    if lock_token is not None:
        expected[0x71] = {}
    if lock_token:
        expected[0x71] = {Symbol("x-opt-lock-token"): uuid.UUID(bytes_le=lock_token)}
    return expected


CASES = list(
    itertools.product(
        (False, True),
        (None, 0, 9),
        (0, 1, 255, 256, 2000),
        (None, 0, 5_000, 2**32 - 1, 2**40),
        (None, LOCKED_MS),
        (None, 0, 1, 2),
        (None, b"", TOKEN),
        ({}, {"x-opt-partition-key": "k"}, {"x-long": "y" * 120}, {"x-long": "y" * 300}),
    )
)


def test_prefix_has_header_and_annotations_in_every_combination() -> None:
    for durable, priority, count, ttl_ms, locked_ms, state, token, own in CASES:
        if token is not None and bool(token) is (locked_ms is None):
            continue  # locked deliveries, and no others, have a token
        envelope = Envelope(
            is_durable=durable, priority=priority, **client_annotations(**own), body=BODY
        )
        fields = {
            "delivery_count": count,
            "ttl_ms": ttl_ms,
            "locked_until_ms": locked_ms,
            "state": state,
            "lock_token": token,
        }
        prefix = encode_prefix(envelope, sequence=SEQUENCE, enqueued_ms=ENQUEUED_MS, **fields)
        sections = sections_of(prefix)
        assert list(sections) == sorted(sections)
        assert same(sections, dict(sorted(expected_sections(envelope, own, **fields).items())))


@pytest.mark.parametrize("size", range(90, 180))
def test_client_annotations_of_any_length_leave_the_map_whole(size: int) -> None:
    envelope = Envelope(**client_annotations(k="y" * size))
    for locked_ms in (None, LOCKED_MS):
        prefix = encode_prefix(
            envelope,
            sequence=1,
            enqueued_ms=2,
            delivery_count=0,
            ttl_ms=None,
            locked_until_ms=locked_ms,
            lock_token=b"" if locked_ms is None else TOKEN,
        )
        assert sections_of(prefix)[0x72][Symbol("k")] == "y" * size


def test_many_small_annotations_leave_the_map_whole() -> None:
    for count in (10, 60, 61, 62, 120, 130, 250):
        envelope = Envelope(annotations=b"\x43\x40" * count, annotation_count=count)
        prefix = encode_prefix(
            envelope,
            sequence=1,
            enqueued_ms=2,
            delivery_count=0,
            ttl_ms=None,
            locked_until_ms=LOCKED_MS,
            lock_token=TOKEN,
        )
        assert sections_of(prefix)[0x72][Uint(0)] is None


def encoded(envelope: Envelope, **changes: Value) -> bytes:
    encoded: dict[str, Value] = {
        "sequence": SEQUENCE,
        "enqueued_ms": ENQUEUED_MS,
        "delivery_count": 3,
        "ttl_ms": envelope.ttl_ms,
        "locked_until_ms": LOCKED_MS,
        "lock_token": TOKEN,
    }
    return encode_message(envelope, **{**encoded, **changes})


def test_a_copy_names_its_source() -> None:
    told_of = Symbol("x-opt-enqueue-sequence-number"), Symbol("x-opt-deadletter-source")
    for own in ({}, {"x-opt-partition-key": "k"}, {"x-long": "y" * 300}):
        for locked_ms, ttl_ms, state in itertools.product((None, LOCKED_MS), (None, 9), (None, 0)):
            for number, source in ((7, None), (2**48 + 1, b"q\xc3\xa9"), (None, b"q")):
                envelope = Envelope(
                    **client_annotations(**own),
                    hop_count=0 if source is None else 1,
                    origin_sequence=number,
                    dead_letter_source=source,
                )
                prefix = encode_prefix(
                    envelope,
                    sequence=SEQUENCE,
                    enqueued_ms=ENQUEUED_MS,
                    delivery_count=0,
                    ttl_ms=ttl_ms,
                    locked_until_ms=locked_ms,
                    lock_token=b"" if locked_ms is None else TOKEN,
                    state=state,
                )
                annotations = sections_of(prefix)[0x72]
                text = None if source is None else source.decode()
                assert [annotations.get(name) for name in told_of] == [number, text]
                assert annotations[Symbol("x-opt-sequence-number")] == SEQUENCE
                assert all(annotations[Symbol(name)] == own[name] for name in own)
                count = 2 + sum(x is not None for x in (locked_ms, state, number, source))
                assert len(annotations) == count + len(own)


@given(messages())
def test_delivered_message_can_be_sent_again_unchanged(data: bytes) -> None:
    """A delivered message is sliced like the sent one: only the broker's own parts differ."""
    envelope = slice_message(data)
    again = slice_message(encoded(envelope, state=1, ttl_ms=None))
    for name in set(Envelope.__slots__) - {"size_bytes", "ttl_ms"}:
        assert getattr(again, name) == getattr(envelope, name), name


@pytest.mark.parametrize("name", sorted(set(all_captured()) - {"python_batch"}))
def test_foreign_decoders_read_delivered_messages(name: str) -> None:
    envelope = slice_message(captured(name))
    data = encoded(envelope, ttl_ms=5_000)
    by_proton = proton.Message()
    by_proton.decode(data)
    original = proton.Message()
    if name != "python_value_body":  # its sections are in an order that Proton refuses
        original.decode(captured(name))
        assert by_proton.body == original.body
        assert by_proton.properties == original.properties
        assert by_proton.id == original.id
    assert by_proton.delivery_count == 3
    assert by_proton.ttl == 5.0
    assert by_proton.annotations["x-opt-sequence-number"] == SEQUENCE
    assert by_proton.annotations["x-opt-locked-until"] == LOCKED_MS
    if name not in {"proton_compounds", "proton_every_property"}:  # types it does not know
        by_sdk = decode_payload(memoryview(data))
        assert by_sdk.header.delivery_count == 3
        assert by_sdk.header.ttl == 5_000
        assert by_sdk.message_annotations[b"x-opt-enqueued-time"] == ENQUEUED_MS
        assert bool(by_sdk.header.durable) is envelope.is_durable


@pytest.mark.behaviour("S58")
@given(st.one_of(st.text(max_size=128), st.uuids(), st.integers(0, 2**64 - 1).map(Ulong)))
def test_message_id_is_the_sender_s_after_storing_redelivery_and_dead_lettering(
    message_id: Value,
) -> None:
    envelope = slice_message(properties(message_id=message_id, subject="s") + BODY)
    stored = unpack_envelope(pack_envelope(envelope), b"", envelope.body)
    stored.application_properties = merge_properties(b"", {"DeadLetterReason": "why"})
    for delivery_count in (0, 1, 300):
        sections = sections_of(encoded(stored, delivery_count=delivery_count))
        assert same(sections[0x73][0], message_id)
        assert same(sections[0x74], {"DeadLetterReason": "why"})


# --- lock tokens ---------------------------------------------------------------------------------


def test_lock_token_on_the_wire_is_a_little_endian_guid() -> None:
    value = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
    tag = bytes.fromhex("33221100 5544 7766 8899aabbccddeeff")
    assert uuid_to_token(value) == tag
    assert token_to_uuid(tag) == value


@given(st.binary(min_size=16, max_size=16))
def test_both_forms_of_a_lock_token_name_the_same(token: bytes) -> None:
    assert uuid_to_token(token_to_uuid(token)) == token
    assert token_to_uuid(token).bytes[8:] == token[8:]


@pytest.mark.parametrize("ttl_ms", [None, 5_000])
@given(token=st.binary(min_size=16, max_size=16))
def test_lock_token_is_a_delivery_annotation_in_network_order(
    ttl_ms: int | None, token: bytes
) -> None:
    data = encoded(Envelope(body=BODY), ttl_ms=ttl_ms, lock_token=token)
    described, _ = decode_value(data, data.index(b"\x00\x53\x71"))
    assert isinstance(described, Described)
    assert described.value == {Symbol("x-opt-lock-token"): token_to_uuid(token)}


@pytest.mark.parametrize("size", [1, 100, 300])
def test_delivery_annotations_of_the_sender_are_handed_on_beside_the_token(size: int) -> None:
    own = {Symbol("x-mine"): "y" * size, Symbol("second"): None}
    name = Symbol("x-opt-lock-token")
    sent = section(0x71, {**own, name: uuid.UUID(int=7)}) + properties(message_id="m") + BODY
    envelope = slice_message(sent)
    stored = unpack_envelope(pack_envelope(envelope), b"", envelope.body)
    assert sections_of(encoded(stored))[0x71] == {name: token_to_uuid(TOKEN), **own}
    assert sections_of(encoded(stored, locked_until_ms=None, lock_token=b""))[0x71] == own
    assert sections_of(encoded(stored, locked_until_ms=None, lock_token=None, state=0))[0x71] == own


# --- times ---------------------------------------------------------------------------------------

VALUES = ("m", b"u", "t", "s", "r", uuid.UUID(int=3), Symbol("text/plain"), Symbol("gzip"),
          Timestamp(5), Timestamp(4), "g", Uint(3), "z" * 300)  # fmt: skip


@pytest.mark.parametrize("count", range(14))
def test_times_are_the_broker_s_and_other_properties_the_sender_s(count: int) -> None:
    usual = ("m", *[None] * 7, Timestamp(5), Timestamp(4), "g")
    for values in (VALUES, VALUES[:12], usual, ("m", "u", *usual[2:]), (None,) * 13):
        own = section(0x73, list(values[:count]))
        expected = [*values[:count], *[None] * (10 - count)]
        expected[8:10] = [Timestamp(ENQUEUED_MS + 5_000), Timestamp(ENQUEUED_MS)]
        for descriptor in (b"\x53\x73", b"\x80" + (0x73).to_bytes(8, "big")):
            envelope = slice_message(b"\0" + descriptor + own[3:] + BODY)
            envelope.body = b""
            assert same(sections_of(encoded(envelope, ttl_ms=5_000))[0x73], expected)


def test_times_are_delivered_without_properties_of_the_sender() -> None:
    expected = [*[None] * 8, Timestamp(ENQUEUED_MS + 5_000), Timestamp(ENQUEUED_MS)]
    for own in (b"", b"\x00\x53\x73\x45"):
        assert same(sections_of(encoded(Envelope(properties=own), ttl_ms=5_000))[0x73], expected)


def test_properties_in_a_long_list_keep_their_other_fields() -> None:
    items = b"\x40\x40\x40\xa1\x03new\x40"
    own = b"\x00\x53\x73\xd0" + (len(items) + 4).to_bytes(4, "big") + b"\0\0\0\x05" + items
    envelope = slice_message(own + BODY)
    envelope.body = b""
    assert sections_of(encoded(envelope, ttl_ms=1))[0x73][3] == "new"


def test_an_expiry_beyond_the_range_of_clients_is_capped() -> None:
    data = encoded(Envelope(), ttl_ms=MAX_TTL_MS)
    assert sections_of(data)[0x73][8] == Timestamp(253_402_214_399_999)


@pytest.mark.parametrize(
    "broken",
    ["0053 73c0 04 09 a1 20 61", "0053 73c0 03 0a 40 ff", "0053 73d0 00000006 00000003 4040"],
)
def test_properties_that_cannot_be_read_stay_as_they_are(broken: str) -> None:
    own = bytes.fromhex(broken)
    assert with_times(own, ENQUEUED_MS, 5) == own


def test_times_without_a_ttl_are_those_of_the_sender() -> None:
    own = properties(absolute_expiry_time=Timestamp(5), creation_time=Timestamp(4))
    assert slice_message(own + BODY).ttl_ms is None
    assert own in encoded(slice_message(own + BODY))
