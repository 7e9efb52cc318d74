"""The interface of an entity to its messages, in one sub-queue or divided by session.

There are two implementations: `PlainMessages`, also of the dead-letter kinds, and `SessionQueue`
for the active messages of an entity that requires sessions. Callers use `requires_session` only
where Service Bus answers differently.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from postbus.entity.commands import (
    AcceptSession,
    CompleteSessions,
    DeferredReceived,
    DeleteMessages,
    GetSessionState,
    ListSessions,
    LocksRenewed,
    MessagesDeleted,
    Peek,
    Peeked,
    ReceiveDeferred,
    Refusal,
    Refused,
    RenewLocks,
    RenewSession,
    Reply,
    SetSessionState,
    Settle,
    Settled,
    StoredRow,
    SubQueue,
)
from postbus.entity.entity_state import MovedTo

if TYPE_CHECKING:
    from postbus.entity.outcomes import LoadedPartition, Needs
    from postbus.entity.queues.sub_queue import Consumer, SubQueueState
    from postbus.message.envelope import Envelope

FromNumber: TypeAlias = Callable[[int], Iterator[tuple[int, int]]]
"""Yields (number, row key) in rising order, from a number upward."""

SessionCommand: TypeAlias = (
    AcceptSession | RenewSession | GetSessionState | SetSessionState | ListSessions
)


class ActiveMessages(MovedTo, Protocol):
    """See the module's docstring."""

    attempts: dict[int, int]
    kind: SubQueue
    unsorted_until_ms: int

    @property
    def requires_session(self) -> bool:
        """True if each message has a session and each receiver holds one."""

    @property
    def live(self) -> int:
        """Number of messages."""

    @property
    def locked_count(self) -> int:
        """Number of locked messages."""

    # --- arrivals ---------------------------------------------------------------------------------

    def load(self, loaded: LoadedPartition) -> None:
        """Take over loaded messages."""

    def append(
        self,
        envelopes: list[Envelope],
        total_bytes: int,
        *,
        is_shared: bool = False,
        enqueued_ms: int | None = None,
    ) -> list[int]:
        """Store new messages behind all others; return their sequence numbers."""

    def supply(self, rows: Iterable[StoredRow]) -> None:
        """Use the rows of a `Fetch`."""

    # --- receivers --------------------------------------------------------------------------------

    def add_receiver(self, consumer: Consumer) -> Refused | None:
        """Add a receiver, or return why it cannot receive without accepting a session."""

    def end_consumers(self, refusal: Refusal) -> list[int]:
        """Remove all receivers of clients with an effect for each; return their ids."""

    def has_receivers(self) -> bool:
        """Return whether a client waits for messages or for a session."""

    def forward(self, target: str | None) -> None:
        """Forward all messages to an entity from now on; None ends it."""

    def has_backlog(self) -> bool:
        """Return whether messages wait to be forwarded, which new ones must not overtake."""

    # --- settlement -------------------------------------------------------------------------------

    def settle(
        self, command: Settle, found: Sequence[StoredRow] | None
    ) -> Settled | Refused | Needs:
        """Settle a vector of tokens; the reply names those that are no longer held."""

    def renew_locks(self, command: RenewLocks) -> LocksRenewed | Refused:
        """Extend all locks or none."""

    def lose_locks(self) -> None:
        """End all locks now, as if they expired."""

    def locks_of(self, session_id: bytes | None, tokens: list[bytes]) -> SubQueueState | None:
        """Return the messages with these locks; None if the session is not held."""

    # --- sessions ---------------------------------------------------------------------------------

    def use_session(
        self, command: SessionCommand, found: Sequence[StoredRow] | None
    ) -> Reply | Needs:
        """Apply a command for a session itself."""

    def complete_sessions(self, command: CompleteSessions) -> Settled | Refused:
        """Complete messages of several sessions."""

    # --- reading ----------------------------------------------------------------------------------

    def peek(
        self, scheduled: FromNumber, command: Peek, found: Sequence[StoredRow] | None
    ) -> Peeked | Needs:
        """List messages of any state by number; `scheduled` yields the scheduled ones."""

    def receive_deferred(
        self, command: ReceiveDeferred, found: Sequence[StoredRow] | None
    ) -> DeferredReceived | Refused | Needs:
        """Deliver deferred messages by number, all or none."""

    def delete_messages(
        self, command: DeleteMessages, found: Sequence[StoredRow] | None
    ) -> MessagesDeleted | Needs:
        """Delete the oldest messages that are neither locked nor deferred."""

    def oldest(self) -> tuple[int, int | None] | None:
        """Return row key and enqueued time of the next available message; None if unknown.

        The time is None when only the key is in memory. Locked and deferred messages do not wait.
        """

    def places_of(
        self, by_key: dict[int, int], rows: dict[int, StoredRow]
    ) -> list[tuple[SubQueueState, dict[int, int]]]:
        """Return the places of messages: a sub-queue or sessions, which are open until
        `end_search`.

        Shape of `by_key` and of each part of it: row key -> number.
        """

    def row_keys(self) -> array[int]:
        """Return the keys of all messages."""

    # --- reader groups ----------------------------------------------------------------------------

    def lowest_held(self) -> int | None:
        """Return the lowest key of a message that a receiver has, or that is about to leave."""

    def deferred_count(self) -> int:
        """Return the number of deferred messages."""

    def remove_below(self, end_key: int, limit: int) -> int:
        """Complete the first messages below a key, at most `limit`; return their number.

        Their rows are committed. Locked and deferred ones stay.
        """

    def clear(self) -> None:
        """Drop all memory: the entity is dropped."""
