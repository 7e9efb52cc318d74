"""The checker of pipelines under kills finds each kind of violation."""

from __future__ import annotations

import pytest

from tests.faults.pipeline_record import Entry, Order, Record, Sent, check

BELONGS = {"table": (Order.GOOD,), "target": (Order.GOOD,), "dead letters": (Order.FREE,)}


def record(**places: list[str]) -> Record:
    sent = {
        "a1": Entry(Order.GOOD, Sent.ACCEPTED, "a", 1),
        "a2": Entry(Order.GOOD, Sent.ACCEPTED, "a", 2),
        "b1": Entry(Order.GOOD, Sent.UNKNOWN, "b", 1),
        "f1": Entry(Order.FREE, Sent.ACCEPTED, "b", 2),
    }
    right = {"table": ["a2", "a1"], "target": ["a1", "a2"], "dead letters": ["f1"]}
    return Record(sent, right | places)


def found(**places: list[str]) -> list[str]:
    return list(check(record(**places), BELONGS, ordered=["target"]))


def test_each_order_where_it_belongs_is_right() -> None:
    assert found() == []
    assert found(table=["a1", "a2", "b1"], target=["a1", "b1", "a2"]) == []


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        ({"table": ["a1"]}, "table: 1 accepted orders are lost, such as a2"),
        ({"dead letters": []}, "dead letters: 1 accepted orders are lost, such as f1"),
        ({"target": ["a1", "a2", "a2"]}, "target: 1 orders are there twice, such as a2"),
        ({"table": ["a1", "a2", "f1"]}, "table: 1 do not belong there, such as f1"),
        ({"dead letters": ["f1", "x"]}, "dead letters: 1 do not belong there, such as x"),
        ({"table": ["a1", "a2", "b1"]}, "b1 is in table only"),
        ({"target": ["a2", "a1"]}, "target: a1 comes after a later order of its session a"),
    ],
)
def test_each_violation_is_found(places: dict[str, list[str]], problem: str) -> None:
    assert problem in found(**places)
