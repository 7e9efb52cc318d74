"""The resources of a run: one bus, and entities spread over cluster namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from e2e.tests import manifests

Json = dict[str, Any]

LABEL: Final = "example.test/postbus-scale"
BUS: Final = "scale-bus"
PATTERN: Final = ("topic", *("subscription",) * 3, *("queue",) * 6)
"""Ten entities: 6 queues, and a topic with 3 subscriptions."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Names of everything. `run` tells one run from another one."""

    run: str
    entity_count: int
    namespace_count: int

    @property
    def home(self) -> str:
        """The cluster namespace of the bus."""
        return f"{self.run}-home"

    @property
    def broker(self) -> str:
        """The pod of the broker."""
        return f"{BUS}-broker-0"

    @property
    def namespaces(self) -> list[str]:
        """The cluster namespaces of the entities."""
        return [f"{self.run}-{number:03}" for number in range(self.namespace_count)]

    def bus(self) -> Json:
        """Return the bus: Premium with one partition, which takes entities of all namespaces."""
        made = manifests.bus(BUS, operator={"allowedNamespaces": {"from": "All"}})
        return self._placed(made, self.home)

    def entities(self) -> Iterator[Json]:
        """Yield the entities, those of a cluster namespace one after the other."""
        most = -(-self.entity_count // self.namespace_count)
        for at, namespace in enumerate(self.namespaces):
            for number in range(min(most, self.entity_count - at * most)):
                yield self._placed(self._entity(namespace, number), namespace)

    def queue(self, name: str) -> Json:
        """Return a queue beside the bus."""
        return self._placed(manifests.queue(name, BUS), self.home)

    def namespace(self, name: str) -> Json:
        """Return a cluster namespace."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted", LABEL: self.run}
        return {
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels},
        }  # fmt: skip

    def _entity(self, namespace: str, number: int) -> Json:
        # Names of entities count in the whole bus.
        group, kind = number // len(PATTERN), PATTERN[number % len(PATTERN)]
        topic, owner = f"{namespace}-topic-{group}", {"name": BUS, "namespace": self.home}
        if kind == "topic":
            return manifests.resource("Topic", topic, {"owner": owner})
        name = f"{namespace}-{number}"
        if kind == "subscription":
            return manifests.subscription(name, topic)
        return manifests.resource("Queue", name, {"owner": owner})

    def _placed(self, wanted: Json, namespace: str) -> Json:
        wanted["metadata"] |= {"namespace": namespace, "labels": {LABEL: self.run}}
        return wanted
