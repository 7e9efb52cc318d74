"""What programs that kill pipelines have in common: options, a bus behind a relay, a report."""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from postbus.process.embedded import EmbeddedPostgres
from postbus_spark.tokens import load_credentials
from postbus_spark.transport import Bus as Address
from postbus_spark.transport import call
from tests.faults.pipeline_calls import Relay, relay_to
from tests.faults.victims import KEY, Broker, wait_for_port

SHOWN = 20
"""Problems that a report shows."""


def manifests(queues: Iterable[str]) -> str:
    """Return the manifests of a bus of two partitions. `queues`: each `name` or `name: spec`."""
    namespace = f"""apiVersion: v1
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
  authorizationRules:
    - {{name: RootManageSharedAccessKey, rights: [Manage], secretName: root-key}}
"""
    documents = [namespace]
    for queue in queues:
        name, _, spec = queue.partition(": ")
        documents.append(
            "apiVersion: postbus.dev/v1alpha1\nkind: Queue\n"
            f"metadata: {{name: {name}}}\n"
            f"spec: {{owner: {{name: faults}}{', ' if spec else ''}{spec}}}\n"
        )
    return "---\n".join(documents)


def parser_of(text: str, kills: int, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options that these programs share. `text`: the module's."""
    parser = argparse.ArgumentParser(
        description=text.splitlines()[0],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kills", type=int, default=kills, help=f"number of kills (default: {kills})"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of choices (default: 1)")
    parser.add_argument("--broker", default="-m postbus", help="program to run as the broker")
    return parser


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pipeline", default="-m postbus_spark.jobs.main", help="program to run as the pipeline"
    )


@dataclass(frozen=True, slots=True)
class Bus:
    """A bus to be killed. `connection_file`: leads to its relay."""

    folder: Path
    postgres: EmbeddedPostgres
    broker: Broker
    relay: Relay
    connection_file: Path

    def create_group(self, queue: str, name: str, kind: str) -> None:
        """Create a reader group that begins with the first message."""
        credentials = load_credentials(str(self.connection_file))
        body = {"kind": kind, "start": "earliest"}
        token = credentials.token("", time.time())
        target = f"/{queue}/$bulk/groups/{name}"
        call(Address(credentials.base_url), "PUT", target, token, body)


@asynccontextmanager
async def bus_of(
    folder: Path, program: str, manifests: str, environment: dict[str, str] | None = None
) -> AsyncIterator[Bus]:
    """Run Postgres, a broker (`program`: what Python runs) and a relay to it."""
    postgres = EmbeddedPostgres(folder / "postgres")
    await asyncio.to_thread(postgres.start)
    broker = Broker(folder, postgres.dsn, program.split(), manifests, environment)
    broker.start()
    try:
        await wait_for_port(broker.port)
        async with relay_to(broker.port) as relay:
            file = folder / "connection"
            file.write_text(broker.connection_string.replace(f":{broker.port};", f":{relay.port};"))
            yield Bus(folder, postgres, broker, relay, file)
    finally:
        await asyncio.to_thread(broker.stop)
        await asyncio.to_thread(postgres.stop)


Ended = TypeVar("Ended")


def run_program(
    run: Callable[[argparse.Namespace, Path], Awaitable[Ended]], options: argparse.Namespace
) -> Ended:
    """Run in a folder of its own, without what clients log of each lost connection."""
    for noisy in ("azure", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL + 1)

    async def ended(folder: str) -> Ended:
        return await run(options, Path(folder))

    with tempfile.TemporaryDirectory(prefix="postbus-kill-") as folder:
        return asyncio.run(ended(folder))


def report(summary: str, counts: dict[str, Counter[str]], problems: list[str]) -> int:
    """Print a report and return the exit code. `counts`: prefix of lines -> numbers by name."""
    print(summary)
    for prefix, found in counts.items():
        for each, count in sorted(found.items()):
            print(f"  {prefix}{each} {count}")
    print(f"violations {len(problems)}")
    for problem in problems[:SHOWN]:
        print(problem)
    return 1 if problems else 0
