"""Reads of ranges of rows as they are now, without a reader group.

A peek returns what is live, a history what is kept besides. Each call is one short statement on the
connection for bulk reads, which looks at `SCAN_ROWS` rows at most: between two live messages there
may be millions that are kept. Rows have the changes of receivers. Called by the broker.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from postbus.contract.bulk import Selection
from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import Settling
from postbus.store.bulk_reads import (
    CHUNK_BYTES,
    CHUNK_OF,
    HEAD_FIELDS,
    IN_PART,
    NO_ENTITY,
    Columns,
    joined,
)
from postbus.store.migrate import schema_of
from postbus.store.parts import unsettled_ranges
from postbus.store.postgres import Store
from postbus.store.reads import has_rows

SCAN_ROWS: Final = 16_384
"""Rows that one statement looks at. Source: measured for marks, 30 ms (`look_keys`)."""


class Piece(NamedTuple):
    """Positions [first, end) of a block; in ACTIVE position + `offset` is the number."""

    first: int
    end: int
    offset: int
    sub_queue: SubQueue


class Present(NamedTuple):
    """Values that change later, of the rows of `Columns`, packed as these are.

    `is_settled`: a byte for each row, 1 or 0. A live row has a delivery count and a state, a
    settled one a time and a settlement; the others are 0 or "". States and settlements are names.
    """

    delivery_counts: bytes
    state_lengths: bytes
    states: bytes
    is_settled: bytes
    settled_ms: bytes
    settlement_lengths: bytes
    settlements: bytes


class BrowseReader:
    """Reads ranges of one partition."""

    def __init__(self, store: Store, partition_id: int) -> None:
        self._store = store
        self._schema = schema_of(partition_id)

    async def pieces(
        self, entity_no: int, sub_queue: SubQueue, first: int, end: int, selection: Selection
    ) -> list[Piece]:
        """Return where rows of a sub-queue may lie in [first, end), in order.

        A peek leaves out what is marked as settled (ADR 44), and finds scheduled messages in
        ACTIVE, as receivers do.
        """
        kinds = [int(sub_queue)]
        if sub_queue is SubQueue.ACTIVE and not selection.is_history:
            kinds.append(int(SubQueue.SCHEDULED))
        async with self._store.bulk() as connection:
            rows = await connection.fetch(self._sql(BLOCKS), entity_no, kinds, first, end)
        found: list[Piece] = []
        for key, size, sequence, kind, settled_parts in rows:
            ranges, _ = unsettled_ranges(
                [(key, size, 0 if selection.is_history else settled_parts)]
            )
            found += [
                Piece(max(low, first), min(high, end), sequence - key, SubQueue(kind))
                for low, high in ranges
                if low < end and high > first
            ]
        return found

    async def attempts(self, piece: Piece) -> str | None:
        """Return the attempts of a piece that are not in `patch` yet, by key as JSON.

        Read once for a piece: all records of a partition are looked at, 0.5 s for half a million.
        """
        async with self._store.bulk() as connection:
            found = await connection.fetchval(self._sql(ATTEMPTS), piece.first, piece.end)
        assert found is None or isinstance(found, str)
        return found

    async def read(
        self,
        entity_no: int,
        piece: Piece,
        limit: int,
        selection: Selection,
        *,
        with_properties: bool,
        with_body: bool,
        with_present: bool,
        attempts: str | None,
    ) -> tuple[Columns, Present]:
        """Return the first rows of a piece: at most `limit`, and about `CHUNK_BYTES` of them.

        There may be none before `last_position`, up to which all are read; 0: nothing is left.
        `low` is 0, or `NO_ENTITY`. `attempts` counts with `with_present` only.
        """
        sql = HISTORY if selection.is_history else PEEK
        is_active = piece.sub_queue is SubQueue.ACTIVE
        sql = sql.replace("{sent_sequence}", SENT[is_active])
        async with self._store.bulk() as connection:
            parts = await connection.fetch(
                self._sql(sql),
                piece.first,
                piece.end,
                limit,
                CHUNK_BYTES,
                entity_no,
                SCAN_ROWS,
                with_properties,
                with_body,
                with_present,
                attempts,
                *((selection.from_ms, selection.to_ms) if selection.is_history else ()),
            )
        count, last_position, low, columns = joined(parts)
        size = len(Columns._fields) - HEAD_FIELDS
        return Columns(count, last_position, low, *columns[:size]), Present(*columns[size:])

    def _sql(self, sql: str) -> str:
        return sql.replace("{schema}", self._schema)


def _settlement_of(how: Settling) -> str:
    match how:
        case Settling.COMPLETED:
            return "completed"
        case Settling.RECEIVED:
            return "receivedAndDeleted"
        case Settling.EXPIRED:
            return "expired"
        case Settling.PURGED:
            return "purged"
        case Settling.DEAD_LETTERED:
            return "deadLettered"
        case Settling.RESENT:
            return "resent"
        case Settling.FORWARDED:
            return "forwarded"
        case Settling.REJECTED:
            return "rejected"


SETTLEMENTS: Final = {each: _settlement_of(each) for each in Settling}
_SETTLEMENT: Final = " ".join(
    f"when {each:d} then '{name}'::bytea" for each, name in SETTLEMENTS.items()
)

BLOCKS: Final = """
select first_key, size, first_sequence, sub_queue, settled_parts from {schema}.block
where entity_no = $1 and sub_queue = any ($2::smallint[])
  and first_key < $4 and first_key + size > $3
order by first_key
"""
_MEASURED: Final = """(
        select w.row_key, w.envelope, w.body, w.body_id,
               coalesce(p.application_properties, w.application_properties)
                   as application_properties
        from (
            select * from {schema}.message where row_key >= $1 and row_key < $2
            order by row_key limit $6
        ) w
        left join lateral (
            select p.* from {schema}.patch p where {any_patch} and p.row_key = w.row_key limit 1
        ) p on true
        where {measured_wanted}
    )"""
_ROWS: Final = """(
        select w.row_key, w.enqueued_ms, w.envelope, w.body, w.body_id,
               coalesce(p.application_properties, w.application_properties)
                   as application_properties,
               coalesce(p.is_deferred, false) as is_deferred, s.how, s.settled_ms,
               greatest(p.delivery_count, k.delivery_count, 0) as stored_count,
               d.row_key is not null as is_scheduled, coalesce(k.sequence, d.sequence) as sequence
        from (select m.* from {schema}.message m where {in_part} order by m.row_key) w
        left join lateral (
            select s.how, s.settled_ms from {schema}.settled s
            where {any_settled} and s.row_key = w.row_key limit 1
        ) s on true
        left join lateral (
            select p.* from {schema}.patch p where {any_patch} and p.row_key = w.row_key limit 1
        ) p on true
        left join lateral (
            select k.sequence, k.delivery_count from {schema}.kept k
            where {any_kept} and k.row_key = w.row_key limit 1
        ) k on true
        left join lateral (
            select d.row_key, d.sequence from {schema}.due d
            where {any_due} and d.row_key = w.row_key limit 1
        ) d on true
        where {wanted}
    ) m"""
"""Without the limits joins may be merged or hashed, which reads whole tables for a page.

`{any_…}`: whether a table has a row of the piece, asked once a chunk. Most have none, and looking
for each message in four empty tables is half of the time of a read."""


_MORE: Final = """
           case when $9::boolean and m.how is null then
               coalesce(($10::jsonb ->> m.row_key::text)::int, m.stored_count)
           end as delivery_count,
           case when $9::boolean and m.how is null then
               case when m.is_scheduled then 'scheduled'::bytea
                    when m.is_deferred then 'deferred'::bytea else 'active'::bytea end
           end as state,
           case when $9::boolean then m.how end as how,
           case when $9::boolean then m.settled_ms end as settled_ms,
           case when $9::boolean then case m.how {settlement} end end as settlement,
"""
ATTEMPTS: Final = """
select jsonb_object_agg(u.row_key::text, u.attempt order by a.id)::text
from {schema}.acquired a, unnest(a.row_keys, a.attempts) as u (row_key, attempt)
where u.row_key >= $1 and u.row_key < $2
"""
"""The last record of a row counts."""
_MORE_SENT: Final = """,
       string_agg(int8send(coalesce(delivery_count, 0)), ''::bytea) as delivery_counts,
       string_agg(int4send(coalesce(octet_length(state), 0)), ''::bytea) as state_lengths,
       string_agg(state, ''::bytea) as states,
       string_agg(
           case when how is null then '\\x00'::bytea else '\\x01'::bytea end, ''::bytea
       ) as is_settled,
       string_agg(int8send(coalesce(settled_ms, 0)), ''::bytea) as settled_ms,
       string_agg(int4send(coalesce(octet_length(settlement), 0)), ''::bytea)
           as settlement_lengths,
       string_agg(settlement, ''::bytea) as settlements
"""
_LAST: Final = """
    case when cut.is_whole then (
        select max(row_key) from (
            select row_key from {schema}.message where row_key >= $1 and row_key < $2
            order by row_key limit $6
        ) as looked_at
    ) else cut.last end"""
"""A chunk that was not cut ends with the last row that was looked at."""
_GONE: Final = f"""
    case when exists (select from {{schema}}.entity where entity_no = $5) then 0
         else {NO_ENTITY} end"""
_CHUNK: Final = (
    CHUNK_OF.replace("{measured}", _MEASURED)
    .replace("{rows}", _ROWS)
    .replace("{in_part}", IN_PART)
    .replace("{any_settled}", has_rows("settled", "$1", "$2"))
    .replace("{any_patch}", has_rows("patch", "$1", "$2"))
    .replace("{any_kept}", has_rows("kept", "$1", "$2"))
    .replace("{any_due}", has_rows("due", "$1", "$2"))
    .replace("{sequence}", "m.sequence")
    .replace("{more}", _MORE)
    .replace("{more_sent}", _MORE_SENT)
    .replace("{last}", _LAST)
    .replace("{low}", _GONE)
    .replace("{settlement}", _SETTLEMENT)
)
IS_LIVE: Final = f"""
    (
        select true from {{schema}}.settled s
        where {has_rows("settled", "$1", "$2")} and s.row_key = w.row_key limit 1
    ) is null"""
PEEK: Final = _CHUNK.replace("{measured_wanted}", IS_LIVE).replace("{wanted}", "s.how is null")
IN_TIME: Final = "w.enqueued_ms >= $11 and w.enqueued_ms < $12"
HISTORY: Final = _CHUNK.replace("{measured_wanted}", IN_TIME).replace("{wanted}", IN_TIME)
SENT: Final = {True: "null::bytea", False: "int8send(coalesce(sequence, 0))"}
"""In ACTIVE the number follows from the position; elsewhere it is beside the row."""
