"""Endpoint of a client's receiver link: credit to demand, deliveries to transfers, outcomes to
`Settle`.

It has no state machine of its own: `amqp` keeps the credit, `demand_window` demand and drain, the
entity locks and order. Receivers of sessions are in `session_links.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from postbus.amqp.events import DeliveriesUpdated
from postbus.amqp.link import OutgoingLink
from postbus.amqp.performatives import DeliveryState, Rejected, TransactionalState
from postbus.broker.address import Address
from postbus.contract.entities import NamespaceLimits
from postbus.edge.access.inflight_budget import guarded
from postbus.edge.amqp.demand_window import AnswerDrain, DemandLimits, DemandWindow
from postbus.edge.amqp.idleness import Idleness
from postbus.edge.amqp.link_context import PacedContext
from postbus.edge.amqp.settlements import (
    LOST,
    RELOADING,
    answer_of,
    disposition_of,
    is_repeatable,
    ranges_of,
)
from postbus.edge.amqp.transactions import TransactionContext
from postbus.entity.commands import (
    AddConsumer,
    Delivery,
    DemandSet,
    Disposition,
    Done,
    OnReply,
    ReceiveMode,
    Receiver,
    Refusal,
    Refused,
    RemoveConsumer,
    SetDemand,
    Settle,
    Settled,
)
from postbus.entity.expects import Expects, R
from postbus.message.runs import pack_deliveries

MAX_OUT_BYTES: Final = 4 << 20
"""Bytes of one connection written in one iteration of the event loop above which no more are
requested."""

REPEAT_S: Final = 0.1
"""Pause before a settlement is repeated after a failed read, or a demand after a refusal."""

REPEATED: Final = frozenset({Refusal.NOT_APPLIED, Refusal.BUSY})
"""Temporary refusals of a demand: the partition loads, or decides whether the entity is idle."""

NAME_CHARS: Final = 256
"""Characters of a link's name that are kept with a dead letter. Our choice."""


class ReceiverContext(TransactionContext, PacedContext, Protocol):
    """For receivers. `address`: the client's IP address."""

    limits: NamespaceLimits
    demand_limits: DemandLimits
    address: str | None

    def loop_time_s(self) -> float:
        """Return the time of the event loop."""


class ReceiverEndpoint:
    """Hands messages of one queue or sub-queue to a client; a delivery sink of the router.

    The entity calls `deliver` while it applies a command, so nothing is submitted from there:
    `pump` runs once before the next write and brings the entity's demand in line with the link's
    credit.
    """

    def __init__(
        self, connection: ReceiverContext, link: OutgoingLink, address: Address, path: str
    ) -> None:
        self.path = path
        self.connection = connection
        self.idleness = Idleness()
        self._link = link
        self._address = address
        self._is_locking = link.snd_settle_mode != 1
        self._consumer_id = 0
        self._window = DemandWindow(
            connection.demand_limits, connection.limits.default_message_size_kb * 1024
        )
        self._drain_timer: asyncio.TimerHandle | None = None
        self._session_id: bytes | None = None
        self._lost = LOST
        self._returns: list[bytes] = []  # tokens of deliveries without credit
        self._unsent: deque[Delivery] = deque()  # the same in receive-and-delete
        self._tag = 0

    @property
    def credit(self) -> int:
        """Number of further deliveries that the client accepts."""
        return self._link.credit

    @property
    def locked_count(self) -> int:
        """Deliveries that wait for an outcome, each under a lock."""
        return self._window.unsettled_count if self._is_locking else 0

    def attach(self) -> None:
        """Answer the attach and register the consumer."""
        self._link.accept()
        self._register()
        self.connection.pump_soon(self)  # a flow may have followed the attach

    def flowed(self) -> None:
        """Handle a change of credit, or the request of a drain."""
        self.idleness.is_used = True
        self.connection.pump_soon(self)

    def close(self) -> None:
        """Remove the consumer of a detached link; its locks live until they expire."""
        self._stop_drain_timer()
        self.connection.router.unregister_sink(self._address.partition_id, self._consumer_id)
        self._give_back()
        self._submit(RemoveConsumer(self._consumer_id))

    def updated(self, event: DeliveriesUpdated) -> None:
        """Apply the client's outcomes; a settled disposition gets no answer."""
        self.idleness.is_used = True
        state = event.state
        if isinstance(state, TransactionalState):
            self._enlist(event, state)
            return
        command = self._settlement(event.tags, state)
        if event.is_settled:
            self._count_settled(len(event.delivery_ids))
            self._submit(command)
        else:
            self.connection.unanswered_count += 1
            self._settle(command, event.delivery_ids, answer_of(state))

    def _settlement(self, tags: list[bytes], state: DeliveryState | None) -> Settle:
        disposition, (reason, description, properties) = disposition_of(state)
        return Settle(
            self._address.entity_no,
            self._address.sub_queue,
            tags,
            disposition,
            reason,
            description,
            properties,
            self._session_id,
        )

    # --- transactions ---------------------------------------------------------------------------

    def _enlist(self, event: DeliveriesUpdated, state: TransactionalState) -> None:
        """Add a settlement to its transaction if the locks are valid."""
        ids = event.delivery_ids
        transactions = self.connection.transactions
        transaction = transactions.find(state.transaction_id)
        if transaction is None and event.is_settled:  # it gets no answer; its lock expires
            self._count_settled(len(ids))
            return
        if transaction is None:
            error = transactions.unknown(state.transaction_id)
            self._answer(ids, Rejected(error.condition, error.description))
            return
        if not self._is_locking:
            detail = (
                "Messages received in receive-and-delete mode cannot be settled in a transaction."
            )
            self._refuse(ids, Refused(Refusal.NOT_ALLOWED, detail))
            return
        answer = TransactionalState(state.transaction_id, answer_of(state.outcome))
        command = self._settlement(event.tags, state.outcome)

        def checked(refused: Refused | None) -> None:
            if event.is_settled:
                self._count_settled(len(ids))
            elif refused is None:
                self._answer(ids, answer)
            else:
                self._refuse(ids, self._lost if refused.refusal is Refusal.LOCK_LOST else refused)

        transaction.add_settlement(self._address, self.path, command, checked)

    # --- delivery sink --------------------------------------------------------------------------

    @guarded
    def deliver(self, deliveries: list[Delivery]) -> None:
        """Send the entity's deliveries; return those for which the client no longer has credit."""
        link, window = self._link, self._window
        taken = window.receive(len(deliveries), link.credit if link.is_attached else 0)
        if taken < len(deliveries):
            over = deliveries[taken:]
            deliveries = deliveries[:taken]
            if self._is_locking:
                self._returns += [delivery.lock_token for delivery in over]
            else:
                self._unsent.extend(over)
        if deliveries:
            self._send(deliveries)
        is_done = not (link.is_draining or self._returns or self._unsent)
        if not (is_done and window.is_in_step(link.credit)):
            self.connection.pump_soon(self)

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        """Raise: only receivers of sessions are granted one."""
        raise AssertionError(f"asked for no session, got {session_id!r} until {locked_until_ms}")

    def available(self, count: int) -> None:
        """Raise: only the router asks for hints."""
        raise AssertionError(f"asked for no hint, got {count}")

    def ended(self, refused: Refused) -> None:
        """Detach: the entity was dropped or disabled, or the session's lock is lost."""
        error = self.connection.error_mapper.refused(refused, self.path)
        self.connection.detach(self._link, error)

    def reset(self) -> None:
        """Resume at the state of the link after a reload of the partition."""
        if self._link.is_attached:
            self._register()
            self.connection.pump_soon(self)

    # --- demand ---------------------------------------------------------------------------------

    def pump(self) -> None:
        """Bring the entity's demand in line with the link."""
        link = self._link
        if not link.is_attached:
            return
        self._give_back()
        if self._unsent and link.credit > 0:
            count = min(len(self._unsent), link.credit)
            self._send([self._unsent.popleft() for _ in range(count)])
        window, connection = self._window, self.connection
        if window.drain is not None:
            return
        credit = link.credit
        is_held = credit > 0 and connection.must_wait(self, link.session, MAX_OUT_BYTES)
        if link.is_draining:
            self._drain(credit, is_held)
        else:
            command = window.request(credit, is_held=is_held)
            if command is not None:
                self._submit(command, lambda reply: self._requested(command, reply))

    @guarded
    def _requested(self, command: SetDemand, reply: DemandSet | Refused) -> None:
        """Schedule a new request if the demand was refused; nothing else would trigger one."""
        is_refused = isinstance(reply, Refused) and reply.refusal in REPEATED
        if is_refused and self._link.is_attached and self._window.note_refused(command):
            self.connection.call_later(REPEAT_S, self.connection.pump_soon, self)

    def _drain(self, credit: int, is_held: bool) -> None:
        now_s = self.connection.loop_time_s()
        match self._window.request_drain(credit, is_held=is_held, now_s=now_s):
            case AnswerDrain():
                self._answer_drain()
            case SetDemand() as command:
                self._set_drain_timer(now_s)
                self._submit(command, lambda reply: self._drained(command, reply))
            case None:
                pass

    @guarded
    def _drained(self, command: SetDemand, reply: DemandSet | Refused) -> None:
        """Record that the deliveries of one step are sent, or that there are no more."""
        link = self._link
        is_draining = link.is_attached and link.is_draining
        if self._window.end_drain(command, reply, is_draining=is_draining) is not None:
            self._answer_drain()
        self.connection.pump_soon(self)

    def _look_at_drain(self) -> None:
        """Answer a drain that takes too long."""
        self._drain_timer = None
        link, connection, now_s = self._link, self.connection, self.connection.loop_time_s()
        is_draining = link.is_attached and link.is_draining
        is_held = is_draining and connection.must_wait(self, link.session, MAX_OUT_BYTES)
        late = self._window.expire_drain(now_s, is_draining=is_draining, is_held=is_held)
        if late is not None:
            self._answer_drain()
        connection.pump_soon(self)
        self._set_drain_timer(now_s)

    def _answer_drain(self) -> None:
        self._stop_drain_timer()
        self._link.drained()
        self.connection.flush_soon()

    def _set_drain_timer(self, now_s: float) -> None:
        due_s = self._window.drain_due_s
        if due_s is not None and self._drain_timer is None:
            self._drain_timer = self.connection.call_later(due_s - now_s, self._look_at_drain)

    def _stop_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    # --- internals ------------------------------------------------------------------------------

    def _receiver(self) -> Receiver:
        """Return the receiver's name for dead letters that expire under its lock."""
        return Receiver(self._link.name[:NAME_CHARS], self.connection.address or "")

    def _register(self) -> None:
        consumer_id = self._begin()
        mode = ReceiveMode.PEEK_LOCK if self._is_locking else ReceiveMode.RECEIVE_AND_DELETE
        self._submit(
            AddConsumer(
                self._address.entity_no,
                self._address.sub_queue,
                consumer_id,
                mode,
                self._receiver(),
            ),
            lambda reply: self._added(consumer_id, reply),
        )

    def _begin(self) -> int:
        """Register a new consumer for deliveries, with a demand of zero; return its number."""
        router = self.connection.router
        self._consumer_id = router.new_consumer_id()
        self._window.restart(self._consumer_id)
        router.register_sink(self._address.partition_id, self._consumer_id, self)
        return self._consumer_id

    @guarded
    def _added(self, consumer_id: int, reply: Done | Refused) -> None:
        if isinstance(reply, Refused) and consumer_id == self._consumer_id:
            self.ended(reply)

    def _send(self, deliveries: list[Delivery]) -> None:
        is_settled = not self._is_locking
        tags = [delivery[0] for delivery in deliveries]
        if is_settled:
            first, self._tag = self._tag + 1, self._tag + len(deliveries)
            tags = [number.to_bytes(16, "big") for number in range(first, self._tag + 1)]
        parts, payload_bytes, size_bytes = pack_deliveries(deliveries, is_locked=self._is_locking)
        self._link.send_all(tags, parts, payload_bytes, is_settled=is_settled)
        if self._is_locking:
            self._window.unsettled_count += len(deliveries)
        self._window.note_sent(len(deliveries), size_bytes)
        self.connection.flush_soon()

    def _give_back(self) -> None:
        if self._returns:
            tokens, self._returns = self._returns, []
            address = self._address
            self._submit(
                Settle(
                    address.entity_no,
                    address.sub_queue,
                    tokens,
                    Disposition.RELEASE,
                    session_id=self._session_id,
                )
            )

    def _settle(self, command: Settle, ids: list[int], answer: DeliveryState) -> None:
        consumer_id = self._consumer_id
        self._submit(command, lambda reply: self._settled(consumer_id, command, ids, answer, reply))

    @guarded
    def _settled(
        self,
        consumer_id: int,
        command: Settle,
        ids: list[int],
        answer: DeliveryState,
        reply: Settled | Refused,
    ) -> None:
        is_reloaded = consumer_id != self._consumer_id
        if is_repeatable(reply, is_reloaded=is_reloaded) and self._link.is_attached:
            self.connection.call_later(REPEAT_S, self._settle, command, ids, answer)
            return
        self.connection.unanswered_count -= 1
        if isinstance(reply, Settled):
            if not reply.lost:
                self._answer(ids, answer)
                return
            lost = set(reply.lost)
            self._answer([each for n, each in enumerate(ids) if n not in lost], answer)
            self._refuse([ids[index] for index in reply.lost], self._lost)
        else:
            is_lost = reply.refusal in RELOADING or reply.refusal is Refusal.NOT_APPLIED
            self._refuse(ids, self._lost if is_lost else reply)

    def _answer(self, ids: list[int], state: DeliveryState) -> None:
        link = self._link
        if ids and link.is_attached:
            for first, last in ranges_of(sorted(ids)):  # handlers finish in any order
                link.settle(first, last, state)
            self._count_settled(len(ids))
            self.connection.flush_soon()

    def _count_settled(self, count: int) -> None:
        """Request more if the client had too many unsettled deliveries before."""
        if self._window.settle(count):
            self.connection.pump_soon(self)

    def _refuse(self, ids: list[int], reply: Refused) -> None:
        for delivery_id in ids:
            error = self.connection.error_mapper.refused(reply, self.path)
            self._answer([delivery_id], Rejected(error.condition, error.description))

    def _submit(self, command: Expects[R], on_reply: OnReply[R] | None = None) -> None:
        self.connection.router.submit(self._address.partition_id, command, on_reply)
