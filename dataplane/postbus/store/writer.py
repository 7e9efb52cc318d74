"""A writer connection: prepared statements, and their arguments from a batch.

Each commit is one statement of `statements.py`, the smallest that suffices, or one message of
`pipelined.py`. Called by the journal.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias, TypeVar

import asyncpg.prepared_stmt

from postbus.entity.outcomes import (
    InsertMessage,
    Mutation,
    RecordIds,
    ReserveBlock,
    SettleRows,
    ShareBody,
)
from postbus.message.envelope import Envelope
from postbus.message.rows import pack_envelope
from postbus.store.batch import INLINE_BODY_BYTES, STAGED_BODY_BYTES, Batch, RowKind, SideRows
from postbus.store.changes import BatchChanges
from postbus.store.errors import Connection
from postbus.store.mutation_traits import TRAITS, Tier
from postbus.store.pipelined import (
    END_PREPARING,
    PipelinedCommits,
    message_of,
    rows_of,
    rows_with_bodies,
)
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
    Commit,
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

        `is_pipelined`: plain commits are one message, if the driver allows.
        """
        if is_pipelined:
            self._pipelined = await PipelinedCommits.on(self.connection)
            if self._pipelined is None:
                logger.warning("commits are statements: the driver does not show its transport")
        if self._pipelined is None:
            for sql in (INSERT_ONE, DELETE_ONE, INSERT, DELETE, MIXED):
                await self._prepare(sql)
            await self.connection.execute(END_PREPARING)

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
            await self._change(batch, kind)
        elif self._pipelined is not None:
            _refuse_own_rows(batch)
            message = message_of(deletes=batch.deletes, rows=rows_of(batch.inserts))
            await self._send(batch, self._pipelined, message)
        else:
            await self._execute(batch, *_translate_plain(batch))
        if self._sides.keys:
            self._sides.forget(batch.deletes)
            for change in batch.mutations:
                if type(change) is SettleRows:
                    self._sides.forget(change.row_keys)

    async def _send(self, batch: Batch[P], commits: PipelinedCommits, message: bytes) -> None:
        batch.is_sent = not self.connection.is_closed()
        released = await commits.commit(message)
        if released is not None:
            self._sides.bodies.release(released)

    async def _execute(self, batch: Batch[P], sql: str, arguments: Sequence[object]) -> None:
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

    # --- more than plain rows ---------------------------------------------------------------------

    async def _change(self, batch: Batch[P], kind: int) -> None:
        """Commit a batch with more than plain rows. `kind`: of the deleted ones."""
        _refuse_own_rows(batch)
        inserts, deletes, sides = batch.inserts, batch.deletes, self._sides
        kinds = set(map(type, batch.mutations))
        tier = max((TRAITS[each].tier for each in kinds), default=Tier.LIGHT)
        if kind == RowKind.SHARING and not (inserts or kinds):
            await self._execute(batch, TAKE, (deletes, sides.bodies.take_dead()))
            return
        changes = BatchChanges(batch.mutations)
        is_kept = SettleRows in kinds
        if kind == RowKind.PLAIN and not batch.is_large and tier <= Tier.IDS:
            statement = KEEP if is_kept else _smallest_plain(kinds)
            if statement is not None:
                columns = changes.light_columns() | {"deletes": deletes}
                if is_kept:
                    columns |= changes.settled_columns()
                await self._with_rows(batch, statement, columns, None)
                return
        bodies = _Bodies(batch, changes.shares, sides)
        arguments = changes.light_columns() | bodies.side_columns()
        if is_kept:
            arguments |= changes.settled_columns()
        arguments["deletes"] = deletes
        arguments["dead_bodies"] = sides.bodies.take_dead()
        if kind != RowKind.SIDED and tier <= Tier.PUBLISH and not bodies.staged:
            await self._with_rows(batch, KEEP_PUBLISH if is_kept else PUBLISH, arguments, bodies)
            return
        changes.note_sides(sides)
        arguments |= bodies.row_columns() | changes.row_columns()
        arguments["staged_ids"] = bodies.staged
        if is_kept:
            arguments |= changes.copy_columns() | changes.full_columns()
            await self._execute(batch, *_filled(RETAIN, arguments))
        elif tier <= Tier.GENERAL:
            await self._execute(batch, *_filled(GENERAL, arguments))
        else:
            await self._execute(batch, *_filled(FULL, arguments | changes.full_columns()))

    async def _with_rows(
        self,
        batch: Batch[P],
        statement: Commit,
        arguments: dict[str, object],
        bodies: _Bodies | None,
    ) -> None:
        """Commit changes and rows: those go beside the statement as a COPY, or are arguments.

        `bodies`: where those of the rows are, None if they are all in the rows.
        """
        if self._pipelined is None:
            columns = _plain_columns(batch.inserts) if bodies is None else bodies.row_columns()
            await self._execute(batch, *_filled(statement.whole, arguments | columns))
            return
        sql, filled = _filled(statement.beside, arguments)
        bound = (await self._pipelined.prepared(sql)).bind(filled)
        rows = rows_of(batch.inserts) if bodies is None else bodies.rows()
        await self._send(batch, self._pipelined, message_of(statement=bound, rows=rows))


def _smallest_plain(kinds: set[type[Mutation]]) -> Commit | None:
    """Return the smallest statement for plain rows and these kinds, None if `PUBLISH` is."""
    if kinds == ONLY_IDS:
        return SEEN
    return None if RecordIds in kinds else CHANGES


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
    _refuse_own_rows(batch)
    return MIXED, (*_insert_columns(inserts), deletes)


def _filled(statement: Named, arguments: dict[str, object]) -> tuple[str, tuple[object, ...]]:
    return statement.sql, tuple(arguments[name] for name in statement.names)


def _refuse_own_rows(batch: Batch[P]) -> None:
    """Check that a batch does not delete its own rows, which no order of its parts can do."""
    if batch.inserts and batch.deletes:
        row_keys = [insert[0] for insert in batch.inserts]
        if max(batch.deletes) >= min(row_keys):
            assert set(row_keys).isdisjoint(batch.deletes), "touches_uncommitted is not set"


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


def _plain_columns(inserts: list[InsertMessage]) -> dict[str, object]:
    names = ("keys", "enqueued", "envelopes", "properties", "bodies")
    return dict(zip(names, _insert_columns(inserts), strict=True))


class _Bodies:
    """Inserts of a batch whose bodies are not all in their rows; `sides` is updated."""

    def __init__(self, batch: Batch[P], shares: list[ShareBody], sides: SideRows) -> None:
        self.staged: list[int] = []
        self._inserts = inserts = batch.inserts
        self._keys = [insert[0] for insert in inserts]
        self._bodies = [insert[2].body or None for insert in inserts]
        self._body_ids: list[int | None] = [None] * len(inserts)
        self._inline: dict[int, bytes] = {}
        self._shared: dict[int, bytes] = {}
        self._has_shares = bool(shares)
        self._has_ids = False
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
        self._has_ids = True
        if len(body) <= STAGED_BODY_BYTES:
            self._inline[body_id] = body
        elif not self.staged or self.staged[-1] != body_id:
            self.staged.append(body_id)

    def side_columns(self) -> dict[str, object]:
        """Return the columns of bodies beside their rows."""
        return {
            "inline_ids": list(self._inline),
            "inline_bodies": list(self._inline.values()),
            "shared_ids": list(self._shared),
            "shared_keys": list(self._shared.values()),
        }

    def row_columns(self) -> dict[str, object]:
        """Return the columns of rows."""
        envelopes = [insert[2] for insert in self._inserts]
        return {
            "keys": self._keys,
            "enqueued": [insert[1] for insert in self._inserts],
            "envelopes": self._packed(envelopes),
            "properties": [envelope.application_properties or None for envelope in envelopes],
            "bodies": self._bodies,
            "body_ids": self._body_ids,
        }

    def rows(self) -> Sequence[bytes]:
        """Return the messages for the rows."""
        if not self._has_ids:
            return rows_of(self._inserts)
        envelopes = [insert[2] for insert in self._inserts]
        return rows_with_bodies(
            self._inserts, self._packed(envelopes), self._bodies, self._body_ids
        )

    def _packed(self, envelopes: list[Envelope]) -> list[bytes]:
        """Return packed envelopes. Copies with one envelope are packed once."""
        if not self._has_shares:
            return [pack_envelope(envelope) for envelope in envelopes]
        packed = {id(envelope): envelope for envelope in envelopes}
        blobs = {number: pack_envelope(envelope) for number, envelope in packed.items()}
        return [blobs[id(envelope)] for envelope in envelopes]
