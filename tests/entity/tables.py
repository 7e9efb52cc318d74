"""The tables of one partition as dicts: mutations applied as their vocabulary defines them.

A test of that vocabulary, no stand-in for SQL.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import assert_never

from postbus.entity.commands import (
    Death,
    StoredRow,
    SubQueue,
)
from postbus.entity.group_commands import GroupKind
from postbus.entity.outcomes import (
    DropCursor,
    DropDefinition,
    ForgetIds,
    LoadedEntity,
    LoadedPartition,
    MoveMessage,
    Outcome,
    PatchMessage,
    PutCursor,
    PutDefinition,
    PutDue,
    PutInbound,
    PutKept,
    PutOutbound,
    PutSessionState,
    RecordAcquired,
    RecordIds,
    RecordSize,
    RecordUse,
    ReserveBlock,
    SettleRows,
    Settling,
    ShareBody,
    StoredState,
)
from postbus.message.envelope import Envelope

ACTIVE = SubQueue.ACTIVE


def as_read(envelope: Envelope) -> Envelope:
    """Return an envelope as its row stores it, without the fields kept in memory only."""
    if envelope.shared is None:
        return envelope
    fields = {slot: getattr(envelope, slot) for slot in Envelope.__slots__}
    return Envelope(**(fields | {"shared": None}))


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
    """The tables of the store, as dicts."""

    epoch: int = 1
    rows: dict[int, tuple[int, Envelope]] = field(default_factory=dict)
    blocks: dict[int, ReserveBlock] = field(default_factory=dict)
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    deaths: dict[int, Death | None] = field(default_factory=dict)
    patches: dict[int, Patch] = field(default_factory=dict)
    due: dict[int, PutDue] = field(default_factory=dict)
    acquired: dict[int, int] = field(default_factory=dict)
    definitions: dict[int, PutDefinition] = field(default_factory=dict)
    sizes: dict[int, RecordSize] = field(default_factory=dict)
    states: dict[tuple[int, bytes], tuple[bytes, int]] = field(default_factory=dict)
    outbound: dict[int, PutOutbound] = field(default_factory=dict)
    inbound: dict[tuple[int, int], PutInbound] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    seen: list[RecordIds] = field(default_factory=list)
    shared: list[list[int]] = field(default_factory=list)
    settled: dict[int, tuple[int, Settling, int]] = field(default_factory=dict)
    cursors: dict[tuple[int, SubQueue, str], PutCursor] = field(default_factory=dict)

    def commit(self, outcome: Outcome) -> None:
        for mutation in outcome.mutations:
            if isinstance(mutation, ReserveBlock):
                self._reserve(mutation)
        for insert in outcome.inserts:
            assert insert.row_key not in self.rows
            self.block_of(insert.row_key)
            self.rows[insert.row_key] = (insert.enqueued_ms, as_read(insert.envelope))
        own = {insert.row_key for insert in outcome.inserts}
        for mutation in outcome.mutations:
            match mutation:
                case PatchMessage():
                    self._patch(mutation)
                case MoveMessage():
                    assert mutation.row_key not in own, "no statement moves what it inserts"
                    self._move(mutation)
                case SettleRows():
                    self._settle(mutation)
                case PutDue():
                    assert mutation.row_key in self.rows
                    self.due[mutation.row_key] = mutation
                case RecordAcquired(row_keys, attempts):
                    self.acquired.update(zip(row_keys, attempts, strict=True))
                case PutDefinition():
                    self.definitions[mutation.entity_no] = mutation
                case DropDefinition():
                    self._drop(mutation.entity_no)
                case RecordSize():
                    self.sizes[mutation.entity_no] = mutation
                case PutSessionState():
                    session = (mutation.entity_no, mutation.session_id)
                    if mutation.state is None:
                        self.states.pop(session, None)
                    else:
                        self.states[session] = (mutation.state, mutation.updated_ms)
                case PutOutbound():
                    assert mutation.row_key in self.rows
                    self.outbound[mutation.row_key] = mutation
                case PutInbound():
                    place = (mutation.source_partition, mutation.entity_no)
                    known = self.inbound.get(place)
                    assert known is None or known.last_number < mutation.last_number
                    self.inbound[place] = mutation
                case PutKept():
                    self._keep(mutation)
                case ShareBody():
                    bodies = {id(self.rows[row_key][1].body) for row_key in mutation.row_keys}
                    assert len(bodies) == 1, "these bodies are not one"
                    self.shared.append(mutation.row_keys)
                case RecordIds():
                    assert mutation.entity_no in self.definitions
                    self.seen.append(mutation)
                case ForgetIds():
                    self._forget_ids(mutation)
                case RecordUse():
                    self.uses[mutation.entity_no] = mutation.last_used_ms
                case PutCursor():
                    assert mutation.entity_no in self.definitions
                    self.cursors[mutation.entity_no, mutation.sub_queue, mutation.name] = mutation
                case DropCursor():
                    del self.cursors[mutation.entity_no, mutation.sub_queue, mutation.name]
                case ReserveBlock():
                    pass
                case _:
                    assert_never(mutation)
        for row_key in outcome.deletes:
            assert row_key not in self.settled
            assert not self._is_kept(row_key), "an entity with a history settles its rows"
            self._forget(row_key)
        self._check_copies(outcome)

    def _drop(self, entity_no: int) -> None:
        del self.definitions[entity_no]
        self.uses.pop(entity_no, None)
        for place in [place for place in self.inbound if place[1] == entity_no]:
            del self.inbound[place]
        for group in [group for group in self.cursors if group[0] == entity_no]:
            del self.cursors[group]

    def _is_kept(self, row_key: int) -> bool:
        block = self.block_of(row_key)
        put = self.definitions.get(block.entity_no)
        retention_ms = getattr(put and put.properties, "history_retention_ms", None)
        is_tapped = any(
            put.entity_no == block.entity_no and put.cursor.kind is GroupKind.TAP
            for put in self.cursors.values()
        )
        is_kept = retention_ms is not None or is_tapped
        return is_kept and block.sub_queue is not SubQueue.SCHEDULED

    def _check_copies(self, outcome: Outcome) -> None:
        for mutation in outcome.mutations:
            if isinstance(mutation, MoveMessage) and mutation.keeps_source:
                assert mutation.row_key in self.settled

    def _settle(self, mutation: SettleRows) -> None:
        assert mutation.row_keys
        for row_key in mutation.row_keys:
            assert row_key in self.rows
            assert row_key not in self.settled
            assert self.block_of(row_key).entity_no == mutation.entity_no
            self.settled[row_key] = (mutation.entity_no, mutation.how, mutation.settled_ms)

    def reap(self, cutoffs: dict[int, int]) -> None:
        """Delete rows settled before their entity's cutoff, and all of entities without one."""
        for row_key, (entity_no, _, settled_ms) in list(self.settled.items()):
            if settled_ms < cutoffs.get(entity_no, settled_ms + 1):
                del self.settled[row_key]
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

    def _keep(self, put: PutKept) -> None:
        assert put.row_key in self.rows
        block = self.block_of(put.row_key)
        assert (block.entity_no, block.sub_queue) == (put.entity_no, put.sub_queue)
        self.kept[put.row_key] = (put.sequence, put.delivery_count)
        self.deaths[put.row_key] = put.death

    def _forget_ids(self, forget: ForgetIds) -> None:
        before_ms = forget.before_ms
        self.seen = [
            row
            for row in self.seen
            if row.entity_no != forget.entity_no
            or (before_ms is not None and row.seen_ms >= before_ms)
        ]

    def read_ids(self, ids: list[tuple[int, bytes, int, int]]) -> set[tuple[int, bytes]]:
        return {
            (entity_no, digest)
            for entity_no, digest, from_ms, to_ms in ids
            for row in self.seen
            if row.entity_no == entity_no
            and from_ms <= row.seen_ms <= to_ms
            and digest in [row.digests[at : at + 16] for at in range(0, len(row.digests), 16)]
        }

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
        if not move.keeps_source:
            assert move.row_key not in self.settled
            self._forget(move.row_key)
        assert move.new_row_key not in self.rows
        block = self.block_of(move.new_row_key)
        assert (block.entity_no, block.sub_queue) == (move.entity_no, move.to_sub_queue)
        stored_ms = enqueued_ms if move.enqueued_ms is None else move.enqueued_ms
        self.rows[move.new_row_key] = (stored_ms, envelope)
        if move.to_sub_queue is not ACTIVE:
            self.kept[move.new_row_key] = (move.sequence, move.delivery_count)
            self.deaths[move.new_row_key] = move.death

    def _forget(self, row_key: int) -> None:
        del self.rows[row_key]
        for side in (self.patches, self.kept, self.due, self.acquired, self.outbound):
            side.pop(row_key, None)

    def fold(self) -> None:
        """Write the attempts of rows that are still there into `patch`, as upkeep does (ADR 19)."""
        for row_key, attempts in self.acquired.items():
            if row_key in self.rows:
                self.patches.setdefault(row_key, Patch()).delivery_count = attempts
        self.acquired.clear()

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
            and row_key not in self.settled
            and (self.block_of(row_key).entity_no, self.block_of(row_key).sub_queue)
            == (entity_no, sub_queue)
        ]
        return [self._stored(row_key) for _, row_key in sorted(found)[:limit]]

    def read_named(
        self, entity_no: int, sub_queue: SubQueue, numbers: list[int]
    ) -> list[StoredRow]:
        found = self.read_numbers(entity_no, sub_queue, 0, len(self.rows))
        return [row for row in found if row.sequence in numbers]

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
            self.deaths.get(row_key) if row_key in self.kept else None,
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
            attempts={
                row_key: attempt
                for row_key, attempt in self.acquired.items()
                if row_key not in self.settled
            },
            seen=sorted(self.seen, key=lambda row: row.seen_ms),
            outbox=[self.outbound[number] for number in sorted(self.outbound)],
            inbound=list(self.inbound.values()),
            cursors=list(self.cursors.values()),
        )
        for put in self.definitions.values():
            loaded.next_sequence[put.entity_no] = put.next_sequence
            size = sum(
                row[1].size_bytes
                for key, row in self.rows.items()
                if key not in self.settled and self.block_of(key).entity_no == put.entity_no
            )
            loaded.entities.append(
                LoadedEntity(
                    put.entity_no,
                    put.name,
                    put.kind,
                    put.properties,
                    size,
                    put.topic_no,
                    put.rules,
                    put.is_partitioned,
                    self.uses.get(put.entity_no, 0),
                )
            )
        for block in loaded.blocks:
            if block.sub_queue is ACTIVE and block.entity_no in loaded.next_sequence:
                end = block.first_sequence + block.size
                loaded.next_sequence[block.entity_no] = max(
                    end, loaded.next_sequence[block.entity_no]
                )
        for row_key in sorted(self.rows.keys() - self.settled.keys()):
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
            session_id = self.rows[row_key][1].session_id
            if self._is_divided(*place) and session_id is not None:
                sessions = loaded.sessions.setdefault(block.entity_no, {})
                sessions.setdefault(session_id, array("q")).append(row_key)
        for (entity_no, session_id), (state, updated_ms) in self.states.items():
            stored = StoredState(updated_ms, len(state))
            loaded.session_states.setdefault(entity_no, {})[session_id] = stored
        return loaded

    def _is_divided(self, entity_no: int, sub_queue: SubQueue) -> bool:
        put = self.definitions.get(entity_no)
        requires_session = getattr(put and put.properties, "requires_session", False)
        return sub_queue is ACTIVE and requires_session
