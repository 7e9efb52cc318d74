"""The grants of one connection end at the second of their expiry."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from postbus.broker.access.authz import NEVER_S, Authorizer, Grant, KeyRule
from postbus.contract.entities import Right
from postbus.edge.amqp.grants import MAX_GRANTS, MAX_WAIT_S, Grants
from tests.edge.bus_thread import Keys

RULE = KeyRule("root", frozenset(Right), Keys("key"))


class FakeTimer:
    def __init__(self, rig: Rig, wait_s: float, call: Callable[[], None]) -> None:
        self.at_s = rig.now_s + wait_s
        self.call = call
        self._rig = rig

    def cancel(self) -> None:
        if self in self._rig.timers:  # else it was called
            self._rig.timers.remove(self)


class Rig:
    """Grants, and a clock that calls timers at their time."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.timers: list[FakeTimer] = []
        self.expired_at: list[float] = []
        self.grants = Grants(
            Authorizer([RULE]),
            lambda: self.now_s,
            self._call_later,  # type: ignore[arg-type]
            self._expired,
        )

    def add(self, path: str, expires_s: float) -> None:
        self.grants.add(Grant(path, RULE.rights, RULE.name, expires_s, None, "key"))

    def pass_until(self, at_s: float) -> None:
        while self.timers and min(each.at_s for each in self.timers) <= at_s:
            timer = min(self.timers, key=lambda each: each.at_s)
            self.timers.remove(timer)
            self.now_s = timer.at_s
            timer.call()
        self.now_s = at_s

    def _call_later(self, wait_s: float, call: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(self, wait_s, call))
        return self.timers[-1]

    def _expired(self) -> None:
        self.expired_at.append(self.now_s)
        self.grants.renew()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_each_grant_ends_at_its_second_with_one_timer(rig: Rig) -> None:
    for path, expires_s in (("b", 1_020.0), ("a", 1_010.0), ("c", NEVER_S), ("d", 1_015.0)):
        rig.add(path, expires_s)
    rig.add("d", 1_030.0)  # renewed in time
    assert len(rig.timers) == 1
    rig.pass_until(2_000.0)
    assert rig.expired_at == [1_010.0, 1_020.0, 1_030.0]
    assert [path for path in "abcd" if rig.grants.find(path, Right.SEND)] == ["c"]
    assert not rig.timers


def test_far_expiries_are_checked_again_as_real_time_may_move(rig: Rig) -> None:
    rig.add("a", 1_000.0 + 3 * MAX_WAIT_S)
    rig.add("b", 1e300)
    rig.pass_until(1_000.0 + 2.5 * MAX_WAIT_S)
    assert not rig.expired_at
    rig.pass_until(1_000.0 + 3 * MAX_WAIT_S)
    assert rig.expired_at == [1_000.0 + 3 * MAX_WAIT_S]
    rig.now_s += 1e6  # put forward: the tick of a connection asks
    rig.add("c", rig.now_s - 1)
    assert rig.grants.has_expired()


def test_ended_grants_are_not_watched(rig: Rig) -> None:
    rig.add("a", 1_010.0)
    rig.grants.close()
    assert not rig.timers
    assert len(rig.grants) == 1


def test_grants_are_bounded_and_the_oldest_goes() -> None:
    """A name has any number of spellings, each an audience of its own."""
    rig = Rig()
    for number in range(MAX_GRANTS + 5):
        rig.add(f"queue-{number}", 2_000.0 + number)
    assert len(rig.grants) == MAX_GRANTS
    assert rig.grants.find("queue-4", Right.SEND) is None
    assert rig.grants.find("queue-5", Right.SEND) is not None
    assert [timer.at_s for timer in rig.timers] == [2_005.0]


def test_a_later_grant_that_ends_earlier_moves_the_timer() -> None:
    rig = Rig()
    rig.add("first", 2_000.0)
    rig.add("second", 1_500.0)
    assert [timer.at_s for timer in rig.timers] == [1_500.0]
    rig.add("second", 3_000.0)
    assert [timer.at_s for timer in rig.timers] == [2_000.0]
