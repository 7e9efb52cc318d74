"""A namespace is closed in one call if it is empty; clients lose nothing that was accepted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.exceptions import ServiceBusServerBusyError

from tests.edge.control.control_bus import WAIT_S, Caller, ControlledBus, controlled_bus, path_of

pytestmark = pytest.mark.slow

CLOSE = "/v1/namespace/close"
OPEN = "/v1/namespace/open"


@contextmanager
def client_of(bus: ControlledBus) -> Iterator[ServiceBusClient]:
    with ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client:
        yield client


def send(client: ServiceBusClient, path: str, *messages: ServiceBusMessage) -> None:
    with client.get_queue_sender(path) as sender:
        sender.send_messages(list(messages) or [ServiceBusMessage("x")])


def is_refused(client: ServiceBusClient, path: str) -> bool:
    try:
        send(client, path)
    except ServiceBusServerBusyError as error:
        return "the namespace is closed" in str(error)
    return False


def test_an_empty_namespace_stays_closed_after_a_restart(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus") as bus, client_of(bus) as client:
        before = bus.caller.get("/v1/namespace").body
        assert before["isClosed"] is False
        closed = bus.caller.post(CLOSE)
        assert (closed.status, closed.body["isClosed"]) == (200, True)
        assert closed.body["version"] > before["version"]
        assert bus.caller.get("/v1/namespace").body == closed.body
        assert is_refused(client, "declared")
        again = bus.caller.post(CLOSE)
        assert (again.status, again.body) == (200, closed.body)
        entries = bus.caller.get("/v1/audit?top=1").body["items"]
        assert (entries[0]["verb"], entries[0]["outcome"]) == ("close namespace", "done")
    with controlled_bus(database, tmp_path / "bus") as bus, client_of(bus) as client:
        assert bus.caller.get("/v1/namespace").body["isClosed"] is True
        assert is_refused(client, "declared")
        assert bus.caller.put(path_of("queues", "later"), {}).status == 201
        assert is_refused(client, "later")
        assert bus.caller.delete(path_of("queues", "later")).status == 200


def test_a_closed_namespace_can_be_opened_again(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus") as bus, client_of(bus) as client:
        assert bus.caller.post(CLOSE).status == 200
        assert is_refused(client, "declared")
        opened = bus.caller.post(OPEN)
        assert (opened.status, opened.body["isClosed"]) == (200, False)
        send(client, "declared")
        again = bus.caller.post(OPEN)
        assert (again.status, again.body) == (200, opened.body)
        entries = bus.caller.get("/v1/audit?top=1").body["items"]
        assert (entries[0]["verb"], entries[0]["outcome"]) == ("open namespace", "done")
    with controlled_bus(database, tmp_path / "bus") as bus, client_of(bus) as client:
        assert bus.caller.get("/v1/namespace").body["isClosed"] is False
        send(client, "declared")


def test_entities_with_messages_are_named_and_accept_more(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus") as bus, client_of(bus) as client:
        api = bus.caller
        for number in range(9):
            assert api.put(path_of("queues", f"queue-{number}"), {}).status == 201
            send(client, f"queue-{number}")
        assert api.put(path_of("topics", "Events"), {}).status == 201
        for name in ("one", "two"):
            assert api.put(path_of("topics", "Events", "subscriptions", name), {}).status == 201
        send(client, "Events")
        due = datetime.now(UTC) + timedelta(days=1)
        send(client, "declared", ServiceBusMessage("x", scheduled_enqueue_time_utc=due))
        with client.get_queue_receiver("queue-0") as receiver:
            (message,) = receiver.receive_messages(1, max_wait_time=10)
            receiver.dead_letter_message(message)
        refused = api.post(CLOSE)
        assert (refused.status, refused.kind) == (409, "not-empty")
        assert refused.body["detail"].startswith(
            "12 entities hold 12 messages: Events/Subscriptions/one (1), Events/Subscriptions/two"
        )
        named = [each["field"] for each in refused.body["problems"]]
        assert len(named) == 10
        assert {"Events/Subscriptions/one", "declared", "queue-0"} <= set(named)
        assert {each["problem"] for each in refused.body["problems"]} == {"holds messages: 1"}
        assert api.get("/v1/namespace").body["isClosed"] is False
        send(client, "declared")


def test_bad_requests_close_nothing(database: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    names = {"read": "r" * 30, "messages": "m" * 30, "all": "a" * 30}
    tokens.write_text("".join(f"{scope} {scope} {token}\n" for scope, token in names.items()))
    more = {"control_token_file": tokens}
    with controlled_bus(database, tmp_path / "bus", None, **more) as bus:
        api = Caller(bus.caller.address, names["all"])
        assert api.get(CLOSE).status == 405
        assert api.post(f"{CLOSE}?force=true").status == 400
        for scope in ("read", "messages"):
            assert api.post(CLOSE, token=names[scope]).status == 403
        assert api.post(CLOSE, token="").status == 401
        new, old = ({"Postbus-Caller-Epoch": epoch} for epoch in ("7", "6"))
        assert api.put(path_of("queues", "some"), {}, headers=new).status == 201
        late = api.post(CLOSE, headers=old)
        assert (late.status, late.kind) == (409, "caller-too-old")
        assert api.get("/v1/namespace").body["isClosed"] is False
        assert api.post(CLOSE, headers=new).status == 200


def test_clients_lose_no_accepted_message(database: str, tmp_path: Path) -> None:
    """Senders hear "busy" while it is tried; what they were told is stored is received."""
    with controlled_bus(database, tmp_path / "bus", None) as bus:
        stop = threading.Event()
        accepted: list[str] = []
        received: list[str] = []
        busy: list[str] = []
        senders = [
            threading.Thread(target=keep_sending, args=[bus, number, stop, accepted, busy])
            for number in range(3)
        ]
        receiver = threading.Thread(target=keep_receiving, args=[bus, stop, received])
        deadline = time.monotonic() + WAIT_S
        for sender in senders:
            sender.start()
        while not accepted:
            assert time.monotonic() < deadline
        assert bus.caller.post(CLOSE).kind == "not-empty"
        receiver.start()
        while (response := bus.caller.post(CLOSE)).status != 200:
            assert response.kind == "not-empty"
            assert time.monotonic() < deadline
        count, busy_count = len(accepted), len(busy)
        while len(busy) < busy_count + 2 * len(senders):
            assert time.monotonic() < deadline
        stop.set()
        for thread in (*senders, receiver):
            thread.join(WAIT_S)
        assert len(accepted) <= count + len(senders)  # answers that were on their way
        assert sorted(received) == sorted(accepted)


def keep_sending(
    bus: ControlledBus, number: int, stop: threading.Event, accepted: list[str], busy: list[str]
) -> None:
    """Send until told to stop, at least some before the namespace is closed."""
    with client_of(bus) as client:
        step = 0
        while not stop.is_set():
            step += 1
            body = f"{number}-{step}"
            try:
                send(client, "declared", ServiceBusMessage(body))
                accepted.append(body)
            except ServiceBusServerBusyError:
                busy.append(body)
            stop.wait(0.02 * (number + 1))


def keep_receiving(bus: ControlledBus, stop: threading.Event, received: list[str]) -> None:
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with (
        client_of(bus) as client,
        client.get_queue_receiver("declared", receive_mode=mode) as receiver,
    ):
        while True:
            is_last = stop.is_set()
            found = receiver.receive_messages(100, max_wait_time=0.2)
            received += [str(message) for message in found]
            if is_last and not found:
                return
