"""Messages that leave automatically: expired, out of deliveries, or dead-lettered.

Expiry is lazy (S71, S75): callers check when a message is acquired or returned, with the definition
at that time. Its default applies to messages without a time to live of their own (S105).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.entity.commands import Death, Receiver, SubQueue
from postbus.entity.outcomes import MoveMessage, Settling
from postbus.entity.queues.dead_letter_reasons import DESCRIPTION, EXPIRED, REASON, merged
from postbus.entity.queues.queued_message import QueuedMessage

if TYPE_CHECKING:
    from postbus.entity.entity_state import EntityState
    from postbus.entity.queues.sub_queue import SubQueueState


def effective_ttl_ms(entity: EntityState, own_ttl_ms: int | None) -> int | None:
    """Return the message's time to live, fixed when it was sent, else the entity's (S105).

    None: never expires.
    """
    return entity.default_ttl_ms if own_ttl_ms is None else own_ttl_ms


def is_expired(sub: SubQueueState, message: QueuedMessage) -> bool:
    """Return whether a message of the main queue has expired."""
    if not sub.is_main:
        return False
    ttl_ms = effective_ttl_ms(sub.entity, message.own_ttl_ms)
    return ttl_ms is not None and message.enqueued_ms + ttl_ms <= sub.context.now_ms


def expire(sub: SubQueueState, message: QueuedMessage) -> None:
    """Drop or dead-letter an expired message that was removed from the order."""
    if not sub.entity.dead_letters_expired:
        sub.remove(message, Settling.EXPIRED)
        sub.entity.traffic.expired += 1
    else:
        dead_letter(sub, message, EXPIRED)


def exhaust(sub: SubQueueState, message: QueuedMessage) -> None:
    """Dead-letter a message whose last allowed delivery failed."""
    text = f"Message could not be consumed after {sub.entity.max_delivery_count} delivery attempts."
    properties: dict[str, object] = {REASON: "MaxDeliveryCountExceeded", DESCRIPTION: text}
    death = Death(sub.context.now_ms, message.failures, receiver_of(message))
    dead_letter(sub, message, properties, death)


def receiver_of(message: QueuedMessage) -> Receiver | None:
    """Return the last receiver of a message, None if unknown in this life of the partition."""
    receiver: Receiver | None = getattr(message, "receiver", None)
    return receiver


def dead_letter(
    sub: SubQueueState,
    message: QueuedMessage,
    properties: dict[str, object],
    death: Death | None = None,
) -> None:
    """Move a message that was removed from the order to the dead-letter queue.

    `death` None: it had no receiver.

    A stub waits in `doomed` until its row is read, because the reason is merged into the row's
    application properties; `paging.settle_doomed` then goes on.
    """
    envelope = message.envelope
    if envelope is None:
        sub.doomed[message.row_key] = message
        sub.context.resumed[sub.fetch_doomed] = None
        return
    section = envelope.application_properties
    if properties:
        section = merged(sub.context, section, properties)
    death = death or Death(sub.context.now_ms, message.failures)
    move(sub, message, section, death, properties.get(REASON))


def move(
    sub: SubQueueState,
    message: QueuedMessage,
    section: bytes,
    death: Death,
    reason: object,
    *,
    is_rejected: bool = False,
) -> None:
    """Move a loaded message with its new application properties to the dead-letter queue.

    If the entity has a history, or a drain has rejected the message, the row stays there and a copy
    moves.
    """
    assert message.envelope is not None
    entity = sub.entity
    entity.traffic.died(reason)
    keeps_row = entity.keeps_settled or is_rejected
    if keeps_row:
        how = Settling.REJECTED if is_rejected else Settling.DEAD_LETTERED
        sub.context.settle(entity.entity_no, [message.row_key], how)
    if entity.forward_dead_letters_to is not None:
        sub.ledger.leave(message)
        entity.outbox.move(
            entity, message, entity.forward_dead_letters_to, section, is_kept=is_rejected
        )
        return
    target = entity.sub_queue(SubQueue.DEAD_LETTER)
    new_row_key, _ = target.numbering.take_one(sub.context)
    sub.context.outcome.mutations.append(
        MoveMessage(
            message.row_key,
            new_row_key,
            entity.entity_no,
            SubQueue.DEAD_LETTER,
            message.sequence,
            message.failures,
            None,
            section,
            keeps_row,
            death,
        )
    )
    grown_bytes = len(section) - len(message.envelope.application_properties)
    kept_bytes = message.envelope.size_bytes
    sub.ledger.leave(message)
    target.append_key(new_row_key, kept_bytes + grown_bytes)
