"""Pauses between attempts."""

from __future__ import annotations

from postbus.broker.backoff import FIRST_BACKOFF_S, LAST_BACKOFF_S, Backoff


def test_pauses_double_up_to_the_last_and_begin_again_after_a_reset() -> None:
    backoff = Backoff()
    pauses = [backoff.next_s() for _ in range(9)]
    assert pauses[:3] == [FIRST_BACKOFF_S, FIRST_BACKOFF_S * 2, FIRST_BACKOFF_S * 4]
    assert pauses[-2:] == [LAST_BACKOFF_S, LAST_BACKOFF_S]
    backoff.reset()
    assert backoff.next_s() == FIRST_BACKOFF_S


def test_limits_may_be_given() -> None:
    backoff = Backoff(0.2, 0.5)
    assert [backoff.next_s() for _ in range(3)] == [0.2, 0.4, 0.5]


def test_next_pause_doubles_a_shortened_one() -> None:
    backoff = Backoff()
    assert backoff.next_s(left_s=0.02) == 0.02
    assert backoff.next_s() == FIRST_BACKOFF_S
    assert backoff.next_s(left_s=0.06) == 0.06
    assert backoff.next_s() == 0.12


async def test_pause_waits_and_lengthens_the_next() -> None:
    backoff = Backoff(0.001)
    await backoff.pause()
    assert backoff.next_s() == 0.002
