"""Spans of traced messages, as a collector gets them over OTLP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from postbus.broker.operate.tracing import context_of
from postbus.message.codec import Described, Ulong, encode_value
from postbus.message.sections import slice_message
from tests.assembly.test_bus import RunBus, folder, run_bus  # noqa: F401 - fixtures

TRACE, SENDER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{SENDER}-01"


class Collector:
    """Takes spans over HTTP as any collector of OpenTelemetry does."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []

    async def take(self, request: web.Request) -> web.Response:
        export = ExportTraceServiceRequest.FromString(await request.read())
        for resource in export.resource_spans:
            attributes = resource.resource.attributes
            self.resources.append({each.key: each.value.string_value for each in attributes})
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield made
    await runner.cleanup()


def message(name: str, **properties: str) -> ServiceBusMessage:
    return ServiceBusMessage(name, message_id=name, application_properties=dict(properties))


@pytest.mark.slow
async def test_spans_of_a_message_belong_to_the_trace_of_its_sender(
    run_bus: RunBus,  # noqa: F811
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POSTBUS_IS_TRACING_ENABLED", "true")
    async with run_bus("orders") as bus:
        (_, connection_string), *_ = bus.connection_strings()
        async with (
            ServiceBusClient.from_connection_string(connection_string) as client,
            client.get_queue_sender("orders") as sender,
            client.get_queue_receiver("orders", max_wait_time=5) as receiver,
        ):
            await sender.send_messages(message("new", traceparent=SAMPLED))
            old = message("old", **{"Diagnostic-Id": SAMPLED})
            await sender.send_messages([old, message("none"), message("b", traceparent="00-x")])
            got = []
            while len(got) < 4:
                got += await receiver.receive_messages(10, max_wait_time=5)
            await asyncio.gather(*map(receiver.complete_message, got))
    names = sorted(span.name for span in collector.spans)
    assert names == ["complete orders"] * 2 + ["deliver orders"] * 2 + ["send orders"] * 2
    for span in collector.spans:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SENDER)
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.kind == Span.SPAN_KIND_SERVER
        assert span.status.code == Status.STATUS_CODE_UNSET
        attributes = {each.key: each.value.string_value for each in span.attributes}
        assert attributes["messaging.destination.name"] == "orders"
    assert {each["service.name"] for each in collector.resources} == {"postbus"}


@pytest.mark.parametrize(
    ("value", "is_traced"),
    [
        (SAMPLED, True),
        (SAMPLED[:-2] + "03", True),
        (SAMPLED[:-2] + "00", False),
        (f"00-{'0' * 32}-{SENDER}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        ("|hierarchical.id.", False),
        (7, False),
    ],
)
def test_only_sampled_contexts_count(value: object, is_traced: bool) -> None:
    section = encode_value(Described(Ulong(0x74), {"traceparent": value}))
    envelope = slice_message(section + encode_value(Described(Ulong(0x75), b"x")))
    assert (context_of(envelope) is not None) is is_traced
