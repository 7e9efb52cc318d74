"""Garbage is collected after a time and when memory grew; pauses are a small part of the time."""

from __future__ import annotations

import gc
import weakref

import pytest

from postbus.process.garbage import (
    GROWTH_BYTES,
    LONGEST_S,
    PAUSE_PART,
    Collector,
    own_resident_bytes,
)

MIB = 1 << 20


class Process:
    """Time, memory and collections that are made up."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.resident_bytes = 100 * MIB
        self.pause_s = 0.0
        self.count = 0
        self.collector = Collector(lambda: self.now_s, lambda: self.resident_bytes, self._collect)

    def _collect(self) -> None:
        self.count += 1
        self.now_s += self.pause_s

    def run(self, duration_s: int, grown_bytes: int = 0) -> int:
        """Check each second; return how often garbage was collected."""
        before = self.count
        for _ in range(duration_s):
            self.now_s += 1
            self.resident_bytes += grown_bytes
            self.collector.check()
        return self.count - before


@pytest.fixture
def process() -> Process:
    return Process()


def test_garbage_is_collected_after_a_time(process: Process) -> None:
    assert process.run(int(LONGEST_S) - 1) == 0
    assert process.run(1) == 1
    assert process.run(600) == 10


def test_garbage_is_collected_when_memory_grew(process: Process) -> None:
    process.resident_bytes += GROWTH_BYTES - 1
    assert process.run(1) == 0
    process.resident_bytes += 1
    assert process.run(1) == 1
    assert process.run(10) == 0  # it is no less, but grows no more


def test_of_much_memory_growth_is_a_quarter(process: Process) -> None:
    process.resident_bytes = 4_000 * MIB
    assert process.run(1) == 1
    process.resident_bytes += 999 * MIB
    assert process.run(1) == 0
    process.resident_bytes += MIB
    assert process.run(1) == 1


def test_long_pauses_are_seldom(process: Process) -> None:
    process.pause_s = 1.0
    assert process.run(int(LONGEST_S)) == 1
    assert process.run(PAUSE_PART - 1, grown_bytes=GROWTH_BYTES) == 0
    assert process.run(2, grown_bytes=GROWTH_BYTES) == 1


@pytest.mark.slow
def test_cycle_goes_when_memory_grew() -> None:
    """The collector of Python itself, and the memory of this process."""

    class Knot:
        def __init__(self) -> None:
            self.itself = self
            self.held = bytearray(GROWTH_BYTES + own_resident_bytes() // 2)
            self.held[::4_096] = b"\1" * len(self.held[::4_096])

    gc.collect()
    gc.disable()
    try:
        collector = Collector()
        knot = weakref.ref(Knot())
        assert knot() is not None
        collector.check()
        assert knot() is None
    finally:
        gc.enable()
