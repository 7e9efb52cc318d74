"""The loop of fuzzers, and limits beside wrong answers: memory, and the time of one input."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MAX_GROWN_BYTES = 96 << 20
"""Maximum growth of the memory of a fuzzer, its pool of inputs and caches included."""

MAX_STEP_S = 0.5
"""CPU time of one input with all its processing: no other client is served meanwhile."""

Check = Callable[[random.Random], bool]
"""Makes an input, checks what comes out, and returns whether the input was accepted."""


class Bounds:
    """Of one run; raises `AssertionError` above a bound."""

    def __init__(self) -> None:
        self._first_bytes = resident_bytes()
        self._count = 0
        self.longest_s = 0.0
        self.grown_bytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the processing of one input."""
        began_s = time.process_time()
        yield
        took_s = time.process_time() - began_s
        self.longest_s = max(self.longest_s, took_s)
        assert took_s < MAX_STEP_S, f"one input took {took_s:.2f} s"
        self._count += 1
        if self._count % 64 == 0 or took_s > 0.05:
            self.look()

    def look(self) -> None:
        """Check the growth of memory since the start."""
        self.grown_bytes = max(self.grown_bytes, resident_bytes() - self._first_bytes)
        assert self.grown_bytes < MAX_GROWN_BYTES, f"memory grew by {self.grown_bytes >> 20} MiB"

    def __str__(self) -> str:
        self.look()
        step_ms, grown = self.longest_s * 1_000, self.grown_bytes / (1 << 20)
        return f"longest step {step_ms:.0f} ms, memory grew by {grown:.0f} MiB"


def fuzz(
    checks: Sequence[Check],
    seconds: float,
    seed: int,
    max_inputs: int | None = None,
    bounds: Bounds | None = None,
) -> tuple[int, int]:
    """Run checks in turn; return how many inputs were tried and how many were accepted.

    A check makes an input from its source alone: a seed and a number find it again.
    """
    bounds = bounds or Bounds()
    ends_at = time.monotonic() + seconds
    tried = accepted = 0
    while time.monotonic() < ends_at and (max_inputs is None or tried < max_inputs):
        check = checks[tried % len(checks)]
        source = random.Random(f"{seed} {tried}")
        try:
            with bounds.step():
                accepted += check(source)
        except BaseException:
            sys.stderr.write(f"seed {seed}, input {tried}, {check.__name__}\n")
            raise
        tried += 1
    return tried, accepted


def fuzz_program(checks: Sequence[Check]) -> None:
    """Run checks as the arguments of the program say, and print what was tried."""
    seconds, seed = program_arguments()
    bounds = Bounds()
    tried, accepted = fuzz(checks, seconds, seed, bounds=bounds)
    sys.stdout.write(f"{tried} requests, {accepted} accepted, seed {seed}, {bounds}\n")


def program_arguments() -> tuple[float, int]:
    """Return the arguments of a fuzzer as a program: seconds to run, and a seed."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    return seconds, int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) << 10
