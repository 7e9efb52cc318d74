"""Entities come, change and go."""

from __future__ import annotations

import pytest

from postbus.contract.entities import EntityKind, EntityStatus, QueueProperties
from postbus.entity.commands import (
    AddConsumer,
    CancelScheduled,
    DeleteMessages,
    Disposition,
    Done,
    DropEntity,
    Enqueue,
    Peek,
    PutEntity,
    ReceiveDeferred,
    Refusal,
    Refused,
    RenewLocks,
    Settle,
)
from postbus.entity.outcomes import DropDefinition, Outcome
from tests.entity.partition_rig import ACTIVE, DLQ, PEEK_LOCK, QUEUE, Rig, message


@pytest.mark.parametrize(
    ("status", "refusal"),
    [
        (EntityStatus.DISABLED, Refusal.ENTITY_DISABLED),
        (EntityStatus.RECEIVE_DISABLED, Refusal.RECEIVE_DISABLED),
    ],
)
def test_disabling_ends_receivers_and_refuses_new_ones(
    status: EntityStatus, refusal: Refusal
) -> None:
    rig = Rig()
    rig.send("m")
    held = rig.receive("A")
    rig.consumer("D", sub_queue=DLQ)
    clients = list(rig.clients.values())
    rig.put(QueueProperties(status=status))
    assert [client.ended for client in clients] == [refusal, refusal]
    for command in (
        AddConsumer(QUEUE, ACTIVE, 50, PEEK_LOCK),
        ReceiveDeferred(QUEUE, ACTIVE, [1], PEEK_LOCK),
        DeleteMessages(QUEUE, ACTIVE, 1, rig.now_ms),
    ):
        reply = rig.apply(command)
        assert isinstance(reply, Refused)
        assert reply.refusal is refusal
    assert rig.apply(Settle(QUEUE, ACTIVE, [held[0].lock_token], Disposition.COMPLETE)).lost is None


def test_send_disabled_does_not_end_receivers() -> None:
    rig = Rig()
    rig.consumer("A")
    rig.put(QueueProperties(status=EntityStatus.SEND_DISABLED))
    assert rig.clients[rig.names["A"]].ended is None


def test_a_disabled_entity_keeps_its_messages() -> None:
    rig = Rig()
    rig.send("m")
    rig.put(QueueProperties(status=EntityStatus.DISABLED))
    rig.put(QueueProperties())
    assert len(rig.receive()) == 1


def test_dropping_ends_receivers_and_deletes_rows_in_chunks() -> None:
    rig = Rig()
    rig.checks = False
    rig.send(*["m"] * 2_400)
    rig.send(message("s", scheduled_ms=rig.now_ms + 1_000))
    rig.receive("A", 5)
    client = rig.clients[rig.names["A"]]
    rig.results.clear()
    assert rig.apply(DropEntity(QUEUE, 9)) == Done()
    (outcome,) = rig.results
    assert isinstance(outcome, Outcome)
    assert outcome.mutations == [DropDefinition(QUEUE, 9)]
    assert client.ended is Refusal.ENTITY_NOT_FOUND
    assert rig.state.counts(QUEUE) is None
    rig.advance(100_000)
    chunks = [len(result.deletes) for result in rig.results if isinstance(result, Outcome)]
    assert max(chunks) == 1_000
    assert sum(chunks) == 2_401
    assert rig.tables.rows == {}
    assert rig.budget.used_bytes == 0
    assert rig.state.catalog_version == 9


def test_a_drop_interrupted_by_a_crash_goes_on_after_it() -> None:
    rig = Rig()
    rig.send(*["m"] * 50)
    rig.apply(DropEntity(QUEUE, 9))
    assert len(rig.tables.rows) == 50
    rig.crash()
    assert rig.tables.rows == {}


def test_a_recreated_entity_starts_empty_under_another_number() -> None:
    rig = Rig()
    rig.send("old")
    rig.apply(DropEntity(QUEUE, 2))
    rig.apply(PutEntity(8, "queue-7", EntityKind.QUEUE, QueueProperties(), 3))
    rig.advance(100)
    assert rig.send("new", entity_no=8) == [1]


def test_every_command_for_an_unknown_entity_says_not_found() -> None:
    rig = Rig()
    for command in (
        Enqueue(9, []),
        Settle(9, ACTIVE, [], Disposition.COMPLETE),
        RenewLocks(9, ACTIVE, []),
        Peek(9, ACTIVE, 0, 1, 1),
        ReceiveDeferred(9, ACTIVE, [], PEEK_LOCK),
        CancelScheduled(9, []),
        DeleteMessages(9, ACTIVE, 1, 0),
        AddConsumer(9, ACTIVE, 1, PEEK_LOCK),
    ):
        assert rig.apply(command) == Refused(Refusal.ENTITY_NOT_FOUND)
    assert rig.apply(DropEntity(9, 1)) == Done()


def test_cancelling_on_a_disabled_entity_is_refused() -> None:
    rig = Rig()
    (number,) = rig.send(message("s", scheduled_ms=rig.now_ms + 1_000))
    rig.put(QueueProperties(status=EntityStatus.DISABLED))
    reply = rig.apply(CancelScheduled(QUEUE, [number]))
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.ENTITY_DISABLED


def test_definitions_survive_a_crash() -> None:
    rig = Rig(QueueProperties(max_delivery_count=4))
    rig.crash()
    entity = rig.state.entities.get(QUEUE)
    assert entity is not None
    assert entity.properties.max_delivery_count == 4
    assert entity.name == "queue-7"


def test_a_retained_entity_keeps_everything_and_ends_its_receivers() -> None:
    rig = Rig()
    rig.send("a", "b")
    rig.receive("A", 1)
    asleep = QueueProperties(status=EntityStatus.DISABLED)
    put = PutEntity(QUEUE, "queue-7", EntityKind.QUEUE, asleep, 2, is_retained=True)
    assert rig.apply(put) == Done()
    assert rig.clients[rig.names["A"]].ended is Refusal.ENTITY_NOT_FOUND
    rig.crash()
    refused = rig.apply(Enqueue(QUEUE, [message("c")]))
    assert isinstance(refused, Refused)
    rig.apply(PutEntity(QUEUE, "queue-7", EntityKind.QUEUE, QueueProperties(), 3))
    assert rig.peek_names() == ["a", "b"]
    assert rig.send("c")[0] > 2
