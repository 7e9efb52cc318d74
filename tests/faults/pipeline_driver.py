"""A pipeline as a process to be killed, with what Spark starts below it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "spark.master": "local[2]",
    "spark.driver.memory": "768m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.ui.enabled": "false",
}
EXECUTORS = "local-cluster[2,1,512]"
"""Two executors, each a JVM of its own with a core."""


class Driver:
    """`postbus-pipeline run FILE`, again and again."""

    def __init__(
        self, document: Path, connection_file: Path, program: list[str], *, has_executors: bool
    ) -> None:
        """`program` is what Python runs; `has_executors`: Spark's executors are processes."""
        self.log = document.with_suffix(".log")
        self._document = document
        self._connection_file = connection_file
        self._program = program
        self._settings = document.with_suffix(".conf")
        self._settings.mkdir()
        settings = SETTINGS | ({"spark.master": EXECUTORS} if has_executors else {})
        lines = "".join(f"{name} {value}\n" for name, value in settings.items())
        (self._settings / "spark-defaults.conf").write_text(lines)
        self.process: subprocess.Popen[bytes]

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in a process group of its own, which has the JVM, too."""
        environment = os.environ | {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_CONF_DIR": str(self._settings),
            "PYTHONPATH": f"{ROOT / 'dataplane'}:{ROOT / 'pipeline'}:{ROOT}",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, *self._program, "run", str(self._document),
                    "--connection-string-file", str(self._connection_file),
                ],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self.process

    def kill(self) -> None:
        """Kill driver, JVM and executors at once, unless they have ended by themselves."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill_below(self, command: str) -> bool:
        """Kill a process below the driver whose command line has a text, if there is one."""
        found = [pid for pid in below(self.process.pid) if command in command_of(pid)]
        if not found:
            return False
        with suppress(ProcessLookupError):
            os.kill(random.choice(found), signal.SIGKILL)
        return True

    def ended(self) -> str:
        """Return the end of its log, which has the reason of an exit."""
        return self.log.read_text(errors="replace")[-3_000:]


WORKER = "pyspark.daemon"
EXECUTOR = "CoarseGrainedExecutorBackend"


def below(root: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    todo = [*children.get(root, ())]
    while todo:
        pid = todo.pop()
        yield pid
        todo += children.get(pid, ())


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def has_java() -> bool:
    return shutil.which("java") is not None
