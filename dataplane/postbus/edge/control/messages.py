"""Control API of message operations: show, delete, purge, resend.

Translates JSON to arguments of `MessageOperations`, and its results to JSON.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from postbus.broker.operate.dead_letter_groups import DeadLetterGroup
from postbus.broker.operate.message_operations import (
    MessageEdit,
    MessageOperations,
    OperationRefused,
    Walked,
)
from postbus.broker.operate.message_view import MessageView
from postbus.contract import control_messages as contract
from postbus.contract.control import (
    FieldProblem,
    ProblemType,
)
from postbus.contract.control_messages import (
    DeletedMessages,
    DeleteMessages,
    EditedMessage,
    MessagePage,
    MessagesOf,
    MessageSummary,
    PeekMessages,
    PurgedMessages,
    PurgeMessages,
    RefusedMessage,
    ResendMessages,
    ResentMessage,
    ResentMessages,
    ShownMessage,
    StateName,
    SubQueueName,
    SummarizeMessages,
)
from postbus.edge.control.calls import Answer, Call, ControlRefused, Handler, refused
from postbus.entity.commands import MessageState, Refused, SubQueue

SUFFIXES: Final[dict[SubQueueName, str]] = {
    "main": "",
    "deadLetter": "/$DeadLetterQueue",
    "transferDeadLetter": "/$Transfer/$DeadLetterQueue",
}
STATES: Final[dict[StateName, MessageState]] = {
    "active": MessageState.ACTIVE,
    "deferred": MessageState.DEFERRED,
    "scheduled": MessageState.SCHEDULED,
}
STATE_NAMES: Final = {state: name for name, state in STATES.items()}
SUB_QUEUE_NAMES: Final[dict[SubQueue, SubQueueName]] = {
    SubQueue.DEAD_LETTER: "deadLetter",
    SubQueue.TRANSFER_DEAD_LETTER: "transferDeadLetter",
}
NO_FIELDS: Final = {"body", "body_base64", "properties", "removed_properties"}
FIRST_MS: Final = -62_135_596_800_000
LAST_MS: Final = 253_402_300_799_999
"""Calendars know the years 1 to 9999; other times are not shown."""


class ControlMessages:
    """Handlers of message operations."""

    def __init__(self, message_operations: MessageOperations) -> None:
        self._message_operations = message_operations

    def operations(self) -> Mapping[str, Handler]:
        return {
            "peekMessages": self._peek,
            "summarizeMessages": self._summarize,
            "deleteMessages": self._delete,
            "purgeMessages": self._purge,
            "resendMessages": self._resend,
        }

    async def _peek(self, call: Call) -> Answer:
        asked = call.read(PeekMessages)
        try:
            page = await self._message_operations.peek(
                path_of(asked),
                from_number=asked.from_number,
                count=asked.count,
                where=asked.where,
                session_id=asked.session_id,
                state=None if asked.state is None else STATES[asked.state],
                body_contains=asked.body_contains,
                body_bytes=asked.body_bytes,
            )
        except OperationRefused as error:
            raise refused(error.refused) from error
        return Answer(
            MessagePage(
                **_walked(page),
                messages=[_shown(each) for each in page.messages],
                total=page.total,
            )
        )

    async def _summarize(self, call: Call) -> Answer:
        asked = call.read(SummarizeMessages)
        try:
            page = await self._message_operations.summarize(
                path_of(asked), from_number=asked.from_number, where=asked.where
            )
        except OperationRefused as error:
            raise refused(error.refused) from error
        return Answer(
            MessageSummary(
                **_walked(page), groups=[_group(each) for each in page.groups], total=page.total
            )
        )

    async def _delete(self, call: Call) -> Answer:
        asked = call.read(DeleteMessages)
        try:
            done = await self._message_operations.delete(path_of(asked), asked.numbers)
        except OperationRefused as error:
            raise refused(error.refused) from error
        numbers = list(done.numbers)
        return Answer(DeletedMessages(numbers=numbers, refused=_refused(done.refused)))

    async def _purge(self, call: Call) -> Answer:
        asked = call.read(PurgeMessages)
        try:
            page = await self._message_operations.purge(
                path_of(asked),
                where=asked.where,
                from_number=asked.from_number,
                count=asked.count,
                dry_run=asked.dry_run,
                session_id=asked.session_id,
                state=None if asked.state is None else STATES[asked.state],
                body_contains=asked.body_contains,
            )
        except OperationRefused as error:
            raise refused(error.refused) from error
        return Answer(
            PurgedMessages(
                matched=page.matched,
                deleted=page.deleted,
                refused=_refused(page.refused),
                **_walked(page),
            )
        )

    async def _resend(self, call: Call) -> Answer:
        asked = call.read(ResendMessages)
        edit = None if asked.edit is None else _edit(asked.edit)
        try:
            done = await self._message_operations.resend(
                path_of(asked), asked.numbers, to=asked.to, edit=edit
            )
        except OperationRefused as error:
            raise refused(error.refused) from error
        resent = [
            ResentMessage(number=number, new_number=new) for number, new in done.resent.items()
        ]
        return Answer(
            ResentMessages(
                resent=resent, forwarded=list(done.forwarded), refused=_refused(done.refused)
            )
        )


def path_of(asked: MessagesOf) -> str:
    """Return the path of an entity or sub-queue."""
    return asked.entity + SUFFIXES[asked.sub_queue]


def _edit(said: EditedMessage) -> MessageEdit:
    """Return the edit; raises `ControlRefused` for a body that cannot be read."""
    body = None if said.body is None else said.body.encode()
    if said.body_base64 is not None:
        try:
            if body is not None:
                raise ValueError("body and bodyBase64 exclude each other")
            body = base64.b64decode(said.body_base64, validate=True)
        except (ValueError, binascii.Error) as error:
            problem = FieldProblem(field="edit.bodyBase64", problem=str(error))
            detail = f"{problem.field}: {problem.problem}"
            raise ControlRefused(400, detail, ProblemType.INVALID, [problem]) from error
    return MessageEdit(
        body,
        {name: getattr(said, name) for name in said.model_fields_set - NO_FIELDS},
        said.properties,
        tuple(said.removed_properties),
    )


def _walked(page: Walked) -> dict[str, Any]:
    """Return the fields that all pages have."""
    return {
        "next_number": page.next_number,
        "is_end": page.is_end,
        "looked_at": page.looked_at,
        "failed": page.failed,
        "away": list(page.away),
        "absent": list(page.absent),
    }


def _refused(found: Mapping[int, Refused]) -> list[RefusedMessage]:
    return [
        RefusedMessage(
            number=number, reason=each.refusal.value, detail=each.detail or each.refusal.value
        )
        for number, each in found.items()
    ]


def _shown(view: MessageView) -> ShownMessage:
    death, receiver = view.death, None if view.death is None else view.death.receiver
    body = None if view.body is None else base64.b64encode(view.body).decode("ascii")
    enqueued_at = _time(view.enqueued_ms)
    assert enqueued_at is not None
    return ShownMessage(
        sequence_number=view.sequence_number,
        sub_queue=SUB_QUEUE_NAMES.get(view.sub_queue, "main"),
        state=STATE_NAMES[view.state],
        message_id=view.message_id,
        session_id=view.session_id,
        partition_key=view.partition_key,
        correlation_id=view.correlation_id,
        subject=view.subject,
        content_type=view.content_type,
        to=view.to,
        reply_to=view.reply_to,
        reply_to_session_id=view.reply_to_session_id,
        enqueued_at=enqueued_at,
        scheduled_at=_time(view.scheduled_ms),
        expires_at=_time(view.expires_ms),
        time_to_live=view.ttl_ms,
        delivery_count=view.delivery_count,
        size_in_bytes=view.size_bytes,
        enqueued_sequence_number=view.enqueued_sequence_number,
        dead_letter_reason=view.dead_letter_reason,
        dead_letter_description=view.dead_letter_description,
        dead_letter_source=view.dead_letter_source,
        dead_lettered_at=None if death is None else _time(death.at_ms),
        dead_letter_deliveries=None if death is None else death.deliveries,
        dead_letter_link=None if receiver is None else receiver.link,
        dead_letter_client=None if receiver is None else receiver.client,
        application_properties=dict(view.application_properties),
        body_kind=str(view.body_kind.value),
        body_bytes=view.body_bytes,
        body_base64=body,
        is_malformed=view.is_malformed,
    )


def _group(group: DeadLetterGroup) -> contract.DeadLetterGroup:
    return contract.DeadLetterGroup(
        reason=group.reason,
        description=group.description,
        is_cut=group.is_cut,
        count=group.count,
        first_at=_time(group.first_ms),
        last_at=_time(group.last_ms),
        example_number=group.example,
        example_message_id=group.example_id,
        example_description=group.example_description,
    )


def _time(value_ms: int | None) -> datetime | None:
    if value_ms is None or not FIRST_MS <= value_ms <= LAST_MS:
        return None
    return datetime.fromtimestamp(value_ms / 1_000, UTC)
