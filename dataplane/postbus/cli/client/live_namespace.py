"""Definitions of a running bus, read over the control API, as models of manifests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from postbus.cli.client.control_client import ControlClient, NotFoundError, part
from postbus.contract.entities import (
    Model,
    NamespaceProperties,
    QueueProperties,
    Right,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.contract.namespace import NamespaceDefinition
from postbus.manifests.reader import (
    BusDefinition,
    QueueDefinition,
    RuleDefinition,
    SubscriptionDefinition,
    TopicDefinition,
)

M = TypeVar("M", bound=Model)


def queue_path(name: str) -> str:
    """Return the path of a queue in the control API."""
    return f"/v1/queues/{part(name)}"


def topic_path(name: str) -> str:
    """Return the path of a topic in the control API."""
    return f"/v1/topics/{part(name)}"


def subscription_path_of(topic: str, name: str) -> str:
    """Return the path of a subscription in the control API."""
    return f"{topic_path(topic)}/subscriptions/{part(name)}"


async def read_namespace(control: ControlClient, *, with_rules: bool = True) -> BusDefinition:
    """Return all definitions of a bus, without keys."""
    answer = await control.get("/v1/namespace")
    queues = [_queue(each) for each in await control.all_of("/v1/queues")]
    topics = [_topic(each) for each in await control.all_of("/v1/topics")]
    subscriptions = [
        _subscription(topic.name, each)
        for topic in topics
        for each in await control.all_of(f"{topic_path(topic.name)}/subscriptions")
    ]
    rules: tuple[RuleDefinition, ...] = ()
    if with_rules:
        rules = await _rules(control, "/v1")
        queues = [
            QueueDefinition(
                each.name, each.properties, await _rules(control, queue_path(each.name))
            )
            for each in queues
        ]
        topics = [
            TopicDefinition(
                each.name, each.properties, await _rules(control, topic_path(each.name))
            )
            for each in topics
        ]
    return BusDefinition(
        str(answer["name"]),
        known(NamespaceProperties, answer["properties"]),
        rules,
        tuple(queues),
        tuple(topics),
        tuple(subscriptions),
        known(NamespaceDefinition, answer["properties"]).soft_delete.retention_ms,
    )


async def read_queue(control: ControlClient, name: str) -> QueueDefinition | None:
    """Return a queue, None when there is none."""
    try:
        return _queue(await control.get(queue_path(name)))
    except NotFoundError:
        return None


async def read_topic(control: ControlClient, name: str) -> TopicDefinition | None:
    """Return a topic, None when there is none."""
    try:
        return _topic(await control.get(topic_path(name)))
    except NotFoundError:
        return None


async def read_subscription(
    control: ControlClient, topic: str, name: str
) -> SubscriptionDefinition | None:
    """Return a subscription with its rules, None when there is none."""
    try:
        return _subscription(topic, await control.get(subscription_path_of(topic, name)))
    except NotFoundError:
        return None


def known(model: type[M], said: Mapping[str, Any]) -> M:
    """Return properties from a response, without fields that a newer version added."""
    names = {info.alias or name for name, info in model.model_fields.items()}
    return model.model_validate({key: each for key, each in said.items() if key in names})


def _queue(answer: Mapping[str, Any]) -> QueueDefinition:
    return QueueDefinition(answer["name"], known(QueueProperties, answer["properties"]), ())


def _topic(answer: Mapping[str, Any]) -> TopicDefinition:
    return TopicDefinition(answer["name"], known(TopicProperties, answer["properties"]), ())


def _subscription(topic: str, answer: Mapping[str, Any]) -> SubscriptionDefinition:
    said = answer["properties"]
    rules = tuple(known(RuleProperties, each) for each in said.get("rules") or ())
    return SubscriptionDefinition(topic, answer["name"], known(SubscriptionProperties, said), rules)


async def _rules(control: ControlClient, at: str) -> tuple[RuleDefinition, ...]:
    answer = await control.get(f"{at}/authorization-rules")
    return tuple(
        RuleDefinition(each["name"], frozenset(map(Right, each["rights"])), None)
        for each in answer["items"]
    )
