"""Entities of one bus as its feed of changes reports them: those that exist, and tombstones.

Pure. Paths compare without case, as in the catalog. A change that is older than what is known is
ignored, so that answers to own calls and pages of the feed may arrive in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import NamedTuple

from postbus.contract.control import Applied, EntityChange
from postbus.contract.entities import catalog_key, topic_of
from postbus_operator.bus.entity_paths import EntityPath, EntityWord


class LiveEntity(NamedTuple):
    """An entity that exists; `version` is its ETag."""

    kind: EntityWord
    name: str
    entity_id: int
    applied_hash: str
    mark: str
    version: int


class Tombstone(NamedTuple):
    """A deleted entity. `restorable_until` None: its messages are gone."""

    kind: EntityWord
    name: str
    entity_id: int
    mark: str
    version: int
    reason: str
    restorable_until: datetime | None


class BusView:
    """What is known of a bus up to `version` of its catalog."""

    def __init__(self) -> None:
        self.version = 0
        self._live: dict[str, LiveEntity] = {}
        self._gone: dict[str, dict[int, Tombstone]] = {}
        self._subscriptions: dict[str, int] = {}

    def find(self, name: str) -> LiveEntity | None:
        """Return the entity of a path, of any kind."""
        return self._live.get(catalog_key(name))

    def tombstones(self, path: EntityPath) -> list[Tombstone]:
        """Return the deleted entities of a path and kind, the latest deletion first."""
        found = self._gone.get(catalog_key(path.name), {}).values()
        return sorted(
            (each for each in found if each.kind == path.kind), key=lambda each: -each.version
        )

    def subscription_count(self, topic: str) -> int:
        """Return the number of subscriptions of a topic."""
        return self._subscriptions.get(catalog_key(topic), 0)

    def paths(self) -> Collection[str]:
        """Return the paths of all entities and tombstones, in lower case."""
        return self._live.keys() | self._gone.keys()

    def take(self, change: EntityChange) -> bool:
        """Note a change of the feed; return whether it says something new."""
        if change.change == "put":
            assert change.applied_hash is not None
            return self._put(
                LiveEntity(
                    change.kind,
                    change.name,
                    change.entity_id,
                    change.applied_hash,
                    change.managed_by,
                    change.version,
                )
            )
        return self._delete(
            Tombstone(
                change.kind,
                change.name,
                change.entity_id,
                change.managed_by,
                change.version,
                change.reason or "requested",
                change.restorable_until,
            )
        )

    def note_put(self, path: EntityPath, answer: Applied, mark: str) -> None:
        """Note the answer to an own change, before the feed reports it."""
        known = self.find(path.name)
        name = path.name if known is None else known.name
        self._put(
            LiveEntity(path.kind, name, answer.entity_id, answer.applied_hash, mark, answer.version)
        )

    def differences(self, former: BusView) -> set[str]:
        """Return the paths of which another view says something else."""
        return {
            path
            for path in {*self.paths(), *former.paths()}
            if self._live.get(path) != former._live.get(path)
            or self._gone.get(path) != former._gone.get(path)
        }

    def _put(self, entity: LiveEntity) -> bool:
        path = catalog_key(entity.name)
        known = self._live.get(path)
        stones = self._gone.get(path, {})
        stone = stones.get(entity.entity_id)
        # A tombstone of another one may be newer: it gets a new version when its retention ends.
        latest = max(known.version if known else 0, stone.version if stone else 0)
        if entity.version < latest or entity == known:
            return False
        if stones.pop(entity.entity_id, None) is not None and not stones:  # it was restored
            del self._gone[path]
        self._live[path] = entity
        self._count(entity, 1 if known is None else 0)
        return True

    def _delete(self, stone: Tombstone) -> bool:
        path = catalog_key(stone.name)
        known = self._live.get(path)
        if known is not None and known.entity_id == stone.entity_id:
            if stone.version < known.version:
                return False
            del self._live[path]
            self._count(known, -1)
        stones = self._gone.setdefault(path, {})
        before = stones.get(stone.entity_id)
        if before is not None and before.version >= stone.version:
            return False
        stones[stone.entity_id] = stone
        return True

    def _count(self, entity: LiveEntity, more: int) -> None:
        if entity.kind == "subscription" and more:
            topic = catalog_key(topic_of(entity.name))
            self._subscriptions[topic] = self._subscriptions.get(topic, 0) + more


def view_of(changes: Iterable[EntityChange], version: int) -> BusView:
    """Return the view of a list from zero."""
    view = BusView()
    for change in changes:
        view.take(change)
    view.version = version
    return view
