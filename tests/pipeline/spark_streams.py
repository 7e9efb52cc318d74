"""Pipelines of several sources and with state; `test_spark` runs them with its session."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postbus.contract.pipeline import PipelineSpec
from postbus_spark.errors import InvalidOffset, InvalidRows, StaleWriter
from postbus_spark.jobs import batches
from postbus_spark.jobs.explaining import explained, status
from postbus_spark.jobs.failures import ExitCode, exit_code
from postbus_spark.jobs.frames import InvalidPipeline
from postbus_spark.jobs.main import main
from postbus_spark.jobs.readers import readers_of
from postbus_spark.jobs.state import StateLost
from postbus_spark.jobs.streams import check_frames
from postbus_spark.lake.delta import DeltaTable
from postbus_spark.lake.parquet import ParquetTable
from postbus_spark.publish import Writer
from tests.edge.bus_thread import RULES, BusThread
from tests.pipeline.lake import GROUP, Lake
from tests.pipeline.pipelines import Pipe, order
from tests.pipeline.spark_pipelines import EXAMPLE, GOOD, GUIDE, reasons, run_script, target_of

STATE_GUIDE = GUIDE.partition("\n## State between batches\n")[2]
thorough = pytest.mark.thorough
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
BODY = {"json": "sku string, amount double, placed timestamp"}
COUNTS = (
    "select window.start as minute, body.sku, count(*) as orders from {0}"
    " group by window(event_time, '1 minute'), body.sku"
)


def placed(minute: float, sku: str, amount: float = 1) -> bytes:
    """Return an order of a time after noon."""
    at = NOON + timedelta(minutes=minute)
    return json.dumps({"sku": sku, "amount": amount, "placed": at.isoformat()}).encode()


class Pair:
    """Orders and returns, each in a queue with a drain."""

    def __init__(self, bus: BusThread, folder: Path) -> None:
        self.orders = Lake(bus, bus.queue(), folder)
        self.returns = Lake(bus, bus.queue(), folder)
        for lake in (self.orders, self.returns):
            lake.create(kind="drain")

    def sources(self, **more: Any) -> list[dict[str, Any]]:
        named = {"orders": self.orders, "returns": self.returns}
        return [
            {
                "name": name,
                "queue": lake.entity,
                "mode": "drain",
                "readerGroup": GROUP,
                "body": BODY,
                **more,
            }
            for name, lake in named.items()
        ]

    def is_settled(self) -> bool:
        return all(lake.group().plan.is_settled for lake in (self.orders, self.returns))


@pytest.fixture
def pair(bus: BusThread, tmp_path: Path) -> Pair:
    return Pair(bus, tmp_path)


ALL = (
    "select source, body.sku, partition, position, enqueued_time from orders"
    " union all select source, body.sku, partition, position, enqueued_time from returns"
)


def united(pair: Pair, table_format: str = "parquet") -> Pipe:
    """Return a pipeline that sends the messages of both queues to one, and to a table."""
    sent = "select to_json(struct(sku)) as body, sku as message_id, source, position from united"
    pipe = Pipe(
        pair.orders,
        table_format,
        sources=pair.sources(),
        transform={"sql": {"united": ALL, "sent": sent}},
        limits={"maxMessagesPerTrigger": 3},
    )
    pipe.spec["sinks"] = [
        {"from": "united", "table": {"format": table_format, "path": str(pipe.table)}},
        {"from": "malformed", "deadLetter": "orders"},
        {"from": "malformed", "deadLetter": "returns"},
        {"from": "sent", "queue": pair.orders.bus.queue()},
    ]
    pipe.rule = RULES[0].name
    return pipe


def windowed(lake: Lake, table_format: str = "parquet", **more: Any) -> Pipe:
    """Return a pipeline that counts orders by minute, into a table and a queue."""
    source = {
        "name": "orders",
        "queue": lake.entity,
        "mode": "drain",
        "readerGroup": GROUP,
        "body": BODY,
        "watermark": {"column": "body.placed", "delay": "PT0S"},
        **more,
    }
    pipe = Pipe(lake, table_format, sources=[source])
    pipe.spec["transform"] = {
        "sql": {
            "counts": COUNTS.format("orders"),
            "told": "select to_json(struct(sku, orders)) as body from counts",
        }
    }
    table = {"format": table_format, "path": str(pipe.table), "partitionBy": []}
    pipe.spec["sinks"] = [
        {"from": "counts", "table": table},
        {"from": "malformed", "deadLetter": "orders"},
        {"from": "told", "queue": lake.bus.queue()},
    ]
    pipe.rule = RULES[0].name
    return pipe


def counted(pipe: Pipe) -> list[tuple[int, str, int]]:
    """Return minute, sku and count of each row of the table."""
    return sorted(
        (int((row["minute"] - NOON).total_seconds() // 60), row["sku"], row["orders"])
        for row in pipe.rows()
    )


def sent_to(pipe: Pipe) -> list[str]:
    """Return the bodies in the queue that gets messages, without a wait for more."""
    with pipe.lake.bus.client() as client, client.get_queue_receiver(target_of(pipe)) as receiver:
        return sorted(str(each) for each in receiver.peek_messages(50))


def dying(patched: pytest.MonkeyPatch, where: Any, name: str, at: int, *, is_done: bool) -> None:
    """Raise in the call of this number, before or after it is done."""
    function: Callable[..., Any] = getattr(where, name)
    calls: list[object] = []

    def call(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) != at or is_done:
            result = function(*given, **named)
        if len(calls) == at:
            raise RuntimeError("killed")
        return result

    patched.setattr(where, name, call)


class StreamTests:
    """One session for all of them."""

    def test_messages_of_two_queues_go_one_way(self, spark: SparkSession, pair: Pair) -> None:
        pair.orders.send(order("a"), order("b"), b"no json", order("c"), order("d"))
        pipe = united(pair)
        pipe.run(spark)
        assert pipe.skus() == ["a", "b", "c", "d"]
        pair.returns.send(order("x"), b"[]", order("y"))
        pair.orders.send(order("e"))
        pipe.run(spark)
        skus = ["a", "b", "c", "d", "e", "x", "y"]
        assert pipe.skus() == skus
        assert {(row["source"], row["sku"] < "x") for row in pipe.rows()} == {
            ("orders", True),
            ("returns", False),
        }
        assert sent_to(pipe) == [f'{{"sku":"{sku}"}}' for sku in skus]
        assert reasons(pair.orders) == reasons(pair.returns) == ["MalformedBody"]
        assert pair.is_settled()
        readers = readers_of(pipe.document(), pair.orders.connection_file())
        lines = list(status(pipe.document(), [reader.client.ranges() for reader in readers]))
        assert len([line for line in lines if line.startswith("reader group lake, a drain")]) == 2

    @pytest.mark.parametrize(
        ("where", "name", "is_done", "is_checkpoint_lost"),
        [
            pytest.param(ParquetTable, "_publish", False, True, marks=thorough),
            pytest.param(Writer, "publish", True, True, marks=thorough),
            pytest.param(Writer, "publish", True, False, marks=thorough),
            pytest.param(batches.Batches, "__call__", True, True, marks=thorough),
        ],
    )
    def test_a_batch_that_is_repeated_has_no_newer_messages_of_another_source(
        self,
        spark: SparkSession,
        pair: Pair,
        monkeypatch: pytest.MonkeyPatch,
        where: Any,
        name: str,
        is_done: bool,
        is_checkpoint_lost: bool,
    ) -> None:
        """The batch has orders alone; returns come before it is repeated."""
        pair.orders.send(order("a"), order("b"))
        pipe = united(pair)
        with monkeypatch.context() as patched:
            dying(patched, where, name, 1, is_done=is_done)
            with pytest.raises(RuntimeError, match="killed"):
                pipe.run(spark)
        pair.returns.send(order("x"))
        pair.orders.send(order("c"))
        if is_checkpoint_lost:
            shutil.rmtree(pipe.checkpoint)
        pipe.run(spark)
        skus = ["a", "b", "c", "x"]
        assert pipe.skus() == skus
        assert sent_to(pipe) == [f'{{"sku":"{sku}"}}' for sku in skus]
        assert pair.is_settled()

    @thorough
    def test_delta_takes_rows_of_two_queues_once(
        self, spark: SparkSession, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair.orders.send(order("a"))
        pair.returns.send(order("x"))
        pipe = united(pair, "delta")
        with monkeypatch.context() as patched:
            dying(patched, DeltaTable, "commit", 1, is_done=True)
            with pytest.raises(RuntimeError, match="killed"):
                pipe.run(spark)
        shutil.rmtree(pipe.checkpoint)
        pipe.run(spark)
        assert pipe.skus() == ["a", "x"]
        assert main(["verify", str(pipe.file)]) == 0

    @thorough
    def test_a_group_of_several_that_was_made_again_publishes_nothing_unnoticed(
        self, spark: SparkSession, pair: Pair
    ) -> None:
        pipe = united(pair)
        pipe.spec["sinks"] = [each for each in pipe.spec["sinks"] if "table" not in each]
        pair.orders.send(order("a"))
        pair.returns.send(order("x"))
        pipe.run(spark)
        pair.returns.manage("DELETE", f"groups/{GROUP}")
        pair.returns.create(kind="drain")
        pair.returns.send(order("y"))
        shutil.rmtree(pipe.checkpoint)
        with pytest.raises(StaleWriter) as failed:
            pipe.run(spark)
        assert exit_code(failed.value) is ExitCode.STOPPED

    def test_a_checkpoint_of_fewer_sources_is_refused(
        self, spark: SparkSession, pair: Pair
    ) -> None:
        pair.orders.send(order("a"))
        pipe = united(pair)
        one = {"sources": pair.sources()[:1], "sinks": pipe.spec["sinks"][1:2]}
        first = Pipe(pair.orders, **one)
        del first.spec["transform"]
        first.run(spark)
        with pytest.raises(InvalidOffset, match="has version v1 and 1 sources, the document 2"):
            pipe.run(spark)

    def test_rows_of_a_source_without_a_dead_letter_queue_are_not_dropped(
        self, spark: SparkSession, pair: Pair
    ) -> None:
        pipe = united(pair)
        del pipe.spec["sinks"][2]
        pair.returns.send(b"no json")
        with pytest.raises(InvalidRows, match="has rows of returns, which no sink dead-letters"):
            pipe.run(spark)
        assert not pair.is_settled()

    # --- state ----------------------------------------------------------------------------------

    def test_windows_are_counted_over_batches(
        self, spark: SparkSession, drained: Lake, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What is late is left out and logged, and the last window waits for a later message."""
        pipe = windowed(drained)
        drained.send(placed(0, "a"), placed(0.5, "a"), placed(0.5, "b"), placed(1, "a"))
        pipe.run(spark)
        assert counted(pipe) == [(0, "a", 2), (0, "b", 1)]
        assert "later than the watermark" not in caplog.text
        late = [placed(0, f"late {number}") for number in range(3)]
        drained.send(placed(1.9, "a"), *late, placed(3, "c"))
        pipe.run(spark)
        assert "3 rows are later than the watermark and left out, 3 since" in caplog.text
        assert counted(pipe) == [(0, "a", 2), (0, "b", 1), (1, "a", 2)]
        told = sent_to(pipe)
        assert told == [
            '{"sku":"a","orders":2}', '{"sku":"a","orders":2}', '{"sku":"b","orders":1}',
        ]  # fmt: skip
        assert drained.group().plan.is_settled
        assert main(["verify", str(pipe.file)]) == 0

    @pytest.mark.parametrize(
        ("where", "name", "at", "is_done"),
        [
            (ParquetTable, "_publish", 1, False),
            (Writer, "publish", 2, True),
            (batches.Batches, "__call__", 2, True),
            (batches.Batches, "__call__", 3, True),
        ],
    )
    @thorough
    def test_a_window_of_a_batch_that_is_repeated_comes_once(
        self,
        spark: SparkSession,
        drained: Lake,
        monkeypatch: pytest.MonkeyPatch,
        where: Any,
        name: str,
        at: int,
        is_done: bool,
    ) -> None:
        """A batch without messages has the windows, so plans of the group do not number it."""
        pipe = windowed(drained)
        pipe.spec["limits"] = {"maxMessagesPerTrigger": 2}
        drained.send(placed(0, "a"), placed(0.5, "a"), placed(1, "a"), placed(2, "b"))
        with monkeypatch.context() as patched:
            dying(patched, where, name, at, is_done=is_done)
            with pytest.raises(RuntimeError, match="killed"):
                pipe.run(spark)
        pipe.run(spark)
        assert counted(pipe) == [(0, "a", 2), (1, "a", 1)]
        assert sent_to(pipe) == ['{"sku":"a","orders":1}', '{"sku":"a","orders":2}']
        assert drained.group().plan.is_settled

    @thorough
    def test_windows_of_a_partitioned_table_of_delta_lie_in_their_hour(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        pipe = windowed(drained, "delta")
        counts = COUNTS.format("orders").replace("from", ", window.start as enqueued_time from", 1)
        pipe.spec["transform"]["sql"]["counts"] = counts
        pipe.spec["sinks"][0]["table"]["partitionBy"] = ["date", "hour"]
        drained.send(placed(0, "a"), placed(70, "a"), placed(140, "a"))
        pipe.run(spark)
        pipe.run(spark)
        assert counted(pipe) == [(0, "a", 1), (70, "a", 1)]
        assert {row["hour"] for row in pipe.rows()} == {12, 13}
        assert main(["verify", str(pipe.file)]) == 0

    @thorough
    def test_a_message_that_was_sent_twice_is_read_once(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        pipe = windowed(drained, deduplicate=["body.sku"])
        sql = {"first": "select body.sku, enqueued_time from orders"}
        pipe.spec["transform"]["sql"] = sql
        pipe.spec["sources"][0]["watermark"] = {"column": "enqueued_time", "delay": "PT10M"}
        table = {"format": "parquet", "path": str(pipe.table)}
        pipe.spec["sinks"] = [
            {"from": "first", "table": table},
            {"from": "malformed", "deadLetter": "orders"},
        ]
        for skus in ("ab", "bc", "a"):
            drained.send(*map(order, skus), b"no json")
            pipe.run(spark)
        assert pipe.skus() == [*GOOD, "a", "b", "c", "z"]
        assert reasons(drained) == 5 * ["MalformedBody"]

    @thorough
    def test_messages_of_two_queues_meet_in_different_batches(
        self, spark: SparkSession, pair: Pair
    ) -> None:
        watermark = {"column": "body.placed", "delay": "PT1H"}
        joined = (
            "select o.body.sku, r.body.amount from orders o join returns r on"
            " o.body.sku = r.body.sku and r.event_time between o.event_time"
            " and o.event_time + interval 10 minutes"
        )
        pipe = Pipe(pair.orders, sources=pair.sources(watermark=watermark))
        pipe.spec["transform"] = {"sql": {"joined": joined}}
        table = {"format": "parquet", "path": str(pipe.table), "partitionBy": []}
        pipe.spec["sinks"] = [
            {"from": "joined", "table": table},
            {"from": "malformed", "deadLetter": "orders"},
            {"from": "malformed", "deadLetter": "returns"},
        ]
        pair.orders.send(placed(0, "a"), placed(1, "b"))
        pipe.run(spark)
        assert pipe.rows() == []
        pair.returns.send(placed(2, "a", 7), placed(30, "b", 8), b"no json")
        pipe.run(spark)
        assert [(row["sku"], row["amount"]) for row in pipe.rows()] == [("a", 7.0)]
        assert (reasons(pair.orders), reasons(pair.returns)) == ([], ["MalformedBody"])
        assert pair.is_settled()

    @thorough
    def test_a_state_that_is_lost_stops_the_pipeline_until_a_reset(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        pipe = windowed(drained)
        drained.send(placed(0, "a"), placed(1, "a"))
        pipe.run(spark)
        older = drained.folder / "older"
        shutil.copytree(pipe.checkpoint, older)
        drained.send(placed(1.5, "a"))
        pipe.run(spark)
        newest = pipe.checkpoint.rename(drained.folder / "newest")
        with pytest.raises(StateLost, match="is empty, and plan 2 of the reader group lake was"):
            pipe.run(spark)
        shutil.copytree(older, pipe.checkpoint)
        with pytest.raises(StateLost, match="is not where plan 2 of the reader group lake ends"):
            pipe.run(spark)
        shutil.rmtree(pipe.checkpoint)
        newest.rename(pipe.checkpoint)
        drained.send(placed(3, "a"))
        pipe.run(spark)
        assert counted(pipe) == [(0, "a", 1), (1, "a", 2)]
        assert main(["reset", str(pipe.file)]) == 0
        drained.send(placed(3, "a"), placed(4, "a"))
        pipe.run(spark)
        assert counted(pipe) == [(0, "a", 1), (1, "a", 2), (3, "a", 1)]

    @thorough
    def test_a_document_without_a_watermark_leaves_no_state_unnoticed(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        pipe = windowed(drained)
        drained.send(placed(0, "a"))
        pipe.run(spark)
        with pytest.raises(StateLost, match="has state, and no source has a watermark") as failed:
            Pipe(drained).run(spark)
        assert exit_code(failed.value) is ExitCode.STOPPED

    def test_the_example_is_that_of_the_guide(self) -> None:
        text = (EXAMPLE.parent / "count-orders.yaml").read_text(encoding="utf-8")
        assert STATE_GUIDE.partition("```yaml\n")[2].partition("```")[0] in text

    @thorough
    def test_the_guide_of_state_works(self, tmp_path: Path) -> None:
        done = run_script(STATE_GUIDE, tmp_path)
        lines = done.stdout.splitlines()
        assert "[2]" in lines
        assert len([line for line in lines if line.startswith("reader group count-orders")]) == 2

    # --- bad queries ----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("sql", "text"),
        [
            ({"counts": "select count(*) as n from orders"}, "Group by window(…) of a column with"),
            (
                {"a": COUNTS.format("orders"), "b": COUNTS.format("orders")},
                "spec.sinks: a and b keep state apart from one another",
            ),
            ({"a": "select body.sku from orders"}, "and no output of a sink groups, joins or"),
            (
                {"a": "select o.body from orders o join orders p on o.event_time = p.event_time"},
                "spec.transform.sql.a: it reads orders beside what it has of that already",
            ),
        ],
    )
    def test_a_query_that_cannot_keep_state_is_named(
        self, spark: SparkSession, sql: dict[str, str], text: str
    ) -> None:
        outputs = [{"from": name, "queue": f"to-{name}"} for name in sql]
        with pytest.raises(InvalidPipeline) as failed:
            check_frames(spec_of(sql, outputs, count=1), spark)
        assert text in str(failed.value)
        assert exit_code(failed.value) is ExitCode.CONFIGURATION

    def test_a_watermark_is_of_a_timestamp(self, spark: SparkSession) -> None:
        sql = {"counts": COUNTS.format("orders")}
        for column, text in {
            "body.sku": "body.sku of orders is string, and no timestamp",
            "body.time": "there is no body.time: name a column of messages, or a field of body.js",
            "state": "state of orders is string",
        }.items():
            with pytest.raises(InvalidPipeline, match=text):
                check_frames(spec_of(sql, SENT, count=1, column=column), spark)
        with pytest.raises(InvalidPipeline, match=r"sources\[0\].deduplicate\[0\]: there is no x"):
            check_frames(spec_of(sql, SENT, count=1, deduplicate=["x"]), spark)

    def test_rows_of_earlier_batches_are_no_dead_letters(self, spark: SparkSession) -> None:
        sql = {
            "pairs": "select o.partition, o.position, o.source from orders o join returns r"
            " on o.body.sku = r.body.sku and o.event_time = r.event_time"
        }
        with pytest.raises(InvalidPipeline, match="pairs has rows of earlier batches, whose mess"):
            check_frames(spec_of(sql, [{"from": "pairs", "deadLetter": "orders"}]), spark)

    def test_sources_are_not_joined_batch_by_batch(self, spark: SparkSession) -> None:
        sql = {"pairs": "select o.message_id from orders o join returns r using (message_id)"}
        sinks = [{"from": "pairs", "queue": "pairs"}]
        with pytest.raises(InvalidPipeline, match="it joins sources batch by batch, so rows of d"):
            check_frames(spec_of(sql, sinks, is_stateful=False), spark)

    def test_what_is_kept_in_mind_is_explained(self, spark: SparkSession, pair: Pair) -> None:
        pipe = windowed(pair.orders, deduplicate=["message_id"])
        document = pipe.document()
        lines = list(explained(document, check_frames(document.spec, spark)))
        assert lines[0] == "State of queries lies in the checkpoint alone: without it, a run stops."
        assert "3. watch body.placed of orders: rows may be 0 s late" in lines
        assert "4. leave out rows with the same message_id within 0 s" in lines


SENT = [{"from": "counts", "queue": "counts"}]


def spec_of(
    sql: dict[str, str],
    sinks: list[dict[str, str]],
    *,
    count: int = 2,
    column: str = "body.placed",
    is_stateful: bool = True,
    **more: object,
) -> PipelineSpec:
    """Return a pipeline of orders, and returns, without a bus."""
    watermark = {"watermark": {"column": column, "delay": "PT1M"}} if is_stateful else {}
    sources = [
        {"name": name, "queue": name, "mode": "drain", "body": BODY, **watermark, **more}
        for name in ("orders", "returns")[:count]
    ]
    return PipelineSpec.model_validate(
        {
            "sources": sources,
            "transform": {"sql": sql},
            "sinks": sinks,
            "trigger": {"once": True},
            "checkpoint": {"path": "/checkpoints/orders"},
        }
    )
