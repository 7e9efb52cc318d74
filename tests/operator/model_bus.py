"""A bus as a few rules: catalog, preconditions, tombstones. Its feed lags behind until asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from postbus.client.control import RequestRefused
from postbus.contract.control import (
    Applied,
    Deleted,
    DeletionPolicy,
    EntityChange,
    ProblemType,
    QueueDescription,
    RuntimeInformation,
    SubscriptionDefinition,
    SubscriptionDescription,
    TopicDescription,
)
from postbus.contract.control_counts import EntityCounts
from postbus.contract.entities import QueueProperties, TopicProperties, topic_of
from postbus_operator.bus.entity_paths import EntityPath, EntityWord
from postbus_operator.bus.view import BusView
from postbus_operator.entities.status import NO_MESSAGES
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable

BORN = datetime(2026, 11, 23, tzinfo=UTC)
FAR = datetime(2026, 12, 23, tzinfo=UTC)


@dataclass(frozen=True)
class Entity:
    """An entity. `reason`: it is deleted."""

    name: str
    number: int
    body: Mapping[str, Any]
    mark: str
    version: int
    messages: int = 0
    reason: str | None = None
    is_retained: bool = False
    kind: EntityWord = "queue"

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.body, sort_keys=True).encode()).hexdigest()


class ModelBus:
    """Session and control API in one; `of` makes it the sessions of a cluster, too."""

    def __init__(self) -> None:
        self.control = self
        self.view = BusView()
        self.trouble: str | None = None
        self.list_count = 1
        self.synced_keys: dict[Any, Any] = {}
        self.version = 0
        self.puts = 0
        self.made: list[int] = []
        self.counts: dict[int, EntityCounts] = {}
        self._entities: dict[int, Entity] = {}

    # --- sessions -------------------------------------------------------------------------------

    async def of(self, bus: Resource) -> ModelBus:
        return self

    def answering(self, bus: Resource) -> ModelBus | None:
        return None if self.trouble else self

    def failure_of(self, bus: Resource) -> BackendUnavailable:
        return BackendUnavailable(self.trouble or "")

    async def close(self) -> None:
        """Nothing is open."""

    def counts_of(self, number: int) -> EntityCounts | None:
        return self.counts.get(number)

    def note_put(self, path: EntityPath, answer: Applied, mark: str) -> None:
        self.view.note_put(path, answer, mark)

    async def catch_up(self) -> None:
        for each in sorted(self._entities.values(), key=lambda each: each.version):
            is_put = each.reason is None
            self.view.take(
                EntityChange(
                    version=each.version,
                    entity_id=each.number,
                    name=each.name,
                    kind=each.kind,
                    change="put" if is_put else "deleted",
                    managed_by=each.mark,
                    applied_hash=each.hash if is_put else None,
                    reason=each.reason,
                    restorable_until=FAR if each.is_retained else None,
                )
            )
        self.view.version = self.version

    # --- what others do -------------------------------------------------------------------------

    def live(self, name: str) -> Entity | None:
        found = [each for each in self._entities.values() if each.reason is None]
        return next((each for each in found if each.name == name), None)

    def change(self, name: str, **parts: Any) -> None:
        """Change the entity of a name, if there is one."""
        known = self.live(name)
        if known is not None:
            self._store(replace(known, **parts))

    def _store(self, entity: Entity) -> Entity:
        self.version += 1
        self._entities[entity.number] = replace(entity, version=self.version)
        return self._entities[entity.number]

    # --- control API ----------------------------------------------------------------------------

    async def put(
        self, path: EntityPath, body: Mapping[str, Any], mark: str, version: int | None
    ) -> Applied:
        known = self.live(path.name)
        if version is None and known is not None:
            raise RequestRefused(412, ProblemType.ALREADY_EXISTS, "it exists already")
        if version is not None and known is None:
            raise RequestRefused(412, ProblemType.NOT_FOUND, "there is none")
        if known is not None and known.version != version:
            raise RequestRefused(412, ProblemType.VERSION_DIFFERS, "another version")
        self.puts += 1
        if known is None:
            number = len(self._entities) + 1
            self.made.append(number)
            new = Entity(path.name, number, body, mark, 0, kind=path.kind)
            return self._applied(self._store(new), True)
        if (known.body, known.mark) != (body, mark):
            known = self._store(replace(known, body=body, mark=mark))
        return self._applied(known, False)

    async def delete(self, path: EntityPath, policy: DeletionPolicy, version: int) -> Deleted:
        known = self.live(path.name)
        if known is None or known.version != version:
            kind = ProblemType.NOT_FOUND if known is None else ProblemType.VERSION_DIFFERS
            raise RequestRefused(404 if known is None else 412, kind, "not that one")
        if policy is DeletionPolicy.DELETE_IF_EMPTY and known.messages:
            raise RequestRefused(409, ProblemType.NOT_EMPTY, "it holds messages")
        is_retained = policy is DeletionPolicy.RETAIN
        self._store(replace(known, reason="requested", is_retained=is_retained))
        return Deleted(entity_id=known.number, version=self.version, restorable=is_retained)

    async def restore(self, number: int) -> Applied:
        known = self._entities[number]
        if not known.is_retained:
            raise RequestRefused(404, ProblemType.NOT_FOUND, "not restorable")
        if self.live(known.name) is not None:
            raise RequestRefused(409, ProblemType.ALREADY_EXISTS, "it exists again")
        return self._applied(self._store(replace(known, reason=None, is_retained=False)), False)

    def count_messages(self, name: str, active: int) -> None:
        """Show other counts of an entity, if there is one."""
        known = self.live(name)
        if known is not None:
            self.counts[known.number] = EntityCounts(
                entity_id=known.number,
                name=name,
                kind=known.kind,
                message_count=active,
                count_details=NO_MESSAGES.model_copy(update={"active_message_count": active}),
                size_in_bytes=active * 100,
                accessed_at=BORN,
                availability="Available",
                unavailable_partitions=(),
                subscription_count=0,
            )

    async def describe(
        self, path: EntityPath
    ) -> QueueDescription | TopicDescription | SubscriptionDescription:
        known = self.live(path.name)
        if known is None:
            raise RequestRefused(404, ProblemType.NOT_FOUND, "there is none")
        facts: dict[str, Any] = {
            "entity_id": known.number,
            "name": known.name,
            "version": known.version,
            "applied_hash": known.hash,
            "created_at": BORN,
            "updated_at": BORN,
            "is_partitioned": False,
            "partitions": (0,),
            "managed_by": known.mark,
        }
        body = json.dumps(dict(known.body))
        match known.kind:
            case "queue":
                properties = QueueProperties.model_validate_json(body)
                return QueueDescription(**facts, properties=properties)
            case "topic":
                return TopicDescription(
                    **facts, properties=TopicProperties.model_validate_json(body)
                )
            case "subscription":
                return SubscriptionDescription(
                    **facts,
                    topic=topic_of(known.name),
                    path=known.name,
                    properties=SubscriptionDefinition.model_validate_json(body),
                )

    async def count(self, path: EntityPath) -> RuntimeInformation:
        known = self.live(path.name)
        return RuntimeInformation(
            message_count=known.messages if known else 0,
            count_details=NO_MESSAGES,
            size_in_bytes=0,
            accessed_at=BORN,
            availability="Available",
            unavailable_partitions=(),
            subscription_count=0,
            rates=None,
            oldest_message_age_seconds=None,
        )

    async def ask(self, method: str, path: str, **_: Any) -> Any:
        assert (method, path.rpartition("/")[2]) == ("GET", "authorization-rules")
        return {"items": []}

    def _applied(self, entity: Entity, created: bool) -> Applied:
        return Applied(
            entity_id=entity.number,
            applied_hash=entity.hash,
            version=entity.version,
            acknowledged={0: entity.version},
            created=created,
        )
