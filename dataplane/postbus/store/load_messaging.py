"""Loading of sessions, seen ids, outbox, arrivals and shared bodies of a partition.

Part of the load; rows of deleted entities are removed on the way. Unreferenced bodies are found and
removed later (`sweep.py`), since they may be many and large. Called by `load.py`.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import groupby
from typing import Final

import asyncpg

from postbus.entity.commands import SubQueue
from postbus.entity.group_commands import NO_LIMITS, Cursor, GroupKind, Limits, Plan
from postbus.entity.outcomes import (
    LoadedPartition,
    PutCursor,
    PutInbound,
    PutOutbound,
    RecordIds,
    StoredState,
)
from postbus.message.rows import session_id_of
from postbus.store.batch import SideRows
from postbus.store.errors import Connection

PAGE_ROWS: Final = 2_000
"""Rows per page: about 10 ms during which nothing else in the process runs."""
SEEN_ROWS: Final = 200


async def load_messaging(connection: Connection, loaded: LoadedPartition) -> None:
    """Load the rows of topics, sessions and forwarding; `keys` and `entities` are loaded."""
    await connection.execute(REMOVE_STATES)
    await connection.execute(REMOVE_SEEN)
    await connection.execute(REMOVE_INBOUND)
    await connection.execute(REMOVE_GROUPS)
    await _load_sessions(connection, loaded)
    async with connection.transaction(readonly=True):
        async for row in connection.cursor(STATES, prefetch=PAGE_ROWS):
            states = loaded.session_states.setdefault(row["entity_no"], {})
            states[row["session_id"]] = StoredState(row["updated_ms"], row["size_bytes"])
        async for row in connection.cursor(SEEN, prefetch=SEEN_ROWS):
            loaded.seen.append(RecordIds(*row.values()))
    loaded.outbox = [PutOutbound(*row.values()) for row in await connection.fetch(OUTBOUND)]
    loaded.cursors = [_put_cursor(row) for row in await connection.fetch(GROUPS)]
    loaded.inbound = [PutInbound(*row.values()) for row in await connection.fetch(INBOUND)]
    for row in await connection.fetch(AWAITED):
        loaded.awaited.setdefault(row["entity_no"], []).append(row["name"])


REMOVE_STATES: Final = """
delete from session s where not exists (select from entity e where e.entity_no = s.entity_no)
"""
REMOVE_SEEN: Final = """
delete from seen s where not exists (select from entity e where e.entity_no = s.entity_no)
"""
REMOVE_INBOUND: Final = """
delete from inbound i where not exists (select from entity e where e.entity_no = i.entity_no)
"""
REMOVE_GROUPS: Final = """
with groupless as (
    delete from reader_group g
    where not exists (select from entity e where e.entity_no = g.entity_no)
)
delete from low_mark m where not exists (select from entity e where e.entity_no = m.entity_no)
"""
GROUPS: Final = """
select entity_no, sub_queue, name, kind, epoch, reader, settled, plan, planned, placed_ms, limits
from reader_group
order by entity_no, sub_queue, name
"""
STATES: Final = """
select entity_no, session_id, updated_ms, octet_length(state) as size_bytes from session
"""
SEEN: Final = "select entity_no, last_ms, digests from seen order by last_ms, first_ms"
OUTBOUND: Final = """
select row_key, source_no, target, sequence, is_dead_letter, is_resent
from outbound order by row_key
"""
AWAITED: Final = "select entity_no, name from writer where slot is not null order by 1, 2"
INBOUND: Final = "select source_partition, entity_no, last_number from inbound order by 2, 1"


def _put_cursor(row: asyncpg.Record) -> PutCursor:
    plan = None
    if row["plan"] is not None:
        stored = json.loads(row["plan"])
        ranges = {int(name): (first, end) for name, (first, end) in stored.pop("ranges").items()}
        plan = Plan(ranges=ranges, **stored)
    limits = NO_LIMITS if row["limits"] is None else Limits(**json.loads(row["limits"]))
    cursor = Cursor(
        GroupKind(row["kind"]), row["epoch"], row["reader"], row["settled"], plan,
        row["planned"], row["placed_ms"], limits,
    )  # fmt: skip
    return PutCursor(row["entity_no"], SubQueue(row["sub_queue"]), row["name"], cursor)


async def _load_sessions(connection: Connection, loaded: LoadedPartition) -> None:
    """Sort the keys in ACTIVE of session entities by the session in their envelope."""
    for entity in loaded.entities:
        if not getattr(entity.properties, "requires_session", False):
            continue
        sessions = loaded.sessions.setdefault(entity.entity_no, {})
        keys = loaded.keys.get((entity.entity_no, SubQueue.ACTIVE), array("q"))
        for start in range(0, len(keys), PAGE_ROWS):
            page = keys[start : start + PAGE_ROWS].tolist()
            for key, envelope in await connection.fetch(ENVELOPES, page):
                session_id = session_id_of(envelope) or b""
                messages = sessions.get(session_id)
                if messages is None:
                    sessions[session_id] = array("q", (key,))
                else:
                    messages.append(key)


ENVELOPES: Final = """
select row_key, envelope from message where row_key = any ($1::bigint[]) order by row_key
"""


async def load_bodies(
    connection: Connection,
    loaded: LoadedPartition,
    all_keys: array[int],
    sides: SideRows,
    pages: Sequence[tuple[list[int], list[int]]],
    *,
    has_settled: bool,
) -> None:
    """Count references to shared bodies, find unreferenced ones, record live rows with a body.

    `all_keys`: those of live rows; settled rows refer to bodies too. `pages`: first ids and ends of
    the ranges to read, in order; no live row refers to a body elsewhere (ADR 44).
    """
    carried = [row for page in pages for row in await connection.fetch(CARRIED, *page)]
    carried.sort(key=lambda row: int(row["body_id"]))
    carriers = {
        body_id: sum(row["is_shared"] for row in rows)
        for body_id, rows in groupby(carried, key=lambda row: row["body_id"])
    }
    starts = array("q", [block.first_key for block in loaded.blocks])
    sharing: set[int] = set()
    key_count = len(all_keys)
    body_ids, counts = array("q"), array("I")
    settled_keys, settled_bodies = array("q"), array("q")  # the second: indexes into the ids
    is_in_order = True  # the statement does not promise it, to need no sort
    for page in pages:
        async for body_id, packed in _rows_of(connection, SHARED, page):
            row_keys = array("q", packed)
            if sys.byteorder == "big":
                row_keys.byteswap()
            count = carriers.get(body_id, 0)
            for key in row_keys:
                at = bisect_left(all_keys, key)
                if at < key_count and all_keys[at] == key:
                    count += 1
                    sharing.add(bisect_right(starts, key) - 1)
                elif has_settled:
                    settled_keys.append(key)
                    settled_bodies.append(len(body_ids))
            is_in_order = is_in_order and (not body_ids or body_ids[-1] < body_id)
            body_ids.append(body_id)
            counts.append(count)
    sides.note_sharing(starts[index] for index in sharing)
    for start in range(0, len(settled_keys), PAGE_ROWS):
        some = settled_keys[start : start + PAGE_ROWS].tolist()
        stored = {row["row_key"] for row in await connection.fetch(STORED, some)}
        for key, index in zip(some, settled_bodies[start : start + PAGE_ROWS], strict=True):
            counts[index] += key in stored
    pairs: Iterable[tuple[int, int]] = zip(body_ids, counts, strict=True)
    for body_id, count in pairs if is_in_order else sorted(pairs):
        sides.bodies.load(body_id, count)
    for row in carried:
        if not row["is_settled"]:
            block = loaded.blocks[bisect_right(starts, row["row_key"]) - 1]
            sides.note_carried(row["row_key"], block.sub_queue)
    await connection.execute(ONLY_MERGE)
    for page in pages:
        for row in await connection.fetch(OWN_BODIES, *page):
            body_id = row["body_id"]
            at = bisect_left(all_keys, body_id)
            if at < key_count and all_keys[at] == body_id:
                sides.keys.add(body_id)
            elif body_id not in carriers:  # its row was deleted, or its commit never happened
                sides.bodies.load(body_id, 0)
    await connection.execute(ANY_JOIN)


ONLY_MERGE: Final = "set enable_nestloop = off; set enable_hashjoin = off"
"""Settled rows are left out by a merge of two indexes: with poor statistics the planner may take a
join whose cost grows with the square of the page, or a hash of all settled rows for each page."""
ANY_JOIN: Final = "reset enable_nestloop; reset enable_hashjoin"


async def _rows_of(
    connection: Connection, sql: str, page: tuple[list[int], list[int]]
) -> AsyncIterator[asyncpg.Record]:
    async with connection.transaction(readonly=True):
        async for row in connection.cursor(sql, *page, prefetch=PAGE_ROWS):
            yield row


CARRIED: Final = """
select found.row_key, found.body_id,
       (select s.body_id from shared s where s.body_id = found.body_id) is not null as is_shared,
       (select d.row_key from settled d where d.row_key = found.row_key) is not null as is_settled
from unnest($1::bigint[], $2::bigint[]) as r (first_key, end_key)
cross join lateral (
    select e.row_key, e.body_id from embodied e
    where e.body_id >= r.first_key and e.body_id < r.end_key
) as found
"""
STORED: Final = "select row_key from message where row_key = any ($1::bigint[])"
SHARED: Final = """
select found.body_id, found.row_keys
from unnest($1::bigint[], $2::bigint[]) as r (first_key, end_key)
cross join lateral (
    select s.body_id, s.row_keys from shared s
    where s.body_id >= r.first_key and s.body_id < r.end_key order by s.body_id
) as found
"""
OWN_BODIES: Final = """
select found.body_id
from unnest($1::bigint[], $2::bigint[]) as r (first_key, end_key)
cross join lateral (
    select b.body_id from body b
    where b.body_id >= r.first_key and b.body_id < r.end_key and b.chunk = 0
      and not exists (
          select from shared s
          where s.body_id = b.body_id and s.body_id >= r.first_key and s.body_id < r.end_key
      )
      and not exists (
          select from settled d
          where d.row_key = b.body_id and d.row_key >= r.first_key and d.row_key < r.end_key
      )
) as found
"""
