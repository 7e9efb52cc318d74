"""The checker of resent dead letters finds each kind of violation."""

from __future__ import annotations

import pytest

from tests.faults.resend_kills import check

BEFORE = {"1": "a", "2": "b", "10": "c"}
THERE = [("2", "body 2"), ("1", "body 1")]
LEFT = {"10": "c"}


def test_one_copy_of_each_chosen_letter_and_the_others_as_they_were_is_right() -> None:
    assert list(check({"1", "2"}, BEFORE, THERE, LEFT)) == []


@pytest.mark.parametrize(
    ("there", "left", "problem"),
    [
        (THERE[:1], LEFT, "1 chosen letters are lost, such as 1"),
        (THERE[:1], LEFT | {"1": "a"}, "1 chosen letters were not resent, such as 1"),
        ([*THERE, THERE[0]], LEFT, "1 messages are there twice, such as 2"),
        ([*THERE, ("10", "body 10")], LEFT, "1 messages were resent and not chosen, such as 10"),
        ([THERE[0], ("1", "body 2")], LEFT, "1 messages have another body, such as 1"),
        (THERE, {}, "1 other letters were changed, such as 10"),
        (THERE, {"10": "d"}, "1 other letters were changed, such as 10"),
    ],
)
def test_each_violation_is_found(
    there: list[tuple[str, str]], left: dict[str, str], problem: str
) -> None:
    assert list(check({"1", "2"}, BEFORE, there, left)) == [problem]
