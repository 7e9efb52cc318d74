"""One batch: transform, commit to tables, publish, dead-letter. Every step may be repeated.

The reader has planned the batch before Spark hands it over, so the bus knows its number and ranges.
Rows are read afterwards, under the epoch of the reader: if another one has claimed the group, the
bus refuses to read, and nothing of the batch is written.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions

from postbus_spark.errors import Fenced, StaleWriter
from postbus_spark.jobs.failures import Poison, cause_of, is_of_batch
from postbus_spark.jobs.frames import REJECT_KEYS, catalog_table, check_sinks, frames_of, written
from postbus_spark.lake.files import FILE_SCHEMA, TableJob, period_of, write_files
from postbus_spark.lake.layout import Batch, StagedFile, Table
from postbus_spark.lake.parquet import ParquetTable
from postbus_spark.publish import Writer
from postbus_spark.rejects import reject_places
from postbus_spark.staging import Staged

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from postbus.contract.bulk import ReaderGroup
    from postbus.contract.pipeline import LakeTable, PipelineDocument, Sink
    from postbus_spark.client import GroupClient
    from postbus_spark.options import Options

LOG: Final = logging.getLogger("postbus_spark.jobs")

FILE_ROWS: Final = 16_384
"""Rows of a batch for each of its files at least, if it has several of a partition and hour."""
SHUFFLE: Final = re.compile(r"(?<!Broadcast)Exchange")
"""Operators of a plan behind which a task has rows of other tasks."""


class Batches:
    """What Spark calls for each batch, on the driver."""

    def __init__(
        self,
        document: PipelineDocument,
        options: Options,
        client: GroupClient,
        *,
        is_tried_again: bool = False,
    ) -> None:
        """`is_tried_again`: also a batch that has failed as often as it may."""
        self._spec = document.spec
        self._options = options
        self._client = client
        self._is_tried_again = is_tried_again
        self.tables = tables_of(document)
        self._writers = {
            at: Writer(**writer_options(document, sink, options.connection_string_file))
            for at, sink in enumerate(document.spec.sinks)
            if sink.entity is not None
        }
        self.epoch: int | None = None
        """Epoch of the reader, from the first batch on."""

    def open(self) -> None:
        """Open all tables. Raises `InvalidTable`, `OSError`."""
        for table in self.tables.values():
            table.open()

    def __call__(self, messages: DataFrame) -> Batch:
        """Process a batch. Raises `Poison` instead of the error of its last attempt."""
        batch = planned_batch(self._client.group(), self._options)
        self.epoch = batch.epoch
        most = self._spec.limits.max_attempts
        if batch.attempts > most and not self._is_tried_again:
            raise Poison(_poisoned(batch, "its errors are in the logs of these attempts"))
        if batch.attempts == 1:
            self._check_writers(batch)
        try:
            self._process(messages, batch)
        except Exception as error:
            if batch.attempts < most or not is_of_batch(cause_of(error)):
                raise
            raise Poison(_poisoned(batch, f"{type(error).__name__}: {error}")) from error
        return batch

    def _process(self, messages: DataFrame, batch: Batch) -> None:
        is_read_twice = len(self._spec.sinks) > 1
        if is_read_twice:
            messages = messages.persist()
        try:
            frames = frames_of(self._spec, messages)
            check_sinks(self._spec, frames)
            for sink in self._spec.sinks:
                if sink.table is not None:
                    self._write(frames[sink.origin], sink, sink.table, batch)
            for at, writer in self._writers.items():
                self._publish(frames[self._spec.sinks[at].origin], writer, batch)
            for sink in self._spec.sinks:
                if sink.dead_letter is not None:
                    self._reject(frames[sink.origin], sink, batch)
        finally:
            if is_read_twice:
                messages.unpersist()

    # --- tables ---------------------------------------------------------------------------------

    def _write(self, output: DataFrame, sink: Sink, spec: LakeTable, batch: Batch) -> None:
        table = self.tables[spec.path]
        starts = table.missing(batch)
        if starts is None:
            LOG.info("the table %s has plan %s already", table.folder, batch.number)
            return
        if any(starts[number] > first for number, (first, _) in batch.ranges.items()):
            output = output.where(_is_from(starts))
        if table.has_period_columns:
            output = with_periods(output, spec.partition_by)
        table.check(output.schema)
        period_ms = period_of(spec.partition_by)
        job = TableJob(sink.origin, table.staging(batch), period_ms, dict(batch.ranges))
        files = write_table(output, job)
        table.commit(batch, output.schema, files)
        rows = sum(file.rows for file in files)
        LOG.info(
            "plan %s: %s rows in %s files of the table %s",
            batch.number, rows, len(files), table.folder,
        )  # fmt: skip

    # --- entities -------------------------------------------------------------------------------

    def _check_writers(self, batch: Batch) -> None:
        """Raise `StaleWriter` if a plan that is new was published before: under its number, the
        publishing would do nothing.
        """
        for writer in self._writers.values():
            last = writer.last_batch()
            if last is not None and last.batch >= batch.number:
                raise StaleWriter(
                    f"the writer {last.writer} has published batch {last.batch}, and the reader"
                    f" group {batch.group} begins plan {batch.number}: the group was made again, or"
                    " another pipeline has its name. Give the group another name"
                )

    def _publish(self, output: DataFrame, writer: Writer, batch: Batch) -> None:
        last = writer.last_batch()
        if last is not None and last.batch == batch.number:
            LOG.info("the writer %s has plan %s already", last.writer, batch.number)
            staged = Staged((), 0)
        else:
            staged = writer.stage(written(output))
        made = writer.publish(batch.number, staged)
        LOG.info("plan %s: %s messages of %s", batch.number, made.messages, made.writer)

    # --- dead letters ---------------------------------------------------------------------------

    def _reject(self, output: DataFrame, sink: Sink, batch: Batch) -> None:
        rejected = 0
        for (reason, description), places in _grouped(output, sink.origin).items():
            rejected += reject_places(self._client, batch.epoch, places, reason, description)
        if rejected:
            LOG.info(
                "plan %s: %s messages of %s dead-lettered", batch.number, rejected, sink.origin
            )


def writer_options(
    document: PipelineDocument, sink: Sink, connection_file: str | None
) -> dict[str, str]:
    """Return the options of the writer of a sink."""
    file = None if connection_file is None else Path(connection_file).absolute()
    given = {
        "entity": sink.entity,
        "writer": document.writer(sink),
        "rate": sink.rate,
        "connectionStringFile": file,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def tables_of(document: PipelineDocument) -> dict[str, Table]:
    """Return the tables of a pipeline by path; they are not open yet."""
    specs = [sink.table for sink in document.spec.sinks if sink.table is not None]
    return {spec.path: _table(spec) for spec in specs}


def _table(spec: LakeTable) -> Table:
    folder = spec.path
    if spec.format == "parquet":
        return ParquetTable(folder, spec.partition_by)
    if spec.format == "delta":
        from postbus_spark.lake.delta import DeltaTable  # as large as Spark's own imports

        return DeltaTable(folder, spec.partition_by)
    from postbus_spark.lake.iceberg import IcebergTable

    return IcebergTable(folder, spec.partition_by, catalog_table(spec))


def planned_batch(group: ReaderGroup, options: Options) -> Batch:
    """Return the batch that a group reads now. Raises `Fenced` if there is none."""
    plan = group.plan
    if plan.is_settled:
        raise Fenced(f"plan {plan.number} of {group.name} was settled while it was processed")
    return Batch(
        entity=options.offset_entity,
        generation=group.generation,
        group=group.name,
        epoch=group.epoch,
        number=plan.number,
        attempts=plan.attempts,
        ranges=dict(plan.ranges),
    )


def write_table(output: DataFrame, job: TableJob) -> list[StagedFile]:
    """Write the rows of an output by executors; return the files that the driver may commit."""
    tasks = output.sparkSession.sparkContext.defaultParallelism
    if is_shuffled(output):
        order: list[Column | str] = ["partition"]
        if job.period_ms is not None:
            seconds = job.period_ms // 1000
            order.append(functions.expr(f"unix_seconds(enqueued_time) div {seconds}"))
        arranged = output.repartition(tasks, *order).sortWithinPartitions(*order, "position")
    else:
        most = sum(end - first for first, end in job.ranges.values())
        arranged = output.coalesce(max(1, min(tasks, most // FILE_ROWS)))
    written = arranged.mapInArrow(partial(write_files, job), FILE_SCHEMA)
    return [StagedFile(**row.asDict()) for row in written.collect()]


def is_shuffled(output: DataFrame) -> bool:
    """Return whether tasks have other rows than those that read them; else they are in order."""
    plan = output._jdf.queryExecution().executedPlan().toString()  # PySpark does not show it
    return SHUFFLE.search(plan) is not None


def with_periods(output: DataFrame, partition_by: Iterable[str]) -> DataFrame:
    """Return an output with the date and hour of each row as columns, in UTC."""
    times = functions.col("enqueued_time")
    columns = {"date": functions.to_date(times), "hour": functions.hour(times)}
    return output.withColumns({name: columns[name] for name in partition_by})


def _is_from(starts: Mapping[int, int]) -> str:
    """Return the condition of rows from a position of each partition on."""
    parts = [f"(partition = {number} and position >= {start})" for number, start in starts.items()]
    return " or ".join(parts)


def _grouped(output: DataFrame, origin: str) -> dict[tuple[str, str], set[tuple[int, int]]]:
    """Return the places of rows by reason and description; the reason is the output's name."""
    columns = [functions.col(name) for name in REJECT_KEYS]
    for name, default in (("reason", origin), ("description", "")):
        given = functions.col(name).cast("string") if name in output.columns else None
        value = functions.lit(default)
        if given is not None:
            value = functions.coalesce(functions.when(given != "", given), value)
        columns.append(value.alias(name))
    found: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for partition, position, reason, description in output.select(*columns).collect():
        found[reason, description].add((partition, position))
    return found


def _poisoned(batch: Batch, why: str) -> str:
    return (
        f"the batch of plan {batch.number} of the reader group {batch.group} of {batch.entity},"
        f" {_shown(batch.ranges.items())}, was begun {batch.attempts} times and never finished"
        f" ({why}). Nothing of it is settled, and nothing is lost: correct the transformation or"
        " send what it cannot use to deadLetter, then start once with --again"
    )


def _shown(ranges: Iterable[tuple[int, tuple[int, int]]]) -> str:
    return ", ".join(f"partition {number} [{first}, {end})" for number, (first, end) in ranges)
