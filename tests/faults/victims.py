"""A broker and a Postgres to be killed, and a killer that waits for the worst moments.

Both run as separate processes; a killed one is started again on the same address and data.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import asyncpg

from postbus.process.embedded import EmbeddedPostgres

KEY = "kill-test-key-of-brokers"


class Kind(Enum):
    """Moment of a kill. Broker and Postgres are the victims alternately if none is named."""

    BROKER = "broker"
    POSTGRES = "postgres"
    LOAD = "load"  # while the broker, killed just before, loads its partition
    VACUUM = "vacuum"  # while its upkeep runs
    PAGING = "paging"  # while it reads messages back


ACTIVITIES = {
    Kind.LOAD: (  # of the new broker: it connected later than we did
        "application_name like 'postbus writer %' and backend_start >"
        " (select backend_start from pg_stat_activity where pid = pg_backend_pid())"
    ),
    Kind.VACUUM: "state = 'active' and query ilike 'vacuum%message'",
    Kind.PAGING: (
        "state = 'active' and application_name = 'postbus reader' and query like '%m.envelope%'"
    ),
}
"""Conditions on `pg_stat_activity` that show the moment."""

LOAD_ATTEMPTS = 5
"""A load of a small backlog takes some milliseconds; a kill that comes too late is repeated."""

CATCH_S = 30.0
"""Time limit of a kill's wait for its moment; later it comes at any moment and counts as missed."""


@dataclass(slots=True)
class Kills:
    """Kills so far. `caught`: kills in the requested moment."""

    count: int = 0
    caught: Counter[Kind] = field(default_factory=Counter)
    at: list[float] = field(default_factory=list)
    """Times in seconds since the epoch."""

    def note(self) -> None:
        self.count += 1
        self.at.append(time.time())


class Broker:
    """A broker as a child process. `environment` is added to the common variables."""

    def __init__(
        self,
        folder: Path,
        dsn: str,
        program: list[str],
        manifests: str,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.port = choose_port()
        self.data = folder / "broker"
        self._program = program
        self._log = folder / "broker.log"
        self._manifests = folder / "manifests.yaml"
        self._manifests.write_text(manifests)
        self._environment = os.environ | {
            "POSTBUS_STORES": dsn,
            "POSTBUS_HOST": "127.0.0.1",
            "POSTBUS_PORT": str(self.port),
            "POSTBUS_TLS_PORT": "0",
            "POSTBUS_HTTP_PORT": "0",
            "POSTBUS_CONTROL_PORT": "0",
            "POSTBUS_METRICS_PORT": "0",
            "POSTBUS_DATA": str(self.data),
            "POSTBUS_LOG_FORMAT": "json",
            **(environment or {}),
        }
        self._log_start = 0
        self.process: subprocess.Popen[bytes]

    def start(self, *options: str, environment: dict[str, str] | None = None) -> None:
        """Start it; `environment` is added for this life only."""
        command = [sys.executable, *self._program, "serve", str(self._manifests), *options]
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                command, env=self._environment | (environment or {}), stdout=log, stderr=log
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    @property
    def has_loaded(self) -> bool:
        """Return whether a partition was loaded since the last start."""
        return b"partition loaded" in self._log.read_bytes()[self._log_start :]

    def logged(self) -> list[dict[str, str]]:
        """Return its log since the first start, without incomplete lines."""
        entries: list[dict[str, str]] = []
        for line in self._log.read_text(errors="replace").splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:  # a kill in the middle of a line, or a word of the interpreter
                continue
        return entries

    def last_words(self) -> str:
        """Return the end of its log, which has the reason of an unexpected exit."""
        return self._log.read_text(errors="replace")[-1_000:]

    @property
    def connection_string(self) -> str:
        return (
            f"Endpoint=sb://localhost:{self.port};SharedAccessKeyName=RootManageSharedAccessKey;"
            f"SharedAccessKey={KEY};UseDevelopmentEmulator=true;"
        )


class Killer:
    """Waits for the right moment and kills; its methods block, run them in a thread."""

    def __init__(self, broker: Broker, postgres: EmbeddedPostgres, kills: Kills) -> None:
        self._broker = broker
        self._postgres = postgres
        self._kills = kills
        self._is_broker_next = True

    def kill(self, kind: Kind) -> None:
        """Kill in a moment of this kind; the victim runs again when this returns."""
        match kind:
            case Kind.BROKER:
                self._kill_broker()
            case Kind.POSTGRES:
                self._kill_postgres()
            case Kind.LOAD:
                is_caught = False
                for attempt in range(LOAD_ATTEMPTS):
                    if not is_caught:
                        self._kill_broker()
                        is_caught = self._catch(kind, random.random() * 0.05 / (attempt + 1))
                self._kills.caught[kind] += is_caught
            case _:
                self._kills.caught[kind] += self._catch(kind)

    def _catch(self, kind: Kind, delay_s: float = 0.0) -> bool:
        """Kill when an activity is seen, or after a time; return whether it was seen."""
        return asyncio.run(self._watch(kind, delay_s))

    async def _watch(self, kind: Kind, delay_s: float) -> bool:
        connection = await asyncpg.connect(self._postgres.dsn)
        question = f"select exists (select from pg_stat_activity where {ACTIVITIES[kind]})"
        end_s = time.monotonic() + CATCH_S
        is_caught = False
        while not is_caught and time.monotonic() < end_s:
            is_caught = await connection.fetchval(question)
        await asyncio.sleep(delay_s)
        if kind is Kind.LOAD and self._broker.has_loaded:
            is_caught = False
        is_broker, self._is_broker_next = self._is_broker_next, not self._is_broker_next
        if is_broker:
            self._kill_broker()
        else:
            self._kill_postgres()
        connection.terminate()
        return is_caught

    def _kill_broker(self) -> None:
        self._kills.note()
        self._broker.kill()
        self._broker.start()

    def _kill_postgres(self) -> None:
        self._kills.note()
        os.kill(self._postgres.pid, signal.SIGKILL)
        self._postgres.restart()


def choose_port() -> int:
    """Return a free port that no outgoing connection takes while the broker is down."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def wait_for_port(port: int, deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return
