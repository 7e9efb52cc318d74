"""Fuzzes the functions for bursts in C: `python -m tests.fast.fuzz_runs SECONDS [SEED]`.

Captured and generated messages, frames and queues, damaged and with unusual parts, go through both
builds in one process: results, exceptions and all that the functions change must be the same.

A read or write out of bounds may change nothing that is compared. With AddressSanitizer and UBSan
in the module such a step ends the process (gcc; `make accelerate` afterwards makes the usual one):

    CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1" \\
        .venv/bin/python dataplane/compile_runs.py
    LD_PRELOAD="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)" \\
        PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=32 \\
        .venv/bin/python -m tests.fast.fuzz_runs 600

Likewise the tests, with `-m pytest tests/fast -s -p no:faulthandler` in the last line; without `-s`
they end without the report. A build whose bounds are wrong on purpose shows that it comes.
"""

from __future__ import annotations

import sys

from postbus.fast import IS_ACCELERATED
from tests.fast.comparisons import COMPARISONS
from tests.fast.twins import REASON
from tests.fast.wholes import WHOLES
from tests.fuzz_bounds import Bounds, Check, fuzz, program_arguments

CHECKS: tuple[Check, ...] = (*COMPARISONS * 4, *WHOLES)
"""The functions alone are cheap; engines and partitions show which inputs they meet there."""


def main() -> None:
    if not IS_ACCELERATED:
        sys.exit(REASON)
    seconds, seed = program_arguments()
    bounds = Bounds()
    tried, in_c = fuzz(CHECKS, seconds, seed, bounds=bounds)
    sys.stdout.write(f"{tried} inputs, {in_c} with work in C, seed {seed}, {bounds}\n")


if __name__ == "__main__":
    main()
