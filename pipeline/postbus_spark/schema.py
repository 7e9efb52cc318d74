"""Columns of messages: their names, types and what a schema of a user may say of them.

Columns are added at the end and never change their type: tables and checkpoints outlive versions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NamedTuple

from postbus_spark.errors import InvalidSchema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from postbus_spark.options import PropertiesFormat


class Column(NamedTuple):
    """A column with its type in Spark's SQL."""

    name: str
    sql_type: str
    is_nullable: bool = True


COLUMNS: Final = (
    Column("entity", "string", is_nullable=False),
    Column("sub_queue", "string", is_nullable=False),
    Column("partition", "int", is_nullable=False),
    Column("position", "bigint", is_nullable=False),
    Column("sequence_number", "bigint", is_nullable=False),
    Column("enqueued_time", "timestamp", is_nullable=False),
    Column("expires_at", "timestamp"),
    Column("message_id", "string"),
    Column("session_id", "string"),
    Column("partition_key", "string"),
    Column("correlation_id", "string"),
    Column("subject", "string"),
    Column("to", "string"),
    Column("reply_to", "string"),
    Column("reply_to_session_id", "string"),
    Column("content_type", "string"),
    Column("time_to_live_ms", "bigint"),
    Column("delivery_count", "int"),
    Column("state", "string"),
    Column("dead_letter_source", "string"),
    Column("dead_letter_reason", "string"),
    Column("dead_letter_error_description", "string"),
    Column("body", "binary"),
    Column("body_type", "string"),
    Column("application_properties", "map<string,string>"),
    Column("application_properties_json", "string"),
    Column("is_malformed", "boolean", is_nullable=False),
    Column("amqp", "binary"),
    Column("settled_time", "timestamp"),
    Column("settlement", "string"),
)
"""All columns; those of `decode.PRESENT` change later and are null for a reader group."""

BY_NAME: Final = {column.name: column for column in COLUMNS}

_TEXT: Final = ("string",)
WRITTEN: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "message_id": _TEXT,
    "session_id": _TEXT,
    "partition_key": _TEXT,
    "correlation_id": _TEXT,
    "subject": _TEXT,
    "to": _TEXT,
    "reply_to": _TEXT,
    "reply_to_session_id": _TEXT,
    "content_type": _TEXT,
    "time_to_live_ms": ("bigint", "int"),
    "scheduled_enqueue_time": ("timestamp",),
    "application_properties": ("map<string,string>",),
    "application_properties_json": _TEXT,
}
"""Columns that are written -> the types in Spark's SQL that each may have."""


def default_columns(
    properties: PropertiesFormat, *, is_raw_included: bool, is_history: bool = False
) -> list[Column]:
    """Return the columns without a schema of the user."""
    left_out = {
        "map": {"application_properties_json"},
        "json": {"application_properties"},
    }[properties]
    if not is_raw_included:
        left_out = left_out | {"amqp"}
    if not is_history:
        left_out = left_out | {"settled_time", "settlement"}
    return [column for column in COLUMNS if column.name not in left_out]


def ddl(columns: Sequence[Column]) -> str:
    """Return the columns as a schema of Spark's SQL."""
    return ", ".join(f"`{column.name}` {column.sql_type}" for column in columns)


def check_schema(schema: StructType) -> None:
    """Raise `InvalidSchema` unless a schema selects columns in their types."""
    names = [field.name for field in schema.fields]
    for field in schema.fields:
        column = _known(field.name)
        sql_type = field.dataType.simpleString()
        if sql_type != column.sql_type:
            raise InvalidSchema(
                f"column {field.name} is {column.sql_type}, and the schema says {sql_type}: read it"
                " as it is and cast it afterwards"
            )
        if not field.nullable and column.is_nullable:
            raise InvalidSchema(
                f"column {field.name} may be null, and the schema says NOT NULL: leave that out"
            )
        if names.count(field.name) > 1:
            raise InvalidSchema(f"the schema names column {field.name} twice")
    if not names:
        raise InvalidSchema("the schema has no column: name at least one, such as position")


def check_written(schema: StructType) -> None:
    """Raise `InvalidSchema` unless messages can have all columns, in their types."""
    names = [field.name for field in schema.fields]
    for field in schema.fields:
        if field.name in BY_NAME and field.name not in WRITTEN:
            raise InvalidSchema(
                f"column {field.name} is made by the bus and cannot be written: select the columns"
                " of the messages before, such as body and application_properties"
            )
        if field.name not in WRITTEN:
            raise InvalidSchema(_unknown(field.name, WRITTEN))
        sql_type = field.dataType.simpleString()
        if sql_type not in WRITTEN[field.name]:
            raise InvalidSchema(
                f"column {field.name} is written as {' or '.join(WRITTEN[field.name])}, and it is"
                f" {sql_type}: cast it before"
            )
        if names.count(field.name) > 1:
            raise InvalidSchema(f"there are two columns {field.name}: select one of them")
    if not names:
        raise InvalidSchema("there is no column to write: select at least one, such as body")
    if {"application_properties", "application_properties_json"} <= set(names):
        raise InvalidSchema(
            "application_properties and application_properties_json are the same part of a message:"
            " select one of them"
        )


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """Return the columns of these names for readers without Spark."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "binary": pa.binary(),
        "boolean": pa.bool_(),
        "map<string,string>": pa.map_(pa.string(), pa.string()),
    }
    columns = [_known(name) for name in names]
    if not columns or len(set(names)) < len(columns):
        raise InvalidSchema("name at least one column, and each once")
    return pa.schema([pa.field(column.name, types[column.sql_type]) for column in columns])


def _known(name: str) -> Column:
    if name in BY_NAME:
        return BY_NAME[name]
    raise InvalidSchema(_unknown(name, BY_NAME))


def _unknown(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"there is no column {name}, {hint}"
