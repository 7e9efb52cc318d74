"""A schema selects columns; what it cannot have is named."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampNTZType,
)

from postbus_spark.errors import InvalidSchema
from postbus_spark.schema import (
    COLUMNS,
    arrow_schema,
    check_schema,
    ddl,
    default_columns,
)
from tests.pipeline.stored_rows import spark_schema


def test_names_and_types_of_columns_stay() -> None:
    """Tables have them: a column is added at the end, and none is renamed or retyped."""
    assert ddl(COLUMNS) == (
        "`entity` string, `sub_queue` string, `partition` int, `position` bigint,"
        " `sequence_number` bigint, `enqueued_time` timestamp, `expires_at` timestamp,"
        " `message_id` string, `session_id` string, `partition_key` string,"
        " `correlation_id` string, `subject` string, `to` string, `reply_to` string,"
        " `reply_to_session_id` string, `content_type` string, `time_to_live_ms` bigint,"
        " `delivery_count` int, `state` string, `dead_letter_source` string,"
        " `dead_letter_reason` string, `dead_letter_error_description` string, `body` binary,"
        " `body_type` string, `application_properties` map<string,string>,"
        " `application_properties_json` string, `is_malformed` boolean, `amqp` binary,"
        " `settled_time` timestamp, `settlement` string"
    )


@pytest.mark.parametrize(
    ("properties", "is_raw", "absent"),
    [
        ("map", False, {"application_properties_json", "amqp"}),
        ("json", False, {"application_properties", "amqp"}),
        ("map", True, {"application_properties_json"}),
    ],
)
@pytest.mark.parametrize("is_history", [False, True])
def test_columns_without_a_schema(
    properties: str, is_raw: bool, absent: set[str], is_history: bool
) -> None:
    found = default_columns(properties, is_raw_included=is_raw, is_history=is_history)
    of_history = set() if is_history else {"settled_time", "settlement"}
    assert {column.name for column in COLUMNS} - {each.name for each in found} == (
        absent | of_history
    )


def test_a_schema_is_a_selection_in_any_order() -> None:
    check_schema(StructType().add("body", BinaryType()).add("position", LongType(), nullable=False))
    check_schema(spark_schema(["application_properties", "to"]))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (StructType().add("bodi", BinaryType()), "no column bodi, did you mean body?"),
        (StructType().add("Body", BinaryType()), "did you mean body?"),
        (StructType().add("xyzxyz", IntegerType()), "there are entity, sub_queue"),
        (StructType().add("body", StringType()), "body is binary, and the schema says string"),
        (StructType().add("position", IntegerType()), "position is bigint"),
        (StructType().add("enqueued_time", TimestampNTZType()), "enqueued_time is timestamp"),
        (StructType().add("subject", StringType(), nullable=False), "NOT NULL: leave that out"),
        (StructType().add("to", StringType()).add("to", StringType()), "column to twice"),
        (StructType(), "has no column"),
    ],
)
def test_other_schemas_are_refused(schema: StructType, text: str) -> None:
    with pytest.raises(InvalidSchema) as error:
        check_schema(schema)
    assert text in str(error.value)


@pytest.mark.parametrize("names", [[], ["to", "to"], ["nothing"]])
def test_columns_without_spark_are_checked_too(names: list[str]) -> None:
    with pytest.raises(InvalidSchema):
        arrow_schema(names)
