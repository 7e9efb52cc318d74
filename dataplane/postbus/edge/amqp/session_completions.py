"""Completions on links of sessions, gathered into one command.

A receiver of many sessions has a link for each and completes single messages on each of them. One
command and one answer for each message would cost more than the rest of their processing. Import
circle with `session_links`: an endpoint adds its completions here, and the answer to a group goes
back to each of its endpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from postbus.amqp.performatives import ACCEPTED
from postbus.edge.access.inflight_budget import guarded
from postbus.edge.amqp.link_context import LinkContext
from postbus.edge.amqp.settlements import ranges_of
from postbus.entity.commands import CompleteSessions, Refused, Settled

if TYPE_CHECKING:
    from postbus.amqp.events import DeliveriesUpdated
    from postbus.amqp.session import Session
    from postbus.edge.amqp.session_links import SessionEndpoint


class Completion(NamedTuple):
    """Completed deliveries of one link, with the link's consumer at that time."""

    endpoint: SessionEndpoint
    consumer_id: int
    event: DeliveriesUpdated


class SessionCompletions:
    """Completions of one connection, submitted before any later command of the same links."""

    def __init__(self) -> None:
        self._added: list[Completion] = []

    def add(self, endpoint: SessionEndpoint, event: DeliveriesUpdated) -> None:
        """Add unsettled deliveries that the client accepts."""
        self._added.append(Completion(endpoint, endpoint.consumer_id, event))

    def submit(self) -> None:
        """Submit the added completions, one command for each entity."""
        added = self._added
        if not added:
            return
        self._added = []
        if len(added) == 1:
            added[0].endpoint.complete(added[0].event)
            return
        entities: dict[tuple[int, int], list[Completion]] = {}
        for each in added:
            entities.setdefault(each.endpoint.place, []).append(each)
        connection = added[0].endpoint.connection
        for (partition_id, entity_no), group in entities.items():
            connection.unanswered_count += len(group)
            parts = [(each.endpoint.session_id, each.event.tags) for each in group]
            command = CompleteSessions(entity_no, parts)
            connection.router.submit(partition_id, command, _Submitted(connection, group).completed)


class _Submitted:
    """Completions of one entity in flight."""

    def __init__(self, connection: LinkContext, group: list[Completion]) -> None:
        self.connection = connection
        self._group = group

    @guarded
    def completed(self, reply: Settled | Refused) -> None:
        """Answer all together if all succeeded, otherwise each link separately."""
        if isinstance(reply, Refused) or reply.lost:
            self._answer_apart(reply)
            return
        self.connection.unanswered_count -= len(self._group)
        ids: dict[Session, list[int]] = {}
        for endpoint, _, event in self._group:
            session = endpoint.note_completed(event)
            if session is not None:
                ids.setdefault(session, []).extend(event.delivery_ids)
        for session, answered in ids.items():
            for first, last in ranges_of(sorted(answered)):
                session.settle_outgoing(first, last, ACCEPTED)
        self.connection.flush_soon()

    def _answer_apart(self, reply: Settled | Refused) -> None:
        lost = set(reply.lost or ()) if isinstance(reply, Settled) else set()
        start = 0
        for endpoint, consumer_id, event in self._group:
            count = len(event.tags)
            own = reply
            if isinstance(reply, Settled):
                own = Settled([n for n in range(count) if start + n in lost] or None)
            endpoint.completed(consumer_id, event, own)
            start += count
