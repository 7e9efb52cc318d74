"""A bus that `postbus dev` runs as a user would start it, on free ports and without leftovers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60.0
PORTS = ("--port", "--tls-port", "--http-port", "--metrics-port", "--control-port")
FREE_PORTS = tuple(word for port in PORTS for word in (port, "0"))


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a new user without settings, with the build under test."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("POSTBUS_") or name == "POSTBUS_ACCELERATE"
    }
    return {**kept, "PYTHONPATH": str(ROOT / "dataplane"), "NO_COLOR": "1", **more}


class DevBus(NamedTuple):
    """A running bus with its printed addresses, which are URLs; `token_file` is a path."""

    connection_string: str
    metrics: str
    control: str
    token_file: str
    http: str
    authority_file: str
    pid: int

    @property
    def control_port(self) -> str:
        return self.control.rpartition(":")[2]

    @property
    def token(self) -> str:
        return Path(self.token_file).read_text(encoding="ascii").strip()

    def advance(self, duration: str) -> None:
        """Move the time of messages, with `--clock manual`."""
        request = urllib.request.Request(
            f"{self.control}/v1/clock/advance",
            json.dumps({"duration": duration}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"},
        )
        urllib.request.urlopen(request, timeout=LIMIT_S).close()


@contextmanager
def running_dev_bus(*arguments: str) -> Iterator[DevBus]:
    """Run `postbus dev` from the checkout's folder; it must end in order on SIGTERM."""
    options = ("--ephemeral", *FREE_PORTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "postbus", "dev", *arguments, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stdout is not None
    printed = ""
    try:
        for line in process.stdout:
            printed += line
            if line.startswith("ready"):
                break
        patterns = (
            r"^Endpoint=sb://\S+",
            r"http://\S+/metrics",
            r"(?<=control) +http://\S+",
            r"(?<=^token) +/\S+",
            r"(?<=^http) +http://\S+",
            r"^/\S+ca\.pem$",
        )
        found = [re.search(pattern, printed, re.MULTILINE) for pattern in patterns]
        assert all(found), printed
        texts = [each[0].strip() for each in found if each]
        yield DevBus(*texts, pid=process.pid)
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
