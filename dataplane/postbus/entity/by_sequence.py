"""Finding messages of a sub-queue by their numbers, and taking them out of its order.

Other messages of the sub-queue do not change. Memory decides what exists; rows are read (`Needs`)
for data that is not in memory: the number of a dead letter, the session of a message, the size of
one that is not loaded.
"""

from __future__ import annotations

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
FROZEN: Final = Refused(
    Refusal.MESSAGE_LOCKED, "a reader group that drains the messages has it; it is settled by that"
)
UNSTORED: Final = Refused(Refusal.BUSY, "the message is being stored")


class Choice(NamedTuple):
    """A message that may be removed. `place` is a sub-queue or a session.

    `message` is None if only its key is in memory; then `row` is set.
    """

    number: int
    row_key: int
    place: SubQueueState
    is_deferred: bool
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
        if section is not None:  # the row may not have the patch yet
            return with_properties(self.row.envelope, section)
        return self.place.context.as_changed(self.row_key, self.row.envelope)


class Chosen(NamedTuple):
    """Result of a search: messages in the requested order, refusals, and numbers left for later.

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
    *,
    is_frozen: bool = True,
) -> Chosen | Needs:
    """Find messages by number, up to the limit of one read; not scheduled ones.

    `is_frozen`: those that a drain reads now are refused.
    """
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
    frozen_below = entity.frozen_below(kind) if is_frozen else 0
    answers = {number: spots.get(number, ABSENT) for number in wanted}
    for number, answer in answers.items():
        if isinstance(answer, Choice) and answer.row_key < frozen_below:
            answers[number] = FROZEN
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

    def note(row_key: int, message: QueuedMessage | None, *, is_deferred: bool = False) -> None:
        number, row = by_key[row_key], rows.get(row_key)
        if row is None and (message is None or message.envelope is None):
            spots[number] = UNSTORED
        else:
            spots[number] = Choice(number, row_key, place, is_deferred, message, row)

    for message in place.locks.values():
        if message.row_key in by_key:
            spots[by_key[message.row_key]] = LOCKED
    for row_key in place.doomed:
        if row_key in by_key:
            spots[by_key[row_key]] = LEAVING
    for message in place.order.messages():
        if message.row_key in by_key:
            note(message.row_key, message)
    for row_key, number in by_key.items():
        if place.deferred.get(number) == row_key:
            note(row_key, None, is_deferred=True)
        elif number not in spots and place.order.is_absent(row_key):
            note(row_key, None)
    return spots


# --- taking out -----------------------------------------------------------------------------------


def take(choices: Sequence[Choice], how: Settling) -> None:
    """Delete messages with the commit of this outcome."""
    places: dict[SubQueueState, list[Choice]] = {}
    for choice in choices:
        places.setdefault(choice.place, []).append(choice)
    for place, chosen in places.items():
        place.order.cut({choice.row_key for choice in chosen if not choice.is_deferred})
        for choice in chosen:
            if choice.is_deferred:
                del place.deferred[choice.number]
                place.deferred_sections.pop(choice.row_key, None)
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
