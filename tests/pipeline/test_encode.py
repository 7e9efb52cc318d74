"""Rows become messages that the bus and the SDK read as they were written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus._pyamqp._decode import decode_payload
from hypothesis import example, given
from hypothesis import strategies as st

from postbus.message.patch import MAX_PROPERTIES_BYTES, MAX_PROPERTY_BYTES, check_properties
from postbus.message.sections import MAX_TTL_MS, slice_message
from postbus_spark.decode import Decoder
from postbus_spark.encode import encode_rows
from postbus_spark.errors import InvalidRows, InvalidSchema
from postbus_spark.schema import BY_NAME, WRITTEN, arrow_schema, check_written
from tests.pipeline.stored_rows import (
    PLACE,
    SPARK_TYPES,
    decoded,
    record_batch,
    row_of,
    sdk_row,
    spark_schema,
)

NOW_MS = 1_700_000_000_000
TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}
TEXT_COLUMNS = [name for name, types in WRITTEN.items() if types == ("string",)][:-1]

Row = dict[str, Any]


def batch_of(rows: list[Row], names: Iterable[str] | None = None) -> pa.RecordBatch:
    names = list(dict.fromkeys(name for row in rows for name in row)) if names is None else names
    columns = {
        name: pa.array([row.get(name) for row in rows], TYPES[WRITTEN[name][0]]) for name in names
    }
    return pa.RecordBatch.from_pydict(columns)


def split(arrays: Iterable[pa.Array]) -> list[bytes]:
    """Return messages without the lengths before them."""
    messages = [each for array in arrays for each in array.to_pylist()]
    for each in messages:
        assert int.from_bytes(each[:4], "big") == len(each) - 4
    return [each[4:] for each in messages]


def encoded(*rows: Row) -> list[bytes]:
    return split(encode_rows(batch_of(list(rows)), 0, NOW_MS))


def received(data: bytes) -> ServiceBusReceivedMessage:
    """Return a message as the SDK gives it to an application."""
    return ServiceBusReceivedMessage(decode_payload(memoryview(data)), receiver=None)


def read_back(*rows: Row, names: list[str]) -> list[Row]:
    """Return what a reader of the connector gets of written rows."""
    stored = [row_of(slice_message(data)) for data in encoded(*rows)]
    return decoded(*stored, names=names)


def test_the_sdk_reads_every_column() -> None:
    at = datetime(2026, 1, 31, 8, 30, 0, 123_000, UTC)
    message = received(
        encoded({
            "body": b"\x00\xffbody",
            "message_id": "id-1",
            "session_id": "s",
            "partition_key": "s",
            "correlation_id": "c",
            "subject": "sübject",
            "to": "to",
            "reply_to": "reply",
            "reply_to_session_id": "rs",
            "content_type": "application/json",
            "time_to_live_ms": 60_000,
            "scheduled_enqueue_time": at,
            "application_properties": [("text", "ü"), ("none", None)],
        })[0]
    )  # fmt: skip
    assert b"".join(message.body) == b"\x00\xffbody"
    assert (message.message_id, message.session_id, message.partition_key) == ("id-1", "s", "s")
    assert (message.correlation_id, message.subject, message.to) == ("c", "sübject", "to")
    assert (message.reply_to, message.reply_to_session_id) == ("reply", "rs")
    assert message.content_type == "application/json"
    assert message.time_to_live == timedelta(minutes=1)
    assert message.scheduled_enqueue_time_utc == at
    assert message.application_properties == {b"text": "ü".encode(), b"none": None}
    assert message.raw_amqp_message.header.durable is True


@pytest.mark.parametrize("name", TEXT_COLUMNS)
def test_each_column_alone_and_null_beside_a_value(name: str) -> None:
    first, second = encoded({name: "välue"}, {name: None})
    assert getattr(received(first), name) == "välue"
    assert getattr(received(second), name) is None
    assert received(second).raw_amqp_message.annotations in (None, {})


def test_nulls_are_fields_that_a_message_does_not_have() -> None:
    row: Row = dict.fromkeys(name for name in WRITTEN if name != "application_properties_json")
    names = [name for name in row if name in BY_NAME]
    envelope = slice_message(encoded(row)[0])
    assert (envelope.ttl_ms, envelope.scheduled_ms, envelope.partition_key) == (None, None, None)
    assert (envelope.annotation_count, envelope.application_properties, envelope.body) == (
        0, b"", b"",
    )  # fmt: skip
    found = decoded(row_of(envelope), names=names)[0]
    assert found == {**dict.fromkeys(names), "application_properties": []}


def test_body_and_properties_of_one_row_are_not_those_of_another() -> None:
    rows: list[Row] = [
        {"body": b"a", "application_properties": [("k", "1"), ("l", "2")]},
        {"body": None, "application_properties": None},
        {"body": b"c" * 300, "application_properties": []},
        {"body": b"", "application_properties": [("m", "x" * 300)]},
    ]
    names = ["body", "application_properties"]
    expected = [{**row, "application_properties": row[names[1]] or []} for row in rows]
    assert read_back(*rows, names=names) == expected
    batch = batch_of([rows[0], *rows, rows[0]])
    sliced = split(encode_rows(batch.slice(1, 4), 0, NOW_MS))
    assert sliced == encoded(*rows)


@pytest.mark.parametrize("size", [0, 1, 253, 254, 255, 256, 257, 70_000])
def test_sizes_around_one_octet(size: int) -> None:
    row: Row = {"body": b"x" * size, "subject": "s" * min(size, 30_000)}
    row["application_properties"] = [("n", "v" * min(size, 30_000))]
    for rows in ([row], [row, {"body": b"y", "subject": "t"}]):
        first = read_back(*rows, names=["body", "subject", "application_properties"])[0]
        assert first == row


@pytest.mark.parametrize("count", [126, 127, 128, 129, 300])
def test_numbers_of_properties_around_one_octet(count: int) -> None:
    pairs = [(f"{number:x}", "") for number in range(count)]
    [row] = read_back({"application_properties": pairs}, names=["application_properties"])
    assert row["application_properties"] == pairs


def test_a_string_is_a_body_too() -> None:
    batch = pa.RecordBatch.from_pydict({"body": ["text", None, "ü"]})
    bodies = [slice_message(data).body for data in split(encode_rows(batch, 0, NOW_MS))]
    assert bodies == [b"\x00\x53\x75\xa0\x04text", b"", b"\x00\x53\x75\xa0\x02\xc3\xbc"]


def test_large_types_of_arrow_are_the_same() -> None:
    large = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([b"a"], pa.large_binary()),
            "subject": pa.array(["s"], pa.large_string()),
            "application_properties": pa.array(
                [[("k", "v")]], pa.map_(pa.large_string(), pa.large_string())
            ),
        }
    )
    row: Row = {"body": b"a", "subject": "s", "application_properties": [("k", "v")]}
    assert split(encode_rows(large, 0, NOW_MS)) == encoded(row)


@pytest.mark.parametrize("ttl_ms", [0, 1, 0xFFFF_FFFF, 0x1_0000_0000, 90 * 86_400_000])
def test_a_time_to_live_is_what_the_bus_reads(ttl_ms: int) -> None:
    for rows in ([ttl_ms], [ttl_ms, 5, None]):
        found = encoded(*({"time_to_live_ms": each} for each in rows))
        assert [slice_message(each).ttl_ms for each in found] == rows


def test_a_time_to_live_without_end_ends_with_the_dates_of_clients() -> None:
    data = encoded({"time_to_live_ms": MAX_TTL_MS, "message_id": "m"})[0]
    assert slice_message(data).ttl_ms == 253_402_214_399_999 - NOW_MS
    message = received(data).raw_amqp_message
    assert message.properties.creation_time == NOW_MS
    assert message.properties.absolute_expiry_time == 253_402_214_399_999


def test_times_are_utc_whatever_the_zone_of_the_session() -> None:
    times = pa.array([NOW_MS * 1_000 + 999, None], pa.timestamp("us", "Pacific/Auckland"))
    batch = pa.RecordBatch.from_pydict({"scheduled_enqueue_time": times})
    found = [slice_message(data) for data in split(encode_rows(batch, 0, NOW_MS))]
    assert [each.scheduled_ms for each in found] == [NOW_MS, None]


def test_batches_are_divided_when_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [{"body": b"%d" % number * 100} for number in range(9)]
    whole = encoded(*rows)
    monkeypatch.setattr("postbus_spark.encode.MAX_BATCH_BYTES", 500)
    arrays = list(encode_rows(batch_of(rows), 0, NOW_MS))
    assert len(arrays) == 3
    assert split(arrays) == whole
    assert list(encode_rows(batch_of([], ["body"]), 0, NOW_MS)) == []
    rows[7]["time_to_live_ms"] = -1
    with pytest.raises(InvalidRows, match="row 107 of the task"):
        list(encode_rows(batch_of(rows), 100, NOW_MS))


# --- JSON -----------------------------------------------------------------------------------------


def test_json_keeps_the_types_of_properties() -> None:
    values = {
        "text": "ü", "long": "y" * 300, "whole": 7, "large": -(2**63), "unsigned": 2**64 - 1,
        "part": 1.5, "yes": True, "no": False, "none": None,
    }  # fmt: skip
    data = encoded({"application_properties_json": json.dumps(values)})[0]
    found = received(data).application_properties
    assert found is not None
    sent = {name.decode(): value for name, value in found.items()}
    assert sent.pop("text").decode() == "ü"
    assert sent.pop("long").decode() == "y" * 300
    assert sent == {name: values[name] for name in sent}
    assert type(sent["whole"]) is int
    assert type(sent["yes"]) is bool
    [row] = read_back({"application_properties_json": json.dumps(values)},
                      names=["application_properties_json"])  # fmt: skip
    assert json.loads(row["application_properties_json"]) == values


def test_arrays_and_objects_become_text_as_a_property_is_a_simple_value() -> None:
    [row] = read_back({"application_properties_json": '{"a":[1,{"b":"ü"}],"c":{}}'},
                      names=["application_properties"])  # fmt: skip
    assert row["application_properties"] == [("a", '[1,{"b":"ü"}]'), ("c", "{}")]


def test_no_json_is_no_properties() -> None:
    found = encoded(*({"application_properties_json": each} for each in (None, "{}", '{"a":1}')))
    assert [bool(slice_message(each).application_properties) for each in found] == [
        False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[]", "it is no JSON object"),
        ("null", "it is no JSON object"),
        ('{"a":NaN}', "NaN is no JSON"),
        ('{"a":1e999}', "property 'a' does not fit"),
        ('{"a":18446744073709551616}', "property 'a' does not fit"),
        ('{"a":-9223372036854775809}', "property 'a' does not fit"),
        ('{"a":"\\ud800"}', "property 'a' does not fit"),
        ('{"\\ud800":1}', "does not fit"),
        ('{"a":' + "9" * 5_000 + "}", "integer string conversion"),
        ('{"a":' + "[" * 100_000 + "}", "recursion"),
        ('{"a":"' + "x" * (MAX_PROPERTY_BYTES + 1) + '"}', "property 'a' is larger than 32768"),
    ],
)
def test_wrong_json_is_named_with_its_row(text: str, said: str) -> None:
    rows: list[Row] = [{"application_properties_json": each} for each in ("{}", "{}", text)]
    with pytest.raises(InvalidRows) as error:
        list(encode_rows(batch_of(rows), 1_000, NOW_MS))
    assert "column application_properties_json of row 1002 of the task: " in str(error.value)
    assert said in str(error.value)
    assert len(str(error.value)) < 500


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "column", "said"),
    [
        ({"message_id": "m" * 129}, "message_id", "129 characters, and it may have at most 128"),
        ({"session_id": "ü" * 129}, "session_id", "129 characters"),
        ({"reply_to_session_id": "m" * 129}, "reply_to_session_id", "129 characters"),
        ({"partition_key": "m" * 129}, "partition_key", "129 characters"),
        ({"session_id": "a", "partition_key": "b"}, "partition_key", "differs from the session"),
        ({"time_to_live_ms": -1}, "time_to_live_ms", "-1 is not between 0 and"),
        ({"time_to_live_ms": MAX_TTL_MS + 1}, "time_to_live_ms", "is not between 0 and"),
        (
            {"application_properties": [("a", ""), ("b", "x" * (MAX_PROPERTY_BYTES + 1))]},
            "application_properties", "property 'b' is larger than 32768 bytes",
        ),
        (
            {"application_properties": [(name, "x" * 30_000) for name in "abc"]},
            "application_properties", "all properties are 90",
        ),
        ({"subject": "s" * MAX_PROPERTIES_BYTES}, "subject", "may be at most 65536"),
    ],
)  # fmt: skip
def test_a_value_beyond_a_limit_is_named_with_row_and_column(
    row: Row, column: str, said: str
) -> None:
    fine: Row = dict.fromkeys(row)
    with pytest.raises(InvalidRows) as error:
        list(encode_rows(batch_of([fine, row, row]), 40, NOW_MS))
    assert f"column {column} of row 41 of the task: " in str(error.value)
    assert said in str(error.value)


def test_values_at_a_limit_are_written() -> None:
    row: Row = {
        "message_id": "ü" * 128,
        "session_id": "s" * 128,
        "application_properties": [("a", "x" * MAX_PROPERTY_BYTES)],
    }
    envelope = slice_message(encoded(row)[0])
    assert check_properties(envelope) is None
    assert envelope.session_id == b"s" * 128


@pytest.mark.parametrize("name", ["subject", "application_properties", "message_id"])
def test_text_that_is_not_utf8_is_named(name: str) -> None:
    """A cast from binary to string in Spark checks nothing."""
    bad = pa.array([b"fine", None, b"\xff"]).view(pa.string())
    column = bad
    if name == "application_properties":
        column = pa.MapArray.from_arrays([0, 0, 2, 3], ["a", "b", "c"], bad)
    batch = pa.RecordBatch.from_arrays([column], names=[name])
    with pytest.raises(InvalidRows, match=f"column {name} of row 2 of .* is not UTF-8"):
        list(encode_rows(batch, 0, NOW_MS))


# --- schemas --------------------------------------------------------------------------------------


def test_columns_that_are_read_and_written_have_the_same_type() -> None:
    shared = [name for name in WRITTEN if name in BY_NAME]
    assert len(shared) == len(WRITTEN) - 1
    for name in shared:
        assert BY_NAME[name].sql_type in WRITTEN[name]
        check_written(spark_schema([name]))
    assert arrow_schema(shared[:1]).types == [pa.binary()]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([("bodi", "string")], "there is no column bodi, did you mean body?"),
        ([("qqq", "string")], "there is no column qqq, there are body, message_id"),
        ([("position", "bigint")], "position is made by the bus and cannot be written: select"),
        ([("body", "bigint")], "body is written as binary or string, and it is bigint: cast it"),
        ([("message_id", "binary")], "message_id is written as string, and it is binary: cast"),
        ([("body", "binary")] * 2, "there are two columns body: select one"),
        ([], "there is no column to write"),
        (
            [("application_properties", "map<string,string>"),
             ("application_properties_json", "string")],
            "are the same part of a message: select one of them",
        ),
    ],
)  # fmt: skip
def test_a_wrong_schema_is_named(fields: list[tuple[str, str]], said: str) -> None:
    schema = spark_schema([])
    for name, sql_type in fields:
        schema = schema.add(name, SPARK_TYPES[sql_type])
    with pytest.raises(InvalidSchema) as error:
        check_written(schema)
    assert said in str(error.value)


# --- generated ------------------------------------------------------------------------------------

TEXT = st.none() | st.text(max_size=12) | st.text(min_size=250, max_size=260)
ID = st.none() | st.text(max_size=128)
PAIRS = st.none() | st.dictionaries(st.text(max_size=9), TEXT, max_size=4).map(
    lambda found: list(found.items())
)
ROW = st.fixed_dictionaries({
    "body": st.none() | st.binary(max_size=300),
    "message_id": ID,
    "session_id": ID,
    "correlation_id": TEXT,
    "subject": TEXT,
    "to": TEXT,
    "reply_to": TEXT,
    "reply_to_session_id": ID,
    "content_type": TEXT,
    "time_to_live_ms": st.none() | st.integers(0, 2**40),
    "application_properties": PAIRS,
})  # fmt: skip
NAMES = st.sets(st.sampled_from(["body", "application_properties", *TEXT_COLUMNS]), min_size=1)


@given(st.lists(ROW, min_size=1, max_size=5), NAMES, st.data())
def test_what_is_written_is_what_a_reader_gets(
    rows: list[Row], names: set[str], data: st.DataObject
) -> None:
    names -= {"partition_key"}
    columns = sorted(names) or ["body"]
    written = [{name: row[name] for name in columns} for row in rows]
    found = read_back(*written, names=columns)
    for row in written:
        if "application_properties" in row:
            row["application_properties"] = row["application_properties"] or []
    assert found == written
    messages = encoded(*written)
    again = data.draw(st.integers(0, len(rows) - 1))
    assert encoded(*written[again:]) == messages[again:], "rows do not depend on each other"


@example({"subject": "s"}, {"k": 1.5})
@given(
    st.fixed_dictionaries({"subject": st.text(max_size=9)}),
    st.dictionaries(
        st.text(min_size=1, max_size=9),
        st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.text(max_size=9)
        | st.floats(allow_nan=False, allow_infinity=False),
        max_size=4,
    ),
)  # fmt: skip
def test_properties_that_were_read_as_json_are_written_as_the_sdk_sent_them(
    fields: Row, values: dict[str, object]
) -> None:
    names = ["application_properties_json", "subject"]
    first = decoded(sdk_row(b"", application_properties=values, **fields), names=names)[0]
    again = row_of(slice_message(encoded(first)[0]))
    decoder = Decoder(arrow_schema(names), PLACE)
    second = decoder.decode(record_batch([again], list(decoder.stored_columns))).to_pylist()[0]
    assert json.loads(second["application_properties_json"]) == json.loads(
        first["application_properties_json"]
    )
    assert (second["subject"] or "") == fields["subject"]
