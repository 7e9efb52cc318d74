"""One batch: transform, commit to tables, publish, dead-letter. Every step may be repeated.

Readers have planned the batch before Spark hands it over, so the bus knows its numbers and ranges.
Rows are read afterwards, under the epoch of the reader: if another one has claimed the group, the
bus refuses to read, and nothing of the batch is written.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions

from postbus.contract.pipeline_checks import QUERY_CHARS
from postbus_spark.errors import InvalidRows, StaleWriter
from postbus_spark.jobs.excuses import excuse, excused
from postbus_spark.jobs.failures import Poison, cause_of, is_of_batch, is_passing
from postbus_spark.jobs.frames import (
    REJECT_KEYS,
    SOURCE,
    catalog_table,
    check_sinks,
    frames_of,
    queried,
    written,
)
from postbus_spark.jobs.planning import Planned, planned
from postbus_spark.jobs.streams import batch_messages, parted
from postbus_spark.lake.files import FILE_SCHEMA, TableJob, capture_files, period_of, write_files
from postbus_spark.lake.layout import Batch, StagedFile, Table
from postbus_spark.lake.parquet import ParquetTable
from postbus_spark.publish import Writer
from postbus_spark.reader import read_parts
from postbus_spark.rejects import reject_places
from postbus_spark.staging import Staged

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from postbus.contract.pipeline import LakeTable, PipelineDocument, Sink
    from postbus_spark.jobs.arrangement import Arrangement
    from postbus_spark.jobs.readers import Reader
    from postbus_spark.rows import RowRange

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
        readers: Sequence[Reader],
        *,
        is_tried_again: bool = False,
    ) -> None:
        """`is_tried_again`: also a batch that has failed as often as it may."""
        self._document = document
        self._spec = document.spec
        self._readers = readers
        self._connection_file = readers[0].options.get("connectionStringFile")
        self._is_tried_again = is_tried_again
        self.tables = tables_of(document)
        self._writers: dict[int, Writer] = {}
        self.arrangement: Arrangement | None = None
        """Of a pipeline with state, from the start of its query on."""

        self.epochs: tuple[int, ...] | None = None
        """Epoch of each reader, from the first batch on."""

    def open(self) -> None:
        """Open all tables. Raises `InvalidTable`, `OSError`."""
        for table in self.tables.values():
            table.open()

    def __call__(self, rows: DataFrame, number: int) -> None:
        """Process a batch. Raises `Poison` instead of the error of its last attempt.

        `rows`: of all sources, or of all outputs that have state. `number`: Spark's.
        """
        found = planned(self._document, self._readers, number)
        if found is None:
            return
        batch = found.batch
        self.epochs = tuple(group.epoch for group in found.groups)
        self._writers = self._writers or self._made_writers(found.query)
        assert self._spec.checkpoint is not None  # the sources have reader groups
        checkpoint = Path(self._spec.checkpoint.path)
        most = self._spec.limits.max_attempts + excused(checkpoint, batch)
        if batch.attempts > most and not self._is_tried_again:
            raise Poison(_poisoned(found, "its errors are in the logs of these attempts"))
        if found.is_first and not found.query:
            self._check_writers(batch)
        try:
            self._process(rows, found)
        except Exception as error:
            cause = cause_of(error)
            if is_passing(cause):
                excuse(checkpoint, batch)
            if batch.attempts < most or not is_of_batch(cause):
                raise
            raise Poison(_poisoned(found, f"{type(error).__name__}: {error}")) from error

    def _made_writers(self, query: str) -> dict[int, Writer]:
        options = (
            (at, writer_options(self._document, sink, self._connection_file, query))
            for at, sink in enumerate(self._spec.sinks)
            if sink.entity is not None
        )
        return {at: Writer(**given) for at, given in options}

    def _process(self, rows: DataFrame, found: Planned) -> None:
        batch = found.batch
        is_read_twice = len(self._spec.sinks) > 1 or not self._spec.has_places
        if is_read_twice:
            rows = rows.persist()
        try:
            if self._spec.is_stateful:
                rows.count()  # all parts of the state are written, though all sinks have the batch
            frames = self._frames(rows, found)
            check_sinks(self._spec, frames)
            for sink in self._spec.sinks:
                if sink.table is not None:
                    is_source = frames[sink.origin] is rows and not is_read_twice
                    self._write(frames[sink.origin], sink, sink.table, found, is_source=is_source)
            for at, writer in self._writers.items():
                self._publish(frames[self._spec.sinks[at].origin], writer, batch)
            for sink in self._spec.sinks:
                if sink.dead_letter is not None:
                    self._reject(frames[sink.origin], sink, found)
        finally:
            if is_read_twice:
                rows.unpersist()

    def _frames(self, rows: DataFrame, found: Planned) -> dict[str, DataFrame]:
        """Return the outputs of a batch."""
        if self.arrangement is None:
            return frames_of(self._spec, parted(self._spec, rows))
        session, frames = rows.sparkSession, {}
        kept, derived, stateless = self.arrangement
        if stateless:
            messages = batch_messages(session, self._readers, found.groups)
            frames = frames_of(self._spec, messages)
        rows.createOrReplaceTempView(kept)
        return {**frames, kept: rows, **queried(self._spec, session, derived)}

    # --- tables ---------------------------------------------------------------------------------

    def _write(
        self, output: DataFrame, sink: Sink, spec: LakeTable, found: Planned, *, is_source: bool
    ) -> None:
        """Write an output to a table. `is_source`: it is the messages of the batch, as they are."""
        table, batch = self.tables[spec.path], found.batch
        starts = table.missing(batch)
        if starts is None:
            LOG.info("the table %s has plan %s already", table.folder, batch.number)
            return
        if batch.has_places and any(
            starts[number] > first for number, (first, _) in batch.ranges.items()
        ):
            output = output.where(_is_from(starts))
        if table.has_period_columns:
            output = with_periods(output, spec.partition_by)
        table.check(output.schema)
        period_ms = period_of(spec.partition_by)
        ranges = dict(batch.ranges) if batch.has_places else None
        job = TableJob(sink.origin, table.staging(batch), period_ms, ranges)
        if is_source and not table.has_period_columns:
            spans = {number: (starts[number], end) for number, (_, end) in batch.ranges.items()}
            count = file_count(output, batch.ranges)
            parts = self._readers[0].client.row_ranges(found.groups[0], spans, count)
            files = capture(output, job, parts)
        else:
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

    def _reject(self, output: DataFrame, sink: Sink, found: Planned) -> None:
        at = [source.name for source in self._spec.sources].index(sink.dead_letter or "")
        if len(self._spec.sources) > 1:
            self._check_sources(output, sink)
            output = output.where(functions.col(SOURCE) == functions.lit(sink.dead_letter))
        reader, group = self._readers[at], found.groups[at]
        rejected = 0
        for (reason, description), places in _grouped(output, sink.origin).items():
            rejected += reject_places(reader.client, group.epoch, places, reason, description)
        if rejected:
            LOG.info(
                "plan %s: %s messages of %s dead-lettered",
                found.batch.number, rejected, sink.origin,
            )  # fmt: skip

    def _check_sources(self, output: DataFrame, sink: Sink) -> None:
        """Raise `InvalidRows` if rows are of a source whose dead letters they do not become."""
        taken = {each.dead_letter for each in self._spec.sinks if each.origin == sink.origin}
        names = {row[0] for row in output.select(SOURCE).distinct().collect()} - taken
        for name in sorted(map(str, names)):
            raise InvalidRows(
                f"the output {sink.origin} has rows of {name}, which no sink dead-letters: add a"
                " sink with deadLetter for it, or a condition to the query"
            )


def writer_options(
    document: PipelineDocument, sink: Sink, connection_file: str | None, query: str = ""
) -> dict[str, str]:
    """Return the options of the writer of a sink. `query`: within which its batches count."""
    file = None if connection_file is None else Path(connection_file).absolute()
    given = {
        "entity": sink.entity,
        "writer": document.writer(sink) + (f".{query[: QUERY_CHARS - 1]}" if query else ""),
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


def write_table(output: DataFrame, job: TableJob) -> list[StagedFile]:
    """Write the rows of an output by executors; return the files that the driver may commit."""
    tasks = output.sparkSession.sparkContext.defaultParallelism
    if job.ranges is not None and not is_shuffled(output):
        arranged = output.coalesce(file_count(output, job.ranges))
    else:
        order: list[Column | str] = [] if job.ranges is None else ["partition"]
        if job.period_ms is not None:
            seconds = job.period_ms // 1000
            order.append(functions.expr(f"unix_seconds(enqueued_time) div {seconds}"))
        arranged = output.repartition(tasks, *order)
        if job.keys:
            key = job.keys[-1 if job.ranges is None else 1]
            arranged = arranged.sortWithinPartitions(*order, key)
    written = arranged.mapInArrow(partial(write_files, job), FILE_SCHEMA)
    return [StagedFile(**row.asDict()) for row in written.collect()]


def file_count(output: DataFrame, ranges: Mapping[int, tuple[int, int]]) -> int:
    """Return how many tasks write the rows of ranges, unless they are brought together."""
    most = sum(end - first for first, end in ranges.values())
    return max(1, min(output.sparkSession.sparkContext.defaultParallelism, most // FILE_ROWS))


def capture(output: DataFrame, job: TableJob, parts: Sequence[RowRange]) -> list[StagedFile]:
    """Write the messages of a batch by the processes that read them.

    Through Spark each row would go to Java and back, which takes as long as all the rest.
    """
    if not parts:
        return []
    read = partial(read_parts, parts, output.columns)
    numbers = output.sparkSession.range(0, len(parts), 1, len(parts))
    written = numbers.mapInArrow(partial(capture_files, job, read), FILE_SCHEMA)
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


def _poisoned(found: Planned, why: str) -> str:
    plans = "; ".join(
        f"plan {group.plan.number} of the reader group {group.name} of {group.entity},"
        f" {_shown(group.plan.ranges.items())}"
        for group in found.groups
        if not group.plan.is_settled
    )
    return (
        f"the batch of {plans}, was begun {found.batch.attempts} times and never finished"
        f" ({why}). Nothing of it is settled, and nothing is lost: correct the transformation or"
        " send what it cannot use to deadLetter, then start once with --again"
    )


def _shown(ranges: Iterable[tuple[int, tuple[int, int]]]) -> str:
    return ", ".join(f"partition {number} [{first}, {end})" for number, (first, end) in ranges)
