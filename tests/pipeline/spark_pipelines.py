"""Pipelines on a real bus and Spark; `test_spark` runs them, since one file has one session."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from postbus.contract.pipeline import PipelineSpec
from postbus_spark.client import GroupClient
from postbus_spark.errors import Fenced, StaleWriter
from postbus_spark.jobs import batches, runner
from postbus_spark.jobs.explaining import explained
from postbus_spark.jobs.failures import ExitCode, Poison, exit_code, shown
from postbus_spark.jobs.frames import InvalidPipeline
from postbus_spark.jobs.main import main
from postbus_spark.jobs.schedules import Clock
from postbus_spark.jobs.settling import last_batch
from postbus_spark.jobs.streams import check_frames
from postbus_spark.lake.delta import DeltaTable
from postbus_spark.lake.iceberg import IcebergTable
from postbus_spark.lake.layout import TableAhead
from postbus_spark.lake.parquet import ParquetTable
from postbus_spark.publish import Writer
from tests.dev_bus import ROOT, environment, running_dev_bus
from tests.edge.bus_thread import RULES, BusThread
from tests.pipeline.lake import GROUP, Lake
from tests.pipeline.pipelines import PRICED, TRANSFORM, Pipe, order
from tests.pipeline.s3_server import gated_s3, running_s3

GUIDE = (ROOT / "docs" / "guides" / "pipelines.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "pipeline" / "price-orders.yaml"
PATHS = f"{ROOT / 'dataplane'}:{ROOT / 'pipeline'}"
LOOPBACK = "127.0.0.1"
GOOD = [f"{number:02}" for number in range(12)]
LAST_BATCH = 2
thorough = pytest.mark.thorough
BAD = {b"no json": "MalformedBody", b"[1]": "MalformedBody", order("z", -1): "NoPrice"}


@pytest.fixture
def drained(bus: BusThread, tmp_path: Path) -> Lake:
    """Twelve orders that can be priced, and three that cannot, in a queue with a drain."""
    lake = Lake(bus, bus.queue(), tmp_path)
    lake.create(kind="drain")
    lake.send(*(order(sku) for sku in GOOD[:6]), *BAD, *(order(sku) for sku in GOOD[6:]))
    return lake


def reasons(lake: Lake) -> list[str]:
    with lake.bus.client() as client:
        receiver = client.get_queue_receiver(lake.entity, sub_queue="deadletter")
        with receiver:
            found = receiver.peek_messages(50)
    return sorted(each.dead_letter_reason for each in found)


def is_done(pipe: Pipe) -> bool:
    """Return whether each order had its effect once, and nothing is left."""
    assert pipe.skus() == GOOD
    assert reasons(pipe.lake) == sorted(BAD.values())
    assert pipe.lake.group().plan.is_settled
    return pipe.lake.bus.counts(pipe.lake.entity).active == 0


class PipelineTests:
    """One session for all of them."""

    @pytest.mark.parametrize("table_format", ["parquet", "delta", "iceberg"])
    def test_orders_are_priced_and_what_cannot_be_is_dead_lettered(
        self, spark: SparkSession, drained: Lake, table_format: str
    ) -> None:
        pipe = Pipe(drained, table_format)
        pipe.run(spark)
        assert is_done(pipe)
        row = min(pipe.rows(), key=lambda each: each["sku"])
        assert row["price"] == 2.0
        assert f"{row['enqueued_time']:%Y-%m-%d %H}" == f"{row['date']} {row['hour']:02}"
        files = [file for file in pipe.table.rglob("*.parquet") if "_postbus" not in file.parts]
        assert len(files) <= 2 * 2, "one for each partition and hour"
        for file in files:
            positions = pq.read_table(file, partitioning=None)["position"].to_pylist()
            assert positions == sorted(positions)
            assert f"-{positions[0]}-{positions[-1]}-" in file.name
        pipe.run(spark)
        assert is_done(pipe)

    @pytest.mark.parametrize(
        ("table_format", "point", "is_checkpoint_lost"),
        [
            pytest.param("parquet", "files written", False, marks=thorough),
            pytest.param("parquet", "commit made", False, marks=thorough),
            ("parquet", "commit made", True),
            pytest.param("delta", "files written", False, marks=thorough),
            pytest.param("delta", "commit made", False, marks=thorough),
            pytest.param("delta", "commit made", True, marks=thorough),
            pytest.param("iceberg", "files written", False, marks=thorough),
            pytest.param("iceberg", "commit made", False, marks=thorough),
            pytest.param("iceberg", "commit made", True, marks=thorough),
            pytest.param("parquet", "tables done", False, marks=thorough),
            pytest.param("parquet", "batch done", True, marks=thorough),
            pytest.param("parquet", "last batch committed", False, marks=thorough),
            pytest.param("parquet", "last batch committed", True, marks=thorough),
        ],
    )
    def test_a_run_that_is_killed_loses_and_doubles_nothing(
        self,
        spark: SparkSession,
        drained: Lake,
        monkeypatch: pytest.MonkeyPatch,
        table_format: str,
        point: str,
        is_checkpoint_lost: bool,
    ) -> None:
        pipe = Pipe(drained, table_format, limits={"maxMessagesPerTrigger": 6})
        with monkeypatch.context() as patched:
            kill_at(patched, point, table_format)
            with pytest.raises(RuntimeError, match="killed"):
                pipe.run(spark)
        assert not drained.group().plan.is_settled
        if is_checkpoint_lost:
            shutil.rmtree(pipe.checkpoint)
        pipe.run(spark)
        assert is_done(pipe)

    @thorough
    def test_a_partitioned_queue_is_read_once_by_a_run_that_is_killed(
        self, spark: SparkSession, bus: BusThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lake = Lake(bus, bus.queue(enable_partitioning=True), tmp_path)
        lake.create(kind="drain")
        for number, body in enumerate([*map(order, GOOD), *BAD]):
            lake.send(body, partition_key=str(number))
        pipe = Pipe(lake, limits={"maxMessagesPerTrigger": 6})
        with monkeypatch.context() as patched:
            kill_at(patched, "commit made")
            with pytest.raises(RuntimeError, match="killed"):
                pipe.run(spark)
        shutil.rmtree(pipe.checkpoint)
        pipe.run(spark)
        assert pipe.skus() == GOOD
        assert reasons(lake) == sorted(BAD.values())
        assert {row["partition"] for row in pipe.rows()} == {0, 1}
        assert lake.group().plan.is_settled

    @pytest.mark.parametrize(
        ("point", "is_checkpoint_lost"),
        [
            pytest.param("staged", False, marks=thorough),
            pytest.param("published", False, marks=thorough),
            ("published", True),
            pytest.param("last batch committed", True, marks=thorough),
        ],
    )
    def test_a_run_that_is_killed_publishes_each_message_once(
        self,
        spark: SparkSession,
        drained: Lake,
        monkeypatch: pytest.MonkeyPatch,
        point: str,
        is_checkpoint_lost: bool,
    ) -> None:
        pipe = published(drained)
        with monkeypatch.context() as patched:
            kill_at(patched, point)
            with pytest.raises(RuntimeError, match="killed"):
                pipe.run(spark)
        if is_checkpoint_lost:
            shutil.rmtree(pipe.checkpoint)
        pipe.run(spark)
        assert is_done(pipe)
        assert sorted(received(drained, target_of(pipe))) == [f'{{"sku":"{sku}"}}' for sku in GOOD]

    @thorough
    def test_a_group_that_was_made_again_publishes_nothing_unnoticed(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        """Its plans begin with 1, under which its writer has published already."""
        pipe = published(drained)
        pipe.spec["sinks"] = [each for each in pipe.spec["sinks"] if "table" not in each]
        pipe.run(spark)
        drained.manage("DELETE", f"groups/{GROUP}")
        drained.create(kind="drain")
        drained.send(order("later"))
        shutil.rmtree(pipe.checkpoint)
        with pytest.raises(StaleWriter, match="the group was made again") as failed:
            pipe.run(spark)
        assert exit_code(failed.value) is ExitCode.STOPPED
        assert drained.bus.counts(drained.entity).active == 1

    def test_a_pipeline_that_is_stopped_settles_its_last_batch(
        self, spark: SparkSession, drained: Lake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pipe = Pipe(drained, trigger={"continuous": "PT0.1S"}, limits={"maxMessagesPerTrigger": 6})
        running = pipe.runner()
        failures: list[Exception] = []
        taken_in = threading.Event()
        commit = ParquetTable.commit

        def noted(*given: Any) -> Any:
            made = commit(*given)
            if pipe.skus() == GOOD:
                taken_in.set()
            return made

        monkeypatch.setattr(ParquetTable, "commit", noted)

        def run() -> None:
            try:
                running.run(spark)
            except Exception as error:  # noqa: BLE001 - asserted below
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert taken_in.wait(60)
        running.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert failures == []
        assert is_done(pipe)

    @thorough
    def test_a_scheduled_pipeline_runs_at_its_times_until_it_is_stopped(
        self, spark: SparkSession, drained: Lake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A batch that a kill has left is repeated without a wait."""
        pipe = Pipe(
            drained, trigger={"schedule": "*/5 * * * *"}, limits={"maxMessagesPerTrigger": 6}
        )
        times = [datetime(2026, 1, 31, 12, 1, tzinfo=UTC)]
        seen: list[int] = []

        def pause(_: float) -> None:
            seen.append(len(pipe.rows()))
            times[0] += timedelta(minutes=5)
            if len(seen) == 2:
                drained.send(order("late"))
            if len(seen) == 3:
                running.stop()

        clock = Clock(lambda: times[0], pause)
        with monkeypatch.context() as patched:
            kill_at(patched, "commit made")
            with pytest.raises(RuntimeError, match="killed"):
                pipe.runner(clock=clock).run(spark)
        running = pipe.runner(clock=clock)
        running.run(spark)
        assert seen == [0, 12, 13]
        assert pipe.skus() == [*GOOD, "late"]
        assert drained.group().plan.is_settled

    @thorough
    def test_a_run_for_what_is_there_that_is_stopped_before_its_end_is_to_be_repeated(
        self, spark: SparkSession, drained: Lake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pipe = Pipe(drained, limits={"maxMessagesPerTrigger": 6})
        running = pipe.runner()
        process = batches.Batches.__call__

        def stopped(self: batches.Batches, rows: DataFrame, number: int) -> None:
            running.stop()
            process(self, rows, number)

        with monkeypatch.context() as patched:
            patched.setattr(batches.Batches, "__call__", stopped)
            with pytest.raises(runner.Unprocessed) as failed:
                running.run(spark)
        assert exit_code(failed.value) is ExitCode.RETRY
        pipe.run(spark)
        assert is_done(pipe)

    def test_a_batch_that_always_fails_stops_the_pipeline(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        bad = {
            "priced": "select *, cast(raise_error('no way') as double) as price from orders",
            "rejected": "select * from malformed",
        }
        pipe = Pipe(drained, transform={"sql": bad}, limits={"maxAttempts": 2})
        pipe.spec["sinks"] = [
            {"from": "priced", "table": {"format": "parquet", "path": str(pipe.table)}},
            {"from": "rejected", "deadLetter": "orders"},
        ]
        codes = []
        for is_tried_again in (False, False, False, True):
            with pytest.raises(Exception) as failed:
                pipe.run(spark, is_tried_again=is_tried_again)
            codes.append(exit_code(failed.value))
        assert codes == [ExitCode.RETRY, *3 * [ExitCode.STOPPED]]
        assert isinstance(failed.value, Poison)
        assert "was begun 4 times and never finished" in str(failed.value)
        assert "no way" in str(failed.value)
        assert pipe.rows() == []
        repaired = Pipe(drained, limits={"maxAttempts": 2})
        repaired.run(spark, is_tried_again=True)
        assert is_done(repaired)

    @thorough
    def test_attempts_that_a_disk_has_ended_do_not_count(
        self, spark: SparkSession, drained: Lake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last of them is of the rows, and the only one that the pipeline allows."""
        pipe = Pipe(drained, limits={"maxAttempts": 1})
        gone = f"{drained.folder}/gone"
        with monkeypatch.context() as patched:
            patched.setattr(ParquetTable, "staging", lambda *_: gone)
            for _ in range(3):
                with pytest.raises(Exception) as failed:
                    pipe.run(spark)
                assert f"TableUnavailable: the file {gone}/" in shown(failed.value)
                assert exit_code(failed.value) is ExitCode.RETRY
        with monkeypatch.context() as patched:
            patched.setattr(ParquetTable, "commit", lambda *_: 1 / 0)
            with pytest.raises(Poison, match="was begun 4 times"):
                pipe.run(spark)
        pipe.run(spark, is_tried_again=True)
        assert is_done(pipe)

    def test_a_tap_of_a_subqueue_is_captured_as_it_is(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        """Receivers get the messages all the same, and a reset reads no row a second time."""
        drained.manage("DELETE", f"groups/{GROUP}")
        drained.create(kind="tap")
        pipe = Pipe(drained, sources=[{"name": "m", "queue": drained.entity, "readerGroup": GROUP}])
        del pipe.spec["transform"]
        table = {"format": "parquet", "path": str(pipe.table), "partitionBy": []}
        pipe.spec["sinks"] = [{"from": "m", "table": table}]
        pipe.run(spark)
        drained.complete(15)
        drained.reset("earliest")
        shutil.rmtree(pipe.checkpoint)
        pipe.run(spark)
        found = pipe.rows()
        assert sorted(row["sequence_number"] for row in found) == list(range(1, 16))
        assert {*BAD} < {row["body"] for row in found}

    @thorough
    def test_a_table_that_is_ahead_of_the_bus_is_not_trimmed_to_nothing(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        pipe = Pipe(drained, limits={"maxMessagesPerTrigger": 6})
        pipe.run(spark)
        drained.manage("DELETE", f"groups/{GROUP}")
        drained.create(kind="drain")
        drained.send(order("later"))
        shutil.rmtree(pipe.checkpoint)
        with pytest.raises(TableAhead) as failed:
            pipe.run(spark)
        assert exit_code(failed.value) is ExitCode.STOPPED
        assert main(["reset", str(pipe.file)]) == 0
        pipe.run(spark)
        assert pipe.skus() == [*GOOD, "later"]
        assert main(["verify", str(pipe.file)]) == 0

    def test_an_older_driver_plans_nothing_once_the_checkpoint_is_read(
        self, spark: SparkSession, drained: Lake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pipe = Pipe(drained)
        older = drained.client().claim()
        start = runner.Runner._started

        def started(of: runner.Runner, session: SparkSession) -> StreamingQuery:
            with pytest.raises(Fenced, match="was claimed by"):
                drained.client().plan(older.epoch, {0: (0, 1)})
            return start(of, session)

        monkeypatch.setattr(runner.Runner, "_started", started)
        pipe.run(spark)
        assert is_done(pipe)

    @thorough
    def test_an_older_checkpoint_stops_the_pipeline(
        self, spark: SparkSession, drained: Lake, tmp_path: Path
    ) -> None:
        pipe = Pipe(drained)
        pipe.run(spark)
        shutil.copytree(pipe.checkpoint, tmp_path / "older")
        for _ in range(2):
            drained.send(order("later"))
            pipe.run(spark)
        pipe.spec["checkpoint"]["path"] = str(tmp_path / "older")
        with pytest.raises(Exception, match="Restore the newest checkpoint") as failed:
            pipe.run(spark)
        assert exit_code(failed.value) is ExitCode.STOPPED
        assert "StaleCheckpoint: " in shown(failed.value)
        assert pipe.skus() == [*GOOD, "later", "later"]

    def test_a_function_makes_outputs(
        self, spark: SparkSession, drained: Lake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [program] = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
        (drained.folder / "pricing.py").write_text(program)
        monkeypatch.syspath_prepend(str(drained.folder))
        python = {"module": "pricing", "function": "price"}
        pipe = Pipe(drained, transform={"python": python})
        pipe.run(spark)
        assert pipe.skus() == GOOD
        assert reasons(drained) == ["MalformedBody", "MalformedBody", "rejected"]

    def test_lookups_are_read_for_each_batch(self, spark: SparkSession, drained: Lake) -> None:
        prices, sizes = drained.folder / "prices", drained.folder / "sizes"
        deltalake.write_deltalake(sizes, pa.table({"sku": [*GOOD, "late"], "size": 13 * ["m"]}))
        prices.mkdir()
        pq.write_table(pa.table({"sku": GOOD, "price": 12 * [2.5]}), prices / "a.parquet")
        joined = (
            "select body.sku, price, size, partition, position, enqueued_time from orders"
            " join prices p on p.sku = body.sku join sizes s on s.sku = body.sku"
        )
        pipe = Pipe(
            drained,
            lookups=[
                {"name": "prices", "parquet": str(prices)},
                {"name": "sizes", "delta": str(sizes)},
            ],
            transform={"sql": {**TRANSFORM["sql"], "priced": joined}},
        )
        pipe.run(spark)
        assert is_done(pipe)
        assert {(row["price"], row["size"]) for row in pipe.rows()} == {(2.5, "m")}
        late = pa.table({"sku": ["late"], "price": [9.5], "note": ["a column that others lack"]})
        pq.write_table(late, prices / "b.parquet")
        deltalake.DeltaTable(sizes).update(updates={"size": "'xl'"})
        drained.send(order("late"))
        pipe.run(spark)
        assert {(row["price"], row["size"]) for row in pipe.rows() if row["sku"] == "late"} == {
            (9.5, "xl")
        }

    @pytest.mark.parametrize(
        ("lookup", "text"),
        [
            ({"parquet": "none"}, r"spec.lookups\[0\].parquet: there is no folder .*none: make it"),
            ({"delta": "none"}, r"spec.lookups\[0\].delta: there is no folder"),
            ({"parquet": "empty"}, r"empty cannot be read as Parquet \(.*UNABLE_TO_INFER_SCHEMA"),
            ({"delta": "bad"}, "bad cannot be read as Delta"),
        ],
    )
    def test_a_lookup_that_cannot_be_read_is_named(
        self, spark: SparkSession, tmp_path: Path, lookup: dict[str, str], text: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "a.parquet").write_text("no Parquet")
        [(kind, name)] = lookup.items()
        spec = {
            "sources": [{"name": "orders", "queue": "orders"}],
            "lookups": [{"name": "prices", kind: str(tmp_path / name)}],
            "transform": {"python": {"module": "builtins", "function": "dict"}},
            "sinks": [{"from": "orders", "table": {"format": "parquet", "path": "/lake/orders"}}],
            "trigger": {"once": True},
            "checkpoint": {"path": "/checkpoints/orders"},
        }
        with pytest.raises(InvalidPipeline, match=text) as failed:
            check_frames(PipelineSpec.model_validate(spec), spark)
        assert exit_code(failed.value) is ExitCode.CONFIGURATION
        if name == "bad":
            spec["lookups"] = [{"name": "prices", "parquet": str(tmp_path / name)}]
            with pytest.raises(Exception, match="reading file") as failed:
                check_frames(PipelineSpec.model_validate(spec), spark)
            assert exit_code(failed.value) is ExitCode.RETRY, "it may be on its way"
            assert "bad/a.parquet" in shown(failed.value)

    def test_a_function_gets_lookups(
        self, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "joining.py").write_text(
            "def join(frames):\n"
            "    return {'priced': frames['orders'].join(frames['prices'], 'message_id')}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "prices").mkdir()
        prices = pa.table({"message_id": ["a"], "price": [1.0]})
        pq.write_table(prices, tmp_path / "prices" / "a.parquet")
        spec = {
            "sources": [{"name": "orders", "queue": "orders"}],
            "lookups": [{"name": "prices", "parquet": str(tmp_path / "prices")}],
            "transform": {"python": {"module": "joining", "function": "join"}},
            "sinks": [{"from": "priced", "table": {"format": "delta", "path": "/lake/orders"}}],
            "trigger": {"once": True},
            "checkpoint": {"path": "/checkpoints/orders"},
        }
        found = check_frames(PipelineSpec.model_validate(spec), spark)
        assert "price" in found["priced"].columns

    def test_an_output_with_other_positions_is_refused(
        self, spark: SparkSession, drained: Lake
    ) -> None:
        moved = PRICED.replace("position", "position + 1 as position")
        pipe = Pipe(drained, transform={"sql": {**TRANSFORM["sql"], "priced": moved}})
        with pytest.raises(Exception, match="keep the columns partition and position") as failed:
            pipe.run(spark)
        assert exit_code(failed.value) is ExitCode.CONFIGURATION
        assert shown(failed.value).startswith("InvalidSchema: the output priced has positions")
        assert pipe.rows() == []
        Pipe(drained).run(spark)
        assert is_done(pipe)

    def test_explain_says_what_a_batch_does(self, spark: SparkSession, drained: Lake) -> None:
        document = Pipe(drained, trigger={"continuous": "PT2S"}).document()
        lines = list(explained(document, check_frames(document.spec, spark)))
        assert lines[0] == "Every 2 s:"
        assert lines[1].startswith("1. plan up to 268435456 bytes of queue-")
        assert [line.partition(" ")[2].partition(" ")[0] for line in lines[2:9]] == [
            "read", "query", "add", "dead-letter", "dead-letter", "commit", "settle",
        ]  # fmt: skip
        assert lines[lines.index("priced:") + 2] == "  price double"

    def test_columns_of_messages_are_checked(self, spark: SparkSession, drained: Lake) -> None:
        pipe = published(drained)
        pipe.spec["transform"]["sql"]["sent"] = "select sku, position from priced"
        with pytest.raises(InvalidPipeline, match=r"sinks\[3\]: there is no column sku"):
            check_frames(pipe.document().spec, spark)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"priced": "select nothing from orders"}, r"sql.priced: .*`nothing` cannot be"),
            ({"priced": "selekt"}, "spec.transform.sql.priced: .*selekt"),
            ({"priced": "select 1 as a"}, r"spec.sinks\[0\]: .* column partition .* lacks it"),
            (
                {"rejected": "select partition, string(position) as position from orders"},
                r"spec.sinks\[1\]: .* column position .* has it as string",
            ),
            ({"priced": "select *, 1 as hour from orders"}, "column hour, as the folders"),
            ({"priced": "select *, null as x from orders"}, "column x of priced has no type"),
            ({"priced": "select *, 1 as BODY from orders"}, "has the column body twice"),
        ],
    )
    def test_queries_are_checked_without_rows(
        self, spark: SparkSession, drained: Lake, change: dict[str, str], text: str
    ) -> None:
        document = Pipe(drained, transform={"sql": {**TRANSFORM["sql"], **change}}).document()
        with pytest.raises(InvalidPipeline, match=text) as failed:
            check_frames(document.spec, spark)
        assert exit_code(failed.value) is ExitCode.CONFIGURATION

    def test_a_wrong_schema_of_bodies_is_named(self, spark: SparkSession, drained: Lake) -> None:
        pipe = Pipe(drained)
        pipe.spec["sources"][0]["body"] = {"json": "sku strin"}
        with pytest.raises(InvalidPipeline, match=r"sources\[0\].body.json: .*STRIN"):
            check_frames(pipe.document().spec, spark)

    @pytest.mark.parametrize(
        ("python", "text"),
        [
            ({"module": "no_such_module", "function": "price"}, "No module named"),
            ({"module": "json", "function": "price"}, "has no attribute 'price'"),
            ({"module": "builtins", "function": "list"}, "does not return frames by name"),
            ({"module": "builtins", "function": "dict"}, "rows of malformed go nowhere"),
        ],
    )
    def test_a_wrong_function_is_named(
        self, spark: SparkSession, drained: Lake, python: dict[str, str], text: str
    ) -> None:
        document = Pipe(drained, transform={"python": python}).document()
        with pytest.raises(InvalidPipeline, match=text):
            check_frames(document.spec, spark)

    @thorough
    def test_a_process_that_is_killed_goes_on_and_ends_in_order_on_sigterm(
        self, drained: Lake
    ) -> None:
        pipe = Pipe(drained, trigger={"continuous": "PT0.1S"}, limits={"maxMessagesPerTrigger": 5})
        pipe.document()
        killed = started(pipe)
        seen = wait_for(pipe.skus, killed)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait(60)
        assert seen
        process = started(pipe)
        wait_for(lambda: pipe.skus() == GOOD and len(reasons(drained)) == len(BAD), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert is_done(pipe)

    @thorough
    @pytest.mark.parametrize("table_format", ["parquet", "iceberg"])
    def test_executors_write_a_table_on_s3(self, drained: Lake, table_format: str) -> None:
        """In a process of its own: the workers of Python have the environment of their JVM."""
        pipe = Pipe(drained, table_format)
        pipe.place["path"] = "s3://lake/priced"
        pipe.document()
        with running_s3("lake") as surroundings:
            process = started(pipe, **surroundings)
            assert process.wait(600) == 0
            check_captured(pipe, surroundings)

    @thorough
    @pytest.mark.parametrize("is_long", [False, True])
    def test_a_batch_is_repeated_until_s3_is_back(self, drained: Lake, is_long: bool) -> None:
        """Within the run, or by the next one; neither is one of the attempts of `maxAttempts`."""
        pipe = Pipe(drained, limits={"maxAttempts": 1})
        pipe.place["path"] = "s3://lake/priced"
        pipe.document()
        with gated_s3("lake") as (gate, surroundings):
            gate.closes_at = b"PUT /lake/priced/_postbus/staged/"
            process = started(pipe, **surroundings)
            for _ in range(2):
                assert gate.refused.acquire(timeout=600)
            if is_long:
                assert process.wait(600) == ExitCode.RETRY
                assert not drained.group().plan.is_settled
                gate.open()
                process = started(pipe, **surroundings)
            gate.open()
            assert process.wait(600) == 0
            assert drained.group().plan.attempts == 1 + is_long
            check_captured(pipe, surroundings)

    def test_the_example_of_iceberg_works(self, spark: SparkSession, drained: Lake) -> None:
        text = (EXAMPLE.parent / "capture-orders-iceberg.yaml").read_text(encoding="utf-8")
        folder = drained.folder / "lake"
        text = text.replace("/tmp/lake", str(folder))
        pipe = Pipe(drained, "iceberg")
        pipe.spec = yaml.safe_load(text)["spec"]
        pipe.spec["sources"][0] |= {
            "queue": drained.entity, "mode": "drain", "readerGroup": GROUP,
        }  # fmt: skip
        pipe.place = pipe.spec["sinks"][0]["table"]
        pipe.run(spark)
        assert len(pipe.rows()) == len(GOOD) + len(BAD)

    def test_the_guide_works(self, tmp_path: Path) -> None:
        text = EXAMPLE.read_text(encoding="utf-8")
        assert GUIDE.partition("```yaml\n")[2].partition("```")[0] in text
        done = run_script(GUIDE, tmp_path)
        lines = done.stdout.splitlines()
        assert f"{tmp_path / EXAMPLE.name}: the pipeline price-orders is valid" in lines
        assert "[3.0]" in lines
        assert "NoAmount" in done.stdout
        assert "MalformedBody" in done.stdout
        assert "reader group price-orders, a drain: plan 1, settled" in lines


def run_script(guide: str, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the first script of a guide with the examples, on a bus of its own.

    `changes`: what is written otherwise in the examples.
    """
    for example in EXAMPLE.parent.glob("*.yaml"):
        text = example.read_text(encoding="utf-8").replace("/tmp/lake", str(folder / "lake"))
        for old, new in changes.items():
            text = re.sub(rf'(?<= {old}: )".*"', new, text)
        (folder / example.name).write_text(text)
    [script, *_] = re.findall(r"^```sh\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    for old, new in {
        r"^postbus ": f"{sys.executable} -m postbus ",
        r"^postbus-pipeline ": f"{sys.executable} -m postbus_spark.jobs.main ",
        r"^python3 ": f"{sys.executable} ",
        r"/tmp/lake": str(folder / "lake"),
        r"examples/pipeline/": f"{folder}/",
    }.items():
        script = re.sub(old, new, script, flags=re.MULTILINE)
    with running_dev_bus("examples") as bus:
        context = f"{sys.executable} -m postbus context"
        of_bus = f"--control {bus.control} --token-file {bus.token_file}"
        script = f"({context} set guide {of_bus}; {context} use guide) > set\n{script}"
        more = {"POSTBUS_CONNECTION_STRING": bus.connection_string, "SPARK_LOCAL_IP": LOOPBACK}
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", script],
            capture_output=True, text=True, timeout=600, check=False, cwd=folder,
            env=environment(**more, PYTHONPATH=PATHS, XDG_CONFIG_HOME=str(folder)),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def check_captured(pipe: Pipe, surroundings: Mapping[str, str]) -> None:
    """Check that all messages are in a table on S3 once, or in the dead-letter queue."""
    check = [sys.executable, "-m", "postbus_spark.jobs.main", "verify", str(pipe.file)]
    given = environment(**surroundings, PYTHONPATH=PATHS)
    done = subprocess.run(check, capture_output=True, text=True, check=True, env=given)
    assert f", {len(GOOD)} rows" in done.stdout
    assert reasons(pipe.lake) == sorted(BAD.values())
    assert pipe.lake.group().plan.is_settled


def started(pipe: Pipe, **more: str) -> subprocess.Popen[bytes]:
    return process_of(pipe.file, pipe.lake.connection_file(), **more)


def process_of(document: Path, connection_file: str, **more: str) -> subprocess.Popen[bytes]:
    """Run a pipeline as a process with a group of its own, which has its JVM, too."""
    command = [sys.executable, "-m", "postbus_spark.jobs.main", "run", str(document)]
    return subprocess.Popen(
        [*command, "--connection-string-file", connection_file],
        env=environment(**more, SPARK_LOCAL_IP=LOOPBACK, PYTHONPATH=PATHS),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> object:
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert process.poll() is None, "the process has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def published(lake: Lake) -> Pipe:
    """Return a pipeline that sends priced orders to a queue, too, with the right to."""
    sent = "select to_json(struct(sku)) as body, sku as message_id, position from priced"
    pipe = Pipe(lake, transform={"sql": {**TRANSFORM["sql"], "sent": sent}})
    pipe.spec["limits"] = {"maxMessagesPerTrigger": 6}
    pipe.spec["sinks"].append({"from": "sent", "queue": lake.bus.queue()})
    pipe.rule = RULES[0].name
    return pipe


def target_of(pipe: Pipe) -> str:
    return pipe.spec["sinks"][-1]["queue"]


def received(lake: Lake, entity: str) -> list[str]:
    with lake.bus.client() as client, client.get_queue_receiver(entity) as receiver:
        found = receiver.receive_messages(50, max_wait_time=5)
        while len(found) < len(GOOD) and (more := receiver.receive_messages(50, max_wait_time=5)):
            found += more
    return [str(each) for each in found]


def kill_at(patched: pytest.MonkeyPatch, point: str, table_format: str = "parquet") -> None:
    """End the second batch where a kill would, or the run when Spark has committed the last one."""
    seen: list[object] = []

    def dying(function: Callable[..., Any], *, is_done_first: bool) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            seen.append(function)
            if len(seen) != 2 or is_done_first:
                result = function(*given, **named)
            if len(seen) == 2:
                raise RuntimeError("killed")
            return result

        return call

    def settle(client: GroupClient, checkpoint: Path, *_: int) -> None:
        if last_batch(checkpoint) == LAST_BATCH:
            raise RuntimeError("killed")

    is_parquet = table_format == "parquet"
    table = {"parquet": ParquetTable, "delta": DeltaTable, "iceberg": IcebergTable}[table_format]
    if point == "last batch committed":
        patched.setattr(runner, "settle_committed", settle)
        return
    where, name, is_done_first = {
        "files written": (table, "commit" if is_parquet else "_add", False),
        "commit made": (table, "_publish" if is_parquet else "commit", not is_parquet),
        "tables done": (batches.Batches, "_reject", False),
        "staged": (Writer, "publish", False),
        "published": (Writer, "publish", True),
        "batch done": (batches.Batches, "__call__", True),
    }[point]
    patched.setattr(where, name, dying(getattr(where, name), is_done_first=is_done_first))
