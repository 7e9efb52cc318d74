"""SIGHUP: a bus reads its manifests and Secrets again, and never ends by it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command_line import CONTROL, READY_S, CommandLine, user_folder
from tests.dev_bus import FREE_PORTS

BUS = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: %s}
spec:
  sku: {name: Standard}
  authorizationRules:
    - {name: root, rights: [Manage], secretName: root}
---
apiVersion: v1
kind: Secret
metadata: {name: root}
stringData: {primaryKey: %s}
"""
QUEUE = """
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: %s}
spec: {owner: {name: serve-bus}, lockDuration: %s}
"""
OLD, NEW = "the-key-before-it-was-changed", "the-key-after-it-was-changed"


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + READY_S
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


@contextmanager
def serving(database: str, folder: Path) -> Iterator[tuple[CommandLine, subprocess.Popen[str]]]:
    """Run `postbus serve` with data directory `d` of a folder, which its commands are told."""
    user = CommandLine(folder, {"POSTBUS_DATA": "d"})
    process = subprocess.Popen(
        [sys.executable, "-m", "postbus", "serve", "bus.yaml", *FREE_PORTS, *CONTROL],
        cwd=folder, env={**user.environment(), "POSTBUS_STORES": database},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=(folder / "log").open("w"),
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        if not any(line.startswith("ready") for line in process.stdout):
            raise AssertionError((folder / "log").read_text())
        yield user, process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def sends(user: CommandLine, key: str) -> bool:
    endpoint = user.ok("connection-string").strip().replace(OLD, key).replace(NEW, key)
    return user.run("send", "orders", "x", POSTBUS_CONNECTION_STRING=endpoint).returncode == 0


@pytest.mark.slow
def test_manifests_and_secrets_are_read_again_and_nothing_ends(database: str) -> None:
    with user_folder() as folder:
        manifests, log = folder / "bus.yaml", folder / "log"
        manifests.write_text(BUS % ("serve-bus", OLD) + QUEUE % ("orders", "PT30S"))
        with serving(database, folder) as (user, process):
            assert user.ok("status").startswith("bus")
            user.fails("send", "orders", "x", code=3, says="to what postbus connection-string")
            assert (sends(user, OLD), sends(user, NEW)) == (True, False)

            changed = QUEUE % ("orders", "PT45S") + QUEUE % ("more", "PT30S")
            manifests.write_text(BUS % ("serve-bus", NEW) + changed)
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "manifests were read again" in log.read_text())
            assert (sends(user, OLD), sends(user, NEW)) == (False, True)
            assert "lockDuration: PT45S" in user.ok("describe", "orders")
            assert [each["name"] for each in user.json("get", "queues")] == ["more", "orders"]

            manifests.write_text(BUS % ("serve-bus", OLD) + QUEUE % ("orders", "forever"))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "spec.lockDuration" in log.read_text())
            manifests.write_text(BUS % ("other-bus", OLD))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "these are manifests of other-bus" in log.read_text())
            assert sends(user, NEW)
            process.terminate()
            assert process.wait(READY_S) == 0


@pytest.mark.slow
def test_a_signal_during_the_start_ends_nothing(database: str) -> None:
    with user_folder() as folder:
        (folder / "bus.yaml").write_text(BUS % ("serve-bus", OLD))
        user = CommandLine(folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "postbus", "serve", "bus.yaml", *FREE_PORTS, *CONTROL],
            cwd=folder, env={**user.environment(), "POSTBUS_STORES": database},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        assert process.stdout is not None
        try:
            assert "opening the store" in process.stderr.readline()
            process.send_signal(signal.SIGHUP)
            assert any("manifests were read again" in line for line in process.stderr)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
