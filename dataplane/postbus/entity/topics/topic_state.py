"""A topic of a partition: its refusals, and the copies of messages in its subscriptions.

A topic keeps scheduled messages, and in its transfer dead-letter queue those it could not send on
in a transaction; its ACTIVE is empty and only supplies numbers. All copies of a publish are one
commit. A copy that a subscription cannot take (its filter failed, or it has no session id where one
is needed) is inserted into the subscription's dead-letter queue. A disabled subscription gets no
copies; one that is only not received from collects them. Our choice. A subscription asks its topic
for the limits they have in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from postbus.contract.entities import (
    EntityProperties,
    EntityStatus,
    RuleProperties,
    TopicProperties,
)
from postbus.entity.commands import Death, Enqueue, Enqueued, Refusal, Refused, StoredRow, SubQueue
from postbus.entity.outcomes import InsertMessage, Needs, PutKept, ShareBody
from postbus.entity.queues.dead_letter_reasons import DESCRIPTION, REASON, merged
from postbus.entity.queues.queue_state import QUOTA_EXCEEDED, QueueState, properties_refusal
from postbus.entity.queues.scheduled import ScheduledMessages
from postbus.entity.topics.routing import Copies, Routing
from postbus.message.envelope import Envelope, SharedBody
from postbus.message.patch import check_properties

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from postbus.entity.partition_context import PartitionContext

BURST_FACTOR: Final = 4
"""Factor by which a burst of single messages may have more copies than one publish, in the same
bytes; further messages are refused temporarily. They are one commit, but acknowledged one by one.
Source: measured, docs/benchmarks.md: a commit of either takes about a second."""

SHARE_ALWAYS_BYTES: Final = 8_192
SHARE_LEAST_BYTES: Final = 256
"""Size above which a body is stored once: for more than two copies, and for two (ADR 7). Smaller
ones are repeated, which costs less. Our choice."""

COUNT_ONCE_BYTES: Final = 1_024
"""Size below which a body counts in the window for each copy: sharing costs more."""

LATER: Final = Refused(Refusal.BUSY, "the messages sent before it make enough copies for now")
TRANSFER_LOCK_MS: Final = 60_000
"""Locks in the transfer dead-letter queue of a topic, which has no setting for it: the default of
queues. Our choice."""

NOT_RECEIVED_FROM: Final = Refused(
    Refusal.NOT_ALLOWED, "messages of a topic are received from its subscriptions"
)

NO_SESSION: Final[dict[str, object]] = {
    REASON: "Session id is null.",
    DESCRIPTION: (
        "Session enabled entity doesn't allow a message whose session identifier is null."
    ),
}
"""Source: the table of system reasons in Azure's page on dead-letter queues (S262)."""


class _Load(NamedTuple):
    """Size of a publish: copies, their bytes, and their bytes with shared bodies counted once."""

    copies: int
    size_bytes: int
    row_bytes: int


class TopicState(QueueState):
    """See the module's docstring. `size_bytes` is that of the scheduled messages.

    `checked_copies`: number of copies in the last `check`.
    """

    __slots__ = (
        "_room_bytes",
        "_room_checks",
        "_routing",
        "checked_copies",
        "publish_limits",
        "subscriptions",
    )

    def __init__(
        self,
        entity_no: int,
        name: str,
        properties: TopicProperties,
        context: PartitionContext,
        next_sequence: int,
        size_bytes: int = 0,
        *,
        share: int = 1,
    ) -> None:
        self.subscriptions: dict[int, QueueState] = {}
        self._routing = Routing(context.random, context.steps)
        self.publish_limits = context.publish_limits
        self._room_bytes = 0
        self._room_checks = 0
        self.checked_copies = 0
        super().__init__(
            entity_no, name, properties, context, next_sequence, size_bytes, share=share
        )
        self.scheduled = ScheduledMessages(self, self.active, context, self._publish_due)

    def _define(self, properties: EntityProperties) -> None:
        assert isinstance(properties, TopicProperties)
        self._define_sending(properties)
        self.lock_duration_ms = TRANSFER_LOCK_MS
        self.max_delivery_count = 1
        self.dead_letters_expired = self.keeps_settled = self.is_tapped = False
        self.forward_to = self.forward_dead_letters_to = None
        self._room_bytes = 0

    def redefine(self, properties: EntityProperties) -> list[int]:
        """Replace the definition; the default time to live of subscriptions may change with it."""
        self._define(properties)
        refused = self.receive_refusal(SubQueue.TRANSFER_DEAD_LETTER)
        ended = [] if refused is None else self.end_consumers(refused.refusal)
        for subscription in self.subscriptions.values():
            ended += subscription.redefine(subscription.properties)
        return ended

    def put_subscription(self, subscription: QueueState, rules: Sequence[RuleProperties]) -> None:
        """Add a subscription or replace its rules; both may follow a change of its status."""
        is_open = subscription.properties.status in (
            EntityStatus.ACTIVE,
            EntityStatus.RECEIVE_DISABLED,
        )
        self.subscriptions[subscription.entity_no] = subscription
        self._routing.put(subscription.entity_no, rules if is_open else ())

    def remove_subscription(self, subscription_no: int) -> None:
        del self.subscriptions[subscription_no]
        self._routing.remove(subscription_no)

    @property
    def total_bytes(self) -> int:
        """Total size of the messages of the topic and its subscriptions."""
        return super().total_bytes + sum(
            subscription.total_bytes for subscription in self.subscriptions.values()
        )

    def receive_refusal(self, kind: SubQueue = SubQueue.ACTIVE) -> Refused | None:
        """Return why nothing may be received, or None: a topic itself has only messages that
        transactions sent via it and that could not be delivered (S292).
        """
        if kind is SubQueue.TRANSFER_DEAD_LETTER:
            return super().receive_refusal(kind)
        return NOT_RECEIVED_FROM

    # --- checks -----------------------------------------------------------------------------------

    def _complaint(self, envelope: Envelope) -> Refused | None:
        """Return a refusal if the message itself is invalid, else None."""
        return self._size_refusal(envelope) or properties_refusal(envelope)

    def has_room(self, wanted_bytes: int) -> bool:
        """Return whether the size limit allows this; sizes are summed periodically only."""
        if self.context.is_checked:
            return True
        if wanted_bytes > self._room_bytes or self._room_checks <= 0:
            self._room_bytes = self.max_size_bytes - self.total_bytes
            self._room_checks = len(self.subscriptions) + 100
        self._room_checks -= 1
        return wanted_bytes <= self._room_bytes

    def take_room(self, taken_bytes: int) -> None:
        """Account for data of a subscription beside its messages."""
        self._room_bytes -= taken_bytes

    def check(
        self, command: Enqueue, pending_bytes: int, found: Sequence[StoredRow] | None
    ) -> Refused | Needs | None:
        """Return a refusal if not all can be published after `pending_bytes` more."""
        refused = self.send_refusal()
        if refused is not None:
            return refused
        judged = self._judge(command, found, is_atomic=True, pending_bytes=pending_bytes)
        if isinstance(judged, Refused | Needs):
            return judged
        routes = [*judged.routes, *judged.by_index.values()]
        self.checked_copies = sum(len(made.envelopes) for route in routes for made in route)
        return None

    # --- sending ----------------------------------------------------------------------------------

    def enqueue(
        self, command: Enqueue, found: Sequence[StoredRow] | None = None
    ) -> Enqueued | Refused | Needs:
        """Check and route all of it, then store the copies."""
        refused = self.send_refusal()
        if refused is not None:
            return refused
        messages = command.messages
        if not messages:
            return Enqueued([])
        if self.default_ttl_ms is not None:
            self._lower_ttls(messages, self.default_ttl_ms)
        judged = self._judge(command, found, is_atomic=command.is_atomic)
        if isinstance(judged, Refused | Needs):
            return judged
        if self.seen is not None:
            self.seen.record(judged.digests)
        self._room_bytes -= judged.size_bytes
        now_ms = self.context.now_ms
        if judged.is_plain:
            self.traffic.accepted += len(messages)
            numbers = self._take_numbers(len(messages))
            self._publish(messages, judged.routes, numbers, now_ms)
            return Enqueued(numbers)
        reserved = command.numbers
        numbers = reserved or [0] * len(messages)
        for index, envelope in enumerate(messages):
            if index in judged.scheduled:
                given = None if reserved is None else reserved[index]
                numbers[index] = self.scheduled.add(envelope, given)
            elif reserved is not None:
                continue
            elif index in judged.by_index or (
                index not in judged.refusals and _is_later(envelope, now_ms)
            ):  # a duplicate that is scheduled gets a number, which names nothing
                (numbers[index],) = self._take_numbers(1)
        published = [messages[index] for index in judged.by_index]
        origins = [numbers[index] for index in judged.by_index]
        self.traffic.accepted += len(published)
        self._publish(published, list(judged.by_index.values()), origins, now_ms)
        return Enqueued(numbers, judged.refusals or None)

    def _judge(
        self,
        command: Enqueue,
        found: Sequence[StoredRow] | None,
        *,
        is_atomic: bool,
        pending_bytes: int = 0,
    ) -> _Judged | Refused | Needs:
        """Decide about each message and route the accepted ones, without changing anything."""
        messages = command.messages
        digests: list[bytes | None] | None = None
        is_new = True
        if self.seen is not None and not command.is_resent:
            screened = self.seen.screen(messages, found)
            if isinstance(screened, Needs):
                return screened
            digests, is_new = screened
            is_new = is_new and self.seen.refusal(len(digests)) is None
        if is_new:
            steps_left = self.context.steps.left
            judged = self._judge_together(messages, digests, pending_bytes)
            if judged is not None:
                return judged
            self.context.steps.left = steps_left
        return self._judge_each(command, digests, found, is_atomic, pending_bytes)

    def _judge_together(
        self, messages: list[Envelope], digests: list[bytes | None] | None, pending_bytes: int
    ) -> _Judged | None:
        """Route a burst without refused, scheduled or duplicate messages; else return None."""
        max_bytes = self.max_message_bytes
        now_ms = self.context.now_ms
        route, check = self._routing.route, check_properties
        routes: list[list[Copies]] = []
        copies = total_bytes = 0
        for envelope in messages:
            size_bytes = envelope.size_bytes
            if size_bytes > max_bytes or envelope.scheduled_ms is not None or check(envelope):
                return None
            routed = route(envelope, now_ms)
            if len(routed) == 1 and len(routed[0].envelopes) == 1:
                copies += 1
                total_bytes += routed[0].envelopes[0].size_bytes
            else:
                load = _load_of(envelope, routed)
                copies += load.copies
                total_bytes += load.size_bytes
            routes.append(routed)
        limits = self.publish_limits
        if copies > limits.max_copies or total_bytes > limits.max_row_bytes:
            return None
        if not self.has_room(pending_bytes + total_bytes):
            return None
        named = [digest for digest in digests if digest is not None] if digests else []
        return _Judged(routes, named, total_bytes)

    def _judge_each(
        self,
        command: Enqueue,
        digests: list[bytes | None] | None,
        found: Sequence[StoredRow] | None,
        is_atomic: bool,
        pending_bytes: int,
    ) -> _Judged | Refused:
        now_ms = self.context.now_ms
        judged = _Judged([], [], 0, is_plain=False)
        accepted: dict[bytes | None, None] = {}
        factor = 1 if is_atomic else BURST_FACTOR
        limits = self.publish_limits
        most_copies = factor * limits.max_copies
        is_checked = self.context.is_checked
        copies = row_bytes = 0
        is_over = False
        for index, envelope in enumerate(command.messages):
            digest = None if digests is None else digests[index]
            seen = None if digest is None else self.seen
            if digest in accepted or (
                seen is not None and digest is not None and seen.is_seen(digest, found)
            ):
                continue
            refused = self._complaint(envelope)
            if refused is None and seen is not None and not is_checked:
                refused = seen.refusal(len(accepted) + 1)
            size_bytes = envelope.size_bytes
            route: list[Copies] | None = None
            is_scheduled = command.numbers is not None or _is_later(envelope, now_ms)
            if refused is None and not is_scheduled:
                route = self._routing.route(envelope, now_ms)
                load = _load_of(envelope, route)
                size_bytes = load.size_bytes
                copies += load.copies
                row_bytes += load.row_bytes
                is_over = is_over or copies > most_copies or row_bytes > limits.max_row_bytes
                if is_checked:
                    pass
                elif load.copies > limits.max_copies or load.row_bytes > limits.max_row_bytes:
                    refused = limits.too_large
                elif is_over:
                    refused = limits.too_large if is_atomic else LATER
            if refused is None and not self.has_room(
                pending_bytes + judged.size_bytes + size_bytes
            ):
                refused = QUOTA_EXCEEDED
            if refused is None:
                judged.size_bytes += size_bytes
                if digest is not None:
                    accepted[digest] = None
                if route is None:
                    judged.scheduled.add(index)
                else:
                    judged.by_index[index] = route
            elif is_atomic:
                return refused
            else:
                judged.refusals[index] = refused
        judged.digests = [digest for digest in accepted if digest is not None]
        return judged

    def _take_numbers(self, count: int) -> list[int]:
        runs = self.active.numbering.take(count, self.context)
        return [
            number
            for key, offset, length in runs
            for number in range(key + offset, key + offset + length)
        ]

    # --- copies -----------------------------------------------------------------------------------

    def _publish_due(self, envelope: Envelope, due_ms: int) -> int:
        """Publish a scheduled message that is due; return the number of copies."""
        route = self._routing.route(envelope, self.context.now_ms)
        load = _load_of(envelope, route)
        self._room_bytes -= load.size_bytes
        self._publish([envelope], [route], self._take_numbers(1), due_ms)
        return load.copies

    def _publish(
        self,
        messages: list[Envelope],
        routes: list[list[Copies]],
        numbers: Iterable[int],
        enqueued_ms: int,
    ) -> None:
        """Store the routed copies of messages, each with its number in the topic."""
        inserts = self.context.outcome.inserts
        first_insert = len(inserts)
        bursts: dict[int, list[Envelope]] = {}
        failed: list[tuple[int, Envelope, dict[str, object]]] = []
        is_shared = False
        is_changed = False
        shares_rows = False
        for envelope, route, number in zip(messages, routes, numbers, strict=True):
            if not envelope.hop_count or envelope.origin_sequence is None:
                envelope.origin_sequence = number
            count = 0
            for subscription_no, envelopes, error in route:
                if error is not None:
                    count += 1
                    failed.append((subscription_no, envelope, _reason_of(error)))
                    continue
                count += len(envelopes)
                burst = bursts.get(subscription_no)
                if burst is None:
                    bursts[subscription_no] = list(envelopes)
                else:
                    burst += envelopes
                for copy in envelopes:
                    copy.origin_sequence = envelope.origin_sequence
                    is_changed = is_changed or copy is not envelope
            if count > 1:
                body_bytes = len(envelope.body)
                if body_bytes >= COUNT_ONCE_BYTES:
                    is_shared = True
                    _mark_shared(envelope, route)
                least_bytes = SHARE_ALWAYS_BYTES if count == 2 else SHARE_LEAST_BYTES
                shares_rows = shares_rows or body_bytes > least_bytes
        lowered: dict[tuple[int, int], Envelope] = {}
        for subscription_no, envelopes in bursts.items():
            subscription = self.subscriptions[subscription_no]
            ttl_ms = subscription.default_ttl_ms
            # Publishing lowered them to the topic's default; an action may set any other.
            if ttl_ms is not None and (is_changed or ttl_ms != self.default_ttl_ms):
                envelopes = [_with_ttl(envelope, ttl_ms, lowered) for envelope in envelopes]
            self._hand_over(subscription, envelopes, is_shared, enqueued_ms)
        for subscription_no, envelope, reason in failed:
            subscription = self.subscriptions[subscription_no]
            if getattr(
                subscription.properties, "dead_lettering_on_filter_evaluation_exceptions", False
            ):
                _dead_letter(subscription, envelope, reason, enqueued_ms)
        if shares_rows:
            self._share_bodies(inserts, first_insert)

    def _hand_over(
        self,
        subscription: QueueState,
        envelopes: list[Envelope],
        is_shared: bool,
        enqueued_ms: int,
    ) -> None:
        has_sessions = subscription.active.requires_session
        if has_sessions:
            for envelope in envelopes:
                if envelope.session_id is None:
                    _dead_letter(subscription, envelope, NO_SESSION, enqueued_ms)
            envelopes = [envelope for envelope in envelopes if envelope.session_id is not None]
            if not envelopes:
                return
        if is_shared and (has_sessions or subscription.forward_to is not None):
            envelopes = [
                envelope if envelope.shared is None else _copy(envelope, shared=None)
                for envelope in envelopes
            ]
            is_shared = False
        total_bytes = sum([envelope.size_bytes for envelope in envelopes])
        subscription.take(envelopes, total_bytes, is_shared=is_shared, enqueued_ms=enqueued_ms)

    def _share_bodies(self, inserts: list[InsertMessage], first: int) -> None:
        """Store bodies that several new rows share once (ADR 7)."""
        rows: dict[int, list[int]] = {}
        bodies: dict[int, bytes] = {}
        for row_key, _, envelope in inserts[first:]:
            if len(envelope.body) > SHARE_LEAST_BYTES:
                body_no = id(envelope.body)
                bodies[body_no] = envelope.body
                rows.setdefault(body_no, []).append(row_key)
        for body_no, row_keys in rows.items():
            if len(row_keys) > 2 or (
                len(row_keys) == 2 and len(bodies[body_no]) > SHARE_ALWAYS_BYTES
            ):
                self.context.outcome.mutations.append(ShareBody(row_keys))


class _Judged:
    """Decisions about the messages of one command.

    `is_plain`: all are published, `routes[i]` belongs to message i. Else `by_index` has the routes
    of published messages; a message in none of the fields is a duplicate. `digests` are to be
    recorded.
    """

    __slots__ = (
        "by_index",
        "digests",
        "is_plain",
        "refusals",
        "routes",
        "scheduled",
        "size_bytes",
    )

    def __init__(
        self,
        routes: list[list[Copies]],
        digests: list[bytes],
        size_bytes: int,
        *,
        is_plain: bool = True,
    ) -> None:
        self.routes = routes
        self.digests = digests
        self.size_bytes = size_bytes
        self.is_plain = is_plain
        self.by_index: dict[int, list[Copies]] = {}
        self.scheduled: set[int] = set()
        self.refusals: dict[int, Refused] = {}


def _is_later(envelope: Envelope, now_ms: int) -> bool:
    return envelope.scheduled_ms is not None and envelope.scheduled_ms > now_ms


def _load_of(envelope: Envelope, route: list[Copies]) -> _Load:
    copies = size_bytes = 0
    for _, envelopes, error in route:
        if error is not None:
            copies += 1
            size_bytes += envelope.size_bytes
        for copy in envelopes:
            copies += 1
            size_bytes += copy.size_bytes
    body_bytes = len(envelope.body) if copies > 1 else 0
    return _Load(copies, size_bytes, size_bytes - body_bytes * (copies - 1))


def _mark_shared(envelope: Envelope, route: list[Copies]) -> None:
    envelope.shared = shared = SharedBody(len(envelope.body))
    for _, envelopes, _ in route:
        for copy in envelopes:
            copy.shared = shared


def _reason_of(error: Exception) -> dict[str, object]:
    name = getattr(error, "name", type(error).__name__)
    return {REASON: name, DESCRIPTION: str(error)}


def _with_ttl(
    envelope: Envelope, most_ms: int, lowered: dict[tuple[int, int], Envelope]
) -> Envelope:
    """Return a copy with at most the time to live of its subscription; others share it (S103)."""
    if envelope.ttl_ms is None or envelope.ttl_ms <= most_ms:
        return envelope
    copy = lowered.get((id(envelope), most_ms))
    if copy is None:
        copy = lowered[id(envelope), most_ms] = _copy(envelope, ttl_ms=most_ms)
    return copy


def _copy(envelope: Envelope, **changes: object) -> Envelope:
    fields = {name: getattr(envelope, name) for name in Envelope.__slots__}
    return Envelope(**(fields | changes))


def _dead_letter(
    subscription: QueueState, envelope: Envelope, reason: dict[str, object], enqueued_ms: int
) -> None:
    """Insert a copy into the dead-letter queue of a subscription."""
    context = subscription.context
    target = subscription.sub_queue(SubQueue.DEAD_LETTER)
    section = merged(context, envelope.application_properties, reason)
    grown_bytes = len(section) - len(envelope.application_properties)
    size_bytes = envelope.size_bytes + grown_bytes
    copy = _copy(envelope, application_properties=section, size_bytes=size_bytes, shared=None)
    _, sequence = subscription.active.numbering.take_one(context)
    row_key, _ = target.numbering.take_one(context)
    context.outcome.inserts.append(InsertMessage(row_key, enqueued_ms, copy))
    context.outcome.mutations.append(
        PutKept(
            row_key,
            subscription.entity_no,
            SubQueue.DEAD_LETTER,
            sequence,
            0,
            Death(context.now_ms),
        )
    )
    subscription.traffic.accepted += 1
    subscription.traffic.died(reason[REASON])
    target.append_key(row_key, size_bytes)
