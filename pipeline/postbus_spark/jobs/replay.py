"""Sends what has an end, the history of an entity or a table, as one batch of each sink's writer.

The bus knows which batches are published: a run stages and publishes what is missing, and then
waits until all messages have arrived. So a run that is killed anywhere may be repeated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException

from postbus.contract.pipeline import MALFORMED, S3, time_ms
from postbus_spark.errors import StaleWriter
from postbus_spark.jobs.batches import writer_options
from postbus_spark.jobs.failures import cause_of
from postbus_spark.jobs.frames import (
    KEY_TYPES,
    InvalidPipeline,
    as_sent,
    catalog_table,
    check_messages,
    frames_of,
    read_delta,
    read_iceberg,
    unparsed_views,
    written,
)
from postbus_spark.jobs.runner import Unprocessed
from postbus_spark.lake.files import KEYS
from postbus_spark.lake.parquet_rows import read_table
from postbus_spark.lake.places import InvalidTable
from postbus_spark.publish import Writer
from postbus_spark.schema import BY_NAME, WRITTEN, ddl, default_columns
from postbus_spark.writer import BATCH

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from postbus.contract.bulk import PublishedBatch
    from postbus.contract.pipeline import PipelineDocument, PipelineSpec, Source

LOG: Final = logging.getLogger("postbus_spark.jobs")

PATH: Final = "spec.sources[0].table.path"
PROPERTIES: Final = "application_properties_json"
COLUMNS: Final = (
    *default_columns("map", is_raw_included=False, is_history=True),
    BY_NAME[PROPERTIES],
)
"""Columns of a history: properties as text for queries, and with their types to be sent again."""


class Replay:
    """One run of a pipeline whose source has an end."""

    def __init__(self, document: PipelineDocument, connection_file: str | None) -> None:
        """Raises `InvalidOption`, `InvalidCredentials`."""
        self._document = document
        self._connection_file = connection_file
        self._writers = {
            at: Writer(**writer_options(document, sink, connection_file))
            for at, sink in enumerate(document.spec.sinks)
        }
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ask the run to end when its batches are published; a signal handler may call this."""
        self._stopping.set()

    def published(self) -> dict[int, PublishedBatch | None]:
        """Return the batch of each sink; None: it is not published. Raises `StaleWriter`."""
        found = {at: writer.last_batch() for at, writer in self._writers.items()}
        for last in found.values():
            if last is not None and last.batch != BATCH:
                raise StaleWriter(
                    f"the writer {last.writer} has published batch {last.batch}: a pipeline with a"
                    " reader group has its name. Choose another metadata.name"
                )
        return found

    def unsent(self) -> list[int]:
        """Return the sinks whose batch is not published, and log which ones are."""
        found = self.published()
        for last in found.values():
            if last is not None:
                LOG.info(
                    "the writer %s has sent %s messages already: choose another metadata.name to"
                    " send them again", last.writer, last.messages,
                )  # fmt: skip
        return [at for at, last in found.items() if last is None]

    def send(self, spark: SparkSession, sinks: Iterable[int]) -> None:
        """Stage and publish the batches of sinks. Raises what `cause_of` returns.

        Without messages nothing is published, so another run may find some.
        """
        messages = messages_of(self._document.spec, spark, self._connection_file)
        is_read_twice = len(self._writers) > 1
        if is_read_twice:
            messages = messages.persist()
        try:
            rows = rows_of(self._document.spec, messages)
            for at in sinks:
                staged = self._writers[at].stage(rows[at])
                if not staged.messages:
                    LOG.info("there is nothing to send for the sink %s", at)
                    continue
                made = self._writers[at].publish(BATCH, staged)
                LOG.info("the writer %s has published %s messages", made.writer, made.messages)
        except PySparkException as error:
            raise cause_of(error) from error
        finally:
            if is_read_twice:
                messages.unpersist()

    def wait(self) -> None:
        """Wait until all that is published has arrived.

        Raises `Unfinished` if nothing of it does for long, `Unprocessed` after `stop`.
        """
        for at, published in self.published().items():
            if published is None:
                continue
            published = self._writers[at].wait(published, self._stopping.is_set)
            if not published.is_done:
                raise Unprocessed(
                    f"stopped before the last {published.left} messages of the writer"
                    f" {published.writer} have arrived: the bus goes on to send them, and another"
                    " run waits for them"
                )
            LOG.info("all messages of the writer %s have arrived", published.writer)


# --- rows ---------------------------------------------------------------------------------------


def rows_of(spec: PipelineSpec, messages: DataFrame) -> dict[int, DataFrame]:
    """Return the rows of each sink as messages. Raises `InvalidPipeline`.

    What a sink names directly is sent as it was.
    """
    frames = frames_of(spec, {spec.source.name: messages})
    unparsed = unparsed_views(spec.source, messages)
    found = {}
    for at, sink in enumerate(spec.sinks):
        where = f"spec.sinks[{at}]"
        is_direct = sink.origin in {spec.source.name, MALFORMED}
        if is_direct and "body" not in unparsed[sink.origin].columns:
            raise InvalidPipeline(where, f"{sink.origin} has no column body: write a query for it")
        found[at] = as_sent(unparsed[sink.origin]) if is_direct else written(frames[sink.origin])
        check_messages(where, found[at])
    return found


def messages_of(spec: PipelineSpec, spark: SparkSession, connection_file: str | None) -> DataFrame:
    """Return the rows of the source in the order of their positions, partition by partition."""
    source = spec.source
    if source.table is not None:
        return _table_rows(source, spark)
    options: dict[str, Any] = {
        "entity": source.entity,
        "subQueue": source.sub_queue,
        "mode": source.mode,
        "startingTimestamp": source.from_time and time_ms(source.from_time),
        "endingTimestamp": source.to_time and time_ms(source.to_time),
        "minPartitions": spark.sparkContext.defaultParallelism,
        "connectionStringFile": connection_file and Path(connection_file).absolute(),
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    return spark.read.format("postbus").schema(ddl(COLUMNS)).options(**given).load()


def no_messages(spec: PipelineSpec, spark: SparkSession) -> DataFrame:
    """Return the source without a look at the bus; a table is not read before its rows are."""
    if spec.source.table is not None:
        return _table_rows(spec.source, spark)
    return spark.createDataFrame([], ddl(COLUMNS))


def _table_rows(source: Source, spark: SparkSession) -> DataFrame:
    table = source.table
    assert table is not None
    if not table.path.startswith(S3) and not Path(table.path).is_dir():
        raise InvalidPipeline(PATH, f"there is no folder {table.path}: correct it")
    start, end = (
        None if text is None else datetime.fromisoformat(text)
        for text in (source.from_time, source.to_time)
    )
    times = [
        ("enqueued_time", sign, time)
        for sign, time in ((">=", start), ("<", end))
        if time is not None
    ]
    if table.format == "parquet":
        rows = _parquet_rows(spark, table.path, start, end)
    elif table.format == "delta":
        rows = read_delta(spark, table.path, PATH, times)
    else:
        rows = read_iceberg(spark, catalog_table(table), PATH, start, end)
    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    wanted: Mapping[str, tuple[str, ...]] = {name: (KEY_TYPES[name],) for name in KEYS}
    if source.body is not None:
        wanted = {**wanted, "body": WRITTEN["body"]}
    for name, kinds in wanted.items():
        if types.get(name) not in kinds:
            raise InvalidPipeline(
                PATH,
                f"the table {table.path} has no column {name} that is {' or '.join(kinds)}: name"
                " a table that a pipeline has written with the columns of its source",
            )
    for name, sign, time in times:
        rows = rows.where(f"{name} {sign} timestamp '{time.isoformat()}'")
    return rows.orderBy(*KEYS[:2])


def _parquet_rows(
    spark: SparkSession, folder: str, start: datetime | None, end: datetime | None
) -> DataFrame:
    try:
        return read_table(spark, folder, start, end)
    except InvalidTable as error:
        raise InvalidPipeline(PATH, str(error)) from None
