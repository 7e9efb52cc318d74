"""A fuzzer fails for an input that takes long or keeps memory, and names the input that failed."""

from __future__ import annotations

import random
import time

import pytest

from tests import fuzz_bounds
from tests.fuzz_bounds import Bounds, fuzz


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


def test_inputs_are_made_by_seed_and_number() -> None:
    made: list[float] = []

    def check(source: random.Random) -> bool:
        made.append(source.random())
        return made[-1] < 0.5

    tried, accepted = fuzz([check], seconds=60, seed=7, max_inputs=20)
    assert (tried, accepted) == (20, sum(each < 0.5 for each in made))
    assert len(set(made)) == 20
    fuzz([check], seconds=60, seed=7, max_inputs=20)
    assert made[20:] == made[:20]


def test_an_input_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def is_good(_source: random.Random) -> bool:
        return True

    def fails(_source: random.Random) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fuzz([is_good, is_good, fails], seconds=60, seed=7)
    assert capsys.readouterr().err == "seed 7, input 2, fails\n"
