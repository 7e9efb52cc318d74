"""Removal of unreferenced bodies, outside the commits and a limited number of bytes at a time.

The duration of a delete depends on the bytes (ADR 20): a body of 1 MiB has five hundred pieces,
each of which is marked, and after a checkpoint each of its pages is written to the log as a whole.
Commits must not wait for that. Called by `upkeep.py` and the journal.
"""

from __future__ import annotations

from typing import Final

from postbus.store.fenced import fenced
from postbus.store.postgres import Store
from postbus.store.shared import BodyCounts

SWEEP_BYTES: Final = 8 << 20
"""Maximum bytes of bodies that a transaction removes; one chunk may be more. Source: measured,
docs/benchmarks.md: 20 to 80 ms, which other users of the connection have to wait."""
SWEEP_BODIES: Final = 1_000
"""Maximum number of bodies that it examines."""
SWEEP_AT: Final = 64
"""Number of bodies from which removal starts; regular upkeep removes fewer. Our choice: a
transaction costs a millisecond, which is little for each body."""


async def sweep_some(store: Store, partition_id: int, epoch: int, bodies: BodyCounts) -> int:
    """Remove bodies in `large_dead`; return their number. Raises StoreUnavailable, Fenced.

    They leave the list when the removal is durable; if it fails, the next load finds them again.
    """
    body_ids = bodies.large_dead[:SWEEP_BODIES]
    async with fenced(store, partition_id, epoch) as connection:
        await connection.execute(BY_INDEX)
        rest = await connection.fetchval(REMOVE, body_ids, SWEEP_BYTES) or []
    bodies.large_dead[: len(body_ids)] = rest
    return len(body_ids) - len(rest)


BY_INDEX: Final = "set local enable_seqscan = off; set local enable_bitmapscan = off"
REMOVE: Final = """
with piece as materialized (
    select body_id, chunk, octet_length(data) as size_bytes
    from body where body_id = any ($1::bigint[])
), placed as materialized (
    select body_id, chunk,
           sum(size_bytes) over (order by body_id, chunk desc) - size_bytes as bytes_before
    from piece
), removed as (
    delete from body b using placed p
    where p.bytes_before < $2 and b.body_id = p.body_id and b.chunk = p.chunk
), unshared as (
    delete from shared where body_id = any (array(
        select body_id from unnest($1::bigint[]) as asked (body_id)
        except select body_id from placed where bytes_before >= $2
    ))
)
select array_agg(distinct body_id) from placed where bytes_before >= $2
"""
"""The first chunk of a body is removed last, since a load finds the rest of a body by it. Returns
the bodies that are not removed completely."""
