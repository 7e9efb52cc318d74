"""The example of Spark's declarative pipelines, as a user runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from azure.servicebus import ServiceBusClient

from tests.dev_bus import ROOT, DevBus, environment, running_dev_bus

GUIDE = (ROOT / "docs" / "guides" / "spark.md").read_text(encoding="utf-8")
BIN = ROOT / ".venv-declarative" / "bin"
RUN_S = 900

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("java") is None, reason="there is no java on PATH"),
]


class Project:
    """The example in a folder, with its bus."""

    def __init__(self, folder: Path, bus: DevBus) -> None:
        self.bus = bus
        self.folder = folder
        self._project = folder / "examples" / "pipeline" / "declarative"
        shutil.copytree(ROOT / "examples" / "pipeline" / "declarative", self._project)
        for name in ("spark-pipeline.yml", "spark-defaults.conf"):
            file = self._project / name
            text = file.read_text(encoding="utf-8").replace("/tmp/lake", str(folder / "lake"))
            file.write_text(text, encoding="utf-8")
        self.call("context", "set", "d", "--control", bus.control, "--token-file", bus.token_file)
        self.call("context", "use", "d")

    def call(self, *words: str) -> str:
        """Run a command of `postbus`; return what it printed."""
        return subprocess.run(
            [sys.executable, "-m", "postbus", *words], capture_output=True, text=True, check=True,
            cwd=self.folder, env=self._environment(XDG_CONFIG_HOME=str(self.folder)),
        ).stdout  # fmt: skip

    def _environment(self, **more: str) -> dict[str, str]:
        return environment(POSTBUS_CONNECTION_STRING=self.bus.connection_string, **more)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `spark-pipelines`."""
        given = self._environment(
            PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",
            PYSPARK_PYTHON=str(BIN / "python"),
            PYTHONPATH="",
            SPARK_CONF_DIR=str(self._project),
            SPARK_LOCAL_IP="127.0.0.1",
        )
        return subprocess.run(
            [str(BIN / "spark-pipelines"), "run", *words], capture_output=True, text=True,
            check=False, timeout=RUN_S, cwd=self._project, env=given,
        )  # fmt: skip

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table, read without Spark."""
        folder = self.folder / "lake" / "declarative" / "warehouse" / table
        tables = [pq.read_table(file) for file in folder.glob("*.parquet")]
        return [row for each in tables for row in each.to_pylist()]

    def counts(self) -> list[tuple[Any, ...]]:
        """Return sku, number of orders and amount."""
        return sorted(tuple(row.values()) for row in self.rows("orders_by_sku"))

    def sent(self) -> list[str]:
        """Return the bodies of the queue that gets large orders."""
        with (
            ServiceBusClient.from_connection_string(self.bus.connection_string) as client,
            client.get_queue_receiver("orders") as receiver,
        ):
            return [str(message) for message in receiver.peek_messages(50)]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    assert BIN.exists(), "make .venv-declarative/.ready installs what it needs"
    with running_dev_bus("examples") as bus:
        yield Project(tmp_path, bus)


def test_a_declarative_project_has_each_message_once(project: Project) -> None:
    """The script of the guide, a second run, and what it says of a full refresh."""
    part = GUIDE.partition("\n## Declarative pipelines\n")[2]
    [script, *_] = re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    for words in re.findall(r"^postbus (.*)$", script, re.MULTILINE):
        project.call(*re.findall(r"(?<=')[^']+(?=')|[^' ]+", words))
    done = project.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.counts() == [("apple", 1, 50.0), ("pear", 1, 500.0)]
    large = ['{"sku":"pear","amount":500.0}']
    assert project.sent() == large

    project.call("send", "queue.1", '{"sku": "apple", "amount": 250}')
    done = project.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.counts() == [("apple", 2, 300.0), ("pear", 1, 500.0)]
    large.append('{"sku":"apple","amount":250.0}')
    assert project.sent() == large

    done = project.run("--full-refresh-all")
    assert done.returncode == 1
    assert "StaleWriter" in done.stdout + done.stderr
    assert [row["order"]["amount"] for row in project.rows("orders")] == [250.0]
    assert project.sent() == large
