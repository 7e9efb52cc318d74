"""The session of a bus: client and feed against a real broker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from postbus.client.control import RequestRefused
from postbus.contract.control import MAX_EPOCH, DeletionPolicy, EntityChanges, ProblemType
from postbus.contract.control_counts import EntityCountsPage
from postbus.contract.control_groups import CreateReaderGroup, ReaderGroupList
from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.bus.control_client import Access, BusControl
from postbus_operator.bus.entity_paths import EntityPath
from postbus_operator.bus.session import BUS_PATH, BusSessions, Periods
from postbus_operator.context import LeadershipLost
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, StillConnecting
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of
from tests.operator.live_bus import (
    Followed,
    access_to,
    advance,
    call,
    control_of,
    followed,
    leads,
    wait_until,
    was_replaced,
)
from tests.operator.objects import shown

pytestmark = pytest.mark.slow

NUMBERS = itertools.count(1)
MARK = "postbus.dev/queues/shop/orders/1"


@pytest.fixture(scope="module")
def store(postgres_server: EmbeddedPostgres) -> str:
    make_database(postgres_server, "operator_session", template=TEMPLATE)
    return dsn_of(postgres_server, "operator_session")


@pytest.fixture(scope="module")
def running(store: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledBus]:
    with controlled_bus(store, tmp_path_factory.mktemp("operator")) as bus:
        yield bus


@pytest.fixture
def queue() -> EntityPath:
    return EntityPath("queue", f"Team/orders-{next(NUMBERS)}")


# --- client -------------------------------------------------------------------------------------


async def test_a_put_has_a_mark_and_needs_absence_or_the_known_version(
    running: ControlledBus, queue: EntityPath
) -> None:
    control = control_of(running)
    made = await control.put(queue, {"maxDeliveryCount": 3}, MARK, None)
    assert made.created
    with pytest.raises(RequestRefused) as caught:
        await control.put(queue, {}, MARK, None)
    assert (caught.value.status, caught.value.type) == (412, ProblemType.ALREADY_EXISTS)
    changed = await control.put(queue, {"maxDeliveryCount": 4}, MARK, made.version)
    assert not changed.created
    with pytest.raises(RequestRefused) as caught:
        await control.put(queue, {}, MARK, made.version)
    assert (caught.value.status, caught.value.type) == (412, ProblemType.VERSION_DIFFERS)
    with pytest.raises(RequestRefused) as caught:
        await control.delete(queue, DeletionPolicy.RETAIN, made.version)
    assert caught.value.status == 412
    assert (await control.describe(queue)).managed_by == MARK
    deleted = await control.delete(queue, DeletionPolicy.RETAIN, changed.version)
    assert deleted.restorable
    assert (await control.restore(deleted.entity_id)).entity_id == made.entity_id
    await control.close()


async def test_a_put_does_not_remake_a_queue_that_was_deleted_as_idle(
    running: ControlledBus, queue: EntityPath
) -> None:
    async with followed(running, Periods(wait_s=1, pause_s=0.05)) as bus:
        control = bus.session.control
        made = await control.put(queue, {"autoDeleteOnIdle": "PT5M"}, MARK, None)
        bus.session.note_put(queue, made, MARK)
        await advance(running.caller, "PT6M")
        await wait_until(lambda: bool(bus.session.view.tombstones(queue)))
        with pytest.raises(RequestRefused) as caught:
            await control.put(queue, {"autoDeleteOnIdle": "PT10M"}, MARK, made.version)
        assert (caught.value.status, caught.value.type) == (412, ProblemType.NOT_FOUND)
        await bus.session.catch_up()
        [stone] = bus.session.view.tombstones(queue)
        assert (stone.reason, stone.mark, stone.entity_id) == ("idle", MARK, made.entity_id)
        assert stone.restorable_until is None


async def test_a_bus_that_saw_a_later_leader_ends_leadership(
    store: str, tmp_path: Path, postgres_server: EmbeddedPostgres, queue: EntityPath
) -> None:
    make_database(postgres_server, "operator_epoch", template=TEMPLATE)
    with controlled_bus(dsn_of(postgres_server, "operator_epoch"), tmp_path) as running:
        former, later = control_of(running, 7, was_replaced), control_of(running, epoch=8)
        await former.put(queue, {}, MARK, None)
        await later.put(EntityPath("queue", "of-the-later"), {}, MARK, None)
        with pytest.raises(LeadershipLost, match="epoch 7 is outdated"):
            await former.put(queue, {"maxDeliveryCount": 3}, MARK, 1)
        assert (await former.describe(queue)).managed_by == MARK
        await former.close()
        await later.close()


async def test_the_leader_by_the_lease_keeps_leading_whatever_a_bus_says(
    running: ControlledBus, queue: EntityPath
) -> None:
    asked = 0

    async def still_leads() -> bool:
        nonlocal asked
        asked += 1
        return True

    leader = control_of(running, 9, still_leads)
    await leader.put(queue, {}, MARK, None)
    assert asked == 0
    other = control_of(running, MAX_EPOCH)
    await other.put(EntityPath("queue", "of-another-cluster"), {}, MARK, None)
    try:
        with pytest.raises(BackendUnavailable, match=r"epoch 9 is outdated.*caller-epoch"):
            await leader.put(queue, {"maxDeliveryCount": 3}, MARK, None)
        assert asked == 1
    finally:
        await call(lambda: running.caller.delete("/v1/caller-epoch"))
    version = (await leader.describe(queue)).version
    await leader.put(queue, {"maxDeliveryCount": 3}, MARK, version)
    await call(lambda: running.caller.delete("/v1/caller-epoch"))
    await leader.close()
    await other.close()


async def test_a_changed_token_is_read_again(running: ControlledBus, queue: EntityPath) -> None:
    tokens = ["of-yesterday", running.caller.token]

    async def read_access() -> Access:
        return Access(running.caller.address, tokens.pop(0))

    control = BusControl(read_access, 1, leads)
    assert (await control.put(queue, {}, MARK, None)).created
    assert tokens == []
    await control.close()


async def test_a_token_that_stays_wrong_is_an_outage_without_the_token(
    running: ControlledBus,
) -> None:
    async def read_access() -> Access:
        return Access(running.caller.address, "a-wrong-token-of-the-test")

    control = BusControl(read_access, 1, leads)
    with pytest.raises(BackendUnavailable, match="refuses the operator") as caught:
        await control.status()
    assert "a-wrong-token" not in repr(caught.value)
    assert "a-wrong-token" not in repr(await read_access())
    await control.close()


# --- feed ---------------------------------------------------------------------------------------


async def test_changes_of_others_are_reported_and_own_ones_are_not(
    running: ControlledBus, queue: EntityPath
) -> None:
    other = f"other-{next(NUMBERS)}"
    async with followed(running, Periods(wait_s=1, counts_s=600)) as bus:
        await wait_until(lambda: len(bus.moved) > 1)  # the first counts
        assert bus.moved.pop(0) is None
        bus.moved.clear()
        made = await bus.session.control.put(queue, {}, MARK, None)
        bus.session.note_put(queue, made, MARK)
        await call(lambda: running.caller.put(path_of("queues", other), {"maxDeliveryCount": 2}))
        await wait_until(lambda: other in bus.paths())
        assert bus.paths() == {other}
        live = bus.session.view.find(queue.name.upper())
        assert live is not None
        assert (live.entity_id, live.mark, live.version) == (made.entity_id, MARK, made.version)
        await call(lambda: running.caller.delete(path_of("queues", queue.name)))
        await wait_until(lambda: bus.session.view.find(queue.name) is None)
        assert queue.name.lower() in bus.paths()


async def test_subscriptions_of_a_topic_are_counted(running: ControlledBus) -> None:
    name = f"events-{next(NUMBERS)}"
    one, two = (path_of("topics", name, "subscriptions", each) for each in ("one", "two"))
    async with followed(running) as bus:
        for path in (path_of("topics", name), one, two):
            await call(lambda path=path: running.caller.put(path, {}))  # type: ignore[misc]
        await wait_until(lambda: bus.session.view.subscription_count(name) == 2)
        await call(lambda: running.caller.delete(one))
        await wait_until(lambda: bus.session.view.subscription_count(name) == 1)
        await call(lambda: running.caller.delete(path_of("topics", name)))
        await wait_until(lambda: bus.session.view.find(name) is None)
        assert bus.session.view.subscription_count(name) == 0


async def test_counts_are_reported_when_they_move(
    running: ControlledBus, queue: EntityPath
) -> None:
    async with followed(running) as bus:
        made = await bus.session.control.put(queue, {}, MARK, None)
        # Until the partition of the new queue has loaded, its counts are unknown.
        await wait_until(lambda: message_count(bus, made.entity_id) == 0)
        await call(lambda: send(running, queue.name))
        await wait_until(lambda: message_count(bus, made.entity_id) == 1)


async def test_a_bus_is_asked_for_counts_only_when_they_have_moved(
    running: ControlledBus, queue: EntityPath
) -> None:
    async with followed(running) as bus:
        asked = 0
        polls = 0
        control = bus.session.control
        counts, changes = control.counts, control.changes

        async def noted_counts(since: str) -> EntityCountsPage:
            nonlocal asked
            asked += 1
            return await counts(since)

        async def noted_changes(since: int, begun: int, wait_s: int = 0) -> EntityChanges:
            nonlocal polls
            found = await changes(since, begun, wait_s)
            polls += 1
            return found

        made = await control.put(queue, {}, MARK, None)
        await wait_until(lambda: message_count(bus, made.entity_id) == 0)
        control.changes = noted_changes  # type: ignore[method-assign]
        await wait_until(lambda: polls == 2)  # what was under way has ended
        control.counts = noted_counts  # type: ignore[method-assign]
        await wait_until(lambda: polls == 4)
        assert asked == 0
        await call(lambda: send(running, queue.name))
        await wait_until(lambda: message_count(bus, made.entity_id) == 1)
        assert asked > 0


def send(running: ControlledBus, queue: str) -> None:
    with ServiceBusClient.from_connection_string(running.connection_string) as client:
        client.get_queue_sender(queue).send_messages(ServiceBusMessage("a"))


def message_count(bus: Followed, entity_id: int) -> int | None:
    counts = bus.session.counts_of(entity_id)
    return None if counts is None else counts.message_count


async def test_looks_at_reader_groups_share_a_list_unless_they_need_a_fresh_one(
    running: ControlledBus, queue: EntityPath
) -> None:
    async with followed(running, Periods(wait_s=1, groups_s=3_600)) as bus:
        session, control, requests = bus.session, bus.session.control, 0
        listed = control.reader_groups

        async def counted() -> ReaderGroupList:
            nonlocal requests
            requests += 1
            return await listed()

        control.reader_groups = counted  # type: ignore[method-assign]
        await control.put(queue, {}, MARK, None)
        looks = [session.reader_groups(is_fresh=False) for _ in range(10)]
        assert all(each.items == [] for each in await asyncio.gather(*looks))
        assert requests == 1
        await control.create_reader_group(CreateReaderGroup(entity=queue.name, name="lake"))
        assert (await session.reader_groups(is_fresh=False)).items == []
        [found] = (await session.reader_groups(is_fresh=True)).items
        assert (found.name, requests) == ("lake", 2)
        assert (await session.reader_groups(is_fresh=False)).items == [found]
        assert requests == 2
        assert 0.8 * 3_600 <= session.next_groups_s() <= 1.2 * 3_600


async def test_counts_that_a_bus_refused_are_asked_for_again(
    running: ControlledBus, queue: EntityPath
) -> None:
    async with followed(running) as bus:
        control, refusals = bus.session.control, 2
        counts = control.counts

        async def refused(since: str) -> EntityCountsPage:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise BackendUnavailable("no partition is available")
            return await counts(since)

        control.counts = refused  # type: ignore[method-assign]
        made = await control.put(queue, {}, MARK, None)
        await wait_until(lambda: message_count(bus, made.entity_id) == 0)
        assert refusals == 0


async def test_a_bus_of_a_former_version_is_asked_for_counts_each_time(
    running: ControlledBus,
) -> None:
    """Its answers do not say whether they have moved."""
    async with followed(running) as bus:
        control, asked = bus.session.control, 0
        counts, changes = control.counts, control.changes

        async def former(since: int, begun: int, wait_s: int = 0) -> EntityChanges:
            found = await changes(since, begun, wait_s)
            return found.model_copy(update={"counts_cursor": None})

        async def noted(since: str) -> EntityCountsPage:
            nonlocal asked
            asked += 1
            return await counts(since)

        control.changes, control.counts = former, noted  # type: ignore[method-assign]
        await wait_until(lambda: asked == 2)


async def test_a_bus_is_looked_at_when_it_has_other_entities(
    running: ControlledBus, queue: EntityPath
) -> None:
    """Its own changes wake no entity, but the Namespace shows how many there are."""
    async with followed(running) as bus:
        await wait_until(lambda: len(bus.moved) > 1)  # the first counts
        assert BUS_PATH not in bus.paths()
        made = await bus.session.control.put(queue, {}, MARK, None)
        bus.session.note_put(queue, made, MARK)
        await wait_until(lambda: BUS_PATH in bus.paths())


# --- outages ------------------------------------------------------------------------------------


async def test_a_restarted_broker_is_listed_again_and_nothing_moves(
    postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    make_database(postgres_server, "operator_restart", template=TEMPLATE)
    database = dsn_of(postgres_server, "operator_restart")
    with controlled_bus(database, tmp_path) as running:
        for name in ("a", "b"):
            running.caller.put(path_of("queues", name), {})
        following = followed(running, Periods(wait_s=1, counts_s=600, pause_s=0.05, outage_s=600))
        bus = await following.__aenter__()
        await wait_until(lambda: len(bus.moved) > 1)  # the first counts
        known = bus.session.view
    bus.moved.clear()
    with controlled_bus(database, tmp_path) as again:
        bus.running = again
        await wait_until(lambda: bus.session.list_count == 2)
        assert bus.moved == [set()]
        assert bus.session.view.find("a") == known.find("a")
        await following.__aexit__(None, None, None)


async def test_an_outage_has_a_reason_and_another_store_is_another_bus(
    postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    for name in ("operator_one", "operator_two"):
        make_database(postgres_server, name, template=TEMPLATE)
    with controlled_bus(dsn_of(postgres_server, "operator_one"), tmp_path / "one") as running:
        running.caller.put(path_of("queues", "kept"), {})
        following = followed(running)
        bus = await following.__aenter__()
    await wait_until(lambda: bus.session.trouble is not None)
    assert "the control API: " in (bus.session.trouble or "")
    with controlled_bus(dsn_of(postgres_server, "operator_two"), tmp_path / "two") as other:
        other.caller.put(path_of("queues", "new"), {})
        bus.running = other
        await wait_until(lambda: bus.session.trouble is None)
        assert None in bus.moved[1:]
        assert bus.session.view.find("kept") is None
        assert bus.session.view.find("new") is not None
        await following.__aexit__(None, None, None)


async def test_a_feed_that_is_too_old_is_listed_again(
    running: ControlledBus, queue: EntityPath
) -> None:
    async with followed(running) as bus:
        made = await bus.session.control.put(queue, {}, MARK, None)
        bus.session.view.version = made.version + 1_000_000  # as after a restore of the store
        before = bus.session.list_count
        await wait_until(lambda: bus.session.list_count > before)
        live = bus.session.view.find(queue.name)
        assert live is not None
        assert live.entity_id == made.entity_id
        assert bus.session.view.version < 1_000_000


async def test_a_bus_that_somebody_asks_for_is_tried_again_at_once(
    running: ControlledBus,
) -> None:
    attempts = 0

    async def read_access() -> Access:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise BackendUnavailable("a Secret of the bus is not there yet")
        return access_to(running)

    bus = Resource.from_object("Namespace", shown("Namespace", "bus", spec={}))
    patient = Periods(wait_s=1, pause_s=600)
    buses = BusSessions(
        lambda bus: read_access(), 1, leads, lambda bus: True, lambda bus, paths: None, patient
    )
    assert await buses.of(bus) is None
    assert "Secret" in str(buses.failure_of(bus))
    async with asyncio.timeout(10):
        while await buses.of(bus) is None:
            await asyncio.sleep(0)
    assert attempts == 2
    await buses.close()


@pytest.mark.parametrize(
    ("outage_s", "expected"), [(600.0, StillConnecting), (0.0, BackendUnavailable)]
)
async def test_a_bus_that_never_answered_is_away_only_after_the_time_of_an_outage(
    outage_s: float, expected: type[BackendUnavailable]
) -> None:
    async def read_access(_bus: Resource) -> Access:
        raise BackendUnavailable("the database is away")

    bus = Resource.from_object("Namespace", shown("Namespace", "bus", spec={}))
    periods = Periods(wait_s=1, pause_s=600, outage_s=outage_s)
    buses = BusSessions(read_access, 1, leads, lambda _: True, lambda *_: None, periods)
    assert await buses.of(bus) is None
    failure = buses.failure_of(bus)
    assert (type(failure), str(failure)) == (expected, "the database is away")
    await buses.close()


async def test_a_session_ends_with_its_bus(running: ControlledBus) -> None:
    async with followed(running) as bus:
        bus.session._is_wanted = lambda: False  # type: ignore[method-assign]
        tasks = [each for each in asyncio.all_tasks() if "BusSession.run" in repr(each)]
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks)
