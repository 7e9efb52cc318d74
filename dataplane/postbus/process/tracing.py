"""Sends the spans of traced messages to a collector of OpenTelemetry, over OTLP.

Part of the extra `tracing`. Target and sampling are set by the standard variables of OpenTelemetry
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, ...), which its SDK reads.
"""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from postbus import __version__
from postbus.broker.operate.tracing import TraceContext


class OtlpSpans:
    """Collects spans and sends them in batches from its own thread; spans beyond its buffer are
    dropped.
    """

    def __init__(self, namespace: str, broker_name: str) -> None:
        resource = Resource.create(
            {
                "service.name": "postbus",
                "service.version": __version__,
                "service.namespace": namespace,
                "service.instance.id": broker_name,
            }
        )
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("postbus", __version__)

    def add(
        self,
        operation: str,
        entity: str,
        context: TraceContext,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, str | int],
        error: str | None,
    ) -> None:
        """Add a finished span below that of the sender."""
        parent = SpanContext(
            context.trace_id,
            context.span_id,
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )
        span = self._tracer.start_span(
            f"{operation} {entity}",
            set_span_in_context(NonRecordingSpan(parent)),
            SpanKind.SERVER,
            {
                "messaging.system": "servicebus",
                "messaging.operation.name": operation,
                "messaging.destination.name": entity,
                **attributes,
            },
            start_time=start_ns,
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_ns)

    def close(self) -> None:
        """Send the remaining spans; may take as long as the exporter's timeout."""
        self._provider.shutdown()
