"""Definitions in memory, indexed by name, number and topic.

Only `directory` changes it. Keys are names in lower case; an entry keeps its original case.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import (
    EntityKind,
    EntityProperties,
    EntityStatus,
    RuleProperties,
    catalog_key,
)
from postbus.entity.commands import PutEntity
from postbus.store.catalog import CatalogEntry


class Entries:
    """Existing and retained entities. Counts and sorted names are maintained: ten thousand
    creations take linear time, a page of a list no sort.
    """

    def __init__(self, entries: Iterable[CatalogEntry] = ()) -> None:
        self._by_name: dict[str, CatalogEntry] = {}
        self._by_number: dict[int, CatalogEntry] = {}
        self._subscriptions: dict[int, dict[int, CatalogEntry]] = {}
        self._orders: dict[EntityKind | int, list[str]] = {}  # of a kind, or a topic's number
        self._retained: dict[int, CatalogEntry] = {}
        self._retained_names: dict[str, dict[int, CatalogEntry]] = {}
        self.partitioned_count = 0
        """Queues and topics that are partitioned."""
        self.count = 0
        """Queues and topics."""
        self.unmanaged_count = 0
        """Queues, topics and subscriptions without a mark of the program that keeps them."""
        for entry in entries:
            self.put(entry)

    def put(self, entry: CatalogEntry) -> None:
        name = catalog_key(entry.name)
        known = self._by_number.get(entry.entity_no) or self._retained.get(entry.entity_no)
        if known is not None:
            self.remove(known)
        if entry.is_retained:
            self._retained[entry.entity_no] = entry
            self._retained_names.setdefault(name, {})[entry.entity_no] = entry
            return
        for order in self._orders_of(entry):
            if order and order[-1] < name:  # in the order of the tables
                order.append(name)
            else:
                insort(order, name)
        self._by_name[name] = entry
        self._by_number[entry.entity_no] = entry
        self.unmanaged_count += not entry.managed_by
        if entry.kind is not EntityKind.SUBSCRIPTION:
            self.count += 1
            self.partitioned_count += entry.is_partitioned
        elif entry.topic_no is not None:
            self._subscriptions.setdefault(entry.topic_no, {})[entry.entity_no] = entry

    def remove(self, entry: CatalogEntry) -> None:
        name = catalog_key(entry.name)
        if self._retained.pop(entry.entity_no, None) is not None:
            namesakes = self._retained_names[name]
            del namesakes[entry.entity_no]
            if not namesakes:
                del self._retained_names[name]
            return
        for order in self._orders_of(entry):
            del order[bisect_left(order, name)]
        del self._by_name[name]
        del self._by_number[entry.entity_no]
        self.unmanaged_count -= not entry.managed_by
        if entry.kind is not EntityKind.SUBSCRIPTION:
            self.count -= 1
            self.partitioned_count -= entry.is_partitioned
            if not self._orders.get(entry.entity_no):  # else its subscriptions still exist
                self._orders.pop(entry.entity_no, None)
        elif entry.topic_no is not None:
            del self._subscriptions[entry.topic_no][entry.entity_no]

    def _orders_of(self, entry: CatalogEntry) -> list[list[str]]:
        """Return the sorted lists of names that contain an entry."""
        orders = [self._orders.setdefault(entry.kind, [])]
        if entry.topic_no is not None:
            orders.append(self._orders.setdefault(entry.topic_no, []))
        return orders

    def find(self, name: str) -> CatalogEntry | None:
        return self._by_name.get(name)

    def numbered(self, entity_no: int) -> CatalogEntry | None:
        return self._by_number.get(entity_no)

    def all(self) -> list[CatalogEntry]:
        return list(self._by_number.values())

    def retained(self) -> list[CatalogEntry]:
        """Return the deleted entities that can be restored."""
        return list(self._retained.values())

    def retained_named(self, name: str) -> list[CatalogEntry]:
        """Return the deleted entities of a name that can be restored."""
        return list(self._retained_names.get(name, {}).values())

    def stored(self) -> list[CatalogEntry]:
        """Return the entities that partitions store: existing and retained ones."""
        return [*self._by_number.values(), *self._retained.values()]

    def stored_numbered(self, entity_no: int) -> CatalogEntry | None:
        return self._by_number.get(entity_no) or self._retained.get(entity_no)

    def retained_below(self, topic_no: int) -> list[CatalogEntry]:
        """Return the retained subscriptions of a topic, deleted with it or before it."""
        return [entry for entry in self._retained.values() if entry.topic_no == topic_no]

    def count_of(self, kind: EntityKind) -> int:
        return len(self._orders.get(kind, ()))

    def page(self, of: EntityKind | int, skip: int, top: int) -> list[CatalogEntry]:
        """Return a page of a kind, or of the subscriptions of a topic's number, in order of
        name.
        """
        names = self._orders.get(of, [])[skip : skip + top]
        return [self._by_name[name] for name in names]

    def begins(self, path: str) -> bool:
        """Return whether a lower-case path is the name of a queue or topic, or a prefix of one."""
        if path in self._by_name:
            return True
        for kind in (EntityKind.QUEUE, EntityKind.TOPIC):
            names = self._orders.get(kind, [])
            at = bisect_left(names, f"{path}/")
            if at < len(names) and names[at].startswith(f"{path}/"):
                return True
        return False

    def subscriptions_of(self, topic_no: int) -> list[CatalogEntry]:
        return list(self._subscriptions.get(topic_no, {}).values())

    def subscriptions_named(self, topic: str) -> list[CatalogEntry]:
        """Return the subscriptions of a topic by its name; empty if there is no such topic."""
        found = self._by_name.get(topic)
        return [] if found is None else self.subscriptions_of(found.entity_no)

    def rules_of_topic(self, topic_no: int, besides: int | None) -> list[RuleProperties]:
        """Return the rules of a topic's subscriptions, except those of one."""
        return [
            rule.properties
            for entry in self._subscriptions.get(topic_no, {}).values()
            if entry.entity_no != besides
            for rule in entry.rules
        ]


def put_of(entry: CatalogEntry, version: int | None = None) -> PutEntity:
    """Return the command that puts an entry into a partition."""
    return PutEntity(
        entry.entity_no,
        entry.name,
        entry.kind,
        _sleeping(entry) if entry.is_retained else entry.properties,
        entry.version if version is None else version,
        entry.topic_no,
        tuple(rule.properties for rule in entry.rules),
        entry.is_partitioned,
        entry.is_retained,
    )


def _sleeping(entry: CatalogEntry) -> EntityProperties:
    """Return the definition of a retained entity: it accepts and delivers no messages.

    Scheduled messages of a topic still become copies in the matching subscriptions that were
    deleted with it.
    """
    is_open = entry.properties.status in (EntityStatus.ACTIVE, EntityStatus.RECEIVE_DISABLED)
    is_fed = is_open and entry.deleted_with is not None
    changes: dict[str, object] = {
        "status": EntityStatus.RECEIVE_DISABLED if is_fed else EntityStatus.DISABLED,
        "auto_delete_on_idle_ms": MAX_DURATION_MS,
    }
    if entry.kind is not EntityKind.TOPIC:
        changes |= {"forward_to": None, "forward_dead_lettered_messages_to": None}
    return entry.properties.model_copy(update=changes)


def puts_in_order(
    entries: Iterable[CatalogEntry], known: set[int], version: int
) -> list[PutEntity]:
    """Return the missing puts of a partition that knows these numbers up to a version (ADR 27).

    They are in order of version, so that an interrupted sequence leaves no gap below its last
    version. A topic that was changed after its subscriptions were created is put before them
    nevertheless, as of their version, and again at its own.
    """
    wanted = sorted(entries, key=lambda entry: entry.version)
    topics = {entry.entity_no: entry for entry in wanted if entry.kind is EntityKind.TOPIC}
    placed = set(known)
    puts = []
    for entry in wanted:
        if entry.entity_no in known and entry.version <= version:
            continue
        if entry.topic_no is not None and entry.topic_no not in placed:
            puts.append(put_of(topics[entry.topic_no], entry.version))
            placed.add(entry.topic_no)
        puts.append(put_of(entry))
        placed.add(entry.entity_no)
    return puts
