"""Messages as clients encode them, and rows as the store has them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from azure.servicebus import ServiceBusMessage
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from postbus.contract.bulk import GENERATION_KEY, ROW_FORMAT, ROW_FORMAT_KEY
from postbus.message.envelope import Envelope
from postbus.message.rows import pack_envelope
from postbus.message.sections import slice_message
from postbus_spark.decode import Decoder, Place
from postbus_spark.schema import BY_NAME, COLUMNS, arrow_schema

ENQUEUED_MS = 1_700_000_000_123
PLACE = Place("orders", "main", 3)
ALL_NAMES = [column.name for column in COLUMNS]
TYPES = {
    "position": pa.int64(),
    "sequence_number": pa.int64(),
    "enqueued_ms": pa.int64(),
    "envelope": pa.binary(),
    "application_properties": pa.binary(),
    "body": pa.binary(),
}
GENERATION = "bus/7"
SPARK_TYPES = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "binary": BinaryType(),
    "boolean": BooleanType(),
    "map<string,string>": MapType(StringType(), StringType()),
}

Row = dict[str, Any]


def sdk_bytes(body: Any = b"body", **fields: Any) -> bytes:
    """Return a message as azure-servicebus encodes it."""
    message = ServiceBusMessage(body, **fields)
    outgoing = PyamqpTransport.to_outgoing_amqp_message(message.raw_amqp_message)
    return bytes(encode_payload(bytearray(), outgoing))


def row_of(envelope: Envelope, position: int = 1) -> Row:
    return {
        "position": position,
        "sequence_number": position + 1_000,
        "enqueued_ms": ENQUEUED_MS,
        "envelope": pack_envelope(envelope),
        "application_properties": envelope.application_properties or None,
        "body": envelope.body or None,
    }


def sdk_row(body: Any = b"body", position: int = 1, **fields: Any) -> Row:
    return row_of(slice_message(sdk_bytes(body, **fields)), position)


def spark_schema(names: list[str]) -> StructType:
    schema = StructType()
    for name in names:
        schema = schema.add(name, SPARK_TYPES[BY_NAME[name].sql_type])
    return schema


def record_batch(rows: list[Row], names: list[str] | None = None) -> pa.RecordBatch:
    names = list(TYPES) if names is None else names
    schema = pa.schema(
        [pa.field(name, TYPES[name]) for name in names],
        metadata={ROW_FORMAT_KEY: ROW_FORMAT, GENERATION_KEY: GENERATION},
    )
    columns = [pa.array([row[name] for row in rows], TYPES[name]) for name in names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def decoded(*rows: Row, names: list[str] | None = None) -> list[Row]:
    """Return messages as a reader gets them; the batch has exactly the declared schema."""
    schema = arrow_schema(ALL_NAMES if names is None else names)
    decoder = Decoder(schema, PLACE)
    stored = record_batch(list(rows), list(decoder.stored_columns))
    batch = decoder.decode(stored)
    assert batch.schema.equals(schema)
    batch.validate(full=True)
    return batch.to_pylist()
