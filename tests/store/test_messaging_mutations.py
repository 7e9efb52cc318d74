"""Mutations of sessions, duplicate detection, topics and outbox: the load returns them."""

from __future__ import annotations

import pytest

from postbus.contract.entities import (
    EntityKind,
    QueueProperties,
    RuleProperties,
    SqlAction,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import (
    DropDefinition,
    ForgetIds,
    LoadedEntity,
    MoveMessage,
    Mutation,
    Needs,
    PutDefinition,
    PutInbound,
    PutKept,
    PutOutbound,
    PutSessionState,
    RecordIds,
    RecordSize,
    RecordUse,
    ReserveBlock,
    StoredState,
)
from postbus.store.batch import INLINE_BODY_BYTES
from postbus.store.postgres import Store
from tests.store.driving import (
    NOW_MS,
    block,
    connected,
    definition,
    driven,
    envelope,
    insert,
    open_driven,
    outcome,
    reload,
)

OUTBOX_KEY = 2_000_000
OUTBOX_BLOCK = ReserveBlock(OUTBOX_KEY, 256, 0, SubQueue.OUTBOX, 0)
DEAD_KEY = 3_000_000
TRANSFER_BLOCK = block(DEAD_KEY, 256, SubQueue.TRANSFER_DEAD_LETTER)
DIGESTS = [bytes([number]) * 16 for number in range(10)]
LATE_MS = NOW_MS + 1_000_000


def state(session_id: bytes, content: bytes | None, updated_ms: int = NOW_MS) -> PutSessionState:
    return PutSessionState(1, session_id, content, updated_ms)


def out(row_key: int, target: str = "bills", *, is_dead_letter: bool = False) -> PutOutbound:
    return PutOutbound(row_key, 1, target, row_key % 1_000, is_dead_letter)


def into_outbox(row_key: int, new_key: int = OUTBOX_KEY) -> MoveMessage:
    return MoveMessage(row_key, new_key, 0, SubQueue.OUTBOX, row_key, 2, None, None)


# --- definitions ----------------------------------------------------------------------------------


async def test_topic_and_subscription_come_back_as_they_were_defined(store: Store) -> None:
    rules = (
        RuleProperties(name="$Default", sql_filter=SqlFilter(sql_expression="a = 'ü\\'")),
        RuleProperties(
            name="high",
            sql_filter=SqlFilter(sql_expression="x > 1"),
            action=SqlAction(sql_expression="set y = 2"),
        ),
    )
    topic = TopicProperties(max_size_in_megabytes=2048, requires_duplicate_detection=True)
    subscription = SubscriptionProperties(requires_session=True, forward_to="orders")
    kinds = EntityKind
    async with driven(store) as it:
        await it.commit(
            outcome(
                mutations=[
                    PutDefinition(2, "t", kinds.TOPIC, topic, 4, 7, is_partitioned=True),
                    PutDefinition(
                        3, "t/Subscriptions/s", kinds.SUBSCRIPTION, subscription, 5, 1, 2, rules
                    ),
                ]
            )
        )
    loaded = await reload(store)
    assert loaded.entities == [
        LoadedEntity(1, "orders", kinds.QUEUE, QueueProperties(), 0, catalog_version=3),
        LoadedEntity(2, "t", kinds.TOPIC, topic, 0, is_partitioned=True, catalog_version=4),
        LoadedEntity(
            3, "t/Subscriptions/s", kinds.SUBSCRIPTION, subscription, 0, 2, rules, catalog_version=5
        ),
    ]
    assert loaded.next_sequence[2] == 7
    async with driven(store) as it:
        changed = PutDefinition(
            3, "t/Subscriptions/s", kinds.SUBSCRIPTION, subscription, 6, 1, 2, rules[1:]
        )
        await it.commit(outcome(mutations=[changed]))
    assert (await reload(store)).entities[2].rules == rules[1:]


async def test_definition_written_by_an_earlier_version_is_a_queue(
    store: Store, database: str
) -> None:
    async with connected(database) as look:
        await look.execute(
            "insert into entity (entity_no, name, definition, next_sequence, catalog_version) "
            """values (5, 'old', '{"maxDeliveryCount": 3}', 9, 1)"""
        )
    properties = QueueProperties(max_delivery_count=3)
    assert (await reload(store)).entities == [
        LoadedEntity(5, "old", EntityKind.QUEUE, properties, 0, catalog_version=1)
    ]


async def test_last_use_is_kept_beside_sizes_and_definitions(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(
            outcome(
                [insert(1), insert(2)],
                mutations=[RecordUse(1, NOW_MS), RecordSize(1, 100, 2), RecordUse(1, NOW_MS - 5)],
            )
        )
        await it.commit(outcome(mutations=[RecordUse(2, NOW_MS + 2), definition(2, "bills")]))
        await it.commit(outcome(mutations=[definition(1, "orders"), RecordSize(1, 300, 2)]))
        await it.commit(outcome(mutations=[definition(2, "bills")]))
        await it.commit(outcome(mutations=[RecordUse(2, NOW_MS)]))
    first, second = (await reload(store)).entities
    assert (first.last_used_ms, first.size_bytes) == (NOW_MS, 300)
    assert (second.last_used_ms, second.size_bytes) == (NOW_MS + 2, 0)


async def test_use_after_a_definition_takes_a_commit_of_its_own(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(
            outcome(mutations=[definition(2, "a")]),
            outcome(mutations=[RecordUse(2, NOW_MS)]),
            outcome(mutations=[RecordUse(1, NOW_MS)]),
            outcome(mutations=[definition(2, "b")]),
        )
        assert it.seen.batches == [1, 2, 1]
    loaded = await reload(store)
    assert [entity.last_used_ms for entity in loaded.entities] == [NOW_MS, NOW_MS]
    assert loaded.entities[1].name == "b"


# --- sessions -------------------------------------------------------------------------------------


async def test_session_state_is_replaced_and_removed(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(
            outcome(mutations=[state(b"a", b"1"), state(b"b", b"1"), state(b"\x00\xff", b"")])
        )
        await it.commit(
            outcome(mutations=[state(b"a", b"2", NOW_MS + 1)]),
            outcome(mutations=[state(b"b", None)]),
            outcome(mutations=[state(b"a", bytes(300_000), NOW_MS + 2)]),
            outcome(mutations=[state(b"c", b"1")]),
            outcome(mutations=[state(b"c", None)]),
            outcome(mutations=[state(b"d", None)]),
            outcome(mutations=[state(b"d", b"4", NOW_MS + 4)]),
        )
        assert it.seen.batches == [1, 7]
        found = await it.journal.read_states([(1, b"a"), (1, b"b"), (2, b"a"), (1, b"\x00\xff")])
        assert found == {(1, b"a"): bytes(300_000), (1, b"\x00\xff"): b""}
        assert await look.fetchval("select count(*) from session") == 3
    assert (await reload(store)).session_states == {
        1: {
            b"a": StoredState(NOW_MS + 2, 300_000),
            b"\x00\xff": StoredState(NOW_MS, 0),
            b"d": StoredState(NOW_MS + 4, 1),
        }
    }


async def test_session_states_count_against_the_bytes_of_a_commit(store: Store) -> None:
    async with driven(store) as it:
        big = bytes(700_000)
        await it.commit(*(outcome(mutations=[state(b"%d" % n, big)]) for n in range(3)))
        assert it.seen.batches == [1, 1, 1]
        assert it.journal.queued_bytes == 0


# --- seen ids -------------------------------------------------------------------------------------


async def test_ids_of_one_commit_are_one_row(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(
            outcome([insert(1)], mutations=[RecordIds(1, NOW_MS, DIGESTS[0] + DIGESTS[1])]),
            outcome([insert(2)], mutations=[RecordIds(1, NOW_MS + 3, DIGESTS[2])]),
            outcome([insert(3)], mutations=[RecordIds(2, NOW_MS + 3, DIGESTS[3])]),
            outcome(mutations=[RecordIds(1, LATE_MS, DIGESTS[4])]),
        )
        assert it.seen.batches == [4]
        assert await look.fetchval("select count(*) from seen") == 3
        await it.commit(outcome(mutations=[definition(2, "bills")]))
    assert (await reload(store)).seen == [
        RecordIds(1, NOW_MS + 3, b"".join(DIGESTS[:3])),
        RecordIds(2, NOW_MS + 3, DIGESTS[3]),
        RecordIds(1, LATE_MS, DIGESTS[4]),
    ]


async def test_ids_are_found_in_their_time_and_place_only(store: Store) -> None:
    first, second, third = DIGESTS[:3]
    across = first[8:] + second[:8]
    async with driven(store) as it:
        await it.commit(
            outcome(mutations=[RecordIds(1, NOW_MS, first + second)]),
            outcome(mutations=[RecordIds(1, NOW_MS + 5, third)]),
            outcome(mutations=[RecordIds(2, NOW_MS, first)]),
        )
        await it.commit(outcome(mutations=[RecordIds(1, LATE_MS, first + second + across)]))

        async def is_seen(digest: bytes, from_ms: int, to_ms: int, entity_no: int = 1) -> bool:
            found = await it.journal.read(Needs(ids=[(entity_no, digest, from_ms, to_ms)]))
            assert found.seen in (set(), {(entity_no, digest)})
            return bool(found.seen)

        assert await is_seen(first, NOW_MS, NOW_MS)
        assert await is_seen(second, NOW_MS, NOW_MS + 1)
        assert await is_seen(third, NOW_MS + 5, NOW_MS + 5)
        assert not await is_seen(third, NOW_MS + 6, LATE_MS)
        assert not await is_seen(third, NOW_MS - 9, NOW_MS - 1)
        assert not await is_seen(third, NOW_MS, LATE_MS, entity_no=2)
        assert await is_seen(first, LATE_MS, LATE_MS)
        assert not await is_seen(across, NOW_MS, LATE_MS - 1)
        assert await is_seen(across, LATE_MS, LATE_MS)
        many = [(1, digest, NOW_MS, NOW_MS + 5) for digest in DIGESTS] + [(2, first, 0, LATE_MS)]
        found = await it.journal.read(Needs(ids=many))
        assert found.seen == {(1, first), (1, second), (1, third), (2, first)}


async def test_ids_that_left_the_window_are_forgotten(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome(mutations=[definition(2, "bills")]))
        for number in range(4):
            ids = [RecordIds(entity, NOW_MS + 100 * number, DIGESTS[number]) for entity in (1, 2)]
            await it.commit(outcome(mutations=ids))
        await it.commit(
            outcome(mutations=[RecordIds(1, NOW_MS + 400, DIGESTS[4])]),
            outcome(mutations=[ForgetIds(1, NOW_MS + 200)]),
            outcome(mutations=[ForgetIds(2, NOW_MS + 300), RecordIds(2, LATE_MS, DIGESTS[5])]),
        )
        assert it.seen.batches[-1] == 3
    assert (await reload(store)).seen == [
        RecordIds(1, NOW_MS + 200, DIGESTS[2]),
        RecordIds(1, NOW_MS + 300, DIGESTS[3]),
        RecordIds(2, NOW_MS + 300, DIGESTS[3]),
        RecordIds(1, NOW_MS + 400, DIGESTS[4]),
        RecordIds(2, LATE_MS, DIGESTS[5]),
    ]


async def test_row_of_ids_with_a_young_last_one_is_kept(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(
            outcome(mutations=[RecordIds(1, NOW_MS, DIGESTS[0])]),
            outcome(mutations=[RecordIds(1, NOW_MS + 8, DIGESTS[1])]),
        )
        await it.commit(outcome(mutations=[ForgetIds(1, NOW_MS + 5)]))
        assert (await reload(store)).seen == [RecordIds(1, NOW_MS + 8, DIGESTS[0] + DIGESTS[1])]


# --- dropping -------------------------------------------------------------------------------------

OF_ENTITY: list[Mutation] = [
    state(b"a", b"1"),
    RecordIds(1, NOW_MS, DIGESTS[0]),
    PutInbound(3, 1, 17),
    RecordUse(1, NOW_MS),
]


@pytest.mark.parametrize("way", ["later", "same outcome", "same commit"])
async def test_dropped_entity_leaves_no_rows(store: Store, database: str, way: str) -> None:
    drop: list[Mutation] = [DropDefinition(1, 9)]
    async with driven(store) as it, connected(database) as look:
        if way == "later":
            await it.commit(outcome(mutations=OF_ENTITY))
            await it.commit(outcome(mutations=drop))
        elif way == "same outcome":
            await it.commit(outcome(mutations=OF_ENTITY + drop))
        else:
            await it.commit(outcome(mutations=OF_ENTITY[:3]), outcome(mutations=drop))
            assert it.seen.batches == [2]
        await it.journal.upkeep(NOW_MS)
        for table in ("entity", "session", "seen", "inbound"):
            assert await look.fetchval(f"select count(*) from {table}") == 0, table


@pytest.mark.parametrize("way", ["load", "upkeep"])
async def test_leftovers_of_a_drop_are_deleted_later(store: Store, database: str, way: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=OF_ENTITY))
        await it.commit(outcome(mutations=[state(b"%d" % number, b"x") for number in range(1_500)]))
        await it.commit(outcome(mutations=[DropDefinition(1, 9)]))
        assert await look.fetchval("select count(*) from session") == 1_501
        if way == "upkeep":
            await it.journal.upkeep(NOW_MS)
        else:
            loaded = await reload(store)
            assert (loaded.session_states, loaded.seen, loaded.inbound) == ({}, [], [])
        assert await look.fetchval("select count(*) from session") == 0


async def test_ids_are_forgotten_with_their_entity(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=OF_ENTITY))
        await it.commit(
            outcome(mutations=[RecordIds(1, LATE_MS, DIGESTS[1])]),
            outcome(mutations=[ForgetIds(1, None)]),
        )
        assert await look.fetchval("select count(*) from seen") == 0


# --- outbox ---------------------------------------------------------------------------------------


async def test_outbox_is_loaded_in_order_and_empties(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[OUTBOX_BLOCK]))
        keys = [OUTBOX_KEY + number for number in range(4)]
        rows = [insert(key) for key in keys]
        puts = [out(keys[2]), out(keys[0], "ünits"), out(keys[1], is_dead_letter=True)]
        puts[0] = puts[0]._replace(is_resent=True)
        await it.commit(outcome(rows, mutations=[*puts, out(keys[3])]))
        loaded = await reload(store)
        assert loaded.outbox == [puts[1], puts[2], puts[0], out(keys[3])]
        assert loaded.blocks == [block(), OUTBOX_BLOCK]
        assert list(loaded.keys[0, SubQueue.OUTBOX]) == keys
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(deletes=keys[:3]), outcome(deletes=[keys[3]]))
        for table in ("message", "outbound", "kept"):
            assert await look.fetchval(f"select count(*) from {table}") == 0, table
    loaded = await reload(store)
    assert loaded.outbox == []
    assert loaded.next_row_key == OUTBOX_KEY + 256


@pytest.mark.parametrize("body", [b"small", bytes(20_000), bytes(3 << 20)], ids=len)
async def test_message_goes_through_the_outbox_into_the_transfer_queue(
    store: Store, database: str, body: bytes
) -> None:
    async with driven(store) as it, connected(database) as look:
        sent = insert(5)._replace(envelope=envelope(body, application_properties=b"app"))
        await it.commit(outcome([sent], mutations=[OUTBOX_BLOCK, TRANSFER_BLOCK]))
        await it.commit(outcome(mutations=[into_outbox(5), out(OUTBOX_KEY)]))
        [row] = await it.journal.read_rows([OUTBOX_KEY])
        assert (row.sequence, row.delivery_count, row.envelope.body) == (5, 2, body)
    assert (await reload(store)).outbox == [out(OUTBOX_KEY)]
    async with driven(store) as it, connected(database) as look:
        refused = MoveMessage(
            OUTBOX_KEY, DEAD_KEY, 1, SubQueue.TRANSFER_DEAD_LETTER, 5, 1, None, b"why"
        )
        await it.commit(outcome(mutations=[refused]))
        assert await look.fetchval("select count(*) from outbound") == 0
        [row] = await it.journal.read_numbers(1, SubQueue.TRANSFER_DEAD_LETTER, 1, 10)
        assert (row.row_key, row.sequence, row.delivery_count) == (DEAD_KEY, 5, 1)
        assert (row.envelope.application_properties, row.envelope.body) == (b"why", body)
        loaded = await reload(store)
        assert loaded.outbox == []
        assert list(loaded.keys[1, SubQueue.TRANSFER_DEAD_LETTER]) == [DEAD_KEY]
    async with driven(store) as it, connected(database) as look:
        again = insert(7)._replace(envelope=row.envelope)  # a dead letter is sent again
        await it.commit(outcome([again], deletes=[DEAD_KEY]))
        [row] = await it.journal.read_rows([7, DEAD_KEY])
        assert (row.row_key, row.envelope.body) == (7, body)
        await it.journal.upkeep(NOW_MS)
        chunks = await look.fetchval("select sum(octet_length(data)) from body")
        assert chunks == (len(body) if len(body) > INLINE_BODY_BYTES else None)
        move = MoveMessage(7, DEAD_KEY, 1, SubQueue.TRANSFER_DEAD_LETTER, 5, 1, None, None)
        await it.commit(outcome(mutations=[move]))
    async with driven(store) as it, connected(database) as look:
        back = MoveMessage(DEAD_KEY, 6, 1, SubQueue.ACTIVE, 6, 0, None, None)
        await it.commit(outcome(mutations=[back]))
        [row] = await it.journal.read_rows([6])
        assert (row.sequence, row.envelope.body) == (None, body)
        await it.commit(outcome(deletes=[6]))
        await it.journal.upkeep(NOW_MS)
        for table in ("message", "body", "embodied", "kept", "staged"):
            assert await look.fetchval(f"select count(*) from {table}") == 0, table


async def test_shipped_right_after_it_was_moved_is_deleted_by_the_next_commit(
    store: Store,
) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(5)], mutations=[OUTBOX_BLOCK]))
        await it.commit(
            outcome(mutations=[into_outbox(5), out(OUTBOX_KEY)]),
            outcome(deletes=[OUTBOX_KEY], touches_uncommitted=True),
        )
        assert it.seen.batches[-2:] == [1, 1]
    loaded = await reload(store)
    assert (loaded.outbox, loaded.keys) == ([], {})


async def test_last_number_from_a_partition_never_goes_back(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(
            outcome([insert(1)], mutations=[PutInbound(3, 1, 10), PutInbound(4, 1, 5)]),
            outcome([insert(2)], mutations=[PutInbound(3, 1, 12)]),
            outcome([insert(3)], mutations=[PutInbound(3, 1, 11)]),
        )
        assert it.seen.batches == [3]
        await it.commit(outcome(mutations=[PutInbound(4, 1, 4)]))
    assert (await reload(store)).inbound == [PutInbound(3, 1, 12), PutInbound(4, 1, 5)]


# --- all of it ------------------------------------------------------------------------------------


async def test_crash_keeps_confirmed_outcomes(store: Store) -> None:
    """The journal is dropped without a clean end; the next claim terminates its backends."""
    it = await open_driven(store)
    await it.commit(outcome(mutations=[definition(), block(), OUTBOX_BLOCK]))
    await it.commit(
        outcome(
            [insert(1), insert(OUTBOX_KEY)],
            mutations=[*OF_ENTITY, out(OUTBOX_KEY)],
        )
    )
    it.journal.abandon()
    loaded = await reload(store)
    assert loaded.session_states == {1: {b"a": StoredState(NOW_MS, 1)}}
    assert loaded.seen == [OF_ENTITY[1]]
    assert loaded.inbound == [OF_ENTITY[2]]
    assert loaded.outbox == [out(OUTBOX_KEY)]
    assert loaded.entities[0].last_used_ms == NOW_MS


async def test_row_inserted_into_a_dead_letter_queue_keeps_its_number(store: Store) -> None:
    first, second = DEAD_KEY, DEAD_KEY + 1
    dead = SubQueue.DEAD_LETTER
    async with driven(store) as it:
        puts = [PutKept(first, 1, dead, 41, 0), PutKept(second, 1, dead, 42, 3)]
        await it.commit(
            outcome([insert(first), insert(second)], mutations=[block(DEAD_KEY, 256, dead), *puts])
        )
    loaded = await reload(store)
    assert list(loaded.keys[1, dead]) == [first, second]
    async with driven(store) as it:
        rows = await it.journal.read_numbers(1, dead, 41, 10)
        await it.commit(outcome(deletes=[first]))
        left = await it.journal.read_numbers(1, dead, 41, 10)
        named = await it.journal.read(Needs(named=[(1, dead, [43, 42, 41, 7])]))
    assert [(row.row_key, row.sequence, row.delivery_count) for row in rows] == [
        (first, 41, 0),
        (second, 42, 3),
    ]
    assert [row.row_key for row in left] == [second]
    assert [row.row_key for row in named] == [second]
