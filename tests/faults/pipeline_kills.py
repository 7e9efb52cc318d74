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
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.dataset as ds
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import ServiceBusError

from postbus_spark.client import GroupClient
from postbus_spark.jobs.batches import tables_of
from postbus_spark.jobs.documents import read_pipeline
from postbus_spark.jobs.failures import ExitCode
from postbus_spark.lake.iceberg import loaded
from postbus_spark.lake.layout import OWN
from postbus_spark.options import read_options
from tests.faults.kill_programs import Bus, add_pipeline, bus_of, parser_of, report, run_program
from tests.faults.pipeline_calls import Point, Trap
from tests.faults.pipeline_driver import EXECUTOR, WORKER, Driver
from tests.faults.pipeline_record import Entry, Order, Record, Sent, check
from tests.faults.pipeline_scenarios import (
    DELAY_S,
    GROUP,
    MANIFESTS,
    SCENARIOS,
    TARGET,
    Scenario,
    entry_of,
    table_of,
)
from tests.faults.victims import wait_for_port

SENDERS = 4
SESSIONS = 20
AHEAD = 800
"""Orders that are sent for each batch at most; less than it takes. Those that are on their way lie
as far apart at most, far less than the delay of watermarks.
"""
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
"""Time of the first order; each one after is a second later."""

CATCH_S = 90.0
"""Longest wait for a point of a batch; then the kill comes at any moment and counts as missed."""

PROGRESS_S = 600.0
"""Longest time without a commit to the table while everything runs; a busy machine starts Spark in
minutes."""

EXAMPLES = """
examples, each begins with `python -m tests.faults.pipeline_kills`:
                                  48 kills of a drain that publishes, on local[2]
  --scenario capture --executors  a tap into a table, by two executors
  --scenario capture --format delta
  --scenario state                windows over two queues, drained by one document
  --kills 4                       a part of it, for CI
  --pipeline 'tests/faults/flawed_pipeline.py forgets'
                                  must find violations: its batches have no number
"""


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
    bus: Bus
    driver: Driver
    record: Record = field(default_factory=Record)
    kills: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    checkpoints: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    under_way: set[int] = field(default_factory=set)
    """First numbers of the sends that have no answer yet."""
    sent_before: tuple[int, int] = (0, 0)
    """Commits of the table, and how many orders were sent when they were seen first."""
    is_over: bool = False
    is_loaded: bool = True
    disturbances: Iterator[Callable[[Run], None] | None] = field(
        default_factory=lambda: itertools.cycle(DISTURBANCES)
    )
    next_start: Callable[[], None] | None = None
    """What is done to the checkpoint before the driver starts again."""
    refused_with: str | None = None
    """Error of the next start, which has a checkpoint that it may not go on with."""

    @property
    def table(self) -> Path:
        return self.bus.folder / "table"

    @property
    def checkpoint(self) -> Path:
        return self.bus.folder / "checkpoint"

    @property
    def older(self) -> Path:
        """A copy of the checkpoint of an earlier time."""
        return self.bus.folder / "older"

    @property
    def newest(self) -> Path:
        """The checkpoint while another one is in its place."""
        return self.bus.folder / "newest"

    @property
    def document(self) -> Path:
        return self.bus.folder / "pipeline.yaml"

    @property
    def log(self) -> Path:
        """The folder with a file for each commit of the table."""
        return self.table / ("_delta_log" if self.format == "delta" else f"{OWN}/commits")

    def commits(self) -> int:
        """Return how many batches the table has, and of Delta one more: it is made with none."""
        if self.format == "iceberg":
            table = loaded(entry_of(self.bus.folder))
            return 0 if table is None else table.metadata.last_sequence_number
        return sum(1 for _ in self.log.glob("*.json"))

    def is_ahead(self) -> bool:
        """Return whether the senders must wait for the pipeline, or for one another."""
        sent, commits = len(self.record.sent), self.commits()
        if commits != self.sent_before[0]:
            self.sent_before = commits, sent
        oldest = min(self.under_way, default=sent)
        return sent > min(self.sent_before[1], oldest) + AHEAD

    def group_clients(self) -> list[GroupClient]:
        """Return a client of the group of each source."""
        given = {
            "readerGroup": GROUP,
            "mode": self.scenario.kind,
            "connectionStringFile": str(self.bus.connection_file),
        }
        return [
            GroupClient(read_options(given | {"entity": each})) for each in self.scenario.sources
        ]


# --- preparing ----------------------------------------------------------------------------------


def write_document(run: Run) -> None:
    table = table_of(run.format, run.bus.folder)
    run.document.write_text(run.scenario.document(table=table, checkpoint=run.checkpoint))


def make_groups(run: Run) -> None:
    for each in run.scenario.sources:
        run.bus.create_group(each, GROUP, run.scenario.kind)


# --- clients of the bus -------------------------------------------------------------------------


async def send_forever(run: Run, sender: int) -> None:
    """Send batches of one session each; one whose answer is lost is unknown."""
    sessions = [f"s{each}" for each in range(sender, SESSIONS, SENDERS)]
    source = run.scenario.sources[sender % len(run.scenario.sources)]
    while run.is_loaded:
        try:
            async with client_of(run) as client, client.get_queue_sender(source) as queue:
                while run.is_loaded:
                    while run.is_ahead():
                        await asyncio.sleep(0.2)
                    await send(run, queue.send_messages, random.choice(sessions))
                    await asyncio.sleep(0.3)
        except (ServiceBusError, OSError, ValueError):
            await asyncio.sleep(0.2)


async def send(run: Run, send: Callable[..., object], session: str) -> None:
    batch, entries = [], {}
    for number in itertools.islice(run.numbers, random.randint(1, 40)):
        each = f"{session}-{number}"
        order = random.choices(list(Order), (20, 2, 1))[0]
        body = {
            Order.GOOD: good(number),
            Order.FREE: '{"note": "free"}',
            Order.MALFORMED: "no JSON",
        }[order]
        batch.append(ServiceBusMessage(body, message_id=each, session_id=session))
        entries[each] = Entry(order, Sent.UNKNOWN, session, number)
    run.record.sent |= entries
    first = min(entry.number for entry in entries.values())
    run.under_way.add(first)
    try:
        await send(batch)  # type: ignore[misc]
    finally:
        run.under_way.remove(first)
    for each, entry in entries.items():
        run.record.sent[each] = Entry(entry.order, Sent.ACCEPTED, session, entry.number)


def good(number: int) -> str:
    """Return the body of a good order."""
    placed = (FIRST + timedelta(seconds=number)).isoformat()
    return f'{{"amount": {number}, "placed": "{placed}"}}'


async def receive_forever(run: Run) -> None:
    """Complete what a tap reads beside."""
    (source,) = run.scenario.sources
    while run.is_loaded:
        try:
            async with client_of(run) as client, client.get_queue_receiver(source) as receiver:
                while run.is_loaded:
                    for message in await receiver.receive_messages(100, max_wait_time=1):
                        await receiver.complete_message(message)
        except (ServiceBusError, OSError, ValueError):
            await asyncio.sleep(0.2)


def client_of(run: Run) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(run.bus.broker.connection_string, retry_total=0)


async def peeked(
    run: Run, entity: str, sub_queue: ServiceBusSubQueue | None = None
) -> list[ServiceBusReceivedMessage]:
    """Return all messages that are left, by sequence number."""
    found: list[ServiceBusReceivedMessage] = []
    number = 1
    async with (
        client_of(run) as client,
        client.get_queue_receiver(entity, sub_queue=sub_queue) as receiver,
    ):
        while page := await receiver.peek_messages(500, sequence_number=number):
            found += page
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
        if run.refused_with is not None:
            if not is_stopped or run.refused_with not in run.driver.ended():
                run.problems.append(f"a start was not refused with {run.refused_with} ({code})")
            run.refused_with = None
            run.next_start = partial(_go_on, run)
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


def ends_driver(step: Victim | Point, number: int) -> bool:
    if isinstance(step, Point):
        return not is_for_broker(number)
    return step in {Victim.DRIVER, Victim.TABLE}


def is_for_broker(number: int) -> bool:
    """Return whether the broker is killed at a point, not the driver; points have even numbers."""
    return number % 4 == 2


async def take(run: Run, step: Victim | Point, number: int) -> None:
    """Kill; what was killed runs again when this returns."""
    match step:
        case Point():
            await kill_at(run, step, is_broker=is_for_broker(number))
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
            run.bus.broker.kill()
            run.bus.broker.start()
        case Victim.POSTGRES:
            await asyncio.sleep(random.random())
            os.kill(run.bus.postgres.pid, signal.SIGKILL)
            await asyncio.to_thread(run.bus.postgres.restart)
        case Victim.RIVAL:
            await take_over(run)
    run.kills[name_of(step)] += 1
    await wait_for_port(run.bus.broker.port)


async def kill_at(run: Run, point: Point, *, is_broker: bool) -> None:
    """Kill driver or broker at a point of a batch."""
    kill = run.bus.broker.kill if is_broker else run.driver.kill
    trap = run.bus.relay.trap = Trap(point, random.randint(1, 3), kill)
    try:
        async with asyncio.timeout(CATCH_S):
            await trap.sprung.wait()
    except TimeoutError:
        run.missed[str(point)] += 1
        kill()
    finally:
        run.bus.relay.trap = None
    if is_broker:
        run.bus.broker.start()


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


def disturb_checkpoint(run: Run) -> None:
    """Lose the checkpoint before the next start of the driver, or put another one in its place."""
    found = next(run.disturbances)
    if found is not None:
        run.next_start = partial(found, run)


def lose(run: Run) -> None:
    """Remove the checkpoint. With state it must be missed."""
    if run.scenario.has_state:
        _put_aside(run, "StateLost", "lost")
    else:
        shutil.rmtree(run.checkpoint)
        run.checkpoints["lost"] += 1


def keep(run: Run) -> None:
    """Copy the checkpoint, for a later start."""
    shutil.rmtree(run.older, ignore_errors=True)
    shutil.copytree(run.checkpoint, run.older)


def bring_back(run: Run) -> None:
    """Put the older checkpoint in the place of the newest."""
    error = "StateLost" if run.scenario.has_state else "StaleCheckpoint"
    _put_aside(run, error, "of earlier")
    run.older.rename(run.checkpoint)


def take_foreign(run: Run) -> None:
    """Put the checkpoint of another queue's pipeline in the place of the newest."""
    _put_aside(run, "InvalidOffset", "of another pipeline")
    shutil.copytree(run.newest, run.checkpoint, ignore=shutil.ignore_patterns(".*.crc"))
    for file in (run.checkpoint / "offsets").iterdir():
        text = file.read_text()
        for each in run.scenario.sources:
            text = text.replace(f'"{each}"', f'"not-{each}"')
        file.write_text(text)


DISTURBANCES = (None, lose, keep, take_foreign, bring_back)


def _put_aside(run: Run, error: str, name: str) -> None:
    """Move the newest checkpoint away; the start without it must be refused with an error."""
    shutil.rmtree(run.newest, ignore_errors=True)
    run.checkpoint.rename(run.newest)
    run.refused_with = error
    run.checkpoints[name] += 1


def _go_on(run: Run) -> None:
    """After a refusal, take the newest checkpoint; without state an empty one does as well."""
    shutil.rmtree(run.checkpoint, ignore_errors=True)
    if run.scenario.has_state:
        run.newest.rename(run.checkpoint)


async def kill_under_load(run: Run, count: int, *, has_executors: bool) -> None:
    began_s = time.monotonic()
    await progress(run)
    steps = steps_of(run.scenario, has_executors=has_executors)
    for number, step in enumerate(itertools.islice(steps, count)):
        if run.is_over or run.problems:
            return
        if ends_driver(step, number):
            disturb_checkpoint(run)
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
    async with bus_of(folder, options.broker, MANIFESTS) as bus:
        driver = Driver(
            folder / "pipeline.yaml", bus.connection_file, options.pipeline.split(),
            has_executors=options.executors,
        )  # fmt: skip
        run = Run(SCENARIOS[options.scenario], options.format, bus, driver)
        write_document(run)
        await asyncio.to_thread(make_groups, run)
        driver.start()
        try:
            await load(run, options)
        finally:
            run.is_over = True
            if driver.process.poll() is None:
                driver.kill()
    return run


async def load(run: Run, options: argparse.Namespace) -> None:
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(send_forever(run, number)) for number in range(SENDERS)]
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
            await end_windows(run)
            await catch_up(run)
        run.is_over = True
        if run.driver.process.poll() is None:
            run.driver.process.terminate()
        code = await asyncio.to_thread(run.driver.process.wait)
        if code != 0 and not run.problems:
            run.problems.append(f"the pipeline ended with {code}: {run.driver.ended()}")
        await supervisor
    await collect(run)


async def end_windows(run: Run) -> None:
    """Complete all windows with later orders, which stay in the state, and wait for the last."""
    if not run.scenario.has_state:
        return
    body = good(next(run.numbers) + 10 * DELAY_S)
    async with client_of(run) as client:
        for source in run.scenario.sources:
            async with client.get_queue_sender(source) as sender:
                await sender.send_messages(ServiceBusMessage(body, message_id="later"))
    accepted = [
        (entry.number, each)
        for each, entry in run.record.sent.items()
        if entry.order is Order.GOOD and entry.result is Sent.ACCEPTED
    ]
    _, last = max(accepted)
    try:
        async with asyncio.timeout(PROGRESS_S):
            while last not in await asyncio.to_thread(in_table, run):
                await progress(run)
    except TimeoutError:
        run.problems.append(f"the window of {last} was not completed")


async def catch_up(run: Run) -> None:
    commits, since_s = run.commits(), time.monotonic()
    for client in run.group_clients():
        while not await asyncio.to_thread(has_caught_up, client):
            if run.commits() > commits:
                commits, since_s = run.commits(), time.monotonic()
            if time.monotonic() > since_s + PROGRESS_S:
                run.problems.append("the pipeline does not catch up")
                return
            await asyncio.sleep(0.5)


def in_table(run: Run) -> list[str]:
    """Return the ids of all orders in the table."""
    column = run.scenario.ids
    rows: pa.Table
    if run.format == "delta":
        rows = deltalake.DeltaTable(run.table).to_pyarrow_table(columns=[column])
    elif run.format == "iceberg":
        rows = loaded(entry_of(run.bus.folder)).scan(selected_fields=(column,)).to_arrow()
    else:
        dataset = ds.dataset(run.table, partitioning="hive")
        if column not in dataset.schema.names:
            return []  # no file yet
        rows = dataset.to_table(columns=[column])
    return parted(rows[column].to_pylist())


def parted(texts: Iterable[object]) -> list[str]:
    """Return the ids of texts that have several."""
    return [each for text in texts for each in str(text).split(",")]


async def collect(run: Run) -> None:
    """Read what the pipeline has made, and check it."""
    places = {"table": in_table(run)}
    if run.scenario.kind == "drain":
        sent = await peeked(run, TARGET)
        places["target"] = parted(
            str(each) if run.scenario.has_state else each.message_id for each in sent
        )
        places["dead letters"] = []
        for source in run.scenario.sources:
            letters = await peeked(run, source, ServiceBusSubQueue.DEAD_LETTER)
            places["dead letters"] += [str(each.message_id) for each in letters]
            if left := await peeked(run, source):
                run.problems.append(f"{len(left)} orders are left, such as {left[0].message_id}")
    run.record.places = places
    ordered = ["target"] if "target" in places and not run.scenario.has_state else []
    run.problems += check(run.record, run.scenario.belongs, ordered)
    for each in tables_of(read_pipeline(run.document)).values():
        run.problems += each.verified().problems
    run.problems += [
        f"{entry['message']}: {entry.get('error', '')[-2_000:]}"
        for entry in run.bus.broker.logged()
        if entry.get("level") == "error"
    ]


def main() -> int:
    parser = parser_of(__doc__, 48, EXAMPLES)
    add_pipeline(parser)
    parser.add_argument("--scenario", choices=SCENARIOS, default="drain")
    parser.add_argument("--format", choices=("parquet", "delta", "iceberg"), default="parquet")
    parser.add_argument(
        "--executors", action="store_true", help="let two executors of Spark do the work"
    )
    began = time.time()
    run = run_program(run_kills, parser.parse_args())
    sent = Counter(entry.result.value for entry in run.record.sent.values())
    found = ", ".join(f"{len(ids)} in {place}" for place, ids in run.record.places.items())
    took = timedelta(seconds=round(time.time() - began))
    return report(
        f"kills {run.kills.total()}, {took}, {sent['accepted']} accepted,"
        f" {sent['unknown']} unknown, {found}",
        {
            "": run.kills,
            "missed: ": run.missed,
            "checkpoint ": run.checkpoints,
            "driver: ": run.restarts,
        },
        run.problems,
    )


if __name__ == "__main__":
    sys.exit(main())
