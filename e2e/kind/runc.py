#!/usr/bin/env python3
"""Run runc without what root lacks on this machine, as a runtime of docker.

`docker run --privileged` asks for all capabilities and raised limits; where root itself lacks
CAP_SYS_RESOURCE, runc refuses to start. With all capabilities this changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE"
    " NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO"
    " SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME"
    " SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG"
    " WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)  # in the order of their bits


def main(arguments: list[str]) -> None:
    """Reduce the configuration that a command of runc reads, then become runc."""
    if "create" in arguments or "run" in arguments:
        folder = value_of(arguments, "--bundle", "-b") or "."
        rewrite(Path(folder, "config.json"), lambda document: reduce(document["process"]))
    elif "exec" in arguments and (path := value_of(arguments, "--process", "-p")):
        rewrite(Path(path), reduce)
    os.execvp("runc", ["runc", *arguments])


def value_of(arguments: list[str], *options: str) -> str | None:
    for position, each in enumerate(arguments):
        name, equals, value = each.partition("=")
        if name in options:
            return value if equals else arguments[position + 1]
    return None


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def reduce(process: dict[str, Any]) -> None:
    """Take capabilities out that root lacks, and limits that only CAP_SYS_RESOURCE may raise."""
    ours = own_capabilities()
    for kind, names in (process.get("capabilities") or {}).items():
        process["capabilities"][kind] = [name for name in names or () if name in ours]
    if "CAP_SYS_RESOURCE" not in ours:
        process.pop("oomScoreAdj", None)
        process.pop("rlimits", None)


def own_capabilities() -> set[str]:
    status = Path("/proc/self/status").read_text()
    bits = int(status.partition("CapBnd:")[2].split(maxsplit=1)[0], 16)
    return {f"CAP_{name}" for bit, name in enumerate(NAMES.split()) if bits >> bit & 1}


if __name__ == "__main__":
    main(sys.argv[1:])
