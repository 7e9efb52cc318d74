"""Parts in which everything is settled are marked, and the load skips them (ADR 44)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from postbus.contract.entities import EntityKind, QueueProperties, SubscriptionProperties
from postbus.entity.commands import Disposition, SetDemand, Settle, SubQueue, Tick
from postbus.entity.outcomes import (
    InsertMessage,
    LoadedPartition,
    MoveMessage,
    Outcome,
    PatchMessage,
    PutDefinition,
    RecordAcquired,
    ReserveBlock,
    SettleRows,
    Settling,
    ShareBody,
)
from postbus.store import load, load_messaging, marking
from postbus.store.batch import SideRows
from postbus.store.errors import Connection, Fenced
from postbus.store.parts import all_parts, numbers_in, part_range
from postbus.store.postgres import Store
from postbus.store.upkeep_limits import UpkeepLimits
from tests.entity.partition_rig import ACTIVE, QUEUE, TOPIC, Rig, message
from tests.store.driving import (
    HELD_MS,
    NOW_MS,
    Driven,
    connected,
    envelope,
    holding,
    insert,
    open_driven,
    outcome,
    reload,
    wait_until,
)

RETENTION_MS = 60_000
LATER_MS = NOW_MS + RETENTION_MS + 1
FIRST, SECOND, OTHER = 65_536, 65_792, 131_072
ALL = all_parts(256)
LIVE_IN_MARKED = """
select m.row_key from message m
where not exists (select from settled s where s.row_key = m.row_key)
  and exists (
      select from block b
      where (m.row_key >= b.first_key and m.row_key < b.first_key + b.size and (
                b.settled_parts >> ((m.row_key - b.first_key) / ((b.size + 31) / 32))::int) & 1 = 1)
         or (m.body_id >= b.first_key and m.body_id < b.first_key + b.size and (
                b.settled_parts >> ((m.body_id - b.first_key) / ((b.size + 31) / 32))::int) & 1 = 1)
  )
"""
"""Live rows in a marked part, or with a body that has its id in one."""


def define(entity_no: int = 1, retention_ms: int | None = RETENTION_MS) -> PutDefinition:
    properties = QueueProperties(history_retention_ms=retention_ms)
    return PutDefinition(entity_no, f"queue-{entity_no}", EntityKind.QUEUE, properties, 3, 1)


def reserve(first_key: int, entity_no: int = 1, queue: SubQueue = ACTIVE) -> ReserveBlock:
    return ReserveBlock(first_key, 256, entity_no, queue, first_key if queue is ACTIVE else 0)


def settle(row_keys: Iterable[int], entity_no: int = 1, settled_ms: int = NOW_MS) -> Outcome:
    rows = SettleRows(entity_no, list(row_keys), Settling.COMPLETED, settled_ms)
    return outcome(mutations=[rows])


async def start(store: Store, *blocks: ReserveBlock) -> Driven:
    it = await open_driven(store)
    await it.commit(outcome(mutations=[define(), define(2)]))
    for block in blocks:
        await it.commit(outcome(mutations=[block]))
    return it


async def fill(it: Driven, keys: range, body: bytes | None = None) -> None:
    await it.commit(outcome([insert(key, body) for key in keys]))


async def marks(look: Connection) -> dict[int, int]:
    """Return first key -> marked parts, without blocks that have none."""
    rows = await look.fetch("select first_key, settled_parts from block where settled_parts <> 0")
    return dict(map(tuple, rows))


async def keys_of(store: Store, entity_no: int = 1, queue: SubQueue = ACTIVE) -> list[int]:
    return list((await reload(store)).keys.get((entity_no, queue), []))


# --- which parts are marked -------------------------------------------------------------------


async def test_a_block_of_settled_rows_is_marked(store: Store, database: str) -> None:
    it = await start(store, reserve(FIRST), reserve(SECOND))
    async with connected(database) as look:
        await fill(it, range(FIRST, FIRST + 256))
        await it.commit(settle(range(FIRST, FIRST + 255)))
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: ALL >> 1}, "the last part has a live row"
        await it.commit(settle([FIRST + 255]))
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: ALL}
    await it.journal.close()
    assert await keys_of(store) == []


async def test_a_load_reads_no_row_of_a_marked_part(store: Store, database: str) -> None:
    """Marks that are wrong on purpose show what is read."""
    it = await start(store, reserve(FIRST), reserve(SECOND))
    rows = [InsertMessage(key, NOW_MS, envelope(bytes(9_000))) for key in range(FIRST, FIRST + 24)]
    await it.commit(outcome(rows, mutations=[ShareBody([FIRST + 8, FIRST + 20])]))
    deferred = [PatchMessage(FIRST + key, True, 2, None) for key in (3, 9)]
    await it.commit(outcome(mutations=[RecordAcquired([FIRST + 1, FIRST + 9], [1, 1]), *deferred]))
    await it.journal.close()
    async with connected(database) as look:
        await look.execute("update block set settled_parts = 2 where first_key = $1", FIRST)
    it = await open_driven(store)
    loaded, sides = it.loaded, it.journal._sides
    assert list(loaded.keys[1, ACTIVE]) == [
        *range(FIRST, FIRST + 8),
        *range(FIRST + 16, FIRST + 24),
    ]
    assert loaded.deferred == {(1, ACTIVE): {FIRST + 3: FIRST + 3}}
    assert loaded.attempts == {FIRST + 1: 1}
    assert sides.keys == {*loaded.keys[1, ACTIVE]} - {FIRST + 20}
    assert not sides.bodies._old_ids
    assert not sides.bodies.large_dead
    await it.journal.close()


async def test_only_full_parts_of_a_block_in_use_are_marked(store: Store, database: str) -> None:
    it = await start(store, reserve(FIRST))
    async with connected(database) as look:
        await fill(it, range(FIRST, FIRST + 20))
        await it.commit(settle(range(FIRST, FIRST + 20)))
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: 0b11}
        await fill(it, range(FIRST + 20, FIRST + 24))
        await it.journal.upkeep(NOW_MS)
        assert await keys_of_open(look) == [FIRST + 20, FIRST + 21, FIRST + 22, FIRST + 23]
        await it.commit(settle(range(FIRST + 20, FIRST + 23)))
        await it.commit(outcome(mutations=[reserve(SECOND)]))
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: ALL & ~0b100}, "it gets no more rows"
    await it.journal.close()
    assert await keys_of(store) == [FIRST + 23]


async def keys_of_open(look: Connection) -> list[int]:
    """Return live keys as a load without marks reads them."""
    rows = await look.fetch(
        "select row_key from message except select row_key from settled order by 1"
    )
    return [row["row_key"] for row in rows]


async def test_a_part_is_not_marked_while_a_commit_may_insert_there(
    store: Store, database: str
) -> None:
    """All keys are settled, but the row of one is not there: it may bring a body for others."""
    it = await start(store, reserve(FIRST), reserve(OTHER, 2))
    async with connected(database) as look, holding(database) as hold:
        rows = [InsertMessage(key, HELD_MS, envelope(bytes(9_000))) for key in (FIRST, OTHER)]
        it.journal.submit(outcome(rows, mutations=[ShareBody([FIRST, OTHER])]), None)
        await hold.wait_held()
        others = [insert(key) for key in range(FIRST + 1, FIRST + 200)]
        it.journal.submit(
            outcome(others, mutations=settle(range(FIRST, FIRST + 8)).mutations), None
        )

        async def is_settled() -> bool:
            return bool(await look.fetchval("select count(*) = 8 from settled"))

        await wait_until(is_settled)
        released = len(it.seen.released)
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {}
        await hold.end()
        await it.seen.wait_released(released + 2)
        assert await look.fetch(LIVE_IN_MARKED) == []
    it.journal.abandon()
    assert await keys_of(store, 2) == [OTHER]


@pytest.mark.parametrize("is_copy", [True, False])
async def test_a_part_is_marked_when_no_live_row_refers_to_its_bodies(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch, is_copy: bool
) -> None:
    """A dead letter has the body of its source, a copy for a subscription that of the first one."""
    monkeypatch.setattr(marking, "AGAIN_S", 0.0)
    queue = SubQueue.DEAD_LETTER if is_copy else ACTIVE
    it = await start(store, reserve(FIRST), reserve(SECOND), reserve(OTHER, 2, queue))
    async with connected(database) as look:
        await fill(it, range(FIRST + 1, FIRST + 8))
        if is_copy:
            await it.commit(outcome([insert(FIRST, bytes(9_000))]))
            copy = MoveMessage(FIRST, OTHER, 2, queue, FIRST, 1, None, None, True)
            await it.commit(outcome(mutations=[*settle([FIRST]).mutations, copy]))
            await it.commit(settle(range(FIRST + 1, FIRST + 8)))
        else:
            rows = [InsertMessage(key, NOW_MS, envelope(bytes(9_000))) for key in (FIRST, OTHER)]
            await it.commit(outcome(rows, mutations=[ShareBody([FIRST, OTHER])]))
            await it.commit(settle(range(FIRST, FIRST + 8)))
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: ALL & ~1}
        await it.commit(settle([OTHER], 2))
        await it.journal.upkeep(NOW_MS)
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: ALL}
    await it.journal.close()
    it = await open_driven(store)
    assert not it.journal._sides.bodies._old_ids, "a body of settled rows is not counted"
    async with connected(database) as look:
        await it.journal.upkeep(LATER_MS)
        assert await look.fetchval("select count(*) from message") == 0
        for table in ("body", "shared", "embodied"):
            assert await look.fetchval(f"select count(*) from {table}") == 0, table
    await it.journal.close()


async def test_a_body_that_is_not_counted_stays_until_its_last_row_is_deleted(
    store: Store, database: str
) -> None:
    it = await start(store, reserve(FIRST), reserve(SECOND), reserve(OTHER, 2))
    rows = [InsertMessage(key, NOW_MS, envelope(bytes(9_000))) for key in (FIRST, OTHER)]
    await it.commit(outcome(rows, mutations=[ShareBody([FIRST, OTHER])]))
    await it.commit(settle([FIRST]), settle([OTHER], 2, NOW_MS + 5))
    await it.journal.close()
    for _ in range(2):  # the first marks
        it = await open_driven(store)
        await it.journal.upkeep(NOW_MS)
        await it.journal.close()
    it = await open_driven(store)
    async with connected(database) as look:
        assert await marks(look) == {FIRST: ALL, SECOND: ALL, OTHER: ALL}
        await it.journal.upkeep(LATER_MS)
        assert await keys_of_rows(look) == [OTHER]
        [row] = await it.journal.read_rows([OTHER])
        assert row.envelope.body == bytes(9_000)
        await it.journal.upkeep(LATER_MS + 5)
        assert await keys_of_rows(look) == []
        assert await look.fetchval("select count(*) from body") == 0
    await it.journal.close()


async def keys_of_rows(look: Connection) -> list[int]:
    return [row["row_key"] for row in await look.fetch("select row_key from message order by 1")]


async def test_parts_of_former_lives_are_marked_after_a_load(store: Store, database: str) -> None:
    """The rest of a block is lost at a reload, so it gets no more rows either."""
    it = await start(store, reserve(FIRST))
    await fill(it, range(FIRST, FIRST + 20))
    await it.commit(settle(range(FIRST, FIRST + 19)))
    it.journal.abandon()
    it = await open_driven(store)
    async with connected(database) as look:
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: ALL & ~0b100}
    await it.journal.close()
    assert await keys_of(store) == [FIRST + 19]


async def test_a_look_ends_in_time_and_goes_on_later(store: Store, database: str) -> None:
    store.upkeep_limits = UpkeepLimits(look_s=-1.0)
    it = await start(store, reserve(FIRST), reserve(SECOND))
    await fill(it, range(FIRST, FIRST + 256))
    await it.commit(settle(range(FIRST, FIRST + 256)))
    async with connected(database) as look:
        assert await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {}
    await it.journal.close()
    store.upkeep_limits = UpkeepLimits(look_keys=1, look_s=600.0)
    it = await open_driven(store)
    async with connected(database) as look:
        assert not await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: ALL, SECOND: ALL}
    await it.journal.close()


async def test_a_former_owner_marks_nothing(store: Store, database: str) -> None:
    it = await start(store, reserve(FIRST), reserve(SECOND))
    await fill(it, range(FIRST, FIRST + 8))
    await it.commit(settle(range(FIRST, FIRST + 8)))
    async with connected(database) as look:
        await look.execute("update owner set epoch = epoch + 1")
        with pytest.raises(Fenced):
            await it.journal._upkeep._settled.look()
        assert await marks(look) == {}
        await look.execute("update owner set epoch = epoch - 1")
        await it.journal.upkeep(NOW_MS)
        assert await marks(look) == {FIRST: ALL}
    await it.journal.close()


# --- the end of a block -----------------------------------------------------------------------


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_a_marked_block_is_deleted_after_its_rows(
    store: Store, database: str, is_loaded: bool
) -> None:
    it = await start(store, reserve(FIRST), reserve(SECOND), reserve(OTHER))
    async with connected(database) as look:
        await fill(it, range(FIRST, FIRST + 256))
        await fill(it, range(SECOND, SECOND + 256))
        await it.commit(settle(range(FIRST, FIRST + 256)))
        await it.commit(settle(range(SECOND, SECOND + 256), settled_ms=NOW_MS + 9))
        await it.journal.upkeep(NOW_MS)
        firsts = "select first_key from block order by 1"
        assert len(await look.fetch(firsts)) == 3
        if is_loaded:
            await it.journal.close()
            it = await open_driven(store)
        await it.journal.upkeep(LATER_MS)
        assert [row[0] for row in await look.fetch(firsts)] == [SECOND, OTHER]
        await it.journal.upkeep(LATER_MS + 9)
        assert [row[0] for row in await look.fetch(firsts)] == [OTHER], "it bounds the numbers"
        assert await keys_of_rows(look) == []
    await it.journal.close()
    assert (await reload(store)).next_sequence[1] == OTHER + 256


async def test_an_empty_marked_block_of_a_former_life_is_deleted(
    store: Store, database: str
) -> None:
    """The broker ended between the deletion of the last row and that of the block."""
    it = await start(store, reserve(FIRST), reserve(SECOND))
    await fill(it, range(SECOND, SECOND + 1))
    await it.commit(settle([SECOND]))
    await it.journal.close()
    async with connected(database) as look:
        await look.execute("update block set settled_parts = $2 where first_key = $1", FIRST, ALL)
        it = await open_driven(store)
        assert [block.first_key for block in it.loaded.blocks] == [FIRST, SECOND]
        await it.journal.upkeep(NOW_MS)
        await it.journal.close()
        assert await marks(look) == {SECOND: ALL}


# --- statements -------------------------------------------------------------------------------


STATEMENTS = {
    "keys": load.KEYS,
    "live keys": load.LIVE_KEYS,
    "patched": load.PATCHED,
    "deferred": load.DEFERRED,
    "carried": load_messaging.CARRIED,
    "shared": load_messaging.SHARED,
    "bodies": load_messaging.OWN_BODIES,
}


@pytest.mark.parametrize("name", STATEMENTS)
async def test_a_load_scans_ranges_of_indexes_only(store: Store, database: str, name: str) -> None:
    """Also with statistics of empty tables; settled rows are left out by a merge of two ranges."""
    sql = STATEMENTS[name]
    it = await start(store, reserve(FIRST))
    async with connected(database) as look:
        for table in ("message", "settled", "body", "shared"):
            await look.execute(f"vacuum (truncate off, analyze) {table}")
        await look.execute("insert into settled select n, 1, 1, 1 from generate_series(1, 9999) n")
    arguments = [[1], [9], 10] if "keys" in name else [[1], [9]]
    async with store.reading() as connection, connection.transaction():
        await connection.execute("set local search_path = partition_0")
        if name in ("live keys", "bodies"):
            await connection.execute(load_messaging.ONLY_MERGE.replace("set ", "set local "))
        rows = await connection.fetch(f"explain {sql}", *arguments)
        plan = "\n".join(row[0] for row in rows)
    assert ("Merge Anti Join" in plan) == (name in ("live keys", "bodies"))
    assert "Seq Scan" not in plan
    scans = plan.count("Index Only Scan") + plan.count("Index Scan")
    assert plan.count("Index Cond") == scans, "each reads its range only"
    await it.journal.close()


@pytest.mark.parametrize("page_keys", [1, 3, 100_000])
@pytest.mark.parametrize("page_ranges", [1, 2, 1_000])
async def test_pages_hold_the_keys_of_many_ranges(
    store: Store,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    page_keys: int,
    page_ranges: int,
) -> None:
    monkeypatch.setattr(load, "PAGE_KEYS", page_keys)
    monkeypatch.setattr(load, "PAGE_RANGES", page_ranges)
    it = await start(store, reserve(FIRST), reserve(SECOND))
    settled = [key for key in range(FIRST, FIRST + 72) if key // 8 % 2 or key % 8 < 4]
    live = sorted({*range(FIRST, FIRST + 72)}.difference(settled))
    await fill(it, range(FIRST, FIRST + 72))
    await it.commit(settle(settled))
    await fill(it, range(SECOND, SECOND + 3))
    await it.journal.upkeep(NOW_MS)
    async with connected(database) as look:
        assert (await marks(look))[FIRST] == ALL & ~0b101010101
    await it.journal.close()
    assert await keys_of(store) == [*live, *range(SECOND, SECOND + 3)]


async def test_rows_that_were_settled_earlier_than_deleted_ones_are_deleted(store: Store) -> None:
    """Each look begins where the last one ended, but for rows whose commit came late."""
    it = await start(store, reserve(FIRST))
    await fill(it, range(FIRST, FIRST + 8))
    await it.commit(settle([FIRST], settled_ms=NOW_MS + 5))
    await it.journal.upkeep(LATER_MS + 5)
    assert await it.journal.read_rows([FIRST]) == []
    await it.commit(settle([FIRST + 1], settled_ms=NOW_MS))
    await it.journal.upkeep(LATER_MS + 5)
    assert await it.journal.read_rows([FIRST + 1]) == []
    await it.journal.close()


# --- versions ---------------------------------------------------------------------------------

RESERVE_BEFORE = """
insert into block (first_key, size, entity_no, sub_queue, first_sequence) values ($1, 256, 1, 0, $2)
"""
"""As the version before step 26 reserves a block."""


async def test_the_version_before_leaves_marks_true(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds rows to blocks of its own only, without a mark, and deletes no settled row alone."""
    it = await start(store, reserve(FIRST), reserve(SECOND))
    await fill(it, range(FIRST, FIRST + 256))
    await it.commit(settle(range(FIRST, FIRST + 256)))
    await it.journal.upkeep(NOW_MS)
    await it.journal.close()
    async with connected(database) as look:
        await look.execute(RESERVE_BEFORE, OTHER, OTHER)
        await look.execute(
            "insert into message (row_key, enqueued_ms, envelope) values ($1, 1, '')", OTHER + 8
        )
        assert await marks(look) == {FIRST: ALL}
        assert await look.fetch(LIVE_IN_MARKED) == []
    assert await keys_of(store) == [OTHER + 8]


# --- random histories -------------------------------------------------------------------------

SUBSCRIPTIONS = (21, 22, 23)
HISTORY = SubscriptionProperties(
    history_retention_ms=RETENTION_MS, lock_duration_ms=5_000, max_delivery_count=2
)


class RecordingRig(Rig):
    """Keeps what it commits, for a real store."""

    def __init__(self, **arguments: Any) -> None:
        self.committed: list[Outcome] = []
        super().__init__(**arguments)

    def commit(self, count: int | None = None) -> None:
        waiting = [result for result, _ in self.pending][:count]
        super().commit(count)
        self.committed += waiting

    def take(self) -> list[Outcome]:
        taken, self.committed = self.committed, []
        return taken


class Clients:
    """Random clients of a queue and a topic that keep what is settled; one subscription does not.

    Bodies are in the row, beside it, or shared.
    """

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.rig = RecordingRig(
            properties=QueueProperties(
                history_retention_ms=RETENTION_MS,
                lock_duration_ms=5_000,
                max_delivery_count=2,
                dead_lettering_on_message_expiration=True,
            )
        )
        self.rig.put_topic()
        for entity_no in SUBSCRIPTIONS[:2]:
            self.rig.put_subscription(entity_no, HISTORY)
        self.rig.put_subscription(SUBSCRIPTIONS[2])
        self.attach()

    def attach(self) -> None:
        self.consumers = {
            entity_no: self.rig.consumer(f"c{entity_no}", entity_no=entity_no)
            for entity_no in (QUEUE, *SUBSCRIPTIONS)
        }

    def step(self) -> None:
        rig, draw = self.rig, self.draw
        what = draw(st.integers(0, 9))
        if what < 4:
            self.send(draw(st.sampled_from([QUEUE, TOPIC])), draw(st.integers(1, 40)))
        elif what < 9:
            entity_no = draw(st.sampled_from((QUEUE, *SUBSCRIPTIONS)))
            self.settle(entity_no, draw(st.integers(1, 60)))
        else:
            rig.now_ms += draw(st.sampled_from([1, 2_000, 6_000]))
            rig.apply(Tick())

    def send(self, entity_no: int, count: int) -> None:
        size = self.draw(st.sampled_from([5, 1_500, 9_000]))
        sent = []
        for number in range(count):
            name = f"m{number}"
            sent.append(message(name, ttl_ms=5_000 if number % 9 == 8 else None))
            sent[-1].body = name.encode().ljust(size)
            sent[-1].size_bytes = 100 + size
        self.rig.send(*sent, entity_no=entity_no)

    def settle(self, entity_no: int, count: int) -> None:
        rig, consumer_id = self.rig, self.consumers[entity_no]
        rig.apply(SetDemand(consumer_id, count))
        inbox = rig.clients[consumer_id].inbox
        odd = self.draw(st.integers(0, 19))
        for at, delivery in enumerate(inbox[:count]):
            disposition = Disposition.COMPLETE
            if at % 20 == odd:
                disposition = self.draw(st.sampled_from(Disposition))
            rig.apply(Settle(entity_no, ACTIVE, [delivery.lock_token], disposition))
        del inbox[:count]


@pytest.mark.slow
@settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
)
@given(data=st.data())
def test_a_load_with_marks_is_one_without(data: st.DataObject, database: str) -> None:
    """After random histories with crashes, upkeep at any moment, and rows that were deleted."""
    asyncio.run(check_lives(data.draw, database))


async def check_lives(draw: Any, database: str) -> None:
    clients = Clients(draw)
    store = Store(database)
    try:
        async with connected(database) as look:
            await look.execute(EMPTY)
            for _ in range(draw(st.integers(1, 3))):
                await live(draw, store, look, clients)
                clients.rig.crash()
                clients.attach()
                await compare_loads(store, look, clients.rig.loaded)
            await assert_all_goes(store, look, clients)
    finally:
        await store.close()


async def live(draw: Any, store: Store, look: Connection, clients: Clients) -> None:
    """Commit what random clients cause, with upkeep now and then, and crash."""
    it = await open_driven(store)
    try:
        for _ in range(draw(st.integers(1, 20))):
            clients.step()
            for one in clients.rig.take():
                await it.commit(one)
            if draw(st.integers(0, 3)) == 0:
                later_ms = draw(st.sampled_from([0, 0, RETENTION_MS]))
                await it.journal.upkeep(clients.rig.now_ms + later_ms)
                assert await look.fetch(LIVE_IN_MARKED) == []
    finally:
        it.journal.abandon()


EMPTY: str = (
    "truncate message, settled, block, entity, patch, kept, due, acquired, body, shared, "
    "embodied, staged, seen, session, outbound, inbound; update owner set catalog_version = 0"
)


async def compare_loads(store: Store, look: Connection, expected: LoadedPartition) -> None:
    """Compare a load with marks, one without, and that of the model."""
    marked = await open_driven(store)
    await marked.journal.close()
    kept = await look.fetch("select first_key, settled_parts from block")
    await look.execute("update block set settled_parts = 0")
    plain = await open_driven(store)
    await plain.journal.close()
    await look.executemany(
        "update block set settled_parts = $2 where first_key = $1",
        [(row["first_key"], row["settled_parts"]) for row in kept],
    )
    left, right = comparable(marked), comparable(plain)
    for name, found in left.items():
        assert found == right[name], name
    assert {name: list(keys) for name, keys in marked.loaded.keys.items()} == {
        name: list(keys) for name, keys in expected.keys.items()
    }
    marks_of = {row["first_key"]: row["settled_parts"] for row in kept}
    more = {block.first_key for block in marked.loaded.blocks}
    more -= {block.first_key for block in plain.loaded.blocks}
    assert all(marks_of[first_key] for first_key in more), "upkeep deletes these"
    dead = [set(it.journal._sides.bodies.large_dead) for it in (marked, plain)]
    assert dead[0] <= dead[1]
    assert all(marks_of[block_of(plain, key)] for key in dead[1] - dead[0]), "found when it goes"


def block_of(it: Driven, key: int) -> int:
    return max(block.first_key for block in it.loaded.blocks if block.first_key <= key)


def comparable(it: Driven) -> dict[str, object]:
    """Return what a load found; of bodies and side rows what concerns live rows."""
    loaded, sides = it.loaded, it.journal._sides
    live = [key for keys in loaded.keys.values() for key in keys]
    return {
        "keys": {name: list(keys) for name, keys in loaded.keys.items()},
        "entities": loaded.entities,
        "sequences": loaded.next_sequence,
        "next": loaded.next_row_key,
        "deferred": loaded.deferred,
        "due": loaded.due,
        "attempts": loaded.attempts,
        "sessions": loaded.sessions,
        "outbox": loaded.outbox,
        "sided": sides.keys,
        "kinds": kinds_of(sides, live),
    }


def kinds_of(sides: SideRows, keys: list[int]) -> list[int]:
    return [sides.kind_of([key]) for key in keys]


async def assert_all_goes(store: Store, look: Connection, clients: Clients) -> None:
    """Let all messages be settled and deleted: no row and no body is left."""
    rig = clients.rig
    it = await open_driven(store)
    live = [(entity_no, key) for (entity_no, _), keys in it.loaded.keys.items() for key in keys]
    for entity_no, key in live:
        await it.commit(settle([key], entity_no, rig.now_ms))
    for _ in range(3):
        await it.journal.upkeep(rig.now_ms + RETENTION_MS + 1)
        await it.journal.close()
        it = await open_driven(store)

    async def is_empty() -> bool:
        await it.journal.upkeep(rig.now_ms + RETENTION_MS + 1)
        counts = [
            await look.fetchval(f"select count(*) from {table}")
            for table in ("message", "settled", "body", "shared", "embodied")
        ]
        return not any(counts)

    await wait_until(is_empty)
    bounds = "select count(*) from block group by entity_no, sub_queue having count(*) > 1"
    assert await look.fetch(bounds) == []
    await it.journal.close()


def test_numbers_and_ranges_of_parts_are_those_of_the_statement() -> None:
    """`LIVE_IN_MARKED` divides as `part_range` does."""
    for number in numbers_in(ALL):
        first, end = part_range(0, 256, number)
        assert {key // ((256 + 31) // 32) for key in range(first, end)} == {number}
