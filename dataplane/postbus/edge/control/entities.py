"""Control API of definitions: queues, topics, subscriptions and their rules; counts.

Bodies become calls of `Administration`, which makes all decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from postbus.broker.administration import (
    Administration,
    DeletePolicy,
    EntityDescription,
    PutMode,
)
from postbus.broker.administration import RuleDescription as KnownRule
from postbus.broker.catalog.preconditions import WantedEntity
from postbus.contract.control import (
    Applied,
    Deleted,
    DeletionPolicy,
    ProblemType,
    QueueDescription,
    QueuePage,
    RuleDescription,
    RulePage,
    SubscriptionDefinition,
    SubscriptionDescription,
    SubscriptionPage,
    TopicDescription,
    TopicPage,
    applied_hash,
)
from postbus.contract.entities import (
    EntityKind,
    QueueProperties,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
    subscription_path,
)
from postbus.edge.control.calls import Answer, Call, ControlRefused, Handler, answering_if_match
from postbus.edge.control.counts import runtime_of
from postbus.edge.control.routes import MANAGED_BY


class ControlEntities:
    """Handlers for the entities of the catalog."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def operations(self) -> Mapping[str, Handler]:
        return {
            "listQueues": self._list_queues,
            "getQueue": self._get_queue,
            "putQueue": self._put_queue,
            "deleteQueue": self._delete_queue,
            "countQueue": self._count_queue,
            "listTopics": self._list_topics,
            "getTopic": self._get_topic,
            "putTopic": self._put_topic,
            "deleteTopic": self._delete_topic,
            "countTopic": self._count_topic,
            "listSubscriptions": self._list_subscriptions,
            "listAllSubscriptions": self._list_subscriptions,
            "getSubscription": self._get_subscription,
            "putSubscription": self._put_subscription,
            "deleteSubscription": self._delete_subscription,
            "countSubscription": self._count_subscription,
            "listRules": self._list_rules,
            "getRule": self._get_rule,
            "putRule": self._put_rule,
            "deleteRule": self._delete_rule,
        }

    # --- queues ---------------------------------------------------------------------------------

    async def _list_queues(self, call: Call) -> Answer:
        found, next_skip = self._page(call, EntityKind.QUEUE)
        return Answer(QueuePage(items=[_queue(each) for each in found], next_skip=next_skip))

    async def _get_queue(self, call: Call) -> Answer:
        found = self._get(EntityKind.QUEUE, call.names["queue"])
        warnings = self._administration.warnings_of(found.name)
        return Answer(_queue(found, warnings), etag=found.version)

    async def _put_queue(self, call: Call) -> Answer:
        properties = call.read(QueueProperties)
        return await self._put(
            call,
            WantedEntity(
                EntityKind.QUEUE, call.names["queue"], properties, managed_by=_mark_of(call)
            ),
        )

    async def _delete_queue(self, call: Call) -> Answer:
        return await self._delete(call, EntityKind.QUEUE, call.names["queue"])

    async def _count_queue(self, call: Call) -> Answer:
        return await self._count(EntityKind.QUEUE, call.names["queue"])

    # --- topics ---------------------------------------------------------------------------------

    async def _list_topics(self, call: Call) -> Answer:
        found, next_skip = self._page(call, EntityKind.TOPIC)
        return Answer(TopicPage(items=[_topic(each) for each in found], next_skip=next_skip))

    async def _get_topic(self, call: Call) -> Answer:
        found = self._get(EntityKind.TOPIC, call.names["topic"])
        return Answer(_topic(found), etag=found.version)

    async def _put_topic(self, call: Call) -> Answer:
        properties = call.read(TopicProperties)
        return await self._put(
            call,
            WantedEntity(
                EntityKind.TOPIC, call.names["topic"], properties, managed_by=_mark_of(call)
            ),
        )

    async def _delete_topic(self, call: Call) -> Answer:
        return await self._delete(call, EntityKind.TOPIC, call.names["topic"])

    async def _count_topic(self, call: Call) -> Answer:
        return await self._count(EntityKind.TOPIC, call.names["topic"])

    # --- subscriptions --------------------------------------------------------------------------

    async def _list_subscriptions(self, call: Call) -> Answer:
        found, next_skip = self._page(call, EntityKind.SUBSCRIPTION, call.names.get("topic"))
        items = [_subscription(each) for each in found]
        return Answer(SubscriptionPage(items=items, next_skip=next_skip))

    async def _get_subscription(self, call: Call) -> Answer:
        found = self._get(EntityKind.SUBSCRIPTION, _path(call))
        warnings = self._administration.warnings_of(found.name)
        return Answer(_subscription(found, warnings), etag=found.version)

    async def _put_subscription(self, call: Call) -> Answer:
        topic, name = call.names["topic"], call.names["subscription"]
        said = call.read(SubscriptionDefinition)
        properties = _without_rules(said)
        wanted = WantedEntity(
            EntityKind.SUBSCRIPTION,
            name,
            properties,
            topic,
            said.rules,
            managed_by=_mark_of(call),
        )
        return await self._put(call, wanted)

    async def _delete_subscription(self, call: Call) -> Answer:
        return await self._delete(call, EntityKind.SUBSCRIPTION, _path(call))

    async def _count_subscription(self, call: Call) -> Answer:
        return await self._count(EntityKind.SUBSCRIPTION, _path(call))

    # --- rules ----------------------------------------------------------------------------------

    async def _list_rules(self, call: Call) -> Answer:
        rules = self._get(EntityKind.SUBSCRIPTION, _path(call)).rules
        ordered = sorted(rules, key=lambda each: each.properties.name.lower())
        skip, top = call.number("skip"), call.number("top")
        items = [_rule(each) for each in ordered[skip : skip + top]]
        next_skip = skip + top if skip + top < len(rules) else None
        return Answer(RulePage(items=items, next_skip=next_skip))

    async def _get_rule(self, call: Call) -> Answer:
        subscription = self._get(EntityKind.SUBSCRIPTION, _path(call))
        return Answer(_rule(_named(subscription, call.names["rule"])))

    async def _put_rule(self, call: Call) -> Answer:
        path, name, wanted = _path(call), call.names["rule"], call.read(RuleProperties)
        if wanted.name.lower() != name.lower():
            raise ControlRefused(
                400,
                f"name: must be {name}, as in the path; a rule is not renamed",
                ProblemType.INVALID,
            )
        before = self._get(EntityKind.SUBSCRIPTION, path)
        put = await self._administration.put_rule(before.name, wanted, mode=PutMode.ANY)
        after = self._get(EntityKind.SUBSCRIPTION, path)
        return applied(self._administration, after, is_new=put.is_new)

    async def _delete_rule(self, call: Call) -> Answer:
        before = self._get(EntityKind.SUBSCRIPTION, _path(call))
        await self._administration.delete_rule(before.name, call.names["rule"])
        after = self._get(EntityKind.SUBSCRIPTION, _path(call))
        return applied(self._administration, after, is_new=False)

    # --- common parts ---------------------------------------------------------------------------

    def _find(self, kind: EntityKind, path: str) -> EntityDescription | None:
        """Return the entity with this path and kind."""
        found = self._administration.find(path)
        is_it = found is not None and found.kind is kind and found.name.lower() == path.lower()
        return found if is_it else None

    def _get(self, kind: EntityKind, path: str) -> EntityDescription:
        found = self._find(kind, path)
        if found is None:
            raise _missing(kind, path)
        return found

    def _page(
        self, call: Call, kind: EntityKind, topic: str | None = None
    ) -> tuple[list[EntityDescription], int | None]:
        """Return a page, and the start of the next one."""
        skip, top = call.number("skip"), call.number("top")
        found = self._administration.listed(kind, topic, skip, top + 1)
        return found[:top], skip + top if len(found) > top else None

    async def _put(self, call: Call, wanted: WantedEntity) -> Answer:
        with answering_if_match(f"the {wanted.kind.value} {wanted.path}", call.condition.mode):
            put = await self._administration.put(wanted, call.condition)
        return applied(self._administration, put, is_new=put.is_new)

    async def _delete(self, call: Call, kind: EntityKind, path: str) -> Answer:
        before = self._get(kind, path)
        policy = _policy_of(DeletionPolicy(call.text("policy")))
        with answering_if_match(f"the {kind.value} {path}"):
            await self._administration.delete(path, policy=policy, condition=call.condition)
        is_restorable = policy is DeletePolicy.RETAIN
        return Answer(
            Deleted(
                entity_id=before.entity_no,
                version=self._administration.version,
                restorable=is_restorable,
            )
        )

    async def _count(self, kind: EntityKind, path: str) -> Answer:
        name = self._get(kind, path).name
        counted = await self._administration.runtime(name)
        return Answer(runtime_of(counted, await self._administration.traffic(name)))


def applied(administration: Administration, put: EntityDescription, *, is_new: bool) -> Answer:
    """Return the result of a change."""
    applied_change = Applied(
        entity_id=put.entity_no,
        applied_hash=_hash(put),
        version=put.version,
        acknowledged=administration.acknowledged(),
        created=is_new,
    )
    return Answer(applied_change, 201 if is_new else 200, put.version)


def _mark_of(call: Call) -> str | None:
    return call.text_or_none(MANAGED_BY.name)


# --- responses ----------------------------------------------------------------------------------


def _path(call: Call) -> str:
    return subscription_path(call.names["topic"], call.names["subscription"])


def _missing(kind: EntityKind, path: str) -> ControlRefused:
    return ControlRefused(404, f"there is no {kind.value} {path}", ProblemType.NOT_FOUND)


def _named(subscription: EntityDescription, name: str) -> KnownRule:
    for rule in subscription.rules:
        if rule.properties.name.lower() == name.lower():
            return rule
    raise ControlRefused(404, f"{subscription.name} has no rule {name}", ProblemType.NOT_FOUND)


def _time(value_ms: int) -> datetime:
    return datetime.fromtimestamp(value_ms / 1_000, UTC)


def _hash(entity: EntityDescription) -> str:
    return applied_hash(entity.properties, [rule.properties for rule in entity.rules])


def _facts(entity: EntityDescription, warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields that all descriptions have."""
    return {
        "entity_id": entity.entity_no,
        "name": entity.name,
        "version": entity.version,
        "applied_hash": _hash(entity),
        "created_at": _time(entity.created_ms),
        "updated_at": _time(entity.updated_ms),
        "is_partitioned": entity.is_partitioned,
        "partitions": entity.partitions,
        "managed_by": entity.managed_by,
        "warnings": warnings,
    }


def _queue(entity: EntityDescription, warnings: tuple[str, ...] = ()) -> QueueDescription:
    assert isinstance(entity.properties, QueueProperties)
    return QueueDescription(**_facts(entity, warnings), properties=entity.properties)


def _topic(entity: EntityDescription) -> TopicDescription:
    assert isinstance(entity.properties, TopicProperties)
    return TopicDescription(**_facts(entity), properties=entity.properties)


def _subscription(
    entity: EntityDescription, warnings: tuple[str, ...] = ()
) -> SubscriptionDescription:
    topic, _, name = entity.name.rsplit("/", 2)
    said = {each: getattr(entity.properties, each) for each in SubscriptionProperties.model_fields}
    rules = tuple(rule.properties for rule in entity.rules)
    return SubscriptionDescription(
        **{**_facts(entity, warnings), "name": name},
        topic=topic,
        path=entity.name,
        properties=SubscriptionDefinition.model_construct(**said, rules=rules),
    )


def _without_rules(wanted: SubscriptionDefinition) -> SubscriptionProperties:
    """Return the properties with only the given fields set, so that the tier supplies the rest."""
    said = wanted.model_fields_set - {"rules"}
    return SubscriptionProperties.model_construct(
        _fields_set=said,
        **{each: getattr(wanted, each) for each in SubscriptionProperties.model_fields},
    )


def _rule(rule: KnownRule) -> RuleDescription:
    return RuleDescription(
        name=rule.properties.name, created_at=_time(rule.created_ms), properties=rule.properties
    )


def _policy_of(policy: DeletionPolicy) -> DeletePolicy:
    match policy:
        case DeletionPolicy.DELETE:
            return DeletePolicy.DELETE
        case DeletionPolicy.DELETE_IF_EMPTY:
            return DeletePolicy.DELETE_IF_EMPTY
        case DeletionPolicy.RETAIN:
            return DeletePolicy.RETAIN
