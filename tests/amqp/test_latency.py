"""Sends over a long wire: two engines, a heap of arrivals, and no real time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest

from postbus.amqp.client import ClientConnection
from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    DeliveriesUpdated,
    LinkAttached,
    SaslInitReceived,
    SingleEvent,
    TransferReceived,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.amqp.performatives import ACCEPTED

ONE_WAY_MS = 35
ACCEPTANCE_MS = 10
COUNT = 100
BODY = b"\x00\x53\x75\xa0\x05hello"


class LongWire:
    """A client with one sender link to a broker that takes 10 ms to store a message."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._order = itertools.count()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self.broker = Connection(container_id="broker", limits=Limits())
        self.client = ClientConnection(container_id="client", limits=Limits(), hostname="host")
        self.settled_ms: dict[bytes, int] = {}
        self.stored: list[bytes] = []
        self.client.start()
        self._write()
        self._run()
        self.link = self.client.begin().attach_sender("link", "queue")
        self._write()
        self._run()
        assert self.link.is_attached
        assert self.link.credit >= COUNT
        self.started_ms = self.now_ms

    # --- the client -----------------------------------------------------------------------------

    def send(self, number: int) -> None:
        self.link.send(number.to_bytes(4, "big"), (BODY,), is_settled=False)
        self._write()

    def send_one_after_another(self) -> int:
        """Return the milliseconds until the last outcome came."""
        for number in range(COUNT):
            self.send(number)
            self._run()
        return self.now_ms - self.started_ms

    def send_together(self) -> int:
        """Return the milliseconds until the last outcome came."""
        for number in range(COUNT):
            self.send(number)
        self._run()
        return self.now_ms - self.started_ms

    # --- the wire and its ends ------------------------------------------------------------------

    def _after(self, delay_ms: int, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_ms + delay_ms, next(self._order), work))

    def _run(self) -> None:
        """Let time pass until nothing is on its way."""
        while self._due:
            self.now_ms, _, work = heapq.heappop(self._due)
            work()

    def _write(self) -> None:
        """Put the pending bytes of both engines on the wire."""
        if data := b"".join(self.client.data_to_send()):
            self._after(ONE_WAY_MS, lambda: self._at_broker(data))
        if answer := b"".join(self.broker.data_to_send()):
            self._after(ONE_WAY_MS, lambda: self._at_client(answer))

    def _at_broker(self, data: bytes) -> None:
        events = list(one_by_one(self.broker.receive_data(data, self.now_ms)))
        while events:
            more: list[SingleEvent] = []
            for event in events:
                match event:
                    case SaslInitReceived():
                        self.broker.accept_sasl()
                        more += one_by_one(self.broker.receive_data(b"", self.now_ms))
                    case LinkAttached(link) if isinstance(link, IncomingLink):
                        link.accept(max_message_bytes=1 << 20, credit=1_000)
                    case TransferReceived():
                        self._after(ACCEPTANCE_MS, self._acceptance(event))
            events = more
        self._write()

    def _acceptance(self, transfer: TransferReceived) -> Callable[[], None]:
        def accept() -> None:
            self.stored.append(transfer.delivery_tag)
            transfer.link.settle(transfer.delivery_id, transfer.delivery_id, ACCEPTED)
            self._write()

        return accept

    def _at_client(self, data: bytes) -> None:
        for event in self.client.receive_data(data, self.now_ms):
            if isinstance(event, DeliveriesUpdated):
                assert isinstance(event.link, OutgoingLink)
                assert (event.state, event.is_settled) == (ACCEPTED, True)
                self.settled_ms.update(dict.fromkeys(event.tags, self.now_ms))
        self._write()


@pytest.mark.behaviour("S17")
def test_each_awaited_send_pays_the_way_there_and_back() -> None:
    wire = LongWire()
    assert wire.send_one_after_another() == COUNT * (2 * ONE_WAY_MS + ACCEPTANCE_MS) == 8_000
    assert len(wire.settled_ms) == len(wire.stored) == COUNT


@pytest.mark.behaviour("S18")
def test_overlapping_sends_pay_it_once() -> None:
    wire = LongWire()
    assert wire.send_together() == 2 * ONE_WAY_MS + ACCEPTANCE_MS
    assert list(wire.settled_ms) == wire.stored == [n.to_bytes(4, "big") for n in range(COUNT)]
