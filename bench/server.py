"""A broker under measurement: started here, measured by pid, stopped by pid.

Every broker listens on loopback only and keeps all it writes below its own directory. Nothing is
ever stopped that was not started by the same object.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import procfs

LOOPBACK = "127.0.0.1"


class BenchError(Exception):
    """Something the user must put right; shown as one line."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far: of the broker's own processes and of Postgres below or beside it."""

    broker_s: float
    postgres_s: float

    @property
    def total_s(self) -> float:
        """Return the sum of both: the cost of the product."""
        return self.broker_s + self.postgres_s


class Server:
    """One broker as a child process in a session of its own."""

    key = ""
    title = ""
    # Whether a completion is answered after it is durable (rcv-settle-mode second).
    confirms_settlement = False
    user = ""
    password = ""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    # -- defined by each broker ------------------------------------------------------------------

    def missing(self) -> str | None:
        """Return the missing installation of this broker, None if it can run."""
        raise NotImplementedError

    def version(self) -> str:
        """Return the version for the report."""
        raise NotImplementedError

    def prepare(self, *, fresh: bool) -> None:
        """Write configuration; with `fresh` also throw away all data of former runs."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """Return the command that runs the broker in the foreground."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return the additional environment variables of the command."""
        return {}

    def after_start(self) -> None:
        """Create queues, where the configuration could not."""

    def address(self, queue: str) -> str:
        """Return the AMQP address of a queue."""
        return queue

    def postgres_roots(self) -> list[int]:
        """Return the pids of Postgres servers that work for this broker."""
        return []

    # -- life ------------------------------------------------------------------------------------

    def start(self, *, fresh: bool = True) -> None:
        """Start and wait until the port answers and the queues exist."""
        self.launch(fresh=fresh)
        self.wait_for_port()
        self.after_start()

    def launch(self, *, fresh: bool) -> None:
        """Start without waiting for anything."""
        if self._process is not None:
            raise BenchError(f"{self.title} runs already")
        if port_answers(self.port):
            raise BenchError(f"port {self.port} for {self.title} is in use; see --base-port")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.prepare(fresh=fresh)
        log = self.log_path().open("ab")
        with log:
            self._process = subprocess.Popen(
                self.command(),
                env={**os.environ, **self.environment()},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_port(self, limit_s: float = 90) -> None:
        """Wait until the port takes connections."""
        deadline = time.monotonic() + limit_s
        while not port_answers(self.port):
            if self._process is None or self._process.poll() is not None:
                raise BenchError(f"{self.title} ended at start; see {self.log_path()}")
            if time.monotonic() > deadline:
                raise BenchError(f"{self.title} did not open port {self.port}")
            time.sleep(0.005)

    def stop(self, limit_s: float = 60) -> None:
        """End it politely, then by force; waits until it is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        members = procfs.tree([process.pid])  # never a Postgres that was only lent
        process.terminate()
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    @property
    def is_running(self) -> bool:
        """Return whether start was called and the process is still running."""
        return self._process is not None and self._process.poll() is None

    def log_path(self) -> Path:
        """Return where the broker's output goes."""
        return self.directory / "output.log"

    # -- measuring -------------------------------------------------------------------------------

    def processes(self) -> tuple[list[procfs.Process], list[procfs.Process]]:
        """Return the broker's own processes and those of Postgres."""
        assert self._process is not None
        postgres = procfs.tree(self.postgres_roots())
        members = procfs.tree([self._process.pid])
        own = [p for p in members.values() if p.pid not in postgres and p.name != "postgres"]
        inside = {p.pid: p for p in members.values() if p.name == "postgres"}
        return own, list({**postgres, **inside}.values())

    def usage(self) -> Usage:
        """Return the CPU time used so far."""
        own, postgres = self.processes()
        return Usage(sum(p.cpu_s for p in own), sum(p.cpu_s for p in postgres))

    def resident_kib(self, field: str = "VmRSS") -> int:
        """Return resident memory of the broker's own processes; VmHWM for the highest so far."""
        own, _ = self.processes()
        return sum(procfs.memory_kib(p.pid, field) for p in own)

    def reset_high_water(self) -> None:
        """Reset VmHWM to the current resident memory."""
        own, _ = self.processes()
        for process in own:
            procfs.reset_high_water(process.pid)


def port_answers(port: int) -> bool:
    """Return whether a port on loopback takes connections."""
    try:
        socket.create_connection((LOOPBACK, port), 1).close()
    except OSError:
        return False
    return True
