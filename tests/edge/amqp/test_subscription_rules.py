"""Rules of subscriptions by callback: changes, refusals and audit entries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from postbus.broker.audit import Audit, AuditedChange
from postbus.contract.entities import (
    RuleProperties,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.edge.amqp.subscription_rules import SubscriptionRules
from postbus.entity.commands import Done, Refusal, Refused
from postbus.store.audit import AuditStore
from postbus.store.postgres import Store
from tests.broker.administration_rig import administration_of
from tests.broker.partition.test_host import until
from tests.broker.partition_rig import running
from tests.broker.putting import put_subscription, put_topic

pytestmark = pytest.mark.slow

BY = AuditedChange("rule root", "127.0.0.1", "AMQP", "put rule", "t/Subscriptions/s", {})
MISSING = "t/Subscriptions/x"


def rule(name: str) -> RuleProperties:
    return RuleProperties(
        name=name, filter_type="SqlFilter", sql_filter=SqlFilter(sql_expression="1=1")
    )


async def test_rules_are_changed_by_callback_and_audited(store: Store) -> None:
    async with running(store) as bus, asyncio.TaskGroup() as tasks:
        await put_topic(bus.directory, "t", TopicProperties())
        path = (await put_subscription(bus.directory, "t", "s", SubscriptionProperties())).name
        audit = Audit(AuditStore(store), tasks.create_task, lambda: 1, lambda: 0)
        tasks.create_task(audit.keep_writing())
        rules = SubscriptionRules(administration_of(bus, store), audit, tasks.create_task)
        replies: list[Done | Refused] = []

        async def answer(call: Callable[..., None], *arguments: object) -> Done | Refused:
            count = len(replies)
            call(*arguments, BY, replies.append)
            assert len(replies) == count  # never before it returns
            await until(lambda: len(replies) > count)
            return replies[-1]

        def names() -> list[str]:
            listed = rules.listed(path)
            assert not isinstance(listed, Refused)
            return [each.properties.name for each in listed]

        assert names() == ["$Default"]
        assert await answer(rules.add, path, rule("more")) == Done()
        assert await answer(rules.remove, path, "$Default") == Done()
        assert names() == ["more"]
        (entry,) = await audit.page(2**31, 10)
        assert (entry.change.caller, entry.outcome) == (BY.caller, "done")
        assert entry.change.detail == {"rules": ["more", "$Default"]}
        for call, arguments, refusal in (
            (rules.add, (path, rule("more")), Refusal.ALREADY_EXISTS),
            (rules.remove, (path, "$Default"), Refusal.ENTITY_NOT_FOUND),
            (rules.add, (MISSING, rule("a")), Refusal.ENTITY_NOT_FOUND),
        ):
            refused = await answer(call, *arguments)
            assert isinstance(refused, Refused)
            assert refused.refusal is refusal
        missing = rules.listed(MISSING)
        assert isinstance(missing, Refused)
        assert missing.refusal is Refusal.ENTITY_NOT_FOUND
        audit.stop()
