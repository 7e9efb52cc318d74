"""A partition without a host: it applies, "commits" into tables of dicts, and releases in order.

`Tables` interprets mutations as the vocabulary defines them; it is a test of that vocabulary, no
stand-in for SQL. `Rig` checks after each step what must always hold: every live row is known to
memory exactly once, budget and counts are exact, no message is in two places.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field

from postbus.contract import LIMITS, NamespaceLimits, QueueProperties, Sku
from postbus.entity.commands import (
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
    Deliver,
    DropDefinition,
    EndConsumer,
    Fetch,
    LoadedEntity,
    LoadedPartition,
    MoveMessage,
    Needs,
    Outcome,
    PatchMessage,
    PutDefinition,
    PutDue,
    RecordAcquired,
    RecordSize,
    ReserveBlock,
)
from postbus.entity.partition_state import PartitionState, WindowBudget
from postbus.entity.sub_queue import SubQueueState
from postbus.entity.window import MESSAGE_OVERHEAD_BYTES
from postbus.message.codec import Described, decode_value
from postbus.message.envelope import Envelope

START_MS = 1_700_000_000_000
QUEUE = 7
ACTIVE, DLQ = SubQueue.ACTIVE, SubQueue.DEAD_LETTER
PEEK_LOCK, DELETE = ReceiveMode.PEEK_LOCK, ReceiveMode.RECEIVE_AND_DELETE


def message(
    name: str = "m",
    *,
    size_bytes: int = 100,
    ttl_ms: int | None = None,
    scheduled_ms: int | None = None,
    application_properties: bytes = b"",
) -> Envelope:
    """Make an envelope whose message-id says which one it is."""
    return Envelope(
        message_id=name.encode(),
        body=name.encode(),
        size_bytes=size_bytes + len(application_properties),
        ttl_ms=ttl_ms,
        scheduled_ms=scheduled_ms,
        application_properties=application_properties,
    )


def name_of(envelope: Envelope) -> str:
    return (envelope.message_id or b"").decode()


def properties_of(envelope: Envelope) -> dict[str, object]:
    """Decode the application properties."""
    if not envelope.application_properties:
        return {}
    section, _ = decode_value(envelope.application_properties)
    assert isinstance(section, Described)
    assert isinstance(section.value, dict)
    return section.value


def with_section(envelope: Envelope, section: bytes) -> Envelope:
    fields = {slot: getattr(envelope, slot) for slot in Envelope.__slots__}
    fields["size_bytes"] += len(section) - len(envelope.application_properties)
    fields["application_properties"] = section
    return Envelope(**fields)


@dataclass
class Patch:
    is_deferred: bool = False
    delivery_count: int | None = None
    application_properties: bytes | None = None


@dataclass
class Tables:
    """What the store holds, as dicts."""

    epoch: int = 1
    rows: dict[int, tuple[int, Envelope]] = field(default_factory=dict)
    blocks: dict[int, ReserveBlock] = field(default_factory=dict)
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    patches: dict[int, Patch] = field(default_factory=dict)
    due: dict[int, PutDue] = field(default_factory=dict)
    acquired: dict[int, int] = field(default_factory=dict)
    definitions: dict[int, PutDefinition] = field(default_factory=dict)
    sizes: dict[int, RecordSize] = field(default_factory=dict)

    def commit(self, outcome: Outcome) -> None:
        for mutation in outcome.mutations:
            if isinstance(mutation, ReserveBlock):
                self._reserve(mutation)
        for insert in outcome.inserts:
            assert insert.row_key not in self.rows
            self.block_of(insert.row_key)
            self.rows[insert.row_key] = (insert.enqueued_ms, insert.envelope)
        for mutation in outcome.mutations:
            match mutation:
                case PatchMessage():
                    self._patch(mutation)
                case MoveMessage():
                    self._move(mutation)
                case PutDue():
                    assert mutation.row_key in self.rows
                    self.due[mutation.row_key] = mutation
                case RecordAcquired():
                    for row_key, attempts in zip(mutation.row_keys, mutation.attempts, strict=True):
                        self.acquired[row_key] = attempts
                case PutDefinition():
                    self.definitions[mutation.entity_no] = mutation
                case DropDefinition():
                    del self.definitions[mutation.entity_no]
                case RecordSize():
                    self.sizes[mutation.entity_no] = mutation
                case ReserveBlock():
                    pass
        for row_key in outcome.deletes:
            self._forget(row_key)

    def _reserve(self, block: ReserveBlock) -> None:
        assert 256 <= block.size <= 65_536
        for other in self.blocks.values():
            assert block.first_key >= other.first_key + other.size
            if block.sub_queue is ACTIVE is other.sub_queue and (
                other.entity_no == block.entity_no
            ):
                assert block.first_sequence >= other.first_sequence + other.size
        self.blocks[block.first_key] = block

    def _patch(self, patch: PatchMessage) -> None:
        assert patch.row_key in self.rows
        row = self.patches.setdefault(patch.row_key, Patch())
        if patch.is_deferred is not None:
            row.is_deferred = patch.is_deferred
        if patch.delivery_count is not None:
            row.delivery_count = patch.delivery_count
        if patch.application_properties is not None:
            row.application_properties = patch.application_properties

    def _move(self, move: MoveMessage) -> None:
        enqueued_ms, envelope = self.rows[move.row_key]
        section = move.application_properties
        if section is None and move.row_key in self.patches:
            section = self.patches[move.row_key].application_properties
        if section is not None:
            envelope = with_section(envelope, section)
        self._forget(move.row_key)
        assert move.new_row_key not in self.rows
        block = self.block_of(move.new_row_key)
        assert (block.entity_no, block.sub_queue) == (move.entity_no, move.to_sub_queue)
        stored_ms = enqueued_ms if move.enqueued_ms is None else move.enqueued_ms
        self.rows[move.new_row_key] = (stored_ms, envelope)
        if move.to_sub_queue is not ACTIVE:
            self.kept[move.new_row_key] = (move.sequence, move.delivery_count)

    def _forget(self, row_key: int) -> None:
        del self.rows[row_key]
        for side in (self.patches, self.kept, self.due, self.acquired):
            side.pop(row_key, None)

    def block_of(self, row_key: int) -> ReserveBlock:
        for block in self.blocks.values():
            if block.first_key <= row_key < block.first_key + block.size:
                return block
        raise AssertionError(f"row {row_key} lies in no block")

    # --- reads ----------------------------------------------------------------------------------

    def read(self, row_keys: list[int]) -> list[StoredRow]:
        return [self._stored(key) for key in sorted(row_keys) if key in self.rows]

    def read_numbers(
        self, entity_no: int, sub_queue: SubQueue, from_sequence: int, limit: int
    ) -> list[StoredRow]:
        found = [
            (sequence, row_key)
            for row_key, (sequence, _) in self.kept.items()
            if sequence >= from_sequence
            and (self.block_of(row_key).entity_no, self.block_of(row_key).sub_queue)
            == (entity_no, sub_queue)
        ]
        return [self._stored(row_key) for _, row_key in sorted(found)[:limit]]

    def _stored(self, row_key: int) -> StoredRow:
        enqueued_ms, envelope = self.rows[row_key]
        patch = self.patches.get(row_key, Patch())
        if patch.application_properties is not None:
            envelope = with_section(envelope, patch.application_properties)
        sequence, count = self.kept.get(row_key, (None, 0))
        if row_key in self.due:
            sequence = self.due[row_key].sequence
        return StoredRow(
            row_key,
            enqueued_ms,
            sequence,
            max(count, patch.delivery_count or 0),
            patch.is_deferred,
            envelope,
        )

    def load(self) -> LoadedPartition:
        """Start a new life: the next epoch, and everything that is not a body."""
        self.epoch += 1
        loaded = LoadedPartition(
            epoch=self.epoch,
            catalog_version=max(
                (put.catalog_version for put in self.definitions.values()), default=0
            ),
            next_row_key=max((b.first_key + b.size for b in self.blocks.values()), default=1),
            blocks=sorted(self.blocks.values()),
            due=list(self.due.values()),
            attempts=dict(self.acquired),
        )
        for put in self.definitions.values():
            loaded.next_sequence[put.entity_no] = put.next_sequence
            size = sum(
                row[1].size_bytes
                for key, row in self.rows.items()
                if self.block_of(key).entity_no == put.entity_no
            )
            loaded.entities.append(LoadedEntity(put.entity_no, put.name, put.properties, size))
        for block in loaded.blocks:
            if block.sub_queue is ACTIVE and block.entity_no in loaded.next_sequence:
                end = block.first_sequence + block.size
                loaded.next_sequence[block.entity_no] = max(
                    end, loaded.next_sequence[block.entity_no]
                )
        for row_key in sorted(self.rows):
            block = self.block_of(row_key)
            place = (block.entity_no, block.sub_queue)
            loaded.keys.setdefault(place, array("q")).append(row_key)
            if row_key in self.patches and self.patches[row_key].is_deferred:
                sequence = (
                    self.kept[row_key][0]
                    if row_key in self.kept
                    else block.first_sequence + row_key - block.first_key
                )
                loaded.deferred.setdefault(place, {})[row_key] = sequence
        return loaded


@dataclass
class Client:
    """What one consumer saw."""

    entity_no: int
    sub_queue: SubQueue
    mode: ReceiveMode
    limit: int = 0
    inbox: list[Delivery] = field(default_factory=list)
    ended: Refusal | None = None


class Rig:
    """Drives one partition; commits at once unless `commit()` is left to the test."""

    def __init__(
        self,
        properties: QueueProperties | None = None,
        *,
        budget_bytes: int = 1 << 30,
        limits: NamespaceLimits = LIMITS[Sku.STANDARD],
        seed: int = 1,
        is_auto: bool = True,
    ) -> None:
        self.tables = Tables(epoch=0)
        self.now_ms = START_MS
        self.limits = limits
        self.budget = WindowBudget(budget_bytes)
        self.is_auto = is_auto
        self.seed = seed
        self.clients: dict[int, Client] = {}
        self.names: dict[str, int] = {}
        self.last_consumer_id = 0
        self.pending: deque[tuple[Outcome, list[Reply]]] = deque()
        self.log: list[tuple[Command, int, list[StoredRow] | None]] = []
        self.results: list[Outcome | Needs] = []
        self.checks = True
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
            found = self.tables.read(result.row_keys)
            for numbers in result.numbers:
                found += self.tables.read_numbers(*numbers)
        if self.checks:
            check_partition(self.state)
        self.pending.append((result, replies))
        if self.is_auto:
            self.commit()
        return replies

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
                elif isinstance(effect, Fetch):
                    rows = self.tables.read(effect.row_keys)
                    self.submit(SupplyRows(effect.entity_no, effect.sub_queue, rows))
            replies.append(outcome.reply)
            if count is not None:
                count -= 1

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
        """Lose what was not committed, and all memory."""
        self.pending.clear()
        self.state.discard()
        assert self.budget.used_bytes == 0
        self.clients.clear()
        self.names.clear()
        self.state = self._start()
        self.tick_now()

    # --- a client's part ------------------------------------------------------------------------

    def put(self, properties: QueueProperties, entity_no: int = QUEUE) -> None:
        self.apply(PutEntity(entity_no, f"queue-{entity_no}", properties, 1))

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
            reply = self.apply(AddConsumer(entity_no, sub_queue, consumer_id, mode))
            assert not isinstance(reply, Refused), reply
        return self.names[name]

    def demand(self, name: str, count: int) -> None:
        """Raise the demand of a receiver by `count`."""
        consumer_id = self.consumer(name)
        client = self.clients[consumer_id]
        client.limit += count
        self.apply(SetDemand(consumer_id, client.limit))
        self.tick_now()

    def inbox(self, name: str) -> list[Delivery]:
        """Take what a receiver has got."""
        client = self.clients[self.names[name]]
        taken, client.inbox = client.inbox, []
        return taken

    def receive(self, name: str = "A", count: int = 1, **kwargs: object) -> list[Delivery]:
        """Ask for messages, take what comes, and withdraw the rest of the demand."""
        sub_queue = kwargs.get("sub_queue", ACTIVE)
        mode = kwargs.get("mode", PEEK_LOCK)
        assert isinstance(sub_queue, SubQueue)
        assert isinstance(mode, ReceiveMode)
        if sub_queue is not ACTIVE and name == "A":
            name = "D"
        consumer_id = self.consumer(name, sub_queue=sub_queue, mode=mode)
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
    ) -> list[PeekedMessage]:
        reply = self.apply(Peek(QUEUE, sub_queue, from_sequence, limit, max_bytes))
        assert isinstance(reply, Peeked)
        return reply.messages

    def peek_names(self, sub_queue: SubQueue = ACTIVE) -> list[str]:
        return [name_of(peeked.envelope) for peeked in self.peek(limit=10_000, sub_queue=sub_queue)]


def check_partition(state: PartitionState) -> None:
    """Assert what holds between any two commands."""
    window = state._turn.window
    count = used = 0
    for sub in state._turn.sub_queues:
        loaded = [
            queued
            for queued in (
                *sub.ready,
                *sub.tail,
                *(queued for _, queued in sub.returned),
                *sub.locks.values(),
                *sub.doomed.values(),
            )
            if queued.envelope is not None
        ]
        count += len(loaded)
        used += sum(queued.envelope.size_bytes for queued in loaded if queued.envelope)
        _check_order(sub)
    assert window.count == count
    assert window.used_bytes == used + count * MESSAGE_OVERHEAD_BYTES
    assert window.budget.used_bytes >= window.used_bytes
    assert not window.is_over, "the budget is exceeded"


def _check_order(sub: SubQueueState) -> None:
    returned = sorted(key for key, _ in sub.returned)
    backlog = list(sub.backlog[sub.backlog_head :])
    ready = [queued.row_key for queued in sub.ready]
    tail = [queued.row_key for queued in sub.tail]
    order = returned + ready + backlog + tail
    assert backlog or not tail
    assert order == sorted(order)
    keys = Counter(sub.row_keys())
    assert all(times == 1 for times in keys.values()), "a message is in two places"
    assert len(keys) == sub.live
    stubs = {key for key, queued in sub.returned if queued.envelope is None}
    assert stubs == set(sub.stubs)
    assert all(queued.token is None for _, queued in sub.returned)
    assert all(token == queued.token for token, queued in sub.locks.items())
    assert [c.is_waiting for c in sub.waiting] == [True] * len(sub.waiting)
    assert all(
        consumer.is_waiting is (consumer.limit > consumer.delivered)
        for consumer in sub.consumers.values()
    )
