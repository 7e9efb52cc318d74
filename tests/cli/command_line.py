"""The command line as a user has it: a folder of their own, a bus that runs there, no settings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from postbus.cli import app
from tests.dev_bus import FREE_PORTS, environment

READY_S = 60.0
CONTROL = ("--control-port", "0")


@dataclass
class CommandLine:
    """Runs `postbus` in a folder. Tests check its output and its exit code."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    announced: str = ""
    """Standard output of the bus of the folder until it was ready."""

    def environment(self) -> dict[str, str]:
        config = str(self.folder / "config")
        return environment(XDG_CONFIG_HOME=config, COLUMNS="200", **self.variables)

    def run(
        self, *arguments: str, stdin: str | bytes = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, within this process: a fifth of the time of one of its own."""
        wanted = {**self.environment(), **variables}
        unset = {name: None for name in os.environ if name not in wanted}
        with contextlib.chdir(self.folder):
            done = CliRunner().invoke(
                app,
                arguments,
                input=stdin.encode() if isinstance(stdin, str) else stdin,
                env={**unset, **wanted},
                prog_name="postbus",
            )
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(
            arguments, done.exit_code, done.stdout_bytes.decode(), done.stderr_bytes.decode()
        )

    def ok(self, *arguments: str, stdin: str | bytes = "", **variables: str) -> str:
        """Run a command that must succeed; return its standard output."""
        done = self.run(*arguments, stdin=stdin, **variables)
        assert done.returncode == 0, (arguments, done.stderr, done.stdout)
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """Run a command and return the JSON that it printed."""
        return json.loads(self.ok(*arguments, "-o", "json"))

    def lines(self, *arguments: str) -> list[dict[str, Any]]:
        """Run a command; return its lines of JSON. No line has exit code 1 and a remark."""
        done = self.run(*arguments)
        assert done.returncode == (0 if done.stdout else 1), done.stderr
        assert re.fullmatch("" if done.stdout else "postbus: no message arrived .*\n", done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def fails(self, *arguments: str, code: int, says: str, stdin: str = "", **more: str) -> str:
        """Check for one clear message, the exit code, and no traceback; return the message."""
        done = self.run(*arguments, stdin=stdin, **more)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done
        assert re.search(says, " ".join(done.stderr.split())), done.stderr
        return done.stderr


@contextmanager
def user_folder() -> Iterator[Path]:
    """Make a private folder with a short path, for a bus of its own."""
    with tempfile.TemporaryDirectory(prefix="postbus-user-") as name:
        yield Path(name)


@contextmanager
def folder_with_bus(*arguments: str) -> Iterator[CommandLine]:
    """Run `postbus dev` in a folder of its own; it must end in order on SIGTERM."""
    with user_folder() as folder:
        user = CommandLine(folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "postbus", "dev", *arguments, *FREE_PORTS, *CONTROL],
            cwd=folder,
            env=user.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                user.announced += line
                if line.startswith("ready"):
                    break
            else:
                raise AssertionError(user.announced)
            yield user
            process.terminate()
            assert process.wait(READY_S) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
