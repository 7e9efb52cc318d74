"""One queue of a partition: its definition, refusals and sub-queues."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import (
    EntityProperties,
    EntityStatus,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import Enqueue, Enqueued, Refusal, Refused, StoredRow, SubQueue
from postbus.entity.entity_state import EntityState
from postbus.entity.group_commands import GroupKind
from postbus.entity.groups import ReaderGroups
from postbus.entity.outcomes import Needs, PutCursor
from postbus.entity.queues import runs
from postbus.entity.queues.dedup import SeenIds
from postbus.entity.queues.plain_messages import PlainMessages
from postbus.entity.queues.scheduled import ScheduledMessages
from postbus.entity.sessions.session_queue import SessionQueue
from postbus.message.envelope import Envelope
from postbus.message.patch import TWO_KEYS, check_properties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.entity.group_commands import Cursor
    from postbus.entity.partition_context import PartitionContext
    from postbus.entity.queues.active_messages import ActiveMessages
    from postbus.entity.topics.topic_state import TopicState

SESSION_ID_MISSING: Final = Refused(
    Refusal.SESSION_REQUIRED, "A message sent to it needs a session id."
)
NOT_SENT_TO: Final = Refused(
    Refusal.NOT_ALLOWED, "messages of a subscription are sent to its topic"
)
DRAIN_PAUSE_MS: Final = 10
"""Pause between two chunks of drained messages, since the journal has other work. Our choice."""
QUOTA_EXCEEDED: Final = Refused(Refusal.QUOTA_EXCEEDED, "the entity has reached its maximum size")


def properties_refusal(envelope: Envelope) -> Refused | None:
    """Return a refusal if the properties of a message are invalid, else None."""
    complaint = check_properties(envelope)
    if complaint is None:
        return None
    if complaint is TWO_KEYS:  # shown by SDKs as an invalid operation (S172, S230)
        return Refused(Refusal.NOT_ALLOWED, complaint)
    return Refused(Refusal.PROPERTIES_TOO_LARGE, complaint)


class QueueState(EntityState):
    """A queue, or a subscription of `topic`.

    `seen` is set if duplicates are detected. `share` divides the size limit of a partitioned
    entity.
    """

    __slots__ = (
        "_groups",
        "_removal_ms",
        "_subs",
        "context",
        "max_message_bytes",
        "max_size_bytes",
        "properties",
        "scheduled",
        "seen",
        "share",
        "topic",
    )

    max_message_bytes: int
    max_size_bytes: int

    def __init__(
        self,
        entity_no: int,
        name: str,
        properties: EntityProperties,
        context: PartitionContext,
        next_sequence: int,
        size_bytes: int = 0,
        *,
        topic: TopicState | None = None,
        share: int = 1,
    ) -> None:
        super().__init__(entity_no, name, context.traffic_of(entity_no), context.outbox, size_bytes)
        self.context = context
        self.topic = topic
        self.share = share
        self.seen: SeenIds | None = None
        self._groups: ReaderGroups | None = None
        self._removal_ms: int | None = None
        self._define(properties)
        self.active: ActiveMessages
        if not isinstance(properties, TopicProperties) and properties.requires_session:
            self.active = SessionQueue(self, context, next_sequence)
        else:
            self.active = PlainMessages(self, SubQueue.ACTIVE, context, next_sequence)
        self._subs: dict[SubQueue, ActiveMessages] = {SubQueue.ACTIVE: self.active}
        self.scheduled = ScheduledMessages(self, self.active, context)
        if self.forward_to is not None:
            self.active.forward(self.forward_to)

    def _define(self, properties: EntityProperties) -> None:
        assert not isinstance(properties, TopicProperties)
        self._define_sending(properties)
        self.lock_duration_ms = properties.lock_duration_ms
        self.max_delivery_count = properties.max_delivery_count
        self.dead_letters_expired = properties.dead_lettering_on_message_expiration
        self.follow_groups()

    def _define_sending(self, properties: EntityProperties) -> None:
        """Set the properties common to queues and topics; a subscription has its topic's limits."""
        limits = self.context.limits
        self.properties = properties
        ttl_ms = min(properties.default_message_ttl_ms, limits.max_default_ttl_ms)
        if self.topic is not None:
            ttl_ms = min(ttl_ms, self.topic.default_ttl_ms or MAX_DURATION_MS)
        self.default_ttl_ms = None if ttl_ms >= MAX_DURATION_MS else ttl_ms
        if self.topic is not None:
            self.max_size_bytes = self.topic.max_size_bytes
            self.max_message_bytes = self.topic.max_message_bytes
        if isinstance(properties, SubscriptionProperties):
            return
        self.max_size_bytes = properties.max_size_in_megabytes * 1024 * 1024 // self.share
        self.max_message_bytes = min(
            properties.max_message_size_in_kilobytes * 1024, limits.max_message_bytes
        )
        if not properties.requires_duplicate_detection:
            if self.seen is not None:
                self.seen.clear()
            self.seen = None
        elif self.seen is None:
            window_ms = properties.duplicate_detection_history_time_window_ms
            self.seen = SeenIds(self.entity_no, self.context, window_ms)
        else:
            self.seen.window_ms = properties.duplicate_detection_history_time_window_ms

    @property
    def groups(self) -> ReaderGroups:
        """The reader groups, made at first use: most entities have none."""
        if self._groups is None:
            self._groups = ReaderGroups(self.entity_no, self.context)
        return self._groups

    def listed_groups(self) -> list[tuple[SubQueue, str, Cursor]]:
        """Return (sub-queue, name, cursor) of each reader group, in order."""
        return [] if self._groups is None else self._groups.all()

    def next_position(self, kind: SubQueue) -> int:
        """Return a position above all messages of a sub-queue, and not above any later one."""
        return self.sub_queue(kind).numbering.next_position(self.context)

    def load_group(self, put: PutCursor) -> None:
        """Take over a stored cursor."""
        self.groups.load(put)
        self.follow_groups()
        if put.cursor.kind is GroupKind.DRAIN:
            if put.sub_queue in self._subs:
                self._subs[put.sub_queue].forward(None)
            self.context.set_timer(self.context.now_ms, self.remove_drained)

    def follow_groups(self) -> None:
        """Decide whether settled messages stay and where messages are forwarded to, after a change
        of definition or groups.

        What a group drains is not forwarded.
        """
        properties, groups = self.properties, self._groups
        assert not isinstance(properties, TopicProperties)
        has_history = getattr(properties, "history_retention_ms", None) is not None
        self.is_tapped = groups is not None and groups.has_tap
        self.keeps_settled = has_history or self.is_tapped
        is_open = properties.status in (EntityStatus.ACTIVE, EntityStatus.SEND_DISABLED)
        self.forward_to = self.forward_dead_letters_to = None
        if is_open and (groups is None or groups.drain_of(SubQueue.ACTIVE) is None):
            self.forward_to = properties.forward_to
        if is_open and (groups is None or groups.drain_of(SubQueue.DEAD_LETTER) is None):
            self.forward_dead_letters_to = properties.forward_dead_lettered_messages_to

    def start_drain(self, kind: SubQueue) -> None:
        """End the receivers of a sub-queue that a group drains from now on."""
        self.follow_groups()
        for consumer_id in self.sub_queue(kind).end_consumers(Refusal.NOT_ALLOWED):
            self.context.consumers.pop(consumer_id, None)

    def end_drain(self, kind: SubQueue) -> None:
        """Let receivers and forwarding go on."""
        self.follow_groups()
        self.sub_queue(kind).forward(self.target_of(kind))

    def frozen_below(self, kind: SubQueue) -> int:
        """Return the position below which a drain has planned to read: nothing else leaves."""
        return 0 if self._groups is None else self._groups.frozen_below(kind)

    def remove_drained(self) -> None:
        """Remove what drains have settled, up to the limit of one command; a Tick goes on."""
        context, groups = self.context, self.groups
        if self._removal_ms is not None and self._removal_ms > context.now_ms:
            return  # that Tick does it
        self._removal_ms = None
        for kind, settled in groups.undrained():
            sub = self.sub_queue(kind)
            count = -1
            while count and context.allowance > 0:
                count = sub.remove_below(settled, context.allowance)
                context.allowance -= count
                if kind is SubQueue.ACTIVE:
                    self.traffic.completed += count
            if count:
                self._removal_ms = context.now_ms + DRAIN_PAUSE_MS
            else:
                groups.note_drained(kind)
        if self._removal_ms is not None:
            context.set_timer(self._removal_ms, self.remove_drained)

    def follow_limits(self) -> None:
        """Derive again what the limits of the namespace bound."""
        self._define_sending(self.properties)

    def redefine(self, properties: EntityProperties) -> list[int]:
        """Replace the definition; messages and locks stay. Return the receivers that it ended."""
        assert not isinstance(properties, TopicProperties)
        if properties.lock_duration_ms < self.lock_duration_ms:
            longest_ms = self.context.now_ms + self.lock_duration_ms
            for sub in self._subs.values():
                sub.unsorted_until_ms = max(sub.unsorted_until_ms, longest_ms)
        self._define(properties)
        ended: list[int] = []
        for sub in self.sub_queues():  # a session may return the first dead letter
            refusal = self.receive_refusal(sub.kind)
            if refusal is not None:
                ended += sub.end_consumers(refusal.refusal)
            sub.forward(self.target_of(sub.kind))
        return ended

    # --- sub-queues -------------------------------------------------------------------------------

    def sub_queue(self, kind: SubQueue) -> ActiveMessages:
        """Return a sub-queue, made at first use: most entities never need the others."""
        sub = self._subs.get(kind)
        if sub is None:
            assert kind in (SubQueue.DEAD_LETTER, SubQueue.TRANSFER_DEAD_LETTER)
            sub = self._subs[kind] = PlainMessages(self, kind, self.context)
            if self.forward_dead_letters_to is not None:
                sub.forward(self.target_of(kind))
        return sub

    def sub_queues(self) -> list[ActiveMessages]:
        return list(self._subs.values())

    def live_count(self, kind: SubQueue) -> int:
        sub = self._subs.get(kind)
        return 0 if sub is None else sub.live

    @property
    def message_count(self) -> int:
        """Live messages of all sub-queues."""
        return sum(sub.live for sub in self._subs.values()) + len(self.scheduled) + self.outbound

    def end_consumers(self, refusal: Refusal) -> list[int]:
        """Remove all receivers; return their ids."""
        return [
            consumer_id for sub in self.sub_queues() for consumer_id in sub.end_consumers(refusal)
        ]

    def target_of(self, kind: SubQueue) -> str | None:
        """Return the forwarding target of a sub-queue; the transfer dead-letter queue has none."""
        if kind is SubQueue.ACTIVE:
            return self.forward_to
        return self.forward_dead_letters_to if kind is SubQueue.DEAD_LETTER else None

    # --- refusals ---------------------------------------------------------------------------------

    def receive_refusal(self, kind: SubQueue = SubQueue.ACTIVE) -> Refused | None:
        """Return a refusal if a sub-queue must not be received from, else None."""
        refused = self.status_refusal()
        if refused is not None:
            return refused
        target = self.target_of(kind)
        if target is not None:
            return Refused(Refusal.NOT_ALLOWED, f"the messages are forwarded to {target}")
        name = None if self._groups is None else self._groups.drain_of(kind)
        if name is not None:
            return Refused(Refusal.NOT_ALLOWED, f"the reader group {name} drains the messages")
        return None

    def status_refusal(self) -> Refused | None:
        """Return a refusal if the entity is disabled for receivers, else None."""
        status = self.properties.status
        if status is EntityStatus.DISABLED:
            return Refused(Refusal.ENTITY_DISABLED, self.name)
        if status is EntityStatus.RECEIVE_DISABLED:
            return Refused(Refusal.RECEIVE_DISABLED, self.name)
        return None

    def send_refusal(self, *, is_resent: bool = False) -> Refused | None:
        """Return a refusal if the entity must not be sent to, else None."""
        status = self.properties.status
        if status is EntityStatus.DISABLED:
            return Refused(Refusal.ENTITY_DISABLED, self.name)
        if status is EntityStatus.SEND_DISABLED:
            return Refused(Refusal.SEND_DISABLED, self.name)
        return None if self.topic is None or is_resent else NOT_SENT_TO

    def first_refusal(
        self, messages: list[Envelope], waiting_bytes: int
    ) -> tuple[int | None, Refused | None]:
        """Return the first message that a send would refuse, and why; change nothing.

        `waiting_bytes` count as if they were stored. Duplicates are not looked for.
        """
        refused = self.send_refusal()
        if refused is not None:
            return 0, refused
        for index, envelope in enumerate(messages):
            refused = self._message_refusal(envelope, waiting_bytes)
            if refused is not None:
                return index, refused
            waiting_bytes += envelope.size_bytes
        return None, None

    def _size_refusal(self, envelope: Envelope) -> Refused | None:
        size_bytes = envelope.size_bytes
        if size_bytes <= self.max_message_bytes:
            return None
        return Refused(
            Refusal.MESSAGE_TOO_LARGE,
            f"the message has {size_bytes} bytes, {self.max_message_bytes} are allowed",
        )

    def _message_refusal(self, envelope: Envelope, pending_bytes: int) -> Refused | None:
        refused = self._size_refusal(envelope)
        if refused is not None:
            return refused
        refused = properties_refusal(envelope)
        if refused is not None:
            return refused
        if envelope.session_id is None and self.active.requires_session:
            return SESSION_ID_MISSING
        return None if self.has_room(pending_bytes + envelope.size_bytes) else QUOTA_EXCEEDED

    def has_room(self, wanted_bytes: int) -> bool:
        """Return whether the size limit allows this; that of a subscription is its topic's."""
        if self.context.is_checked:
            return True
        if self.topic is not None:
            return self.topic.has_room(wanted_bytes)
        return self.size_bytes + self.state_bytes + wanted_bytes <= self.max_size_bytes

    def keep_state(self, grown_bytes: int) -> bool:
        """Account for session states that grow or shrink; False if there is no room."""
        if not self.message_count:
            self.size_bytes = 0
        if grown_bytes > 0:
            if not self.has_room(grown_bytes):
                return False
            if self.topic is not None:
                self.topic.take_room(grown_bytes)
        self.state_bytes += grown_bytes
        return True

    # --- sending ----------------------------------------------------------------------------------

    def check(
        self, command: Enqueue, pending_bytes: int, found: Sequence[StoredRow] | None
    ) -> Refused | Needs | None:
        """Return a refusal if not all can be stored after `pending_bytes` more; change nothing."""
        if self.seen is not None and not command.is_resent:
            screened = self.seen.screen(command.messages, found)
            if isinstance(screened, Needs):
                return screened
        if not self.message_count:
            self.size_bytes = 0
        refused = self.send_refusal(is_resent=command.is_resent)
        for envelope in command.messages:
            refused = refused or self._message_refusal(envelope, pending_bytes)
            pending_bytes += envelope.size_bytes
        return refused

    def enqueue(
        self, command: Enqueue, found: Sequence[StoredRow] | None = None
    ) -> Enqueued | Refused | Needs:
        """Check, then store. The usual burst (nothing refused, nothing scheduled) is stored
        together.
        """
        refused = self.send_refusal(is_resent=command.is_resent)
        if refused is not None:
            return refused
        messages = command.messages
        if self.default_ttl_ms is not None:
            self._lower_ttls(messages, self.default_ttl_ms)
        digests: list[bytes | None] | None = None
        if self.seen is not None and not command.is_resent:
            screened = self.seen.screen(messages, found)
            if isinstance(screened, Needs):
                return screened
            digests = screened.digests
            if not screened.is_new or self.seen.refusal(len(digests)) is not None:
                return self._enqueue_each(command, digests, found)
        max_bytes = self.max_message_bytes
        check = check_properties
        done, total_bytes = runs.check_usual(messages, max_bytes)
        for envelope in islice(messages, done, None):
            size_bytes = envelope.size_bytes
            if size_bytes > max_bytes or envelope.scheduled_ms is not None or check(envelope):
                return self._enqueue_each(command, digests, found)
            total_bytes += size_bytes
        if self.size_bytes + self.state_bytes + total_bytes > self.max_size_bytes:
            return self._enqueue_each(command, digests, found)
        if self.active.requires_session and None in [m.session_id for m in messages]:
            return self._enqueue_each(command, digests, found)
        if not messages:
            return Enqueued([])
        if self.seen is not None and digests is not None:
            self.seen.record([digest for digest in digests if digest is not None])
        return Enqueued(self.take(messages, total_bytes))

    def reserve(self, count: int) -> Enqueued | Refused:
        """Reserve numbers for messages that are scheduled later."""
        refused = self.send_refusal()
        numbering, context = self.active.numbering, self.context
        return refused or Enqueued([numbering.take_one(context)[1] for _ in range(count)])

    def take(
        self,
        envelopes: list[Envelope],
        total_bytes: int,
        *,
        is_shared: bool = False,
        enqueued_ms: int | None = None,
    ) -> list[int]:
        """Store messages that passed all checks, or forward them; return their numbers."""
        self.traffic.accepted += len(envelopes)
        if self.forward_to is not None and not self.active.has_backlog():
            return self.outbox.send(self, envelopes, self.forward_to)
        return self.active.append(
            envelopes, total_bytes, is_shared=is_shared, enqueued_ms=enqueued_ms
        )

    @staticmethod
    def _lower_ttls(messages: list[Envelope], most_ms: int) -> None:
        """Lower times to live that are longer than the present default.

        Stored ones do not change with the default (S95, S106).
        """
        for envelope in messages:
            if envelope.ttl_ms is not None and envelope.ttl_ms > most_ms:
                envelope.ttl_ms = most_ms

    def _enqueue_each(
        self,
        command: Enqueue,
        digests: list[bytes | None] | None,
        found: Sequence[StoredRow] | None,
    ) -> Enqueued | Refused:
        """Check all, then store those that pass; with `is_atomic` one refusal refuses all (ADR 21).

        Duplicates count as accepted; a scheduled one gets an unused number (ADR 26).
        """
        messages = command.messages
        if not self.message_count:
            self.size_bytes = 0  # whatever remained was the error of an estimate
        refusals: dict[int, Refused] = {}
        duplicates: set[int] = set()
        accepted: dict[bytes | None, None] = {}
        seen = self.seen
        pending_bytes = 0
        for index, envelope in enumerate(messages):
            digest = None if digests is None else digests[index]
            is_known = seen is not None and digest is not None and seen.is_seen(digest, found)
            if is_known or digest in accepted:
                duplicates.add(index)
                continue
            refused = self._message_refusal(envelope, pending_bytes)
            is_counted = digest is not None and not self.context.is_checked
            if refused is None and seen is not None and is_counted:
                refused = seen.refusal(len(accepted) + 1)
            if refused is None:
                pending_bytes += envelope.size_bytes
                if digest is not None:
                    accepted[digest] = None
            elif command.is_atomic:
                return refused
            else:
                refusals[index] = refused
        if seen is not None:
            seen.record([digest for digest in accepted if digest is not None])
        reserved = command.numbers
        numbers = reserved or [0] * len(messages)
        now_ms = self.context.now_ms
        for index, envelope in enumerate(messages):
            is_due = envelope.scheduled_ms is None or envelope.scheduled_ms <= now_ms
            if index in refusals:
                continue
            if index in duplicates:
                if not is_due and reserved is None:
                    numbers[index] = self.active.numbering.take_one(self.context)[1]
            elif reserved is not None:
                self.scheduled.add(envelope, reserved[index])
            elif is_due:
                (numbers[index],) = self.take([envelope], envelope.size_bytes)
            else:
                numbers[index] = self.scheduled.add(envelope)
        return Enqueued(numbers, refusals or None)
