"""Messages that arrive in a partition, from outboxes and from writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.entity.commands import (
    Arrive,
    Arrived,
    CheckSends,
    Done,
    Enqueue,
    Enqueued,
    Refusal,
    Refused,
    SendsChecked,
)
from postbus.entity.outcomes import Needs, PutInbound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from postbus.entity.commands import NotePublication, StoredRow
    from postbus.entity.outcomes import LoadedPartition
    from postbus.entity.partition_context import PartitionContext
    from postbus.entity.queues.queue_state import QueueState
    from postbus.message.envelope import Envelope

MAX_FORWARD_HOPS: Final = 4
"""Maximum number of successive forwards of a message. Source: Azure's page on auto-forwarding (an
older one says 3)."""

ARRIVAL_ROWS: Final = 50_000
"""Number of rows made by an arrival above which later messages must be sent again (ADR 20)."""


class Inbox:
    """Stores arriving messages: each number once, up to the first refusal (I17)."""

    __slots__ = ("_context", "_entities", "_last_numbers")

    def __init__(self, context: PartitionContext, entities: Mapping[int, QueueState]) -> None:
        self._context = context
        self._entities = entities
        self._last_numbers: dict[tuple[int, int], int] = {}

    def load(self, loaded: LoadedPartition) -> None:
        for row in loaded.inbound:
            self._last_numbers[row.source_partition, row.entity_no] = row.last_number
        for entity_no, writers in loaded.awaited.items():
            if entity_no in self._entities:
                self._entities[entity_no].awaited = frozenset(writers)

    def answer(self, command: CheckSends | NotePublication) -> SendsChecked | Done | Refused:
        """Check messages that are staged; note a writer whose messages are to arrive, or have."""
        entity = self._entities.get(command.entity_no)
        if entity is None:
            return Refused(Refusal.ENTITY_NOT_FOUND)
        if isinstance(command, CheckSends):
            return SendsChecked(*entity.first_refusal(command.messages, command.waiting_bytes))
        if command.is_open:
            entity.awaited |= {command.writer}
        else:
            entity.awaited -= {command.writer}
        return Done()

    def drop(self, entity_no: int) -> None:
        """Forget an entity that is dropped; its rows are deleted with its definition."""
        for place in [place for place in self._last_numbers if place[1] == entity_no]:
            del self._last_numbers[place]

    def arrive(self, command: Arrive, found: Sequence[StoredRow] | None) -> Arrived | Needs:
        """Store new messages, together if none is refused."""
        place = (command.source_partition, command.entity_no)
        last_number = self._last_numbers.get(place, 0)
        if last_number < command.after:
            return Arrived(0, Refused(Refusal.BUSY, "the messages before have not arrived"))
        known = sum(number <= last_number for number in command.numbers)
        fresh = command.messages[known:]
        resent = [number in command.resent for number in command.numbers[known:]]
        entity = self._entities.get(command.entity_no)
        if entity is None:
            return Arrived(0, Refused(Refusal.ENTITY_NOT_FOUND))
        hops = [envelope.hop_count > MAX_FORWARD_HOPS for envelope in fresh]
        refused = Refused(Refusal.HOPS_EXCEEDED) if any(hops) else None
        fresh = fresh[: hops.index(True)] if refused else fresh
        for envelope in fresh:
            envelope.shared = None  # its body is accounted for in its source
        count = 0
        if fresh:
            answer = self._store(entity, fresh, resent, found)
            if isinstance(answer, Needs):
                return answer
            count, earlier = answer
            refused = earlier or refused
        if count:
            last_number = command.numbers[known + count - 1]
            self._last_numbers[place] = last_number
            self._context.outcome.mutations.append(PutInbound(*place, last_number))
        return Arrived(known + count, refused)

    @staticmethod
    def _store(
        entity: QueueState,
        messages: list[Envelope],
        resent: list[bool],
        found: Sequence[StoredRow] | None,
    ) -> tuple[int, Refused | None] | Needs:
        """Store messages up to the first refused one; return their number, and the refusal."""
        entity_no = entity.entity_no
        ids = [each for each, is_resent in zip(messages, resent, strict=False) if not is_resent]
        if entity.seen is None or not ids or len(ids) == len(messages):
            together = Enqueue(entity_no, messages, is_atomic=True, is_resent=not ids)
            reply = entity.enqueue(together, found)
            if isinstance(reply, Needs):
                return reply
            if isinstance(reply, Enqueued):
                return len(messages), None
        else:  # seen ids are looked up before anything is stored
            screened = entity.seen.screen(ids, found)
            if isinstance(screened, Needs):
                return screened
        inserts = entity.context.outcome.inserts
        for count, envelope in enumerate(messages):
            if len(inserts) >= ARRIVAL_ROWS:
                return count, Refused(Refusal.BUSY, "the messages before it make enough copies")
            one = Enqueue(entity_no, [envelope], is_atomic=True, is_resent=resent[count])
            reply = entity.enqueue(one, found)
            assert not isinstance(reply, Needs), "the ids are known by now"
            if isinstance(reply, Refused):
                return count, reply
        return len(messages), None  # there is room for each when the one before is routed or gone
