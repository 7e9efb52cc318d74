"""Processes of our own node, as this machine sees them: signals reach pods and control plane.

Needs root on the machine of the node, not a right in the cluster. Kubelet keeps the processes of a
pod in a cgroup with its uid; those of the control plane are in the namespace of the first process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
STATE: Final = Path(os.environ.get("E2E_STATE", "e2e/.state"))


def pod_folder(uid: str) -> Path:
    """Return the folder of kubelet with the volumes of a pod."""
    return STATE / "node" / "kubelet" / "pods" / uid


def processes_of_pod(uid: str) -> list[int]:
    """Return the processes of a pod's containers, without the one that keeps its namespaces."""
    for pattern in (
        f"*/postbus-e2e-*/kubepods*/**/pod{uid}",
        f"postbus-e2e-*/kubepods*/**/pod{uid}",
    ):
        for folder in CGROUPS.glob(pattern):
            found = [
                int(each)
                for file in folder.glob("**/cgroup.procs")
                for each in file.read_text().split()
            ]
            return [each for each in found if command_of(each)[:1] != ["/pause"]]
    return []


def command_of(process: int) -> list[str]:
    """Return the arguments of a process; none if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def processes_of_program(name: str) -> list[int]:
    """Return the processes of a program of the control plane."""
    shared = namespace_of(int((STATE / "node.pid").read_text()), "pid_for_children")
    return [
        int(each.name)
        for each in Path("/proc").iterdir()
        if each.name.isdigit()
        and Path((command_of(int(each.name)) or [""])[0]).name == name
        and namespace_of(int(each.name), "pid") == shared
    ]


def namespace_of(process: int, kind: str) -> str:
    """Return the name of a namespace of a process; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{process}/ns/{kind}")
    except OSError:
        return ""


def send(what: signal.Signals, processes: list[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each, what)


@contextmanager
def stopped(processes: list[int]) -> Iterator[None]:
    """Stop processes while the block runs."""
    assert processes
    send(signal.SIGSTOP, processes)
    try:
        yield
    finally:
        send(signal.SIGCONT, processes)
