"""The bus of the benchmark of pipelines: Postgres over TCP, so that JDBC can read the same rows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from postbus.process.embedded import SUPERUSER, EmbeddedPostgres
from postbus_server import OWNER, Postbus, document, fetch_value, run_script
from server import LOOPBACK, BenchError

DATABASE_HOST = "127.0.0.9"
"""An address of the loopback interface with which no other Postgres shares its port."""

SUBSCRIPTION = """\
---
apiVersion: postbus.dev/v1alpha1
kind: Subscription
metadata: {{name: all}}
spec: {{owner: {{name: {topic}}}}}
"""
LARGEST = """
select schemaname from pg_tables where tablename = 'message'
order by pg_relation_size(format('%I.message', schemaname)) desc limit 1
"""


class PipelineBus(Postbus):
    """A bus on a Postgres of its own. Each topic has one subscription, `all`."""

    def __init__(self, directory: Path, port: int, queues: list[str], topics: list[str]) -> None:
        documents = "".join(
            document("Topic", topic, OWNER, "") + SUBSCRIPTION.format(topic=topic)
            for topic in topics
        )
        self._postgres = EmbeddedPostgres(
            directory / "postgres", settings={"listen_addresses": DATABASE_HOST}
        )
        dsn = f"postgresql://{SUPERUSER}@{DATABASE_HOST}/postgres"
        super().__init__(directory, port, queues, dsn=dsn, tier="Premium", documents=documents)
        self.jdbc_url = f"jdbc:postgresql://{DATABASE_HOST}/postgres?user={SUPERUSER}"
        self.connection_file = directory / "connection-string"
        self.connection_string = (
            f"Endpoint=sb://{LOOPBACK}:{port};SharedAccessKeyName={self.user};"
            f"SharedAccessKey={self.password};UseDevelopmentEmulator=true"
        )

    def run(self, cleanup: ExitStack) -> None:
        """Start Postgres and an empty bus; `cleanup` ends them."""
        cleanup.callback(self._postgres.stop)
        self._postgres.start()
        with (self._postgres.folder / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {DATABASE_HOST}/24 trust\n")
        asyncio.run(run_script(self._postgres.dsn, "select pg_reload_conf()"))
        cleanup.callback(self.stop)
        self.start()
        self.connection_file.touch(0o600)
        self.connection_file.write_text(self.connection_string)
        address = f"http://{LOOPBACK}:{self.port + 2}"
        token = str(self.directory / "data" / "control.token")
        self.command_line("context", "set", "bench", "--control", address, "--token-file", token)
        self.command_line("context", "use", "bench")

    def message_table(self) -> str:
        """Return the table of messages of the one partition that has some."""
        found = str(asyncio.run(fetch_value(self.reachable_dsn(), LARGEST)))
        return f"{found}.message"

    def bounds(self, table: str) -> tuple[int, int]:
        """Return the lowest and the highest key of a table of messages."""
        query = f"select array[min(row_key), max(row_key)] from {table}"
        found: Any = asyncio.run(fetch_value(self.reachable_dsn(), query))
        return found[0], found[1]

    def command_line(self, *arguments: str) -> str:
        """Run `postbus` with a command on this bus; return what it printed."""
        environment = {
            **os.environ,
            "POSTBUS_CONNECTION_STRING": self.connection_string,
            "XDG_CONFIG_HOME": str(self.directory / "config"),
        }
        done = subprocess.run(
            [sys.executable, "-m", "postbus", *arguments],
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"postbus {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout
