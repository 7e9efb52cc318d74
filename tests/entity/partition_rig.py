"""A partition without a host: it applies, "commits" into tables of dicts, and releases in order.

`Rig` checks after each step what must always hold: every live row is known to memory exactly once,
budget and counts are exact, no message is in two places.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, assert_never, get_args

from postbus.contract.entities import (
    DEFAULT_RULE,
    LIMITS,
    EntityKind,
    NamespaceLimits,
    QueueProperties,
    RuleProperties,
    Sku,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    AcceptSession,
    AddConsumer,
    Command,
    Delivery,
    Disposition,
    Enqueue,
    Enqueued,
    Peek,
    Peeked,
    PeekedMessage,
    PutEntity,
    ReceiveMode,
    Receiver,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    Settle,
    StoredRow,
    SubQueue,
    SupplyRows,
    Tick,
)
from postbus.entity.outcomes import (
    Available,
    Deliver,
    EndConsumer,
    Fetch,
    Found,
    Idle,
    Needs,
    Outcome,
    SessionGranted,
    Ship,
)
from postbus.entity.partition_state import PartitionState, WindowBudget
from postbus.entity.topics.publish_limits import PublishLimits
from postbus.entity.traffic import Traffic
from postbus.message.codec import Described, decode_value
from postbus.message.envelope import Envelope
from tests.entity.partition_checks import check_partition
from tests.entity.tables import Tables

START_MS = 1_700_000_000_000
QUEUE = 7
TOPIC = 20
ACTIVE, DLQ = SubQueue.ACTIVE, SubQueue.DEAD_LETTER
PEEK_LOCK, DELETE = ReceiveMode.PEEK_LOCK, ReceiveMode.RECEIVE_AND_DELETE
REPLY_TO: Final[dict[type[Command], Any]] = {
    kind: get_args(base)[0] for kind in get_args(Command) for base in kind.__orig_bases__
}
"""Command -> the type of its reply, as its base `Expects` says."""


def message(
    name: str = "m",
    *,
    size_bytes: int = 100,
    ttl_ms: int | None = None,
    scheduled_ms: int | None = None,
    application_properties: bytes = b"",
    session: str | None = None,
) -> Envelope:
    """Make an envelope with its name as message-id."""
    return Envelope(
        message_id=name.encode(),
        body=name.encode(),
        size_bytes=size_bytes + len(application_properties),
        ttl_ms=ttl_ms,
        scheduled_ms=scheduled_ms,
        application_properties=application_properties,
        session_id=None if session is None else session.encode(),
    )


def name_of(envelope: Envelope) -> str:
    message_id = envelope.message_id or b""
    return message_id.removeprefix(message_id[:2] if message_id[:1] == b"\xa1" else b"").decode()


def properties_of(envelope: Envelope) -> dict[str, object]:
    """Decode the application properties."""
    if not envelope.application_properties:
        return {}
    section, _ = decode_value(envelope.application_properties)
    assert isinstance(section, Described)
    assert isinstance(section.value, dict)
    return section.value


@dataclass
class Client:
    """Deliveries and events of one consumer."""

    entity_no: int
    sub_queue: SubQueue
    mode: ReceiveMode
    limit: int = 0
    inbox: list[Delivery] = field(default_factory=list)
    ended: Refusal | None = None
    session: str | None = None
    until_ms: int = 0


class Rig:
    """Drives one partition; commits at once unless `commit()` is left to the test."""

    def __init__(
        self,
        properties: QueueProperties | None = None,
        *,
        budget_bytes: int = 1 << 30,
        limits: NamespaceLimits = LIMITS[Sku.STANDARD],
        publish_limits: PublishLimits = PublishLimits(),  # noqa: B008 - frozen
        seed: int = 1,
        is_auto: bool = True,
    ) -> None:
        self.tables = Tables(epoch=0)
        self.now_ms = START_MS
        self.limits = limits
        self.publish_limits = publish_limits
        self.budget = WindowBudget(budget_bytes)
        self.is_auto = is_auto
        self.seed = seed
        self.clients: dict[int, Client] = {}
        self.names: dict[str, int] = {}
        self.last_consumer_id = 0
        self.pending: deque[tuple[Outcome, list[Reply]]] = deque()
        self.log: list[tuple[Command, int, list[StoredRow] | None]] = []
        self.results: list[Outcome | Needs] = []
        self.ships: list[Ship] = []
        self.hints: list[Available] = []
        self.idle: list[int] = []
        self.checks = True
        self.traffic: dict[int, Traffic] = {}
        self.state = self._start()
        self.put(properties or QueueProperties())

    def _start(self) -> PartitionState:
        self.loaded = self.tables.load()
        return PartitionState(
            partition_id=3,
            loaded=self.loaded,
            seed=self.seed,
            budget=self.budget,
            limits=self.limits,
            publish_limits=self.publish_limits,
            traffic=self.traffic,
        )

    # --- the host's part ----------------------------------------------------------------------

    def submit(self, command: Command) -> list[Reply]:
        """Apply; the list gets the reply when it is released."""
        replies: list[Reply] = []
        found: list[StoredRow] | None = None
        while True:
            result = self.state.apply(command, self.now_ms, found)
            self.log.append((command, self.now_ms, found))
            self.results.append(result)
            if isinstance(result, Outcome):
                break
            found = Found(result.row_keys)
            found += self.tables.read(result.row_keys)
            for session in result.states:
                if session in self.tables.states:
                    found.states[session] = self.tables.states[session][0]
            found.seen = self.tables.read_ids(result.ids)
            for numbers in result.numbers:
                found += self.tables.read_numbers(*numbers)
            for named in result.named:
                found += self.tables.read_named(*named)
        assert isinstance(result.reply, Refused | REPLY_TO[type(command)])
        if self.checks:
            check_partition(self.state)
        self._check_overlap(result)
        self.pending.append((result, replies))
        if self.is_auto:
            self.commit()
        return replies

    def _check_overlap(self, outcome: Outcome) -> None:
        """Assert that outcomes on rows of a commit in flight are barriers (ADR 32)."""
        if outcome.deletes and not outcome.touches_uncommitted:
            for earlier, _ in self.pending:
                own = {insert.row_key for insert in earlier.inserts}
                assert own.isdisjoint(outcome.deletes), "touches_uncommitted is not set"

    def apply(self, command: Command) -> Reply:
        """Apply and commit; return the reply."""
        replies = self.submit(command)
        self.commit()
        (reply,) = replies
        return reply

    def commit(self, count: int | None = None) -> None:
        """Commit and release the oldest outcomes, all by default."""
        while self.pending and (count is None or count > 0):
            outcome, replies = self.pending.popleft()
            self.tables.commit(outcome)
            self.state.mark_committed(outcome.applied_ms)
            for effect in outcome.effects:
                if isinstance(effect, Deliver):
                    self._deliver(effect)
                elif isinstance(effect, EndConsumer):
                    self.clients[effect.consumer_id].ended = effect.refusal
                elif isinstance(effect, Ship):
                    self.ships.append(effect)
                elif isinstance(effect, Available):
                    self.hints.append(effect)
                elif isinstance(effect, Idle):
                    self.idle.append(effect.entity_no)
                elif isinstance(effect, SessionGranted):
                    self._grant(effect)
                elif isinstance(effect, Fetch):
                    rows = self.tables.read(effect.row_keys)
                    self.submit(SupplyRows(effect.entity_no, effect.sub_queue, rows))
                else:
                    assert_never(effect)
            replies.append(outcome.reply)
            if count is not None:
                count -= 1

    def _grant(self, effect: SessionGranted) -> None:
        client = self.clients.get(effect.consumer_id)
        if client is None:
            self.submit(RemoveConsumer(effect.consumer_id))
        else:
            client.session = effect.session_id.decode()
            client.until_ms = effect.locked_until_ms

    def _deliver(self, effect: Deliver) -> None:
        client = self.clients.get(effect.consumer_id)
        if client is not None:
            client.inbox += effect.deliveries
            return
        tokens = [delivery.lock_token for delivery in effect.deliveries if delivery.lock_token]
        if tokens:
            self.submit(Settle(effect.entity_no, effect.sub_queue, tokens, Disposition.RELEASE))

    def tick_now(self) -> None:
        """Send Ticks while the state asks for one at this moment."""
        for _ in range(1_000):
            deadline_ms = self.state.next_deadline_ms
            if deadline_ms is None or deadline_ms > self.now_ms:
                return
            self.submit(Tick())
            self.commit()
        raise AssertionError("the state asks for Ticks without end")

    def advance(self, ms: int) -> None:
        """Let time pass; the host's timer fires at each deadline."""
        end_ms = self.now_ms + ms
        while True:
            deadline_ms = self.state.next_deadline_ms
            if deadline_ms is None or deadline_ms > end_ms:
                break
            self.now_ms = max(deadline_ms, self.now_ms)
            self.tick_now()
        self.now_ms = end_ms
        self.tick_now()

    def crash(self) -> None:
        """Drop uncommitted outcomes and all memory, and load again."""
        self.pending.clear()
        self.state.discard()
        assert self.budget.used_bytes == 0
        self.clients.clear()
        self.names.clear()
        self.ships.clear()
        self.state = self._start()
        self.tick_now()

    # --- a client's part ------------------------------------------------------------------------

    def put(self, properties: QueueProperties, entity_no: int = QUEUE) -> None:
        self.apply(PutEntity(entity_no, f"queue-{entity_no}", EntityKind.QUEUE, properties, 1))

    def put_topic(
        self, properties: TopicProperties | None = None, *, is_partitioned: bool = False
    ) -> None:
        self.apply(
            PutEntity(
                TOPIC,
                "topic",
                EntityKind.TOPIC,
                properties or TopicProperties(),
                1,
                is_partitioned=is_partitioned,
            )
        )

    def put_subscription(
        self,
        entity_no: int,
        properties: SubscriptionProperties | None = None,
        rules: tuple[RuleProperties, ...] = (DEFAULT_RULE,),
        *,
        is_partitioned: bool = False,
    ) -> None:
        self.apply(
            PutEntity(
                entity_no,
                f"topic/Subscriptions/s{entity_no}",
                EntityKind.SUBSCRIPTION,
                properties or SubscriptionProperties(),
                1,
                TOPIC,
                rules,
                is_partitioned,
            )
        )

    def send(self, *messages: Envelope | str, entity_no: int = QUEUE) -> list[int]:
        """Send and expect success; return the sequence numbers."""
        envelopes = [message(m) if isinstance(m, str) else m for m in messages]
        reply = self.apply(Enqueue(entity_no, envelopes))
        assert isinstance(reply, Enqueued), reply
        assert reply.refusals is None, reply
        return reply.sequence_numbers

    def consumer(
        self,
        name: str = "A",
        *,
        sub_queue: SubQueue = ACTIVE,
        mode: ReceiveMode = PEEK_LOCK,
        entity_no: int = QUEUE,
    ) -> int:
        """Attach a receiver under a name, once."""
        if name not in self.names:
            self.last_consumer_id += 1
            consumer_id = self.last_consumer_id
            self.names[name] = consumer_id
            self.clients[consumer_id] = Client(entity_no, sub_queue, mode)
            reply = self.apply(
                AddConsumer(
                    entity_no, sub_queue, consumer_id, mode, Receiver(f"link-{name}", "192.0.2.1")
                )
            )
            assert not isinstance(reply, Refused), reply
        return self.names[name]

    def accept(
        self,
        name: str,
        session: str | None = None,
        mode: ReceiveMode = PEEK_LOCK,
        entity_no: int = QUEUE,
    ) -> str | Refusal | None:
        """Ask for a session, the next one if none is named; return it, a refusal, or None yet."""
        self.last_consumer_id += 1
        consumer_id = self.last_consumer_id
        client = Client(entity_no, ACTIVE, mode)
        self.clients[consumer_id] = client
        session_id = None if session is None else session.encode()
        reply = self.apply(
            AcceptSession(
                entity_no, consumer_id, mode, session_id, Receiver(f"link-{name}", "192.0.2.1")
            )
        )
        if isinstance(reply, Refused):
            del self.clients[consumer_id]
            return reply.refusal
        self.names[name] = consumer_id
        self.tick_now()
        return client.session

    def demand(self, name: str, count: int) -> None:
        """Raise the demand of a receiver by `count`."""
        consumer_id = self.consumer(name)
        client = self.clients[consumer_id]
        client.limit += count
        self.apply(SetDemand(consumer_id, client.limit))
        self.tick_now()

    def inbox(self, name: str) -> list[Delivery]:
        """Return the deliveries of a receiver, and clear them."""
        client = self.clients[self.names[name]]
        taken, client.inbox = client.inbox, []
        return taken

    def receive(self, name: str = "A", count: int = 1, **kwargs: object) -> list[Delivery]:
        """Set a demand, take the deliveries, and withdraw the rest of the demand."""
        sub_queue = kwargs.get("sub_queue", ACTIVE)
        mode = kwargs.get("mode", PEEK_LOCK)
        assert isinstance(sub_queue, SubQueue)
        assert isinstance(mode, ReceiveMode)
        if sub_queue is not ACTIVE and name == "A":
            name = "D"
        entity_no = kwargs.get("entity_no", QUEUE)
        assert isinstance(entity_no, int)
        consumer_id = self.consumer(name, sub_queue=sub_queue, mode=mode, entity_no=entity_no)
        client = self.clients[consumer_id]
        self.demand(name, count)
        taken = self.inbox(name)
        client.limit -= count - len(taken)
        self.apply(SetDemand(consumer_id, client.limit))
        return taken

    def detach(self, name: str) -> None:
        consumer_id = self.names.pop(name)
        self.apply(RemoveConsumer(consumer_id))
        del self.clients[consumer_id]

    def settle(
        self,
        disposition: Disposition,
        *deliveries: Delivery,
        sub_queue: SubQueue = ACTIVE,
        **details: object,
    ) -> Reply:
        tokens = [delivery.lock_token for delivery in deliveries]
        command = Settle(QUEUE, sub_queue, tokens, disposition)
        for name, value in details.items():
            setattr(command, name, value)
        reply = self.apply(command)
        self.tick_now()
        return reply

    def peek(
        self,
        from_sequence: int = 0,
        limit: int = 100,
        sub_queue: SubQueue = ACTIVE,
        max_bytes: int = 1 << 20,
        entity_no: int = QUEUE,
    ) -> list[PeekedMessage]:
        reply = self.apply(Peek(entity_no, sub_queue, from_sequence, limit, max_bytes))
        assert isinstance(reply, Peeked)
        return reply.messages

    def peek_names(self, sub_queue: SubQueue = ACTIVE, entity_no: int = QUEUE) -> list[str]:
        found = self.peek(limit=10_000, sub_queue=sub_queue, entity_no=entity_no)
        return [name_of(peeked.envelope) for peeked in found]
