"""A foreign AMQP client: qpid-proton's blocking and event-driven APIs."""

from __future__ import annotations

from typing import Any

import pytest
from proton import Delivery, Message
from proton.handlers import MessagingHandler, TransactionHandler
from proton.reactor import AtMostOnce, Container, Copy, LinkOption
from proton.utils import (
    BlockingConnection,
    BlockingReceiver,
    LinkDetached,
    SendException,
)

from tests.edge.bus_thread import RULES, BusThread

pytestmark = pytest.mark.slow

ROOT = RULES[0]
LONG_S = 20


class Unsettled(LinkOption):
    """A receiver that settles by hand."""

    def apply(self, link: Any) -> None:
        link.snd_settle_mode = 0


@pytest.fixture
def connection(bus: BusThread) -> BlockingConnection:
    opened = connect(bus)
    yield opened
    opened.close()


def connect(bus: BusThread) -> BlockingConnection:
    return BlockingConnection(
        f"amqp://localhost:{bus.port}",
        timeout=LONG_S,
        user=ROOT.name,
        password=ROOT.keys.primary,
        allowed_mechs="PLAIN",
        allow_insecure_mechs=True,
    )


def receiver_of(connection: BlockingConnection, queue: str, credit: int = 10) -> BlockingReceiver:
    return connection.create_receiver(queue, credit=credit)


def test_a_browser_is_refused_and_locks_no_message(
    bus: BusThread, connection: BlockingConnection, queue: str
) -> None:
    connection.create_sender(queue).send(Message(body="here"))
    with pytest.raises(LinkDetached, match=r"not-implemented.*peek"):
        connection.create_receiver(queue, options=Copy())
    assert receiver_of(connection, queue).receive(timeout=LONG_S).delivery_count == 0


def test_send_receive_and_settle(
    bus: BusThread, connection: BlockingConnection, queue: str
) -> None:
    sender = connection.create_sender(queue)
    bodies: list[object] = ["text", b"bytes", 7, [1, "two"], {"key": 1.5}, None]
    for number, body in enumerate(bodies):
        delivery = sender.send(Message(body=body, id=number, properties={"n": number}))
        assert delivery.remote_state == Delivery.ACCEPTED
    receiver = receiver_of(connection, queue)
    for number, body in enumerate(bodies):
        message = receiver.receive(LONG_S)
        assert message.id == number
        assert (bytes(message.body) if isinstance(body, bytes) else message.body) == body
        assert message.properties == {"n": number}
        assert message.durable is False
        assert message.delivery_count == 0
        receiver.accept()
    connection.close()
    assert bus.counts(queue).active == 0


def test_reject_release_and_modify(
    bus: BusThread, connection: BlockingConnection, queue: str
) -> None:
    sender = connection.create_sender(queue)
    for name in ("reject", "release", "modify"):
        sender.send(Message(body=name))
    receiver = receiver_of(connection, queue)
    assert receiver.receive(LONG_S).body == "reject"
    receiver.reject()
    assert receiver.receive(LONG_S).body == "release"
    receiver.release(delivered=False)
    again = receiver.receive(LONG_S)
    while again.body == "modify":
        receiver.release(delivered=True)
        again = receiver.receive(LONG_S)
    assert again.body == "release"
    assert again.delivery_count == 0
    receiver.accept()
    connection.close()
    counts = bus.counts(queue)
    assert (counts.active, counts.dead_letter) == (1, 1)


def test_pre_settled_transfers_both_ways(
    bus: BusThread, connection: BlockingConnection, queue: str
) -> None:
    sender = connection.create_sender(queue, options=AtMostOnce())
    for number in range(20):
        sender.link.send(Message(body=number))
    flushed = connection.create_sender(queue, name="flushed")
    flushed.send(Message(body=20))
    receiver = connection.create_receiver(queue, credit=30, options=AtMostOnce())
    assert [receiver.receive(LONG_S).body for _ in range(21)] == list(range(21))
    assert bus.counts(queue).active == 0


def test_unknown_queue_is_refused(connection: BlockingConnection) -> None:
    with pytest.raises(LinkDetached, match="could not be found"):
        connection.create_sender("absent")
    with pytest.raises(LinkDetached, match="could not be found"):
        connection.create_receiver("absent")


def test_refused_message_raises(connection: BlockingConnection, queue: str) -> None:
    sender = connection.create_sender(queue)
    with pytest.raises(SendException):
        sender.send(Message(body=b"x" * 300_000))
    assert sender.send(Message(body="fits")).remote_state == Delivery.ACCEPTED


def test_ten_megabytes_in_many_frames(premium_bus: BusThread) -> None:
    queue = premium_bus.queue(max_message_size_in_kilobytes=20 * 1024)
    body = bytes(range(256)) * 4 * 1024 * 10
    connection = connect(premium_bus)
    sender = connection.create_sender(queue)
    assert sender.send(Message(body=body), timeout=60).remote_state == Delivery.ACCEPTED
    receiver = receiver_of(connection, queue, 1)
    assert bytes(receiver.receive(60).body) == body
    receiver.accept()
    connection.close()
    assert premium_bus.counts(queue).active == 0


class Drainer(MessagingHandler):
    """Receives with drain until nothing is left."""

    def __init__(self, bus: BusThread, queue: str) -> None:
        super().__init__(prefetch=0, auto_accept=True)
        self._bus, self._queue = bus, queue
        self.bodies: list[object] = []
        self.drained = 0

    def on_start(self, event: Any) -> None:
        connection = event.container.connect(
            f"amqp://localhost:{self._bus.port}",
            user=ROOT.name,
            password=ROOT.keys.primary,
            allowed_mechs="PLAIN",
            allow_insecure_mechs=True,
            reconnect=False,
        )
        self.receiver = event.container.create_receiver(connection, self._queue)

    def on_link_opened(self, event: Any) -> None:
        event.receiver.drain(50)

    def on_message(self, event: Any) -> None:
        self.bodies.append(event.message.body)

    def on_link_flow(self, event: Any) -> None:
        if event.receiver and not event.receiver.credit and not event.receiver.draining():
            self.drained += 1
            event.connection.close()


def test_drain_delivers_available_messages_and_ends(
    bus: BusThread, connection: BlockingConnection, queue: str
) -> None:
    sender = connection.create_sender(queue)
    for number in range(20):
        sender.send(Message(body=number))
    drainer = Drainer(bus, queue)
    Container(drainer).run()
    assert drainer.bodies == list(range(20))
    assert drainer.drained == 1


class Mover(MessagingHandler, TransactionHandler):
    """Takes messages of one queue and sends answers to it, three of each in a transaction."""

    def __init__(self, bus: BusThread, queue: str, *, aborts: bool) -> None:
        super().__init__(prefetch=0, auto_accept=False)
        self._bus, self._queue, self._aborts = bus, queue, aborts
        self.ended: list[str] = []
        self._taken = 0

    def on_start(self, event: Any) -> None:
        self.container = event.container
        self.connection = event.container.connect(
            f"amqp://localhost:{self._bus.port}",
            user=ROOT.name,
            password=ROOT.keys.primary,
            allowed_mechs="PLAIN",
            allow_insecure_mechs=True,
            reconnect=False,
        )
        self.sender = event.container.create_sender(self.connection, self._queue)
        self.receiver = event.container.create_receiver(self.connection, self._queue)
        event.container.declare_transaction(self.connection, handler=self)

    def on_transaction_declared(self, event: Any) -> None:
        self.transaction = event.transaction
        self.receiver.flow(3)

    def on_message(self, event: Any) -> None:
        self.transaction.accept(event.delivery)
        self.transaction.send(self.sender, Message(body=f"answer to {event.message.body}"))
        self._taken += 1
        if self._taken == 3 and self._aborts:
            self.transaction.abort()
        elif self._taken == 3:
            self.transaction.commit()

    def on_transaction_committed(self, event: Any) -> None:
        self.ended.append("committed")
        event.connection.close()

    def on_transaction_aborted(self, event: Any) -> None:
        self.ended.append("aborted")
        event.connection.close()

    def on_transaction_commit_failed(self, event: Any) -> None:
        self.ended.append("failed")
        event.connection.close()


@pytest.mark.parametrize("aborts", [False, True])
def test_proton_commits_and_aborts_transactions(
    bus: BusThread, connection: BlockingConnection, queue: str, aborts: bool
) -> None:
    sender = connection.create_sender(queue)
    for number in range(3):
        sender.send(Message(body=number))
    mover = Mover(bus, queue, aborts=aborts)
    Container(mover).run()
    assert mover.ended == ["aborted" if aborts else "committed"]
    bus.advance(61_000)  # messages of an aborted transaction stay locked until then
    receiver = receiver_of(connection, queue, 3)
    bodies = [receiver.receive(LONG_S).body for _ in range(3)]
    assert bodies == ([0, 1, 2] if aborts else [f"answer to {number}" for number in range(3)])
