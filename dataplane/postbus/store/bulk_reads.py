"""Reads of ranges of rows for the bulk API, as columns (ADR 42).

Postgres joins the values of each column, so that no row is handled in Python. Each call is one
short statement on a connection for such reads alone, so that no snapshot delays VACUUM and no
receiver waits for it. Rows are as they were stored: settled ones are included, later changes are
not. Called through the journal by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Final, NamedTuple

import asyncpg

from postbus.entity.commands import SubQueue
from postbus.entity.group_commands import GroupKind
from postbus.entity.outcomes import Settling
from postbus.store.migrate import schema_of
from postbus.store.postgres import Store

CHUNK_BYTES: Final = 1 << 20
"""Bytes after which a chunk ends. A larger row is a chunk of its own."""
MAX_CHUNK_ROWS: Final = 4_096
FIRST_ROWS: Final = 64
"""Rows of the first chunk of a range at most: what is settled is in no average size. Our choice:
each row is measured, and one of 100 MB has thousands of rows in `body`."""
NO_ENTITY: Final = (1 << 63) - 1
"""The mark of an entity that was deleted: its rows are being deleted too."""


class Block(NamedTuple):
    """Positions [first, end) of a sub-queue; in ACTIVE position + `offset` is the number."""

    first: int
    end: int
    offset: int


class Columns(NamedTuple):
    """Rows of one block in order of position, column by column.

    Numbers are big-endian, eight bytes each. A column of bytes has the lengths of its values, four
    bytes each, and the values one behind the other; `has_…`: a byte for each row, 1 or 0.
    `sequences` is empty in ACTIVE. `low`: the position below which rows may be missing.
    """

    row_count: int
    last_position: int
    low: int
    positions: bytes
    sequences: bytes
    enqueued_ms: bytes
    envelope_lengths: bytes
    envelopes: bytes
    has_properties: bytes
    property_lengths: bytes
    properties: bytes
    has_body: bytes
    body_lengths: bytes
    bodies: bytes


def next_limit(limit: int, read: Columns) -> int:
    """Return how many rows the chunk after one may have: few are measured and not read."""
    most = min(2 * limit, MAX_CHUNK_ROWS)
    size_bytes = len(read.envelopes) + len(read.properties) + len(read.bodies)
    return min(read.row_count * CHUNK_BYTES // size_bytes + 1, most) if size_bytes else most


class BulkReader:
    """Reads ranges of one partition."""

    def __init__(self, store: Store, partition_id: int) -> None:
        self._store = store
        self._schema = schema_of(partition_id)

    async def low_mark(self, entity_no: int, sub_queue: SubQueue, group: str | None = None) -> int:
        """Return the position below which rows may be missing, for a group if one is named.

        What was deleted before a group was placed is not missing for it.
        """
        async with self._store.bulk() as connection:
            return int(await connection.fetchval(self._sql(LOW), entity_no, int(sub_queue), group))

    async def blocks(
        self, entity_no: int, sub_queue: SubQueue, first: int, end: int
    ) -> list[Block]:
        """Return the blocks of a sub-queue in [first, end), cut to it, in order."""
        async with self._store.bulk() as connection:
            rows = await connection.fetch(self._sql(BLOCKS), entity_no, int(sub_queue), first, end)
        return [
            Block(max(key, first), min(key + size, end), sequence - key)
            for key, size, sequence in rows
        ]

    async def position_at(self, entity_no: int, sub_queue: SubQueue, time_ms: int, end: int) -> int:
        """Return the position below `end` of the first row enqueued since a time, else `end`.

        Dead letters are in order of their deaths: each block may have such a row.
        """
        async with self._store.bulk() as connection:
            found = None
            if sub_queue is SubQueue.ACTIVE:
                found = await connection.fetchval(
                    self._sql(BLOCK_AT), entity_no, int(sub_queue), end, time_ms
                )
            for block in await connection.fetch(
                self._sql(BLOCKS), entity_no, int(sub_queue), found or 0, end
            ):
                position = await connection.fetchval(
                    self._sql(POSITION_AT),
                    block["first_key"],
                    min(block["first_key"] + block["size"], end),
                    time_ms,
                )
                if position is not None:
                    return int(position)
        return end

    async def read(
        self,
        entity_no: int,
        sub_queue: SubQueue,
        block: Block,
        limit: int,
        *,
        group: str | None = None,
        is_drain: bool = False,
        with_properties: bool,
        with_body: bool,
    ) -> Columns:
        """Return the first rows of a block: at most `limit`, and about `CHUNK_BYTES` of them.

        `is_drain`: only messages that the group settles, neither deferred nor settled already;
        there may be none up to `last_position`. It is 0 when nothing is left.
        """
        sql = CHUNK if sub_queue is SubQueue.ACTIVE else CHUNK_KEPT
        sql = sql.replace("{undrained}", UNDRAINED if is_drain else "")
        async with self._store.bulk() as connection:
            parts = await connection.fetch(
                self._sql(sql),
                block.first,
                block.end,
                limit,
                CHUNK_BYTES,
                entity_no,
                int(sub_queue),
                with_properties,
                with_body,
                group,
            )
        count, last_position, low, columns = joined(parts)
        return Columns(count, last_position, low, *columns)

    def _sql(self, sql: str) -> str:
        return sql.replace("{schema}", self._schema)


def joined(parts: Sequence[asyncpg.Record]) -> tuple[int, int, int, list[bytes]]:
    """Return the number of rows of a chunk, its last position, low mark and columns of bytes."""
    last_position, low, _, *nothing = parts[0]
    found = sorted((part for part in parts if part["count"]), key=itemgetter("positions"))
    if not found:
        return 0, last_position, low, [b""] * len(nothing)
    columns = zip(*(part[HEAD_FIELDS:] for part in found), strict=True)
    count = sum(part["count"] for part in found)
    return count, last_position, low, [b"".join(filter(None, each)) for each in columns]


_LOW: Final = """
case when exists (select from {schema}.entity where entity_no = {no}) then coalesce(
    (
        select greatest(
            case when l.low <= g.base then least(l.low, g.settled) else l.low end,
            case when g.kind = {drain} then g.settled end
        )
        from (select {no} as entity_no, {queue}::smallint as sub_queue) place
        left join {schema}.low_mark l using (entity_no, sub_queue)
        left join {schema}.reader_group g
            on g.entity_no = {no} and g.sub_queue = {queue}::smallint and g.name = {group}::text
    ), 0
) else 9223372036854775807 end
""".replace("{drain}", str(int(GroupKind.DRAIN)))
LOW: Final = "select" + _LOW.replace("{no}", "$1").replace("{queue}", "$2").replace("{group}", "$3")
BLOCKS: Final = """
select first_key, size, first_sequence from {schema}.block
where entity_no = $1 and sub_queue = $2::smallint and first_key < $4 and first_key + size > $3
order by first_key
"""
BLOCK_AT: Final = """
select max(b.first_key)
from {schema}.block b
cross join lateral (
    select m.enqueued_ms from {schema}.message m
    where m.row_key >= b.first_key and m.row_key < b.first_key + b.size
    order by m.row_key limit 1
) as first
where b.entity_no = $1 and b.sub_queue = $2::smallint and b.first_key < $3
  and first.enqueued_ms < $4
"""
"""The last block that begins before a time: the first row from then on is in it or in the next."""
POSITION_AT: Final = """
select row_key from {schema}.message
where row_key >= $1 and row_key < $2 and enqueued_ms >= $3
order by row_key limit 1
"""
PART_ROWS: Final = 32
HEAD_FIELDS: Final = 3
"""Fields of a row of an answer before its columns: last position, low mark, count."""
CHUNK_OF: Final = """
with measured as materialized (
    select m.row_key,
           octet_length(m.envelope)
           + case when $7::boolean then coalesce(octet_length(m.application_properties), 0)
                  else 0
             end
           + case when not $8::boolean then 0
                  when m.body_id is null then coalesce(octet_length(m.body), 0)
                  else (
                      select coalesce(sum(octet_length(b.data)), 0) from {schema}.body b
                      where b.body_id = m.body_id
                  )
             end as size_bytes
    from {measured} m
    order by m.row_key
    limit $3
), cut as (
    select count(*) < $3 and coalesce(sum(size_bytes), 0) <= $4 as is_whole,
           case when sum(size_bytes) <= $4 * 5 / 4 then max(row_key) else (
               select max(row_key) from (
                   select row_key, sum(size_bytes) over (
                       order by row_key rows unbounded preceding
                   ) - size_bytes as bytes_before
                   from measured
               ) as weighed
               where bytes_before < $4
           ) end as last
    from measured
)
select coalesce({last}, 0) as last_position, {low} as low, joined.*
from cut left join lateral (
    select part.* from generate_series($1::bigint, cut.last, {part_rows}) as part_of (first)
    cross join lateral (
        select count(*) as count,
               string_agg(int8send(row_key), ''::bytea) as positions,
               string_agg({sent_sequence}, ''::bytea) as sequences,
               string_agg(int8send(enqueued_ms), ''::bytea) as enqueued,
               string_agg(int4send(octet_length(envelope)), ''::bytea) as envelope_lengths,
               string_agg(envelope, ''::bytea) as envelopes,
               string_agg(
                   case when application_properties is null then '\\x00'::bytea
                        else '\\x01'::bytea
                   end, ''::bytea
               ) as has_properties,
               string_agg(
                   int4send(coalesce(octet_length(application_properties), 0)), ''::bytea
               ) as property_lengths,
               string_agg(application_properties, ''::bytea) as properties,
               string_agg(
                   case when body is null then '\\x00'::bytea else '\\x01'::bytea end, ''::bytea
               ) as has_body,
               string_agg(int4send(coalesce(octet_length(body), 0)), ''::bytea) as body_lengths,
               string_agg(body, ''::bytea) as bodies {more_sent}
        from (
            select m.row_key, m.enqueued_ms, m.envelope, {sequence} as sequence, {more}
                   case when $7::boolean then m.application_properties
                   end as application_properties,
                   case when not $8::boolean then null
                        when m.body_id is null then m.body
                        else (
                            select string_agg(b.data, ''::bytea order by b.chunk)
                            from {schema}.body b where b.body_id = m.body_id
                        )
                   end as body
            from {rows}
            order by m.row_key
            limit {part_rows}
        ) as row
    ) as part
    where part.count > 0
) as joined on true
""".replace("{part_rows}", str(PART_ROWS))
"""Arguments: first key and end, most rows, bytes; $7, $8: with properties, with body. What is in
braces depends on who reads.

Rows are measured before they are read. A row of the answer has up to `PART_ROWS` messages: values
of megabytes would make Postgres allocate and free memory of the system for each chunk, half of the
time of a read."""
IN_PART: Final = f"""
    m.row_key >= part_of.first and m.row_key <= least(part_of.first + {PART_ROWS - 1}, cut.last)"""
_CHUNK: Final = (
    CHUNK_OF.replace(
        "{measured}",
        "(select * from {schema}.message m where m.row_key >= $1 and m.row_key < $2)",
    )
    .replace("{rows}", f"{{schema}}.message m where {IN_PART} {{undrained}}")
    .replace("{more}", "")
    .replace("{more_sent}", "")
    .replace("{last}", "cut.last")
    .replace("{low}", _LOW)
    .replace("{no}", "$5")
    .replace("{queue}", "$6")
    .replace("{group}", "$9")
)
UNDRAINED: Final = """
and not exists (
    select from {schema}.settled s
    where s.row_key = m.row_key and not (
        s.how = {rejected} and s.settled_ms >= (
            select placed_ms from {schema}.reader_group
            where entity_no = $5 and sub_queue = $6::smallint and name = $9::text
        )
    )
)
and not exists (
    select from {schema}.patch p where p.row_key = m.row_key and p.is_deferred
)
""".replace("{rejected}", str(int(Settling.REJECTED)))
"""Rows that the group itself has rejected are read again with their range."""
CHUNK: Final = _CHUNK.replace("{sequence}", "null::bigint").replace(
    "{sent_sequence}", "null::bytea"
)
CHUNK_KEPT: Final = _CHUNK.replace(
    "{sequence}", "(select k.sequence from {schema}.kept k where k.row_key = m.row_key)"
).replace("{sent_sequence}", "int8send(coalesce(sequence, 0))")
"""Outside ACTIVE the number of a row is in `kept`. A join may merge the two indexes from the first
row of `kept` on; a subquery looks its row up."""
