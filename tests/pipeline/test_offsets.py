"""Offsets of checkpoints are checked before anything is read with them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus_spark.errors import EntityRecreated, InvalidOffset
from postbus_spark.offsets import Offset, check_offset, read_offset

GOOD = {"v": 1, "entity": "orders", "generation": "bus/7", "p": {"0": 5, "1": 2**60}}
CURRENT = Offset("orders", "bus/7", {0: 9, 1: 9})


def test_an_offset_survives_json_whatever_its_size() -> None:
    offset = read_offset(json.loads(json.dumps(GOOD)))
    assert offset == Offset("orders", "bus/7", {0: 5, 1: 2**60})
    assert offset.json() == GOOD
    assert offset.at({0: 1}).json()["p"] == {"0": 1}


@pytest.mark.parametrize(
    "given_offset",
    [
        None,
        [],
        {},
        "x",
        {**GOOD, "v": True},
        {**GOOD, "v": 0},
        {**GOOD, "more": 1},
        {name: value for name, value in GOOD.items() if name != "generation"},
        {**GOOD, "entity": ""},
        {**GOOD, "entity": 5},
        {**GOOD, "generation": None},
        {**GOOD, "p": {}},
        {**GOOD, "p": [1]},
        {**GOOD, "p": {"x": 1}},
        {**GOOD, "p": {"-1": 1}},
        {**GOOD, "p": {"²": 1}},
        {**GOOD, "p": {"123456": 1}},
        {**GOOD, "p": {"0": -1}},
        {**GOOD, "p": {"0": 1.0}},
        {**GOOD, "p": {"0": True}},
        {**GOOD, "p": {"0": "1"}},
        {**GOOD, "p": {"0": 2**63}},
    ],
)
def test_damaged_offsets_are_refused(given_offset: object) -> None:
    with pytest.raises(InvalidOffset, match="cannot be read"):
        read_offset(given_offset)


def test_offsets_of_a_newer_connector_are_refused() -> None:
    with pytest.raises(InvalidOffset, match="version 2 needs a newer connector"):
        read_offset({**GOOD, "v": 2, "new": {}})


@pytest.mark.parametrize(
    ("offset", "error", "text"),
    [
        (Offset("others", "bus/7", {0: 1, 1: 1}), InvalidOffset, "the query reads orders"),
        (Offset("orders", "bus/8", {0: 1, 1: 1}), EntityRecreated, "deleted and created again"),
        (Offset("orders", "bus/7", {0: 1}), InvalidOffset, r"partitions \[0\]"),
        (Offset("orders/$deadletterqueue", "bus/7", {0: 1, 1: 1}), InvalidOffset, "reads orders"),
    ],
)
def test_foreign_offsets_are_refused(offset: Offset, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_offset(offset, CURRENT)


def test_names_compare_without_case() -> None:
    check_offset(Offset("ORDERS", "bus/7", {0: 1, 1: 1}), CURRENT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["v", "entity", "generation", "p", "x"]), JSON) | JSON)
def test_no_json_is_another_error(given_offset: object) -> None:
    try:
        offset = read_offset(given_offset)
    except InvalidOffset:
        return
    assert read_offset(offset.json()) == offset
