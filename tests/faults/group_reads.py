"""Reads of a queue whose commits become visible in another order than that of its messages.

Senders keep two commits of the partition in flight, and some commits take long. Two readers without
Spark, each with a group of its own, go on where their last read has ended: one reads batches, which
have no plan, the other one plans each range, as streams do. Each message that was accepted must
come to each reader once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import asyncpg

from postbus.cli.client.amqp_session import connected
from postbus.cli.client.connection_strings import read_connection_string
from postbus_spark.batches import decoded, readable
from postbus_spark.client import GroupClient
from postbus_spark.options import Options, read_options
from postbus_spark.schema import arrow_schema
from tests.edge.bulk.writer_client import message
from tests.faults.kill_programs import Bus, bus_of, manifests, report, run_program

QUEUE: Final = "orders"
MANIFESTS: Final = manifests([QUEUE])
SENDERS: Final = 4
MAX_SENT: Final = 150
"""Messages of a page; a second commit begins when 100 wait."""
BODY: Final = b"x" * 100

SLOW_COMMITS: Final = """
create function {schema}.wait_sometimes() returns trigger language plpgsql as $$
begin
    perform pg_sleep(case when random() < 0.25 then 0.1 else 0 end);
    return null;
end
$$;
create trigger wait_sometimes after insert on {schema}.message
for each statement execute function {schema}.wait_sometimes();
"""
PARTITIONS: Final = "select nspname from pg_namespace where nspname like 'partition%'"
SCHEMA: Final = arrow_schema(["message_id"])


@dataclass(slots=True)
class Run:
    """The state of a run. `found`: what each reader got, by its group."""

    bus: Bus
    messages: int
    accepted: list[str] = field(default_factory=list)
    found: dict[str, list[str]] = field(default_factory=dict)
    reads: Counter[str] = field(default_factory=Counter)
    is_sent: threading.Event = field(default_factory=threading.Event)
    problems: list[str] = field(default_factory=list)

    def options(self, group: str) -> Options:
        file = str(self.bus.connection_file)
        return read_options({"entity": QUEUE, "readerGroup": group, "connectionStringFile": file})


async def slow_down(dsn: str) -> None:
    """Let one commit of messages in four take 100 ms: the next one overtakes it."""
    connection = await asyncpg.connect(dsn)
    for schema in await connection.fetch(PARTITIONS):
        await connection.execute(SLOW_COMMITS.replace("{schema}", schema["nspname"]))
    await connection.close()


async def send(run: Run, sender_number: int) -> None:
    """Send pages as long as messages are missing; what the bus has confirmed is accepted."""
    endpoint = read_connection_string(run.bus.broker.connection_string)
    async with connected(endpoint, QUEUE) as session:
        sender = await session.sender(QUEUE)
        for page in itertools.count():
            if len(run.accepted) >= run.messages:
                return
            count = random.randint(1, MAX_SENT)
            ids = [f"{sender_number}-{page}-{each}" for each in range(count)]
            under_way = [await sender.begin(message(BODY, each)) for each in ids]
            for each in under_way:
                await sender.confirmed(each)
            run.accepted += ids


# --- readers: they go on until a read that began when everything was sent ------------------------


def read_in_batches(run: Run, group_name: str) -> None:
    """Read in batches, each from the end of the one before."""
    options = run.options(group_name)
    client = GroupClient(options)
    is_last = False
    while not is_last:
        is_last = run.is_sent.is_set()
        group, ranges = readable(client, options)
        for each in client.row_ranges(group, ranges, 1):
            for batch in decoded(each, SCHEMA):
                run.found[group_name] += batch["message_id"].to_pylist()
        ends = {partition: end for partition, (_, end) in ranges.items()}
        options = replace(options, starting=client.offset(group, ends))
        run.reads[group_name] += 1


def read_planned(run: Run, group_name: str) -> None:
    """Plan each range from the end of the one before, read and settle it."""
    client = GroupClient(run.options(group_name))
    group = client.claim()
    is_last = False
    while not is_last:
        is_last = run.is_sent.is_set()
        starts = {partition: end for partition, (_, end) in group.plan.ranges.items()}
        ends = {each.partition: each.next_position for each in client.ranges().partitions}
        ranges = {each: (start, max(start, ends[each])) for each, start in starts.items()}
        group = client.plan(group.epoch, ranges)
        for wanted in client.row_ranges(group, ranges, 1):
            for batch in decoded(wanted, SCHEMA):
                run.found[group_name] += batch["message_id"].to_pylist()
        group = client.settle(group.epoch, group.plan.number)
        run.reads[group_name] += 1


READERS: Final[dict[str, Callable[[Run, str], None]]] = {
    "batches": read_in_batches,
    "plans": read_planned,
}


# --- the run ------------------------------------------------------------------------------------


def check(accepted: list[str], found: dict[str, list[str]]) -> list[str]:
    """Return what is wrong with what the readers got."""
    problems = []
    for group, ids in found.items():
        counts = Counter(ids)
        lost = [each for each in accepted if not counts[each]]
        twice = [each for each, count in counts.items() if count > 1]
        if lost:
            problems.append(f"{group}: {len(lost)} accepted messages are lost, such as {lost[0]}")
        if twice:
            problems.append(f"{group}: {len(twice)} messages came twice, such as {twice[0]}")
    return problems


async def run_reads(options: argparse.Namespace, folder: Path) -> Run:
    random.seed(options.seed)
    async with bus_of(folder, options.broker, MANIFESTS) as bus:
        run = Run(bus, options.messages)
        for name in READERS:
            run.found[name] = []
            await asyncio.to_thread(bus.create_group, QUEUE, name, "tap")
        await slow_down(bus.postgres.dsn)
        async with asyncio.TaskGroup() as tasks:
            for name, read in READERS.items():
                tasks.create_task(asyncio.to_thread(read, run, name))
            try:
                await asyncio.gather(*(send(run, number) for number in range(SENDERS)))
            finally:
                run.is_sent.set()
    run.problems += check(run.accepted, run.found)
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--messages", type=int, default=10_000, help="messages that are sent (default: 10000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of sizes (default: 1)")
    parser.add_argument("--broker", default="-m postbus", help="program to run as the broker")
    began_s = time.monotonic()
    run = run_program(run_reads, parser.parse_args())
    took_s = time.monotonic() - began_s
    found = ", ".join(f"{len(ids)} in {group}" for group, ids in run.found.items())
    return report(
        f"{took_s:.0f} s, {len(run.accepted)} accepted, {found}",
        {"reads: ": run.reads},
        run.problems,
    )


if __name__ == "__main__":
    sys.exit(main())
