"""Names to addresses, commands to the host of the right partition."""

from __future__ import annotations

import asyncio
import time

import pytest

from postbus.broker.address import Address
from postbus.broker.catalog.directory import home_of
from postbus.broker.partition.clock import EntityClock
from postbus.broker.partition.host import Host
from postbus.broker.partition.ownership import HostStatus
from postbus.broker.placement import SPREAD
from postbus.broker.router import Router
from postbus.contract.entities import (
    EntityKind,
    QueueProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import Enqueue, Enqueued, Refusal, Refused, Reply, SubQueue
from postbus.entity.window import WindowBudget
from postbus.store.catalog import CatalogStore
from postbus.store.postgres import Store
from tests.broker.owner import directory_of
from tests.broker.partition.test_host import message, until
from tests.broker.partition_rig import running, spread
from tests.broker.putting import put_queue, put_subscription, put_topic

pytestmark = pytest.mark.slow


def resolved(router: Router, path: str) -> Address | None:
    found: list[Address | None] = []
    router.resolve(path, found.append)
    assert len(found) == 1
    return found[0]


async def test_a_command_reaches_the_home_partition_of_its_entity(store: Store) -> None:
    directory = directory_of(CatalogStore(store), 2)
    await directory.load()
    name = next(name for name in map("Queue-{}".format, range(99)) if home_of(name.lower(), 2) == 1)
    entry = await put_queue(directory, name, QueueProperties())
    clock = EntityClock(
        lambda: time.monotonic_ns() // 1_000_000, lambda: time.time_ns() // 1_000_000
    )
    async with asyncio.TaskGroup() as tasks:
        hosts = [
            Host(
                partition_id=partition_id,
                store=store,
                directory=directory,
                clock=clock,
                budget=WindowBudget(1 << 26),
                new_seed=lambda: 1,
                tasks=tasks,
            )
            for partition_id in range(2)
        ]
        router = Router(hosts, directory)
        try:
            address = resolved(router, f"/{name.upper()}/")
            assert address is not None
            assert (address.partition_id, address.entity_no) == (1, entry.entity_no)
            assert (address.sub_queue, address.name) == (SubQueue.ACTIVE, name)
            for suffix, sub_queue in (
                ("/$DeadLetterQueue", SubQueue.DEAD_LETTER),
                ("/$Transfer/$DeadLetterQueue", SubQueue.TRANSFER_DEAD_LETTER),
            ):
                below = resolved(router, name + suffix)
                assert below is not None
                assert (below.sub_queue, below.entity_no) == (sub_queue, entry.entity_no)
            assert resolved(router, "nothing") is None
            assert resolved(router, "nothing/$deadletterqueue") is None

            replies: list[Reply] = []
            router.submit(1, Enqueue(entry.entity_no, [message(), message()]), replies.append)
            router.submit(1, Enqueue(entry.entity_no + 1, [message()]), replies.append)
            await until(lambda: len(replies) == 2)
            assert replies[0] == Enqueued([1, 2])
            assert isinstance(replies[1], Refused)
            assert replies[1].refusal is Refusal.ENTITY_NOT_FOUND
            assert hosts[0].status is HostStatus.UNCLAIMED
            counts = hosts[1].counts(entry.entity_no)
            assert counts is not None
            assert counts.active == 2
            assert hosts[1].counts(entry.entity_no + 1) is None
            assert hosts[0].counts(entry.entity_no) is None
            with pytest.raises(IndexError):
                router.submit(2, Enqueue(entry.entity_no, [message()]))
            assert router.new_consumer_id() < router.new_consumer_id()
        finally:
            for host in hosts:
                await host.stop()


async def test_paths_of_subscriptions_lead_to_them(store: Store) -> None:
    async with running(store) as bus:
        await put_topic(bus.directory, "Sales/eu", TopicProperties())
        entry = await put_subscription(bus.directory, "sales/EU", "Audit", SubscriptionProperties())
        for path in ("sales/eu/subscriptions/audit", "/Sales/eu/Subscriptions/Audit"):
            for suffix, sub_queue in (
                ("", SubQueue.ACTIVE),
                ("/$DeadLetterQueue", SubQueue.DEAD_LETTER),
                ("/$Transfer/$DeadLetterQueue", SubQueue.TRANSFER_DEAD_LETTER),
            ):
                address = resolved(bus.router, path + suffix)
                assert address is not None
                assert (address.entity_no, address.sub_queue) == (entry.entity_no, sub_queue)
                assert (address.name, address.kind) == (
                    "Sales/eu/Subscriptions/Audit",
                    EntityKind.SUBSCRIPTION,
                )
                assert address.partition_id == entry.home_partition
        topic = resolved(bus.router, "sales/eu")
        assert topic is not None
        assert topic.kind is EntityKind.TOPIC
        assert resolved(bus.router, "sales/eu/subscriptions/nobody") is None
        assert resolved(bus.router, "sales/eu/subscriptions") is None


async def test_partitioned_entities_lead_to_all_partitions(store: Store) -> None:
    async with running(store) as bus:
        await put_queue(bus.directory, "q", spread())
        await put_topic(
            bus.directory, "t", TopicProperties.model_validate({"enable_partitioning": True})
        )
        await put_subscription(bus.directory, "t", "s", SubscriptionProperties())
        for path in ("q", "q/$deadletterqueue", "t", "t/subscriptions/s"):
            address = resolved(bus.router, path)
            assert address is not None
            assert (address.partition_id, address.is_partitioned) == (SPREAD, True)
