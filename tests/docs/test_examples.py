"""Every program in examples/ runs and has its documented effect."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import AbstractContextManager

import pytest

from tests.dev_bus import LIMIT_S, ROOT, DevBus, environment, running_dev_bus

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.slow


def running_bus(example: str) -> AbstractContextManager[DevBus]:
    """Run the bus of an example by its own instructions, with a manual clock."""
    return running_dev_bus(str(EXAMPLES / example), "--clock", "manual")


def run(example: str, *arguments: str) -> list[str]:
    """Run the program of an example to its end; return the lines it printed."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / example / f"{example}.py", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.behaviour("S39", "S55", "S255", "S258", "S264", "S271")
def test_demo_passes() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "dataplane")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "demo passed"


@pytest.mark.behaviour("S169", "S229")
def test_order_workflow_keeps_every_order_in_step() -> None:
    with running_bus("order_workflow") as bus:
        for _ in range(2):  # a bus that is not new will do
            first, *steps, last = run("order_workflow", bus.connection_string)
            assert (first, last) == ("sent 4 steps of 3 orders", "nothing left to do")
            for order in ("A-1", "A-2", "A-3"):
                taken = [line.rpartition(" ")[2] for line in steps if f" {order} is " in line]
                assert taken == ["placed", "paid", "packed", "shipped"]
            assert len(steps) == 12
            assert {line.partition(":")[0] for line in steps} == {"Ada", "Ben"}


def test_publish_subscribe_gives_each_subscription_the_copies_of_its_rules() -> None:
    with running_bus("publish_subscribe") as bus:
        assert run("publish_subscribe", bus.connection_string) == [
            "published 4 events",
            "",
            "archive:",
            "  A-1 placed amount=250 region=eu",
            "  A-2 placed amount=1500 region=us",
            "  A-3 placed amount=4000 region=eu",
            "  A-2 cancelled amount=1500 region=us",
            "",
            "large-orders:",
            "  A-2 placed RuleName=large amount=1500 priority=high region=us with_tax=1800.0",
            "  A-3 placed RuleName=large amount=4000 priority=high region=eu with_tax=4800.0",
            "",
            "europe:",
            "  A-1 placed amount=250 region=eu",
            "  A-3 placed amount=4000 region=eu",
        ]


@pytest.mark.behaviour("S39", "S255", "S264", "S271")
def test_dead_letters_are_repaired_and_processed() -> None:
    with running_bus("dead_letters") as bus:
        failed = "  I-2: attempt {} failed: could not convert string to float: '12,50'"
        why = "MaxDeliveryCountExceeded: Message could not be consumed after 3 delivery attempts."
        lines = run("dead_letters", bus.connection_string)
        parts = [part.splitlines() for part in "\n".join(lines).split("\n\n")]
        sent, working, seen, repairs, again = parts
        assert sent == ["sent 3 invoices"]
        assert sorted(working) == sorted(
            [
                "working:",
                "  I-1: booked 12.50",
                *map(failed.format, (1, 2, 3)),
                "  I-3: incomplete, dead-lettered at once",
            ]
        )
        assert sorted(seen[1:]) == [
            f"  I-2: {why}",
            "  I-3: incomplete: an invoice needs an amount",
        ]
        assert sorted(repairs[1:]) == ["  I-2: repaired and resent", "  I-3: discarded"]
        assert again == ["working again:", "  I-2: booked 12.50"]


@pytest.mark.behaviour("S84", "S85")
def test_reminders_come_when_their_hour_has_passed() -> None:
    program = EXAMPLES / "scheduled_reminder" / "scheduled_reminder.py"
    with (
        running_bus("scheduled_reminder") as bus,
        subprocess.Popen(
            [sys.executable, program, "3600", bus.connection_string],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        ) as process,
    ):
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().rstrip() for _ in range(4)]
            assert lines[0].startswith("scheduled 3 reminders for ")
            due = lines[0].split()[-2]
            assert lines[1:] == [
                "cancelled: call the bank",
                f"waiting for: water the plants, scheduled for {due}",
                f"waiting for: feed the cat, scheduled for {due}",
            ]
            bus.advance("PT1H")
            assert process.stdout.read().splitlines() == [
                "reminder: water the plants",
                "reminder: feed the cat",
                "done",
            ]
            assert process.wait(LIMIT_S) == 0
        finally:
            watchdog.cancel()
            process.kill()
