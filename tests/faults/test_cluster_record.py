"""What clients in a pod wrote, and the rules that the record is checked by (`e2e/faults`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.faults.checker import PLACES, Pending, overtaken, refused_for, violations
from e2e.faults.record import Line, RecordFile, Seen, Trouble, line_of
from e2e.faults.report import Done, table
from e2e.faults.table import FAULTS, deck

from tests.faults.history import Delivered, Left, Result, Sent, Settled

SEEN: list[Line] = [Seen(path, place) for path, place in PLACES]


def sent(name: str, at: float = 1.0, result: Result = Result.ACCEPTED, **more) -> Sent:
    return Sent(more.pop("path", "plain"), name, result, at, at + 0.1, **more)


def delivered(name: str, at: float, sequence: int = 1, **more) -> Delivered:
    path = more.pop("path", "plain")
    return Delivered(path, name, at, sequence, 1, more.pop("token", name), **more)


def settled(name: str, at: float, result: Result = Result.ACCEPTED, path: str = "plain") -> Settled:
    return Settled(path, name, name, "complete", result, at, at + 0.1)


def rules(*lines: Line, at_end: bool = True) -> list[str]:
    found = violations([*lines, *(SEEN if at_end else [])], [(2.0, 4.0)], is_end=at_end)
    return sorted({each.invariant for each in found})


def test_a_message_that_came_and_went_violates_nothing() -> None:
    assert rules(sent("1"), delivered("1", 2), settled("1", 3)) == []


def test_an_accepted_message_that_is_nowhere_is_lost_at_the_end() -> None:
    assert rules(sent("1")) == ["I1"]
    assert rules(sent("1"), delivered("1", 2)) == ["I1"]
    assert rules(sent("1"), Left("plain", "active", "1", 1, 0)) == []
    assert rules(sent("1"), at_end=False) == []


def test_a_message_of_a_topic_must_reach_its_subscription() -> None:
    assert rules(sent("1", path="events")) == ["I1"]
    there = settled("1", 3, path="events/all")
    assert rules(sent("1", path="events"), delivered("1", 2, path="events/all"), there) == []


def test_requests_without_an_answer_were_done_or_not() -> None:
    unknown = sent("1", result=Result.UNKNOWN)
    assert rules(unknown) == []
    assert rules(unknown, delivered("1", 2), settled("1", 3, Result.UNKNOWN)) == []
    again = delivered("1", 9), settled("1", 9)
    assert rules(unknown, delivered("1", 2), settled("1", 3, Result.UNKNOWN), *again) == []


def test_a_message_that_comes_after_its_completion_was_confirmed_is_doubled() -> None:
    lines = sent("1"), delivered("1", 2), settled("1", 3), delivered("1", 9)
    assert rules(*lines) == ["I2"]
    assert rules(*lines, at_end=False) == ["I2"]


def test_a_message_under_two_numbers_is_doubled() -> None:
    lines = sent("1"), delivered("1", 2, 7), delivered("1", 2.5, 8, token="b"), settled("1", 3)
    assert rules(*lines) == ["I5"]


def test_a_message_that_nobody_sent_is_found() -> None:
    assert rules(delivered("1", 2), settled("1", 3)) == ["I14"]


def test_an_unseen_place_hides_losses_and_is_a_violation() -> None:
    found = violations([sent("1"), *SEEN[1:]], [])
    assert [each.invariant for each in found] == ["unseen"]


def in_session(*names: str) -> list[Line]:
    """Return first deliveries in this order, each by a holder of its own."""
    return [
        delivered(name, 10.0 + number, int(name), path="ordered", hold=number, token=f"t{number}")
        for number, name in enumerate(names)
    ]


def test_a_session_is_in_order_over_all_its_holders() -> None:
    messages = [sent(name, at=int(name), path="ordered", session="a") for name in "123"]
    assert overtaken([*messages, *in_session("1", "2", "1", "3")]) == []
    [found] = overtaken([*messages, *in_session("1", "3", "2")])
    assert (found.invariant, found.id) == ("I6", "3")


def test_a_send_without_an_answer_has_no_place_in_the_order() -> None:
    late = sent("2", at=2, path="ordered", session="a", result=Result.UNKNOWN)
    others = [sent(name, at=int(name), path="ordered", session="a") for name in "13"]
    assert overtaken([*others, late, *in_session("1", "3", "2")]) == []


def test_pending_messages_are_those_that_no_completion_removed() -> None:
    pending = Pending()
    pending.feed([settled("2", 1), sent("1"), sent("2"), sent("3", at=5)])
    assert pending.before(2) == [("plain", "1")]
    pending.feed([settled("1", 6, Result.REFUSED)])
    assert pending.before(9) == [("plain", "1"), ("plain", "3")]
    pending.feed([settled("1", 6, Result.UNKNOWN)])
    assert pending.before(9) == [("plain", "3")]


def test_the_longest_gap_that_meets_a_fault_counts() -> None:
    lines = [sent(str(at), at=at) for at in (0.0, 5.0, 6.0, 9.0, 20.0)]
    assert refused_for(lines, "plain", 5.5, 9.0) == pytest.approx(3.0)
    assert refused_for(lines, "plain", 30.0, 40.0) == 0.0
    assert refused_for(lines, "ordered", 0.0, 40.0) == 0.0


def test_the_record_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = RecordFile(path)
    assert record.read() == []
    first = json.dumps(["sent", "plain", "1", None, "accepted", 1.0, 1.1])
    path.write_text(first + "\n" + '["trouble",2.0,')
    assert record.read() == [sent("1")]
    path.write_text(first + "\n" + '["trouble",2.0,"send","why"]\n')
    assert record.read() == [Trouble(2.0, "send", "why")]
    assert len(record.lines) == 2
    with pytest.raises(ValueError, match="unknown line"):
        line_of('["other", 1]')


def test_a_seed_decides_the_faults_and_each_has_its_share() -> None:
    faults = tuple(each for each in FAULTS if not each.is_slow)
    whole = sum(each.share for each in faults)
    assert deck(1, whole, faults) == deck(1, whole, faults) != deck(2, whole, faults)
    drawn = deck(1, whole, faults)
    assert {each.name: drawn.count(each) for each in faults} == {
        each.name: each.share for each in faults
    }
    assert len({each.name for each in FAULTS}) == len(FAULTS)


def test_the_table_has_medians_and_the_worst_of_each_fault() -> None:
    done = [Done("store-kill", 0.0, 1.0, end, 2.0) for end in (2.0, 3.0, 9.0)]
    assert table(done).splitlines()[2:] == ["| store-kill | 3 | 2.0 / 8.0 s | 2.0 / 2.0 s |"]
