"""Failed commits: the report of each outcome (ADR 2); an unknown one never lands after a reload."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from postbus.entity.commands import Refusal, SubQueue
from postbus.entity.outcomes import InsertMessage
from postbus.message.envelope import Envelope
from postbus.process.embedded import EmbeddedPostgres
from postbus.store import claim as claim_module
from postbus.store import journal as journal_module
from postbus.store.errors import Connection, refusal_of
from postbus.store.journal import ALONE_S
from postbus.store.postgres import Store, StoreFull, StoreUnavailable
from tests.conftest import dsn_of, make_database, run_psql
from tests.store.driving import (
    HELD_MS,
    NOW_MS,
    POISON_MS,
    Driven,
    Hold,
    block,
    connected,
    definition,
    driven,
    holding,
    insert,
    open_driven,
    outcome,
    reload,
    wait_until,
)
from tests.store.relay import relaying


async def live_keys(store: Store) -> list[int]:
    return list((await reload(store)).keys.get((1, SubQueue.ACTIVE), ()))


async def terminate(hold: Hold, pid: int) -> None:
    await hold.connection.execute("select pg_terminate_backend($1)", pid)


async def test_backend_ended_during_a_commit_leaves_it_unknown_and_the_rest_unsent(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold:
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "sent")
        [pid] = await hold.wait_held()
        it.journal.submit(outcome([insert(2)]), "waiting")
        await terminate(hold, pid)
        error = await it.seen.wait_failed()
        assert isinstance(error, StoreUnavailable)
        assert it.seen.failed == [("sent", Refusal.UNKNOWN), ("waiting", Refusal.NOT_APPLIED)]
        assert it.seen.released == []
        assert await live_keys(store) == []


@pytest.mark.slow
async def test_backend_ended_while_idle_is_noticed_without_a_loss(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome([insert(1)]))
        await look.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = 'postbus writer 0' and datname = current_database()"
        )
        await it.seen.wait_failed()
        assert it.seen.failed == []
        assert await live_keys(store) == [1]


async def test_refused_commit_was_not_applied(store: Store, database: str) -> None:
    async with driven(store) as it, holding(database):
        it.journal.submit(outcome([insert(1)]), "good")
        it.journal.submit(outcome([insert(2, enqueued_ms=POISON_MS)]), "poison")
        error = await it.seen.wait_failed()
        assert isinstance(error, asyncpg.CheckViolationError)
        assert it.seen.failed == [("good", Refusal.NOT_APPLIED), ("poison", Refusal.NOT_APPLIED)]
    assert await live_keys(store) == []


@pytest.mark.parametrize("state", ["53100", "53200"])
async def test_full_store_is_reported_as_full(store: Store, database: str, state: str) -> None:
    async with connected(database) as look:
        name = await look.fetchval("select current_database()")
        await look.execute(f"alter database {name} set postbus.refuse_with = '{state}'")
    async with driven(store) as it, holding(database):
        it.journal.submit(outcome([insert(2, enqueued_ms=POISON_MS)]), "poison")
        error = await it.seen.wait_failed()
        assert isinstance(error, StoreFull)
        assert it.seen.failed == [("poison", Refusal.STORE_FULL)]
    assert await live_keys(store) == []


async def test_delete_of_a_queued_row_that_is_not_declared_fails_instead_of_leaving_it(
    store: Store,
) -> None:
    async with driven(store) as it:
        it.journal.submit(outcome([insert(1)]), "insert")
        it.journal.submit(outcome(deletes=[1]), "delete")
        assert isinstance(await it.seen.wait_failed(), AssertionError)
    assert await live_keys(store) == []


async def test_an_outcome_that_cannot_be_encoded_was_not_applied(store: Store) -> None:
    async with driven(store) as it:
        it.journal.submit(outcome([InsertMessage(1 << 70, NOW_MS, Envelope())]), "odd")
        await it.seen.wait_failed()
        assert it.seen.failed == [("odd", Refusal.NOT_APPLIED)]


async def test_one_by_one_the_guilty_outcome_fails_alone(store: Store, database: str) -> None:
    async with driven(store, one_by_one=True) as it, holding(database):
        it.journal.submit(outcome([insert(1)]), 1)
        it.journal.submit(outcome([insert(2)]), 2)
        it.journal.submit(outcome([insert(3, enqueued_ms=POISON_MS)]), 3)
        it.journal.submit(outcome([insert(4)]), 4)
        await it.seen.wait_failed()
        assert it.seen.released == [1, 2]
        assert it.seen.batches == [1, 1]
        assert it.seen.failed == [(3, Refusal.NOT_APPLIED), (4, Refusal.NOT_APPLIED)]
    assert await live_keys(store) == [1, 2]


async def test_one_by_one_ends_after_a_while(store: Store) -> None:
    async with driven(store, one_by_one=True) as it:
        await it.commit(*(outcome([insert(1 + number)]) for number in range(100)))
        assert it.seen.batches == [1] * 100
        it.journal._alone_until -= ALONE_S + 1
        await it.commit(*(outcome([insert(101 + number)]) for number in range(300)))
        assert it.seen.batches[-1] > 100


async def overlapped(it: Driven, hold: Hold) -> tuple[int, int]:
    """Have two commits in flight, both held; return their backends in order."""
    it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "first")
    [first] = await hold.wait_held()
    second = [insert(2 + number) for number in range(150)]
    second.append(insert(500, enqueued_ms=HELD_MS))
    it.journal.submit(outcome(second), "second")
    pids = await hold.wait_held(2)
    return first, next(pid for pid in pids if pid != first)


async def test_second_commit_is_unknown_when_the_first_fails(store: Store, database: str) -> None:
    async with driven(store) as it, holding(database) as hold:
        first, _ = await overlapped(it, hold)
        await terminate(hold, first)
        await it.seen.wait_failed()
        assert it.seen.failed == [("first", Refusal.UNKNOWN), ("second", Refusal.UNKNOWN)]
        assert await live_keys(store) == []


async def test_first_commit_is_released_before_the_second_fails(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold:
        _, second = await overlapped(it, hold)
        it.journal.submit(outcome([insert(900)]), "third")
        await terminate(hold, second)
        for _ in range(20):
            assert len(await hold.held_pids()) <= 2
        assert it.seen.errors == []
        await hold.end()
        await it.seen.wait_failed()
        assert it.seen.released == ["first"]
        assert it.seen.failed == [("second", Refusal.UNKNOWN), ("third", Refusal.NOT_APPLIED)]
        assert await live_keys(store) == [1]


async def test_server_gives_a_statement_up_before_it_is_unknown(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold:
        await it.journal._runners[0].writer.connection.execute("set statement_timeout = 200")
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "slow")
        await hold.wait_held()
        await it.seen.wait_failed()
        assert it.seen.failed == [("slow", Refusal.NOT_APPLIED)]


@pytest.mark.slow
async def test_no_answer_is_unknown_and_the_commit_does_not_land_after_the_reload(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend is stopped while it commits; a claim must wait until it has ended."""
    monkeypatch.setattr(journal_module, "ANSWER_S", 0.3)
    monkeypatch.setattr(claim_module, "LOCK_MS", 300)
    async with driven(store) as it, holding(database) as hold:
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "stopped")
        [pid] = await hold.wait_held()
        os.kill(pid, signal.SIGSTOP)
        try:
            await hold.end()
            await it.seen.wait_failed()
            assert it.seen.failed == [("stopped", Refusal.UNKNOWN)]
            with pytest.raises(StoreUnavailable):
                await open_driven(store)
        finally:
            os.kill(pid, signal.SIGCONT)
        first = await live_keys(store)
        for _ in range(50):
            assert await hold.connection.fetchval("select count(*) from message") == len(first)


async def test_old_commit_held_up_on_a_lock_is_ended_by_the_claim(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold:
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "old")
        [pid] = await hold.wait_held()
        it.journal.abandon()
        assert await live_keys(store) == []
        await hold.end()
        await wait_until_gone(hold, pid)
        assert await hold.connection.fetchval("select count(*) from message") == 0


async def wait_until_gone(hold: Hold, pid: int) -> None:
    async def is_gone() -> bool:
        found = await hold.connection.fetchval(
            "select count(*) from pg_stat_activity where pid = $1", pid
        )
        return bool(found == 0)

    await wait_until(is_gone)


@pytest.mark.slow
async def test_every_confirmed_row_survives_kill_nine_of_the_server(
    server_folder: Path, tmp_path: Path
) -> None:
    server = EmbeddedPostgres(server_folder / tmp_path.name)
    await asyncio.to_thread(server.start)
    try:
        make_database(server, "killed")
        store = Store(dsn_of(server, "killed"))
        it = await open_driven(store)
        await it.commit(outcome(mutations=[definition(), block()]))
        it.seen.released.clear()
        for key in range(1, 20_001):
            it.journal.submit(outcome([insert(key)]), key)
        await it.seen.wait_released(2_000)
        os.kill(server.pid, signal.SIGKILL)
        await it.seen.wait_failed()
        with pytest.raises(StoreUnavailable):
            await open_driven(store)
        await asyncio.to_thread(server.restart)
        found = set(await live_keys(store))
        unsent = {key for key, refusal in it.seen.failed if refusal is Refusal.NOT_APPLIED}
        assert set(it.seen.released) <= found
        assert found.isdisjoint(unsent)
        assert not (await reload(store)).attempts
        await store.close()
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (ValueError("x"), Refusal.UNKNOWN),
        (asyncpg.InternalClientError("x"), Refusal.UNKNOWN),
        (asyncpg.CheckViolationError("x"), Refusal.NOT_APPLIED),
        (asyncpg.QueryCanceledError("x"), Refusal.NOT_APPLIED),
        (asyncpg.DiskFullError("x"), Refusal.STORE_FULL),
        (asyncpg.ConnectionDoesNotExistError("x"), Refusal.UNKNOWN),
        (asyncpg.InterfaceError("x"), Refusal.UNKNOWN),
        (asyncpg.DataError("x"), Refusal.NOT_APPLIED),
        (ConnectionResetError(), Refusal.UNKNOWN),
        (StoreUnavailable(), Refusal.UNKNOWN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_driver_errors_map_to_refusals(error: Exception, refusal: Refusal) -> None:
    assert refusal_of(error) is refusal


@pytest.mark.slow
async def test_commit_with_a_cancelled_wait_for_a_standby_is_unknown(
    server_folder: Path, tmp_path: Path
) -> None:
    """The server reports success with a warning: no standby has the commit."""
    server = EmbeddedPostgres(server_folder / tmp_path.name)
    await asyncio.to_thread(server.start)
    try:
        make_database(server, "alone")
        store = Store(dsn_of(server, "alone"))
        it = await open_driven(store)
        await it.commit(outcome(mutations=[definition(), block()]))
        store.beats.unfollow(it.journal._end)  # beats wait for the standby too, and give up
        run_psql(server, "alter system set synchronous_standby_names = 'nobody'")
        run_psql(server, "select pg_reload_conf()")
        rows = itertools.count(1)
        cancel = (
            "select pg_cancel_backend(pid) from pg_stat_activity "
            "where wait_event = 'SyncRep' and application_name = 'postbus writer 0'"
        )

        async def is_cancelled() -> bool:
            if it.seen.released:  # no wait for a standby until the server has read its settings
                it.seen.released.clear()
                it.journal.submit(outcome([insert(next(rows))]), "sent")
            return "t" in await asyncio.to_thread(run_psql, server, cancel)

        await wait_until(is_cancelled)
        await it.seen.wait_for(lambda: bool(it.seen.released or it.seen.failed))
        assert it.seen.failed == [("sent", Refusal.UNKNOWN)]
        run_psql(server, "alter system reset synchronous_standby_names")
        run_psql(server, "select pg_reload_conf()")
        await store.close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_second_writer_that_could_not_be_opened_is_tried_again(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SECOND_WRITER_S", 0.0)
    async with driven(store) as it, holding(database) as hold:
        connect, tries = store.connect_writer, []

        async def fail_once(partition_id: int) -> Connection:
            tries.append(partition_id)
            if len(tries) == 1:
                raise StoreUnavailable("too many connections")
            return await connect(partition_id)

        monkeypatch.setattr(store, "connect_writer", fail_once)
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "first")
        await hold.wait_held()

        async def are_two() -> bool:
            if not it.journal._is_opening_second:
                it.journal._kick()
            return len(it.journal._runners) == 2

        it.journal.submit(outcome([insert(10 + number) for number in range(150)]), "second")
        await wait_until(are_two)
        await hold.end()
        await it.seen.wait_released(2)


async def test_release_is_done_when_the_server_takes_its_time_to_close(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with relaying(database) as (relay, dsn):
        store = Store(dsn)
        it = await open_driven(store)
        relay.pause_at = "postbus writer 0", b"X\0\0\0\4"
        await it.journal.close()
        assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
        async with connected(database) as look:
            assert await look.fetchval("select is_released from owner")
        await store.close()


@pytest.mark.slow
async def test_a_loop_that_was_held_up_takes_no_answer_for_missing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is unread in the socket, and the timer that checks for it is due first."""
    monkeypatch.setattr(journal_module, "ANSWER_S", 0.3)
    monkeypatch.setattr(journal_module, "WATCH_S", 0.05)
    async with driven(store) as it:
        await it.commit(outcome([insert(1)]))
        it.journal.submit(outcome([insert(2)]), "held up")
        while not it.journal._in_flight:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)  # the commit is written
        held_until = time.monotonic() + 0.6
        while time.monotonic() < held_until:
            pass  # the event loop is blocked
        await wait_until(lambda: asyncio.sleep(0, len(it.seen.released) + len(it.seen.failed) == 2))
        assert it.seen.failed == []


async def test_a_connection_that_ends_between_steps_of_the_driver_is_a_store_that_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load_late(connection: Any, _: object) -> None:
        executor = connection._execute  # looks whether the connection is open, and goes on later
        connection.terminate()
        await executor("select 1", (), 0, None)

    monkeypatch.setattr(journal_module, "load_partition", load_late)
    with pytest.raises(StoreUnavailable, match="the connection was ended"):
        await open_driven(store)
