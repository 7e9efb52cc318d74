"""Messages over HTTP with an ordinary client: every request, its answer and its refusals."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime

import aiohttp
import pytest

from postbus.edge.runtime import receives as http_runtime_receives
from postbus.edge.runtime.receives import _Consumer
from postbus.entity.commands import (
    AddConsumer,
    Command,
    Delivery,
    Enqueue,
    Receiver,
    Refusal,
    Refused,
    Reply,
    Settle,
)
from tests.edge.bus_thread import MAX_RECEIVES, RULES, BusThread, sas_token
from tests.edge.http_client import HttpClient, token_of, url_of
from tests.edge.sdk.sdk_steps import send


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)
    assert bus.listener.inflight.unanswered.used == 0


async def test_a_message_is_sent_locked_and_completed(http: HttpClient, queue: str) -> None:
    sent = await http.send(queue, "hello", {"Label": "greeting", "MessageId": "m 1/2"})
    assert (sent.status, sent.body) == (201, b"")
    locked = await http.lock(queue)
    assert (locked.status, locked.body) == (201, b"hello")
    assert locked.broker["Label"] == "greeting"
    assert locked.broker["DeliveryCount"] == 1
    token = locked.broker["LockToken"]
    at = f"{url_of(http.bus)}/{queue}/messages/m%201%2F2/{token}"
    assert locked.headers["Location"] == at
    assert locked.headers["Server"] == sent.headers["Server"] == "Postbus"
    assert (await http.lock(queue)).status == 204
    assert (await http.call("DELETE", locked.path)).status == 200
    gone = await http.call("DELETE", locked.path)
    assert gone.status == 404
    assert "lock supplied is invalid" in gone.detail
    assert http.bus.counts(queue).active == 0


async def test_a_message_is_read_and_deleted(http: HttpClient, queue: str) -> None:
    body = bytes(range(256)) * 4
    await http.send(queue, body, headers={"Content-Type": "image/x-own; a=b"})
    read = await http.take(queue)
    assert (read.status, read.body) == (200, body)
    assert read.headers["Content-Type"] == "image/x-own; a=b"
    assert "Location" not in read.headers
    assert not {"LockToken", "LockedUntilUtc"} & set(read.broker)
    assert (await http.take(queue)).status == 204
    assert http.bus.counts(queue).active == 0


async def test_an_unlocked_message_comes_again_with_its_count(http: HttpClient, queue: str) -> None:
    await http.send(queue, "again")
    first = await http.lock(queue)
    assert (await http.call("PUT", first.path)).status == 200
    assert (await http.call("PUT", first.path)).status == 404
    second = await http.lock(queue)
    assert (second.broker["SequenceNumber"], second.broker["DeliveryCount"]) == (
        first.broker["SequenceNumber"],
        2,
    )


async def test_a_lock_is_renewed_by_sequence_number(http: HttpClient) -> None:
    bus = http.bus
    queue = bus.queue(lockDuration="PT30S")
    await http.send(queue, "slow")
    locked = await http.lock(queue)
    until = parsedate_to_datetime(locked.broker["LockedUntilUtc"])
    assert timedelta(0) < until - bus.now() <= timedelta(seconds=30)
    bus.advance(20_000)
    at = f"/{queue}/messages/{locked.broker['SequenceNumber']}/{locked.broker['LockToken']}"
    renewed = await http.call("POST", at)
    assert renewed.status == 200
    assert parsedate_to_datetime(renewed.broker["LockedUntilUtc"]) >= until + timedelta(seconds=19)
    bus.advance(20_000)
    assert (await http.call("DELETE", at)).status == 200
    assert (await http.call("POST", at)).status == 404


async def test_an_expired_lock_is_not_found(http: HttpClient, queue: str) -> None:
    await http.send(queue, "late")
    locked = await http.lock(queue)
    http.bus.advance(70_000)
    for method in ("DELETE", "PUT", "POST"):
        assert (await http.call(method, locked.path)).status == 404
    assert (await http.lock(queue)).broker["DeliveryCount"] == 2


async def test_a_receive_waits_for_a_message(http: HttpClient, queue: str) -> None:
    waiting = asyncio.create_task(http.lock(queue, timeout_s=20))
    taking = asyncio.create_task(http.take(queue, timeout_s=20))
    await wait_for_receives(http, 2)
    await http.send(queue, "one")
    await http.send(queue, "two")
    locked, taken = await waiting, await taking
    assert (locked.status, taken.status) == (201, 200)
    assert {locked.body, taken.body} == {b"one", b"two"}
    assert (await http.lock(queue, timeout_s=0.01)).status == 204


async def wait_for_receives(http: HttpClient, count: int) -> None:
    """Return when a number of receives wait."""
    async with asyncio.timeout(10):
        while http.waiting_count() != count:
            await asyncio.sleep(0.005)


async def wait_for_connections(http: HttpClient, count: int) -> None:
    async with asyncio.timeout(10):
        while http.bus.http.connection_count != count:
            await asyncio.sleep(0.01)


async def wait_for_count(found: Sequence[object], count: int) -> None:
    async with asyncio.timeout(10):
        while len(found) < count:
            await asyncio.sleep(0.005)


# --- nothing is lost ------------------------------------------------------------------------------


def raw_receive(http: HttpClient, queue: str, method: str) -> socket.socket:
    """Ask for a message; a client that does not repeat when it is cut off."""
    raw = socket.create_connection(("127.0.0.1", http.bus.port))
    head = f"{method} /{queue}/messages/head?timeout=50 HTTP/1.1\r\nHost: x\r\n"
    raw.sendall(f"{head}Authorization: {http.token}\r\n\r\n".encode())
    return raw


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_client_that_disconnects_while_it_waits_loses_no_message(
    http: HttpClient, queue: str, method: str
) -> None:
    raw = raw_receive(http, queue, method)
    await wait_for_receives(http, 1)
    raw.close()
    await wait_for_receives(http, 0)
    await http.send(queue, "mine")
    assert (await http.lock(queue)).broker["DeliveryCount"] == 1


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_message_delivered_at_the_moment_of_a_disconnect_is_released(
    http: HttpClient, queue: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's end is noticed after the delivery and before the answer."""
    bus = http.bus
    deliver = _Consumer.deliver

    def deliver_and_lose(self: _Consumer, deliveries: list[Delivery]) -> None:
        deliver(self, deliveries)
        for connection in http.bus.http._server.connections:
            if connection._current_request is not None and not seen:
                seen.append(connection)
                connection.transport.abort()

    seen: list[object] = []
    raw = raw_receive(http, queue, method)
    await wait_for_receives(http, 1)
    monkeypatch.setattr(_Consumer, "deliver", deliver_and_lose)
    with bus.client() as client:
        send(client, queue, "kept")
    with raw, suppress(ConnectionError):
        assert raw.recv(1) == b"", "it was answered"
    assert len(seen) == 1
    again = await http.lock(queue, timeout_s=10)
    assert (again.body, again.broker["DeliveryCount"]) == (b"kept", 1)


async def test_a_receive_outlives_a_reload_of_its_partition(http: HttpClient, queue: str) -> None:
    bus = http.bus
    waiting = asyncio.create_task(http.take(queue, timeout_s=30))
    await wait_for_receives(http, 1)
    bus.reload(queue)
    await http.send(queue, "after")
    assert (await waiting).body == b"after"


async def test_a_reload_between_lock_and_deletion_is_not_noticed(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = http.bus
    await http.send(queue, "twice locked")
    submit = bus.router.submit

    def reload_first(partition_id: int, command: Command, *rest: object) -> None:
        if isinstance(command, Settle):
            monkeypatch.setattr(bus.router, "submit", submit)
            bus.drop(queue)
        submit(partition_id, command, *rest)

    monkeypatch.setattr(bus.router, "submit", reload_first)
    taken = await http.take(queue, timeout_s=20)
    assert (taken.status, taken.body) == (200, b"twice locked")
    assert bus.counts(queue).active == 0


async def test_a_deletion_that_failed_gives_the_message_back(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = http.bus
    await http.send(queue, "still there")
    bus.refuse_next(monkeypatch, "not-applied", Settle)
    refused = await http.take(queue)
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert (await http.take(queue)).body == b"still there"


# --- results of the store -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "status", "words"),
    [
        ("not-applied", 503, "had no effect"),
        ("busy", 503, "busy"),
        ("unknown", 504, "may have been stored"),
        ("store-full", 403, "store is full"),
        ("quota-exceeded", 403, "maximum entity size"),
    ],
)
async def test_a_send_refused_by_the_store_is_reported(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch,
    refusal: str, status: int, words: str,
) -> None:  # fmt: skip
    http.bus.refuse_next(monkeypatch, refusal)
    answer = await http.send(queue, "never")
    assert (answer.status, words in answer.detail) == (status, True)
    assert ("Retry-After" in answer.headers) is (status == 503)
    assert re.search(r"TrackingId:\S+, SystemTracker:test-bus:\S+, Timestamp:", answer.detail)


@pytest.mark.parametrize(
    ("refusal", "status"), [("not-applied", 503), ("unknown", 504), ("busy", 503)]
)
async def test_a_settlement_refused_by_the_store_is_reported(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch, refusal: str, status: int
) -> None:
    await http.send(queue, "held")
    locked = await http.lock(queue)
    http.bus.refuse_next(monkeypatch, refusal, Settle)
    answer = await http.call("DELETE", locked.path)
    assert (answer.status, "Repeat it" in answer.detail) == (status, refusal == "unknown")
    assert (await http.call("DELETE", locked.path)).status == 200


@pytest.mark.behaviour("S21")
async def test_a_post_is_answered_after_its_message_is_stored(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipelined posts on one connection: each is answered when its commit is done, in order."""
    bus = http.bus
    held: list[Callable[[Reply], None]] = []
    replies: list[Reply] = []
    submit = bus.router.submit

    def hold(
        partition_id: int, command: Command, on_reply: Callable[[Reply], None] | None = None
    ) -> None:
        if isinstance(command, Enqueue) and on_reply is not None:
            held.append(on_reply)
            submit(partition_id, command, replies.append)
        else:
            submit(partition_id, command, on_reply)

    monkeypatch.setattr(bus.router, "submit", hold)
    head = f"POST /{queue}/messages HTTP/1.1\r\nHost: x\r\nAuthorization: {http.token}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", http.bus.port)
    for body in (b"1", b"2"):
        writer.write(f"{head}Content-Length: 1\r\n\r\n".encode() + body)
    for stored in (1, 2):
        await wait_for_count(replies, stored)
        assert (len(held), bus.counts(queue).active) == (stored, stored)
        with pytest.raises(TimeoutError):  # stored but not released: not answered, and none follows
            await asyncio.wait_for(reader.readexactly(1), 0.05)
        bus.run(release(held[stored - 1], replies[stored - 1]))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 201 ")
    writer.close()


async def release(on_reply: Callable[[Reply], None], reply: Reply) -> None:
    on_reply(reply)


async def test_sends_are_refused_when_too_many_bytes_are_in_flight(
    http: HttpClient, queue: str
) -> None:
    inflight = http.bus.listener.inflight
    inflight.take("others", inflight.unanswered.limit.total)
    answer = await http.send(queue, "more")
    inflight.give_back("others", inflight.unanswered.limit.total)
    assert (answer.status, "busy" in answer.detail) == (503, True)
    assert (await http.send(queue, "more")).status == 201


async def test_receives_at_one_entity_are_limited(http: HttpClient, queue: str) -> None:
    waiting = [asyncio.create_task(http.lock(queue, timeout_s=50)) for _ in range(MAX_RECEIVES)]
    await wait_for_receives(http, MAX_RECEIVES)
    refused = await http.lock(queue)
    assert (refused.status, "20 receives are already waiting" in refused.detail) == (503, True)
    assert (await http.lock(http.bus.queue())).status == 204
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await wait_for_receives(http, 0)
    assert (await http.lock(queue)).status == 204


def holding_sends(bus: BusThread, late: list[Callable[[Reply], None]]) -> Callable[..., None]:
    """Collect the callbacks of sends, which go nowhere; commands of kept consumers pass."""
    submit = bus.router.submit

    def hold(partition_id: int, command: Command, *rest: object) -> None:
        if isinstance(command, Enqueue):
            late.append(rest[0])
        else:
            submit(partition_id, command, *rest)

    return hold


async def test_a_send_without_an_answer_in_time_has_an_unknown_result(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[Reply], None]] = []
    monkeypatch.setattr(http.bus.router, "submit", holding_sends(http.bus, late))
    answer = await http.call("POST", f"/{queue}/messages?timeout=0.02", "maybe")
    assert (answer.status, "may have been stored" in answer.detail) == (504, True)
    assert "Retry-After" not in answer.headers
    assert http.bus.listener.inflight.unanswered.used == len("maybe")  # it is still in flight
    http.bus.run(release(late[0], Refused(Refusal.NOT_APPLIED)))


async def test_a_disconnect_during_a_send_releases_no_budget(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[Reply], None]] = []
    monkeypatch.setattr(http.bus.router, "submit", holding_sends(http.bus, late))
    for count in (1, 2):
        sending = asyncio.create_task(http.send(queue, "12345"))
        await wait_for_count(late, count)
        sending.cancel()
        await asyncio.wait([sending])
        await wait_for_connections(http, 0)
        assert http.bus.listener.inflight.unanswered.used == 5 * count
    for on_reply in late:
        http.bus.run(release(on_reply, Refused(Refusal.NOT_APPLIED)))


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("is_old", [False, True], ids=["rule changed", "token old"])
async def test_a_waiting_receive_ends_with_its_right(
    http: HttpClient, queue: str, method: str, is_old: bool
) -> None:
    bus, root = http.bus, http.token
    http.token = token_of(bus, "listener")
    receiving = asyncio.create_task(http.call(method, f"/{queue}/messages/head?timeout=50"))
    await wait_for_receives(http, 1)
    http.token = token_of(bus, duration_s=6_000)
    try:
        if is_old:
            bus.real_shift_s = 1_000
        else:
            bus.set_rules(*(rule for rule in RULES if rule.name != "listener"))
        assert (await http.send(queue, "not for you")).status == 201
        assert (await receiving).status == 401
    finally:
        bus.set_rules(*RULES)
        bus.real_shift_s = 0
    http.token = root
    again = await http.lock(queue, timeout_s=5)
    assert (again.body, again.broker["DeliveryCount"]) == (b"not for you", 1)


async def test_a_body_completed_after_its_rule_was_deleted_is_not_stored(
    http: HttpClient, queue: str
) -> None:
    bus = http.bus
    token = token_of(bus, "sender")
    reader, writer = await asyncio.open_connection("127.0.0.1", bus.port)
    head = f"POST /{queue}/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    request = f"{head}Authorization: {token}\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n"
    writer.write(request.encode())
    assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
    bus.set_rules(*(rule for rule in RULES if rule.name != "sender"))
    try:
        writer.write(b"x")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    finally:
        bus.set_rules(*RULES)
        writer.close()
    assert bus.counts(queue).active == 0


async def test_location_has_the_scheme_of_tls(http: HttpClient, queue: str) -> None:
    bus = http.bus
    context = ssl.create_default_context(cafile=str(bus.authority_file))
    at = f"https://localhost:{bus.port}/{queue}/messages"
    headers = {"Authorization": http.token}
    async with (
        aiohttp.TCPConnector(ssl=context) as connector,
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
    ):
        assert (await session.post(at, data=b"secret")).status == 201
        locked = await session.post(f"{at}/head")
        assert await locked.read() == b"secret"
        assert locked.headers["Location"].startswith(f"https://localhost:{bus.port}/{queue}/")
        assert (await session.delete(locked.headers["Location"])).status == 200


# --- entities of all kinds ------------------------------------------------------------------------


async def test_a_batch_is_stored_whole_or_not_at_all(http: HttpClient, queue: str) -> None:
    members = [
        {"Body": "first"},
        {
            "Body": "wörd",
            "BrokerProperties": {"Label": "M2", "TimeToLiveTimeSpan": "0.00:00:40"},
            "UserProperties": {"Priority": "Low", "number": 3, "half": 0.5, "yes": True},
        },
    ]
    assert (await http.send_batch(queue, members)).status == 201
    first, second = await http.take(queue), await http.take(queue)
    assert (first.body, second.body) == (b"first", "wörd".encode())
    assert (second.broker["Label"], second.broker["TimeToLive"]) == ("M2", 40.0)
    custom = {name: second.headers[name] for name in ("Priority", "number", "half", "yes")}
    assert custom == {"Priority": '"Low"', "number": "3", "half": "0.5", "yes": "true"}
    wrong = [{"Body": "fine"}, {"Body": "bad", "BrokerProperties": {"MessageId": "x" * 129}}]
    refused = await http.send_batch(queue, wrong)
    assert (refused.status, "MessageId" in refused.detail) == (400, True)
    malformed = await http.send_batch(queue, [{"Body": "fine"}, {"Body": 5}])
    assert (malformed.status, "Message 1 of the batch" in malformed.detail) == (400, True)
    assert (await http.take(queue)).status == 204


async def test_a_long_batch_lets_others_pass(http: HttpClient, queue: str) -> None:
    answer = await http.send_batch(queue, [{"Body": str(n)} for n in range(1_200)])
    assert answer.status == 201
    assert http.bus.counts(queue).active == 1_200
    assert (await http.take(queue)).body == b"0"


async def test_subscriptions_and_their_dead_letters(http: HttpClient) -> None:
    bus = http.bus
    topic = bus.topic("News/of-the-World")
    bus.subscription(topic, "all", maxDeliveryCount=1)
    bus.subscription(topic, "other")
    sent = await http.send(topic, "item", headers={"kind": '"sport"'})
    assert sent.status == 201, sent.body
    source = f"{topic.lower()}/subscriptions/ALL"
    locked = await http.lock(source)
    assert (locked.body, locked.headers["kind"]) == (b"item", '"sport"')
    assert locked.broker["EnqueuedSequenceNumber"] == 1
    assert (await http.call("PUT", locked.path)).status == 200
    dead = await http.lock(f"{source}/$DeadLetterQueue")
    assert dead.headers["DeadLetterReason"] == '"MaxDeliveryCountExceeded"'
    assert "/%24" not in dead.path
    assert (await http.call("DELETE", dead.path)).status == 200
    assert (await http.lock(f"{source}/$deadletterqueue")).status == 204
    assert (await http.lock(f"{source}/$Transfer/$DeadLetterQueue")).status == 204
    assert (await http.take(f"{topic}/Subscriptions/other")).body == b"item"
    for wrong in (f"{topic}/Subscriptions/all", f"{topic}/$DeadLetterQueue"):
        assert (await http.send(wrong, "no")).status == 400
    from_topic = await http.lock(topic)
    assert (from_topic.status, "subscription" in from_topic.detail) == (400, True)


async def test_sessions_are_sent_to_but_not_received(http: HttpClient) -> None:
    queue = http.bus.queue(requiresSession=True)
    missing = await http.send(queue, "no session")
    assert (missing.status, "session" in missing.detail) == (400, True)
    keys = {"SessionId": "s", "PartitionKey": "s"}
    assert (await http.send(queue, "in session", keys)).status == 201
    other = await http.send(queue, "two", {"SessionId": "s", "PartitionKey": "t"})
    assert (other.status, "must be the same" in other.detail) == (400, True)
    token = "/1/00000000-0000-0000-0000-000000000000"
    for method, path in (("POST", "/head"), ("DELETE", "/head"), ("DELETE", token)):
        refused = await http.call(method, f"/{queue}/messages{path}")
        assert (refused.status, "AMQP only" in refused.detail) == (400, True)
    with http.bus.client() as client:
        receiver = client.get_queue_receiver(queue, session_id="s", max_wait_time=5)
        with receiver:
            (message,) = receiver.receive_messages()
            assert (str(message), message.session_id) == ("in session", "s")
            receiver.dead_letter_message(message)
    assert (await http.take(f"{queue}/$DeadLetterQueue")).broker["SessionId"] == "s"


@pytest.mark.behaviour("S206", "S208")
async def test_a_partitioned_queue_is_drained(http: HttpClient) -> None:
    """Over one kept-alive connection and over a new one each time; tokens find their partition."""
    bus = http.bus
    queue = bus.queue(enablePartitioning=True)
    bodies = [f"m{n}" for n in range(40)]
    for body in bodies:
        assert (await http.send(queue, body, {"PartitionKey": body})).status == 201
    found: list[str] = []
    partitions = set()
    while len(found) < 20:
        locked = await http.lock(queue, timeout_s=5)
        assert locked.status == 201
        partitions.add(locked.broker["SequenceNumber"] >> 48)
        found.append(locked.body.decode())
        if len(found) % 2:
            assert (await http.call("POST", locked.path)).status == 200
        assert (await http.call("DELETE", locked.path)).status == 200
        assert (await http.call("DELETE", locked.path)).status == 404
    for _ in range(20):
        async with aiohttp.ClientSession(headers={"Connection": "close"}) as session:
            found.append((await HttpClient(http.bus, session).take(queue, 5)).body.decode())
    assert sorted(found) == sorted(bodies)
    assert len(partitions) == 2
    assert (await http.lock(queue)).status == 204
    unlocked = await http.call("DELETE", f"/{queue}/messages/1/{uuid.uuid4()}")
    assert unlocked.status == 404


@pytest.mark.behaviour("S211")
async def test_a_kept_connection_remembers_which_partitions_have_messages(
    http: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions get one request for their messages, not one with each receive."""
    bus = http.bus
    queue = bus.queue(enablePartitioning=True)
    await http.send_batch(queue, [{"Body": str(n)} for n in range(8)])
    added: list[AddConsumer] = []
    for host in bus._hosts:
        monkeypatch.setattr(host, "submit", noting(host.submit, added))
    for _ in range(4):
        assert (await http.take(queue, 5)).status == 200
    assert len(added) == len(bus._hosts)
    for kept in (5, 6):
        async with aiohttp.ClientSession() as session:
            assert (await HttpClient(bus, session).take(queue, 5)).status == 200
        assert len(added) == len(bus._hosts) * (kept - 3)
    assert (await http.lock(queue)).status == 201
    assert len(added) == len(bus._hosts) * 3


def noting(submit: Callable[..., None], added: list[AddConsumer]) -> Callable[..., None]:
    def note(command: Command, *rest: object) -> None:
        if isinstance(command, AddConsumer):
            added.append(command)
        submit(command, *rest)

    return note


async def test_a_kept_consumer_takes_no_message_and_ends(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = http.bus
    await wait_for_consumers(bus, 0)  # those of other tests
    assert (await http.take(queue)).status == 204
    await http.send(queue, "for all")
    assert consumer_count(bus) == 1
    async with aiohttp.ClientSession() as session:
        other = await HttpClient(bus, session).lock(queue)
    assert (other.body, other.broker["DeliveryCount"]) == (b"for all", 1)
    bus.reload(queue)
    assert (await http.take(queue, 5)).body == b"for all"
    monkeypatch.setattr(http_runtime_receives, "PARKED_S", 0.05)
    assert (await http.take(queue)).status == 204
    await wait_for_consumers(bus, 0)


def consumers_of(bus: BusThread) -> list[tuple[Receiver | None, int, int]]:
    """Return receiver, limit and deliveries of each consumer."""

    async def consumers() -> list[tuple[Receiver | None, int, int]]:
        loaded = [host._state for host in bus._hosts if host._state is not None]
        found = [each for state in loaded for _, each in state._consumers.values()]
        return [(each.receiver, each.limit, each.delivered) for each in found]

    return bus.run(consumers())


def consumer_count(bus: BusThread) -> int:
    return len(consumers_of(bus))


async def wait_for_consumers(bus: BusThread, count: int) -> None:
    try:
        async with asyncio.timeout(10):
            while consumer_count(bus) != count:
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"expected {count} consumers, there are {consumers_of(bus)}")


async def test_a_message_waits_until_it_is_due(http: HttpClient, queue: str) -> None:
    bus = http.bus
    due = bus.now() + timedelta(hours=1)
    text = due.strftime("%a, %d %b %Y %H:%M:%S GMT")
    await http.send(queue, "later", {"ScheduledEnqueueTimeUtc": text, "TimeToLive": 90.5})
    assert (await http.lock(queue)).status == 204
    bus.advance(3_600_000)
    locked = await http.lock(queue)
    assert locked.broker["ScheduledEnqueueTimeUtc"] == text
    assert locked.broker["TimeToLive"] == 90.5


async def test_duplicates_are_taken_and_dropped(http: HttpClient) -> None:
    queue = http.bus.queue(requiresDuplicateDetection=True)
    for _ in range(2):
        assert (await http.send(queue, "once", {"MessageId": "same"})).status == 201
    assert (await http.take(queue)).body == b"once"
    assert (await http.take(queue)).status == 204


async def test_disabled_and_deleted_entities(http: HttpClient) -> None:
    bus = http.bus
    queue = bus.queue()
    bus.change(queue, status="SendDisabled")
    assert (await http.send(queue, "no")).status == 403
    assert (await http.lock(queue)).status == 204
    waiting = asyncio.create_task(http.lock(queue, timeout_s=50))
    await wait_for_receives(http, 1)
    bus.change(queue, status="ReceiveDisabled")
    assert (await waiting).status == 403
    assert (await http.take(queue)).status == 403
    bus.change(queue, status="Active")
    waiting = asyncio.create_task(http.take(queue, timeout_s=50))
    await wait_for_receives(http, 1)
    bus.delete(queue)
    assert (await waiting).status == 404
    gone = await http.send(queue, "no")
    assert gone.status == 404
    assert re.search(r"The messaging entity .* could not be found", gone.detail)


# --- rights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "may_send", "may_receive"),
    [("sender", True, False), ("listener", False, True), ("of-one-queue", False, False)],
)
async def test_rights_are_those_of_the_rule(
    http: HttpClient, queue: str, rule: str, may_send: bool, may_receive: bool
) -> None:
    await http.send(queue, "there")
    locked = await http.lock(queue)
    http.token = token_of(http.bus, rule)
    sent = await http.send(queue, "mine")
    assert sent.status == (201 if may_send else 401)
    for method, path in (
        ("POST", f"/{queue}/messages/head?timeout=0"),
        ("DELETE", f"/{queue}/messages/head?timeout=0"),
        ("POST", locked.path),
        ("PUT", locked.path),
        ("DELETE", locked.path),
    ):
        answer = await http.call(method, path)
        assert (answer.status != 401) is may_receive, answer
    if not may_send:
        refused_as = "'Send' claim(s) are required" if may_receive else "InvalidSignature"
        assert refused_as in sent.detail


async def test_a_token_for_the_address_of_the_request_is_enough(
    http: HttpClient, queue: str
) -> None:
    """Azure compares with the whole URI, and so do the tokens of many scripts."""
    key = RULES[0].keys.primary
    expires_s = int(time.time()) + 600
    for resource, status in (
        (f"{url_of(http.bus)}/{queue}/messages", 201),
        (f"{url_of(http.bus)}/{queue}/message", 401),
        (f"{url_of(http.bus)}/other/messages", 401),
    ):
        http.token = sas_token(resource, RULES[0].name, key, expires_s)
        assert (await http.send(queue, "x")).status == status


@pytest.mark.parametrize("trick", ["x=://h/{own}", "x=a://h/{own}/messages", "://h/{own}"])
async def test_a_token_for_another_entity_is_refused_despite_the_query(
    http: HttpClient, queue: str, trick: str
) -> None:
    own = f"{queue}/own"
    resource = f"{url_of(http.bus)}/{own}"
    http.token = sas_token(resource, RULES[0].name, RULES[0].keys.primary, int(time.time()) + 60)
    for method, path in (("POST", "/messages"), ("DELETE", "/messages/head"), ("GET", "")):
        at = f"/{queue}{path}?timeout=0&{trick.format(own=own)}"
        answer = await http.call(method, at, b"x" if path else None)
        assert answer.status == 401, (method, path)
    assert http.bus.counts(queue).active == 0


async def test_missing_and_expired_tokens_are_refused(http: HttpClient, queue: str) -> None:
    for token in ("", "Bearer e30.e30.", token_of(http.bus, duration_s=-5)):
        http.token = token
        answer = await http.send(queue, "no")
        assert answer.status == 401
        assert answer.detail
