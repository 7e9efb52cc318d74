"""Run a program as root with few privileges: `confined.py KIND PROGRAM ARGUMENTS…`.

`container`: the capabilities of an ordinary container, and no user namespaces. `lone`: root is the
only account, and no user namespaces. Exits with 77 if such a machine cannot be created.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
PR_CAPBSET_DROP = 24
CONTAINER_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
"""Capabilities of container runtimes by default: CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID, …"""
CANNOT = 77
ACCOUNTS = {"container": "0 0 65536", "lone": "0 0 1"}


def main(kind: str, command: list[str]) -> None:
    made_read, made_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    child = os.fork()
    if child:
        os.close(made_write)
        if os.read(made_read, 1):
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child}/{name}").write_text(ACCOUNTS[kind])
            os.write(mapped_write, b".")
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        os._exit(CANNOT)
    os.write(made_write, b".")
    os.read(mapped_read, 1)
    try:
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    except OSError:
        os._exit(CANNOT)
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in set(range(last + 1)) - CONTAINER_CAPABILITIES:
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
