"""A fuzzer fails for an input that takes long or keeps memory, and reports both."""

from __future__ import annotations

import time

import pytest

from tests import fuzz_bounds
from tests.fuzz_bounds import Bounds


def slow_step(bounds: Bounds) -> None:
    began = time.process_time()
    with bounds.step():
        while time.process_time() - began < 0.02:
            pass


def test_long_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_bounds, "MAX_STEP_S", 0.01)
    with pytest.raises(AssertionError, match="one input took"):
        slow_step(Bounds())


def test_memory_that_is_kept_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_bounds, "MAX_GROWN_BYTES", 8 << 20)
    bounds = Bounds()
    kept = b"\1" * (64 << 20)
    with pytest.raises(AssertionError, match="memory grew by"):
        bounds.look()
    assert kept


def test_both_are_reported() -> None:
    bounds = Bounds()
    with bounds.step():
        pass
    assert str(bounds) == "longest step 0 ms, memory grew by 0 MiB"
