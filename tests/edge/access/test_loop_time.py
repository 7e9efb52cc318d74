"""Shares of the event loop: accounts with long calls pause while others are present."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from struct import pack
from time import monotonic_ns, thread_time_ns

import pytest

from postbus.broker.access.authz import KeyRule
from postbus.edge.access.loop_time import (
    COSTLY_NS,
    OTHERS_NS,
    SIGNING_IN_NS,
    UNAUTHENTICATED,
    LoopTime,
    WorkTime,
)
from postbus.message.codec import Uint
from tests.edge.access.test_accounts import dial, poster
from tests.edge.access.two_keys import p99_s, sender_of
from tests.edge.amqp.test_links import wait_until
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import DISPOSITION, RawClient, described, frame

ROOT, TENANT = RULES[0], RULES[1]
MS = 1_000_000


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Machine:
    """A loop with calls of given durations."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.time = LoopTime(self.clock)

    def call(self, account: str, took_ms: int, *, cpu_us: int | None = None) -> None:
        began_ns = self.clock.now_ns
        self.clock.now_ns += took_ms * MS
        self.time.note(account, began_ns, took_ms * MS if cpu_us is None else cpu_us * 1_000)

    def may(self, account: str) -> bool:
        return self.time.admit(account, 9_000, lambda: None)


@pytest.fixture
async def machine() -> Machine:
    """Return a loop in which two accounts made a call."""
    found = Machine()
    found.call("others", 1)
    found.call("own", 1)
    return found


async def test_short_calls_never_wait(machine: Machine) -> None:
    for _ in range(9):
        machine.call("own", 3)
        assert machine.may("own")
        assert not machine.time.is_costly("own")


async def test_single_account_never_waits() -> None:
    machine = Machine()
    for _ in range(9):
        machine.call("own", 30)
        assert machine.may("own")


async def test_a_long_call_is_followed_by_a_pause_of_its_length(machine: Machine) -> None:
    machine.call("own", 30)
    assert machine.time.is_costly("own")
    assert machine.may("others")
    machine.clock.now_ns += 29 * MS
    assert not machine.may("own")


async def test_costly_account_is_limited_to_short_calls_for_a_while(machine: Machine) -> None:
    machine.call("own", 30)
    machine.clock.now_ns += 31 * MS
    assert machine.may("own")
    assert machine.time.is_costly("own")
    machine.clock.now_ns += COSTLY_NS
    assert not machine.time.is_costly("own")


@pytest.mark.parametrize(("cpu_us", "is_costly"), [(400, False), (500, True)])
async def test_costly_account_stays_costly_with_calls_long_for_their_size(
    machine: Machine, cpu_us: int, *, is_costly: bool
) -> None:
    machine.call("own", 30)
    for _ in range(COSTLY_NS // (100 * MS) + 1):
        machine.clock.now_ns += 100 * MS
        machine.call("own", 1, cpu_us=cpu_us)
    assert machine.time.is_costly("own") is is_costly


async def test_garbage_collections_are_no_work_of_an_account() -> None:
    work_ns = WorkTime()
    kept = [[number] for number in range(300_000)]
    began_ns, work_began_ns = thread_time_ns(), work_ns()
    gc.collect()
    took_ns = thread_time_ns() - began_ns
    assert len(kept) == 300_000
    assert work_ns() - work_began_ns < took_ns // 10
    count = len(gc.callbacks)
    del work_ns
    assert len(gc.callbacks) == count - 1


async def test_collections_of_other_threads_do_not_count() -> None:
    work_ns = WorkTime()
    kept = [[number] for number in range(300_000)]
    began_ns, work_began_ns = thread_time_ns(), work_ns()
    collecting = threading.Thread(target=gc.collect)
    collecting.start()
    collecting.join()
    took_ns = thread_time_ns() - began_ns
    assert len(kept) == 300_000
    assert work_ns() - work_began_ns > took_ns // 2


async def test_a_preempted_short_call_does_not_count_as_long(machine: Machine) -> None:
    machine.call("own", 500, cpu_us=3_000)
    assert machine.may("own")
    machine.call("own", 50, cpu_us=4_000)
    machine.clock.now_ns += 49 * MS  # others waited for 50
    assert not machine.may("own")


async def test_account_waiting_for_others_counts_as_present(machine: Machine) -> None:
    for _ in range(300):
        machine.call("own", 40)
    assert not machine.may("own")


async def test_idle_account_counts_as_absent(machine: Machine) -> None:
    machine.clock.now_ns += OTHERS_NS + 9 * MS
    machine.call("own", 30)
    assert machine.may("own")
    machine.time.saw("others")
    machine.call("own", 30)
    assert not machine.may("own")


async def test_a_key_absent_for_long_delays_no_other() -> None:
    machine = Machine()
    machine.call("others", 1)
    machine.clock.now_ns += OTHERS_NS + 9 * MS
    machine.call("own", 30)
    assert machine.may("own")


async def test_unauthenticated_client_counts_as_present_for_a_short_time() -> None:
    machine = Machine()
    machine.call(f"{UNAUTHENTICATED}127.0.0.1", 1)
    machine.call("own", 30)
    assert machine.time.is_costly("own")
    machine.clock.now_ns += SIGNING_IN_NS + COSTLY_NS
    for _ in range(9):
        machine.call("own", 30)
        assert machine.may("own")


async def test_unauthenticated_client_is_costly_beside_authenticated_ones() -> None:
    machine = Machine()
    admission = f"{UNAUTHENTICATED}192.0.2.1"
    machine.call(admission, 30)
    assert machine.may(admission)
    machine.call("own", 1)
    machine.call(admission, 30)
    assert not machine.may(admission)
    assert machine.may("own")


async def test_waiting_calls_run_one_after_the_other() -> None:
    time = LoopTime()
    done: list[int] = []
    over = asyncio.Event()

    def call_of(number: int) -> Callable[[], None]:
        def call() -> None:
            began_ns = monotonic_ns()
            while monotonic_ns() < began_ns + 5 * MS:
                pass
            time.note("own", began_ns, 5 * MS)
            done.append(number)
            if number == 9:
                over.set()
            if number == 4:
                raise OSError

        return call

    time.saw("others")
    time.note("own", monotonic_ns(), 5 * MS)
    call_of(0)()
    for number in range(1, 10):
        assert not time.admit("own", 9_000, call_of(number))
    assert time.admit("others", 9_000, call_of(99))
    began_ns = monotonic_ns()
    await asyncio.wait_for(over.wait(), 10)
    assert done == list(range(10))
    assert monotonic_ns() - began_ns > 9 * 8 * MS  # calls and pauses


async def test_small_reads_go_first_but_not_for_ever() -> None:
    time = LoopTime()
    done: list[str] = []
    over = asyncio.Event()

    def call_of(name: str) -> Callable[[], None]:
        def call() -> None:
            done.append(name)
            if len(done) == 12:
                over.set()

        return call

    time.saw("others")
    time.note("own", monotonic_ns() - 5 * MS, 5 * MS)
    for _ in range(2):
        assert not time.admit("own", 1_025, call_of("large"))
    for _ in range(10):
        assert not time.admit("own", 1_024, call_of("small"))
    await asyncio.wait_for(over.wait(), 10)
    assert done == [*["small"] * 8, "large", "small", "small", "large"]


def connect(bus: BusThread, rule: KeyRule) -> RawClient:
    return RawClient(bus.port, rule.name, rule.keys.primary)


@pytest.mark.slow
def test_http_clients_count_as_present(bus: BusThread, queue: str) -> None:
    with connect(bus, TENANT), dial(bus) as client:
        poster(bus, client, queue, 10)()
        assert bus.listener.loop_time.last == ROOT.name


@pytest.mark.slow
def test_floods_of_empty_frames_leave_half_of_the_loop(bus: BusThread, queue: str) -> None:
    """64 KiB of them take 40 ms: without pauses each send waits for those of all connections."""
    flood = frame(DISPOSITION, True, Uint(0), Uint(2**31 - 1), True, described(0x24, [])) * 4_000

    def pump(client: RawClient) -> None:
        with suppress(OSError):  # it is closed at the end
            while True:
                client.socket.sendall(flood)

    with connect(bus, ROOT) as other, ExitStack() as clients:
        send = sender_of(other, queue)
        pumping = [clients.enter_context(connect(bus, TENANT)) for _ in range(100)]
        threads = [threading.Thread(target=pump, args=(each,)) for each in pumping]
        for thread in threads:
            thread.start()
        try:
            wait_until(bus, lambda: bus.listener.loop_time.is_costly(TENANT.name))
            assert p99_s(send) < 0.5  # many seconds without, on a busy machine
        finally:
            for each in pumping:  # and bytes sent before are dropped
                each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))
                each.socket.shutdown(socket.SHUT_RD)
                each.socket.close()
            for thread in threads:
                thread.join()
            # a paused connection does not notice at once that its client is gone
            for _ in range(3):
                with suppress(TimeoutError):
                    wait_until(bus, lambda: not bus.front.admission_control.of_keys.of(TENANT.name))
                    break
