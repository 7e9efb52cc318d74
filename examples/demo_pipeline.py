"""Run a pipeline that is killed, capture a queue, repair dead letters, replay, and check it all.

`make demo-pipeline` runs it; Spark needs Java. It starts `postbus dev` on `examples/` in a
temporary folder, sends orders with the official Azure SDK, and runs `examples/pipeline`. The exit
code is 0 only if every message had its effect once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import yaml
from azure.core.exceptions import AzureError
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSubQueue
from demo import EXAMPLES, DemoError, expect, free_port, passed, running_bus
from pyspark.sql import DataFrame, SparkSession, functions

from postbus_spark import dead_letter_causes

GOOD, WITHOUT_AMOUNT, MALFORMED = 440, 40, 20
BATCH = 50
ORDERS, REPAIR, REPLAYED = "orders", "queue.1", "billing/invoices"
WAIT_S = 180.0


class Bus:
    """A bus as its users see it: a connection string, and the command line in its folder."""

    def __init__(self, folder: Path, connection_string: str) -> None:
        self.folder = folder
        self.client = ServiceBusClient.from_connection_string(connection_string)
        self.connection_file = folder / "connection-string"
        self.connection_file.write_text(connection_string)

    def run(self, *command: str) -> str:
        """Run `postbus` with a command; return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "postbus", *command],
            cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        expect(f"exit code of postbus {' '.join(command)}: {done.stderr}", done.returncode, 0)
        return done.stdout

    def pipeline(self, file: Path) -> subprocess.Popen[bytes]:
        """Start `postbus-pipeline run` with a process group of its own, which has the JVM, too."""
        program = [sys.executable, "-m", "postbus_spark.jobs.main", "run", str(file)]
        with (self.folder / "pipeline.log").open("ab") as log:
            return subprocess.Popen(
                [*program, "--connection-string-file", str(self.connection_file)],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def bodies(self, entity: str, sub_queue: ServiceBusSubQueue | None = None) -> list[str]:
        """Return the bodies that a queue has, and take none."""
        found: list[str] = []
        number = 1
        with self.client.get_queue_receiver(entity, sub_queue=sub_queue) as receiver:
            while page := receiver.peek_messages(250, sequence_number=number):
                found += [str(message) for message in page]
                number = (page[-1].sequence_number or 0) + 1
        return found


def documents(folder: Path) -> tuple[Path, Path]:
    """Return the pipeline of the examples with small batches, and one that captures a queue."""
    text = (EXAMPLES / "pipeline" / "price-orders.yaml").read_text(encoding="utf-8")
    pricing = yaml.safe_load(text.replace("/tmp/lake", str(folder / "lake")))
    pricing["spec"]["limits"] = {"maxMessagesPerTrigger": BATCH}
    capture = {
        **pricing,
        "metadata": {"name": "capture"},
        "spec": {
            "sources": [{"name": "messages", "queue": REPAIR, "mode": "tap"}],
            "sinks": [
                {
                    "from": "messages",
                    "table": {"format": "parquet", "path": str(folder / "lake" / "captured")},
                }
            ],
            "trigger": {"once": True},
            "checkpoint": {"path": str(folder / "lake" / "checkpoints" / "capture")},
        },
    }
    files = (folder / "price-orders.yaml", folder / "capture.yaml")
    for file, document in zip(files, (pricing, capture), strict=True):
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
    return files


# --- steps --------------------------------------------------------------------------------------


def send_orders(bus: Bus) -> None:
    bodies = [f'{{"sku": "good-{number}", "amount": 2.5}}' for number in range(GOOD)]
    bodies += [f'{{"sku": "free-{number}"}}' for number in range(WITHOUT_AMOUNT)]
    bodies += [f"no JSON {number}" for number in range(MALFORMED)]
    bus.run("groups", "create", ORDERS, "price-orders", "--drain")
    with bus.client.get_queue_sender(ORDERS) as sender:
        sender.send_messages([ServiceBusMessage(body) for body in bodies])
    passed(f"sent {len(bodies)} orders with the SDK")


def price_orders(bus: Bus, file: Path) -> None:
    """Run the pipeline, kill it in the middle, and run it to its end."""
    table = bus.folder / "lake" / "priced-orders"
    commits = table / "_postbus" / "commits"
    process = bus.pipeline(file)
    deadline = time.monotonic() + WAIT_S
    while len(list(commits.glob("*.json"))) < 3:
        expect("exit code of the pipeline so far", process.poll(), None)
        expect("the pipeline is in time", time.monotonic() < deadline, True)
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = ds.dataset(table, partitioning="hive").count_rows()
    expect("the pipeline was killed in the middle", 0 < before < GOOD, True)
    passed(f"killed driver and JVM after {before} rows")
    expect("exit code of the pipeline", bus.pipeline(file).wait(WAIT_S), 0)
    rows = ds.dataset(table, partitioning="hive").to_table(columns=["sku", "price"]).to_pylist()
    expect("rows", Counter(row["sku"] for row in rows), Counter(f"good-{n}" for n in range(GOOD)))
    expect("prices", {row["price"] for row in rows}, {3.0})
    letters = bus.bodies(ORDERS, ServiceBusSubQueue.DEAD_LETTER)
    expect("dead letters", (len(letters), len(set(letters))), (WITHOUT_AMOUNT + MALFORMED,) * 2)
    expect("orders that are left", bus.bodies(ORDERS), [])
    passed(f"went on: {len(rows)} rows and {len(letters)} dead letters, each once")


def repair_letters(bus: Bus, spark: SparkSession) -> None:
    """Group dead letters by cause, choose some with a query, and resend them."""
    letters = messages(bus, spark, ORDERS, subQueue="deadLetter").cache()
    causes = {row["reason"]: row["letters"] for row in dead_letter_causes(letters).collect()}
    expect("causes", causes, {"NoAmount": WITHOUT_AMOUNT, "MalformedBody": MALFORMED})
    passed(f"grouped dead letters by cause: {causes}")
    chosen = letters.where("dead_letter_reason = 'NoAmount' and cast(body as string) like '%free%'")
    numbers = [str(row["sequence_number"]) for row in chosen.select("sequence_number").collect()]
    file = bus.folder / "numbers.txt"
    file.write_text("\n".join(numbers))
    bus.run("groups", "create", REPAIR, "capture")
    command = ("dlq", "resend", ORDERS, "--numbers-file", str(file), "--to", REPAIR, "--yes")
    bus.run(*command)
    bus.run(*command)
    expect("resent", len(set(bus.bodies(REPAIR))), WITHOUT_AMOUNT)
    expect("resent once", len(bus.bodies(REPAIR)), WITHOUT_AMOUNT)
    left = bus.bodies(ORDERS, ServiceBusSubQueue.DEAD_LETTER)
    expect("letters that are left", sorted(left), sorted(f"no JSON {n}" for n in range(MALFORMED)))
    passed(f"resent the {len(numbers)} that a query chose, twice asked and once done")


def capture_and_replay(bus: Bus, spark: SparkSession, file: Path) -> None:
    """Capture a queue beside its receivers, and send the last hour of the table again."""
    expect("exit code of the capture", bus.pipeline(file).wait(WAIT_S), 0)
    captured = spark.read.parquet(str(bus.folder / "lake" / "captured"))
    expect("captured", captured.count(), WITHOUT_AMOUNT)
    expect("still to be received", len(bus.bodies(REPAIR)), WITHOUT_AMOUNT)
    passed("captured a queue into a table beside its receivers")
    hour = captured.where("enqueued_time > current_timestamp() - interval 1 hour")
    again = hour.select("body", functions.lit("replayed").alias("subject"))
    for _ in range(2):
        again.write.format("postbus").mode("append").options(
            entity=REPLAYED, writer="replay", connectionStringFile=str(bus.connection_file)
        ).save()
    bodies = Counter(bus.bodies(REPLAYED))
    expect("replayed", bodies, Counter(bus.bodies(REPAIR)))
    passed(f"replayed an hour of it: {bodies.total()} messages, twice asked and once done")


def messages(bus: Bus, spark: SparkSession, entity: str, **options: str) -> DataFrame:
    """Return what a queue has now; reading changes nothing."""
    found = spark.read.format("postbus").options(
        entity=entity, mode="peek", connectionStringFile=str(bus.connection_file), **options
    )
    return found.load()


def started_spark() -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local[2]").appName("demo")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def main() -> int:
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        print(
            "the demo of pipelines needs Java 17 or 21: install it, see README.md", file=sys.stderr
        )
        return 1
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    folder = Path(tempfile.mkdtemp(prefix="postbus-demo-"))
    try:
        print(f"starting a bus from {EXAMPLES.name}/ with its own Postgres …", flush=True)
        with running_bus(folder / ".postbus", free_port()) as connection_string:
            bus = Bus(folder, connection_string)
            pricing, capture = documents(folder)
            send_orders(bus)
            print("running examples/pipeline/price-orders.yaml …", flush=True)
            price_orders(bus, pricing)
            print("starting Spark for queries …", flush=True)
            spark = started_spark()
            repair_letters(bus, spark)
            capture_and_replay(bus, spark, capture)
            spark.stop()
            print(bus.run("get", "queues"))
    except (DemoError, AzureError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        if (log := folder / "pipeline.log").exists():
            print(log.read_text(errors="replace")[-3_000:], file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("demo passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
