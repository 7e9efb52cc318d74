"""Runs a program that refuses root on behalf of root, in any folder: Postgres (ADR 9).

Two ways, tried in this order on the folder itself. In a user namespace of its own the program has
another user id, while outside its files remain root's and inaccessible to others. If no namespace
may be created, or the folder belongs to another user, it becomes `postgres` or `nobody` and keeps
one capability, to reach folders that are closed to that account.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from postbus.process import become

PROBE_S = 30.0


class NoWayDown(Exception):
    """Root can neither create a user namespace nor become another account here."""


@dataclass(frozen=True, slots=True)
class RunAs:
    """Identity of a child process.

    `uid`, `gid`: owner of its files, seen from here. `rights`, `account`: those that it takes on
    (`become`). `is_shared`: other programs may run under this account, so that the account alone
    proves nothing.
    """

    uid: int
    gid: int
    rights: str = become.SAME
    account: tuple[int, int] = (0, 0)
    is_shared: bool = False

    def command(self, *command: str, reach: str = "", parent: int = 0) -> list[str]:
        """Return a command that takes on the rights and executes another.

        `reach`: folder that it must be able to enter. `parent`: process with which it ends.
        """
        uid, gid = self.account
        rights = (self.rights, str(uid), str(gid), str(parent), reach)
        return [sys.executable, "-I", "-S", become.__file__, *rights, *command]


def run_as(program: Path, folder: Path) -> RunAs:
    """Return a way to run `program`, which reads and writes `folder`.

    Raises `NoWayDown` when this process is root and cannot change its user.
    """
    if os.geteuid() != 0:
        return RunAs(os.geteuid(), os.getegid())
    account = _account()
    pair = (account.pw_uid, account.pw_gid)
    ways = (
        RunAs(0, 0, become.NAMESPACE, (account.pw_uid, account.pw_uid)),
        RunAs(*pair, become.ACCOUNT, pair, is_shared=True),
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
    """Return why a way fails, None if the program runs and can reach the folder. The folder is
    given to the child later.
    """
    parent = folder.parent
    try:
        done = subprocess.run(
            way.command(str(program), "--version", reach=f"{parent}/."),
            cwd="/",
            capture_output=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{program} did not end within {PROBE_S:.0f} s"
    if done.returncode == become.REFUSED:
        return f"not permitted here, or {parent} or {program} is closed to it"
    if done.returncode == become.NOT_RUN:
        return done.stderr.decode(errors="replace").strip()
    return None if done.returncode == 0 else f"{program} ends with {done.returncode}"
