"""Comparisons of both builds, each with an input that it makes from a source of random numbers.

Each returns whether the functions in C had something to do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from postbus.amqp import runs as frame_runs
from postbus.amqp.frames import OutcomeForm
from postbus.edge import message_ids
from postbus.entity.commands import Receiver, StoredRow
from postbus.entity.queues import expiry, locks
from postbus.entity.queues import runs as queue_runs
from postbus.message import runs as message_runs
from postbus.message.patch import check_properties
from postbus.store.reads import Reader
from tests.fast import frames, messages
from tests.fast.messages import FIRST_KEY, NOW_MS
from tests.fast.twins import agree

MOST_BYTES = 10_000
SUFFIX = b"--suffix"
RECEIVER = Receiver("link-A", "192.0.2.1")


# --- frames ---------------------------------------------------------------------------------------


def compare_scanned_transfers(source: random.Random) -> bool:
    found = agree(lambda each: frame_runs.scan_transfers(*each), frames.transfers_read(source))
    return bool(found[0])


def compare_scanned_outcomes(source: random.Random) -> bool:
    found = agree(lambda each: frame_runs.scan_outcomes(*each), frames.outcomes_read(source))
    return bool(found[0])


def compare_captured_frames(source: random.Random) -> bool:
    """Scan the rest of a capture for the form of one of its frames."""
    found = agree(scanned, frames.captured_read(source))
    return bool(found) and bool(found[0])


def scanned(given: list[Any]) -> Any:
    if isinstance(given[0], OutcomeForm):
        return frame_runs.scan_outcomes(*given[:3])
    return frame_runs.scan_transfers(*given)


def compare_packed_transfers(source: random.Random) -> bool:
    agree(written, frames.packed_link(source))
    return True


def written(given: list[Any]) -> bytes:
    channel, handle, *rest = given
    return b"".join(frame_runs.link_frames(channel, handle)(*rest))


# --- messages -------------------------------------------------------------------------------------


def compare_sliced(source: random.Random) -> bool:
    return isinstance(agree(message_runs.slice_messages, messages.payloads(source)), list)


def compare_named(source: random.Random) -> bool:
    first = source.choice((1, 2, 0xFF, 2**32, 0x0123_4567_89AB_CDEF, 2**62))
    agree(named, (messages.some(source, messages.envelope), first))
    return True


def named(given: tuple[list[Any], int]) -> int:
    """Name messages with numbers from one on; return the next one."""
    numbers = count(given[1])
    with patch.object(message_ids, "_NUMBERS", numbers):
        message_ids.name_messages(given[0])
    return next(numbers)


def compare_packed_deliveries(source: random.Random) -> bool:
    given = [messages.delivery(source) for _ in range(source.randrange(6))]
    if not source.randrange(24):
        given.append(messages.foreign(source))
    is_locked = bool(source.randrange(2))
    packed = agree(lambda each: message_runs.pack_deliveries(each, is_locked=is_locked), given)
    return isinstance(packed, tuple)


def compare_packed_rows(source: random.Random) -> bool:
    given = [messages.row(source) for _ in range(source.randrange(6))]
    return isinstance(agree(message_runs.pack_copy_rows, given), bytes)


# --- queues ---------------------------------------------------------------------------------------


def compare_checked(source: random.Random) -> bool:
    return isinstance(agree(checked, messages.some(source, messages.envelope)), int)


def checked(envelopes: list[Any]) -> int | None:
    """Return the sum of sizes, None if one is refused or scheduled: the loop of `enqueue`."""
    done, total_bytes = queue_runs.check_usual(envelopes, MOST_BYTES)
    for envelope in envelopes[done:]:
        size_bytes = envelope.size_bytes
        if size_bytes > MOST_BYTES or envelope.scheduled_ms is not None:
            return None
        if check_properties(envelope):
            return None
        total_bytes += size_bytes
    return total_bytes


def compare_arrived(source: random.Random) -> bool:
    key = source.choice((0, 1, FIRST_KEY, 2**62))
    offset = source.choice((0, 1, -FIRST_KEY, 2**61))
    agree(
        lambda each: queue_runs.arrive(each[0], key, offset, NOW_MS, each[1]),
        (messages.some(source, messages.envelope), [("a row before",)]),
    )
    return True


class Sub(SimpleNamespace):
    """A sub-queue as `locks` uses it; it notes calls of all that is not locks."""

    def __init__(self, held: dict[Any, Any], **settings: Any) -> None:
        self.calls: list[Any] = []
        note = self.note
        self.context = SimpleNamespace(
            now_ms=NOW_MS,
            first_key=FIRST_KEY,
            token_suffix=SUFFIX,
            random=random.Random(5),
            outcome=SimpleNamespace(mutations=[], deletes=["earlier"]),
            outstanding=deque(),
            set_timer=lambda *each: note("timer", each[0]),
            settle=lambda *each: note("settled", *each),
        )
        self.entity = SimpleNamespace(
            entity_no=7,
            default_ttl_ms=settings.get("default_ttl_ms"),
            lock_duration_ms=30_000,
            max_delivery_count=10,
            keeps_settled=settings.get("keeps_settled", False),
            traffic=SimpleNamespace(completed=0),
        )
        self.ledger = SimpleNamespace(
            release=lambda *each: note("released", *each),
            leave_all=lambda *each: note("left", *each),
        )
        self.locks = held
        self.is_main = settings.get("is_main", True)
        self.session_until_ms = settings.get("session_until_ms", 0)
        self.lock_timer_ms = None
        self.expire_locks = None
        self.waiting = ()

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what expires instead of expiring it."""

        def noted(name: str) -> Any:
            return lambda _, message: self.note(name, message)

        with (
            patch.object(expiry, "expire", noted("expired")),
            patch.object(expiry, "exhaust", noted("exhausted")),
            patch.object(locks, "_expire_one", noted("lock expired")),
        ):
            yield

    def left(self) -> Any:
        """Return what a call has left behind."""
        outcome = self.context.outcome
        return (
            self.locks, self.calls, outcome.mutations, outcome.deletes, self.context.outstanding,
            self.lock_timer_ms, self.entity.traffic, self.context.random.random(),
        )  # fmt: skip


def compare_locked(source: random.Random) -> bool:
    batch = messages.some(source, messages.queued)
    held = {each.token: each for each in (messages.locked(source) for _ in range(2))}
    settings = {
        "default_ttl_ms": source.choice((None, None, None, 5_000)),
        "is_main": bool(source.randrange(8)),
        "session_until_ms": source.choice((0, 0, NOW_MS + 9)),
    }
    return isinstance(agree(lambda each: lock(*each, settings), (batch, held))[0], list)


def lock(batch: list[Any], held: dict[Any, Any], settings: dict[str, Any]) -> Any:
    sub = Sub(held, **settings)
    with sub.watched():
        try:
            found: Any = locks.lock(sub, batch, RECEIVER)
        except Exception as error:  # noqa: BLE001 - compared with that of the twin
            found = error
    return found, sub.left()


def compare_completed(source: random.Random) -> bool:
    entries = [messages.locked(source) for _ in range(source.randrange(7))]
    held: dict[Any, Any] = {each.token: each for each in entries}
    tokens = [each.token for each in entries]
    if tokens and not source.randrange(4):
        tokens.append(source.choice(tokens))
    if not source.randrange(4):
        source.shuffle(tokens)
    if not source.randrange(4):
        unknown = source.choice((b"", bytes(16), bytes(17), b"unknown", None, 7, "text"))
        tokens.insert(source.randrange(len(tokens) + 1), unknown)
    if held and not source.randrange(16):
        held[source.choice(sorted(held))] = messages.foreign(source)
    if not source.randrange(4):
        del tokens[source.randrange(len(tokens) + 1) :]
    settings = {"keeps_settled": not source.randrange(4), "is_main": bool(source.randrange(4))}
    done = agree(lambda each: complete(*each, settings), (tokens, held, entries))
    return not isinstance(done[0], Exception)


def complete(
    tokens: list[Any], held: dict[Any, Any], entries: list[Any], settings: dict[str, Any]
) -> Any:
    """Complete messages; all `entries` are compared, also those that are no longer held."""
    del entries
    sub = Sub(held, **settings)
    with sub.watched():
        try:
            found: Any = locks.complete(sub, tokens).lost
        except Exception as error:  # noqa: BLE001 - compared with that of the twin
            found = error
    return found, sub.left()


# --- rows that are read back ----------------------------------------------------------------------


def compare_unpacked_rows(source: random.Random) -> bool:
    given = [messages.record(source) for _ in range(source.randrange(6))]
    return isinstance(agree(stored, given), list)


def stored(found: list[Any]) -> Any:
    """Return the rows of a page, as the reader of the store does."""

    async def bodies(_connection: object, body_ids: list[int]) -> dict[int, bytes]:
        return {each: b"a body" for each in body_ids if each != 1}

    reading = Reader._stored(SimpleNamespace(_read_bodies=bodies), None, found)
    try:
        reading.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("the reader waits")


def compare_loaded(source: random.Random) -> bool:
    offset = source.choice((0, 1, -FIRST_KEY, 2**61))
    rows = [
        StoredRow(number, NOW_MS, None, 0, False, messages.envelope(source))
        for number in range(FIRST_KEY, FIRST_KEY + source.randrange(6))
    ]
    return bool(agree(lambda each: queue_runs.load(each, offset), rows))


COMPARISONS = (
    compare_scanned_transfers,
    compare_scanned_outcomes,
    compare_captured_frames,
    compare_packed_transfers,
    compare_sliced,
    compare_named,
    compare_packed_deliveries,
    compare_packed_rows,
    compare_checked,
    compare_arrived,
    compare_locked,
    compare_completed,
    compare_unpacked_rows,
    compare_loaded,
)
