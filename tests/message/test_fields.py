"""Reading the fields of a message, and building a message with other ones."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.message.codec import (
    DecodeError,
    Int,
    Symbol,
    Timestamp,
    Uint,
    Ulong,
    Value,
    decode_value,
    encode_value,
)
from postbus.message.envelope import LEAST_BYTES, Envelope
from postbus.message.fields import Field, MessageDraft, MessageFields
from postbus.message.patch import MAX_PROPERTIES_BYTES, PropertiesTooLarge
from postbus.message.sections import MAX_TTL_MS, slice_message
from tests.message.wire_values import (
    ANY_SCALAR,
    BODY,
    PROPERTY_NAMES,
    TEXTS,
    all_captured,
    properties,
    same,
    section,
)

ID = uuid.UUID(int=5)
ALL_FIELDS = {
    "message_id": "id-1",
    "user_id": b"user",
    "to": "there",
    "subject": "order",
    "reply_to": "back",
    "correlation_id": Ulong(7),
    "content_type": Symbol("text/plain"),
    "content_encoding": Symbol("gzip"),
    "absolute_expiry_time": Timestamp(2_000),
    "creation_time": Timestamp(1_000),
    "group_id": "s1",
    "group_sequence": Uint(3),
    "reply_to_group_id": "s2",
}
LONGER = 3  # octets that the size of a text over 255 octets takes more
SIMPLE = st.dictionaries(TEXTS, ANY_SCALAR, max_size=6)


def message(application: dict[str, Value] | None = None, **fields: Value) -> Envelope:
    data = properties(**fields) if fields else b""
    if application is not None:
        data += section(0x74, application)
    return slice_message(data + BODY)


def draft_of(envelope: Envelope) -> MessageDraft:
    return MessageDraft(MessageFields(envelope))


def listed(envelope: Envelope) -> dict[str, Value]:
    """Return the fields of the properties section with their AMQP types."""
    values = decode_value(envelope.properties)[0].value if envelope.properties else []
    return {
        name: value
        for name, value in zip(PROPERTY_NAMES, values, strict=False)
        if value is not None
    }


def resliced(envelope: Envelope) -> Envelope:
    """Return the message as a receiver would forward it."""
    annotations = b""
    if envelope.annotation_count:
        size, count = len(envelope.annotations) + 4, envelope.annotation_count * 2
        annotations = b"\x00\x53\x72\xd1" + size.to_bytes(4, "big") + count.to_bytes(4, "big")
        annotations += envelope.annotations
    return slice_message(
        annotations + envelope.properties + envelope.application_properties + envelope.body
    )


# --- reading --------------------------------------------------------------------------------------


def test_all_fields_by_their_places() -> None:
    fields = MessageFields(message(**ALL_FIELDS))
    assert fields.system[Field.MESSAGE_ID] == "id-1"
    assert fields.system[Field.TO] == "there"
    assert fields.system[Field.SUBJECT] == "order"
    assert fields.system[Field.REPLY_TO] == "back"
    assert fields.system[Field.CORRELATION_ID] == "7"
    assert fields.system[Field.CONTENT_TYPE] == "text/plain"
    assert fields.system[Field.GROUP_ID] == "s1"
    assert fields.system[Field.REPLY_TO_GROUP_ID] == "s2"


@given(SIMPLE)
def test_application_properties_keep_their_types(pairs: dict[str, Value]) -> None:
    found = MessageFields(message(pairs)).application
    assert same(found, {str(name): value for name, value in pairs.items()})


def test_a_message_without_sections_has_no_fields() -> None:
    fields = MessageFields(slice_message(BODY))
    assert fields.system == [None] * 13
    assert fields.application == fields.folded == {}


def test_empty_sections_are_read() -> None:
    fields = MessageFields(slice_message(b"\x00\x53\x73\x45\x00\x53\x74\xc1\x01\x00" + BODY))
    assert fields.system == [None] * 13
    assert fields.application == {}


def test_long_forms_and_descriptors_are_read() -> None:
    long_list = b"\x00\x80" + bytes(7) + b"\x73\xd0\0\0\0\x0e\0\0\0\4@@@\xb1\0\0\0\1x"
    long_list = long_list.replace(b"\x0e", b"\x0d")
    long_map = b"\x00\x80" + bytes(7) + b"\x74\xd1\0\0\0\x0b\0\0\0\2\xa1\1a\xb1\0\0\0\1b"
    long_map = long_map.replace(b"\x0b", b"\x0d")
    fields = MessageFields(slice_message(long_list + long_map + BODY))
    assert fields.system[Field.SUBJECT] == "x"
    assert fields.application == {"a": "b"}


@pytest.mark.parametrize("name", sorted(all_captured()))
def test_messages_of_clients_are_read(name: str) -> None:
    data = all_captured()[name]
    try:
        envelope = slice_message(data)
    except DecodeError:
        pytest.skip("a batch")
    fields = MessageFields(envelope)
    listed_fields = listed(envelope)
    assert fields.system[Field.SUBJECT] == listed_fields.get("subject")
    if envelope.application_properties:
        expected = decode_value(envelope.application_properties)[0].value
        assert same(fields.application, expected)


@pytest.mark.parametrize(
    "section_bytes",
    [
        b"\x00\x53\x74\xc1\x05\x02\xa1\x01a\xa1",  # cut off
        b"\x00\x53\x74\xc1\x05\x02\xa1\x01\xffAA",  # no UTF-8
        b"\x00\x53\x74\xc1\x05\x02\xa1\x01aAA",  # longer than its items
        b"\x00\x53\x74\xc1\x04\x01\xa1\x01a",  # a key without a value
        b"\x00\x53\x74\xd1\x00\x00\x00\x04\xff\xff\xff\xfe",  # more items than bytes
        b"\x00\x53\x74\xc0\x01\x00",  # a list
        b"\x00\x53\x74",
    ],
)
def test_broken_sections_raise_each_time_and_are_read_once(section_bytes: bytes) -> None:
    envelope = slice_message(BODY)
    envelope.application_properties = section_bytes
    fields = MessageFields(envelope)
    errors = []
    for _ in range(3):
        with pytest.raises(DecodeError) as caught:
            assert fields.application
        errors.append(caught.value)
    assert errors[0] is errors[1] is errors[2]
    assert fields.system == [None] * 13


# --- building -------------------------------------------------------------------------------------


def test_a_draft_without_changes_is_the_same_message() -> None:
    envelope = message({"a": Int(1)}, **ALL_FIELDS)
    built = draft_of(envelope).build()
    assert built is not envelope
    for name in Envelope.__slots__:
        assert getattr(built, name) == getattr(envelope, name), name


def test_changed_fields_leave_the_others_as_bytes() -> None:
    envelope = message({"a": Int(1)}, **ALL_FIELDS)
    draft = draft_of(envelope)
    draft.set_field(Field.SUBJECT, "changed")
    draft.set_field(Field.REPLY_TO, None)
    assert draft.system[Field.SUBJECT] == "changed"
    built = draft.build()
    expected = {**ALL_FIELDS, "subject": "changed"}
    del expected["reply_to"]
    assert same(listed(built), expected)
    assert built.application_properties == envelope.application_properties
    assert built.body is envelope.body
    assert (
        built.size_bytes == envelope.size_bytes + len("changed") - len("order") - len("xxback") + 1
    )
    assert same(listed(envelope), ALL_FIELDS)


def test_fields_are_added_to_a_message_without_any() -> None:
    envelope = message()
    draft = draft_of(envelope)
    draft.set_field(Field.GROUP_ID, "s")
    draft.set_field(Field.MESSAGE_ID, "m")
    built = draft.build()
    assert listed(built) == {"message_id": "m", "group_id": "s"}
    assert built.message_id == encode_value("m")
    assert built.session_id == b"s"
    again = resliced(built)
    assert (again.message_id, again.session_id) == (built.message_id, built.session_id)
    assert built.size_bytes == envelope.size_bytes + len(built.properties)


def test_removed_ids_are_unknown() -> None:
    draft = draft_of(message(**ALL_FIELDS))
    draft.set_field(Field.GROUP_ID, None)
    draft.set_field(Field.MESSAGE_ID, None)
    built = draft.build()
    assert built.message_id is None
    assert built.session_id is None
    assert resliced(built).message_id is None


@pytest.mark.parametrize("field", [Field.MESSAGE_ID, Field.GROUP_ID, Field.REPLY_TO_GROUP_ID])
def test_ids_have_at_most_128_characters(field: Field) -> None:
    draft = draft_of(message())
    draft.set_field(field, "ß" * 128)
    with pytest.raises(ValueError, match="longer than 128 characters"):
        draft.set_field(field, "x" * 129)
    with pytest.raises(ValueError, match="longer than 128 characters"):
        draft.set_partition_key("x" * 129)


@given(SIMPLE, SIMPLE, st.sets(TEXTS, max_size=4))
def test_application_properties_are_set_and_removed(
    before: dict[str, Value], changes: dict[str, Value], removed: set[str]
) -> None:
    def distinct(pairs: dict[str, Value]) -> dict[str, Value]:
        return {name.lower(): value for name, value in pairs.items()}

    before, changes = distinct(before), distinct(changes)
    envelope = message(before)
    draft = draft_of(envelope)
    for name, value in changes.items():
        draft.set_property(name, value)
    for name in removed:
        draft.remove_property(name.lower())
    gone = {name.lower() for name in removed}
    expected = {n: v for n, v in {**before, **changes}.items() if n not in gone}
    built = draft.build()
    assert same(MessageFields(built).application, expected)
    assert same(draft.application, expected)
    grown_bytes = len(built.application_properties) - len(envelope.application_properties)
    assert built.size_bytes == max(envelope.size_bytes + grown_bytes, LEAST_BYTES)


def test_names_of_properties_keep_the_case_they_have() -> None:
    draft = draft_of(message({"Color": "red", "Size": 1}))
    draft.set_property("COLOR", "blue")
    draft.remove_property("size")
    draft.set_property("New", 1)
    draft.set_property("nEW", 2)
    assert draft.folded == {"color": "blue", "new": 2}
    assert MessageFields(draft.build()).application == {"Color": "blue", "New": 2}


def test_a_removed_property_can_be_set_again_and_a_new_one_removed() -> None:
    draft = draft_of(message({"a": 1, "A": 2}))
    draft.remove_property("a")
    draft.set_property("a", 3)
    draft.set_property("b", 4)
    draft.remove_property("B")
    assert MessageFields(draft.build()).application == {"a": 3}


def test_the_expiry_goes_with_the_ttl() -> None:
    draft = draft_of(message(**ALL_FIELDS))
    draft.set_ttl(5_000)
    assert draft.build().ttl_ms == 5_000
    draft.set_ttl(None)
    assert "absolute_expiry_time" not in listed(draft.build())
    draft.set_ttl(MAX_TTL_MS)
    assert draft.build().ttl_ms == MAX_TTL_MS


def test_a_missing_expiry_stays_missing() -> None:
    draft = draft_of(message(message_id="m"))
    draft.set_ttl(5_000)
    assert draft.build().ttl_ms == 5_000
    assert listed(draft.build()) == {"message_id": "m"}


def annotated(**named: Value) -> Envelope:
    given = {Symbol("x-opt-" + name.replace("_", "-")): value for name, value in named.items()}
    return slice_message(section(0x72, given) + BODY)


def test_the_schedule_and_its_annotation_go_together() -> None:
    envelope = annotated(mine=1, scheduled_enqueue_time=Timestamp(5), other=2)
    draft = draft_of(envelope)
    draft.set_scheduled(9)
    again = resliced(draft.build())
    assert (draft.build().scheduled_ms, again.scheduled_ms) == (9, 9)
    assert again.annotation_count == 3
    assert draft.build().size_bytes == envelope.size_bytes
    draft.set_scheduled(None)
    built = draft.build()
    assert (built.scheduled_ms, resliced(built).scheduled_ms) == (None, None)
    assert (built.annotation_count, resliced(built).annotation_count) == (2, 2)


def test_the_partition_key_follows_the_session() -> None:
    draft = draft_of(annotated(partition_key="old", via_partition_key="via"))
    draft.set_field(Field.GROUP_ID, "new")
    built = draft.build()
    assert (built.session_id, built.partition_key) == (b"new", b"new")
    assert resliced(built).partition_key == b"new"
    assert resliced(built).via_partition_key == b"via"
    draft.set_partition_key("other")
    with pytest.raises(ValueError, match="differs from the session id"):
        draft.build()


def test_properties_over_the_limits_are_refused() -> None:
    draft = draft_of(message({"a": "x" * 30_000}))
    draft.set_property("b", "x" * 32_769)
    with pytest.raises(PropertiesTooLarge, match="'b'"):
        draft.build()
    draft.set_property("b", "x" * 32_000)
    draft.build()
    draft.set_property("c", "x" * 5_000)
    with pytest.raises(PropertiesTooLarge):
        draft.build()


def test_both_sections_count_and_spare_capacity_is_used() -> None:
    draft = draft_of(message({"a": "x" * 32_000}, to="t" * 30_000))
    draft.set_property("b", "")
    used = len(draft.build().properties) + len(draft.build().application_properties)
    draft.set_property("b", "x" * (MAX_PROPERTIES_BYTES - used - LONGER))
    draft.build()
    draft.set_property("b", "x" * (MAX_PROPERTIES_BYTES - used - LONGER + 1))
    draft.build(spare_bytes=1)
    with pytest.raises(PropertiesTooLarge):
        draft.build()


def test_a_compound_is_no_application_property() -> None:
    draft = draft_of(message({"a": [1]}))
    draft.set_property("b", draft.application["a"])
    with pytest.raises(TypeError):
        draft.build()
