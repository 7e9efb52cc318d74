"""Puts entities into a directory by kind, with preconditions, as `Directory.put` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.preconditions import (
    UNCONDITIONAL,
    Precondition,
    PutMode,
    WantedEntity,
)
from postbus.contract.entities import (
    EntityKind,
    QueueProperties,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.store.catalog import CatalogEntry

NEW: Final = Precondition(PutMode.CREATE)
EXISTING: Final = Precondition(PutMode.UPDATE)


def a_queue(name: str, properties: QueueProperties) -> WantedEntity:
    return WantedEntity(EntityKind.QUEUE, name, properties)


def a_topic(name: str, properties: TopicProperties) -> WantedEntity:
    return WantedEntity(EntityKind.TOPIC, name, properties)


def a_subscription(
    topic: str,
    name: str,
    properties: SubscriptionProperties,
    rules: Sequence[RuleProperties] | None = None,
) -> WantedEntity:
    return WantedEntity(EntityKind.SUBSCRIPTION, name, properties, topic, rules)


async def put_queue(
    directory: Directory,
    name: str,
    properties: QueueProperties,
    condition: Precondition = UNCONDITIONAL,
) -> CatalogEntry:
    return (await directory.put(a_queue(name, properties), condition)).entry


async def put_topic(
    directory: Directory,
    name: str,
    properties: TopicProperties,
    condition: Precondition = UNCONDITIONAL,
) -> CatalogEntry:
    return (await directory.put(a_topic(name, properties), condition)).entry


async def put_subscription(
    directory: Directory,
    topic: str,
    name: str,
    properties: SubscriptionProperties,
    rules: Sequence[RuleProperties] | None = None,
    condition: Precondition = UNCONDITIONAL,
) -> CatalogEntry:
    wanted = a_subscription(topic, name, properties, rules)
    return (await directory.put(wanted, condition)).entry
