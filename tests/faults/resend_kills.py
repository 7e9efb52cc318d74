"""Kill -9 of `postbus dlq resend`, broker and Postgres, while chosen dead letters are resent.

The numbers are in a file, as a query of Spark writes them. What was interrupted is repeated, as the
guide says, and then each chosen message must be in its queue once, and each other one must be the
dead letter that it was.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient

from postbus.contract.control_messages import MAX_SEQUENCE_NUMBERS
from postbus.process.data_directory import CONTROL_TOKEN_NAME
from tests.faults.kill_programs import Bus, bus_of, manifests, parser_of, report, run_program
from tests.faults.pipeline_calls import Call, Moment, Point, Relay, Trap, relay_to
from tests.faults.victims import choose_port, wait_for_port

QUEUE = "orders"
MANIFESTS = manifests([f"{QUEUE}: lockDuration: PT5S, maxDeliveryCount: 1"])
OTHERS = 10
"""One dead letter of so many is not chosen."""

LINK_PAGES = 5
"""Receives of a link, which gets at most 20,000 messages that are not settled."""

PATIENCE_S = 600.0
VICTIMS: Final = ("command", "broker", "Postgres")
MOMENTS: Final = tuple(Point(Call.RESEND, moment) for moment in Moment)


class Terminal:
    """A shell for commands, with the settings of the broker."""

    def __init__(self, folder: Path, control_port: int) -> None:
        self._environment = os.environ | {
            "POSTBUS_CONTROL_PORT": str(control_port),
            "POSTBUS_CONTROL_TOKEN_FILE": str(folder / "broker" / CONTROL_TOKEN_NAME),
            "POSTBUS_DATA": str(folder / "broker"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "postbus", *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> str:
        """Return the output of a command. Raises `AssertionError` if it fails."""
        process = self.start(*arguments)
        output, complaint = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, complaint
        return output

    def listed(self, *arguments: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.run(*arguments, "-o", "json").splitlines()]

    def wait_for_letters(self, count: int) -> None:
        """Wait until a queue has so many dead letters. Raises `AssertionError`."""
        output, end_s = "", time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            output = self.run("dlq", "resend", QUEUE, "--all", "--dry-run")
            if output.startswith(f"{count} "):
                return
            time.sleep(0.5)
        raise AssertionError(output)


@dataclass(slots=True)
class Run:
    """The state of a run."""

    bus: Bus
    relay: Relay
    terminal: Terminal
    command: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    kills: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resent: int = 0


async def make_letters(connection_string: str, count: int) -> None:
    """Send messages, receive them all and leave them to the end of their locks."""
    async with ServiceBusClient.from_connection_string(connection_string) as client:
        async with client.get_queue_sender(QUEUE) as sender:
            for start in range(0, count, 500):
                await sender.send_messages(
                    [
                        ServiceBusMessage(
                            f"body {n}", message_id=str(n), application_properties={"n": n}
                        )
                        for n in range(start, min(start + 500, count))
                    ]
                )
        got = 0
        while got < count:  # those whose lock ends before the client takes them do not count
            async with client.get_queue_receiver(QUEUE, prefetch_count=2_000) as receiver:
                for _ in range(LINK_PAGES):
                    page = await receiver.receive_messages(2_000, max_wait_time=20)
                    got += len(page)
                    if not page:
                        return


async def peeked(run: Run, sub_queue: ServiceBusSubQueue | None) -> list[ServiceBusReceivedMessage]:
    """Return the messages of the queue, by sequence number."""
    found: list[ServiceBusReceivedMessage] = []
    number = 1
    text = run.bus.broker.connection_string
    async with (
        ServiceBusClient.from_connection_string(text) as client,
        client.get_queue_receiver(QUEUE, sub_queue=sub_queue) as receiver,
    ):
        while page := await receiver.peek_messages(1_000, sequence_number=number):
            found += page
            number = (page[-1].sequence_number or 0) + 1
    return found


def traces(letters: list[ServiceBusReceivedMessage]) -> dict[str, tuple[object, ...]]:
    """Return what must stay of each dead letter, by its id."""
    return {
        str(each.message_id): (
            each.sequence_number, str(each), each.delivery_count, each.dead_letter_reason,
            each.enqueued_time_utc,
        )
        for each in letters
    }  # fmt: skip


# --- kills --------------------------------------------------------------------------------------


def kills_of(count: int) -> Iterator[tuple[str, Point]]:
    """Yield each victim at each moment of a request."""
    pairs = list(itertools.product(VICTIMS, MOMENTS))
    random.shuffle(pairs)
    return itertools.islice(itertools.cycle(pairs), count)


async def take(run: Run, victim: str, point: Point, call: int) -> bool:
    """Kill at a request; return False if the command ended before it."""
    fell = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fall() -> None:
        if victim == "command":
            assert run.process is not None
            run.process.kill()
        elif victim == "broker":
            run.bus.broker.kill()
            run.bus.broker.start()
        else:
            os.kill(run.bus.postgres.pid, signal.SIGKILL)
            loop.run_in_executor(None, run.bus.postgres.restart).add_done_callback(
                lambda _: fell.set()
            )
            return
        fell.set()

    trap = run.relay.trap = Trap(point, call, fall)
    code = await ended(run)
    run.relay.trap = None
    if not trap.sprung.is_set():
        run.missed[f"{victim} {point}"] += 1
        return code != 0
    await fell.wait()
    run.kills[f"{victim} {point}"] += 1
    await wait_for_port(run.bus.broker.port)
    return True


async def ended(run: Run) -> int:
    """Run the command to its end; return its exit code."""
    process = run.process = run.terminal.start(*run.command)
    await asyncio.to_thread(process.communicate)
    return process.returncode


async def kill_while_resent(run: Run, options: argparse.Namespace) -> None:
    calls = -(-options.letters // MAX_SEQUENCE_NUMBERS)
    most = max(1, calls // options.kills)
    call = 0  # a command that is repeated asks for what is resent already, too
    for number, (victim, point) in enumerate(kills_of(options.kills)):
        call += random.randint(1, most)
        is_unfinished = await take(run, victim, point, call)
        print(f"{number + 1}/{options.kills} {victim} {point}", flush=True)
        if not is_unfinished:
            break
    for _ in range(3):  # the first one may find a broker that still starts
        if await ended(run) == 0:
            return
    run.problems.append("the command fails although nothing is killed any more")


def check(
    chosen: set[str],
    before: Mapping[str, object],
    there: Sequence[tuple[str, str]],
    left: Mapping[str, object],
) -> Iterator[str]:
    """Yield what is wrong. `before`, `left`: the dead letters by id; `there`: ids and bodies of
    the messages of the queue.
    """
    counts = Counter(each for each, _ in there)
    problems = {
        "chosen letters are lost": [e for e in chosen if not counts[e] and e not in left],
        "chosen letters were not resent": [e for e in chosen if e in left],
        "messages are there twice": [e for e, count in counts.items() if count > 1],
        "messages were resent and not chosen": [e for e in counts if e not in chosen],
        "messages have another body": [e for e, body in there if body != f"body {e}"],
        "other letters were changed": [
            e for e, letter in before.items() if e not in chosen and left.get(e) != letter
        ],
    }
    for what, ids in problems.items():
        if ids:
            yield f"{len(ids)} {what}, such as {min(ids)}"


# --- the run ------------------------------------------------------------------------------------


async def run_kills(options: argparse.Namespace, folder: Path) -> Run:
    """Make dead letters, resend those that are chosen under kills, and check."""
    random.seed(options.seed)
    port = choose_port()
    count = options.letters + -(-options.letters // (OTHERS - 1))
    async with AsyncExitStack() as stack:
        environment = {"POSTBUS_CONTROL_PORT": str(port)}
        bus = await stack.enter_async_context(
            bus_of(folder, options.broker, MANIFESTS, environment)
        )
        relay = await stack.enter_async_context(relay_to(port))
        run = Run(bus, relay, Terminal(folder, relay.port))
        await make_letters(bus.broker.connection_string, count)
        await asyncio.to_thread(run.terminal.wait_for_letters, count)
        before = traces(await peeked(run, ServiceBusSubQueue.DEAD_LETTER))
        chosen = {each for each in before if int(each) % OTHERS}
        file = folder / "chosen.txt"
        file.write_text("".join(f"{before[each][0]}\n" for each in chosen))
        run.command = ["dlq", "resend", QUEUE, "--numbers-file", str(file), "--yes"]
        await kill_while_resent(run, options)
        left = traces(await peeked(run, ServiceBusSubQueue.DEAD_LETTER))
        there = [(str(each.message_id), str(each)) for each in await peeked(run, None)]
        run.resent = len(there)
        run.problems += check(chosen, before, there, left)
    return run


def main() -> int:
    parser = parser_of(__doc__, 24)
    parser.add_argument(
        "--letters", type=int, default=100_000, help="dead letters to resend (default: 100000)"
    )
    began = time.time()
    run = run_program(run_kills, parser.parse_args())
    took = timedelta(seconds=round(time.time() - began))
    return report(
        f"kills {run.kills.total()}, {took}, {run.resent} resent",
        {"": run.kills, "missed: ": run.missed},
        run.problems,
    )


if __name__ == "__main__":
    sys.exit(main())
