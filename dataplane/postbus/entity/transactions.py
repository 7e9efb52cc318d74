"""Transactions: several operations of one partition in one outcome, all or nothing (ADR 21).

First all of them are checked, each as if those before it were applied, and nothing changes; then
all are applied, which cannot fail: there is no rollback. `partition_state` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from postbus.contract.entities import EntityStatus
from postbus.entity.commands import (
    CheckLocks,
    Disposition,
    Enqueue,
    Enqueued,
    Refusal,
    Refused,
    ReserveNumbers,
    Settle,
    Settled,
    StoredRow,
    Transact,
    Transacted,
)
from postbus.entity.outcomes import Needs
from postbus.entity.queues import locks, paging
from postbus.entity.queues.queue_state import properties_refusal
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.entity.topics.topic_state import TopicState
from postbus.message.envelope import Envelope
from postbus.rules.steps import APPLY_STEPS

if TYPE_CHECKING:
    from postbus.entity.queues.queue_state import QueueState
    from postbus.entity.queues.sub_queue import SubQueueState
    from postbus.entity.transfer.outbox import Outbox


@dataclass(slots=True)
class _Settlement:
    """A checked settlement. `envelopes` are restored if others unloaded them."""

    sub: SubQueueState
    command: Settle
    plan: locks.SettlePlan | None  # None completes
    envelopes: list[tuple[QueuedMessage, Envelope]]

    def apply(self) -> Settled:
        if self.plan is None:
            return locks.complete(self.sub, self.command.lock_tokens)
        for message, envelope in self.envelopes:
            paging.reload(self.sub, message, envelope)
        return locks.carry_out(self.sub, self.command, self.plan)


@dataclass(slots=True)
class _Sending:
    """Messages that were checked."""

    entity: QueueState
    command: Enqueue


@dataclass(slots=True)
class _Checked:
    """Results of the check pass so far."""

    steps: list[_Settlement | _Sending] = field(default_factory=list)
    tokens: set[bytes] = field(default_factory=set)
    taken_bytes: dict[int, int] = field(default_factory=dict)
    copies: int = 0
    needs: Needs = field(default_factory=Needs)
    is_short: bool = False  # something must be read first

    def note(self, needs: Needs) -> None:
        self.is_short = True
        for name in Needs.__slots__:
            getattr(self.needs, name).extend(getattr(needs, name))


def transact(
    entities: Mapping[int, QueueState],
    outbox: Outbox,
    command: Transact,
    found: Sequence[StoredRow] | None,
) -> Transacted | Refused | Needs:
    """Do all operations or none; the refusal names the operation that caused it."""
    checked = _Checked()
    for index, operation in enumerate(command.operations):
        entity = entities.get(operation.entity_no)
        if entity is None:
            refused: Refused | None = Refused(Refusal.ENTITY_NOT_FOUND)
        elif isinstance(operation, Enqueue):
            refused = _check_send(checked, entity, operation, found)
        else:
            refused = _check_settlement(checked, entity, operation, found)
        if refused is not None:
            _shed(checked)
            return _named(refused, index)
    if checked.is_short:
        return checked.needs
    return _apply(outbox, checked, found)


def _apply(outbox: Outbox, checked: _Checked, found: Sequence[StoredRow] | None) -> Transacted:
    replies: list[Enqueued | Settled] = []
    for step in checked.steps:
        if isinstance(step, _Sending):  # so that rules give the same results as in the check
            step.entity.context.steps.left = APPLY_STEPS
    for step in checked.steps:
        if isinstance(step, _Settlement):
            settled = step.apply()
            assert settled.lost is None
            replies.append(settled)
            continue
        if step.command.via is not None:
            numbers = outbox.send(step.entity, step.command.messages, step.command.via)
            replies.append(Enqueued(numbers))
            continue
        context = step.entity.context
        context.is_checked = True
        enqueued = step.entity.enqueue(step.command, found)
        context.is_checked = False
        assert isinstance(enqueued, Enqueued)
        assert enqueued.refusals is None
        replies.append(enqueued)
    return Transacted(replies)


def answer(
    entities: Mapping[int, QueueState], command: CheckLocks | ReserveNumbers
) -> Settled | Enqueued | Refused:
    """Answer a question of a transaction before its commit: lost locks, or reserved numbers."""
    entity = entities.get(command.entity_no)
    if entity is None:
        return Refused(Refusal.ENTITY_NOT_FOUND)
    if isinstance(command, ReserveNumbers):
        return entity.reserve(len(command.messages))
    return _check_locks(entity, command)


def _check_locks(entity: QueueState, command: CheckLocks) -> Settled:
    tokens = command.lock_tokens
    sub = entity.sub_queue(command.sub_queue)
    place = sub.locks_of(command.session_id, tokens)
    if place is None:
        return Settled(list(range(len(tokens))) or None)
    lost = [index for index, token in enumerate(tokens) if not _is_live(place, token)]
    return Settled(lost or None)


# --- the check pass -------------------------------------------------------------------------------


def _check_send(
    checked: _Checked, entity: QueueState, command: Enqueue, found: Sequence[StoredRow] | None
) -> Refused | None:
    taken_bytes = checked.taken_bytes.get(entity.entity_no, 0)
    answer: Refused | Needs | None
    if command.via is None:
        answer = entity.check(command, taken_bytes, found)
    else:
        answer = _transfer_refusal(entity, command, taken_bytes)
    if isinstance(answer, Refused):
        return answer
    if isinstance(answer, Needs):
        checked.note(answer)
    elif command.via is None and isinstance(entity, TopicState):
        checked.copies += entity.checked_copies
        if checked.copies > entity.publish_limits.max_copies:
            return entity.publish_limits.too_large
    added_bytes = sum(envelope.size_bytes for envelope in command.messages)
    checked.taken_bytes[entity.entity_no] = taken_bytes + added_bytes
    checked.steps.append(_Sending(entity, replace(command, is_atomic=True)))
    return None


def _transfer_refusal(entity: QueueState, command: Enqueue, taken_bytes: int) -> Refused | None:
    """Return a refusal if the outbox cannot store messages of this entity.

    Refusals of the target are found when they arrive there.
    """
    if entity.properties.status is EntityStatus.DISABLED:
        return Refused(Refusal.ENTITY_DISABLED, entity.name)
    owner = entity.topic or entity  # a subscription has the limits of its topic
    for envelope in command.messages:
        if envelope.size_bytes > owner.max_message_bytes:
            limit = f"{owner.max_message_bytes} are allowed"
            text = f"the message has {envelope.size_bytes} bytes, {limit}"
            return Refused(Refusal.MESSAGE_TOO_LARGE, text)
        refused = properties_refusal(envelope)
        if refused is not None:
            return refused
        taken_bytes += envelope.size_bytes
        if owner.size_bytes + owner.state_bytes + taken_bytes > owner.max_size_bytes:
            return Refused(Refusal.QUOTA_EXCEEDED, "the entity has reached its maximum size")
    return None


def _check_settlement(
    checked: _Checked, entity: QueueState, command: Settle, found: Sequence[StoredRow] | None
) -> Refused | None:
    sub = entity.sub_queue(command.sub_queue)
    tokens = command.lock_tokens
    lost = Refusal.SESSION_LOCK_LOST if sub.requires_session else Refusal.LOCK_LOST
    place = sub.locks_of(command.session_id, tokens)
    if place is None:
        return Refused(lost)
    for token in tokens:
        if token in checked.tokens or not _is_live(place, token):
            return Refused(lost)
        checked.tokens.add(token)
    messages = [place.locks[token] for token in tokens]
    plan: locks.SettlePlan | None = None
    if command.disposition is Disposition.COMPLETE:
        freed_bytes = sum(message.weight_bytes for message in messages)
        taken_bytes = checked.taken_bytes.get(entity.entity_no, 0)
        checked.taken_bytes[entity.entity_no] = taken_bytes - freed_bytes
    else:
        answer = locks.prepare(place, command, found)
        if isinstance(answer, Refused):
            return answer
        if isinstance(answer, Needs):
            checked.note(answer)
        else:
            plan = answer
    loaded = [(message, message.envelope) for message in messages if message.envelope is not None]
    checked.steps.append(_Settlement(place, command, plan, loaded))
    return None


def _is_live(place: SubQueueState, token: bytes) -> bool:
    message = place.locks.get(token)
    return message is not None and message.locked_until_ms > place.context.now_ms


def _named(refused: Refused, index: int) -> Refused:
    """Add the refused operation to the detail; operations are counted from 1."""
    where = f"operation {index + 1} of the transaction"
    detail = f"{refused.detail} ({where})" if refused.detail else where
    return Refused(refused.refusal, detail)


def _shed(checked: _Checked) -> None:
    """Unload messages that the check loaded beyond the budget."""
    for step in checked.steps:
        if isinstance(step, _Settlement) and step.sub.context.window.is_over:
            paging.shed(step.sub)
