"""Dead-letter reasons of the broker, and their merge into a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.message.patch import DEAD_LETTER_DESCRIPTION, DEAD_LETTER_REASON, merge_properties

if TYPE_CHECKING:
    from postbus.entity.apply_context import ApplyContext

REASON: Final = DEAD_LETTER_REASON
DESCRIPTION: Final = DEAD_LETTER_DESCRIPTION
SYSTEM_PROPERTY_BYTES: Final = 2 * 4_096 * 4 + 256
"""Allowance for reason and description above the limit of senders: two texts of 4,096 characters of
at most four bytes, and their names."""

EXPIRED: Final[dict[str, object]] = {
    REASON: "TTLExpiredException",
    DESCRIPTION: "The message expired and was dead lettered.",
}
HEADER_TOO_LARGE: Final[dict[str, object]] = {
    REASON: "HeaderSizeExceeded",
    DESCRIPTION: "The size quota for this stream has been exceeded.",
}
"""Source: the table of system reasons in Azure's page on dead-letter queues (S259, S261)."""


def merged(context: ApplyContext, section: bytes, properties: dict[str, object]) -> bytes:
    """Return application properties with reason and description of a dead letter."""
    limit_bytes = context.limits.max_header_bytes + SYSTEM_PROPERTY_BYTES
    try:
        return merge_properties(section, properties, limit_bytes)
    except ValueError:  # a sender's malformed map must not keep its message in the queue
        return merge_properties(b"", properties, limit_bytes)
