"""One port for every protocol: detection of protocols, and refused connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from postbus.edge import port_multiplexer
from postbus.edge.certificates import TlsFiles, ensure_certificate, server_context
from postbus.edge.port_multiplexer import speaks_http
from postbus.edge.web.http_server import read_limited
from tests.edge.front_rig import (
    AMQP_HEADER,
    GET_HEALTH,
    HOST,
    answers_amqp,
    answers_http,
    front,
    hangs_up,
    wait_a_moment,
    wait_until,
)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the context of the server and one of its clients."""
    files = ensure_certificate(tmp_path_factory.mktemp("tls"))
    client = ssl.create_default_context(cafile=files.authority_file)
    return server_context(TlsFiles(files.certificate_file, files.key_file)), client


class Echo:
    """Answers with the body."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await read_limited(request, 1 << 20)
        return web.Response(body=body, headers={"Asked": f"{request.method} {request.path}"})


def test_first_bytes_select_the_protocol() -> None:
    assert speaks_http(b"A") is None
    assert speaks_http(b"AMQ") is None
    assert speaks_http(AMQP_HEADER) is False
    assert speaks_http(b"AMEN / HTTP/1.1\r\n") is None
    assert speaks_http(GET_HEALTH[:-1]) is None
    assert speaks_http(GET_HEALTH) is True
    assert speaks_http(b"G" * 100_000) is True  # the parser reports the error
    assert speaks_http(b"\x16\x03\x01") is False
    assert speaks_http(b"get / HTTP/1.1\r\n") is False


def test_one_port_speaks_all(
    runner: asyncio.Runner, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    server, client = contexts

    async def run() -> None:
        async with front() as listeners:
            both = await listeners.listen(HOST, 0, tls=server)
            secret = await listeners.listen(HOST, 0, is_plain=False, tls=server)
            plain = await listeners.listen(HOST, 0)
            for port, tls in ((both, None), (both, client), (secret, client), (plain, None)):
                assert await answers_amqp(port, tls)
                assert await answers_amqp(port, tls, step=3)
                assert await answers_http(port, tls)
                assert await answers_http(port, tls, step=10)

    runner.run(run())


def test_tls_port_refuses_plain_clients(
    runner: asyncio.Runner, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0, is_plain=False, tls=contexts[0])
            for first in (AMQP_HEADER, GET_HEALTH):
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(first)
                assert await hangs_up(reader)
                writer.close()
            assert await answers_http(port, contexts[1])

    runner.run(run())


def test_bodies_larger_than_the_buffers_come_and_go(
    runner: asyncio.Runner, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async def run() -> None:
        body = bytes(range(256)) * 3_000
        async with front(runtime=Echo()) as listeners, aiohttp.ClientSession() as session:
            port = await listeners.listen(HOST, 0, tls=contexts[0])
            for scheme, tls in (("http", True), ("https", contexts[1])):
                url = f"{scheme}://{HOST}:{port}/orders/messages"
                for _ in range(3):
                    async with session.post(url, data=body, ssl=tls) as answer:
                        assert await answer.read() == body
                        assert answer.headers["Asked"] == "POST /orders/messages"
                async with session.post(url, data=bytes(1 << 21), ssl=tls) as answer:
                    assert answer.status == 413
                    assert "larger than 1048576 bytes" in await answer.text()

    runner.run(run())


def test_connections_of_all_listeners_count_together(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with front(max_connections=3) as listeners:
            one, other = await listeners.listen(HOST, 0), await listeners.listen(HOST, 0)
            _, amqp = await asyncio.open_connection(HOST, one)
            amqp.write(AMQP_HEADER)
            _, http = await asyncio.open_connection(HOST, other)
            http.write(GET_HEALTH)
            _, silent = await asyncio.open_connection(HOST, one)
            await wait_until(
                lambda: listeners.connection_count == 3 and listeners.http.connection_count
            )
            for port in (one, other, one):
                reader, surplus = await asyncio.open_connection(HOST, port)
                assert await hangs_up(reader)
                surplus.close()
            listeners.resize(5_000)  # another tier
            assert await answers_http(other)
            http.close()
            await wait_until(lambda: listeners.connection_count < 3)
            assert await answers_http(other)
            amqp.close()
            silent.close()

    with caplog.at_level(logging.WARNING):
        runner.run(run())
    assert [record.message for record in caplog.records].count("too many connections") == 1


@pytest.mark.parametrize("first", [b"", b"AM", GET_HEALTH[:-2], b"\x16\x03\x01"])
def test_clients_without_first_bytes_are_disconnected(
    runner: asyncio.Runner,
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    monkeypatch: pytest.MonkeyPatch,
    first: bytes,
) -> None:
    monkeypatch.setattr(port_multiplexer, "ARRIVAL_S", 0.2)

    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0, tls=contexts[0])
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(first)
            assert await hangs_up(reader)
            writer.close()

    runner.run(run())


class BrokenContext(ssl.SSLContext):
    """Raises an error that no client should be able to cause."""

    def wrap_bio(self, *_: object, **__: object) -> ssl.SSLObject:
        raise ZeroDivisionError

    _wrap_socket = wrap_bio


async def test_an_arrival_that_breaks_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with front() as listeners:
        port = await listeners.listen(HOST, 0, tls=BrokenContext(ssl.PROTOCOL_TLS_SERVER))
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"\x16\x03\x01")
        assert await hangs_up(reader)
        writer.close()
        assert await answers_amqp(port)
    assert "accepting a connection failed" in caplog.text


def test_close_does_not_wait_for_arrivals(
    runner: asyncio.Runner, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async def run() -> None:
        async with asyncio.timeout(5), front() as listeners:
            port = await listeners.listen(HOST, 0, tls=contexts[0])
            kept = [await asyncio.open_connection(HOST, port) for _ in range(3)]
            for (_, writer), first in zip(kept, (b"", b"AM", b"\x16"), strict=True):
                writer.write(first)
            await wait_until(lambda: listeners.connection_count == 3)

    runner.run(run())


def use_up_descriptors() -> list[int]:
    made: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            made.append(os.dup(0))
    return made


def test_clients_wait_while_no_descriptor_is_left(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, open_descriptors: Callable[[], int]
) -> None:
    monkeypatch.setattr(port_multiplexer, "NO_DESCRIPTORS_S", 0.01)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0)
            assert await answers_http(port)
            await wait_until(lambda: not listeners.connection_count)
            clients = [socket.socket() for _ in range(3)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 10, limits[1]))
            spare = use_up_descriptors()
            try:
                for client in clients:
                    client.connect((HOST, port))
                    client.sendall(GET_HEALTH)
                for _ in range(5):
                    await wait_a_moment()
                assert listeners.connection_count < 3
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in spare:
                    os.close(descriptor)
            await wait_until(lambda: listeners.http.connection_count == 3)
            for client in clients:
                client.close()

    runner.run(run())


def test_port_that_is_taken_is_an_error(runner: asyncio.Runner) -> None:
    async def run() -> None:
        async with front() as listeners:
            with (
                socket.create_server((HOST, 0)) as taken,
                pytest.raises(OSError, match="in use"),
            ):
                await listeners.listen(HOST, taken.getsockname()[1])

    runner.run(run())


def test_addresses_of_a_name_share_a_port(runner: asyncio.Runner) -> None:
    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen("localhost", 0)
            for each in listeners._sockets:
                assert each.getsockname()[1] == port

    runner.run(run())


def test_descriptors_are_given_back(
    runner: asyncio.Runner,
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    open_descriptors: Callable[[], int],
) -> None:
    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0, tls=contexts[0])
            assert await answers_http(port)
            await wait_until(lambda: not listeners.connection_count)
            before = open_descriptors()
            for first in (AMQP_HEADER, GET_HEALTH, b"\x16\x03\x01\x00\x05hello", b"", b"POST"):
                for _ in range(5):
                    _, writer = await asyncio.open_connection(HOST, port)
                    writer.write(first)
                    await wait_a_moment()
                    writer.transport.abort()
            await wait_until(lambda: not listeners.connection_count)
            await wait_until(lambda: open_descriptors() <= before)

    runner.run(run())


@pytest.fixture
def open_descriptors() -> Callable[[], int]:
    return lambda: len(list(Path("/proc/self/fd").iterdir()))
