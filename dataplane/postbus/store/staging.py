"""Staging of large bodies before the commit that refers to them, on the side connection (ADR 17).

The next load finds the remains of a crash, like any unreferenced body. Called by the journal.
"""

from __future__ import annotations

from typing import Final

from postbus.entity.outcomes import Outcome, ShareBody
from postbus.store.batch import STAGED_BODY_BYTES
from postbus.store.fenced import fenced
from postbus.store.postgres import Store


async def stage_bodies(
    store: Store, partition_id: int, epoch: int, bodies: list[tuple[int, bytes]]
) -> None:
    """Write bodies in chunks in one transaction; raises StoreUnavailable, Fenced."""
    async with fenced(store, partition_id, epoch) as connection:
        for body_id, body in bodies:
            await connection.execute("insert into staged (body_id) values ($1)", body_id)
            for chunk, start in enumerate(range(0, len(body), STAGED_BODY_BYTES)):
                data = body[start : start + STAGED_BODY_BYTES]
                await connection.execute(INSERT_CHUNK, body_id, chunk, data)


def bodies_to_stage(outcome: Outcome) -> list[tuple[int, bytes]]:
    """Return ids and bodies that an outcome inserts; a body shared by copies occurs once."""
    copies = {
        key
        for change in outcome.mutations
        if type(change) is ShareBody
        for key in change.row_keys[1:]
    }
    return [
        (insert.row_key, insert.envelope.body)
        for insert in outcome.inserts
        if len(insert.envelope.body) > STAGED_BODY_BYTES and insert.row_key not in copies
    ]


INSERT_CHUNK: Final = "insert into body (body_id, chunk, data) values ($1, $2, $3)"
