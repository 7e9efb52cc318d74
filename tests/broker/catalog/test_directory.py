"""The catalog in memory and in its tables, including lost answers of writes (ADR 27)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postbus.broker.catalog.directory import Directory, DirectoryRefusal, home_of
from postbus.broker.catalog.entries import Entries, put_of
from postbus.broker.catalog.preconditions import NotWritten, WantedEntity
from postbus.contract.checks import complete
from postbus.contract.entities import (
    DEFAULT_RULE,
    LIMITS,
    EntityKind,
    EntityProperties,
    EntityStatus,
    QueueProperties,
    RuleProperties,
    Sku,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
    limits_of,
)
from postbus.entity.commands import Command, Done, DropEntity, PutEntity, Refusal, Reply
from postbus.store.catalog import (
    CatalogEntry,
    CatalogStore,
    StoredRule,
)
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from tests.broker.owner import directory_of
from tests.broker.putting import put_queue, put_subscription, put_topic

pytestmark = pytest.mark.slow

T = TypeVar("T")

STANDARD, PREMIUM = LIMITS[Sku.STANDARD], LIMITS[Sku.PREMIUM]
QUEUE, TOPIC, SUBSCRIPTION = QueueProperties(), TopicProperties(), SubscriptionProperties()
PARTITIONED = QueueProperties(enable_partitioning=True)


class LossyCatalog(CatalogStore):
    """The real catalog; on request it loses a write or the answer to it."""

    loses_answer = loses_write = False
    failing_loads = 0

    async def load(self) -> tuple[int, list[CatalogEntry]]:
        if self.failing_loads:
            self.failing_loads -= 1
            raise StoreUnavailable
        return await super().load()

    async def put_all(self, *given: Any) -> list[CatalogEntry]:
        return await self._lose(super().put_all(*given))

    async def retain(self, *given: Any) -> list[CatalogEntry]:
        return await self._lose(super().retain(*given))

    async def restore(self, *given: Any) -> list[CatalogEntry]:
        return await self._lose(super().restore(*given))

    async def delete(self, *given: Any) -> int:
        return await self._lose(super().delete(*given))

    async def _lose(self, work: Coroutine[object, object, T]) -> T:
        if self.loses_write:
            work.close()
            raise StoreUnavailable
        result = await work
        if self.loses_answer:
            raise StoreUnavailable
        return result


@dataclass
class Partition:
    """A host as the directory sees it: keeps definitions like a partition's state."""

    partition_id: int = 0
    is_loaded: bool = True
    reload_count: int = 0
    epoch: int | None = 0
    trouble: str | None = None
    known: dict[int, PutEntity] = field(default_factory=dict)
    version: int = 0
    received: list[Command] = field(default_factory=list)

    async def call(self, command: Command) -> Reply:
        self.take(command)
        return Done()

    def take(self, command: Command) -> None:
        self.received.append(command)
        if isinstance(command, PutEntity):
            assert command.topic_no is None or command.topic_no in self.known
            self.known[command.entity_no] = command
        else:
            assert isinstance(command, DropEntity)
            subscriptions = [
                put for put in self.known.values() if put.topic_no == command.entity_no
            ]
            assert subscriptions == []
            del self.known[command.entity_no]
        assert command.catalog_version >= self.version
        self.version = command.catalog_version

    async def catch_up(self, directory: Directory) -> None:
        self.is_loaded = True
        copies = {number: put.catalog_version for number, put in self.known.items()}
        catalog = directory.catalog
        gone = await catalog.catch_up(self.partition_id, copies, self.version, was_ours=False)
        for command in catalog.missing(self.partition_id, set(copies), self.version, gone):
            self.take(command)

    def definitions(self) -> dict[int, tuple[EntityProperties, tuple[RuleProperties, ...]]]:
        """Return its definitions by number: several of one name may be retained."""
        return {number: (put.properties, put.rules) for number, put in self.known.items()}

    def known_definitions(self) -> dict[str, tuple[EntityProperties, tuple[RuleProperties, ...]]]:
        return {put.name: (put.properties, put.rules) for put in self.known.values()}


async def open_directory(
    catalog: CatalogStore, count: int = 4
) -> tuple[Directory, list[Partition]]:
    directory = directory_of(catalog, count)
    await directory.load()
    partitions = [Partition(partition_id) for partition_id in range(count)]
    directory.follow(partitions)
    return directory, partitions


def rule(name: str, text: str = "1=1") -> RuleProperties:
    return RuleProperties(name=name, sql_filter=SqlFilter(sql_expression=text))


def rules_of(directory: Directory, path: str) -> tuple[StoredRule, ...]:
    entry = directory.find(path.lower())
    assert entry is not None
    return entry.rules


def names(rules: Sequence[StoredRule]) -> list[str]:
    return [each.properties.name for each in rules]


# --- lost writes --------------------------------------------------------------------------------


@pytest.mark.behaviour("S186")
async def test_a_write_with_a_lost_answer_is_found_in_the_tables(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory = directory_of(catalog, 4)
    await directory.load()
    catalog.loses_answer, catalog.failing_loads = True, 2
    entry = await put_queue(directory, "Orders", QueueProperties())
    assert directory.find("orders") == entry
    assert entry.home_partition == home_of("orders", 4)
    assert await directory.delete("ORDERS")
    assert directory.find("orders") is None
    assert (directory.version, directory.entries()) == await catalog.load()


async def test_a_lost_write_is_reported_without_a_change(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory = directory_of(catalog, 4)
    await directory.load()
    catalog.loses_write = True
    with pytest.raises(NotWritten):
        await put_queue(directory, "orders", QueueProperties())
    assert directory.find("orders") is None
    catalog.loses_write = False
    entry = await put_queue(directory, "orders", QueueProperties())
    assert await put_queue(directory, "ORDERS", QueueProperties()) is entry


async def test_partitions_follow_the_tables_after_an_unknown_result(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory, (partition,) = await open_directory(catalog, 1)
    await put_topic(directory, "events", TOPIC)
    path = (await put_subscription(directory, "events", "a", SUBSCRIPTION)).name
    catalog.loses_answer = True
    await directory.add_rule(path, rule("red"))
    assert partition.known_definitions()[path][1] == (DEFAULT_RULE, rule("red"))
    disabled = TopicProperties(status=EntityStatus.DISABLED)
    await put_topic(directory, "events", disabled)
    assert partition.known_definitions()["events"][0] == disabled
    await directory.delete("events")
    assert partition.known_definitions() == {}


# --- topics, subscriptions, rules ---------------------------------------------------------------


async def test_a_new_subscription_takes_everything(store: Store) -> None:
    directory, partitions = await open_directory(CatalogStore(store))
    topic = await put_topic(directory, "Shop/Events", TOPIC)
    entry = await put_subscription(directory, "shop/events", "Audit", SUBSCRIPTION)
    assert entry.name == "Shop/Events/Subscriptions/Audit"
    assert directory.find("shop/events/subscriptions/audit") == entry
    assert (entry.topic_no, entry.home_partition) == (topic.entity_no, topic.home_partition)
    assert [each.properties for each in entry.rules] == [DEFAULT_RULE]
    received = partitions[topic.home_partition].received
    assert [command.kind for command in received if isinstance(command, PutEntity)] == [
        EntityKind.TOPIC,
        EntityKind.SUBSCRIPTION,
    ]
    assert isinstance(received[1], PutEntity)
    assert (received[1].topic_no, received[1].rules) == (topic.entity_no, (DEFAULT_RULE,))


async def test_rules_that_are_given_are_all_there_are(store: Store) -> None:
    directory, _ = await open_directory(CatalogStore(store))
    await put_topic(directory, "events", TOPIC)
    path = (await put_subscription(directory, "events", "a", SUBSCRIPTION, [rule("red")])).name
    assert names(rules_of(directory, path)) == ["red"]
    created_ms = rules_of(directory, path)[0].created_ms
    await put_subscription(directory, "events", "a", SUBSCRIPTION, [rule("blue"), rule("red")])
    assert names(rules_of(directory, path.upper())) == ["blue", "red"]
    assert rules_of(directory, path)[1].created_ms == created_ms
    changed = SubscriptionProperties(max_delivery_count=3)
    await put_subscription(directory, "events", "A", changed)
    assert names(rules_of(directory, path)) == ["blue", "red"]
    await put_subscription(directory, "events", "a", changed, [])
    assert rules_of(directory, path) == ()


async def test_rules_come_and_go_one_by_one(store: Store) -> None:
    directory, partitions = await open_directory(CatalogStore(store))
    topic = await put_topic(directory, "events", TOPIC)
    path = (await put_subscription(directory, "events", "a", SUBSCRIPTION)).name
    await directory.add_rule(path, rule("red", "colour = 'red'"))
    await directory.remove_rule(path, "$default")
    assert names(rules_of(directory, path)) == ["red"]
    partition = partitions[topic.home_partition]
    assert partition.known_definitions()[path][1] == (rule("red", "colour = 'red'"),)
    with pytest.raises(DirectoryRefusal) as caught:
        await directory.add_rule(path, rule("RED"))
    assert caught.value.refused.refusal is Refusal.ALREADY_EXISTS
    with pytest.raises(DirectoryRefusal) as caught:
        await directory.remove_rule(path, "blue")
    assert caught.value.refused.refusal is Refusal.ENTITY_NOT_FOUND
    with pytest.raises(DirectoryRefusal, match="line 1, column 10") as caught:
        await directory.add_rule(path, rule("bad", "colour = = 1"))
    assert caught.value.refused.refusal is Refusal.ARGUMENT_OUT_OF_RANGE
    for wrong in ("events", "events/subscriptions/b", "nothing"):
        with pytest.raises(DirectoryRefusal, match="no subscription"):
            await directory.add_rule(wrong, rule("r"))
    again = await CatalogStore(store).load()
    assert (directory.version, directory.entries()) == again


@pytest.mark.behaviour("S241")
async def test_deleting_a_topic_deletes_its_subscriptions_first(store: Store) -> None:
    directory, partitions = await open_directory(CatalogStore(store))
    topic = await put_topic(directory, "events", TOPIC)
    await put_subscription(directory, "events", "a", SUBSCRIPTION)
    await put_subscription(directory, "events", "b", SUBSCRIPTION)
    assert await directory.delete("Events")
    assert directory.entries() == []
    drops = partitions[topic.home_partition].received[-3:]
    assert [drop.entity_no for drop in drops if isinstance(drop, DropEntity)][-1] == topic.entity_no
    assert not await directory.delete("events/subscriptions/a")
    again = await put_topic(directory, "events", TOPIC)
    assert again.entity_no > topic.entity_no
    assert (await put_subscription(directory, "events", "a", SUBSCRIPTION)).rules


async def test_a_subscription_goes_alone(store: Store) -> None:
    directory, _ = await open_directory(CatalogStore(store))
    topic = await put_topic(directory, "events", TOPIC)
    await put_subscription(directory, "events", "a", SUBSCRIPTION)
    assert await directory.delete("events/Subscriptions/A")
    assert directory.entries() == [topic]


# --- partitioned entities -----------------------------------------------------------------------


@pytest.mark.behaviour("S143", "S218", "S219")
async def test_partitioned_entities_live_in_every_partition(store: Store) -> None:
    directory, partitions = await open_directory(CatalogStore(store))
    partitions[2].is_loaded = False
    spread = await put_queue(directory, "spread", PARTITIONED)
    await put_topic(directory, "events", TopicProperties(enable_partitioning=True))
    path = (await put_subscription(directory, "events", "a", SUBSCRIPTION)).name
    plain = await put_queue(directory, "plain", QUEUE)
    assert spread.is_partitioned
    assert spread.properties == PARTITIONED
    assert not plain.is_partitioned
    assert list(directory.homes_of(spread)) == [0, 1, 2, 3]
    assert partitions[2].known == {}
    await partitions[2].catch_up(directory)
    for partition in partitions:
        expected = {"spread", "events", path}
        if partition.partition_id == plain.home_partition:
            expected.add("plain")
        assert set(partition.known_definitions()) == expected
    assert all(put.is_partitioned for put in partitions[2].known.values() if put.name != "plain")


@pytest.mark.behaviour("S144")
async def test_all_entities_of_a_partitioned_premium_namespace_are_partitioned(
    store: Store,
) -> None:
    directory = directory_of(CatalogStore(store), 4, replace(PREMIUM, partition_count=4))
    await directory.load()
    assert (await put_queue(directory, "orders", QUEUE)).is_partitioned
    assert (await put_topic(directory, "events", TOPIC)).is_partitioned
    assert (await put_subscription(directory, "events", "a", SUBSCRIPTION)).is_partitioned


@pytest.mark.behaviour("S146")
async def test_existing_entities_keep_home_and_definition_in_premium(store: Store) -> None:
    catalog = CatalogStore(store)
    directory, _ = await open_directory(catalog)
    spread = await put_queue(directory, "spread", PARTITIONED)
    plain = await put_queue(directory, "plain", QUEUE)
    directory.limits = limits_of(Sku.PREMIUM, directory.limits.partition_count)
    for before in (spread, plain):
        assert before.properties.max_message_size_in_kilobytes == 256
        for changes in (
            {"max_delivery_count": 3},
            {"max_delivery_count": 3, "max_message_size_in_kilobytes": 1024},
        ):
            wanted = before.properties.model_copy(update=changes)
            after = await put_queue(directory, before.name, wanted)
            assert (after.is_partitioned, after.home_partition, after.properties) == (
                before.is_partitioned, before.home_partition, wanted
            )  # fmt: skip
        with pytest.raises(DirectoryRefusal, match="must be at least 1024"):
            await put_queue(directory, before.name, before.properties)
    bare = await put_queue(directory, "plain", QueueProperties())
    assert (bare.is_partitioned, bare.properties) == (
        False,
        complete(QUEUE, directory.limits, QUEUE),
    )
    with pytest.raises(DirectoryRefusal, match="cannot be changed from false"):
        await put_queue(directory, "plain", QueueProperties(enable_partitioning=True))
    assert (await put_queue(directory, "new", QueueProperties())).is_partitioned
    assert (await put_topic(directory, "events", TOPIC)).is_partitioned


async def test_an_entity_of_another_tier_is_restored(store: Store) -> None:
    directory, _ = await open_directory(CatalogStore(store))
    before = await put_queue(directory, "plain", QUEUE)
    await directory.retain("plain", 1 << 60)
    directory.limits = limits_of(Sku.PREMIUM, directory.limits.partition_count)
    after = await directory.restore(before.entity_no)
    assert (after.properties, after.is_partitioned) == (before.properties, False)


# --- refusals -----------------------------------------------------------------------------------


async def refused(work: object, directory: Directory, catalog: CatalogStore) -> Refusal:
    """Return the refusal; nothing may have changed."""
    before = directory.version, directory.entries()
    with pytest.raises(DirectoryRefusal) as caught:
        await work  # type: ignore[misc]
    assert before == (directory.version, directory.entries()) == await catalog.load()
    return caught.value.refused.refusal


async def test_invalid_definitions_are_refused(store: Store) -> None:
    catalog = CatalogStore(store)
    directory, _ = await open_directory(catalog)
    await put_queue(directory, "orders", QUEUE)
    await put_topic(directory, "events", TOPIC)
    large = QueueProperties(max_message_size_in_kilobytes=2048)
    sessions = QueueProperties(requires_session=True)
    for work, expected in (
        (put_topic(directory, "Orders", TOPIC), Refusal.ALREADY_EXISTS),
        (put_queue(directory, "EVENTS", QUEUE), Refusal.ALREADY_EXISTS),
        (put_queue(directory, "a//b", QUEUE), Refusal.ARGUMENT_OUT_OF_RANGE),
        (put_subscription(directory, "orders", "a", SUBSCRIPTION), Refusal.ENTITY_NOT_FOUND),
        (put_subscription(directory, "nothing", "a", SUBSCRIPTION), Refusal.ENTITY_NOT_FOUND),
        (put_subscription(directory, "events", "a/b", SUBSCRIPTION), Refusal.ARGUMENT_OUT_OF_RANGE),
        (put_queue(directory, "large", large), Refusal.ARGUMENT_OUT_OF_RANGE),
        (put_queue(directory, "orders", sessions), Refusal.NOT_ALLOWED),
        (
            put_queue(directory, "a", QueueProperties(forward_to="nowhere")),
            Refusal.ARGUMENT_OUT_OF_RANGE,
        ),
        (
            put_subscription(directory, "events", "a", SUBSCRIPTION, [rule("r"), rule("R")]),
            Refusal.ARGUMENT_OUT_OF_RANGE,
        ),
    ):
        assert await refused(work, directory, catalog) is expected


@pytest.mark.behaviour("S150", "S221")
async def test_partitioning_is_not_changed_by_an_update(store: Store) -> None:
    catalog = CatalogStore(store)
    directory, _ = await open_directory(catalog)
    await put_queue(directory, "orders", QUEUE)
    await put_topic(directory, "events", TopicProperties(enable_partitioning=True))
    work = put_queue(directory, "orders", PARTITIONED)
    assert await refused(work, directory, catalog) is Refusal.NOT_ALLOWED
    work = put_topic(directory, "events", TOPIC)
    assert await refused(work, directory, catalog) is Refusal.NOT_ALLOWED


@pytest.mark.behaviour("S242", "S243")
@pytest.mark.parametrize("suffix", ["/$DeadLetterQueue", "/$Transfer/$DeadLetterQueue"])
async def test_a_dead_letter_queue_is_not_managed_apart_from_its_entity(
    store: Store, suffix: str
) -> None:
    catalog = CatalogStore(store)
    directory, _ = await open_directory(catalog)
    await put_queue(directory, "orders", QUEUE)
    work = put_queue(directory, "orders" + suffix, QUEUE)
    assert await refused(work, directory, catalog) is Refusal.ARGUMENT_OUT_OF_RANGE
    assert await refused(directory.delete("orders" + suffix), directory, catalog) is (
        Refusal.NOT_ALLOWED
    )


async def test_forwarding_is_checked_when_it_changes(store: Store) -> None:
    catalog = CatalogStore(store)
    directory, _ = await open_directory(catalog)
    await put_queue(directory, "b", QUEUE)
    await put_queue(directory, "a", QueueProperties(forward_to="b"))
    await put_topic(directory, "t", TOPIC)
    await put_subscription(directory, "t", "s", SubscriptionProperties(forward_to="a"))
    work = put_queue(directory, "b", QueueProperties(forward_to="nowhere"))
    assert await refused(work, directory, catalog) is Refusal.ARGUMENT_OUT_OF_RANGE
    assert await directory.delete("b")  # targets are bound by name: they may go, and come again
    disabled = QueueProperties(forward_to="b", status=EntityStatus.DISABLED)
    assert (await put_queue(directory, "a", disabled)).properties == disabled


@pytest.mark.behaviour("S215", "S216")
async def test_a_namespace_has_limits_of_entities(store: Store) -> None:
    catalog = CatalogStore(store)
    limits = replace(
        STANDARD,
        max_entity_count=4,
        max_partitioned_count=2,
        max_subscription_count=2,
        max_sql_rule_count=3,
    )
    directory = directory_of(catalog, 16, limits)
    await directory.load()
    await put_queue(directory, "p1", PARTITIONED)
    await put_topic(directory, "events", TopicProperties(enable_partitioning=True))
    work = put_queue(directory, "p3", PARTITIONED)
    assert await refused(work, directory, catalog) is Refusal.QUOTA_EXCEEDED
    await put_queue(directory, "q1", QUEUE)
    await put_queue(directory, "q2", QUEUE)  # each partitioned one counts as one
    work = put_topic(directory, "more", TOPIC)
    assert await refused(work, directory, catalog) is Refusal.QUOTA_EXCEEDED
    path = (await put_subscription(directory, "events", "a", SUBSCRIPTION)).name
    await put_subscription(directory, "events", "b", SUBSCRIPTION)
    work = put_subscription(directory, "events", "c", SUBSCRIPTION)
    assert await refused(work, directory, catalog) is Refusal.QUOTA_EXCEEDED
    await directory.add_rule(path, rule("third"))
    assert await refused(directory.add_rule(path, rule("fourth")), directory, catalog) is (
        Refusal.QUOTA_EXCEEDED
    )
    assert await directory.delete("q1")
    await put_topic(directory, "more", TOPIC)
    assert LIMITS[Sku.STANDARD].max_partitioned_count == 100
    assert LIMITS[Sku.STANDARD].max_entity_count == 10_000


# --- catching up --------------------------------------------------------------------------------


async def test_a_topic_changed_after_its_subscription_comes_before_it(store: Store) -> None:
    directory, (partition,) = await open_directory(CatalogStore(store), 1)
    partition.is_loaded = False
    await put_topic(directory, "events", TOPIC)
    await put_subscription(directory, "events", "a", SUBSCRIPTION)
    await put_queue(directory, "orders", QUEUE)
    disabled = TopicProperties(status=EntityStatus.DISABLED)
    await put_topic(directory, "events", disabled)
    commands = directory.catalog.missing(0, set(), 0, set())
    versions = [command.catalog_version for command in commands]
    assert versions == sorted(versions)
    for cut in range(len(commands) + 1):  # the rest comes the next time
        late = Partition(0)
        for command in commands[:cut]:
            late.take(command)
        await late.catch_up(directory)
        assert late.known_definitions() == {
            entry.name: (entry.properties, tuple(each.properties for each in entry.rules))
            for entry in directory.entries()
        }


async def test_a_topic_deleted_meanwhile_goes_after_its_subscriptions(store: Store) -> None:
    directory, (partition,) = await open_directory(CatalogStore(store), 1)
    topic = await put_topic(directory, "events", TOPIC)
    for name in "abcdefgh":
        await put_subscription(directory, "events", name, SUBSCRIPTION)
    partition.is_loaded = False
    await directory.delete("events")
    copies = {number: put.catalog_version for number, put in partition.known.items()}
    gone = await directory.catalog.catch_up(0, copies, partition.version, was_ours=True)
    commands = directory.catalog.missing(0, set(copies), partition.version, gone)
    numbers = [command.entity_no for command in commands]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == topic.entity_no


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "queue",
                "topic",
                "subscription",
                "delete",
                "retain",
                "restore",
                "purge",
                "add_rule",
                "remove_rule",
                "unload",
                "load",
            ]
        ),
        st.integers(0, 2),
        st.integers(1, 3),
        st.sampled_from(["", "", "", "loses_write", "loses_answer"]),
    ),
    min_size=5,
    max_size=30,
)


@given(STEPS)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_memory_partitions_and_tables_agree_after_any_loss(
    database: str, steps: list[tuple[str, int, int, str]]
) -> None:
    asyncio.run(take_steps(database, steps))


async def take_steps(database: str, steps: list[tuple[str, int, int, str]]) -> None:
    store = Store(database)
    async with store.aside() as connection:
        await connection.execute("delete from postbus.catalog")
    catalog = LossyCatalog(store)
    directory, partitions = await open_directory(catalog, 2)
    try:
        for what, which, count, loss in steps:
            catalog.loses_write = loss == "loses_write"
            catalog.loses_answer = loss == "loses_answer"
            lost = NotWritten if loss == "loses_write" else DirectoryRefusal
            with suppress(DirectoryRefusal, lost):
                await take_step(directory, partitions, what, which, count)
        again = directory_of(CatalogStore(store), 2)
        await again.load()
        assert (directory.version, directory.entries()) == (again.version, again.entries())
        for partition in partitions:
            if not partition.is_loaded:
                await partition.catch_up(directory)
            stored = again.catalog.entries_of(partition.partition_id)
            assert sorted(directory.catalog.entries_of(partition.partition_id)) == sorted(stored)
            assert partition.definitions() == {
                entry.entity_no: (put.properties, put.rules)
                for entry, put in zip(stored, map(put_of, stored), strict=True)
            }
    finally:
        await store.close()


async def take_step(
    directory: Directory, partitions: list[Partition], what: str, which: int, count: int
) -> None:
    path = f"t{which}/Subscriptions/s"
    match what:
        case "queue":
            partitioned = QueueProperties(max_delivery_count=count, enable_partitioning=which == 2)
            await put_queue(directory, f"q{which}", partitioned)
        case "topic":
            ttl = count * 60_000
            is_partitioned = which == 2
            await put_topic(
                directory,
                f"t{which}",
                TopicProperties(default_message_ttl_ms=ttl, enable_partitioning=is_partitioned),
            )
        case "subscription":
            properties = SubscriptionProperties(max_delivery_count=count)
            await put_subscription(directory, f"t{which}", "s", properties)
        case "delete":
            await directory.delete([path, f"t{which}", f"q{which}"][count - 1])
        case "retain":
            await directory.retain([path, f"t{which}", f"q{which}"][count - 1], count * 1_000)
        case "restore":
            for partition in partitions:
                retained = [number for number, put in partition.known.items() if put.is_retained]
                for number in retained[which : which + 1]:
                    await directory.restore(number)
        case "purge":
            await directory.purge([0, 1 << 50][count % 2])
        case "add_rule":
            await directory.add_rule(path, rule(f"r{count}"))
        case "remove_rule":
            await directory.remove_rule(path, f"r{count}")
        case "unload":
            partitions[which % 2].is_loaded = False
        case "load":
            await partitions[which % 2].catch_up(directory)


# --- many at once -------------------------------------------------------------------------------


def wanted_entities() -> list[WantedEntity]:
    kind = EntityKind.SUBSCRIPTION
    return [
        WantedEntity(EntityKind.TOPIC, "t", TOPIC),
        WantedEntity(kind, "s", SUBSCRIPTION, "t"),
        WantedEntity(kind, "r", SUBSCRIPTION, "T", [rule("one"), rule("two", "n = 2")]),
        *(WantedEntity(EntityKind.QUEUE, f"q{n}", QUEUE) for n in range(9)),
        WantedEntity(
            EntityKind.QUEUE, "q9", QueueProperties(forward_to="q8", requires_session=False)
        ),
    ]


async def test_many_definitions_are_put_in_few_commits(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory, partitions = await open_directory(catalog)
    await put_queue(directory, "q8", QueueProperties(max_delivery_count=3))
    await put_queue(directory, "q0", QueueProperties(max_delivery_count=3))
    wanted = wanted_entities()
    await directory.put_all(wanted)
    entries = {entry.name: entry for entry in directory.entries()}
    assert directory.version == 2 + len(wanted)  # two are changed, the rest is new
    assert sorted(entry.version for entry in entries.values()) == list(range(3, 16))
    assert len({entry.entity_no for entry in entries.values()}) == len(entries)
    assert entries["q0"].properties == QUEUE
    assert entries["t/Subscriptions/r"].topic_no == entries["t"].entity_no
    assert names(entries["t/Subscriptions/r"].rules) == ["one", "two"]
    assert all(each.created_ms for each in entries["t/Subscriptions/r"].rules)
    assert names(entries["t/Subscriptions/s"].rules) == ["$Default"]
    again = directory_of(catalog, 4)
    await again.load()
    assert again.entries() == directory.entries()
    known = {name for each in partitions for name in each.known_definitions()}
    assert known == set(entries)
    await directory.put_all(wanted)
    assert directory.version == 15  # nothing changed


async def test_an_invalid_definition_among_many_is_named_and_not_stored(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory, _ = await open_directory(catalog)
    await put_queue(directory, "q1", QUEUE)
    wanted = [
        *wanted_entities(),
        WantedEntity(EntityKind.QUEUE, "q1", QueueProperties(requires_session=True)),
    ]
    with pytest.raises(DirectoryRefusal, match="invalid queue q1: requiresSession"):
        await directory.put_all(wanted)
    again = directory_of(catalog, 4)
    await again.load()
    assert again.entries() == directory.entries()
    assert {entry.name for entry in directory.entries()} <= {"q1", "t"}


async def test_of_many_definitions_the_last_of_a_name_counts(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory, partitions = await open_directory(catalog)
    await put_queue(directory, "known", QUEUE)
    counts = [3, 4, 5, 5]
    wanted = [
        WantedEntity(EntityKind.QUEUE, name, QueueProperties(max_delivery_count=count))
        for count in counts
        for name in ("known", "New", "new")
    ]
    await directory.put_all(wanted)
    again = directory_of(catalog, 4)
    await again.load()
    assert again.entries() == directory.entries()
    assert [entry.name for entry in again.entries()] == ["New", "known"]
    assert [entry.properties for entry in again.entries()] == [wanted[-1].properties] * 2
    assert {number for each in partitions for number in each.known} == {
        entry.entity_no for entry in again.entries()
    }


@pytest.mark.parametrize("what", ["answer", "write"])
async def test_many_definitions_with_unknown_result_are_looked_up(store: Store, what: str) -> None:
    catalog = LossyCatalog(store)
    directory, partitions = await open_directory(catalog)
    catalog.loses_answer, catalog.loses_write = what == "answer", what == "write"
    if what == "answer":
        await directory.put_all(wanted_entities())
        assert len(directory.entries()) == 13
        assert sum(len(each.known) for each in partitions) == 13
    else:
        with pytest.raises(NotWritten):
            await directory.put_all(wanted_entities())
        assert directory.entries() == []


# --- in order of name ---------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.booleans()), max_size=60))
def test_pages_of_entries_are_those_of_a_sorted_list(steps: list[tuple[int, int, bool]]) -> None:
    """After any puts, changes, deletions, retentions and restores."""
    entries = Entries()
    model: dict[int, CatalogEntry] = {}
    topic = CatalogEntry(100, "T", EntityKind.TOPIC, TOPIC, 0, 1, 1, 1)
    entries.put(topic)
    for number, what, is_below in steps:
        known = model.get(number)
        if what == 0 and known is not None:
            entries.remove(model.pop(number))
            continue
        if known is None:
            name = f"{'aBcD'[number % 4]}-{number * 7 % 13}"
            known = CatalogEntry(number, name, EntityKind.QUEUE, QUEUE, 0, 1, 1, 1)
            if is_below:
                known = known._replace(
                    name=f"T/Subscriptions/{name}",
                    kind=EntityKind.SUBSCRIPTION,
                    properties=SUBSCRIPTION,
                    topic_no=100,
                )
        model[number] = known._replace(restorable_until_ms=5 if what == 1 else None)
        entries.put(model[number])
    live = sorted(
        (entry for entry in model.values() if not entry.is_retained),
        key=lambda entry: entry.name.lower(),
    )
    queues = [entry for entry in live if entry.kind is EntityKind.QUEUE]
    below = [entry for entry in live if entry.kind is EntityKind.SUBSCRIPTION]
    for of, expected in (
        (EntityKind.QUEUE, queues),
        (EntityKind.SUBSCRIPTION, below),
        (100, below),
        (EntityKind.TOPIC, [topic]),
    ):
        assert entries.page(of, 0, 100) == expected
        assert entries.page(of, 1, 2) == expected[1:3]
    assert entries.count == len(queues) + 1
    assert sorted(entries.subscriptions_of(100)) == sorted(below)
    assert {entry.entity_no for entry in entries.retained()} == {
        number for number, entry in model.items() if entry.is_retained
    }
