"""The catalog of a namespace: which entities exist, what they are and where they live (D14).

One process decides for now; the durable catalog lies with partition 0 and every partition keeps
its own copy through its own journal. A definition counts as changed when the catalog's commit is
durable and the partitions it lives in, as far as they are loaded, have acknowledged the change. A
write that failed may be durable all the same: the tables are read again before anybody is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from postbus.broker.entries import Entries, put_of, puts_in_order
from postbus.broker.idle_deletion import freeze, hold
from postbus.broker.preconditions import (
    ANYHOW,
    DirectoryRefusal,
    Precondition,
    PutMode,
    check_count,
    check_definition,
    check_name,
    check_rules,
    refusal,
    rule_named,
    to_store,
)
from postbus.broker.recovery import FIRST_BACKOFF_S, LAST_BACKOFF_S
from postbus.contract import (
    DEFAULT_RULE,
    LIMITS,
    EntityKind,
    EntityProperties,
    NamespaceLimits,
    QueueProperties,
    RuleProperties,
    Sku,
    SubscriptionProperties,
    TopicProperties,
    check_entity_name,
    check_subscription_name,
    subscription_path,
)
from postbus.definitions import Described, complete
from postbus.entity.commands import (
    Command,
    DropEntity,
    Hold,
    PutEntity,
    Refusal,
    Refused,
    Reply,
)
from postbus.store.catalog import CatalogEntry, CatalogStore, DeletedReason, StoredRule
from postbus.store.errors import StoreError

__all__ = ["Directory", "DirectoryRefusal", "home_of"]

logger = logging.getLogger(__name__)


IDLE_AT_ONCE = 8
"""Idle entities whose partitions are asked at once: each refuses its clients for as long."""


class DefinitionFollower(Protocol):
    """A partition's host, as far as the directory knows it."""

    @property
    def is_loaded(self) -> bool: ...

    @property
    def reload_count(self) -> int: ...

    async def call(self, command: Command) -> Reply: ...


class Directory:
    """Definitions in memory, in step with the catalog's tables.

    What changes a definition raises `DirectoryRefusal`, or what the store raised when nothing was
    written; it waits for the store as long as that is unknown.
    """

    def __init__(
        self,
        catalog: CatalogStore,
        partition_count: int,
        limits: NamespaceLimits = LIMITS[Sku.STANDARD],
    ) -> None:
        self._catalog = catalog
        self._partition_count = partition_count
        self._limits = limits
        self._entries = Entries()
        self._followers: Sequence[DefinitionFollower] = ()
        self._on_deleted: list[Callable[[int], None]] = []
        self._changing = asyncio.Lock()
        self._is_unsure = False  # a write began whose result nobody learned
        self._unused: dict[int, bool] = {}  # whose deletion is considered -> not put since then
        self._condemned: set[int] = set()  # those that no partition takes anything for
        self._room_for_idle = asyncio.Semaphore(IDLE_AT_ONCE)
        self._told: dict[int, int] = {}  # partition that is being told -> what it has until then
        self.version = 0

    def follow(self, followers: Sequence[DefinitionFollower]) -> None:
        """Name the hosts of the partitions, in order of partition id."""
        self._followers = followers

    def tell_deletions(self, on_deleted: Callable[[int], None]) -> None:
        """Add who gets the numbers of deleted entities, when their partitions know of it."""
        self._on_deleted.append(on_deleted)

    async def load(self) -> None:
        """Read the catalog; raises `StoreUnavailable`."""
        self.version, entries = await self._catalog.load()
        self._entries = Entries(entries)

    # --- questions ------------------------------------------------------------------------------

    def find(self, name: str) -> CatalogEntry | None:
        """Return the entity of a lower-case name; that of a subscription is its path."""
        return self._entries.find(name)

    def numbered(self, entity_no: int) -> CatalogEntry | None:
        """Return the entity of a number, None when it is gone."""
        return self._entries.numbered(entity_no)

    def entries(self) -> list[CatalogEntry]:
        return sorted(self._entries.all(), key=lambda entry: entry.name)

    def page(self, of: EntityKind | int, skip: int, top: int) -> list[CatalogEntry]:
        """Return some of a kind, or of the subscriptions of a topic's number, in order of name."""
        return self._entries.page(of, skip, top)

    def subscription_count(self, topic_no: int) -> int:
        return len(self._entries.subscriptions_of(topic_no))

    def entries_of(self, partition_id: int) -> list[CatalogEntry]:
        """Return what lives in a partition."""
        return [entry for entry in self._entries.all() if partition_id in self.homes_of(entry)]

    def homes_of(self, entry: CatalogEntry) -> Collection[int]:
        """Return the partitions that an entity lives in."""
        return range(self._partition_count) if entry.is_partitioned else (entry.home_partition,)

    def missing(
        self, partition_id: int, known: set[int], version: int
    ) -> list[PutEntity | DropEntity]:
        """Return what a partition that knows these numbers up to a version lacks, in order."""
        wanted = self.entries_of(partition_id)
        gone = known - {entry.entity_no for entry in wanted}
        return [
            *puts_in_order(wanted, known, version),
            # A subscription came after its topic and goes before it.
            *(DropEntity(entity_no, self.version) for entity_no in sorted(gone, reverse=True)),
        ]

    def held(self, partition_id: int) -> list[Hold]:
        """Return what a partition that was loaded must not take anything for (D14)."""
        return [
            Hold(entry.entity_no, is_decided=True)
            for entry in self.entries_of(partition_id)
            if entry.entity_no in self._condemned
        ]

    def acknowledged(self) -> dict[int, int]:
        """Return partition -> the version of the catalog it has.

        One that is not loaded counts as having the latest: it takes nothing before it caught up.
        """
        return {
            partition_id: self._told.get(partition_id, self.version)
            for partition_id in range(self._partition_count)
        }

    def rules_of(self, path: str) -> tuple[StoredRule, ...]:
        """Return the rules of a subscription; raises `DirectoryRefusal`."""
        return self._subscription(path).rules

    # --- definitions ----------------------------------------------------------------------------

    async def put_queue(
        self, name: str, properties: QueueProperties, condition: Precondition = ANYHOW
    ) -> CatalogEntry:
        """Create a queue or change its definition; an equal definition changes nothing."""
        async with self._changing:
            await self._make_sure()
            check_name(check_entity_name, name)
            completed = complete(properties, self._limits)
            return await self._put(name, EntityKind.QUEUE, completed, condition=condition)

    async def put_topic(
        self, name: str, properties: TopicProperties, condition: Precondition = ANYHOW
    ) -> CatalogEntry:
        """Create a topic or change its definition."""
        async with self._changing:
            await self._make_sure()
            check_name(check_entity_name, name)
            completed = complete(properties, self._limits)
            return await self._put(name, EntityKind.TOPIC, completed, condition=condition)

    async def put_subscription(
        self,
        topic: str,
        name: str,
        properties: SubscriptionProperties,
        rules: Sequence[RuleProperties] | None = None,
        condition: Precondition = ANYHOW,
    ) -> CatalogEntry:
        """Create a subscription or change its definition.

        `rules` replace those it has; None keeps them, or gives a new one `$Default`.
        """
        async with self._changing:
            await self._make_sure()
            check_name(check_subscription_name, name)
            owner = self._entries.find(topic.lower())
            if owner is None or owner.kind is not EntityKind.TOPIC:
                raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no topic {topic}")
            path = subscription_path(owner.name, name)
            known = self._entries.find(path.lower())
            if rules is not None:
                stored = to_store(rules, known.rules if known else ())
            else:
                stored = known.rules if known else (StoredRule(DEFAULT_RULE),)
            completed = complete(properties, self._limits)
            return await self._put(
                path, EntityKind.SUBSCRIPTION, completed, owner, stored, condition=condition
            )

    async def delete(self, name: str, version: int | None = None) -> bool:
        """Free a name at once; its messages go with it. False when there was none.

        A topic takes its subscriptions along. `version`: that of the definition, if it matters.
        """
        async with self._changing:
            await self._make_sure()
            if "$" in name:
                raise refusal(
                    Refusal.NOT_ALLOWED, f"{name} belongs to its entity and goes only with it"
                )
            entry = self._entries.find(name.lower())
            if entry is None:
                return False
            Precondition(version=version).check(entry.kind, name, entry)
            return await self._delete(entry, DeletedReason.REQUESTED)

    async def idle(self, entity_no: int) -> bool:
        """Delete an entity if none of its partitions has used it for its period (D14).

        Definitions may change while the partitions are asked; one of the entity is a use of it.
        """
        entry = self._entries.numbered(entity_no)
        if entry is None or entity_no in self._unused:
            return False
        hosts = [self._followers[home] for home in self.homes_of(entry)]
        lives = [host.reload_count for host in hosts]
        self._unused[entity_no] = True
        try:
            async with self._room_for_idle, freeze(hosts, entity_no) as is_frozen:
                if not is_frozen or lives != [host.reload_count for host in hosts]:
                    return False  # what a reload forgot perhaps took a message since
                self._condemned.add(entity_no)  # from here on a reload changes nothing
                if not await hold(hosts, entity_no):
                    return False
                async with self._changing:
                    await self._make_sure()
                    entry = self._entries.numbered(entity_no)
                    if entry is None or not self._unused[entity_no]:
                        return False
                    logger.info("idle entity is deleted", extra={"entity": entry.name})
                    return await self._delete(entry, DeletedReason.IDLE)
        finally:
            self._condemned.discard(entity_no)
            del self._unused[entity_no]

    # --- rules ----------------------------------------------------------------------------------

    async def add_rule(
        self, path: str, rule: RuleProperties, mode: PutMode = PutMode.CREATE
    ) -> CatalogEntry:
        """Add a rule to a subscription, or change the one of its name where `mode` allows it."""
        async with self._changing:
            await self._make_sure()
            entry = self._subscription(path)
            known = rule_named(entry.rules, rule.name)
            if known is None and mode is PutMode.UPDATE:
                raise refusal(Refusal.ENTITY_NOT_FOUND, f"{entry.name} has no rule {rule.name}")
            if known is not None and mode is PutMode.CREATE:
                raise refusal(
                    Refusal.ALREADY_EXISTS, f"{entry.name} has a rule {rule.name} already"
                )
            if known is None:
                return await self._put_rules(entry, (*entry.rules, StoredRule(rule)))
            changed = StoredRule(rule, known.created_ms)
            return await self._put_rules(
                entry, tuple(changed if each is known else each for each in entry.rules)
            )

    async def remove_rule(self, path: str, rule_name: str) -> None:
        """Remove a rule of a subscription; one without rules gets nothing."""
        async with self._changing:
            await self._make_sure()
            entry = self._subscription(path)
            found = rule_named(entry.rules, rule_name)
            if found is None:
                raise refusal(Refusal.ENTITY_NOT_FOUND, f"{entry.name} has no rule {rule_name}")
            await self._put_rules(entry, tuple(rule for rule in entry.rules if rule is not found))

    def _subscription(self, path: str) -> CatalogEntry:
        entry = self._entries.find(path.strip("/").lower())
        if entry is None or entry.kind is not EntityKind.SUBSCRIPTION:
            raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no subscription {path}")
        return entry

    async def _put_rules(self, entry: CatalogEntry, rules: tuple[StoredRule, ...]) -> CatalogEntry:
        assert entry.topic_no is not None
        topic = self._entries.numbered(entry.topic_no)
        assert topic is not None
        return await self._put(entry.name, entry.kind, entry.properties, topic, rules)

    # --- writing --------------------------------------------------------------------------------

    async def _put(
        self,
        name: str,
        kind: EntityKind,
        properties: EntityProperties,
        topic: CatalogEntry | None = None,
        rules: tuple[StoredRule, ...] = (),
        *,
        condition: Precondition = ANYHOW,
    ) -> CatalogEntry:
        """Check, write, tell. `topic` and `rules` belong to a subscription."""
        known = self._entries.find(name.lower())
        if topic is not None:
            self._note_use(topic.entity_no)
        condition.check(kind, name, known)
        if known is not None:
            self._note_use(known.entity_no)
            if (known.properties, known.rules) == (properties, rules):
                return known
        entries, limits = self._entries, self._limits
        wanted = Described(known.name if known else name, kind, properties)
        check_definition(entries, limits, wanted, known)
        if known is None:
            check_count(entries, limits, kind, properties, topic)
        if topic is not None:
            check_rules(entries, limits, rules, known, topic)
        if topic is not None:
            home, is_partitioned = topic.home_partition, topic.is_partitioned
        else:
            home = home_of(name, self._partition_count)
            is_partitioned = getattr(properties, "enable_partitioning", False)
        self._is_unsure = True
        try:
            entry = await self._catalog.put(
                name=known.name if known else name,
                kind=kind,
                properties=properties,
                home_partition=home,
                topic_no=topic.entity_no if topic else None,
                rules=rules,
                is_partitioned=is_partitioned,
            )
        except Exception:
            await self._make_sure()
            found = self._entries.find(name.lower())
            if found is None or not _is_what_was_asked(found, properties, rules):
                raise
            return found
        self._is_unsure = False
        self._entries.put(entry)
        self.version = entry.version
        await self._tell(entry, put_of(entry))
        return entry

    async def _delete(self, entry: CatalogEntry, reason: DeletedReason) -> bool:
        self._is_unsure = True
        try:
            self.version = await self._catalog.delete(entry.entity_no, reason)
        except Exception:
            await self._make_sure()
            if self._entries.numbered(entry.entity_no) is not None:
                raise
            return True
        self._is_unsure = False
        all_gone = (*self._entries.subscriptions_of(entry.entity_no), entry)
        for gone in all_gone:
            self._entries.remove(gone)
        for gone in all_gone:
            await self._tell_gone(gone)
        return True

    async def _make_sure(self) -> None:
        """Read the catalog again if a write's result is unknown; repeated until it works."""
        backoff_s = FIRST_BACKOFF_S
        while self._is_unsure:
            try:
                version, entries = await self._catalog.load()
            except StoreError as error:
                logger.warning("the catalog could not be read again", extra={"error": str(error)})
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, LAST_BACKOFF_S)
                continue
            known, self._entries = self._entries.all(), Entries(entries)
            known_version, self.version = self.version, version
            self._is_unsure = False
            await self._tell_changes(known, known_version)

    async def _tell_changes(self, known: list[CatalogEntry], known_version: int) -> None:
        """Let partitions follow what the tables turned out to say, in order of version (D14)."""
        numbers = {entry.entity_no for entry in known}
        for put in puts_in_order(self._entries.all(), numbers, known_version):
            entry = self._entries.numbered(put.entity_no)
            assert entry is not None
            await self._tell(entry, put)
        for entry in sorted(known, key=lambda each: each.entity_no, reverse=True):
            if self._entries.numbered(entry.entity_no) is None:
                await self._tell_gone(entry)

    def _note_use(self, entity_no: int | None) -> None:
        """Keep an entity whose deletion is considered."""
        if entity_no in self._unused:
            self._unused[entity_no] = False

    async def _tell_gone(self, entry: CatalogEntry) -> None:
        await self._tell(entry, DropEntity(entry.entity_no, self.version))
        for tell in self._on_deleted:
            tell(entry.entity_no)

    async def _tell(self, entry: CatalogEntry, command: PutEntity | DropEntity) -> None:
        """Let loaded partitions follow; one that is not catches up when it loads."""
        if isinstance(command, PutEntity):  # thaws what was frozen since the write began
            self._note_use(entry.entity_no)
            self._note_use(entry.topic_no)
        if not self._followers:
            return
        homes = [home for home in self.homes_of(entry) if self._followers[home].is_loaded]
        for home in homes:
            self._told.setdefault(home, command.catalog_version - 1)
        try:
            replies = await asyncio.gather(*(self._followers[home].call(command) for home in homes))
        finally:
            for home in homes:
                self._told.pop(home, None)
        for home, reply in zip(homes, replies, strict=True):
            if isinstance(reply, Refused):  # whatever the store said, the reload catches up
                logger.warning(
                    "partition did not take a definition",
                    extra={"partition": home, "refusal": reply.refusal.value},
                )


def _is_what_was_asked(
    found: CatalogEntry, properties: EntityProperties, rules: Sequence[StoredRule]
) -> bool:
    asked = [rule.properties for rule in rules]
    return found.properties == properties and [rule.properties for rule in found.rules] == asked


def home_of(name: str, partition_count: int) -> int:
    """Choose the partition of a new entity by rendezvous hashing of its name."""
    key = name.lower().encode()

    def weight(partition_id: int) -> bytes:
        return hashlib.blake2b(key, digest_size=8, salt=partition_id.to_bytes(2, "big")).digest()

    return max(range(partition_count), key=weight)
