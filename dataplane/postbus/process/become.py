"""Run a program with other rights: `become.py RIGHTS UID GID PARENT FOLDER PROGRAM ARGUMENTS…`.

A small process of its own, with the standard library only, which then executes the program. The
child of a fork would not do: fork handlers of other libraries run in it, such as that of
OpenTelemetry, which starts a thread, and the kernel makes no user namespace for a process with
threads (EINVAL).

RIGHTS is `same`, `namespace` or `account` (`unprivileged`). PARENT is the process with which the
program ends, 0 for none. FOLDER is one that the program must be able to enter, "" for none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SAME, NAMESPACE, ACCOUNT = "same", "namespace", "account"
REFUSED = 126
"""Exit code if the rights, the folder or the program are not accessible."""
NOT_RUN = 127
"""Exit code if the program cannot be executed; the error is on stderr."""

CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG = 1
PR_SET_SECUREBITS = 28
SECBIT_NO_SETUID_FIXUP = 1 << 2
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_OVERRIDE = 1
LINUX_CAPABILITY_VERSION_3 = 0x20080522


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySet(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _enter_namespace(libc: ctypes.CDLL, uid: int, gid: int) -> None:
    """Become an account inside and root outside the namespace, without capabilities outside."""
    if libc.unshare(CLONE_NEWUSER):
        raise OSError
    for path, text in (
        ("/proc/self/setgroups", b"deny"),
        ("/proc/self/uid_map", b"%d 0 1" % uid),
        ("/proc/self/gid_map", b"%d 0 1" % gid),
    ):
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, text)
        os.close(descriptor)


def _become_account(libc: ctypes.CDLL, uid: int, gid: int) -> None:
    """Become an account with CAP_DAC_OVERRIDE, an ambient capability kept over exec (Linux 4.3).

    Capabilities outlive the change of user, and initdb asks access(2), which takes them into
    account.
    """
    mask = 1 << CAP_DAC_OVERRIDE
    wanted = (_CapabilitySet * 2)(_CapabilitySet(mask, mask, mask), _CapabilitySet(0, 0, 0))
    if libc.prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0):
        raise OSError
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    header = _CapabilityHeader(LINUX_CAPABILITY_VERSION_3, 0)
    if libc.capset(ctypes.byref(header), wanted):
        raise OSError
    if libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0):
        raise OSError


def _end_with(libc: ctypes.CDLL, parent: int) -> None:
    """Request SIGINT, a fast shutdown, at the parent's end; a change of rights forgets it."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the line above
        sys.exit(REFUSED)


def _environment() -> dict[str, str]:
    """Keep PG* variables of the user's shell away from the program."""
    return {name: os.environ[name] for name in ("PATH", "TZ") if name in os.environ} | {
        "LC_ALL": "C"
    }


def main(arguments: list[str]) -> None:
    rights, uid, gid, parent, folder, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if rights == NAMESPACE:
            _enter_namespace(libc, int(uid), int(gid))
        elif rights == ACCOUNT:
            _become_account(libc, int(uid), int(gid))
    except OSError:
        sys.exit(REFUSED)
    if folder and not (os.access(folder, os.X_OK) and os.access(command[0], os.R_OK | os.X_OK)):
        sys.exit(REFUSED)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    if int(parent):
        _end_with(libc, int(parent))
    try:
        os.execve(command[0], command, _environment())
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {(error.strerror or str(error)).lower()}\n")
        sys.exit(NOT_RUN)


if __name__ == "__main__":
    main(sys.argv[1:])
