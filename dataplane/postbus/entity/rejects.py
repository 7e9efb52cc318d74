"""Messages of a drained range that a reader dead-letters (ADR 42).

The row stays, settled, until its range is: a reader that begins the range again reads the same
rows. A copy moves to the dead-letter queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.entity import by_sequence
from postbus.entity.commands import Death, Refusal, Refused, SubQueue
from postbus.entity.group_commands import GroupKind, RowsRejected
from postbus.entity.message_operations import MAX_SEQUENCE_NUMBERS, TOO_MANY
from postbus.entity.outcomes import Needs
from postbus.entity.queues import expiry, paging
from postbus.entity.queues.dead_letter_reasons import DESCRIPTION, REASON, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.entity.by_sequence import Choice
    from postbus.entity.commands import StoredRow
    from postbus.entity.group_commands import Cursor, RejectRows
    from postbus.entity.queues.queue_state import QueueState
    from postbus.entity.queues.sub_queue import SubQueueState

NOT_DRAINED: Final = Refused(
    Refusal.NOT_ALLOWED,
    "only a group that drains rejects messages: those that a tap reads are for receivers",
)
DEAD_ALREADY: Final = Refused(
    Refusal.NOT_ALLOWED, "a message in a dead-letter queue cannot be dead-lettered"
)


def reject(
    entity: QueueState, command: RejectRows, cursor: Cursor, found: Sequence[StoredRow] | None
) -> RowsRejected | Refused | Needs:
    """Dead-letter messages of the planned range by row key; those that are gone are passed over."""
    if cursor.kind is not GroupKind.DRAIN:
        return NOT_DRAINED
    if command.sub_queue is not SubQueue.ACTIVE:
        return DEAD_ALREADY
    if len(command.row_keys) > MAX_SEQUENCE_NUMBERS:
        return TOO_MANY
    for row_key in command.row_keys:
        if not cursor.settled <= row_key < cursor.planned:
            text = f"{row_key} is not in the planned range {cursor.settled} to {cursor.planned}"
            return Refused(Refusal.ARGUMENT_OUT_OF_RANGE, text)
    numbering = entity.active.numbering
    numbers = {}
    for row_key in command.row_keys:
        number = numbering.number_at(row_key)
        if number is not None:
            numbers[number] = row_key
    picked = by_sequence.choose(entity, SubQueue.ACTIVE, list(numbers), found, is_frozen=False)
    if isinstance(picked, Needs):
        return picked
    choices = [choice for choice in picked.choices if not choice.is_deferred]
    places: dict[SubQueueState, set[int]] = {}
    for choice in choices:
        places.setdefault(choice.place, set()).add(choice.row_key)
    for place, row_keys in places.items():
        place.order.cut(row_keys)  # looks at all messages of the place
    properties: dict[str, object] = {REASON: command.reason, DESCRIPTION: command.description}
    for choice in choices:
        _dead_letter(choice, properties)
    picked.rest()
    return RowsRejected(
        len(choices),
        [numbers[number] for number in picked.left],
        {
            numbers[number]: refused
            for number, refused in picked.refused.items()
            if refused is not by_sequence.ABSENT
        },
    )


def _dead_letter(choice: Choice, properties: dict[str, object]) -> None:
    """Move a copy of a message that was removed from the order to the dead-letter queue."""
    place, row, message = choice.place, choice.row, choice.message
    if message is None:
        assert row is not None
        envelope = place.context.as_changed(choice.row_key, row.envelope)
        message = paging.from_row(place, row, envelope)
        place.ledger.load(envelope)
    elif message.envelope is None:
        assert row is not None
        paging.reload(place, message, row.envelope)
    assert message.envelope is not None
    section = merged(place.context, message.envelope.application_properties, properties)
    death = Death(place.context.now_ms, message.failures)
    expiry.move(place, message, section, death, properties[REASON], is_rejected=True)
