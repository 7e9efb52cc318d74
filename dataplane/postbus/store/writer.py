"""A writer connection: prepared statements, and their arguments from a batch.

Each commit is one statement of `statements.py`, the smallest that suffices, or one message of
`pipelined.py`. Called by the journal.
"""

from __future__ import annotations

import logging
import sys
from array import array
from typing import Final, TypeAlias, TypeVar

import asyncpg.prepared_stmt

from postbus.entity.outcomes import (
    InsertMessage,
    RecordIds,
    ReserveBlock,
    SettleRows,
    ShareBody,
)
from postbus.message.rows import pack_envelope
from postbus.store.batch import INLINE_BODY_BYTES, STAGED_BODY_BYTES, Batch, RowKind, SideRows
from postbus.store.changes import BatchChanges
from postbus.store.errors import Connection
from postbus.store.mutation_traits import TRAITS, Tier
from postbus.store.pipelined import PipelinedCommits, message_of
from postbus.store.statements import (
    CHANGES,
    DELETE,
    DELETE_ONE,
    FULL,
    GENERAL,
    INSERT,
    INSERT_ONE,
    KEEP,
    KEEP_PUBLISH,
    MIXED,
    PUBLISH,
    RETAIN,
    SEEN,
    TAKE,
    Named,
)

logger = logging.getLogger(__name__)

P = TypeVar("P")
Statement: TypeAlias = "asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record]"

ONLY_IDS: Final = frozenset({RecordIds})


class Writer:
    """A connection that commits batches and keeps `sides` up to date."""

    def __init__(self, connection: Connection, sides: SideRows) -> None:
        self.connection = connection
        self._sides = sides
        self._pipelined: PipelinedCommits | None = None
        self._statements: dict[str, Statement] = {}

    async def prepare(self, *, is_pipelined: bool) -> None:
        """Prepare the hot statements; the others are prepared at first use.

        `is_pipelined`: plain commits of several rows are one message, if the driver allows.
        """
        if is_pipelined:
            self._pipelined = await PipelinedCommits.on(self.connection)
            if self._pipelined is None:
                logger.warning("commits are statements: the driver does not show its transport")
        several = () if self._pipelined is not None else (INSERT, DELETE, MIXED)
        for sql in (INSERT_ONE, DELETE_ONE, *several):
            await self._prepare(sql)
        # The driver ends no transaction after a prepare: we would hold table locks while idle.
        await self.connection.execute("select 1")

    async def _prepare(self, sql: str) -> Statement:
        """Prepare a named statement: without a name the driver sends its text each time."""
        name = f"postbus_{len(self._statements)}"
        statement = self._statements[sql] = await self.connection.prepare(sql, name=name)
        return statement

    async def commit(self, batch: Batch[P]) -> None:
        """Make a batch durable; raises the driver's exceptions."""
        if not (batch.inserts or batch.deletes or batch.mutations):
            return
        for change in batch.mutations:
            if type(change) is ReserveBlock:
                self._sides.add_block(change)
        kind = self._sides.kind_of(batch.deletes) if batch.deletes else RowKind.PLAIN
        if batch.mutations or kind != RowKind.PLAIN or batch.is_large:
            await self._execute(batch, *self._translate_changes(batch, kind))
        elif self._pipelined is not None and len(batch.inserts) + len(batch.deletes) > 1:
            if batch.inserts and batch.deletes:
                _refuse_own_rows([insert[0] for insert in batch.inserts], batch.deletes)
            message = message_of(batch.inserts, batch.deletes)
            batch.is_sent = not self.connection.is_closed()
            await self._pipelined.commit(message)
        else:
            await self._execute(batch, *_translate_plain(batch))
        if self._sides.keys:
            self._sides.forget(batch.deletes)
            for change in batch.mutations:
                if type(change) is SettleRows:
                    self._sides.forget(change.row_keys)

    async def _execute(self, batch: Batch[P], sql: str, arguments: tuple[object, ...]) -> None:
        statement = self._statements.get(sql)
        if statement is None:
            statement = await self._prepare(sql)
        batch.is_sent = not self.connection.is_closed()  # else the driver refuses, nothing is sent
        answer = await statement.fetch(*arguments)
        if answer:
            self._count_bodies(answer[0])

    def _count_bodies(self, answer: asyncpg.Record) -> None:
        """Update the counts of bodies of copied and deleted rows from a commit's result."""
        bodies = self._sides.bodies
        if (retained := answer.get("retained")) is not None:
            bodies.retain(retained)
        if (released := answer["released"]) is not None:
            bodies.release(released)
        if (orphaned := answer.get("orphaned")) is not None:
            bodies.orphan(orphaned)

    def _translate_changes(self, batch: Batch[P], kind: int) -> tuple[str, tuple[object, ...]]:
        """Return the statement and arguments for a batch with more than plain rows."""
        inserts, deletes, sides = batch.inserts, batch.deletes, self._sides
        kinds = set(map(type, batch.mutations))
        tier = max((TRAITS[each].tier for each in kinds), default=Tier.LIGHT)
        if kind == RowKind.SHARING and not (inserts or kinds):
            return TAKE, (deletes, sides.bodies.take_dead())
        changes = BatchChanges(batch.mutations)
        is_plain = kind == RowKind.PLAIN and not batch.is_large
        if SettleRows in kinds:
            return self._translate_settled(batch, changes, kind, tier)
        if is_plain and (tier == Tier.LIGHT or kinds == ONLY_IDS):
            keys, *others = _insert_columns(inserts)
            if keys and deletes:
                _refuse_own_rows(keys, deletes)
            rows = (keys, *others, deletes)
            if kinds == ONLY_IDS:
                return SEEN, (*rows, *changes.seen_columns().values())
            return CHANGES, (*rows, *changes.plain_columns().values())
        bodies = _Bodies(batch, changes.shares, sides)
        arguments = changes.light_columns() | bodies.columns()
        arguments["deletes"] = deletes
        arguments["dead_bodies"] = sides.bodies.take_dead()
        if kind != RowKind.SIDED and tier <= Tier.PUBLISH and not bodies.staged:
            return _filled(PUBLISH, arguments)
        changes.note_sides(sides)
        arguments |= changes.row_columns()
        arguments["staged_ids"] = bodies.staged
        if tier <= Tier.GENERAL:
            return _filled(GENERAL, arguments)
        return _filled(FULL, arguments | changes.full_columns())

    def _translate_settled(
        self, batch: Batch[P], changes: BatchChanges, kind: int, tier: Tier
    ) -> tuple[str, tuple[object, ...]]:
        """Return statement and arguments for settled rows that stay; `tier`: of all mutations."""
        sides = self._sides
        arguments = changes.light_columns() | changes.settled_columns()
        arguments["deletes"] = batch.deletes
        if kind == RowKind.PLAIN and not batch.is_large and tier <= Tier.IDS:
            columns = _insert_columns(batch.inserts)
            if columns[0] and batch.deletes:
                _refuse_own_rows(columns[0], batch.deletes)
            names = ("keys", "enqueued", "envelopes", "properties", "bodies")
            return _filled(KEEP, arguments | dict(zip(names, columns, strict=True)))
        bodies = _Bodies(batch, changes.shares, sides)
        arguments |= bodies.columns()
        arguments["dead_bodies"] = sides.bodies.take_dead()
        if kind != RowKind.SIDED and tier <= Tier.PUBLISH and not bodies.staged:
            return _filled(KEEP_PUBLISH, arguments)
        changes.note_sides(sides)
        arguments["staged_ids"] = bodies.staged
        arguments |= changes.row_columns() | changes.copy_columns()
        return _filled(RETAIN, arguments | changes.full_columns())


def _translate_plain(batch: Batch[P]) -> tuple[str, tuple[object, ...]]:
    """Return the smallest sufficient statement and its arguments."""
    inserts, deletes = batch.inserts, batch.deletes
    if not deletes:
        if len(inserts) == 1:  # a single client: a plan without arrays is faster
            return INSERT_ONE, tuple(column[0] for column in _insert_columns(inserts))
        return INSERT, _insert_columns(inserts)
    if not inserts:
        if len(deletes) == 1:
            return DELETE_ONE, (deletes[0],)
        return DELETE, (deletes,)
    columns = _insert_columns(inserts)
    _refuse_own_rows(columns[0], deletes)
    return MIXED, (*columns, deletes)


def _filled(statement: Named, arguments: dict[str, object]) -> tuple[str, tuple[object, ...]]:
    return statement.sql, tuple(arguments[name] for name in statement.names)


def _refuse_own_rows(row_keys: list[int], deletes: list[int]) -> None:
    """Check that a batch does not delete its own rows, which one statement cannot do."""
    if max(deletes) >= min(row_keys):
        assert set(row_keys).isdisjoint(deletes), "touches_uncommitted is not set"


def _insert_columns(
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


class _Bodies:
    """Inserts of a batch whose bodies are not all in their rows; `sides` is updated."""

    def __init__(self, batch: Batch[P], shares: list[ShareBody], sides: SideRows) -> None:
        self.staged: list[int] = []
        self._inserts = inserts = batch.inserts
        self._keys = [insert[0] for insert in inserts]
        if self._keys and batch.deletes:
            _refuse_own_rows(self._keys, batch.deletes)
        self._bodies = [insert[2].body or None for insert in inserts]
        self._body_ids: list[int | None] = [None] * len(inserts)
        self._inline: dict[int, bytes] = {}
        self._shared: dict[int, bytes] = {}
        self._has_shares = bool(shares)
        if shares:
            index_of = {key: index for index, key in enumerate(self._keys)}
            for share in shares:
                self._share(share, index_of, sides)
        if batch.is_large:
            for index, body in enumerate(self._bodies):
                if body is not None and len(body) > INLINE_BODY_BYTES:
                    self._take_out(index, self._keys[index], body)
                    sides.keys.add(self._keys[index])

    def _share(self, share: ShareBody, index_of: dict[int, int], sides: SideRows) -> None:
        """Store the body of these rows once, except for rows that were received immediately."""
        keys = [key for key in share.row_keys if key in index_of]
        if not keys:
            return
        body_id = share.row_keys[0]
        body = self._bodies[index_of[keys[0]]]
        if body is None:
            return
        for key in keys:
            self._take_out(index_of[key], body_id, body)
        packed = array("q", keys)
        if sys.byteorder == "big":
            packed.byteswap()
        self._shared[body_id] = packed.tobytes()
        sides.note_share(body_id, keys, is_large=len(body) > INLINE_BODY_BYTES)

    def _take_out(self, index: int, body_id: int, body: bytes) -> None:
        self._bodies[index], self._body_ids[index] = None, body_id
        if len(body) <= STAGED_BODY_BYTES:
            self._inline[body_id] = body
        elif not self.staged or self.staged[-1] != body_id:
            self.staged.append(body_id)

    def columns(self) -> dict[str, object]:
        """Return the columns of rows and bodies. Copies with one envelope are packed once."""
        envelopes = [insert[2] for insert in self._inserts]
        if self._has_shares:
            packed = {id(envelope): envelope for envelope in envelopes}
            blobs = {number: pack_envelope(envelope) for number, envelope in packed.items()}
            columns = [blobs[id(envelope)] for envelope in envelopes]
        else:
            columns = [pack_envelope(envelope) for envelope in envelopes]
        return {
            "keys": self._keys,
            "enqueued": [insert[1] for insert in self._inserts],
            "envelopes": columns,
            "properties": [envelope.application_properties or None for envelope in envelopes],
            "bodies": self._bodies,
            "body_ids": self._body_ids,
            "inline_ids": list(self._inline),
            "inline_bodies": list(self._inline.values()),
            "shared_ids": list(self._shared),
            "shared_keys": list(self._shared.values()),
        }
