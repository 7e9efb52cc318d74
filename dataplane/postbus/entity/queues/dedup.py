"""Ids that a queue or topic has seen; within the window a message with one is a duplicate (ADR 26).

The latest ids are stored exactly, with the time of their acceptance; so is every id that may not be
committed yet. Of older ones 8 bytes are stored, 48 bits of the digest and a time with a resolution
of 16 s, in sorted buckets that are split when they grow, so that the time of an insertion does not
depend on their number. A match there is only probable; the tables decide (`Needs.ids`). Ids that
left the window are removed by a timer.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from postbus.entity.commands import Refusal, Refused, StoredRow
from postbus.entity.outcomes import ForgetIds, Found, Needs, RecordIds
from postbus.message.ids import id_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from postbus.entity.apply_context import ApplyContext
    from postbus.message.envelope import Envelope

DIGEST_BYTES: Final = 16

MAX_IDS: Final = 16 * 1024 * 1024
"""Maximum number of ids of an entity in a partition, 8.5 bytes each. Our choice; more are refused,
with the advice to shorten the window."""

RECENT_IDS: Final = 16_384
"""Number of exact ids, at most 300 bytes each: clients repeat messages soon."""

RECENT_MS: Final = 2_000
"""Age below which ids stay exact: a read of the tables in progress may miss them."""

SLOT_MS: Final = 16_384
SLOT_BITS: Final = 16
SLOT_MASK: Final = (1 << SLOT_BITS) - 1
"""A time is stored as a number of slots modulo 2**16, which is 12 days: more than any window."""

EARLY_SLOTS: Final = 64
"""Number of slots that count as future and not as 12 days ago, after a change of the clock."""

BUCKET_IDS: Final = 1_024
CHUNK_IDS: Final = 256
"""Number of exact ids that become older ones at a time: 0.5 ms."""

SWEEP_BUCKETS: Final = 12
SWEEP_PAUSE_MS: Final = 10
"""One step of a sweep takes about 1 ms."""

LEAST_SWEEP_MS: Final = 10_000
MOST_SWEEP_MS: Final = 60_000
"""Bounds of the interval of sweeps, an eighth of the window. The rows that a sweep deletes are
limited: rarer sweeps would not keep up with a sender that waits for each message."""

TOO_MANY: Final = Refused(
    Refusal.QUOTA_EXCEEDED,
    f"duplicate detection holds {MAX_IDS} ids; a shorter window makes room for more",
)


class Screened(NamedTuple):
    """Digests of messages, None without an id; `is_new`: none is a duplicate of another or of a
    seen one.
    """

    digests: list[bytes | None]
    is_new: bool


def digest_of(message_id: bytes) -> bytes | None:
    """Return the digest of an encoded message id's text, None if it is empty."""
    if message_id[0] == 0xA1:
        text = message_id[2:]
    else:
        text = id_text(message_id).encode()
    return blake2b(text, digest_size=DIGEST_BYTES).digest() if text else None


class SeenIds:
    """See the module's docstring. `window_ms` may be changed at any time."""

    __slots__ = (
        "_context",
        "_index",
        "_order",
        "_recent",
        "_sweep_at",
        "_timer_ms",
        "entity_no",
        "window_ms",
    )

    def __init__(self, entity_no: int, context: ApplyContext, window_ms: int) -> None:
        self.entity_no = entity_no
        self.window_ms = window_ms
        self._context = context
        self._recent: dict[bytes, int] = {}
        self._order: deque[tuple[int, list[bytes]]] = deque()
        self._index = _Index()
        self._sweep_at: int | None = None  # the bucket where a sweep in progress continues
        self._timer_ms: int | None = None

    def __len__(self) -> int:
        return len(self._recent) + self._index.count

    def load(self, rows: Sequence[RecordIds]) -> None:
        """Take over loaded ids, in order of time."""
        first, count = len(rows), 0
        while first and count < RECENT_IDS // 2:
            first -= 1
            count += len(rows[first].digests) // DIGEST_BYTES
        self._index.fill(rows[:first])
        for row in rows[first:]:
            self._remember(row.seen_ms, _split(row.digests))
        self._watch()

    # --- arrivals ---------------------------------------------------------------------------------

    def screen(
        self, envelopes: Sequence[Envelope], found: Sequence[StoredRow] | None
    ) -> Screened | Needs:
        """Return the digests of messages, or the ids that must be looked up in the tables first."""
        oldest_ms = self._context.now_ms - self.window_ms
        recent, index = self._recent, self._index
        digests: list[bytes | None] = []
        asked: list[tuple[int, bytes, int, int]] = []
        known: list[tuple[int, bytes, int, int]] = []
        is_new = True
        for envelope in envelopes:
            message_id = envelope.message_id
            digest = None if message_id is None else digest_of(message_id)
            digests.append(digest)
            if digest is None:
                continue
            seen_ms = recent.get(digest)
            if seen_ms is not None:
                if seen_ms > oldest_ms:
                    is_new = False
                    known.append((self.entity_no, digest, seen_ms, seen_ms))
            elif index.count and (span := index.span(digest, self._context.now_ms, oldest_ms)):
                is_new = False
                if found is None:
                    asked.append((self.entity_no, digest, *span))
        if asked:  # exact ids may be older ones when the answer arrives
            return Needs(ids=asked + known)
        if is_new and len(digests) > 1:
            named = len(digests) - digests.count(None)
            is_new = len(set(digests)) == named + (named < len(digests))
        return Screened(digests, is_new)

    def is_seen(self, digest: bytes, found: Sequence[StoredRow] | None) -> bool:
        """Return whether an id was accepted within the window; `found` has the older ones."""
        seen_ms = self._recent.get(digest)
        if seen_ms is not None:
            return seen_ms > self._context.now_ms - self.window_ms
        return isinstance(found, Found) and (self.entity_no, digest) in found.seen

    def refusal(self, count: int) -> Refused | None:
        """Return a refusal if there is no room for this number of new ids, else None."""
        return TOO_MANY if len(self) + count > MAX_IDS else None

    def record(self, digests: list[bytes]) -> None:
        """Add the ids that this outcome accepts."""
        if not digests:
            return
        context = self._context
        context.outcome.mutations.append(
            RecordIds(self.entity_no, context.now_ms, b"".join(digests))
        )
        self._remember(context.now_ms, digests)
        if self._is_crowded:
            context.resumed[self.settle_down] = None
        self._watch()

    def _remember(self, seen_ms: int, digests: list[bytes]) -> None:
        self._recent.update(dict.fromkeys(digests, seen_ms))
        if len(digests) <= CHUNK_IDS:
            self._order.append((seen_ms, digests))
            return
        for start in range(0, len(digests), CHUNK_IDS):
            self._order.append((seen_ms, digests[start : start + CHUNK_IDS]))

    @property
    def _is_crowded(self) -> bool:
        """Return whether some of the exact ids may become older ones."""
        context = self._context
        return len(self._recent) > RECENT_IDS and self._order[0][0] < min(
            context.committed_ms, context.now_ms - RECENT_MS
        )

    def settle_down(self) -> None:
        """Move the oldest exact ids to the older ones, some at a time.

        In a Tick: between the check of a transaction and its end no id may move.
        """
        recent, order = self._recent, self._order
        most = CHUNK_IDS + (len(recent) - RECENT_IDS) // 4
        while most > 0 and self._is_crowded:
            seen_ms, digests = order.popleft()
            most -= len(digests)
            for digest in digests:
                if recent.get(digest) == seen_ms:  # else it was accepted again meanwhile
                    del recent[digest]
                    self._index.add(digest, seen_ms)
        if self._is_crowded:
            self._context.resumed[self.settle_down] = None

    # --- time -------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything: the entity is dropped, or no longer detects duplicates."""
        self._recent.clear()
        self._order.clear()
        self._index = _Index()
        self._timer_ms = None
        self._context.outcome.mutations.append(ForgetIds(self.entity_no, None))

    def _watch(self) -> None:
        """Set a timer for the time when ids may leave the window."""
        if self._timer_ms is None and (self._recent or self._index.count):
            pause_ms = min(max(self.window_ms // 8, LEAST_SWEEP_MS), MOST_SWEEP_MS)
            self._set_timer(self._context.now_ms + pause_ms)

    def _set_timer(self, when_ms: int) -> None:
        self._timer_ms = when_ms
        self._context.set_timer(when_ms, self.sweep)

    def sweep(self) -> None:
        """Forget ids that left the window, some at a time, and their rows at once."""
        context = self._context
        if self._timer_ms is None or self._timer_ms > context.now_ms:
            return
        self._timer_ms = None
        oldest_ms = context.now_ms - self.window_ms
        if self._sweep_at is None:
            self._sweep_at = 0
            context.outcome.mutations.append(ForgetIds(self.entity_no, oldest_ms + 1))
        recent, order = self._recent, self._order
        left = RECENT_IDS // 16
        while order and order[0][0] <= oldest_ms and left > 0:
            seen_ms, digests = order.popleft()
            left -= len(digests)
            for digest in digests:
                if recent.get(digest) == seen_ms:
                    del recent[digest]
        next_at = self._index.sweep(self._sweep_at, context.now_ms, oldest_ms)
        if next_at is not None or left <= 0:
            self._sweep_at = next_at or 0
            self._set_timer(context.now_ms + SWEEP_PAUSE_MS)
            return
        self._sweep_at = None
        self._watch()


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


# --- older ids ------------------------------------------------------------------------------------


class _Index:
    """Entries of 8 bytes, 48 bits of a digest above the slot of its time, in sorted buckets.

    `_firsts[i]` is the lowest entry that bucket i may hold; the first is 0.
    """

    __slots__ = ("_buckets", "_firsts", "count")

    def __init__(self) -> None:
        self._buckets: list[array[int]] = [array("Q")]
        self._firsts = [0]
        self.count = 0

    def fill(self, rows: Iterable[RecordIds]) -> None:
        """Add many ids to an empty index, sorted in 256 parts to save memory."""
        parts = [array("Q") for _ in range(256)]
        for row in rows:
            slot = row.seen_ms // SLOT_MS & SLOT_MASK
            words = array("Q")
            words.frombytes(row.digests)
            for word in words[::2]:
                parts[word >> 56].append(word & ~SLOT_MASK | slot)
        for number in range(len(parts)):
            entries = sorted(parts[number])
            parts[number] = array("Q")  # not all of it twice
            for start in range(0, len(entries), BUCKET_IDS // 2):
                chunk = array("Q", entries[start : start + BUCKET_IDS // 2])
                self.count += len(chunk)
                self._buckets.append(chunk)
                self._firsts.append(chunk[0])

    def add(self, digest: bytes, seen_ms: int) -> None:
        entry = _prefix_of(digest) | seen_ms // SLOT_MS & SLOT_MASK
        at = bisect_right(self._firsts, entry) - 1
        bucket = self._buckets[at]
        insort(bucket, entry)
        self.count += 1
        if len(bucket) > BUCKET_IDS:
            middle = len(bucket) // 2
            self._buckets[at : at + 1] = [bucket[:middle], bucket[middle:]]
            self._firsts.insert(at + 1, bucket[middle])

    def span(self, digest: bytes, now_ms: int, oldest_ms: int) -> tuple[int, int] | None:
        """Return first and last millisecond at which an id may have been seen after `oldest_ms`."""
        low = _prefix_of(digest)
        high = low | SLOT_MASK
        at = bisect_right(self._firsts, low) - 1
        bucket = self._buckets[at]
        position = bisect_left(bucket, low)
        if position < len(bucket):
            if bucket[position] > high:
                return None
        elif at + 1 == len(self._buckets) or self._firsts[at + 1] > high:
            return None
        slots: list[int] = []
        now_slot = now_ms // SLOT_MS
        while True:
            while position < len(bucket) and bucket[position] <= high:
                slots.append(now_slot - _age_of(bucket[position], now_slot))
                position += 1
            at, position = at + 1, 0
            if at == len(self._buckets) or self._firsts[at] > high:
                break
            bucket = self._buckets[at]
        last_ms = max(slots, default=0) * SLOT_MS + SLOT_MS - 1
        if not slots or last_ms <= oldest_ms:
            return None
        return max(min(slots) * SLOT_MS, oldest_ms + 1), last_ms

    def sweep(self, at: int, now_ms: int, oldest_ms: int) -> int | None:
        """Remove ids that left the window from some buckets; return the next bucket, None at the
        end.
        """
        now_slot = now_ms // SLOT_MS
        most = now_slot - (oldest_ms + 1) // SLOT_MS  # slots that are partly in the window
        buckets, firsts = self._buckets, self._firsts
        for _ in range(SWEEP_BUCKETS):
            if at >= len(buckets):
                return None
            bucket = buckets[at]
            kept = array("Q", [entry for entry in bucket if _age_of(entry, now_slot) <= most])
            self.count -= len(bucket) - len(kept)
            if at and len(kept) + len(buckets[at - 1]) <= BUCKET_IDS // 2:
                buckets[at - 1].extend(kept)
                del buckets[at], firsts[at]
            else:
                buckets[at] = kept
                at += 1
        return at


def _prefix_of(digest: bytes) -> int:
    word: int = _WORD(digest)[0]
    return word & ~SLOT_MASK


_WORD: Final = struct.Struct("=Q").unpack_from
"""The byte order of this machine, as in `array`: an index exists in memory only."""


def _age_of(entry: int, now_slot: int) -> int:
    """Return the age of an entry in slots, a little below 0 for the future."""
    return (now_slot - entry + EARLY_SLOTS & SLOT_MASK) - EARLY_SLOTS
