"""Kill -9 of replays, of broker and Postgres below them, and a check of what has arrived.

Each round replays the same history under a name of its own, at a rate. It is killed once, at a
point of its requests or while the bus sends what it has published, and started again until it ends.
Then each message must be there once, in the order of its session, and no faster than the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusClient

from postbus_spark.jobs.failures import ExitCode
from tests.faults.kill_programs import (
    Bus,
    add_pipeline,
    bus_of,
    manifests,
    parser_of,
    report,
    run_program,
)
from tests.faults.pipeline_calls import Call, Moment, Point, Trap
from tests.faults.pipeline_driver import WORKER, Driver
from tests.faults.pipeline_scenarios import document_of
from tests.faults.victims import wait_for_port

SOURCE, TARGET = "orders", "again"
SESSIONS = 20
RATE = 500
ROUND_S = 900.0
"""Longest time of a round with its starts of Spark."""

MANIFESTS = manifests([f"{SOURCE}: operatorSpec: {{history: {{retention: P1D}}}}", TARGET])


@dataclass(frozen=True, slots=True)
class Kill:
    """A victim at the n-th request of a kind; the driver unless another one is named."""

    point: Point
    count: int = 1
    victim: str = "driver"

    def __str__(self) -> str:
        return f"{self.victim} {self.point} {self.count}"


SENDING: Final = Point(Call.PUBLISH, Moment.AFTER)
"""The first answer says that the batch is published, later ones how much has arrived."""

KILLS: Final = (
    Kill(Point(Call.READ, Moment.DURING)),
    Kill(Point(Call.STAGE, Moment.BEFORE), 2),
    Kill(Point(Call.STAGE, Moment.DURING), 2, "broker"),
    Kill(Point(Call.STAGE, Moment.AFTER), 2, "Postgres"),
    Kill(Point(Call.STAGE, Moment.AFTER), 3),
    Kill(Point(Call.STAGE, Moment.BEFORE), 2, "Python worker"),
    Kill(Point(Call.PUBLISH, Moment.BEFORE)),
    Kill(Point(Call.PUBLISH, Moment.BEFORE), 1, "broker"),
    Kill(SENDING),
    Kill(SENDING, 1, "Postgres"),
    Kill(SENDING, 1, "broker"),
    Kill(SENDING, 2),
    Kill(SENDING, 2, "broker"),
)


@dataclass(slots=True)
class Run:
    """The state of a run. `sent`: the ids of each session in their order."""

    bus: Bus
    driver: Driver
    sent: dict[str, list[str]] = field(default_factory=dict)
    exits: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(len, self.sent.values()))

    def client(self) -> ServiceBusClient:
        return ServiceBusClient.from_connection_string(self.bus.broker.connection_string)


def write_document(run: Run, name: str) -> None:
    query = f"select body, session_id, concat('{name}-', message_id) as message_id from orders"
    spec: dict[str, object] = {
        "sources": [{"name": "orders", "queue": SOURCE, "mode": "history"}],
        "transform": {"sql": {"again": query}},
        "sinks": [{"from": "again", "queue": TARGET, "rate": RATE}],
        "trigger": {"once": True},
    }
    (run.bus.folder / "pipeline.yaml").write_text(document_of(name, spec))


async def send_orders(run: Run, count: int) -> None:
    """Send orders, and complete some: a history has both."""
    numbers = itertools.count()
    async with run.client() as client:
        async with client.get_queue_sender(SOURCE) as sender:
            while run.count < count:
                session = f"s{random.randrange(SESSIONS)}"
                ids = [f"{next(numbers):06}" for _ in range(40)]
                body = b"x" * 2_000
                await sender.send_messages(
                    [ServiceBusMessage(body, message_id=each, session_id=session) for each in ids]
                )
                run.sent.setdefault(session, []).extend(ids)
        async with client.get_queue_receiver(SOURCE) as receiver:
            for message in await receiver.receive_messages(100, max_wait_time=5):
                await receiver.complete_message(message)


# --- rounds -------------------------------------------------------------------------------------


async def play(run: Run, name: str, kill: Kill) -> None:
    """Replay once with a kill, and check what has arrived."""
    write_document(run, name)
    loop = asyncio.get_running_loop()
    trap = run.bus.relay.trap = Trap(kill.point, kill.count, lambda: fell(run, kill, loop))
    run.driver.start()
    async with asyncio.timeout(ROUND_S):
        await end(run)
    run.bus.relay.trap = None
    if not trap.sprung.is_set():
        run.missed[str(kill)] += 1
    await wait_for_port(run.bus.broker.port)
    found = await arrived(run, name)
    run.problems += [f"{name}, {kill}: {each}" for each in check(run, name, found)]


def fell(run: Run, kill: Kill, loop: asyncio.AbstractEventLoop) -> None:
    """Kill the victim; what is no driver is started again at once."""
    match kill.victim:
        case "driver":
            run.driver.kill()
        case "Python worker":
            run.driver.kill_below(WORKER)
        case "broker":
            run.bus.broker.kill()
            run.bus.broker.start()
        case "Postgres":
            os.kill(run.bus.postgres.pid, signal.SIGKILL)
            loop.run_in_executor(None, run.bus.postgres.restart)


async def end(run: Run) -> None:
    """Start the replay again until it ends in order, as a supervisor would."""
    while code := await asyncio.to_thread(run.driver.process.wait):
        run.exits[f"exit {code}"] += 1
        if code in {int(ExitCode.STOPPED), int(ExitCode.CONFIGURATION)}:
            run.problems.append(f"a replay ended with {code}: {run.driver.ended()}")
            return
        run.driver.start()


async def arrived(run: Run, name: str) -> list[ServiceBusReceivedMessage]:
    """Return what has arrived in a round; numbers of partitions do not follow one another."""
    found: list[ServiceBusReceivedMessage] = []
    number = 1
    async with run.client() as client, client.get_queue_receiver(TARGET) as receiver:
        while page := await receiver.peek_messages(250, sequence_number=number):
            found += [each for each in page if str(each.message_id).startswith(f"{name}-")]
            number = (page[-1].sequence_number or 0) + 1
    return found


def check(run: Run, name: str, found: list[ServiceBusReceivedMessage]) -> list[str]:
    """Return what is wrong with what has arrived in a round."""
    problems = []
    sessions: dict[str, list[str]] = {}
    for message in found:
        sessions.setdefault(str(message.session_id), []).append(str(message.message_id))
    for session, ids in run.sent.items():
        wanted = [f"{name}-{each}" for each in ids]
        there = sessions.pop(session, [])
        counts = Counter(there)
        lost = [each for each in wanted if not counts[each]]
        twice = [each for each, count in counts.items() if count > 1]
        if lost or twice:
            problems.append(f"{session}: {len(lost)} are lost, {len(twice)} are there twice")
        elif there != wanted:
            problems.append(f"{session}: another order")
    if sessions:
        problems.append(f"what was not sent has arrived: {min(sessions)}")
    times = [message.enqueued_time_utc.timestamp() for message in found]
    if times and len(times) > RATE * (max(times) - min(times) + 1):
        problems.append(f"{len(times)} messages in {max(times) - min(times):.1f} s")
    return problems


async def run_kills(options: argparse.Namespace, folder: Path) -> Run:
    random.seed(options.seed)
    kills = random.sample(KILLS, len(KILLS))
    async with bus_of(folder, options.broker, MANIFESTS) as bus:
        document, program = folder / "pipeline.yaml", options.pipeline.split()
        driver = Driver(document, bus.connection_file, program, has_executors=False)
        run = Run(bus, driver)
        try:
            await send_orders(run, options.messages)
            for number, kill in enumerate(itertools.islice(itertools.cycle(kills), options.kills)):
                began_s = time.monotonic()
                await play(run, f"round-{number}", kill)
                took_s = time.monotonic() - began_s
                print(f"{took_s:4.0f} s  {number + 1}/{options.kills} {kill}", flush=True)
        except TimeoutError:
            run.problems.append(f"no end within {ROUND_S:.0f} s: {driver.ended()}")
        finally:
            if hasattr(driver, "process") and driver.process.poll() is None:
                driver.kill()
    return run


def main() -> int:
    parser = parser_of(__doc__, len(KILLS))
    add_pipeline(parser)
    parser.add_argument("--messages", type=int, default=4_000, help="messages of a replay")
    options = parser.parse_args()
    run = run_program(run_kills, options)
    return report(
        f"kills {options.kills}, {run.count} messages each",
        {"missed: ": run.missed, "driver: ": run.exits},
        run.problems,
    )


if __name__ == "__main__":
    sys.exit(main())
