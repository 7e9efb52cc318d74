"""Causes of dead letters: the same groups as the bus makes, and reports that show hostile texts."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postbus.broker.operate import dead_letter_groups
from postbus_spark.causes import DESCRIPTION_CHARS, VARYING
from postbus_spark.jobs.dead_letters import MAX_CAUSES, html_of, json_of, lines_of, summary_of

WORDS = st.lists(st.sampled_from([*"ab19@:/.!?,;() \t='\"[]{}<>|-_ä", "://", "order", "42"]))
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@given(WORDS.map("".join))
@example("Order 4711: no price at http://a/b, see x@y.z!? (id=ab12).")
@example("a" * 300)
def test_descriptions_are_compared_as_the_bus_does(text: str) -> None:
    assert re.sub(VARYING, r"*\1", text) == dead_letter_groups.without_details(text)


def test_as_much_is_compared_as_the_bus_does() -> None:
    assert DESCRIPTION_CHARS == dead_letter_groups.DESCRIPTION_CHARS


def cause(**more: Any) -> dict[str, Any]:
    return {
        "reason": "bad", "source": "orders", "description": "no price for *", "letters": 3,
        "first_enqueued_time": AT, "last_enqueued_time": AT, "example_number": 17,
        "example_id": "m17", "example_description": "no price for 17", **more,
    }  # fmt: skip


def test_lines_show_letters_and_an_example() -> None:
    lines = list(lines_of([cause(), cause(letters=1, reason=None, description=None)]))
    assert lines[0] == "        3  bad: no price for *  (such as 17)"
    assert lines[1] == "        1  -: -  (such as 17)"
    assert lines[2] == "4 dead letters of 2 causes"
    assert summary_of([]) == "0 dead letters of 0 causes"
    assert "most frequent" in summary_of([cause()] * MAX_CAUSES)


def test_a_terminal_is_not_controlled() -> None:
    (line, _) = lines_of([cause(description="\x1b[31mred\r\n\x9b")])
    assert line.isprintable()


@pytest.mark.parametrize("name", ["reason", "source", "description", "example_id"])
def test_a_page_shows_markup_as_text(name: str) -> None:
    page = html_of("<b>orders", [cause(**{name: "<script>alert('1')</script>&amp;"})])
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&amp;amp;" in page
    assert "<h1>Dead letters of &lt;b&gt;orders</h1>" in page


def test_times_are_utc_wherever_the_report_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of Spark have times without a zone, in that of the process."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    local = datetime(2026, 1, 2, 4, 4, 5)  # noqa: DTZ001
    try:
        page = html_of("orders", [cause(first_enqueued_time=local)])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "2026-01-02T03:04:05Z" in page
    assert "04:04" not in page


def test_programs_get_all_of_a_cause() -> None:
    report = json.loads(json_of("orders", [cause()]))
    assert report["entity"] == "orders"
    [found] = report["causes"]
    assert found == cause(
        first_enqueued_time="2026-01-02T03:04:05Z", last_enqueued_time="2026-01-02T03:04:05Z"
    )
