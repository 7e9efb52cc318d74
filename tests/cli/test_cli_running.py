"""The end of a running bus: signals, and a takeover by another process."""

from __future__ import annotations

from postbus.cli.serving.running import End


def test_the_first_signal_during_a_hand_over_leaves_clients_their_grace_period() -> None:
    end = End()
    end.hand_over("broker-0, process 7 on host here")
    assert end.is_asked.is_set()
    assert [end.signal(), end.signal()] == [False, True]
