"""The sessions of an entity that requires them: their holders and their locks.

`SessionQueue` replaces the sub-queue of active messages of other entities. It grants sessions to
receivers, one holder each, expires session locks, and passes commands for a session on to it.
`messages_by_session` keeps the messages, `session_browse` reads over all sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar, Final, assert_never

from postbus.contract.durations import MAX_DURATION_MS
from postbus.entity.apply_context import DONE, MAINTENANCE_LIMIT
from postbus.entity.commands import (
    AcceptSession,
    CompleteSessions,
    DeferredReceived,
    DeleteMessages,
    GetSessionState,
    ListSessions,
    MessagesDeleted,
    Peek,
    Peeked,
    ReceiveDeferred,
    Refusal,
    Refused,
    RenewLocks,
    RenewSession,
    Reply,
    SessionRenewed,
    SetSessionState,
    Settle,
    Settled,
    StoredRow,
)
from postbus.entity.outcomes import EndConsumer, Needs, SessionGranted, Settling
from postbus.entity.queues import browse, locks, paging
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.entity.queues.sub_queue import Consumer, end_all
from postbus.entity.sessions import session_browse
from postbus.entity.sessions.messages_by_session import MessagesBySession
from postbus.entity.sessions.session_messages import SessionConsumer, SessionMessages
from postbus.entity.transfer.forwarding import FORWARDER_ID, SessionForwarder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.entity.entity_state import EntityState
    from postbus.entity.partition_context import PartitionContext
    from postbus.entity.queues.active_messages import FromNumber, SessionCommand
    from postbus.entity.queues.sub_queue import SubQueueState
    from postbus.message.envelope import Envelope

MAX_SESSIONS: Final = 10_000
"""Maximum number of sessions that are searched for the oldest message; with more it is unknown. Our
choice: a millisecond."""

HELD: Final = Refused(Refusal.SESSION_CANNOT_BE_LOCKED, "another receiver holds the session")
LOST: Final = Refused(Refusal.SESSION_LOCK_LOST, "the receiver does not hold the session")


class SessionQueue(MessagesBySession):
    """See the module's docstring. `waiters` ask for the next session, in order."""

    __slots__ = ("waiters",)

    context: PartitionContext
    requires_session: ClassVar[bool] = True

    def __init__(self, entity: EntityState, context: PartitionContext, next_sequence: int) -> None:
        super().__init__(entity, context, next_sequence)
        self.waiters: OrderedDict[int, SessionConsumer] = OrderedDict()

    @property
    def locked_count(self) -> int:
        return sum(len(session.locks) for session in self.held)

    def distribute(
        self,
        envelopes: list[Envelope],
        arrived: list[QueuedMessage],
        total_bytes: int,
        is_shared: bool,
    ) -> None:
        """Add new messages, deliver to holders and grant sessions that became available."""
        super().distribute(envelopes, arrived, total_bytes, is_shared)
        if self.waiters:
            self._serve()

    def append_key(
        self, row_key: int, grown_bytes: int = 0, *, session_id: bytes | None = None
    ) -> None:
        """Append a message that was moved here; its row is read when a receiver wants it."""
        super().append_key(row_key, grown_bytes, session_id=session_id)
        if self.waiters:
            self.context.resumed[self._serve] = None

    # --- granting ---------------------------------------------------------------------------------

    def use_session(
        self, command: SessionCommand, found: Sequence[StoredRow] | None
    ) -> Reply | Needs:
        """Apply a command for a session itself."""
        if isinstance(command, AcceptSession):
            return self.accept(command)
        if isinstance(command, ListSessions):
            return session_browse.list_sessions(self, command)
        session = self.held_session(command.session_id, command.consumer_id)
        if session is None:
            return LOST
        match command:
            case RenewSession():
                return self._renew(session)
            case GetSessionState():
                return self.states.get(command.session_id, found)
            case SetSessionState():
                reply = self.states.set(command.session_id, command.state)
                if self.context.window.is_over:
                    for sub in self.context.sub_queues:
                        sub.make_room(0)
                    session.shed()
                return reply
            case _:
                assert_never(command)

    def accept(self, command: AcceptSession) -> Reply:
        """Grant a named session or refuse it at once; grant the next one now or later."""
        context = self.context
        session_id = command.session_id
        if command.consumer_id in context.consumers:
            return Refused(Refusal.NOT_ALLOWED, "a receiver holds one session")
        if session_id is not None and _is_long(session_id, context.limits.max_id_chars):
            return Refused(Refusal.ARGUMENT_OUT_OF_RANGE, "the session id is too long")
        session: SessionMessages | None
        if session_id is None:
            session = self._next_available()
        else:
            session = self.open_sessions.get(session_id)
            if session is not None and session.holder is not None:
                if session.session_until_ms > context.now_ms:
                    return HELD
                self.expire(session)
                session = self.open_sessions.get(session_id)
                if session is not None and session.holder is not None:
                    return HELD  # granted to another, or still returning messages
            if session is None:
                session = self.open_session(session_id)
            if session.is_queued:  # its entry is stale now
                session.is_queued = False
                self._note_orphan()
        consumer = SessionConsumer(command.consumer_id, command.mode, command.receiver)
        self.consumers[command.consumer_id] = consumer
        if session is None:
            context.consumers[command.consumer_id] = (self, consumer)
            self.waiters[command.consumer_id] = consumer
        else:
            self._grant(session, consumer)
        return DONE

    def _next_available(self) -> SessionMessages | None:
        """Return the first session that has available messages and no holder."""
        available = self.available
        while available:
            session_id = available.popleft()
            session = self.open_sessions.get(session_id)
            if session is None:
                if not self.dormant.get(session_id):
                    self._orphans = max(self._orphans - 1, 0)
                    continue
                session = self.open_session(session_id)
                session.is_queued = False
                return session
            session.is_queued = False
            if session.holder is None and session.is_available:
                return session
        return None

    def _grant(self, session: SessionMessages, consumer: SessionConsumer) -> None:
        context = self.context
        if session in self.idle:
            self._leave_idle(session)
        until_ms = context.now_ms + self.entity.lock_duration_ms
        if consumer.is_forwarder:
            session.hold(consumer, MAX_DURATION_MS)
            self.held[session] = None
        else:
            session.hold(consumer, until_ms)
            context.consumers[consumer.consumer_id] = (session, consumer)
            self.held[session] = None
            if self.lock_timer_ms is None or until_ms < self.lock_timer_ms:
                locks.watch(self, until_ms)
            granted = SessionGranted(consumer.consumer_id, session.session_id, until_ms)
            context.outcome.effects.append(granted)
        if session.waiting:
            session.pump()
        elif session.order.has_absent:
            paging.fetch_if_low(session)

    def wait_for_session(self, consumer: SessionConsumer) -> None:
        """Grant the next available session, later."""
        self.consumers[consumer.consumer_id] = consumer
        self.waiters[consumer.consumer_id] = consumer
        self.context.resumed[self._serve] = None

    def _serve(self) -> None:
        """Grant available sessions to waiting receivers in order."""
        while self.waiters:
            session = self._next_available()
            if session is None:
                return
            _, consumer = self.waiters.popitem(last=False)
            self._grant(session, consumer)

    def held_session(
        self, session_id: bytes, consumer_id: int | None = None
    ) -> SessionMessages | None:
        """Return a held session; of this receiver, if one is given."""
        session = self.open_sessions.get(session_id)
        if session is None or session.holder is None:
            return None
        if session.session_until_ms <= self.context.now_ms:
            self.expire(session)
            return None
        if consumer_id is not None and session.holder.consumer_id != consumer_id:
            return None
        return session

    def _renew(self, session: SessionMessages) -> SessionRenewed:
        until_ms = self.context.now_ms + self.entity.lock_duration_ms
        session.renew(until_ms)
        del self.held[session]
        self.held[session] = None
        locks.watch(self, until_ms)
        return SessionRenewed(until_ms)

    # --- giving back ------------------------------------------------------------------------------

    def release(self, session: SessionMessages, *, is_failed: bool) -> None:
        """End the hold of a session; locked messages return, as failed or as undelivered."""
        del self.held[session]
        session.free()
        if session.locks:
            locks.return_all(session, is_failed=is_failed)
        self.put_away(session)
        if self.waiters:
            self._serve()

    def expire(self, session: SessionMessages) -> None:
        """End the holder whose lock has run out.

        With more locked messages than a command may touch (ADR 20) some return now, and the session
        is neither used nor granted until Ticks have returned the others.
        """
        context = self.context
        consumer = session.holder
        assert consumer is not None
        if len(session.locks) > MAINTENANCE_LIMIT:
            locks.expire_first(session, context.allowance)
            context.allowance = 0
            self.lock_timer_ms = context.now_ms
            context.resumed[self.expire_locks] = None
            return
        context.allowance = max(context.allowance - 1 - len(session.locks), 0)
        consumer_id = consumer.consumer_id
        del self.consumers[consumer_id]
        context.consumers.pop(consumer_id, None)
        context.outcome.effects.append(EndConsumer(consumer_id, Refusal.SESSION_LOCK_LOST))
        self.release(session, is_failed=True)

    def expire_locks(self) -> None:
        """Expire session locks, up to the limit of one command."""
        context = self.context
        now_ms = context.now_ms
        if self.lock_timer_ms is None or self.lock_timer_ms > now_ms:
            return  # an earlier timer did this one's work
        self.lock_timer_ms = None
        is_sorted = now_ms >= self.unsorted_until_ms
        expired: list[SessionMessages] = []
        next_ms: int | None = None
        left = context.allowance
        for session in self.held:
            until_ms = session.session_until_ms
            if until_ms <= now_ms:
                if left <= 0:
                    self.lock_timer_ms = now_ms
                    context.resumed[self.expire_locks] = None
                    break
                left -= 1 + len(session.locks)
                expired.append(session)
            elif until_ms != MAX_DURATION_MS and (next_ms is None or until_ms < next_ms):
                next_ms = until_ms
                if is_sorted:
                    break
        if next_ms is not None:
            locks.watch(self, next_ms)
        for session in expired:
            self.expire(session)

    def lose_locks(self) -> None:
        """End all session locks as if they expired."""
        now_ms = self.context.now_ms
        for session in self.held:
            if session.session_until_ms != MAX_DURATION_MS:
                session.session_until_ms = now_ms
        if self.held:
            self.lock_timer_ms = now_ms
            self.expire_locks()

    # --- receivers --------------------------------------------------------------------------------

    def add_receiver(self, consumer: Consumer) -> Refused:
        del consumer
        return Refused(Refusal.SESSION_REQUIRED, self.entity.name)

    def arm_hint(self, consumer: Consumer, *, is_wanted: bool) -> None:
        """Do nothing: each session is in one partition, so its receivers need no hints."""

    def has_receivers(self) -> bool:
        """Return whether a client waits for messages or for a session."""
        return bool(self.waiters) or any(session.waiting for session in self.held)

    def forward(self, target: str | None) -> None:
        """Add or remove our receiver, which forwards one session after the other."""
        if FORWARDER_ID in self.consumers:
            self.remove_consumer(FORWARDER_ID)
        if target is not None:
            self.wait_for_session(SessionForwarder(target, self._give_up))

    def _give_up(self, forwarder: SessionForwarder) -> None:
        """Have our receiver wait for the next session, unless it was removed meanwhile."""
        if self.consumers.get(FORWARDER_ID) is forwarder:
            self.remove_consumer(FORWARDER_ID)
            self.wait_for_session(forwarder)

    def has_backlog(self) -> bool:
        return bool(self.open_sessions or self.dormant)

    def remove_consumer(self, consumer_id: int) -> None:
        """Remove a waiting receiver, or free the session that it holds."""
        consumer = self.consumers[consumer_id]
        assert isinstance(consumer, SessionConsumer)
        if consumer.session is not None:
            consumer.session.remove_consumer(consumer_id)
        else:
            del self.consumers[consumer_id]
            self.waiters.pop(consumer_id, None)

    def end_consumers(self, refusal: Refusal) -> list[int]:
        self.waiters.clear()
        ended = end_all(self.consumers, refusal, self.context)
        for session in list(self.held):
            self.release(session, is_failed=False)
        return ended

    def set_demand(
        self,
        consumer: Consumer,
        limit: int,
        *,
        is_drain: bool,
        found: Sequence[StoredRow] | None,
    ) -> Needs | None:
        """Record the demand of a receiver that waits for a session."""
        del found
        consumer.limit = 0 if is_drain else limit
        return None

    # --- settlement -------------------------------------------------------------------------------

    def renew_locks(self, command: RenewLocks) -> Refused:
        del command
        return Refused(Refusal.NOT_ALLOWED, "renew the lock of the session instead")

    def locks_of(self, session_id: bytes | None, tokens: list[bytes]) -> SessionMessages | None:
        """Return the session with these locks, None when no receiver holds it."""
        if session_id is not None:
            session = self.open_sessions.get(session_id)
        else:
            session = next((held for held in self.held if tokens and tokens[0] in held.locks), None)
        if session is None or session.holder is None:
            return None
        return None if session.session_until_ms <= self.context.now_ms else session

    def settle(
        self, command: Settle, found: Sequence[StoredRow] | None
    ) -> Settled | Refused | Needs:
        """Settle in the named session; all tokens are lost if no receiver holds it."""
        if command.session_id is None:
            return self._settle_anywhere(command, found)
        session = self.held_session(command.session_id)
        if session is None:
            return Settled(list(range(len(command.lock_tokens))) or None)
        return locks.settle(session, command, found)

    def complete_sessions(self, command: CompleteSessions) -> Settled:
        """Complete in each named session; the tokens of one without a holder are lost."""
        context = self.context
        keeps = self.entity.keeps_settled
        gone: list[int] = [] if keeps else context.outcome.deletes
        lost: list[int] = []
        pumped: list[SessionMessages] = []
        start = count = size_bytes = 0
        for session_id, tokens in command.parts:
            session = self.held_session(session_id)
            if session is None:
                lost += range(start, start + len(tokens))
            elif len(tokens) == 1 and (message := session.take_locked(tokens[0])) is not None:
                assert message.envelope is not None
                gone.append(message.row_key)
                size_bytes += message.envelope.size_bytes
                count += 1
                if session.waiting and session.is_available:
                    pumped.append(session)
            else:
                lost += [start + index for index in locks.complete(session, tokens).lost or ()]
            start += len(tokens)
        if keeps and gone:
            context.settle(self.entity.entity_no, gone, Settling.COMPLETED)
        if count:
            self.entity.traffic.completed += count
            self.ledger.leave_all(count, size_bytes)
        for session in pumped:
            session.pump()
        return Settled(lost or None)

    def _settle_anywhere(
        self, command: Settle, found: Sequence[StoredRow] | None
    ) -> Settled | Refused | Needs:
        """Find the session by the tokens, which is slow; they must be of one session."""
        tokens = set(command.lock_tokens)
        held = [each for each in self.held if not tokens.isdisjoint(each.locks.keys() & tokens)]
        if len(held) > 1:
            return Refused(Refusal.SESSION_REQUIRED, "the messages are of several sessions")
        if not held or self.held_session(held[0].session_id) is None:
            return Settled(list(range(len(command.lock_tokens))) or None)
        return locks.settle(held[0], command, found)

    def receive_deferred(
        self, command: ReceiveDeferred, found: Sequence[StoredRow] | None
    ) -> DeferredReceived | Refused | Needs:
        """Hand out deferred messages of a session to its holder."""
        if command.session_id is None or command.consumer_id is None:
            return Refused(Refusal.SESSION_REQUIRED, self.entity.name)
        session = self.held_session(command.session_id, command.consumer_id)
        if session is None:
            return LOST
        return browse.receive_deferred(session, command, found)

    # --- reading over sessions --------------------------------------------------------------------

    def peek(
        self,
        scheduled: FromNumber,
        command: Peek,
        found: Sequence[StoredRow] | None,
    ) -> Peeked | Needs:
        return session_browse.peek(self, scheduled, command, found)

    def delete_messages(
        self, command: DeleteMessages, found: Sequence[StoredRow] | None
    ) -> MessagesDeleted | Needs:
        return session_browse.delete_messages(self, command, found)

    def oldest(self) -> tuple[int, int | None] | None:
        """Return the oldest message of all sessions; None if there are too many to search."""
        if len(self.open_sessions) + len(self.dormant) > MAX_SESSIONS:
            return None
        fronts = [session.oldest() for session in self.open_sessions.values()]
        fronts += [(keys[0], None) for keys in self.dormant.values() if keys]
        return min((each for each in fronts if each is not None), default=None)

    def places_of(
        self, by_key: dict[int, int], rows: dict[int, StoredRow]
    ) -> list[tuple[SubQueueState, dict[int, int]]]:
        """Return the sessions of the rows, opened if necessary."""
        sessions: dict[bytes, dict[int, int]] = {}
        for row_key, number in by_key.items():
            row = rows.get(row_key)
            if row is not None and row.envelope.session_id is not None:
                sessions.setdefault(row.envelope.session_id, {})[row_key] = number
        places: list[tuple[SubQueueState, dict[int, int]]] = []
        for session_id, own in sessions.items():
            session = self.open_sessions.get(session_id)
            if session is None and session_id in self.dormant:
                session = self.open_session(session_id)
            if session is not None:
                places.append((session, own))
        return places


def _is_long(session_id: bytes, most_chars: int) -> bool:
    return len(session_id) > most_chars and len(session_id.decode(errors="replace")) > most_chars
