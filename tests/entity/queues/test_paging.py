"""The ready window: order over memory and store, budget, fetching, stubs."""

from __future__ import annotations

from array import array

import pytest

from postbus.contract.entities import LIMITS, EntityKind, QueueProperties, Sku
from postbus.entity.commands import (
    AddConsumer,
    DeleteMessages,
    Disposition,
    DropEntity,
    Enqueue,
    PutEntity,
    ReceiveMode,
    Refused,
    SetDemand,
    SubQueue,
    SupplyRows,
)
from postbus.entity.outcomes import (
    Deliver,
    Fetch,
    LoadedEntity,
    LoadedPartition,
    Outcome,
    ReserveBlock,
)
from postbus.entity.partition_state import PartitionState, WindowBudget
from postbus.entity.queues import paging
from postbus.entity.queues.runs import ARE_VISITED
from postbus.entity.window import MESSAGE_OVERHEAD_BYTES
from tests.entity.partition_rig import (
    ACTIVE,
    DELETE,
    DLQ,
    QUEUE,
    Rig,
    message,
    name_of,
    properties_of,
)

COMPLETE, ABANDON, RELEASE = Disposition.COMPLETE, Disposition.ABANDON, Disposition.RELEASE
COST = 100 + MESSAGE_OVERHEAD_BYTES


def names(deliveries: list) -> list[str]:
    return [name_of(delivery.envelope) for delivery in deliveries]


def fetches(rig: Rig) -> list[Fetch]:
    return [
        effect
        for result in rig.results
        if isinstance(result, Outcome)
        for effect in result.effects
        if isinstance(effect, Fetch)
    ]


@pytest.mark.parametrize("budget_messages", [1, 3, 10, 40, 200])
def test_order_is_independent_of_the_budget(budget_messages: int) -> None:
    rig = Rig(budget_bytes=budget_messages * COST)
    expected = [f"m{n}" for n in range(120)]
    rig.send(*(message(name) for name in expected))
    seen = []
    while batch := rig.receive(count=7):
        rig.settle(RELEASE, *batch[::-1])
        again = rig.receive(count=len(batch))
        assert names(again) == names(batch)
        rig.settle(COMPLETE, *again)
        seen += names(batch)
    assert seen == expected
    assert rig.tables.rows == {}
    assert rig.budget.used_bytes == 0


def test_without_demand_a_full_budget_keeps_keys_only() -> None:
    rig = Rig(budget_bytes=8 * COST)
    rig.send(*(f"m{n}" for n in range(100)))
    assert rig.budget.used_bytes <= 8 * COST
    assert rig.state.counts(QUEUE).active == 100


def test_with_demand_messages_pass_a_full_budget_without_a_fetch() -> None:
    rig = Rig(budget_bytes=8 * COST)
    rig.send("x")
    rig.settle(COMPLETE, *rig.receive())
    rig.consumer("A")
    rig.demand("A", 100)
    rig.send(*(f"m{n}" for n in range(100)))
    assert len(rig.inbox("A")) == 100
    assert fetches(rig) == []


def test_a_message_larger_than_the_budget_is_still_delivered() -> None:
    rig = Rig(budget_bytes=1_000)
    rig.send(message("a", size_bytes=50_000), message("b", size_bytes=50_000))
    assert names(rig.receive(count=2)) == ["a", "b"]


def test_an_idle_backlog_cannot_starve_a_receiver_elsewhere() -> None:
    rig = Rig(budget_bytes=20 * COST)
    rig.put(QueueProperties(), entity_no=8)
    rig.send(*["idle"] * 200)
    rig.send(*(f"m{n}" for n in range(200)), entity_no=8)
    rig.consumer("B", entity_no=8)
    rig.results.clear()
    rig.demand("B", 200)
    assert names(rig.inbox("B")) == [f"m{n}" for n in range(200)]
    assert len(fetches(rig)) < 40


def test_a_fetch_asks_for_a_thousand_at_most_and_one_is_open() -> None:
    rig = Rig(is_auto=False)
    rig.checks = False
    for _ in range(5):
        rig.send(*["m"] * 500)
    rig.crash()
    consumer_id = rig.consumer("A")
    rig.submit(SetDemand(consumer_id, 10))
    rig.submit(SetDemand(consumer_id, 20))
    rig.submit(Enqueue(QUEUE, [message("new")]))
    (fetch,) = fetches(rig)
    assert fetch == Fetch(QUEUE, ACTIVE, list(range(1, 1_001)))
    rig.commit()
    rig.is_auto = True
    assert len(rig.inbox("A")) == 20


def test_new_messages_stay_loaded_behind_a_backlog() -> None:
    rig = Rig()
    rig.send(*(f"old{n}" for n in range(10)))
    rig.crash()
    rig.send(*(f"new{n}" for n in range(10)))
    rig.consumer("A")
    rig.results.clear()
    rig.demand("A", 20)
    assert names(rig.inbox("A")) == [f"old{n}" for n in range(10)] + [f"new{n}" for n in range(10)]
    assert len(fetches(rig)) == 1


def test_a_missing_row_of_a_live_message_is_a_broken_invariant() -> None:
    rig = Rig(is_auto=False)
    rig.send("a", "b")
    rig.crash()
    rig.submit(SetDemand(rig.consumer("A"), 2))
    with pytest.raises(AssertionError, match="is not stored"):
        rig.state.apply(SupplyRows(QUEUE, ACTIVE, rig.tables.read([2])), rig.now_ms)


def test_supplied_rows_that_were_deleted_meanwhile_are_ignored() -> None:
    rig = Rig(is_auto=False)
    rig.send("a", "b")
    rig.crash()
    rig.submit(SetDemand(rig.consumer("A"), 2))
    rig.apply(DropEntity(QUEUE, 2))
    rig.commit()
    assert rig.inbox("A") == [] if "A" in rig.names else True


def test_stubs_are_dead_lettered_with_their_own_properties() -> None:
    rig = Rig(QueueProperties(max_delivery_count=2), budget_bytes=2 * COST)
    rig.send(*(f"m{n}" for n in range(10)))
    for _ in range(2):
        taken = rig.receive(count=10)
        assert len(taken) == 10
        rig.advance(60_000)
    rig.advance(1_000)
    assert rig.peek_names() == []
    dead = rig.receive(count=10, sub_queue=DLQ)
    assert sorted(names(dead)) == [f"m{n}" for n in range(10)]
    assert {str(properties_of(d.envelope)["DeadLetterReason"]) for d in dead} == {
        "MaxDeliveryCountExceeded"
    }


def test_expired_stubs_are_dead_lettered_as_expired() -> None:
    properties = QueueProperties(dead_lettering_on_message_expiration=True)
    rig = Rig(properties, budget_bytes=2 * COST)
    rig.send(*(message(f"m{n}", ttl_ms=1_000) for n in range(10)))
    rig.receive(count=10)
    rig.advance(61_000)
    assert rig.state.counts(QUEUE).active == 0
    dead = rig.receive(count=10, sub_queue=DLQ)
    assert {str(properties_of(d.envelope)["DeadLetterReason"]) for d in dead} == {
        "TTLExpiredException"
    }


def test_settling_a_stub_with_properties_reads_its_row_first() -> None:
    rig = Rig(budget_bytes=COST)
    rig.send("a", "b", "c")
    taken = rig.receive(count=3)
    rig.settle(Disposition.DEAD_LETTER, *taken[:2], reason="r")
    rig.settle(ABANDON, taken[2], properties={"k": 1})
    assert rig.peek_names(DLQ) == ["a", "b"]
    assert [properties_of(d.envelope) for d in rig.receive()] == [{"k": 1}]


def test_receive_and_delete_pages_through_a_backlog() -> None:
    rig = Rig(budget_bytes=5 * COST)
    expected = [f"m{n}" for n in range(50)]
    rig.send(*expected)
    rig.crash()
    seen = []
    while batch := rig.receive("R", 9, mode=DELETE):
        seen += names(batch)
    assert seen == expected
    assert rig.tables.rows == {}
    assert rig.budget.used_bytes == 0


def test_discard_gives_the_budget_back() -> None:
    rig = Rig()
    rig.send(*["m"] * 10)
    rig.receive(count=3)
    assert rig.budget.used_bytes == 10 * COST
    rig.state.discard()
    assert rig.budget.used_bytes == 0


def test_partitions_share_one_budget() -> None:
    budget = WindowBudget(16 * COST)
    partitions = [
        PartitionState(
            partition_id=n,
            loaded=LoadedPartition(1, 0, 1),
            seed=n,
            budget=budget,
            limits=LIMITS[Sku.STANDARD],
        )
        for n in range(2)
    ]
    for state in partitions:
        state.apply(PutEntity(1, "q", EntityKind.QUEUE, QueueProperties(), 1), 1_000)
        for _ in range(20):
            state.apply(Enqueue(1, [message("m")]), 1_000)
            assert budget.used_bytes <= budget.limit_bytes
    partitions[0].discard()
    partitions[1].discard()
    assert budget.used_bytes == 0


def test_row_key_blocks_grow_and_numbers_run_on() -> None:
    rig = Rig()
    rig.checks = False
    numbers = []
    for _ in range(12):
        numbers += rig.send(*["m"] * 500)
    assert numbers == list(range(1, 6_001))
    sizes = [block.size for block in rig.tables.blocks.values()]
    assert sizes == [256, 1_024, 4_096, 16_384]
    rig.crash()
    assert rig.send("after") == [21_761]  # the rest of the last block is the only gap


def test_a_batch_larger_than_a_block_takes_several() -> None:
    rig = Rig()
    rig.checks = False
    assert rig.send(*["m"] * 3_000) == list(range(1, 3_001))
    assert [block.size for block in rig.tables.blocks.values()] == [256, 1_024, 4_096]


@pytest.mark.slow
def test_a_million_keys_load_and_deliver_from_the_front() -> None:
    count = 1_000_000
    blocks = [ReserveBlock(1, count, 1, ACTIVE, 1)]
    loaded = LoadedPartition(
        epoch=5,
        catalog_version=1,
        next_row_key=count + 1,
        entities=[LoadedEntity(1, "q", EntityKind.QUEUE, QueueProperties(), count * 100)],
        blocks=blocks,
        keys={(1, ACTIVE): array("q", range(1, count + 1))},
        next_sequence={1: count + 1},
    )
    state = PartitionState(
        partition_id=0,
        loaded=loaded,
        seed=1,
        budget=WindowBudget(1 << 26),
        limits=LIMITS[Sku.STANDARD],
    )
    assert state.counts(1).active == count
    state.apply(AddConsumer(1, SubQueue.ACTIVE, 1, ReceiveMode.PEEK_LOCK), 1_000)
    outcome = state.apply(SetDemand(1, 10), 1_000)
    assert isinstance(outcome, Outcome)
    (fetch,) = outcome.effects
    assert isinstance(fetch, Fetch)
    assert fetch.row_keys == list(range(1, 1_001))


def test_pump_hands_out_a_thousand_a_command() -> None:
    rig = Rig()
    rig.checks = False
    rig.send(*["m"] * 2_500)
    rig.consumer("A")
    rig.results.clear()
    rig.demand("A", 2_500)
    bursts = [
        len(effect.deliveries)
        for result in rig.results
        if isinstance(result, Outcome)
        for effect in result.effects
        if isinstance(effect, Deliver)
    ]
    assert bursts == [1_000, 1_000, 500]


def test_evicted_attempts_are_remembered() -> None:
    rig = Rig(budget_bytes=10 * COST)
    rig.put(QueueProperties(), entity_no=8)
    rig.send(*["m"] * 4)
    rig.receive(count=4)
    rig.advance(100)
    rig.crash()
    assert [d.delivery_count for d in rig.receive(count=1)] == [1]
    rig.send(*["x"] * 20, entity_no=8)
    rig.consumer("B", entity_no=8)
    rig.demand("B", 20)  # takes the place of the rows fetched above
    assert len(rig.inbox("B")) == 20
    assert [d.delivery_count for d in rig.receive(count=3)] == [1, 1, 1]


def test_fifty_thousand_messages_are_loaded_where_collections_visit_them() -> None:
    rig = Rig()
    rig.checks = False
    for _ in range(51):
        rig.state.apply(Enqueue(QUEUE, [message("m")] * 1_000), rig.now_ms)
    assert rig.state.counts(QUEUE).active == 51_000
    assert rig.budget.used_bytes == (50_000 if ARE_VISITED else 51_000) * COST


def test_new_messages_take_the_place_of_the_oldest_behind_a_backlog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part at a time: unloading all of a large window at once would stop the event loop."""
    monkeypatch.setattr(paging, "UNLOADED_MESSAGES", 2)
    rig = Rig(budget_bytes=16 * COST)
    rig.send("a", "b")
    rig.crash()
    rig.send(*"cdefghijklmnop")
    assert rig.budget.used_bytes == 14 * COST, "two are left to those with receivers"
    rig.send("q")
    assert rig.budget.used_bytes == 13 * COST
    rig.send("r", "s", "t")
    assert rig.budget.used_bytes == 14 * COST
    assert names(rig.receive(count=20)) == [*"abcdefghijklmnopqrst"]


def test_more_messages_than_have_room_behind_a_backlog_are_keys() -> None:
    rig = Rig(budget_bytes=16 * COST)
    rig.send("a")
    rig.crash()
    rig.send(*"bcdef")
    rig.send(*["x"] * 40)
    assert rig.budget.used_bytes == 0
    assert names(rig.receive(count=50)) == [*"abcdef", *["x"] * 40]


def test_waiting_receivers_unload_no_more_of_the_others_than_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paging, "UNLOADED_MESSAGES", 2)
    rig = Rig(budget_bytes=16 * COST)
    rig.put(QueueProperties(), entity_no=8)
    rig.send(*["x"] * 14, entity_no=8)
    rig.send(*"abcd")
    rig.receive(count=4)
    assert rig.budget.used_bytes == 16 * COST


def test_a_broken_application_section_does_not_keep_a_message_from_dying() -> None:
    rig = Rig(QueueProperties(max_delivery_count=1))
    rig.send(message("m", application_properties=b"\x00\x53\x74\xff"))
    held = rig.receive()
    reply = rig.settle(ABANDON, *held, properties={"k": 1})
    assert isinstance(reply, Refused)
    rig.settle(ABANDON, *held)
    (dead,) = rig.receive(sub_queue=DLQ)
    assert properties_of(dead.envelope)["DeadLetterReason"] == "MaxDeliveryCountExceeded"


def test_a_thousand_locks_elapse_by_one_command_and_the_rest_in_the_next() -> None:
    rig = Rig()
    rig.checks = False
    rig.send(*["m"] * 2_500)
    rig.demand("A", 2_500)
    rig.advance(30_000)
    rig.results.clear()
    rig.advance(30_000)
    again = rig.receive("B", 2_500)
    assert len(again) == 2_500
    assert {delivery.delivery_count for delivery in again} == {1}


def test_a_drain_reads_returned_stubs_too() -> None:
    rig = Rig(budget_bytes=COST)
    rig.send("a", "b", "c")
    rig.settle(RELEASE, *rig.receive(count=3))
    consumer_id = rig.consumer("B")
    assert rig.apply(SetDemand(consumer_id, 2, is_drain=True)).delivered == 2
    assert names(rig.inbox("B")) == ["a", "b"]


def test_rows_that_left_while_they_were_read_are_skipped() -> None:
    rig = Rig(is_auto=False)
    rig.send("a", "b", "c")
    rig.crash()
    rig.submit(SetDemand(rig.consumer("A"), 3))
    (fetch,) = fetches(rig)
    rows = rig.tables.read(fetch.row_keys)
    rig.pending[-1][0].effects.clear()  # the read is under way
    rig.apply(DeleteMessages(QUEUE, ACTIVE, 1, rig.now_ms))
    rig.submit(SupplyRows(QUEUE, ACTIVE, rows))
    rig.commit()
    assert names(rig.inbox("A")) == ["b", "c"]


def test_receive_and_delete_expires_and_exhausts_like_any_receiver() -> None:
    rig = Rig(QueueProperties(max_delivery_count=5))
    rig.send(message("old", ttl_ms=1_000), "tried", "good")
    old, tried = rig.receive(count=2)
    rig.settle(RELEASE, old)
    for _ in range(3):
        rig.settle(ABANDON, tried)
        old, tried = rig.receive(count=2)
        rig.settle(RELEASE, old)
    rig.settle(ABANDON, tried)
    rig.put(QueueProperties(max_delivery_count=3))
    rig.advance(1_000)
    assert names(rig.receive("R", 3, mode=DELETE)) == ["good"]
    assert rig.peek_names(DLQ) == ["tried"]


@pytest.mark.parametrize("sessions", [None, 20])
def test_large_messages_that_came_back_are_not_read_at_once(sessions: int | None) -> None:
    """Messages of a receiver that could not stay loaded return as keys and are read in parts."""
    size_bytes = 512 * 1024
    properties = QueueProperties(
        requires_session=sessions is not None,
        max_message_size_in_kilobytes=1_024,
        max_delivery_count=2,
    )
    rig = Rig(properties, budget_bytes=20 * size_bytes, limits=LIMITS[Sku.PREMIUM])
    for number in range(200):
        session = None if sessions is None else f"s{number % sessions}"
        rig.send(message(f"m{number}", size_bytes=size_bytes, session=session))
    names = ["A"] if sessions is None else [f"R{number}" for number in range(sessions)]
    rig.results.clear()
    for _ in range(2):
        for name in names:
            if sessions is not None:
                rig.accept(name)
        for name in names:
            rig.receive(name, 200)
        rig.advance(60_000)
        rig.advance(1)
    assert max(len(fetch.row_keys) for fetch in fetches(rig)) <= 64
    counts = rig.state.counts(QUEUE)
    assert counts is not None
    assert counts.dead_letter == 200
