"""Endpoint of a client's receiver link: credit to demand, deliveries to transfers, outcomes to
`Settle`.

Holds no state machine: credit arithmetic belongs to the engine, locks and order to the entity.
Receivers of sessions are in `session_links.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Final, Protocol

from postbus.amqp.events import DeliveriesUpdated
from postbus.amqp.link import OutgoingLink
from postbus.amqp.performatives import DeliveryState, Rejected, TransactionalState
from postbus.broker.address import Address
from postbus.contract.entities import NamespaceLimits
from postbus.edge.access.inflight_budget import guarded
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
    Command,
    Delivery,
    DemandSet,
    Disposition,
    OnReply,
    ReceiveMode,
    Receiver,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    Settle,
    Settled,
)
from postbus.message.delivery import encode_prefix, with_times

DELIVERY_STEP: Final = 2_000
"""Maximum number of deliveries requested ahead; a client with unlimited credit gets them in steps.
"""

DELIVERY_BYTES: Final = 4 << 20
"""Bytes requested ahead, by the size of the last deliveries: the most that a client that stops
reading keeps in memory, beside its socket's buffer."""

MAX_UNSETTLED: Final = 20_000
"""Deliveries of one link without an outcome above which no more are requested. Our choice: each
costs about 200 bytes here; SDKs hold a few thousand."""

MAX_OUT_BYTES: Final = 4 << 20
"""Bytes of one connection written in one iteration of the event loop above which no more are
requested."""

DRAIN_S: Final = 0.1
"""Longest time until a drain is answered (ADR 24), not counting the time in which the client does
not read. The JavaScript SDK gives up after 200 ms."""

REPEAT_S: Final = 0.1
"""Pause before a settlement is repeated after a failed read, or a demand after a refusal."""

REPEATED: Final = frozenset({Refusal.NOT_APPLIED, Refusal.BUSY})
"""Temporary refusals of a demand: the partition loads, or decides whether the entity is idle."""

UNKNOWN: Final = -1
"""Stands for a demand that may not have reached the entity."""


NAME_CHARS: Final = 256
"""Characters of a link's name that are kept with a dead letter. Our choice."""


class ReceiverContext(TransactionContext, PacedContext, Protocol):
    """For receivers. `address`: the client's IP address."""

    limits: NamespaceLimits
    address: str | None


class ReceiverEndpoint:
    """Hands messages of one queue or sub-queue to a client; a delivery sink of the router.

    The entity delivers while it works, so nothing is submitted from there: `pump` runs once before
    the next write and brings the entity's demand in line with the link's credit.
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
        self._delivered = 0  # as counted by the entity since the consumer was added
        self._demand = 0  # the last limit sent to the entity
        self._unsettled = 0  # deliveries without an outcome
        self._drain_limit: int | None = None  # set while the entity drains
        self._drain_step = 0  # counts the steps, to recognize a late reply
        self._drain_timer: asyncio.TimerHandle | None = None
        self._average_bytes = connection.limits.default_message_size_kb * 1024
        self._session_id: bytes | None = None
        self._lost = LOST
        self._returns: list[bytes] = []  # tokens of deliveries the client had no credit for
        self._unsent: deque[Delivery] = deque()  # the same in receive-and-delete
        self._tag = 0

    @property
    def credit(self) -> int:
        """Number of further deliveries that the client accepts."""
        return self._link.credit

    @property
    def locked_count(self) -> int:
        """Deliveries that wait for an outcome, each under a lock."""
        return self._unsettled if self._is_locking else 0

    def attach(self) -> None:
        """Answer the attach and register the consumer."""
        self._link.accept()
        self._register()
        self.connection.pump_soon(self)  # a flow may have come right behind the attach

    def flowed(self) -> None:
        """Note that the client granted or withdrew credit, or asks to drain."""
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
        """Add a settlement to its transaction if its locks are valid."""
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
        """Send the entity's deliveries; return those the client has no credit for any more."""
        self._delivered += len(deliveries)
        credit = max(self._link.credit, 0) if self._link.is_attached else 0
        if credit < len(deliveries):
            over = deliveries[credit:]
            deliveries = deliveries[:credit]
            if self._is_locking:
                self._returns += [delivery.lock_token for delivery in over]
            else:
                self._unsent.extend(over)
        if deliveries:
            self._send(deliveries)
        if not self._is_in_step():
            self.connection.pump_soon(self)

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        """Raise: only receivers of sessions are granted one."""
        raise AssertionError(f"asked for no session, got {session_id!r} until {locked_until_ms}")

    def available(self, count: int) -> None:
        """Raise: only the router asks for hints."""
        raise AssertionError(f"asked for no hint, got {count}")

    def ended(self, refusal: Refusal) -> None:
        """Detach: the entity was dropped or disabled, or the session's lock is lost."""
        error = self.connection.error_mapper.refused(Refused(refusal), self.path)
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
        if self._drain_limit is None:
            if link.is_draining:
                self._drain()
            else:
                self._ask()

    def _allowance(self) -> int:
        """Return the number of further deliveries for the client at this time."""
        credit = max(min(self._link.credit, MAX_UNSETTLED - self._unsettled), 0)
        if credit and self.connection.must_wait(self, self._link.session, MAX_OUT_BYTES):
            # Deliveries requested before may come; more when the client has read.
            return min(credit, max(self._demand - self._delivered, 0))
        return min(credit, DELIVERY_STEP, max(DELIVERY_BYTES // self._average_bytes, 1))

    def _is_in_step(self) -> bool:
        """Return whether `pump` would find nothing to do; may return False without need."""
        link = self._link
        credit = link.credit
        return (
            self._demand - self._delivered == credit
            and credit <= DELIVERY_STEP
            and credit * self._average_bytes <= DELIVERY_BYTES
            and self._unsettled + credit <= MAX_UNSETTLED
            and not (link.is_draining or self._returns or self._unsent)
        )

    def _ask(self) -> None:
        """Set the entity's demand; raises wait until they are a quarter of the open demand."""
        allowed = self._allowance()
        limit = self._delivered + allowed
        more = limit - self._demand
        if more < 0 or (more and more * 4 >= allowed):
            self._demand = limit
            asked = partial(self._asked, self._consumer_id)
            self._submit(SetDemand(self._consumer_id, limit), asked)

    @guarded
    def _asked(self, consumer_id: int, reply: Reply) -> None:
        """Schedule a new request if the demand was refused; nothing else would trigger one."""
        if consumer_id != self._consumer_id or not self._link.is_attached:
            return
        if isinstance(reply, Refused) and reply.refusal in REPEATED:
            self._demand = UNKNOWN
            self.connection.call_later(REPEAT_S, self.connection.pump_soon, self)

    def _drain(self) -> None:
        """Let the entity hand out what it has, in steps, then answer.

        A client that does not read delays this: "no more" would be untrue, and it would not read
        the answer either.
        """
        if self._link.credit <= 0 or self._unsettled >= MAX_UNSETTLED:
            self._answer_drain()
            return
        allowed = self._allowance()
        if not allowed:
            return
        if self._drain_timer is None:
            self._drain_timer = self.connection.call_later(DRAIN_S, self._drain_is_late)
        self._drain_limit = self._demand = self._delivered + allowed
        self._drain_step += 1
        command = SetDemand(self._consumer_id, self._drain_limit, is_drain=True)
        self._submit(command, partial(self._drained, self._consumer_id, self._drain_step))

    @guarded
    def _drained(self, consumer_id: int, step: int, reply: Reply) -> None:
        """Note that the deliveries of one step are sent, or that there are no more."""
        if consumer_id != self._consumer_id:
            return
        link = self._link
        if step == self._drain_step and self._drain_limit is not None:
            limit, self._drain_limit = self._drain_limit, None
            is_more = isinstance(reply, DemandSet) and reply.delivered >= limit
            if link.is_attached and link.is_draining and not is_more:
                self._answer_drain()
        if self._drain_limit is None:
            self._demand = self._delivered  # the entity's limit fell to its delivered count
            self.connection.pump_soon(self)

    def _drain_is_late(self) -> None:
        """Answer before the entity has; messages it still hands out are returned."""
        self._drain_timer = None
        if not self._link.is_attached or not self._link.is_draining:
            return
        if self.connection.must_wait(self, self._link.session, MAX_OUT_BYTES):
            self._drain_timer = self.connection.call_later(DRAIN_S, self._drain_is_late)
            return
        self._drain_limit = None
        self._answer_drain()
        self.connection.pump_soon(self)

    def _answer_drain(self) -> None:
        self._stop_drain_timer()
        self._link.drained()
        self.connection.flush_soon()

    def _stop_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    # --- internals ------------------------------------------------------------------------------

    def _receiver(self) -> Receiver:
        """Return the receiver's name for dead letters that expire under its lock."""
        return Receiver(self._link.name[:NAME_CHARS], self.connection.address or "")

    def _register(self) -> None:
        router = self.connection.router
        self._consumer_id = router.new_consumer_id()
        self._delivered = self._demand = 0
        self._drain_limit = None
        router.register_sink(self._address.partition_id, self._consumer_id, self)
        mode = ReceiveMode.PEEK_LOCK if self._is_locking else ReceiveMode.RECEIVE_AND_DELETE
        self._submit(
            AddConsumer(
                self._address.entity_no,
                self._address.sub_queue,
                self._consumer_id,
                mode,
                self._receiver(),
            ),
            partial(self._added, self._consumer_id),
        )

    @guarded
    def _added(self, consumer_id: int, reply: Reply) -> None:
        if isinstance(reply, Refused) and consumer_id == self._consumer_id:
            self.ended(reply.refusal)

    def _send(self, deliveries: list[Delivery]) -> None:
        is_settled = not self._is_locking
        size_bytes = 0
        wire: list[tuple[bytes, tuple[bytes, ...]]] = []
        for token, until_ms, sequence, enqueued_ms, count, ttl_ms, envelope in deliveries:
            tag = token
            if is_settled:
                self._tag += 1
                tag = self._tag.to_bytes(16, "big")
            prefix = encode_prefix(
                envelope,
                sequence=sequence,
                enqueued_ms=enqueued_ms,
                delivery_count=count,
                ttl_ms=ttl_ms,
                locked_until_ms=None if is_settled else until_ms,
                lock_token=token,
            )
            size_bytes += envelope.size_bytes
            properties, application = envelope.properties, envelope.application_properties
            if ttl_ms is not None:
                properties = with_times(properties, enqueued_ms, ttl_ms)
            if properties or application:
                wire.append((tag, (prefix, properties, application, envelope.body)))
            else:
                wire.append((tag, (prefix, envelope.body)))
        self._link.send_all(wire, is_settled=is_settled)
        if self._is_locking:
            self._unsettled += len(deliveries)
        self._average_bytes = ((self._average_bytes + size_bytes // len(deliveries)) >> 1) or 1
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
        self._submit(command, partial(self._settled, self._consumer_id, command, ids, answer))

    @guarded
    def _settled(
        self,
        consumer_id: int,
        command: Settle,
        ids: list[int],
        answer: DeliveryState,
        reply: Reply,
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
            assert isinstance(reply, Refused), reply
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
        was_full = self._unsettled >= MAX_UNSETTLED
        self._unsettled -= count
        if was_full:
            self.connection.pump_soon(self)

    def _refuse(self, ids: list[int], reply: Refused) -> None:
        for delivery_id in ids:
            error = self.connection.error_mapper.refused(reply, self.path)
            self._answer([delivery_id], Rejected(error.condition, error.description))

    def _submit(self, command: Command, on_reply: OnReply | None = None) -> None:
        self.connection.router.submit(self._address.partition_id, command, on_reply)
