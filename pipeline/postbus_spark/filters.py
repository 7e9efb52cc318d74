"""Conditions of a query that narrow what a batch reads.

They leave out ranges, and times of a history; Spark evaluates all of them again. So a condition
that is not understood costs time and changes no result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from postbus_spark.reader import BatchReader, RangePartition

if TYPE_CHECKING:
    from postbus_spark.options import Options

Equal: Final = (EqualTo, EqualNullSafe)


class FilteredReader(BatchReader):
    """A batch reader that Spark gives the conditions of the query.

    Spark refuses such a reader unless `spark.sql.python.filterPushdown.enabled` is true.
    """

    filters: tuple[Filter, ...] = ()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take the conditions, which all hold at once; return those that Spark evaluates: all."""
        self.filters = tuple(filters)
        self.options = narrowed(self.options, self.filters)
        return filters

    def partitions(self) -> list[InputPartition]:
        """Return tasks for what the conditions leave."""
        found: list[InputPartition] = []
        for each in super().partitions():
            wanted = each.value
            if not _is_allowed(wanted.partition, self.filters):
                continue
            first, end = _span(self.filters, wanted.first, wanted.end)
            if first < end:
                found.append(RangePartition(wanted._replace(first=first, end=end)))
        return found


def narrowed(options: Options, filters: Sequence[Filter]) -> Options:
    """Return options that leave out messages of a history outside of the conditions' times."""
    if options.mode != "history":
        return options
    from_ms, to_ms = options.from_ms, options.to_ms
    for each in filters:
        time_ms = _milliseconds(each)
        if time_ms is None:
            continue
        if isinstance(each, (*Equal, GreaterThan, GreaterThanOrEqual)):
            from_ms = time_ms if from_ms is None else max(from_ms, time_ms)
        if isinstance(each, (*Equal, LessThan, LessThanOrEqual)):
            to_ms = time_ms + 1 if to_ms is None else min(to_ms, time_ms + 1)
    if from_ms is not None and to_ms is not None:
        to_ms = max(from_ms, to_ms)
    return replace(options, from_ms=from_ms, to_ms=to_ms)


def _is_allowed(partition: int, filters: Sequence[Filter]) -> bool:
    for each in filters:
        if getattr(each, "attribute", None) != ("partition",):
            continue
        if isinstance(each, Equal) and each.value != partition:
            return False
        if isinstance(each, In) and partition not in each.value:
            return False
    return True


def _span(filters: Sequence[Filter], first: int, end: int) -> tuple[int, int]:
    """Return the part of a range that the conditions on positions leave."""
    for each in filters:
        value = getattr(each, "value", None)
        if getattr(each, "attribute", None) != ("position",) or not isinstance(value, int):
            continue
        if isinstance(each, (*Equal, GreaterThan, GreaterThanOrEqual)):
            first = max(first, value + isinstance(each, GreaterThan))
        if isinstance(each, (*Equal, LessThan, LessThanOrEqual)):
            end = min(end, value + (not isinstance(each, LessThan)))
    return first, end


def _milliseconds(each: Filter) -> int | None:
    """Return the time of a condition on `enqueued_time`, None for another condition."""
    value = getattr(each, "value", None)
    if getattr(each, "attribute", None) != ("enqueued_time",) or not isinstance(value, datetime):
        return None
    return None if value.tzinfo is None else int(value.timestamp() * 1_000)
