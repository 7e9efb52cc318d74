"""The calls of Spark in their order, without Spark: what they plan, repeat, settle and refuse."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
)

from postbus_spark.errors import (
    BusRestored,
    DataLoss,
    EntityRecreated,
    Fenced,
    GroupNotFound,
    InvalidOffset,
    InvalidSchema,
    StaleCheckpoint,
)
from postbus_spark.offsets import Offset
from postbus_spark.options import Options
from postbus_spark.reader import BatchReader
from postbus_spark.source import PostbusSource
from postbus_spark.stream import IDLE_S, StreamReader
from pyspark_postbus import DefaultSource
from tests.pipeline.bulk_server import KEY, BulkServer, refuse
from tests.pipeline.stored_rows import GENERATION, sdk_row, spark_schema

NAMES = ["partition", "position", "body"]
ALL = {0: 10, 1: 105}
Json = dict[str, Any]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def reader(clock: Callable[[], float] | None = None, **options: Any) -> StreamReader:
    given = Options("orders", "lake", **options)
    return StreamReader(given, spark_schema(NAMES), clock or Clock())


def at(*positions: int, generation: str = GENERATION) -> Json:
    return Offset("orders", generation, dict(enumerate(positions))).json()


def latest(stream: StreamReader, start: Json, limit: ReadLimit | None = None) -> Json:
    """Ask as Spark does, which turns offsets into JSON and back."""
    found = stream.latestOffset(
        json.loads(json.dumps(start)), limit or stream.getDefaultReadLimit()
    )
    return json.loads(json.dumps(found))


def read(stream: StreamReader, start: Json, end: Json) -> list[bytes]:
    """Plan a batch and read it with another reader, as executors do."""
    elsewhere = pickle.loads(cloudpickle.dumps(stream))
    tasks = [pickle.loads(pickle.dumps(task)) for task in stream.partitions(start, end)]
    return [
        row["body"] for task in tasks for batch in elsewhere.read(task) for row in batch.to_pylist()
    ]


@pytest.fixture
def group(server: BulkServer) -> BulkServer:
    """The group begins with the first message of each partition."""
    place(server, (0, 0), (100, 100))
    return server


def place(
    server: BulkServer, *ranges: tuple[int, int], number: int = 0, is_settled: bool = True
) -> None:
    server.plan = server.plan.model_copy(
        update={
            "ranges": dict(enumerate(ranges)), "number": number, "is_settled": is_settled
        }
    )  # fmt: skip


def test_a_query_from_its_first_batch_to_its_last(group: BulkServer) -> None:
    stream = reader(max_messages=6)
    first = stream.initialOffset()
    assert first == stream.initialOffset() == at(0, 100)
    assert group.epoch == 0, "only reading claims"
    end = latest(stream, first)
    assert group.epoch == 1
    assert end == at(4, 102)
    assert group.plan.number == 0, "the end is planned when Spark has stored it"
    assert read(stream, first, end) == [b"a0", b"a1", b"a2", b"a3", b"b0", b"b1"]
    assert (group.plan.number, group.plan.is_settled) == (1, False)

    after = latest(stream, end)
    stream.commit(end)
    assert (group.plan.number, group.plan.is_settled) == (1, True)
    assert read(stream, end, after) == [b"a4", b"a5", b"a6", b"a7", b"b2", b"b3"]
    last = latest(stream, after)
    stream.commit(after)
    assert read(stream, after, last) == [b"a8", b"a9", b"b4"]
    assert last == at(10, 105) == latest(stream, last)
    assert (group.plan.number, group.plan.is_settled) == (3, False)
    assert group.epoch == 1


def test_an_empty_range_plans_and_claims_nothing(group: BulkServer) -> None:
    assert reader().partitions(at(3, 100), at(3, 100)) == []
    assert (group.epoch, group.plan.number, group.requests) == (0, 0, [])


def test_planning_a_batch_again_is_the_same_plan(group: BulkServer) -> None:
    stream = reader()
    for _ in range(3):
        assert len(read(stream, at(0, 100), at(10, 105))) == 15
    assert group.plan.number == 1


def test_a_lost_checkpoint_repeats_the_unsettled_plan_exactly(group: BulkServer) -> None:
    place(group, (2, 5), (100, 101), number=7, is_settled=False)
    for limit in (ReadMaxRows(1), ReadMaxBytes(1), ReadAllAvailable()):
        stream = reader(max_messages=1)
        stream.prepareForTriggerAvailableNow()
        first = stream.initialOffset()
        assert first == at(2, 100)
        assert latest(stream, first, limit) == at(5, 101)
    assert read(stream, at(2, 100), at(5, 101)) == [b"a2", b"a3", b"a4", b"b0"]
    assert group.plan.number == 7


def test_a_restart_with_an_unfinished_batch_repeats_it(group: BulkServer) -> None:
    """Spark has the batch in its log and plans it before it asks for anything else."""
    place(group, (0, 5), (100, 101), number=7, is_settled=False)
    group.epoch = 4
    stream = reader()
    assert len(read(stream, at(0, 100), at(5, 101))) == 6
    assert (group.plan.number, group.epoch) == (7, 5)
    assert latest(stream, at(5, 101)) == at(10, 105)


def test_a_restart_settles_the_batch_that_was_finished_before(group: BulkServer) -> None:
    place(group, (0, 5), (100, 101), number=7, is_settled=False)
    stream = reader()
    assert stream.partitions(at(5, 101), at(5, 101)) == []
    end = latest(stream, at(5, 101))
    stream.commit(at(5, 101))
    assert group.plan.is_settled
    assert len(read(stream, at(5, 101), end)) == 9


def test_a_commit_that_comes_late_or_twice_settles_nothing_else(group: BulkServer) -> None:
    stream = reader()
    read(stream, at(0, 100), at(5, 101))
    read(stream, at(5, 101), at(10, 105))
    stream.commit(at(5, 101))
    assert (group.plan.number, group.plan.is_settled) == (2, False)
    stream.commit(at(10, 105))
    stream.commit(at(10, 105))
    assert group.plan.is_settled
    assert group.count("settle") == 1


def test_an_older_checkpoint_is_stale(group: BulkServer) -> None:
    place(group, (2, 5), (100, 101), number=7)
    for step in (
        lambda: latest(reader(), at(2, 100)),
        lambda: reader().partitions(at(2, 100), at(10, 105)),
        lambda: latest(reader(), at(5, 100)),
    ):
        with pytest.raises(StaleCheckpoint, match="Restore the newest checkpoint"):
            step()
    assert group.plan.number == 7


def test_a_checkpoint_ahead_of_the_group_means_a_restored_bus(group: BulkServer) -> None:
    with pytest.raises(BusRestored, match="Start with an empty checkpoint"):
        latest(reader(), at(5, 100))


def test_a_batch_that_ends_before_the_group_is_stale(group: BulkServer) -> None:
    """The group was reset after Spark had stored the end of its first batch."""
    with pytest.raises(StaleCheckpoint, match="ends at position 5 of partition 0, and the reader"):
        reader().partitions(at(8, 100), at(5, 101))


def test_the_older_of_two_readers_is_refused_wherever_it_is(group: BulkServer) -> None:
    older, clock = reader(), Clock()
    idle = reader(clock)
    end = latest(older, at(0, 100))
    tasks = older.partitions(at(0, 100), end)
    assert latest(idle, end) == end
    for step in (
        lambda: list(older.read(tasks[0])),
        lambda: older.commit(end),
        lambda: latest(older, end),
        lambda: older.partitions(at(0, 100), end),
    ):
        with pytest.raises(Fenced, match="Only one query at a time reads a group"):
            step()
    group.epoch, group.reader = 9, "host-2, process 5"
    clock.now_s += IDLE_S
    with pytest.raises(Fenced, match="taken over by host-2, process 5, with epoch 9 instead of 2"):
        latest(idle, end)


def test_an_idle_query_asks_four_times_a_second(group: BulkServer) -> None:
    place(group, (0, 10), (100, 105))
    clock = Clock()
    stream = reader(clock)
    for _ in range(100):
        assert latest(stream, at(10, 105)) == at(10, 105)
        clock.now_s += 0.01
    assert group.count("ranges") == 1 / IDLE_S
    group.rows[0].append(sdk_row(b"new", position=10))
    clock.now_s += IDLE_S
    assert latest(stream, at(10, 105)) == at(11, 105)


def test_available_now_ends_where_it_began_to_look(group: BulkServer) -> None:
    stream = reader(max_messages=100)
    stream.prepareForTriggerAvailableNow()
    group.rows[0].append(sdk_row(b"late", position=10))
    first = stream.initialOffset()
    end = latest(stream, first)
    assert end == at(10, 105)
    read(stream, first, end)
    assert latest(stream, end) == end
    assert stream.reportLatestOffset() == at(11, 105)


@pytest.mark.parametrize(
    ("options", "limit", "end"),
    [
        ({}, None, (10, 105)),
        ({"max_messages": 3}, None, (2, 101)),
        ({"max_bytes": 300}, None, (2, 101)),
        ({"max_bytes": 300, "max_messages": 100}, None, (2, 101)),
        ({"max_bytes": 10_000, "max_messages": 3}, None, (2, 101)),
        ({"max_bytes": 0}, None, (10, 105)),
        ({"max_messages": 3}, ReadAllAvailable(), (10, 105)),
        ({}, ReadMaxRows(3), (2, 101)),
        ({}, ReadMaxBytes(300), (2, 101)),
    ],
)
def test_limits(
    group: BulkServer, options: Json, limit: ReadLimit | None, end: tuple[int, int]
) -> None:
    assert latest(reader(**options), at(0, 100), limit) == at(*end)


def test_tasks_are_as_many_as_min_partitions(group: BulkServer) -> None:
    stream = reader(min_partitions=5)
    tasks = stream.partitions(at(0, 100), at(10, 105))
    assert len(tasks) == 6
    rows = [row for task in tasks for batch in stream.read(task) for row in batch.to_pylist()]
    assert [row["position"] for row in rows] == [*range(10), *range(100, 105)]
    assert BatchReader(
        Options("orders", "lake", min_partitions=2), spark_schema(NAMES)
    ).partitions()


@pytest.mark.parametrize(
    ("start", "error"),
    [
        ({}, InvalidOffset),
        (Offset("others", GENERATION, {0: 0, 1: 100}).json(), InvalidOffset),
        (at(0, 100, generation="bus/8"), EntityRecreated),
        (at(0), InvalidOffset),
    ],
)
def test_foreign_checkpoints_are_refused(
    group: BulkServer, start: Json, error: type[Exception]
) -> None:
    with pytest.raises(error):
        latest(reader(), start)
    with pytest.raises(error):
        reader().partitions(start, at(10, 105))
    assert group.plan.number == 0


def test_a_group_that_does_not_exist_is_told_with_the_command(group: BulkServer) -> None:
    missing = Options("orders", "no-such")
    for step in (
        StreamReader(missing, spark_schema(NAMES)).initialOffset,
        lambda: latest(StreamReader(missing, spark_schema(NAMES)), at(0, 100)),
    ):
        with pytest.raises(GroupNotFound, match="`postbus groups create`"):
            step()


def test_messages_that_are_gone_stop_a_stream(group: BulkServer) -> None:
    group.lows[0] = 3
    with pytest.raises(DataLoss, match="position 0 of partition 0 on are gone up to 3"):
        latest(reader(), at(0, 100))
    stream = reader(is_data_loss_fatal=False)
    end = latest(stream, at(0, 100))
    assert len(read(stream, at(0, 100), end)) == 12


def test_a_given_start_must_be_where_the_group_is(group: BulkServer) -> None:
    same = Offset("orders", GENERATION, {0: 0, 1: 100})
    assert reader(starting=same).initialOffset() == at(0, 100)
    with pytest.raises(BusRestored):
        reader(starting=same.at({0: 1, 1: 100})).initialOffset()


def test_a_batch_may_begin_elsewhere(group: BulkServer) -> None:
    starting = Offset("orders", GENERATION, {0: 8, 1: 104})
    batch = BatchReader(Options("orders", "lake", starting=starting), spark_schema(NAMES))
    assert len(batch.partitions()) == 2
    assert group.epoch == group.plan.number == 0


# --- keys -----------------------------------------------------------------------------------------


def test_the_key_stays_with_the_driver(group: BulkServer) -> None:
    options = CaseInsensitiveDict({"entity": "orders", "readerGroup": "lake"})
    source: DataSource = DefaultSource(options)
    schema = spark_schema(NAMES)
    batch, stream = source.reader(schema), source.streamReader(schema)
    end = latest(stream, stream.initialOffset())
    travelling = [
        source, batch, batch.partitions(), batch.partitions, stream, stream.read,
        stream.partitions(stream.initialOffset(), end), end,
    ]  # fmt: skip
    for each in travelling:
        assert KEY.encode() not in cloudpickle.dumps(each)
        assert KEY not in repr(each)
    assert "sig=" not in repr(travelling)


def test_the_key_is_in_no_error(group: BulkServer) -> None:
    group.call_faults.extend([refuse(401), refuse(404), refuse(400)])
    for _ in range(3):
        with pytest.raises(Exception) as error:
            reader().initialOffset()
        assert KEY not in str(error.value)
        assert "sig=" not in str(error.value)


# --- the source -----------------------------------------------------------------------------------


def test_spark_finds_the_source_by_its_name() -> None:
    assert DefaultSource is PostbusSource
    assert DefaultSource.name() == "postbus"


def test_a_schema_is_checked_before_anything_is_asked(group: BulkServer) -> None:
    source = PostbusSource(CaseInsensitiveDict({"entity": "orders", "readerGroup": "lake"}))
    for make in (source.reader, source.streamReader):
        with pytest.raises(InvalidSchema):
            make(spark_schema([]))
    assert group.requests == []


def test_an_empty_partition_of_spark_has_no_rows() -> None:
    from pyspark.sql.datasource import InputPartition

    batch = BatchReader(Options("orders", "lake"), spark_schema(NAMES))
    assert list(batch.read(InputPartition(None))) == []
