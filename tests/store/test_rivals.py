"""Other processes of one name: detection of living ones, and requests to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from postbus.store import beats as beats_module
from postbus.store import rivals as rivals_module
from postbus.store.incarnation import Broker, Process, runs_here, this_process
from postbus.store.postgres import Store
from postbus.store.rivals import Rivals
from tests.store.driving import connected, wait_until

OURS = Broker("broker-0", Process("here", 2))
LEFT_BEHIND = "insert into postbus.broker values ($1, $2, 'there', 1, '', '', 0, '', 22)"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beat ten times as fast."""
    monkeypatch.setattr(beats_module, "BEAT_S", beats_module.BEAT_S / 10)
    monkeypatch.setattr(rivals_module, "CONFIRMATION_S", beats_module.CONFIRMATION_S / 10)
    monkeypatch.setattr(rivals_module, "LOOK_S", rivals_module.LOOK_S / 10)


@pytest.fixture
async def looking(database: str) -> AsyncIterator[Rivals]:
    store = Store(database, broker=OURS)
    yield Rivals(store, OURS)
    await store.close()


@pytest.fixture
async def first(database: str) -> AsyncIterator[Store]:
    """Return the store of a broker of our name that lives, on another machine."""
    store = Store(database, broker=Broker("broker-0", Process("there", 1)))
    await store.beats.begin()
    yield store
    await store.close()


async def test_only_an_incarnation_with_a_changing_beat_lives(
    looking: Rivals, first: Store, database: str
) -> None:
    async with connected(database) as look:
        await look.execute(LEFT_BEHIND, uuid4(), "broker-0")
        await look.execute(LEFT_BEHIND, uuid4(), "another")
        assert [rival.identity for rival in await looking.living()] == [first.beats.identity]
        await first.close()
        assert await looking.living() == []


async def test_a_broker_asked_to_end_learns_the_requester_once(
    looking: Rivals, first: Store
) -> None:
    requesters: list[str] = []
    first.beats.on_asked = requesters.append
    rivals = await looking.ask_to_end()
    assert str(rivals[0]).startswith("broker-0, process 1 on host there, running since 20")
    await wait_until(lambda: asyncio.sleep(0, bool(requesters)))
    beat = first.beats.confirmed_at
    await wait_until(lambda: asyncio.sleep(0, first.beats.confirmed_at > beat))
    assert requesters == ["broker-0, process 2 on host here"]
    assert await looking.outwait(rivals, 0.0) == rivals  # it is not ended by force
    ending = asyncio.create_task(looking.outwait(rivals, 60.0))
    await first.close()
    assert await ending == []


async def test_a_broker_that_resumes_after_its_end_learns_the_request(
    looking: Rivals, first: Store, database: str
) -> None:
    requesters: list[str] = []
    first.beats.on_asked = requesters.append
    async with connected(database) as look:
        await look.execute("update postbus.broker set ended_by = 'a test', asked_by = 'a twin'")
    await wait_until(lambda: asyncio.sleep(0, bool(requesters)))
    assert requesters == ["a twin"]


async def test_a_silent_broker_is_not_waited_for(looking: Rivals, database: str) -> None:
    async with connected(database) as look:
        await look.execute(LEFT_BEHIND, uuid4(), "broker-0")
    rivals = await looking.ask_to_end()
    assert len(rivals) == 1
    assert await looking.outwait(rivals, 60.0) == []


async def test_a_process_of_this_machine_has_ended_when_it_no_longer_exists(database: str) -> None:
    """The process holds its folder and ports until then."""
    us = this_process()
    assert runs_here(us, us)
    assert not runs_here(us._replace(pid=2**22 + 1), us)
    assert not runs_here(us._replace(boot_id="another"), us)
    assert not runs_here(Process("here", us.pid), Process("here", us.pid))
    store = Store(database, broker=OURS)
    rivals = Rivals(store, Broker("broker-0", us._replace(pid=1)))
    async with connected(database) as look:
        await store.beats.begin()
        await look.execute(
            "update postbus.broker set pid = $1, boot_id = $2, pid_namespace = $3,"
            " started_ticks = $4",
            *us[1:5],
        )
        requested = await rivals.ask_to_end()
        await look.execute("delete from postbus.broker")
        assert await rivals.outwait(requested, 0.0) == requested
    await store.close()
