"""Loading of a partition, after its claim and before its first commit.

Row keys are read by index-only scans in large pages; no message is read. Parts of blocks in which
everything is settled are skipped (ADR 44). Remains of a crash are removed on the way (empty
blocks), on the connection that holds the partition's lock, or found (unreferenced bodies). Called
by the journal.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_left, bisect_right
from typing import Final

import asyncpg

from postbus.contract.entities import PROPERTIES_OF, EntityKind, RuleProperties
from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import LoadedEntity, LoadedPartition, PutDue, ReserveBlock
from postbus.store.batch import SideRows, index_range
from postbus.store.claim import Claim
from postbus.store.errors import COMMIT_MS, Connection, translated
from postbus.store.load_messaging import ANY_JOIN, ONLY_MERGE, load_bodies, load_messaging
from postbus.store.parts import Ranges, all_parts, unsettled_ranges

PAGE_KEYS: Final = 100_000
LOAD_MS: Final = 60_000
"""Statement timeout while loading: a page without visibility map reads 100 MB of heap."""
SET_TIMEOUT: Final = "select set_config('statement_timeout', $1, false)"
PAGE_RANGES: Final = 1_000
"""Ranges of keys that one statement reads."""
SAMPLE_ROWS: Final = 1_000
"""Number of rows sampled for the size of an entity without a checkpoint."""


async def load_partition(connection: Connection, claim: Claim) -> tuple[LoadedPartition, SideRows]:
    """Return the partition as stored, and the rows that have side rows."""
    with translated():
        loaded = LoadedPartition(
            epoch=claim.epoch, catalog_version=claim.catalog_version, next_row_key=1
        )
        await connection.execute(SET_TIMEOUT, str(LOAD_MS))
        has_settled = await connection.fetchval(LAST_SETTLED) is not None
        blocks = await connection.fetch(BLOCKS)
        ranges, body_ranges = unsettled_ranges(
            (row["first_key"], row["size"], row["settled_parts"]) for row in blocks
        )
        await connection.execute(ONLY_MERGE)
        keys = await _read_keys(connection, LIVE_KEYS if has_settled else KEYS, ranges)
        await connection.execute(ANY_JOIN)
        await connection.execute(FORGET_STAGED)
        entities = await connection.fetch(ENTITIES)
        await _load_blocks(connection, blocks, keys, loaded, {row["entity_no"] for row in entities})
        await _load_sides(connection, keys, loaded, ranges)
        await _load_entities(connection, entities, loaded)
        sides = SideRows()
        for block in loaded.blocks:
            sides.add_block(block)
        for firsts, ends in pages_of(ranges):
            patched = await connection.fetch(PATCHED, firsts, ends)
            sides.keys.update(row["row_key"] for row in patched)
        await load_bodies(
            connection, loaded, keys, sides, pages_of(body_ranges), has_settled=has_settled
        )
        await load_messaging(connection, loaded)
        await connection.execute(SET_TIMEOUT, str(COMMIT_MS))
    return loaded, sides


def pages_of(ranges: Ranges) -> list[tuple[list[int], list[int]]]:
    """Return first keys and ends of the ranges that each statement reads."""
    pages = (ranges[start : start + PAGE_RANGES] for start in range(0, len(ranges), PAGE_RANGES))
    return [([first for first, _ in page], [end for _, end in page]) for page in pages]


async def _read_keys(connection: Connection, sql: str, ranges: Ranges) -> array[int]:
    """Return the keys of all live rows in order; a page is one value with 8 bytes per key."""
    keys: array[int] = array("q")
    for firsts, ends in pages_of(ranges):
        at = 0
        while at < len(firsts):
            page = await connection.fetchval(sql, firsts[at:], ends[at:], PAGE_KEYS)
            part: array[int] = array("q", page or b"")
            if sys.byteorder == "little":
                part.byteswap()
            keys += part
            if len(part) < PAGE_KEYS:
                break
            next_key = part[-1] + 1
            at = bisect_right(ends, next_key)
            if at < len(firsts):
                firsts[at] = max(firsts[at], next_key)
    return keys


KEYS: Final = """
select string_agg(int8send(row_key), ''::bytea)
from (
    select row_key
    from unnest($1::bigint[], $2::bigint[]) as r (first_key, end_key)
    cross join lateral (
        select m.row_key from message m
        where m.row_key >= r.first_key and m.row_key < r.end_key
        order by m.row_key limit $3
    ) as found
    order by r.first_key, row_key limit $3
) as page
"""
LIVE_KEYS: Final = """
select string_agg(int8send(row_key), ''::bytea)
from (
    select row_key
    from unnest($1::bigint[], $2::bigint[]) as r (first_key, end_key)
    cross join lateral (
        select m.row_key from message m
        where m.row_key >= r.first_key and m.row_key < r.end_key
          and not exists (
              select from settled s
              where s.row_key = m.row_key
                and s.row_key >= r.first_key and s.row_key < r.end_key
          )
        order by m.row_key limit $3
    ) as found
    order by r.first_key, row_key limit $3
) as page
"""
"""The conditions on both keys let one merge of the two indexes begin and end where the range does.
Ranges are sorted first, so that a page ends with the range that fills it."""
LAST_SETTLED: Final = "select row_key from settled order by row_key desc limit 1"
"""From the end: at the beginning of table and index are deleted rows."""
PATCHED: Final = """
select found.row_key
from unnest($1::bigint[], $2::bigint[]) as r (first_key, end_key)
cross join lateral (
    select p.row_key from patch p where p.row_key >= r.first_key and p.row_key < r.end_key
) as found
where (select s.row_key from settled s where s.row_key = found.row_key) is null
"""
"""A subquery for one value is never turned into a scan of the table."""
FORGET_STAGED: Final = "delete from staged"
"""Bodies of a commit that never came are found with the unreferenced bodies."""


async def _load_blocks(
    connection: Connection,
    rows: list[asyncpg.Record],
    keys: array[int],
    loaded: LoadedPartition,
    existing: set[int],
) -> None:
    """Sort the keys into sub-queues; delete blocks that are empty and bound no number.

    Upkeep does it for blocks that are marked as a whole.
    """
    newest = {
        (row["entity_no"], row["sub_queue"]): row["first_key"]
        for row in rows
        if row["entity_no"] in existing
    }
    bounds = set(newest.values())
    if rows:
        bounds.add(rows[-1]["first_key"])
    empty = {
        row["first_key"]: row["size"]
        for row in rows
        if row["first_key"] not in bounds and row["settled_parts"] != all_parts(row["size"])
    }
    for first_key, size in list(empty.items()):
        start, stop = index_range(keys, first_key, first_key + size)
        if start != stop:
            del empty[first_key]
    for row in await connection.fetch(WITH_SETTLED, list(empty), list(empty.values())):
        del empty[row["first_key"]]
    for row in rows:
        first_key, size = row["first_key"], row["size"]
        block = ReserveBlock(
            first_key, size, row["entity_no"], SubQueue(row["sub_queue"]), row["first_sequence"]
        )
        loaded.next_row_key = max(loaded.next_row_key, first_key + size)
        if block.sub_queue is SubQueue.ACTIVE:
            _raise_next_sequence(loaded, block.entity_no, block.first_sequence + size)
        if first_key in empty:
            continue
        start, stop = index_range(keys, first_key, first_key + size)
        loaded.blocks.append(block)
        if start != stop:
            name = block.entity_no, block.sub_queue
            loaded.keys.setdefault(name, array("q")).extend(keys[start:stop])
    if empty:
        await connection.execute(FORGET_BLOCKS, list(empty))


BLOCKS: Final = """
select first_key, size, entity_no, sub_queue, first_sequence, settled_parts
from block order by first_key
"""
WITH_SETTLED: Final = """
select b.first_key from unnest($1::bigint[], $2::int[]) as b (first_key, size)
where exists (
    select from settled s where s.row_key >= b.first_key and s.row_key < b.first_key + b.size
)
"""
FORGET_BLOCKS: Final = "delete from block where first_key = any ($1::bigint[])"


async def _load_sides(
    connection: Connection, keys: array[int], loaded: LoadedPartition, ranges: Ranges
) -> None:
    """Read schedules, attempts and deferred rows."""
    for row in await connection.fetch(DUE):
        loaded.due.append(PutDue(*row.values()))
        _raise_next_sequence(loaded, row["entity_no"], row["sequence"] + 1)
    for row in await connection.fetch(ATTEMPTS):
        for key, attempt in zip(row["row_keys"], row["attempts"], strict=True):
            if _holds(keys, key):
                loaded.attempts[key] = attempt
    starts = array("q", [block.first_key for block in loaded.blocks])
    deferred = [
        row
        for firsts, ends in pages_of(ranges)
        for row in await connection.fetch(DEFERRED, firsts, ends)
    ]
    for row in sorted(deferred, key=lambda row: int(row["row_key"])):
        key = row["row_key"]
        if not _holds(keys, key):
            continue
        block = loaded.blocks[bisect_left(starts, key + 1) - 1]
        name = block.entity_no, block.sub_queue
        sequence = row["sequence"]
        if sequence is None:
            sequence = block.first_sequence + key - block.first_key
        loaded.deferred.setdefault(name, {})[key] = sequence


DUE: Final = "select row_key, entity_no, due_ms, sequence from due order by due_ms, row_key"
ATTEMPTS: Final = "select row_keys, attempts from acquired order by id"
DEFERRED: Final = """
select found.row_key, (select k.sequence from kept k where k.row_key = found.row_key) as sequence
from unnest($1::bigint[], $2::bigint[]) as r (first_key, end_key)
cross join lateral (
    select p.row_key from patch p
    where p.row_key >= r.first_key and p.row_key < r.end_key and p.is_deferred
) as found
"""


async def _load_entities(
    connection: Connection, rows: list[asyncpg.Record], loaded: LoadedPartition
) -> None:
    counts: dict[int, int] = {}
    for (entity_no, _), keys in loaded.keys.items():
        counts[entity_no] = counts.get(entity_no, 0) + len(keys)
    for row in rows:
        entity_no, live = row["entity_no"], counts.get(row["entity_no"], 0)
        if row["message_count"]:
            size_bytes = row["size_bytes"] * live // row["message_count"]
        else:
            size_bytes = await _estimate_size(connection, loaded, entity_no, live)
        _raise_next_sequence(loaded, entity_no, row["next_sequence"])
        kind = EntityKind(row["kind"])
        loaded.entities.append(
            LoadedEntity(
                entity_no,
                row["name"],
                kind,
                PROPERTIES_OF[kind].model_validate(json.loads(row["definition"])),
                size_bytes,
                row["topic_no"],
                tuple(map(RuleProperties.model_validate, json.loads(row["rules"]))),
                row["is_partitioned"],
                row["last_used_ms"],
                row["catalog_version"],
            )
        )


ENTITIES: Final = """
select entity_no, name, kind, definition, next_sequence, size_bytes, message_count, topic_no,
       rules, is_partitioned, last_used_ms, catalog_version
from entity order by entity_no
"""


async def _estimate_size(
    connection: Connection, loaded: LoadedPartition, entity_no: int, live: int
) -> int:
    """Estimate the size from a sample of rows when there is no checkpoint to scale."""
    if not live:
        return 0
    sample: list[int] = []
    for (number, _), keys in loaded.keys.items():
        if number == entity_no:
            sample += keys[:: len(keys) // SAMPLE_ROWS + 1]
    mean = await connection.fetchval(MEAN_BYTES, sample)
    return int(mean or 0) * live


MEAN_BYTES: Final = """
select avg(
    octet_length(envelope)
    + coalesce(octet_length(application_properties), 0)
    + coalesce(octet_length(body), 0)
    + case when body_id is null then 0
           else (select sum(octet_length(data)) from body b where b.body_id = m.body_id)
      end
)
from message m
where row_key = any ($1::bigint[])
"""


def _raise_next_sequence(loaded: LoadedPartition, entity_no: int, sequence: int) -> None:
    known = loaded.next_sequence.get(entity_no, 1)
    loaded.next_sequence[entity_no] = max(known, sequence)


def _holds(keys: array[int], key: int) -> bool:
    index = bisect_left(keys, key)
    return index < len(keys) and keys[index] == key
