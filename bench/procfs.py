"""Process figures of the kernel: CPU and memory of a tree, and CPU of other processes.

CPU of a tree counts every living process and, through its parent, every one that has ended and
was waited for; so a backend that comes and goes during a measurement is not lost.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    name: str
    parent: int
    cpu_s: float


def read_process(pid: int) -> Process | None:
    """Read one process; None when it is gone. CPU includes its ended, waited-for children."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in parentheses and may itself contain any character.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    ticks = sum(int(field) for field in fields[11:15])
    return Process(pid, name, int(fields[1]), ticks / _TICKS_PER_S)


def tree(roots: list[int]) -> dict[int, Process]:
    """Return the running roots and all their descendants, by pid."""
    table = {
        process.pid: process
        for entry in os.listdir("/proc")
        if entry.isdigit() and (process := read_process(int(entry)))
    }
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: dict[int, Process] = {}
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid in table and pid not in found:
            found[pid] = table[pid]
            todo += children.get(pid, [])
    return found


def memory_kib(pid: int, field: str) -> int:
    """Return VmRSS or VmHWM of a process; 0 when it is gone or has none (a kernel thread)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field + ":")), 0)


def reset_high_water(pid: int) -> None:
    """Reset VmHWM of a process to its current use. Source: proc(5), clear_refs, 5."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class MachineTime:
    """CPU seconds of all cores since boot."""

    busy_s: float
    stolen_s: float

    @classmethod
    def read(cls) -> MachineTime:
        """Read them now."""
        with Path("/proc/stat").open() as stat:
            fields = [int(field) for field in stat.readline().split()[1:]]
        user, nice, system, _, _, _, soft_interrupts, stolen = fields[:8]
        busy = user + nice + system + soft_interrupts
        return cls(busy / _TICKS_PER_S, stolen / _TICKS_PER_S)


def processor() -> str:
    """Return the name and the number of the CPUs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else 'unknown'}"


def filesystem_of(path: Path) -> str:
    """Return the type of the file system of a directory; fsync on tmpfs has no effect."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, this_kind, *_ = line.split()
        is_inside = path.resolve().is_relative_to(mount)
        if is_inside and len(mount) >= len(best):
            best, kind = mount, this_kind
    return kind
