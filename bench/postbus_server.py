"""Postbus itself as the broker under measurement: `postbus dev` on embedded or given Postgres."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import procfs
from postbus.fast import BUILD
from server import LOOPBACK, BenchError, Server

OWNER = "postbus-bench"
_KEY_NAME = "bench"
_SUPERUSER = "postbus"  # of the embedded Postgres
# Long enough for one run of the load client with a whole backlog in a receiver's hands.
_LOCK_DURATION = "PT5M"

_NAMESPACE = """\
apiVersion: v1
kind: Secret
metadata: {{name: bench-key}}
stringData: {{primaryKey: "{key}"}}
---
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {{name: {owner}}}
spec:
  sku: {{name: {tier}}}
  authorizationRules:
    - {{name: {rule}, rights: [Manage, Send, Listen], secretName: bench-key}}
"""
_ENTITY = """\
---
apiVersion: postbus.dev/v1alpha1
kind: {kind}
metadata: {{name: {name}}}
spec: {{owner: {{name: {owner}}}, {properties}}}
"""
_LIMITS = {
    "Standard": "maxSizeInMegabytes: 5120",
    "Premium": "maxSizeInMegabytes: 81920, maxMessageSizeInKilobytes: 102400",
}
_HEAP_SQL = """
SELECT coalesce(sum(pg_relation_size(c.oid)), 0)::bigint AS heap_bytes,
       coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint AS total_bytes
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema')
"""


def document(kind: str, name: str, owner: str, properties: str) -> str:
    """Return the manifest of an entity; `properties` as between braces in YAML."""
    return _ENTITY.format(kind=kind, name=name, owner=owner, properties=properties)


def python_build() -> str:
    """Return the version of this Python, and whether a profile guided its compiler.

    Debian's build has a profile and does not say so: its packaging does what the option does.
    """
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    debian = "--with-wheel-pkg-dir=/usr/share/python-wheels"
    is_profiled = any(each in options for each in ("--enable-optimizations", debian))
    built = "profile-guided" if is_profiled else "not profile-guided"
    return f"Python {sys.version.split()[0]} ({built})"


class Postbus(Server):
    """The broker of this repository, run by the Python that runs the benchmark."""

    key = "postbus"
    title = "Postbus"
    confirms_settlement = True
    user = _KEY_NAME

    def __init__(
        self,
        directory: Path,
        port: int,
        queues: list[str],
        *,
        dsn: str | None,
        tier: str,
        documents: str = "",
    ) -> None:
        super().__init__(directory, port)
        self.queues = queues
        self.documents = documents
        self.dsn = dsn
        self.tier = tier
        self.password = base64.b64encode(os.urandom(32)).decode()

    def missing(self) -> str | None:
        """Return the command that installs the package for this Python."""
        probe = subprocess.run(
            [sys.executable, "-m", "postbus", "--help"],
            capture_output=True,
            check=False,
            env={**os.environ, **self.environment()},
        )
        return None if probe.returncode == 0 else "pip install -e '.[dataplane,embedded]'"

    def version(self) -> str:
        """Return the versions of Postbus, Python and Postgres."""
        try:
            own = importlib.metadata.version("postbus")
        except importlib.metadata.PackageNotFoundError:
            own = "from source"
        postgres = self._postgres_version() if self.is_running else "Postgres"
        return f"{own}, {BUILD}, {python_build()}, {postgres}"

    def prepare(self, *, fresh: bool) -> None:
        """Write the manifests; `fresh` starts with an empty data directory."""
        data = self.directory / "data"
        if fresh:
            if self.dsn is not None:
                asyncio.run(_drop_partitions(self.dsn))
            shutil.rmtree(data, ignore_errors=True)
        data.mkdir(exist_ok=True)
        text = _NAMESPACE.format(owner=OWNER, key=self.password, tier=self.tier, rule=_KEY_NAME)
        properties = f"lockDuration: {_LOCK_DURATION}, {_LIMITS[self.tier]}"
        for name in self.queues:
            text += document("Queue", name, OWNER, properties)
        text += self.documents
        manifests = self.directory / "manifests.yaml"
        manifests.touch(0o600)
        manifests.write_text(text)

    @property
    def http_port(self) -> int:
        """The port that speaks everything, plain and TLS."""
        return self.port + 3

    def command(self) -> list[str]:
        """Return `postbus dev` with every option that has a default."""
        command = [sys.executable, "-m", "postbus", "dev", "manifests.yaml", "--data", "data"]
        return [*command, "--host", LOOPBACK, "--port", str(self.port)]

    def environment(self) -> dict[str, str]:
        """Let the package be found in a checkout, and name the store when one is given."""
        source = str(Path(__file__).resolve().parents[1] / "dataplane")
        path = os.environ.get("PYTHONPATH", "")
        environment = {
            "PYTHONPATH": f"{source}{os.pathsep}{path}" if path else source,
            # All would want well-known ports; metrics stay on, as in production.
            "POSTBUS_TLS_PORT": str(self.port + 4),
            "POSTBUS_HTTP_PORT": str(self.http_port),
            "POSTBUS_METRICS_PORT": str(self.port + 1),
            "POSTBUS_CONTROL_PORT": str(self.port + 2),
        }
        if self.dsn is not None:
            environment["POSTBUS_STORES"] = self.dsn
        return environment

    def postgres_roots(self) -> list[int]:
        """Return the server of the data directory, or the local one behind the given DSN."""
        if self.dsn is not None:
            return [pid] if (pid := _server_behind(self.dsn)) else []
        # The file is written in pieces while the server starts.
        lines = self._pid_file_lines()
        return [int(lines[0])] if lines and lines[0].isdigit() else []

    # -- queries of Postbus alone ----------------------------------------------------------------

    def table_bytes(self) -> tuple[int, int]:
        """Return the heap of all its tables, and the same with indexes and TOAST."""
        row = asyncio.run(_fetch_row(self.reachable_dsn(), _HEAP_SQL))
        heap, total = (int(str(value)) for value in row)
        return heap, total

    def settled_rows(self) -> int:
        """Return how many messages it keeps that are settled, in all its partitions."""
        return asyncio.run(_count_settled(self.reachable_dsn()))

    def _postgres_version(self) -> str:
        try:
            row = asyncio.run(_fetch_row(self.reachable_dsn(), "SHOW server_version"))
        except (OSError, BenchError):
            return "Postgres"
        return f"Postgres {str(row[0]).split()[0]}"

    def reachable_dsn(self) -> str:
        """Return the DSN given, or one for the private socket of the embedded server."""
        if self.dsn is not None:
            return self.dsn
        lines = self._pid_file_lines()
        if len(lines) < 5:
            raise BenchError("the embedded Postgres does not run")
        port, folder = lines[3], lines[4]  # Source: Postgres, miscadmin.h, LOCK_FILE_LINE_PORT
        return f"postgresql://{_SUPERUSER}@/postgres?host={folder}&port={port}"

    def _pid_file_lines(self) -> list[str]:
        for path in (self.directory / "data").glob("*/*/postmaster.pid"):
            with contextlib.suppress(FileNotFoundError):
                return path.read_text().splitlines()
        return []


# ---- SQL -----------------------------------------------------------------------------------------


async def _fetch_row(dsn: str, query: str) -> tuple[object, ...]:
    import asyncpg

    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        return tuple(await connection.fetchrow(query) or ())
    finally:
        await connection.close()


async def fetch_value(dsn: str, query: str) -> object:
    """Return the first column of the first row."""
    return (await _fetch_row(dsn, query) or (None,))[0]


async def run_script(dsn: str, script: str) -> None:
    """Run statements one after the other, each in a transaction of its own, on one connection."""
    import asyncpg

    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        for statement in script.split(";"):
            await connection.execute(statement)
    finally:
        await connection.close()


async def _count_settled(dsn: str) -> int:
    import asyncpg

    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        schemas = await connection.fetch(
            "SELECT schemaname FROM pg_tables WHERE tablename = 'settled'"
        )
        counts = [
            await connection.fetchval(f'SELECT count(*) FROM "{row[0]}".settled') for row in schemas
        ]
    finally:
        await connection.close()
    return sum(counts)


async def _drop_partitions(dsn: str) -> None:
    """Drop everything Postbus keeps in a database."""
    import asyncpg

    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        names = await connection.fetch(
            "SELECT nspname FROM pg_namespace WHERE nspname ~ '^(postbus|partition_[0-9]+)$'"
        )
        for row in names:
            await connection.execute(f'DROP SCHEMA "{row[0]}" CASCADE')
    finally:
        await connection.close()


def _server_behind(dsn: str) -> int | None:
    """Return the pid of a Postgres on this machine; None for one elsewhere."""
    return asyncio.run(_parent_of_backend(dsn))


async def _parent_of_backend(dsn: str) -> int | None:
    import asyncpg

    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        backend = procfs.read_process(await connection.fetchval("SELECT pg_backend_pid()"))
    finally:
        await connection.close()
    return backend.parent if backend is not None and backend.name == "postgres" else None
