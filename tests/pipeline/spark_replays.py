"""Replays on a real bus and Spark; `test_spark` runs them, since one file has one session."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from pyspark.sql import SparkSession

from postbus.contract.pipeline import PipelineDocument
from postbus_spark.errors import StaleWriter
from postbus_spark.jobs.documents import read_pipeline
from postbus_spark.jobs.explaining import explained, replay_status
from postbus_spark.jobs.failures import ExitCode, exit_code, shown
from postbus_spark.jobs.frames import InvalidPipeline
from postbus_spark.jobs.replay import Replay, no_messages, rows_of
from postbus_spark.jobs.runner import Unprocessed
from postbus_spark.lake.parquet import COMMITS, Commit, ParquetTable
from postbus_spark.publish import Writer
from postbus_spark.staging import Staged
from tests.edge.bus_thread import RULES, BusThread
from tests.pipeline.lake import GROUP, Lake
from tests.pipeline.pipelines import Pipe, order, write_document
from tests.pipeline.s3_server import running_s3
from tests.pipeline.spark_pipelines import EXAMPLE, GUIDE, process_of, run_script, started

REPLAY_GUIDE = GUIDE.partition("\n## Replay\n")[2]
HOUR_MS = 3_600_000
thorough = pytest.mark.thorough
PROPERTIES = {"attempt": 2, "is_big": True, "price": 2.5, "region": "eu", "none": None}
REKEYED = "select body, concat('again-', message_id) as message_id from orders"
ODD = [f"{number:02}" for number in range(1, 12, 2)]


@pytest.fixture
def past(bus: BusThread, tmp_path: Path) -> Lake:
    """A queue that keeps its history, with twelve orders of one hour between others."""
    lake = Lake(bus, bus.queue(historyRetention="P1D"), tmp_path)
    lake.send(order("early"))
    bus.advance(HOUR_MS)
    with bus.client() as client, client.get_queue_sender(lake.entity) as sender:
        for number in range(12):
            sender.send_messages(
                ServiceBusMessage(
                    order(f"{number:02}"),
                    message_id=f"m{number:02}",
                    session_id=f"s{number % 2}",
                    subject="order",
                    correlation_id="c",
                    application_properties=PROPERTIES,
                    time_to_live=timedelta(days=3),
                )
            )
    bus.advance(HOUR_MS)
    lake.send(order("late"))
    lake.complete(7)
    return lake


class Again:
    """A replay of the hour, into another queue."""

    def __init__(self, lake: Lake, **spec: Any) -> None:
        self.lake = lake
        self.target = lake.bus.queue()
        self.file = lake.folder / "replay.yaml"
        self.spec: dict[str, Any] = {
            "sources": [self.source(queue=lake.entity, mode="history")],
            "sinks": [{"from": "orders", "queue": self.target}],
            "trigger": {"once": True},
            **spec,
        }

    def source(self, **more: Any) -> dict[str, Any]:
        now = self.lake.bus.now()
        times = {
            name: (now - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
            for name, minutes in (("from", 90), ("to", 30))
        }
        return {"name": "orders", **times, **more}

    def document(self, name: str = "replay") -> PipelineDocument:
        write_document(self.file, self.spec, metadata={"name": name})
        return read_pipeline(self.file)

    def replay(self, name: str = "replay") -> Replay:
        return Replay(self.document(name), self.lake.connection_file(RULES[0].name))

    def run(self, spark: SparkSession, name: str = "replay") -> list[int]:
        """Run as the command does; return the sinks whose batch this run has published."""
        replay = self.replay(name)
        unsent = replay.unsent()
        if unsent:
            replay.send(spark, unsent)
        replay.wait()
        return unsent

    def sent(self, entity: str = "") -> list[ServiceBusReceivedMessage]:
        """Return what the target has got, in its order."""
        client = self.lake.bus.client()
        with client, client.get_queue_receiver(entity or self.target) as receiver:
            return receiver.peek_messages(100)

    def bodies(self, entity: str = "") -> list[bytes]:
        return [b"".join(each.body) for each in self.sent(entity)]


ALL = [order(f"{number:02}") for number in range(12)]


def captured(lake: Lake, table_format: str) -> Pipe:
    """Return a pipeline that captures a queue in a table, beside its receivers."""
    lake.create(kind="tap")
    pipe = Pipe(lake, table_format)
    del pipe.spec["transform"]
    pipe.spec["sources"] = [{"name": "m", "queue": lake.entity, "readerGroup": GROUP}]
    pipe.spec["sinks"] = [{**pipe.spec["sinks"][0], "from": "m"}]
    return pipe


def replay_sql(lake: Lake, query: str, **sink: Any) -> Again:
    """Return a replay of rows that a query makes."""
    again = Again(lake, transform={"sql": {"again": query}})
    again.spec["sinks"] = [{"from": "again", "queue": again.target, **sink}]
    return again


class ReplayTests:
    """One session for all of them."""

    def test_an_hour_of_a_history_is_sent_as_it_was(
        self, spark: SparkSession, past: Lake, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Those that receivers have settled, too, once, and in their order."""
        again = Again(past)
        assert again.run(spark) == [0]
        found = again.sent()
        assert again.bodies() == ALL
        assert [each.message_id for each in found] == [f"m{number:02}" for number in range(12)]
        assert [each.session_id for each in found] == 6 * ["s0", "s1"]
        assert {(each.subject, each.correlation_id) for each in found} == {("order", "c")}
        assert {each.time_to_live for each in found} == {timedelta(days=3)}
        for each in found:
            properties = dict(each.application_properties or {})
            assert {name.decode(): value for name, value in properties.items()} == {
                **PROPERTIES,
                "region": b"eu",
            }
        with caplog.at_level(logging.INFO, "postbus_spark.jobs"):
            assert again.run(spark) == []
        said = "the writer replay.orders has sent 12 messages already: choose another metadata.name"
        assert said in caplog.text
        assert again.bodies() == ALL
        again.run(spark, "replay-2")
        assert again.bodies() == 2 * ALL

    @pytest.mark.parametrize("is_published", [False, True])
    def test_a_replay_that_is_killed_sends_each_message_once(
        self,
        spark: SparkSession,
        past: Lake,
        monkeypatch: pytest.MonkeyPatch,
        is_published: bool,
    ) -> None:
        query = f"{REKEYED} where int(substr(message_id, 2)) % 2 = 1"
        again = replay_sql(past, query, rate=1_000)
        publish = Writer.publish

        def killed(*given: Any) -> None:
            if is_published:
                publish(*given)
            raise RuntimeError("killed")

        with monkeypatch.context() as patched:
            patched.setattr(Writer, "publish", killed)
            with pytest.raises(RuntimeError, match="killed"):
                again.run(spark)
        assert again.run(spark) == ([] if is_published else [0])
        assert again.bodies() == [order(each) for each in ODD]
        assert [each.message_id for each in again.sent()] == [f"again-m{each}" for each in ODD]

    @pytest.mark.parametrize(
        "table_format", ["parquet", pytest.param("delta", marks=thorough), "iceberg"]
    )
    def test_an_hour_of_a_table_that_was_captured_is_sent(
        self, spark: SparkSession, past: Lake, table_format: str
    ) -> None:
        """Rows of Parquet are read by executors, others by the driver."""
        pipe = captured(past, table_format)
        pipe.run(spark)
        table = pipe.place
        again = Again(past)
        again.spec["sources"] = [again.source(table=table)]
        again.run(spark)
        assert again.bodies() == ALL
        [kept, *_] = again.sent()
        assert dict(kept.application_properties or {})[b"attempt"] == b"2", "a table has text"
        again.spec["sources"] = [{"name": "orders", "table": table}]
        again.run(spark, "all")
        assert again.bodies() == [*ALL, order("early"), *ALL, order("late")]

    @thorough
    @pytest.mark.parametrize("table_format", ["parquet", "delta", "iceberg"])
    def test_an_hour_of_a_table_on_s3_is_sent(self, past: Lake, table_format: str) -> None:
        """Processes capture and replay: their workers have their environment."""
        pipe = captured(past, table_format)
        pipe.place["path"] = "s3://lake/orders"
        pipe.document()
        with running_s3("lake") as surroundings:
            assert started(pipe, **surroundings).wait(600) == 0
            again = Again(past)
            again.spec["sources"] = [again.source(table=pipe.place)]
            again.document()
            connection = past.connection_file(RULES[0].name)
            assert process_of(again.file, connection, **surroundings).wait(600) == 0
        assert again.bodies() == ALL

    def test_bodies_are_parsed_for_queries_and_sent_as_they_were(
        self, spark: SparkSession, past: Lake
    ) -> None:
        past.send(b"no json")
        past.bus.advance(1_000)
        again = replay_sql(past, "select to_json(struct(body.sku)) as body from orders")
        schema = {"body": {"json": "sku string"}}
        again.spec["sources"] = [
            {"name": "orders", "queue": past.entity, "mode": "history", **schema}
        ]
        good, bad = past.bus.queue(), past.bus.queue()
        again.spec["sinks"] += [
            {"from": "orders", "queue": good},
            {"from": "malformed", "queue": bad},
        ]
        assert again.run(spark) == [0, 1, 2]
        assert len(again.bodies()) == 14
        assert again.bodies()[1] == b'{"sku":"00"}'
        assert again.bodies(good) == [order("early"), *ALL, order("late")]
        assert again.bodies(bad) == [b"no json"]

    def test_a_replay_that_is_stopped_leaves_the_sending_to_the_bus(
        self, spark: SparkSession, past: Lake
    ) -> None:
        """Another run waits for the rest, at the rate of the first."""
        many = "select body from (select body, explode(sequence(1, 100)) as copy from orders)"
        again = replay_sql(past, many, rate=1)
        replay = again.replay()
        replay.stop()
        replay.send(spark, replay.unsent())
        with pytest.raises(Unprocessed, match="another run waits for them") as failed:
            replay.wait()
        assert exit_code(failed.value) is ExitCode.RETRY
        waiting = again.replay()
        assert waiting.unsent() == []
        [*_, line] = replay_status(again.document(), waiting.published())
        assert line.endswith("of 1200 published messages have arrived")
        past.bus.delete(again.target)

    def test_a_time_without_messages_may_be_corrected(
        self, spark: SparkSession, past: Lake
    ) -> None:
        again = replay_sql(past, f"{REKEYED} where subject = 'none'")
        assert again.run(spark) == [0]
        assert again.replay().unsent() == [0]
        again.spec["transform"]["sql"]["again"] = REKEYED
        again.run(spark)
        assert again.bodies() == ALL

    def test_the_name_of_a_pipeline_with_a_group_is_refused(self, past: Lake) -> None:
        again = Again(past)
        file = past.connection_file(RULES[0].name)
        writer = Writer(entity=again.target, writer="replay.orders", connectionStringFile=file)
        writer.publish(3, Staged((), 0))
        with pytest.raises(StaleWriter, match="a pipeline with a reader group has its name"):
            again.replay().unsent()

    def test_a_row_that_cannot_be_sent_sends_nothing(self, spark: SparkSession, past: Lake) -> None:
        again = replay_sql(past, "select body, repeat(message_id, 99) as message_id from orders")
        with pytest.raises(Exception, match="column message_id of row") as failed:
            again.run(spark)
        assert exit_code(failed.value) is ExitCode.CONFIGURATION
        assert shown(failed.value).startswith("InvalidRows: ")
        assert again.replay().unsent() == [0]

    @pytest.mark.parametrize(
        ("write", "text"),
        [
            (lambda folder: None, "there is no folder"),
            (lambda folder: folder.mkdir(), "is no table of Parquet that a pipeline has written"),
        ],
    )
    def test_a_table_that_cannot_be_read_is_named(
        self, spark: SparkSession, past: Lake, write: Callable[[Path], None], text: str
    ) -> None:
        folder = past.folder / "table"
        write(folder)
        again = Again(past)
        again.spec["sources"] = [
            {"name": "orders", "table": {"format": "parquet", "path": str(folder)}}
        ]
        with pytest.raises(InvalidPipeline, match=rf"sources\[0\].table.path: .*{text}"):
            no_messages(again.document().spec, spark)

    @pytest.mark.parametrize("table_format", ["parquet", "delta"])
    def test_a_table_without_the_place_of_its_rows_is_refused(
        self, spark: SparkSession, past: Lake, table_format: str
    ) -> None:
        folder = past.folder / "table"
        folder.mkdir()
        rows = pa.table({"body": [b"a"]})
        if table_format == "delta":
            deltalake.write_deltalake(folder, rows)
        else:
            pq.write_table(rows, folder / "a.parquet")
            ParquetTable(folder, ()).place.add(
                f"{COMMITS}/{1:012}.json", Commit(1, columns={"body": "binary"}).json().encode()
            )
        again = Again(past)
        again.spec["sources"] = [
            {"name": "orders", "table": {"format": table_format, "path": str(folder)}}
        ]
        with pytest.raises(InvalidPipeline, match="has no column partition that is int"):
            no_messages(again.document().spec, spark)

    def test_columns_of_a_replay_are_checked_without_a_bus(
        self, spark: SparkSession, past: Lake
    ) -> None:
        again = replay_sql(past, "select body, sku from orders")
        spec = again.document().spec
        with pytest.raises(InvalidPipeline, match=r"sql.again: .*`sku`"):
            rows_of(spec, no_messages(spec, spark))
        again = replay_sql(past, "select * from orders")
        spec = again.document().spec
        with pytest.raises(InvalidPipeline, match=r"sinks\[0\]: column entity is made by the bus"):
            rows_of(spec, no_messages(spec, spark))

    def test_the_example_is_that_of_the_guide(self) -> None:
        text = (EXAMPLE.parent / "replay-orders.yaml").read_text(encoding="utf-8")
        assert REPLAY_GUIDE.partition("```yaml\n")[2].partition("```")[0] in text
        for each in EXAMPLE.parent.glob("*.yaml"):
            assert read_pipeline(each).spec.volumes

    @thorough
    def test_the_guide_of_replays_works(self, tmp_path: Path) -> None:
        now = datetime.now(UTC)
        times = {
            name: f'"{now + timedelta(hours=hours):%Y-%m-%dT%H:%M:%SZ}"'
            for name, hours in (("from", -1), ("to", 1))
        }
        done = run_script(REPLAY_GUIDE, tmp_path, **times)
        lines = done.stdout.splitlines()
        [received] = [json.loads(line) for line in lines if line.startswith("{")]
        assert received["body"] == '{"sku": "plum", "amount": 4}'
        assert "writer replay-orders-0131-08.again to queue.1: 1 of 1 published" in done.stdout
        said = re.search("`(the writer replay-orders.*?)`", REPLAY_GUIDE, re.DOTALL)
        assert said is not None
        assert done.stderr.count(said[1]) == 1

    def test_explain_says_what_a_replay_sends(self, past: Lake) -> None:
        again = replay_sql(past, REKEYED, rate=500)
        [first, read, query, send] = explained(again.document(), {})
        assert first == "Once:"
        assert read.startswith(f"1. read the history of {past.entity} (main) from 20")
        assert query == "2. query again"
        assert send == f"3. send again to {again.target}, 500 a second at most"
