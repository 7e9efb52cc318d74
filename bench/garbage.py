#!/usr/bin/env python3
"""Measures how long a full garbage collection takes with messages in a queue's memory.

bench/garbage.py [COUNT] measures it without messages, and with COUNT (default 50,000) of the usual
ones and of ones with an unusual field, which no build makes in C. `POSTBUS_ACCELERATE=off` measures
the build without functions in C.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dataplane"))

from postbus.entity.commands import StoredRow
from postbus.entity.outcomes import InsertMessage
from postbus.entity.queues import runs as queue_runs
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.fast import BUILD
from postbus.message.envelope import Envelope
from postbus.message.rows import pack_envelope, unpack_envelope
from postbus.message.runs import unpack_usual_rows

FIRST_KEY = 2**40
ROUNDS = 5
PROPERTIES = b"\x00\x53\x73\xc0\x05\x01\xa1\x02m1"


def envelope_of(blob: bytes) -> Envelope:
    """Return the message of a row, as a read of the store makes it."""
    body = bytes(1_024)
    record = (FIRST_KEY, 0, blob, None, body, None, None, None, None)
    rows = unpack_usual_rows([record], StoredRow)
    return rows[0].envelope if rows else unpack_envelope(blob, None, body)


def queue_of(count: int, *, ttl_ms: int | None) -> deque[QueuedMessage]:
    """Return a queue of messages of 1 KiB."""
    blob = pack_envelope(Envelope(1_100, properties=PROPERTIES, ttl_ms=ttl_ms))
    queue: deque[QueuedMessage] = deque()
    for key in range(FIRST_KEY, FIRST_KEY + count):
        inserts: list[InsertMessage] = []
        queue += queue_runs.arrive([envelope_of(blob)], key, 0, 0, inserts)
    return queue


def milliseconds() -> float:
    """Return the shortest time of a full collection in several."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        gc.collect()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def main(count: int) -> None:
    """Print one line for each kind of message."""
    print(f"{BUILD}, Python {sys.version.split()[0]}")
    gc.collect()
    gc.freeze()  # as a broker does when it starts
    print(f"{milliseconds():8.1f} ms without messages")
    for name, ttl_ms in (("usual messages", None), ("messages with a time to live", 60_000)):
        queue = queue_of(count, ttl_ms=ttl_ms)
        print(f"{milliseconds():8.1f} ms with {len(queue):,} {name}")
        queue.clear()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
