"""Finding messages of a sub-queue by their numbers, and taking them out of its order.

Nothing else of the sub-queue changes: no place, no delivery count, no lock of another message.
Memory decides what exists, as everywhere; rows are read (`Needs`) for what only they know: the
number of a dead letter, the session of a message, the size of one that is not loaded.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from enum import Enum
from heapq import heapify
from typing import TYPE_CHECKING, Final, NamedTuple

from postbus.entity.commands import Refusal, Refused, StoredRow, SubQueue
from postbus.entity.outcomes import Needs, Settling
from postbus.entity.queues import paging
from postbus.message.patch import with_properties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.entity.queues.queue_state import QueueState
    from postbus.entity.queues.queued_message import QueuedMessage
    from postbus.entity.queues.sub_queue import SubQueueState
    from postbus.message.envelope import Envelope

ABSENT: Final = Refused(Refusal.MESSAGE_NOT_FOUND, "no message here has this number")
LOCKED: Final = Refused(
    Refusal.MESSAGE_LOCKED, "a receiver has the message; try again when its lock is over"
)
LEAVING: Final = Refused(Refusal.BUSY, "the message is about to be dead-lettered")
UNSTORED: Final = Refused(Refusal.BUSY, "the message is being stored")


class Spot(Enum):
    """Where in a sub-queue a message lies that may be taken out."""

    RETURNED = 0
    READY = 1
    BACKLOG = 2
    TAIL = 3
    DEFERRED = 4


class Choice(NamedTuple):
    """A message that may be taken. `place` is a sub-queue or a session.

    `message` is None where memory knows the key only; then `row` is there.
    """

    number: int
    row_key: int
    place: SubQueueState
    spot: Spot
    message: QueuedMessage | None
    row: StoredRow | None

    @property
    def envelope(self) -> Envelope | None:
        """The message; None when it is not loaded and its row is not stored yet."""
        if self.message is not None and self.message.envelope is not None:
            return self.message.envelope
        if self.row is None:
            return None
        section = self.place.deferred_sections.get(self.row_key)
        if section is not None:  # the row may not show the patch yet
            return with_properties(self.row.envelope, section)
        return self.place.context.as_changed(self.row_key, self.row.envelope)


class Chosen(NamedTuple):
    """Result of a search: messages in the order asked for, refusals, and numbers left for later.

    `places` were looked at; `rest` them when the messages are taken.
    """

    choices: list[Choice]
    refused: dict[int, Refused]
    left: list[int]
    places: list[SubQueueState]

    def rest(self) -> None:
        """Release the sessions that were opened for the search."""
        for place in self.places:
            place.end_search()


def choose(
    entity: QueueState,
    kind: SubQueue,
    numbers: Sequence[int],
    found: Sequence[StoredRow] | None,
) -> Chosen | Needs:
    """Find messages by number, up to the limit of one read; not scheduled ones."""
    sub = entity.sub_queue(kind)
    wanted = list(dict.fromkeys(numbers))
    count = paging.readable(entity, len(wanted)) if wanted else 0
    wanted, left = wanted[:count], wanted[count:]
    if kind is SubQueue.ACTIVE:
        named = {number: sub.numbering.key_of(number) for number in wanted}
        row_keys = [row_key for row_key in named.values() if row_key is not None]
        if found is None and row_keys:
            return Needs(row_keys=row_keys)
        rows = {row.row_key: row for row in found or ()}
    else:
        if found is None and wanted:
            return Needs(named=[(entity.entity_no, kind, wanted)])
        rows = {row.row_key: row for row in found or ()}
        named = dict.fromkeys(wanted)
        named.update((row.sequence, row.row_key) for row in rows.values() if row.sequence)
    by_key = {row_key: number for number, row_key in named.items() if row_key is not None}
    places = sub.places_of(by_key, rows)
    spots: dict[int, Choice | Refused] = {}
    for place, own in places:
        spots.update(_locate(place, own, rows))
    answers = {number: spots.get(number, ABSENT) for number in wanted}
    return Chosen(
        [each for each in answers.values() if isinstance(each, Choice)],
        {number: each for number, each in answers.items() if isinstance(each, Refused)},
        left,
        [place for place, _ in places],
    )


def _locate(
    place: SubQueueState, by_key: dict[int, int], rows: dict[int, StoredRow]
) -> dict[int, Choice | Refused]:
    """Return the place of each key that is here. Shape of `by_key`: row key -> number."""
    spots: dict[int, Choice | Refused] = {}

    def note(spot: Spot, row_key: int, message: QueuedMessage | None) -> None:
        number, row = by_key[row_key], rows.get(row_key)
        if row is None and (message is None or message.envelope is None):
            spots[number] = UNSTORED
        else:
            spots[number] = Choice(number, row_key, place, spot, message, row)

    for message in place.locks.values():
        if message.row_key in by_key:
            spots[by_key[message.row_key]] = LOCKED
    for row_key in place.doomed:
        if row_key in by_key:
            spots[by_key[row_key]] = LEAVING
    for spot, messages in (
        (Spot.RETURNED, (message for _, message in place.returned)),
        (Spot.READY, place.ready),
        (Spot.TAIL, place.tail),
    ):
        for message in messages:
            if message.row_key in by_key:
                note(spot, message.row_key, message)
    backlog = place.backlog
    for row_key, number in by_key.items():
        if place.deferred.get(number) == row_key:
            note(Spot.DEFERRED, row_key, None)
        at = bisect_left(backlog, row_key, place.backlog_head)
        if at < len(backlog) and backlog[at] == row_key:
            note(Spot.BACKLOG, row_key, None)
    return spots


# --- taking out -----------------------------------------------------------------------------------


def take(choices: Sequence[Choice], how: Settling) -> None:
    """Remove messages for good, by the commit of this outcome."""
    places: dict[SubQueueState, list[Choice]] = {}
    for choice in choices:
        places.setdefault(choice.place, []).append(choice)
    for place, chosen in places.items():
        _cut_out(place, chosen)
        for choice in chosen:
            place.attempts.pop(choice.row_key, None)
            row, message = choice.row, choice.message
            if message is None:
                assert row is not None
                place.settle_row(choice.row_key, row.enqueued_ms, how, is_stored=True)
                place.ledger.leave_unloaded(row.envelope.size_bytes)
            else:
                is_stored = row is not None
                place.settle_row(choice.row_key, message.enqueued_ms, how, is_stored=is_stored)
                place.ledger.leave(message)
        place.promote_tail()


def _cut_out(place: SubQueueState, chosen: list[Choice]) -> None:
    """Take messages out of the order; the others keep their places."""
    spots: dict[Spot, set[int]] = {}
    for choice in chosen:
        spots.setdefault(choice.spot, set()).add(choice.row_key)
        if choice.spot is Spot.DEFERRED:
            del place.deferred[choice.number]
            place.deferred_sections.pop(choice.row_key, None)
    gone = spots.get(Spot.RETURNED)
    if gone:
        place.returned = [each for each in place.returned if each[0] not in gone]
        heapify(place.returned)
        for row_key in gone:
            place.stubs.pop(row_key, None)
    gone = spots.get(Spot.READY)
    if gone:
        place.ready = deque(each for each in place.ready if each.row_key not in gone)
    gone = spots.get(Spot.TAIL)
    if gone:
        place.tail = deque(each for each in place.tail if each.row_key not in gone)
    gone = spots.get(Spot.BACKLOG)
    if gone:
        _cut_backlog(place, gone)


def _cut_backlog(place: SubQueueState, gone: set[int]) -> None:
    """Copy what lies between; a million keys cost two milliseconds."""
    backlog = place.backlog
    positions = [bisect_left(backlog, row_key, place.backlog_head) for row_key in sorted(gone)]
    kept = array("q")
    start = positions[0]
    for position in positions:
        kept.extend(backlog[start:position])
        start = position + 1
    backlog[positions[0] : positions[-1] + 1] = kept
