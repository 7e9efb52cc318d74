"""One writer connection: prepared statements, and the making of their arguments from a batch.

Each commit is one data-modifying statement. The plain ones (insert, delete, both) carry the hot
path; `CHANGES` adds blocks and acquisitions, `GENERAL` everything else. Called by the journal.
"""

from __future__ import annotations

from typing import Final, TypeAlias, TypeVar

import asyncpg.prepared_stmt

from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import (
    DropDefinition,
    InsertMessage,
    MoveMessage,
    PatchMessage,
    PutDefinition,
    PutDue,
    RecordAcquired,
    RecordSize,
    ReserveBlock,
)
from postbus.message.rows import pack_envelope
from postbus.store.batch import INLINE_BODY_BYTES, STAGED_BODY_BYTES, Batch, SideRows
from postbus.store.errors import Connection

P = TypeVar("P")
Statement: TypeAlias = "asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record]"

INSERT_ONE: Final = """
insert into message (row_key, enqueued_ms, envelope, application_properties, body)
values ($1, $2, $3, $4, $5)
"""
DELETE_ONE: Final = "delete from message where row_key = $1"
INSERT: Final = """
insert into message (row_key, enqueued_ms, envelope, application_properties, body)
select * from unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::bytea[], $5::bytea[])
"""
DELETE: Final = "delete from message where row_key = any ($1::bigint[])"
MIXED: Final = """
with gone as (
    delete from message where row_key = any ($6::bigint[])
)
insert into message (row_key, enqueued_ms, envelope, application_properties, body)
select * from unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::bytea[], $5::bytea[])
"""
CHANGES: Final = """
with gone as (
    delete from message where row_key = any ($6::bigint[])
), reserved as (
    insert into block (first_key, size, entity_no, sub_queue, first_sequence)
    select * from unnest($7::bigint[], $8::int[], $9::int[], $10::smallint[], $11::bigint[])
), attempted as (
    insert into acquired (row_keys, attempts)
    select $12::bigint[], $13::int[] where cardinality($12::bigint[]) > 0
)
insert into message (row_key, enqueued_ms, envelope, application_properties, body)
select * from unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::bytea[], $5::bytea[])
"""
GENERAL: Final = """
with gone as (
    delete from message where row_key = any ($6::bigint[]) returning body_id
), move as (
    select * from unnest($14::bigint[], $15::bigint[], $16::bigint[], $17::bytea[])
        as m (row_key, new_row_key, enqueued_ms, application_properties)
), taken as (
    delete from message where row_key = any ($14::bigint[])
    returning row_key, enqueued_ms, envelope, application_properties, body, body_id
), moved as (
    insert into message (row_key, enqueued_ms, envelope, application_properties, body, body_id)
    select move.new_row_key, coalesce(move.enqueued_ms, taken.enqueued_ms), taken.envelope,
           coalesce(
               move.application_properties,
               patch.application_properties,
               taken.application_properties
           ),
           taken.body, taken.body_id
    from move
    join taken on taken.row_key = move.row_key
    left join patch on patch.row_key = move.row_key
    order by move.new_row_key
), carried as (
    insert into embodied (row_key, body_id)
    select move.new_row_key, taken.body_id
    from move join taken on taken.row_key = move.row_key
    where taken.body_id is not null
), uncarried as (
    delete from embodied where row_key = any ($6::bigint[] || $14::bigint[])
), reserved as (
    insert into block (first_key, size, entity_no, sub_queue, first_sequence)
    select * from unnest($7::bigint[], $8::int[], $9::int[], $10::smallint[], $11::bigint[])
), attempted as (
    insert into acquired (row_keys, attempts)
    select $12::bigint[], $13::int[] where cardinality($12::bigint[]) > 0
), unpatched as (
    delete from patch where row_key = any ($6::bigint[] || $14::bigint[])
), patched as (
    insert into patch as p (row_key, is_deferred, delivery_count, application_properties)
    select * from unnest($18::bigint[], $19::boolean[], $20::int[], $21::bytea[])
    on conflict (row_key) do update
    set is_deferred = coalesce(excluded.is_deferred, p.is_deferred),
        delivery_count = coalesce(excluded.delivery_count, p.delivery_count),
        application_properties
            = coalesce(excluded.application_properties, p.application_properties)
), unkept as (
    delete from kept where row_key = any ($6::bigint[] || $14::bigint[])
), keeping as (
    insert into kept (row_key, entity_no, sub_queue, sequence, delivery_count)
    select * from unnest($22::bigint[], $23::int[], $24::smallint[], $25::bigint[], $26::int[])
), undue as (
    delete from due where row_key = any ($6::bigint[] || $14::bigint[])
), scheduled as (
    insert into due (row_key, entity_no, due_ms, sequence)
    select * from unnest($27::bigint[], $28::int[], $29::bigint[], $30::bigint[])
    on conflict (row_key) do update
    set due_ms = excluded.due_ms, sequence = excluded.sequence
), disembodied as (
    delete from body where body_id in (select body_id from gone where body_id is not null)
), embodied as (
    insert into body (body_id, chunk, data)
    select body_id, 0, data from unnest($31::bigint[], $32::bytea[]) as b (body_id, data)
), unstaged as (
    delete from staged where body_id = any ($33::bigint[])
), defined as (
    insert into entity (entity_no, name, definition, next_sequence, catalog_version)
    select * from unnest($34::int[], $35::text[], $36::jsonb[], $37::bigint[], $38::bigint[])
    on conflict (entity_no) do update
    set name = excluded.name, definition = excluded.definition,
        next_sequence = greatest(excluded.next_sequence, entity.next_sequence),
        catalog_version = excluded.catalog_version
), dropped as (
    delete from entity where entity_no = any ($39::int[])
), sized as (
    update entity set size_bytes = s.size_bytes, message_count = s.message_count
    from unnest($40::int[], $41::bigint[], $42::bigint[])
        as s (entity_no, size_bytes, message_count)
    where entity.entity_no = s.entity_no
), versioned as (
    update owner set catalog_version = greatest(catalog_version, $43::bigint)
    where catalog_version < $43::bigint
)
insert into message (row_key, enqueued_ms, envelope, application_properties, body, body_id)
select * from unnest(
    $1::bigint[], $2::bigint[], $3::bytea[], $4::bytea[], $5::bytea[], $44::bigint[]
)
"""

LIGHT_CHANGES: Final = frozenset({ReserveBlock, RecordAcquired})


class Writer:
    """A connection that commits batches and keeps `sides` up to date."""

    def __init__(self, connection: Connection, sides: SideRows) -> None:
        self.connection = connection
        self._sides = sides
        self._statements: dict[str, Statement] = {}

    async def prepare(self) -> None:
        """Prepare the hot statements; the others are prepared at first use."""
        for sql in (INSERT_ONE, DELETE_ONE, INSERT, DELETE, MIXED):
            self._statements[sql] = await self.connection.prepare(sql)

    async def commit(self, batch: Batch[P]) -> None:
        """Make a batch durable; raises what the driver raises."""
        if not (batch.inserts or batch.deletes or batch.mutations):
            return
        sql, arguments = self._translate(batch)
        statement = self._statements.get(sql)
        if statement is None:
            statement = self._statements[sql] = await self.connection.prepare(sql)
        batch.is_sent = True
        await statement.fetch(*arguments)
        if self._sides.keys and batch.deletes:
            self._sides.forget(batch.deletes)

    def _translate(self, batch: Batch[P]) -> tuple[str, tuple[object, ...]]:
        """Choose the smallest statement that does it, and its arguments."""
        inserts, deletes, mutations = batch.inserts, batch.deletes, batch.mutations
        sides = self._sides
        for change in mutations:
            if type(change) is ReserveBlock:
                sides.add_block(change)
        if (
            batch.is_large
            or (deletes and sides.touch(deletes))
            or (mutations and not LIGHT_CHANGES.issuperset(map(type, mutations)))
        ):
            return GENERAL, _general_arguments(batch, sides)
        if mutations:
            changes = Changes(mutations)
            arguments = _insert_arguments(inserts)
            if inserts and deletes:
                _refuse_own_rows(arguments[0], deletes)
            return CHANGES, (
                *arguments,
                deletes,
                *changes.blocks(),
                *changes.attempts(),
            )
        if not deletes:
            if len(inserts) == 1:  # the lone client: a plan without arrays answers sooner
                return INSERT_ONE, tuple(column[0] for column in _insert_arguments(inserts))
            return INSERT, _insert_arguments(inserts)
        if not inserts:
            if len(deletes) == 1:
                return DELETE_ONE, (deletes[0],)
            return DELETE, (deletes,)
        arguments = _insert_arguments(inserts)
        _refuse_own_rows(arguments[0], deletes)
        return MIXED, (*arguments, deletes)


def _refuse_own_rows(row_keys: list[int], deletes: list[int]) -> None:
    """Fail rather than leave a row behind: a statement cannot delete what it inserts itself."""
    if max(deletes) >= min(row_keys):
        assert set(row_keys).isdisjoint(deletes), "touches_uncommitted is not set"


def _insert_arguments(
    inserts: list[InsertMessage],
) -> tuple[list[int], list[int], list[bytes], list[bytes | None], list[bytes | None]]:
    """Return the five columns of small messages."""
    envelopes = [insert[2] for insert in inserts]
    return (
        [insert[0] for insert in inserts],
        [insert[1] for insert in inserts],
        [pack_envelope(envelope) for envelope in envelopes],
        [envelope.application_properties or None for envelope in envelopes],
        [envelope.body or None for envelope in envelopes],
    )


def _general_arguments(batch: Batch[P], sides: SideRows) -> tuple[object, ...]:
    """Return the 44 arguments of `GENERAL`; takes note of new side rows."""
    keys, enqueued, envelopes, properties, bodies = _insert_arguments(batch.inserts)
    if keys and batch.deletes:
        _refuse_own_rows(keys, batch.deletes)
    body_ids: list[int | None] = [None] * len(keys)
    inline: dict[int, bytes] = {}
    staged: list[int] = []
    for index, insert in enumerate(batch.inserts if batch.is_large else ()):
        size_bytes = len(insert.envelope.body)
        if size_bytes > INLINE_BODY_BYTES:
            bodies[index], body_ids[index] = None, insert.row_key
            sides.keys.add(insert.row_key)
            if size_bytes > STAGED_BODY_BYTES:
                staged.append(insert.row_key)
            else:
                inline[insert.row_key] = insert.envelope.body
    changes = Changes(batch.mutations)
    changes.note_sides(sides)
    return (
        keys,
        enqueued,
        envelopes,
        properties,
        bodies,
        batch.deletes,
        *changes.blocks(),
        *changes.attempts(),
        *changes.move_columns(),
        *changes.patch_columns(),
        *changes.kept_columns(),
        *changes.due_columns(),
        list(inline),
        list(inline.values()),
        staged,
        *changes.definition_columns(),
        changes.drops,
        *changes.size_columns(),
        changes.catalog_version,
        body_ids,
    )


class Changes:
    """Mutations sorted by kind; a later one of the same row replaces or completes an earlier."""

    def __init__(self, mutations: list[object]) -> None:
        self.reserved: list[ReserveBlock] = []
        self.attempted: dict[int, int] = {}
        self.moves: list[MoveMessage] = []
        self.patches: dict[int, PatchMessage] = {}
        self.dues: dict[int, PutDue] = {}
        self.definitions: dict[int, PutDefinition] = {}
        self.drops: list[int] = []
        self.sizes: dict[int, RecordSize] = {}
        self.catalog_version = 0
        for change in mutations:
            self._sort(change)

    def _sort(self, change: object) -> None:
        match change:
            case ReserveBlock():
                self.reserved.append(change)
            case RecordAcquired(row_keys, attempts):
                self.attempted.update(zip(row_keys, attempts, strict=True))
            case MoveMessage():
                self.moves.append(change)
            case PatchMessage():
                known = self.patches.get(change.row_key)
                self.patches[change.row_key] = change if known is None else _merged(known, change)
            case PutDue():
                self.dues[change.row_key] = change
            case PutDefinition():
                self.definitions[change.entity_no] = change
                self.catalog_version = max(self.catalog_version, change.catalog_version)
            case DropDefinition():
                self.drops.append(change.entity_no)
                self.catalog_version = max(self.catalog_version, change.catalog_version)
            case RecordSize():
                self.sizes[change.entity_no] = change
            case _:
                raise AssertionError(f"no SQL for {type(change).__name__}")

    def note_sides(self, sides: SideRows) -> None:
        """Remember which rows of ACTIVE blocks get side rows; others are known by their block."""
        sides.keys.update(self.patches)
        sides.keys.update(self.dues)
        for move in self.moves:
            if move.row_key in sides.keys:  # it may have a body that moves along
                sides.keys.add(move.new_row_key)
                sides.keys.discard(move.row_key)

    def blocks(self) -> tuple[list[int], ...]:
        rows = self.reserved
        return (
            [row.first_key for row in rows],
            [row.size for row in rows],
            [row.entity_no for row in rows],
            [int(row.sub_queue) for row in rows],
            [row.first_sequence for row in rows],
        )

    def attempts(self) -> tuple[list[int], list[int]]:
        return list(self.attempted), list(self.attempted.values())

    def move_columns(self) -> tuple[list[object], ...]:
        rows = self.moves
        return (
            [row.row_key for row in rows],
            [row.new_row_key for row in rows],
            [row.enqueued_ms for row in rows],
            [row.application_properties for row in rows],
        )

    def patch_columns(self) -> tuple[list[object], ...]:
        rows = self.patches.values()
        return (
            list(self.patches),
            [row.is_deferred for row in rows],
            [row.delivery_count for row in rows],
            [row.application_properties for row in rows],
        )

    def kept_columns(self) -> tuple[list[int], ...]:
        """Return the numbers of moved rows; in ACTIVE the key gives the number."""
        rows = [row for row in self.moves if row.to_sub_queue is not SubQueue.ACTIVE]
        return (
            [row.new_row_key for row in rows],
            [row.entity_no for row in rows],
            [int(row.to_sub_queue) for row in rows],
            [row.sequence for row in rows],
            [row.delivery_count for row in rows],
        )

    def due_columns(self) -> tuple[list[int], ...]:
        rows = self.dues.values()
        return (
            list(self.dues),
            [row.entity_no for row in rows],
            [row.due_ms for row in rows],
            [row.sequence for row in rows],
        )

    def definition_columns(self) -> tuple[list[object], ...]:
        rows = self.definitions.values()
        return (
            list(self.definitions),
            [row.name for row in rows],
            [row.properties.model_dump_json(by_alias=True) for row in rows],
            [row.next_sequence for row in rows],
            [row.catalog_version for row in rows],
        )

    def size_columns(self) -> tuple[list[int], ...]:
        rows = self.sizes.values()
        return (
            list(self.sizes),
            [row.size_bytes for row in rows],
            [row.message_count for row in rows],
        )


def _merged(known: PatchMessage, change: PatchMessage) -> PatchMessage:
    return PatchMessage(
        change.row_key,
        known.is_deferred if change.is_deferred is None else change.is_deferred,
        known.delivery_count if change.delivery_count is None else change.delivery_count,
        change.application_properties or known.application_properties,
    )
