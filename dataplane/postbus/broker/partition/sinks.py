"""The sinks of one partition, which link endpoints register for their consumers.

A sink that fails affects no other one. Deliveries without a sink return to their queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from postbus.entity.commands import (
    Command,
    Delivery,
    Disposition,
    Refused,
    RemoveConsumer,
    Settle,
)
from postbus.entity.outcomes import Available, Deliver, EndConsumer, SessionGranted

logger = logging.getLogger(__name__)


class DeliverySink(Protocol):
    """The receiving end of one consumer, called on the event loop.

    A call may come before the `submit` that caused it returns, on the stack of the submitter:
    always when nothing has to be committed first, as for the first demand of a receiver. A sink
    therefore sets its own state before it submits.

    Calls of one partition are not nested: what a call submits to the same partition brings replies
    and further calls after it. There are two exceptions: a refusal may be the reply at once, and a
    partition that fails calls `reset` at once. Calls of different partitions may be nested.
    """

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Write deliveries to the wire; everything that must be durable is."""

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        """Handle the grant of a session to the consumer."""

    def available(self, count: int) -> None:
        """Handle a hint of available messages; called once per request for one (ADR 24)."""

    def ended(self, refused: Refused) -> None:
        """Handle removal by the broker: entity deleted or disabled, or receiving disabled."""

    def reset(self) -> None:
        """Handle a reload of the partition: the consumer and all its locks are gone."""


class Sinks:
    """Sinks of one partition. `submit` takes commands that release undeliverable messages."""

    def __init__(self, partition_id: int, submit: Callable[[Command], None]) -> None:
        self._partition_id = partition_id
        self._submit = submit
        self._sinks: dict[int, DeliverySink] = {}

    def register(self, consumer_id: int, sink: DeliverySink) -> None:
        self._sinks[consumer_id] = sink

    def unregister(self, consumer_id: int) -> None:
        self._sinks.pop(consumer_id, None)

    def deliver(self, effect: Deliver) -> None:
        sink = self._sinks.get(effect.consumer_id)
        if sink is None:
            self._give_back(effect)
            return
        try:
            sink.deliver(effect.deliveries)
        except Exception:  # noqa: BLE001 - logged; its locks expire
            self._log_broken(effect.consumer_id, effect.entity_no)

    def grant(self, effect: SessionGranted) -> None:
        """Grant a session; release it at once when nobody waits for it any more."""
        sink = self._sinks.get(effect.consumer_id)
        if sink is None:
            self._submit(RemoveConsumer(effect.consumer_id))
            return
        try:
            sink.granted(effect.session_id, effect.locked_until_ms)
        except Exception:  # noqa: BLE001 - logged
            self._log_broken(effect.consumer_id)

    def hint(self, effect: Available) -> None:
        sink = self._sinks.get(effect.consumer_id)
        if sink is not None:
            try:
                sink.available(effect.count)
            except Exception:  # noqa: BLE001 - logged
                self._log_broken(effect.consumer_id)

    def end(self, effect: EndConsumer) -> None:
        gone = self._sinks.pop(effect.consumer_id, None)
        if gone is not None:
            try:
                gone.ended(Refused(effect.refusal))
            except Exception:  # noqa: BLE001 - logged
                self._log_broken(effect.consumer_id)

    def reset(self) -> None:
        """Remove all sinks and reset them; sinks registered meanwhile stay."""
        sinks, self._sinks = self._sinks, {}
        for consumer_id, sink in sinks.items():
            try:
                sink.reset()
            except Exception:  # noqa: BLE001 - logged
                self._log_broken(consumer_id)

    def _give_back(self, effect: Deliver) -> None:
        """Release undelivered messages; a receive-and-delete delivery is lost by design (S26)."""
        tokens = [delivery.lock_token for delivery in effect.deliveries if delivery.lock_token]
        if tokens:
            self._submit(Settle(effect.entity_no, effect.sub_queue, tokens, Disposition.RELEASE))

    def _log_broken(self, consumer_id: int, entity_no: int | None = None) -> None:
        logger.exception(
            "a sink for deliveries failed",
            extra={"partition": self._partition_id, "entity": entity_no, "consumer": consumer_id},
        )
