"""The Lease has one holder, and each holder a higher epoch than those before it."""

from __future__ import annotations

import asyncio
import random
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from kubernetes.aio.client import Configuration

from postbus_operator.context import LeadershipLost
from postbus_operator.kube.api import Api
from postbus_operator.kube.resource_types import LEASES
from postbus_operator.leader import TRANSITIONS, Elector, LeaseTimes, epoch_of
from tests.kube.api_server import ApiServer
from tests.kube.clients import api_of, configuration_of

PLACE = "default"
RETRY_S = 0.5


@dataclass
class Clock:
    """A clock that stands still unless it is moved."""

    seconds: float = 1_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
async def api(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    async with api_of(await configuration_of(server, monkeypatch)) as api:
        yield api


@pytest.fixture
def lease(server: ApiServer) -> str:
    return f"lease-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def elector(api: Api, lease: str, clock: Clock, identity: str, *, duration_s: int = 15) -> Elector:
    times = LeaseTimes(duration_s, 10, RETRY_S, monotonic=clock, now=lambda: datetime.now(UTC))
    return Elector(api, PLACE, lease, identity, times, random.Random(1))


async def acquired(elector: Elector) -> int:
    async with asyncio.timeout(20):
        return await elector.acquire()


async def still_waits(task: asyncio.Task[int], elector: Elector, clock: Clock) -> bool:
    """Whether a standby has asked twice more, and does not lead."""
    for _ in range(2):
        before, clock.seconds = elector.answered_at, clock.seconds + 0.001
        while elector.answered_at <= before and not task.done():
            await wait_a_little()
    return not task.done()


async def wait_a_little() -> None:
    await asyncio.sleep(0.01)


async def test_a_standby_takes_over_when_the_lease_did_not_change_for_its_duration(
    api: Api, lease: str, clock: Clock
) -> None:
    first = await acquired(elector(api, lease, clock, "a"))
    standby = elector(api, lease, clock, "b")
    waiting = asyncio.create_task(standby.acquire())
    assert await still_waits(waiting, standby, clock)
    clock.seconds += 14
    assert await still_waits(waiting, standby, clock)
    clock.seconds += 1
    async with asyncio.timeout(20):
        second = await waiting
    assert second == first + 1
    found = await api.get(LEASES, PLACE, lease)
    assert found["spec"]["holderIdentity"] == "b"
    assert second == epoch_of(found)


async def test_a_standby_waits_for_the_duration_of_the_holder(
    api: Api, lease: str, clock: Clock
) -> None:
    """During an upgrade the two may have other settings."""
    await acquired(elector(api, lease, clock, "a", duration_s=60))
    standby = elector(api, lease, clock, "b")
    waiting = asyncio.create_task(standby.acquire())
    assert await still_waits(waiting, standby, clock)
    clock.seconds += 59
    assert await still_waits(waiting, standby, clock)
    clock.seconds += 1
    async with asyncio.timeout(20):
        await waiting


async def test_a_holder_that_renews_keeps_the_lease(api: Api, lease: str, clock: Clock) -> None:
    leader, standby = (elector(api, lease, clock, each) for each in "ab")
    await acquired(leader)
    holding = asyncio.create_task(leader.hold())
    waiting = asyncio.create_task(standby.acquire())
    for _ in range(4):
        clock.seconds += 9
        version = (await api.get(LEASES, PLACE, lease))["metadata"]["resourceVersion"]
        async with asyncio.timeout(20):
            while (await api.get(LEASES, PLACE, lease))["metadata"]["resourceVersion"] == version:
                await wait_a_little()
        assert await still_waits(waiting, standby, clock)
    assert not holding.done()
    for each in (holding, waiting):
        each.cancel()


async def test_a_released_lease_is_taken_at_once(api: Api, lease: str, clock: Clock) -> None:
    leader = elector(api, lease, clock, "a")
    first = await acquired(leader)
    await leader.release()
    assert await acquired(elector(api, lease, clock, "b")) == first + 1
    await leader.release()
    assert (await api.get(LEASES, PLACE, lease))["spec"]["holderIdentity"] == "b"


async def test_a_lease_is_released_although_a_renewal_was_on_its_way(
    api: Api, lease: str, clock: Clock
) -> None:
    leader = elector(api, lease, clock, "a")
    await acquired(leader)
    await api.patch(LEASES, PLACE, lease, {"spec": {"renewTime": "2026-11-23T12:00:00.000000Z"}})
    await leader.release()
    assert not (await api.get(LEASES, PLACE, lease))["spec"].get("holderIdentity")


async def test_a_lease_that_was_deleted_has_a_higher_epoch_when_it_is_made_again(
    api: Api, lease: str, clock: Clock
) -> None:
    """The count of transitions begins again; the time of creation is above it."""
    leader = elector(api, lease, clock, "a")
    await acquired(leader)
    for identity in "bcd":
        await leader.release()
        leader = elector(api, lease, clock, identity)
        before = await acquired(leader)
    assert before & TRANSITIONS == 3
    created = (await api.get(LEASES, PLACE, lease))["metadata"]["creationTimestamp"]
    await wait_for_the_next_second(created)
    await api.delete(LEASES, PLACE, lease)
    with pytest.raises(LeadershipLost, match="deleted"):
        async with asyncio.timeout(20):
            await leader.hold()
    assert await acquired(elector(api, lease, clock, "e")) > before


async def wait_for_the_next_second(created: str) -> None:
    while datetime.now(UTC).timestamp() < datetime.fromisoformat(created).timestamp() + 1:
        await asyncio.sleep(0.01)


async def test_a_holder_that_was_replaced_stops(api: Api, lease: str, clock: Clock) -> None:
    leader = elector(api, lease, clock, "a")
    await acquired(leader)
    found = await api.get(LEASES, PLACE, lease)
    await api.replace(LEASES, found | {"spec": found["spec"] | {"holderIdentity": "b"}})
    with pytest.raises(LeadershipLost, match="b holds"):
        async with asyncio.timeout(20):
            await leader.hold()


async def test_a_holder_whose_lease_was_made_again_with_its_name_stops(
    api: Api, lease: str, clock: Clock
) -> None:
    """As a restored backup does: the Lease has another epoch."""
    leader = elector(api, lease, clock, "a")
    await acquired(leader)
    found = await api.get(LEASES, PLACE, lease)
    await api.delete(LEASES, PLACE, lease)
    copy = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "spec": found["spec"]}
    await api.create(LEASES, PLACE, copy | {"metadata": {"name": lease}})
    with pytest.raises(LeadershipLost, match="made again"):
        async with asyncio.timeout(20):
            await leader.hold()


async def test_a_holder_whose_lease_was_labelled_goes_on(
    api: Api, lease: str, clock: Clock
) -> None:
    leader = elector(api, lease, clock, "a")
    await acquired(leader)
    holding = asyncio.create_task(leader.hold())
    change = {"metadata": {"labels": {"seen": "yes"}}}
    version = (await api.patch(LEASES, PLACE, lease, change))["metadata"]["resourceVersion"]
    async with asyncio.timeout(20):
        while (found := await api.get(LEASES, PLACE, lease))["metadata"][
            "resourceVersion"
        ] == version:
            await wait_a_little()
    assert found["metadata"]["labels"] == {"seen": "yes"}
    assert not holding.done()
    holding.cancel()


async def test_a_process_that_was_paused_past_its_deadline_stops_without_asking(
    api: Api, lease: str, clock: Clock
) -> None:
    leader = elector(api, lease, clock, "a")
    await acquired(leader)
    clock.seconds += 10
    with pytest.raises(LeadershipLost, match="no renewal for 10 s"):
        async with asyncio.timeout(20):
            await leader.hold()
    assert (await api.get(LEASES, PLACE, lease))["spec"]["holderIdentity"] == "a"


async def test_the_lease_says_who_leads(api: Api, lease: str, clock: Clock) -> None:
    leader, later = (elector(api, lease, clock, each) for each in "ab")
    assert not await leader.still_leads()
    await acquired(leader)
    assert await leader.still_leads()
    found = await api.get(LEASES, PLACE, lease)
    taken = found["spec"] | {"leaseTransitions": 7}
    found = await api.replace(LEASES, found | {"spec": taken})
    assert not await leader.still_leads()  # its own name, with the epoch of another
    found = await api.replace(LEASES, found | {"spec": taken | {"holderIdentity": ""}})
    await acquired(later)
    assert await later.still_leads()
    assert not await leader.still_leads()
    await api.delete(LEASES, PLACE, lease)
    assert not await later.still_leads()


async def test_an_api_server_that_does_not_answer_leaves_the_end_to_the_deadline(
    api: Api, lease: str, clock: Clock
) -> None:
    leader = elector(api, lease, clock, "a")
    await acquired(leader)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    async with api_of(Configuration(host=f"http://127.0.0.1:{port}")) as nowhere:
        leader._api = nowhere
        assert await leader.still_leads()


async def test_one_of_many_gets_a_new_lease(api: Api, lease: str, clock: Clock) -> None:
    standbys = [asyncio.create_task(elector(api, lease, clock, str(n)).acquire()) for n in range(8)]
    async with asyncio.timeout(20):
        await asyncio.wait(standbys, return_when=asyncio.FIRST_COMPLETED)
    leaders = [each for each in standbys if each.done()]
    assert len(leaders) == 1
    for each in standbys:
        each.cancel()


async def test_a_lease_counts_from_when_it_was_asked_for(
    api: Api, lease: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may take it 15 s after that, however late the answer comes."""
    create = api.create

    async def create_slowly(*given: object) -> object:
        found = await create(*given)  # type: ignore[arg-type]
        clock.seconds += 11
        return found

    monkeypatch.setattr(api, "create", create_slowly)
    late = elector(api, lease, clock, "late")
    await acquired(late)
    async with asyncio.timeout(5):
        with pytest.raises(LeadershipLost, match="no renewal"):
            await late.hold()
