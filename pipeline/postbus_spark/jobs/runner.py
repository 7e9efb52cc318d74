"""Runs a pipeline: one streaming query, settled after each batch, stopped between two.

With a schedule there is one query for each of its times, none while another one runs. Of several
sources, what a run before has left is a query of its own: the batch must have no message besides.

`foreachBatch` is the vehicle. A signal lets the batch that runs end and be committed; then the
query is stopped. What `query.stop` would cut is repeated under its number by the next run, so a
kill at any point costs neither a message nor a duplicate.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from postbus_spark.jobs.arrangement import arranged
from postbus_spark.jobs.batches import Batches
from postbus_spark.jobs.failures import cause_of
from postbus_spark.jobs.frames import frames_of
from postbus_spark.jobs.lateness import LateRows
from postbus_spark.jobs.schedules import SYSTEM, Clock, wait_for
from postbus_spark.jobs.settling import last_batch, settle_committed
from postbus_spark.jobs.state import check_state
from postbus_spark.jobs.streams import joint, streams_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from postbus.contract.pipeline import PipelineDocument
    from postbus_spark.jobs.readers import Reader

LOG: Final = logging.getLogger("postbus_spark.jobs")

LOOK_S: Final = 0.25
"""How often the runner looks for committed batches. Our choice: below the duration of a batch."""


STATE_PARTS: Final = 4
"""Least number of parts of a state, which a checkpoint keeps for life. Our choice: one core can get
more later, and each part costs files in each batch."""


class Stopped(Exception):
    """The pipeline was asked to stop; the batch that was to begin is the next run's first."""


class Unprocessed(Exception):
    """A run for what is there was stopped before its end: a supervisor starts it again."""


class Runner:
    """One run of a pipeline."""

    def __init__(
        self,
        document: PipelineDocument,
        readers: Sequence[Reader],
        *,
        is_tried_again: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        """`readers`: those of the sources, in their order."""
        self._document = document
        self._readers = readers
        assert document.spec.checkpoint is not None  # the source has a reader group
        self._checkpoint = Path(document.spec.checkpoint.path)
        self._batches = Batches(document, readers, is_tried_again=is_tried_again)
        self._clock = clock
        self._late = LateRows()
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
        if self._has_left():
            self._run(spark)  # what a run before has left waits for no other time
        while wait_for(schedule, self._clock, self._stopping.is_set):
            self._run(spark)

    def _has_left(self) -> bool:
        """Return whether a run before has left a batch that is planned and not settled."""
        return not all(reader.client.group().plan.is_settled for reader in self._readers)

    def _run(self, spark: SparkSession) -> bool:
        """Run a query; return whether it ended by itself."""
        self._batches.open()
        if self._stopping.is_set():
            return False
        # Before Spark reads the checkpoint: an older driver plans no batch behind its end any more.
        self._settle(tuple(reader.client.claim().epoch for reader in self._readers))
        check_state(self._document.spec, self._readers)
        is_joint = len(self._readers) > 1 and not self._document.spec.is_stateful
        if is_joint and self._has_left() and not self._ends(self._started(spark, is_rest=True)):
            return False
        return self._ends(self._started(spark))

    def _ends(self, query: StreamingQuery) -> bool:
        """Watch a query; return whether it ended by itself."""
        is_at_end = False
        try:
            is_at_end = self._watch(query)
        except PySparkException as error:
            failure = cause_of(self._failure or error)
            if not isinstance(failure, Stopped):
                raise failure from error
        finally:
            query.stop()
        self._settle(self._batches.epochs)
        self._late.count(query)
        return is_at_end

    def _started(self, spark: SparkSession, *, is_rest: bool = False) -> StreamingQuery:
        """Start a query. `is_rest`: to the end of what is planned."""
        document = self._document
        more = {"minPartitions": str(spark.sparkContext.defaultParallelism)}
        if is_rest:
            more["endingOffsets"] = "group"
        readers = [each._replace(options={**each.options, **more}) for each in self._readers]
        streams = streams_of(spark, readers)
        is_stateful = document.spec.is_stateful
        if is_stateful:
            frames = frames_of(document.spec, streams)
            self._batches.arrangement = arranged(document.spec, frames)
            rows = frames[self._batches.arrangement.kept]
        else:
            rows = joint(streams)
        writer = (
            rows.writeStream.foreachBatch(self._each)
            .queryName(document.metadata.name)
            .option("checkpointLocation", str(self._checkpoint))
        )
        trigger_ms = document.spec.trigger.continuous_ms
        if trigger_ms is None or is_rest:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{trigger_ms} milliseconds")
        with _settings(spark, _state_settings(spark) if is_stateful else {}):
            return writer.start()

    def _each(self, rows: DataFrame, number: int) -> None:
        with self._running:
            try:
                if self._stopping.is_set():
                    raise Stopped
                self._batches(rows, number)
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
                self._settle(self._batches.epochs)
                self._late.count(query)
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

    def _settle(self, epochs: Sequence[int] | None) -> None:
        for at, epoch in enumerate(epochs or ()):
            client = self._readers[at].client
            settle_committed(client, self._checkpoint, epoch, at, len(self._readers))


def _state_settings(spark: SparkSession) -> dict[str, str]:
    """Return what a query with state needs: a batch without messages completes windows."""
    parts = max(STATE_PARTS, spark.sparkContext.defaultParallelism)
    return {
        "spark.sql.streaming.noDataMicroBatches.enabled": "true",
        "spark.sql.shuffle.partitions": str(parts),
    }


@contextmanager
def _settings(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    """Set settings for a query that is started meanwhile: it keeps them."""
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.set(name, old or "")
