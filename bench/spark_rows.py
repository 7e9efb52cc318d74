"""Measurements of pipelines: one round of each row, all numbers of which belong together.

Counts are small enough for two cores. A number of Spark is without the start of its session: each
row runs once before the first round counts.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import yaml
from azure.servicebus import ServiceBusClient, ServiceBusMessage

import procfs
from measuring import LoadClient, costing, reason_of
from postbus.contract.bulk import ROW_COLUMNS
from postbus_spark import dead_letter_causes
from postbus_spark.batches import row_ranges
from postbus_spark.client import GroupClient
from postbus_spark.decode import Decoder, Place
from postbus_spark.jobs.documents import read_pipeline
from postbus_spark.jobs.readers import readers_of
from postbus_spark.jobs.runner import Runner
from postbus_spark.jobs.settling import settle_committed
from postbus_spark.options import read_options
from postbus_spark.rows import bulk_path, read_rows
from postbus_spark.schema import arrow_schema, ddl, default_columns
from postbus_spark.tokens import load_credentials
from postbus_spark.transport import Bus, call
from server import BenchError
from spark_bus import PipelineBus

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Numbers: TypeAlias = dict[str, float]

TASKS: Final = 2
READ, DRAINED, LOADED, PLAIN, TAPPED, LETTERS, PACED = (
    "read", "drained", "loaded", "plain", "tapped", "letters", "paced",
)  # fmt: skip
QUEUES: Final = (READ, DRAINED, LOADED, PLAIN, TAPPED, LETTERS, PACED)
TOPIC: Final = "priced"
SUBSCRIPTION: Final = f"{TOPIC}/Subscriptions/all"
PROPERTIES: Final = ("sku=apple", "store=berlin-4", "amount=17", "tenant=blue")
STORED: Final = "row_key, enqueued_ms, envelope, application_properties, body"
SDK_BATCH: Final = 100
RESENT: Final = 20_000
LATENCY_RATE, LATENCY_S = 500, 30
WAIT_S: Final = 300.0


@dataclass(slots=True)
class Scene:
    """What all rows use. `count`: messages of a row; `group`: reader group of the queue READ."""

    bus: PipelineBus
    client: LoadClient
    spark: SparkSession
    folder: Path
    count: int
    group: str = ""

    def options(self, entity: str, **more: str) -> dict[str, str]:
        return {"entity": entity, "connectionStringFile": str(self.bus.connection_file), **more}

    def fill(self, queue: str, count: int, *options: str | float) -> float:
        """Put messages into a queue; return messages per second."""
        mode = ("--mode", "send", "--window", 1_000, "--count", count, "--limit-s", 3_600)
        return float(self._loaded(queue, *mode, *_with_properties(), *options)["send_rate"])

    def both(self, queue: str, count: int, *options: str | float) -> dict[str, Any]:
        """Send and receive beside each other; return what the load client says."""
        return self._loaded(queue, "--mode", "both", "--count", count, *options)

    def _loaded(self, queue: str, *options: str | float) -> dict[str, Any]:
        result = self.client.run(self.bus, queue, *options)
        if not result["is_complete"]:
            raise BenchError(f"{queue}: {reason_of(result)}")
        return result

    def create_group(self, entity: str, kind: str) -> str:
        """Create a group that begins with the first message; return its name, used only once."""
        name = f"{kind}-{time.time_ns()}"
        self._ask("PUT", entity, name, {"kind": kind, "start": "earliest"})
        return name

    def drop_group(self, entity: str, name: str) -> None:
        """Drop a group with all that it kept."""
        self._ask("DELETE", entity, name)

    def _ask(self, method: str, entity: str, group: str, *body: Any) -> None:
        credentials = load_credentials(str(self.bus.connection_file))
        token = credentials.token(f"{entity}/$bulk/groups/{group}", time.time())
        bus = Bus(credentials.base_url, None)
        call(bus, method, bulk_path(entity, "groups", group), token, *body)

    def new_folder(self, name: str) -> Path:
        """Return an empty folder."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def _with_properties() -> list[str]:
    return [word for each in PROPERTIES for word in ("--property", each)] + ["--message-ids"]


@contextmanager
def _timing(numbers: Numbers, name: str, count: int) -> Iterator[None]:
    """Record messages per second of a block."""
    start = time.perf_counter()
    yield
    numbers[name] = count / (time.perf_counter() - start)


def _consume(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


# --- reads --------------------------------------------------------------------------------------


def reads(scene: Scene) -> Numbers:
    """Read one queue as stored columns, as some columns, and decoded; each by JDBC, too."""
    numbers: Numbers = {}
    table = scene.bus.message_table()
    peek = scene.options(READ, mode="peek", minPartitions=str(TASKS))
    with _costing_reads(scene, numbers, "stored"):
        _consume(_stored(scene))
    with _costing_reads(scene, numbers, "stored_jdbc"):
        _consume(_jdbc(scene, table, STORED))
    few = "position bigint, enqueued_time timestamp, body binary"
    with _timing(numbers, "few", scene.count):
        _consume(scene.spark.read.format("postbus").options(**peek).schema(few).load())
    with _timing(numbers, "few_jdbc", scene.count):
        _consume(_jdbc(scene, table, "row_key, enqueued_ms, body"))
    with _costing_reads(scene, numbers, "decoded"):
        _consume(scene.spark.read.format("postbus").options(**peek).load())
    with _costing_reads(scene, numbers, "decoded_jdbc"):
        _consume(_jdbc(scene, table, STORED).mapInArrow(_decode, _columns()))
    return numbers


@contextmanager
def _costing_reads(scene: Scene, numbers: Numbers, name: str) -> Iterator[None]:
    """Record messages per second of a read, and µs of a row in each kind of process."""
    before = _spark_cpu_s()
    with costing(scene.bus) as cost, _timing(numbers, name, scene.count):
        yield
    after = _spark_cpu_s()
    used = {"broker": cost.broker_s, "postgres": cost.postgres_s}
    used |= {kind: after[kind] - before[kind] for kind in after}
    for kind, cpu_s in used.items():
        numbers[f"{name}_{kind}_us"] = cpu_s * 1e6 / scene.count


def _spark_cpu_s() -> dict[str, float]:
    """Return CPU of the JVM, and of the workers that it has started."""
    [java] = [each for each in procfs.tree([os.getpid()]).values() if each.name == "java"]
    workers = [each for pid, each in procfs.tree([java.pid]).items() if pid != java.pid]
    return {"jvm": java.cpu_s, "workers": sum(each.cpu_s for each in workers)}


def _columns() -> str:
    return ddl(default_columns("map", is_raw_included=False))


def _stored(scene: Scene) -> DataFrame:
    """Return the stored columns as executors get them from the bus, undecoded."""
    tasks = row_ranges(read_options(scene.options(READ, readerGroup=scene.group)), TASKS)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for rows in read_rows(tasks[number], ROW_COLUMNS):
                    yield pa.RecordBatch.from_arrays(rows.columns, names=list(ROW_COLUMNS))

    schema = (
        "position bigint, sequence_number bigint, enqueued_ms bigint, envelope binary,"
        " application_properties binary, body binary"
    )
    numbers = scene.spark.range(0, len(tasks), 1, len(tasks)).selectExpr("cast(id as int) as id")
    return numbers.mapInArrow(read, schema)


def _decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode rows of JDBC as an executor of Postbus does it."""
    schema = arrow_schema([each.name for each in default_columns("map", is_raw_included=False)])
    decoder = Decoder(schema, Place(READ, "main", 0))
    for batch in batches:
        columns = {name: batch.column(name) for name in batch.schema.names}
        key = columns.pop("row_key")
        named = {"position": key, "sequence_number": key, **columns}
        yield decoder.decode(pa.RecordBatch.from_arrays(list(named.values()), names=list(named)))


def _jdbc(scene: Scene, table: str, columns: str) -> DataFrame:
    bounds = scene.bus.bounds(table)
    return (
        scene.spark.read.format("jdbc")
        .option("url", scene.bus.jdbc_url)
        .option("driver", "org.postgresql.Driver")
        .option("dbtable", f"(select {columns} from {table}) as rows")
        .option("partitionColumn", "row_key")
        .option("lowerBound", str(bounds[0]))
        .option("upperBound", str(bounds[1]))
        .option("numPartitions", str(TASKS))
        .option("fetchsize", "5000")
        .load()
    )


# --- streams and tables -------------------------------------------------------------------------


def streams(scene: Scene) -> Numbers:
    """Read one queue with a tap and with a drain, to nothing and to a table."""
    numbers: Numbers = {}
    for kind in ("tap", "drain"):
        group = _refill(scene, kind)
        with _timing(numbers, kind, scene.count):
            _run_stream(scene, group)
        scene.drop_group(DRAINED, group)
    _empty(scene)
    group = _refill(scene, "tap")
    sinks = [{"from": "messages", "table": _table(scene, "captured")}]
    with _timing(numbers, "capture", scene.count):
        lake = _run_pipeline(scene, "tap", group, sinks=sinks)
    scene.drop_group(DRAINED, group)
    _empty(scene)
    rows = scene.spark.read.parquet(f"file:{lake / 'captured'}").drop("date", "hour")
    target = scene.new_folder("rewritten")
    with _timing(numbers, "rewrite", scene.count):
        rows.write.option("compression", "zstd").parquet(f"file:{target}")
    return numbers


def _refill(scene: Scene, kind: str) -> str:
    """Let a new group have `count` messages; return its name."""
    scene.fill(DRAINED, scene.count)
    return scene.create_group(DRAINED, kind)


def _empty(scene: Scene, entity: str = DRAINED) -> int:
    """Take out what is left; return the number of its messages."""
    options = ("--mode", "receive", "--count", 50_000_000, "--settle-range", 50)
    result = scene.client.run(scene.bus, entity, *options, "--quiet-s", 0.7, "--limit-s", 3_600)
    return int(result["completed"])


def _run_stream(scene: Scene, group: str) -> None:
    """Run a query over what is there, and settle its last batch."""
    options = scene.options(DRAINED, readerGroup=group)
    folder = scene.new_folder("stream")
    query = (
        scene.spark.readStream.format("postbus")
        .options(**options, minPartitions=str(TASKS))
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    settle_committed(GroupClient(read_options(options)), folder)


def _table(scene: Scene, name: str) -> dict[str, Any]:
    return {"format": "parquet", "path": str(scene.folder / "lake" / name)}


def _run_pipeline(scene: Scene, mode: str, group: str, **spec: Any) -> Path:
    """Run a pipeline over the queue to its end; return the folder of its tables."""
    lake = scene.new_folder("lake")
    runner = _runner(scene, mode, group, lake, trigger={"once": True}, **spec)
    runner.run(scene.spark)
    return lake


def _runner(scene: Scene, mode: str, group: str, lake: Path, **spec: Any) -> Runner:
    document = {
        "apiVersion": "postbus.dev/v1alpha1",
        "kind": "Pipeline",
        "metadata": {"name": group},
        "spec": {
            "sources": [{"name": "messages", "queue": DRAINED, "mode": mode}],
            "checkpoint": {"path": str(lake / "checkpoint")},
            **spec,
        },
    }
    file = scene.folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    read = read_pipeline(file)
    return Runner(read, readers_of(read, str(scene.bus.connection_file)))


# --- writes -------------------------------------------------------------------------------------


def loads(scene: Scene) -> Numbers:
    """Write one data frame, and send as many messages with the SDK and the load client."""
    numbers: Numbers = {}
    rows = scene.spark.range(0, scene.count, 1, TASKS).selectExpr(
        "cast(id as string) as message_id",
        "repeat(substr(sha2(cast(id as string), 512), 1, 64), 16) as body",
        "map('sku', 'apple', 'store', 'berlin-4', 'amount', '17', 'tenant', 'blue')"
        " as application_properties",
    )
    name = f"load-{time.time_ns()}"
    with _timing(numbers, "load", scene.count):
        rows.write.format("postbus").options(**scene.options(LOADED, writer=name)).mode(
            "append"
        ).save()
    few = scene.count // 10
    with _timing(numbers, "load_sdk", few):
        _send(scene.bus.connection_string, LOADED, few)
    numbers["load_client"] = scene.fill(LOADED, scene.count)
    received = scene.count // 10
    with _timing(numbers, "receive_sdk", received * TASKS):
        _in_processes(_receive, scene.bus.connection_string, LOADED, received)
    _empty(scene, LOADED)
    return numbers


def _in_processes(work: Callable[..., None], *arguments: Any) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=arguments) for _ in range(TASKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise BenchError(f"a client of the SDK ended with {process.exitcode}")


def _send(connection_string: str, queue: str, count: int) -> None:
    properties: Any = dict(each.split("=") for each in PROPERTIES)
    with (
        ServiceBusClient.from_connection_string(connection_string) as client,
        client.get_queue_sender(queue) as sender,
    ):
        for first in range(0, count, SDK_BATCH):
            sender.send_messages(
                [
                    ServiceBusMessage(b"x" * 1_024, application_properties=properties)
                    for _ in range(first, min(first + SDK_BATCH, count))
                ]
            )


def _receive(connection_string: str, queue: str, count: int) -> None:
    received = 0
    with (
        ServiceBusClient.from_connection_string(connection_string) as client,
        client.get_queue_receiver(queue, prefetch_count=SDK_BATCH) as receiver,
    ):
        while received < count:
            for message in receiver.receive_messages(SDK_BATCH, max_wait_time=5):
                receiver.complete_message(message)
                received += 1


# --- pipelines ----------------------------------------------------------------------------------

SQL: Final = {
    "priced": "select body, message_id, application_properties, subject from messages"
    " where application_properties['sku'] = 'apple'"
}
TO_TOPIC: Final = [{"from": "priced", "topic": TOPIC}]


def pipelines(scene: Scene) -> Numbers:
    """Move messages from a queue through SQL to a topic; plan and settle batches."""
    numbers: Numbers = {}
    group = _refill(scene, "drain")
    with _timing(numbers, "through", scene.count):
        _run_pipeline(scene, "drain", group, transform={"sql": SQL}, sinks=TO_TOPIC)
    arrived = _empty(scene, SUBSCRIPTION)
    if arrived != scene.count:
        raise BenchError(f"{arrived} messages arrived instead of {scene.count}")
    scene.drop_group(DRAINED, group)
    numbers["plan_settle_ms"] = _plan_and_settle(scene)
    return numbers


def _plan_and_settle(scene: Scene, rounds: int = 20) -> float:
    """Return the median of milliseconds that both requests of a batch take, of 500 messages."""
    scene.fill(DRAINED, rounds * 500)
    group = scene.create_group(DRAINED, "drain")
    client = GroupClient(read_options(scene.options(DRAINED, readerGroup=group)))
    epoch = client.claim().epoch
    found = client.ranges()
    assert found.group is not None
    [partition] = found.partitions
    first, taken = found.group.plan.ranges[partition.partition][1], []
    for _ in range(rounds):
        end = min(first + 500, partition.next_position)
        start = time.perf_counter()
        plan = client.plan(epoch, {partition.partition: (first, end)}).plan
        client.settle(epoch, plan.number)
        taken.append((time.perf_counter() - start) * 1e3)
        first = end
    scene.drop_group(DRAINED, group)
    _empty(scene)
    return statistics.median(taken)


# --- the bus beside it --------------------------------------------------------------------------


def beside(scene: Scene) -> Numbers:
    """Load a queue while another process reads rows, and a queue that has a tap."""
    numbers: Numbers = {}
    paced = ("--rate", 10_000, "--window", 1_000)
    count = max(20_000, scene.count // 2)
    numbers["p99_alone"] = scene.both(PACED, count, *paced)["end_to_end_p99_us"]
    with _reader(scene):
        numbers["p99_beside"] = scene.both(PACED, count, *paced)["end_to_end_p99_us"]
    group = scene.create_group(TAPPED, "tap")
    for queue in (PLAIN, TAPPED):
        result = scene.both(queue, scene.count, "--window", 100)
        numbers[f"both_{queue}"] = result["completed"] / result["elapsed_s"]
    scene.drop_group(TAPPED, group)
    return numbers


@contextmanager
def _reader(scene: Scene) -> Iterator[None]:
    """Read the rows of another queue again and again, in a process that throws them away."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_read_on, args=(scene.options(READ, readerGroup=scene.group),))
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _read_on(options: dict[str, str]) -> None:
    while True:
        for task in row_ranges(read_options(options), TASKS):
            for _ in read_rows(task, ROW_COLUMNS):
                pass


# --- dead letters -------------------------------------------------------------------------------


def letters(scene: Scene) -> Numbers:
    """Group dead letters by their reason, and resend some of them."""
    numbers: Numbers = {}
    scene.fill(LETTERS, scene.count)
    options = ("--mode", "receive", "--count", scene.count, "--outcome", "reject")
    scene.client.run(scene.bus, LETTERS, *options, "--quiet-s", 5, "--limit-s", 3_600)
    peek = scene.options(LETTERS, mode="peek", subQueue="deadLetter", minPartitions=str(TASKS))
    found = scene.spark.read.format("postbus").options(**peek).load()
    with _timing(numbers, "grouped", scene.count):
        total = sum(row["letters"] for row in dead_letter_causes(found).collect())
    if total != scene.count:
        raise BenchError(f"{total} dead letters instead of {scene.count}")
    resent = min(RESENT, scene.count)
    chosen = found.select("sequence_number").limit(resent).collect()
    file = scene.folder / "numbers.txt"
    file.write_text("\n".join(str(row["sequence_number"]) for row in chosen), encoding="utf-8")
    with _timing(numbers, "resent", resent):
        scene.bus.command_line("dlq", "resend", LETTERS, "--numbers-file", str(file), "--yes")
    for sub_queue in ((), ("--dead-letter",)):
        scene.bus.command_line("purge", LETTERS, *sub_queue, "--yes")
    return numbers


# --- latency and memory -------------------------------------------------------------------------


def latency(scene: Scene) -> Numbers:
    """Send 500 messages a second through a pipeline with batches of a second to a subscription."""
    group = scene.create_group(DRAINED, "drain")
    trigger = {"continuous": "PT1S"}
    lake = scene.new_folder("lake")
    spec = {"trigger": trigger, "transform": {"sql": SQL}, "sinks": TO_TOPIC}
    runner = _runner(scene, "drain", group, lake, **spec)
    limits = ("--quiet-s", 60, "--limit-s", WAIT_S)
    options = ("--rate", LATENCY_RATE, "--receive-address", SUBSCRIPTION, *limits)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, scene.spark)
        try:
            scene.both(DRAINED, LATENCY_RATE * 5, *options, *_with_properties())
            count = LATENCY_RATE * LATENCY_S
            result = scene.both(DRAINED, count, *options, *_with_properties())
        finally:
            runner.stop()
            running.result()
    scene.drop_group(DRAINED, group)
    return {"latency_p95_s": result["end_to_end_p95_us"] / 1e6, "memory_gib": _memory_gib(scene)}


def _memory_gib(scene: Scene) -> float:
    """Return the most memory so far of driver, JVM and Python's workers."""
    bus = {process.pid for part in scene.bus.processes() for process in part}
    own = procfs.tree([os.getpid()]).keys() - bus
    return sum(procfs.memory_kib(pid, "VmHWM") for pid in own) / (1 << 20)


ROWS: Final[dict[str, Callable[[Scene], Numbers]]] = {
    "reads": reads,
    "streams": streams,
    "loads": loads,
    "pipelines": pipelines,
    "latency": latency,
    "beside": beside,
    "letters": letters,
}
