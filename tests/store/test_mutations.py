"""Each mutation: the next load and reads return the committed state."""

from __future__ import annotations

import pytest

from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import Death, Receiver, SubQueue
from postbus.entity.outcomes import (
    DropDefinition,
    InsertMessage,
    LoadedEntity,
    MoveMessage,
    PatchMessage,
    PutDefinition,
    PutDue,
    RecordAcquired,
    RecordSize,
    ReserveBlock,
)
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

DEAD_KEY = 2_000_000
SCHEDULED_KEY = 3_000_000
SIDE_TABLES = ("patch", "kept", "due", "body", "embodied", "staged")


def dead_letter(row_key: int, new_key: int = DEAD_KEY, **changes: object) -> MoveMessage:
    move = MoveMessage(row_key, new_key, 1, SubQueue.DEAD_LETTER, row_key, 3, None, None)
    return move._replace(**changes)


DEAD_BLOCK = block(DEAD_KEY, 256, SubQueue.DEAD_LETTER)
SCHEDULED_BLOCK = block(SCHEDULED_KEY, 256, SubQueue.SCHEDULED)


async def test_empty_partition_loads_empty(store: Store) -> None:
    it = await open_driven(store)
    await it.journal.close()
    loaded = it.loaded
    assert (loaded.epoch, loaded.next_row_key, loaded.catalog_version) == (1, 1, 0)
    assert (loaded.entities, loaded.blocks, loaded.keys, loaded.due) == ([], [], {}, [])


async def test_definitions_and_blocks_are_loaded(store: Store) -> None:
    async with driven(store):
        pass
    loaded = await reload(store)
    assert loaded.epoch == 2
    assert loaded.catalog_version == 3
    assert loaded.entities == [
        LoadedEntity(1, "orders", EntityKind.QUEUE, QueueProperties(), 0, catalog_version=3)
    ]
    assert loaded.blocks == [block()]
    assert loaded.next_row_key == 1_000_001
    assert loaded.next_sequence == {1: 1_000_001}


async def test_definition_is_replaced_and_dropped(store: Store) -> None:
    changed = QueueProperties(max_delivery_count=3, lock_duration_ms=7_000)
    async with driven(store) as it:
        await it.commit(
            outcome(mutations=[PutDefinition(2, "bills", EntityKind.QUEUE, changed, 4, 17)]),
            outcome(mutations=[PutDefinition(1, "orders", EntityKind.QUEUE, changed, 5, 1)]),
        )
        assert [len(it.seen.released), it.seen.batches] == [2, [2]]
        await it.commit(outcome(mutations=[DropDefinition(1, 6)]))
    loaded = await reload(store)
    assert [(one.entity_no, one.name, one.properties) for one in loaded.entities] == [
        (2, "bills", changed)
    ]
    assert loaded.catalog_version == 6
    assert loaded.next_sequence[2] == 17


async def test_definition_changed_twice_in_a_row_keeps_the_last(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(
            outcome(mutations=[definition(2, "a")]),
            outcome(mutations=[definition(2, "b"), block(5_000_000)]),
            outcome(mutations=[RecordSize(2, 100, 1)]),
            outcome(mutations=[DropDefinition(2, 9)]),
            outcome(mutations=[definition(2, "c")]),
        )
        assert it.seen.batches == [1, 1, 1, 1, 1]
    assert [entity.name for entity in (await reload(store)).entities] == ["orders", "c"]


async def test_row_comes_back_as_it_was_committed(store: Store) -> None:
    sent = envelope(b"body", properties=b"props", application_properties=b"app")
    async with driven(store) as it:
        await it.commit(outcome([InsertMessage(7, NOW_MS + 5, sent)]))
        [row] = await it.journal.read_rows([7])
    assert (row.row_key, row.enqueued_ms, row.sequence) == (7, NOW_MS + 5, None)
    assert (row.delivery_count, row.is_deferred) == (0, False)
    assert row.envelope.properties == b"props"
    assert row.envelope.application_properties == b"app"
    assert row.envelope.body == b"body"


async def test_keys_load_in_order_by_sub_queue(store: Store) -> None:
    blocks = [DEAD_BLOCK, ReserveBlock(4_000_000, 256, 1, SubQueue.ACTIVE, 1_000_001)]
    async with driven(store) as it:
        await it.commit(outcome(mutations=blocks))
        keys = [3, 1, 2, 4_000_001, 4_000_000]
        await it.commit(outcome([insert(key) for key in keys]))
        await it.commit(outcome(deletes=[2]))
        await it.commit(outcome(mutations=[dead_letter(3)]))
    loaded = await reload(store)
    assert {name: list(keys) for name, keys in loaded.keys.items()} == {
        (1, SubQueue.ACTIVE): [1, 4_000_000, 4_000_001],
        (1, SubQueue.DEAD_LETTER): [DEAD_KEY],
    }
    assert loaded.next_sequence == {1: 1_000_257}


async def test_blocks_without_rows_are_forgotten_but_bound_the_numbers(store: Store) -> None:
    async with driven(store) as it:
        for number in range(1, 5):
            await it.commit(
                outcome(mutations=[block(number * 2_000_000, 256, first_sequence=number * 256)])
            )
        await it.commit(outcome([insert(4_000_001)]))
    loaded = await reload(store)
    assert [found.first_key for found in loaded.blocks] == [4_000_000, 8_000_000]
    assert loaded.next_row_key == 8_000_256
    again = await reload(store)
    assert again.next_row_key == loaded.next_row_key
    assert again.blocks == loaded.blocks


async def test_patch_changes_only_its_fields(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(1), insert(2)]))
        await it.commit(
            outcome(mutations=[PatchMessage(1, True, None, None)]),
            outcome(mutations=[PatchMessage(1, None, 4, None)]),
        )
        await it.commit(outcome(mutations=[PatchMessage(1, None, None, b"changed")]))
        [row, other] = await it.journal.read_rows([1, 2])
        assert (row.is_deferred, row.delivery_count) == (True, 4)
        assert row.envelope.application_properties == b"changed"
        assert (other.is_deferred, other.envelope.application_properties) == (False, b"")
        loaded = await reload(store)
        assert loaded.deferred == {(1, SubQueue.ACTIVE): {1: 1}}


async def test_deferred_mark_is_taken_back(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(1)]))
        await it.commit(outcome(mutations=[PatchMessage(1, True, None, None)]))
        await it.commit(outcome(mutations=[PatchMessage(1, False, None, None)]))
    assert (await reload(store)).deferred == {}


@pytest.mark.parametrize("body", [b"small", bytes(20_000), bytes(3 << 20)], ids=len)
async def test_dead_lettering_moves_the_row_with_patch_number_and_body(
    store: Store, database: str, body: bytes
) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome([insert(5, body), insert(6)], mutations=[DEAD_BLOCK]))
        await it.commit(outcome(mutations=[PatchMessage(5, None, 2, b"patched")]))
        await it.commit(outcome(mutations=[dead_letter(5)]))
        assert await it.journal.read_rows([5]) == []
        [row] = await it.journal.read_numbers(1, SubQueue.DEAD_LETTER, 1, 10)
        assert (row.row_key, row.sequence, row.delivery_count) == (DEAD_KEY, 5, 3)
        assert row.enqueued_ms == NOW_MS
        assert row.envelope.application_properties == b"patched"
        assert row.envelope.body == body
        assert await look.fetchval("select count(*) from patch") == 0
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(deletes=[DEAD_KEY]))
        await it.journal.upkeep(NOW_MS)
        for table in SIDE_TABLES:
            assert await look.fetchval(f"select count(*) from {table}") == 0, table


async def test_move_replaces_given_properties_and_time(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(5)], mutations=[DEAD_BLOCK]))
        move = dead_letter(5, enqueued_ms=NOW_MS + 9, application_properties=b"why")
        await it.commit(outcome(mutations=[move]))
        [row] = await it.journal.read_rows([DEAD_KEY])
    assert (row.enqueued_ms, row.envelope.application_properties) == (NOW_MS + 9, b"why")


async def test_the_death_of_a_moved_row_is_read_with_it(store: Store) -> None:
    deaths = [Death(NOW_MS + 5, 3, Receiver("link \0 ä", "192.0.2.7")), Death(NOW_MS + 6), None]
    async with driven(store) as it:
        await it.commit(outcome([insert(number) for number in (1, 2, 3)]))
        moves = [
            dead_letter(number, DEAD_KEY + number, death=death)
            for number, death in enumerate(deaths, 1)
        ]
        await it.commit(outcome(mutations=[DEAD_BLOCK, *moves]))
        rows = await it.journal.read_numbers(1, SubQueue.DEAD_LETTER, 0, 10)
    assert [row.death for row in rows] == deaths


async def test_row_moved_right_after_its_insert_is_moved_by_the_next_commit(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(
            outcome([insert(5)], mutations=[DEAD_BLOCK]),
            outcome(mutations=[dead_letter(5)], touches_uncommitted=True),
            outcome(deletes=[DEAD_KEY], touches_uncommitted=True),
        )
        assert it.seen.batches == [1, 1, 1]
    assert (await reload(store)).keys == {}


@pytest.mark.parametrize("body", [b"small", bytes(20_000)], ids=len)
async def test_schedule_is_loaded_activated_and_cancelled(
    store: Store, database: str, body: bytes
) -> None:
    async with driven(store) as it, connected(database) as look:
        scheduled = [insert(SCHEDULED_KEY + number, body) for number in range(3)]
        dues = [
            PutDue(SCHEDULED_KEY + number, 1, NOW_MS - number, 70 + number) for number in range(3)
        ]
        await it.commit(outcome(scheduled, mutations=[SCHEDULED_BLOCK, *dues]))
        [row] = await it.journal.read_rows([SCHEDULED_KEY + 1])
        assert row.sequence == 71
        loaded = await reload(store)
        assert loaded.due == [dues[2], dues[1], dues[0]]
        assert list(loaded.keys[1, SubQueue.SCHEDULED]) == [key.row_key for key in dues]
    async with driven(store) as it, connected(database) as look:
        activation = MoveMessage(
            SCHEDULED_KEY + 1, 9, 1, SubQueue.ACTIVE, 9, 0, NOW_MS + 60_000, None
        )
        await it.commit(outcome(mutations=[activation]), outcome(deletes=[SCHEDULED_KEY]))
        [row] = await it.journal.read_rows([9])
        assert (row.sequence, row.enqueued_ms, row.envelope.body) == (None, NOW_MS + 60_000, body)
        assert await look.fetchval("select count(*) from kept") == 0
        loaded = await reload(store)
        assert loaded.due == [dues[2]]
        assert list(loaded.keys[1, SubQueue.ACTIVE]) == [9]
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(deletes=[9, SCHEDULED_KEY + 2]))
        await it.journal.upkeep(NOW_MS)
        for table in SIDE_TABLES:
            assert await look.fetchval(f"select count(*) from {table}") == 0, table


async def test_latest_record_of_attempts_wins_and_dead_rows_have_none(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(1), insert(2), insert(3)]))
        await it.commit(outcome(mutations=[RecordAcquired([1, 2, 3], [1, 1, 1])]))
        await it.commit(
            outcome(mutations=[RecordAcquired([1, 2], [2, 2])]),
            outcome(mutations=[RecordAcquired([2], [1])]),
            outcome(deletes=[3]),
        )
    assert (await reload(store)).attempts == {1: 2, 2: 1}


async def test_size_is_scaled_to_the_live_count(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(key) for key in range(1, 11)]))
        await it.commit(outcome(mutations=[RecordSize(1, 1_000, 20), RecordSize(1, 1_000, 10)]))
        await it.commit(outcome(deletes=[1, 2, 3]))
    assert (await reload(store)).entities[0].size_bytes == 700


async def test_size_without_a_checkpoint_is_estimated(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(key, bytes(500)) for key in range(1, 101)]))
    assert 50_000 <= (await reload(store)).entities[0].size_bytes < 60_000


async def test_one_outcome_may_contain_every_mutation(store: Store) -> None:
    """A transaction's outcome: all kinds in one commit."""
    async with driven(store) as it:
        await it.commit(outcome([insert(1), insert(2), insert(3)], mutations=[DEAD_BLOCK]))
        await it.commit(
            outcome(
                [insert(4), insert(SCHEDULED_KEY, bytes(9_000))],
                [1],
                [
                    SCHEDULED_BLOCK,
                    PutDue(SCHEDULED_KEY, 1, NOW_MS, 8),
                    dead_letter(2),
                    PatchMessage(3, True, None, None),
                    RecordAcquired([3, 4], [1, 2]),
                    RecordSize(1, 400, 4),
                    definition(2, "bills"),
                ],
            )
        )
    loaded = await reload(store)
    assert {name: list(keys) for name, keys in loaded.keys.items()} == {
        (1, SubQueue.ACTIVE): [3, 4],
        (1, SubQueue.DEAD_LETTER): [DEAD_KEY],
        (1, SubQueue.SCHEDULED): [SCHEDULED_KEY],
    }
    assert loaded.attempts == {3: 1, 4: 2}
    assert loaded.deferred == {(1, SubQueue.ACTIVE): {3: 3}}
    assert loaded.due == [PutDue(SCHEDULED_KEY, 1, NOW_MS, 8)]
    assert [entity.entity_no for entity in loaded.entities] == [1, 2]


async def test_deferred_row_of_the_dead_letter_queue_keeps_its_number(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(5)], mutations=[DEAD_BLOCK]))
        await it.commit(outcome(mutations=[dead_letter(5)]))
        await it.commit(outcome(mutations=[PatchMessage(DEAD_KEY, True, None, None)]))
    assert (await reload(store)).deferred == {(1, SubQueue.DEAD_LETTER): {DEAD_KEY: 5}}


async def test_ranges_and_numbers_are_read_in_order_up_to_a_limit(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(key) for key in range(1, 2_501)], mutations=[DEAD_BLOCK]))
        found = await it.journal.read_range(10, 2_400, 1_500)
        assert [row.row_key for row in found] == list(range(10, 1_510))
        found = await it.journal.read_range(2_000, 2_400, 1_500)
        assert [row.row_key for row in found] == list(range(2_000, 2_400))
        moves = [dead_letter(20 - number, DEAD_KEY + number) for number in range(10)]
        await it.commit(outcome(mutations=moves))
        found = await it.journal.read_numbers(1, SubQueue.DEAD_LETTER, 13, 4)
        assert [row.sequence for row in found] == [13, 14, 15, 16]
        assert await it.journal.read_numbers(1, SubQueue.OUTBOX, 1, 4) == []
        assert await it.journal.read_rows([]) == []
