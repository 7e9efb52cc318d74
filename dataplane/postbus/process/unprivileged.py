"""Runs a program that refuses root on behalf of root, in any folder: Postgres (ADR 9).

Two ways, tried in this order on the folder itself. In a user namespace of its own the program has
another user id, while outside its files remain root's and inaccessible to others. If no namespace
may be created, or the folder belongs to another user, it becomes `postgres` or `nobody` and keeps
one capability, to reach folders that are closed to that account.

Code between fork and exec must not import, log or wait: other threads may hold any lock.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWUSER = 0x10000000
PR_SET_SECUREBITS = 28
SECBIT_NO_SETUID_FIXUP = 1 << 2
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_OVERRIDE = 1
LINUX_CAPABILITY_VERSION_3 = 0x20080522
PROBE_S = 30.0


class NoWayDown(Exception):
    """Root can neither create a user namespace nor become another account here."""


@dataclass(frozen=True, slots=True)
class RunAs:
    """Identity of a child process.

    `uid`, `gid`: owner of its files, seen from here. `become`: called in the child between fork and
    exec, None when nothing changes. `is_shared`: other programs may run under this account, so that
    the account alone proves nothing.
    """

    uid: int
    gid: int
    become: Callable[[], None] | None = None
    is_shared: bool = False


def run_as(program: Path, folder: Path) -> RunAs:
    """Return a way to run `program`, which reads and writes `folder`.

    Raises `NoWayDown` when this process is root and cannot change its user.
    """
    if os.geteuid() != 0:
        return RunAs(os.geteuid(), os.getegid())
    account = _account()
    ways = (
        RunAs(0, 0, _enter_namespace(account)),
        RunAs(account.pw_uid, account.pw_gid, _become_account(account), is_shared=True),
    )
    reasons = []
    for way in ways:
        reason = _why_not(way, program, folder)
        if reason is None:
            return way
        reasons.append(reason)
    raise NoWayDown(
        f"Postgres does not run as root, and this root can neither make a user namespace"
        f" ({reasons[0]}) nor become {account.pw_name} ({reasons[1]}): run as another user"
        " (of a container: --user 1000), or give the address of a Postgres in POSTBUS_STORES"
    )


def _account() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise NoWayDown("running as root needs an account `postgres` or `nobody`")


def _why_not(way: RunAs, program: Path, folder: Path) -> str | None:
    """Return why a way fails, "" if the program runs and can reach the folder. The folder is given
    to the child later.
    """
    become, parent = way.become, folder.parent
    inside = f"{parent}/."
    assert become is not None

    def prepare() -> None:
        become()
        if not (os.access(inside, os.X_OK) and os.access(program, os.R_OK | os.X_OK)):
            raise PermissionError

    try:
        done = subprocess.run(
            [str(program), "--version"],
            cwd="/",
            capture_output=True,
            timeout=PROBE_S,
            check=False,
            preexec_fn=prepare,
        )
    except OSError as error:
        return f"{program}: {(error.strerror or str(error)).lower()}"
    except subprocess.SubprocessError:
        return f"not permitted here, or {parent} or {program} is closed to it"
    return None if done.returncode == 0 else f"{program} ends with {done.returncode}"


def _enter_namespace(account: pwd.struct_passwd) -> Callable[[], None]:
    """Become `account` inside and root outside the namespace, without any capability outside."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    writes = (
        ("/proc/self/setgroups", b"deny"),
        ("/proc/self/uid_map", b"%d 0 1" % account.pw_uid),
        ("/proc/self/gid_map", b"%d 0 1" % account.pw_gid),
    )

    def become() -> None:
        if unshare(CLONE_NEWUSER):
            raise OSError
        for path, text in writes:
            descriptor = os.open(path, os.O_WRONLY)
            os.write(descriptor, text)
            os.close(descriptor)

    return become


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySet(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _become_account(account: pwd.struct_passwd) -> Callable[[], None]:
    """Become `account` with CAP_DAC_OVERRIDE, an ambient capability kept over exec (Linux 4.3)."""
    libc = ctypes.CDLL(None, use_errno=True)
    prctl, capset = libc.prctl, libc.capset
    header = _CapabilityHeader(LINUX_CAPABILITY_VERSION_3, 0)
    mask = 1 << CAP_DAC_OVERRIDE
    wanted = (_CapabilitySet * 2)(_CapabilitySet(mask, mask, mask), _CapabilitySet(0, 0, 0))
    uid, gid = account.pw_uid, account.pw_gid

    def become() -> None:
        # Capabilities outlive the change of user, and initdb asks access(2), which takes them into
        # account.
        if prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0):
            raise OSError
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        if capset(ctypes.byref(header), wanted):
            raise OSError
        if prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0):
            raise OSError

    return become
