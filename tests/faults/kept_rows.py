"""Checks the tables of queues with a history after the last kill: they have all accepted messages.

Clients cannot see settled messages, so this reads the tables: each accepted message has a row that
is live or settled, a peek lists exactly the live ones, and each entry of `settled` has its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import asyncpg

from postbus.message.codec import decode_value
from postbus.message.rows import unpack_envelope
from tests.faults.history import Event, Left, Result, Sent, Violation

KEPT: Final = ("plain", "grouped")
HISTORY: Final = ", operatorSpec: {history: {retention: P1D}}"
BRIEF_HISTORY: Final = HISTORY.replace("P1D", "PT1M")
"""Short enough that rows expire while others are kept and brokers are killed."""


async def check_kept(dsn: str, events: Sequence[Event]) -> list[Violation]:
    """Compare the rows of `KEPT` with the observations of clients."""
    live: dict[str, list[str]] = {path: [] for path in KEPT}
    settled: dict[str, list[str]] = {path: [] for path in KEPT}
    violations: list[Violation] = []
    connection = await asyncpg.connect(dsn)
    try:
        schemas = await connection.fetch(SCHEMAS)
        for (schema,) in schemas:
            for row in await connection.fetch(ROWS.format(schema), list(KEPT)):
                message_id = unpack_envelope(row["envelope"], None, None).message_id
                name, _ = decode_value(message_id or b"\x40")
                place = settled if row["is_settled"] else live
                place[row["name"]].append(str(name))
            if orphans := await connection.fetchval(ORPHANS.format(schema)):
                violations.append(Violation("history", schema, "", f"{orphans} rows are missing"))
    finally:
        await connection.close()
    violations += [
        Violation("history", event.path, event.id, "accepted, and neither live nor settled")
        for event in events
        if isinstance(event, Sent) and event.path in KEPT and event.result is Result.ACCEPTED
        if event.id not in settled[event.path] and event.id not in live[event.path]
    ]
    for path in KEPT:
        peeked = [
            event.id
            for event in events
            if isinstance(event, Left) and event.path == path and event.place != "dead-letter"
        ]
        if sorted(peeked) != sorted(live[path]):
            violations.append(
                Violation("history", path, "", f"peeked {peeked[:5]}, live are {live[path][:5]}")
            )
        print(f"history of {path}: {len(settled[path])} settled, {len(live[path])} live")
    return violations


SCHEMAS: Final = "select schemaname from pg_tables where tablename = 'settled' order by 1"
ROWS: Final = """
select e.name, m.envelope, s.row_key is not null as is_settled
from {0}.entity e
join {0}.block b on b.entity_no = e.entity_no and b.sub_queue = 0
join {0}.message m on m.row_key >= b.first_key and m.row_key < b.first_key + b.size
left join {0}.settled s on s.row_key = m.row_key
where e.name = any ($1::text[])
"""
ORPHANS: Final = """
select count(*) from {0}.settled s
where not exists (select from {0}.message m where m.row_key = s.row_key)
"""
