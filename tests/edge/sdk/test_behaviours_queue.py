"""Promises about queues that only a whole bus can show: far clients, ids, fixed sub-queues."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSubQueue

from postbus.broker.catalog.directory import DirectoryRefusal
from postbus.contract.yaml_documents import ManifestError
from postbus.entity.commands import Command, Enqueue, Reply
from postbus.manifests.reader import read_one_bus
from postbus.message.codec import Described, Ulong, encode_value
from postbus.message.sections import BATCH_FORMAT
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import ACCEPTED, RawClient, described, message

pytestmark = pytest.mark.slow

ROOT = RULES[0]
ONE_WAY_S = 0.035
ACCEPTANCE_S = 0.010
COUNT = 100
SHORT_COUNT = 10
NAMESPACE = """\
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: shop-bus}
spec: {}
"""
QUEUE = """\
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: orders}
spec:
  owner: {name: shop-bus}
"""


class Lag(asyncio.Protocol):
    """One end of a relay: input is written at the other end 35 ms later, in order."""

    def __init__(self) -> None:
        self.other: Lag | None = None
        self.transport: asyncio.WriteTransport
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)  # uvloop's is no subclass

    def join(self, other: Lag) -> None:
        self.other = other
        for data in self._early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(ONE_WAY_S, self.other.transport.write, data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


@pytest.fixture
def far_port(bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port from which the bus is 70 ms away and back; its store takes 10 ms longer."""
    submit = bus.router.submit

    def submit_slowly(
        partition_id: int, command: Command, on_reply: Callable[[Reply], None] | None = None
    ) -> None:
        if not isinstance(command, Enqueue) or on_reply is None:
            return submit(partition_id, command, on_reply)
        loop = asyncio.get_running_loop()
        return submit(
            partition_id, command, lambda reply: loop.call_later(ACCEPTANCE_S, on_reply, reply)
        )

    joining: set[asyncio.Task[None]] = set()

    def accept() -> Lag:
        near, far = Lag(), Lag()

        async def join() -> None:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: far, "127.0.0.1", bus.port)
            far.join(near)
            near.join(far)

        joining.add(asyncio.ensure_future(join()))
        return near

    async def listen() -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)

    async def close(server: asyncio.Server) -> None:
        server.close()

    server = bus.run(listen())
    monkeypatch.setattr(bus.router, "submit", submit_slowly)
    yield server.sockets[0].getsockname()[1]
    bus.run(close(server))


@pytest.mark.behaviour("S17")
def test_sends_one_after_another_pay_each_round_trip(
    bus: BusThread, far_port: int, queue: str
) -> None:
    with RawClient(far_port, ROOT.name, ROOT.keys.primary) as raw:
        raw.attach_sender(queue)
        started = time.monotonic()
        for number in range(SHORT_COUNT):
            raw.write(raw.transfer(number, message(b"x")))
            assert raw.dispositions(1) == {number: ACCEPTED}
        passed_s = time.monotonic() - started
    assert passed_s >= SHORT_COUNT * (2 * ONE_WAY_S + ACCEPTANCE_S)
    assert bus.counts(queue).active == SHORT_COUNT


@pytest.mark.behaviour("S18")
def test_sends_together_pay_one_round_trip(bus: BusThread, far_port: int, queue: str) -> None:
    with RawClient(far_port, ROOT.name, ROOT.keys.primary) as raw:
        raw.attach_sender(queue)
        started = time.monotonic()
        for number in range(COUNT):
            raw.write(raw.transfer(number, message(b"x")))
        assert raw.dispositions(COUNT) == dict.fromkeys(range(COUNT), ACCEPTED)
        passed_s = time.monotonic() - started
    assert 2 * ONE_WAY_S + ACCEPTANCE_S <= passed_s < 1.0  # one after another: 8 s
    assert bus.counts(queue).active == COUNT


@pytest.mark.behaviour("S177", "S232")
def test_the_sdk_gives_an_id_to_every_message_without_one(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    due = bus.now() + timedelta(days=1)
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("single"))
        sender.send_messages([ServiceBusMessage("first"), ServiceBusMessage("second")])
        batch = sender.create_message_batch()
        batch.add_message(ServiceBusMessage("batched"))
        sender.send_messages(batch)
        sender.schedule_messages(ServiceBusMessage("scheduled"), due)
        sender.send_messages(ServiceBusMessage("due", scheduled_enqueue_time_utc=due))
    with client.get_queue_receiver(queue) as receiver:
        stored = receiver.peek_messages(10)
    ids = {uuid.UUID(message.message_id) for message in stored}
    assert len(ids) == len(stored) == 6


def test_the_bus_gives_an_id_to_a_message_without_one(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    sent = [message(b"x"), encode_value(described(0x73, None, None, "to")) + message(b"x")]
    batch = b"".join(encode_value(Described(Ulong(0x75), each)) for each in sent)
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as raw:
        raw.attach_sender(queue)
        raw.write(*(raw.transfer(number, each) for number, each in enumerate(sent)))
        assert raw.dispositions(2) == dict.fromkeys(range(2), ACCEPTED)
        raw.write(raw.transfer(2, batch, message_format=BATCH_FORMAT))
        assert raw.dispositions(1) == {2: ACCEPTED}
    with client.get_queue_receiver(queue) as receiver:
        stored = receiver.peek_messages(5)
    assert len({int(str(each.message_id), 16) for each in stored}) == len(stored) == 4
    assert [each.to for each in stored] == [None, "to"] * 2


@pytest.mark.behaviour("S242")
def test_a_dead_letter_queue_cannot_be_deleted(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("kept"))
    with client.get_queue_receiver(queue) as receiver:
        (received,) = receiver.receive_messages(1, max_wait_time=10)
        receiver.dead_letter_message(received, reason="r")
    for path in (f"{queue}/$DeadLetterQueue", f"{queue}/$deadletterqueue"):
        with pytest.raises(DirectoryRefusal, match="can only be deleted with it"):
            bus.run(bus._directory.delete(path))
    dead_letters = ServiceBusSubQueue.DEAD_LETTER
    with client.get_queue_receiver(queue, sub_queue=dead_letters) as receiver:
        assert [str(letter) for letter in receiver.peek_messages(2)] == ["kept"]


@pytest.mark.behaviour("S243")
@pytest.mark.parametrize("name", ["orders/$DeadLetterQueue", "orders/$deadletterqueue"])
@pytest.mark.parametrize("field", ["", "  lockDuration: PT10S\n"])
def test_a_dead_letter_queue_cannot_be_declared(tmp_path: Path, name: str, field: str) -> None:
    path = tmp_path / "bus.yaml"
    own = QUEUE.replace("name: orders", "name: dead") + f"  entityName: {name}\n{field}"
    path.write_text(f"{NAMESPACE}---\n{QUEUE}---\n{own}")
    with pytest.raises(ManifestError, match=r"spec\.entityName: the name of a queue or topic has"):
        read_one_bus([path])
    path.write_text(f"{NAMESPACE}---\n{QUEUE}")
    assert [queue.name for queue in read_one_bus([path]).queues] == ["orders"]
