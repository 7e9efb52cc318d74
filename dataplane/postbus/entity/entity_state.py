"""The part of an entity that its sub-queues, outbox and scheduled messages use: size and settings.

They depend on this base and not on `QueueState`, which makes them and implements the abstract
methods. Only the outbox is known here as well: messages of each entity go through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from postbus.entity.outcomes import RecordSize

if TYPE_CHECKING:
    from postbus.entity.commands import SubQueue
    from postbus.entity.numbering import Numbering
    from postbus.entity.traffic import Traffic
    from postbus.entity.transfer.outbox import Outbox


class MovedTo(Protocol):
    """Messages of an entity to which others are moved."""

    numbering: Numbering

    def append_key(
        self, row_key: int, grown_bytes: int = 0, *, session_id: bytes | None = None
    ) -> None:
        """Append a message that was moved here; its row is read when a receiver wants it.

        `grown_bytes`: what it adds to the size of the entity. `session_id` must be given where
        messages are divided by session.
        """


class EntityState(ABC):
    """See the module's docstring. The hot path reads these copies of some properties.

    `state_bytes` is the size of the states of its sessions, `outbound` the number of its messages
    in the outbox; `awaited` are the writers whose messages are still to arrive.
    """

    __slots__ = (
        "accessed_ms",
        "active",
        "awaited",
        "dead_letters_expired",
        "default_ttl_ms",
        "entity_no",
        "forward_dead_letters_to",
        "forward_to",
        "is_tapped",
        "keeps_settled",
        "lock_duration_ms",
        "max_delivery_count",
        "name",
        "outbound",
        "outbox",
        "size_bytes",
        "state_bytes",
        "traffic",
    )

    active: MovedTo
    dead_letters_expired: bool
    default_ttl_ms: int | None
    forward_dead_letters_to: str | None
    forward_to: str | None
    is_tapped: bool
    keeps_settled: bool
    lock_duration_ms: int
    max_delivery_count: int

    def __init__(
        self, entity_no: int, name: str, traffic: Traffic, outbox: Outbox, size_bytes: int
    ) -> None:
        self.entity_no = entity_no
        self.name = name
        self.traffic = traffic
        self.outbox = outbox
        self.size_bytes = size_bytes
        self.state_bytes = 0
        self.outbound = 0
        self.awaited: frozenset[str] = frozenset()
        self.accessed_ms = 0  # time of the last send or receive of a client in this life

    @abstractmethod
    def sub_queue(self, kind: SubQueue) -> MovedTo:
        """Return a sub-queue, made at first use: most entities never need the others."""

    @property
    @abstractmethod
    def message_count(self) -> int:
        """Live messages of all sub-queues."""

    @abstractmethod
    def keep_state(self, grown_bytes: int) -> bool:
        """Account for session states that grow or shrink; return False if there is no room."""

    # --- size -------------------------------------------------------------------------------------

    @property
    def average_bytes(self) -> int:
        """Average size of a message, a guess until rows have been read."""
        count = self.message_count
        return self.size_bytes // count if count else 0

    @property
    def total_bytes(self) -> int:
        """Size of the stored messages; zero for an empty entity, since the size may be an
        estimate.
        """
        return (self.size_bytes if self.message_count else 0) + self.state_bytes

    def grow(self, size_bytes: int) -> None:
        """Add the size of stored messages."""
        self.size_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Subtract the size of messages that left, not below zero: after a load it is estimated."""
        self.size_bytes -= size_bytes
        if self.size_bytes < 0:
            self.size_bytes = 0

    def recorded_size(self) -> RecordSize:
        """Return a checkpoint of size and count (ADR 37)."""
        return RecordSize(self.entity_no, self.size_bytes, self.message_count)
