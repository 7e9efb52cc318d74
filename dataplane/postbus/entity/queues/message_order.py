"""The order in which the available messages of a sub-queue are delivered, loaded or not.

Pure: messages and row keys go in and come out. `ledger` accounts for them, `paging` decides when
they are loaded and unloaded.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import deque
from heapq import heapify, heappop, heappush, nsmallest
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence, Set

    from postbus.entity.queues.queued_message import QueuedMessage

_NO_MESSAGES: Final[deque[QueuedMessage]] = deque(maxlen=0)
"""The tail of most orders: an empty deque costs 770 bytes."""

_row_key_of = attrgetter("row_key")


class MessageOrder:
    """Available messages by row key. Locked, deferred and doomed messages are not here.

    The messages are in four collections, ordered by key: `_returned` (had a lock before; a heap),
    `_ready` (loaded), `_backlog` from `_head` on (keys only) and `_tail` (loaded, newer than the
    backlog). Every key of one is lower than every key of the next, therefore the lowest is at the
    front of the first that is not empty. A backlog that is used up is an empty array, and without
    a backlog there is no tail.

    A message is absent while only its row has the envelope: it is a key, or it returned without
    its envelope and is in `_stubs`, by row key.
    """

    __slots__ = ("_backlog", "_head", "_ready", "_returned", "_stubs", "_tail")

    def __init__(self) -> None:
        self._returned: list[tuple[int, QueuedMessage]] = []
        self._ready: deque[QueuedMessage] = deque()
        self._backlog = array("q")
        self._head = 0
        self._tail = _NO_MESSAGES
        self._stubs: dict[int, QueuedMessage] = {}

    # --- counts -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.front_count + self.backlog_count + len(self._tail)

    @property
    def is_empty(self) -> bool:
        return not (self._ready or self._returned or self._backlog)

    @property
    def front_count(self) -> int:
        """Number of messages before the backlog."""
        return len(self._ready) + len(self._returned)

    @property
    def backlog_count(self) -> int:
        """Number of messages that are keys."""
        return len(self._backlog) - self._head

    @property
    def has_tail(self) -> bool:
        return bool(self._tail)

    @property
    def has_absent(self) -> bool:
        """True if rows must be read before all messages can be taken."""
        return bool(self._backlog or self._stubs)

    # --- arrivals ---------------------------------------------------------------------------------

    def restore(self, row_keys: array[int]) -> None:
        """Take over the keys that were loaded into an empty order."""
        assert self.is_empty
        self._backlog = row_keys

    def extend(self, messages: Sequence[QueuedMessage]) -> None:
        """Add new messages, which are loaded, behind all others."""
        if not self._backlog:
            self._ready.extend(messages)
        elif self._tail:
            self._tail.extend(messages)
        else:
            self._tail = deque(messages)

    def append_ready(self, message: QueuedMessage) -> bool:
        """Add a new message unless it would be the tail; return whether it was added."""
        if self._backlog:
            return False
        self._ready.append(message)
        return True

    def append_keys(self, row_keys: Sequence[int]) -> None:
        """Add new messages of which only the keys are known; there must be no tail."""
        assert not self._tail
        self._backlog.extend(row_keys)

    def put_back(self, message: QueuedMessage) -> None:
        """Return a message that was taken, loaded or not."""
        heappush(self._returned, (message.row_key, message))
        if message.envelope is None:
            self._stubs[message.row_key] = message

    # --- leaving ----------------------------------------------------------------------------------

    def take(self, count: int) -> list[QueuedMessage]:
        """Take up to `count` messages from the front; stop before one that is absent."""
        returned, ready = self._returned, self._ready
        batch: list[QueuedMessage] = []
        while returned and len(batch) < count:
            if returned[0][1].envelope is None:
                return batch
            batch.append(heappop(returned)[1])
        count -= len(batch)
        if count >= len(ready):
            batch += ready
            ready.clear()
        else:
            take = ready.popleft
            batch += [take() for _ in range(count)]
        return batch

    def take_below(self, end_key: int, limit: int) -> tuple[list[QueuedMessage], array[int]]:
        """Take the first messages below a key, at most `limit`, loaded or not.

        Those of which only the key is here are returned as keys. Fewer than `limit` are not the
        last ones where a backlog has ended.
        """
        messages: list[QueuedMessage] = []
        returned, ready = self._returned, self._ready
        while returned and len(messages) < limit and returned[0][0] < end_key:
            row_key, message = heappop(returned)
            self._stubs.pop(row_key, None)
            messages.append(message)
        while ready and len(messages) < limit and ready[0].row_key < end_key:
            messages.append(ready.popleft())
        last = min(self._head + limit - len(messages), len(self._backlog))
        keys = self._backlog[self._head : bisect_left(self._backlog, end_key, self._head, last)]
        if keys:
            self._head += len(keys)
            self._trim_backlog()
        return messages, keys

    def take_only(self) -> QueuedMessage | None:
        """Take the message if there is exactly one and it is ready."""
        if len(self._ready) == 1 and not (self._returned or self._backlog):
            return self._ready.popleft()
        return None

    def cut(self, row_keys: Set[int]) -> None:
        """Remove messages; the order of the others stays."""
        if not row_keys:
            return
        if self._returned:
            self._returned = [each for each in self._returned if each[0] not in row_keys]
            heapify(self._returned)
            for row_key in row_keys & self._stubs.keys():
                del self._stubs[row_key]
        if self._ready and min(row_keys) <= self._ready[-1].row_key:
            self._ready = deque(each for each in self._ready if each.row_key not in row_keys)
        if self._backlog:
            self._cut_backlog(row_keys)
            if self._tail:
                self._tail = deque(each for each in self._tail if each.row_key not in row_keys)
            self._trim_backlog()

    def _cut_backlog(self, row_keys: Set[int]) -> None:
        """Copy the keys in between; a million of them cost two milliseconds."""
        backlog = self._backlog
        positions = [self._position_of(row_key) for row_key in sorted(row_keys)]
        positions = [position for position in positions if position >= 0]
        if not positions:
            return
        kept = array("q")
        start = positions[0]
        for position in positions:
            kept.extend(backlog[start:position])
            start = position + 1
        backlog[positions[0] : positions[-1] + 1] = kept

    def clear(self) -> None:
        self._returned.clear()
        self._ready.clear()
        self._backlog = array("q")
        self._head = 0
        self._tail = _NO_MESSAGES
        self._stubs.clear()

    # --- unloading --------------------------------------------------------------------------------

    def unload_tail(self, limit: int = sys.maxsize) -> Collection[QueuedMessage]:
        """Keep only the keys of the first messages of the tail; return these."""
        tail = self._tail
        if limit < len(tail):
            take = tail.popleft
            unloaded: Collection[QueuedMessage] = [take() for _ in range(limit)]
        else:
            unloaded, self._tail = tail, _NO_MESSAGES
        self._backlog.extend([message.row_key for message in unloaded])
        return unloaded

    def unload_ready(self, limit: int = sys.maxsize) -> Collection[QueuedMessage]:
        """Keep only the keys of the last ready messages; return these."""
        ready = self._ready
        if limit < len(ready):
            take = ready.pop
            unloaded: Collection[QueuedMessage] = [take() for _ in range(limit)][::-1]
        else:
            unloaded, self._ready = ready, deque()
        if unloaded:
            keys = array("q", [message.row_key for message in unloaded])
            keys.extend(self._backlog[self._head :])
            self._backlog = keys
            self._head = 0
        return unloaded

    def note_unloaded(self, message: QueuedMessage) -> None:
        """Record that a returned message has lost its envelope."""
        self._stubs[message.row_key] = message

    # --- loading ----------------------------------------------------------------------------------

    def wants_rows(self, low_water: int) -> bool:
        """Return whether there are stubs, or few ready messages before a backlog."""
        return bool(self._stubs or (self._backlog and len(self._ready) < low_water))

    def stub_keys(self, limit: int) -> list[int]:
        """Return the first keys of returned messages without an envelope."""
        return sorted(self._stubs)[:limit] if self._stubs else []

    def next_keys(self, limit: int) -> array[int]:
        """Return the first keys of the backlog."""
        return self._backlog[self._head : self._head + max(limit, 0)]

    def stub_of(self, row_key: int) -> QueuedMessage | None:
        return self._stubs.get(row_key)

    def is_absent(self, row_key: int) -> bool:
        """Return whether this is a message here of which only the row has the envelope."""
        return row_key in self._stubs or self._position_of(row_key) >= 0

    def note_loaded(self, stub: QueuedMessage) -> None:
        """Record that a stub has its envelope again."""
        del self._stubs[stub.row_key]

    def load_next(self, messages: Sequence[QueuedMessage]) -> None:
        """Replace the first keys of the backlog by their messages, which are ready now."""
        if messages:
            self._head += len(messages)
            assert self._backlog[self._head - 1] == messages[-1].row_key
            self._ready.extend(messages)
            self._trim_backlog()

    def _trim_backlog(self) -> None:
        """Free the used front of the array; make the tail ready when the backlog is empty."""
        if self._head == len(self._backlog):
            self._backlog = array("q")
            self._head = 0
            self._ready += self._tail
            self._tail = _NO_MESSAGES
        elif self._head > len(self._backlog) // 2:
            del self._backlog[: self._head]
            self._head = 0

    def _position_of(self, row_key: int) -> int:
        """Return the index of a key of the backlog; -1 if it is none."""
        position = bisect_left(self._backlog, row_key, self._head)
        if position < len(self._backlog) and self._backlog[position] == row_key:
            return position
        return -1

    # --- reading ----------------------------------------------------------------------------------

    def oldest(self) -> tuple[int, int | None] | None:
        """Return row key and enqueued time of the first message, None without one.

        The time is None when only the key is in memory.
        """
        if self._returned:
            row_key, message = self._returned[0]
            return row_key, message.enqueued_ms
        if self._ready:
            return self._ready[0].row_key, self._ready[0].enqueued_ms
        return (self._backlog[self._head], None) if self._backlog else None

    def lowest_key(self, from_key: int) -> int | None:
        """Return the lowest key that is not below `from_key`, None without one."""
        if self._returned:
            keys = [row_key for row_key, _ in self._returned if row_key >= from_key]
            if keys:
                return min(keys)
        if self._ready and self._ready[-1].row_key >= from_key:
            return self._ready[bisect_left(self._ready, from_key, key=_row_key_of)].row_key
        if self._backlog and self._backlog[-1] >= from_key:
            return self._backlog[bisect_left(self._backlog, from_key, self._head)]
        if self._tail and self._tail[-1].row_key >= from_key:
            return self._tail[bisect_left(self._tail, from_key, key=_row_key_of)].row_key
        return None

    def first(self, limit: int, from_key: int = 0) -> list[tuple[int, QueuedMessage | None]]:
        """Return the first messages from a key on; None is one of which only the key is here."""
        found: list[tuple[int, QueuedMessage | None]] = []
        if self._returned:
            found += nsmallest(limit, (each for each in self._returned if each[0] >= from_key))
        found += _from_key(self._ready, from_key, limit - len(found))
        if self._backlog and len(found) < limit:
            start = bisect_left(self._backlog, from_key, self._head)
            keys = self._backlog[start : start + limit - len(found)]
            found += [(row_key, None) for row_key in keys]
            found += _from_key(self._tail, from_key, limit - len(found))
        return found

    def returned(self) -> list[QueuedMessage]:
        """Return the messages that had a lock before, in order."""
        return [message for _, message in sorted(self._returned, key=lambda pair: pair[0])]

    def front(self) -> Iterator[QueuedMessage]:
        """Yield the messages before the backlog, in order."""
        return chain(self.returned(), self._ready)

    def messages(self) -> Iterator[QueuedMessage]:
        """Yield all messages that are more than a key, in order."""
        return chain(self.front(), self._tail)

    def row_keys(self) -> array[int]:
        """Return the keys of all messages, in order."""
        keys = array("q", [message.row_key for message in self.front()])
        keys.extend(self._backlog[self._head :])
        keys.extend([message.row_key for message in self._tail])
        return keys


def _from_key(
    messages: deque[QueuedMessage], from_key: int, limit: int
) -> list[tuple[int, QueuedMessage | None]]:
    if not messages or messages[-1].row_key < from_key:
        return []
    start = bisect_left(messages, from_key, key=_row_key_of)
    return [(each.row_key, each) for each in islice(messages, start, start + max(limit, 0))]
