"""Definitions in memory, found by name, by number and by topic.

Only `directory` changes it. Names are in lower case here; an entry keeps the case it came with.
"""

from __future__ import annotations

from collections.abc import Iterable

from postbus.contract import EntityKind, RuleProperties
from postbus.entity.commands import PutEntity
from postbus.store.catalog import CatalogEntry


class Entries:
    """What exists. Counts are kept, so that ten thousand creations cost no square."""

    def __init__(self, entries: Iterable[CatalogEntry] = ()) -> None:
        self._by_name: dict[str, CatalogEntry] = {}
        self._by_number: dict[int, CatalogEntry] = {}
        self._subscriptions: dict[int, dict[int, CatalogEntry]] = {}
        self.partitioned_count = 0
        """Queues and topics that are partitioned."""
        self.count = 0
        """Queues and topics."""
        for entry in entries:
            self.put(entry)

    def put(self, entry: CatalogEntry) -> None:
        known = self._by_number.get(entry.entity_no)
        if known is not None:
            self.remove(known)
        self._by_name[entry.name.lower()] = entry
        self._by_number[entry.entity_no] = entry
        if entry.kind is not EntityKind.SUBSCRIPTION:
            self.count += 1
            self.partitioned_count += entry.is_partitioned
        elif entry.topic_no is not None:
            self._subscriptions.setdefault(entry.topic_no, {})[entry.entity_no] = entry

    def remove(self, entry: CatalogEntry) -> None:
        del self._by_name[entry.name.lower()]
        del self._by_number[entry.entity_no]
        if entry.kind is not EntityKind.SUBSCRIPTION:
            self.count -= 1
            self.partitioned_count -= entry.is_partitioned
        elif entry.topic_no is not None:
            del self._subscriptions[entry.topic_no][entry.entity_no]

    def find(self, name: str) -> CatalogEntry | None:
        return self._by_name.get(name)

    def numbered(self, entity_no: int) -> CatalogEntry | None:
        return self._by_number.get(entity_no)

    def all(self) -> list[CatalogEntry]:
        return list(self._by_number.values())

    def subscriptions_of(self, topic_no: int) -> list[CatalogEntry]:
        return list(self._subscriptions.get(topic_no, {}).values())

    def subscriptions_named(self, topic: str) -> list[CatalogEntry]:
        """Return the subscriptions of the topic of a name, none if it is no topic."""
        found = self._by_name.get(topic)
        return [] if found is None else self.subscriptions_of(found.entity_no)

    def rules_of_topic(self, topic_no: int, besides: int | None) -> list[RuleProperties]:
        """Return the rules of a topic's subscriptions, all but those of one."""
        return [
            rule.properties
            for entry in self._subscriptions.get(topic_no, {}).values()
            if entry.entity_no != besides
            for rule in entry.rules
        ]


def put_of(entry: CatalogEntry, version: int | None = None) -> PutEntity:
    """Return what a partition is told of an entry."""
    return PutEntity(
        entry.entity_no,
        entry.name,
        entry.kind,
        entry.properties,
        entry.version if version is None else version,
        entry.topic_no,
        tuple(rule.properties for rule in entry.rules),
        entry.is_partitioned,
    )


def puts_in_order(
    entries: Iterable[CatalogEntry], known: set[int], version: int
) -> list[PutEntity]:
    """Return what a partition lacks that knows these numbers up to a version, in order (D14).

    The order is that of versions: what is cut short leaves no gap below the version it reached. A
    topic that was changed after its subscriptions came is put before them all the same, as of their
    version, and again in its turn.
    """
    wanted = sorted(entries, key=lambda entry: entry.version)
    topics = {entry.entity_no: entry for entry in wanted if entry.kind is EntityKind.TOPIC}
    told = set(known)
    puts = []
    for entry in wanted:
        if entry.entity_no in known and entry.version <= version:
            continue
        if entry.topic_no is not None and entry.topic_no not in told:
            puts.append(put_of(topics[entry.topic_no], entry.version))
            told.add(entry.topic_no)
        puts.append(put_of(entry))
        told.add(entry.entity_no)
    return puts
