"""Kill -9 of broker and Postgres under load through the official SDK, with a checker.

Senders and receivers run here, the broker and Postgres in other processes. Each accepted message
id, each confirmed completion and each delivery is recorded; after the last kill the remaining
messages are peeked and the record checked: nothing accepted is lost or doubled, nothing completed
comes back, delivery counts keep their promise. A send or completion with a lost answer may have
happened or not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver
from azure.servicebus.exceptions import MessageLockLostError, ServiceBusError

from postbus.process.embedded import EmbeddedPostgres
from tests.faults.kill_programs import run_program
from tests.faults.victims import ACTIVITIES, KEY, Broker, Killer, Kills, Kind, wait_for_port

QUEUE = "kills"
BACKLOG = 3_000
"""Senders wait while more messages than this are not completed yet."""

BODY_BYTES = 200
PAGED_BODY_BYTES = 3_000
PAGED_WINDOW_BYTES = 1 << 20
"""A full backlog has several times as many bytes, so that most of it is paged out."""

EXAMPLES = """
examples, each begins with `python -m tests.faults.kill_nine`:
                                       fifty kills of all kinds, a million messages
  --kills 3 --messages 6000            required of a change
  --kinds vacuum --kills 2 --messages 5000
  --kinds load,paging --seed 7
  --broker tests/faults/early_answers.py --commit-delay-ms 50 --kills 4 --messages 8000
                                       must find problems: it answers too early
"""


MANIFEST = f"""
apiVersion: v1
kind: Secret
metadata: {{name: root-key}}
stringData: {{primaryKey: {KEY}}}
---
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {{name: faults}}
spec:
  sku: {{name: Standard}}
  authorizationRules:
    - {{name: RootManageSharedAccessKey, rights: [Manage], secretName: root-key}}
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {{name: {QUEUE}}}
spec: {{owner: {{name: faults}}, lockDuration: PT10S, maxDeliveryCount: 1000}}
"""


@dataclass(slots=True)
class History:
    """Observations of the clients. Times are monotonic seconds of this process."""

    accepted: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    completed: dict[str, float] = field(default_factory=dict)
    completing: set[str] = field(default_factory=set)
    deliveries: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    in_flight: int = 0
    kills: Kills = field(default_factory=Kills)
    in_flight_at_kills: list[int] = field(default_factory=list)

    def delivered(self, message: ServiceBusReceivedMessage, started: float) -> None:
        """Check a delivery against the record; `started`: when its receive call began."""
        message_id = str(message.message_id)
        completed_at = self.completed.get(message_id)
        if completed_at is not None and completed_at < started:
            self.problems.append(f"I2: {message_id} delivered after its completion was confirmed")
        # A kill may cut off a delivery that the client or the tables never saw (ADR 19).
        seen, reported = self.deliveries[message_id], message.delivery_count or 0
        if abs(reported - seen) > self.kills.count:
            self.problems.append(
                f"I8: {message_id} reports {reported} earlier deliveries of {seen} seen"
            )
        self.deliveries[message_id] += 1
        self.completing.discard(message_id)

    def check(self, drained: list[str]) -> None:
        """Compare with the messages left in the queue; adds to `problems`."""
        twice = [key for key, count in Counter(drained).items() if count > 1]
        if twice:
            self.problems.append(f"I1: {len(twice)} messages stored twice, e.g. {twice[0]}")
        left = set(drained)
        lost = self.accepted - left - set(self.completed) - self.in_doubt - self.completing
        if lost:
            self.problems.append(f"I1: {len(lost)} accepted messages lost, e.g. {min(lost)}")
        back = left & set(self.completed)
        if back:
            self.problems.append(f"I2: {len(back)} completed messages came back, e.g. {min(back)}")


class Progress:
    """One line that moves on a terminal, a line for each kill elsewhere."""

    def __init__(self, kills: int, messages: int) -> None:
        self._kills = kills
        self._messages = messages
        self._is_moving = sys.stdout.isatty()

    def show(self, history: History, kind: Kind | None, kills: int) -> None:
        share = min(len(history.accepted) / self._messages, 1.0)
        text = (
            f"{'#' * int(share * 20):.<20} {share:4.0%}  kills {kills}/{self._kills}"
            f"  accepted {len(history.accepted)}  completed {len(history.completed)}"
        )
        if self._is_moving:
            print(f"\r{text}", end="", flush=True)
        elif kind is not None:
            in_flight = history.in_flight_at_kills[-1]
            print(f"{text}  in flight {in_flight}  during {kind.value}", flush=True)

    def end(self) -> None:
        if self._is_moving:
            print()


async def send_forever(
    client: ServiceBusClient,
    history: History,
    numbers: itertools.count[int],
    body_bytes: int,
    until: asyncio.Event,
) -> None:
    """Send batches; a batch that raised is in doubt, one that returned is accepted."""
    while not until.is_set():
        try:
            async with client.get_queue_sender(QUEUE) as sender:
                while not until.is_set():
                    if len(history.accepted) - len(history.completed) > BACKLOG:
                        await asyncio.sleep(0.02)
                        continue
                    ids = [f"m{next(numbers)}" for _ in range(random.randint(1, 40))]
                    history.in_doubt.update(ids)
                    history.in_flight += len(ids)
                    try:
                        body = b"x" * body_bytes
                        batch = [ServiceBusMessage(body, message_id=key) for key in ids]
                        await sender.send_messages(batch)
                        history.accepted.update(ids)
                        history.in_doubt.difference_update(ids)
                    finally:
                        history.in_flight -= len(ids)
        except (ServiceBusError, OSError, ValueError):
            await asyncio.sleep(0.2)


async def settle(
    receiver: ServiceBusReceiver, message: ServiceBusReceivedMessage, history: History
) -> None:
    history.in_flight += 1
    message_id = str(message.message_id)
    try:
        if random.random() < 0.05:
            await receiver.abandon_message(message)
        else:
            history.completing.add(message_id)
            await receiver.complete_message(message)
            history.completing.discard(message_id)
            history.completed[message_id] = time.monotonic()
    except MessageLockLostError:
        pass  # allowed after a restart: the message is delivered again
    finally:
        history.in_flight -= 1


async def receive_forever(client: ServiceBusClient, history: History, until: asyncio.Event) -> None:
    while not until.is_set():
        try:
            async with client.get_queue_receiver(QUEUE) as receiver:
                while not until.is_set():
                    started = time.monotonic()
                    messages = await receiver.receive_messages(100, max_wait_time=1)
                    for message in messages:
                        history.delivered(message, started)
                    await asyncio.gather(*(settle(receiver, one, history) for one in messages))
        except (ServiceBusError, OSError, ValueError):
            await asyncio.sleep(0.2)


async def drain(connection_string: str) -> list[str]:
    """Peek all remaining messages, in every state."""
    found: list[str] = []
    async with (
        ServiceBusClient.from_connection_string(connection_string) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        number = 1
        while page := await receiver.peek_messages(500, sequence_number=number):
            found += [str(message.message_id) for message in page]
            number = (page[-1].sequence_number or 0) + 1
    return found


async def run(options: argparse.Namespace, folder: Path) -> History:
    """Drive the load, kill the requested number of times, drain and check."""
    random.seed(options.seed)
    kinds = [Kind(name) for name in options.kinds.split(",")]
    delay_us = options.commit_delay_ms * 1_000
    settings = {"commit_delay": str(delay_us), "commit_siblings": "0"} if delay_us else None
    history, postgres = History(), EmbeddedPostgres(folder / "postgres", settings=settings)
    await asyncio.to_thread(postgres.start)
    broker = make_broker(options, kinds, folder, postgres.dsn)
    broker.start()
    await wait_for_port(broker.port)
    until, numbers = asyncio.Event(), itertools.count(1)
    clients = [
        ServiceBusClient.from_connection_string(broker.connection_string, retry_total=0)
        for _ in range(8)
    ]
    body_bytes = PAGED_BODY_BYTES if Kind.PAGING in kinds else BODY_BYTES
    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(send_forever(client, history, numbers, body_bytes, until))
            tasks.create_task(receive_forever(client, history, until))
        await kill_under_load(
            options, kinds, history, Killer(broker, postgres, history.kills), broker
        )
        until.set()
    for client in clients:
        await client.close()
    history.check(await drain(broker.connection_string))
    for kind in set(kinds) & set(ACTIVITIES):
        if not history.kills.caught[kind] and options.kills >= len(kinds):
            history.problems.append(f"no kill hit the moment of {kind.value}")
    await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(postgres.stop)
    return history


def make_broker(options: argparse.Namespace, kinds: list[Kind], folder: Path, dsn: str) -> Broker:
    """Return a broker that often does the work that kills must hit: VACUUM, paging."""
    program, environment = ["-m", "postbus"], {}
    if Kind.VACUUM in kinds:
        rows = min(max(options.messages // 50, 100), 100_000)
        program = [str(Path(__file__).parent / "eager_upkeep.py"), str(rows)]
    if Kind.PAGING in kinds:
        environment["POSTBUS_WINDOW_BYTES"] = str(PAGED_WINDOW_BYTES)
    command = [options.broker] if options.broker else program
    return Broker(folder, dsn, command, MANIFEST, environment)


async def kill_under_load(
    options: argparse.Namespace,
    kinds: list[Kind],
    history: History,
    killer: Killer,
    broker: Broker,
) -> None:
    """Kill in equal steps of accepted messages; return when all are accepted."""
    kills, messages = options.kills, options.messages
    progress = Progress(kills, messages)
    for kill, kind in zip(range(kills), itertools.cycle(kinds), strict=False):
        target = messages * (kill + 1) // (kills + 1)
        async with asyncio.timeout(600):
            while len(history.accepted) < target or history.in_flight < 100:
                await asyncio.sleep(0.005)
                progress.show(history, None, kill)
        await asyncio.sleep(random.random() * 0.5)
        history.in_flight_at_kills.append(history.in_flight)
        await asyncio.to_thread(killer.kill, kind)
        await wait_for_port(broker.port)
        progress.show(history, kind, kill + 1)
    while len(history.accepted) < messages:
        await asyncio.sleep(0.05)
        progress.show(history, None, kills)
    progress.end()


def kinds_of(text: str) -> str:
    """Check a list of kinds for the command line."""
    for name in text.split(","):
        Kind(name)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = ",".join(kind.value for kind in Kind)
    parser.add_argument("--kills", type=int, default=50, help="number of kills (default: 50)")
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="accepted messages (default: 1000000)"
    )
    parser.add_argument(
        "--kinds", type=kinds_of, default=every, help=f"moments, in rotation (default: {every})"
    )
    parser.add_argument(
        "--commit-delay-ms",
        type=int,
        choices=range(101),
        default=0,
        metavar="0..100",
        help="delay commits, so that more are in flight at a kill (default: 0)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of sizes and moments (default: 1)"
    )
    parser.add_argument("--broker", help="program to run as the broker (default: `-m postbus`)")
    options = parser.parse_args()
    history = run_program(run, options)
    caught = ", ".join(f"{kind.value} {count}" for kind, count in history.kills.caught.items())
    print(f"kills {history.kills.count}, of them at requested moments: {caught or 'none'}")
    print(
        f"accepted {len(history.accepted)}, completed {len(history.completed)}, sends in doubt "
        f"{len(history.in_doubt)}, completions in doubt {len(history.completing)}, "
        f"problems {len(history.problems)}"
    )
    for problem in history.problems[:20]:
        print(problem)
    return 1 if history.problems else 0


if __name__ == "__main__":
    sys.exit(main())
