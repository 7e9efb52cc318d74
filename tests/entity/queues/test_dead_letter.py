"""Part E at the level of one partition: the dead-letter queue."""

from __future__ import annotations

import pytest

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    Disposition,
    DropEntity,
    LocksRenewed,
    Refusal,
    Refused,
    RenewLocks,
    Settled,
)
from tests.entity.partition_rig import DELETE, DLQ, QUEUE, Rig, message, name_of, properties_of

COMPLETE, ABANDON = Disposition.COMPLETE, Disposition.ABANDON
DEAD_LETTER = Disposition.DEAD_LETTER
LOCK_MS = 60_000


def names(deliveries: list) -> list[str]:
    return [name_of(delivery.envelope) for delivery in deliveries]


def with_dead_letters(*letters: str) -> Rig:
    rig = Rig()
    rig.send(*letters)
    rig.settle(DEAD_LETTER, *rig.receive(count=len(letters)))
    return rig


@pytest.mark.behaviour("S240", "S245")
def test_a_new_queue_has_an_empty_dead_letter_queue_that_can_be_received_from() -> None:
    rig = Rig()
    assert rig.receive(sub_queue=DLQ) == []
    assert rig.state.counts(QUEUE).dead_letter == 0


@pytest.mark.behaviour("S54", "S245", "S285")
def test_dead_lettering_moves_the_message_at_once() -> None:
    rig = Rig()
    (sequence,) = rig.send("m")
    assert rig.settle(DEAD_LETTER, *rig.receive()) == Settled()
    assert rig.peek_names() == []
    (dead,) = rig.receive(sub_queue=DLQ)
    assert name_of(dead.envelope) == "m"
    assert dead.sequence == sequence
    assert rig.state.counts(QUEUE).dead_letter == 1


@pytest.mark.behaviour("S55", "S258", "S264")
def test_reason_and_description_are_stored_unchanged() -> None:
    rig = Rig()
    rig.send("m")
    held = rig.receive()
    rig.settle(
        DEAD_LETTER, *held, reason="bad payload", description="line 3: ä", properties={"k": "v"}
    )
    (dead,) = rig.receive(sub_queue=DLQ)
    assert properties_of(dead.envelope) == {
        "DeadLetterReason": "bad payload",
        "DeadLetterErrorDescription": "line 3: ä",
        "k": "v",
    }


def test_reason_and_description_have_a_limit() -> None:
    rig = Rig()
    rig.send("m")
    held = rig.receive()
    rig.settle(DEAD_LETTER, *held, reason="x" * 4_096, description="y" * 4_096)
    assert rig.state.counts(QUEUE).dead_letter == 1
    rig.send("n")
    held = rig.receive()
    for details in ({"reason": "x" * 4_097}, {"description": "x" * 4_097}):
        reply = rig.settle(DEAD_LETTER, *held, **details)
        assert isinstance(reply, Refused)
        assert reply.refusal is Refusal.ARGUMENT_OUT_OF_RANGE
    assert rig.settle(COMPLETE, *held) == Settled()


@pytest.mark.behaviour("S244")
def test_dropping_the_queue_drops_its_dead_letters() -> None:
    rig = with_dead_letters("a", "b")
    rig.send("c")
    rig.apply(DropEntity(QUEUE, 2))
    rig.advance(1_000)
    assert rig.tables.rows == {}


@pytest.mark.behaviour("S248", "S252")
def test_a_dead_letter_outlives_its_ttl() -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=1_000))
    rig.send(message("m", ttl_ms=500))
    rig.settle(DEAD_LETTER, *rig.receive())
    rig.demand("W", 1)
    rig.advance(100 * 86_400_000)
    assert names(rig.receive(sub_queue=DLQ)) == ["m"]


@pytest.mark.behaviour("S249")
def test_a_dead_letter_cannot_be_dead_lettered() -> None:
    rig = with_dead_letters("m")
    held = rig.receive(sub_queue=DLQ)
    reply = rig.settle(DEAD_LETTER, *held, sub_queue=DLQ)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.NOT_ALLOWED
    assert rig.peek_names(DLQ) == ["m"]


@pytest.mark.behaviour("S250")
def test_locks_work_in_the_dead_letter_queue_as_on_any_queue() -> None:
    rig = with_dead_letters("m")
    (held,) = rig.receive(sub_queue=DLQ)
    assert held.locked_until_ms == rig.now_ms + LOCK_MS
    assert rig.receive("E", sub_queue=DLQ) == []
    rig.advance(LOCK_MS - 1)
    reply = rig.apply(RenewLocks(QUEUE, DLQ, [held.lock_token]))
    assert reply == LocksRenewed([rig.now_ms + LOCK_MS])
    rig.advance(LOCK_MS)
    assert rig.settle(COMPLETE, held, sub_queue=DLQ) == Settled([0])
    (again,) = rig.receive(sub_queue=DLQ)
    assert again.delivery_count == 0  # expiry does not count here
    rig.settle(ABANDON, again, sub_queue=DLQ)
    (third,) = rig.receive(sub_queue=DLQ)
    assert third.delivery_count == 0  # and neither does abandoning
    assert rig.settle(COMPLETE, third, sub_queue=DLQ) == Settled()


@pytest.mark.behaviour("S253")
def test_a_completed_dead_letter_is_gone() -> None:
    rig = with_dead_letters("m")
    rig.settle(COMPLETE, *rig.receive(sub_queue=DLQ), sub_queue=DLQ)
    assert rig.tables.rows == {}
    rig.crash()
    assert rig.receive(sub_queue=DLQ) == []


@pytest.mark.behaviour("S254")
def test_a_dead_letter_may_be_abandoned_without_limit() -> None:
    rig = with_dead_letters("m")
    for _ in range(15):
        (held,) = rig.receive(sub_queue=DLQ)
        assert held.delivery_count == 0
        rig.settle(ABANDON, held, sub_queue=DLQ)
    rig.crash()
    (held,) = rig.receive(sub_queue=DLQ)
    assert held.delivery_count == 0
    rig.advance(1_000)  # the attempt that is out is journalled, and taken back with the lock
    rig.settle(ABANDON, held, sub_queue=DLQ)
    rig.crash()
    (held,) = rig.receive(sub_queue=DLQ)
    assert held.delivery_count == 0


@pytest.mark.behaviour("S255")
def test_a_resent_message_is_like_new() -> None:
    rig = with_dead_letters("m")
    (dead,) = rig.receive(sub_queue=DLQ)
    (sequence,) = rig.send(message("m"))
    rig.settle(COMPLETE, dead, sub_queue=DLQ)
    (delivery,) = rig.receive()
    assert (delivery.sequence, delivery.delivery_count) == (sequence, 0)


@pytest.mark.behaviour("S43", "S271", "S272", "S296")
def test_ten_abandons_show_the_message_ten_times_then_it_is_dead() -> None:
    rig = Rig()
    rig.send("m")
    counts = []
    while held := rig.receive():
        counts.append(held[0].delivery_count)
        rig.settle(ABANDON, *held)
    assert counts == list(range(10))
    assert rig.peek_names() == []
    assert rig.peek_names(DLQ) == ["m"]


@pytest.mark.behaviour("S44", "S256", "S257", "S265", "S271")
def test_elapsed_locks_exhaust_deliveries_with_that_reason() -> None:
    rig = Rig(QueueProperties(max_delivery_count=3))
    rig.send("m")
    for _ in range(3):
        assert names(rig.receive()) == ["m"]
        rig.advance(LOCK_MS)
    assert rig.peek_names(DLQ) == ["m"]  # without a request
    assert rig.receive() == []
    (dead,) = rig.receive(sub_queue=DLQ)
    assert properties_of(dead.envelope) == {
        "DeadLetterReason": "MaxDeliveryCountExceeded",
        "DeadLetterErrorDescription": "Message could not be consumed after 3 delivery attempts.",
    }
    assert dead.delivery_count == 3


@pytest.mark.behaviour("S45")
def test_abandons_and_elapsed_locks_add_up() -> None:
    rig = Rig(QueueProperties(max_delivery_count=4))
    rig.send("m")
    for attempt in range(4):
        held = rig.receive()
        assert held[0].delivery_count == attempt
        if attempt % 2:
            rig.settle(ABANDON, *held)
        else:
            rig.advance(LOCK_MS)
    assert rig.peek_names(DLQ) == ["m"]


@pytest.mark.behaviour("S275")
def test_with_a_maximum_of_one_the_first_abandon_dead_letters() -> None:
    rig = Rig(QueueProperties(max_delivery_count=1))
    rig.send("m")
    rig.settle(ABANDON, *rig.receive())
    assert rig.peek_names(DLQ) == ["m"]


@pytest.mark.behaviour("S274")
def test_a_very_large_maximum_never_fires() -> None:
    rig = Rig(QueueProperties(max_delivery_count=2_147_483_647))
    rig.send("m")
    for _ in range(200):
        rig.settle(ABANDON, *rig.receive())
    assert rig.receive()[0].delivery_count == 200


@pytest.mark.behaviour("S266", "S277")
def test_defaults_of_a_queue() -> None:
    properties = QueueProperties()
    assert properties.max_delivery_count == 10
    assert properties.dead_lettering_on_message_expiration is False


@pytest.mark.behaviour("S270")
def test_receive_and_delete_never_dead_letters() -> None:
    rig = Rig(QueueProperties(max_delivery_count=1))
    rig.send(*"abc")
    assert names(rig.receive("R", 3, mode=DELETE)) == ["a", "b", "c"]
    assert rig.peek_names(DLQ) == []


@pytest.mark.behaviour("S297")
def test_receiving_all_messages_empties_the_dead_letter_queue() -> None:
    letters = [f"m{n}" for n in range(25)]
    rig = with_dead_letters(*letters)
    seen = []
    while batch := rig.receive(count=4, sub_queue=DLQ):
        seen += names(batch)
        rig.settle(COMPLETE, *batch, sub_queue=DLQ)
    assert seen == letters
    assert rig.tables.rows == {}


@pytest.mark.behaviour("S259")
def test_properties_that_outgrow_the_header_dead_letter_the_message() -> None:
    rig = Rig()
    rig.send("m")
    held = rig.receive()
    rig.settle(ABANDON, *held, properties={f"k{n}": "x" * 30_000 for n in range(3)})
    (dead,) = rig.receive(sub_queue=DLQ)
    assert properties_of(dead.envelope) == {
        "DeadLetterReason": "HeaderSizeExceeded",
        "DeadLetterErrorDescription": "The size quota for this stream has been exceeded.",
    }


@pytest.mark.behaviour("S249")
@pytest.mark.parametrize("disposition", [ABANDON, Disposition.DEFER])
def test_properties_set_on_a_dead_letter_do_not_replace_its_reason(
    disposition: Disposition,
) -> None:
    rig = Rig()
    rig.send("m")
    rig.settle(DEAD_LETTER, *rig.receive(), reason="mine")
    held = rig.receive(sub_queue=DLQ)
    large = {f"k{n}": "x" * 30_000 for n in range(3)}
    reply = rig.settle(disposition, *held, sub_queue=DLQ, properties=large)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.PROPERTIES_TOO_LARGE
    rig.settle(ABANDON, *held, sub_queue=DLQ, properties={"seen": "1"})
    (dead,) = rig.receive(sub_queue=DLQ)
    assert properties_of(dead.envelope) == {"DeadLetterReason": "mine", "seen": "1"}


def test_dead_lettering_with_too_large_properties_is_refused_whole() -> None:
    rig = Rig()
    rig.send("m", "n")
    held = rig.receive(count=2)
    large = {f"k{n}": "x" * 30_000 for n in range(3)}
    reply = rig.settle(DEAD_LETTER, *held, properties=large)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.PROPERTIES_TOO_LARGE
    assert rig.settle(COMPLETE, *held) == Settled()


def test_a_waiting_receiver_of_the_dead_letter_queue_gets_new_dead_letters() -> None:
    rig = Rig()
    rig.consumer("D", sub_queue=DLQ)
    rig.demand("D", 5)
    rig.send("m")
    rig.settle(DEAD_LETTER, *rig.receive())
    assert names(rig.inbox("D")) == ["m"]


def test_modified_properties_are_on_the_next_delivery_and_survive() -> None:
    rig = Rig()
    rig.send("m")
    rig.settle(ABANDON, *rig.receive(), properties={"tries": "1"})
    (again,) = rig.receive()
    assert properties_of(again.envelope) == {"tries": "1"}
    rig.crash()
    (later,) = rig.receive()
    assert properties_of(later.envelope) == {"tries": "1"}
    rig.settle(DEAD_LETTER, later, reason="r")
    (dead,) = rig.receive(sub_queue=DLQ)
    assert properties_of(dead.envelope) == {"tries": "1", "DeadLetterReason": "r"}
