"""Time to live, schedules and defaults at the level of one partition."""

from __future__ import annotations

import pytest

from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import DAY_MS, LIMITS, QueueProperties, Sku
from postbus.entity.commands import (
    Cancelled,
    CancelScheduled,
    DeferredReceived,
    Disposition,
    LocksRenewed,
    ReceiveDeferred,
    ReceiveMode,
    Refused,
    RenewLocks,
    SetDemand,
    Settled,
    SubQueue,
)
from postbus.entity.outcomes import Outcome
from tests.entity.partition_rig import (
    DELETE,
    DLQ,
    QUEUE,
    TOPIC,
    Rig,
    message,
    name_of,
    properties_of,
)

COMPLETE, ABANDON = Disposition.COMPLETE, Disposition.ABANDON
LOCK_MS = 60_000
SUBSCRIPTION = 21
DEAD_LETTERING = QueueProperties(dead_lettering_on_message_expiration=True)


def names(deliveries: list) -> list[str]:
    return [name_of(delivery.envelope) for delivery in deliveries]


# --- B1 -------------------------------------------------------------------------------------------


@pytest.mark.behaviour("S68", "S69")
def test_expires_at_is_enqueued_time_plus_ttl() -> None:
    rig = Rig()
    rig.send(message("a", ttl_ms=5_000))
    rig.advance(700)
    rig.send(message("b", ttl_ms=5_000))
    first, second = rig.receive(count=2)
    assert first.ttl_ms == second.ttl_ms == 5_000
    assert second.enqueued_ms - first.enqueued_ms == 700


@pytest.mark.behaviour("S70", "S108")
def test_an_expired_message_is_dropped_and_not_returned() -> None:
    rig = Rig()
    rig.send(message("m", ttl_ms=1_000))
    rig.advance(1_000)
    assert rig.receive() == []
    assert rig.tables.rows == {}
    assert rig.peek_names(DLQ) == []


@pytest.mark.behaviour("S70")
def test_a_message_is_returned_until_the_very_instant() -> None:
    rig = Rig()
    rig.send(message("m", ttl_ms=1_000))
    rig.advance(999)
    assert names(rig.receive()) == ["m"]


@pytest.mark.behaviour("S71", "S72", "S73", "S280")
@pytest.mark.parametrize("properties", [QueueProperties(), DEAD_LETTERING])
def test_messages_do_not_expire_without_a_receiver(properties: QueueProperties) -> None:
    rig = Rig(properties)
    rig.send(message("m", ttl_ms=1))
    rig.consumer("A")  # attached, without demand
    rig.advance(10_000_000)
    assert rig.state.counts(QUEUE).active == 1
    assert rig.peek_names() == ["m"]
    assert rig.peek_names(DLQ) == []


@pytest.mark.behaviour("S74", "S75")
def test_live_messages_behind_expired_ones_are_returned() -> None:
    rig = Rig()
    rig.send(message("dead", ttl_ms=10), message("dead", ttl_ms=10), "live")
    rig.advance(10)
    assert names(rig.receive()) == ["live"]
    assert rig.state.counts(QUEUE).active == 1


@pytest.mark.behaviour("S76", "S80", "S81")
def test_a_lock_over_expiry_stays_valid_and_completes() -> None:
    rig = Rig()
    rig.send(message("m", ttl_ms=1_000))
    (held,) = rig.receive()
    rig.advance(2_000)
    assert held.enqueued_ms + held.ttl_ms < rig.now_ms
    assert rig.settle(COMPLETE, held) == Settled()
    assert rig.tables.rows == {}


@pytest.mark.behaviour("S80")
def test_the_expiry_shown_counts_from_the_enqueuing_not_from_the_delivery() -> None:
    rig = Rig()
    rig.send(message("m", ttl_ms=1_000))
    rig.advance(900)
    (held,) = rig.receive()
    rig.advance(101)
    assert held.enqueued_ms + held.ttl_ms == rig.now_ms - 1


@pytest.mark.behaviour("S77")
def test_expiry_takes_effect_when_the_lock_elapses() -> None:
    rig = Rig()
    rig.send(message("m", ttl_ms=1_000))
    rig.receive()
    rig.advance(LOCK_MS)
    assert rig.tables.rows == {}
    assert rig.receive() == []


@pytest.mark.behaviour("S78", "S82")
def test_expiry_takes_effect_when_the_message_is_abandoned() -> None:
    rig = Rig()
    rig.send(message("m", ttl_ms=1_000))
    held = rig.receive()
    rig.advance(1_000)
    assert rig.settle(ABANDON, *held) == Settled()
    assert rig.receive() == []
    assert rig.tables.rows == {}


@pytest.mark.behaviour("S79")
def test_a_lock_over_expiry_can_be_renewed() -> None:
    rig = Rig()
    rig.send(message("m", ttl_ms=1_000))
    (held,) = rig.receive()
    for _ in range(3):
        rig.advance(LOCK_MS - 1)
        reply = rig.apply(RenewLocks(QUEUE, SubQueue.ACTIVE, [held.lock_token]))
        assert isinstance(reply, LocksRenewed)
    assert rig.settle(COMPLETE, held) == Settled()


@pytest.mark.behaviour("S83")
def test_a_ttl_of_a_millisecond_is_accepted_and_may_be_over_at_once() -> None:
    rig = Rig()
    rig.send(message("m", ttl_ms=1))
    rig.advance(1)
    assert rig.receive() == []


def test_a_thousand_expire_by_one_command_and_the_rest_in_the_next() -> None:
    rig = Rig()
    rig.send(*[message("m", ttl_ms=1)] * 2_500, "live")
    rig.advance(1)
    rig.consumer("A")
    rig.results.clear()
    rig.demand("A", 1)
    deleted = [len(result.deletes) for result in rig.results if isinstance(result, Outcome)]
    assert max(deleted) <= 1_000
    assert sum(deleted) == 2_500
    assert names(rig.inbox("A")) == ["live"]


# --- B2 -------------------------------------------------------------------------------------------


@pytest.mark.behaviour("S84", "S85", "S86")
def test_a_scheduled_message_is_receivable_from_its_time_on() -> None:
    rig = Rig()
    due_ms = rig.now_ms + 5_000
    rig.send(message("later", scheduled_ms=due_ms), "now")
    rig.demand("A", 10)
    rig.advance(4_999)
    assert names(rig.inbox("A")) == ["now"]
    rig.advance(1)
    (delivery,) = rig.inbox("A")
    assert name_of(delivery.envelope) == "later"
    assert delivery.enqueued_ms == due_ms


@pytest.mark.behaviour("S87", "S88", "S89")
def test_the_ttl_of_a_scheduled_message_starts_at_its_time() -> None:
    rig = Rig()
    rig.send(message("m", scheduled_ms=rig.now_ms + 300_000, ttl_ms=60_000))
    rig.advance(300_000 + 59_999)
    (delivery,) = rig.receive()
    assert delivery.enqueued_ms + delivery.ttl_ms == rig.now_ms + 1
    rig.advance(1)
    rig.settle(ABANDON, delivery)
    assert rig.receive() == []


@pytest.mark.behaviour("S84", "S86")
def test_a_schedule_does_not_come_along_with_one_that_is_due_before() -> None:
    rig = Rig()
    due_ms = rig.now_ms + 1_000
    rig.send(message("later", scheduled_ms=due_ms + 500), message("first", scheduled_ms=due_ms))
    rig.advance(1_000)
    assert names(rig.receive(count=2)) == ["first"]
    rig.advance(499)
    assert rig.receive() == []
    rig.advance(1)
    (delivery,) = rig.receive()
    assert (name_of(delivery.envelope), delivery.enqueued_ms) == ("later", due_ms + 500)


@pytest.mark.behaviour("S84", "S85")
def test_schedules_survive_a_crash_and_overdue_ones_are_activated_at_once() -> None:
    rig = Rig()
    rig.send(message("m", scheduled_ms=rig.now_ms + 1_000))
    rig.crash()
    assert rig.receive() == []
    rig.now_ms += 2_000
    rig.crash()
    (delivery,) = rig.receive()
    assert delivery.enqueued_ms == rig.now_ms - 1_000


def test_a_cancelled_schedule_never_arrives() -> None:
    rig = Rig()
    first, second = rig.send(
        message("a", scheduled_ms=rig.now_ms + 100), message("b", scheduled_ms=rig.now_ms + 100)
    )
    assert isinstance(rig.apply(CancelScheduled(QUEUE, [first, 99])), Refused)
    assert rig.state.counts(QUEUE).scheduled == 2
    assert isinstance(rig.apply(CancelScheduled(QUEUE, [first])), Cancelled)
    rig.advance(100)
    assert names(rig.receive(count=2)) == ["b"]
    assert isinstance(rig.apply(CancelScheduled(QUEUE, [second])), Refused)


def test_numbers_of_scheduled_messages_are_never_reused() -> None:
    rig = Rig()
    numbers = rig.send(message("a", scheduled_ms=rig.now_ms + 100), "b", "c")
    rig.advance(100)
    delivered = [delivery.sequence for delivery in rig.receive(count=3)]
    assert len(set(numbers + delivered)) == 4
    assert delivered == [2, 3, 4]


def test_no_more_than_a_thousand_are_activated_by_one_command() -> None:
    rig = Rig()
    rig.checks = False
    rig.send(*[message("m", scheduled_ms=rig.now_ms + 50)] * 2_300)
    rig.results.clear()
    rig.advance(50)
    moves = [len(result.mutations) for result in rig.results if isinstance(result, Outcome)]
    assert max(moves) <= 1_000 + 10
    assert rig.state.counts(QUEUE).active == 2_300


# --- B3 -------------------------------------------------------------------------------------------


@pytest.mark.behaviour("S90", "S105")
def test_the_entity_default_applies_to_messages_without_ttl() -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=2_000))
    rig.send("a")
    (delivery,) = rig.receive()
    assert delivery.ttl_ms == 2_000
    rig.send("b")
    rig.advance(2_000)
    assert rig.receive() == []


@pytest.mark.behaviour("S105")
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("mode", list(ReceiveMode))
def test_every_way_to_receive_shows_the_default_of_the_entity(
    mode: ReceiveMode, is_deferred: bool
) -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=2_000))
    sent_ms = rig.now_ms
    numbers = rig.send("a")
    if is_deferred:
        rig.settle(Disposition.DEFER, *rig.receive("D"))
    rig.advance(500)
    if is_deferred:
        reply = rig.apply(ReceiveDeferred(QUEUE, SubQueue.ACTIVE, numbers, mode))
        assert isinstance(reply, DeferredReceived)
        (delivery,) = reply.deliveries
    else:
        (delivery,) = rig.receive(mode=mode)
    assert (delivery.enqueued_ms, delivery.ttl_ms) == (sent_ms, 2_000)


def test_limits_of_another_tier_apply_to_what_is_looked_at_afterwards() -> None:
    rig = Rig()
    rig.put_topic()
    rig.put_subscription(SUBSCRIPTION)
    rig.send("a", "b")
    rig.send("c", "d", entity_no=TOPIC)
    rig.advance(14 * DAY_MS)
    assert names(rig.receive(mode=DELETE)) == ["a"]
    assert names(rig.receive("B", mode=DELETE, entity_no=SUBSCRIPTION)) == ["c"]
    rig.state.set_limits(LIMITS[Sku.BASIC])
    assert rig.receive() == []
    assert rig.receive("B", entity_no=SUBSCRIPTION) == []


@pytest.mark.behaviour("S93", "S110")
def test_a_changed_default_applies_to_later_reads() -> None:
    rig = Rig()
    rig.send("old")
    rig.put(QueueProperties(default_message_ttl_ms=1_000))
    rig.send("new")
    rig.advance(1_000)
    rig.put(
        QueueProperties(default_message_ttl_ms=1_000, dead_lettering_on_message_expiration=True)
    )
    assert rig.receive(count=2) == []
    assert rig.peek_names(DLQ) == ["old", "new"]


@pytest.mark.behaviour("S94", "S95", "S96", "S97")
@pytest.mark.parametrize(
    ("own_ms", "effective_ms"), [(9_000, 5_000), (3_000, 3_000), (5_000, 5_000)]
)
def test_the_shorter_of_both_ttls_counts(own_ms: int, effective_ms: int) -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=5_000))
    rig.send(message("m", ttl_ms=own_ms))
    (delivery,) = rig.receive()
    assert delivery.ttl_ms == effective_ms
    rig.advance(effective_ms)
    rig.settle(ABANDON, delivery)
    assert rig.receive() == []


@pytest.mark.behaviour("S96")
@pytest.mark.parametrize("mode", list(ReceiveMode))
def test_an_own_ttl_below_the_default_counts_in_every_mode(mode: ReceiveMode) -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=5_000))
    rig.send(message("short", ttl_ms=3_000))
    (delivery,) = rig.receive(mode=mode)
    assert delivery.ttl_ms == 3_000
    rig.send(message("late", ttl_ms=3_000))
    rig.advance(3_000)
    assert rig.receive(mode=mode) == []


@pytest.mark.behaviour("S95", "S107")
@pytest.mark.parametrize("delay_ms", [0, 50])
def test_a_ttl_is_lowered_once_and_for_all_when_the_message_is_sent(delay_ms: int) -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=5_000))
    due_ms = rig.now_ms + delay_ms
    rig.send(message("m", ttl_ms=9_000, scheduled_ms=due_ms if delay_ms else None))
    assert [peeked.envelope.ttl_ms for peeked in rig.peek()] == [5_000]
    rig.put(QueueProperties())
    rig.crash()
    rig.advance(delay_ms + 4_999)
    (delivery,) = rig.receive()
    assert delivery.ttl_ms == 5_000
    rig.advance(1)
    rig.settle(ABANDON, delivery)
    assert rig.receive() == []


@pytest.mark.behaviour("S93", "S106")
def test_a_changed_default_leaves_an_own_ttl_alone() -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=5_000))
    rig.send(message("own", ttl_ms=3_000), "without")
    rig.put(QueueProperties(default_message_ttl_ms=1_000))
    rig.send(message("later", ttl_ms=3_000))
    rig.advance(1_000)
    (delivery,) = rig.receive(count=3)  # the other two live by the new default
    assert (name_of(delivery.envelope), delivery.ttl_ms) == ("own", 3_000)
    rig.settle(ABANDON, delivery)
    (again,) = rig.receive("R", mode=DELETE)
    assert (name_of(again.envelope), again.ttl_ms) == ("own", 3_000)


@pytest.mark.behaviour("S98", "S99")
def test_without_any_ttl_a_message_never_expires() -> None:
    rig = Rig()
    assert QueueProperties().default_message_ttl_ms == MAX_DURATION_MS
    rig.send("m")
    rig.advance(500 * 365 * 86_400_000)
    (delivery,) = rig.receive()
    assert delivery.ttl_ms is None


@pytest.mark.behaviour("S100")
def test_basic_caps_the_default_at_fourteen_days() -> None:
    rig = Rig(limits=LIMITS[Sku.BASIC])
    rig.send("m")
    (delivery,) = rig.receive()
    assert delivery.ttl_ms == 14 * 86_400_000


# --- B4 -------------------------------------------------------------------------------------------


@pytest.mark.behaviour("S104", "S105", "S106", "S107")
def test_peek_shows_the_own_ttl_and_computes_none() -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=2_000))
    rig.send("without", message("with", ttl_ms=1_500))
    without, own = rig.peek()
    assert without.envelope.ttl_ms is None
    assert own.envelope.ttl_ms == 1_500
    assert own.enqueued_ms == rig.now_ms
    assert [delivery.ttl_ms for delivery in rig.receive(count=2)] == [2_000, 1_500]


# --- B5 -------------------------------------------------------------------------------------------


@pytest.mark.behaviour("S109", "S111", "S261", "S278", "S281")
def test_expired_messages_are_dead_lettered_when_a_receiver_pulls() -> None:
    rig = Rig(DEAD_LETTERING)
    rig.send(*[message(f"m{n}", ttl_ms=100) for n in range(5)])
    rig.advance(100)
    assert rig.receive() == []
    dead = rig.receive(count=10, sub_queue=DLQ)
    assert names(dead) == [f"m{n}" for n in range(5)]
    for delivery in dead:
        properties = properties_of(delivery.envelope)
        assert properties["DeadLetterReason"] == "TTLExpiredException"
        assert properties["DeadLetterErrorDescription"] == (
            "The message expired and was dead lettered."
        )


@pytest.mark.behaviour("S281")
def test_with_the_flag_off_expired_messages_are_purged_when_a_receiver_pulls() -> None:
    rig = Rig()
    rig.send(*[message(f"m{n}", ttl_ms=100) for n in range(5)])
    rig.advance(100)
    assert rig.receive() == []
    assert rig.tables.rows == {}


@pytest.mark.behaviour("S110")
def test_the_flag_counts_at_the_moment_of_expiry() -> None:
    rig = Rig(DEAD_LETTERING)
    rig.send(message("m", ttl_ms=100))
    rig.advance(100)
    rig.put(QueueProperties())
    assert rig.receive() == []
    assert rig.peek_names(DLQ) == []


@pytest.mark.behaviour("S112", "S82")
def test_abandoning_an_expired_message_dead_letters_it() -> None:
    rig = Rig(DEAD_LETTERING)
    rig.send(message("m", ttl_ms=100))
    held = rig.receive()
    rig.advance(100)
    rig.settle(ABANDON, *held)
    assert rig.peek_names(DLQ) == ["m"]


@pytest.mark.behaviour("S113")
def test_an_elapsed_lock_on_an_expired_message_dead_letters_it() -> None:
    rig = Rig(DEAD_LETTERING)
    rig.send(message("m", ttl_ms=100))
    rig.receive()
    rig.advance(LOCK_MS)
    assert rig.peek_names(DLQ) == ["m"]
    assert rig.peek_names() == []


@pytest.mark.behaviour("S114")
def test_completing_an_expired_message_does_not_dead_letter_it() -> None:
    rig = Rig(DEAD_LETTERING)
    rig.send(message("m", ttl_ms=100))
    held = rig.receive()
    rig.advance(100)
    rig.settle(COMPLETE, *held)
    rig.advance(LOCK_MS)
    assert rig.peek_names(DLQ) == rig.peek_names() == []


@pytest.mark.behaviour("S115")
@pytest.mark.parametrize("is_committed", [True, False])
def test_after_a_crash_in_the_move_the_message_is_in_exactly_one_place(is_committed: bool) -> None:
    rig = Rig(DEAD_LETTERING)
    rig.send(message("m", ttl_ms=100))
    rig.advance(100)
    consumer_id = rig.consumer("A")
    rig.is_auto = False
    rig.submit(SetDemand(consumer_id, 1))
    if is_committed:
        rig.commit()
    rig.crash()
    rig.is_auto = True
    assert (rig.peek_names(), rig.peek_names(DLQ)) == (([], ["m"]) if is_committed else (["m"], []))


@pytest.mark.behaviour("S116")
def test_of_jobs_that_are_received_and_deleted_none_is_missing_and_none_is_in_both() -> None:
    rig = Rig(DEAD_LETTERING)
    jobs = [f"job{n}" for n in range(30)]
    rig.send(*[message(job, ttl_ms=5_000) for job in jobs])
    handled = []
    while batch := rig.receive(count=3, mode=DELETE):
        rig.advance(1_000)
        handled += names(batch)
    assert handled == jobs[:15]
    assert rig.peek_names(DLQ) == jobs[15:]
    assert rig.peek_names() == []


@pytest.mark.behaviour("S116")
def test_of_many_jobs_with_a_deadline_none_is_missing_and_none_is_in_both() -> None:
    rig = Rig(DEAD_LETTERING)
    jobs = [f"job{n}" for n in range(100)]
    rig.send(*[message(job, ttl_ms=20_000) for job in jobs])
    handled = []
    while batch := rig.receive(count=3):
        rig.advance(1_000)
        rig.settle(COMPLETE, *batch)
        handled += names(batch)
    rig.advance(LOCK_MS)
    rig.receive()
    dead = rig.peek_names(DLQ)
    assert sorted(handled + dead) == sorted(jobs)
    assert handled
    assert dead
