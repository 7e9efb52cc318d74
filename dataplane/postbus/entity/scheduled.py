"""Scheduled messages of one entity: known by number and due time only, their rows stay stored.

A scheduled message takes the entity's next number, which names it for cancelling and peeking until
it is activated. Then it moves behind the active messages under a fresh key and number, enqueued at
its scheduled time (D4).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from postbus.entity.commands import Cancelled, Refusal, Refused, SubQueue
from postbus.entity.numbering import Numbering
from postbus.entity.outcomes import InsertMessage, MoveMessage, PutDue
from postbus.message.envelope import Envelope

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from postbus.entity.sub_queue import SubQueueState
    from postbus.entity.turn import Turn


class _Due(NamedTuple):
    due_ms: int
    row_key: int
    sequence: int
    size_bytes: int | None  # unknown after a load


class ScheduledMessages:
    """See the module's docstring. `active` is where messages go when they are due."""

    __slots__ = (
        "_active",
        "_by_time",
        "_due",
        "_numbering",
        "_numbers",
        "_timer_ms",
        "_turn",
    )

    def __init__(self, active: SubQueueState, turn: Turn) -> None:
        self._active = active
        self._turn = turn
        self._numbering = Numbering(active.entity, SubQueue.SCHEDULED, 0)
        self._due: dict[int, _Due] = {}
        self._by_time: list[_Due] = []
        self._numbers = array("q")  # every number ever scheduled, rising; gone ones are skipped
        self._timer_ms: int | None = None

    def __len__(self) -> int:
        return len(self._due)

    def load(self, rows: Iterable[PutDue]) -> None:
        """Take over the due rows of an earlier life."""
        for row in sorted(rows, key=lambda row: row.sequence):
            due = _Due(row.due_ms, row.row_key, row.sequence, None)
            self._due[row.sequence] = due
            self._by_time.append(due)
            self._numbers.append(row.sequence)
        heapify(self._by_time)
        self._watch()

    def clear(self) -> None:
        """Forget everything: the entity is dropped."""
        self._due.clear()
        self._by_time.clear()
        self._timer_ms = None

    def row_keys(self) -> list[int]:
        return [due.row_key for due in self._due.values()]

    def from_number(self, sequence: int) -> Iterator[tuple[int, int]]:
        """Yield (number, row key) in rising order, from a number upward."""
        numbers = self._numbers
        for index in range(bisect_left(numbers, sequence), len(numbers)):
            due = self._due.get(numbers[index])
            if due is not None:
                yield due.sequence, due.row_key

    def add(self, envelope: Envelope) -> int:
        """Store a message to be activated at its scheduled time; return its number."""
        turn = self._turn
        assert envelope.scheduled_ms is not None
        _, sequence = self._active.numbering.take_one(turn)
        row_key, _ = self._numbering.take_one(turn)
        due = _Due(envelope.scheduled_ms, row_key, sequence, envelope.size_bytes)
        outcome = turn.outcome
        outcome.inserts.append(InsertMessage(row_key, turn.now_ms, envelope))
        outcome.mutations.append(
            PutDue(row_key, self._active.entity.entity_no, due.due_ms, sequence)
        )
        self._due[sequence] = due
        self._numbers.append(sequence)
        heappush(self._by_time, due)
        self._active.entity.size_bytes += envelope.size_bytes
        self._watch()
        return sequence

    def cancel(self, numbers: list[int]) -> Cancelled | Refused:
        """Delete all of them or none."""
        wanted = dict.fromkeys(numbers)
        for sequence in wanted:
            if sequence not in self._due:
                return Refused(
                    Refusal.MESSAGE_NOT_FOUND, f"no scheduled message has the number {sequence}"
                )
        outcome = self._turn.outcome
        entity = self._active.entity
        for sequence in wanted:
            due = self._due.pop(sequence)
            outcome.deletes.append(due.row_key)
            if due.row_key >= self._turn.first_key:
                outcome.touches_uncommitted = True
            size_bytes = entity.average_bytes if due.size_bytes is None else due.size_bytes
            entity.shrink(size_bytes)
        self._trim()
        return Cancelled()

    def activate(self) -> None:
        """Move what is due behind the active messages, as many as one turn allows."""
        turn = self._turn
        by_time, due_rows, active = self._by_time, self._due, self._active
        if self._timer_ms is None or self._timer_ms > turn.now_ms:
            return
        self._timer_ms = None
        while by_time and by_time[0].due_ms <= turn.now_ms and turn.allowance > 0:
            due = heappop(by_time)
            if due_rows.get(due.sequence) is not due:
                continue  # cancelled
            del due_rows[due.sequence]
            turn.allowance -= 1
            row_key, sequence = active.numbering.take_one(turn)
            turn.outcome.mutations.append(
                MoveMessage(
                    due.row_key,
                    row_key,
                    active.entity.entity_no,
                    SubQueue.ACTIVE,
                    sequence,
                    0,
                    due.due_ms,
                    None,
                )
            )
            active.append_key(row_key)
        self._trim()
        self._watch()

    def _watch(self) -> None:
        """Make sure a Tick comes when the next message is due."""
        if not self._by_time:
            return
        due_ms = self._by_time[0].due_ms
        if self._timer_ms is not None and self._timer_ms <= due_ms:
            return
        self._timer_ms = due_ms
        if due_ms <= self._turn.now_ms:  # more than one turn allows
            self._turn.resumed[self.activate] = None
        else:
            self._turn.set_timer(due_ms, self.activate)

    def _trim(self) -> None:
        """Forget gone numbers and cancelled entries once they are the larger half."""
        if len(self._numbers) > 2 * len(self._due) + 64:
            self._numbers = array("q", [n for n in self._numbers if n in self._due])
        if len(self._by_time) > 2 * len(self._due) + 64:
            self._by_time = list(self._due.values())
            heapify(self._by_time)
