"""Messages of a burst in a queue: checked, stored, locked and completed.

The usual first ones are done by `postbus.fast` in C, where it is used (ADR 50); what calls these
functions does the rest, and defines what they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from postbus.entity.commands import Delivery, Receiver, StoredRow
from postbus.entity.outcomes import InsertMessage
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.fast import IS_ACCELERATED
from postbus.message.envelope import Envelope
from postbus.message.patch import MAX_ID_CHARS, MAX_PROPERTY_BYTES

if TYPE_CHECKING or IS_ACCELERATED:
    from postbus.fast._runs import QueueRuns

_new = tuple.__new__


def check_usual(envelopes: list[Envelope], most_bytes: int) -> tuple[int, int]:
    """Return how many messages from the first on have short properties, no session, keys or
    schedule, and the sum of their sizes: these are accepted.
    """
    if in_c is None:
        return 0, 0
    return in_c.check(envelopes, most_bytes, MAX_ID_CHARS, MAX_PROPERTY_BYTES)


def arrive(
    envelopes: list[Envelope], key: int, offset: int, now_ms: int, inserts: list[InsertMessage]
) -> list[QueuedMessage]:
    """Append a row for each message, with keys from `key` on; return the queued messages."""
    if in_c is not None:
        return in_c.arrive(envelopes, key, offset, now_ms, inserts)
    inserts += [
        _new(InsertMessage, (row_key, now_ms, envelope))
        for row_key, envelope in enumerate(envelopes, key)
    ]
    return [
        QueuedMessage(row_key, row_key + offset, now_ms, envelope)
        for row_key, envelope in enumerate(envelopes, key)
    ]


def load(rows: Iterable[StoredRow], offset: int) -> list[QueuedMessage]:
    """Return the queued messages of rows that did not fail, whose keys are of one block."""
    if in_c is not None:
        return in_c.load(rows, offset)
    return [
        QueuedMessage(row_key, row_key + offset, enqueued_ms, envelope)
        for row_key, enqueued_ms, _, _, _, envelope, _ in rows
    ]


def lock_usual(
    batch: list[QueuedMessage],
    held: dict[bytes, QueuedMessage],
    receiver: Receiver | None,
    until_ms: int,
    first_key: int,
    random_bytes: bytes,
    suffix: bytes,
) -> list[Delivery]:
    """Lock the first messages without TTL and failures, with a key from `first_key` on.

    Their tokens are eight random octets each, and the suffix.
    """
    if in_c is None:
        return []
    return in_c.lock(batch, held, receiver, until_ms, first_key, random_bytes, suffix)


def complete_usual(
    tokens: list[bytes], held: dict[bytes, QueuedMessage], now_ms: int, gone: list[int]
) -> tuple[int, int]:
    """Complete the first messages that are locked, loaded and share no body.

    Append their row keys to `gone`; return their number and the sum of their sizes.
    """
    return (0, 0) if in_c is None else in_c.complete(tokens, held, now_ms, gone)


ARE_VISITED: Final = not IS_ACCELERATED
"""True if a garbage collection visits each message of a queue: with the functions in C none."""

in_c: Final = (
    QueueRuns(Envelope, QueuedMessage, InsertMessage, Delivery) if IS_ACCELERATED else None
)
