"""Audit of manual changes: one row for each, written before the change and completed after it.

For a row that was not completed it is unknown whether the change was made. Called by
`broker/audit.py` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from postbus.store.postgres import Store


@dataclass(frozen=True, slots=True)
class AuditedChange:
    """A change and its caller. `entity` "" is the namespace; `detail` is JSON."""

    caller: str
    address: str
    protocol: str
    verb: str
    entity: str
    detail: Mapping[str, Any]


class AuditEntry(NamedTuple):
    """A stored entry. Times are real times in milliseconds.

    `ended_ms` and `outcome` None: in progress, or unknown. `calls`: number of equal calls.
    """

    number: int
    begun_ms: int
    ended_ms: int | None
    calls: int
    change: AuditedChange
    outcome: str | None


class AuditEnd(NamedTuple):
    """The end of a change; `outcome` None: nothing was changed, and its row is deleted."""

    number: int
    ended_ms: int
    outcome: str | None
    detail: Mapping[str, Any]


class AuditStore:
    """Reads and writes rows. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def begin(self, begun_ms: int, changes: Sequence[AuditedChange]) -> list[int]:
        """Write entries of changes durably; return their numbers, which rise."""
        await self._store.open()
        columns = [
            [storable(each.caller) for each in changes],
            [storable(each.address) for each in changes],
            [each.protocol for each in changes],
            [each.verb for each in changes],
            [storable(each.entity) for each in changes],
            [json.dumps(storable_json(each.detail)) for each in changes],
        ]
        async with self._store.aside() as connection:
            rows = await connection.fetch(BEGIN, begun_ms, *columns)
        return sorted(int(row["audit_no"]) for row in rows)

    async def resume(self, number: int) -> None:
        """Record that one more call of a change is in progress."""
        await self._store.open()
        async with self._store.aside() as connection:
            await connection.execute(RESUME, number)

    async def end(self, ends: Sequence[AuditEnd]) -> None:
        """Complete rows."""
        await self._store.open()
        gone = [each.number for each in ends if each.outcome is None]
        kept = [each for each in ends if each.outcome is not None]
        async with self._store.aside() as connection, connection.transaction():
            if gone:
                await connection.execute(DROP, gone)
            if kept:
                await connection.execute(
                    END,
                    [each.number for each in kept],
                    [each.ended_ms for each in kept],
                    [storable(each.outcome or "") for each in kept],
                    [json.dumps(storable_json(each.detail)) for each in kept],
                )

    async def page(
        self, before: int, top: int, entity: str | None = None, caller: str | None = None
    ) -> list[AuditEntry]:
        """Return entries below a number, newest first; of an entity or a caller if given."""
        await self._store.open()
        async with self._store.aside() as connection:
            said = [None if each is None else storable(each) for each in (entity, caller)]
            rows = await connection.fetch(PAGE, before, top, *said)
        return [
            AuditEntry(
                row["audit_no"],
                row["begun_ms"],
                row["ended_ms"],
                row["calls"],
                AuditedChange(
                    row["caller"],
                    row["address"],
                    row["protocol"],
                    row["verb"],
                    row["entity"],
                    json.loads(row["detail"]),
                ),
                row["outcome"],
            )
            for row in rows
        ]

    async def forget(self, most: int, before_ms: int) -> int:
        """Delete old entries, and all but the last `most`; return the number of deleted ones.

        A call deletes a bounded number; the next call continues.
        """
        await self._store.open()
        async with self._store.aside() as connection:
            return int(await connection.fetchval(FORGET, most, before_ms, FORGOTTEN_AT_ONCE))


def storable(text: str) -> str:
    """Return text that Postgres accepts; names in refused calls may contain anything."""
    if text.isprintable():
        return text[:MOST_CHARS]
    written = text[:MOST_CHARS].encode("utf-8", "backslashreplace").decode()
    return written.replace("\0", "\\x00")


def storable_json(value: Any) -> Any:
    """Return JSON whose texts Postgres accepts."""
    match value:
        case str():
            return storable(value)
        case Mapping():
            return {storable(str(key)): storable_json(each) for key, each in value.items()}
        case list() | tuple():
            return [storable_json(each) for each in value]
        case _:
            return value


MOST_CHARS: Final = 2_048
"""Maximum stored length of a text; filters are half as long."""

FORGOTTEN_AT_ONCE: Final = 10_000
BEGIN: Final = """
insert into postbus.audit (begun_ms, caller, address, door, verb, entity, detail)
select $1, caller, address, door, verb, entity, detail::jsonb
from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[])
    with ordinality as entry (caller, address, door, verb, entity, detail, ordinal)
order by ordinal
returning audit_no
"""
RESUME: Final = """
update postbus.audit set ended_ms = null, outcome = null, calls = calls + 1 where audit_no = $1
"""
DROP: Final = "delete from postbus.audit where audit_no = any($1::bigint[])"
END: Final = """
update postbus.audit
set ended_ms = done.ended_ms, outcome = done.outcome, detail = done.detail::jsonb
from unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[])
    as done (audit_no, ended_ms, outcome, detail)
where audit.audit_no = done.audit_no
"""
PAGE: Final = """
select audit_no, begun_ms, ended_ms, calls, caller, address, door as protocol, verb, entity,
    detail, outcome
from postbus.audit
where audit_no < $1
    and ($3::text is null or lower(entity) = lower($3))
    and ($4::text is null or caller = $4)
order by audit_no desc limit $2
"""
FORGET: Final = """
with old as (
    select audit_no from postbus.audit
    where audit_no <= (select max(audit_no) from postbus.audit) - $1 or begun_ms < $2
    order by audit_no limit $3
), gone as (
    delete from postbus.audit where audit_no in (select audit_no from old) returning audit_no
)
select count(*) from gone
"""
