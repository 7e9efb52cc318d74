"""Part A at the level of one partition: sending, receiving, settling, losing locks."""

from __future__ import annotations

import pytest

from postbus.contract.entities import EntityStatus, QueueProperties
from postbus.entity.commands import (
    AddConsumer,
    Disposition,
    Enqueue,
    Enqueued,
    LocksRenewed,
    Refusal,
    Refused,
    RenewLocks,
    SetDemand,
    Settle,
    Settled,
)
from postbus.entity.outcomes import Deliver, Outcome
from tests.entity.partition_rig import ACTIVE, DELETE, DLQ, QUEUE, Rig, message, name_of

COMPLETE, ABANDON = Disposition.COMPLETE, Disposition.ABANDON
LOCK_MS = 60_000


def names(deliveries: list) -> list[str]:
    return [name_of(delivery.envelope) for delivery in deliveries]


def renew(rig: Rig, *deliveries) -> object:
    tokens = [delivery.lock_token for delivery in deliveries]
    return rig.apply(RenewLocks(QUEUE, ACTIVE, tokens))


# --- sending --------------------------------------------------------------------------------------


@pytest.mark.behaviour("S1", "S11", "S12", "S15")
def test_pipelined_sends_are_numbered_and_stored_in_send_order() -> None:
    rig = Rig(is_auto=False)
    replies = [rig.submit(Enqueue(QUEUE, [message(f"m{n}")])) for n in range(10)]
    rig.commit()
    assert [reply[0].sequence_numbers for reply in replies] == [[n] for n in range(1, 11)]
    assert names(rig.receive(count=10)) == [f"m{n}" for n in range(10)]


@pytest.mark.behaviour("S2")
def test_accepted_is_not_released_before_the_commit() -> None:
    rig = Rig(is_auto=False)
    rig.consumer("A")
    rig.demand("A", 1)
    replies = rig.submit(Enqueue(QUEUE, [message("m")]))
    assert replies == []
    assert rig.inbox("A") == []
    rig.commit()
    assert replies == [Enqueued([1])]
    assert names(rig.inbox("A")) == ["m"]


@pytest.mark.behaviour("S3")
def test_an_accepted_message_survives_a_crash() -> None:
    rig = Rig()
    rig.send("m")
    rig.crash()
    assert names(rig.receive()) == ["m"]


@pytest.mark.behaviour("S4", "S10", "S16")
def test_one_bad_send_of_a_hundred_fails_alone_without_a_trace() -> None:
    rig = Rig()
    messages = [message(f"m{n}") for n in range(100)]
    messages[40] = message("huge", size_bytes=256 * 1024 + 1)
    reply = rig.apply(Enqueue(QUEUE, messages))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    assert {n: r.refusal for n, r in reply.refusals.items()} == {40: Refusal.MESSAGE_TOO_LARGE}
    assert rig.state.counts(QUEUE).active == 99
    assert "huge" not in rig.peek_names()


@pytest.mark.behaviour("S4", "S10")
def test_an_atomic_batch_is_stored_whole_or_not_at_all() -> None:
    rig = Rig()
    batch = [message("a"), message("b", size_bytes=300_000)]
    reply = rig.apply(Enqueue(QUEUE, batch, is_atomic=True))
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.MESSAGE_TOO_LARGE
    assert rig.peek_names() == []
    assert rig.tables.rows == {}


@pytest.mark.behaviour("S4")
@pytest.mark.parametrize(
    ("status", "refusal"),
    [
        (EntityStatus.DISABLED, Refusal.ENTITY_DISABLED),
        (EntityStatus.SEND_DISABLED, Refusal.SEND_DISABLED),
    ],
)
def test_a_disabled_entity_refuses_sends(status: EntityStatus, refusal: Refusal) -> None:
    rig = Rig(QueueProperties(status=status))
    reply = rig.apply(Enqueue(QUEUE, [message()]))
    assert isinstance(reply, Refused)
    assert reply.refusal is refusal


@pytest.mark.behaviour("S4")
def test_a_full_entity_refuses_until_a_message_is_removed() -> None:
    rig = Rig()
    mebi = 1024 * 1024
    entity = rig.state.entities.get(QUEUE)
    rig.send(message("a", size_bytes=1000))
    entity.max_size_bytes = 1500
    reply = rig.apply(Enqueue(QUEUE, [message("b", size_bytes=501)]))
    assert reply.refusals[0].refusal is Refusal.QUOTA_EXCEEDED
    assert rig.apply(Enqueue(QUEUE, [message("b", size_bytes=501)], True)).refusal is (
        Refusal.QUOTA_EXCEEDED
    )
    rig.settle(COMPLETE, *rig.receive())
    rig.send(message("b", size_bytes=501))
    assert QueueProperties().max_size_in_megabytes * mebi == 1 << 30


def test_an_unknown_entity_is_refused() -> None:
    rig = Rig()
    reply = rig.apply(Enqueue(99, [message()]))
    assert reply == Refused(Refusal.ENTITY_NOT_FOUND)


# --- receive-and-delete ---------------------------------------------------------------------------


@pytest.mark.behaviour("S25", "S26")
def test_receive_and_delete_deletes_before_the_transfer_leaves() -> None:
    rig = Rig(is_auto=False)
    rig.send("m")
    consumer_id = rig.consumer("R", mode=DELETE)
    rig.submit(SetDemand(consumer_id, 1))
    assert rig.inbox("R") == []
    assert len(rig.tables.rows) == 1
    rig.commit()
    assert names(rig.inbox("R")) == ["m"]
    assert rig.tables.rows == {}
    rig.crash()
    rig.is_auto = True
    assert rig.receive() == []


@pytest.mark.behaviour("S27")
def test_receive_and_delete_flows_as_long_as_there_is_demand() -> None:
    rig = Rig()
    rig.consumer("R", mode=DELETE)
    rig.demand("R", 5)
    for n in range(7):
        rig.send(f"m{n}")
    assert names(rig.inbox("R")) == ["m0", "m1", "m2", "m3", "m4"]
    rig.demand("R", 5)
    assert names(rig.inbox("R")) == ["m5", "m6"]


@pytest.mark.behaviour("S28")
def test_a_received_and_deleted_message_has_no_lock_to_settle() -> None:
    rig = Rig()
    rig.send("m")
    (delivery,) = rig.receive("R", mode=DELETE)
    assert delivery.lock_token == b""
    assert rig.settle(COMPLETE, delivery) == Settled([0])


@pytest.mark.behaviour("S29")
def test_both_modes_on_one_queue_share_out_the_messages() -> None:
    rig = Rig()
    rig.consumer("R", mode=DELETE)
    rig.demand("R", 10)
    rig.demand("P", 10)
    rig.send(*(f"m{n}" for n in range(20)))
    seen = names(rig.inbox("R")) + names(rig.inbox("P"))
    assert len(seen) == len(set(seen)) == 20


# --- locks ----------------------------------------------------------------------------------------


@pytest.mark.behaviour("S30", "S33")
def test_a_locked_message_is_hidden_and_does_not_block_others() -> None:
    rig = Rig()
    rig.send("m1", "m2")
    assert names(rig.receive("A")) == ["m1"]
    assert names(rig.receive("B")) == ["m2"]
    assert rig.receive("C") == []


@pytest.mark.behaviour("S32")
def test_concurrent_receivers_never_hold_the_same_message() -> None:
    rig = Rig()
    rig.send(*(f"m{n}" for n in range(200)))
    held: set[str] = set()
    for turn in range(10):
        for receiver in "ABCDE":
            got = set(names(rig.receive(receiver, 1 + turn % 7)))
            assert not held & got
            held |= got
    assert len(held) == 170


@pytest.mark.behaviour("S34")
def test_locked_until_is_now_plus_the_lock_duration() -> None:
    rig = Rig(QueueProperties(lock_duration_ms=30_000))
    rig.send("m")
    rig.advance(1_234)
    (delivery,) = rig.receive()
    assert delivery.locked_until_ms == rig.now_ms + 30_000


@pytest.mark.behaviour("S36", "S37")
def test_renewal_keeps_the_lock_for_many_durations() -> None:
    rig = Rig()
    rig.send("m")
    (delivery,) = rig.receive("A")
    for _ in range(5):
        rig.advance(LOCK_MS - 1)
        assert renew(rig, delivery) == LocksRenewed([rig.now_ms + LOCK_MS])
        assert rig.receive("B") == []
    assert rig.settle(COMPLETE, delivery) == Settled()
    rig.advance(10 * LOCK_MS)
    assert rig.receive("B") == []


@pytest.mark.behaviour("S38")
def test_renewing_a_wrong_token_is_refused_and_renews_no_lock() -> None:
    rig = Rig()
    rig.send("m")
    (delivery,) = rig.receive()
    wrong = delivery._replace(lock_token=b"x" * 16)
    rig.advance(10)
    assert renew(rig, delivery, wrong) == Refused(Refusal.LOCK_LOST)
    rig.advance(LOCK_MS - 10)
    assert names(rig.receive("B")) == ["m"]


@pytest.mark.behaviour("S39", "S268")
def test_abandoning_returns_the_message_at_once_and_counts() -> None:
    rig = Rig()
    rig.send("m")
    (first,) = rig.receive("A")
    assert first.delivery_count == 0
    rig.settle(ABANDON, first)
    (second,) = rig.receive("B")
    assert second.delivery_count == 1
    assert second.sequence == first.sequence


@pytest.mark.behaviour("S39")
def test_an_abandoned_message_goes_at_once_to_a_receiver_that_waits() -> None:
    rig = Rig()
    rig.send("m")
    (first,) = rig.receive("A")
    rig.demand("B", 1)
    rig.settle(ABANDON, first)
    assert names(rig.inbox("B")) == ["m"]


@pytest.mark.behaviour("S40", "S269")
def test_an_elapsed_lock_returns_the_message_and_counts() -> None:
    rig = Rig()
    rig.send("m")
    rig.receive("A")
    rig.demand("B", 1)
    rig.advance(LOCK_MS - 1)
    assert rig.inbox("B") == []
    rig.advance(1)
    (again,) = rig.inbox("B")
    assert again.delivery_count == 1


@pytest.mark.behaviour("S41")
def test_an_abandoned_message_returns_to_its_place() -> None:
    rig = Rig()
    rig.send("m1", "m2", "m3", "m4", "m5")
    rig.settle(ABANDON, *rig.receive())
    assert names(rig.receive(count=5)) == ["m1", "m2", "m3", "m4", "m5"]


@pytest.mark.behaviour("S42")
def test_a_message_with_an_expired_lock_returns_to_its_place() -> None:
    rig = Rig()
    rig.send("m1", "m2", "m3", "m4", "m5")
    rig.receive(count=2)
    rig.advance(LOCK_MS)
    assert names(rig.receive(count=5)) == ["m1", "m2", "m3", "m4", "m5"]


def test_released_messages_return_to_their_places_uncounted() -> None:
    rig = Rig()
    rig.send("m1", "m2", "m3")
    taken = rig.receive(count=3)
    for delivery in (taken[2], taken[0], taken[1]):
        assert rig.settle(Disposition.RELEASE, delivery) == Settled()
    again = rig.receive(count=3)
    assert names(again) == ["m1", "m2", "m3"]
    assert [delivery.delivery_count for delivery in again] == [0, 0, 0]


def test_every_delivery_has_a_token_of_its_own() -> None:
    rig = Rig()
    rig.send("m")
    tokens = set()
    for _ in range(5):
        (delivery,) = rig.receive()
        tokens.add(delivery.lock_token)
        assert delivery.lock_token[8:] == b"\x00\x03" + (1).to_bytes(6, "big")
        rig.settle(Disposition.RELEASE, delivery)
    assert len(tokens) == 5


# --- settling -------------------------------------------------------------------------------------


@pytest.mark.behaviour("S47", "S48")
def test_a_completed_message_is_gone_for_good() -> None:
    rig = Rig()
    rig.send("m")
    assert rig.settle(COMPLETE, *rig.receive()) == Settled()
    rig.advance(2 * LOCK_MS)
    assert rig.receive() == []
    assert rig.tables.rows == {}
    rig.crash()
    assert rig.receive() == []


@pytest.mark.behaviour("S49")
def test_each_of_many_settlements_gets_its_own_answer() -> None:
    rig = Rig(is_auto=False)
    rig.send(*"abcdef")
    taken = rig.receive(count=6)
    unknown = b"?" * 16
    replies = [rig.submit(Settle(QUEUE, ACTIVE, [d.lock_token, unknown], COMPLETE)) for d in taken]
    rig.commit()
    assert replies == [[Settled([1])]] * 6


@pytest.mark.behaviour("S49")
@pytest.mark.parametrize("disposition", list(Disposition))
def test_a_lost_lock_among_many_is_named_by_its_place(disposition: Disposition) -> None:
    rig = Rig()
    rig.send(*"abcd")
    tokens = [delivery.lock_token for delivery in rig.receive(count=4)]
    tokens[2] = b"?" * 16
    assert rig.apply(Settle(QUEUE, ACTIVE, tokens, disposition)) == Settled([2])


@pytest.mark.behaviour("S50", "S65", "S66")
def test_completing_after_the_lock_elapsed_is_answered_lock_lost_each_time() -> None:
    rig = Rig()
    rig.send("m")
    (old,) = rig.receive("A")
    rig.advance(LOCK_MS)
    assert rig.settle(COMPLETE, old) == Settled([0])
    assert rig.settle(COMPLETE, old) == Settled([0])
    assert names(rig.receive("B")) == ["m"]


@pytest.mark.behaviour("S50")
def test_a_lock_is_lost_at_its_instant_even_before_a_tick() -> None:
    rig = Rig()
    rig.send("m", "n")
    held = rig.receive(count=2)
    rig.now_ms += LOCK_MS  # no Tick came yet
    assert rig.apply(Settle(QUEUE, ACTIVE, [held[0].lock_token], COMPLETE)) == Settled([0])
    assert rig.apply(Settle(QUEUE, ACTIVE, [held[1].lock_token], ABANDON)) == Settled([0])
    assert names(rig.receive("B", 2)) == ["m", "n"]


@pytest.mark.behaviour("S51")
def test_dead_lettering_after_the_lock_elapsed_is_refused() -> None:
    rig = Rig()
    rig.send("m")
    held = rig.receive()
    rig.advance(LOCK_MS)
    assert rig.settle(Disposition.DEAD_LETTER, *held, reason="late") == Settled([0])
    assert rig.peek_names(DLQ) == []
    assert rig.peek_names() == ["m"]


@pytest.mark.behaviour("S51")
@pytest.mark.parametrize("late_ms", [0, 1])
def test_dead_lettering_an_elapsed_lock_is_refused_even_before_a_tick(late_ms: int) -> None:
    rig = Rig()
    rig.send("m")
    (held,) = rig.receive()
    rig.now_ms += LOCK_MS + late_ms  # no Tick came yet
    settle = Settle(QUEUE, ACTIVE, [held.lock_token], Disposition.DEAD_LETTER)
    assert rig.apply(settle) == Settled([0])
    assert rig.peek_names(DLQ) == []
    assert names(rig.receive("B")) == ["m"]


@pytest.mark.behaviour("S52")
def test_an_elapsed_lock_cannot_be_renewed() -> None:
    rig = Rig()
    rig.send("m")
    (held,) = rig.receive()
    rig.now_ms += LOCK_MS
    assert renew(rig, held) == Refused(Refusal.LOCK_LOST)
    rig.tick_now()
    assert renew(rig, held) == Refused(Refusal.LOCK_LOST)
    assert names(rig.receive("B")) == ["m"]


@pytest.mark.behaviour("S53")
def test_settling_on_a_dropped_entity_is_refused() -> None:
    rig = Rig()
    reply = rig.apply(Settle(99, ACTIVE, [b"x" * 16], COMPLETE))
    assert reply == Refused(Refusal.ENTITY_NOT_FOUND)


@pytest.mark.behaviour("S57", "S58")
def test_the_message_id_stays_over_redelivery_and_dead_lettering() -> None:
    rig = Rig()
    rig.send("id-1")
    for _ in range(3):
        (delivery,) = rig.receive()
        assert delivery.envelope.message_id == b"id-1"
        rig.settle(ABANDON, delivery)
    rig.settle(Disposition.DEAD_LETTER, *rig.receive())
    (dead,) = rig.receive(sub_queue=DLQ)
    assert dead.envelope.message_id == b"id-1"


@pytest.mark.behaviour("S59", "S60")
def test_a_lock_outlives_its_receiver_and_frees_the_message_when_it_elapses() -> None:
    rig = Rig()
    rig.send("m")
    rig.receive("A")
    rig.detach("A")
    assert rig.receive("B") == []
    rig.advance(LOCK_MS)
    assert names(rig.receive("B")) == ["m"]


def test_a_token_of_a_detached_receiver_still_settles() -> None:
    rig = Rig()
    rig.send("m")
    held = rig.receive("A")
    rig.detach("A")
    assert rig.settle(COMPLETE, *held) == Settled()


@pytest.mark.behaviour("S61", "S62")
def test_after_a_restart_old_tokens_are_lost_and_messages_come_again() -> None:
    rig = Rig()
    rig.send("m")
    held = rig.receive()
    rig.crash()
    assert rig.settle(COMPLETE, *held) == Settled([0])
    assert names(rig.receive()) == ["m"]


@pytest.mark.behaviour("S63")
def test_an_update_of_the_queue_keeps_locks_and_messages() -> None:
    rig = Rig()
    rig.send("m", "n")
    held = rig.receive(count=2)
    rig.put(QueueProperties(lock_duration_ms=5_000, max_delivery_count=3))
    assert rig.settle(COMPLETE, held[0]) == Settled()
    rig.advance(LOCK_MS)
    assert names(rig.receive()) == ["n"]


@pytest.mark.behaviour("S34", "S63")
def test_shorter_locks_expire_in_time_although_longer_ones_were_first() -> None:
    rig = Rig()
    rig.send("slow", "fast")
    rig.receive("A")
    rig.put(QueueProperties(lock_duration_ms=5_000))
    rig.receive("B")
    rig.demand("C", 2)
    rig.advance(5_000)
    fast = rig.inbox("C")
    assert names(fast) == ["fast"]
    rig.settle(COMPLETE, *fast)
    rig.advance(LOCK_MS - 5_000)
    assert names(rig.inbox("C")) == ["slow"]


@pytest.mark.behaviour("S67")
def test_the_new_token_of_a_redelivery_settles() -> None:
    rig = Rig()
    rig.send("m")
    (old,) = rig.receive()
    rig.advance(LOCK_MS)
    (new,) = rig.receive()
    assert rig.settle(COMPLETE, old) == Settled([0])
    assert rig.settle(COMPLETE, new) == Settled()
    assert rig.receive() == []


def test_a_vector_settles_the_held_and_names_the_lost() -> None:
    rig = Rig()
    rig.send(*"abcd")
    taken = rig.receive(count=4)
    rig.settle(COMPLETE, taken[1])
    assert rig.settle(COMPLETE, *taken) == Settled([1])
    assert rig.peek_names() == []


# --- receivers ------------------------------------------------------------------------------------


def test_four_receivers_with_equal_demand_get_equal_shares() -> None:
    rig = Rig()
    for receiver in "ABCD":
        rig.demand(receiver, 1_000)
    for burst in range(80):
        rig.send(*["m"] * (1 + burst % 50))
    shares = [len(rig.inbox(receiver)) for receiver in "ABCD"]
    total = sum(shares)
    assert all(0.20 <= share / total <= 0.30 for share in shares), shares


def test_receivers_share_a_backlog_equally() -> None:
    rig = Rig()
    rig.send(*["m"] * 400)
    for receiver in "ABCD":
        rig.consumer(receiver)
    for _ in range(25):
        for receiver in "ABCD":
            rig.demand(receiver, 4)
    assert [len(rig.inbox(receiver)) for receiver in "ABCD"] == [100] * 4


def test_a_lowered_limit_stops_deliveries() -> None:
    rig = Rig()
    consumer_id = rig.consumer("A")
    rig.apply(SetDemand(consumer_id, 10))
    rig.send("m1")
    rig.apply(SetDemand(consumer_id, 1))
    rig.send("m2")
    assert names(rig.inbox("A")) == ["m1"]


def test_a_drain_delivers_available_messages_and_withdraws_the_rest() -> None:
    rig = Rig()
    consumer_id = rig.consumer("A")
    rig.send("m1", "m2")
    reply = rig.apply(SetDemand(consumer_id, 5, is_drain=True))
    assert reply.delivered == 2
    rig.send("m3")
    assert names(rig.inbox("A")) == ["m1", "m2"]


def test_a_drain_looks_into_the_stored_backlog() -> None:
    rig = Rig()
    rig.send("m1", "m2", "m3")
    rig.crash()
    consumer_id = rig.consumer("A")
    assert rig.apply(SetDemand(consumer_id, 2, is_drain=True)).delivered == 2
    assert names(rig.inbox("A")) == ["m1", "m2"]


def test_commands_of_an_unknown_receiver_are_harmless() -> None:
    rig = Rig()
    assert rig.apply(SetDemand(77, 1)) == Refused(Refusal.ENTITY_NOT_FOUND)
    consumer_id = rig.consumer("A")
    rig.apply(AddConsumer(QUEUE, ACTIVE, consumer_id, DELETE))
    rig.send("m")
    (delivery,) = rig.receive("A")
    assert delivery.lock_token != b""


def test_deliveries_without_a_sink_are_given_back() -> None:
    rig = Rig(is_auto=False)
    rig.consumer("A")
    rig.commit()
    rig.submit(SetDemand(rig.names["A"], 1))
    rig.submit(Enqueue(QUEUE, [message("m")]))
    del rig.clients[rig.names.pop("A")]
    rig.commit()
    (delivery,) = rig.receive("B")
    assert delivery.delivery_count == 0


def test_deliver_names_entity_and_sub_queue() -> None:
    rig = Rig()
    rig.demand("A", 1)
    rig.submit(Enqueue(QUEUE, [message("m")]))
    outcome = rig.results[-1]
    assert isinstance(outcome, Outcome)
    (effect,) = outcome.effects
    assert isinstance(effect, Deliver)
    assert (effect.consumer_id, effect.entity_no, effect.sub_queue) == (1, QUEUE, ACTIVE)


@pytest.mark.behaviour("S4")
def test_oversized_properties_are_refused() -> None:
    rig = Rig()
    envelope = message("m", application_properties=b"\x00\x53\x74\xc1\x01\x00" + bytes(70_000))
    reply = rig.apply(Enqueue(QUEUE, [envelope]))
    assert reply.refusals[0].refusal is Refusal.PROPERTIES_TOO_LARGE
    assert rig.apply(Enqueue(QUEUE, [])) == Enqueued([])


def test_a_waiting_receiver_can_leave() -> None:
    rig = Rig()
    rig.demand("A", 5)
    rig.detach("A")
    rig.send("m")
    assert names(rig.receive("B")) == ["m"]
