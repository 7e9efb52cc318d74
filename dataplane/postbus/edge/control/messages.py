"""Control API of message operations: show, delete, purge, resend.

Translates JSON to arguments of `MessageOperations`, and its results to JSON.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from postbus.broker.operate.dead_letter_groups import DeadLetterGroup
from postbus.broker.operate.message_operations import (
    MessageEdit,
    MessageOperations,
    Walked,
)
from postbus.broker.operate.message_view import STATE_NAMES, moment_of
from postbus.contract import control_messages as contract
from postbus.contract.bodies import SubQueueName
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
    StateName,
    SummarizeMessages,
)
from postbus.edge.control.calls import Answer, Call, ControlRefused, Handler
from postbus.entity.commands import MessageState, Refused

SUFFIXES: Final[dict[SubQueueName, str]] = {
    "main": "",
    "deadLetter": "/$DeadLetterQueue",
    "transferDeadLetter": "/$Transfer/$DeadLetterQueue",
}
STATES: Final[dict[StateName, MessageState]] = {name: state for state, name in STATE_NAMES.items()}
NO_FIELDS: Final = {"body", "body_base64", "properties", "removed_properties"}


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
        return Answer(
            MessagePage(
                **_walked(page),
                messages=list(page.messages),
                total=page.total,
            )
        )

    async def _summarize(self, call: Call) -> Answer:
        asked = call.read(SummarizeMessages)
        page = await self._message_operations.summarize(
            path_of(asked), from_number=asked.from_number, where=asked.where
        )
        return Answer(
            MessageSummary(
                **_walked(page), groups=[_group(each) for each in page.groups], total=page.total
            )
        )

    async def _delete(self, call: Call) -> Answer:
        asked = call.read(DeleteMessages)
        done = await self._message_operations.delete(path_of(asked), asked.numbers)
        numbers = list(done.numbers)
        return Answer(DeletedMessages(numbers=numbers, refused=_refused(done.refused)))

    async def _purge(self, call: Call) -> Answer:
        asked = call.read(PurgeMessages)
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
        done = await self._message_operations.resend(
            path_of(asked),
            asked.numbers,
            to=asked.to,
            edit=edit,
            max_resends=asked.max_resends,
        )
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


def _group(group: DeadLetterGroup) -> contract.DeadLetterGroup:
    return contract.DeadLetterGroup(
        reason=group.reason,
        description=group.description,
        is_cut=group.is_cut,
        count=group.count,
        first_at=moment_of(group.first_ms),
        last_at=moment_of(group.last_ms),
        example_number=group.example,
        example_message_id=group.example_id,
        example_description=group.example_description,
    )
