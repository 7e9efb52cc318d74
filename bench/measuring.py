"""One run of the load client against one broker: its cost, and CPU of other processes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from procfs import MachineTime
from server import LOOPBACK, BenchError, Server

Result: TypeAlias = dict[str, Any]  # the load client's JSON line with additions of this module

MAIN_QUEUE = "bench"
OTHER_QUEUE = "bench-other"

# Clock ticks of the machine alone can show a small share of other processes.
_UNATTRIBUTED_S = 0.04


@dataclass(slots=True)
class Cost:
    """Cost of a time span; filled at its end."""

    broker_s: float = 0
    postgres_s: float = 0
    elapsed_s: float = 0
    foreign_share: float = 0
    stolen_share: float = 0


@dataclass(frozen=True, slots=True)
class LoadClient:
    """The C++ load client."""

    binary: Path

    def arguments(self, server: Server, queue: str, *options: str | float) -> list[str]:
        """Return the command line for a broker, with how it wants to be spoken to."""
        settle = "second" if server.confirms_settlement else "first"
        addresses = ",".join(server.address(name) for name in queue.split(","))
        command = [str(self.binary), "--host", LOOPBACK, "--port", str(server.port)]
        command += ["--address", addresses, "--settle", settle]
        if server.user:
            command += ["--user", server.user, "--password", server.password]
        return [*command, *map(str, options)]

    def start(self, server: Server, queue: str, *options: str | float) -> subprocess.Popen[str]:
        """Start a client beside other processes; its output is a pipe."""
        return subprocess.Popen(
            self.arguments(server, queue, *options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, server: Server, queue: str, *options: str | float) -> Result:
        """Run a client to its end; raises BenchError when it could not even start."""
        return finish(self.start(server, queue, *options))


def finish(client: subprocess.Popen[str]) -> Result:
    """Wait for a client and read its result."""
    out, err = client.communicate()
    try:
        result: Result = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        raise BenchError(err.strip() or f"load client ended with {client.returncode}") from None
    result["is_complete"] = client.returncode == 0
    return result


@contextmanager
def costing(server: Server) -> Iterator[Cost]:
    """Measure CPU of a broker and of other processes while the block runs."""
    cost = Cost()
    usage, machine, own = server.usage(), MachineTime.read(), sum(os.times()[:4])
    start = time.monotonic()
    yield cost
    cost.elapsed_s = time.monotonic() - start
    usage_after, machine_after = server.usage(), MachineTime.read()
    cost.broker_s = usage_after.broker_s - usage.broker_s
    cost.postgres_s = usage_after.postgres_s - usage.postgres_s
    known = usage_after.total_s - usage.total_s + sum(os.times()[:4]) - own
    core_s = cost.elapsed_s * (os.cpu_count() or 1)
    busy = machine_after.busy_s - machine.busy_s
    cost.foreign_share = max(0.0, busy - known - _UNATTRIBUTED_S) / core_s
    cost.stolen_share = (machine_after.stolen_s - machine.stolen_s) / core_s


@dataclass(slots=True)
class Bench:
    """The context of every row: the client and the scale of the counts."""

    client: LoadClient
    scale: float
    rounds: int = 5  # of rows that alternate by themselves
    # Messages a bulk row moves, by broker: one to three seconds' worth each.
    bulk: dict[str, int] = field(default_factory=lambda: {"rabbitmq": 40_000, "rabbitmq4": 60_000})
    bulk_default: int = 100_000

    def count(self, number: int) -> int:
        """Scale a number of messages, but leave something to measure."""
        return max(100, round(number * self.scale))

    def bulk_count(self, server: Server) -> int:
        """Return how many messages a bulk row moves through this broker."""
        return self.count(self.bulk.get(server.key, self.bulk_default))

    def measure(self, server: Server, *options: str | float, queue: str = MAIN_QUEUE) -> Result:
        """Run the client and add CPU per message, and the machine's share of other processes."""
        with costing(server) as cost:
            result = self.client.run(server, queue, *options)
        moved = max(1, result.get("accepted", 0), result.get("completed", 0))
        result["broker_cpu_us"] = cost.broker_s * 1e6 / moved
        result["postgres_cpu_us"] = cost.postgres_s * 1e6 / moved
        result["cpu_us"] = (cost.broker_s + cost.postgres_s) * 1e6 / moved
        result["foreign_share"] = cost.foreign_share
        result["stolen_share"] = cost.stolen_share
        return result

    def fill(self, server: Server, count: int, *options: str | float) -> Result:
        """Put messages into the main queue, not as a measurement of a row."""
        arguments = ("--mode", "send", "--window", 1000, "--limit-s", 3600, "--count", count)
        result = self.client.run(server, MAIN_QUEUE, *arguments, *options)
        if not result["is_complete"]:
            raise BenchError(f"{server.title}: could not fill its queue: {reason_of(result)}")
        return result

    def drain(self, server: Server, queue: str = MAIN_QUEUE) -> int:
        """Empty a queue; return the number of its messages."""
        options = ("--mode", "receive", "--count", 50_000_000, "--settle-range", 50)
        result = self.client.run(server, queue, *options, "--quiet-s", 0.7, "--limit-s", 3600)
        return int(result["completed"])


def reason_of(result: Result) -> str:
    """Return a short reason why a run is not complete."""
    for key in ("failure", "refusal"):
        if result.get(key):
            return str(result[key])
    done = {key: result[key] for key in ("sent", "accepted", "completed") if key in result}
    return f"ended by {result['ending']} with {done} of {result['count']}"
