"""The only translator between AMQP links and entity commands.

A `SenderDoor` stands behind a client's sender link, a `ReceiverDoor` behind its receiver link. They
hold no state machine: credit arithmetic belongs to the engine, locks and order to the entity.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from postbus.amqp import conditions
from postbus.amqp.events import DeliveriesUpdated, OversizeReceived, TransferReceived
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    DeliveryState,
    Modified,
    Rejected,
    Released,
)
from postbus.broker.router import Address
from postbus.entity.commands import (
    AddConsumer,
    Delivery,
    DemandSet,
    Disposition,
    Enqueue,
    Enqueued,
    ReceiveMode,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    Settle,
    Settled,
)
from postbus.message.codec import DecodeError
from postbus.message.delivery import encode_prefix
from postbus.message.envelope import Envelope
from postbus.message.sections import BATCH_FORMAT, explode_batch, slice_message

if TYPE_CHECKING:
    from postbus.edge.amqp_connection import AmqpConnection

SEND_CREDIT: Final = 2_000
"""Most deliveries a client may have on the way on one link. Service Bus grants 1,000; a pipelining
sender with a window of 1,000 must not wait for credit."""

LINK_BUDGET_BYTES: Final = 16 << 20
"""Bytes one link may have on the way, by the size of its last messages (D15)."""

DELIVERY_STEP: Final = 2_000
"""Deliveries asked for ahead of the transport; a client with endless credit that does not read
gets no more than this before its socket is empty again."""

LOST: Final = Refused(Refusal.LOCK_LOST)
ABANDONED: Final = Modified()
DEAD_LETTERED: Final = Rejected()


class SenderDoor:
    """Takes what a client sends to one queue."""

    def __init__(
        self, connection: AmqpConnection, link: IncomingLink, address: Address, path: str
    ) -> None:
        self.path = path
        self._connection = connection
        self._link = link
        self._address = address
        self._waiting = 0  # deliveries without an answer
        self._last_bytes = 1_024

    def attach(self, max_message_bytes: int, max_batch_bytes: int) -> None:
        """Answer the attach and grant the first credit."""
        self._link.accept(
            max_message_bytes=max_message_bytes,
            credit=SEND_CREDIT,
            properties={"com.microsoft:max-message-batch-size": max_batch_bytes},
        )

    def receive(self, transfers: list[TransferReceived]) -> None:
        """Enqueue one read's deliveries of this link, in order."""
        envelopes: list[Envelope] = []
        ids: list[int] = []
        self._waiting += len(transfers)
        self._last_bytes = len(transfers[-1].payload) or 1
        for transfer in transfers:
            if transfer.is_settled or transfer.message_format or transfer.state is not None:
                self._submit(envelopes, ids)
                envelopes, ids = [], []
                self._receive_special(transfer)
                continue
            try:
                envelopes.append(slice_message(transfer.payload))
            except DecodeError as error:
                self._submit(envelopes, ids)
                envelopes, ids = [], []
                self._refuse_malformed(transfer, error)
                continue
            ids.append(transfer.delivery_id)
        self._submit(envelopes, ids)

    def refuse_oversize(self, event: OversizeReceived) -> None:
        """Answer a delivery that was too large to be kept."""
        self._waiting += 1
        if event.is_settled:
            self._returned(1)
            return
        size = f"The limit is {self._link.max_message_bytes} bytes."
        self._refuse([event.delivery_id], Refused(Refusal.MESSAGE_TOO_LARGE, size))

    def close(self) -> None:
        """Forget the link; answers still under way find it detached."""

    def _submit(self, envelopes: list[Envelope], ids: list[int]) -> None:
        if envelopes:
            command = Enqueue(self._address.entity_no, envelopes)
            self._connection.router.submit(
                self._address.partition_id, command, partial(self._answered, ids)
            )

    def _receive_special(self, transfer: TransferReceived) -> None:
        """Take a batch, a pre-settled delivery, or one in a state we do not know."""
        if transfer.state is not None:
            self._reject(
                [transfer.delivery_id],
                conditions.NOT_IMPLEMENTED,
                "Transactions are not supported by this version.",
            )
            return
        is_batch = transfer.message_format == BATCH_FORMAT
        try:
            envelopes = (
                explode_batch(transfer.payload) if is_batch else [slice_message(transfer.payload)]
            )
        except DecodeError as error:
            self._refuse_malformed(transfer, error)
            return
        answer = self._drop_answer if transfer.is_settled else self._answered_batch
        command = Enqueue(self._address.entity_no, envelopes, is_atomic=is_batch)
        self._connection.router.submit(
            self._address.partition_id, command, partial(answer, transfer.delivery_id)
        )

    def _refuse_malformed(self, transfer: TransferReceived, error: DecodeError) -> None:
        if transfer.is_settled:
            self._returned(1)
            return
        reply = Refused(Refusal.MESSAGE_MALFORMED, str(error))
        self._refuse([transfer.delivery_id], reply)

    # --- answers --------------------------------------------------------------------------------

    def _answered(self, ids: list[int], reply: Reply) -> None:
        if isinstance(reply, Enqueued):
            refusals = reply.refusals
            if not refusals:
                self._settle(ids, ACCEPTED)
                return
            self._settle([each for n, each in enumerate(ids) if n not in refusals], ACCEPTED)
            for index, refused in refusals.items():
                self._refuse([ids[index]], refused)
            return
        assert isinstance(reply, Refused)
        self._refuse(ids, reply)

    def _answered_batch(self, delivery_id: int, reply: Reply) -> None:
        if isinstance(reply, Enqueued) and reply.refusals:
            reply = next(iter(reply.refusals.values()))
        if isinstance(reply, Refused):
            self._refuse([delivery_id], reply)
        else:
            self._settle([delivery_id], ACCEPTED)

    def _drop_answer(self, _delivery_id: int, _reply: Reply) -> None:
        """A pre-settled delivery gets no outcome, whatever came of it (S22, S24)."""
        self._returned(1)

    def _refuse(self, ids: list[int], reply: Refused) -> None:
        for delivery_id in ids:  # each refusal has a tracking id of its own (S6)
            error = self._connection.explainer.refused(reply, self.path)
            self._settle([delivery_id], Rejected(error.condition, error.description))

    def _reject(self, ids: list[int], condition: str, text: str) -> None:
        error = self._connection.explainer.error(condition, text, self.path)
        self._settle(ids, Rejected(error.condition, error.description))

    def _settle(self, ids: list[int], state: DeliveryState) -> None:
        if not ids:
            return
        link = self._link
        if link.is_attached:
            for first, last in _ranges(ids):
                link.settle(first, last, state)
        self._returned(len(ids))
        self._connection.flush_soon()

    def _returned(self, count: int) -> None:
        """Count answered deliveries and grant credit again when half of it is used."""
        self._waiting -= count
        link = self._link
        target = min(SEND_CREDIT, max(LINK_BUDGET_BYTES // self._last_bytes, 8))
        if link.is_attached and link.credit <= target >> 1:
            credit = target - self._waiting
            if credit > link.credit:
                link.grant(credit)
                self._connection.flush_soon()


class ReceiverDoor:
    """Hands messages of one queue or sub-queue to a client; a delivery sink of the router."""

    def __init__(
        self, connection: AmqpConnection, link: OutgoingLink, address: Address, path: str
    ) -> None:
        self.path = path
        self._connection = connection
        self._link = link
        self._address = address
        self._is_locking = link.snd_settle_mode != 1
        self._consumer_id = 0
        self._base = 0  # deliveries of the link before the present consumer was added
        self._given_back = 0  # deliveries the consumer counts but the link never sent
        self._demand = 0
        self._tag = 0

    def attach(self) -> None:
        """Answer the attach and register the consumer."""
        self._link.accept()
        self._register()

    def flowed(self) -> None:
        """Take the link's credit over into the entity's demand; answer a drain."""
        if self._link.is_draining:
            limit = self._demand_limit(self._link.limit)
            self._demand = limit
            self._submit(SetDemand(self._consumer_id, limit, is_drain=True), self._drained)
        else:
            self._ask()

    def writable(self) -> None:
        """The transport has room again."""
        self._ask()

    def updated(self, event: DeliveriesUpdated) -> None:
        """Settle what the client decided on."""
        state = event.state
        reason = description = None
        properties = None
        match state:
            case Accepted():
                disposition = Disposition.COMPLETE
            case Released():
                disposition = Disposition.RELEASE
            case Modified(_, is_undeliverable, annotations):
                disposition = Disposition.DEFER if is_undeliverable else Disposition.ABANDON
                properties = _texts(annotations)
            case Rejected(_, _, info):
                disposition = Disposition.DEAD_LETTER
                properties = _texts(info) or {}
                reason = _pop_text(properties, "DeadLetterReason")
                description = _pop_text(properties, "DeadLetterErrorDescription")
                properties = properties or None
            case _:
                if not event.is_settled:
                    self._refuse(event.delivery_ids, Refused(Refusal.NOT_ALLOWED))
                return
        command = Settle(
            self._address.entity_no,
            self._address.sub_queue,
            event.tags,
            disposition,
            reason,
            description,
            properties,
        )
        on_reply = None
        if not event.is_settled:
            on_reply = partial(self._settled, event.delivery_ids, _answer_of(state))
        self._connection.router.submit(self._address.partition_id, command, on_reply)

    def close(self) -> None:
        """The link is gone; its locks live until they expire."""
        self._connection.router.unregister_sink(self._address.partition_id, self._consumer_id)
        self._submit(RemoveConsumer(self._consumer_id))

    # --- delivery sink --------------------------------------------------------------------------

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Send what the entity handed out; what the client has no credit for any more goes back."""
        link = self._link
        credit = link.credit
        if credit < len(deliveries):
            self._give_back(deliveries[max(credit, 0) :])
            deliveries = deliveries[: max(credit, 0)]
        send = link.send
        is_settled = not self._is_locking
        for delivery in deliveries:
            envelope = delivery.envelope
            tag = delivery.lock_token
            if is_settled:
                self._tag += 1
                tag = self._tag.to_bytes(16, "big")
            prefix = encode_prefix(
                envelope,
                sequence=delivery.sequence,
                enqueued_ms=delivery.enqueued_ms,
                delivery_count=delivery.delivery_count,
                ttl_ms=delivery.ttl_ms,
                locked_until_ms=None if is_settled else delivery.locked_until_ms,
            )
            if envelope.properties or envelope.application_properties:
                parts = (
                    prefix,
                    envelope.properties,
                    envelope.application_properties,
                    envelope.body,
                )
                send(tag, parts, is_settled=is_settled)
            else:
                send(tag, (prefix, envelope.body), is_settled=is_settled)
        self._connection.flush_soon()
        if link.limit - link.sent and self._demand - self._delivered < DELIVERY_STEP >> 1:
            self._ask()

    def ended(self, refusal: Refusal) -> None:
        """The entity was dropped or disabled."""
        error = self._connection.explainer.refused(Refused(refusal), self.path)
        self._connection.detach(self._link, error)

    def reset(self) -> None:
        """The partition was reloaded: take up again where the link stands."""
        if self._link.is_attached:
            self._register()
            self._ask()

    # --- internals ------------------------------------------------------------------------------

    @property
    def _delivered(self) -> int:
        """Deliveries of the present consumer, as the entity counts them."""
        return self._link.sent - self._base + self._given_back

    def _register(self) -> None:
        router = self._connection.router
        self._consumer_id = router.new_consumer_id()
        self._base, self._given_back, self._demand = self._link.sent, 0, 0
        router.register_sink(self._address.partition_id, self._consumer_id, self)
        mode = ReceiveMode.PEEK_LOCK if self._is_locking else ReceiveMode.RECEIVE_AND_DELETE
        self._submit(
            AddConsumer(self._address.entity_no, self._address.sub_queue, self._consumer_id, mode),
            self._added,
        )

    def _added(self, reply: Reply) -> None:
        if isinstance(reply, Refused):
            error = self._connection.explainer.refused(reply, self.path)
            self._connection.detach(self._link, error)

    def _demand_limit(self, link_limit: int) -> int:
        return link_limit - self._base + self._given_back

    def _ask(self) -> None:
        """Set the entity's demand: the client's credit, bounded by what the transport takes."""
        link = self._link
        step = 0 if self._connection.is_paused else DELIVERY_STEP
        limit = self._demand_limit(min(link.limit, link.sent + step))
        if limit != self._demand and (limit > self._demand or link.limit < link.sent + step):
            self._demand = limit
            self._submit(SetDemand(self._consumer_id, limit))

    def _drained(self, reply: Reply) -> None:
        if isinstance(reply, DemandSet):
            self._demand = reply.delivered
        if self._link.is_attached and self._link.is_draining:
            self._link.drained()
            self._connection.flush_soon()

    def _give_back(self, deliveries: list[Delivery]) -> None:
        self._given_back += len(deliveries)
        tokens = [delivery.lock_token for delivery in deliveries if delivery.lock_token]
        if tokens:
            self._submit(
                Settle(
                    self._address.entity_no,
                    self._address.sub_queue,
                    tokens,
                    Disposition.RELEASE,
                )
            )

    def _settled(self, ids: list[int], answer: DeliveryState, reply: Reply) -> None:
        if isinstance(reply, Settled):
            if not reply.lost:
                self._answer(ids, answer)
                return
            lost = set(reply.lost)
            self._answer([each for n, each in enumerate(ids) if n not in lost], answer)
            self._refuse([ids[index] for index in reply.lost], LOST)
        elif isinstance(reply, Refused):
            is_lost = reply.refusal in (Refusal.NOT_APPLIED, Refusal.UNKNOWN)
            self._refuse(ids, LOST if is_lost else reply)  # a reload drops every lock (D10)

    def _answer(self, ids: list[int], state: DeliveryState) -> None:
        link = self._link
        if ids and not link.session.is_ended:
            for first, last in _ranges(ids):
                link.settle(first, last, state)
            self._connection.flush_soon()

    def _refuse(self, ids: list[int], reply: Refused) -> None:
        for delivery_id in ids:
            error = self._connection.explainer.refused(reply, self.path)
            self._answer([delivery_id], Rejected(error.condition, error.description))

    def _submit(
        self, command: AddConsumer | SetDemand | RemoveConsumer | Settle, on_reply: object = None
    ) -> None:
        self._connection.router.submit(self._address.partition_id, command, on_reply)  # type: ignore[arg-type]


def _ranges(ids: list[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive ids; nearly always one."""
    first, last = ids[0], ids[-1]
    if last - first + 1 == len(ids):
        return [(first, last)]
    runs: list[tuple[int, int]] = []
    start = previous = first
    for each in ids[1:]:
        if each != previous + 1:
            runs.append((start, previous))
            start = each
        previous = each
    runs.append((start, previous))
    return runs


def _answer_of(state: DeliveryState | None) -> DeliveryState:
    """Return the outcome that tells a client its settlement was done: the same type."""
    match state:
        case Accepted():
            return ACCEPTED
        case Released():
            return RELEASED
        case Modified():
            return ABANDONED
        case _:
            return DEAD_LETTERED


def _texts(entries: dict[object, object] | None) -> dict[str, object] | None:
    return {str(key): value for key, value in entries.items()} if entries else None


def _pop_text(properties: dict[str, object], name: str) -> str | None:
    value = properties.pop(name, None)
    return value if isinstance(value, str) else None
