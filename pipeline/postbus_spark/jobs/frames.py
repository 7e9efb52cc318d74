"""Frames of a batch: the source with parsed bodies, what cannot be parsed, lookups, and outputs.

Everything but a lookup of Delta is lazy, so `check` builds the same frames without messages to find
mistakes early.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import functions
from pyspark.sql.types import StructType

from postbus.contract.pipeline import MALFORMED, PythonFunction, Sink
from postbus.contract.pipeline_checks import ordered_queries
from postbus_spark.errors import InvalidSchema
from postbus_spark.lake.files import KEYS
from postbus_spark.lake.layout import CatalogTable
from postbus_spark.lake.places import InvalidTable, place_at
from postbus_spark.schema import WRITTEN, check_written

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from postbus.contract.pipeline import PipelineSpec, Source, TablePlace

MALFORMED_REASON: Final = "MalformedBody"
REJECT_KEYS: Final = KEYS[:2]
"""Columns that an output for a dead-letter queue keeps."""

_PARSED: Final = "_parsed_body"
_UNPARSED: Final = "_unparsed_body"
_KEY: Final = "_key"
SOURCE: Final = "source"
"""Column with the name of the source, where there are several."""

EVENT_TIME: Final = "event_time"
KEY_TYPES: Final = {
    "partition": "int",
    "position": "bigint",
    "enqueued_time": "timestamp",
    "source": "string",
}


class InvalidPipeline(Exception):
    """A query, a schema or a function of a pipeline is wrong; `where` is the field."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")


def frames_of(spec: PipelineSpec, messages: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
    """Return the frames that sinks may name, of the messages of each source.

    Raises `InvalidPipeline`.
    """
    session = messages[spec.source.name].sparkSession
    views = {**_all_views(spec, messages), **_lookups(spec, session)}
    transform = spec.transform
    if transform is None:
        return views
    if transform.python is not None:
        return {**views, **_called(transform.python, views, spec.sinks)}
    for name, frame in views.items():
        frame.createOrReplaceTempView(name)
    return {**views, **queried(spec, session, ordered_queries(transform.sql or {}))}


def queried(
    spec: PipelineSpec, session: SparkSession, names: Sequence[str]
) -> dict[str, DataFrame]:
    """Return the outputs of queries in this order, each a view. Raises `InvalidPipeline`."""
    outputs = {}
    queries = (spec.transform and spec.transform.sql) or {}
    for name in names:
        where = f"spec.transform.sql.{name}"
        try:
            outputs[name] = session.sql(queries[name])
        except (AnalysisException, ParseException) as error:
            raise InvalidPipeline(where, first_line(error)) from None
        if not outputs[name].columns:
            raise InvalidPipeline(where, "a query that returns rows")
        outputs[name].createOrReplaceTempView(name)
    return outputs


def _all_views(spec: PipelineSpec, messages: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
    """Return the views of all sources; `malformed` has the messages of all."""
    views: dict[str, DataFrame] = {}
    for at, source in enumerate(spec.sources):
        found = _views(source, messages[source.name], f"spec.sources[{at}]")
        if MALFORMED in found and MALFORMED in views:
            found[MALFORMED] = views[MALFORMED].unionByName(found[MALFORMED])
        views |= found
        views[source.name] = _watermarked(source, views[source.name], f"spec.sources[{at}]")
    return views


def _watermarked(source: Source, rows: DataFrame, where: str) -> DataFrame:
    """Return the rows with their watermark, the first ones of equal ones if so declared.

    A field of bodies becomes the column `event_time`, since Spark watches columns only.
    """
    watermark = source.watermark
    if watermark is None:
        return rows
    column = watermark.column
    kind = _type_of(rows, column, f"{where}.watermark.column")
    if kind != "timestamp":
        raise InvalidPipeline(
            f"{where}.watermark.column", f"{column} of {source.name} is {kind}, and no timestamp"
        )
    if "." in column:
        rows, column = rows.withColumn(EVENT_TIME, functions.col(column)), EVENT_TIME
    rows = rows.withWatermark(column, f"{watermark.delay_ms} milliseconds")
    if not source.deduplicate or not rows.isStreaming:
        return rows
    keys = []
    for at, name in enumerate(source.deduplicate):
        _type_of(rows, name, f"{where}.deduplicate[{at}]")
        keys.append(f"{_KEY}{at}")
        rows = rows.withColumn(keys[-1], functions.col(name))
    return rows.dropDuplicatesWithinWatermark(keys).drop(*keys)


def _type_of(rows: DataFrame, column: str, where: str) -> str:
    try:
        return rows.select(column).schema.fields[0].dataType.simpleString()
    except AnalysisException:
        raise InvalidPipeline(
            where, f"there is no {column}: name a column of messages, or a field of body.json"
        ) from None


def _views(source: Source, messages: DataFrame, where: str) -> dict[str, DataFrame]:
    """Return the messages with parsed bodies, and those whose body does not have the schema."""
    if source.body is None:
        return {source.name: messages}
    parsed, is_parsed = _parsed(source, messages, where)
    good = parsed.where(is_parsed).withColumn("body", functions.col(_PARSED).dropFields(_UNPARSED))
    bad = parsed.where(f"not ({is_parsed})")
    description = f"the body is no JSON object with {source.body.json_schema}"
    return {
        source.name: good.drop(_PARSED),
        MALFORMED: bad.drop(_PARSED)
        .withColumn("reason", functions.lit(MALFORMED_REASON))
        .withColumn("description", functions.lit(description[:1_000])),
    }


def unparsed_views(source: Source, messages: DataFrame) -> dict[str, DataFrame]:
    """Return the same messages with their bodies as they are."""
    if source.body is None:
        return {source.name: messages}
    parsed, is_parsed = _parsed(source, messages, "spec.sources[0]")
    return {source.name: parsed.where(is_parsed), MALFORMED: parsed.where(f"not ({is_parsed})")}


def _parsed(source: Source, messages: DataFrame, where: str) -> tuple[DataFrame, str]:
    """Return messages with parsed bodies, and the condition that a body was parsed."""
    schema = body_schema(source, where)
    text = functions.expr("try_validate_utf8(cast(body as string))")
    parsed = messages.withColumn(
        _PARSED,
        functions.from_json(
            text, schema.add(_UNPARSED, "string"), {"columnNameOfCorruptRecord": _UNPARSED}
        ),
    )
    return parsed, f"{_PARSED} is not null and {_PARSED}.{_UNPARSED} is null"


def body_schema(source: Source, where: str) -> StructType:
    """Return the declared schema of bodies. Raises `InvalidPipeline`."""
    where = f"{where}.body.json"
    try:
        schema = StructType.fromDDL(source.body.json_schema if source.body else "")
    except (AnalysisException, ParseException) as error:
        raise InvalidPipeline(where, first_line(error)) from None
    if not isinstance(schema, StructType):
        raise InvalidPipeline(where, "columns with their types, such as sku string, amount double")
    return schema


# --- lookups ------------------------------------------------------------------------------------


def _lookups(spec: PipelineSpec, session: SparkSession) -> dict[str, DataFrame]:
    """Return the rows of lookups as they are now. Raises `InvalidPipeline`, `OSError`."""
    found = {}
    for at, lookup in enumerate(spec.lookups):
        kind, read = ("parquet", read_parquet) if lookup.parquet else ("delta", read_delta)
        folder = lookup.folder
        where = f"spec.lookups[{at}].{kind}"
        if not Path(folder).is_dir():
            raise InvalidPipeline(where, f"there is no folder {folder}: make it, or correct this")
        found[lookup.name] = read(session, folder, where)
    return found


def read_parquet(session: SparkSession, folder: str, where: str) -> DataFrame:
    """Return the rows of a folder, read by executors. Files may have more columns than others."""
    try:
        return session.read.option("mergeSchema", "true").parquet(f"file:{folder}")
    except PySparkException as error:
        raise InvalidPipeline(
            where, f"the folder {folder} cannot be read as Parquet ({first_line(error)})"
        ) from None


def read_delta(
    session: SparkSession,
    folder: str,
    where: str,
    filters: Sequence[tuple[str, str, object]] = (),
) -> DataFrame:
    """Return the rows of a table, read by the driver: the log knows what files alone do not."""
    import deltalake
    import pyarrow as pa
    from deltalake.exceptions import DeltaError

    try:
        options = place_at(folder).options
        table = deltalake.DeltaTable(folder, storage_options=options)
        return session.createDataFrame(table.to_pyarrow_table(filters=list(filters) or None))
    except (DeltaError, pa.ArrowInvalid) as error:
        raise InvalidPipeline(
            where, f"the folder {folder} cannot be read as Delta ({error})"
        ) from None


def read_iceberg(
    session: SparkSession,
    place: CatalogTable,
    where: str,
    start: datetime | None,
    end: datetime | None,
) -> DataFrame:
    """Return the rows of a table that were enqueued in [start, end), read by the driver."""
    from postbus_spark.lake.iceberg import read_rows

    try:
        return session.createDataFrame(read_rows(place, start, end))
    except InvalidTable as error:
        raise InvalidPipeline(where, str(error)) from None


def catalog_table(table: TablePlace) -> CatalogTable:
    """Return where a table of Iceberg is."""
    assert table.catalog is not None
    assert table.name is not None
    return CatalogTable(table.catalog.uri, table.name, table.catalog.warehouse)


# --- functions ----------------------------------------------------------------------------------


def _called(
    python: PythonFunction, views: Mapping[str, DataFrame], sinks: tuple[Sink, ...]
) -> dict[str, DataFrame]:
    """Return the outputs of a function."""
    where = "spec.transform.python"
    try:
        function = getattr(importlib.import_module(python.module), python.function)
    except (ImportError, AttributeError) as error:
        raise InvalidPipeline(where, str(error)) from error
    found = function(dict(views))
    wanted = {sink.origin for sink in sinks} - views.keys()
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidPipeline(where, f"{python.function} does not return frames by name")
    for name in sorted(found.keys() - wanted):
        raise InvalidPipeline(where, f"the rows of {name} go nowhere: add a sink that is from it")
    for name in sorted(wanted - found.keys()):
        raise InvalidPipeline(where, f"{python.function} does not return the output {name}")
    return found


# --- what sinks need ----------------------------------------------------------------------------


def check_sinks(spec: PipelineSpec, frames: Mapping[str, DataFrame]) -> None:
    """Raise `InvalidPipeline` if an output lacks what its sink needs."""
    for at, sink in enumerate(spec.sinks):
        where = f"spec.sinks[{at}]"
        if sink.entity is not None:
            check_messages(where, written(frames[sink.origin]))
            continue
        schema = frames[sink.origin].schema
        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        for name in _needed(spec, sink):
            if types.get(name) != KEY_TYPES[name]:
                found = f"has it as {types[name]}" if name in types else "lacks it"
                raise InvalidPipeline(
                    where,
                    f"the sink needs the column {name} of the source, and {sink.origin} {found}:"
                    " add it to the query",
                )
        if sink.table:
            _check_columns(where, sink, schema)


def _needed(spec: PipelineSpec, sink: Sink) -> tuple[str, ...]:
    """Return the columns of messages that the output of a sink must have."""
    if sink.table is None:
        return REJECT_KEYS if len(spec.sources) == 1 else (*REJECT_KEYS, SOURCE)
    if spec.has_places:
        return KEYS
    return KEYS[2:] if sink.table.partition_by else ()


def written(output: DataFrame) -> DataFrame:
    """Return an output as messages, without the place of each row in the source."""
    return output.drop(*KEYS, SOURCE)


def as_sent(messages: DataFrame) -> DataFrame:
    """Return messages with the columns that can be written, properties with their types."""
    names = [name for name in messages.columns if name in WRITTEN]
    if "application_properties_json" in names:
        names = [name for name in names if name != "application_properties"]
    return messages.select(*names)


def check_messages(where: str, rows: DataFrame) -> None:
    """Raise `InvalidPipeline` if messages cannot have the columns of rows."""
    try:
        check_written(rows.schema)
    except InvalidSchema as error:
        raise InvalidPipeline(where, str(error)) from None


def _check_columns(where: str, sink: Sink, schema: StructType) -> None:
    names = [field.name.lower() for field in schema.fields]
    for field in schema.fields:
        if names.count(field.name.lower()) > 1:
            raise InvalidPipeline(where, f"{sink.origin} has the column {field.name} twice")
        if field.dataType.simpleString() == "void":
            message = f"the column {field.name} of {sink.origin} has no type: cast it to one"
            raise InvalidPipeline(where, message)
        if sink.table and field.name.lower() in sink.table.partition_by:
            message = f"{sink.origin} has the column {field.name}, as the folders: rename it"
            raise InvalidPipeline(where, message)


def first_line(error: PySparkException) -> str:
    """Return what Spark says, without where."""
    text = error.getMessage() or str(error)
    return " ".join(text.split("\n\n")[0].split())
