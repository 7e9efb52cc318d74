"""The directory of a namespace: existing entities, their definitions and partitions (ADR 27).

The broker that owns partition 0 decides; the durable catalog is stored with partition 0, and every
partition has a copy that it changes through its own journal. A definition counts as changed when
the catalog's commit is durable and those of its partitions that are loaded here have acknowledged
the change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from postbus.broker.catalog.catalog import Catalog, caller_epoch
from postbus.broker.catalog.entries import Entries
from postbus.broker.catalog.followers import DefinitionFollower
from postbus.broker.catalog.idle_deletion import freeze, hold
from postbus.broker.catalog.preconditions import (
    UNCONDITIONAL,
    DirectoryRefusal,
    Precondition,
    Put,
    PutMode,
    WantedEntity,
    check_restore,
    check_retained_count,
    plan,
    refusal,
    rule_named,
    warnings_of,
)
from postbus.broker.placement import home_of
from postbus.contract.entities import (
    LIMITS,
    EntityKind,
    NamespaceLimits,
    RuleProperties,
    Sku,
    catalog_key,
    subscription_name,
)
from postbus.entity.commands import Command, Hold, Refusal, Refused
from postbus.entity.outcomes import LoadedPartition
from postbus.store.catalog import (
    CatalogEntry,
    CatalogPut,
    CatalogStore,
    DeletedReason,
    StoredRule,
)

__all__ = ["Directory", "DirectoryRefusal", "home_of"]

logger = logging.getLogger(__name__)

IDLE_AT_ONCE = 8
"""Maximum number of idle entities whose deletion is decided at once: each refuses clients
meanwhile."""

PUT_AT_ONCE = 1_000
"""Maximum number of definitions in a commit. Our choice: they are some hundred kilobytes."""

PURGED_AT_ONCE = 100
"""Maximum number of retained entities that a purge deletes: no other definition changes
meanwhile."""

DELETION_PENDING: Final = Refused(Refusal.BUSY, "it is being checked for deletion; try again")
USED: Final = Refused(Refusal.BUSY, "it was used or changed meanwhile; try again")


class Directory:
    """Definitions in memory, in step with the catalog's tables.

    Methods that change a definition raise `DirectoryRefusal`, or `NotWritten`; they wait for the
    store while the result is unknown.
    """

    def __init__(
        self,
        catalog: CatalogStore,
        limits: NamespaceLimits = LIMITS[Sku.STANDARD],
    ) -> None:
        self.limits = limits
        """Limits of the namespace; those of another tier replace them, with as many partitions."""
        self.refuses_sends = False
        """True while the namespace is closed or is being closed."""
        self.catalog = Catalog(catalog, limits.partition_count, self._catalog_changed)
        self._unused: dict[int, bool] = {}  # whose deletion is considered -> not put since then
        self._condemned: set[int] = set()  # those that no partition takes anything for
        self._room_for_idle = asyncio.Semaphore(IDLE_AT_ONCE)

    @property
    def version(self) -> int:
        """The catalog's version: each change raises it."""
        return self.catalog.version

    @property
    def _entries(self) -> Entries:
        return self.catalog.entries

    def follow(self, followers: Sequence[DefinitionFollower]) -> None:
        """Set the hosts of the partitions, in order of partition id."""
        self.catalog.followers.hosts = followers

    def on_deletion(self, on_deleted: Callable[[int], None]) -> None:
        """Add a callback for the numbers of deleted entities, called when their partitions know of
        it.
        """
        self.catalog.followers.on_deleted.append(on_deleted)

    def on_restore(self, on_restored: Callable[[int], None]) -> None:
        """Add a callback for the numbers of restored entities."""
        self.catalog.followers.on_restored.append(on_restored)

    async def load(self) -> None:
        """Read the catalog; raises `StoreUnavailable`."""
        await self.catalog.read()

    # --- questions ------------------------------------------------------------------------------

    def find(self, name: str) -> CatalogEntry | None:
        """Return the entity of a lower-case name; that of a subscription is its path."""
        return self._entries.find(name)

    def warnings_of(self, entry: CatalogEntry) -> dict[str, str]:
        """Return field -> warning, for definitions that are valid but probably not intended."""
        return warnings_of(self._entries, entry)

    def begins(self, path: str) -> bool:
        """Return whether a lower-case path is the name of a queue or topic, or a prefix of one."""
        return self._entries.begins(path)

    def numbered(self, entity_no: int) -> CatalogEntry | None:
        """Return the entity of a number, None if it was deleted."""
        return self._entries.numbered(entity_no)

    def retained_named(self, name: str) -> list[CatalogEntry]:
        """Return the deleted entities of a lower-case name that can be restored."""
        return self._entries.retained_named(name)

    def entries(self) -> list[CatalogEntry]:
        return sorted(self._entries.all(), key=lambda entry: entry.name)

    def changed_since(self, version: int) -> list[CatalogEntry]:
        """Return the existing entities that were changed after a version, in order of version."""
        found = [entry for entry in self._entries.all() if entry.version > version]
        return sorted(found, key=lambda entry: entry.version)

    def page(self, of: EntityKind | int, skip: int, top: int) -> list[CatalogEntry]:
        """Return a page of a kind, or of the subscriptions of a topic's number, in order of
        name.
        """
        return self._entries.page(of, skip, top)

    def count_of(self, kind: EntityKind) -> int:
        return self._entries.count_of(kind)

    @property
    def unmanaged_count(self) -> int:
        return self._entries.unmanaged_count

    def subscription_count(self, topic_no: int) -> int:
        return len(self._entries.subscriptions_of(topic_no))

    def homes_of(self, entry: CatalogEntry) -> Collection[int]:
        """Return the partitions of an entity."""
        return self.catalog.followers.homes_of(entry)

    def homes_in_use(self) -> set[int]:
        """Return the partitions that have entities, including retained ones."""
        return {home for entry in self._entries.stored() for home in self.homes_of(entry)}

    async def read_for(
        self, partition_id: int, loaded: LoadedPartition, last_epoch: int
    ) -> set[int]:
        """Read the catalog for a loaded partition; return the argument of `missing`.

        `last_epoch`: epoch of its previous load here. Raises StoreUnavailable.
        """
        was_ours = loaded.epoch == last_epoch + 1
        copies = {each.entity_no: each.catalog_version for each in loaded.entities}
        version = loaded.catalog_version
        return await self.catalog.catch_up(partition_id, copies, version, was_ours=was_ours)

    def missing(self, partition_id: int, loaded: LoadedPartition, gone: set[int]) -> list[Command]:
        """Return the commands that bring a loaded partition up to date, in order (ADR 27)."""
        known = {each.entity_no for each in loaded.entities}
        missing = self.catalog.missing(partition_id, known, loaded.catalog_version, gone)
        return [*missing, *self.held(partition_id)]

    def held(self, partition_id: int) -> list[Hold]:
        """Return the entities for which a loaded partition must not accept anything (ADR 27)."""
        return [
            Hold(entry.entity_no, is_decided=True)
            for entry in self.catalog.entries_of(partition_id)
            if entry.entity_no in self._condemned
        ]

    def acknowledged(self) -> dict[int, int]:
        """Return partition -> the version of the catalog it has.

        One that is not loaded counts as having the latest: it accepts nothing before it has caught
        up.
        """
        return self.catalog.followers.acknowledged(self.version)

    # --- definitions ----------------------------------------------------------------------------

    @asynccontextmanager
    async def unchanged(self, condition: Precondition = UNCONDITIONAL) -> AsyncIterator[None]:
        """Keep definitions unchanged in a block; CONFLICT if the catalog has another version."""
        async with self.catalog.changing():
            condition.check_version("the catalog", self.version)
            yield

    async def put(self, wanted: WantedEntity, condition: Precondition = UNCONDITIONAL) -> Put:
        """Create an entity or change its definition, if the condition holds."""
        async with self.catalog.changing():
            return await self._put(wanted, condition)

    async def put_all(self, wanted: Sequence[WantedEntity]) -> None:
        """Put many in few commits, in order; those before a refused one may already be stored."""
        async with self.catalog.changing():
            done = 0
            while done < len(wanted):
                count, puts = self._planned(wanted[done : done + PUT_AT_ONCE])
                done += count
                if not puts:
                    continue
                entries = await self.catalog.written(
                    self.catalog.store.put_all(puts, self.catalog.fence()),
                    partial(self._are_as_asked, puts),
                )
                await self.catalog.follow(entries or ())

    def _planned(self, wanted: Sequence[WantedEntity]) -> tuple[int, list[CatalogPut]]:
        """Return the definitions to store, each checked as if those before it were stored.

        Also returns the number of `wanted` that they cover: a new topic is stored before its
        subscriptions, and an entity that occurs twice is stored twice.
        """
        puts: list[CatalogPut] = []
        planned: set[int] = set()
        try:
            for count, each in enumerate(wanted):
                try:
                    put = self._plan(each, UNCONDITIONAL)
                except DirectoryRefusal as error:
                    detail = f"invalid {each.kind.value} {each.name}: {error}"
                    raise refusal(error.refused.refusal, detail) from error
                if put.topic_no is not None and put.topic_no < 0:
                    return count, puts
                if isinstance(put, CatalogPut):
                    if put.known is not None and put.known.entity_no in planned:
                        return count, puts
                    puts.append(put)
                    entry = put.entry(-len(puts), self.version, 0)
                    planned.add(entry.entity_no)
                    self._entries.put(entry)
        finally:
            for number, put in reversed(list(enumerate(puts, 1))):
                if put.known is not None:
                    self._entries.put(put.known)
                else:
                    self._entries.remove(put.entry(-number, self.version, 0))
        return len(wanted), puts

    def _plan(self, wanted: WantedEntity, condition: Precondition) -> CatalogPut | CatalogEntry:
        home = partial(home_of, partition_count=self.limits.partition_count)
        return plan(self._entries, self.limits, wanted, condition, home)

    def _are_as_asked(self, puts: Sequence[CatalogPut]) -> bool:
        return all(_is_what_was_asked(self._entries.find(put.name.lower()), put) for put in puts)

    # --- deletions ------------------------------------------------------------------------------

    async def delete(self, name: str, condition: Precondition = UNCONDITIONAL) -> bool:
        """Delete an entity with its messages; its name is free at once. False if there was none.

        A topic's subscriptions are deleted with it.
        """
        async with self.catalog.changing():
            entry = self._to_delete(name, condition)
            return entry is not None and await self._delete(entry, DeletedReason.REQUESTED)

    async def delete_if_empty(self, name: str, condition: Precondition = UNCONDITIONAL) -> bool:
        """Delete an entity if it has no messages, decided in step with traffic.

        Raises `DirectoryRefusal`, such as NOT_EMPTY; its partitions should be loaded.
        """
        async with self.catalog.changing():
            entry = self._to_delete(name, condition)
        if entry is None:
            return False
        why_not = await self._delete_frozen(entry, DeletedReason.REQUESTED)
        if why_not is not None:
            raise DirectoryRefusal(why_not)
        return True

    async def idle(self, entity_no: int) -> bool:
        """Delete an entity if none of its partitions has used it for its period (ADR 27).

        Does nothing unless definitions are changed here: the partition repeats its report.
        """
        if self.catalog.epoch is None:
            return False
        caller_epoch.set(None)  # inherited from the caller that started the timer
        entry = self._entries.numbered(entity_no)
        return entry is not None and await self._delete_frozen(entry, DeletedReason.IDLE) is None

    async def _delete_frozen(self, entry: CatalogEntry, reason: DeletedReason) -> Refused | None:
        """Delete an entity that all its partitions agree to freeze; else return the reason.

        Definitions may change while the partitions are asked; a change of the entity is a use of
        it.
        """
        entity_no = entry.entity_no
        if entity_no in self._unused:
            return DELETION_PENDING
        hosts = self.catalog.followers.hosts_of(entry)
        lives = [host.reload_count for host in hosts]
        if_empty = reason is DeletedReason.REQUESTED
        self._unused[entity_no] = True
        try:
            async with self._room_for_idle, freeze(hosts, entity_no, if_empty=if_empty) as why_not:
                if why_not is not None:
                    return why_not
                if lives != [host.reload_count for host in hosts]:
                    return USED  # after a reload, which thaws it, it may have accepted a message
                self._condemned.add(entity_no)  # from here on a reload does no harm
                why_not = await hold(hosts, entity_no)
                if why_not is not None:
                    return why_not
                async with self.catalog.changing():
                    found = self._entries.numbered(entity_no)
                    if found is None or not self._unused[entity_no]:
                        return USED
                    logger.info(f"{reason.value} entity is deleted", extra={"entity": found.name})
                    return None if await self._delete(found, reason) else USED
        finally:
            self._condemned.discard(entity_no)
            del self._unused[entity_no]

    def _to_delete(self, name: str, condition: Precondition) -> CatalogEntry | None:
        if "$" in name:
            raise refusal(
                Refusal.NOT_ALLOWED, f"{name} belongs to its entity and can only be deleted with it"
            )
        entry = self._entries.find(name.lower())
        if entry is not None:
            condition.check(entry.kind, name, entry)
        return entry

    # --- deleted and kept -----------------------------------------------------------------------

    async def retain(
        self, name: str, until_ms: int, condition: Precondition = UNCONDITIONAL
    ) -> bool:
        """Free a name at once, but keep messages, rules and numbers until a given time (ADR 27).

        A topic's subscriptions are retained with it. Returns False if there was none.
        """
        async with self.catalog.changing():
            entry = self._to_delete(name, condition)
            if entry is None:
                return False
            number = entry.entity_no
            check_retained_count(self._entries, self.limits, number)
            moved = await self.catalog.written(
                self.catalog.store.retain(number, until_ms, self.catalog.fence()),
                lambda: self._entries.numbered(number) is None,
            )
            await self.catalog.follow(moved or (), was_elsewhere=True)
            return True

    async def restore(self, entity_no: int) -> CatalogEntry:
        """Restore a retained entity, a topic with the subscriptions that were deleted with it."""
        async with self.catalog.changing():
            entry = check_restore(self._entries, self.limits, entity_no)
            moved = await self.catalog.written(
                self.catalog.store.restore(entity_no, self.catalog.fence()),
                lambda: self._entries.numbered(entity_no) is not None,
            )
            await self.catalog.follow(moved or (), was_elsewhere=True)
            return self._entries.numbered(entity_no) or entry

    async def purge(self, now_ms: int) -> int:
        """Delete some retained entities whose retention ended, with their messages; return their
        number.
        """
        async with self.catalog.changing():
            due = [
                entry
                for entry in self._entries.retained()
                if entry.restorable_until_ms is not None and entry.restorable_until_ms <= now_ms
            ]
            for entry in sorted(due, key=lambda each: each.entity_no)[:PURGED_AT_ONCE]:
                if self._entries.stored_numbered(entry.entity_no) is not None:  # not with its topic
                    await self._delete(entry, DeletedReason.REQUESTED)
            return len(due)

    # --- rules ----------------------------------------------------------------------------------

    async def add_rule(
        self, path: str, rule: RuleProperties, mode: PutMode = PutMode.CREATE
    ) -> Put:
        """Add a rule to a subscription, or change the rule of its name if `mode` allows that."""
        async with self.catalog.changing():
            entry = self._subscription(path)
            known = rule_named(entry.rules, rule.name)
            if known is None and mode is PutMode.UPDATE:
                raise refusal(Refusal.ENTITY_NOT_FOUND, f"{entry.name} has no rule {rule.name}")
            if known is not None and mode is PutMode.CREATE:
                raise refusal(
                    Refusal.ALREADY_EXISTS, f"{entry.name} already has a rule {rule.name}"
                )
            if known is None:
                put = await self._put_rules(entry, (*entry.rules, StoredRule(rule)))
                return Put(put.entry, is_new=True)
            changed = StoredRule(rule, known.created_ms)
            return await self._put_rules(
                entry, tuple(changed if each is known else each for each in entry.rules)
            )

    async def remove_rule(self, path: str, rule_name: str) -> None:
        """Remove a rule of a subscription; one without rules receives nothing."""
        async with self.catalog.changing():
            entry = self._subscription(path)
            found = rule_named(entry.rules, rule_name)
            if found is None:
                raise refusal(Refusal.ENTITY_NOT_FOUND, f"{entry.name} has no rule {rule_name}")
            await self._put_rules(entry, tuple(rule for rule in entry.rules if rule is not found))

    def _subscription(self, path: str) -> CatalogEntry:
        entry = self._entries.find(catalog_key(path))
        if entry is None or entry.kind is not EntityKind.SUBSCRIPTION:
            raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no subscription {path}")
        return entry

    async def _put_rules(self, entry: CatalogEntry, rules: Sequence[StoredRule]) -> Put:
        topic = None if entry.topic_no is None else self._entries.numbered(entry.topic_no)
        assert topic is not None
        wanted = WantedEntity(
            entry.kind,
            subscription_name(entry.name),
            entry.properties,
            topic.name,
            [rule.properties for rule in rules],
        )
        return await self._put(wanted, UNCONDITIONAL)

    # --- writing --------------------------------------------------------------------------------

    async def _put(self, wanted: WantedEntity, condition: Precondition) -> Put:
        """Check, write, notify."""
        put = self._plan(wanted, condition)
        self._note_use(put.topic_no)
        if isinstance(put, CatalogEntry):
            self._note_use(put.entity_no)
            return Put(put, is_new=False)
        if put.known is not None:
            self._note_use(put.known.entity_no)
        entries = await self.catalog.written(
            self.catalog.store.put_all([put], self.catalog.fence()),
            partial(self._are_as_asked, [put]),
        )
        if entries is None:
            found = self._entries.find(put.name.lower())
            assert found is not None
            return Put(found, put.known is None)
        await self.catalog.follow(entries)
        return Put(entries[0], put.known is None)

    async def _delete(self, entry: CatalogEntry, reason: DeletedReason) -> bool:
        """Delete an existing or retained entity permanently."""
        number = entry.entity_no
        version = await self.catalog.written(
            self.catalog.store.delete(number, reason, self.catalog.fence()),
            lambda: self._entries.stored_numbered(number) is None,
        )
        if version is not None:
            await self.catalog.remove(entry, version)
        return True

    def _note_use(self, entity_no: int | None) -> None:
        """Keep an entity that is being checked for deletion."""
        if entity_no in self._unused:
            self._unused[entity_no] = False

    def _catalog_changed(self, entry: CatalogEntry) -> None:
        """A change of a definition is a use of it, and of its topic."""
        self._note_use(entry.entity_no)
        self._note_use(entry.topic_no)


def _is_what_was_asked(found: CatalogEntry | None, put: CatalogPut) -> bool:
    asked = [rule.properties for rule in put.rules]
    return (
        found is not None
        and found.properties == put.properties
        and found.forwards_as_sent == put.forwards_as_sent
        and found.managed_by == put.managed_by
        and [rule.properties for rule in found.rules] == asked
    )
