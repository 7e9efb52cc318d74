"""Endpoint of a client's sender link: AMQP transfers to `Enqueue`, refusals to rejected outcomes.

Holds no state machine: credit arithmetic belongs to the engine, order to the entity. Messages
inside a transaction go to the `Transaction` and wait there.
"""

from __future__ import annotations

from typing import Final

from postbus.amqp.events import OversizeReceived, TransferReceived, TransfersReceived
from postbus.amqp.link import IncomingLink
from postbus.amqp.performatives import ACCEPTED, DeliveryState, Rejected, TransactionalState
from postbus.broker.address import Address
from postbus.edge.access.inflight_budget import guarded
from postbus.edge.amqp.idleness import Idleness
from postbus.edge.amqp.settlements import PRE_SETTLED, ranges_of
from postbus.edge.amqp.transactions import TransactionContext
from postbus.edge.message_ids import name_messages
from postbus.entity.commands import Enqueue, Enqueued, Refusal, Refused, Transact, Transacted
from postbus.message.codec import DecodeError, Ulong
from postbus.message.envelope import Envelope
from postbus.message.runs import slice_messages
from postbus.message.sections import BATCH_FORMAT, TooManyMembers, explode_batch, slice_message

SEND_CREDIT: Final = 2_000
"""Maximum number of deliveries in flight on one link. Service Bus grants 1,000; a pipelining sender
with a window of 1,000 must not wait for credit."""

LINK_BUDGET_BYTES: Final = 16 << 20
"""Bytes in flight on one link, by the size of its last messages (ADR 25)."""

MAX_UNANSWERED: Final = 20_000
"""Deliveries without an answer above which a link's sends are refused as busy. Some clients ignore
credit: the Python SDK starts with an assumed 10,000."""

LINK_ENDING: Final = frozenset(
    {Refusal.ENTITY_NOT_FOUND, Refusal.ENTITY_DISABLED, Refusal.SEND_DISABLED}
)
"""Refusals of a send that hold for the whole link."""


class SenderEndpoint:
    """Takes the messages of a client for one queue or topic.

    `via`: the final entity, reached through the outbox of `address` (send-via).
    """

    def __init__(
        self,
        connection: TransactionContext,
        link: IncomingLink,
        address: Address,
        path: str,
        via: str | None = None,
    ) -> None:
        self.path = path
        self.via = via
        self.connection = connection
        self.idleness = Idleness()
        self._link = link
        self._address = address
        self._inflight = connection.inflight
        self._account = connection.account
        self._waiting = 0  # deliveries without an answer
        self._last_bytes = 1_024
        self._max_batch_bytes = 0

    @property
    def credit(self) -> int:
        """Number of messages that the client may send."""
        return self._link.credit

    @property
    def _is_busy(self) -> bool:
        return self._inflight.is_full(self._account) or self._waiting >= MAX_UNANSWERED

    def attach(self, max_message_bytes: int, max_batch_bytes: int) -> None:
        """Answer the attach and grant the first credit."""
        self._max_batch_bytes = max_batch_bytes
        self.connection.router.watch(self._address.entity_no, self)
        self._link.accept(
            max_message_bytes=max_message_bytes,
            credit=SEND_CREDIT,
            properties={"com.microsoft:max-message-batch-size": Ulong(max_batch_bytes)},
        )

    def receive_run(self, run: TransfersReceived) -> None:
        """Enqueue deliveries that look alike, in order."""
        payloads = run.payloads
        if self._is_busy:
            self.receive(run.each())
            return
        try:
            envelopes = slice_messages(payloads)
        except DecodeError:  # which one is found out one by one
            self.receive(run.each())
            return
        self.idleness.is_used = True
        self._waiting += len(payloads)
        self._last_bytes = len(payloads[-1]) or 1
        name_messages(envelopes)
        ids = [PRE_SETTLED] * len(payloads) if run.is_settled else run.delivery_ids
        size_bytes = sum(map(len, payloads))
        self._submit(ids, Enqueue(self._address.entity_no, envelopes), size_bytes)

    def receive(self, transfers: list[TransferReceived]) -> None:
        """Enqueue the deliveries of this link from one read, in order."""
        envelopes: list[Envelope] = []
        ids: list[int] = []
        size_bytes = 0
        is_busy = self._is_busy
        self.idleness.is_used = True
        self._waiting += len(transfers)
        self._last_bytes = len(transfers[-1].payload) or 1
        for transfer in transfers:
            _, delivery_id, _, message_format, is_settled, state, payload = transfer
            if is_settled:
                delivery_id = PRE_SETTLED
            if is_busy:
                self._refuse_special(transfer.state, delivery_id, Refused(Refusal.BUSY))
                continue
            if message_format or state is not None:
                name_messages(envelopes)
                self._submit(ids, Enqueue(self._address.entity_no, envelopes), size_bytes)
                envelopes, ids, size_bytes = [], [], 0
                self._receive_special(transfer, delivery_id)
                continue
            try:
                envelopes.append(slice_message(payload))
            except DecodeError as error:
                self._refuse([delivery_id], Refused(Refusal.MESSAGE_MALFORMED, str(error)))
                continue
            ids.append(delivery_id)
            size_bytes += len(payload)
        name_messages(envelopes)
        self._submit(ids, Enqueue(self._address.entity_no, envelopes), size_bytes)

    def refuse_oversize(self, event: OversizeReceived) -> None:
        """Answer a delivery that was too large to be kept."""
        self.idleness.is_used = True
        self._waiting += 1
        delivery_id = PRE_SETTLED if event.is_settled else event.delivery_id
        detail = f"The limit is {self._link.max_message_bytes} bytes."
        refused = Refused(Refusal.MESSAGE_TOO_LARGE, detail)
        self._refuse_special(event.state, delivery_id, refused)

    def close(self) -> None:
        """Forget the link; answers in flight find it detached."""
        self._inflight.forget(self._account, self)
        self.connection.router.unwatch(self._address.entity_no, self)

    @guarded
    def deleted(self) -> None:
        """Detach: the entity was deleted."""
        error = self.connection.error_mapper.refused(Refused(Refusal.ENTITY_NOT_FOUND), self.path)
        self.connection.detach(self._link, error)

    def replenish(self) -> None:
        """Grant credit again when half of it is used and the budget allows."""
        link = self._link
        target = min(SEND_CREDIT, max(LINK_BUDGET_BYTES // self._last_bytes, 8))
        if link.is_attached and link.credit <= target >> 1:
            credit = target - self._waiting
            if credit > max(link.credit, 0):  # below 0 for a client that ignores its credit
                if self._inflight.is_over(self._account):
                    self._inflight.hold(self._account, self)
                    return
                link.grant(credit)
                self.connection.flush_soon()

    def _receive_special(self, transfer: TransferReceived, delivery_id: int) -> None:
        """Take a batch, a message of an unknown format, or one in a transaction."""
        payload = transfer.payload
        is_batch = transfer.message_format == BATCH_FORMAT
        if is_batch and len(payload) > self._max_batch_bytes:
            detail = f"A batch may have {self._max_batch_bytes} bytes."
            refused = Refused(Refusal.MESSAGE_TOO_LARGE, detail)
            self._refuse_special(transfer.state, delivery_id, refused)
            return
        try:
            envelopes = explode_batch(payload) if is_batch else [slice_message(payload)]
        except DecodeError as error:
            is_too_long = isinstance(error, TooManyMembers)
            why = Refusal.MESSAGE_TOO_LARGE if is_too_long else Refusal.MESSAGE_MALFORMED
            refused = Refused(why, str(error))
            self._refuse_special(transfer.state, delivery_id, refused)
            return
        name_messages(envelopes)
        if transfer.state is not None:
            self._enlist(transfer, delivery_id, envelopes)
            return
        command = Enqueue(self._address.entity_no, envelopes, is_atomic=is_batch)
        self._submit([delivery_id], command, len(payload))

    def _refuse_special(
        self, state: DeliveryState | None, delivery_id: int, refused: Refused
    ) -> None:
        """Refuse one delivery; the transaction it belongs to cannot commit without it.

        The Java SDK takes every outcome of a send in a transaction as success.
        """
        if isinstance(state, TransactionalState):
            transaction = self.connection.transactions.find(state.transaction_id)
            if transaction is not None:
                transaction.fail(refused)
        self._refuse([delivery_id], refused)

    def _enlist(
        self, transfer: TransferReceived, delivery_id: int, envelopes: list[Envelope]
    ) -> None:
        """Add messages to their transaction; promises to the client apply at the commit."""
        state = transfer.state
        if not isinstance(state, TransactionalState):
            self._refuse([delivery_id], Refused(Refusal.MESSAGE_MALFORMED))
            return
        transactions = self.connection.transactions
        transaction = transactions.find(state.transaction_id)
        if transaction is None:
            error = transactions.unknown(state.transaction_id)
            self._settle([delivery_id], Rejected(error.condition, error.description))
            return
        refused = transaction.add_send(self._address, envelopes, len(transfer.payload), self.via)
        if refused is None:
            self._settle([delivery_id], TransactionalState(state.transaction_id, ACCEPTED))
        else:
            self._refuse([delivery_id], refused)

    def _submit(self, ids: list[int], command: Enqueue, size_bytes: int) -> None:
        if not ids:
            return
        if self.via is not None and len(ids) > 1:  # each alone: an error of one fails no other
            for delivery_id, envelope in zip(ids, command.messages, strict=True):
                alone = Enqueue(command.entity_no, [envelope])
                self._submit([delivery_id], alone, envelope.size_bytes)
            return
        self._inflight.take(self._account, size_bytes)
        connection = self.connection
        connection.unanswered_count += 1

        def answered(reply: Enqueued | Transacted | Refused) -> None:
            self._answered(ids, size_bytes, reply)

        if self.via is None:
            connection.router.submit(self._address.partition_id, command, answered)
        else:
            command.via = self.via
            connection.router.submit(self._address.partition_id, Transact([command]), answered)

    # --- answers --------------------------------------------------------------------------------

    @guarded
    def _answered(
        self, ids: list[int], size_bytes: int, reply: Enqueued | Transacted | Refused
    ) -> None:
        """Answer the deliveries of one command; a batch is one delivery of many messages."""
        self._inflight.give_back(self._account, size_bytes)
        self.connection.unanswered_count -= 1
        if isinstance(reply, Refused):
            self._refuse(ids, reply)
            return
        if isinstance(reply, Transacted):  # sent through an outbox
            self._settle(ids, ACCEPTED)
            return
        refusals = reply.refusals
        if not refusals:
            self._settle(ids, ACCEPTED)
        elif len(reply.sequence_numbers) > len(ids):
            self._refuse(ids, next(iter(refusals.values())))
        else:
            self._settle([each for n, each in enumerate(ids) if n not in refusals], ACCEPTED)
            for index, refused in refusals.items():
                self._refuse([ids[index]], refused)

    def _refuse(self, ids: list[int], reply: Refused) -> None:
        error = None
        for delivery_id in ids:  # each refusal has a tracking id of its own (S6)
            error = self.connection.error_mapper.refused(reply, self.path)
            self._settle([delivery_id], Rejected(error.condition, error.description))
        if error is not None and reply.refusal in LINK_ENDING and self._link.is_attached:
            self.connection.detach(self._link, error)

    def _settle(self, ids: list[int], state: DeliveryState) -> None:
        """Send an outcome; pre-settled deliveries get none, whatever their result (S22, S24)."""
        if not ids:
            return
        link = self._link
        if link.is_attached:
            for first, last in ranges_of(ids):
                link.settle(first, last, state)
        self._waiting -= len(ids)
        self.replenish()
        self.connection.flush_soon()
