"""A pytest plugin: the fixture `postbus`, a bus of its own whose time and faults tests control.

Installed with the extra `testing`, pytest finds it by itself. The bus is a process of `postbus dev`
with a clock that only moves on and a folder that is deleted; it starts with the first test that
wants it. Imported in every run of pytest where Postbus is installed, so it loads next to nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest

MANIFESTS: Final = "postbus_manifests"
"""In the configuration of pytest: files and folders of manifests, from its own folder on."""

ANSWER_S: Final = 90.0
"""Timeout of a request to the bus; longer than its own waits."""

ANY_PORT: Final = tuple(f"--{name}port=0" for name in ("", "tls-", "http-", "metrics-", "control-"))


class BusFailed(Exception):
    """The bus did not start, or refuses what it was asked; the text says why."""


class Bus:
    """A running bus. Durations are `timedelta`s, or text in ISO 8601 such as `PT5M`."""

    def __init__(self, connection_string: str, control: str, token: str) -> None:
        """`control`: URL of the control API, which `token` opens."""
        self.connection_string = connection_string
        """For the client of an SDK."""
        self.control = control
        self._token = token

    def advance(self, duration: timedelta | str) -> None:
        """Let time pass at once; what is due by then has happened when this returns."""
        self._post("/v1/clock/advance", {"duration": _iso(duration)})

    def lose_locks(self, entity: str) -> None:
        """Let every lock of an entity run out: its messages are available again."""
        self._post("/v1/faults/lose-locks", {"entity": entity})

    def outage(self, duration: timedelta | str) -> None:
        """Simulate an outage of the store for a duration of real time."""
        self._post("/v1/faults/store-outage", {"duration": _iso(duration)})

    def _post(self, path: str, body: Mapping[str, str]) -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.control + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S):
                pass
        except urllib.error.HTTPError as error:
            answer = json.loads(error.read())
            raise BusFailed(answer.get("error") or answer.get("detail")) from None


@contextmanager
def running_bus(*manifests: Path | str) -> Iterator[Bus]:
    """Run a bus of these manifests, or one with the queue `queue.1`; raises `BusFailed`."""
    from postbus.process.local_bus import bus_of_data_directory

    with tempfile.TemporaryDirectory(prefix="postbus-") as name:
        folder = Path(name)
        log = folder / "log"
        command = [sys.executable, "-m", "postbus", "dev", *map(str, manifests)]
        command += ["--clock", "manual", "--data", str(folder / "data"), *ANY_PORT]
        with (
            log.open("wb") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            assert process.stdout is not None
            try:
                is_ready = any(line.startswith("ready") for line in process.stdout)
                found = bus_of_data_directory(folder / "data") if is_ready else None
                if found is None or found.connection_string is None or found.control is None:
                    raise BusFailed(f"the bus did not start:\n{log.read_text(errors='replace')}")
                assert found.token_file is not None
                token = Path(found.token_file).read_text(encoding="ascii").strip()
                yield Bus(found.connection_string, found.control, token)
            finally:
                process.terminate()
                try:
                    process.wait(ANSWER_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _iso(duration: timedelta | str) -> str:
    if isinstance(duration, str):
        return duration
    return f"PT{duration / timedelta(seconds=1):.3f}S"


# --- pytest -------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the configuration name manifests."""
    parser.addini(MANIFESTS, "manifests of the bus that tests get", type="paths", default=[])


@pytest.fixture(scope="session")
def postbus(pytestconfig: pytest.Config) -> Iterator[Bus]:
    """Return a bus for all tests of a run, with the manifests that `postbus_manifests` names."""
    try:
        with running_bus(*pytestconfig.getini(MANIFESTS)) as bus:
            yield bus
    except BusFailed as failure:
        pytest.fail(str(failure), pytrace=False)
