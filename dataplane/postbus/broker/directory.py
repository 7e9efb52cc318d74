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
from postbus.definitions import (
    Described,
    change_problems,
    complete,
    doubled_rule,
    forwarding_problems,
    rule_count_problem,
    tier_problems,
)
from postbus.entity.commands import (
    Command,
    DropEntity,
    Hold,
    PutEntity,
    Refusal,
    Refused,
    Reply,
)
from postbus.entity.rules import check_rule
from postbus.entity.sql_grammar import RuleError
from postbus.store.catalog import CatalogEntry, CatalogStore, DeletedReason, StoredRule
from postbus.store.errors import StoreError

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


class DirectoryRefusal(Exception):
    """A change of the catalog that is refused; nothing changed."""

    def __init__(self, refused: Refused) -> None:
        self.refused = refused
        super().__init__(refused.detail)


def _refusal(refusal: Refusal, detail: str) -> DirectoryRefusal:
    return DirectoryRefusal(Refused(refusal, detail))


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

    def rules_of(self, path: str) -> tuple[StoredRule, ...]:
        """Return the rules of a subscription; raises `DirectoryRefusal`."""
        return self._subscription(path).rules

    # --- definitions ----------------------------------------------------------------------------

    async def put_queue(self, name: str, properties: QueueProperties) -> CatalogEntry:
        """Create a queue or change its definition; an equal definition changes nothing."""
        async with self._changing:
            await self._make_sure()
            _check_name(check_entity_name, name)
            return await self._put(name, EntityKind.QUEUE, complete(properties, self._limits))

    async def put_topic(self, name: str, properties: TopicProperties) -> CatalogEntry:
        """Create a topic or change its definition."""
        async with self._changing:
            await self._make_sure()
            _check_name(check_entity_name, name)
            return await self._put(name, EntityKind.TOPIC, complete(properties, self._limits))

    async def put_subscription(
        self,
        topic: str,
        name: str,
        properties: SubscriptionProperties,
        rules: Sequence[RuleProperties] | None = None,
    ) -> CatalogEntry:
        """Create a subscription or change its definition.

        `rules` replace those it has; None keeps them, or gives a new one `$Default`.
        """
        async with self._changing:
            await self._make_sure()
            _check_name(check_subscription_name, name)
            owner = self._entries.find(topic.lower())
            if owner is None or owner.kind is not EntityKind.TOPIC:
                raise _refusal(Refusal.ENTITY_NOT_FOUND, f"there is no topic {topic}")
            path = subscription_path(owner.name, name)
            known = self._entries.find(path.lower())
            if rules is not None:
                stored = _stored(rules, known.rules if known else ())
            else:
                stored = known.rules if known else (StoredRule(DEFAULT_RULE),)
            completed = complete(properties, self._limits)
            return await self._put(path, EntityKind.SUBSCRIPTION, completed, owner, stored)

    async def delete(self, name: str) -> bool:
        """Free a name at once; its messages go with it. False when there was none.

        A topic takes its subscriptions along.
        """
        async with self._changing:
            await self._make_sure()
            if "$" in name:
                raise _refusal(
                    Refusal.NOT_ALLOWED, f"{name} belongs to its entity and goes only with it"
                )
            entry = self._entries.find(name.lower())
            return entry is not None and await self._delete(entry, DeletedReason.REQUESTED)

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

    async def add_rule(self, path: str, rule: RuleProperties) -> None:
        """Add a rule to a subscription; one of that name must not exist."""
        async with self._changing:
            await self._make_sure()
            entry = self._subscription(path)
            if _named(entry.rules, rule.name) is not None:
                raise _refusal(
                    Refusal.ALREADY_EXISTS, f"{entry.name} has a rule {rule.name} already"
                )
            await self._put_rules(entry, (*entry.rules, StoredRule(rule)))

    async def remove_rule(self, path: str, rule_name: str) -> None:
        """Remove a rule of a subscription; one without rules gets nothing."""
        async with self._changing:
            await self._make_sure()
            entry = self._subscription(path)
            found = _named(entry.rules, rule_name)
            if found is None:
                raise _refusal(Refusal.ENTITY_NOT_FOUND, f"{entry.name} has no rule {rule_name}")
            await self._put_rules(entry, tuple(rule for rule in entry.rules if rule is not found))

    def _subscription(self, path: str) -> CatalogEntry:
        entry = self._entries.find(path.strip("/").lower())
        if entry is None or entry.kind is not EntityKind.SUBSCRIPTION:
            raise _refusal(Refusal.ENTITY_NOT_FOUND, f"there is no subscription {path}")
        return entry

    async def _put_rules(self, entry: CatalogEntry, rules: tuple[StoredRule, ...]) -> None:
        assert entry.topic_no is not None
        topic = self._entries.numbered(entry.topic_no)
        assert topic is not None
        await self._put(entry.name, entry.kind, entry.properties, topic, rules)

    # --- writing --------------------------------------------------------------------------------

    async def _put(
        self,
        name: str,
        kind: EntityKind,
        properties: EntityProperties,
        topic: CatalogEntry | None = None,
        rules: tuple[StoredRule, ...] = (),
    ) -> CatalogEntry:
        """Check, write, tell. `topic` and `rules` belong to a subscription."""
        known = self._entries.find(name.lower())
        if topic is not None:
            self._note_use(topic.entity_no)
        if known is not None and known.kind is not kind:
            raise _refusal(
                Refusal.ALREADY_EXISTS, f"{known.name} exists already and is a {known.kind.value}"
            )
        if known is not None:
            self._note_use(known.entity_no)
            if (known.properties, known.rules) == (properties, rules):
                return known
        self._check(Described(known.name if known else name, kind, properties), known)
        self._check_count(kind, properties, known, topic)
        self._check_rules(rules, known, topic)
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
        replies = await asyncio.gather(*(self._followers[home].call(command) for home in homes))
        for home, reply in zip(homes, replies, strict=True):
            if isinstance(reply, Refused):  # whatever the store said, the reload catches up
                logger.warning(
                    "partition did not take a definition",
                    extra={"partition": home, "refusal": reply.refusal.value},
                )

    # --- checks ---------------------------------------------------------------------------------

    def _check(self, wanted: Described, known: CatalogEntry | None) -> None:
        """Refuse what the tier, the past or the rest of the namespace does not allow."""
        if known is not None:
            changed = change_problems(known.properties, wanted.properties)
            if changed:
                raise _refusal(Refusal.NOT_ALLOWED, _shown(changed))
        problems = tier_problems(wanted.properties, self._limits)
        if known is not None and known.is_partitioned:  # it may come from another tier (S146)
            problems.pop("enablePartitioning", None)
        if known is None or _forwards_of(known.properties) != _forwards_of(wanted.properties):
            problems |= forwarding_problems(
                wanted, self._entries.find, self._entries.subscriptions_named
            )
        if problems:
            raise _refusal(Refusal.ARGUMENT_OUT_OF_RANGE, _shown(problems))

    def _check_count(
        self,
        kind: EntityKind,
        properties: EntityProperties,
        known: CatalogEntry | None,
        topic: CatalogEntry | None,
    ) -> None:
        if known is not None:
            return
        limits = self._limits
        if topic is not None:
            if (
                len(self._entries.subscriptions_of(topic.entity_no))
                >= limits.max_subscription_count
            ):
                most = limits.max_subscription_count
                raise _refusal(
                    Refusal.QUOTA_EXCEEDED, f"{topic.name} has {most} subscriptions, no more may be"
                )
            return
        if self._entries.count >= limits.max_entity_count:
            raise _refusal(
                Refusal.QUOTA_EXCEEDED,
                f"the namespace has {limits.max_entity_count} queues and topics, no more may be",
            )
        most_partitioned = limits.max_partitioned_count
        is_partitioned = getattr(properties, "enable_partitioning", False)
        if (
            is_partitioned
            and most_partitioned is not None
            and self._entries.partitioned_count >= most_partitioned
        ):
            raise _refusal(
                Refusal.QUOTA_EXCEEDED,
                f"the namespace has {most_partitioned} partitioned {kind.value}s and the like,"
                " no more may be",
            )

    def _check_rules(
        self,
        rules: tuple[StoredRule, ...],
        known: CatalogEntry | None,
        topic: CatalogEntry | None,
    ) -> None:
        if topic is None or (known is not None and known.rules == rules):
            return
        wanted = [rule.properties for rule in rules]
        name = doubled_rule(wanted)
        if name is not None:
            raise _refusal(Refusal.ARGUMENT_OUT_OF_RANGE, f"the rule {name} is named twice")
        for rule in rules:
            if rule.created_ms == 0:
                try:
                    check_rule(rule.properties)
                except RuleError as error:
                    detail = f"rule {rule.properties.name}: {error}"
                    raise _refusal(Refusal.ARGUMENT_OUT_OF_RANGE, detail) from error
        others = self._entries.rules_of_topic(topic.entity_no, known.entity_no if known else None)
        problem = rule_count_problem([*others, *wanted], self._limits)
        if problem is not None:
            raise _refusal(Refusal.QUOTA_EXCEEDED, problem)


def _check_name(check: Callable[[str], str], name: str) -> None:
    try:
        check(name)
    except ValueError as error:
        raise _refusal(Refusal.ARGUMENT_OUT_OF_RANGE, f"{name!r}: {error}") from error


def _shown(problems: dict[str, str]) -> str:
    return "; ".join(f"{where}: {text}" if where else text for where, text in problems.items())


def _forwards_of(properties: EntityProperties) -> tuple[str | None, str | None]:
    if isinstance(properties, TopicProperties):
        return None, None
    return properties.forward_to, properties.forward_dead_lettered_messages_to


def _named(rules: Sequence[StoredRule], name: str) -> StoredRule | None:
    return next((rule for rule in rules if rule.properties.name.lower() == name.lower()), None)


def _stored(rules: Sequence[RuleProperties], known: Sequence[StoredRule]) -> tuple[StoredRule, ...]:
    """Return rules to store; what was there before and did not change keeps its time."""
    stored = []
    for rule in rules:
        before = _named(known, rule.name)
        is_same = before is not None and before.properties == rule
        stored.append(before if before is not None and is_same else StoredRule(rule))
    return tuple(stored)


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
