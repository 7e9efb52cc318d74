"""Habits of other tools, and the width of terminals."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from postbus.cli.commands.entities import COLUMNS as ENTITY_COLUMNS
from postbus.cli.commands.entities import WIDE_COLUMNS, age, rate
from postbus.cli.commands.messages import COLUMNS, DEAD_COLUMNS
from postbus.cli.commands.watching import COLUMNS as WATCHED_COLUMNS
from postbus.cli.commands.watching import watched
from postbus.cli.formats import output
from postbus.cli.formats.output import Format, print_objects
from tests.cli.command_line import CommandLine, folder_with_bus
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
def test_kinds_and_names_of_other_tools_are_accepted(here: CommandLine) -> None:
    assert [each["name"] for each in here.json("get", "queue")] == ["queue.1"]
    assert [each["name"] for each in here.json("get", "queues", "QUEUE.1")] == ["queue.1"]
    assert [each["name"] for each in here.json("get", "subscription", "order-events")] == ["all"]
    assert here.run("get", "namespace").returncode == 0
    here.fails("get", "queus", code=2, says=r"did you mean queues\?")
    here.fails("get", "queue", "queue1", code=7, says=r"did you mean queue.1\?")


@pytest.mark.slow
def test_unknown_name_suggests_the_nearest_one(here: CommandLine) -> None:
    here.fails("describe", "order-event", code=7, says=r"did you mean order-events\?")
    here.fails("delete", "zzz", "--yes", code=7, says="subscriptions are topic/Subscriptions/name")


@pytest.mark.slow
def test_context_option_is_accepted_before_the_command(here: CommandLine) -> None:
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
def test_tables_fit_eighty_columns_and_shorten_bodies_first(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], columns: dict[str, str]
) -> None:
    lines = shown(monkeypatch, [row, row], columns, Format.TABLE)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert (MESSAGE["messageId"] in text, "body" in text) == (True, False)
    assert "deadLetterReason" not in columns or "reason" in text
    wide = shown(monkeypatch, [row], columns, Format.WIDE)
    assert "body" in wide[0]


async def test_watch_shows_rates_and_the_growth_of_dead_letters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {
        "name": "orders", "status": "Active", "active": 5, "deadLetter": 0, "scheduled": 0,
        "incomingRate": "12.5", "outgoingRate": "7", "oldestAge": "3m",
        "availability": "Available",
    }  # fmt: skip
    looks = [[row], [{**row, "deadLetter": 500_000}]]

    async def look() -> list[dict[str, Any]]:
        if not looks:
            raise KeyboardInterrupt
        return looks.pop(0)

    with pytest.raises(KeyboardInterrupt):
        await watched(look, Format.TABLE, 0)
    first, second = capsys.readouterr().out.split("orders")[1:]
    assert first.split()[:7] == ["Active", "5", "12.5", "7", "3m", "0", "0"]
    dead, dead_rate = second.split()[5:7]
    assert (dead, dead_rate[0]) == ("500000", "+")


QUEUE_ROW = {
    "name": "orders-of-the-north-east", "status": "Active", "active": 4_800_000,
    "deadLetter": 120_000, "scheduled": 5_000, "sizeInBytes": 123_456_789_012,
    "incomingRate": "10123", "outgoingRate": "99.5", "oldestAge": "119m", "deadLetterRate": "+99.5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "output"), [(ENTITY_COLUMNS, Format.TABLE), (WATCHED_COLUMNS, Format.TABLE)]
)
def test_table_of_queues_fits_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, columns: dict[str, str], output: Format
) -> None:
    lines = shown(monkeypatch, [QUEUE_ROW], columns, output)
    assert max(map(len, lines)) <= 80
    assert "orders-of-the-north-east" in "\n".join(lines)


def test_wide_table_of_queues_has_rates_and_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(shown(monkeypatch, [QUEUE_ROW], WIDE_COLUMNS, Format.WIDE))
    for heading, value in (("in/s", "10123"), ("out/s", "99.5"), ("oldest", "119m")):
        assert heading in text
        assert value in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (119, "119s"), (120, "2m"), (7_199, "120m"), (7_200, "2h"), (200_000, "2d")],
)
def test_ages_have_their_greatest_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(None, None), (0.0, "0"), (0.24, "0.2"), (99.94, "99.9"), (1_234.5, "1234")],
)
def test_small_rates_have_a_decimal_digit(per_second: float | None, text: str | None) -> None:
    assert rate(per_second) == text
