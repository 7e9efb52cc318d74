"""Heartbeats: sent during any work, silence by the observer's clock, reported ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from postbus.entity.outcomes import LoadedPartition
from postbus.process.embedded import EmbeddedPostgres
from postbus.store import beats as beats_module
from postbus.store import connections as connections_module
from postbus.store import incarnation as incarnation_module
from postbus.store import journal as journal_module
from postbus.store import postgres as postgres_module
from postbus.store.batch import SideRows
from postbus.store.beats import CONFIRMATION_S, SILENCE_S, Incarnation
from postbus.store.claim import Claim
from postbus.store.errors import Connection, Fenced, StoreUnavailable
from postbus.store.incarnation import Broker, Process, boottime_s, is_provably_gone, this_process
from postbus.store.load import load_partition
from postbus.store.postgres import Store
from tests.conftest import dsn_of, make_database, run_psql
from tests.store.driving import connected, driven, insert, open_driven, outcome, wait_until
from tests.store.relay import relaying

ELSEWHERE = Broker("broker-1", Process("elsewhere", 7))
BEATER = "postbus beat"


@pytest.fixture
async def other(database: str) -> AsyncIterator[Store]:
    """Return the store of another broker, on another machine, that observes the others."""
    opened = Store(database, broker=ELSEWHERE)
    await opened.open()
    await opened.beats.begin()
    yield opened
    await opened.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beat ten times as fast."""
    for name in ("BEAT_S", "SILENCE_S", "CONFIRMATION_S", "GAP_S"):
        monkeypatch.setattr(beats_module, name, getattr(beats_module, name) / 10)


async def wait_for_claim(store: Store) -> tuple[float, str]:
    """Claim the partition as soon as possible; return the duration and the former owner."""
    started, detail = boottime_s(), ""
    while True:
        try:
            claimed = await open_driven(store)
        except StoreUnavailable as error:
            detail = str(error)
            await asyncio.sleep(0.02)
            continue
        await claimed.journal.close()
        return boottime_s() - started, detail


async def test_beats_confirm_ownership_each_second(store: Store) -> None:
    async with driven(store) as it:
        before = it.journal.confirmed_at
        await wait_until(lambda: asyncio.sleep(0, it.journal.confirmed_at > before))
        assert it.journal.confirmed_at <= boottime_s()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_silent_broker_is_taken_over_and_learns_the_successor(
    database: str, other: Store
) -> None:
    async with relaying(database) as (relay, dsn):
        store = Store(dsn)
        async with driven(store) as it:
            await it.commit(outcome([insert(1)]))
            relay.pause_at = BEATER, b""
            await relay.paused.wait()
            took_s, held_by = await wait_for_claim(other)
            assert took_s >= beats_module.SILENCE_S - beats_module.BEAT_S
            assert "owned by broker-0" in held_by
            if not it.seen.errors:  # else it has learned it already
                it.journal.submit(outcome([insert(2)]), "late")
            await it.seen.wait_failed()
            assert it.seen.released == [None]
        store.beats._shared.drop()  # it is connected again
        ends: list[Exception] = []
        store.beats.follow(ends.append)
        await wait_until(lambda: asyncio.sleep(0, bool(ends)))
        [end] = ends
        assert isinstance(end, Fenced)
        assert "taken over by broker-1, process 7 on host elsewhere (it was silent" in str(end)
        await store.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_broker_that_loads_for_long_is_alive(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loading, goes_on = asyncio.Event(), asyncio.Event()

    async def load_slowly(connection: Connection, claim: Claim) -> tuple[LoadedPartition, SideRows]:
        is_loading.set()
        await goes_on.wait()
        return await load_partition(connection, claim)

    monkeypatch.setattr(journal_module, "load_partition", load_slowly)
    loading = asyncio.create_task(open_driven(store))
    await is_loading.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3 * beats_module.SILENCE_S):
            await wait_for_claim(other)
    goes_on.set()
    loaded = await loading
    assert loaded.loaded.epoch == 1
    await loaded.journal.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_second_live_process_of_one_name_waits_for_the_first(
    store: Store, database: str
) -> None:
    twin = Store(database, broker=Broker("broker-0", Process("elsewhere", 7)))
    async with driven(store) as it:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * beats_module.SILENCE_S):
                await wait_for_claim(twin)
        await it.commit(outcome([insert(1)]))
    assert (await wait_for_claim(twin))[0] < 2.0
    await twin.close()


@pytest.mark.usefixtures("quick")
async def test_observer_that_was_paused_itself_sees_no_silence(store: Store, other: Store) -> None:
    async with driven(store):
        identity = store.beats.identity
        assert identity is not None
        await wait_until(lambda: asyncio.sleep(0, identity in other.beats._others))
        other.beats._clock = lambda: boottime_s() + 1_000.0  # a suspended machine
        assert other.beats.holds_on(identity)
        with pytest.raises(Fenced):
            await open_driven(other)


async def test_a_beat_that_came_meanwhile_shows_that_it_lives(
    store: Store, other: Store, database: str
) -> None:
    async with driven(store), connected(database) as look:
        row = await look.fetchrow("select *, started_at::text as since from postbus.broker")
        assert row is not None
        identity = store.beats.identity
        assert identity is not None
        await wait_until(lambda: asyncio.sleep(0, identity in other.beats._others))
        seen = other.beats._others[identity]
        other.beats._others[identity] = seen._replace(since=boottime_s() - 2 * SILENCE_S)
        owner = Incarnation(identity, "broker-0", Process("here", 1), seen.beat, "then")
        await look.execute("update postbus.broker set beat = beat + 1")
        with pytest.raises(
            Fenced, match="owned by broker-0, process 1 on host here, running since then in epoch 3"
        ):
            await other.beats.take_place_of(owner, 3, look)


async def test_a_broker_that_ended_in_order_is_not_waited_for(store: Store, database: str) -> None:
    async with driven(store), connected(database) as look:
        assert await look.fetchval("select count(*) from postbus.broker") == 1
        await store.close()
        living = "select count(*) from postbus.broker where ended_by is null"
        assert await look.fetchval(living) == 0


async def test_the_time_outlives_an_end_without_a_released_partition(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(journal_module, "release", fails)
    newest_ms = 0
    for _ in range(3):  # the last one that left is kept, with the time of those before
        store = Store(database)
        async with driven(store) as it:
            assert it.journal._persisted_ms >= newest_ms
            newest_ms = it.journal._persisted_ms + 10_000
            store.beats.persisted_ms = newest_ms
        await store.close()
    async with connected(database) as look:
        assert await look.fetchval("select count(*) from postbus.broker") == 1


async def test_the_time_outlives_an_end_without_a_stored_entry(store: Store, database: str) -> None:
    await store.beats.begin()
    store.beats.persisted_ms = 777
    await store.close()
    left = Store(database)
    connect = left.beats._shared._connect
    left.beats._shared._connect = AsyncMock(side_effect=ConnectionRefusedError)
    with pytest.raises(StoreUnavailable):
        await left.beats.begin()
    left.beats._shared._connect = connect
    await left.close()  # the database is back
    async with connected(database) as look:
        rows = await look.fetch("select ended_by, persisted_ms from postbus.broker")
    assert [tuple(row) for row in rows] == [("itself", 777)]


async def test_an_entry_without_an_answer_is_the_one_of_the_next_attempt(database: str) -> None:
    async with relaying(database) as (relay, dsn), connected(database) as look:
        for ends in (False, True):
            store = Store(dsn)
            await store.open()
            relay.deafen_at = BEATER, store.beats.broker.name.encode()
            with pytest.raises(StoreUnavailable):
                await store.beats.begin()
            assert relay.deafen_at is None
            if ends:
                await look.execute(
                    "update postbus.broker set ended_by = 'x' where ended_by is null"
                )
                with pytest.raises(StoreUnavailable, match="ended before it was answered"):
                    await store.beats.begin()
            identity = await store.beats.begin()
            living = await look.fetch(
                "select incarnation from postbus.broker where ended_by is null"
            )
            assert [row["incarnation"] for row in living] == [identity]
            await store.close()


async def test_broker_that_is_silent_for_long_is_ended(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats_module, "FORGET_S", 0.0)
    async with connected(database) as look:
        await store.open()
        await look.execute(
            "insert into postbus.broker values ($1, 'gone', 'h', 1, '', '', 0, '', 1)", uuid4()
        )
        await store.beats.begin()

        async def is_ended() -> bool:
            sql = "select ended_by from postbus.broker where broker_name = 'gone'"
            return "broker-0, process" in (await look.fetchval(sql) or "")

        await wait_until(is_ended)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["idle", "commit", "claim", "load"])
async def test_silently_lost_database_fails_calls_within_seconds(
    database: str, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(postgres_module, "ANSWER_S", 1.0)
    monkeypatch.setattr(journal_module, "ANSWER_S", 1.5)
    monkeypatch.setattr(connections_module, "CONNECT_S", 1.0)
    writer = "postbus writer 0"
    async with relaying(database) as (relay, dsn):
        store = Store(dsn)
        started = boottime_s()
        if at in ("idle", "commit"):
            it = await open_driven(store)
            relay.is_silent = True
            started = boottime_s()
            if at == "commit":
                it.journal.submit(outcome([insert(1)]), "sent")
            assert isinstance(await it.seen.wait_failed(), StoreUnavailable)
        else:
            relay.pause_at = writer, b"pg_advisory_lock" if at == "claim" else b"settled_parts"
            opening = asyncio.create_task(open_driven(store))
            async with asyncio.timeout(6.0):
                await relay.paused.wait()
            relay.is_silent = True
            with pytest.raises(StoreUnavailable):
                await opening
        assert boottime_s() - started < 6.0
        relay.is_silent = False
        async with asyncio.timeout(6.0):
            await wait_for_claim(store)
        await store.close()


@pytest.mark.slow
async def test_beat_that_waits_for_a_standby_confirms_no_ownership(
    server_folder: Path, tmp_path: Path
) -> None:
    """The old primary of a database that failed over: its writes are on no other server."""
    server = EmbeddedPostgres(server_folder / tmp_path.name)
    await asyncio.to_thread(server.start)
    try:
        make_database(server, "isolated")
        store = Store(dsn_of(server, "isolated"))
        it = await open_driven(store)
        run_psql(server, "alter system set synchronous_standby_names = 'nobody'")
        run_psql(server, "select pg_reload_conf()")

        async def is_unconfirmed() -> bool:
            return boottime_s() - it.journal.confirmed_at > CONFIRMATION_S

        await wait_until(is_unconfirmed, CONFIRMATION_S + 4.0)
        it.journal.abandon()
        run_psql(server, "alter system reset synchronous_standby_names")
        run_psql(server, "select pg_reload_conf()")
        await store.close()
    finally:
        await asyncio.to_thread(server.stop)


def test_only_this_machine_proves_that_a_process_has_ended() -> None:
    here, identity = this_process("1:2"), uuid4()
    ended = here._replace(pid=2**22 + 1)
    assert is_provably_gone(ended._replace(data_lock=""), identity, here, set())
    assert is_provably_gone(here._replace(data_lock=""), identity, here, set())
    assert not is_provably_gone(here, identity, here, {identity})
    reused = here._replace(pid=1, started_ticks=-1, data_lock="")
    assert is_provably_gone(reused, identity, here, set())
    elsewhere = ended._replace(pid_namespace="pid:[1]", data_lock="")
    assert not is_provably_gone(elsewhere, identity, here, set())
    assert is_provably_gone(elsewhere._replace(data_lock="1:2"), identity, here, set())
    assert not is_provably_gone(ended._replace(boot_id="other"), identity, here, set())
    assert not is_provably_gone(Process("h", 2**22 + 1), identity, Process("h", 1), set())


@pytest.mark.parametrize("pid", ["parent", "nobody"])
def test_a_process_hidden_by_proc_counts_as_living(
    pid: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Mounted with hidepid, /proc hides the processes of other users."""
    here = this_process()
    monkeypatch.setattr(incarnation_module, "PROC", tmp_path)
    former = here._replace(pid=os.getppid() if pid == "parent" else 2**22 + 1)
    assert is_provably_gone(former, uuid4(), here, set()) is (pid == "nobody")


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_beats_continue_after_a_database_refused_connections(
    store: Store, database: str, postgres_server: EmbeddedPostgres
) -> None:
    name = urlsplit(database).path[1:]
    await store.beats.begin()
    run_psql(postgres_server, f"alter database {name} allow_connections false")
    of_it = f"from pg_stat_activity where datname = '{name}'"
    run_psql(postgres_server, f"select count(pg_terminate_backend(pid)) {of_it}")
    task, failed_at = store.beats._task, boottime_s()
    assert task is not None
    await wait_until(lambda: asyncio.sleep(0, boottime_s() - failed_at > 3 * beats_module.BEAT_S))
    run_psql(postgres_server, f"alter database {name} allow_connections true")
    opened_at = boottime_s()
    await wait_until(lambda: asyncio.sleep(0, store.beats.confirmed_at > opened_at))
    assert not task.done()
