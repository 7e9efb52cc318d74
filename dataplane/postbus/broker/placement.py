"""Home partitions of entities, and partitions of messages in partitioned entities.

Pure functions of a key and the partition count (ADR 37): the same key gives the same partition
after a restart, on another broker and for a forwarded message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from postbus.message.envelope import Envelope
from postbus.message.ids import id_text

SPREAD: Final = -1
"""In place of a partition id: the entity lives in all partitions."""

NUMBER_BITS: Final = 48
"""A sequence number of a partitioned entity is `partition_id << 48 | n` (ADR 15)."""

TOKEN_PARTITION: Final = slice(8, 10)
"""Position of the partition in a lock token, big-endian (ADR 23)."""


def home_of(name: str, partition_count: int) -> int:
    """Return the partition of a new entity by rendezvous hashing of its name."""
    key = name.lower().encode()

    def weight(partition_id: int) -> bytes:
        return hashlib.blake2b(key, digest_size=8, salt=partition_id.to_bytes(2, "big")).digest()

    return max(range(partition_count), key=weight)


def key_of(envelope: Envelope, *, detects_duplicates: bool) -> bytes | None:
    """Return the placement key of a message, None when any partition is valid.

    The session id, else the partition key, else the message id if duplicates are detected, so that
    duplicates are stored in the same partition.
    """
    if envelope.session_id is not None:
        return envelope.session_id
    if envelope.partition_key is not None:
        return envelope.partition_key
    if detects_duplicates and envelope.message_id is not None:
        return id_text(envelope.message_id).encode()
    return None


def has_two_keys(envelope: Envelope) -> bool:
    """Return whether session id and partition key differ, which is refused (S172)."""
    return (
        envelope.partition_key is not None
        and envelope.session_id is not None
        and envelope.partition_key != envelope.session_id
    )


def partition_of_key(key: bytes, partition_count: int) -> int:
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") % partition_count


def partition_of_token(lock_token: bytes) -> int:
    return int.from_bytes(lock_token[TOKEN_PARTITION], "big")


def partition_of_number(sequence: int) -> int:
    """Return the partition in a sequence number; negative for a negative number."""
    return sequence >> NUMBER_BITS


def split(places: Sequence[int]) -> dict[int, list[int]]:
    """Return partition -> indexes of its items, in order."""
    found: dict[int, list[int]] = {}
    for index, partition_id in enumerate(places):
        found.setdefault(partition_id, []).append(index)
    return found
