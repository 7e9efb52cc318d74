"""Dead letters that come back after they were resent: the count that stops them."""

from __future__ import annotations

import pytest

from postbus.entity.commands import (
    Disposition,
    MessagesHandled,
    Refusal,
    ResendBySequence,
    Settle,
    Settled,
)
from postbus.message.codec import Symbol, Value, encode_value
from postbus.message.envelope import Envelope
from postbus.message.fields import MAX_RESENDS, RESENDS, MessageFields
from tests.entity.partition_rig import ACTIVE, DLQ, QUEUE, Rig, message


def reject(rig: Rig) -> tuple[int, Envelope]:
    """Dead-letter the next message; return its number, and what the receiver got."""
    [delivery] = rig.receive("receiver", 1)
    lock = [delivery.lock_token]
    settle = Settle(QUEUE, ACTIVE, lock, Disposition.DEAD_LETTER, "poison", "")
    assert rig.apply(settle) == Settled()
    rig.detach("receiver")
    return delivery.sequence, delivery.envelope


def resend(rig: Rig, number: int, max_resends: int | None = None) -> MessagesHandled:
    command = ResendBySequence(QUEUE, DLQ, [number], QUEUE, max_resends=max_resends)
    reply = rig.apply(command)
    assert isinstance(reply, MessagesHandled), reply
    return reply


def test_a_message_that_comes_back_is_resent_as_often_as_is_allowed() -> None:
    rig = Rig()
    rig.send("back")
    number, envelope = reject(rig)
    assert envelope.annotation_count == 0
    for count in (1, 2):
        assert resend(rig, number, max_resends=2).refused == {}
        number, envelope = reject(rig)
        assert MessageFields(envelope).resends == count
        assert envelope.annotation_count == 1
    refused = resend(rig, number, max_resends=2).refused[number]
    assert refused.refusal is Refusal.NOT_ALLOWED
    assert "it was resent 2 times" in refused.detail
    assert resend(rig, number).refused == {}


@pytest.mark.parametrize(
    ("said", "resends"),
    [(Symbol("often"), 0), (True, 0), (-1, 0), (7, 7), (2**62, MAX_RESENDS)],
)
def test_a_count_of_resends_that_a_sender_has_written_is_bounded(said: Value, resends: int) -> None:
    sent = message("sent")
    sent.annotations = encode_value(Symbol(RESENDS)) + encode_value(said)
    sent.annotation_count = 1
    rig = Rig()
    rig.send(sent)
    number, _ = reject(rig)
    if resends:
        refused = resend(rig, number, max_resends=resends).refused
        assert refused[number].refusal is Refusal.NOT_ALLOWED
    assert resend(rig, number, max_resends=resends + 1).refused == {}
