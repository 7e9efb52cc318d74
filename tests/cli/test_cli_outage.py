"""An outage of the store is not an empty queue: commands distinguish them and name the store."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from postbus.broker.partition.trouble import SUMMARY_S, Troubles
from postbus.cli.commands.entities import Policy, messages_of
from postbus.store.errors import StoreMisconfigured, StoreUnavailable
from tests.cli.command_line import CommandLine, folder_with_bus

AWAY = r"the store at \S+postgres\S* is unavailable: a test requested an outage"


@pytest.fixture(scope="module")
def here() -> Iterator[CommandLine]:
    with folder_with_bus() as user:
        yield user


@pytest.mark.slow
def test_exit_code_is_one_for_empty_and_seven_for_an_outage(here: CommandLine) -> None:
    receive = ("receive", "queue.1", "--wait", "0.2")
    assert here.run(*receive).returncode == 1
    here.ok("fault", "store-outage", "4s")
    here.fails(*receive, code=7, says=AWAY)
    done = here.run("send", "queue.1", "late")  # it is tried until the store is back
    assert (done.returncode, done.stdout) == (0, "sent 1 message to queue.1\n")
    assert re.search(r"postbus: .*(has not answered yet|retrying)", done.stderr)
    assert here.lines("receive", "queue.1")[0]["body"] == "late"
    assert here.run("receive", "queue.1", "--count", "0", "--wait", "0.2").returncode == 1


@pytest.mark.slow
def test_status_and_lists_name_the_store_that_is_away(here: CommandLine) -> None:
    here.ok("fault", "store-outage", "10s")
    here.fails("peek", "queue.1", code=7, says=AWAY)
    assert re.search(AWAY, here.run("status").stdout)
    listed = here.run("get", "queues")
    assert (listed.returncode, "Limited" in listed.stdout) == (0, True)
    assert re.search(f"postbus: not counted: .*{AWAY}", listed.stderr)


@pytest.mark.parametrize(
    ("count", "unavailable", "policy", "expected"),
    [
        (0, [], Policy.DELETE, ""),
        (1, [], Policy.DELETE, " and its message, which is lost"),
        (2, [], Policy.RETAIN, " and its 2 messages, which are kept for a restore"),
        (12, [1, 3], Policy.DELETE, " and at least 12 messages, which are lost"),
        (0, [1], Policy.DELETE, " and an unknown number of messages, which are lost"),
    ],
)
def test_confirmation_of_a_deletion_shows_known_message_counts(
    count: int, unavailable: list[int], policy: Policy, expected: str
) -> None:
    runtime = {"messageCount": count, "unavailablePartitions": unavailable}
    assert messages_of(runtime, policy) == expected


def test_outage_is_logged_once_and_then_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    now = 1_000.0
    host = "db.example.org:5432"
    troubles = Troubles(lambda: host, lambda: now)
    refused = StoreUnavailable("ConnectionRefusedError: [Errno 111]\nDETAIL: more")

    def new_records() -> list[logging.LogRecord]:
        found = list(caplog.records)
        caplog.clear()
        return found

    for partition in range(16):
        troubles.log(partition, "partition could not be loaded", refused)
    (first,) = new_records()
    text = "the store at db.example.org:5432 is unavailable: ConnectionRefusedError: [Errno 111]"
    assert (first.levelno, vars(first)["error"]) == (logging.WARNING, text)
    for _ in range(12):
        now += 5
        troubles.log(0, "partition could not be loaded", refused)
    (summary,) = new_records()
    assert (vars(summary)["failures"], vars(summary)["since_s"]) == (27, SUMMARY_S)
    troubles.log(0, "partition could not be loaded", StoreMisconfigured("no such"))
    assert [each.levelno for each in new_records()] == [logging.ERROR]
    troubles.log(1, "partition could not be loaded", StoreMisconfigured("no such"))
    assert not new_records()  # it lasts longer than this
    troubles.log(1, "partition could not be loaded", StoreMisconfigured("another"))
    assert [each.levelno for each in new_records()] == [logging.ERROR]
    now += SUMMARY_S
    troubles.log(0, "partition could not be loaded", refused)
    (again,) = new_records()
    assert "failures" not in vars(again)
    host = "db2.example.org:5432"  # it has moved
    assert troubles.text(refused).startswith("the store at db2.example.org:5432 is unavailable")
