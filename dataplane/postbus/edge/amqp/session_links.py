"""Endpoint of a receiver link that asks for a session: the attach waits until one is granted.

A client names a session or takes the next available one; the answer to the attach names the
session. When its lock is lost the link is detached, and its deliveries can no longer be settled.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from postbus.amqp import conditions
from postbus.amqp.link import OutgoingLink
from postbus.amqp.performatives import ACCEPTED, Terminus, with_filters
from postbus.broker.address import Address
from postbus.broker.placement import SPREAD
from postbus.edge.access.inflight_budget import guarded
from postbus.edge.amqp.held_sessions import HeldSessions
from postbus.edge.amqp.receiver_links import ReceiverContext, ReceiverEndpoint
from postbus.edge.amqp.session_completions import SessionCompletions
from postbus.entity.commands import AcceptSession, ReceiveMode, Refusal, Refused, Settled
from postbus.message.codec import Described

if TYPE_CHECKING:
    from postbus.amqp.events import DeliveriesUpdated
    from postbus.amqp.session import Session

SESSION_FILTER: Final = "com.microsoft:session-filter"
SESSION_FILTER_CODE: Final = 0x0000_0013_7000_000C
DESCRIPTORS: Final = (SESSION_FILTER_CODE, SESSION_FILTER)  # not a set: the value may be a list
TIMEOUT_PROPERTY: Final = "com.microsoft:timeout"
LOCKED_UNTIL_PROPERTY: Final = "com.microsoft:locked-until-utc"

NEXT_SESSION_S: Final = 65.0
"""Time to wait for the next available session when the client names none. Source: a comment in the
JavaScript SDK about the behaviour of the service."""

GRACE_S: Final = 2.0
"""Time that a receive-and-delete link outlives the lock of its session: a client that has all
messages closes it itself, as the SDKs' own tests do just after the lock. Nothing is delivered
meanwhile, and the session is free."""

TICKS_TO_EPOCH: Final = 621_355_968_000_000_000
TICKS_PER_MS: Final = 10_000


class SessionFilter:
    """A session filter as the client wrote it. `session_id` None: the next available session."""

    def __init__(self, key: object, value: object) -> None:
        self._key = key
        self._value = value
        is_known = not isinstance(value, Described) or value.descriptor in DESCRIPTORS
        asked = value.value if isinstance(value, Described) else value
        self.is_valid = is_known and (asked is None or isinstance(asked, str))
        self.session_id = asked.encode() if isinstance(asked, str) else None

    @classmethod
    def of(cls, source: Terminus | None) -> SessionFilter | None:
        """Return the session filter of a source, None when it has none."""
        for key, value in ((source.filters if source else None) or {}).items():
            if str(key) == SESSION_FILTER or (
                isinstance(value, Described) and value.descriptor == SESSION_FILTER_CODE
            ):
                return cls(key, value)
        return None

    def granting(self, source: Terminus, session_id: bytes) -> Terminus:
        """Return the source with the session's id in the form of the request.

        Source: go-amqp wants the described form back, the JavaScript and Java SDKs the plain one.
        """
        value: object = session_id.decode()
        if isinstance(self._value, Described):
            value = Described(self._value.descriptor, value)
        return with_filters(source, {**(source.filters or {}), self._key: value})


def source_refusal(source: Terminus | None, *, needs_session: bool) -> tuple[str, str] | None:
    """Return condition and text for a source that no entity, or not this one, supports.

    A session filter where there are no sessions is refused by the entity.
    """
    wanted = SessionFilter.of(source)
    filters = (source.filters if source is not None else None) or {}
    if len(filters) > (wanted is not None):
        names = ", ".join(str(key) for key in filters)
        return conditions.NOT_IMPLEMENTED, f"No such filter is supported: {names}."
    if source is not None and source.is_copying:
        return (
            conditions.NOT_IMPLEMENTED,
            "distribution-mode copy is not supported; use peek-message on $management.",
        )
    if wanted is not None and not wanted.is_valid:
        return conditions.INVALID_FIELD, "A session filter is a string or null."
    if wanted is None and needs_session:
        text = (
            "It is not possible for an entity that requires sessions to create a "
            "non-sessionful message receiver."
        )
        return conditions.NOT_ALLOWED, text
    return None


class SessionContext(ReceiverContext, Protocol):
    """For receivers of sessions."""

    sessions: HeldSessions
    completions: SessionCompletions
    is_ended: bool


class SessionEndpoint(ReceiverEndpoint):
    """Hands the messages of one session to a client."""

    connection: SessionContext

    def __init__(
        self,
        connection: SessionContext,
        link: OutgoingLink,
        address: Address,
        path: str,
        wanted: SessionFilter,
    ) -> None:
        super().__init__(connection, link, address, path)
        self._lost = Refused(Refusal.SESSION_LOCK_LOST)
        self._wanted = wanted
        self._wait_timer: asyncio.TimerHandle | None = None
        self._grace_timer: asyncio.TimerHandle | None = None

    @property
    def consumer_id(self) -> int:
        """Consumer that holds the session, for requests of the management node."""
        return self._consumer_id

    def attach(self) -> None:
        """Ask for the session; the attach is answered when it is granted or refused."""
        if self._wanted.session_id is None:  # first, since a session may be granted immediately
            asked = self._link.properties.get(TIMEOUT_PROPERTY)
            wait_s = asked / 1_000 if isinstance(asked, int) else NEXT_SESSION_S
            self._wait_timer = self.connection.call_later(wait_s, self._waited_enough)
        self._register()

    @property
    def session_id(self) -> bytes:
        """The session that was granted."""
        assert self._session_id is not None
        return self._session_id

    @property
    def link_name(self) -> str:
        """Name of the link for requests of the management node."""
        return self._link.name

    @property
    def place(self) -> tuple[int, int]:
        """Partition and number of the entity."""
        return self._address.partition_id, self._address.entity_no

    def close(self) -> None:
        """Release the session; the link is gone."""
        self.connection.completions.submit()
        self._stop_wait_timer()
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        if self._session_id is not None:
            self.connection.sessions.remove(self._address.entity_no, self._session_id, self)
        super().close()

    @guarded
    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        """Answer the attach with the granted session."""
        self._stop_wait_timer()
        link = self._link
        if link.is_gone or link.source is None or self.connection.is_ended:
            return
        self._session_id = session_id
        self.connection.sessions.add(self._address.entity_no, session_id, self)
        link.source = self._wanted.granting(link.source, session_id)
        ticks = TICKS_TO_EPOCH + locked_until_ms * TICKS_PER_MS
        link.accept({LOCKED_UNTIL_PROPERTY: ticks})
        self.connection.pump_soon(self)  # a flow may have followed the attach

    # --- settlement -----------------------------------------------------------------------------

    def updated(self, event: DeliveriesUpdated) -> None:
        """Let completions wait for those of other links that arrived with them."""
        is_completion = event.state is ACCEPTED and not event.is_settled
        if is_completion and self._address.partition_id != SPREAD:
            self.idleness.is_used = True
            self.connection.completions.add(self, event)
        else:
            self.connection.completions.submit()
            super().updated(event)

    def complete(self, event: DeliveriesUpdated) -> None:
        """Complete the deliveries of this link alone."""
        super().updated(event)

    def completed(
        self, consumer_id: int, event: DeliveriesUpdated, reply: Settled | Refused
    ) -> None:
        """Answer completions that did not all succeed."""
        command = self._settlement(event.tags, ACCEPTED)
        self._settled(consumer_id, command, event.delivery_ids, ACCEPTED, reply)

    def note_completed(self, event: DeliveriesUpdated) -> Session | None:
        """Count completed deliveries; return the AMQP session to answer on, if there is one."""
        link = self._link
        if not link.is_attached:
            return None
        link.open_count -= len(event.delivery_ids)
        self._count_settled(len(event.delivery_ids))
        return link.session

    # --- the end --------------------------------------------------------------------------------

    def ended(self, refused: Refused) -> None:
        """Detach; for a session in receive-and-delete shortly after its lock."""
        if self._is_locking or refused.refusal is not Refusal.SESSION_LOCK_LOST:
            super().ended(refused)
        elif self._grace_timer is None:
            self._grace_timer = self.connection.call_later(GRACE_S, super().ended, refused)

    def reset(self) -> None:
        """Detach a session that was held, since its lock is lost; one waited for is requested
        again.
        """
        if self._session_id is not None:
            self.ended(Refused(Refusal.SESSION_LOCK_LOST))
        elif not self._link.is_gone:
            self._register()

    def _register(self) -> None:
        consumer_id = self._begin()
        mode = ReceiveMode.PEEK_LOCK if self._is_locking else ReceiveMode.RECEIVE_AND_DELETE
        self._submit(
            AcceptSession(
                self._address.entity_no,
                consumer_id,
                mode,
                self._wanted.session_id,
                self._receiver(),
            ),
            lambda reply: self._added(consumer_id, reply),
        )

    def _waited_enough(self) -> None:
        """Refuse the attach: no session became available in time."""
        self._wait_timer = None
        text = "The operation did not complete within the allotted timeout: no session came."
        self.connection.detach(
            self._link, self.connection.error_mapper.error(conditions.TIMEOUT, text, self.path)
        )

    def _stop_wait_timer(self) -> None:
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None
