"""HTTP of the data ports: dispatch, refusals and their form."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast
from urllib.parse import quote_plus
from xml.etree import ElementTree

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from postbus.broker.access.authz import Authorizer
from postbus.broker.access.own_names import OwnNames
from postbus.broker.router import Router
from postbus.contract.entities import LIMITS, Right, Sku
from postbus.edge.amqp.listener import AmqpListener
from postbus.edge.amqp.subscription_rules import SubscriptionRules
from postbus.edge.port_multiplexer import PortMultiplexer
from postbus.edge.web import http_server
from postbus.edge.web.authorization import HttpAuthorizer, HttpRefused
from postbus.edge.web.http_server import HttpServer, read_limited
from tests.edge.bus_thread import RULES, sas_token
from tests.edge.front_rig import GET_HEALTH, HOST, wait_a_moment

ROOT = RULES[0]
NOW_S = 1_800_000_000


class Named:
    """Answers with its name; acts on the query."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if "refuse" in request.query:
            raise HttpRefused(409, "Taken <here> & \x00there.")
        if "break" in request.query:
            raise ZeroDivisionError("secret of ours")
        await read_limited(request, 100)
        return web.Response(text=self._name)


class Rig:
    """The server on a port, in the loop of the test."""

    is_healthy = True

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.port = port
        self._session = session

    async def health(self) -> bool:
        return self.is_healthy

    async def ask(self, method: str, path: str, **more: object) -> tuple[int, str]:
        url = f"http://{HOST}:{self.port}{path}"
        async with self._session.request(method, url, **more) as answer:  # type: ignore[arg-type]
            return answer.status, await answer.text()

    async def raw(self, data: bytes) -> bytes:
        """Send bytes and return everything until the broker disconnects."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(data)
        async with asyncio.timeout(10):
            found = await reader.read()
        writer.close()
        return found


@asynccontextmanager
async def rig_of(names: OwnNames | None = None) -> AsyncIterator[Rig]:
    async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession() as session:
        rules = cast(SubscriptionRules, None)
        router = cast(Router, None)  # no test here uses AMQP
        amqp = AmqpListener(router, rules, Authorizer(RULES), LIMITS[Sku.STANDARD], tasks)
        http = HttpServer(
            "test-bus",
            administration=Named("administration"),
            runtime=Named("runtime"),
            is_healthy=lambda: made.health(),
            names=names,
        )
        listeners = PortMultiplexer(amqp, http, tasks)
        made = Rig(await listeners.listen(HOST, 0), session)
        yield made
        await session.close()
        await listeners.close()
        await amqp.stop(1.0)
        await http.stop(1.0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rig_of() as made:
        yield made


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/orders/messages", "runtime"),
        ("POST", "/orders/messages/?timeout=5", "runtime"),
        ("POST", "/orders/messages/head", "runtime"),
        ("DELETE", "/a/b/Messages/Head?timeout=5", "runtime"),
        ("PUT", "/t/Subscriptions/s/messages/7/5e1f", "runtime"),
        ("DELETE", "/orders/$DeadLetterQueue/messages/7/5e1f", "runtime"),
        ("PUT", "/orders/messages", "administration"),
        ("DELETE", "/orders/messages", "administration"),
        ("GET", "/orders/messages", "administration"),
        ("PUT", "/messages", "administration"),
        ("POST", "/messages", "administration"),
        ("GET", "/$Resources/queues?$skip=0&$top=100", "administration"),
        ("GET", "/", "administration"),
    ],
)
async def test_path_and_method_select_the_handler(
    rig: Rig, method: str, path: str, expected: str
) -> None:
    assert await rig.ask(method, path) == (200, expected)


async def test_health_needs_no_key(rig: Rig) -> None:
    status, text = await rig.ask("GET", "/health")
    assert (status, text) == (200, '{"status": "healthy", "message": "Service is healthy."}')
    rig.is_healthy = False
    status, text = await rig.ask("GET", "/health")
    assert status == 503
    assert '"unhealthy"' in text


async def test_entity_called_health_can_be_administered(rig: Rig) -> None:
    found = await rig.ask("GET", "/health", headers={"Authorization": "some"})
    assert found == (200, "administration")


async def test_refusal_is_the_xml_that_sdks_read(rig: Rig) -> None:
    status, text = await rig.ask("PUT", "/orders?refuse")
    assert status == 409
    error = ElementTree.fromstring(text)
    assert (error.tag, error.findtext("Code")) == ("Error", "409")
    detail = error.findtext("Detail") or ""
    assert re.fullmatch(
        r"Taken <here> & \?there\. TrackingId:[\w-]+_G0, SystemTracker:test-bus:orders,"
        r" Timestamp:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d",
        detail,
    )


async def test_internal_error_discloses_no_detail(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    status, text = await rig.ask("PUT", "/orders?break")
    assert status == 500
    assert "secret" not in text
    assert "ZeroDivisionError" in caplog.text


async def test_server_without_a_handler_names_the_alternatives(rig: Rig) -> None:
    status, text = await rig.ask("GET", "/$servicebus/websocket")
    assert status == 404
    assert "GET /health" in text


# --- limits -------------------------------------------------------------------------------------


async def test_body_is_limited(rig: Rig) -> None:
    assert (await rig.ask("POST", "/orders/messages", data=b"x" * 100))[0] == 200
    status, text = await rig.ask("POST", "/orders/messages", data=b"x" * 101)
    assert status == 413
    assert "larger than 100 bytes" in text

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 50

    assert (await rig.ask("POST", "/orders/messages", data=pieces()))[0] == 413


async def test_compressed_body_is_not_unpacked(rig: Rig) -> None:
    options = {"data": b"\x1f\x8b", "headers": {"Content-Encoding": "gzip"}}
    assert (await rig.ask("POST", "/orders/messages", **options))[0] == 415


async def test_late_body_is_not_awaited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_S", 0.1)
    head = b"POST /orders/messages HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nab"
    assert (await rig.raw(head)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nName: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\n" + b"Name: x\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"Name" * 30_000,
        b"GET / HTTP/9.1\r\nHost: here\r\n\r\n",
        b"GARBAGE\r\n\r\n",
    ],
)
async def test_bad_heads_are_answered_and_not_logged(
    rig: Rig, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await rig.raw(head)).startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_headers_are_limited_together(rig: Rig) -> None:
    fields = b"".join(b"Name-%d: %s\r\n" % (n, b"x" * 14_000) for n in range(5))
    head = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n" + fields + b"\r\n"
    assert (await rig.raw(head)).startswith(b"HTTP/1.1 431 ")


async def begin(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and request the health, so that the multiplexer's time limits have ended."""
    reader, writer = await asyncio.open_connection(HOST, rig.port)
    writer.write(GET_HEALTH)
    async with asyncio.timeout(10):
        await reader.readuntil(b"}")
    return reader, writer


async def test_later_heads_are_bounded_while_they_come(rig: Rig) -> None:
    reader, writer = await begin(rig)
    writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n")
    field = b"Name: %s\r\n" % (b"x" * 10_000)
    for _ in range(6):
        writer.write(field)
        await wait_a_moment()
    assert not reader.at_eof()
    writer.write(field)
    async with asyncio.timeout(10):
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_heads_behind_a_request_that_waits_are_bounded_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.Event()
    monkeypatch.setattr(Named, "handle", lambda *_: waits.wait())
    reader, writer = await begin(rig)
    writer.write(GET_HEALTH.replace(b"health", b"orders") + GET_HEALTH[:-2])
    await wait_a_moment()
    with suppress(ConnectionError):
        for _ in range(20):
            writer.write(b"Name: %s\r\n" % (b"x" * 10_000))
            await wait_a_moment()
    async with asyncio.timeout(10):
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_bodies_and_many_requests_are_no_heads(rig: Rig) -> None:
    reader, writer = await begin(rig)
    for _ in range(3):
        writer.write(
            b"POST /orders/messages HTTP/1.1\r\nHost: here\r\nContent-Length: 200000\r\n\r\n"
        )
        for _ in range(20):
            writer.write(b"x" * 10_000)
            await wait_a_moment()
        writer.write(GET_HEALTH * 20)
    async with asyncio.timeout(10):
        for number in range(63):
            status = b"HTTP/1.1 200 " if number % 21 else b"HTTP/1.1 413 "
            assert (await reader.readuntil(b"\r\n")).startswith(status)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.findall(rb"Content-Length: (\d+)", head)[0]))
    writer.close()


POST = b"POST /orders/messages HTTP/1.1\r\nHost: here\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 6\r\n" + CHUNKED + LAST_CHUNK,
        POST + CHUNKED + b"Content-Length: 5\r\n" + LAST_CHUNK,
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        POST + b"Content-Length: +5\r\n\r\nhello",
        POST + b"Content-Length: 0x5\r\n\r\nhello",
        POST + b"Content-Length: 99999999999999999999\r\n\r\nhello",
        POST + b"Transfer-Encoding: xchunked\r\n" + LAST_CHUNK,
        POST + b"Transfer-Encoding: chunked, identity\r\n" + LAST_CHUNK,
        POST + b"Transfer-Encoding: gzip, chunked\r\n" + LAST_CHUNK,
        POST + CHUNKED + b"Transfer-Encoding: identity\r\n" + LAST_CHUNK,
        POST + b"Transfer-Encoding : chunked\r\n" + LAST_CHUNK,
        POST + b"Name: x\r\n Transfer-Encoding: chunked\r\n" + LAST_CHUNK,
        POST + b"Name: x\rTransfer-Encoding: chunked\r\n" + LAST_CHUNK,
        POST + b"Name: x\0\r\nContent-Length: 0\r\n\r\n",
        POST + b"Host: there\r\nContent-Length: 0\r\n\r\n",
        POST.replace(b"\r\n", b"\n") + b"Content-Length: 0\n\n",
        POST.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n" + CHUNKED + LAST_CHUNK,
        POST + CHUNKED + b"\r\n0x5\r\nhello" + LAST_CHUNK,
        POST + CHUNKED + b"\r\n-5\r\nhello" + LAST_CHUNK,
        POST + CHUNKED + b"\r\n5;a\nb\r\nhello" + LAST_CHUNK,
        POST + CHUNKED + b"\r\n5\nhello\n0\n\n",
        POST + CHUNKED + b"\r\n5\r\nhelloXX0\r\n\r\n",
        POST + CHUNKED + b"\r\nFFFFFFFFFFFFFFFFF\r\nhello" + LAST_CHUNK,
        b"GET /health\r\n\r\n",
    ],
)
async def test_ambiguous_requests_end_the_connection(rig: Rig, request_bytes: bytes) -> None:
    """Nothing smuggled in a body is answered; nor are components disclosed."""
    found = await rig.raw(request_bytes + GET_HEALTH)
    assert len(re.findall(rb"HTTP/[01]\.[019] (?:400|501) ", found)) == 1
    assert b"healthy" not in found
    assert b"Server: Postbus\r\n" in found
    assert b"aiohttp" not in found


# --- browsers ---------------------------------------------------------------------------------


@pytest.fixture
async def guarded() -> AsyncIterator[Rig]:
    async with rig_of(names=OwnNames("test-bus", ["bus.example"])) as made:
        yield made


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:5300"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "[::1]:5300"}, 200),
        ({"Host": "test-bus"}, 200),
        ({"Host": "test-bus.servicebus.windows.net"}, 200),
        ({"Host": "BUS.example:443"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "evil@localhost"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://bus.example"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ([("Origin", "http://localhost"), ("Origin", "https://evil.example")], 403),
    ],
)
async def test_pages_of_other_hosts_are_refused_on_loopback(
    guarded: Rig, headers: dict[str, str] | list[tuple[str, str]], status: int
) -> None:
    fields = list(headers.items()) if isinstance(headers, dict) else headers
    for method, path in (("GET", "/orders"), ("POST", "/orders/messages"), ("GET", "/health")):
        assert (await guarded.ask(method, path, headers=fields))[0] == status
    upgrade = [("Upgrade", "websocket"), ("Connection", "Upgrade"), *fields]
    found = (await guarded.ask("GET", "/$servicebus/websocket", headers=upgrade))[0]
    assert found == (404 if status == 200 else 403)


async def test_elsewhere_any_name_may_lead_to_the_bus(rig: Rig) -> None:
    headers = {"Host": "balancer.example", "Origin": "https://pages.example"}
    assert (await rig.ask("GET", "/orders", headers=headers))[0] == 200


# --- authorization ------------------------------------------------------------------------------


def authorize(token: str | None, path: str = "orders", needed: Right = Right.MANAGE) -> str:
    headers = {} if token is None else {"Authorization": token}
    authorizer = HttpAuthorizer(Authorizer(RULES), "test-bus", lambda: NOW_S)
    request = make_mocked_request("GET", f"/{path}", headers=headers)
    return asyncio.run(authorizer.authorize(request, path, needed)).rule_name


def refusal(*arguments: object) -> str:
    with pytest.raises(HttpRefused) as caught:
        authorize(*arguments)  # type: ignore[arg-type]
    assert caught.value.status == 401
    assert "WWW-Authenticate" in caught.value.headers
    return caught.value.text


@pytest.mark.parametrize(
    "resource",
    [
        "https://localhost:5300",
        "http://localhost:5300/orders",
        "https://localhost/orders?api-version=2021-05",
        "sb://localhost/ORDERS/",
        "https://localhost/orders/messages",
        "localhost",
        "localhost:5300",
    ],
)
def test_token_of_every_sdk_is_good(resource: str) -> None:
    token = sas_token(resource, ROOT.name, ROOT.keys.primary, NOW_S + 60)
    path = "orders/messages" if resource.endswith("messages") else "orders"
    assert authorize(token, path) == ROOT.name


def test_fields_of_a_token_come_in_any_order() -> None:
    token = sas_token("https://here", ROOT.name, ROOT.keys.primary, NOW_S + 60)
    fields = token.removeprefix("SharedAccessSignature ").split("&")
    assert authorize("SharedAccessSignature " + "&".join(reversed(fields))) == ROOT.name


def test_names_with_odd_characters_are_paths_as_they_are() -> None:
    path = "a b%41?c"
    resource = f"https://here/{quote_plus(path).replace('+', '%20')}"
    assert authorize(sas_token(resource, ROOT.name, ROOT.keys.primary, NOW_S + 9), path)


def test_refused_tokens_have_a_reason() -> None:
    key, expiry = ROOT.keys.primary, NOW_S + 60
    assert "MissingToken" in refusal(None)
    assert "use a SAS key" in refusal("Bearer ey")
    assert "malformed" in refusal("SharedAccessSignature sr=x")
    assert "another resource" in refusal(sas_token("sb://h/other", ROOT.name, key, expiry))
    assert "does not match" in refusal(sas_token("sb://h", ROOT.name, "wrong", expiry))
    why = "The signature does not match a key of the rule"
    assert f"{why} nobody." in refusal(sas_token("sb://h", "nobody", key, expiry))
    for odd in ("x" * 51, "a\nb", "é", ""):
        assert f"{why}." in refusal(sas_token("sb://h", odd, key, expiry))
    why = refusal(sas_token("sb://h", ROOT.name, key, NOW_S))
    assert why.startswith("ExpiredToken: The token is expired. Expiration time: '")
    token = sas_token("sb://h", "sender", RULES[1].keys.primary, expiry)
    assert "'Manage' claim(s) are required" in refusal(token)
    assert authorize(token, "orders", Right.SEND) == "sender"


def test_real_time_is_the_default() -> None:
    token = sas_token("sb://h", ROOT.name, ROOT.keys.primary, int(time.time()) + 60)
    request = make_mocked_request("GET", "/orders", headers={"Authorization": token})
    authorizer = HttpAuthorizer(Authorizer(RULES), "n")
    assert asyncio.run(authorizer.authorize(request, "orders", Right.SEND)).rule_name == ROOT.name
