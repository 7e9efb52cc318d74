"""Changes of definitions at run time, and questions about entities.

Used by all protocols and for the manifests of a start; messages are routed by `router`. A change
runs in a task of the bus and completes even if the client disconnects. The directory decides and
serialises; counts come from the hosts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar, assert_never

from postbus.broker.catalog.change_feed import MOST, ChangeFeed, EntityChange
from postbus.broker.catalog.change_tasks import ChangeTasks
from postbus.broker.catalog.directory import PURGED_AT_ONCE, Directory
from postbus.broker.catalog.namespace import Namespace
from postbus.broker.catalog.preconditions import (
    UNCONDITIONAL,
    Precondition,
    PutMode,
    WantedEntity,
    refusal,
    rule_named,
)
from postbus.broker.partition.activity import Activity, Rates, oldest_age_of
from postbus.broker.partition.closing import Closing, NamespaceNotEmpty
from postbus.broker.partition.counts_feed import CountsFeed, EntityMovement
from postbus.broker.partition.host import Host
from postbus.broker.spread.replies import away
from postbus.contract.entities import (
    DAY_MS,
    EntityKind,
    EntityProperties,
    NamespaceLimits,
    RuleProperties,
    Sku,
    catalog_key,
)
from postbus.contract.namespace import NamespaceDefinition
from postbus.entity.commands import Refusal, Refused, Tick
from postbus.entity.counts import Counts, sum_of
from postbus.store.catalog import CatalogEntry
from postbus.store.errors import StoreError
from postbus.store.tombstones import Tombstone, TombstoneStore

__all__ = [
    "Administration",
    "Availability",
    "DeletePolicy",
    "EntityChange",
    "EntityDescription",
    "EntityRuntime",
    "NamespaceNotEmpty",
    "PutMode",
    "RuleDescription",
    "RuntimeInformation",
    "Tombstone",
    "WantedEntity",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOADING_S: Final = 10.0
"""Maximum wait of a question for partitions. Our choice: twice the silence after which a partition
may be taken over, and less than a client waits."""

RELOADING: Final = "a partition is being loaded; try again"

TOMBSTONES_MS: Final = 100 * DAY_MS
"""Retention of tombstones; longer than that of any entity. Our choice."""

REAP_S: Final = 60.0
"""Interval of checks for retained entities and tombstones whose retention ended. Our choice."""


class Availability(Enum):
    """Availability of an entity. Source: Service Bus EntityAvailabilityStatus.

    LIMITED: one of its partitions is unavailable or accepts no sends.
    """

    AVAILABLE = "Available"
    LIMITED = "Limited"


class DeletePolicy(Enum):
    """Fate of the messages of an entity that is deleted.

    DELETE: they are deleted. DELETE_IF_EMPTY: there must be none. RETAIN: they are kept for the
    retention of the namespace, during which the entity can be restored.
    """

    DELETE = "Delete"
    DELETE_IF_EMPTY = "DeleteIfEmpty"
    RETAIN = "Retain"


@dataclass(frozen=True, slots=True)
class RuleDescription:
    """A rule of a subscription. `is_new`: the change that returned this created it."""

    properties: RuleProperties
    created_ms: int
    is_new: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class EntityDescription:
    """An entity in the catalog. `version`: the catalog's at its last change, its ETag.

    `name` has its original case; of a subscription it is the path `topic/Subscriptions/name`.
    `partitions`: those that have it. `is_new`: the change that returned this created it.
    `forwards_as_sent`: field -> the URL of a target as sent by a client, perhaps of a former one.
    """

    entity_no: int
    name: str
    kind: EntityKind
    properties: EntityProperties
    rules: tuple[RuleDescription, ...]
    version: int
    created_ms: int
    updated_ms: int
    is_partitioned: bool
    partitions: tuple[int, ...]
    is_new: bool = field(default=False, compare=False)
    forwards_as_sent: Mapping[str, str] = field(default_factory=dict)
    managed_by: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeInformation:
    """Counts of an entity, exact while nobody sends or receives; its partitions were loaded for
    them.

    The messages of `unavailable_partitions` are not counted: what is there is known only when they
    are back. The counts are those of the other partitions; without any they are zero and say
    nothing (`Administration.uncounted`).

    `active` includes locked and deferred messages; `transfer` counts those in the outbox.
    `accessed_ms`: time of the last send or receive, else of the creation; after a kill of the
    broker it may be older. `subscription_count` is a topic's.
    """

    active: int
    dead_letter: int
    scheduled: int
    transfer: int
    transfer_dead_letter: int
    size_bytes: int
    accessed_ms: int
    availability: Availability
    subscription_count: int
    unavailable_partitions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EntityRuntime:
    """The counts of an entity in a list. `is_known`: at least one of its partitions is available;
    else the counts are zero and mean nothing.
    """

    entity_no: int
    name: str
    kind: EntityKind
    runtime: RuntimeInformation
    is_known: bool


@dataclass(frozen=True, slots=True)
class RuntimePage:
    """Entities whose counts changed after a cursor, the latest change last.

    `cursor`: that of the next page. `starts_over`: the given cursor was of no use, and the pages
    have all entities.
    """

    items: list[EntityRuntime]
    cursor: str
    is_end: bool
    starts_over: bool


@dataclass(frozen=True, slots=True)
class EntityTraffic:
    """Present traffic of an entity.

    `rates` are None in the first second of a broker; `oldest_age_s`: age of the oldest active
    message, in entity time; None if there is none or its age is unknown.
    """

    rates: Rates | None
    oldest_age_s: float | None


class Administration:
    """See the module's docstring. Refused calls raise `DirectoryRefusal`."""

    def __init__(
        self,
        directory: Directory,
        hosts: Sequence[Host],
        tombstones: TombstoneStore,
        namespace: Namespace,
        change_tasks: ChangeTasks,
        *,
        now_ms: Callable[[], int],
        loading_s: float = LOADING_S,
    ) -> None:
        """`now_ms` is entity time."""
        self._directory = directory
        self._hosts = hosts
        self._tombstones = tombstones
        self._feed = ChangeFeed(directory, tombstones)
        self._closing = Closing(namespace, hosts, self._load)
        self.counts_feed = CountsFeed(directory, hosts)
        self.activity = Activity(hosts)
        self._now_ms = now_ms
        self._loading_s = loading_s
        self._stopping = asyncio.Event()
        self._namespace = namespace
        self._change_tasks = change_tasks

    # --- questions ------------------------------------------------------------------------------

    @property
    def namespace(self) -> str:
        """The namespace's name."""
        return self._namespace.name

    @property
    def properties(self) -> NamespaceDefinition:
        """The definition of the namespace."""
        return self._namespace.definition

    @property
    def limits(self) -> NamespaceLimits:
        """The limits of the namespace's tier."""
        return self._directory.limits

    @property
    def version(self) -> int:
        """The catalog's version: each change of a definition raises it."""
        return self._directory.version

    def find(self, path: str) -> EntityDescription | None:
        """Return an entity by its path, which is case-insensitive; None if there is none."""
        entry = self._directory.find(catalog_key(path))
        return None if entry is None else self._described(entry)

    def warnings_of(self, path: str) -> tuple[str, ...]:
        """Return field -> warning, for definitions that are valid but probably not intended."""
        entry = self._directory.find(catalog_key(path))
        found = {} if entry is None else self._directory.warnings_of(entry)
        return tuple(f"{where}: {why}" for where, why in found.items())

    def listed(
        self, kind: EntityKind, topic: str | None = None, skip: int = 0, top: int = 100
    ) -> list[EntityDescription]:
        """Return a page in order of name; of subscriptions those of `topic`, None: of all topics.

        Raises ENTITY_NOT_FOUND if the topic does not exist.
        """
        of: EntityKind | int = kind
        if topic is not None:
            owner = self._directory.find(catalog_key(topic))
            if owner is None or owner.kind is not EntityKind.TOPIC:
                raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no topic {topic}")
            of = owner.entity_no
        page = self._directory.page(of, max(skip, 0), max(top, 0))
        return [self._described(entry) for entry in page]

    def count_of(self, kind: EntityKind) -> int:
        """Return the number of entities of a kind."""
        return self._directory.count_of(kind)

    @property
    def unmanaged_count(self) -> int:
        """Number of entities without a mark of the program that keeps them."""
        return self._directory.unmanaged_count

    def acknowledged(self) -> dict[int, int]:
        """Return partition -> the version of the catalog it has.

        One that is not loaded counts as having the latest: it accepts nothing before it has caught
        up.
        """
        return self._directory.acknowledged()

    async def runtime(self, path: str) -> RuntimeInformation:
        """Return counts of an entity; loads those of its partitions whose store is available.

        Raises ENTITY_NOT_FOUND, or NOT_APPLIED while none of its partitions can be loaded.
        """
        entry = self._directory.find(catalog_key(path))
        if entry is None:
            raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no entity {path}")
        hosts = [self._hosts[home] for home in self._directory.homes_of(entry)]
        reachable = [host for host in hosts if away(host) is None]
        problem = await self._load(reachable) if reachable else _problem_of(hosts)
        found = {host.partition_id: host.counts(entry.entity_no) for host in hosts}
        known = [counts for counts in found.values() if counts is not None]
        if len(known) < len(hosts) and self._directory.numbered(entry.entity_no) is None:
            raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no entity {path}")
        if not known:
            raise refusal(Refusal.NOT_APPLIED, problem or RELOADING)
        is_limited = len(known) < len(hosts) or any(host.trouble is not None for host in hosts)
        return _runtime(
            sum_of(known),
            entry.created_ms,
            Availability.LIMITED if is_limited else Availability.AVAILABLE,
            self._directory.subscription_count(entry.entity_no),
            tuple(number for number, counts in found.items() if counts is None),
        )

    def uncounted(self, description: EntityDescription) -> RuntimeInformation:
        """Return what is known of an entity while all its partitions are unavailable."""
        subscriptions = self._directory.subscription_count(description.entity_no)
        return _runtime(
            sum_of([]),
            description.created_ms,
            Availability.LIMITED,
            subscriptions,
            description.partitions,
        )

    async def runtime_since(self, cursor: str, top: int) -> RuntimePage:
        """Return counts of at most `top` entities that changed after a cursor.

        Partitions that can be reached are loaded; entities of the others are limited. Raises
        NOT_APPLIED while no partition with entities can be loaded.
        """
        hosts = self.counts_feed.homes()
        reachable = [host for host in hosts if away(host) is None]
        problem = await self._load(reachable) if reachable else _problem_of(hosts)
        if hosts and not any(host.is_loaded for host in hosts):
            raise refusal(Refusal.NOT_APPLIED, problem or RELOADING)
        page = await self.counts_feed.since(cursor, top)
        items = [_moved(movement) for movement in page.items]
        return RuntimePage(items, page.cursor, page.is_end, page.starts_over)

    async def traffic(self, path: str) -> EntityTraffic:
        """Return the present traffic of an entity; waits at most 2 s. Raises ENTITY_NOT_FOUND."""
        entry = self._directory.find(catalog_key(path))
        if entry is None:
            raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no entity {path}")
        homes = self._directory.homes_of(entry)
        age_ms = await oldest_age_of([self._hosts[home] for home in homes], entry.entity_no)
        rates = self.activity.rates(entry.entity_no, homes)
        return EntityTraffic(rates, None if age_ms is None else age_ms / 1_000)

    async def _load(self, hosts: Sequence[Host]) -> str | None:
        """Load partitions; return the reason if one failed or took too long, else None.

        The others are loaded nevertheless.
        """
        calls = [asyncio.ensure_future(host.call(Tick())) for host in hosts if not host.is_loaded]
        if not calls:
            return None
        try:
            done, late = await asyncio.wait(calls, timeout=self._loading_s)
        finally:
            for call in calls:
                call.cancel()
        if late or any(isinstance(call.result(), Refused) for call in done):
            return _problem_of(hosts)
        return None

    # --- definitions ----------------------------------------------------------------------------

    async def put_namespace(
        self, wanted: NamespaceDefinition, condition: Precondition = UNCONDITIONAL
    ) -> int:
        """Change the definition of the namespace; return the catalog's new version.

        Versions of the condition are the catalog's. Raises NOT_ALLOWED for immutable fields.
        """
        return await self._change_tasks.run(self._namespace.put(wanted, condition))

    @property
    def is_closed(self) -> bool:
        """True if the namespace refuses messages until it is opened again."""
        return self._namespace.is_closed

    async def close_namespace(self) -> None:
        """Refuse messages if there are none, until `open_namespace`.

        Raises `NamespaceNotEmpty`; then messages are accepted again.
        """
        await self._change_tasks.run(self._closing.close())

    async def open_namespace(self) -> None:
        """Accept messages again after `close_namespace`."""
        await self._change_tasks.run(self._closing.open())

    async def declare_sku(self, wanted: Sku) -> None:
        """Change the tier to that of a manifest. Raises NOT_ALLOWED if the tier cannot change."""
        await self._change_tasks.run(self._namespace.declare_sku(wanted))

    async def put(self, wanted: WantedEntity, condition: Precondition) -> EntityDescription:
        """Create an entity or replace its definition; return when its partitions follow it."""
        put = await self._change_tasks.run(self._directory.put(wanted, condition))
        self._warn(put.entry)
        return self._described(put.entry, is_new=put.is_new)

    def _warn(self, entry: CatalogEntry) -> None:
        for where, why in self._directory.warnings_of(entry).items():
            logger.warning(
                "a definition is valid but probably not intended",
                extra={"entity": entry.name, "field": where, "why": why},
            )

    async def put_all(self, wanted: Sequence[WantedEntity]) -> None:
        """Create or change many in few commits, in order, as at a start.

        Raises for the first invalid definition; earlier ones may already be stored.
        """
        await self._change_tasks.run(self._directory.put_all(wanted))
        for each in wanted:
            if (entry := self._directory.find(catalog_key(each.path))) is not None:
                self._warn(entry)

    async def put_rule(self, path: str, rule: RuleProperties, *, mode: PutMode) -> RuleDescription:
        """Add a rule to a subscription, or change the rule of that name, which keeps its creation
        time.
        """
        put = await self._change_tasks.run(self._directory.add_rule(catalog_key(path), rule, mode))
        stored = rule_named(put.entry.rules, rule.name)
        assert stored is not None
        return RuleDescription(stored.properties, stored.created_ms, put.is_new)

    async def delete_rule(self, path: str, name: str) -> None:
        """Remove a rule from a subscription; one without rules receives nothing."""
        await self._change_tasks.run(self._directory.remove_rule(catalog_key(path), name))

    async def delete(
        self,
        path: str,
        *,
        policy: DeletePolicy = DeletePolicy.DELETE,
        condition: Precondition = UNCONDITIONAL,
    ) -> None:
        """Delete an entity, a topic with its subscriptions; the name is free at once.

        Raises NOT_EMPTY with `DeletePolicy.DELETE_IF_EMPTY`, and BUSY if the entity changed during
        the check.
        """
        name, directory = catalog_key(path), self._directory
        match policy:
            case DeletePolicy.DELETE:
                work = directory.delete(name, condition)
            case DeletePolicy.DELETE_IF_EMPTY:
                entry = directory.find(name)
                if entry is not None:
                    homes = [self._hosts[home] for home in directory.homes_of(entry)]
                    if (problem := await self._load(homes)) is not None:
                        raise refusal(Refusal.NOT_APPLIED, problem)
                work = directory.delete_if_empty(name, condition)
            case DeletePolicy.RETAIN:
                until_ms = self._now_ms() + self.properties.soft_delete.retention_ms
                work = directory.retain(name, until_ms, condition)
            case _:
                assert_never(policy)
        if not await self._change_tasks.run(work):
            raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no entity {path}")

    # --- deleted and kept -----------------------------------------------------------------------

    async def restore(self, entity_no: int) -> EntityDescription:
        """Restore an entity deleted with `DeletePolicy.RETAIN`, a topic with its subscriptions.

        Its name must be free.
        """
        return self._described(await self._change_tasks.run(self._directory.restore(entity_no)))

    async def tombstones(self, since_version: int, top: int = MOST) -> list[Tombstone]:
        """Return the entities deleted after a version of the catalog, in order of version.

        Version 0: all known ones. At most `top` or a few more; continue with the version of the
        last one. Raises ARGUMENT_OUT_OF_RANGE if some are no longer known.
        """
        return await self._asked(self._feed.tombstones(max(since_version, 0), max(top, 1)))

    async def changes(
        self, since_version: int, wait_s: float = 0.0, begun: int = 0
    ) -> tuple[int, list[EntityChange]]:
        """Return changes after a version, and the version up to which these are all.

        They are 1,000 or a few more; the rest follows after that version. Waits up to `wait_s` for
        the first change. An entity that changed twice is there once. Raises ARGUMENT_OUT_OF_RANGE
        where not all is known any more: list everything then. `begun`: the version of the catalog
        when the caller began with 0.
        """
        return await self._asked(self._feed.changes(max(since_version, 0), wait_s, begun))

    async def _asked(self, work: Coroutine[object, object, T]) -> T:
        try:
            return await work
        except StoreError as error:
            detail = f"the store is unavailable: {error}; try again"
            raise refusal(Refusal.NOT_APPLIED, detail) from error

    async def reap(self) -> None:
        """Delete entities and tombstones whose retention ended, if definitions are changed here."""
        epoch = self._directory.catalog.epoch
        if epoch is None:
            return
        while await self._directory.purge(self._now_ms()) > PURGED_AT_ONCE:
            pass
        await self._tombstones.forget(self._now_ms() - TOMBSTONES_MS, epoch)

    async def keep_counting(self) -> None:
        """Sample the counters of entities periodically until `stop`."""
        await self.activity.keep_sampling(self._stopping)

    async def keep_reaping(self) -> None:
        """Reap periodically until `stop`; failures are retried."""
        while not self._stopping.is_set():
            try:
                await self.reap()
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                logger.warning("deleted entities could not be reaped", extra={"error": repr(error)})
            try:
                async with asyncio.timeout(REAP_S):
                    await self._stopping.wait()
            except TimeoutError:
                pass

    def stop(self) -> None:
        """End `keep_reaping` and `keep_counting`."""
        self._stopping.set()

    # --- how a change runs ----------------------------------------------------------------------

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Run work of several changes to its end, even if its caller is cancelled."""
        return await self._change_tasks.run(work)

    def _described(self, entry: CatalogEntry, *, is_new: bool = False) -> EntityDescription:
        return EntityDescription(
            entry.entity_no,
            entry.name,
            entry.kind,
            entry.properties,
            tuple(RuleDescription(rule.properties, rule.created_ms) for rule in entry.rules),
            entry.version,
            entry.created_ms,
            entry.updated_ms,
            entry.is_partitioned,
            tuple(self._directory.homes_of(entry)),
            is_new,
            entry.forwards_as_sent,
            entry.managed_by,
        )


def _problem_of(hosts: Sequence[Host]) -> str:
    troubles = [host.trouble for host in hosts if host.trouble is not None]
    why = f": {troubles[0]}" if troubles else ""
    return f"the store is unavailable{why}; try again"


def _moved(movement: EntityMovement) -> EntityRuntime:
    entry, counts = movement.entry, movement.counts
    runtime = _runtime(
        sum_of(()) if counts is None else counts,
        entry.created_ms,
        Availability.LIMITED if movement.is_limited else Availability.AVAILABLE,
        movement.subscription_count,
        movement.unavailable_partitions,
    )
    return EntityRuntime(entry.entity_no, entry.name, entry.kind, runtime, counts is not None)


def _runtime(
    counts: Counts,
    created_ms: int,
    availability: Availability,
    subscription_count: int,
    unavailable_partitions: tuple[int, ...],
) -> RuntimeInformation:
    return RuntimeInformation(
        counts.active,
        counts.dead_letter,
        counts.scheduled,
        counts.transfer,
        counts.transfer_dead_letter,
        counts.size_bytes,
        counts.accessed_ms or created_ms,
        availability,
        subscription_count,
        unavailable_partitions,
    )
