"""Scheduled messages of one entity: known by number and due time only, their rows stay stored.

A scheduled message takes the entity's next number, which identifies it for cancelling and peeking
until it is activated. Then it moves behind the active messages under a fresh key and number,
enqueued at its scheduled time (ADR 17).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from postbus.entity.commands import Cancelled, Refusal, Refused, StoredRow, SubQueue
from postbus.entity.numbering import Numbering
from postbus.entity.outcomes import Fetch, InsertMessage, MoveMessage, PutDue
from postbus.message.envelope import Envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from postbus.entity.apply_context import ApplyContext
    from postbus.entity.entity_state import EntityState
    from postbus.entity.queues.active_messages import ActiveMessages


PUBLISH_COPIES: Final = 10_000
"""Approximate number of copies of due messages made at a time. Our choice: a commit of 100 ms."""

FETCH_BYTES: Final = 4 * 1024 * 1024
"""Approximate bytes of due messages read at a time; they are in memory only until they are moved.
Our choice."""


class _Due(NamedTuple):
    due_ms: int
    row_key: int
    sequence: int
    size_bytes: int | None  # unknown after a load


class ScheduledMessages:
    """See the module's docstring. `active`: the destination of due messages.

    In a topic they are passed to `publish` with their scheduled time; it returns the number of
    copies, and the row is deleted.
    """

    __slots__ = (
        "_active",
        "_by_time",
        "_context",
        "_due",
        "_entity",
        "_fetched",
        "_numbering",
        "_numbers",
        "_publish",
        "_timer_ms",
    )

    def __init__(
        self,
        entity: EntityState,
        active: ActiveMessages,
        context: ApplyContext,
        publish: Callable[[Envelope, int], int] | None = None,
    ) -> None:
        self._entity = entity
        self._active = active
        self._publish = publish
        self._context = context
        self._numbering = Numbering(entity, SubQueue.SCHEDULED, 0)
        self._due: dict[int, _Due] = {}
        self._by_time: list[_Due] = []
        self._fetched: list[_Due] = []  # due, their rows are being read
        self._numbers = array("q")  # every scheduled number, rising; removed ones are skipped
        self._timer_ms: int | None = None

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._due

    def load(self, rows: Iterable[PutDue]) -> None:
        """Take over loaded scheduled rows."""
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
        self._fetched.clear()
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

    def add(self, envelope: Envelope, reserved: int | None = None) -> int:
        """Store a message to be activated at its scheduled time; return its number."""
        context = self._context
        assert envelope.scheduled_ms is not None
        sequence = reserved
        if sequence is None:
            _, sequence = self._active.numbering.take_one(context)
        row_key, _ = self._numbering.take_one(context)
        due = _Due(envelope.scheduled_ms, row_key, sequence, envelope.size_bytes)
        outcome = context.outcome
        outcome.inserts.append(InsertMessage(row_key, context.now_ms, envelope))
        outcome.mutations.append(PutDue(row_key, self._entity.entity_no, due.due_ms, sequence))
        self._due[sequence] = due
        insort(self._numbers, sequence)  # at the end, unless the number was reserved long ago
        heappush(self._by_time, due)
        self._entity.grow(envelope.size_bytes)
        self._entity.traffic.accepted += 1
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
        outcome = self._context.outcome
        entity = self._entity
        average_bytes = entity.average_bytes
        for sequence in wanted:
            due = self._due.pop(sequence)
            outcome.deletes.append(due.row_key)
            if due.row_key >= self._context.first_key:
                outcome.touches_uncommitted = True
            entity.shrink(average_bytes if due.size_bytes is None else due.size_bytes)
        self._trim()
        return Cancelled()

    def activate(self) -> None:
        """Move due messages behind the active ones, up to the limit of one command."""
        context = self._context
        by_time, due_rows, active = self._by_time, self._due, self._active
        if self._timer_ms is None or self._timer_ms > context.now_ms:
            return
        self._timer_ms = None
        if self._publish is not None or (
            active.requires_session and self._entity.forward_to is None
        ):
            self._fetch_due()
            return
        while by_time and by_time[0].due_ms <= context.now_ms and context.allowance > 0:
            due = heappop(by_time)
            if due_rows.get(due.sequence) is not due:
                continue  # cancelled
            context.allowance -= 1
            self._activate(due)
        self._trim()
        self._watch()

    def _activate(self, due: _Due) -> None:
        entity = self._entity
        if entity.forward_to is None:
            self._active.append_key(self._move(due))
            return
        size_bytes = entity.average_bytes if due.size_bytes is None else due.size_bytes
        del self._due[due.sequence]
        entity.outbox.take_due(entity, due.row_key, due.sequence, due.due_ms, size_bytes)

    def _move(self, due: _Due) -> int:
        """Insert a due message into the active ones; return its key there."""
        context, active = self._context, self._active
        del self._due[due.sequence]
        row_key, sequence = active.numbering.take_one(context)
        context.outcome.mutations.append(
            MoveMessage(
                due.row_key,
                row_key,
                self._entity.entity_no,
                SubQueue.ACTIVE,
                sequence,
                0,
                due.due_ms,
                None,
            )
        )
        return row_key

    def _fetch_due(self) -> None:
        """Read due rows, for their sessions; one read at a time."""
        context, by_time = self._context, self._by_time
        if self._fetched:
            return
        room_bytes = FETCH_BYTES
        while (
            by_time
            and by_time[0].due_ms <= context.now_ms
            and context.allowance > 0
            and (room_bytes > 0 or not self._fetched)
        ):
            due = heappop(by_time)
            if self._due.get(due.sequence) is due:
                context.allowance -= 1
                room_bytes -= due.size_bytes or self._entity.average_bytes
                self._fetched.append(due)
        if self._fetched:
            row_keys = sorted(due.row_key for due in self._fetched)
            entity_no = self._entity.entity_no
            context.outcome.effects.append(Fetch(entity_no, SubQueue.SCHEDULED, row_keys))
        else:
            self._watch()

    def supply(self, rows: Iterable[StoredRow]) -> None:
        """Activate the messages whose rows were read, unless they were cancelled meanwhile."""
        by_key = {row.row_key: row for row in rows}
        fetched = self._fetched
        self._fetched = []
        if self._publish is not None:
            self._publish_all(fetched, by_key)
            return
        for due in fetched:
            if self._due.get(due.sequence) is due:
                session_id = by_key[due.row_key].envelope.session_id
                if self._entity.forward_to is None:
                    self._active.append_key(self._move(due), session_id=session_id)
                else:
                    self._activate(due)
        self._trim()
        self._watch()

    def _publish_all(self, fetched: list[_Due], rows: dict[int, StoredRow]) -> None:
        """Publish messages that were read, up to the limit of a command; the others are read
        again.
        """
        assert self._publish is not None
        outcome, entity = self._context.outcome, self._entity
        copies = 0
        for due in fetched:
            if self._due.get(due.sequence) is not due:
                continue
            if copies >= PUBLISH_COPIES:
                heappush(self._by_time, due)
                continue
            envelope = rows[due.row_key].envelope
            copies += self._publish(envelope, due.due_ms)
            del self._due[due.sequence]
            outcome.deletes.append(due.row_key)
            entity.shrink(envelope.size_bytes if due.size_bytes is None else due.size_bytes)
        self._trim()
        self._watch()

    def _watch(self) -> None:
        """Set a timer for the time when the next message is due."""
        if not self._by_time:
            return
        due_ms = self._by_time[0].due_ms
        if self._timer_ms is not None and self._timer_ms <= due_ms:
            return
        self._timer_ms = due_ms
        if due_ms <= self._context.now_ms:  # more than one command may move
            self._context.resumed[self.activate] = None
        else:
            self._context.set_timer(due_ms, self.activate)

    def _trim(self) -> None:
        """Forget removed numbers and cancelled entries once they are the larger half."""
        if len(self._numbers) > 2 * len(self._due) + 64:
            self._numbers = array("q", [n for n in self._numbers if n in self._due])
        if len(self._by_time) > 2 * len(self._due) + 64:
            self._by_time = list(self._due.values())
            heapify(self._by_time)
