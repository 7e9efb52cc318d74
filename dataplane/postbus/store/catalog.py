"""The durable catalog of a namespace: definitions of entities, written by partition 0 (ADR 27).

Each change is one commit of partition 0's owner that raises the version (`catalog_change`). Called
by `broker/catalog/catalog.py` and `broker/catalog/directory.py` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

import asyncpg

from postbus.contract.entities import PROPERTIES_OF, EntityKind, EntityProperties, RuleProperties
from postbus.store.catalog_change import CatalogFence, changing
from postbus.store.postgres import Store


class DeletedReason(Enum):
    """Reason of a deletion; the value of the tombstone's column."""

    REQUESTED = "requested"
    IDLE = "idle"


class StoredRule(NamedTuple):
    """A rule of a subscription. `created_ms` 0: a new rule, the store sets the time."""

    properties: RuleProperties
    created_ms: int = 0


NONE_SENT: Final[Mapping[str, str]] = MappingProxyType({})


class CatalogEntry(NamedTuple):
    """An entity that exists or can be restored. `version`: the catalog's at its last change.

    The name of a subscription is its path. Only subscriptions have `topic_no` and `rules`. With
    `restorable_until_ms` the entity is deleted, its name is free and its messages are kept until
    then; `deleted_with`: the topic that it was deleted with. `forwards_as_sent`: field -> the URL
    that a client sent as the target of a forward, perhaps of a former bus name. `managed_by`: mark
    of the program that keeps the definition, empty if none does.
    """

    entity_no: int
    name: str
    kind: EntityKind
    properties: EntityProperties
    home_partition: int
    version: int
    created_ms: int
    updated_ms: int
    topic_no: int | None = None
    rules: tuple[StoredRule, ...] = ()
    is_partitioned: bool = False
    restorable_until_ms: int | None = None
    deleted_with: int | None = None
    forwards_as_sent: Mapping[str, str] = NONE_SENT
    managed_by: str = ""

    @property
    def is_retained(self) -> bool:
        """True if it is deleted and can be restored."""
        return self.restorable_until_ms is not None


class CatalogPut(NamedTuple):
    """A definition to store. `known`: the existing entity, None for a new one.

    The other fields are those of `CatalogEntry`. Kind and home of an entity never change.
    """

    known: CatalogEntry | None
    name: str
    kind: EntityKind
    properties: EntityProperties
    home_partition: int
    topic_no: int | None = None
    rules: tuple[StoredRule, ...] = ()
    is_partitioned: bool = False
    forwards_as_sent: Mapping[str, str] = NONE_SENT
    managed_by: str = ""

    def entry(self, entity_no: int, version: int, now_ms: int) -> CatalogEntry:
        """Return the entity that results from this change; new rules get the time `now_ms`."""
        rules = tuple(StoredRule(rule.properties, rule.created_ms or now_ms) for rule in self.rules)
        if self.known is not None:
            return self.known._replace(
                properties=self.properties,
                rules=rules,
                version=version,
                updated_ms=now_ms,
                forwards_as_sent=self.forwards_as_sent,
                managed_by=self.managed_by,
            )
        return CatalogEntry(
            entity_no,
            self.name,
            self.kind,
            self.properties,
            self.home_partition,
            version,
            now_ms,
            now_ms,
            self.topic_no,
            rules,
            self.is_partitioned,
            forwards_as_sent=self.forwards_as_sent,
            managed_by=self.managed_by,
        )


class CatalogStore:
    """Reads and writes the catalog's tables. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def load(self) -> tuple[int, list[CatalogEntry]]:
        """Return the catalog's version, and existing and restorable entities in order of name.

        Waits for a transaction in progress, so that the result of a lost connection is known.
        """
        await self._store.open()
        async with self._store.aside() as connection, connection.transaction():
            await connection.execute(f"set local lock_timeout = {LOCK_MS}")
            version = await connection.fetchval(LOCK_VERSION)
            rows = await connection.fetch(LOAD)
        return int(version), [_entry(row) for row in rows]

    async def read_version(self) -> int:
        """Return the durable version; does not wait for writers."""
        async with self._store.reading() as connection:
            return int(await connection.fetchval(READ_VERSION))

    async def buried(self, copies: Mapping[int, int]) -> set[int]:
        """Return the entities of `copies` that are deleted permanently, also those without
        tombstone.

        `copies`: number -> version of the definition that a partition has. An entity that is not in
        the catalog was deleted and its tombstone forgotten, or the catalog was restored to an
        earlier moment.
        """
        if not copies:
            return set()
        async with self._store.reading() as connection:
            rows = await connection.fetch(BURIED, list(copies), list(copies.values()))
        return {row["entity_no"] for row in rows}

    async def created_ms(self) -> int:
        """Return the creation time of the store and namespace, by the database's clock."""
        await self._store.open()
        async with self._store.aside() as connection:
            return int(await connection.fetchval(READ_AGE))

    async def put_all(self, puts: Sequence[CatalogPut], fence: CatalogFence) -> list[CatalogEntry]:
        """Store definitions in one commit; each gets its own version, in order."""
        new_count = sum(put.known is None for put in puts)
        async with changing(self._store, fence, len(puts), new_count) as change:
            number = change.entity_no
            entries: list[CatalogEntry] = []
            for version, put in enumerate(puts, change.version):
                entries.append(put.entry(number, version, change.now_ms))
                number += put.known is None
            for sql, is_new in ((CREATE_ALL, True), (REPLACE_ALL, False)):
                selected = [
                    entry
                    for put, entry in zip(puts, entries, strict=True)
                    if (put.known is None) is is_new
                ]
                if selected:
                    await change.connection.execute(sql, *_columns_of(selected))
        return entries

    async def delete(self, entity_no: int, reason: DeletedReason, fence: CatalogFence) -> int:
        """Delete an entity permanently, and a topic's subscriptions; their names are free.

        Their numbers are never reused. A retained entity can no longer be restored. Return the new
        version.
        """
        async with changing(self._store, fence) as change:
            await change.connection.execute(
                DELETE, entity_no, change.version, change.now_ms, reason.value
            )
        return change.version

    async def retain(
        self, entity_no: int, until_ms: int, fence: CatalogFence
    ) -> list[CatalogEntry]:
        """Free the name of an entity, and those of a topic's subscriptions, until it is restored.

        Return the retained entities, a topic first, each with its own version: the version of a
        partition then shows which of them it does not have yet.
        """
        return await self._move(fence, RETAIN, entity_no, until_ms, DeletedReason.REQUESTED.value)

    async def restore(self, entity_no: int, fence: CatalogFence) -> list[CatalogEntry]:
        """Restore the entities that `retain` retained; return them, a topic first."""
        return await self._move(fence, RESTORE, entity_no)

    async def _move(
        self, fence: CatalogFence, sql: str, entity_no: int, *arguments: object
    ) -> list[CatalogEntry]:
        async with changing(self._store, fence) as change:
            connection = change.connection
            rows = await connection.fetch(sql, entity_no, change.version, change.now_ms, *arguments)
            entries = sorted(map(_entry, rows), key=lambda entry: entry.version)
            if len(entries) > 1:
                await connection.execute(SET_VERSION, entries[-1].version)
        return entries


LOCK_MS: Final = 4_500
LOCK_VERSION: Final = "select version from postbus.catalog_version for share"
READ_AGE: Final = "select (extract(epoch from created_at) * 1000)::bigint from postbus.store"
COLUMNS: Final = """
entity_no, name, kind, definition, home_partition, version, created_ms, updated_ms, topic_no, rules,
is_partitioned, restorable_until_ms, deleted_with, forwards_as_sent, managed_by
"""
READ_VERSION: Final = "select version from postbus.catalog_version"
BURIED: Final = """
select copy.entity_no
from unnest($1::integer[], $2::bigint[]) as copy (entity_no, version)
left join postbus.catalog found on found.entity_no = copy.entity_no
where found.is_deleted and found.restorable_until_ms is null
   or found.entity_no is null
      and copy.version < (select forgotten_version from postbus.catalog_version)
"""
LOAD: Final = f"""
select {COLUMNS} from postbus.catalog
where not is_deleted or restorable_until_ms is not null
order by name
"""
ALL_COLUMNS: Final = """
unnest(
    $1::integer[], $2::text[], $3::text[], $4::text[], $5::integer[], $6::bigint[], $7::bigint[],
    $8::bigint[], $9::integer[], $10::text[], $11::boolean[], $12::text[], $13::text[]
) as new (
    entity_no, name, kind, definition, home_partition, version, created_ms, updated_ms, topic_no,
    rules, is_partitioned, forwards_as_sent, managed_by
)
"""
CREATE_ALL: Final = f"""
insert into postbus.catalog (
    entity_no, name, kind, definition, home_partition, version, created_ms, updated_ms, topic_no,
    rules, is_partitioned, forwards_as_sent, managed_by
)
select entity_no, name, kind, definition::jsonb, home_partition, version, created_ms, updated_ms,
       topic_no, rules::jsonb, is_partitioned, forwards_as_sent::jsonb, managed_by
from {ALL_COLUMNS}
"""
REPLACE_ALL: Final = f"""
update postbus.catalog old
set definition = new.definition::jsonb, rules = new.rules::jsonb, version = new.version,
    updated_ms = new.updated_ms, forwards_as_sent = new.forwards_as_sent::jsonb,
    managed_by = new.managed_by
from {ALL_COLUMNS}
where old.entity_no = new.entity_no and not old.is_deleted
"""
DELETE: Final = """
update postbus.catalog
set is_deleted = true, version = $2, restorable_until_ms = null, deleted_with = null,
    updated_ms = case when is_deleted then updated_ms else $3 end,
    deleted_reason = case when is_deleted then deleted_reason else $4 end
where (entity_no = $1 or topic_no = $1) and (not is_deleted or restorable_until_ms is not null)
"""
RETAIN: Final = f"""
with family as (
    select entity_no as number,
           $2::bigint - 1 + row_number() over (order by topic_no nulls first, entity_no) as version
    from postbus.catalog where (entity_no = $1 or topic_no = $1) and not is_deleted
)
update postbus.catalog
set is_deleted = true, version = family.version, updated_ms = $3, deleted_reason = $5,
    restorable_until_ms = $4,
    deleted_with = case when entity_no = $1 then null else $1::integer end
from family where entity_no = number
returning {COLUMNS.replace(" version", " catalog.version")}
"""
RESTORE: Final = f"""
with family as (
    select entity_no as number,
           $2::bigint - 1 + row_number() over (order by topic_no nulls first, entity_no) as version
    from postbus.catalog
    where (entity_no = $1 or deleted_with = $1) and is_deleted and restorable_until_ms is not null
)
update postbus.catalog
set is_deleted = false, version = family.version, updated_ms = $3, deleted_reason = null,
    restorable_until_ms = null, deleted_with = null
from family where entity_no = number
returning {COLUMNS.replace(" version", " catalog.version")}
"""
SET_VERSION: Final = "update postbus.catalog_version set version = $1"


def _entry(row: asyncpg.Record) -> CatalogEntry:
    kind = EntityKind(row["kind"])
    return CatalogEntry(
        row["entity_no"],
        row["name"],
        kind,
        PROPERTIES_OF[kind].model_validate(json.loads(row["definition"])),
        row["home_partition"],
        row["version"],
        row["created_ms"],
        row["updated_ms"],
        row["topic_no"],
        tuple(
            StoredRule(RuleProperties.model_validate(rule["rule"]), rule["created_ms"])
            for rule in json.loads(row["rules"])
        ),
        row["is_partitioned"],
        row["restorable_until_ms"],
        row["deleted_with"],
        json.loads(row["forwards_as_sent"]),
        row["managed_by"],
    )


def _columns_of(entries: Sequence[CatalogEntry]) -> list[list[object]]:
    """Return the columns of `ALL_COLUMNS`."""
    return [
        [entry.entity_no for entry in entries],
        [entry.name for entry in entries],
        [entry.kind.value for entry in entries],
        [entry.properties.model_dump_json(by_alias=True) for entry in entries],
        [entry.home_partition for entry in entries],
        [entry.version for entry in entries],
        [entry.created_ms for entry in entries],
        [entry.updated_ms for entry in entries],
        [entry.topic_no for entry in entries],
        [_pack_rules(entry.rules, entry.updated_ms) for entry in entries],
        [entry.is_partitioned for entry in entries],
        [json.dumps(dict(entry.forwards_as_sent)) for entry in entries],
        [entry.managed_by for entry in entries],
    ]


def _pack_rules(rules: Sequence[StoredRule], now_ms: int) -> str:
    """Return the column's text; new rules get the time of this change."""
    return f"[{','.join([_packed(rule, rule.created_ms or now_ms) for rule in rules])}]"


def _packed(rule: StoredRule, created_ms: int) -> str:
    return f'{{"created_ms":{created_ms},"rule":{rule.properties.text}}}'
