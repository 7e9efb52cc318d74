"""Two brokers on one store that take over from each other under load, and the check of the record.

A round is a schedule of events that its seed decides: processes are started, stopped, killed,
paused and cut off from Postgres while clients of both use queues, sessions, schedules, a topic and
a forward, and create and delete queues. Some processes have the name of the other one, as in a
restart that overlaps, others a name of their own. Several rounds share one database: at the end
everything is healed, one process stops, the remaining messages are peeked at the other one, and the
record is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path

import asyncpg
from azure.servicebus import ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database
from tests.faults.history import (
    FROM_ABSENCE,
    Defined,
    Event,
    Left,
    Listed,
    Loaded,
    Paused,
    Result,
    Sent,
    Settled,
    Violation,
    check,
)
from tests.faults.kill_programs import run_program
from tests.faults.mixed_kills import (
    LOCK_S,
    MAX_DELIVERIES,
    NAMESPACE,
    PEEK_RETRIES,
    PLACES,
    SESSIONS,
    entity,
    peek,
)
from tests.faults.moving_clients import (
    QUEUES,
    READ,
    SUBSCRIPTIONS,
    TOPOLOGY,
    Address,
    Made,
    MovingLoad,
    works,
)
from tests.faults.network import Cut, Network, network_to
from tests.faults.victims import Broker, choose_port, wait_for_port

ROUND_S = 6.0
LIFE_ROUNDS = 20
"""Rounds until everything is checked."""

SERVED = 40
SERVED_S = 15.0
"""A round begins after this many accepted messages, or this many seconds, since the last one."""

STOP_S = 30.0
"""Time limit of a stop: its grace period, and its wait for a store that does not answer."""

READY_S = 90.0
"""Time limit of a healed bus until it serves again."""

STORE_AWAY = 6
"""Exit code of a start without Postgres."""

LOADED = "partition loaded"
"""Log message of a broker."""

INTERRUPTED = 130
"""Exit code of a stop in the first moment of a start."""

EXAMPLES = """
examples, each begins with `python -m tests.faults.two_processes`:
  --rounds 4                     required of a change
  --rounds 20 --seed 41          one life again
"""


# --- steps ----------------------------------------------------------------------------------------


class Verb(Enum):
    """A fault of a process; a stopped or killed process is started again."""

    STOP = "stop"
    KILL = "kill"
    PAUSE = "pause"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Step:
    """An event of a round: when, to which process, for how long."""

    at_s: float
    is_for_owner: bool
    """Whether it happens to the owner of partition 0, or to the other process."""

    verb: Verb
    for_s: float
    cut: Cut
    name: str
    """Name of the process when it starts again; "": its own name."""

    is_patient: bool
    """Whether it waits until the process serves, instead of hitting its start."""

    def __str__(self) -> str:
        how = {Verb.CUT: self.cut.value, Verb.PAUSE: ""}.get(
            self.verb, f"as {self.name}" if self.name else ""
        )
        who = "owner" if self.is_for_owner else "other"
        return f"{self.verb.value} {who} for {self.for_s:.1f} s {how}".strip()


def steps_of(seed: int) -> list[Step]:
    """Return the steps of a round; the same for the same seed.

    In half of the rounds a started process has the name of the other one, as in a restart that
    overlaps, otherwise its own name. Most pauses and cuts last until the other one takes over.
    """
    chance = random.Random(seed)
    is_restart = chance.random() < 0.5
    steps = []
    for number in range(1 if chance.random() < 0.6 else 2):
        verb = chance.choice(list(Verb))
        is_long = verb in (Verb.PAUSE, Verb.CUT) and chance.random() < 0.7
        steps.append(
            Step(
                chance.uniform(1.0, ROUND_S) if number else 0.0,
                number == 0 or chance.random() < 0.3,
                verb,
                chance.uniform(6.0, 10.0) if is_long else chance.uniform(0.0, 2.0),
                chance.choice(list(Cut)),
                "bus" if is_restart else "",
                chance.random() < 0.75,
            )
        )
    return sorted(steps, key=lambda step: step.at_s)


# --- to whom --------------------------------------------------------------------------------------


@dataclass
class Process:
    """One of the two brokers, with its network to Postgres."""

    number: int
    broker: Broker
    network: Network
    tls_port: int
    name: str
    down_s: float = 0.0
    """Time between its end and its next start."""

    is_over: bool = False
    """It is not started again."""

    is_running: bool = False
    is_ending: bool = False
    was_cut: bool = False
    """In this life of the process."""

    problems: list[str] = field(default_factory=list)
    ends: set[asyncio.Task[None]] = field(default_factory=set)
    """Of pauses and cuts that last."""

    paused_at: float | None = None
    pauses: list[Paused] = field(default_factory=list)
    watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> Address:
        broker = self.broker
        authority = broker.data / "tls" / "ca.pem"
        return Address(
            str(self.number), broker.port, broker.connection_string, self.tls_port, authority
        )

    def start(self) -> None:
        self.broker.start(environment={"POSTBUS_BROKER_NAME": self.name})
        self.is_running, self.is_ending = True, False
        self.was_cut = self.network.cut is not None
        self.watch = asyncio.create_task(self._watch())

    def apply(self, step: Step) -> str:
        """Perform a step; return a description of the result."""
        if not self.is_running or self.is_ending:
            return f"{step}: it does not run"
        match step.verb:
            case Verb.STOP:
                self.ask_to_stop()
            case Verb.KILL:
                self.is_ending = True
                self.broker.process.kill()
            case Verb.PAUSE:
                self.paused_at = time.time()
                self.broker.process.send_signal(signal.SIGSTOP)
                self._later(step.for_s, self._resume)
            case Verb.CUT if self.network.cut is None:
                self.network.start_cut(step.cut)
                self.was_cut = True
                self._later(step.for_s, self.network.heal)
            case Verb.CUT:
                return f"{step}: it is cut already"
        self.down_s, self.name = step.for_s, step.name or f"bus-{self.number}"
        return f"{step}: {self.number}"

    def _resume(self) -> None:
        self.broker.process.send_signal(signal.SIGCONT)
        if self.paused_at is not None:
            self.pauses.append(Paused(str(self.number), self.paused_at, time.time()))
            self.paused_at = None

    def _later(self, after_s: float, end: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(after_s)
            end()

        task = asyncio.create_task(wait())
        self.ends.add(task)
        task.add_done_callback(self.ends.discard)

    async def _watch(self) -> None:
        """Record the end of the process, and an unexpected exit code."""
        process = self.broker.process
        while (code := process.poll()) is None:
            await asyncio.sleep(0.02)
        self.is_running = False
        allowed = {0, -signal.SIGKILL}
        if self.is_ending:  # before it handles signals
            allowed |= {INTERRUPTED, -signal.SIGINT, -signal.SIGTERM}
        if self.was_cut:
            allowed.add(STORE_AWAY)
        if code not in allowed:
            problem = f"process {self.number} ended with exit code {code}"
            self.problems.append(f"{problem}: {self.broker.last_words()}")
        if not self.is_over:
            self._later(self.down_s, self.start)

    def calm(self) -> None:
        """End pauses and cuts at once; a process that ends is not started again."""
        self.is_over = True
        for task in self.ends:
            task.cancel()
        self.network.heal()
        if self.is_running:
            self._resume()

    async def listening(self) -> None:
        """Wait until it listens; a process that does not is reported."""
        try:
            await wait_for_port(self.broker.port, READY_S)
        except TimeoutError:
            self.problems.append(f"process {self.number} did not listen within {READY_S:.0f} s")

    def ask_to_stop(self) -> None:
        self.is_ending = True
        self.broker.process.terminate()

    async def stopped(self) -> None:
        """Wait for the requested end; a process that does not end is killed and reported."""
        until = time.monotonic() + STOP_S
        while self.is_running and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self.is_running:
            self.problems.append(f"process {self.number} does not stop")
            self.broker.kill()
            self.is_running = False

    def kill(self) -> None:
        self.calm()
        if self.watch is not None:
            self.watch.cancel()
        if self.is_running:
            self.broker.kill()


# --- a life ---------------------------------------------------------------------------------------


def manifests() -> str:
    """Return the manifests of the bus; the name of an entity states its purpose."""
    common = f", lockDuration: PT{LOCK_S:.0f}S, maxDeliveryCount: {MAX_DELIVERIES}"
    extra = {"once": ", requiresDuplicateDetection: true", "grouped": ", requiresSession: true"}
    documents = [
        *NAMESPACE,
        *(entity("Queue", name, "faults", common + extra.get(name, "")) for name in QUEUES),
        entity("Queue", "hop", "faults", common + ", forwardTo: end"),
        entity("Topic", "news", "faults", ", supportOrdering: true"),
    ]
    for name, expression in SUBSCRIPTIONS.items():
        rules = f", rules: [{{name: selected, sqlFilter: {{sqlExpression: '{expression}'}}}}]"
        documents.append(
            entity("Subscription", name, "news", common + (rules if expression else ""))
        )
    return "\n---\n".join(documents) + "\n"


@dataclass
class Life:
    """The events on one database, and the violations."""

    first_seed: int
    rounds: int
    began: float = field(default_factory=time.time)
    applied_steps: list[tuple[float, int, str]] = field(default_factory=list)
    """Time, seed and text of each event."""

    events: list[Event] = field(default_factory=list)
    troubles: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def command(self) -> str:
        return (
            f"python -m tests.faults.two_processes --rounds {self.rounds} --seed {self.first_seed}"
        )


async def live(life: Life, folder: Path, dsn: str) -> None:
    """Run some rounds on a new database, and check."""
    random.seed(life.first_seed)
    async with AsyncExitStack() as stack:
        processes = [await make_process(number, folder, dsn, stack) for number in range(2)]
        definers = {"left": Made(), "right": Made()}
        addresses = [process.address for process in processes]
        end = asyncio.Event()
        first = MovingLoad(0, "", addresses=addresses, end=end)
        loads: list[MovingLoad] = []
        for process in processes:
            process.start()
            await process.listening()
        async with asyncio.TaskGroup() as tasks:
            for work in works(definers):
                load = MovingLoad(
                    0,
                    "",
                    events=life.events,
                    numbers=first.numbers,
                    troubles=life.troubles,
                    addresses=addresses,
                    end=end,
                )
                loads.append(load)
                tasks.create_task(load.visit_all(work))
            for seed in range(life.first_seed, life.first_seed + life.rounds):
                await under_load(loads)
                await live_round(life, seed, processes)
            survivor = await settle_down(processes)
            for load in loads:
                load.may_send = False
            await asyncio.sleep(LOCK_S + 1)  # locked and due messages come again
            end.set()
            for load in loads:
                load.until.set()
        unseen = await look(life, survivor.address)
        life.events += await loads_of(processes, dsn)
        life.events += [each for process in processes for each in process.pauses]
        survivor.ask_to_stop()
        await survivor.stopped()
        life.violations += violations_of(life.events, unseen)
        for process in processes:
            life.violations += problems_of(process)


async def make_process(number: int, folder: Path, dsn: str, stack: AsyncExitStack) -> Process:
    own = folder / str(number)
    own.mkdir()
    sealing_key = folder / "sealing.key"
    sealing_key.touch(0o600)
    sealing_key.write_text(base64.b64encode(bytes(32)).decode())
    network, through = await stack.enter_async_context(network_to(dsn))
    tls_port = choose_port()
    environment = {
        "POSTBUS_SEALING_KEY_FILE": str(sealing_key),
        "POSTBUS_GRACE_S": "1",
        "POSTBUS_TLS_PORT": str(tls_port),
    }
    broker = Broker(own, through, ["-m", "postbus"], manifests(), environment)
    process = Process(number, broker, network, tls_port, f"bus-{number}")
    stack.callback(process.kill)
    return process


async def under_load(loads: Sequence[MovingLoad]) -> None:
    """Wait until clients are served again, up to a time limit."""
    until, target = time.monotonic() + SERVED_S, SERVED + sum(load.done for load in loads)
    while sum(load.done for load in loads) < target and time.monotonic() < until:
        await asyncio.sleep(0.05)


async def live_round(life: Life, seed: int, processes: Sequence[Process]) -> None:
    """Perform the steps of a round."""
    began = time.monotonic()
    steps = steps_of(seed)
    for step in steps:
        await asyncio.sleep(max(0.0, began + step.at_s - time.monotonic()))
        process = affected_process(step, processes)
        if step.is_patient:
            await process.listening()
        life.applied_steps.append((time.time(), seed, process.apply(step)))
    lasts_s = max(ROUND_S, steps[0].for_s)  # so that the other one can take over
    await asyncio.sleep(max(0.0, began + lasts_s - time.monotonic()))


def affected_process(step: Step, processes: Sequence[Process]) -> Process:
    """Return the process that loaded partition 0 last, or the other one."""
    owner, other = sorted(processes, key=epoch_of, reverse=True)
    return owner if step.is_for_owner else other


def epoch_of(process: Process) -> int:
    """Return the last epoch in which this process had partition 0."""
    loads = [entry for entry in process.broker.logged() if entry.get("message") == LOADED]
    return max((int(entry["epoch"]) for entry in loads if not int(entry["partition"])), default=0)


async def settle_down(processes: Sequence[Process]) -> Process:
    """Heal all faults and leave one process that owns everything; return it."""
    for process in processes:
        process.calm()
        if process.is_ending:
            await process.stopped()
        if not process.is_running:
            process.start()
    survivor, other = random.sample(list(processes), 2)
    await survivor.listening()
    other.ask_to_stop()
    await other.stopped()
    return survivor


# --- remaining messages ---------------------------------------------------------------------------


async def look(life: Life, address: Address) -> list[str]:
    """Peek all remaining messages and list the entities; return the requests without an answer.

    All at once: the SDK takes a second to close each client.
    """
    load = MovingLoad(address.port, address.connection_string)
    async with load.client(PEEK_RETRIES) as client:
        works = {
            f"{path} {place} {options}": peek(client, path, place, **options)
            for path in (*READ, "grouped", "hop")
            for sub_queue, place in PLACES.items()
            for options in options_of(path, sub_queue)
        }
        works["what was made"] = look_at_made(client, address)
        tasks = {name: asyncio.create_task(work) for name, work in works.items()}
        await asyncio.wait(tasks.values(), timeout=READY_S)
        problems = []
        for name, task in tasks.items():
            error = task.exception() if task.done() else TimeoutError()
            if error is None:
                life.events += task.result()
            else:
                task.cancel()
                problems.append(f"{name} cannot be seen after all was healed: {error!r}")
    return problems


def options_of(path: str, sub_queue: ServiceBusSubQueue | None) -> list[dict[str, object]]:
    """Return the options of peeks of a sub-queue: by session, none if the entity forwards."""
    if sub_queue is not None:
        return [{"sub_queue": sub_queue}]
    if path == "grouped":
        return [{"session_id": f"s{number}"} for number in range(SESSIONS)]
    return [] if path == "hop" else [{}]


async def look_at_made(client: ServiceBusClient, address: Address) -> list[Event]:
    """Peek the created queues; their metadata have the generation of the name."""
    async with address.administration(PEEK_RETRIES) as administration:
        listed = [queue async for queue in administration.list_queues()]
    made = [queue for queue in listed if queue.user_metadata]
    peeks = [peek(client, queue.name, "active") for queue in made]
    events: list[Event] = []
    for queue, found in zip(made, await asyncio.gather(*peeks), strict=True):
        events.append(Listed(queue.user_metadata))
        for left in found:
            assert isinstance(left, Left)
            events.append(replace(left, path=queue.user_metadata))
    return events


async def loads_of(processes: Sequence[Process], dsn: str) -> list[Event]:
    """Return the loads of the partition of each entity, from the logs."""
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch(READ_HOMES)
    finally:
        await connection.close()
    paths: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        topic, _, subscription = row["name"].partition("/Subscriptions/")
        name = f"{topic}/{subscription}" if subscription else topic
        paths[row["home_partition"]].append(row["metadata"] or name)
    return [
        Loaded(
            path,
            datetime.fromisoformat(entry["time"]).timestamp(),
            str(process.number),
            int(entry["epoch"]),
        )
        for process in processes
        for entry in process.broker.logged()
        if entry.get("message") == LOADED
        for path in paths[int(entry["partition"])]
    ]


READ_HOMES = """
select name, home_partition, definition ->> 'userMetadata' as metadata from postbus.catalog
"""


def violations_of(events: Sequence[Event], unseen: Sequence[str]) -> list[Violation]:
    """Return the violations of a record, and the places that could not be looked at.

    Each of these would else add a violation for every message and queue that is left in it.
    """
    found = check(events, TOPOLOGY)
    if unseen:
        found = [each for each in found if each.invariant not in FROM_ABSENCE]
    return [*(Violation("unseen", "", "", problem) for problem in unseen), *found]


def problems_of(process: Process) -> list[Violation]:
    """Return the problems of a process that do not depend on clients."""
    found = [Violation("process", "", "", problem) for problem in process.problems]
    found += [
        Violation("error", "", "", f"{entry['message']}: {entry.get('error', '')[-2_000:]}")
        for entry in process.broker.logged()
        if entry.get("level") == "error"
    ]
    return found


# --- many lives -----------------------------------------------------------------------------------


async def run(options: argparse.Namespace, folder: Path) -> list[Life]:
    """Run until all rounds are done, or a violation is found."""
    settings = {"max_connections": "400"}  # those that were cut stay for a while
    postgres = EmbeddedPostgres(folder / "postgres", settings=settings)
    await asyncio.to_thread(postgres.start)
    lives: list[Life] = []
    try:
        for first in range(0, options.rounds, LIFE_ROUNDS):
            life = Life(options.seed + first, min(LIFE_ROUNDS, options.rounds - first))
            lives.append(life)
            name = f"life_{len(lives)}"
            await asyncio.to_thread(make_database, postgres, name)
            own = folder / name
            own.mkdir()
            try:
                await live(life, own, dsn_of(postgres, name))
            finally:
                if options.record is not None:
                    write_record(life, own, options.record)
            show(life)
    finally:
        await asyncio.to_thread(postgres.stop)
    return lives


def show(life: Life) -> None:
    """Print a summary; with violations also the events, and the command to repeat them."""
    kinds = Counter(type(event).__name__ for event in life.events)
    accepted = sum(
        isinstance(event, Sent | Settled | Defined) and event.result is Result.ACCEPTED
        for event in life.events
    )
    print(
        f"rounds {life.first_seed} to {life.first_seed + life.rounds - 1}:"
        f" {time.time() - life.began:.0f} s, {len(life.applied_steps)} events, {accepted} accepted,"
        f" {kinds['Delivered']} delivered, {kinds['Loaded']} loads of an entity,"
        f" violations {len(life.violations)}",
        flush=True,
    )
    if not life.violations:
        return
    for at, seed, text in life.applied_steps:
        print(f"  {datetime.fromtimestamp(at, UTC):%H:%M:%S.%f} seed {seed}, {text}")
    counts = Counter(each.invariant for each in life.violations)
    for violation in sorted(life.violations, key=lambda each: each.invariant, reverse=True)[:30]:
        print(violation)
    print("violated " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"again: {life.command()}", flush=True)


def write_record(life: Life, own: Path, folder: Path) -> None:
    for number in range(2):
        log = folder / f"{life.first_seed}-{number}.log"
        log.write_bytes((own / str(number) / "broker.log").read_bytes())
    with (folder / f"{life.first_seed}.jsonl").open("w") as lines:
        for event in life.events:
            entry = {"event": type(event).__name__, **asdict(event)}
            lines.write(json.dumps(entry, default=str) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=200, help="number of rounds (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round (default: 1)")
    parser.add_argument(
        "--record", type=Path, help="folder for the record, lines of JSON, and logs"
    )
    options = parser.parse_args()
    began = time.time()
    lives = run_program(run, options)
    kinds = Counter(type(event).__name__ for life in lives for event in life.events)
    verbs = Counter(text.split()[0] for life in lives for _, _, text in life.applied_steps)
    troubles = sum((life.troubles for life in lives), Counter())
    print(f"rounds {options.rounds}, {timedelta(seconds=round(time.time() - began))}")
    print("events " + ", ".join(f"{name} {count}" for name, count in sorted(verbs.items())))
    print("recorded " + ", ".join(f"{count} {name}" for name, count in sorted(kinds.items())))
    print("clients saw " + ", ".join(f"{name} {count}" for name, count in sorted(troubles.items())))
    violations = sum(len(life.violations) for life in lives)
    print(f"violations {violations}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
