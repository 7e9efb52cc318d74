"""Transactions: checks of their messages, and choice of their partition.

Pure. On a partitioned entity all messages of a transaction have one key, since it commits in one
partition (S189-S198). Messages to other partitions go through the outbox of that partition (ADR
21).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from postbus.broker.placement import (
    SPREAD,
    has_two_keys,
    key_of,
    partition_of_key,
    partition_of_token,
)
from postbus.contract.entities import SubscriptionProperties
from postbus.entity.commands import Enqueue, Refusal, Refused, Settle, Transact
from postbus.message.envelope import Envelope

if TYPE_CHECKING:
    from postbus.broker.address import Address

NO_SESSION: Final = Refused(
    Refusal.SESSION_REQUIRED, "A message sent to it needs a session id, in a transaction too."
)
OTHER_SESSION: Final = Refused(
    Refusal.NOT_ALLOWED, "InvalidOperation: the partition key differs from the session id."
)
NO_KEY: Final = Refused(
    Refusal.NOT_ALLOWED,
    "InvalidOperation: a message sent to a partitioned entity in a transaction needs a key: a"
    " session id, a partition key, or a message id where duplicates are detected.",
)
OTHER_KEY: Final = Refused(
    Refusal.NOT_ALLOWED,
    "InvalidOperation: all messages sent to a partitioned entity in one transaction need the same"
    " session id or partition key.",
)
SEVERAL_PARTITIONS: Final = Refused(
    Refusal.NOT_ALLOWED,
    "InvalidOperation: a transaction settles messages of one partition of the bus only.",
)


def check_transaction_send(
    address: Address, envelope: Envelope, first_key: bytes | None
) -> Refused | bytes | None:
    """Return the key that later messages of the transaction must have, or the refusal of this one.

    `first_key`: result for the previous message, None for the first one. Entities that are not
    partitioned allow any keys (S199) and leave it unchanged.
    """
    if address.requires_session and envelope.session_id is None:
        return NO_SESSION
    if has_two_keys(envelope):
        return OTHER_SESSION
    if not address.is_partitioned:
        return first_key
    key = key_of(envelope, detects_duplicates=detects_duplicates(address))
    if key is None:
        return NO_KEY
    return OTHER_KEY if first_key is not None and key != first_key else key


def detects_duplicates(address: Address) -> bool:
    properties = address.properties
    return (
        not isinstance(properties, SubscriptionProperties)
        and properties.requires_duplicate_detection
    )


def place_transaction(
    command: Transact, find: Callable[[int], Address | None], partition_count: int
) -> tuple[int, Transact] | Refused:
    """Return the partition of a transaction and its commands there.

    The partition of the settlements, else of the first message: by its key, or its entity's home;
    SPREAD if any is valid. A message for another partition is forwarded by an entity of this one.
    `find` returns the entity of a number; a message for a deleted one is not moved.
    """
    settled = {
        partition_of_token(token)
        for each in command.operations
        if isinstance(each, Settle)
        for token in each.lock_tokens
    }
    if len(settled) > 1:
        return SEVERAL_PARTITIONS
    home = next(iter(settled), SPREAD)
    anchor: int | None = None
    for each in command.operations:
        if isinstance(each, Settle) is bool(settled):
            anchor = each.entity_no
            if isinstance(each, Enqueue):
                home = _place(each, find(anchor), partition_count)
            break
    if anchor is None or home == SPREAD:
        return home, command
    if home >= partition_count:
        return Refused(Refusal.LOCK_LOST)
    operations: list[Enqueue | Settle] = []
    for each in command.operations:
        if isinstance(each, Enqueue):
            address = find(each.entity_no)
            if address is not None and not _is_at(home, each, address, partition_count):
                each = replace(each, entity_no=anchor, via=each.via or address.name)
        operations.append(each)
    return home, Transact(operations)


def _place(command: Enqueue, address: Address | None, partition_count: int) -> int:
    """Return the partition of the first message, SPREAD if any is valid."""
    if address is None or not address.is_partitioned:
        return SPREAD if address is None else address.partition_id
    for envelope in command.messages:
        key = key_of(envelope, detects_duplicates=detects_duplicates(address))
        if command.via is not None:  # its own key places it at its destination
            key = envelope.via_partition_key or key
        if key is not None:
            return partition_of_key(key, partition_count)
    return SPREAD


def _is_at(home: int, command: Enqueue, address: Address, partition_count: int) -> bool:
    """Return whether a partition can store all these messages itself."""
    if not address.is_partitioned:
        return address.partition_id == home
    if command.via is not None:
        return True
    detects = detects_duplicates(address)
    keys = {key_of(each, detects_duplicates=detects) for each in command.messages} - {None}
    return all(partition_of_key(key, partition_count) == home for key in keys if key is not None)
