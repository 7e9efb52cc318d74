"""The walk-through of docs/guides/dead-letters.md, with a broker that is killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database
from tests.dev_bus import ROOT
from tests.faults.kill_nine import MANIFEST
from tests.faults.victims import Broker, wait_for_port

pytestmark = pytest.mark.slow

QUEUE = "orders"
LETTERS = 10_000
KEPT = LETTERS // 10
PATIENCE_S = 120.0


class Terminal:
    """A shell for commands, with the settings of the broker."""

    def __init__(self, folder: Path, control_port: int) -> None:
        self._environment = os.environ | {
            "POSTBUS_CONTROL_PORT": str(control_port),
            "POSTBUS_DATA": str(folder / "broker"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "postbus", *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> str:
        """Return the output of a command; it must not fail."""
        process = self.start(*arguments)
        output, complaint = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, complaint
        return output

    def listed(self, *arguments: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.run(*arguments, "-o", "json").splitlines()]


@pytest.fixture
def place(postgres_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[tuple[Broker, Terminal]]:
    make_database(postgres_server, "dead_letter_kills")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        control_port = probe.getsockname()[1]
    manifest = MANIFEST.replace("name: kills", f"name: {QUEUE}")
    manifest = manifest.replace("PT10S, maxDeliveryCount: 1000", "PT5S, maxDeliveryCount: 1")
    assert QUEUE in manifest
    assert "maxDeliveryCount: 1}" in manifest
    environment = {"POSTBUS_CONTROL_PORT": str(control_port), "POSTBUS_HTTP_PORT": "0"}
    dsn = dsn_of(postgres_server, "dead_letter_kills")
    broker = Broker(tmp_path, dsn, ["-m", "postbus"], manifest, environment)
    broker.start()
    try:
        yield broker, Terminal(tmp_path, control_port)
    finally:
        broker.kill()


def commands_of_the_guide() -> list[list[str]]:
    text = (ROOT / "docs" / "guides" / "dead-letters.md").read_text(encoding="utf-8")
    lines = re.findall(r"^postbus (dlq .*)$", text, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def make_letters(broker: Broker) -> None:
    """Send messages, receive them all and leave them to the end of their locks."""
    with ServiceBusClient.from_connection_string(broker.connection_string) as client:
        with client.get_queue_sender(QUEUE) as sender:
            for start in range(0, LETTERS, 500):
                sender.send_messages(
                    [
                        ServiceBusMessage(
                            f"body {n}", message_id=str(n), application_properties={"n": n}
                        )
                        for n in range(start, start + 500)
                    ]
                )
        with client.get_queue_receiver(QUEUE, prefetch_count=2_000) as receiver:
            got = 0
            while got < LETTERS:
                got += len(receiver.receive_messages(2_000, max_wait_time=20))


def wait_for_letters(terminal: Terminal, count: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        output = terminal.run("dlq", "resend", QUEUE, "--all", "--dry-run")
        if output.startswith(f"{count} "):
            return
        time.sleep(0.5)
    raise AssertionError(output)


def wait_for_resent(terminal: Terminal) -> None:
    """Return when some have been sent again, but not all."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if len(terminal.listed("peek", QUEUE, "-n", "300")) == 300:
            return
    raise AssertionError("nothing was sent again")


def test_nine_thousand_dead_letters_are_sent_again_through_a_kill(
    place: tuple[Broker, Terminal],
) -> None:
    broker, terminal = place
    asyncio.run(wait_for_port(broker.port))
    make_letters(broker)
    wait_for_letters(terminal, LETTERS)
    _summary, look, edit, count, resend = commands_of_the_guide()
    (selected,) = terminal.listed(*look)
    assert str(selected["sequenceNumber"]) in edit
    terminal.run(*edit)
    assert terminal.run(*count).startswith(f"{LETTERS - KEPT - 1} ")
    running = terminal.start(*resend)
    wait_for_resent(terminal)
    broker.kill()
    _, complaint = running.communicate(timeout=PATIENCE_S)
    assert running.returncode != 0, "it was too fast to be killed"
    assert complaint
    broker.start()
    asyncio.run(wait_for_port(broker.port))
    terminal.run(*resend)
    there = terminal.listed("peek", QUEUE, "-n", "0")
    left = terminal.listed("dlq", "list", QUEUE, "-n", "0")
    assert len(left) == KEPT
    assert Counter(each["messageId"] for each in [*there, *left]) == Counter(
        str(n) for n in range(LETTERS)
    )
    assert {int(str(each["messageId"])) % 10 for each in left} == {0}
    (edited,) = [each for each in there if each["messageId"] == "4711"]
    assert edited["body"] == "repaired"
    assert not any("DeadLetterReason" in str(each["applicationProperties"]) for each in there)
