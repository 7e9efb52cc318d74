"""The pure state machine of one partition: `apply(command, now)` returns what must become durable.

Owns the partition's entities, locks, receivers and numbers; the host calls it and does what its
outcomes say. It has no clock, no I/O and no log, and it is deterministic: the same commands at the
same times, the same seed and the same loaded state give the same outcomes. It never looks into a
message beyond its `Envelope`. A broken invariant raises, and the host reloads the partition.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Final, assert_never

from postbus.contract.entities import EntityStatus, NamespaceLimits, TopicProperties
from postbus.entity import group_operations, message_operations, own_rows, transactions
from postbus.entity.apply_context import DONE
from postbus.entity.commands import (
    AcceptSession,
    AddConsumer,
    Arrive,
    CancelScheduled,
    CheckLocks,
    CheckSends,
    Command,
    CompleteSessions,
    DeleteBySequence,
    DeleteMessages,
    DemandSet,
    DropEntity,
    Enqueue,
    Freeze,
    GetSessionState,
    Hold,
    ListSessions,
    LoseLocks,
    NotePublication,
    Peek,
    PutEntity,
    Quiesce,
    ReceiveDeferred,
    Refusal,
    Refused,
    RemoveConsumer,
    RenewLocks,
    RenewSession,
    Reply,
    ResendBySequence,
    ReserveNumbers,
    SetDemand,
    SetSessionState,
    Settle,
    Shipped,
    StoredRow,
    SubQueue,
    SupplyRows,
    Thaw,
    Tick,
    Transact,
)
from postbus.entity.counts import Counts
from postbus.entity.group_commands import GroupCommand
from postbus.entity.idle import IdleEntities
from postbus.entity.outcomes import (
    DropDefinition,
    LoadedEntity,
    LoadedPartition,
    Needs,
    Outcome,
    PutDefinition,
    PutDue,
    RecordAcquired,
    RecordIds,
    RecordUse,
)
from postbus.entity.partition_context import PartitionContext
from postbus.entity.queues.active_messages import SessionCommand
from postbus.entity.queues.queue_state import QueueState
from postbus.entity.queues.sub_queue import Consumer
from postbus.entity.topics.publish_limits import PublishLimits
from postbus.entity.topics.topic_state import TopicState
from postbus.entity.traffic import Traffic
from postbus.entity.transfer.inbox import Inbox
from postbus.entity.transfer.outbox import OUTBOX_NO, Outbox
from postbus.entity.window import Window, WindowBudget

__all__ = ["Counts", "PartitionState", "WindowBudget"]

PURGE_PAUSE_MS: Final = 10
"""Pause between two chunks of rows of a dropped entity, since the journal has other work. Our
choice."""

NUMBER_BITS: Final = 48
"""A sequence number of a partitioned entity is `partition_id << 48 | n` (ADR 15)."""

PARTITION_BYTES: Final = 2
EPOCH_BYTES: Final = 6
"""Shape of a lock token after its 8 random bytes (ADR 23)."""


class PartitionState:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        partition_id: int,
        loaded: LoadedPartition,
        seed: int,
        budget: WindowBudget,
        limits: NamespaceLimits,
        publish_limits: PublishLimits = PublishLimits(),  # noqa: B008 - frozen
        traffic: dict[int, Traffic] | None = None,
    ) -> None:
        """`traffic`: counters to add to; the caller keeps them for the next load."""
        self.partition_id = partition_id
        self.catalog_version = loaded.catalog_version
        self._context = PartitionContext(
            random=Random(seed),
            token_suffix=partition_id.to_bytes(PARTITION_BYTES, "big")
            + loaded.epoch.to_bytes(EPOCH_BYTES, "big"),
            first_key=loaded.next_row_key,
            window=Window(budget),
            limits=limits,
            publish_limits=publish_limits,
            traffic={} if traffic is None else traffic,
        )
        self.entities: dict[int, QueueState] = {}  # topics too, and subscriptions
        self._context.outbox = self._outbox = Outbox(self._context, self.entities)
        self._inbox = Inbox(self._context, self.entities)
        self._idle = IdleEntities(self._context, self.entities)
        self._consumers = self._context.consumers
        self._purged: deque[array[int]] = deque()
        self._load(loaded)

    # --- for the host -----------------------------------------------------------------------------

    def set_limits(self, limits: NamespaceLimits) -> None:
        """Take over the limits of another tier. Definitions, messages and locks stay."""
        self._context.limits = limits
        for entity in self.entities.values():  # a topic before its subscriptions
            entity.follow_limits()

    def apply(
        self, command: Command, now_ms: int, found: Sequence[StoredRow] | None = None
    ) -> Outcome | Needs:
        """Change the state; the same command again with `found` when the answer is `Needs`."""
        outcome = self._context.begin(now_ms)
        if self._idle.is_watching:
            reply = self._apply_tracked(command, found)
        else:
            reply = self._dispatch(command, found)
        if isinstance(reply, Needs):
            return reply
        outcome.reply = reply
        if self._outbox.unoffered:
            self._outbox.offer()
        if outcome.inserts and outcome.mutations:
            own_rows.settle(outcome)
        return outcome

    @property
    def next_deadline_ms(self) -> int | None:
        """Time of the next Tick, None when nothing waits for time."""
        return self._context.next_deadline_ms

    def mark_committed(self, applied_ms: int) -> None:
        """Record that every outcome up to one with this `applied_ms` is durable; optional."""
        if applied_ms > self._context.committed_ms:
            self._context.committed_ms = applied_ms

    def discard(self) -> None:
        """Give the window back to the budget; the state must not be used afterwards."""
        self._context.window.discard()

    def counts(self, entity_no: int) -> Counts | None:
        """Return the counts of an entity, None if the partition does not have it."""
        entity = self.entities.get(entity_no)
        if entity is None:
            return None
        return Counts(
            entity.live_count(SubQueue.ACTIVE),
            entity.live_count(SubQueue.DEAD_LETTER),
            len(entity.scheduled),
            entity.live_count(SubQueue.TRANSFER_DEAD_LETTER),
            entity.total_bytes,
            entity.outbound,
            entity.accessed_ms,
        )

    def locked_count(self, entity_no: int) -> int:
        """Return the number of locked active messages of an entity."""
        entity = self.entities.get(entity_no)
        return 0 if entity is None else entity.active.locked_count

    def oldest(self, entity_no: int) -> tuple[int, int | None] | None:
        """Return row key and enqueued time of the oldest active message."""
        entity = self.entities.get(entity_no)
        return None if entity is None else entity.active.oldest()

    # --- commands ---------------------------------------------------------------------------------

    def _dispatch(self, command: Command, found: Sequence[StoredRow] | None) -> Reply | Needs:
        match command:
            case Enqueue():
                return self._enqueue(command, found)
            case Settle():
                return self._settle(command, found)
            case SetDemand():
                return self._set_demand(command, found)
            case RemoveConsumer():
                return self._remove_consumer(command)
            case (
                AcceptSession()
                | RenewSession()
                | GetSessionState()
                | SetSessionState()
                | ListSessions()
            ):
                return self._use_session(command, found)
            case CompleteSessions():
                return self._complete_sessions(command)
            case SupplyRows():
                return self._supply(command)
            case RenewLocks():
                return self._renew_locks(command)
            case LoseLocks():
                return self._lose_locks(command)
            case Peek():
                return self._peek(command, found)
            case ReceiveDeferred():
                return self._receive_deferred(command, found)
            case CancelScheduled():
                return self._cancel(command)
            case DeleteMessages():
                return self._delete_messages(command, found)
            case DeleteBySequence() | ResendBySequence():
                return message_operations.handle(self.entities, self._outbox, command, found)
            case AddConsumer():
                return self._add_consumer(command)
            case PutEntity():
                return self._put_entity(command)
            case DropEntity():
                return self._drop_entity(command)
            case Transact():
                return transactions.transact(self.entities, self._outbox, command, found)
            case CheckLocks() | ReserveNumbers():
                return transactions.answer(self.entities, command)
            case Arrive():
                return self._inbox.arrive(command, found)
            case CheckSends() | NotePublication():
                return self._inbox.answer(command)
            case Shipped():
                return self._outbox.shipped(command, found) or DONE
            case Freeze():
                return self._idle.freeze(command)
            case Hold():
                return self._idle.hold(command)
            case Thaw():
                self._idle.thaw(command)
                return DONE
            case Tick():
                self._context.run_timers()
                self._context.record_outstanding()
                return DONE
            case Quiesce():
                self._quiesce()
                return DONE
            case _:
                if isinstance(command, GroupCommand):
                    return group_operations.handle(self.entities, command, self.partition_id, found)
                assert_never(command)

    def _apply_tracked(self, command: Command, found: Sequence[StoredRow] | None) -> Reply | Needs:
        """Apply while some entity has idle deletion or is about to be deleted."""
        idle = self._idle
        used = idle.used_by(command)
        refused = idle.refusal(command, used)
        if refused is not None:
            return refused
        reply = self._dispatch(command, found)
        if not isinstance(reply, Needs):
            idle.note(used, self._context.outcome)
        return reply

    def _enqueue(self, command: Enqueue, found: Sequence[StoredRow] | None) -> Reply | Needs:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return _not_found()
        entity.accessed_ms = self._context.now_ms
        return entity.enqueue(command, found)

    def _settle(self, command: Settle, found: Sequence[StoredRow] | None) -> Reply | Needs:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return _not_found()
        return entity.sub_queue(command.sub_queue).settle(command, found)

    def _add_consumer(self, command: AddConsumer) -> Reply:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return _not_found()
        refused = entity.receive_refusal(command.sub_queue)
        if refused is not None:
            return refused
        if command.consumer_id not in self._consumers:
            consumer = Consumer(command.consumer_id, command.mode, command.receiver)
            sub = entity.sub_queue(command.sub_queue)
            return sub.add_receiver(consumer) or DONE
        return DONE

    def _set_demand(self, command: SetDemand, found: Sequence[StoredRow] | None) -> Reply | Needs:
        registered = self._consumers.get(command.consumer_id)
        if registered is None:
            return _not_found()
        sub, consumer = registered
        sub.entity.accessed_ms = self._context.now_ms
        needs = sub.set_demand(consumer, command.limit, is_drain=command.is_drain, found=found)
        if needs is not None:
            return needs
        if command.wants_hint or sub.hinted:
            sub.arm_hint(consumer, is_wanted=command.wants_hint)
        return DemandSet(consumer.delivered)

    def _remove_consumer(self, command: RemoveConsumer) -> Reply:
        registered = self._consumers.pop(command.consumer_id, None)
        if registered is not None:
            registered[0].remove_consumer(command.consumer_id)
        return DONE

    def _use_session(
        self, command: SessionCommand, found: Sequence[StoredRow] | None
    ) -> Reply | Needs:
        entity = self.entities.get(command.entity_no)
        refused = _not_found() if entity is None else entity.receive_refusal()
        if entity is None or refused is not None:
            return refused or _not_found()
        return entity.active.use_session(command, found)

    def _complete_sessions(self, command: CompleteSessions) -> Reply:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return _not_found()
        return entity.active.complete_sessions(command)

    def _supply(self, command: SupplyRows) -> Reply:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return DONE
        if command.sub_queue is SubQueue.SCHEDULED:
            entity.scheduled.supply(command.rows)
        else:
            entity.sub_queue(command.sub_queue).supply(command.rows)
        return DONE

    def _renew_locks(self, command: RenewLocks) -> Reply:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return _not_found()
        return entity.sub_queue(command.sub_queue).renew_locks(command)

    def _lose_locks(self, command: LoseLocks) -> Reply:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return _not_found()
        for sub in entity.sub_queues():
            sub.lose_locks()
        return DONE

    def _peek(self, command: Peek, found: Sequence[StoredRow] | None) -> Reply | Needs:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return _not_found()
        if entity.properties.status is EntityStatus.DISABLED:
            return Refused(Refusal.ENTITY_DISABLED, entity.name)
        sub = entity.sub_queue(command.sub_queue)
        return sub.peek(entity.scheduled.from_number, command, found)

    def _receive_deferred(
        self, command: ReceiveDeferred, found: Sequence[StoredRow] | None
    ) -> Reply | Needs:
        entity = self.entities.get(command.entity_no)
        refused = _not_found() if entity is None else entity.receive_refusal(command.sub_queue)
        if entity is None or refused is not None:
            return refused or _not_found()
        return entity.sub_queue(command.sub_queue).receive_deferred(command, found)

    def _delete_messages(
        self, command: DeleteMessages, found: Sequence[StoredRow] | None
    ) -> Reply | Needs:
        entity = self.entities.get(command.entity_no)
        refused = _not_found() if entity is None else entity.receive_refusal(command.sub_queue)
        if entity is None or refused is not None:
            return refused or _not_found()
        return entity.sub_queue(command.sub_queue).delete_messages(command, found)

    def _cancel(self, command: CancelScheduled) -> Reply:
        entity = self.entities.get(command.entity_no)
        if entity is None:
            return _not_found()
        if entity.properties.status is EntityStatus.DISABLED:
            return Refused(Refusal.ENTITY_DISABLED, entity.name)
        return entity.scheduled.cancel(command.sequence_numbers)

    # --- definitions ------------------------------------------------------------------------------

    def _put_entity(self, command: PutEntity) -> Reply:
        self.catalog_version = max(self.catalog_version, command.catalog_version)
        entity = self.entities.get(command.entity_no)
        if entity is None:
            first = self._first_sequence(is_partitioned=command.is_partitioned)
            entity = self._add_entity(command, first, 0)
        else:
            if command.is_retained:
                for consumer_id in entity.end_consumers(Refusal.ENTITY_NOT_FOUND):
                    del self._consumers[consumer_id]
            for consumer_id in entity.redefine(command.properties):
                self._consumers.pop(consumer_id, None)
            if entity.topic is not None:
                entity.topic.put_subscription(entity, command.rules)
        self._idle.define(entity)
        self._context.outcome.mutations.append(
            PutDefinition(
                command.entity_no,
                command.name,
                command.kind,
                command.properties,
                command.catalog_version,
                entity.active.numbering.next_sequence,
                command.topic_no,
                command.rules,
                command.is_partitioned,
            )
        )
        return DONE

    def _first_sequence(self, *, is_partitioned: bool) -> int:
        """Return the first number of an entity, which may contain the partition (ADR 15)."""
        return (self.partition_id << NUMBER_BITS) + 1 if is_partitioned else 1

    def _add_entity(
        self, stored: PutEntity | LoadedEntity, next_sequence: int, size_bytes: int
    ) -> QueueState:
        """Create an entity; the topic of a subscription must exist."""
        limits, is_partitioned = self._context.limits, stored.is_partitioned
        share = limits.partition_count if is_partitioned else 1
        share //= limits.size_factor(is_partitioned=is_partitioned)
        entity_no, context = stored.entity_no, self._context
        entity: QueueState
        if isinstance(stored.properties, TopicProperties):
            entity = TopicState(
                entity_no, stored.name, stored.properties, context, next_sequence, size_bytes,
                share=share,
            )  # fmt: skip
        else:
            topic = None if stored.topic_no is None else self.entities[stored.topic_no]
            assert topic is None or isinstance(topic, TopicState)
            entity = QueueState(
                entity_no, stored.name, stored.properties, context, next_sequence, size_bytes,
                topic=topic, share=share,
            )  # fmt: skip
            if topic is not None:
                topic.put_subscription(entity, stored.rules)
        self.entities[entity_no] = entity
        return entity

    def _drop_entity(self, command: DropEntity) -> Reply:
        self.catalog_version = max(self.catalog_version, command.catalog_version)
        entity = self.entities.pop(command.entity_no, None)
        if entity is None:
            return DONE
        if isinstance(entity, TopicState):
            for subscription_no in list(entity.subscriptions):
                self._drop_entity(DropEntity(subscription_no, command.catalog_version))
        if entity.topic is not None:
            entity.topic.remove_subscription(command.entity_no)
        if entity.seen is not None:
            entity.seen.clear()
        for consumer_id in entity.end_consumers(Refusal.ENTITY_NOT_FOUND):
            del self._consumers[consumer_id]
        self._inbox.drop(command.entity_no)
        self._idle.forget(command.entity_no)
        self._context.forget_traffic(command.entity_no)
        keys = self._outbox.drop(command.entity_no)
        keys.extend(entity.scheduled.row_keys())
        entity.scheduled.clear()
        for sub in entity.sub_queues():
            keys.extend(sub.row_keys())
            sub.clear()
        self._context.outcome.mutations.append(
            DropDefinition(command.entity_no, command.catalog_version)
        )
        self._start_purge(keys)
        return DONE

    def _start_purge(self, row_keys: array[int]) -> None:
        """Delete the rows of a dropped entity in chunks, one a Tick."""
        if row_keys:
            self._purged.append(row_keys)
            if len(self._purged) == 1:
                self._context.set_timer(self._context.now_ms, self._purge)

    def _purge(self) -> None:
        context = self._context
        row_keys = self._purged[0]
        chunk = row_keys[-context.allowance :] if context.allowance else array("q")
        del row_keys[len(row_keys) - len(chunk) :]
        context.allowance -= len(chunk)
        if chunk:
            context.outcome.deletes.extend(chunk)
            context.outcome.touches_uncommitted = True
        if not row_keys:
            self._purged.popleft()
        if self._purged:
            context.set_timer(context.now_ms + PURGE_PAUSE_MS, self._purge)

    # --- stop and start ---------------------------------------------------------------------------

    def _quiesce(self) -> None:
        """Record sizes, last uses and attempts that are not in the tables (ADR 19, ADR 37)."""
        mutations = self._context.outcome.mutations
        row_keys: list[int] = []
        attempts: list[int] = []
        for sub in self._context.sub_queues:
            for message, attempt in sub.unrecorded():
                message.recorded = attempt
                row_keys.append(message.row_key)
                attempts.append(attempt)
        if row_keys:
            mutations.append(RecordAcquired(row_keys, attempts))
        for entity in self.entities.values():
            mutations.append(entity.recorded_size())
            if entity.accessed_ms and entity.entity_no not in self._idle.trackers:
                mutations.append(RecordUse(entity.entity_no, entity.accessed_ms))

    def _load_seen(self, loaded: LoadedPartition) -> None:
        """Load the ids for duplicate detection into their entities, in order of time."""
        rows: dict[int, list[RecordIds]] = {}
        for row in loaded.seen:
            rows.setdefault(row.entity_no, []).append(row)
        for entity_no, seen in rows.items():
            entity = self.entities.get(entity_no)
            if entity is not None and entity.seen is not None:
                entity.seen.load(seen)

    def _load(self, loaded: LoadedPartition) -> None:
        for stored in sorted(loaded.entities, key=lambda stored: stored.topic_no is not None):
            first = self._first_sequence(is_partitioned=stored.is_partitioned)
            next_sequence = max(loaded.next_sequence.get(stored.entity_no, first), first)
            made = self._add_entity(stored, next_sequence, stored.size_bytes)
            self._idle.load(stored)
            if stored.entity_no not in self._idle.trackers:  # theirs is later than the use
                made.accessed_ms = stored.last_used_ms
        self._load_seen(loaded)
        blocks = sorted(loaded.blocks)
        for block in blocks:
            entity = self.entities.get(block.entity_no)
            if entity is not None and block.sub_queue is SubQueue.ACTIVE:
                entity.active.numbering.add_loaded(block)
        for (entity_no, kind), keys in loaded.keys.items():
            entity = self.entities.get(entity_no)
            if entity_no == OUTBOX_NO:
                continue
            if entity is None:
                self._start_purge(array("q", keys))
            elif kind not in (SubQueue.ACTIVE, SubQueue.SCHEDULED) and keys:
                entity.sub_queue(kind).load(loaded)
        self._start_purge(self._outbox.load(loaded.outbox))
        self._inbox.load(loaded)
        for put in loaded.cursors:
            if put.entity_no in self.entities:
                self.entities[put.entity_no].load_group(put)
        due_rows: dict[int, list[PutDue]] = {}
        for due in loaded.due:
            due_rows.setdefault(due.entity_no, []).append(due)
        for entity_no, rows in due_rows.items():
            if entity_no in self.entities:
                self.entities[entity_no].scheduled.load(rows)
        for entity in self.entities.values():
            entity.active.load(loaded)
        first_keys = [block.first_key for block in blocks]
        for row_key, attempt in loaded.attempts.items():
            block = blocks[bisect_right(first_keys, row_key) - 1]
            entity = self.entities.get(block.entity_no)
            if entity is not None:
                entity.sub_queue(block.sub_queue).attempts[row_key] = attempt


def _not_found() -> Refused:
    return Refused(Refusal.ENTITY_NOT_FOUND)
