"""Reads a reader group as a stream.

Spark keeps one of these in a driver process for the whole query, and a second one, which only
reads, in executors. The order of its calls, which shapes this module:

- `initialOffset` comes at least twice before the first batch is committed: it only looks.
- `partitions` comes after Spark has stored the end of a batch, and again after a restart; with an
  empty range at a restart, which plans nothing. Planning makes the range the group's, under a
  number, and settles the batch before.
- `commit` comes when the next batch is stored, so never for the last one. It settles its plan.
- `stop` may never come: nothing depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from postbus_spark import guard
from postbus_spark.batches import group_of, lost_skipped
from postbus_spark.errors import Fenced, StaleCheckpoint
from postbus_spark.limits import SPLITS, limited_ends, widest
from postbus_spark.offsets import Offset, check_offset, read_offset
from postbus_spark.reader import read_task, tasks
from postbus_spark.schema import check_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from postbus.contract.bulk import ReadableRanges, ReaderGroup
    from postbus_spark.client import GroupClient
    from postbus_spark.options import Options

IDLE_S: Final = 0.25
"""Pause after an answer without news: Spark asks a hundred times a second. Our choice."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of `spark.readStream`."""

    def __init__(
        self,
        options: Options,
        schema: StructType,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `InvalidSchema`."""
        check_schema(schema)
        self.options = options
        self.schema = schema
        self._clock = clock
        self._client: GroupClient | None = None
        self._group: ReaderGroup | None = None
        """The group as of the last answer, from this reader's claim on."""
        self._target: dict[int, int] | None = None
        """Where a query with the trigger AvailableNow ends."""
        self._latest: Offset | None = None
        self._idle_since_s: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave what the driver has behind: its client holds the key."""
        return type(self), (self.options, self.schema)

    # --- offsets --------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, object]:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint begins; the same until it has planned."""
        group = self._driver().group()
        guard.check_mode(group, self.options)
        first = self._driver().offset(group, guard.starts_of(group.plan))
        if self.options.starting is None:
            return first.json()
        check_offset(self.options.starting, first)
        guard.check_place(group, self.options.starting.positions)
        return self.options.starting.json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Note what is there now: the query ends when it has read that."""
        found = self._driver().ranges()
        group_of(found, self.options)
        self._target = {each.partition: each.next_position for each in found.partitions}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return a limit of the options; `latestOffset` knows the other one itself."""
        if self.options.max_messages:
            return ReadMaxRows(self.options.max_messages)
        if self.options.max_bytes:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802 - Spark's name
        """Return the end of what was there at the last look, from which Spark computes the lag."""
        return None if self._latest is None else self._latest.json()

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, object], limit: ReadLimit
    ) -> dict[str, object]:
        """Return the end of the next batch; the start if there is nothing to read.

        Claims the group the first time. A plan that is not settled is repeated exactly.
        """
        offset = read_offset(start)
        if self._idle_since_s is not None and self._clock() - self._idle_since_s < IDLE_S:
            return start
        group = self._claimed()
        check_offset(offset, self._driver().offset(group, guard.ends_of(group.plan)))
        guard.check_place(group, offset.positions)
        repeated = guard.repeated_end(group.plan, offset.positions)
        if repeated is not None:
            return offset.at(repeated).json()
        if self.options.is_plan_only:
            return start
        end = offset.at(self._next_ends(offset.positions, limit))
        self._idle_since_s = self._clock() if end == offset else None
        return end.json()

    def _next_ends(self, starts: Mapping[int, int], limit: ReadLimit) -> dict[int, int]:
        found = self._looked()
        lost_skipped(found, starts, self.options)
        max_messages, max_bytes = self._limits(limit)
        messages, size_bytes = widest(starts, found.partitions)
        is_limited = (0 < max_messages < messages) or (0 < max_bytes < size_bytes)
        if is_limited:
            found = self._looked(SPLITS)
        ends = {each.partition: each.next_position for each in found.partitions}
        if self._target is not None:
            ends = {number: min(end, self._target[number]) for number, end in ends.items()}
        if is_limited:
            return limited_ends(starts, ends, found.partitions, max_messages, max_bytes)
        return {number: max(end, starts[number]) for number, end in ends.items()}

    def _limits(self, limit: ReadLimit) -> tuple[int, int]:
        """Return the most messages and bytes of a batch, 0 for any number."""
        if isinstance(limit, ReadAllAvailable):
            return 0, 0
        max_messages, max_bytes = self.options.max_messages, self.options.max_bytes
        if isinstance(limit, ReadMaxRows):
            max_messages = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            max_bytes = limit.max_bytes
        return max_messages, max_bytes

    def _looked(self, splits: int = 1) -> ReadableRanges:
        """Return what can be read. Raises `Fenced` if another reader has claimed the group."""
        found = self._driver().ranges(splits)
        group, own = group_of(found, self.options), self._claimed()
        if group.epoch != own.epoch:
            who = group.reader or "somebody who reset it"
            raise Fenced(
                f"the reader group {own.name} was taken over by {who}, with epoch {group.epoch}"
                f" instead of {own.epoch}"
            )
        ends = {each.partition: each.next_position for each in found.partitions}
        self._latest = self._driver().offset(found, ends)
        return found

    # --- batches --------------------------------------------------------------------------------

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> list[InputPartition]:
        """Plan a batch and return its tasks; an empty one plans nothing."""
        first, last = read_offset(start), read_offset(end)
        check_offset(last, first)
        if first.positions == last.positions:
            return []
        for number, position in first.positions.items():
            if position > last.positions[number]:
                raise StaleCheckpoint(
                    f"the batch of the checkpoint ends at position {last.positions[number]} of"
                    f" partition {number}, and the reader group is at {position}"
                )
        group = self._claimed()
        check_offset(first, self._driver().offset(group, guard.ends_of(group.plan)))
        guard.check_place(group, first.positions)
        ranges = {
            number: (position, last.positions[number])
            for number, position in first.positions.items()
        }
        planned = self._group = self._driver().plan(group.epoch, ranges)
        return tasks(self._driver(), planned, ranges, self.options.min_partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task, in an executor."""
        return read_task(self.schema, partition)

    def commit(self, end: dict[str, object]) -> None:
        """Settle the plan that ends there; an older one was settled by the plan behind it."""
        group = self._claimed()
        if group.plan.is_settled or read_offset(end).positions != guard.ends_of(group.plan):
            return
        self._group = self._driver().settle(group.epoch, group.plan.number)

    def stop(self) -> None:
        """Leave the group claimed: whoever reads next claims it anyway."""

    # --- the driver's own -----------------------------------------------------------------------

    def _driver(self) -> GroupClient:
        if self._client is None:
            from postbus_spark.client import GroupClient

            self._client = GroupClient(self.options)
        return self._client

    def _claimed(self) -> ReaderGroup:
        if self._group is None:
            group = self._driver().claim()
            guard.check_mode(group, self.options)
            self._group = group
        return self._group
