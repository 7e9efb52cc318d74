"""Reads of messages: pages of rows on the store's read connection.

Each call is one or two short statements, so that no snapshot delays VACUUM. Rows include the
columns of side tables, which a statement looks at for single rows only if they have any in its
range: four index searches a row were three quarters of a read. Called through the journal by the
host's read connections.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from operator import itemgetter
from typing import Final

import asyncpg

from postbus.entity.commands import Death, Receiver, StoredRow, SubQueue
from postbus.message.rows import unpack_envelope
from postbus.message.runs import unpack_usual_rows
from postbus.store.changes import SEEN_SPAN_MS
from postbus.store.errors import Connection
from postbus.store.migrate import schema_of
from postbus.store.pipelined import key_ranges
from postbus.store.postgres import Store

PAGE_ROWS: Final = 1_000
"""Rows of one statement. Source: measured, pages of 1000 read 4-5 times faster than of 100."""


DIGEST_BYTES: Final = 16

BODY_ID, KEPT = 5, 8
"""Indexes of columns in `COLUMNS`: a name costs more, and these reads are a backlog's receive."""

RANGE_KEYS: Final = 3
"""Keys that a range must have on average: with fewer, one search for each key costs less."""


class Reader:
    """Reads rows of one partition."""

    def __init__(self, store: Store, partition_id: int) -> None:
        self._store = store
        self._by_key = _qualified(BY_KEY, partition_id)
        self._by_ranges = _qualified(BY_RANGES, partition_id)
        self._by_range = _qualified(BY_RANGE, partition_id)
        self._by_number = _qualified(BY_NUMBER, partition_id)
        self._by_name = _qualified(BY_NAME, partition_id)
        self._bodies = _qualified(BODIES, partition_id)
        self._states = _qualified(STATES, partition_id)
        self._seen = _qualified(SEEN, partition_id)

    async def read_rows(self, row_keys: list[int]) -> list[StoredRow]:
        """Return the rows of these keys in key order; keys without a row are left out."""
        rows: list[StoredRow] = []
        keys = sorted(set(row_keys))
        async with self._store.reading() as connection:
            for start in range(0, len(keys), PAGE_ROWS):
                page = keys[start : start + PAGE_ROWS]
                ranges = key_ranges(page)
                if len(ranges) * RANGE_KEYS <= len(page):
                    firsts, ends = zip(*ranges, strict=True)
                    found = await connection.fetch(self._by_ranges, firsts, ends)
                    found.sort(key=itemgetter(0))
                else:
                    found = await connection.fetch(self._by_key, page)
                rows += await self._stored(connection, found)
        return rows

    async def read_range(self, first_key: int, end_key: int, limit: int) -> list[StoredRow]:
        """Return up to `limit` rows with keys in [first_key, end_key), in key order."""
        rows: list[StoredRow] = []
        async with self._store.reading() as connection:
            while len(rows) < limit:
                wanted = min(PAGE_ROWS, limit - len(rows))
                found = await connection.fetch(self._by_range, first_key, end_key, wanted)
                rows += await self._stored(connection, found)
                if len(found) < wanted:
                    break
                first_key = found[-1]["row_key"] + 1
        return rows

    async def read_numbers(
        self, entity_no: int, sub_queue: SubQueue, from_sequence: int, limit: int
    ) -> list[StoredRow]:
        """Return up to `limit` rows of a sub-queue in order of their stored sequence number."""
        rows: list[StoredRow] = []
        async with self._store.reading() as connection:
            while len(rows) < limit:
                wanted = min(PAGE_ROWS, limit - len(rows))
                found = await connection.fetch(
                    self._by_number, entity_no, int(sub_queue), from_sequence, wanted
                )
                rows += await self._stored(connection, found)
                if len(found) < wanted:
                    break
                from_sequence = found[-1][KEPT][0] + 1
        return rows

    async def read_named(
        self, entity_no: int, sub_queue: SubQueue, numbers: list[int]
    ) -> list[StoredRow]:
        """Return the existing rows of these kept numbers, in order."""
        rows: list[StoredRow] = []
        async with self._store.reading() as connection:
            for start in range(0, len(numbers), PAGE_ROWS):
                page = numbers[start : start + PAGE_ROWS]
                found = await connection.fetch(self._by_name, entity_no, int(sub_queue), page)
                rows += await self._stored(connection, found)
        return rows

    async def read_states(self, names: list[tuple[int, bytes]]) -> dict[tuple[int, bytes], bytes]:
        """Return (entity_no, session_id) -> state of the sessions that have one."""
        states: dict[tuple[int, bytes], bytes] = {}
        async with self._store.reading() as connection:
            for name in dict.fromkeys(names):
                state = await connection.fetchval(self._states, *name)
                if state is not None:
                    states[name] = state
        return states

    async def read_seen(self, ids: list[tuple[int, bytes, int, int]]) -> set[tuple[int, bytes]]:
        """Return the (entity_no, digest) pairs that were seen between two times, inclusive."""
        wanted: dict[tuple[int, int, int], set[bytes]] = {}
        for entity_no, digest, from_ms, to_ms in ids:
            wanted.setdefault((entity_no, from_ms, to_ms), set()).add(digest)
        seen: set[tuple[int, bytes]] = set()
        async with self._store.reading() as connection:
            for (entity_no, from_ms, to_ms), digests in wanted.items():
                rows = await connection.fetch(
                    self._seen, entity_no, from_ms - SEEN_SPAN_MS, to_ms, from_ms, list(digests)
                )
                for row in rows:
                    if _is_member(row["digest"], row["digests"]):
                        seen.add((entity_no, row["digest"]))
        return seen

    async def _stored(self, connection: Connection, found: list[asyncpg.Record]) -> list[StoredRow]:
        wanted = [row[BODY_ID] for row in found if row[BODY_ID] is not None]
        bodies = await self._read_bodies(connection, wanted) if wanted else {}
        rows = unpack_usual_rows(found, StoredRow)
        for row_key, enqueued_ms, blob, properties, body, body_id, patch, due, kept in islice(
            found, len(rows), None
        ):
            if body_id is not None:
                if body_id not in bodies:  # it was deleted meanwhile
                    continue
                body = bodies[body_id]
            is_deferred, patched_count, patched = patch or (None, None, None)
            sequence, kept_count, *died = kept or (due, None, None, None, None, None)
            rows.append(
                StoredRow(
                    row_key,
                    enqueued_ms,
                    sequence,
                    max(kept_count or 0, patched_count or 0),
                    is_deferred or False,
                    unpack_envelope(blob, properties if patched is None else patched, body),
                    _death(*died),
                )
            )
        return rows

    async def _read_bodies(
        self, connection: Connection, body_ids: Iterable[int]
    ) -> dict[int, bytes]:
        """Return whole bodies; 64 bodies a statement."""
        chunks: dict[int, list[bytes]] = {}
        pending = sorted(set(body_ids))
        while pending:
            group, pending = pending[:64], pending[64:]
            for row in await connection.fetch(self._bodies, group):
                chunks.setdefault(row["body_id"], []).append(row["data"])
        return {body_id: b"".join(parts) for body_id, parts in chunks.items()}


COLUMNS: Final = """
    m.row_key, m.enqueued_ms, m.envelope, m.application_properties, m.body, m.body_id,
    case when {any_patch} then (
        select row(p.is_deferred, p.delivery_count, p.application_properties)
        from {schema}.patch p where p.row_key = m.row_key
    ) end as patch
"""
DUE: Final = """
    case when {any_due} then (
        select d.sequence from {schema}.due d where d.row_key = m.row_key
    ) end as due_sequence
"""
KEPT_ROW: Final = "row(k.sequence, k.delivery_count, k.died_ms, k.deliveries, k.link, k.client)"
KEPT_OF_ROW: Final = f"""
    case when {{any_kept}} then (
        select {KEPT_ROW} from {{schema}}.kept k where k.row_key = m.row_key
    ) end as kept
"""
IS_LIVE: Final = """
    and not exists (select from {schema}.settled s where s.row_key = m.row_key)
"""
"""Settled rows can be read by key only: callers know which keys are live (ADR 18)."""


def _columns_of(first_key: str, end_key: str) -> str:
    """Return the columns for rows in a range, given by expressions without columns."""
    columns = f"{COLUMNS}, {DUE}, {KEPT_OF_ROW}"
    for table in ("patch", "due", "kept"):
        columns = columns.replace(f"{{any_{table}}}", has_rows(table, first_key, end_key))
    return columns


def has_rows(table: str, first_key: str, end_key: str) -> str:
    """Return an expression that is true if a side table has a row in a range, else null.

    It is evaluated once for a statement if the range has no columns in it.
    """
    return f"""(
        select true from {{schema}}.{table} where row_key >= {first_key} and row_key < {end_key}
        order by row_key limit 1
    )"""


KEYS: Final = "$1::bigint[]"
ENDS: Final = "$2::bigint[]"
BY_KEY: Final = f"""
select {_columns_of(f"({KEYS})[1]", f"({KEYS})[cardinality({KEYS})] + 1")}
from {{schema}}.message m
where m.row_key = any ({KEYS})
order by m.row_key
"""
BY_RANGES: Final = f"""
select {_columns_of(f"({KEYS})[1]", f"({ENDS})[cardinality({ENDS})]")}
from unnest({KEYS}, {ENDS}) as r (first_key, end_key)
cross join lateral (
    select * from {{schema}}.message w
    where w.row_key >= r.first_key and w.row_key < r.end_key
    order by w.row_key limit {PAGE_ROWS}
) m
"""
"""The limit keeps the planner from looking through the ranges for each row of the table."""
BY_RANGE: Final = f"""
select {_columns_of("$1", "$2")}
from {{schema}}.message m
where m.row_key >= $1 and m.row_key < $2 {IS_LIVE}
order by m.row_key
limit $3
"""
KEPT_COLUMNS: Final = (
    f"{COLUMNS.replace('{any_patch}', 'true')}, null::bigint as due_sequence, {KEPT_ROW} as kept"
)
BY_NUMBER: Final = f"""
select {KEPT_COLUMNS}
from {{schema}}.kept k join {{schema}}.message m on m.row_key = k.row_key
where k.entity_no = $1 and k.sub_queue = $2::smallint and k.sequence >= $3 {IS_LIVE}
order by k.sequence
limit $4
"""
BY_NAME: Final = f"""
select {KEPT_COLUMNS}
from {{schema}}.kept k join {{schema}}.message m on m.row_key = k.row_key
where k.entity_no = $1 and k.sub_queue = $2::smallint and k.sequence = any ($3::bigint[]) {IS_LIVE}
order by k.sequence
"""
BODIES: Final = """
select body_id, data from {schema}.body where body_id = any ($1::bigint[]) order by body_id, chunk
"""
STATES: Final = """
select state from {schema}.session where entity_no = $1 and session_id = $2
"""
SEEN: Final = """
select w.digest, s.digests
from {schema}.seen s join unnest($5::bytea[]) as w (digest) on position(w.digest in s.digests) > 0
where s.entity_no = $1 and s.first_ms between $2 and $3 and s.last_ms >= $4
"""
"""`position` may match across two neighbours; the caller checks again."""


def _death(died_ms: int | None, deliveries: int, link: bytes | None, client: str) -> Death | None:
    if died_ms is None:
        return None
    receiver = None if link is None else Receiver(link.decode(), client)
    return Death(died_ms, deliveries, receiver)


def _is_member(digest: bytes, digests: bytes) -> bool:
    """Return whether a digest is one of the concatenated ones, not a match across two."""
    at = digests.find(digest)
    while at % DIGEST_BYTES:  # -1 % 16 is not 0 either
        if at < 0:
            return False
        at = digests.find(digest, at + 1)
    return True


def _qualified(sql: str, partition_id: int) -> str:
    """Insert the partition's schema; the read connection serves all partitions."""
    return sql.replace("{schema}", schema_of(partition_id))
