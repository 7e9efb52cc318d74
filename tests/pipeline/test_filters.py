"""Conditions that narrow what a batch reads, on a real bus, without a JVM."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from postbus_spark.errors import InvalidOption
from postbus_spark.filters import FilteredReader
from postbus_spark.options import read_options
from postbus_spark.reader import RangePartition
from postbus_spark.source import PostbusSource
from tests.edge.bus_thread import BusThread
from tests.pipeline.lake import Lake
from tests.pipeline.stored_rows import spark_schema

NAMES = ["partition", "position", "enqueued_time", "body"]


@pytest.fixture
def kept(bus: BusThread, tmp_path: Path) -> Lake:
    """A queue with three messages, a second apart, of which the bus reads partition and place."""
    found = Lake(bus, bus.queue(historyRetention="P7D"), tmp_path)
    for body in (b"first", b"second", b"third"):
        found.send(body)
        bus.advance(1_000)
    return found


def read(lake: Lake, mode: str, *filters: Filter) -> list[dict[str, object]]:
    """Return the rows that the bus sends for conditions: what Spark filters again is in them."""
    file = lake.connection_file("listener")
    options = {"entity": lake.entity, "connectionStringFile": file, "mode": mode}
    reader = FilteredReader(read_options(options), spark_schema(NAMES))
    assert list(reader.pushFilters(list(filters))) == list(filters), "Spark evaluates them again"
    return [
        row
        for each in reader.partitions()
        for batch in reader.read(each)
        for row in batch.to_pylist()
    ]


@pytest.mark.parametrize("mode", ["peek", "history"])
def test_positions_bound_the_ranges(kept: Lake, mode: str) -> None:
    first, second, third = (row["position"] for row in read(kept, mode))
    assert isinstance(second, int)
    at, all_bodies = ("position",), [b"first", b"second", b"third"]
    for filters, bodies in (
        ([EqualTo(at, second)], [b"second"]),
        ([GreaterThan(at, second)], [b"third"]),
        ([GreaterThanOrEqual(at, second)], [b"second", b"third"]),
        ([LessThan(at, second)], [b"first"]),
        ([LessThanOrEqual(at, second)], [b"first", b"second"]),
        ([GreaterThan(at, first), LessThan(at, third)], [b"second"]),
        ([GreaterThan(at, third)], []),
        ([IsNotNull(at), Not(LessThan(at, third)), EqualTo(("body",), b"x")], all_bodies),
    ):
        assert [row["body"] for row in read(kept, mode, *filters)] == bodies, filters


def test_partitions_are_left_out(kept: Lake) -> None:
    own = read(kept, "peek")[0]["partition"]
    assert isinstance(own, int)
    for filters, count in (
        ([EqualTo(("partition",), own)], 3),
        ([EqualTo(("partition",), own + 1)], 0),
        ([In(("partition",), (own + 1, own))], 3),
        ([In(("partition",), (own + 1,))], 0),
        ([Not(EqualTo(("partition",), own))], 3),
    ):
        assert len(read(kept, "peek", *filters)) == count, filters


def test_times_bound_a_history_on_the_bus(kept: Lake) -> None:
    _, second, _ = (row["enqueued_time"] for row in read(kept, "history"))
    assert isinstance(second, datetime)
    second = second.astimezone(UTC)
    at, later = ("enqueued_time",), second + timedelta(microseconds=900)
    for filters, bodies in (
        ([EqualTo(at, second)], [b"second"]),
        ([GreaterThanOrEqual(at, second)], [b"second", b"third"]),
        ([LessThanOrEqual(at, second)], [b"first", b"second"]),
        ([GreaterThan(at, later), LessThan(at, later)], [b"second"]),
        ([GreaterThan(at, second + timedelta(days=1)), LessThan(at, second)], []),
        ([EqualTo(at, second.replace(tzinfo=None))], [b"first", b"second", b"third"]),
    ):
        assert [row["body"] for row in read(kept, "history", *filters)] == bodies, filters
    assert len(read(kept, "peek", EqualTo(at, second))) == 3, "a peek looks at no times"


def test_only_a_batch_with_the_option_takes_conditions(kept: Lake) -> None:
    given = {"entity": kept.entity, "connectionStringFile": kept.connection_file("listener")}
    schema = spark_schema(NAMES)
    plain = PostbusSource({**given, "mode": "peek"}).reader(schema)
    assert not isinstance(plain, FilteredReader), "Spark refuses it while its setting is off"
    pushing = PostbusSource({**given, "mode": "peek", "pushFilters": "true"}).reader(schema)
    assert isinstance(pushing, FilteredReader)
    assert all(isinstance(each, RangePartition) for each in pushing.partitions())
    stream = PostbusSource({**given, "readerGroup": "lake", "pushFilters": "true"})
    with pytest.raises(InvalidOption, match="pushFilters: a stream reads each message once"):
        stream.streamReader(schema)
