"""Message operations of operators: messages by number, deleted or resent.

A dead letter that is sent again is removed and stored again by one outcome, and an outcome is one
commit: there is one of it at any time, whatever crashes. It is stored as a new message is, not
moved as a row: number, times, time to live and usually properties are other ones, and it takes the
same way as any send into sessions, receivers, forwards and topics. For an entity of another
partition it goes into the outbox in that commit, and from there exactly once.

First each message is checked against its target, then all that pass are applied (ADR 21).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from postbus.contract.entities import EntityStatus
from postbus.entity import by_sequence
from postbus.entity.commands import (
    DeleteBySequence,
    Enqueue,
    Enqueued,
    MessageEdit,
    MessagesHandled,
    Refusal,
    Refused,
    ResendBySequence,
    StoredRow,
    SubQueue,
)
from postbus.entity.outcomes import Needs, Settling
from postbus.entity.queues import paging
from postbus.entity.queues.queue_state import properties_refusal
from postbus.entity.topics.topic_state import TopicState
from postbus.message.codec import DecodeError, Timestamp, encode_value
from postbus.message.fields import Field, MessageDraft, MessageFields
from postbus.message.patch import (
    DEAD_LETTER_DESCRIPTION,
    DEAD_LETTER_REASON,
    DEAD_LETTER_SOURCE,
    PropertiesTooLarge,
)

if TYPE_CHECKING:
    from postbus.entity.by_sequence import Choice
    from postbus.entity.queues.queue_state import QueueState
    from postbus.entity.transfer.outbox import Outbox
    from postbus.message.envelope import Envelope

MAX_SEQUENCE_NUMBERS: Final = 250
"""Maximum number of messages of a command. Our choice: a commit of 10 ms, so that others are not
delayed."""

PARTITION_KEY: Final = "partition_key"
EDITABLE: Final[dict[str, Field | None]] = {
    "message_id": Field.MESSAGE_ID,
    "session_id": Field.GROUP_ID,
    "subject": Field.SUBJECT,
    "content_type": Field.CONTENT_TYPE,
    "correlation_id": Field.CORRELATION_ID,
    "reply_to": Field.REPLY_TO,
    "reply_to_session_id": Field.REPLY_TO_GROUP_ID,
    "to": Field.TO,
    PARTITION_KEY: None,
}
"""Name of a field that an edit may set beside body and application properties -> the field."""

DEAD_LETTER_PROPERTIES: Final = (DEAD_LETTER_REASON, DEAD_LETTER_DESCRIPTION, DEAD_LETTER_SOURCE)

_DATA_SECTION: Final = b"\x00\x53\x75"

TOO_MANY: Final = Refused(
    Refusal.ARGUMENT_OUT_OF_RANGE, f"at most {MAX_SEQUENCE_NUMBERS} messages may be named at a time"
)
NO_DEAD_LETTERS: Final = Refused(
    Refusal.NOT_ALLOWED, "only messages of a dead-letter queue are sent again"
)


def handle(
    entities: Mapping[int, QueueState],
    outbox: Outbox,
    command: DeleteBySequence | ResendBySequence,
    found: Sequence[StoredRow] | None,
) -> MessagesHandled | Refused | Needs:
    """Handle each message that can be handled; the reply names the others.

    An entity that is disabled for sending or receiving is no reason to refuse, only a disabled one.
    """
    entity = entities.get(command.entity_no)
    if entity is None:
        return Refused(Refusal.ENTITY_NOT_FOUND)
    if len(command.sequence_numbers) > MAX_SEQUENCE_NUMBERS:
        return TOO_MANY
    if entity.properties.status is EntityStatus.DISABLED:
        return Refused(Refusal.ENTITY_DISABLED, entity.name)
    if isinstance(command, DeleteBySequence):
        return _delete(entity, command, found)
    target = None if command.target_no is None else entities.get(command.target_no)
    if target is None and command.target is None:
        return Refused(Refusal.ENTITY_NOT_FOUND)
    if command.sub_queue not in (SubQueue.DEAD_LETTER, SubQueue.TRANSFER_DEAD_LETTER):
        return NO_DEAD_LETTERS
    refused = None if target is None else target.send_refusal(is_resent=target is entity)
    if refused is not None:
        return refused
    return _resend(entity, target, outbox, command, found)


# --- delete ---------------------------------------------------------------------------------------


def _delete(
    entity: QueueState, command: DeleteBySequence, found: Sequence[StoredRow] | None
) -> MessagesHandled | Needs:
    """Delete messages by number; locked ones stay and are refused."""
    numbers = list(dict.fromkeys(command.sequence_numbers))
    is_main = command.sub_queue is SubQueue.ACTIVE
    scheduled = [number for number in numbers if is_main and number in entity.scheduled]
    others = [number for number in numbers if not is_main or number not in entity.scheduled]
    picked = by_sequence.choose(entity, command.sub_queue, others, found)
    if isinstance(picked, Needs):
        return picked
    if scheduled:
        entity.scheduled.cancel(scheduled)
    by_sequence.take(picked.choices, Settling.PURGED)
    picked.rest()
    done = [*scheduled, *(choice.number for choice in picked.choices)]
    return MessagesHandled(dict.fromkeys(done, 0), picked.refused, picked.left)


# --- resend ---------------------------------------------------------------------------------------


def _resend(
    entity: QueueState,
    target: QueueState | None,
    outbox: Outbox,
    command: ResendBySequence,
    found: Sequence[StoredRow] | None,
) -> MessagesHandled | Needs:
    """Resend dead letters one by one; refused ones stay where they are.

    Ids are not looked up: within the window a message would be a duplicate of itself, and lost.
    """
    picked = by_sequence.choose(entity, command.sub_queue, command.sequence_numbers, found)
    if isinstance(picked, Needs):
        return picked
    plan, refusals, late = _check(entity, target, command, picked.choices)
    refusals = {**picked.refused, **refusals}
    left = [*late, *picked.left]
    by_sequence.take([choice for choice, _ in plan], Settling.RESENT)
    numbers = [choice.number for choice, _ in plan]
    envelopes = [envelope for _, envelope in plan]
    if not plan:
        return MessagesHandled({}, refusals, left)
    if target is None:
        assert command.target is not None
        outbox.send(entity, envelopes, command.target, numbers)
        return MessagesHandled(dict.fromkeys(numbers, 0), refusals, left)
    context = target.context
    context.is_checked = True
    reply = target.enqueue(
        Enqueue(target.entity_no, envelopes, is_atomic=True, is_resent=True), found
    )
    context.is_checked = False
    assert isinstance(reply, Enqueued)
    assert reply.refusals is None
    return MessagesHandled(dict(zip(numbers, reply.sequence_numbers, strict=True)), refusals, left)


def _check(
    entity: QueueState, target: QueueState | None, command: ResendBySequence, choices: list[Choice]
) -> tuple[list[tuple[Choice, Envelope]], dict[int, Refused], list[int]]:
    """Decide about each message; return the accepted, the refused and those left for later.

    Each is counted on top of those before it, less what leaves the same accounts.
    """
    plan: list[tuple[Choice, Envelope]] = []
    refusals: dict[int, Refused] = {}
    has_account = target is entity or (target is not None and target is entity.topic)
    pending_bytes = copies = sent_bytes = 0
    for index, choice in enumerate(choices):
        old = choice.envelope
        assert old is not None
        envelope = _renewed(old, command, entity.context.now_ms, is_home=target is entity)
        refused: Refused | None
        if isinstance(envelope, Refused):
            refusals[choice.number] = envelope
            continue
        freed_bytes = old.size_bytes if has_account else 0
        if target is None:
            refused = properties_refusal(envelope)
        else:
            one = Enqueue(target.entity_no, [envelope], is_atomic=True, is_resent=True)
            answer = target.check(one, pending_bytes - freed_bytes, None)
            assert not isinstance(answer, Needs), "no id is looked up"
            refused = answer
        if refused is not None:
            refusals[choice.number] = refused
            continue
        if isinstance(target, TopicState):
            copies += target.checked_copies
            if plan and copies > target.publish_limits.max_copies:
                return plan, refusals, [each.number for each in choices[index:]]
        sent_bytes += envelope.size_bytes
        if plan and sent_bytes > paging.READ_BYTES:  # an edit made them larger
            return plan, refusals, [each.number for each in choices[index:]]
        pending_bytes += envelope.size_bytes - freed_bytes
        plan.append((choice, envelope))
    return plan, refusals, []


def _renewed(
    envelope: Envelope, command: ResendBySequence, now_ms: int, *, is_home: bool
) -> Envelope | Refused:
    """Return the message to resend, without traces of having been a dead letter but their count.

    Ids, session and keys stay, and the time to live, which starts again; an expiry in the past and
    a scheduled time are removed. Hops are counted from here. `is_home`: it returns to the entity it
    is from, where its number in the topic still says which message it is.
    """
    edit = command.edit
    try:
        draft = MessageDraft(MessageFields(envelope))
        if command.max_resends is not None and draft.resends >= command.max_resends:
            return Refused(
                Refusal.NOT_ALLOWED,
                f"it was resent {draft.resends} times, and came back: correct the cause, or allow"
                " more resends",
            )
        draft.count_resend()
        for name in DEAD_LETTER_PROPERTIES:
            draft.remove_property(name)
        if envelope.scheduled_ms is not None:
            draft.set_scheduled(None)
        expiry = draft.system[Field.EXPIRY_TIME]
        if isinstance(expiry, Timestamp) and expiry <= now_ms:
            draft.set_field(Field.EXPIRY_TIME, None)
        if edit is not None:
            _edit(draft, edit)
        renewed = draft.build()
    except DecodeError as error:
        return Refused(Refusal.MESSAGE_MALFORMED, str(error))
    except PropertiesTooLarge as error:
        return Refused(Refusal.PROPERTIES_TOO_LARGE, str(error))
    except (ValueError, TypeError) as error:
        return Refused(Refusal.ARGUMENT_OUT_OF_RANGE, str(error))
    if edit is not None and edit.body is not None:
        renewed.body = _DATA_SECTION + encode_value(edit.body)
        renewed.size_bytes += len(renewed.body) - len(envelope.body)
    if not is_home or envelope.hop_count:
        renewed.origin_sequence = None
    renewed.hop_count = 0
    renewed.dead_letter_source = None
    return renewed


def _edit(draft: MessageDraft, edit: MessageEdit) -> None:
    for name, text in edit.fields.items():
        field = EDITABLE[name]
        if field is None:
            draft.set_partition_key(text)
        else:
            draft.set_field(field, text)
    for name in edit.removed:
        draft.remove_property(name)
    for name, value in edit.properties.items():
        draft.set_property(name, value)
