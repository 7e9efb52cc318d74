"""Deletion of unused entities: their last use, and the time when they are idle (ADR 27).

Uses are commands of clients, receivers with credit, pending scheduled messages, messages in the
outbox, and forwarding. A publish is a use of the topic only, but a use of a subscription is also
one of its topic. The time of the last use is recorded coarsely and rounded up, so that after a
crash an entity appears to have been used later than it was, never earlier.

An entity that is to be deleted only if it is empty is frozen in the same way.

`PartitionState.apply` calls this only while an entity has an `AutoDeleteOnIdle` or is frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import TopicProperties
from postbus.entity.commands import (
    Arrive,
    Arrived,
    Command,
    DropEntity,
    Freeze,
    Frozen,
    Hold,
    LoseLocks,
    PutEntity,
    Quiesce,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    ResendBySequence,
    SetDemand,
    Shipped,
    SupplyRows,
    Thaw,
    Tick,
    Transact,
)
from postbus.entity.group_commands import FollowHome, ListGroups
from postbus.entity.outcomes import Deliver, Idle, RecordUse
from postbus.entity.topics.topic_state import TopicState

if TYPE_CHECKING:
    from postbus.entity.outcomes import LoadedEntity, Outcome
    from postbus.entity.partition_context import PartitionContext
    from postbus.entity.queues.queue_state import QueueState

FREEZE_MS: Final = 2_000
"""Time after which an entity thaws unless it is held (ADR 27)."""

NEVER_MS: Final = 1 << 62

REPEAT_MS: Final = 60_000
"""Interval at which the catalog is notified of an entity that stays idle. Our choice."""

GRAINS: Final = 10
LEAST_GRAIN_MS: Final = 60_000
"""The last use is recorded when it advanced by a tenth of the period, or a minute. Our choice."""

_NO_USE: Final = (
    DropEntity,
    FollowHome,
    Freeze,
    Hold,
    ListGroups,
    LoseLocks,
    Quiesce,
    Shipped,
    SupplyRows,
    Thaw,
    Tick,
)


class IdleTracker:
    """The last use of one entity. `recorded_ms`: the last use in the tables."""

    __slots__ = (
        "_context",
        "_entities",
        "_entity_no",
        "_timer_ms",
        "last_used_ms",
        "period_ms",
        "recorded_ms",
    )

    def __init__(
        self,
        entity_no: int,
        context: PartitionContext,
        entities: IdleEntities,
        period_ms: int,
        recorded_ms: int = 0,
    ) -> None:
        self._entity_no = entity_no
        self._context = context
        self._entities = entities
        self._timer_ms: int | None = None
        self.period_ms = period_ms
        self.last_used_ms = recorded_ms
        self.recorded_ms = recorded_ms

    @property
    def is_due(self) -> bool:
        return self._context.now_ms >= self.last_used_ms + self.period_ms

    def touch(self) -> None:
        """Record a use now."""
        context = self._context
        now_ms = context.now_ms
        self.last_used_ms = max(now_ms, self.last_used_ms)
        if now_ms >= self.recorded_ms:
            self.recorded_ms = now_ms + max(self.period_ms // GRAINS, LEAST_GRAIN_MS)
            context.outcome.mutations.append(RecordUse(self._entity_no, self.recorded_ms))
            self.watch(self.recorded_ms)

    def watch(self, when_ms: int) -> None:
        """Check the entity at this time, or earlier if a check is due before."""
        if self._timer_ms is None or when_ms < self._timer_ms:
            self._timer_ms = when_ms
            self._context.set_timer(when_ms, self.look)

    def look(self) -> None:
        """Report that the entity is idle, or set the time of the next check."""
        context = self._context
        now_ms = context.now_ms
        if self._entities.trackers.get(self._entity_no) is not self:
            return
        if self._timer_ms is not None and self._timer_ms > now_ms:
            return  # an earlier timer did this one's work
        self._timer_ms = None
        is_busy = self._entities.is_busy(self._entity_no)
        if is_busy or not self.last_used_ms:
            self.touch()
        if is_busy:
            self.watch(min(self.recorded_ms, now_ms + self.period_ms))
        elif self.is_due:
            context.outcome.effects.append(Idle(self._entity_no))
            self.watch(now_ms + REPEAT_MS)
        else:
            self.watch(self.last_used_ms + self.period_ms)


class IdleEntities:
    """All entities of a partition with an `AutoDeleteOnIdle`; see the module's docstring."""

    __slots__ = ("_context", "_emptied", "_entities", "_frozen", "trackers")

    def __init__(self, context: PartitionContext, entities: Mapping[int, QueueState]) -> None:
        self._context = context
        self._entities = entities
        self._frozen: dict[int, int] = {}  # entity -> time when it thaws
        self._emptied: set[int] = set()  # those of them that are empty
        self.trackers: dict[int, IdleTracker] = {}

    # --- definitions ------------------------------------------------------------------------------

    def define(self, entity: QueueState) -> None:
        """Apply a new definition of an entity, which counts as use."""
        entity_no = entity.entity_no
        self._melt(entity_no)
        period_ms = entity.properties.auto_delete_on_idle_ms
        if period_ms >= MAX_DURATION_MS:
            self.trackers.pop(entity_no, None)
        elif entity_no in self.trackers:
            self.trackers[entity_no].period_ms = period_ms
        else:
            self.trackers[entity_no] = IdleTracker(entity_no, self._context, self, period_ms)
        self.touch(entity_no)

    def load(self, stored: LoadedEntity) -> None:
        """Take over a loaded entity."""
        period_ms = stored.properties.auto_delete_on_idle_ms
        if period_ms < MAX_DURATION_MS:
            tracker = IdleTracker(
                stored.entity_no, self._context, self, period_ms, stored.last_used_ms
            )
            self.trackers[stored.entity_no] = tracker
            self._context.resumed[tracker.look] = None

    def forget(self, entity_no: int) -> None:
        """Forget an entity that is dropped."""
        self._melt(entity_no)
        self.trackers.pop(entity_no, None)

    # --- use --------------------------------------------------------------------------------------

    def touch(self, entity_no: int) -> None:
        """Record a use of an entity, and of its topic."""
        for used_no in self._with_topic(entity_no):
            tracker = self.trackers.get(used_no)
            if tracker is not None:
                tracker.touch()

    def note(self, used: list[int], outcome: Outcome) -> None:
        """Record the uses by a command and its deliveries."""
        for entity_no in used:
            self.touch(entity_no)
        for effect in outcome.effects:
            if isinstance(effect, Deliver):
                self.touch(effect.entity_no)

    def used_by(self, command: Command) -> list[int]:
        """Return the entities that a command uses; called before it is applied."""
        if isinstance(command, _NO_USE):
            return []
        if isinstance(command, Transact):
            return [operation.entity_no for operation in command.operations]
        if isinstance(command, ResendBySequence) and command.target_no is not None:
            return [command.entity_no, command.target_no]
        if isinstance(command, SetDemand | RemoveConsumer):
            registered = self._context.consumers.get(command.consumer_id)
            return [] if registered is None else [registered[0].entity.entity_no]
        return [command.entity_no]

    def is_busy(self, entity_no: int) -> bool:
        """Return whether an entity is in use without commands."""
        entity = self._entities[entity_no]
        if len(entity.scheduled) or entity.outbound or entity.awaited:
            return True
        if any(sub.has_receivers() for sub in entity.sub_queues()):
            return True
        if isinstance(entity, TopicState):
            return any(map(self.is_busy, entity.subscriptions))
        properties = entity.properties
        return not isinstance(properties, TopicProperties) and properties.forward_to is not None

    def _with_topic(self, entity_no: int) -> list[int]:
        entity = self._entities.get(entity_no)
        topic = None if entity is None else entity.topic
        return [entity_no] if topic is None else [entity_no, topic.entity_no]

    # --- freezing ---------------------------------------------------------------------------------

    @property
    def is_watching(self) -> bool:
        """True if commands must be checked here."""
        return bool(self.trackers or self._frozen)

    def freeze(self, command: Freeze) -> Reply:
        """Refuse commands for an idle entity for `FREEZE_MS`."""
        entity_no = command.entity_no
        entity = self._entities.get(entity_no)
        if entity is None:
            return Refused(Refusal.ENTITY_NOT_FOUND)
        tracker = self.trackers.get(entity_no)
        if command.if_empty:
            refused = _not_empty(entity)
            if refused is not None:
                return refused
        elif tracker is None or not tracker.is_due or self.is_busy(entity_no):
            return Refused(Refusal.BUSY, "the entity is in use")
        self._melt(entity_no)
        if command.if_empty:
            self._emptied.add(entity_no)
        self._frozen[entity_no] = self._context.now_ms + FREEZE_MS
        return Frozen(0 if tracker is None else tracker.last_used_ms)

    def hold(self, command: Hold) -> Reply:
        """Keep entities frozen until their deletion is confirmed or cancelled.

        A topic is not held: a copy that it stored in an empty subscription since then keeps that.
        """
        entity_no = command.entity_no
        entity = self._entities.get(entity_no)
        if entity is None:
            return Refused(Refusal.ENTITY_NOT_FOUND)
        if not command.is_decided:
            if self._frozen.get(entity_no, 0) <= self._context.now_ms:
                return Refused(Refusal.BUSY, "the entity is no longer frozen")
            refused = _not_empty(entity) if entity_no in self._emptied else None
            if refused is not None:
                return refused
        self._frozen[entity_no] = NEVER_MS
        tracker = self.trackers.get(entity_no)
        return Frozen(0 if tracker is None else tracker.last_used_ms)

    def thaw(self, command: Thaw) -> None:
        self._melt(command.entity_no)

    def _melt(self, entity_no: int) -> None:
        self._frozen.pop(entity_no, None)
        self._emptied.discard(entity_no)

    def refusal(self, command: Command, used: list[int]) -> Reply | None:
        """Return BUSY if the command uses an entity that is frozen, or whose topic is frozen."""
        if not self._frozen or isinstance(command, PutEntity | RemoveConsumer):
            return None
        now_ms = self._context.now_ms
        for entity_no in used:
            for frozen_no in self._with_topic(entity_no):
                if self._frozen.get(frozen_no, now_ms) > now_ms:
                    refused = Refused(Refusal.BUSY, "the entity is about to be deleted")
                    return Arrived(0, refused) if isinstance(command, Arrive) else refused
        return None


def _not_empty(entity: QueueState) -> Refused | None:
    """Return a refusal with the number of messages of an entity, None if it is empty."""
    count = entity.message_count + len(entity.awaited)
    if isinstance(entity, TopicState):
        count += sum(each.message_count for each in entity.subscriptions.values())
    if not count:
        return None
    return Refused(Refusal.NOT_EMPTY, f"{entity.name} holds {count} message{'s' * (count != 1)}")
