"""The address of an entity or of one of its sub-queues, to which a path resolves."""

from __future__ import annotations

from dataclasses import dataclass

from postbus.contract.entities import (
    EntityKind,
    EntityProperties,
    NamespaceLimits,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import SubQueue


@dataclass(frozen=True, slots=True)
class Address:
    """An address. `name` has its original case.

    `partition_id` of a partitioned entity is SPREAD, which the router accepts like any other.
    """

    partition_id: int
    entity_no: int
    sub_queue: SubQueue
    name: str
    kind: EntityKind
    properties: EntityProperties
    is_partitioned: bool = False

    @property
    def requires_session(self) -> bool:
        """True if its active messages are received by session."""
        properties = self.properties
        return not isinstance(properties, TopicProperties) and properties.requires_session

    def max_message_bytes(self, limits: NamespaceLimits) -> int:
        """Return the maximum size of a message."""
        if isinstance(self.properties, SubscriptionProperties):
            return limits.max_message_bytes
        size_kb = self.properties.max_message_size_in_kilobytes
        return min(size_kb * 1024, limits.max_message_bytes)
