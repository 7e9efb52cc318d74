"""What people type out of habit from other tools, and what their terminals have room for."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from postbus.cli import output
from postbus.cli.message_commands import COLUMNS, DEAD_COLUMNS
from postbus.cli.output import Format, print_objects
from postbus.cli.watching import watched
from tests.command_line import CommandLine, folder_with_bus
from tests.dev_bus import LIMIT_S

TOPIC = """
apiVersion: postbus.dev/v1alpha1
kind: Topic
metadata: {name: order-events}
spec: {owner: {name: local-bus}}
---
apiVersion: postbus.dev/v1alpha1
kind: Subscription
metadata: {name: all}
spec: {owner: {name: order-events}}
"""


@pytest.fixture(scope="module")
def here() -> Iterator[CommandLine]:
    with folder_with_bus() as user:
        user.ok("apply", "-", stdin=TOPIC)
        yield user


# --- words --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kinds_and_names_as_of_other_tools(here: CommandLine) -> None:
    assert [each["name"] for each in here.json("get", "queue")] == ["queue.1"]
    assert [each["name"] for each in here.json("get", "queues", "QUEUE.1")] == ["queue.1"]
    assert [each["name"] for each in here.json("get", "subscription", "order-events")] == ["all"]
    assert here.run("get", "namespace").returncode == 0
    here.fails("get", "queus", code=2, says=r"did you mean queues\?")
    here.fails("get", "queue", "queue1", code=7, says=r"did you mean queue.1\?")


@pytest.mark.slow
def test_a_name_that_nothing_has_brings_the_nearest_one(here: CommandLine) -> None:
    here.fails("describe", "order-event", code=7, says=r"did you mean order-events\?")
    here.fails("delete", "zzz", "--yes", code=7, says="subscriptions are topic/Subscriptions/name")


@pytest.mark.slow
def test_the_context_may_stand_before_the_command(here: CommandLine) -> None:
    here.ok("context", "set", "away", "--control", "http://127.0.0.1:1")
    here.fails("--context", "away", "status", code=7, says="no bus answers at http://127.0.0.1:1")
    here.ok("--context", "away", "status", "--context", "default")
    here.ok("-C", "default", "status", POSTBUS_CONTEXT="away")


@pytest.mark.slow
def test_shell_completes_entities(here: CommandLine) -> None:
    def complete(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        done = subprocess.run(
            [sys.executable, "-m", "postbus"],
            env={**here.environment(), "_POSTBUS_COMPLETE": "complete_bash", **words},
            capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=here.folder,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split()

    everything = ["order-events", "order-events/Subscriptions/all", "queue.1"]
    assert sorted(complete("postbus send ")) == everything
    assert complete("postbus receive que") == ["queue.1"]
    assert complete("postbus describe order-events/") == ["order-events/Subscriptions/all"]
    assert complete("postbus dlq list que") == ["queue.1"]
    assert "queues" in complete("postbus get ")
    assert complete("postbus send --context none x") == []


# --- tables -------------------------------------------------------------------------------------


def shown(
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    form: Format,
) -> list[str]:
    """Return the lines on a terminal of 80 columns."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, soft_wrap=True, color_system=None)
    monkeypatch.setattr(output, "out", console)
    print_objects(rows, form, columns)
    return file.getvalue().splitlines()


MESSAGE = {
    "sequenceNumber": 12345,
    "enqueuedTime": "2030-01-31T12:00:00.123Z",
    "messageId": "0a1b2c3d4e5f60718293a4b5c6d7e8f9",
    "sessionId": None,
    "subject": "an order that was placed",
    "deliveryCount": 3,
    "body": '{"order": 1, "lines": [1, 2, 3], "text": "of which there is a lot in real life"}',
}
DEAD = {
    **MESSAGE,
    "deadLetteredTime": "2030-01-31T13:00:00.123Z",
    "deadLetterDeliveries": 3,
    "deadLetterReason": "PaymentDeclined",
    "deadLetterDescription": "The card 3 of the customer 4711 was declined by the bank, alas",
}


@pytest.mark.parametrize(("row", "columns"), [(MESSAGE, COLUMNS), (DEAD, DEAD_COLUMNS)])
def test_tables_fit_eighty_columns_and_bodies_go_first(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], columns: dict[str, str]
) -> None:
    lines = shown(monkeypatch, [row, row], columns, Format.TABLE)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert (MESSAGE["messageId"] in text, "body" in text) == (True, False)
    assert "deadLetterReason" not in columns or "reason" in text
    wide = shown(monkeypatch, [row], columns, Format.WIDE)
    assert "body" in wide[0]


async def test_watching_tells_how_fast_counts_change(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "orders", "status": "Active", "active": 5, "deadLetter": 0, "scheduled": 0}
    looks = [[row], [{**row, "active": 500_000, "deadLetter": 0}]]

    async def look() -> list[dict[str, Any]]:
        if not looks:
            raise KeyboardInterrupt
        return looks.pop(0)

    with pytest.raises(KeyboardInterrupt):
        await watched(look, Format.TABLE, 0)
    first, second = capsys.readouterr().out.split("orders")[1:]
    assert first.split()[:3] == ["Active", "5", "0"]
    active, rate, dead, dead_rate = second.split()[1:5]
    assert (active, rate[0], dead, dead_rate) == ("500000", "+", "0", "0")
