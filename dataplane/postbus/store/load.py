"""Loading of a partition, after its claim and before its first commit.

Row keys are read by index-only scans in large pages; no message is read. Remains of a crash are
removed on the way (empty blocks), on the connection that holds the partition's lock, or found
(unreferenced bodies). Called by the journal.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_left
from typing import Final

import asyncpg

from postbus.contract.entities import PROPERTIES_OF, EntityKind, RuleProperties
from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import LoadedEntity, LoadedPartition, PutDue, ReserveBlock
from postbus.store.batch import SideRows, index_range
from postbus.store.claim import Claim
from postbus.store.errors import COMMIT_MS, Connection, translated
from postbus.store.load_messaging import load_bodies, load_messaging

PAGE_KEYS: Final = 100_000
LOAD_MS: Final = 60_000
"""Statement timeout while loading: a page without visibility map reads 100 MB of heap."""
SET_TIMEOUT: Final = "select set_config('statement_timeout', $1, false)"
SAMPLE_ROWS: Final = 1_000
"""Number of rows sampled for the size of an entity without a checkpoint."""


async def load_partition(connection: Connection, claim: Claim) -> tuple[LoadedPartition, SideRows]:
    """Return the partition as stored, and the rows that have side rows."""
    with translated():
        loaded = LoadedPartition(
            epoch=claim.epoch, catalog_version=claim.catalog_version, next_row_key=1
        )
        await connection.execute(SET_TIMEOUT, str(LOAD_MS))
        has_settled = await connection.fetchval(HAS_SETTLED)
        keys = await _read_keys(connection, KEYS if not has_settled else LIVE_KEYS)
        await connection.execute(FORGET_STAGED)
        entities = await connection.fetch(ENTITIES)
        await _load_blocks(connection, keys, loaded, {row["entity_no"] for row in entities})
        await _load_sides(connection, keys, loaded)
        await _load_entities(connection, entities, loaded)
        sides = SideRows()
        for block in loaded.blocks:
            sides.add_block(block)
        sides.keys.update(row["row_key"] for row in await connection.fetch(PATCHED))
        await load_bodies(connection, loaded, keys, sides, has_settled=has_settled)
        await load_messaging(connection, loaded)
        await connection.execute(SET_TIMEOUT, str(COMMIT_MS))
    return loaded, sides


async def _read_keys(connection: Connection, sql: str) -> array[int]:
    """Return the keys of all live rows in order; a page is one value with 8 bytes per key."""
    keys: array[int] = array("q")
    last_key = -1
    while True:
        page = await connection.fetchval(sql, last_key, PAGE_KEYS)
        if page is None:
            break
        part: array[int] = array("q", page)
        if sys.byteorder == "little":
            part.byteswap()
        keys += part
        last_key = part[-1]
        if len(part) < PAGE_KEYS:
            break
    return keys


KEYS: Final = """
select string_agg(int8send(row_key), ''::bytea)
from (select row_key from message where row_key > $1 order by row_key limit $2) as page
"""
LIVE_KEYS: Final = """
select string_agg(int8send(row_key), ''::bytea)
from (
    select m.row_key from message m
    where m.row_key > $1
      and not exists (
          select from settled s where s.row_key = m.row_key and s.row_key > $1
      )
    order by m.row_key limit $2
) as page
"""
"""Both conditions on the key let one merge of the two indexes begin where the page does."""
HAS_SETTLED: Final = "select exists (select from settled)"
PATCHED: Final = """
select row_key from patch p where not exists (select from settled s where s.row_key = p.row_key)
"""
FORGET_STAGED: Final = "delete from staged"
"""Bodies of a commit that never came are found with the unreferenced bodies."""


async def _load_blocks(
    connection: Connection, keys: array[int], loaded: LoadedPartition, existing: set[int]
) -> None:
    """Sort the keys into sub-queues; delete blocks that are empty and bound no number."""
    rows = await connection.fetch(BLOCKS)
    newest = {
        (row["entity_no"], row["sub_queue"]): row["first_key"]
        for row in rows
        if row["entity_no"] in existing
    }
    bounds = set(newest.values())
    if rows:
        bounds.add(rows[-1]["first_key"])
    empty = {row["first_key"]: row["size"] for row in rows if row["first_key"] not in bounds}
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
select first_key, size, entity_no, sub_queue, first_sequence from block order by first_key
"""
WITH_SETTLED: Final = """
select b.first_key from unnest($1::bigint[], $2::int[]) as b (first_key, size)
where exists (
    select from settled s where s.row_key >= b.first_key and s.row_key < b.first_key + b.size
)
"""
FORGET_BLOCKS: Final = "delete from block where first_key = any ($1::bigint[])"


async def _load_sides(connection: Connection, keys: array[int], loaded: LoadedPartition) -> None:
    """Read schedules, attempts and deferred rows."""
    for row in await connection.fetch(DUE):
        loaded.due.append(PutDue(*row.values()))
        _raise_next_sequence(loaded, row["entity_no"], row["sequence"] + 1)
    for row in await connection.fetch(ATTEMPTS):
        for key, attempt in zip(row["row_keys"], row["attempts"], strict=True):
            if _holds(keys, key):
                loaded.attempts[key] = attempt
    starts = array("q", [block.first_key for block in loaded.blocks])
    for row in await connection.fetch(DEFERRED):
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
select p.row_key, k.sequence
from patch p left join kept k on k.row_key = p.row_key
where p.is_deferred
order by p.row_key
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
