"""Writes rows as messages, in batches and as a stream.

Executors stage messages, and return the numbers of their stages to the driver, which publishes
them as one batch. Spark makes writers for each batch, and those of a stream once more to commit it:
they keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from postbus_spark.errors import InvalidOption
from postbus_spark.publishing import WriterClient
from postbus_spark.schema import check_written
from postbus_spark.staging import abort_stages, stage_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from postbus_spark.options import WriteOptions

BATCH: Final = 0
"""The one batch of a writer that is not a stream."""


class StagedRows(WriterCommitMessage):
    """What an attempt of a task has staged."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.stages = stages


class BatchWriter(DataSourceArrowWriter):
    """The writer of `df.write`: its name is that of the run, which is done once."""

    def __init__(self, options: WriteOptions, schema: StructType, *, is_overwrite: bool) -> None:
        """Look whether the run was published before. Raises one of `postbus_spark.errors`."""
        check_written(schema)
        _check_append(is_overwrite, 'mode("append")')
        client = WriterClient(options)
        self.options = options
        self.task = client.stage_task()
        self.is_done_before = client.last_batch() is not None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of a task, in an executor; none if the run was published before."""
        if self.is_done_before:
            for _ in iterator:
                pass
            return StagedRows(())
        return StagedRows(stage_rows(self.task, iterator).stages)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the run, and wait until its messages have arrived."""
        client = WriterClient(self.options)
        client.finish(client.publish(BATCH, _stages_of(messages)))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove what the tasks have staged that did not fail."""
        abort_stages(self.task, _stages_of(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of `df.writeStream`."""

    def __init__(self, options: WriteOptions, schema: StructType, *, is_overwrite: bool) -> None:
        """Raises `InvalidSchema`, `InvalidOption`, `InvalidCredentials`."""
        check_written(schema)
        _check_append(is_overwrite, 'outputMode("append")')
        self.options = options
        self.task = WriterClient(options).stage_task()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of a task, in an executor."""
        return StagedRows(stage_rows(self.task, iterator).stages)

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        """Publish a batch. The stream goes on when that is durable, whether all has arrived or not.

        What has not arrived needs the stream no more; the next batch waits for it.
        """
        WriterClient(self.options).publish(batchId, _stages_of(messages))

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: ARG002, N803 - Spark's name
    ) -> None:
        """Remove what the tasks have staged that did not fail; what is published stays."""
        abort_stages(self.task, _stages_of(messages))


def _stages_of(messages: Sequence[WriterCommitMessage | None]) -> list[int]:
    """Return the stages of all tasks, in the order of tasks."""
    return [stage for each in messages if isinstance(each, StagedRows) for stage in each.stages]


def _check_append(is_overwrite: bool, way_out: str) -> None:
    if is_overwrite:
        raise InvalidOption(
            f"messages are added to a queue or topic and never replace others: use {way_out}"
        )
