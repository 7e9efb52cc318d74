"""The key of a pipeline: one rule of its bus, with the rights that its document needs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final

from postbus.contract.entities import Right
from postbus.contract.pipeline import PipelineSpec
from postbus_operator.bus.session import BusSession
from postbus_operator.bus.synced_keys import KeysResult
from postbus_operator.context import Context
from postbus_operator.keys.sync import sync_keys
from postbus_operator.objects import Key, Resource

MAX_RULE: Final = 256


def rule_name(key: Key) -> str:
    """Return the name of a pipeline's rule on its bus: `pipeline.shop.price-orders`."""
    name = f"pipeline.{key.namespace}.{key.name}"
    if len(name) <= MAX_RULE:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{name[: MAX_RULE - 11].rstrip('.-')}-{digest}"


def rights_of(spec: PipelineSpec) -> list[str]:
    """Return the rights that reading entities, and writing to entities, need."""
    is_reading = any(source.table is None for source in spec.sources)
    is_sending = any(sink.entity is not None for sink in spec.sinks)
    wanted = ((Right.LISTEN, is_reading), (Right.SEND, is_sending))
    return [right.value for right, is_wanted in wanted if is_wanted]


async def sync_key(
    context: Context, session: BusSession, bus: Resource, resource: Resource, spec: PipelineSpec
) -> KeysResult:
    """Make the rule, and the Secret with its key."""
    rule: dict[str, object] = {"name": rule_name(resource.key), "rights": rights_of(spec)}
    return await sync_keys(context, session, bus, _with_rules(resource, [rule]))


async def remove_key(
    context: Context, session: BusSession, bus: Resource, resource: Resource
) -> KeysResult:
    """Delete the rule and the Secret."""
    session.synced_keys.pop(resource.key, None)
    return await sync_keys(context, session, bus, _with_rules(resource, []))


def _with_rules(resource: Resource, rules: list[dict[str, object]]) -> Resource:
    return replace(resource, spec={**resource.spec, "authorizationRules": rules})
