"""The Python SDK over WebSocket: plain, TLS and through an HTTP proxy."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusMessage,
    TransportType,
)
from azure.servicebus.aio import ServiceBusClient as AsyncClient
from azure.servicebus.exceptions import ServiceBusConnectionError

from postbus.contract.entities import LIMITS, Sku
from postbus.edge import certificates, port_multiplexer
from postbus.edge.access import auth_throttle
from postbus.edge.amqp import connection as amqp_connection
from postbus.edge.amqp import listener as amqp_listener
from postbus.edge.web import http_server
from postbus.edge.web.http_listener import MAX_HEAD_BYTES
from tests.edge.bus_thread import RULES, TLS_HOST, BusThread

pytestmark = pytest.mark.slow

ROOT = RULES[0]
LONG_S = 10


def plain(bus: BusThread) -> dict[str, object]:
    """Return options for the SDK; without `custom_endpoint_address` it drops the port."""
    return {"conn_str": bus.connection_string(), "custom_endpoint_address": address("http", bus)}


def secret(bus: BusThread) -> dict[str, object]:
    return {
        "conn_str": f"Endpoint=sb://{TLS_HOST}/;SharedAccessKeyName={ROOT.name};"
        f"SharedAccessKey={ROOT.keys.primary}",
        "custom_endpoint_address": f"https://{TLS_HOST}:5671",
        "connection_verify": str(bus.authority_file),
    }


def address(scheme: str, bus: BusThread) -> str:
    return f"{scheme}://localhost:{bus.port}"


def connect(defaults: dict[str, object], **more: object) -> ServiceBusClient:
    options = {"transport_type": TransportType.AmqpOverWebsocket, "retry_total": 0}
    return ServiceBusClient.from_connection_string(**{**options, **defaults, **more})


def take(client: ServiceBusClient, queue: str, count: int, **options: object) -> list[str]:
    found: list[str] = []
    with client.get_queue_receiver(queue, **options) as receiver:
        while len(found) < count:
            messages = receiver.receive_messages(count - len(found), max_wait_time=LONG_S)
            assert messages
            for message in messages:
                receiver.complete_message(message)
                found.append(str(message))
    return found


@pytest.mark.parametrize("way", [plain, secret])
def test_send_receive_and_complete(
    bus: BusThread, queue: str, way: Callable[[BusThread], dict[str, object]]
) -> None:
    bus.queue("with-sessions", requires_session=True)
    with connect(way(bus)) as client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages(ServiceBusMessage("one"))
            batch = sender.create_message_batch()
            for number in range(50):
                batch.add_message(ServiceBusMessage(f"{number}: " + "x" * 4_000))
            sender.send_messages(batch)
        found = take(client, queue, 51)
        assert [each.partition(":")[0] for each in found] == ["one", *map(str, range(50))]
        with client.get_queue_sender("with-sessions") as sender:
            sender.send_messages([ServiceBusMessage(str(n), session_id="s") for n in range(3)])
        found = take(client, "with-sessions", 3, session_id=NEXT_AVAILABLE_SESSION)
        assert found == ["0", "1", "2"]
    assert bus.counts(queue).active == 0


def test_wrong_key_is_refused(bus: BusThread, queue: str) -> None:
    """With `custom_endpoint_address` the SDK takes every refusal for a wrong address."""
    text = bus.connection_string(key="wrong")
    with (
        connect({**plain(bus), "conn_str": text}) as client,
        pytest.raises(ServiceBusConnectionError),
        client.get_queue_sender(queue) as sender,
    ):
        sender.send_messages(ServiceBusMessage("one"))


@pytest.mark.parametrize("way", [plain, secret])
async def test_asynchronous_client(
    bus: BusThread, queue: str, way: Callable[[BusThread], dict[str, object]]
) -> None:
    async with AsyncClient.from_connection_string(
        transport_type=TransportType.AmqpOverWebsocket, retry_total=0, **way(bus)
    ) as client:
        async with client.get_queue_sender(queue) as sender:
            await sender.send_messages([ServiceBusMessage(str(n)) for n in range(20)])
        async with client.get_queue_receiver(queue, max_wait_time=LONG_S) as receiver:
            found = []
            async for message in receiver:
                await receiver.complete_message(message)
                found.append(str(message))
                if len(found) == 20:
                    break
    assert found == [str(n) for n in range(20)]


# --- a proxy ------------------------------------------------------------------------------------


class Proxy:
    """An HTTP proxy that tunnels, in a thread: CONNECT, then bytes both ways."""

    def __init__(self) -> None:
        self.seen_requests: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self._ready.wait(LONG_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(LONG_S)

    close = stop

    def _run(self) -> None:
        with closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._done = asyncio.Event()
        server = await asyncio.start_server(self._tunnel, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._done.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _tunnel(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        head = (await client.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        self.seen_requests.append(f"{method} {target}")
        host, _, port = target.rpartition(":")
        broker, requests = await asyncio.open_connection(host, int(port))
        answers.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pour(client, requests), pour(broker, answers))


async def pour(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass
    finally:
        target.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with closing(Proxy()) as made:
        yield made


@pytest.mark.parametrize("way", [plain, secret])
def test_proxy_is_passed(
    bus: BusThread, queue: str, proxy: Proxy, way: Callable[[BusThread], dict[str, object]]
) -> None:
    through = {"proxy_hostname": "127.0.0.1", "proxy_port": proxy.port}
    with connect(way(bus), http_proxy=through) as client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages([ServiceBusMessage("x" * 1_000) for _ in range(100)])
        assert len(take(client, queue, 100)) == 100
    assert len(proxy.seen_requests) >= 2
    assert all(each.startswith("CONNECT ") for each in proxy.seen_requests)


# --- the guide ----------------------------------------------------------------------------------


GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "connections.md"


def test_guide_sends(bus: BusThread) -> None:
    bus.queue("orders")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    text = snippet.replace("localhost:5300", f"localhost:{bus.port}")
    exec(compile(text, str(GUIDE), "exec"), {"connection_string": bus.connection_string()})
    with connect(plain(bus)) as client:
        assert take(client, "orders", 1) == ["through the wall"]


@pytest.mark.parametrize(
    "limit",
    [
        f"all ports together | {LIMITS[Sku.STANDARD].max_connections:,},",
        f"in Basic {LIMITS[Sku.BASIC].max_connections:,};",
        f"first HTTP request | {port_multiplexer.ARRIVAL_S:.0f} s each",
        f"unauthenticated connection | {amqp_listener.UNAUTHENTICATED_MS // 1_000} s",
        f"without links | {amqp_listener.LINKLESS_MS // 60_000} min",
        f"without a request | {http_server.QUIET_S:.0f} s",
        f"each later one | {MAX_HEAD_BYTES >> 10} KiB, {http_server.MAX_FIELDS} fields",
        f"body of an HTTP request | {http_server.BODY_S:.0f} s",
        f"of one connection | {amqp_connection.MAX_REFUSED_TOKENS} |",
        f"first by {auth_throttle.FIRST_DELAY_S} s, then twice as long each time",
        f"up to {auth_throttle.MAX_DELAY_S:.0f} s",
        f"within {certificates.RELOAD_S:.0f} seconds",
    ],
)
def test_limits_of_the_guide_are_those_of_the_bus(limit: str) -> None:
    assert limit in " ".join(GUIDE.read_text().split())
