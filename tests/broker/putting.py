"""Entities put into a directory by kind, as `Directory.put` takes them."""

from __future__ import annotations

from collections.abc import Sequence

from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.preconditions import UNCONDITIONAL, Precondition, WantedEntity
from postbus.contract.entities import (
    EntityKind,
    QueueProperties,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.store.catalog import CatalogEntry


async def put_queue(
    directory: Directory,
    name: str,
    properties: QueueProperties,
    condition: Precondition = UNCONDITIONAL,
) -> CatalogEntry:
    wanted = WantedEntity(EntityKind.QUEUE, name, properties)
    return (await directory.put(wanted, condition)).entry


async def put_topic(
    directory: Directory,
    name: str,
    properties: TopicProperties,
    condition: Precondition = UNCONDITIONAL,
) -> CatalogEntry:
    wanted = WantedEntity(EntityKind.TOPIC, name, properties)
    return (await directory.put(wanted, condition)).entry


async def put_subscription(
    directory: Directory,
    topic: str,
    name: str,
    properties: SubscriptionProperties,
    rules: Sequence[RuleProperties] | None = None,
    condition: Precondition = UNCONDITIONAL,
) -> CatalogEntry:
    wanted = WantedEntity(EntityKind.SUBSCRIPTION, name, properties, topic, rules)
    return (await directory.put(wanted, condition)).entry
