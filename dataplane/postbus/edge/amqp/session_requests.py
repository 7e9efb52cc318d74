"""Management requests about sessions: lock, state, list.

The connection's receiver links know who holds a session: requests about its lock and state must
come on the same connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from postbus.broker.address import Address
from postbus.edge.amqp.held_sessions import HeldSessions
from postbus.edge.amqp.management_bodies import BadRequest, integer, ok, response, session_id_of
from postbus.edge.amqp.requests import Respond
from postbus.entity.commands import (
    Done,
    GetSessionState,
    ListSessions,
    Refusal,
    Refused,
    RenewSession,
    SessionRenewed,
    SessionsListed,
    SessionState,
    SetSessionState,
)
from postbus.message.codec import Array, Int, Timestamp

if TYPE_CHECKING:
    from postbus.edge.amqp.management_node import ManagementNode

ALL_SESSIONS_MS: Final = 253_402_300_799_999
"""A "last updated" time from this one on means every session with messages or state: .NET's
DateTime.MaxValue, which clients round in both directions."""

MAX_LISTED: Final = 1_000
MAX_SKIPPED: Final = 1 << 30
"""The answer contains the next value of skip as an AMQP int."""


class SessionRequests:
    """The operations of one management node."""

    def __init__(self, sessions: HeldSessions, node: ManagementNode) -> None:
        self._sessions = sessions
        self._node = node
        self.operations: dict[str, Callable[[Address, Any, Respond], None]] = {
            "renew-session-lock": self._renew,
            "get-session-state": self._get_state,
            "set-session-state": self._set_state,
            "get-message-sessions": self._list,
        }

    def _renew(self, address: Address, body: Any, respond: Respond) -> None:
        held = self._held(address, body, respond)
        if held is None:
            return

        def answer(reply: SessionRenewed | Refused) -> None:
            if isinstance(reply, SessionRenewed):
                ok(respond, {"expiration": Timestamp(reply.locked_until_ms)})
            else:
                self._node.refuse(respond, reply)

        self._node.submit(address, RenewSession(address.entity_no, *held), answer)

    def _get_state(self, address: Address, body: Any, respond: Respond) -> None:
        held = self._held(address, body, respond)
        if held is None:
            return

        def answer(reply: SessionState | Refused) -> None:
            if isinstance(reply, SessionState):
                ok(respond, {"session-state": reply.state})
            else:
                self._node.refuse(respond, reply)

        self._node.submit(address, GetSessionState(address.entity_no, *held), answer)

    def _set_state(self, address: Address, body: Any, respond: Respond) -> None:
        state = body.get("session-state")
        if state is not None and not isinstance(state, bytes):
            raise BadRequest("session-state is neither binary nor null")
        held = self._held(address, body, respond)
        if held is None:
            return

        def answer(reply: Done | Refused) -> None:
            if isinstance(reply, Done):
                ok(respond, None)
            else:
                self._node.refuse(respond, reply)

        self._node.submit(address, SetSessionState(address.entity_no, *held, state), answer)

    def _list(self, address: Address, body: Any, respond: Respond) -> None:
        after_ms = integer(body, "last-updated-time", default=ALL_SESSIONS_MS)
        skip = max(0, min(integer(body, "skip", default=0), MAX_SKIPPED))
        top = max(1, min(integer(body, "top", default=MAX_LISTED), MAX_LISTED))
        command = ListSessions(
            address.entity_no, None if after_ms >= ALL_SESSIONS_MS else after_ms, skip, top
        )

        def answer(reply: SessionsListed | Refused) -> None:
            if isinstance(reply, Refused):
                self._node.refuse(respond, reply)
            elif not reply.session_ids:
                respond(response(204, "No content"))
            else:
                names = [each.decode() for each in reply.session_ids]
                ok(respond, {"skip": Int(skip + len(names)), "sessions-ids": Array(0xB1, names)})

        self._node.submit(address, command, answer)

    def _held(self, address: Address, body: Any, respond: Respond) -> tuple[bytes, int] | None:
        """Return the session and its holder on this connection; None after a refusal."""
        session_id = session_id_of(body)
        if session_id is None:
            raise BadRequest("session-id is missing")
        holder = self._sessions.consumer_of(address.entity_no, session_id)
        if holder is None:
            self._node.refuse(respond, Refused(Refusal.SESSION_LOCK_LOST))
            return None
        return session_id, holder
