"""Spans of traced messages: sent, delivered, settled. A router that records spans.

A message is traced if its application properties have a W3C trace context that the sender sampled:
`traceparent`, or `Diagnostic-Id` of older SDKs. Spans become children of that context. A bus
without tracing has the plain `Router`, at no cost.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from postbus.broker.catalog.directory import Directory
from postbus.broker.partition.host import Host
from postbus.broker.partition.sinks import DeliverySink
from postbus.broker.placement import partition_of_number
from postbus.broker.router import Router
from postbus.entity.commands import (
    AcceptSession,
    AddConsumer,
    Arrive,
    CheckSends,
    Command,
    CompleteSessions,
    Delivery,
    Enqueue,
    OnReply,
    OtherCommand,
    Refused,
    Reply,
    ResendBySequence,
    Settle,
    Transact,
)
from postbus.message.codec import DecodeError
from postbus.message.envelope import Envelope
from postbus.message.fields import MessageFields

MAX_LOCKED: Final = 100_000
"""Maximum number of locked messages whose context is kept for the span of their settlement; the
oldest are dropped first."""

PROPERTIES: Final = ("traceparent", "Diagnostic-Id")
MARKS: Final = tuple(name.encode() for name in PROPERTIES)
SAMPLED: Final = 1
TRACE_PARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""Version, trace id, span id, flags. Source: W3C Trace Context."""


class TraceContext(NamedTuple):
    """The trace context of a message: the ids of a trace and of a span in it."""

    trace_id: int
    span_id: int


class Spans(Protocol):
    """Receiver of finished spans; must not block. Times in nanoseconds of the wall clock."""

    def add(
        self,
        operation: str,
        entity: str,
        context: TraceContext,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, str | int],
        error: str | None,
    ) -> None: ...


def context_of(envelope: Envelope) -> TraceContext | None:
    """Return the trace context of a sampled message, or None."""
    section = envelope.application_properties
    if not any(mark in section for mark in MARKS):
        return None
    try:
        properties = MessageFields(envelope).application
    except DecodeError:
        return None
    for name in PROPERTIES:
        value = properties.get(name)
        match = TRACE_PARENT.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            trace_id, span_id = int(match[1], 16), int(match[2], 16)
            if trace_id and span_id and int(match[3], 16) & SAMPLED:
                return TraceContext(trace_id, span_id)
    return None


class TracedRouter(Router):
    """A router that records spans of commands and deliveries; see the module's docstring."""

    def __init__(
        self,
        hosts: Sequence[Host],
        directory: Directory,
        spans: Spans,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(hosts, directory)
        self._spans = spans
        self._wall_ns = wall_ns
        self._locked: OrderedDict[bytes, TraceContext] = OrderedDict()
        self._sinks: dict[int, _TracedSink] = {}

    def submit(self, partition_id: int, command: Any, on_reply: Any = None) -> None:
        """Apply a command; spans of traced messages end with its reply."""
        if isinstance(command, AddConsumer | AcceptSession):
            traced = self._sinks.get(command.consumer_id)
            if traced is not None:
                traced.entity_no = command.entity_no
        super().submit(partition_id, command, self._watched(command, on_reply))

    def register_sink(self, partition_id: int, consumer_id: int, sink: DeliverySink) -> None:
        """Register the sink for a consumer's deliveries."""
        traced = self._sinks[consumer_id] = _TracedSink(self, sink)
        super().register_sink(partition_id, consumer_id, traced)

    def unregister_sink(self, partition_id: int, consumer_id: int) -> None:
        """Remove a sink."""
        self._sinks.pop(consumer_id, None)
        super().unregister_sink(partition_id, consumer_id)

    # --- spans ----------------------------------------------------------------------------------

    def _watched(self, command: Command, on_reply: OnReply[Any] | None) -> OnReply[Any] | None:
        """Return a callback that also makes the spans of a command, if it has any."""
        traced = list(self._traced(command))
        if not traced:
            return on_reply
        start_ns = self._wall_ns()

        def answered(reply: Reply) -> None:
            self._end(traced, start_ns, reply)
            if on_reply is not None:
                on_reply(reply)

        return answered

    def _traced(self, command: Command) -> Iterable[tuple[str, int, TraceContext]]:
        """Yield operation, entity and context of each traced message of a command."""
        match command:
            case Enqueue(entity_no, messages):
                for envelope in messages:
                    context = context_of(envelope)
                    if context is not None:
                        yield "send", entity_no, context
            case Settle(entity_no, _, tokens, disposition):
                yield from self._settled(entity_no, tokens, disposition.name.lower())
            case CompleteSessions(entity_no, parts):
                for _, tokens in parts:
                    yield from self._settled(entity_no, tokens, "complete")
            case Transact(operations):
                for operation in operations:
                    yield from self._traced(operation)
            case Arrive() | CheckSends() | ResendBySequence():
                pass
            case _:
                _other: OtherCommand = command  # a type error if a case is missing above

    def _settled(
        self, entity_no: int, tokens: Sequence[bytes], operation: str
    ) -> Iterable[tuple[str, int, TraceContext]]:
        for token in tokens:
            context = self._locked.pop(token, None)
            if context is not None:
                yield operation, entity_no, context

    def _end(
        self, traced: list[tuple[str, int, TraceContext]], start_ns: int, reply: Reply
    ) -> None:
        error = reply.refusal.value if isinstance(reply, Refused) else None
        end_ns = self._wall_ns()
        attributes: dict[str, str | int] = {"messaging.batch.message_count": len(traced)}
        for operation, entity_no, context in traced:
            self._spans.add(
                operation, self._name(entity_no), context, start_ns, end_ns, attributes, error
            )

    def delivered(self, entity_no: int, deliveries: list[Delivery]) -> None:
        """Make spans of deliveries, from the time messages were enqueued until now."""
        for delivery in deliveries:
            context = context_of(delivery.envelope)
            if context is None:
                continue
            end_ns = self._wall_ns()
            host = self._hosts[partition_of_number(delivery.sequence)]
            waited_ms = max(host.clock() - delivery.enqueued_ms, 0)
            if delivery.lock_token:
                self._locked[delivery.lock_token] = context
                if len(self._locked) > MAX_LOCKED:
                    self._locked.popitem(last=False)
            self._spans.add(
                "deliver",
                self._name(entity_no),
                context,
                end_ns - waited_ms * 1_000_000,
                end_ns,
                {
                    "messaging.servicebus.message.delivery_count": delivery.delivery_count + 1,
                    "messaging.servicebus.message.sequence_number": delivery.sequence,
                },
                None,
            )

    def _name(self, entity_no: int) -> str:
        entry = self._directory.numbered(entity_no)
        return "" if entry is None else entry.name


class _TracedSink:
    """Passes all calls on to the sink of a link endpoint."""

    def __init__(self, router: TracedRouter, sink: DeliverySink) -> None:
        self._router = router
        self._sink = sink
        self.entity_no = 0

    def deliver(self, deliveries: list[Delivery]) -> None:
        self._router.delivered(self.entity_no, deliveries)
        self._sink.deliver(deliveries)

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        self._sink.granted(session_id, locked_until_ms)

    def available(self, count: int) -> None:
        self._sink.available(count)

    def ended(self, refused: Refused) -> None:
        self._sink.ended(refused)

    def reset(self) -> None:
        self._sink.reset()
