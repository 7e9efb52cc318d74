"""Refusals of entities that cannot be sent to or received from; the same for every protocol."""

from __future__ import annotations

from postbus.broker.address import Address
from postbus.contract.entities import EntityKind, EntityStatus
from postbus.entity.commands import Refusal, Refused, SubQueue


def attach_refusal(address: Address, *, is_sender: bool) -> Refused | None:
    """Return why the target of an address cannot be sent to or received from; None if it can."""
    refused = target_refusal(address) if is_sender else None
    if refused is not None:
        return refused
    is_own = address.sub_queue is SubQueue.TRANSFER_DEAD_LETTER
    if not is_sender and address.kind is EntityKind.TOPIC and not is_own:
        return Refused(Refusal.NOT_ALLOWED, "Receive from a subscription of the topic.")
    match address.properties.status:
        case EntityStatus.ACTIVE:
            return None
        case EntityStatus.DISABLED:
            return Refused(Refusal.ENTITY_DISABLED)
        case EntityStatus.SEND_DISABLED:
            return Refused(Refusal.SEND_DISABLED) if is_sender else None
        case EntityStatus.RECEIVE_DISABLED:
            return None if is_sender else Refused(Refusal.RECEIVE_DISABLED)


def target_refusal(address: Address) -> Refused | None:
    """Return why the target of an address can never be sent to; None if it can."""
    if address.sub_queue is not SubQueue.ACTIVE:
        return Refused(Refusal.NOT_ALLOWED, "A dead-letter queue cannot be sent to.")
    if address.kind is EntityKind.SUBSCRIPTION:
        return Refused(Refusal.NOT_ALLOWED, "Send to the topic of a subscription.")
    return None
