"""The sessions that receiver links of one connection hold.

Requests about a session's lock and state come on the same connection, through its management node.
"""

from __future__ import annotations

from typing import Protocol

from postbus.edge.amqp.idleness import Idleness


class SessionHolder(Protocol):
    """A link that holds a session."""

    idleness: Idleness

    @property
    def consumer_id(self) -> int: ...
    @property
    def link_name(self) -> str: ...


class HeldSessions:
    """Maps the sessions of all entities to the links that hold them."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, bytes], SessionHolder] = {}

    def add(self, entity_no: int, session_id: bytes, holder: SessionHolder) -> None:
        """Record the link that holds a session."""
        self._holders[entity_no, session_id] = holder

    def remove(self, entity_no: int, session_id: bytes, holder: SessionHolder) -> None:
        """Forget that a link held a session, unless another link holds it now."""
        if self._holders.get((entity_no, session_id)) is holder:
            del self._holders[entity_no, session_id]

    def consumer_of(self, entity_no: int, session_id: bytes | None) -> int | None:
        """Return the consumer that holds a session; that is a use of its link.

        A handler that is busy for long renews the lock and does nothing else on the link.
        """
        if session_id is None:
            return None
        holder = self._holders.get((entity_no, session_id))
        if holder is None:
            return None
        holder.idleness.is_used = True
        return holder.consumer_id

    def find(self, entity_no: int, link_name: object) -> bytes | None:
        """Return the session of an entity that the link of a name holds."""
        for (number, session_id), holder in self._holders.items():
            if number == entity_no and holder.link_name == link_name:
                return session_id
        return None
