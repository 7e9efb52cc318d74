"""Runs a pipeline: one streaming query, settled after each batch, stopped between two.

With a schedule there is one query for each of its times, none while another one runs.

`foreachBatch` is the vehicle. A signal lets the batch that runs end and be committed; then the
query is stopped. What `query.stop` would cut is repeated under its number by the next run, so a
kill at any point costs neither a message nor a duplicate.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from postbus_spark.jobs.batches import Batches
from postbus_spark.jobs.failures import cause_of
from postbus_spark.jobs.schedules import SYSTEM, Clock, wait_for
from postbus_spark.jobs.settling import last_batch, settle_committed
from postbus_spark.options import read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from postbus.contract.pipeline import PipelineDocument
    from postbus_spark.client import GroupClient

LOG: Final = logging.getLogger("postbus_spark.jobs")

LOOK_S: Final = 0.25
"""How often the runner looks for committed batches. Our choice: below the duration of a batch."""


class Stopped(Exception):
    """The pipeline was asked to stop; the batch that was to begin is the next run's first."""


class Unprocessed(Exception):
    """A run for what is there was stopped before its end: a supervisor starts it again."""


class Runner:
    """One run of a pipeline."""

    def __init__(
        self,
        document: PipelineDocument,
        client: GroupClient,
        options: dict[str, str],
        *,
        is_tried_again: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        """`options`: those of the source, as `source_options` returns them."""
        self._document = document
        self._client = client
        self._options = options
        assert document.spec.checkpoint is not None  # the source has a reader group
        self._checkpoint = Path(document.spec.checkpoint.path)
        self._batches = Batches(
            document, read_options(options), client, is_tried_again=is_tried_again
        )
        self._clock = clock
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._running = threading.Lock()
        self._processed = -1
        """Spark's number of the last batch that was processed by this run."""

    def stop(self) -> None:
        """Ask the run to end when its batch is committed; may be called by a signal handler."""
        self._stopping.set()

    def run(self, spark: SparkSession) -> None:
        """Run to the end, or until `stop`. Raises what ended it, as `cause_of` returns it.

        `Unprocessed`: of what was to be processed `once`, something may be left.
        """
        trigger = self._document.spec.trigger
        schedule = trigger.schedule
        if schedule is None:
            is_at_end = self._run(spark)
            if trigger.once and not is_at_end:
                raise Unprocessed("stopped before the end of what was there: run it again to go on")
            return
        if not self._client.group().plan.is_settled:
            self._run(spark)  # what a run before has left waits for no other time
        while wait_for(schedule, self._clock, self._stopping.is_set):
            self._run(spark)

    def _run(self, spark: SparkSession) -> bool:
        """Run a query; return whether it ended by itself."""
        self._batches.open()
        if self._stopping.is_set():
            return False
        # Before Spark reads the checkpoint: an older driver plans no batch behind its end any more.
        epoch = self._client.claim().epoch
        settle_committed(self._client, self._checkpoint, epoch)
        query = self._started(spark)
        is_at_end = False
        try:
            is_at_end = self._watch(query)
        except PySparkException as error:
            failure = cause_of(self._failure or error)
            if not isinstance(failure, Stopped):
                raise failure from error
        finally:
            query.stop()
        self._settle()
        return is_at_end

    def _started(self, spark: SparkSession) -> StreamingQuery:
        document = self._document
        tasks = spark.sparkContext.defaultParallelism
        stream = (
            spark.readStream.format("postbus")
            .options(**self._options, minPartitions=str(tasks))
            .load()
        )
        writer = (
            stream.writeStream.foreachBatch(self._each)
            .queryName(document.metadata.name)
            .option("checkpointLocation", str(self._checkpoint))
        )
        trigger_ms = document.spec.trigger.continuous_ms
        if trigger_ms is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{trigger_ms} milliseconds").start()

    def _each(self, messages: DataFrame, number: int) -> None:
        with self._running:
            try:
                if self._stopping.is_set():
                    raise Stopped
                self._batches(messages)
                self._processed = number
            except Exception as error:
                self._failure = error
                raise

    def _watch(self, query: StreamingQuery) -> bool:
        """Settle what is committed until the query ends; return whether it did so by itself."""
        seen = last_batch(self._checkpoint)
        while not query.awaitTermination(LOOK_S):  # type: ignore[arg-type]  # takes fractions
            committed = last_batch(self._checkpoint)
            if committed != seen:
                seen = committed
                self._settle()
            if self._stopping.is_set() and self._is_between(committed):
                LOG.info("stopping, the last batch is %s", seen)
                query.stop()
                return False
        return True

    def _is_between(self, committed: int | None) -> bool:
        """Return whether no batch is processed, and all that were are committed."""
        if not self._running.acquire(blocking=False):
            return False
        self._running.release()
        return self._processed <= (-1 if committed is None else committed)

    def _settle(self) -> None:
        if self._batches.epoch is not None:
            settle_committed(self._client, self._checkpoint, self._batches.epoch)


def source_options(document: PipelineDocument, connection_file: str | None) -> dict[str, str]:
    """Return the options of the source that a pipeline reads."""
    spec = document.spec
    source, limits = spec.source, spec.limits
    options = {
        "entity": source.entity,
        "readerGroup": document.group,
        "subQueue": source.sub_queue,
        "mode": source.mode,
        "maxMessagesPerTrigger": str(limits.max_messages_per_trigger),
        "maxBytesPerTrigger": str(limits.max_bytes_per_trigger),
    }
    if connection_file is not None:
        options["connectionStringFile"] = str(Path(connection_file).absolute())
    return options
