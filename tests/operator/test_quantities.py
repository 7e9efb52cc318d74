"""Amounts are written as the API server writes them; tests/kube compares with a real one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.contract.operator_spec import QUANTITY_PATTERN
from postbus_operator.children.quantities import canonical_quantity, quantity_value

CASES = {
    "0.5Gi": "512Mi",
    "1024Mi": "1Gi",
    "1.5": "1500m",
    "1000m": "1",
    "0.1": "100m",
    "1e3": "1e3",
    "100000": "100k",
    "0.5Ki": "512",
    "1e-9": "1e-9",
    "0.1n": "1n",
    "12E": "9223372036854775807",
    "0": "0",
    "5.": "5",
}


@pytest.mark.parametrize("text", CASES)
def test_an_amount_has_one_form(text: str) -> None:
    assert canonical_quantity(text) == CASES[text]


@given(st.from_regex(QUANTITY_PATTERN, fullmatch=True).filter(lambda text: len(text) <= 20))
def test_the_form_means_the_same_and_stays(text: str) -> None:
    written = canonical_quantity(text)
    assert canonical_quantity(written) == written
    least = min(quantity_value(text), Fraction(2**63 - 1))
    assert 0 <= quantity_value(written) - least < Fraction(1, 10**9)
