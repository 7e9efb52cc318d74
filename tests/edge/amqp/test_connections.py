"""Connections that are slow, silent, unauthorised or too many, and the end of the broker."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from azure.core.credentials import AzureSasCredential
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import (
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusError,
)

from postbus.amqp.conditions import AmqpLinkError
from postbus.broker.access.authz import KeyRule
from postbus.contract.entities import Right
from postbus.edge.access.inflight_budget import InflightBudget
from postbus.edge.amqp import listener as amqp_listener
from postbus.edge.amqp import receiver_links
from postbus.edge.refusals import ErrorMapper
from postbus.message.codec import Described, Ulong, encode_value
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.amqp.test_wire import request, response_parts
from tests.edge.amqp.websocket_client import WebSocketClient
from tests.edge.bus_thread import RULES, BusThread, Keys, sas_token
from tests.edge.raw_client import (
    ACCEPTED,
    CLOSE,
    DETACH,
    DISPOSITION,
    END,
    REJECTED,
    TRANSFER,
    RawClient,
    described,
    frame,
    message,
)

pytestmark = pytest.mark.slow

ROOT = RULES[0]


@pytest.fixture
def raw(bus: BusThread) -> Iterator[RawClient]:
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        yield client


# --- authorisation ------------------------------------------------------------------------------


def test_wrong_key_fails_authentication(bus: BusThread, queue: str) -> None:
    with (
        bus.client(ROOT.name, "wrong") as client,
        pytest.raises(ServiceBusAuthenticationError),
    ):
        client.get_queue_sender(queue).__enter__()


@pytest.mark.behaviour("S8")
def test_missing_right_fails_authorisation_at_the_attach(bus: BusThread, queue: str) -> None:
    with (
        bus.client("listener") as client,
        pytest.raises(ServiceBusAuthorizationError),
    ):
        client.get_queue_sender(queue).__enter__()
    with (
        bus.client("sender") as client,
        pytest.raises(ServiceBusAuthorizationError),
    ):
        client.get_queue_receiver(queue).__enter__()


def test_secondary_key_and_scoped_rule_work_with_the_sdk(bus: BusThread, queue: str) -> None:
    with bus.client(ROOT.name, "other key") as client:  # noqa: SIM117
        with client.get_queue_sender(queue) as sender:
            sender.send_messages(ServiceBusMessage("x"))
    bus.queue("scoped")
    with bus.client("of-one-queue") as client:
        with client.get_queue_sender("scoped") as sender:
            sender.send_messages(ServiceBusMessage("x"))
        with pytest.raises(ServiceBusAuthenticationError):
            client.get_queue_sender(queue).__enter__()


def token_client(bus: BusThread, token: str) -> ServiceBusClient:
    text = f"Endpoint=sb://localhost:{bus.port};SharedAccessSignature={token};"
    return ServiceBusClient.from_connection_string(
        text + "UseDevelopmentEmulator=true", retry_total=0
    )


def test_token_made_elsewhere_is_enough(bus: BusThread, queue: str) -> None:
    expires_s = int(bus.real_time_s()) + 3_600
    token = sas_token(f"sb://localhost/{queue}", "sender", "s3nd=", expires_s)
    with token_client(bus, token) as client, client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("x"))
    assert bus.counts(queue).active == 1
    assert AzureSasCredential(token).signature == token


def test_expired_token_detaches_its_links(bus: BusThread, queue: str) -> None:
    expires_s = int(bus.real_time_s()) + 3_600
    token = sas_token(f"sb://localhost/{queue}", ROOT.name, ROOT.keys.primary, expires_s)
    with token_client(bus, token) as client, client.get_queue_receiver(queue) as receiver:
        assert receiver.receive_messages(1, max_wait_time=0.1) == []
        bus.age_tokens(3_700)
        with pytest.raises(ServiceBusError):
            receiver.receive_messages(1, max_wait_time=2)


def test_a_link_ends_at_the_second_its_token_does(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tick of the connection is needed, which comes every 15 s."""
    monkeypatch.setattr(amqp_listener.AmqpTransport, "tick", lambda *_: None)
    expires_s = int(bus.real_time_s()) + 60
    resource = f"sb://localhost/{queue}"
    properties = {"operation": "put-token", "type": "x", "name": resource}
    token = sas_token(resource, ROOT.name, ROOT.keys.primary, expires_s)
    other = bus.queue("scoped")
    with RawClient(bus.port, "of-one-queue", "only here") as client:
        client.attach_sender(other, 5)
        bus.real_shift_s = expires_s - 0.5 - time.time()
        answer = request(client, "$cbs", "id", properties, token)
        assert response_parts(answer)[1]["status-code"] == 202
        client.attach_receiver(queue, 6)
        detached = client.expect(DETACH)
        assert bus.real_time_s() >= expires_s
        assert detached.fields[2].value[0] == "amqp:unauthorized-access"
        assert resource.rpartition("/")[2] in detached.fields[2].value[1]
    bus.delete(other)


@pytest.mark.parametrize("change", ["rule is gone", "key is gone", "right is gone", "other key"])
def test_change_of_a_rule_detaches_its_links(bus: BusThread, queue: str, change: str) -> None:
    name = "robot"
    rule = KeyRule(name, frozenset({Right.SEND, Right.LISTEN}), Keys("one", "two"))
    bus.set_rules(ROOT, rule)
    now = {
        "rule is gone": [],
        "key is gone": [replace(rule, keys=Keys("new", "two"))],
        "right is gone": [replace(rule, rights=frozenset({Right.SEND}))],
        "other key": [replace(rule, keys=Keys("one", "new"))],
    }[change]
    with (
        RawClient(bus.port, name, "one") as robot,
        RawClient(bus.port, ROOT.name, "other key") as other,
    ):
        robot.attach_receiver(queue)
        other.attach_receiver(queue)
        bus.set_rules(ROOT, *now)
        if change == "other key":
            assert robot.is_silent_until(END, frame(END))
        else:
            assert robot.expect(DETACH).fields[2].value[0] == "amqp:unauthorized-access"
        assert other.is_silent_until(END, frame(END))
    bus.set_rules(*RULES)


def test_a_connection_that_breaks_keeps_no_other_in_its_rights(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain, calls = ErrorMapper.missing_right, itertools.count()

    def breaking(error_mapper: ErrorMapper, right: Right, path: str) -> AmqpLinkError:
        if next(calls) == 0:
            raise ZeroDivisionError
        return explain(error_mapper, right, path)

    monkeypatch.setattr(ErrorMapper, "missing_right", breaking)
    bus.set_rules(ROOT, KeyRule("robot", frozenset({Right.LISTEN}), Keys("one")))
    with (
        RawClient(bus.port, "robot", "one") as first,
        RawClient(bus.port, "robot", "one") as second,
    ):
        first.attach_receiver(queue)
        second.attach_receiver(queue)
        bus.set_rules(*RULES)
        assert second.expect(DETACH).fields[2].value[0] == "amqp:unauthorized-access"
    closed = "connection closed by an internal error"
    assert [error[: len(closed)] for error in bus.log.errors()] == [closed]
    bus.log.records.clear()


def is_ended(client: socket.socket, wait_s: float) -> bool:
    """Read until the broker disconnects, or sends nothing for a time."""
    client.settimeout(wait_s)
    try:
        while client.recv(4_096):
            pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(("age_s", "is_closed"), [(19, False), (21, True)])
def test_unauthenticated_connection_is_closed_after_twenty_seconds(
    bus: BusThread, age_s: int, is_closed: bool
) -> None:
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as known:
        with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as admission:
            admission.sendall(b"AMQP\x03\x01\x00\x00")
            assert admission.recv(8)
            bus.look_in(age_s)
            assert is_ended(admission, 10 if is_closed else 2) is is_closed
        known.attach_sender(bus.queue())


def test_connection_without_links_is_closed_after_some_minutes(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amqp_listener, "LINKLESS_MS", 100_000)  # below the idle timeout
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as busy:
        busy.attach_sender(queue)
        bus.look_in(16)
        bus.look_in(130)
        fields = raw.expect(CLOSE).fields
        assert str(fields[0].value[0]) == "amqp:connection:forced"
        assert "100000 milliseconds" in str(fields[0].value[1])
        raw.write(frame(CLOSE))
        assert raw.is_hung_up()
        busy.write(busy.transfer(0, message(b"x")))
        assert busy.dispositions(1) == {0: ACCEPTED}


def test_too_many_wrong_tokens_end_the_connection(bus: BusThread, queue: str) -> None:
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        client.attach_receiver("$cbs", 21)
        client.attach_sender("$cbs", 20)
        client.write(client.flow(100, handle=21))
        properties = {"operation": "put-token", "name": f"sb://localhost/{queue}"}
        payload = (
            encode_value(described(0x73, "id"))
            + encode_value(Described(Ulong(0x74), properties))
            + encode_value(Described(Ulong(0x77), "SharedAccessSignature sr=a&sig=b&se=1&skn=c"))
        )
        client.write(*[client.transfer(n, payload, handle=20, settled=True) for n in range(20)])
        while client.read().code != CLOSE:
            pass
        assert client.is_hung_up()


# --- limits -------------------------------------------------------------------------------------


def test_connection_beyond_the_limit_is_cut(
    bus: BusThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus.front, "_max_connections", bus.front.connection_count + 1)
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary):  # noqa: SIM117
        with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as surplus:
            with contextlib.suppress(ConnectionResetError):
                assert surplus.recv(1) == b""


def test_sends_above_the_hard_bound_are_refused_as_busy(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus.listener, "inflight", InflightBudget(0, 0, 0))
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        client.attach_sender(queue)
        client.write(client.transfer(0, message(b"x")))
        fields = client.expect(DISPOSITION).fields
        assert int(fields[4].descriptor) == REJECTED
        assert str(fields[4].value[0].value[0]) == "com.microsoft:server-busy"
    assert bus.counts(queue).active == 0


def test_credit_waits_for_budget_and_is_granted_again(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus.listener, "inflight", InflightBudget(1, 1 << 30, 0))
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        client.attach_sender(queue)
        credit = int(client.read().fields[6])
        for start in range(0, 2 * credit, 100):
            client.write(*[client.transfer(start + n, message(b"x")) for n in range(100)])
            assert len(client.dispositions(100)) == 100


def test_client_that_does_not_read_holds_no_more_than_a_little(
    bus: BusThread, raw: RawClient
) -> None:
    """With endless credit and no reading, most of a large backlog stays available to others."""
    queue = bus.queue()
    raw.attach_sender(queue)
    body = message(b"x" * 50_000)
    for start in range(0, 600, 50):
        raw.write(*[raw.transfer(start + n, body) for n in range(50)])
        raw.dispositions(50)
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as deaf:
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        deaf.attach_receiver(queue)
        deaf.write(deaf.flow(1_000_000, window=1_000_000))
        raw.attach_receiver(queue, 2)
        raw.write(raw.flow(200, handle=2))
        for _ in range(200):
            raw.expect(TRANSFER)


def test_slow_reader_gets_everything_in_the_end(bus: BusThread, raw: RawClient) -> None:
    queue = bus.queue()
    raw.attach_sender(queue)
    body = message(b"x" * 50_000)
    for start in range(0, 300, 50):
        raw.write(*[raw.transfer(start + n, body) for n in range(50)])
        raw.dispositions(50)
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as slow:
        slow.attach_receiver(queue)
        slow.write(slow.flow(1_000, window=100_000))
        for _ in range(300):
            assert len(slow.expect(TRANSFER).payload) > 50_000


def test_error_of_ours_ends_one_connection_only(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.attach_sender(queue)
    raw.write(raw.transfer(0, message(b"x")))
    raw.dispositions(1)

    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError("made by the test")

    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as victim:
        victim.attach_receiver(queue)
        monkeypatch.setattr(receiver_links, "pack_deliveries", fail)
        victim.write(victim.flow(1))
        with pytest.raises((AssertionError, ConnectionResetError)):
            victim.expect(TRANSFER)
    monkeypatch.undo()
    assert any("connection closed by an internal error" in each for each in bus.log.errors())
    bus.log.records.clear()
    raw.write(raw.transfer(1, message(b"x")))
    assert raw.dispositions(1) == {1: ACCEPTED}


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.behaviour("S2")
def test_stop_answers_accepted_messages_then_closes(postgres_server: EmbeddedPostgres) -> None:
    make_database(postgres_server, "edge_stop", template=TEMPLATE)
    bus = BusThread(dsn_of(postgres_server, "edge_stop"))
    bus.start()
    queue = bus.queue()
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        client.attach_sender(queue)
        client.write(*[client.transfer(n, message(b"x")) for n in range(100)])
        accepted = client.dispositions(100)
        client.attach_receiver(queue)
        other = RawClient(0, ROOT.name, ROOT.keys.primary, stream=WebSocketClient(bus.port))
        other.attach_sender(queue)
        bus.stop()
        detached = [client.expect(DETACH), client.expect(DETACH)]
        for each in detached:
            assert each.fields[1] is True
            assert str(each.fields[2].value[0]) == "amqp:link:detach-forced"
        closed = client.expect(CLOSE)
        assert str(closed.fields[0].value[0]) == "amqp:connection:forced"
        assert set(accepted.values()) == {ACCEPTED}
        client.write(frame(CLOSE))
        assert client.is_hung_up()
        assert str(other.expect(DETACH).fields[2].value[0]) == "amqp:link:detach-forced"
        assert str(other.expect(CLOSE).fields[0].value[0]) == "amqp:connection:forced"
        assert other.is_hung_up()
