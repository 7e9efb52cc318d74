"""Shares of the event loop: who takes long turns pauses, while others are there."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from time import monotonic_ns

import pytest

from postbus.broker.authz import KeyRule
from postbus.edge.loop_time import LONG_TURN_NS, OTHERS_NS, LoopTime
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import DISPOSITION, RawClient, Uint, described, frame
from tests.edge.test_links import wait_until
from tests.edge.two_keys import p99_s, sender_of

ROOT, TENANT = RULES[0], RULES[1]
MS = 1_000_000


def connect(bus: BusThread, rule: KeyRule) -> RawClient:
    return RawClient(bus.port, rule.name, rule.keys.primary)


def turn(time: LoopTime, account: str, began_ns: int, took_ns: int) -> int:
    """Return the pause after a turn on a machine that does nothing else."""
    return time.pause_ns(account, began_ns, began_ns + took_ns, took_ns)


def busy_with_others() -> LoopTime:
    """Return the times of a loop in which two accounts had a turn."""
    time = LoopTime()
    assert turn(time, "others", 0, MS) == turn(time, "own", 0, MS) == 0
    return time


def test_short_turns_never_pause() -> None:
    time = busy_with_others()
    assert [turn(time, "own", at * MS, LONG_TURN_NS - 1) for at in range(9)] == [0] * 9


def test_who_is_alone_never_pauses() -> None:
    time = LoopTime()
    assert turn(time, "own", 0, 30 * MS) == 0
    assert turn(time, "own", 30 * MS, 30 * MS) == 0
    assert not time.is_costly("own", 30 * MS)


def test_a_long_turn_is_followed_by_a_pause_as_long() -> None:
    time = busy_with_others()
    assert turn(time, "own", 0, 30 * MS) == 30 * MS
    assert time.is_costly("own", 59 * MS)
    assert not time.is_costly("others", 59 * MS)
    assert turn(time, "own", 60 * MS, MS) == 0
    assert time.is_costly("own", 60 * MS)
    assert not time.is_costly("own", 60 * MS + OTHERS_NS)


def test_connections_of_an_account_share_its_half() -> None:
    time = busy_with_others()
    pauses = [turn(time, "own", at * MS, 5 * MS) // MS for at in (0, 5, 10, 15)]
    assert pauses == [5, 10, 15, 20]
    assert turn(time, "own", 20 * MS, MS) == 21 * MS  # a short turn too, until they are over
    assert turn(time, "others", 22 * MS, MS) == 0


def test_others_that_are_gone_for_a_second_are_not_waited_for() -> None:
    time = busy_with_others()
    assert turn(time, "own", OTHERS_NS + 1, 30 * MS) == 0
    assert turn(time, "others", OTHERS_NS + 2, MS) == 0
    assert turn(time, "own", OTHERS_NS + 3, 30 * MS) == 30 * MS


def test_a_pause_lasts_as_long_as_others_waited() -> None:
    """A short turn may take long on a busy machine; that is not its account's fault."""
    time = busy_with_others()
    assert time.pause_ns("own", 0, 50 * MS, LONG_TURN_NS - 1) == 0
    assert time.pause_ns("own", 50 * MS, 100 * MS, LONG_TURN_NS) == 50 * MS


@pytest.mark.slow
def test_frames_that_do_nothing_leave_half_of_the_loop(bus: BusThread, queue: str) -> None:
    """64 KiB of them take 40 ms: without pauses each send waits for those of all connections."""
    flood = frame(DISPOSITION, True, Uint(0), Uint(2**31 - 1), True, described(0x24, [])) * 4_000

    def pump(client: RawClient) -> None:
        with suppress(OSError):  # it is closed at the end
            while True:
                client.socket.sendall(flood)

    with connect(bus, ROOT) as other, ExitStack() as clients:
        send = sender_of(other, queue)
        pumping = [clients.enter_context(connect(bus, TENANT)) for _ in range(8)]
        threads = [threading.Thread(target=pump, args=(each,)) for each in pumping]
        for thread in threads:
            thread.start()
        try:
            wait_until(bus, lambda: bus.listener.loop_time.is_costly(TENANT.name, monotonic_ns()))
            assert p99_s(send) < 0.5  # many seconds without, on a busy machine
        finally:
            for each in pumping:
                each.socket.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for _ in range(3):  # who pauses does not see at once that its client is gone
                with suppress(TimeoutError):
                    wait_until(bus, lambda: not bus.front.strangers.of_keys.of(TENANT.name))
                    break
