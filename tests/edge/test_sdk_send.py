"""Sending with the unmodified azure-servicebus SDK."""

from __future__ import annotations

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from tests.edge.bus_thread import BusThread


@pytest.mark.behaviour("S1")
def test_send_returns_when_the_message_is_stored(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("hello"))
    assert bus.counts(queue).active == 1


def test_receive(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage("hello"), ServiceBusMessage("2")])
    with client.get_queue_receiver(queue) as receiver:
        messages = receiver.receive_messages(2, max_wait_time=5)
        assert [str(m) for m in messages] == ["hello", "2"]
        for m in messages:
            receiver.complete_message(m)
    assert bus.counts(queue).active == 0
