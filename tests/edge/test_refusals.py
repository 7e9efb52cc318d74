"""The one table of refusals, and the texts made from it."""

from __future__ import annotations

import logging
import re

import pytest

from postbus.amqp import conditions
from postbus.edge.refusals import REFUSALS, Explainer, status_code
from postbus.entity.commands import Refusal, Refused

RETRIED = {conditions.SERVER_BUSY, conditions.TIMEOUT}
"""Conditions that every SDK repeats after."""


def test_table_is_total() -> None:
    assert set(REFUSALS) == set(Refusal)


@pytest.mark.behaviour("S7", "S8")
def test_only_trouble_that_passes_is_retried() -> None:
    passing = {refusal for refusal, entry in REFUSALS.items() if entry[0] in RETRIED}
    assert passing == {Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.BUSY}
    assert {status_code(refusal) for refusal in passing} == {503, 408}


@pytest.mark.behaviour("S5", "S6")
@pytest.mark.parametrize("refusal", list(Refusal))
def test_every_text_can_be_found_in_the_log(
    refusal: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="postbus"):
        error = Explainer("bus").refused(Refused(refusal, "More."), "some/{queue}")
    found = re.fullmatch(
        r".+ More\. Reference:[0-9a-f-]{36}, TrackingId:([0-9a-f-]{36}_G\d+),"
        r" SystemTracker:bus:Queue:some/\{queue\}, Timestamp:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d",
        error.description,
    )
    assert found is not None, error.description
    assert caplog.records[-1].__dict__["tracking_id"] == found.group(1)
    assert "{path}" not in error.description


def test_missing_entity_is_said_as_clients_parse_it() -> None:
    text = Explainer("bus").refused(Refused(Refusal.ENTITY_NOT_FOUND), "q").description
    assert re.match(r"The messaging entity .* could not be found", text)
