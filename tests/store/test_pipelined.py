"""Commits in one message: what they write, and what is left when the server refuses a part."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import asyncpg
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from postbus.edge.certificates import ensure_certificate
from postbus.entity.commands import Refusal
from postbus.entity.outcomes import InsertMessage
from postbus.message.envelope import Envelope
from postbus.store.batch import Batch, SideRows
from postbus.store.errors import Connection, StoreUnavailable
from postbus.store.pipelined import PipelinedCommits, key_ranges, message_of, rows_of
from postbus.store.postgres import Store
from postbus.store.statements import INSERT
from postbus.store.writer import Writer, _insert_columns
from tests.store.driving import (
    NOW_MS,
    connected,
    driven,
    envelope,
    insert,
    outcome,
    reload,
    wait_until,
)
from tests.store.relay import relaying

ROWS = "select * from message order by row_key"
KEYS = "select row_key from message order by row_key"
WRITER = "postbus writer 0"
TROUBLE = """
create function partition_0.{name}() returns trigger language plpgsql as $$
begin
    {what};
    return new;
end
$$;
create trigger {name} before insert on partition_0.message for each row
when (new.enqueued_ms = 1) execute function partition_0.{name}();
"""


@pytest.fixture
async def connection(store: Store) -> AsyncIterator[Connection]:
    """A connection as writers have it."""
    await store.open()
    opened = await store.connect_writer(0)
    yield opened
    opened.terminate()


@pytest.fixture
async def commits(connection: Connection) -> PipelinedCommits:
    found = await PipelinedCommits.on(connection)
    assert found is not None
    return found


def commit_of(inserts: Sequence[InsertMessage], deletes: Sequence[int]) -> bytes:
    return message_of(deletes=deletes, rows=rows_of(inserts))


async def keys_in(connection: Connection) -> list[int]:
    return [row["row_key"] for row in await connection.fetch(KEYS)]


# --- what is written ------------------------------------------------------------------------------


@given(
    st.sets(st.integers(-(2**63), 2**63 - 2), min_size=1) | st.sets(st.integers(0, 30), min_size=1)
)
def test_ranges_have_exactly_their_keys(keys: set[int]) -> None:
    ranges = key_ranges(sorted(keys))
    assert sum(end - first for first, end in ranges) == len(keys)
    assert all(first in keys and end - 1 in keys for first, end in ranges)
    assert all(end < first for (_, end), (first, _) in pairwise(ranges))


def odd_envelopes() -> list[Envelope]:
    body = b"\x00\x53\x75\xa0\x05hello"
    properties = b"\x00\x53\x74\xc1\x01\x00"
    return [
        envelope(),
        envelope(b""),
        Envelope(),
        envelope(body, application_properties=properties),
        Envelope(application_properties=properties, size_bytes=6),
        envelope(bytes(range(256)) * 30),
        Envelope(body=body, size_bytes=9, session_id=b"\x00\xff", ttl_ms=2**62, is_durable=True),
        Envelope(body=body, size_bytes=9, message_id=b"\xa1\x01m", priority=9),
    ]


async def test_rows_are_what_a_statement_writes(
    connection: Connection, commits: PipelinedCommits
) -> None:
    envelopes = odd_envelopes()
    times = [0, -1, 2**62, NOW_MS, -(2**63), 2**63 - 1, 1, 2]
    rows = [InsertMessage(key, times[key], each) for key, each in enumerate(envelopes)]
    await connection.execute("begin")
    await connection.fetch(INSERT, *_insert_columns(rows))
    wanted = await connection.fetch(ROWS)
    await connection.execute("rollback")
    await commits.commit(commit_of(rows, []))
    assert await connection.fetch(ROWS) == wanted
    assert len(wanted) == len(envelopes)
    for row in rows:  # a single one is no COPY
        await commits.commit(commit_of([], [row.row_key]))
        assert len(await connection.fetch(ROWS)) == len(envelopes) - 1
        await commits.commit(commit_of([row], []))
    assert await connection.fetch(ROWS) == wanted


async def test_exactly_the_named_keys_go(connection: Connection, commits: PipelinedCommits) -> None:
    """Random commits beside a set: runs, runs with gaps, and scattered keys."""
    choose, live, key = random.Random(7), set[int](), 1
    for _ in range(150):
        key += choose.choice((0, 0, 1, 70))
        inserts = [insert(key + offset) for offset in range(choose.randrange(60))]
        key += len(inserts)
        first = choose.choice(sorted(live)) if live else 0
        deletes = [each for each in live if choose.random() < 0.1 or first <= each < first + 40]
        choose.shuffle(deletes)
        if not (inserts or deletes):
            continue
        await commits.commit(commit_of(inserts, deletes))
        live = (live - set(deletes)) | {row.row_key for row in inserts}
    assert await keys_in(connection) == sorted(live)
    assert len(live) > 50


async def test_driver_and_commits_take_turns(
    connection: Connection, commits: PipelinedCommits
) -> None:
    for key in range(1, 20, 2):
        await commits.commit(commit_of([insert(key), insert(key + 1)], []))
        assert await connection.fetchval("select max(row_key) from message") == key + 1
    await connection.execute("set application_name = 'another'")  # the server reports this one
    await commits.commit(commit_of([insert(30), insert(31)], [1]))
    assert await connection.fetchval("select count(*) from message") == 21


async def test_a_commit_larger_than_the_buffers_arrives(
    connection: Connection, commits: PipelinedCommits
) -> None:
    rows = [insert(key, bytes(7_000)) for key in range(4_000)]
    await commits.commit(commit_of(rows, []))
    total = await connection.fetchval("select sum(length(body)) from message")
    assert total == 4_000 * 7_000


class OneByOne(asyncio.Protocol):
    """Passes on what the server sends octet by octet."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def data_received(self, data: bytes) -> None:
        for octet in data:
            self._behind.data_received(bytes((octet,)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


async def test_answers_may_be_cut_anywhere(
    connection: Connection, commits: PipelinedCommits, database: str
) -> None:
    async with connected(database) as look:
        await look.execute(TROUBLE.format(name="says", what="raise notice 'one %', new.row_key"))
    notices: list[str] = []
    connection.add_log_listener(lambda _, message: notices.append(message.message))
    commits._transport.set_protocol(OneByOne(commits))
    for key in range(1, 10, 2):
        await commits.commit(commit_of([insert(key), insert(key + 1, enqueued_ms=1)], []))
        with pytest.raises(asyncpg.UniqueViolationError):
            await commits.commit(commit_of([insert(key + 2), insert(key)], [key + 1]))
        assert len(await keys_in(connection)) == key + 1
    assert notices == [f"one {key}" for key in range(2, 11, 2)]


NUMBERS = [0, 1, -1, 2**15 - 1, -(2**15)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("bigint", [*NUMBERS, 2**63 - 1, -(2**63)]),
        ("int", [*NUMBERS, 2**31 - 1, -(2**31)]),
        ("smallint", NUMBERS),
        ("bytea", [b"", b"\0\xff", bytes(70_000)]),
        ("bytea", []),
    ],
)
async def test_arguments_of_a_statement_arrive(
    commits: PipelinedCommits, kind: str, values: list[Any]
) -> None:
    text = f"select convert_to(to_json($1::{kind}[])::text, 'UTF8')"
    bound = (await commits.prepared(text)).bind([values])
    answer = await commits.commit(message_of(statement=bound, rows=rows_of([])))
    wanted = [f"\\x{each.hex()}" if isinstance(each, bytes) else each for each in values]
    assert answer is not None
    assert json.loads(answer) == wanted


async def test_a_statement_may_answer_nothing_or_null(commits: PipelinedCommits) -> None:
    for text in (
        "select null::text from unnest($1::int[])",
        "select from unnest($1::int[])",
        "select 1 from unnest($1::int[]) limit 0",
    ):
        bound = (await commits.prepared(text)).bind([[1]])
        assert await commits.commit(message_of(statement=bound, rows=rows_of([]))) is None


# --- refusals -------------------------------------------------------------------------------------


async def test_a_refused_copy_takes_back_the_deletes(
    connection: Connection, commits: PipelinedCommits
) -> None:
    await commits.commit(commit_of([insert(key) for key in range(1, 50)], []))
    with pytest.raises(asyncpg.UniqueViolationError) as caught:
        await commits.commit(commit_of([insert(60), insert(3)], list(range(10, 40))))
    assert caught.value.sqlstate == "23505"
    assert caught.value.detail is not None
    assert "(row_key)=(3)" in caught.value.detail
    assert await keys_in(connection) == list(range(1, 50))
    await commits.commit(commit_of([insert(60)], [3]))  # it goes on
    assert await keys_in(connection) == [1, 2, *range(4, 50), 60]


async def test_a_delete_that_waits_too_long_writes_nothing(
    connection: Connection, commits: PipelinedCommits, database: str
) -> None:
    """The server has the copy's rows by then, and skips them."""
    await commits.commit(commit_of([insert(1), insert(2)], []))
    await connection.execute("set statement_timeout = 100")
    async with connected(database) as other, other.transaction():
        await other.execute("select from message where row_key = 1 for update")
        message = commit_of([insert(key, bytes(5_000)) for key in range(10, 1_000)], [1, 2])
        with pytest.raises(asyncpg.QueryCanceledError):
            await commits.commit(message)
    assert await keys_in(connection) == [1, 2]
    await commits.commit(commit_of([insert(3)], [1]))
    assert await keys_in(connection) == [2, 3]


async def test_a_number_that_fits_no_column_is_not_sent(store: Store) -> None:
    async with driven(store) as it:
        rows = [insert(1), InsertMessage(1 << 70, NOW_MS, Envelope())]
        it.journal.submit(outcome(rows), "odd")
        await it.seen.wait_failed()
        assert it.seen.failed == [("odd", Refusal.NOT_APPLIED)]


# --- ends -----------------------------------------------------------------------------------------


async def test_an_end_before_the_answer_is_unknown(
    connection: Connection, commits: PipelinedCommits, database: str
) -> None:
    async with connected(database) as other, other.transaction():
        await other.execute("lock table message in share mode")
        under_way = asyncio.ensure_future(commits.commit(commit_of([insert(1), insert(2)], [])))
        pid = connection.get_server_pid()
        waiting = (
            "select count(*) from pg_stat_activity where pid = $1 and wait_event_type = 'Lock'"
        )
        await wait_until(lambda: other.fetchval(waiting, pid))
        await other.execute("select pg_terminate_backend($1)", pid)
        with pytest.raises(asyncpg.AdminShutdownError) as caught:
            await under_way
        assert cast("Any", caught.value).severity == "FATAL"
    assert connection.is_closed()


async def test_a_lost_answer_of_a_commit_is_unknown_and_the_rows_are_there(database: str) -> None:
    async with relaying(database) as (relay, dsn):
        store = Store(dsn)
        async with driven(store) as it:
            relay.deafen_at = (WRITER, b"postbus_c")
            it.journal.submit(outcome([insert(1), insert(2)]), "sent")
            assert isinstance(await it.seen.wait_failed(), StoreUnavailable)
            assert it.seen.failed == [("sent", Refusal.UNKNOWN)]
        keys = (await reload(store)).keys
        assert [list(each) for each in keys.values()] == [[1, 2]]
        await store.close()


async def test_a_cancelled_commit_ends_its_connection(
    connection: Connection, commits: PipelinedCommits, database: str
) -> None:
    """Nobody reads its answer, which the next statement would take for its own."""
    async with connected(database) as other, other.transaction():
        await other.execute("lock table message in share mode")
        under_way = asyncio.ensure_future(commits.commit(commit_of([insert(1), insert(2)], [])))
        await asyncio.sleep(0)
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        assert connection.is_closed()


async def test_a_commit_on_a_closed_connection_is_refused(
    connection: Connection, commits: PipelinedCommits
) -> None:
    connection.terminate()
    async with asyncio.timeout(5):
        with pytest.raises(asyncpg.InterfaceError, match="the connection is closed"):
            await commits.commit(commit_of([insert(1), insert(2)], []))


async def test_a_warning_during_a_commit_ends_the_journal(store: Store, database: str) -> None:
    """A standby that does not confirm is a warning, and then the commit is not safe."""
    async with driven(store) as it, connected(database) as look:
        await look.execute(TROUBLE.format(name="warns", what="raise warning 'canceled wait'"))
        it.journal.submit(outcome([insert(1), insert(2, enqueued_ms=1)]), "sent")
        error = await it.seen.wait_failed()
        assert "the server warned: PostgresWarning: canceled wait" in str(error)
        assert it.seen.failed == [("sent", Refusal.UNKNOWN)]
        assert it.seen.released == []


# --- drivers --------------------------------------------------------------------------------------


class Hidden:
    """A connection of a driver that does not show its transport."""

    def __init__(self, connection: Connection) -> None:
        self._connection_of_test = connection

    def __getattr__(self, name: str) -> Any:
        if name in ("_transport", "_protocol"):
            raise AttributeError(name)
        return getattr(self._connection_of_test, name)


async def test_without_a_transport_commits_are_statements(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(cast("Connection", Hidden(connection)), SideRows())
    await writer.prepare(is_pipelined=True)
    batch: Batch[None] = Batch()
    batch.add(outcome([insert(1), insert(2)]), None, 2, 20)
    await writer.commit(batch)
    assert batch.is_sent
    assert await keys_in(connection) == [1, 2]
    assert "commits are statements" in caplog.text


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_each_loop_and_tls_has_commits_in_one_message(
    database: str, tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], is_tls: bool
) -> None:
    context: ssl.SSLContext | None = None
    if is_tls:
        files = ensure_certificate(tmp_path / "tls")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate_file, files.key_file)

    async def commit() -> None:
        async with relaying(database, over_tcp=True, tls=context) as (relay, dsn):
            store = Store(f"{dsn}&sslmode={'require' if is_tls else 'disable'}")
            async with driven(store) as it:
                before = Counter(relay.client_messages[WRITER])
                await it.commit(outcome([insert(1, bytes(7_000)), insert(2)]))
                await it.commit(outcome([insert(3)], [1, 2]))
                sent = relay.client_messages[WRITER] - before
                assert (sent["d"], sent["c"], sent["S"], sent["P"]) == (1, 1, 2, 0)
            await store.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(commit())
