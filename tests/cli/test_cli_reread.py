"""SIGHUP: a bus reads its manifests and Secrets again, and never ends by it."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from postbus.assembly.bus import Bus
from postbus.cli.serving.rereading import Rereading
from postbus.manifests.reader import BusDefinition
from postbus.process.data_directory import DataDirectory
from postbus.process.settings import Settings
from tests.broker.brokers_rig import PORTS, definition
from tests.cli.command_line import CONTROL, READY_S, CommandLine, user_folder
from tests.dev_bus import FREE_PORTS

BUS = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: %s}
spec:
  sku: {name: Standard}
  minimumTlsVersion: "%s"
  tags: {stage: "%s"}
  operatorSpec: {softDelete: {retention: %s}}
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
AT_FIRST = ("1.2", "trial", "P7D")
OLD, NEW = "the-key-before-it-was-changed", "the-key-after-it-was-changed"


def bus_of(name: str, key: str, its: tuple[str, str, str] = AT_FIRST) -> str:
    return BUS % (name, *its, key)


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + READY_S
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


@contextmanager
def serving(database: str, folder: Path) -> Iterator[tuple[CommandLine, subprocess.Popen[str]]]:
    """Run `postbus serve` with data directory `d` of a folder; its commands get that directory."""
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
def test_reload_applies_manifests_and_secrets_without_disconnects(database: str) -> None:
    with user_folder() as folder:
        manifests, log = folder / "bus.yaml", folder / "log"
        manifests.write_text(bus_of("serve-bus", OLD) + QUEUE % ("orders", "PT30S"))
        with serving(database, folder) as (user, process):
            assert user.ok("status").startswith("bus")
            user.fails(
                "send", "orders", "x", code=3, says="to the output of postbus connection-string"
            )
            assert (sends(user, OLD), sends(user, NEW)) == (True, False)

            changed = QUEUE % ("orders", "PT45S") + QUEUE % ("more", "PT30S")
            manifests.write_text(bus_of("serve-bus", NEW) + changed)
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "manifests were read again" in log.read_text())
            assert (sends(user, OLD), sends(user, NEW)) == (False, True)
            assert "lockDuration: PT45S" in user.ok("describe", "orders")
            assert [each["name"] for each in user.json("get", "queues")] == ["more", "orders"]

            manifests.write_text(bus_of("serve-bus", OLD) + QUEUE % ("orders", "forever"))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "spec.lockDuration" in log.read_text())
            manifests.write_text(bus_of("other-bus", OLD))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "these are manifests of other-bus" in log.read_text())
            assert sends(user, NEW)
            process.terminate()
            assert process.wait(READY_S) == 0


@pytest.mark.slow
def test_reload_applies_namespace_changes_except_immutable_ones(database: str) -> None:
    with user_folder() as folder:
        manifests, log = folder / "bus.yaml", folder / "log"
        manifests.write_text(bus_of("serve-bus", OLD))
        with serving(database, folder) as (user, process):
            manifests.write_text(bus_of("serve-bus", OLD, ("1.3", "live", "P30D")))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "manifests were read again" in log.read_text())
            applied = yaml.safe_load(user.ok("get", "namespace", "-o", "yaml"))["properties"]
            assert (applied["minimumTlsVersion"], applied["tags"]) == ("1.3", {"stage": "live"})
            assert applied["softDelete"] == {"retention": "P30D"}
            manifests.write_text(bus_of("serve-bus", OLD).replace("Standard", "Premium"))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: log.read_text().count("manifests were read again") == 2)
            told = yaml.safe_load(user.ok("get", "namespace", "-o", "yaml"))
            assert (told["properties"]["sku"]["name"], told["partitionCount"]) == ("Premium", 16)
            manifests.write_text(bus_of("serve-bus", OLD))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "a Premium namespace stays Premium" in log.read_text())


@pytest.mark.slow
def test_reload_signal_during_the_start_is_harmless(database: str) -> None:
    with user_folder() as folder:
        (folder / "bus.yaml").write_text(bus_of("serve-bus", OLD))
        user = CommandLine(folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "postbus", "serve", "bus.yaml", *FREE_PORTS, *CONTROL],
            cwd=folder, env={**user.environment(), "POSTBUS_STORES": database},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        assert process.stdout is not None
        try:
            assert any("opening the store" in line for line in process.stderr)
            process.send_signal(signal.SIGHUP)
            assert any("manifests were read again" in line for line in process.stderr)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


async def test_unexpected_failure_does_not_stop_later_reloads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> BusDefinition:
        if not caplog.records:
            raise RuntimeError("unforeseen")
        return definition(name="other-bus")

    async def logged(text: str) -> logging.LogRecord:
        async with asyncio.timeout(READY_S):
            while not following.done():
                for each in caplog.records:
                    if text in f"{each.exc_text} {getattr(each, 'why', '')}":
                        return each
                await asyncio.sleep(0)
        raise AssertionError("nobody follows the signal any more")

    settings = Settings.model_validate(dict.fromkeys(PORTS, 0))
    with DataDirectory(tmp_path / "bus") as data:
        bus = Bus(settings, definition(), data, is_embedded=True)
        rereading = Rereading(read)
        following = asyncio.create_task(rereading.follow(bus))
        try:
            for text in ("unforeseen", "these are manifests of other-bus"):
                rereading.ask()
                assert (await logged(text)).message == "manifests were not read again"
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
