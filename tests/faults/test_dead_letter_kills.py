"""The walk-through of docs/guides/dead-letters.md, with a broker that is killed in the middle."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database
from tests.dev_bus import ROOT
from tests.faults.kill_nine import MANIFEST
from tests.faults.resend_kills import QUEUE, Terminal, make_letters
from tests.faults.victims import Broker, wait_for_port
from tests.ports import free_ports

pytestmark = pytest.mark.slow

LETTERS = 10_000
KEPT = LETTERS // 10
PATIENCE_S = 120.0


@pytest.fixture
def place(postgres_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[tuple[Broker, Terminal]]:
    make_database(postgres_server, "dead_letter_kills")
    [control_port] = free_ports(1)
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
    asyncio.run(make_letters(broker.connection_string, LETTERS))
    terminal.wait_for_letters(LETTERS)
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
