"""The receivers of one partition, as doors register them, and how they are told.

A receiver that breaks hurts nobody else. What reaches none goes back to where it came from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from postbus.entity.commands import (
    Command,
    Delivery,
    Disposition,
    Refusal,
    RemoveConsumer,
    Settle,
)
from postbus.entity.outcomes import Available, Deliver, EndConsumer, SessionGranted

logger = logging.getLogger(__name__)


class DeliverySink(Protocol):
    """The receiving end of one consumer, called by the event loop.

    A call may come before the `submit` that caused it returns, on the stack of whoever submits:
    always when nothing has to be committed first, as for the first demand of a receiver. A sink
    therefore sets its own state before it submits.

    Calls of one partition are not nested: what a call submits to the same partition brings replies
    and further calls after it. There are two exceptions: a refusal may be the reply at once, and a
    partition that fails calls `reset` at once. Calls of different partitions may be nested.
    """

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Write these to the wire; they are durable as far as they must be."""

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        """The consumer holds this session from now on."""

    def available(self, count: int) -> None:
        """So many messages could be had; told once to a consumer that asked for it (ADR 24)."""

    def ended(self, refusal: Refusal) -> None:
        """The broker removed the consumer: entity dropped, disabled, or receiving disabled."""

    def reset(self) -> None:
        """The partition was reloaded: the consumer is gone and every lock with it."""


class Sinks:
    """Of one partition. `submit` takes what is to be given back."""

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
        """Tell of a session; one that nobody waits for any more is free at once."""
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
                gone.ended(effect.refusal)
            except Exception:  # noqa: BLE001 - logged
                self._log_broken(effect.consumer_id)

    def reset(self) -> None:
        """Forget all of them and tell them; what they register meanwhile stays."""
        sinks, self._sinks = self._sinks, {}
        for consumer_id, sink in sinks.items():
            try:
                sink.reset()
            except Exception:  # noqa: BLE001 - logged
                self._log_broken(consumer_id)

    def _give_back(self, effect: Deliver) -> None:
        """Release what reached no wire; a receive-and-delete delivery is lost by design (S26)."""
        tokens = [delivery.lock_token for delivery in effect.deliveries if delivery.lock_token]
        if tokens:
            self._submit(Settle(effect.entity_no, effect.sub_queue, tokens, Disposition.RELEASE))

    def _log_broken(self, consumer_id: int, entity_no: int | None = None) -> None:
        logger.exception(
            "a receiver of deliveries broke",
            extra={"partition": self._partition_id, "entity": entity_no, "consumer": consumer_id},
        )
