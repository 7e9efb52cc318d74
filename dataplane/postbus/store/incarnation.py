"""Identity of a broker's process, and proof that a former one has ended (ADR 12).

A name proves nothing: two processes may have it, and a disconnected one may still deliver. Only
this machine itself can prove that a process has ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Container
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

PROC: Final = Path("/proc")
BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime_s() -> float:
    """Return seconds since some moment, including suspend, unlike monotonic time."""
    return time.clock_gettime(BOOT_CLOCK)


class Process(NamedTuple):
    """A process as identified by its machine.

    `boot_id` and `pid_namespace` are empty where the system does not provide them; then nothing can
    be proven. `started_ticks`: start time in kernel ticks since boot, since process ids are reused.
    `data_lock`: device and inode of the lock file in its data directory, empty without one.
    """

    host: str
    pid: int
    boot_id: str = ""
    pid_namespace: str = ""
    started_ticks: int = 0
    data_lock: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


class Broker(NamedTuple):
    """A broker: a name and its process."""

    name: str
    process: Process

    def __str__(self) -> str:
        return f"{self.name}, {self.process}"


def this_process(data_lock: str = "") -> Process:
    """Return the identity of this process; `data_lock`: see `Process`."""
    pid = os.getpid()
    try:
        boot_id = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pid_namespace = os.readlink(PROC / "self/ns/pid")
    except OSError:
        boot_id = pid_namespace = ""
    return Process(
        socket.gethostname(), pid, boot_id, pid_namespace, _started_ticks(pid) or 0, data_lock
    )


def is_provably_gone(
    former: Process, identity: UUID, ours: Process, living: Container[UUID]
) -> bool:
    """Return whether the process of a former incarnation `identity` has certainly ended.

    `living`: the incarnations of our own process. True only on the same machine and in the same
    boot: the process no longer exists, or we hold the lock that it held.
    """
    if not former.boot_id or former.boot_id != ours.boot_id:
        return False
    if former.data_lock and former.data_lock == ours.data_lock:
        return identity not in living
    if former.pid_namespace != ours.pid_namespace:
        return False
    if (former.pid, former.started_ticks) == (ours.pid, ours.started_ticks):
        return identity not in living
    return _has_ended(former.pid, former.started_ticks)


def runs_here(other: Process, ours: Process) -> bool:
    """Return whether a process appears to run on this machine, and so holds its ports."""
    is_here = (other.boot_id, other.pid_namespace) == (ours.boot_id, ours.pid_namespace)
    return is_here and bool(other.boot_id) and not _has_ended(other.pid, other.started_ticks)


def _has_ended(pid: int, started_ticks: int) -> bool:
    """Return whether a process with this start time has certainly ended.

    /proc may hide processes of other users, and shows zombies.
    """
    fields = _stat_of(pid)
    if fields is not None:
        return fields[0] in "ZX" or int(fields[19]) != started_ticks
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _started_ticks(pid: int) -> int | None:
    """Return the start time of a process, None if it cannot be read."""
    fields = _stat_of(pid)
    return None if fields is None else int(fields[19])


def _stat_of(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on, None if it cannot be read."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # the name before it may contain anything
