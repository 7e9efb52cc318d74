"""The `$management` node of a queue: what does not fit on a link.

Peek, renew, deferred messages, schedules and settlement by lock token. Names carry the prefix
`com.microsoft:`; numbers are accepted in every AMQP width, answers use the widths clients expect.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from postbus.amqp import conditions
from postbus.amqp.conditions import AmqpError
from postbus.broker.router import Address
from postbus.contract import Right
from postbus.edge.refusals import status_code
from postbus.edge.requests import Request, Respond, Response
from postbus.edge.settlements import RELOADING
from postbus.entity.commands import (
    Cancelled,
    CancelScheduled,
    Command,
    DeferredReceived,
    DeleteMessages,
    Disposition,
    Enqueue,
    Enqueued,
    LocksRenewed,
    MessagesDeleted,
    MessageState,
    Peek,
    Peeked,
    PeekedMessage,
    ReceiveDeferred,
    ReceiveMode,
    Refusal,
    Refused,
    RenewLocks,
    Reply,
    Settle,
    Settled,
    SubQueue,
)
from postbus.message.codec import Array, DecodeError, Int, Symbol
from postbus.message.delivery import encode_message, token_to_uuid, uuid_to_token
from postbus.message.envelope import Envelope
from postbus.message.sections import slice_message

if TYPE_CHECKING:
    from postbus.edge.amqp_connection import AmqpConnection

PREFIX: Final = "com.microsoft:"
MAX_PEEK_COUNT: Final = 1_000
MAX_PEEK_BYTES: Final = 1 << 20
"""Bytes of messages in one peek response; more messages come with the next request."""

MAX_LIST_ITEMS: Final = 10_000

EMPTY_BODY: Final = b"\x00\x53\x75\xa0\x00"

DISPOSITIONS: Final = {
    "completed": Disposition.COMPLETE,
    "abandoned": Disposition.ABANDON,
    "suspended": Disposition.DEAD_LETTER,
    "defered": Disposition.DEFER,  # with one r on the wire
}


class BadRequest(Exception):
    """A request's body is not what its operation needs."""


class ManagementNode:
    """Handles the requests of one connection to one queue or sub-queue."""

    def __init__(self, connection: AmqpConnection, path: str) -> None:
        self.path = path
        self._connection = connection
        self._operations: dict[str, tuple[Right, Callable[[Address, Any, Respond], None]]] = {
            "renew-lock": (Right.LISTEN, self._renew_lock),
            "peek-message": (Right.LISTEN, self._peek),
            "receive-by-sequence-number": (Right.LISTEN, self._receive_deferred),
            "update-disposition": (Right.LISTEN, self._update_disposition),
            "batch-delete-messages": (Right.LISTEN, self._delete),
            "schedule-message": (Right.SEND, self._schedule),
            "cancel-scheduled-message": (Right.SEND, self._cancel),
        }

    def handle(self, request: Request, respond: Respond) -> None:
        """Dispatch one request; whatever is wrong with it becomes its response."""
        name = request.properties.get("operation")
        operation = None
        if isinstance(name, str) and name.startswith(PREFIX):
            operation = self._operations.get(name[len(PREFIX) :])
        if operation is None:
            self._fail(respond, 501, conditions.NOT_IMPLEMENTED, f"No operation '{name}' here.")
            return
        right, run = operation
        if not self._connection.is_allowed(self.path, right):
            text = f"Unauthorized access. '{right.value}' claim(s) are required."
            self._fail(respond, 401, conditions.UNAUTHORIZED_ACCESS, text)
            return
        if not isinstance(request.body, dict):
            self._fail(respond, 400, conditions.ARGUMENT_ERROR, "The body is not a map.")
            return
        body = {str(key): value for key, value in request.body.items()}

        def resolved(address: Address | None) -> None:
            if address is None:
                self._refuse(respond, Refused(Refusal.ENTITY_NOT_FOUND))
                return
            try:
                run(address, body, respond)
            except (BadRequest, DecodeError) as error:
                self._fail(respond, 400, conditions.ARGUMENT_ERROR, str(error))

        self._connection.router.resolve(self.path, resolved)

    # --- operations -----------------------------------------------------------------------------

    def _renew_lock(self, address: Address, body: Any, respond: Respond) -> None:
        tokens = _tokens(body)
        command = RenewLocks(address.entity_no, address.sub_queue, tokens)

        def answer(reply: Reply) -> None:
            if isinstance(reply, LocksRenewed):
                _ok(respond, {"expirations": Array(0x83, list(reply.locked_until_ms))})
            else:
                self._refuse(respond, reply)

        self._submit(address, command, answer)

    def _peek(self, address: Address, body: Any, respond: Respond) -> None:
        command = Peek(
            address.entity_no,
            address.sub_queue,
            _integer(body, "from-sequence-number"),
            max(1, min(_integer(body, "message-count"), MAX_PEEK_COUNT)),
            MAX_PEEK_BYTES,
        )

        def answer(reply: Reply) -> None:
            if not isinstance(reply, Peeked):
                self._refuse(respond, reply)
                return
            if not reply.messages:
                respond(_response(204, "No content"))
                return
            encode = _peeked_without_body if body.get("omit-message-body") is True else _peeked
            _ok(respond, {"messages": [{"message": encode(each)} for each in reply.messages]})

        self._submit(address, command, answer)

    def _receive_deferred(self, address: Address, body: Any, respond: Respond) -> None:
        mode = ReceiveMode.PEEK_LOCK
        if _integer(body, "receiver-settle-mode", default=1) == 0:
            mode = ReceiveMode.RECEIVE_AND_DELETE
        numbers = _numbers(body)
        command = ReceiveDeferred(address.entity_no, address.sub_queue, numbers, mode)

        def answer(reply: Reply) -> None:
            if not isinstance(reply, DeferredReceived):
                self._refuse(respond, reply)
                return
            messages = []
            for each in reply.deliveries:
                token = each.lock_token or None
                entry: dict[str, Any] = {
                    "message": encode_message(
                        each.envelope,
                        sequence=each.sequence,
                        enqueued_ms=each.enqueued_ms,
                        delivery_count=each.delivery_count,
                        ttl_ms=each.ttl_ms,
                        locked_until_ms=each.locked_until_ms if token else None,
                        state=int(MessageState.DEFERRED),
                        lock_token=token,
                    )
                }
                if token:
                    entry["lock-token"] = token_to_uuid(token)
                messages.append(entry)
            _ok(respond, {"messages": messages})

        self._submit(address, command, answer)

    def _update_disposition(self, address: Address, body: Any, respond: Respond) -> None:
        disposition = DISPOSITIONS.get(str(body.get("disposition-status")))
        if disposition is None:
            raise BadRequest("disposition-status is not one of " + ", ".join(DISPOSITIONS))
        changes = body.get("properties-to-modify")
        properties = (
            {str(key): value for key, value in changes.items()}
            if isinstance(changes, dict)
            else None
        )
        is_dead_letter = disposition is Disposition.DEAD_LETTER
        command = Settle(
            address.entity_no,
            address.sub_queue,
            _tokens(body),
            disposition,
            _text(body, "deadletter-reason") if is_dead_letter else None,
            _text(body, "deadletter-description") if is_dead_letter else None,
            properties,
        )

        def answer(reply: Reply) -> None:
            if isinstance(reply, Settled) and not reply.lost:
                _ok(respond, None)
            elif isinstance(reply, Settled) or (
                isinstance(reply, Refused) and reply.refusal in RELOADING
            ):
                self._refuse(respond, Refused(Refusal.LOCK_LOST))
            else:
                self._refuse(respond, reply)

        self._submit(address, command, answer)

    def _schedule(self, address: Address, body: Any, respond: Respond) -> None:
        entries = _items(body, "messages")
        if address.sub_queue is not SubQueue.ACTIVE:
            self._refuse(respond, Refused(Refusal.NOT_ALLOWED))
            return
        envelopes: list[Envelope] = []
        for entry in entries:
            message = entry.get("message") if isinstance(entry, dict) else None
            if not isinstance(message, bytes):
                raise BadRequest("each entry of messages needs a binary message")
            envelopes.append(slice_message(message))

        def answer(reply: Reply) -> None:
            if isinstance(reply, Enqueued) and not reply.refusals:
                _ok(respond, {"sequence-numbers": Array(0x81, list(reply.sequence_numbers))})
            elif isinstance(reply, Enqueued) and reply.refusals:
                self._refuse(respond, next(iter(reply.refusals.values())))
            else:
                self._refuse(respond, reply)

        self._submit(address, Enqueue(address.entity_no, envelopes, is_atomic=True), answer)

    def _cancel(self, address: Address, body: Any, respond: Respond) -> None:
        def answer(reply: Reply) -> None:
            if isinstance(reply, Cancelled):
                _ok(respond, None)
            else:
                self._refuse(respond, reply)

        self._submit(address, CancelScheduled(address.entity_no, _numbers(body)), answer)

    def _delete(self, address: Address, body: Any, respond: Respond) -> None:
        limit = _integer(body, "message-count")
        if not 1 <= limit <= self._connection.limits.max_delete_count:
            raise BadRequest(
                f"message-count must be 1 to {self._connection.limits.max_delete_count}"
            )
        before_ms = _integer(body, "enqueued-time-utc", default=self._connection.router.now_ms())
        command = DeleteMessages(address.entity_no, address.sub_queue, limit, before_ms)

        def answer(reply: Reply) -> None:
            if not isinstance(reply, MessagesDeleted):
                self._refuse(respond, reply)
            elif reply.count:
                _ok(respond, {"message-count": Int(reply.count)})
            else:
                respond(_response(204, "No content"))

        self._submit(address, command, answer)

    # --- internals ------------------------------------------------------------------------------

    def _submit(
        self, address: Address, command: Command, on_reply: Callable[[Reply], None]
    ) -> None:
        connection = self._connection

        def answer(reply: Reply) -> None:
            connection.note_answered()
            try:
                on_reply(reply)
            except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
                connection.broke()

        connection.owed_count += 1
        connection.router.submit(address.partition_id, command, answer)

    def _refuse(self, respond: Respond, reply: Reply) -> None:
        assert isinstance(reply, Refused)
        refusal = reply
        error = self._connection.explainer.refused(refusal, self.path)
        respond(_failure(status_code(refusal.refusal), error))

    def _fail(self, respond: Respond, code: int, condition: str, text: str) -> None:
        respond(_failure(code, self._connection.explainer.error(condition, text, self.path)))


def _peeked(message: PeekedMessage) -> bytes:
    """Return a browsed message; its expiry is told only where the sender set one (S104)."""
    return encode_message(
        message.envelope,
        sequence=message.sequence,
        enqueued_ms=message.enqueued_ms,
        delivery_count=message.delivery_count,
        ttl_ms=message.envelope.ttl_ms,
        state=int(message.state),
    )


def _peeked_without_body(message: PeekedMessage) -> bytes:
    encoded = _peeked(message)
    return encoded[: len(encoded) - len(message.envelope.body)] + EMPTY_BODY


def _response(code: int, description: str, body: Any = None) -> Response:
    return Response({"statusCode": Int(code), "statusDescription": description}, body)


def _ok(respond: Respond, body: Any) -> None:
    respond(_response(200, "OK", body))


def _failure(code: int, error: AmqpError) -> Response:
    return Response(
        {
            "statusCode": Int(code),
            "statusDescription": error.description,
            "errorCondition": Symbol(error.condition),
        }
    )


def _integer(body: Any, name: str, default: int | None = None) -> int:
    value = body.get(name, default)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"{name} is missing or not a number")
    return int(value)


def _text(body: Any, name: str) -> str | None:
    value = body.get(name)
    return value if isinstance(value, str) else None


def _items(body: Any, name: str) -> list[Any]:
    value = body.get(name)
    if isinstance(value, Array):
        value = value.items
    if not isinstance(value, list) or not value or len(value) > MAX_LIST_ITEMS:
        raise BadRequest(f"{name} is missing, empty or too long")
    return value


def _numbers(body: Any) -> list[int]:
    numbers = _items(body, "sequence-numbers")
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in numbers):
        raise BadRequest("sequence-numbers holds something that is no number")
    return [int(each) for each in numbers]


def _tokens(body: Any) -> list[bytes]:
    tokens = _items(body, "lock-tokens")
    if not all(isinstance(each, uuid.UUID) for each in tokens):
        raise BadRequest("lock-tokens holds something that is no uuid")
    return [uuid_to_token(each) for each in tokens]
