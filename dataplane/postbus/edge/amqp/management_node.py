"""The `$management` node of an entity: operations that links do not offer.

Peek, renew, deferred messages, schedules and settlement by lock token; requests about sessions and
rules are in modules of their own. Names carry the prefix `com.microsoft:`.

Import circle: the node makes `SessionRequests` and `RuleRequests`, and they submit and refuse
through it, so that all requests are counted and answered in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from postbus.amqp import conditions
from postbus.broker.address import Address
from postbus.contract.entities import NamespaceLimits, Right
from postbus.edge.amqp.addresses import Node, NodeAddress
from postbus.edge.amqp.held_sessions import HeldSessions
from postbus.edge.amqp.management_bodies import (
    BadRequest,
    failure,
    integer,
    items,
    numbers,
    ok,
    response,
    session_id_of,
    text,
    tokens,
)
from postbus.edge.amqp.requests import (
    BODY_HEAP_BYTES,
    REQUEST_BYTES,
    SCHEDULE_HEAP_BYTES,
    Request,
    Respond,
)
from postbus.edge.amqp.rule_requests import RuleContext, RuleRequests
from postbus.edge.amqp.session_requests import SessionRequests
from postbus.edge.amqp.settlements import RELOADING
from postbus.edge.amqp.transactions import Transaction, TransactionContext
from postbus.edge.message_ids import name_messages
from postbus.edge.refusals import status_code
from postbus.entity.commands import (
    Cancelled,
    CancelScheduled,
    DeferredReceived,
    DeleteMessages,
    Disposition,
    Enqueue,
    Enqueued,
    LocksRenewed,
    MessagesDeleted,
    MessageState,
    OnReply,
    Peek,
    Peeked,
    PeekedMessage,
    ReceiveDeferred,
    ReceiveMode,
    Refusal,
    Refused,
    RenewLocks,
    Settle,
    Settled,
    SubQueue,
)
from postbus.entity.expects import Expects, R
from postbus.message.codec import Array, DecodeError, Int
from postbus.message.delivery import encode_message, token_to_uuid
from postbus.message.envelope import Envelope
from postbus.message.sections import slice_message
from postbus.message.value_check import MAX_VALUES

PREFIX: Final = "com.microsoft:"
OF_SUB_QUEUES: Final = frozenset(
    PREFIX + name
    for name in (
        "renew-lock",
        "peek-message",
        "receive-by-sequence-number",
        "update-disposition",
        "batch-delete-messages",
    )
)
"""Operations on the messages of the node's entity or sub-queue. All others, on rules, sessions and
schedules, are about the entity itself, for which a token of one of its sub-queues is not valid."""

SCHEDULE: Final = PREFIX + "schedule-message"
"""The only request with messages in it, and so the only one that may be large."""

MAX_PEEK_COUNT: Final = 1_000
MAX_PEEK_BYTES: Final = 1 << 20
"""Bytes of messages in one peek response; more messages come with the next request."""

TRANSACTION: Final = "$transaction"
"""Key of a request's transaction among the fields of its body; not a field of clients."""

TRANSACTIONAL: Final = frozenset({PREFIX + "update-disposition", PREFIX + "schedule-message"})
BESIDE_TRANSACTIONS: Final = frozenset(
    PREFIX + name
    for name in (
        "peek-message",
        "renew-lock",
        "renew-session-lock",
        "get-session-state",
        "get-message-sessions",
        "enumerate-rules",
    )
)
"""Requests that change nothing a rollback could undo. They are answered as outside a transaction:
the SDK of .NET puts every request into the ambient one."""

EMPTY_BODY: Final = b"\x00\x53\x75\xa0\x00"

DISPOSITIONS: Final = {
    "completed": Disposition.COMPLETE,
    "abandoned": Disposition.ABANDON,
    "suspended": Disposition.DEAD_LETTER,
    "defered": Disposition.DEFER,  # with one r on the wire
}


class ManagementContext(RuleContext, TransactionContext, Protocol):
    """The connection as the node sees it."""

    limits: NamespaceLimits
    sessions: HeldSessions


class ManagementNode:
    """Handles the requests of one connection to one entity or sub-queue."""

    def __init__(self, connection: ManagementContext, path: str) -> None:
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
        for group in (SessionRequests(connection.sessions, self), RuleRequests(connection, self)):
            for name, run in group.operations.items():
                self._operations[name] = (Right.LISTEN, run)

    def handle(self, request: Request, respond: Respond) -> None:
        """Dispatch one request; an error in it becomes its response."""
        name = request.operation
        operation = None
        if isinstance(name, str) and name.startswith(PREFIX):
            operation = self._operations.get(name[len(PREFIX) :])
        if operation is None:
            self.fail(respond, 501, conditions.NOT_IMPLEMENTED, f"No operation '{name}' here.")
            return
        right, run = operation
        path = self.path
        if name not in OF_SUB_QUEUES:
            path = NodeAddress(Node.MANAGEMENT, self.path).entity_path
        if not self._connection.is_allowed(path, right):
            why = f"Unauthorized access. '{right.value}' claim(s) are required."
            self.fail(respond, 401, conditions.UNAUTHORIZED_ACCESS, why)
            return
        if request.transaction_id is not None and name not in TRANSACTIONAL | BESIDE_TRANSACTIONS:
            why = "Only update-disposition and schedule-message can be part of a transaction."
            self.fail(respond, 501, conditions.NOT_IMPLEMENTED, why)
            return
        is_scheduling = name == SCHEDULE
        if not is_scheduling and request.size_bytes > REQUEST_BYTES:
            why = f"A request for {name} may have {REQUEST_BYTES} bytes."
            self.fail(respond, 400, conditions.ARGUMENT_ERROR, why)
            return
        try:
            decoded = request.body(SCHEDULE_HEAP_BYTES if is_scheduling else BODY_HEAP_BYTES)
        except DecodeError as error:
            self.fail(respond, 400, conditions.DECODE_ERROR, str(error))
            return
        if not isinstance(decoded, dict):
            self.fail(respond, 400, conditions.ARGUMENT_ERROR, "The body is not a map.")
            return
        body = {str(key): value for key, value in decoded.items()}
        body[TRANSACTION] = request.transaction_id

        def resolved(address: Address | None) -> None:
            if address is None:
                self.refuse(respond, Refused(Refusal.ENTITY_NOT_FOUND))
                return
            if body.get("session-id") is None:
                link_name = request.properties.get("associated-link-name")
                session_id = self._connection.sessions.find(address.entity_no, link_name)
                if session_id is not None:  # azservicebus of Go names the session by the link alone
                    body["session-id"] = session_id.decode()
            try:
                run(address, body, respond)
            except (BadRequest, DecodeError) as error:
                self.fail(respond, 400, conditions.ARGUMENT_ERROR, str(error))

        self._connection.router.resolve(self.path, resolved)

    # --- operations -----------------------------------------------------------------------------

    def _renew_lock(self, address: Address, body: Any, respond: Respond) -> None:
        if address.requires_session and address.sub_queue is SubQueue.ACTIVE:
            why = "Locks of messages of a session are renewed with the session."
            self.fail(respond, 400, conditions.NOT_ALLOWED, why)
            return
        command = RenewLocks(address.entity_no, address.sub_queue, tokens(body))

        def answer(reply: LocksRenewed | Refused) -> None:
            if isinstance(reply, LocksRenewed):
                ok(respond, {"expirations": Array(0x83, list(reply.locked_until_ms))})
            else:
                self.refuse(respond, reply)

        self.submit(address, command, answer)

    def _peek(self, address: Address, body: Any, respond: Respond) -> None:
        count = integer(body, "message-count")
        if count < 1:
            raise BadRequest("message-count must be at least 1")
        command = Peek(
            address.entity_no,
            address.sub_queue,
            integer(body, "from-sequence-number"),
            min(count, MAX_PEEK_COUNT),
            MAX_PEEK_BYTES,
            session_id_of(body),
        )

        def answer(reply: Peeked | Refused) -> None:
            if isinstance(reply, Refused):
                self.refuse(respond, reply)
                return
            if not reply.messages:
                respond(response(204, "No content"))
                return
            encode = _peeked_without_body if body.get("omit-message-body") is True else _peeked
            ok(respond, {"messages": [{"message": encode(each)} for each in reply.messages]})

        self.submit(address, command, answer)

    def _receive_deferred(self, address: Address, body: Any, respond: Respond) -> None:
        mode = ReceiveMode.PEEK_LOCK
        if integer(body, "receiver-settle-mode", default=1) == 0:
            mode = ReceiveMode.RECEIVE_AND_DELETE
        session_id = session_id_of(body)
        command = ReceiveDeferred(
            address.entity_no,
            address.sub_queue,
            numbers(body),
            mode,
            session_id,
            self._connection.sessions.consumer_of(address.entity_no, session_id),
        )

        def answer(reply: DeferredReceived | Refused) -> None:
            if isinstance(reply, Refused):
                self.refuse(respond, reply)
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
            ok(respond, {"messages": messages})

        self.submit(address, command, answer)

    def _update_disposition(self, address: Address, body: Any, respond: Respond) -> None:
        disposition = DISPOSITIONS.get(str(body.get("disposition-status")))
        if disposition is None:
            raise BadRequest("disposition-status is not one of " + ", ".join(DISPOSITIONS))
        changes = body.get("properties-to-modify")
        if changes is not None and not (
            isinstance(changes, dict) and all(isinstance(key, str) for key in changes)
        ):
            raise BadRequest("properties-to-modify is not a map of names")
        properties = changes and {str(key): value for key, value in changes.items()}
        is_dead_letter = disposition is Disposition.DEAD_LETTER
        command = Settle(
            address.entity_no,
            address.sub_queue,
            tokens(body),
            disposition,
            text(body, "deadletter-reason") if is_dead_letter else None,
            text(body, "deadletter-description") if is_dead_letter else None,
            properties,
            session_id_of(body),
        )
        is_session = address.requires_session and address.sub_queue is SubQueue.ACTIVE
        lost = Refused(Refusal.SESSION_LOCK_LOST if is_session else Refusal.LOCK_LOST)
        if body[TRANSACTION] is not None:
            self._enlist(address, command, body[TRANSACTION], lost, respond)
            return

        def answer(reply: Settled | Refused) -> None:
            if isinstance(reply, Refused):
                self.refuse(respond, lost if reply.refusal in RELOADING else reply)
            elif reply.lost:
                self.refuse(respond, lost)
            else:
                ok(respond, None)

        self.submit(address, command, answer)

    def _enlist(
        self,
        address: Address,
        command: Settle,
        transaction_id: bytes,
        lost: Refused,
        respond: Respond,
    ) -> None:
        """Add a settlement to its transaction if its locks are valid."""
        transaction = self._transaction(transaction_id, respond)
        if transaction is None:
            return

        def checked(refused: Refused | None) -> None:
            if refused is None:
                ok(respond, None)
            else:
                self.refuse(respond, lost if refused.refusal is Refusal.LOCK_LOST else refused)

        transaction.add_settlement(address, self.path, command, checked)

    def _schedule(self, address: Address, body: Any, respond: Respond) -> None:
        entries = items(body, "messages")
        if address.sub_queue is not SubQueue.ACTIVE:
            self.refuse(respond, Refused(Refusal.NOT_ALLOWED))
            return
        envelopes: list[Envelope] = []
        values_left = [MAX_VALUES]
        for entry in entries:
            message = entry.get("message") if isinstance(entry, dict) else None
            if not isinstance(message, bytes):
                raise BadRequest("each entry of messages needs a binary message")
            envelopes.append(slice_message(message, values_left))
        name_messages(envelopes)
        size_bytes = sum(envelope.size_bytes for envelope in envelopes)
        if body[TRANSACTION] is not None:
            self._schedule_in(body[TRANSACTION], address, envelopes, size_bytes, respond)
            return
        inflight, account = self._connection.inflight, self._connection.account
        if inflight.is_full(account):
            self.refuse(respond, Refused(Refusal.BUSY))
            return
        inflight.take(account, size_bytes)

        def answer(reply: Enqueued | Refused) -> None:
            inflight.give_back(account, size_bytes)
            self._scheduled(respond, reply)

        self.submit(address, Enqueue(address.entity_no, envelopes, is_atomic=True), answer)

    def _schedule_in(
        self,
        transaction_id: bytes,
        address: Address,
        envelopes: list[Envelope],
        size_bytes: int,
        respond: Respond,
    ) -> None:
        """Add scheduled messages to their transaction; their numbers are returned now."""
        transaction = self._transaction(transaction_id, respond)
        if transaction is None:
            return
        if not envelopes or any(envelope.scheduled_ms is None for envelope in envelopes):
            raise BadRequest("each message needs x-opt-scheduled-enqueue-time")
        transaction.add_schedule(
            address, envelopes, size_bytes, lambda reply: self._scheduled(respond, reply)
        )

    def _transaction(self, transaction_id: bytes, respond: Respond) -> Transaction | None:
        """Return a transaction of this connection; None after a failure."""
        transactions = self._connection.transactions
        transaction = transactions.find(transaction_id)
        if transaction is None:
            respond(failure(410, transactions.unknown(transaction_id)))
        return transaction

    def _scheduled(self, respond: Respond, reply: Enqueued | Refused) -> None:
        if isinstance(reply, Refused):
            self.refuse(respond, reply)
        elif reply.refusals:
            self.refuse(respond, next(iter(reply.refusals.values())))
        else:
            ok(respond, {"sequence-numbers": Array(0x81, list(reply.sequence_numbers))})

    def _cancel(self, address: Address, body: Any, respond: Respond) -> None:
        def answer(reply: Cancelled | Refused) -> None:
            if isinstance(reply, Cancelled):
                ok(respond, None)
            else:
                self.refuse(respond, reply)

        self.submit(address, CancelScheduled(address.entity_no, numbers(body)), answer)

    def _delete(self, address: Address, body: Any, respond: Respond) -> None:
        limit = integer(body, "message-count")
        if not 1 <= limit <= self._connection.limits.max_delete_count:
            raise BadRequest(
                f"message-count must be 1 to {self._connection.limits.max_delete_count}"
            )
        has_bound = body.get("enqueued-time-utc") is not None
        before_ms = integer(body, "enqueued-time-utc") if has_bound else None
        command = DeleteMessages(
            address.entity_no, address.sub_queue, limit, before_ms, session_id_of(body)
        )

        def answer(reply: MessagesDeleted | Refused) -> None:
            if isinstance(reply, Refused):
                self.refuse(respond, reply)
            elif reply.count:
                ok(respond, {"message-count": Int(reply.count)})
            else:
                respond(response(204, "No content"))

        self.submit(address, command, answer)

    # --- for the groups of operations -----------------------------------------------------------

    def submit(self, address: Address, command: Expects[R], on_reply: OnReply[R]) -> None:
        """Submit a command that the client waits for."""
        connection = self._connection

        def answer(reply: R | Refused) -> None:
            connection.unanswered_count -= 1
            try:
                on_reply(reply)
            except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
                connection.broke()

        connection.unanswered_count += 1
        connection.router.submit(address.partition_id, command, answer)

    def refuse(self, respond: Respond, refused: Refused) -> None:
        """Answer with the refusal of an entity."""
        error = self._connection.error_mapper.refused(refused, self.path)
        respond(failure(status_code(refused.refusal), error))

    def fail(self, respond: Respond, code: int, condition: str, why: str) -> None:
        """Answer with an error that is not a refusal of an entity."""
        respond(failure(code, self._connection.error_mapper.error(condition, why, self.path)))


def _peeked(message: PeekedMessage) -> bytes:
    """Return a browsed message; its expiry is included only if the sender set one (S104)."""
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
