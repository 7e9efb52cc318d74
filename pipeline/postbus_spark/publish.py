"""Write a data frame as messages from the driver, under a number of your own (`foreachBatch`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from postbus_spark.errors import InvalidOption
from postbus_spark.options import write_options
from postbus_spark.publishing import WriterClient
from postbus_spark.schema import check_written
from postbus_spark.staging import Staged, StageTask, stage_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from postbus.contract.bulk import PublishedBatch

MAX_BATCH: Final = 2**63 - 1


class Writer:
    """A writer whose steps a program takes itself; options are those of writing.

    It holds the key of the driver and must not be pickled.
    """

    def __init__(self, **options: str) -> None:
        """Raises `InvalidOption`, `InvalidCredentials`."""
        self._client = WriterClient(write_options(options))

    def last_batch(self) -> PublishedBatch | None:
        """Return the batch that was published last, if there is one."""
        return self._client.last_batch()

    def stage(self, frame: DataFrame) -> Staged:
        """Stage the rows of a data frame, in executors; nobody sees them before `publish`.

        Raises `InvalidSchema`; errors of executors are Spark's.
        """
        check_written(frame.schema)
        staging = _staging(self._client.stage_task())
        found = frame.mapInArrow(staging, "stages array<bigint>, messages bigint").collect()
        stages = tuple(stage for row in found for stage in row["stages"])
        return Staged(stages, sum(row["messages"] for row in found))

    def publish(self, batch: int, staged: Staged) -> PublishedBatch:
        """Publish what is staged as a batch; nothing if that number was published before.

        Numbers of batches rise. Returns when publishing is durable. Raises `StaleWriter`,
        `StagesGone`, `Unfinished` if the batch before cannot be sent.
        """
        if not 0 <= batch <= MAX_BATCH:
            raise InvalidOption(f"batch {batch}: a whole number from 0 on")
        return self._client.publish(batch, staged.stages)

    def wait(self, published: PublishedBatch, is_stopped: Callable[[], bool]) -> PublishedBatch:
        """Wait until a batch has arrived, or the wait is stopped; return its state.

        Raises `Unfinished` if nothing arrives for long.
        """
        return self._client.finish(published, is_stopped)


def publish_messages(frame: DataFrame, *, batch: int, **options: str) -> int:
    """Write a data frame as a batch of messages, once; return the number of its messages.

    A batch of a number that was published before is neither computed nor written again. Options
    are those of writing. Raises one of `postbus_spark.errors`.
    """
    writer = Writer(**options)
    last = writer.last_batch()
    is_known = last is not None and batch <= last.batch
    staged = Staged((), 0) if is_known else writer.stage(frame)
    return writer.publish(batch, staged).messages


def _staging(
    task: StageTask,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that stages the rows of a task; it travels to executors."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        staged = stage_rows(task, batches)
        schema = pa.schema({"stages": pa.list_(pa.int64()), "messages": pa.int64()})
        yield pa.RecordBatch.from_pylist(
            [{"stages": list(staged.stages), "messages": staged.messages}], schema
        )

    return stage
