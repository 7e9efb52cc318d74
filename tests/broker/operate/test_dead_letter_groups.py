"""Normalized descriptions of dead letters, and counts by them."""

from __future__ import annotations

import time

import pytest

from postbus.broker.operate.dead_letter_groups import (
    DESCRIPTION_CHARS,
    MAX_GROUPS,
    DeadLetterGroups,
    without_details,
)
from postbus.entity.commands import Death, MessageState, PeekedMessage
from postbus.message.envelope import Envelope
from postbus.message.patch import (
    DEAD_LETTER_DESCRIPTION,
    DEAD_LETTER_REASON,
    merge_properties,
)


def letter(
    number: int, reason: str | None, text: str | None = None, at_ms: int | None = None
) -> PeekedMessage:
    named: dict[str, object] = {DEAD_LETTER_REASON: reason, DEAD_LETTER_DESCRIPTION: text}
    given = {name: value for name, value in named.items() if value is not None}
    section = merge_properties(b"", given) if given else b""
    death = None if at_ms is None else Death(at_ms)
    envelope = Envelope(application_properties=section)
    return PeekedMessage(number, 0, 0, MessageState.ACTIVE, envelope, death)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("card A-3 was declined.", "card * was declined."),
        ("timeout after 30s: db.example:5432 (10.0.0.7)", "timeout after *: * (*)"),
        ("order 6f1d3c5a-0b0e-4b53-9d5c-2f1d8a6f7c10, line 4", "order *, line *"),
        ("no answer of https://pay.example/charge", "no answer of *"),
        ("mail of a.b@example.com bounced, retry=3", "mail of * bounced, retry=*"),
        ("Message could not be consumed after 10 delivery attempts.",
         "Message could not be consumed after * delivery attempts."),
        ("nothing varies", "nothing varies"),
        ("", ""),
    ],
)  # fmt: skip
def test_numbers_ids_and_addresses_are_taken_out(text: str, expected: str) -> None:
    assert without_details(text) == expected


def test_dead_letters_are_counted_by_reason_and_normalized_description() -> None:
    groups = DeadLetterGroups()
    for number in range(5):
        assert groups.add(letter(number, "bad", f"card {number} declined", 1_000 - number))
    assert groups.add(letter(9, "bad", "no stock", 5_000))
    assert groups.add(letter(10, "worse", "card 1 declined"))
    assert groups.add(letter(11, None))
    assert groups.add(letter(12, None))
    found = groups.largest_first()
    assert [(each.reason, each.description, each.count) for each in found] == [
        ("bad", "card * declined", 5),
        (None, None, 2),
        ("bad", "no stock", 1),
        ("worse", "card * declined", 1),
    ]
    cards = found[0]
    assert (cards.first_ms, cards.last_ms) == (996, 1_000)
    assert (cards.example, cards.example_description) == (0, "card 0 declined")
    assert found[1].first_ms is None


def test_a_page_limits_groups_and_length_of_texts() -> None:
    groups = DeadLetterGroups()
    for number in range(MAX_GROUPS):
        assert groups.add(letter(number, f"reason {number}", "x" * 4_000))
    assert not groups.add(letter(MAX_GROUPS, "one more"))
    assert groups.add(letter(MAX_GROUPS, "reason 0", "x" * 4_000))
    first = groups.largest_first()[0]
    assert (first.count, first.is_cut, len(first.description or "")) == (2, True, DESCRIPTION_CHARS)


def test_hostile_descriptions_take_little_time() -> None:
    started = time.process_time()
    for text in ("a" * 4_096, "a@" * 2_048, "://" * 1_365, "1" * 4_096, ".:!?" * 1_024):
        groups = DeadLetterGroups()
        for number in range(100):
            groups.add(letter(number, "bad", text))
        without_details(text)
    assert time.process_time() - started < 0.5
