"""Errors of refusals over AMQP, and their log."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest

from postbus.amqp import conditions
from postbus.edge.access.admission import AdmissionControl
from postbus.edge.access.refusal_sums import MAX_ENTITIES, SUMMARY_S, RefusalSums
from postbus.edge.refusals import REFUSALS, ErrorMapper, status_code
from postbus.entity.commands import Refusal, Refused

RETRIED = {conditions.SERVER_BUSY, conditions.TIMEOUT}
"""Conditions that every SDK repeats after."""


@pytest.mark.behaviour("S7", "S8")
def test_only_transient_errors_are_retried() -> None:
    passing = {refusal for refusal, entry in REFUSALS.items() if entry[0] in RETRIED}
    assert passing == {Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.BUSY}
    assert {status_code(refusal) for refusal in passing} == {503, 408}


@pytest.mark.behaviour("S5", "S6")
@pytest.mark.parametrize("refusal", list(Refusal))
def test_every_text_can_be_found_in_the_log(
    refusal: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="postbus"):
        error = ErrorMapper("bus").refused(Refused(refusal, "More."), "some/{queue}")
    found = re.fullmatch(
        r".+ More\. Reference:[0-9a-f-]{36}, TrackingId:([0-9a-f-]{36}_G\d+),"
        r" SystemTracker:bus:Queue:some/\{queue\}, Timestamp:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d",
        error.description,
    )
    assert found is not None, error.description
    assert caplog.records[-1].__dict__["tracking_id"] == found.group(1)
    assert "{path}" not in error.description


class Timers:
    """Makes due calls when a test lets a minute pass."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        assert delay_s == SUMMARY_S
        self._due.append(call)

    def pass_a_minute(self) -> None:
        due, self._due = self._due, []
        for call in due:
            call()


def summaries(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """Return the summaries that were logged since the last call."""
    summed = "further requests refused"
    found = [vars(each) for each in caplog.records if each.getMessage() == summed]
    caplog.clear()
    names = ("reason", "refused", "entities")
    return [{name: each[name] for name in names} for each in found]


def test_outage_is_logged_at_once_and_then_summed_up_each_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timers = Timers()
    sums = RefusalSums(timers.later)
    away = Refusal.NOT_APPLIED
    assert sums.is_logged(away, "orders")
    assert not any(sums.is_logged(away, "orders") for _ in range(500))
    assert not any(sums.is_logged(away, "bills") for _ in range(20))
    assert sums.is_logged(Refusal.STORE_FULL, "orders")  # another reason is logged at once
    assert summaries(caplog) == []
    timers.pass_a_minute()
    assert summaries(caplog) == [
        {"reason": "not-applied", "refused": 520, "entities": "orders 500, bills 20"}
    ]
    assert not sums.is_logged(away, "bills")
    timers.pass_a_minute()
    assert summaries(caplog) == [{"reason": "not-applied", "refused": 1, "entities": "bills 1"}]
    timers.pass_a_minute()  # a quiet minute: the next outage is logged at once
    assert summaries(caplog) == []
    assert sums.is_logged(away, "orders")


def test_summary_names_the_most_refused_entities_and_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timers = Timers()
    sums = RefusalSums(timers.later)
    for number in range(MAX_ENTITIES + 51):
        sums.is_logged(Refusal.BUSY, f"q{number}" + "x" * 1_000)
    for _ in range(6):
        for number in range(1, 8):
            sums.is_logged(Refusal.BUSY, f"q{number}" + "x" * 1_000)
    timers.pass_a_minute()
    [logged] = summaries(caplog)
    named = str(logged["entities"]).split(", ")
    assert [each.split()[1] for each in named] == ["7", "7", "7", "7", "7", "1057"]
    assert logged["refused"] == MAX_ENTITIES + 50 + 42
    assert max(map(len, named)) < 110


def test_summed_up_refusals_are_logged_individually_at_level_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A tracking id of an outage is in the debug log, one of a client error always."""
    admission_control = AdmissionControl()
    admission_control.sums = RefusalSums(Timers().later)
    admission = admission_control.admit("198.51.100.7", is_full=False)
    assert admission is not None
    error_mapper = ErrorMapper("bus", admission.is_refusal_logged)
    with caplog.at_level(logging.DEBUG, logger="postbus"):
        for refusal in (Refusal.NOT_APPLIED, Refusal.LOCK_LOST, Refusal.NOT_APPLIED) * 3:
            error_mapper.refused(Refused(refusal), "q")
    logged = [(each.levelname, vars(each)["condition"]) for each in caplog.records]
    busy, lost = conditions.SERVER_BUSY, conditions.MESSAGE_LOCK_LOST
    again = ("DEBUG", busy)
    assert logged == [("INFO", busy), *[("INFO", lost), again, again] * 2, ("INFO", lost), again]
    assert len({vars(each)["tracking_id"] for each in caplog.records}) == 9


def test_missing_entity_has_the_text_that_clients_parse() -> None:
    text = ErrorMapper("bus").refused(Refused(Refusal.ENTITY_NOT_FOUND), "q").description
    assert re.match(r"The messaging entity .* could not be found", text)
