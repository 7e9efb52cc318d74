"""Parser of administration paths; greedy, because names of entities have slashes.

`/a/b/Subscriptions/s/Rules/r` is the rule `r` of the subscription `s` of the topic `a/b`. Case,
double slashes and trailing slashes are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from postbus.contract.entities import EntityKind, subscription_path


@dataclass(frozen=True, slots=True)
class Root:
    """The namespace's root, which answers that the service exists."""


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """Information about the namespace."""


@dataclass(frozen=True, slots=True)
class Entities:
    """All queues or all topics."""

    kind: EntityKind


@dataclass(frozen=True, slots=True)
class EntityAt:
    """A queue or a topic."""

    name: str


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """The subscriptions of a topic."""

    topic: str


@dataclass(frozen=True, slots=True)
class SubscriptionAt:
    topic: str
    name: str

    @property
    def path(self) -> str:
        return subscription_path(self.topic, self.name)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a subscription."""

    subscription: SubscriptionAt


@dataclass(frozen=True, slots=True)
class RuleAt:
    subscription: SubscriptionAt
    name: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A path with an unknown `$` part."""


ParsedPath: TypeAlias = (
    Root
    | NamespaceInfo
    | Entities
    | EntityAt
    | Subscriptions
    | SubscriptionAt
    | Rules
    | RuleAt
    | Unknown
)

_RESOURCES: Final = {
    "queues": Entities(EntityKind.QUEUE),
    "topics": Entities(EntityKind.TOPIC),
}


def parse_path(path: str) -> ParsedPath:
    """Parse a decoded path, whether its entity exists or not."""
    parts = [part for part in path.split("/") if part]
    if not parts:
        return Root()
    low = [part.lower() for part in parts]
    if low == ["$namespaceinfo"]:
        return NamespaceInfo()
    if low[0] == "$resources":
        return _RESOURCES.get("/".join(low[1:]), Unknown())
    if len(low) > 3 and low[-1] == "rules" and low[-3] == "subscriptions":
        return Rules(SubscriptionAt("/".join(parts[:-3]), parts[-2]))
    if len(low) > 4 and low[-2] == "rules" and low[-4] == "subscriptions":
        return RuleAt(SubscriptionAt("/".join(parts[:-4]), parts[-3]), parts[-1])
    if len(low) > 2 and low[-2] == "subscriptions":
        return SubscriptionAt("/".join(parts[:-2]), parts[-1])
    if len(low) > 1 and low[-1] == "subscriptions":
        return Subscriptions("/".join(parts[:-1]))
    return Unknown() if any("$" in part for part in parts) else EntityAt("/".join(parts))
