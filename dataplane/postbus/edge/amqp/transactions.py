"""Transactions of one connection: the coordinator node, and the operations of open transactions.

Nothing of a transaction reaches a partition before its discharge: messages wait here, locks are
only checked. The operations go to one partition as one `Transact` (ADR 21). It is the partition of
the first settlement, else of the messages' key; messages for other entities than the first one go
through that one's outbox. Source: AMQP 1.0 part 4; Service Bus's send-via.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, assert_never

from postbus.amqp import conditions
from postbus.amqp.conditions import AmqpError
from postbus.amqp.events import OversizeReceived, TransferReceived
from postbus.amqp.link import IncomingLink
from postbus.amqp.performatives import (
    ACCEPTED,
    Declare,
    Declared,
    Discharge,
    Rejected,
    decode_transaction_request,
)
from postbus.broker.address import Address
from postbus.broker.placement import partition_of_number
from postbus.broker.spread.transactions import check_transaction_send
from postbus.contract.entities import Right
from postbus.edge.amqp.link_context import LinkContext
from postbus.edge.refusals import ErrorMapper
from postbus.entity.commands import (
    CheckLocks,
    Enqueue,
    Enqueued,
    OnReply,
    Refusal,
    Refused,
    ReserveNumbers,
    Settle,
    Settled,
    Transact,
    Transacted,
)
from postbus.message.codec import DecodeError, decode_value
from postbus.message.envelope import Envelope
from postbus.message.sections import slice_message

COORDINATOR: Final = "$coordinator"
REQUEST_BYTES: Final = 4_096
REQUEST_CREDIT: Final = 100
MAX_OPEN: Final = 1_000
"""Open transactions of one connection. Our choice: each costs about 1 KB without its messages."""

MAX_OPEN_UNKNOWN: Final = 10
"""The same for an unauthenticated client: some declare a transaction before anything else."""

MAX_MESSAGES: Final = 100
"""Messages and settlements in one transaction. Source: the quota page of Azure Service Bus."""

HELD_BYTES: Final = 512
"""Overhead of a waiting message beside its bytes: its envelope and its place in the list, about 345
octets measured."""

MAX_BYTES: Final = 16 << 20
"""Bytes of messages in one transaction (ADR 21)."""

LIFETIME_S: Final = 120.0
"""Maximum duration of an open transaction. Source: Service Bus, two minutes."""

ELSEWHERE: Final = Refused(
    Refusal.NOT_ALLOWED,
    "A transaction can schedule only in the entity and partition of its first operation: send the"
    " message with a scheduled enqueue time instead.",
)

OnChecked: TypeAlias = Callable[[Refused | None], None]
Answer: TypeAlias = Callable[[AmqpError | None], None]


class TransactionContext(LinkContext, Protocol):
    """For endpoints that take part in transactions."""

    transactions: Transactions

    @property
    def is_authorised(self) -> bool:
        """True if the client has presented a key that is still valid."""

    def is_allowed(self, path: str, right: Right) -> bool:
        """Return whether a live grant of the connection covers a right on a path."""

    def call_later(
        self, delay_s: float, callback: Callable[..., object], /, *args: Any
    ) -> asyncio.TimerHandle:
        """Schedule a call in the event loop."""


class Transaction:
    """The operations of one discharge."""

    def __init__(
        self,
        connection: TransactionContext,
        transaction_id: bytes,
        coordinator: CoordinatorEndpoint,
    ) -> None:
        self.transaction_id = transaction_id
        self.coordinator = coordinator
        self._connection = connection
        self._operations: list[Enqueue | Settle] = []
        self._home: Address | None = None
        self._partition_id: int | None = None  # of the first settlement or scheduled message
        self._key: bytes | None = None
        self._size_bytes = 0
        self._count = 0
        self._checking = 0  # settlements with locks being checked, messages being numbered
        self._failure: Refused | None = None  # makes the discharge fail
        self._needed: set[tuple[str, Right]] = set()  # the rights that all operations depend on
        self._lost: tuple[str, Right] | None = None  # one of these that is no longer granted
        self._discharge: Answer | None = None  # waits for checks in progress
        self._timer = connection.call_later(LIFETIME_S, self._expire)
        self._is_submitted = False
        self.is_over = False
        self.has_timed_out = False

    # --- while it is open -----------------------------------------------------------------------

    def add_send(
        self, address: Address, envelopes: list[Envelope], size_bytes: int, via: str | None
    ) -> Refused | None:
        """Add messages; return the reason of a refusal."""
        refused = self._count_refusal(len(envelopes))
        if refused is None and self._size_bytes + size_bytes > MAX_BYTES:
            refused = Refused(
                Refusal.MESSAGE_TOO_LARGE,
                f"A transaction has at most {MAX_BYTES} bytes of messages.",
            )
        size_bytes += len(envelopes) * HELD_BYTES
        home = self._home or address
        is_home = address.entity_no == home.entity_no
        key = self._key if is_home else None
        for envelope in envelopes:
            if refused is None:
                checked = check_transaction_send(address, envelope, key)
                if isinstance(checked, Refused):
                    refused = checked
                else:
                    key = checked
        if refused is None and not self._let_wait(size_bytes):
            detail = "Open transactions of this key hold too many bytes of messages."
            refused = Refused(Refusal.BUSY, detail)
        if refused is not None:
            self.fail(refused)
            return refused
        self._home = home
        self._needed.add((address.name, Right.SEND))
        if via is not None:
            self._needed.add((via, Right.SEND))
        if is_home:
            self._key = key
        elif via is None:
            via = address.name
        self._operations.append(Enqueue(home.entity_no, envelopes, is_atomic=True, via=via))
        self._size_bytes += size_bytes
        return None

    def add_schedule(
        self,
        address: Address,
        envelopes: list[Envelope],
        size_bytes: int,
        on_numbered: OnReply[Enqueued],
    ) -> None:
        """Add scheduled messages; `on_numbered` gets their numbers, or the reason of a refusal.

        The numbers are returned before the commit, therefore the messages must stay in this
        partition.
        """
        refused: Refused | None = None
        if self._home is not None and address.entity_no != self._home.entity_no:
            refused = ELSEWHERE
            self.fail(refused)
        refused = refused or self.add_send(address, envelopes, size_bytes, None)
        if refused is not None:
            on_numbered(refused)
            return
        sending = self._operations[-1]
        assert isinstance(sending, Enqueue)
        self._checking += 1

        def answered(reply: Enqueued | Refused) -> None:
            if isinstance(reply, Enqueued):
                sending.numbers = reply.sequence_numbers
                partition_id = address.partition_id
                if address.is_partitioned:
                    partition_id = partition_of_number(reply.sequence_numbers[0])
                if self._partition_id not in (None, partition_id):
                    reply = ELSEWHERE
                self._partition_id = partition_id
            if isinstance(reply, Refused):
                self.fail(reply)
            self._checked(partial(on_numbered, reply))

        command = ReserveNumbers(address.entity_no, envelopes)
        self._connection.router.submit(address.partition_id, command, answered)

    def _checked(self, answer: Callable[[], None]) -> None:
        """Answer a check, and continue a discharge that waited for it."""
        self._checking -= 1
        try:
            answer()
            if self._discharge is not None and not self._checking:
                self._commit(self._discharge)
        except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
            self._connection.broke()

    def fail(self, refused: Refused) -> None:
        """Make the discharge fail: an operation of the transaction was refused."""
        self._failure = self._failure or refused

    def add_settlement(
        self, address: Address, path: str, command: Settle, on_checked: OnChecked
    ) -> None:
        """Add a settlement if its locks are valid; `on_checked` is called once.

        `path`: the entity or sub-queue of the locks.
        """
        refused = self._count_refusal(len(command.lock_tokens))
        partition_id = int.from_bytes(command.lock_tokens[0][8:10], "big")
        if self._partition_id not in (None, partition_id):
            refused = Refused(
                Refusal.NOT_ALLOWED,
                "All operations of a transaction must be in one partition of the bus.",
            )
        if refused is not None:
            self.fail(refused)
            on_checked(refused)
            return
        self._partition_id = partition_id
        self._home = self._home or address
        self._needed.add((path, Right.LISTEN))
        self._checking += 1

        def answered(reply: Settled | Refused) -> None:
            if isinstance(reply, Settled):
                refused = Refused(Refusal.LOCK_LOST) if reply.lost else None
            else:
                refused = reply
            if refused is not None:
                self.fail(refused)
            elif self._lost is None:
                self._operations.append(command)
            self._checked(partial(on_checked, refused))

        check = CheckLocks(
            command.entity_no, command.sub_queue, command.lock_tokens, command.session_id
        )
        self._connection.router.submit(address.partition_id, check, answered)

    def _count_refusal(self, count: int) -> Refused | None:
        if self.is_over:
            return Refused(Refusal.NOT_ALLOWED, "The transaction is being discharged.")
        self._count += count
        if self._count > MAX_MESSAGES:
            return Refused(
                Refusal.NOT_ALLOWED, f"A transaction has at most {MAX_MESSAGES} messages."
            )
        return None

    # --- the end --------------------------------------------------------------------------------

    def discharge(self, answer: Answer) -> None:
        """Commit; `answer` gets None, or the error of a transaction that was rolled back."""
        self.is_over = True
        self._timer.cancel()
        if self._checking:
            self._discharge = answer
        else:
            self._commit(answer)

    def roll_back(self) -> None:
        """Forget all operations, unless a partition was already asked to commit them."""
        if self._is_submitted:
            return
        self.is_over = True
        self._discharge = None
        self._timer.cancel()
        self._forget()

    def review_rights(self) -> None:
        """Forget all operations if one of their rights is gone; the discharge then fails."""
        if self._is_submitted or self._lost is not None:
            return
        for path, right in self._needed:
            if not self._connection.is_allowed(path, right):
                self._lost = path, right
                self._forget()
                return

    def _forget(self) -> None:
        self._operations.clear()
        self._let_go()
        self._size_bytes = 0

    def _commit(self, answer: Answer) -> None:
        error_mapper, path = self._connection.error_mapper, COORDINATOR
        self.review_rights()
        reason = ""
        if self._lost is not None:
            lost_path, right = self._lost
            reason = error_mapper.missing_right(right, lost_path).description
        elif self._failure is not None:
            reason = error_mapper.refused(self._failure, path).description
        if reason:
            text = f"The transaction was rolled back: {reason}"
            self.roll_back()
            answer(error_mapper.error(conditions.TRANSACTION_ROLLBACK, text, path))
            return
        home = self._home
        if home is None or not self._operations:
            answer(None)
            return

        def answered(reply: Transacted | Refused) -> None:
            connection.unanswered_count -= 1
            inflight.give_back(connection.account, self._size_bytes)
            error: AmqpError | None = None
            if isinstance(reply, Refused):
                error = error_mapper.refused(reply, home.name)
                if reply.refusal not in (Refusal.UNKNOWN, Refusal.BUSY):
                    text = f"The transaction was rolled back: {error.description}"
                    error = error_mapper.error(conditions.TRANSACTION_ROLLBACK, text, home.name)
            try:
                answer(error)
            except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
                self._connection.broke()

        self._is_submitted = True
        connection, inflight = self._connection, self._connection.inflight
        self._let_go()
        inflight.take(connection.account, self._size_bytes)
        connection.unanswered_count += 1
        connection.router.submit(home.partition_id, Transact(self._operations), answered)

    def _let_wait(self, size_bytes: int) -> bool:
        """Count waiting messages; return whether the key may have that many."""
        return self._connection.inflight.waiting.take(self._connection.account, size_bytes)

    def _let_go(self) -> None:
        """Release the bytes of all messages. The account is the same: every sender is
        authenticated.
        """
        self._connection.inflight.waiting.give_back(self._connection.account, self._size_bytes)

    def _expire(self) -> None:
        self.has_timed_out = True
        self.roll_back()


class Transactions:
    """The open transactions of one connection, without a reference to it: they would keep it in
    memory.
    """

    def __init__(self, error_mapper: ErrorMapper) -> None:
        self._error_mapper = error_mapper
        self._open: dict[bytes, Transaction] = {}

    def declare(self, coordinator: CoordinatorEndpoint) -> Transaction | None:
        """Open a transaction; None when too many are open."""
        most = coordinator.most_open
        if len(self._open) >= most:  # those that timed out are kept to report it
            for each in [each for each in self._open.values() if each.has_timed_out]:
                self.close(each)
        if len(self._open) >= most:
            return None
        transaction = Transaction(coordinator.connection, secrets.token_bytes(16), coordinator)
        self._open[transaction.transaction_id] = transaction
        return transaction

    def find(self, transaction_id: bytes) -> Transaction | None:
        """Return an open transaction; one that timed out is closed."""
        transaction = self._open.get(transaction_id)
        return None if transaction is None or transaction.is_over else transaction

    def unknown(self, transaction_id: bytes) -> AmqpError:
        """Return the error for an id that is not open."""
        known = self._open.get(transaction_id)
        if known is not None and known.has_timed_out:
            text = f"The transaction was open for more than {LIFETIME_S:.0f} s and was rolled back."
            return self._error_mapper.error(conditions.TRANSACTION_TIMEOUT, text, "")
        text = "No such transaction is open on this connection."
        return self._error_mapper.error(conditions.TRANSACTION_UNKNOWN_ID, text, "")

    def forget_late(self, transaction_id: bytes) -> None:
        """Forget a transaction that timed out; its client has the answer."""
        known = self._open.get(transaction_id)
        if known is not None and known.has_timed_out:
            self.close(known)

    def close(self, transaction: Transaction) -> None:
        """Forget a transaction that ended."""
        self._open.pop(transaction.transaction_id, None)

    def review_rights(self) -> None:
        """Review all transactions after a change of rights."""
        for transaction in self._open.values():
            transaction.review_rights()

    def roll_back(self, coordinator: CoordinatorEndpoint | None = None) -> None:
        """Roll back the transactions of a link that is gone; None: all, the connection is gone."""
        for transaction in list(self._open.values()):
            if coordinator in (None, transaction.coordinator):
                transaction.roll_back()
                self.close(transaction)


class CoordinatorEndpoint:
    """Endpoint of a link to the transaction coordinator. Its transactions end with it."""

    idleness: Final = None
    path = COORDINATOR

    def __init__(self, connection: TransactionContext, link: IncomingLink) -> None:
        self.connection = connection
        self._link = link

    @property
    def most_open(self) -> int:
        """Number of transactions the connection may have open."""
        return MAX_OPEN if self.connection.is_authorised else MAX_OPEN_UNKNOWN

    def attach(self) -> None:
        self._link.accept(max_message_bytes=REQUEST_BYTES, credit=REQUEST_CREDIT)

    def receive(self, transfers: list[TransferReceived]) -> None:
        """Answer each declare and discharge."""
        for transfer in transfers:
            request = _request_of(transfer)
            match request:
                case Declare():
                    self._declare(transfer)
                case Discharge():
                    self._discharge(transfer, request)
                case None:
                    text = "A coordinator accepts declare and discharge only."
                    self._reject(transfer, self._error(conditions.NOT_IMPLEMENTED, text))
                case _:
                    assert_never(request)
        if self._link.is_attached and self._link.credit < REQUEST_CREDIT >> 1:
            self._link.grant(REQUEST_CREDIT)
        self.connection.flush_soon()

    def refuse_oversize(self, event: OversizeReceived) -> None:
        if not event.is_settled:
            text = f"A request may have {REQUEST_BYTES} bytes."
            state = Rejected(conditions.MESSAGE_SIZE_EXCEEDED, text)
            self._link.settle(event.delivery_id, event.delivery_id, state)

    def close(self) -> None:
        """Roll back the link's transactions that were not discharged."""
        self.connection.transactions.roll_back(self)

    def _declare(self, transfer: TransferReceived) -> None:
        transaction = self.connection.transactions.declare(self)
        if transaction is None:
            text = f"The connection may have {self.most_open} open transactions."
            self._reject(transfer, self._error(conditions.RESOURCE_LIMIT_EXCEEDED, text))
            return
        if not transfer.is_settled:
            state = Declared(transaction.transaction_id)
            self._link.settle(transfer.delivery_id, transfer.delivery_id, state)

    def _discharge(self, transfer: TransferReceived, request: Discharge) -> None:
        transactions = self.connection.transactions
        transaction = transactions.find(request.transaction_id)
        if transaction is None:
            self._reject(transfer, transactions.unknown(request.transaction_id))
            transactions.forget_late(request.transaction_id)
            return

        def answer(error: AmqpError | None) -> None:
            transactions.close(transaction)
            if error is not None:
                self._reject(transfer, error)
            elif self._link.is_attached and not transfer.is_settled:
                self._link.settle(transfer.delivery_id, transfer.delivery_id, ACCEPTED)
            self.connection.flush_soon()

        if request.has_failed:
            transaction.roll_back()
            answer(None)
        else:
            transaction.discharge(answer)

    def _error(self, condition: str, text: str) -> AmqpError:
        return self.connection.error_mapper.error(condition, text, COORDINATOR)

    def _reject(self, transfer: TransferReceived, error: AmqpError) -> None:
        if self._link.is_attached and not transfer.is_settled:
            state = Rejected(error.condition, error.description)
            self._link.settle(transfer.delivery_id, transfer.delivery_id, state)


def _request_of(transfer: TransferReceived) -> Declare | Discharge | None:
    try:
        body = slice_message(transfer.payload).body
        section, _ = decode_value(body) if body else (None, 0)
    except DecodeError:
        return None
    return None if section is None else decode_transaction_request(section.value)
