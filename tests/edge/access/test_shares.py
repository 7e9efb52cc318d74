"""Shares of keys: no key gets everything, and later keys get a share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.edge.access.shares import FLOORS, Limit, Shares

TOTAL = 6_400
SIZES = st.integers(1, 900)
ACCOUNTS = st.sampled_from("abcdef")


def fill(shares: Shares, account: str, size: int = 1) -> int:
    """Take as long as the share allows; return the amount of the account."""
    while shares.take(account, size):
        pass
    return shares.of(account)


@pytest.mark.parametrize(("alone", "most"), [(0.5, 3_200), (0.8, 5_120)])
def test_a_single_account_gets_a_part_of_the_whole(alone: float, most: int) -> None:
    assert fill(Shares(Limit(TOTAL, alone)), "a") == most


def test_others_get_half_of_the_rest_and_never_less_than_a_floor() -> None:
    shares = Shares(Limit(TOTAL))
    got = [fill(shares, f"greedy {n}") for n in range(40)]
    assert got[:5] == [3_200, 1_600, 800, 400, 200]
    assert got[5:6] == [TOTAL // FLOORS]
    assert sum(got) == shares.used == TOTAL
    assert fill(shares, "late") == 0  # only now


def test_accounts_that_take_alternately_get_the_same() -> None:
    shares = Shares(Limit(TOTAL))
    for _ in range(TOTAL):
        for account in "abc":
            shares.take(account, 1)
    assert [shares.of(account) for account in "abc"] == [TOTAL // 4] * 3


def test_refusals_are_counted_and_take_no_share() -> None:
    shares = Shares(Limit(100))
    assert not shares.take("a", 51)
    assert (shares.used, shares.refused_count) == (0, 1)
    assert shares.take("a", 50)
    assert not shares.take("a", 1)
    shares.give_back("a", 1)
    assert shares.take("a", 1)
    shares.clear()
    assert (shares.used, shares.of("a")) == (0, 0)


@given(st.lists(st.tuples(ACCOUNTS, SIZES, st.booleans()), max_size=300), st.floats(0.1, 0.9))
def test_any_history_keeps_the_whole_and_the_floors(
    history: list[tuple[str, int, bool]], alone: float
) -> None:
    limit = Limit(TOTAL, alone)
    shares = Shares(limit)
    model: Counter[str] = Counter()
    for account, size, is_taking in history:
        if not is_taking:
            size = min(size, model[account])
            shares.give_back(account, size)
            model[account] -= size
        else:
            own, used = model[account] + size, model.total() + size
            has_taken = shares.take(account, size)
            if has_taken:
                model[account] += size
            assert used <= TOTAL or not has_taken
            if own <= TOTAL // FLOORS:
                assert has_taken == (used <= TOTAL)
            if used == own <= int(TOTAL * alone):  # alone
                assert has_taken
        assert shares.used == model.total()
        assert {each: shares.of(each) for each in "abcdef"} == {
            each: model[each] for each in "abcdef"
        }
    assert set(shares._of) == {account for account, size in model.items() if size}


@given(st.integers(1, 6), SIZES)
def test_greedy_accounts_leave_enough_for_another(greedy: int, size: int) -> None:
    """After any number of greedy accounts: half of the rest, apart from the floor."""
    shares = Shares(Limit(TOTAL))
    for number in range(greedy):
        fill(shares, str(number), size)
    left = TOTAL - shares.used
    assert fill(shares, "other") >= min(max(left // 2, TOTAL // FLOORS), left)
