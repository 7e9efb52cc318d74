"""Kill -9 of a pipeline, what Spark runs for it, broker and Postgres, and a check of the record.

Orders are sent with the official SDK while a pipeline prices them. Some kills come at any moment,
others at an exact point of a batch (`pipeline_calls`); checkpoints are lost or replaced by older
ones, and a second driver takes the group away. After the last kill the pipeline catches up, and
each accepted order must have had each of its effects once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final

import deltalake
import pyarrow.dataset as ds
import yaml
from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import ServiceBusError

from postbus.process.embedded import EmbeddedPostgres
from postbus_spark.client import GroupClient
from postbus_spark.jobs.batches import tables_of
from postbus_spark.jobs.documents import read_pipeline
from postbus_spark.jobs.failures import ExitCode
from postbus_spark.jobs.settling import last_batch
from postbus_spark.lake.iceberg import loaded
from postbus_spark.lake.layout import OWN, CatalogTable
from postbus_spark.options import read_options
from postbus_spark.tokens import load_credentials
from postbus_spark.transport import Bus, call
from tests.faults.pipeline_calls import Call, Moment, Point, Relay, Trap, relay_to
from tests.faults.pipeline_driver import EXECUTOR, WORKER, Driver
from tests.faults.pipeline_record import Entry, Order, Record, Sent, check
from tests.faults.victims import KEY, Broker, wait_for_port

SOURCE, TARGET, GROUP = "orders", "priced", "kills"
RULE = "RootManageSharedAccessKey"
SESSIONS = 20
BACKLOG = 1_500
"""Senders wait while the pipeline is further behind."""

CATCH_S = 90.0
"""Longest wait for a point of a batch; then the kill comes at any moment and counts as missed."""

PROGRESS_S = 180.0
"""Longest time without a commit to the table while everything runs."""

EXAMPLES = """
examples, each begins with `python -m tests.faults.pipeline_kills`:
                                  48 kills of a drain that publishes, on local[2]
  --scenario capture --executors  a tap into a table, by two executors
  --scenario capture --format delta
  --kills 4                       a part of it, for CI
  --pipeline 'tests/faults/flawed_pipeline.py forgets'
                                  must find violations: its batches have no number
"""

MANIFESTS = f"""apiVersion: v1
kind: Secret
metadata: {{name: root-key}}
stringData: {{primaryKey: {KEY}}}
---
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {{name: faults}}
spec:
  sku: {{name: Premium}}
  premiumMessagingPartitions: 2
  authorizationRules: [{{name: {RULE}, rights: [Manage], secretName: root-key}}]
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {{name: {SOURCE}}}
spec: {{owner: {{name: faults}}, maxDeliveryCount: 1000}}
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {{name: {TARGET}}}
spec: {{owner: {{name: faults}}}}
"""

KEPT: Final = "message_id, session_id, partition, position, enqueued_time"
PRICED: Final = {
    "priced": f"select {KEPT}, body.amount * 2 as price from orders where body.amount > 0",
    "sent": "select message_id, session_id, to_json(struct(price)) as body from priced",
    "rejected": "select partition, position, 'NoPrice' as reason from orders"
    " where body.amount is null",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A pipeline, where its orders belong, and the points of its batches."""

    kind: str
    transform: dict[str, dict[str, str]] | None
    table_from: str
    sinks: tuple[dict[str, str], ...]
    belongs: dict[str, tuple[Order, ...]]
    points: tuple[Point, ...]


def _points(*calls: Call, more: tuple[Point, ...] = ()) -> tuple[Point, ...]:
    found = [Point(each, moment) for each in calls for moment in (Moment.BEFORE, Moment.AFTER)]
    return (*found, *more)


SCENARIOS: Final = {
    "drain": Scenario(
        kind="drain",
        transform={"sql": PRICED},
        table_from="priced",
        sinks=(
            {"from": "sent", "queue": TARGET},
            {"from": "rejected", "deadLetter": "orders"},
            {"from": "malformed", "deadLetter": "orders"},
        ),
        belongs={
            "table": (Order.GOOD,),
            "target": (Order.GOOD,),
            "dead letters": (Order.FREE, Order.MALFORMED),
        },
        points=_points(
            Call.PLAN, Call.PUBLISH, Call.REJECT, Call.SETTLE,
            more=(
                Point(Call.READ, Moment.DURING),
                Point(Call.STAGE, Moment.DURING),
                Point(Call.STAGE, Moment.AFTER),
            ),
        ),
    ),
    "capture": Scenario(
        kind="tap",
        transform=None,
        table_from="orders",
        sinks=(),
        belongs={"table": tuple(Order)},
        points=_points(Call.PLAN, Call.SETTLE, more=(Point(Call.READ, Moment.DURING),)),
    ),
}  # fmt: skip


class Victim(Enum):
    """What is killed at any moment, or done to the pipeline."""

    DRIVER = "driver"
    WORKER = "Python worker"
    EXECUTOR = "executor"
    BROKER = "broker"
    POSTGRES = "Postgres"
    TABLE = "driver after the table's commit"
    RIVAL = "a second driver"


@dataclass(slots=True)
class Run:
    """The state of a run. `commits`: of the table at the last step."""

    scenario: Scenario
    format: str
    folder: Path
    postgres: EmbeddedPostgres
    broker: Broker
    relay: Relay
    driver: Driver
    record: Record = field(default_factory=Record)
    kills: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    for_table: int = 0
    """How many orders that belong there were sent."""
    rows: dict[str, int] = field(default_factory=dict)
    is_over: bool = False
    is_loaded: bool = True
    next_start: Callable[[], None] | None = None
    """What is done to the checkpoint before the driver starts again."""
    must_refuse: bool = False
    """The next start has an older checkpoint."""

    @property
    def table(self) -> Path:
        return self.folder / "table"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def document(self) -> Path:
        return self.folder / "pipeline.yaml"

    @property
    def connection_file(self) -> Path:
        return self.folder / "connection"

    @property
    def entry(self) -> CatalogTable:
        """The table in its catalog, if it is one of Iceberg."""
        return CatalogTable(f"sqlite:///{self.folder}/catalog/lake.db", "faults.table", None)

    @property
    def log(self) -> Path:
        """The folder with a file for each commit of the table."""
        return self.table / ("_delta_log" if self.format == "delta" else f"{OWN}/commits")

    def commits(self) -> int:
        """Return how many batches the table has, and of Delta one more: it is made with none."""
        if self.format == "iceberg":
            table = loaded(self.entry)
            return 0 if table is None else table.metadata.last_sequence_number
        return sum(1 for _ in self.log.glob("*.json"))

    def in_table(self) -> int:
        """Return how many rows are committed."""
        if self.format == "iceberg":
            table = loaded(self.entry)
            snapshot = None if table is None else table.current_snapshot()
            return 0 if snapshot is None else int(snapshot.summary["total-records"])
        for file in self.log.glob("*.json"):
            if file.name not in self.rows:
                text = file.read_text()
                counts = re.findall(r'"rows": (\d+)|numRecords\\": ?(\d+)', text)
                self.rows[file.name] = sum(int(rows or records) for rows, records in counts)
        return sum(self.rows.values())

    def group_client(self) -> GroupClient:
        given = {
            "entity": SOURCE,
            "readerGroup": GROUP,
            "mode": self.scenario.kind,
            "connectionStringFile": str(self.connection_file),
        }
        return GroupClient(read_options(given))


# --- preparing ----------------------------------------------------------------------------------


def write_document(run: Run) -> None:
    scenario = run.scenario
    source: dict[str, object] = {
        "name": "orders", "queue": SOURCE, "mode": scenario.kind, "readerGroup": GROUP,
    }  # fmt: skip
    if scenario.transform is not None:
        source["body"] = {"json": "amount double"}
    table: dict[str, object] = {"format": run.format, "path": str(run.table)}
    if run.format == "iceberg":
        table |= {"name": run.entry.name, "catalog": {"uri": run.entry.uri}}
    spec = {
        "sources": [source],
        "transform": scenario.transform,
        "sinks": [{"from": scenario.table_from, "table": table}, *scenario.sinks],
        "trigger": {"continuous": "PT0.5S"},
        "limits": {"maxMessagesPerTrigger": 1_000, "maxAttempts": 1_000},
        "checkpoint": {"path": str(run.checkpoint)},
    }
    if scenario.transform is None:
        del spec["transform"]
    document = {
        "apiVersion": "postbus.dev/v1alpha1",
        "kind": "Pipeline",
        "metadata": {"name": "kills"},
        "spec": spec,
    }
    run.document.write_text(yaml.safe_dump(document))


def make_group(run: Run) -> None:
    credentials = load_credentials(str(run.connection_file))
    target = f"/{SOURCE}/$bulk/groups/{GROUP}"
    body = {"kind": run.scenario.kind, "start": "earliest"}
    call(Bus(credentials.base_url), "PUT", target, credentials.token("", time.time()), body)


# --- clients of the bus -------------------------------------------------------------------------


async def send_forever(run: Run, sender: int) -> None:
    """Send batches of one session each; one whose answer is lost is unknown."""
    numbers = itertools.count(1)
    sessions = [f"s{each}" for each in range(sender, SESSIONS, 4)]
    while run.is_loaded:
        try:
            async with client_of(run) as client, client.get_queue_sender(SOURCE) as queue:
                while run.is_loaded:
                    await send(run, queue.send_messages, random.choice(sessions), numbers)
                    while run.in_table() < run.for_table - BACKLOG:
                        await asyncio.sleep(0.5)
                    await asyncio.sleep(0.3)
        except (ServiceBusError, OSError, ValueError):
            await asyncio.sleep(0.2)


async def send(run: Run, send: Callable[..., object], session: str, numbers: Iterator[int]) -> None:
    batch, entries = [], {}
    for number in itertools.islice(numbers, random.randint(1, 40)):
        each = f"{session}-{number}"
        order = random.choices(list(Order), (20, 2, 1))[0]
        body = {
            Order.GOOD: f'{{"amount": {number}}}',
            Order.FREE: '{"note": "free"}',
            Order.MALFORMED: "no JSON",
        }[order]
        batch.append(ServiceBusMessage(body, message_id=each, session_id=session))
        entries[each] = Entry(order, Sent.UNKNOWN, session, number)
    run.record.sent |= entries
    belongs = run.scenario.belongs["table"]
    run.for_table += sum(entry.order in belongs for entry in entries.values())
    await send(batch)  # type: ignore[misc]
    for each, entry in entries.items():
        run.record.sent[each] = Entry(entry.order, Sent.ACCEPTED, session, entry.number)


async def receive_forever(run: Run) -> None:
    """Complete what a tap reads beside."""
    while run.is_loaded:
        try:
            async with client_of(run) as client, client.get_queue_receiver(SOURCE) as receiver:
                while run.is_loaded:
                    for message in await receiver.receive_messages(100, max_wait_time=1):
                        await receiver.complete_message(message)
        except (ServiceBusError, OSError, ValueError):
            await asyncio.sleep(0.2)


def client_of(run: Run) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(run.broker.connection_string, retry_total=0)


async def peeked(run: Run, entity: str, sub_queue: ServiceBusSubQueue | None = None) -> list[str]:
    """Return the ids of all messages that are left, by sequence number."""
    found: list[str] = []
    number = 1
    async with (
        client_of(run) as client,
        client.get_queue_receiver(entity, sub_queue=sub_queue) as receiver,
    ):
        while page := await receiver.peek_messages(500, sequence_number=number):
            found += [str(message.message_id) for message in page]
            number = (page[-1].sequence_number or 0) + 1
    return found


# --- the pipeline -------------------------------------------------------------------------------


async def supervise(run: Run) -> None:
    """Start the pipeline again when it ends, as a supervisor would."""
    while not run.is_over:
        process = run.driver.process
        code = await asyncio.to_thread(process.wait)
        if run.is_over or process is not run.driver.process:
            continue
        run.restarts[f"exit {code}"] += 1
        is_stopped = code in {int(ExitCode.STOPPED), int(ExitCode.CONFIGURATION)}
        if run.must_refuse:
            run.must_refuse = False
            if not is_stopped or "StaleCheckpoint" not in run.driver.ended():
                run.problems.append(f"an older checkpoint was taken (exit {code})")
            run.next_start = partial(shutil.rmtree, run.checkpoint)
        elif is_stopped:
            run.problems.append(f"the pipeline ended with {code}: {run.driver.ended()}")
            run.is_over = True
            return
        if run.next_start is not None:
            run.next_start()
            run.next_start = None
        run.driver.start()


async def progress(run: Run, commits: int = 1) -> None:
    """Wait until the table has more commits. Raises `TimeoutError`."""
    target = run.commits() + commits
    async with asyncio.timeout(PROGRESS_S):
        while run.commits() < target and not run.is_over:
            await asyncio.sleep(0.002)


def has_caught_up(client: GroupClient) -> bool:
    found = client.ranges()
    assert found.group is not None
    plan = found.group.plan
    ends = {partition: end for partition, (_, end) in plan.ranges.items()}
    return plan.is_settled and all(
        ends.get(each.partition, each.low) == each.next_position for each in found.partitions
    )


# --- kills --------------------------------------------------------------------------------------


def steps_of(scenario: Scenario, *, has_executors: bool) -> Iterator[Victim | Point]:
    """Yield kills at any moment and at points in turn."""
    victims = [each for each in Victim if has_executors or each is not Victim.EXECUTOR]
    random.shuffle(victims)
    points = [*scenario.points]
    random.shuffle(points)
    for victim, point in zip(itertools.cycle(victims), itertools.cycle(points), strict=False):
        yield point
        yield victim


def name_of(step: Victim | Point) -> str:
    return str(step) if isinstance(step, Point) else step.value


async def take(run: Run, step: Victim | Point, number: int) -> None:
    """Kill; what was killed runs again when this returns."""
    match step:
        case Point():
            await kill_at(run, step, is_broker=number % 4 == 2)
        case Victim.DRIVER:
            await asyncio.sleep(random.random())
            run.driver.kill()
        case Victim.TABLE:
            await progress(run)
            run.driver.kill()
        case Victim.WORKER | Victim.EXECUTOR:
            command = WORKER if step is Victim.WORKER else EXECUTOR
            await asyncio.sleep(random.random())
            if not run.driver.kill_below(command):
                run.missed[step.value] += 1
                return
        case Victim.BROKER:
            await asyncio.sleep(random.random())
            run.broker.kill()
            run.broker.start()
        case Victim.POSTGRES:
            await asyncio.sleep(random.random())
            os.kill(run.postgres.pid, signal.SIGKILL)
            await asyncio.to_thread(run.postgres.restart)
        case Victim.RIVAL:
            await take_over(run)
    run.kills[name_of(step)] += 1
    await wait_for_port(run.broker.port)


async def kill_at(run: Run, point: Point, *, is_broker: bool) -> None:
    """Kill driver or broker at a point of a batch."""
    kill = run.broker.kill if is_broker else run.driver.kill
    trap = run.relay.trap = Trap(point, random.randint(1, 3), kill)
    try:
        async with asyncio.timeout(CATCH_S):
            await trap.sprung.wait()
    except TimeoutError:
        run.missed[str(point)] += 1
        kill()
    finally:
        run.relay.trap = None
    if is_broker:
        run.broker.start()


async def take_over(run: Run) -> None:
    """Start a second driver: the first one must end by itself."""
    older = run.driver.process
    run.driver.start()
    try:
        async with asyncio.timeout(PROGRESS_S):
            code = await asyncio.to_thread(older.wait)
    except TimeoutError:
        run.problems.append("a driver goes on although another one has claimed its group")
        older.kill()
        return
    if code == 0:
        run.problems.append("a driver ended in order although another one has claimed its group")


def disturb_checkpoint(run: Run, number: int) -> None:
    """Lose the checkpoint before the next start of the driver, keep a copy, or bring it back."""
    older = run.folder / "older"
    match number % 6:
        case 1:
            run.next_start = partial(shutil.rmtree, run.checkpoint, ignore_errors=True)
        case 3:
            run.next_start = partial(_copy, run.checkpoint, older)
        case 5 if older.exists() and last_batch(older) is not None:

            def restore() -> None:
                shutil.rmtree(run.checkpoint, ignore_errors=True)
                older.rename(run.checkpoint)
                run.must_refuse = True

            run.next_start = restore


def _copy(folder: Path, target: Path) -> None:
    if folder.exists():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)


async def kill_under_load(run: Run, count: int, *, has_executors: bool) -> None:
    began_s = time.monotonic()
    await progress(run)
    steps = steps_of(run.scenario, has_executors=has_executors)
    for number, step in enumerate(itertools.islice(steps, count)):
        if run.is_over:
            return
        if step is not Victim.RIVAL:
            disturb_checkpoint(run, number)
        await take(run, step, number)
        took_s = time.monotonic() - began_s
        print(
            f"{took_s:4.0f} s  {number + 1}/{count} {name_of(step)}:"
            f" {len(run.record.sent)} sent, {run.commits()} commits",
            flush=True,
        )
        await progress(run, 2)
        run.next_start = None


# --- the run ------------------------------------------------------------------------------------


async def run_kills(options: argparse.Namespace, folder: Path) -> Run:
    """Drive the load, kill the requested number of times, catch up and check."""
    random.seed(options.seed)
    postgres = EmbeddedPostgres(folder / "postgres")
    await asyncio.to_thread(postgres.start)
    broker = Broker(folder, postgres.dsn, options.broker.split(), MANIFESTS)
    broker.start()
    await wait_for_port(broker.port)
    async with relay_to(broker.port) as relay:
        connection_file = folder / "connection"
        through = broker.connection_string.replace(f":{broker.port};", f":{relay.port};")
        connection_file.write_text(through)
        driver = Driver(
            folder / "pipeline.yaml", connection_file, options.pipeline.split(),
            has_executors=options.executors,
        )  # fmt: skip
        scenario = SCENARIOS[options.scenario]
        run = Run(scenario, options.format, folder, postgres, broker, relay, driver)
        write_document(run)
        await asyncio.to_thread(make_group, run)
        driver.start()
        try:
            await load(run, options)
        finally:
            run.is_over = True
            if driver.process.poll() is None:
                driver.kill()
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(postgres.stop)
    return run


async def load(run: Run, options: argparse.Namespace) -> None:
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(send_forever(run, number)) for number in range(4)]
        if run.scenario.kind == "tap":
            clients.append(tasks.create_task(receive_forever(run)))
        supervisor = tasks.create_task(supervise(run))
        try:
            await kill_under_load(run, options.kills, has_executors=options.executors)
        except TimeoutError:
            run.problems.append(f"no batch for {PROGRESS_S:.0f} s: {run.driver.ended()}")
            run.is_over = True
        run.is_loaded = False  # the SDK can swallow the end of a task
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        if not run.is_over:
            await catch_up(run)
        run.is_over = True
        if run.driver.process.poll() is None:
            run.driver.process.terminate()
        code = await asyncio.to_thread(run.driver.process.wait)
        if code != 0 and not run.problems:
            run.problems.append(f"the pipeline ended with {code}: {run.driver.ended()}")
        await supervisor
    await collect(run)


async def catch_up(run: Run) -> None:
    client = run.group_client()
    commits, since_s = run.commits(), time.monotonic()
    while not await asyncio.to_thread(has_caught_up, client):
        if run.commits() > commits:
            commits, since_s = run.commits(), time.monotonic()
        if time.monotonic() > since_s + PROGRESS_S:
            run.problems.append("the pipeline does not catch up")
            return
        await asyncio.sleep(0.5)


async def collect(run: Run) -> None:
    """Read what the pipeline has made, and check it."""
    places: dict[str, list[str]] = {}
    if run.format == "delta":
        table = deltalake.DeltaTable(run.table).to_pyarrow_table(columns=["message_id"])
    elif run.format == "iceberg":
        table = loaded(run.entry).scan(selected_fields=("message_id",)).to_arrow()
    else:
        table = ds.dataset(run.table, partitioning="hive").to_table(columns=["message_id"])
    places["table"] = [str(each) for each in table["message_id"].to_pylist()]
    if run.scenario.kind == "drain":
        places["target"] = await peeked(run, TARGET)
        places["dead letters"] = await peeked(run, SOURCE, ServiceBusSubQueue.DEAD_LETTER)
        if left := await peeked(run, SOURCE):
            run.problems.append(f"{len(left)} orders are left, such as {left[0]}")
    run.record.places = places
    ordered = ["target"] if "target" in places else []
    run.problems += check(run.record, run.scenario.belongs, ordered)
    for each in tables_of(read_pipeline(run.document)).values():
        run.problems += each.verified().problems
    run.problems += [
        f"{entry['message']}: {entry.get('error', '')[-2_000:]}"
        for entry in run.broker.logged()
        if entry.get("level") == "error"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default="drain")
    parser.add_argument("--format", choices=("parquet", "delta", "iceberg"), default="parquet")
    parser.add_argument("--kills", type=int, default=48, help="number of kills (default: 48)")
    parser.add_argument("--seed", type=int, default=1, help="seed of choices (default: 1)")
    parser.add_argument(
        "--executors", action="store_true", help="let two executors of Spark do the work"
    )
    parser.add_argument("--broker", default="-m postbus", help="program to run as the broker")
    parser.add_argument(
        "--pipeline", default="-m postbus_spark.jobs.main", help="program to run as the pipeline"
    )
    options = parser.parse_args()
    for noisy in ("azure", "asyncio"):  # clients log each lost connection
        logging.getLogger(noisy).setLevel(logging.CRITICAL + 1)
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="postbus-kill-") as folder:
        run = asyncio.run(run_kills(options, Path(folder)))
    _report(run, time.time() - began)
    return 1 if run.problems else 0


def _report(run: Run, took_s: float) -> None:
    print(f"kills {run.kills.total()}, {timedelta(seconds=round(took_s))}")
    for name, counts in (("", run.kills), ("missed: ", run.missed), ("driver: ", run.restarts)):
        for each, count in sorted(counts.items()):
            print(f"  {name}{each} {count}")
    sent = Counter(entry.result.value for entry in run.record.sent.values())
    found = ", ".join(f"{len(ids)} in {place}" for place, ids in run.record.places.items())
    print(f"{sent['accepted']} accepted, {sent['unknown']} unknown, {found}")
    print(f"violations {len(run.problems)}")
    for problem in run.problems[:20]:
        print(problem)


if __name__ == "__main__":
    sys.exit(main())
