"""Servers that ask for passwords, and a file of addresses as the kubelet mounts it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database, run_psql

NUMBERS = itertools.count(1)
ACCESS_RULES = """
local all postbus trust
local all absent trust
local all rejected reject
local all all scram-sha-256
"""


def ask_for_passwords(server: EmbeddedPostgres) -> None:
    """Make a running server ask every role but its superuser for a password."""
    (server.folder / "pg_hba.conf").write_text(ACCESS_RULES)
    run_psql(server, "select pg_reload_conf()")
    run_psql(server, "create role bus login")


class Database:
    """A new database on a server, owned by the role `bus`. `password` is its current one."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self.server = server
        self.name = f"changed_{next(NUMBERS)}"
        make_database(server, self.name)
        run_psql(server, f"alter database {self.name} owner to bus")
        self.change_password()

    def change_password(self) -> None:
        self.password = f"hidden{next(NUMBERS)}"
        run_psql(self.server, f"alter role bus password '{self.password}'")

    def end_connections(self, name: str = "%") -> None:
        end = "select count(pg_terminate_backend(pid)) from pg_stat_activity"
        run_psql(self.server, f"{end} where usename = 'bus' and application_name like '{name}'")

    @property
    def dsn(self) -> str:
        own = f"//bus:{self.password}@"
        return dsn_of(self.server, self.name).replace("//postbus@", own)


class Mount:
    """The file of addresses as the kubelet mounts it: a link to a folder that is replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "stores"
        self.file.symlink_to("..data/stores")

    def write(self, *lines: str) -> None:
        new = self._folder / f"..{next(NUMBERS)}"
        new.mkdir()
        (new / "stores").write_text("\n".join(lines))
        (new / "stores").chmod(0o600)
        link = self._folder / "..data_tmp"
        link.symlink_to(new.name)
        os.replace(link, self._folder / "..data")
