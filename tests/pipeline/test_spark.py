"""Spark reads a bus: what only a JVM shows. One session for all tests, so all are in this file."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from postbus_spark import publish_messages
from postbus_spark.jobs.dead_letters import causes_of
from tests.edge.bus_thread import BusThread
from tests.pipeline.lake import KEYS, Lake
from tests.pipeline.spark_notebooks import NotebookTests
from tests.pipeline.spark_pipelines import PipelineTests, drained
from tests.pipeline.spark_replays import ReplayTests, past
from tests.pipeline.spark_restores import RestoreTests, site
from tests.pipeline.spark_streams import StreamTests, pair

pytestmark = [
    pytest.mark.jvm,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="there is no java on PATH"),
]

ROOT = Path(__file__).parents[2]
END_S = 120
ALL = [f"{number:02}" for number in range(15)]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where Spark writes its event log."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def spark(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Start Spark with workers of this interpreter; they find the source by its package alone."""
    folder = tmp_path_factory.mktemp("spark")
    kept = {name: os.environ.get(name) for name in ("PYSPARK_PYTHON", "SPARK_LOCAL_IP")}
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    settings = {
        "spark.driver.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": logs.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.task.maxFailures": "1",
        "spark.python.authenticate.socketTimeout": "120s",  # workers start slowly on a busy machine
        "spark.sql.streaming.metricsEnabled": "false",
    }
    builder = SparkSession.builder.master("local[2]").appName("tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    for name, value in kept.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def group(lake: Lake) -> Lake:
    """Fifteen messages, of which receivers have completed two."""
    lake.send(*(body.encode() for body in ALL))
    lake.complete(2)
    return lake


@pytest.fixture
def options(group: Lake) -> dict[str, str]:
    """Return options; the connection string is in a file, as a Secret would be."""
    return group.options()


def program_of_guide(word: str) -> str:
    """Return the program of the guide that has a word."""
    guide = (ROOT / "docs" / "guides" / "spark.md").read_text(encoding="utf-8")
    programs: list[str] = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    [found] = [each for each in programs if word in each]
    return found


class Captured:
    """A sink that keeps batches: its id, the bodies and the plan's number."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.batches: list[tuple[int, list[str]]] = []
        self.plans: list[int] = []
        self.then: Callable[[int], None] = lambda _: None

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.batches.append((number, bodies(frame)))
        self.plans.append(self.lake.group().plan.number)
        self.then(number)

    def bodies(self) -> list[str]:
        return sorted(body for _, each in self.batches for body in each)


__all__ = ["drained", "pair", "past", "site"]


def bodies(frame: DataFrame) -> list[str]:
    rows = frame.orderBy("partition", "position").collect()
    return [bytes(row.body).decode() for row in rows]


def start(
    spark: SparkSession, options: dict[str, str], sink: Captured, checkpoint: Path, **more: str
) -> StreamingQuery:
    stream = spark.readStream.format("postbus").options(**options, **more).load()
    return (
        stream.writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def run(
    spark: SparkSession, options: dict[str, str], sink: Captured, checkpoint: Path, **more: str
) -> StreamingQuery:
    """Run a query to the end of what is there."""
    query = start(spark, options, sink, checkpoint, **more)
    assert query.awaitTermination(END_S)
    return query


def failure(query: StreamingQuery) -> str:
    with pytest.raises(PySparkException) as error:
        query.awaitTermination(END_S)
    return str(error.value)


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_has_all_columns(spark: SparkSession, options: dict[str, str]) -> None:
    frame = spark.read.format("postbus").options(**options).load()
    assert bodies(frame) == ALL
    first = frame.orderBy("partition", "position").first()
    assert first is not None
    row = first.asDict()
    assert (row["entity"], row["sequence_number"]) == (options["entity"], 1)
    assert row["application_properties"] == {}
    assert row["is_malformed"] is False
    assert row["delivery_count"] is row["state"] is None
    assert frame.where("sequence_number > 10").count() == 5


def test_a_schema_selects_columns(spark: SparkSession, options: dict[str, str]) -> None:
    reader = spark.read.format("postbus").options(**options)
    frame = reader.schema("sequence_number bigint, partition int").load()
    assert frame.columns == ["sequence_number", "partition"]
    assert frame.selectExpr("sum(sequence_number)").first()[0] == sum(range(1, 16))


def test_a_frame_may_be_used_twice(spark: SparkSession, options: dict[str, str]) -> None:
    frame = spark.read.format("postbus").options(**options, minPartitions="4").load()
    assert frame.rdd.getNumPartitions() >= 4
    assert frame.union(frame).count() == 30
    joined = frame.alias("a").join(frame.alias("b"), ["partition", "position"])
    assert joined.count() == 15


def test_an_empty_group_is_an_empty_frame(spark: SparkSession, group: Lake) -> None:
    group.reset("latest")
    frame = spark.read.format("postbus").options(**group.options()).load()
    assert frame.count() == 0


def test_tables_of_sql_read_it(spark: SparkSession, options: dict[str, str]) -> None:
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    spark.sql(f"create temporary view orders using postbus options ({given})")
    found = spark.sql("select count(*), count(distinct message_id) from orders").first()
    assert found is not None
    assert tuple(found) == (15, 15)
    spark.sql("drop view orders")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"maxMessagePerTrigger": "1"}, "did you mean maxMessagesPerTrigger?"),
        ({"mode": "peek"}, "the mode peek reads what is there without a group"),
        ({"connectionString": "Endpoint=sb://x"}, "would show a key in query plans"),
    ],
)
def test_a_wrong_option_is_named(
    spark: SparkSession, options: dict[str, str], more: dict[str, str], text: str
) -> None:
    with pytest.raises(AnalysisException) as error:
        spark.read.format("postbus").options(**options, **more).load()
    assert text in str(error.value)


def test_a_wrong_schema_is_named(spark: SparkSession, options: dict[str, str]) -> None:
    reader = spark.read.format("postbus").options(**options).schema("bodi binary")
    with pytest.raises(PySparkException, match=r"no column bodi, did you mean body\?"):
        reader.load().count()


def test_spark_reads_what_is_there_without_a_group(
    spark: SparkSession, bus: BusThread, tmp_path: Path
) -> None:
    lake = Lake(bus, bus.queue(historyRetention="P1D"), tmp_path)
    lake.send(b"done", b"dead", b"dead", b"live")
    lake.complete(1)
    lake.dead_letter(2, "NoPrice")
    access = {name: text for name, text in lake.options().items() if name != "readerGroup"}
    program = program_of_guide("def looked_at")
    names: dict[str, Any] = {}
    exec(compile(program, "spark.md", "exec"), names)
    by_reason, past = names["looked_at"](spark, access)
    assert [tuple(row) for row in by_reason.collect()] == [("NoPrice", 2)]
    assert past.columns == ["message_id", "settled_time", "settlement"]
    assert past.count() == 0, "the hour of the guide is long ago"
    reader = spark.read.format("postbus").options(**access, mode="history", minPartitions="3")
    kept = reader.load()
    assert kept.rdd.getNumPartitions() == 3
    assert [row.settlement for row in kept.orderBy("position").collect()] == [
        "completed", "deadLettered", "deadLettered", None,
    ]  # fmt: skip


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_of_several_batches_goes_on_where_it_ended(
    spark: SparkSession, options: dict[str, str], group: Lake, tmp_path: Path
) -> None:
    sink, checkpoint = Captured(group), tmp_path / "checkpoint"
    query = run(spark, options, sink, checkpoint, maxMessagesPerTrigger="6")
    assert [number for number, _ in sink.batches] == [0, 1, 2]
    assert sink.plans == [1, 2, 3]
    assert [len(each) for _, each in sink.batches] == [6, 6, 3]
    assert sink.bodies() == ALL
    progress = json.loads(query.lastProgress.json)["sources"][0]
    assert progress["endOffset"] == progress["latestOffset"]
    assert progress["endOffset"]["entity"] == group.entity

    run(spark, options, sink, checkpoint)
    assert len(sink.batches) == 3
    group.send(b"c")
    run(spark, options, sink, checkpoint)
    assert sink.batches[3:] == [(3, ["c"])]
    assert group.group().plan.number == 4


@pytest.mark.thorough
def test_a_lost_checkpoint_repeats_the_last_range_under_its_number(
    spark: SparkSession, options: dict[str, str], group: Lake, tmp_path: Path
) -> None:
    sink = Captured(group)
    run(spark, options, sink, tmp_path / "first", maxMessagesPerTrigger="9")
    group.send(b"c")
    again = Captured(group)
    run(spark, options, again, tmp_path / "second", maxMessagesPerTrigger="1")
    assert again.batches == [(0, sink.batches[-1][1]), (1, ["c"])]
    assert again.plans == [2, 3]


def test_a_batch_that_failed_is_the_same_after_a_restart(
    spark: SparkSession, options: dict[str, str], group: Lake, tmp_path: Path
) -> None:
    sink, checkpoint = Captured(group), tmp_path / "checkpoint"

    def fail(number: int) -> None:
        if number == 1:
            raise RuntimeError("the sink is full")

    sink.then = fail
    query = start(spark, options, sink, checkpoint, maxMessagesPerTrigger="6")
    assert "the sink is full" in failure(query)
    group.send(b"c")
    sink.then = lambda _: None
    run(spark, options, sink, checkpoint)
    assert sink.batches[2] == sink.batches[1]
    assert sink.plans == [1, 2, 2, 3]
    assert sorted(set(sink.bodies())) == sorted([*ALL, "c"])


@pytest.mark.thorough
def test_two_queries_of_one_group_the_older_ends(
    spark: SparkSession, options: dict[str, str], group: Lake, tmp_path: Path
) -> None:
    sink = Captured(group)

    def take_over(number: int) -> None:
        sink.then = lambda _: None
        run(spark, options, Captured(group), tmp_path / "newer")

    sink.then = take_over
    query = start(spark, options, sink, tmp_path / "older", maxMessagesPerTrigger="6")
    text = failure(query)
    assert "Fenced" in text
    assert "Only one query at a time reads a group" in text


@pytest.mark.thorough
def test_an_older_checkpoint_is_refused(
    spark: SparkSession, options: dict[str, str], group: Lake, tmp_path: Path
) -> None:
    """One batch back may be repeated; two are settled."""
    checkpoint, older = tmp_path / "checkpoint", tmp_path / "older"
    run(spark, options, Captured(group), checkpoint)
    shutil.copytree(checkpoint, older)
    for _ in range(2):
        group.send(b"c")
        run(spark, options, Captured(group), checkpoint)
    text = failure(start(spark, options, Captured(group), older))
    assert "StaleCheckpoint" in text
    assert "Restore the newest checkpoint" in text


@pytest.mark.thorough
def test_stateful_queries_and_retries_see_each_message_once(
    spark: SparkSession, options: dict[str, str], group: Lake, tmp_path: Path
) -> None:
    stream = spark.readStream.format("postbus").options(**options, maxMessagesPerTrigger="4")
    counted = stream.load().groupBy("partition").count()
    query = (
        counted.writeStream.format("memory")
        .queryName("counted")
        .outputMode("complete")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(END_S)
    found = spark.sql("select * from counted").collect()
    assert [row["count"] for row in found] == [15]


# --- keys -----------------------------------------------------------------------------------------


def test_neither_key_nor_token_is_shown(
    spark: SparkSession,
    options: dict[str, str],
    group: Lake,
    logs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    frame = spark.read.format("postbus").options(**options).load()
    frame.explain(mode="extended")
    assert frame.count() == 15
    checkpoint = tmp_path / "checkpoint"
    query = run(spark, options, Captured(group), checkpoint)
    query.explain(extended=True)
    shown = [capsys.readouterr().out, str(query.lastProgress), str(query.status)]
    for folder in (checkpoint, logs):
        files: list[Any] = [each for each in folder.rglob("*") if each.is_file()]
        assert files
        shown += [each.read_bytes().decode(errors="replace") for each in files]
    for each in shown:
        assert not [key for key in KEYS if key in each]
        assert "SharedAccessSignature" not in each
        assert "&sig=" not in each


def test_the_program_of_the_guide_works(
    spark: SparkSession, bus: BusThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = Lake(bus, bus.queue("queue.1"), tmp_path)
    lake.create()
    lake.send(b"from the guide", subject="news")
    program = program_of_guide("builder.master")
    program = program.replace("/run/secrets/postbus/connection-string", lake.connection_file())
    program = program.replace("/checkpoints/lake", str(tmp_path / "checkpoint"))
    exec(compile(program, "spark.md", "exec"), {})
    shown = capsys.readouterr().out
    assert re.search(r"news *\| +1\|", shown)
    assert "from the guide" in shown


def test_a_drain_rejects_what_the_guide_rejects(
    spark: SparkSession, bus: BusThread, tmp_path: Path
) -> None:
    lake = Lake(bus, bus.queue(), tmp_path)
    lake.send(b"good", b"better", subject="news")
    lake.send(b"bad")
    lake.create(kind="drain")
    program = program_of_guide("def each_batch")
    names: dict[str, Any] = {"options": lake.options()}
    program = program.replace("/lake/orders", str(tmp_path / "table"))
    exec(compile(program, "spark.md", "exec"), names)
    for _ in range(2):
        stream = spark.readStream.format("postbus").options(**lake.options()).load()
        query = (
            stream.writeStream.foreachBatch(names["each_batch"])
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    table = spark.read.parquet(str(tmp_path / "table"))
    assert sorted(bytes(row.body) for row in table.collect()) == [b"better", b"good"]
    assert bus.counts(lake.entity).dead_letter == 1


# --- dead letters -------------------------------------------------------------------------------


def test_dead_letters_are_grouped_and_chosen_as_the_guide_does(
    spark: SparkSession, lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake.send(*(b"apple %d" % number for number in range(3)), b"pear", b"plum")
    texts = {b"pear": ("NoPrice", "no price at 10:15"), b"plum": ("", "")}
    with lake.bus.client() as client, client.get_queue_receiver(lake.entity) as receiver:
        for message in receiver.receive_messages(5, max_wait_time=5):
            body = b"".join(message.body)
            reason, description = texts.get(body, ("NoPrice", f"no price for {body.decode()}"))
            receiver.dead_letter_message(message, reason, description)
    file = lake.connection_file()
    given = {"entity": lake.entity, "subQueue": "deadLetter", "connectionStringFile": file}
    causes = {each["description"]: each for each in causes_of(spark, given)}
    assert {text: each["letters"] for text, each in causes.items()} == {
        "no price for apple *": 3, "no price at *": 1, "": 1,
    }  # fmt: skip
    found = causes["no price for apple *"]
    assert (found["reason"], found["example_description"]) == ("NoPrice", "no price for apple 0")
    program = program_of_guide("dead_letter_causes")
    for old, new in {
        '"orders"': f'"{lake.entity}"',
        "/run/secrets/postbus/connection-string": file,
        "/tmp/chosen.txt": str(tmp_path / "chosen.txt"),
    }.items():
        program = program.replace(old, new)
    exec(compile(program, "spark.md", "exec"), {"spark": spark})
    assert "no price for apple *" in capsys.readouterr().out
    numbers = (tmp_path / "chosen.txt").read_text().split()
    assert len(numbers) == len(set(numbers)) == 3
    assert numbers[0] == str(found["example_number"])


# --- writing --------------------------------------------------------------------------------------


def writing(lake: Lake, name: str) -> dict[str, str]:
    return {
        "entity": lake.entity,
        "writer": name,
        "connectionStringFile": lake.connection_file("sender"),
    }


def test_a_run_writes_its_rows_once(spark: SparkSession, bus: BusThread, tmp_path: Path) -> None:
    lake = Lake(bus, bus.queue(), tmp_path)
    program = program_of_guide("def write_orders")
    names: dict[str, Any] = {}
    exec(compile(program, "spark.md", "exec"), names)
    for _ in range(2):
        names["write_orders"](spark, writing(lake, "orders-1"))
    lake.create()
    found = spark.read.format("postbus").options(**lake.options()).load()
    assert sorted((row.message_id, bytes(row.body)) for row in found.collect()) == [
        ("1", b"first"),
        ("2", b"second"),
    ]
    names["write_orders"](spark, writing(lake, "orders-2"))
    assert bus.counts(lake.entity).active == 4


def test_a_stream_writes_each_batch_once_though_it_is_repeated(
    spark: SparkSession, bus: BusThread, tmp_path: Path
) -> None:
    """Spark repeats a batch whose commit is missing from its log, as after a crash."""
    source, target = Lake(bus, bus.queue(), tmp_path), Lake(bus, bus.queue(), tmp_path)
    source.create(kind="drain")
    source.send(*(b"%d" % number for number in range(40)))
    checkpoint = tmp_path / "checkpoint"
    for _ in range(2):
        rows = spark.readStream.format("postbus").options(**source.options()).load()
        query = (
            rows.select("message_id", "body", "application_properties")
            .writeStream.format("postbus")
            .options(**writing(target, "copy"))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(END_S)
        (checkpoint / "commits" / "0").unlink()
        (checkpoint / "commits" / ".0.crc").unlink()
    assert bus.counts(target.entity).active == 40


def test_a_program_publishes_a_batch_once_and_nothing_of_one_that_failed(
    spark: SparkSession, bus: BusThread, tmp_path: Path
) -> None:
    lake = Lake(bus, bus.queue(), tmp_path)
    bad = spark.range(100, numPartitions=2).selectExpr("repeat('m', 2 * id) as message_id")
    with pytest.raises(PySparkException, match=r"message_id of row .* at most 128"):
        bad.write.format("postbus").options(**writing(lake, "load")).mode("append").save()
    good = spark.range(100, numPartitions=2).selectExpr("cast(id as string) as body")
    for _ in range(2):
        assert publish_messages(good, batch=5, **writing(lake, "load")) == 100
    assert bus.counts(lake.entity).active == 100


# --- pipelines ------------------------------------------------------------------------------------


class TestPipelines(PipelineTests):
    """Here for the session of this file."""


class TestReplays(ReplayTests):
    """Here for the session of this file."""


class TestStreams(StreamTests):
    """Here for the session of this file."""


class TestRestores(RestoreTests):
    """Here for the session of this file."""


class TestNotebooks(NotebookTests):
    """Here for the session of this file."""
