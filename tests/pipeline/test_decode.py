"""Stored rows become columns; what cannot be decoded is null and never an error."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageBodyType
from hypothesis import example, given
from hypothesis import strategies as st

from postbus.message.codec import (
    Array,
    Char,
    Described,
    Int,
    Symbol,
    Timestamp,
    Ubyte,
    Ulong,
    encode_value,
)
from postbus.message.envelope import Envelope
from postbus.message.rows import pack_envelope
from postbus.message.sections import slice_message
from postbus_spark.decode import Decoder, read_body, read_properties
from postbus_spark.errors import UnknownRows
from postbus_spark.schema import arrow_schema
from tests.message.wire_values import all_captured, properties, section
from tests.pipeline.stored_rows import (
    ALL_NAMES,
    ENQUEUED_MS,
    PLACE,
    Row,
    decoded,
    record_batch,
    row_of,
    sdk_bytes,
    sdk_row,
    spark_schema,
)

ENQUEUED = datetime.fromtimestamp(ENQUEUED_MS // 1_000, UTC) + timedelta(milliseconds=123)


def test_every_column_of_a_message_of_the_sdk() -> None:
    sent = sdk_row(
        b"\x00\xffbody",
        message_id="id-1",
        session_id="s",
        correlation_id="c",
        subject="subject",
        to="to",
        reply_to="reply",
        reply_to_session_id="rs",
        content_type="application/json",
        partition_key="s",
        time_to_live=timedelta(minutes=1),
        application_properties={"text": "ü", "number": 7, "flag": True, "part": 1.5},
    )
    found = decoded(sent)[0]
    raw = found.pop("amqp")
    assert found == {
        "entity": "orders",
        "sub_queue": "main",
        "partition": 3,
        "position": 1,
        "sequence_number": 1_001,
        "enqueued_time": ENQUEUED,
        "expires_at": ENQUEUED + timedelta(minutes=1),
        "message_id": "id-1",
        "session_id": "s",
        "partition_key": "s",
        "correlation_id": "c",
        "subject": "subject",
        "to": "to",
        "reply_to": "reply",
        "reply_to_session_id": "rs",
        "content_type": "application/json",
        "time_to_live_ms": 60_000,
        "delivery_count": None,
        "state": None,
        "dead_letter_source": None,
        "dead_letter_reason": None,
        "dead_letter_error_description": None,
        "body": b"\x00\xffbody",
        "body_type": "data",
        "application_properties": [
            ("text", "ü"),
            ("number", "7"),
            ("flag", "true"),
            ("part", "1.5"),
        ],
        "application_properties_json": '{"text":"ü","number":7,"flag":true,"part":1.5}',
        "is_malformed": False,
        "settled_time": None,
        "settlement": None,
    }
    assert row_of(slice_message(raw)) == sent


def test_an_empty_message_has_nulls() -> None:
    found = decoded(row_of(Envelope()))[0]
    assert found["is_malformed"] is False
    assert found["application_properties"] == []
    assert found["application_properties_json"] == "{}"
    assert {name for name, value in found.items() if value is None} == set(ALL_NAMES) - {
        "entity", "sub_queue", "partition", "position", "sequence_number", "enqueued_time",
        "application_properties", "application_properties_json", "is_malformed", "amqp",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (Ulong(2**64 - 1), "18446744073709551615"),
        (b"\x01\xff", "01ff"),
    ],
    ids=["string", "uuid", "ulong", "binary"],
)
def test_ids_are_text_whatever_their_type(value: object, text: str) -> None:
    data = properties(message_id=value, correlation_id=value) + section(0x75, b"")
    found = decoded(row_of(slice_message(data)))[0]
    assert (found["message_id"], found["correlation_id"]) == (text, text)
    assert found["is_malformed"] is False


@pytest.mark.parametrize(
    ("value", "text", "plain"),
    [
        (None, None, None),
        (True, "true", True),
        (Ubyte(9), "9", 9),
        (Ulong(2**64 - 1), "18446744073709551615", 2**64 - 1),
        (-1.5, "-1.5", -1.5),
        (float("nan"), "nan", "nan"),
        (float("-inf"), "-inf", "-inf"),
        (Timestamp(ENQUEUED_MS), "2023-11-14T22:13:20.123Z", "2023-11-14T22:13:20.123Z"),
        (Timestamp(2**62), str(2**62), str(2**62)),
        (b"\x00\xff", "AP8=", "AP8="),
        (Symbol("sym"), "sym", "sym"),
        (Char("ü"), "ü", "ü"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005", str(uuid.UUID(int=5))),
        ("a\x00b", "a\x00b", "a\x00b"),
        (Described(Symbol("com.microsoft:timespan"), -15_000_001), "PT-1.5000001S", ...),
        (
            Described(Symbol("com.microsoft:datetime-offset"), 621_355_968_010_000_000),
            "1970-01-01T00:00:01.000Z",
            ...,
        ),
        ([1, "a", None], '[1,"a",null]', [1, "a", None]),
        ({"k": Array(0x71, [Int(1)])}, '{"k":[1]}', {"k": [1]}),
    ],
)
def test_application_properties_of_every_type_are_text_and_json(
    value: object, text: str | None, plain: object
) -> None:
    data = section(0x74, {"name": value})
    row = row_of(Envelope(application_properties=data))
    found = decoded(row)[0]
    assert found["application_properties"] == [("name", text)]
    expected = text if plain is ... else plain
    assert json.loads(found["application_properties_json"]) == {"name": expected}
    assert found["is_malformed"] is False


@pytest.mark.parametrize(
    ("body", "kind", "content"),
    [
        (section(0x75, b"one"), "data", b"one"),
        (section(0x75, b"x" * 300), "data", b"x" * 300),
        (section(0x75, b"one") + section(0x75, b"two"), "data", b"onetwo"),
        (section(0x75, b"one") + section(0x78, {Symbol("f"): 1}), "data", b"one"),
        (section(0x77, "text ü"), "value", "text ü".encode()),
        (section(0x77, b"\xff"), "value", b"\xff"),
        (section(0x77, None), "value", None),
        (section(0x77, {"a": [1, True]}), "value", b'{"a":[1,true]}'),
        (section(0x77, Timestamp(0)), "value", b'"1970-01-01T00:00:00.000Z"'),
        (section(0x76, [1, "a"]) + section(0x76, [None]), "sequence", b'[1,"a",null]'),
        (section(0x78, {}), None, None),
        (encode_value(Described(Symbol("amqp:data:binary"), b"by name")), "data", b"by name"),
        (b"", None, None),
    ],
)
def test_bodies_of_every_type(body: bytes, kind: str | None, content: bytes | None) -> None:
    found = decoded(row_of(Envelope(body=body)))[0]
    assert (found["body_type"], found["body"], found["is_malformed"]) == (kind, content, False)


def test_bodies_of_the_sdk_that_are_values_and_sequences() -> None:
    value = AmqpAnnotatedMessage(value_body={"a": 1, "b": [True, None]})
    sequence = AmqpAnnotatedMessage(sequence_body=[["x", 2]])
    assert value.body_type is AmqpMessageBodyType.VALUE
    rows = [row_of(slice_message(encoded(each))) for each in (value, sequence)]
    found = decoded(*rows)
    assert [(each["body_type"], json.loads(each["body"])) for each in found] == [
        ("value", {"a": 1, "b": [True, None]}),
        ("sequence", ["x", 2]),
    ]


def encoded(message: AmqpAnnotatedMessage) -> bytes:
    from azure.servicebus._pyamqp._encode import encode_payload
    from azure.servicebus._transport._pyamqp_transport import PyamqpTransport

    outgoing = PyamqpTransport.to_outgoing_amqp_message(message)
    return bytes(encode_payload(bytearray(), outgoing))


@pytest.mark.parametrize(
    ("damaged", "lost"),
    [
        ({"properties": properties(subject="x")[:-1] + b"\xff"}, {"subject"}),
        ({"properties": b"\x00\x53\x73\xc0\x02\x05\x40"}, set()),
        ({"properties": b"\x00\x53\x73\xc1\x01\x00"}, set()),
        ({"properties": properties(subject=Int(1))}, {"subject"}),
        ({"session_id": b"\xff"}, {"session_id"}),
        ({"dead_letter_source": b"\xc3"}, {"dead_letter_source"}),
        ({"message_id": b"\xa1\x01\xff"}, {"message_id"}),
        ({"application_properties": b"\x00\x53\x74\xc1\x01"}, {"application_properties"}),
        ({"application_properties": b"\x00\x53\x74\xc1\x02\x01\x40"}, {"application_properties"}),
        ({"application_properties": b"\x00\x53\x74\x40"}, {"application_properties"}),
        ({"application_properties": b"\x00"}, {"application_properties"}),
        ({"body": b"\x00\x53\x75\xa0\x05ab"}, {"body"}),
        ({"body": b"\x00\x53\x77\xa1\x01\xff"}, {"body"}),
        ({"body": b"no section"}, {"body"}),
        ({"body": section(0x75, b"a") + section(0x77, 1)}, {"body"}),
        ({"body": section(0x75, "text")}, {"body"}),
        ({"body": section(0x77, 1) * 2}, {"body"}),
        ({"body": section(0x77, Char("\ud800"))[:-4] + b"\x00\x00\xd8\x00"}, {"body"}),
        ({"body": b"\x00" * 100}, {"body"}),
    ],
)
def test_damaged_parts_are_null_and_the_message_is_marked(
    damaged: dict[str, bytes], lost: set[str]
) -> None:
    parts = {
        "properties": properties(message_id="id"),
        "message_id": encode_value("id"),
        "application_properties": section(0x74, {"name": "value"}),
        "body": section(0x75, b"body"),
        **damaged,
    }
    found = decoded(row_of(Envelope(**parts)), sdk_row(b"next"))
    assert found[0]["is_malformed"] is True
    assert {name for name in lost if found[0][name] is not None} == set()
    for name, value in (("application_properties", [("name", "value")]), ("body", b"body")):
        assert (found[0][name] == value) == (name not in damaged)
    assert (found[1]["body"], found[1]["is_malformed"]) == (b"next", False)


def test_one_damaged_property_leaves_the_others() -> None:
    entries = {"good": 1, "bad": "xx", "last": "l"}
    broken = section(0x74, entries).replace(b"xx", b"\xff\xff")
    assert read_properties(broken) == ({"good": 1, "bad": None, "last": "l"}, True)
    unnamed = section(0x74, {"good": 1, "nn": 2}).replace(b"nn", b"\xff\xfe")
    assert read_properties(unnamed) == ({"good": 1}, True)
    assert read_properties(section(0x74, {5: 1, "good": 2})) == ({"good": 2}, True)


def test_columns_are_decoded_only_where_they_are_named() -> None:
    broken = row_of(Envelope(body=b"broken", application_properties=b"broken"))
    assert decoded(broken, names=["position", "message_id"]) == [
        {"position": 1, "message_id": None}
    ]
    stored = {name: Decoder(arrow_schema([name]), PLACE).stored_columns[1:] for name in ALL_NAMES}
    assert stored["position"] == stored["entity"] == stored["state"] == ()
    assert stored["body"] == stored["body_type"] == ("body",)
    assert stored["subject"] == stored["message_id"] == ("envelope",)
    assert stored["expires_at"] == ("enqueued_ms", "envelope")
    assert stored["dead_letter_reason"] == ("application_properties",)
    everything = ("envelope", "application_properties", "body")
    assert stored["is_malformed"] == stored["amqp"] == everything


def test_what_changes_later_is_null_for_a_group_and_read_without_one() -> None:
    names = ["position", "delivery_count", "state", "settled_time", "settlement"]
    schema = arrow_schema(names)
    nothing = dict.fromkeys(names[1:])
    assert decoded(sdk_row(position=1), names=names) == [{"position": 1, **nothing}]
    decoder = Decoder(schema, PLACE, has_present=True)
    assert decoder.stored_columns == ("position", *names[1:3], "settled_ms", "settlement")
    stored = pa.table({
        "position": [1, 2],
        "delivery_count": pa.array([3, None], pa.int64()),
        "state": ["deferred", None],
        "settled_ms": pa.array([None, ENQUEUED_MS], pa.int64()),
        "settlement": [None, "completed"],
    })  # fmt: skip
    batch = decoder.decode(stored.to_batches()[0])
    assert batch.schema.equals(schema)
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (1, 3, "deferred", None, None),
        (2, None, None, ENQUEUED, "completed"),
    ]


def test_each_column_alone_is_what_it_is_among_all() -> None:
    rows = [
        sdk_row(b"a", 1, message_id="1", application_properties={"DeadLetterReason": "r"}),
        row_of(Envelope(body=b"broken", properties=b"\x00"), 2),
    ]
    whole = decoded(*rows)
    for name in ALL_NAMES:
        assert decoded(*rows, names=[name]) == [{name: row[name]} for row in whole]


def test_reasons_of_dead_letters_are_columns() -> None:
    reasons = {"DeadLetterReason": "NoPrice", "DeadLetterErrorDescription": "sku 7"}
    found = decoded(
        row_of(
            Envelope(application_properties=section(0x74, reasons), dead_letter_source=b"orders/x")
        )
    )[0]
    assert found["dead_letter_reason"] == "NoPrice"
    assert found["dead_letter_error_description"] == "sku 7"
    assert found["dead_letter_source"] == "orders/x"


def test_a_time_to_live_without_end_expires_when_dates_end() -> None:
    found = decoded(row_of(Envelope(ttl_ms=922_337_203_685_477)))[0]
    assert found["time_to_live_ms"] == 922_337_203_685_477
    assert found["expires_at"] == datetime(9999, 12, 30, 23, 59, 59, 999_000, UTC)


def test_rows_of_a_newer_bus_are_refused_with_what_to_do() -> None:
    row = {**row_of(Envelope()), "envelope": b"\x63\x00"}
    with pytest.raises(UnknownRows, match="newer version of the bus: use the version"):
        decoded(row)


def test_captured_messages_come_back_as_they_were_sent() -> None:
    for name, data in all_captured().items():
        envelope = slice_message(data)
        found = decoded(row_of(envelope))[0]
        assert found["is_malformed"] is False, name
        again = slice_message(found["amqp"])
        for part in Envelope.__slots__:
            if part not in {"shared", "size_bytes"}:
                assert getattr(again, part) == getattr(envelope, part), (name, part)


def test_a_large_message_is_decoded_whole() -> None:
    body = b"x" * (8 << 20)
    assert decoded(sdk_row(body))[0]["body"] == body


# --- generated ------------------------------------------------------------------------------------

TEXT = st.text(max_size=20)
PLAIN = st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | TEXT | st.floats()


@given(
    st.binary(max_size=64),
    st.dictionaries(TEXT.filter(bool), PLAIN.filter(lambda value: value is not None), max_size=4),
    TEXT,
)
def test_what_the_sdk_sends_is_what_a_reader_gets(
    body: bytes, values: dict[str, object], subject: str
) -> None:
    message = ServiceBusMessage(body, subject=subject, application_properties=values)
    found = decoded(row_of(slice_message(encoded(message.raw_amqp_message))))[0]
    assert found["is_malformed"] is False
    assert found["body"] == body
    assert (found["subject"] or "") == subject
    assert dict(found["application_properties"]).keys() == values.keys()
    for name, text in found["application_properties"]:
        if isinstance(values[name], str):
            assert text == values[name]


@given(
    st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=8)
)
def test_no_bytes_of_a_message_are_an_error(
    fields: bytes, application: bytes, body: bytes, session: bytes
) -> None:
    envelope = Envelope(
        properties=b"\x00\x53\x73" + fields,
        application_properties=b"\x00\x53\x74" + application,
        body=b"\x00\x53" + body,
        session_id=session,
    )
    decoded(row_of(envelope), row_of(Envelope(properties=fields, body=body)))


@given(st.sampled_from(sorted(all_captured())), st.data())
def test_captured_messages_with_damage_are_no_error(name: str, data: st.DataObject) -> None:
    envelope = slice_message(all_captured()[name])
    for part in ("properties", "application_properties", "body"):
        whole = bytearray(getattr(envelope, part))
        for _ in range(data.draw(st.integers(0, 3))):
            if whole:
                at = data.draw(st.integers(0, len(whole) - 1))
                whole[at] = data.draw(st.integers(0, 255))
        setattr(envelope, part, bytes(whole))
    decoded(row_of(envelope))


@example(b"\x18" + b"\x00" * 8 + b"\x80" + b"\x00" * 7)
@example(b"\x04\x80" + b"\x00" * 7)
@given(st.binary(max_size=60))
def test_no_bytes_of_an_envelope_are_an_error(blob: bytes) -> None:
    row: Row = {**row_of(Envelope()), "envelope": b"\x01" + blob}
    decoded(row)


def test_batches_are_decoded_with_the_types_of_spark() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    target = to_arrow_schema(spark_schema(ALL_NAMES), timezone="UTC")
    assert target.equals(arrow_schema(ALL_NAMES))
    batch = Decoder(target, PLACE).decode(record_batch([sdk_row()]))
    assert batch.schema.equals(target)


def test_an_empty_batch_stays_empty() -> None:
    batch = Decoder(arrow_schema(ALL_NAMES), PLACE).decode(record_batch([]))
    assert batch.num_rows == 0
    assert batch.schema.equals(arrow_schema(ALL_NAMES))


def test_sections_of_a_body_are_bounded() -> None:
    assert read_body(section(0x75, b"") * 1_000) == ("data", b"")
    found = decoded(row_of(Envelope(body=section(0x75, b"") * 100_001)))[0]
    assert (found["body"], found["is_malformed"]) == (None, True)


@pytest.mark.slow
def test_executors_import_no_pydantic_and_no_contract() -> None:
    program = (
        "import sys, pyspark_postbus, postbus_spark.rows, postbus_spark.decode;"
        "print([n for n in ('pydantic', 'postbus.contract', 'pyarrow', 'aiohttp')"
        " if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_packed_envelopes_are_what_the_store_has() -> None:
    envelope = slice_message(sdk_bytes(session_id="s", time_to_live=timedelta(seconds=1)))
    assert row_of(envelope)["envelope"] == pack_envelope(envelope)
    assert isinstance(record_batch([row_of(envelope)]), pa.RecordBatch)
