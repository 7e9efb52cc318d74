"""Authorization rules created at run time: names, rights and sealed keys (ADR 31).

A change is one commit that raises the catalog's version, so that followers of the catalog notice
it. Called by `broker/access/authorization_rules.py` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import asyncpg

from postbus.contract.entities import Right
from postbus.store.catalog_change import CatalogFence, changing
from postbus.store.postgres import Store

NAMESPACE_NO: Final = 0
"""Entity number of the namespace's rules; entities count from 1."""


class SealedRule(NamedTuple):
    """A stored rule. `entity_no` may be `NAMESPACE_NO`; times in database milliseconds."""

    entity_no: int
    name: str
    rights: frozenset[Right]
    primary_sealed: bytes
    secondary_sealed: bytes
    created_ms: int = 0
    updated_ms: int = 0
    managed_by: str = ""


class AuthorizationStore:
    """Reads and writes the table of rules. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def load(self) -> list[SealedRule]:
        """Return all rules; rules of deleted entities are deleted with their tombstones."""
        await self._store.open()
        async with self._store.aside() as connection:
            rows = await connection.fetch(LOAD)
        return [_rule(row) for row in rows]

    async def replace(
        self,
        entity_no: int,
        rules: Sequence[SealedRule],
        kept: Sequence[str],
        fence: CatalogFence,
    ) -> tuple[int, list[SealedRule]]:
        """Replace the rules of an entity, or of the namespace, except those of `kept` names.

        Return the catalog's version and all its rules; an existing rule keeps its creation time.
        """
        async with changing(self._store, fence) as change:
            connection = change.connection
            names = [*kept, *(rule.name for rule in rules)]
            await connection.execute(REMOVE, entity_no, names)
            for rule in rules:
                await connection.execute(
                    PUT,
                    entity_no,
                    rule.name,
                    sorted(right.value for right in rule.rights),
                    rule.primary_sealed,
                    rule.secondary_sealed,
                    change.now_ms,
                    rule.managed_by,
                )
            rows = await connection.fetch(LOAD_ONE, entity_no)
        return change.version, [_rule(row) for row in rows]


COLUMNS: Final = """
entity_no, name, rights, primary_sealed, secondary_sealed, created_ms, updated_ms, managed_by
"""
LOAD: Final = f"select {COLUMNS} from postbus.authorization_rule order by entity_no, name"
LOAD_ONE: Final = f"""
select {COLUMNS} from postbus.authorization_rule where entity_no = $1 order by name
"""
REMOVE: Final = """
delete from postbus.authorization_rule where entity_no = $1 and not name = any($2::text[])
"""
PUT: Final = """
insert into postbus.authorization_rule (
    entity_no, name, rights, primary_sealed, secondary_sealed, created_ms, updated_ms,
    managed_by
)
values ($1, $2, $3, $4, $5, $6, $6, $7)
on conflict (entity_no, name) do update
set rights = excluded.rights, primary_sealed = excluded.primary_sealed,
    secondary_sealed = excluded.secondary_sealed, updated_ms = excluded.updated_ms,
    managed_by = excluded.managed_by
"""


def _rule(row: asyncpg.Record) -> SealedRule:
    return SealedRule(
        row["entity_no"],
        row["name"],
        frozenset(map(Right, row["rights"])),
        row["primary_sealed"],
        row["secondary_sealed"],
        row["created_ms"],
        row["updated_ms"],
        row["managed_by"],
    )
