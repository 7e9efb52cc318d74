"""Faulty and hostile HTTP clients: each gets a clear answer, others are not affected."""

from __future__ import annotations

import asyncio
import re
import socket
import uuid
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.edge.bus_thread import BusThread
from tests.edge.http_client import BATCH_TYPE, HttpClient
from tests.edge.runtime.fuzz_http import CHECKS
from tests.edge.runtime.test_http_runtime import wait_for_receives
from tests.fuzz_bounds import fuzz

TOKEN = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)
    assert bus.listener.inflight.unanswered.used == 0
    assert bus.listener.inflight.reading.used == 0
    assert sum(bus.receives._waiting.values()) == 0


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("PUT", "/{queue}/messages/head", 405, "POST, DELETE"),
        ("PATCH", f"/{{queue}}/messages/1/{TOKEN}", 405, "DELETE, PUT, POST"),
        ("DELETE", "/{queue}/messages/1/nonsense", 400, "not a GUID"),
        ("DELETE", f"/{{queue}}/messages/1/{TOKEN}%00", 400, "not a GUID"),
        ("DELETE", f"/{{queue}}/messages/1/{TOKEN}", 404, "lock supplied is invalid"),
        ("PUT", f"/{{queue}}/messages/%FF/{TOKEN}", 404, "lock supplied is invalid"),
        ("POST", f"/{{queue}}/messages/a%2Fb/{TOKEN}", 404, "lock supplied is invalid"),
        ("POST", "/nowhere/messages", 404, "The messaging entity 'nowhere' could not be found"),
        ("POST", "/{queue}/Subscriptions/x/messages/head", 404, "could not be found"),
        ("POST", "/{queue}%FF/messages", 400, "UTF-8"),
        ("POST", "/{queue}%00/messages", 400, "does not name an entity"),
        ("POST", "/a//b/messages", 400, "does not name an entity"),
        ("POST", "/" + "x" * 9_000 + "/messages", 404, "could not be found"),
        ("POST", "/{queue}/messages/head?timeout=-1", 400, "0 or more"),
        ("POST", "/{queue}/messages/head?timeout=nan", 400, "0 or more"),
        ("POST", "/{queue}/messages/head?timeout=inf", 400, "0 or more"),
        ("DELETE", "/{queue}/messages/head?timeout=soon", 400, "0 or more"),
        ("POST", "/{queue}/messages?timeout=", 201, ""),
        ("POST", "/{queue}/messages?timeout=5&api-version=2013-08&x=%FF", 201, ""),
        ("POST", "/{queue}/MESSAGES/", 201, ""),
    ],
)
async def test_addresses_of_requests_are_parsed_or_refused(
    http: HttpClient, queue: str, method: str, path: str, status: int, words: str
) -> None:
    answer = await http.call(method, path.format(queue=queue))
    assert answer.status == status, answer.body
    assert not words or words in answer.detail
    if status == 405:
        assert answer.headers["Allow"] == words


async def test_a_timeout_of_ages_waits_an_hour(http: HttpClient, queue: str) -> None:
    waiting = asyncio.create_task(http.lock(queue, timeout_s=10**15))
    await wait_for_receives(http, 1)
    await http.send(queue, "there")
    assert (await waiting).body == b"there"


@pytest.mark.parametrize("partition", ["0000", "0001", "0009", "ffff"])
async def test_invented_lock_tokens_of_any_partition_are_refused(
    http: HttpClient, partition: str
) -> None:
    queue = http.bus.queue(enablePartitioning=True)
    await http.send(queue, "safe")
    token = f"00000000-0000-0000-{partition}-000000000001"
    for method in ("DELETE", "PUT", "POST"):
        assert (await http.call(method, f"/{queue}/messages/1/{token}")).status == 404
    assert (await http.take(queue, 5)).body == b"safe"


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "at least one message"),
        (b"{}", "a JSON array"),
        (b"[" + b"{}," * 10_000 + b"{}]", "at most 10,000 messages"),
        (b"[1]", "Message 0 of the batch: The message must be a JSON object"),
        (b'[{"Body": null}]', "Body must be a text"),
        (b'[{"Body": "\\udc00"}]', "surrogate"),
        (b'[{"Body": ""}, {"UserProperties": []}, {"UserProperties": [1]}]', "Message 2"),
        (b'[{"BrokerProperties": {"MessageId": 5}}]', "MessageId must be a text"),
        (b'[{"UserProperties": {"a": {}}}]', "'a' must be a text, a number"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'[{"Body": "x"}', "not valid JSON"),
        (b'[{"Body": ' + b"1" * 10_000 + b"}]", "not valid JSON"),
    ],
)
async def test_invalid_batches_are_refused(
    http: HttpClient, queue: str, body: bytes, words: str
) -> None:
    answer = await http.call("POST", f"/{queue}/messages", body, {"Content-Type": BATCH_TYPE})
    assert (answer.status, words in answer.detail) == (400, True), answer.body
    assert (await http.take(queue)).status == 204


async def test_the_type_of_a_batch_with_a_parameter_is_that_of_a_message(
    http: HttpClient, queue: str
) -> None:
    kind = f"{BATCH_TYPE}; charset=utf-8"
    await http.call("POST", f"/{queue}/messages", b'[{"Body":"x"}]', {"Content-Type": kind})
    taken = await http.take(queue)
    assert (taken.headers["Content-Type"], taken.body) == (kind, b'[{"Body":"x"}]')


async def test_too_large_requests_are_refused(http: HttpClient, queue: str) -> None:
    limit = 256 * 1024
    declared = await http.send(queue, b"x" * (limit + 1))
    assert (declared.status, str(limit) in declared.detail) == (403, True)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 60_000

    async with http.session.post(
        f"http://127.0.0.1:{http.bus.port}/{queue}/messages",
        data=chunks(),
        headers={"Authorization": http.token},
    ) as answer:
        assert answer.status == 403
    with_its_header = await http.send(queue, b"x" * limit)
    assert (with_its_header.status, "allowed" in with_its_header.detail) == (403, True)
    assert (await http.send(queue, b"x" * (limit - 200))).status == 201
    large = await http.send(queue, b"", headers={"large": '"' + "x" * 33_000 + '"'})
    assert (large.status, "properties" in large.detail) == (403, True)
    members = [{"Body": "x" * 1_000} for _ in range(300)]
    assert (await http.send_batch(queue, members)).status == 403
    assert http.bus.counts(queue).active == 1


async def test_headers_are_limited_as_a_message_is(http: HttpClient, queue: str) -> None:
    headers = {f"large-{n}": '"' + "x" * 30_000 + '"' for n in range(2)}
    assert (await http.send(queue, b"", headers=headers)).status == 201
    async with aiohttp.ClientSession(max_field_size=70_000, max_line_size=70_000) as session:
        patient = HttpClient(http.bus, session)
        assert (await patient.take(queue)).headers["large-0"] == headers["large-0"]
    headers["large-2"] = headers["large-0"]
    assert (await http.send(queue, b"", headers=headers)).status in (400, 431)


@pytest.mark.parametrize(
    ("field", "status"),
    [
        (b"kind: \xff\xfe", 400),
        (b'kind: "\xc3\x28"', 400),
        (b"BrokerProperties: \xff", 400),
        (b"BrokerProperties: {}\r\nBrokerProperties: []", 400),
        (b"Content-Encoding: gzip", 415),
        (b"Content-Type: text/\xff", 400),
        (b"kind: \x01", 400),
        (b": nameless", 400),
        (b"Content-Length: 7", 400),
        (b"Transfer-Encoding: chunked", 400),
    ],
)
async def test_invalid_headers_are_refused(
    http: HttpClient, queue: str, field: bytes, status: int
) -> None:
    answer = await ask_raw(http, queue, field)
    assert re.match(rb"HTTP/1\.[01] %d " % status, answer), answer
    assert http.bus.counts(queue).active == 0


async def ask_raw(http: HttpClient, queue: str, *fields: bytes) -> bytes:
    """Send a message of one octet with header fields as they are, return all that comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.bus.port)
    lines = [
        f"POST /{queue}/messages HTTP/1.1".encode(),
        b"Host: here",
        b"Connection: close",
        f"Authorization: {http.token}".encode(),
        b"Content-Length: 1",
        *fields,
    ]
    writer.write(b"\r\n".join(lines) + b"\r\n\r\nx")
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


async def test_an_incomplete_body_stores_no_message(http: HttpClient, queue: str) -> None:
    head = f"POST /{queue}/messages HTTP/1.1\r\nHost: x\r\nAuthorization: {http.token}\r\n"
    with socket.create_connection(("127.0.0.1", http.bus.port)) as raw:
        raw.sendall(f"{head}Content-Length: 100000\r\n\r\nonly this".encode())
        await wait_for_reading(http, 9)
    await wait_for_reading(http, 0)
    assert (await http.take(queue)).status == 204


async def wait_for_reading(http: HttpClient, size_bytes: int) -> None:
    async with asyncio.timeout(10):
        while http.bus.listener.inflight.reading.used != size_bytes:
            await asyncio.sleep(0.005)


async def test_one_token_is_used_by_many_at_once(http: HttpClient, queue: str) -> None:
    await http.send(queue, "once")
    locked = await http.lock(queue)
    answers = await asyncio.gather(*(http.call("DELETE", locked.path) for _ in range(20)))
    assert sorted(answer.status for answer in answers) == [200] + [404] * 19
    assert uuid.UUID(locked.broker["LockToken"])


async def test_many_receive_at_once_and_each_message_once(http: HttpClient, queue: str) -> None:
    await http.send_batch(queue, [{"Body": str(n)} for n in range(60)])
    found: list[bytes] = []

    async def drain() -> None:
        while (taken := await http.take(queue)).status == 200:
            found.append(taken.body)

    await asyncio.gather(*(drain() for _ in range(12)))
    assert sorted(found, key=int) == [str(n).encode() for n in range(60)]


@pytest.mark.slow
def test_fuzzed_requests_are_refused_or_become_messages() -> None:
    tried, accepted = fuzz(CHECKS, seconds=60, seed=7, max_inputs=6_000)
    assert tried == 6_000
    assert accepted > 500
