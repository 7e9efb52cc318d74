"""Definitions at run time: requests and changes of the edge, and their results (ATOM, control)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from postbus.broker.administration import (
    Availability,
    DeletePolicy,
    EntityDescription,
    PutMode,
)
from postbus.broker.catalog.preconditions import UNCONDITIONAL, DirectoryRefusal, Precondition
from postbus.broker.partition.activity import SAMPLES, Activity, Rates
from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import (
    EntityKind,
    EntityStatus,
    QueueProperties,
    RuleProperties,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import ReceiveMode, Refusal
from postbus.store.catalog import CatalogStore
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from tests.broker.administration_rig import administered, refusal_of
from tests.broker.partition.test_host import until
from tests.broker.partition_rig import manual_clock, message, spread
from tests.broker.putting import EXISTING, NEW, a_queue, a_subscription, a_topic, put_queue

pytestmark = pytest.mark.slow

CREATE, UPDATE = PutMode.CREATE, PutMode.UPDATE
QUEUE, TOPIC, SUBSCRIPTION = QueueProperties(), TopicProperties(), SubscriptionProperties()


def of_version(entity: EntityDescription) -> Precondition:
    return Precondition(UPDATE, frozenset({entity.version}))


def rule(name: str, text: str = "1=1") -> RuleProperties:
    return RuleProperties(name=name, sql_filter=SqlFilter(sql_expression=text))


# --- definitions --------------------------------------------------------------------------------


async def test_modes_decide_whether_an_entity_must_exist(store: Store) -> None:
    async with administered(store) as (administration, _):
        assert await refusal_of(administration.put(a_queue("q", QUEUE), EXISTING)) is (
            Refusal.ENTITY_NOT_FOUND
        )
        made = await administration.put(a_queue("Orders", QUEUE), NEW)
        assert (made.name, made.kind, made.version) == ("Orders", EntityKind.QUEUE, 1)
        assert made.created_ms == made.updated_ms > 0
        assert administration.version == 1
        for taken in (
            administration.put(a_queue("orders", QUEUE), NEW),
            administration.put(a_topic("orders", TOPIC), UNCONDITIONAL),
            administration.put(a_topic("orders", TOPIC), EXISTING),
        ):
            assert await refusal_of(taken) is Refusal.ALREADY_EXISTS
        changed = await administration.put(
            a_queue("ORDERS", QueueProperties(lock_duration_ms=5_000, user_metadata="a note")),
            EXISTING,
        )
        assert (changed.name, changed.entity_no, changed.version) == ("Orders", made.entity_no, 2)
        found = administration.find("/oRDERs")
        assert found == changed
        assert isinstance(found.properties, QueueProperties)
        assert found.properties.user_metadata == "a note"
        assert (await administration.put(a_queue("orders", QUEUE), UNCONDITIONAL)).version == 3
        assert (await administration.put(a_queue("orders", QUEUE), UNCONDITIONAL)).version == 3


async def test_a_change_of_another_version_is_a_conflict(store: Store) -> None:
    async with administered(store) as (administration, _):
        made = await administration.put(a_queue("q", QUEUE), NEW)
        first = await administration.put(
            a_queue("q", QueueProperties(max_delivery_count=3)), of_version(made)
        )
        late = administration.put(
            a_queue("q", QueueProperties(max_delivery_count=4)), of_version(made)
        )
        assert await refusal_of(late) is Refusal.CONFLICT
        deleted = administration.delete("q", condition=of_version(made))
        assert await refusal_of(deleted) is Refusal.CONFLICT
        assert administration.find("q") == first
        await administration.delete("q", condition=of_version(first))
        assert administration.find("q") is None
        gone = administration.put(a_queue("q", QUEUE), of_version(first))
        assert await refusal_of(gone) is Refusal.ENTITY_NOT_FOUND


async def test_of_two_changes_of_one_version_one_wins(store: Store) -> None:
    async with administered(store) as (administration, _):
        made = await administration.put(a_queue("q", QUEUE), NEW)
        changes = [
            administration.put(
                a_queue("q", QueueProperties(max_delivery_count=count)),
                of_version(made),
            )
            for count in range(2, 10)
        ]
        results = await asyncio.gather(*changes, return_exceptions=True)
        refused = [each for each in results if isinstance(each, DirectoryRefusal)]
        assert len(refused) == 7
        assert {each.refused.refusal for each in refused} == {Refusal.CONFLICT}


@pytest.mark.behaviour("S150")
async def test_changes_of_fixed_properties_are_refused_by_name(store: Store) -> None:
    async with administered(store) as (administration, _):
        await administration.put(a_queue("q", QUEUE), NEW)
        await administration.put(a_topic("t", TOPIC), NEW)
        await administration.put(a_subscription("t", "s", SUBSCRIPTION), NEW)
        for name, work in (
            ("enablePartitioning", administration.put(a_queue("q", spread()), EXISTING)),
            (
                "requiresSession",
                administration.put(
                    a_queue("q", QueueProperties(requires_session=True)), UNCONDITIONAL
                ),
            ),
            (
                "requiresDuplicateDetection",
                administration.put(
                    a_topic("t", TopicProperties(requires_duplicate_detection=True)), EXISTING
                ),
            ),
            (
                "requiresSession",
                administration.put(
                    a_subscription("t", "s", SubscriptionProperties(requires_session=True)),
                    EXISTING,
                ),
            ),
        ):
            with pytest.raises(DirectoryRefusal, match=name) as caught:
                await work
            assert caught.value.refused.refusal is Refusal.NOT_ALLOWED
        assert administration.version == 3


async def test_rules_are_put_and_deleted_and_keep_their_time(store: Store) -> None:
    async with administered(store) as (administration, _):
        await administration.put(a_topic("t", TOPIC), NEW)
        await administration.put(a_subscription("t", "s", SUBSCRIPTION), NEW)
        path = "T/subscriptions/S"
        made = await administration.put_rule(path, rule("red", "color = 'red'"), mode=CREATE)
        assert made.created_ms > 0
        again = administration.put_rule(path, rule("RED"), mode=CREATE)
        assert await refusal_of(again) is Refusal.ALREADY_EXISTS
        missing = administration.put_rule(path, rule("blue"), mode=UPDATE)
        assert await refusal_of(missing) is Refusal.ENTITY_NOT_FOUND
        broken = administration.put_rule(path, rule("red", "color =="), mode=UPDATE)
        assert await refusal_of(broken) is Refusal.ARGUMENT_OUT_OF_RANGE
        changed = await administration.put_rule(path, rule("red", "color = 'r'"), mode=UPDATE)
        assert changed.created_ms == made.created_ms
        await administration.delete_rule(path, "$default")
        assert await refusal_of(administration.delete_rule(path, "$Default")) is (
            Refusal.ENTITY_NOT_FOUND
        )
        found = administration.find(path)
        assert found is not None
        assert found.rules == (changed,)
        assert found.name == "t/Subscriptions/s"
        whole = await administration.put(
            a_subscription("t", "s", SUBSCRIPTION, [rule("red", "1=0"), rule("new")]), EXISTING
        )
        assert [each.created_ms == made.created_ms for each in whole.rules] == [True, False]


async def test_pages_are_in_order_of_name(store: Store) -> None:
    async with administered(store) as (administration, _):
        for name in ("b", "A", "c", "B2"):
            await administration.put(a_queue(name, QUEUE), NEW)
        for topic in ("t", "u"):
            await administration.put(a_topic(topic, TOPIC), NEW)
            for name in ("two", "One"):
                await administration.put(a_subscription(topic, name, SUBSCRIPTION), NEW)

        def names(*requested: Any, **page: int) -> list[str]:
            return [each.name for each in administration.listed(*requested, **page)]

        assert names(EntityKind.QUEUE) == ["A", "b", "B2", "c"]
        assert names(EntityKind.QUEUE, skip=1, top=2) == ["b", "B2"]
        assert names(EntityKind.QUEUE, skip=4) == []
        assert names(EntityKind.TOPIC) == ["t", "u"]
        subscriptions = ["u/Subscriptions/One", "u/Subscriptions/two"]
        assert names(EntityKind.SUBSCRIPTION, "U") == subscriptions
        assert names(EntityKind.SUBSCRIPTION)[2:] == subscriptions
        with pytest.raises(DirectoryRefusal, match="no topic"):
            administration.listed(EntityKind.SUBSCRIPTION, "b")
        await administration.delete("b")
        await administration.delete("u")
        assert names(EntityKind.QUEUE) == ["A", "B2", "c"]
        assert len(names(EntityKind.SUBSCRIPTION)) == 2
        await administration.put(a_topic("u", TOPIC), NEW)
        assert names(EntityKind.SUBSCRIPTION, "u") == []


# --- disconnects and store failures -------------------------------------------------------------


class SlowCatalog(CatalogStore):
    """The real catalog; a write waits until it is released."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def put_all(self, *given: Any) -> Any:
        self.begun.set()
        await self.goes_on.wait()
        return await super().put_all(*given)


async def test_a_client_that_hangs_up_does_not_stop_a_change(store: Store) -> None:
    async with administered(store) as (administration, bus):
        catalog = SlowCatalog(store)
        bus.directory.catalog.store = catalog
        await bus.load()
        request = asyncio.create_task(administration.put(a_queue("q", QUEUE), NEW))
        await catalog.begun.wait()
        request.cancel()
        await asyncio.wait([request])
        assert request.cancelled()
        catalog.goes_on.set()
        while administration.find("q") is None:
            await asyncio.sleep(0)
        assert await refusal_of(administration.put(a_queue("q", QUEUE), NEW)) is (
            Refusal.ALREADY_EXISTS
        )
        assert (await bus.sent(bus.address("q"), message("x"))) == [1]


async def test_a_change_that_a_stop_cuts_short_is_answered_without_a_guess(store: Store) -> None:
    started: list[asyncio.Task[object]] = []

    def start(work: Coroutine[object, object, None]) -> None:
        started.append(asyncio.create_task(work))

    async with administered(store, start=start) as (administration, _):
        request = asyncio.create_task(administration.put(a_queue("q", QUEUE), NEW))
        while not started:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        started[0].cancel()
        async with asyncio.timeout(5):
            assert await refusal_of(request) is Refusal.UNKNOWN


class AwayCatalog(CatalogStore):
    async def put_all(self, *given: Any) -> Any:
        raise StoreUnavailable("no route")


async def test_an_unavailable_store_refuses_changes(store: Store) -> None:
    async with administered(store) as (administration, bus):
        bus.directory.catalog.store = AwayCatalog(store)
        assert await refusal_of(administration.put(a_queue("q", QUEUE), NEW)) is (
            Refusal.NOT_APPLIED
        )
        assert administration.find("q") is None


class BrokenCatalog(CatalogStore):
    async def put_all(self, *given: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")


async def test_a_failure_before_the_write_is_not_applied(store: Store) -> None:
    async with administered(store) as (administration, bus):
        bus.directory.catalog.store = BrokenCatalog(store)
        made = administration.put(a_queue("q", QUEUE), NEW)
        assert await refusal_of(made) is Refusal.NOT_APPLIED
        assert administration.find("q") is None


async def test_a_failure_after_the_commit_is_unknown_and_logged(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_entity_no: int) -> None:
        raise ZeroDivisionError("a mistake of ours")

    async with administered(store) as (administration, bus):
        await administration.put(a_queue("q", QUEUE), NEW)
        bus.directory.on_deletion(broken)
        assert await refusal_of(administration.delete("q")) is Refusal.UNKNOWN
        assert administration.find("q") is None
    assert any(each.exc_info and each.levelname == "ERROR" for each in caplog.records)


# --- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("properties", [QUEUE, spread()])
async def test_counts_are_exact_and_load_unloaded_partitions(
    store: Store, properties: QueueProperties
) -> None:
    async with administered(store) as (administration, bus):
        await administration.put(a_queue("q", properties), NEW)
        await bus.sent(bus.address("q"), *(message(f"{n}") for n in range(10)))
        used = await administration.runtime("q")
        assert used.accessed_ms is not None
    async with administered(store) as (administration, bus):
        assert not any(host.is_loaded for host in bus.hosts)
        found = await administration.runtime("Q")
        assert (found.active, found.dead_letter, found.scheduled) == (10, 0, 0)
        assert found.size_bytes > 0
        assert found.accessed_ms == used.accessed_ms
        assert found.availability is Availability.AVAILABLE
        loaded = sum(host.is_loaded for host in bus.hosts)
        assert loaded == (4 if properties.enable_partitioning else 1)
        assert await refusal_of(administration.runtime("r")) is Refusal.ENTITY_NOT_FOUND


async def test_a_topic_counts_its_subscriptions(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await administration.put(a_topic("t", TOPIC), NEW)
        for name in ("a", "b"):
            await administration.put(a_subscription("t", name, SUBSCRIPTION), NEW)
        await bus.sent(bus.address("t"), message("x"))
        assert (await administration.runtime("t")).subscription_count == 2
        assert (await administration.runtime("t")).active == 0
        assert (await administration.runtime("t/Subscriptions/a")).active == 1


@pytest.mark.parametrize("properties", [QUEUE, spread()])
async def test_rates_are_those_of_the_last_samples(
    store: Store, properties: QueueProperties
) -> None:
    now_s = 100.0
    async with administered(store) as (administration, bus):
        activity = administration.activity = Activity(bus.hosts, lambda: now_s)
        await administration.put(a_queue("q", properties), NEW)
        assert (await administration.traffic("q")).rates is None
        queue = bus.address("q")
        await bus.sent(queue, *(message(f"{n}") for n in range(40)))
        _, sink = await bus.consume(queue, 10, ReceiveMode.RECEIVE_AND_DELETE)
        await until(lambda: len(sink.deliveries) == 10)
        now_s += 2.0
        assert (await administration.traffic("Q")).rates == Rates(20.0, 5.0, 5.0)
        for _ in range(SAMPLES - 1):
            now_s += 5.0
            activity.sample()
        await bus.sent(queue, message("x"), message("y"))
        now_s += 5.0
        found = (await administration.traffic("q")).rates
        assert found is not None
        assert found.accepted == pytest.approx(42 / 17)
        activity.sample()
        found = (await administration.traffic("q")).rates
        assert found == Rates(2 / 10, 0.0, 0.0)


@pytest.mark.parametrize("properties", [QUEUE, spread()])
async def test_age_of_the_oldest_message_is_known_without_its_row_in_memory(
    store: Store, properties: QueueProperties
) -> None:
    async with administered(store) as (administration, bus):
        await administration.put(a_queue("q", properties), NEW)
        assert (await administration.traffic("q")).oldest_age_s is None
        await bus.sent(bus.address("q"), *(message(f"{n}") for n in range(10)))
    clock = manual_clock()
    async with administered(store, clock=clock) as (administration, _):
        await administration.runtime("q")
        clock.advance(90_000)
        found = (await administration.traffic("q")).oldest_age_s
        assert found is not None
        assert 90.0 <= found < 120.0
        assert await refusal_of(administration.traffic("r")) is Refusal.ENTITY_NOT_FOUND


async def test_messages_in_the_outbox_are_counted_as_transfer(store: Store) -> None:
    async with administered(store, partition_count=2) as (administration, bus):
        names = {bus.directory.homes_of(entry)[0]: entry.name for entry in [
            await put_queue(bus.directory, f"q{n}", QUEUE) for n in range(8)
        ]}  # fmt: skip
        source, target = names[0], names[1]
        await administration.put(
            a_queue(source, QueueProperties(forward_to=target, status=EntityStatus.ACTIVE)),
            EXISTING,
        )
        await bus.load()
        bus.hosts[1].interrupt(30)
        await bus.sent(bus.address(source), *(message(f"{n}") for n in range(5)))
        found = await administration.runtime(source)
        assert (found.active, found.transfer) == (0, 5)


async def test_counts_of_an_unavailable_store_are_refused_in_time(store: Store) -> None:
    async with administered(store, loading_s=0.2) as (administration, bus):
        await administration.put(a_queue("q", QUEUE), NEW)
        for host in bus.hosts:
            host.interrupt(60)
        assert await refusal_of(administration.runtime("q")) is Refusal.NOT_APPLIED


async def test_counts_leave_out_unavailable_partitions(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await administration.put(a_queue("q", spread()), NEW)
        await bus.sent(bus.address("q"), *(message(key=f"{n}") for n in range(40)))
        kept = [host.counts(bus.address("q").entity_no) for host in bus.hosts]
    async with administered(store, loading_s=1.0) as (administration, bus):
        for host in bus.hosts[2:]:
            host.interrupt(60)
        for _ in range(2):  # they were to be loaded, and then were known to be away
            found = await administration.runtime("q")
            assert found.active == sum(counts.active for counts in kept[:2] if counts is not None)
            assert found.availability is Availability.LIMITED
            assert found.unavailable_partitions == (2, 3)
        work = administration.delete("q", policy=DeletePolicy.DELETE_IF_EMPTY)
        assert await refusal_of(work) is Refusal.NOT_APPLIED


# --- counts of parts ----------------------------------------------------------------------------


async def test_partitions_acknowledge_a_version(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await bus.load()
        made = await administration.put(a_queue("q", spread()), NEW)
        assert administration.acknowledged() == dict.fromkeys(range(4), made.version)
        gate = asyncio.Event()
        home = bus.hosts[2]
        call = home.call

        async def late(command: Any) -> Any:
            await gate.wait()
            return await call(command)

        home.call = late  # type: ignore[method-assign]
        changing = asyncio.create_task(
            administration.put(a_queue("q", spread(max_delivery_count=3)), EXISTING)
        )
        while administration.version == made.version:
            await asyncio.sleep(0)
        assert administration.acknowledged()[2] == made.version
        gate.set()
        await changing
        assert administration.acknowledged() == dict.fromkeys(range(4), made.version + 1)


# --- guarantees for definitions -----------------------------------------------------------------


@pytest.mark.behaviour("S92", "S93", "S266", "S267", "S277")
async def test_defaults_and_changes_are_read_back(store: Store) -> None:
    async with administered(store) as (administration, _):
        for made in (
            await administration.put(a_queue("q", QUEUE), NEW),
            await administration.put(a_topic("t", TOPIC), NEW),
            await administration.put(a_subscription("t", "s", SUBSCRIPTION), NEW),
        ):
            properties = made.properties
            assert properties.default_message_ttl_ms == MAX_DURATION_MS
            if not isinstance(properties, TopicProperties):
                assert properties.max_delivery_count == 10
                assert not properties.dead_lettering_on_message_expiration
            assert administration.find(made.name) == made
        given = QueueProperties(default_message_ttl_ms=5_000)
        await administration.put(a_queue("short", given), NEW)
        longer = QueueProperties(default_message_ttl_ms=6_000)
        await administration.put(a_queue("short", longer), EXISTING)
        found = administration.find("short")
        assert found is not None
        assert found.properties.default_message_ttl_ms == 6_000


@pytest.mark.behaviour("S242", "S243")
@pytest.mark.parametrize("below", ["/$DeadLetterQueue", "/$Transfer/$DeadLetterQueue"])
async def test_dead_letter_queues_cannot_be_managed(store: Store, below: str) -> None:
    async with administered(store) as (administration, _):
        await administration.put(a_queue("q", QUEUE), NEW)
        for policy in DeletePolicy:
            refused = administration.delete(f"q{below}", policy=policy)
            assert await refusal_of(refused) is Refusal.NOT_ALLOWED
        for mode in PutMode:
            refused_put = administration.put(a_queue(f"q{below}", QUEUE), Precondition(mode))
            assert await refusal_of(refused_put) is Refusal.ARGUMENT_OUT_OF_RANGE
        assert administration.find(f"q{below}") is None
        assert administration.find("q") is not None
