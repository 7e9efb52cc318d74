"""Mutations of one batch sorted by kind, as the columns of a statement's arguments.

A later mutation of the same row replaces or completes an earlier one; mutations of an entity that
the batch drops are left out. Called by the writer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final, assert_never

from postbus.entity.commands import Death, SubQueue
from postbus.entity.group_commands import NO_LIMITS, Cursor, Limits, Plan
from postbus.entity.outcomes import (
    DropCursor,
    DropDefinition,
    ForgetIds,
    MoveMessage,
    Mutation,
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
    ShareBody,
)
from postbus.store.batch import SideRows
from postbus.store.mutation_traits import EntityChange

SEEN_SPAN_MS: Final = 10
"""Ids seen within this number of milliseconds share a row, which counts as seen at the last of
them. Our choice: negligible compared with the shortest window of 20 s, and longer than a commit."""
ALL_TIME_MS: Final = (1 << 63) - 1


class BatchChanges:
    """The mutations of a batch, sorted by kind."""

    def __init__(self, mutations: Iterable[Mutation]) -> None:
        self.shares: list[ShareBody] = []
        self.settled_keys: list[int] = []
        self._settled: list[SettleRows] = []
        self._reserved: list[ReserveBlock] = []
        self._attempted: dict[int, int] = {}
        self._moves: list[MoveMessage] = []
        self._patches: dict[int, PatchMessage] = {}
        self._dues: dict[int, PutDue] = {}
        self._kept: list[PutKept] = []
        self._definitions: dict[int, PutDefinition] = {}
        self._drops: list[int] = []
        self._sizes: dict[int, RecordSize] = {}
        self._uses: dict[int, int] = {}
        self._states: dict[tuple[int, bytes], PutSessionState] = {}
        self._seen: list[_SeenRow] = []
        self._forgotten: dict[int, int] = {}
        self._outbound: list[PutOutbound] = []
        self._inbound: dict[tuple[int, int], int] = {}
        self._cursors: dict[tuple[int, SubQueue, str], Cursor | None] = {}
        self._placed: set[tuple[int, SubQueue, str]] = set()
        self._catalog_version = 0
        for change in mutations:
            self._sort(change)

    def _sort(self, change: Mutation) -> None:
        match change:
            case RecordIds():
                self._see(change)
            case SettleRows():
                self._settled.append(change)
                self.settled_keys += change.row_keys
            case ShareBody():
                self.shares.append(change)
            case ReserveBlock():
                self._reserved.append(change)
            case RecordAcquired(row_keys, attempts):
                self._attempted.update(zip(row_keys, attempts, strict=True))
            case MoveMessage():
                self._moves.append(change)
                if change.to_sub_queue is not SubQueue.ACTIVE:  # in ACTIVE the key gives the number
                    self._kept.append(
                        PutKept(
                            change.new_row_key,
                            change.entity_no,
                            change.to_sub_queue,
                            change.sequence,
                            change.delivery_count,
                            change.death,
                        )
                    )
            case PutOutbound():
                self._outbound.append(change)
            case PutInbound(source, entity_no, number):
                name = source, entity_no
                self._inbound[name] = max(number, self._inbound.get(name, 0))
            case PatchMessage():
                known = self._patches.get(change.row_key)
                self._patches[change.row_key] = change if known is None else _merged(known, change)
            case PutDue():
                self._dues[change.row_key] = change
            case PutKept():
                self._kept.append(change)
            case PutSessionState():
                self._states[change.entity_no, change.session_id] = change
            case PutCursor(entity_no, sub_queue, name, cursor, is_placed):
                self._cursors[entity_no, sub_queue, name] = cursor
                if is_placed:
                    self._placed.add((entity_no, sub_queue, name))
            case DropCursor(entity_no, sub_queue, name):
                self._cursors[entity_no, sub_queue, name] = None
            case _:
                self._sort_by_entity(change)

    def _sort_by_entity(self, change: EntityChange | ForgetIds) -> None:
        match change:
            case PutDefinition():
                self._definitions[change.entity_no] = change
                self._catalog_version = max(self._catalog_version, change.catalog_version)
            case DropDefinition():
                self._drop(change.entity_no)
                self._catalog_version = max(self._catalog_version, change.catalog_version)
            case RecordSize():
                self._sizes[change.entity_no] = change
            case RecordUse(entity_no, last_used_ms):
                self._uses[entity_no] = max(last_used_ms, self._uses.get(entity_no, 0))
            case ForgetIds(entity_no, before_ms):
                self._forget(entity_no, ALL_TIME_MS if before_ms is None else before_ms)
            case _:
                assert_never(change)

    def _see(self, change: RecordIds) -> None:
        for row in self._seen:
            if row.admits(change):
                row.last_ms = max(row.last_ms, change.seen_ms)
                row.digests.append(change.digests)
                return
        self._seen.append(_SeenRow(change))

    def _forget(self, entity_no: int, before_ms: int) -> None:
        self._forgotten[entity_no] = max(before_ms, self._forgotten.get(entity_no, 0))
        self._seen = [
            row for row in self._seen if row.entity_no != entity_no or row.last_ms >= before_ms
        ]

    def _drop(self, entity_no: int) -> None:
        self._drops.append(entity_no)
        self._forget(entity_no, ALL_TIME_MS)
        self._uses.pop(entity_no, None)
        for state in [name for name in self._states if name[0] == entity_no]:
            del self._states[state]
        for group in [name for name in self._cursors if name[0] == entity_no]:
            del self._cursors[group]
        for source in [name for name in self._inbound if name[1] == entity_no]:
            del self._inbound[source]

    def note_sides(self, sides: SideRows) -> None:
        """Record which rows get side rows, unless their block implies it."""
        sides.keys.update(self._patches)
        sides.keys.update(self._dues)
        for move in self._moves:
            sides.note_move(move.row_key, move.new_row_key, move.to_sub_queue)

    # --- columns ----------------------------------------------------------------------------------

    def light_columns(self) -> dict[str, object]:
        """Return the columns of blocks, attempts, ids and arrivals."""
        blocks, seen = self._reserved, self._seen
        return {
            "block_keys": [row.first_key for row in blocks],
            "block_sizes": [row.size for row in blocks],
            "block_nos": [row.entity_no for row in blocks],
            "block_queues": [int(row.sub_queue) for row in blocks],
            "block_sequences": [row.first_sequence for row in blocks],
            "attempt_keys": list(self._attempted),
            "attempts": list(self._attempted.values()),
            "seen_nos": [row.entity_no for row in seen],
            "seen_first_ms": [row.first_ms for row in seen],
            "seen_last_ms": [row.last_ms for row in seen],
            "digests": [b"".join(row.digests) for row in seen],
            "in_sources": [source for source, _ in self._inbound],
            "in_nos": [entity_no for _, entity_no in self._inbound],
            "in_numbers": list(self._inbound.values()),
        }

    def settled_columns(self) -> dict[str, object]:
        """Return the columns of settled rows: keys, and the range of keys for each line.

        Keys count from one, both bounds are inclusive.
        """
        firsts: list[int] = []
        lasts: list[int] = []
        end = 0
        for row in self._settled:
            firsts.append(end + 1)
            end += len(row.row_keys)
            lasts.append(end)
        return {
            "settle_keys": self.settled_keys,
            "settle_nos": [row.entity_no for row in self._settled],
            "settle_hows": [int(row.how) for row in self._settled],
            "settle_ms": [row.settled_ms for row in self._settled],
            "settle_firsts": firsts,
            "settle_lasts": lasts,
        }

    def copy_columns(self) -> dict[str, object]:
        """Return the keys of moved rows that are deleted and of those that stay."""
        return {
            "lifted_keys": [row.row_key for row in self._moves if not row.keeps_source],
            "copied_keys": [row.row_key for row in self._moves if row.keeps_source],
        }

    def row_columns(self) -> dict[str, object]:
        """Return the columns of moves and side rows."""
        moves, patches, dues = self._moves, self._patches.values(), self._dues.values()
        kept = self._kept
        return {
            "move_keys": [row.row_key for row in moves],
            "move_new_keys": [row.new_row_key for row in moves],
            "move_enqueued": [row.enqueued_ms for row in moves],
            "move_properties": [row.application_properties for row in moves],
            "patch_keys": list(self._patches),
            "patch_deferred": [row.is_deferred for row in patches],
            "patch_counts": [row.delivery_count for row in patches],
            "patch_properties": [row.application_properties for row in patches],
            "kept_keys": [row.row_key for row in kept],
            "kept_nos": [row.entity_no for row in kept],
            "kept_queues": [int(row.sub_queue) for row in kept],
            "kept_sequences": [row.sequence for row in kept],
            "kept_counts": [row.delivery_count for row in kept],
            **_death_columns([row.death for row in kept]),
            "due_keys": list(self._dues),
            "due_nos": [row.entity_no for row in dues],
            "due_ms": [row.due_ms for row in dues],
            "due_sequences": [row.sequence for row in dues],
            "out_keys": [row.row_key for row in self._outbound],
            "out_nos": [row.source_no for row in self._outbound],
            "out_targets": [row.target for row in self._outbound],
            "out_sequences": [row.sequence for row in self._outbound],
            "out_dead": [row.is_dead_letter for row in self._outbound],
            "out_resent": [row.is_resent for row in self._outbound],
        }

    def full_columns(self) -> dict[str, object]:
        """Return the columns that only `FULL` and `RETAIN` have."""
        return {**self._entity_columns(), **self._memory_columns(), **self._group_columns()}

    def _entity_columns(self) -> dict[str, object]:
        """Return the columns of definitions, sizes and uses."""
        rows = self._definitions.values()
        sizes, uses = self._sizes, self._uses
        defined = self._definitions
        measured = [number for number in {**sizes, **uses} if number not in defined]
        return {
            "definition_nos": list(defined),
            "names": [row.name for row in rows],
            "kinds": [row.kind.value for row in rows],
            "definitions": [row.properties.model_dump_json(by_alias=True) for row in rows],
            "next_sequences": [row.next_sequence for row in rows],
            "versions": [row.catalog_version for row in rows],
            "topic_nos": [row.topic_no for row in rows],
            "rules": [_rules_json(row) for row in rows],
            "partitioned": [row.is_partitioned for row in rows],
            "definition_sizes": [_size(sizes.get(number)) for number in defined],
            "definition_counts": [_count(sizes.get(number)) for number in defined],
            "definition_uses": [uses.get(number) for number in defined],
            "drops": self._drops,
            "measured_nos": measured,
            "sizes": [_size(sizes.get(number)) for number in measured],
            "counts": [_count(sizes.get(number)) for number in measured],
            "uses": [uses.get(number) for number in measured],
            "catalog_version": self._catalog_version,
        }

    def _memory_columns(self) -> dict[str, object]:
        """Return the columns of session states and forgotten ids."""
        put = [row for row in self._states.values() if row.state is not None]
        removed = [row for row in self._states.values() if row.state is None]
        return {
            "state_nos": [row.entity_no for row in put],
            "state_sessions": [row.session_id for row in put],
            "states": [row.state for row in put],
            "state_ms": [row.updated_ms for row in put],
            "stateless_nos": [row.entity_no for row in removed],
            "stateless_sessions": [row.session_id for row in removed],
            "forget_nos": list(self._forgotten),
            "forget_ms": list(self._forgotten.values()),
        }

    def _group_columns(self) -> dict[str, object]:
        """Return the columns of reader groups."""
        put = {name: cursor for name, cursor in self._cursors.items() if cursor is not None}
        dropped = [name for name, cursor in self._cursors.items() if cursor is None]
        return {
            "group_nos": [name[0] for name in put],
            "group_queues": [int(name[1]) for name in put],
            "group_names": [name[2] for name in put],
            "group_kinds": [int(cursor.kind) for cursor in put.values()],
            "group_epochs": [cursor.epoch for cursor in put.values()],
            "group_readers": [cursor.reader for cursor in put.values()],
            "group_settled": [cursor.settled for cursor in put.values()],
            "group_planned": [cursor.planned for cursor in put.values()],
            "group_placed_ms": [cursor.placed_ms for cursor in put.values()],
            "group_placed": [name in self._placed for name in put],
            "group_plans": [_plan_json(cursor.plan) for cursor in put.values()],
            "group_limits": [_limits_json(cursor.limits) for cursor in put.values()],
            "groupless_nos": [name[0] for name in dropped],
            "groupless_queues": [int(name[1]) for name in dropped],
            "groupless_names": [name[2] for name in dropped],
        }


class _SeenRow:
    """A row of `seen` under construction."""

    __slots__ = ("digests", "entity_no", "first_ms", "last_ms")

    def __init__(self, change: RecordIds) -> None:
        self.entity_no = change.entity_no
        self.first_ms = self.last_ms = change.seen_ms
        self.digests = [change.digests]

    def admits(self, change: RecordIds) -> bool:
        """Return whether these ids were seen at about the same time."""
        return (
            change.entity_no == self.entity_no
            and 0 <= change.seen_ms - self.first_ms <= SEEN_SPAN_MS
        )


def _merged(known: PatchMessage, change: PatchMessage) -> PatchMessage:
    return PatchMessage(
        change.row_key,
        known.is_deferred if change.is_deferred is None else change.is_deferred,
        known.delivery_count if change.delivery_count is None else change.delivery_count,
        change.application_properties or known.application_properties,
    )


def _death_columns(deaths: list[Death | None]) -> dict[str, object]:
    receivers = [None if death is None else death.receiver for death in deaths]
    return {
        "death_ms": [None if death is None else death.at_ms for death in deaths],
        "death_deliveries": [None if death is None else death.deliveries for death in deaths],
        "death_links": [None if one is None else one.link.encode() for one in receivers],
        "death_clients": [None if one is None else one.client for one in receivers],
    }


def _rules_json(definition: PutDefinition) -> str:
    return f"[{','.join([rule.text for rule in definition.rules])}]"


def _plan_json(plan: Plan | None) -> str | None:
    return None if plan is None else json.dumps(plan._asdict())


def _limits_json(limits: Limits) -> str | None:
    return None if limits == NO_LIMITS else json.dumps(limits._asdict())


def _size(record: RecordSize | None) -> int | None:
    return None if record is None else record.size_bytes


def _count(record: RecordSize | None) -> int | None:
    return None if record is None else record.message_count
