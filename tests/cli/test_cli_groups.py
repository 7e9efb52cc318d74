"""`postbus groups` on a running bus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.command_line import CommandLine, folder_with_bus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here() -> Iterator[CommandLine]:
    with folder_with_bus() as user:
        yield user


def test_a_group_is_created_listed_moved_and_deleted(here: CommandLine) -> None:
    assert here.json("groups", "list", "--output", "json") == []
    here.ok("send", "queue.1", "hello")
    made = here.ok("groups", "create", "queue.1", "lake", "--from", "earliest")
    assert made == "queue.1: the reader group lake is at plan 0\n"
    [group] = here.json("groups", "list", "--output", "json")
    assert (group["entity"], group["name"], group["subQueue"]) == ("queue.1", "lake", "main")
    assert group["unreadMessages"] >= 1
    assert "lake" in here.ok("groups", "list")
    moved = here.ok("groups", "reset", "queue.1", "lake", "--from", "latest")
    assert "goes on from there" in moved
    [group] = here.json("groups", "list", "--output", "json")
    assert group["unreadMessages"] == 0
    here.ok("groups", "create", "queue.1", "failures", "--dead-letters")
    here.ok("groups", "drop", "queue.1", "failures", "--dead-letters")
    here.ok("groups", "drop", "queue.1", "lake")
    assert here.json("groups", "list", "--output", "json") == []


def test_limits_are_given_shown_and_changed(here: CommandLine) -> None:
    limited = ("--max-pinned-bytes", "2000000", "--max-pinned-age", "P7D")
    here.ok("groups", "create", "queue.1", "bounded", *limited, "--on-pin-limit", "drop")
    names = ("maxPinnedBytes", "maxPinnedAge", "onPinLimit")
    [group] = here.json("groups", "list", "--output", "json")
    assert [group[name] for name in names] == [2_000_000, "P7D", "drop"]
    here.ok("groups", "create", "queue.1", "bounded")
    here.ok("groups", "create", "queue.1", "bounded", "--max-pinned-age", "PT1H")
    [group] = here.json("groups", "list", "--output", "json")
    assert [group[name] for name in names] == [None, "PT1H", "fail"]
    table = here.ok("groups", "list")
    for heading in ("lag, s", "kept bytes", "over limit"):
        assert heading in table
    here.ok("groups", "drop", "queue.1", "bounded")


def test_wrong_limits_are_named(here: CommandLine) -> None:
    make = ("groups", "create", "queue.1", "lake")
    here.fails(*make, "--max-pinned-bytes", "-1", code=7, says="maxPinnedBytes")
    here.fails(*make, "--max-pinned-bytes", "9" * 40, code=7, says="maxPinnedBytes")
    here.fails(*make, "--max-pinned-age", "7 days", code=7, says="maxPinnedAge")
    here.fails(*make, "--on-pin-limit", "drop", code=7, says="needs maxPinnedBytes")
    here.fails(*make, "--on-pin-limit", "delete", code=2, says="on-pin-limit")
    here.fails(*make, "--max-pinned-bytes", "much", code=2, says="max-pinned-bytes")
    assert here.json("groups", "list", "--output", "json") == []


def test_mistakes_are_named(here: CommandLine) -> None:
    here.fails("groups", "drop", "queue.1", "none", code=7, says="there is no reader group none")
    here.fails("groups", "create", "absent", "lake", code=7, says="absent")
    here.fails("groups", "create", "queue.1", "Lake", code=7, says="name")
    here.fails("groups", "create", "queue.1", "lake", "--from", "soon", code=7, says="start")
