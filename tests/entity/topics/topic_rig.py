"""A topic with subscriptions on the rig, for tests of topics."""

from __future__ import annotations

from typing import Any

from postbus.contract.entities import (
    RuleProperties,
    SqlAction,
    SqlFilter,
    TopicProperties,
)
from postbus.entity.commands import (
    Delivery,
    SubQueue,
)
from postbus.message.codec import encode_value
from postbus.message.envelope import Envelope
from postbus.message.patch import merge_properties
from tests.entity.partition_rig import (
    ACTIVE,
    TOPIC,
    Rig,
    message,
)

ONE, TWO, THREE = 21, 22, 23


def topic_rig(count: int = 2, topic: TopicProperties | None = None, **settings: Any) -> Rig:
    """Make a topic with this number of subscriptions that take everything."""
    rig = Rig(**settings)
    rig.put_topic(topic)
    for entity_no in range(ONE, ONE + count):
        rig.put_subscription(entity_no)
    return rig


def publish(rig: Rig, *messages: Envelope | str) -> list[int]:
    return rig.send(*messages, entity_no=TOPIC)


def names(rig: Rig, entity_no: int, sub_queue: SubQueue = ACTIVE) -> list[str]:
    return rig.peek_names(sub_queue, entity_no)


def with_properties(name: str, body: bytes = b"", **properties: object) -> Envelope:
    section = merge_properties(b"", properties) if properties else b""
    envelope = message(name, application_properties=section)
    envelope.message_id = encode_value(name)
    if body:
        envelope.body = body
        envelope.size_bytes = 100 + len(section) + len(body)
    return envelope


def sql(name: str, expression: str, action: str | None = None) -> RuleProperties:
    return RuleProperties(
        name=name,
        sql_filter=SqlFilter(sql_expression=expression),
        action=None if action is None else SqlAction(sql_expression=action),
    )


def take(rig: Rig, entity_no: int, count: int = 1, sub_queue: SubQueue = ACTIVE) -> list[Delivery]:
    name = f"{entity_no}/{sub_queue}"
    return rig.receive(name, count, entity_no=entity_no, sub_queue=sub_queue)


def shared_rows(rig: Rig) -> list[list[int]]:
    return rig.tables.shared
