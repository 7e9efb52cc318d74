"""The TLS listener."""

from __future__ import annotations

import ssl

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from proton import Delivery, Message, SSLDomain
from proton.utils import BlockingConnection

from tests.edge.bus_thread import RULES, TLS_HOST, BusThread
from tests.edge.raw_client import ACCEPTED, TRANSFER, RawClient, message

pytestmark = pytest.mark.slow

ROOT = RULES[0]


def test_sdk_speaks_tls(bus: BusThread, queue: str) -> None:
    text = (
        f"Endpoint=sb://{TLS_HOST}/;SharedAccessKeyName={ROOT.name};"
        f"SharedAccessKey={ROOT.keys.primary}"
    )
    with ServiceBusClient.from_connection_string(
        text,
        connection_verify=str(bus.authority_file),
        retry_total=0,
    ) as client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages(ServiceBusMessage("secret"))
            sender.send_messages([ServiceBusMessage(b"x" * 100_000) for _ in range(2)])
        with client.get_queue_receiver(queue) as receiver:
            found = []
            while len(found) < 3:
                found += receiver.receive_messages(3 - len(found), max_wait_time=10)
            for each in found:
                receiver.complete_message(each)
    assert str(found[0]) == "secret"
    assert bus.counts(queue).active == 0


def test_proton_speaks_tls(bus: BusThread, queue: str) -> None:
    domain = SSLDomain(SSLDomain.MODE_CLIENT)
    domain.set_trusted_ca_db(str(bus.authority_file))
    domain.set_peer_authentication(SSLDomain.VERIFY_PEER, str(bus.authority_file))
    connection = BlockingConnection(
        f"amqps://{TLS_HOST}:5671",
        timeout=20,
        ssl_domain=domain,
        user=ROOT.name,
        password=ROOT.keys.primary,
        allowed_mechs="PLAIN",
    )
    sender = connection.create_sender(queue)
    assert sender.send(Message(body="secret")).remote_state == Delivery.ACCEPTED
    connection.close()
    assert bus.counts(queue).active == 1


def test_large_bursts_pass_through_tls(bus: BusThread, queue: str) -> None:
    context = ssl.create_default_context(cafile=str(bus.authority_file))
    with RawClient(5671, ROOT.name, ROOT.keys.primary, TLS_HOST, context) as raw:
        raw.attach_sender(queue)
        body = message(b"x" * 30_000)
        for start in range(0, 300, 50):
            raw.write(*[raw.transfer(start + n, body) for n in range(50)])
            assert set(raw.dispositions(50).values()) == {ACCEPTED}
        raw.attach_receiver(queue)
        raw.write(raw.flow(300))
        for _ in range(300):
            assert len(raw.expect(TRANSFER).payload) > 30_000


def test_plain_client_is_refused_by_the_tls_port(bus: BusThread) -> None:
    with pytest.raises((AssertionError, OSError)):
        RawClient(5671, ROOT.name, ROOT.keys.primary, TLS_HOST)
