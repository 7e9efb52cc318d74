"""The client of the control API: answers of a real bus, and servers that are none."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from postbus.client.control import (
    MAX_ANSWER,
    ControlClient,
    Failure,
    RequestFailed,
    RequestRefused,
    part,
)
from postbus.contract.control import ProblemType
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "client_control", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("client")
    with controlled_bus(dsn_of(postgres_server, "client_control"), folder) as bus:
        yield bus


def client_of(bus: ControlledBus) -> ControlClient:
    return ControlClient(bus.caller.address, bus.caller.token)


async def test_definitions_are_put_listed_and_deleted(running: ControlledBus) -> None:
    async with client_of(running) as client:
        for number in range(5):
            path = f"/v1/queues/{part(f'team/orders-{number}')}"
            put = await client.put(path, {"maxDeliveryCount": 3}, managed_by="tests")
            assert put["created"]
        found = await client.all_of("/v1/queues", page=2)
        ours = [each for each in found if each["name"].startswith("team/")]
        assert [each["managedBy"] for each in ours] == ["tests"] * 5
        assert (await client.get(path))["properties"]["maxDeliveryCount"] == 3
        assert (await client.delete(path, policy="Retain"))["restorable"]


async def test_problem_has_status_type_and_detail(running: ControlledBus) -> None:
    async with client_of(running) as client:
        with pytest.raises(RequestRefused, match="there is no queue missing") as caught:
            await client.get("/v1/queues/missing")
    assert (caught.value.status, caught.value.type) == (404, ProblemType.NOT_FOUND)


async def test_wrong_token_is_refused_and_in_no_error(running: ControlledBus) -> None:
    secret = "a-token-that-nobody-issued"
    async with ControlClient(running.caller.address, secret) as client:
        with pytest.raises(RequestRefused) as caught:
            await client.get("/v1/queues")
    assert caught.value.status == 401
    assert secret not in repr(caught.value)


async def failure_at(
    url: str, trusted: ssl.SSLContext | None = None, max_answer: int = MAX_ANSWER
) -> Failure:
    async with ControlClient(url, "token", trusted, max_answer=max_answer) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.get("/v1/queues")
    return caught.value.failure


async def test_closed_port_has_no_connection() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    assert await failure_at(f"http://127.0.0.1:{port}") is Failure.NO_CONNECTION


async def test_server_without_tls_is_recognized(running: ControlledBus) -> None:
    url = running.caller.address.replace("http:", "https:")
    assert await failure_at(url) is Failure.NO_TLS


@contextmanager
def server_that_says(answer: bytes) -> Iterator[str]:
    """Read a request of each connection, send bytes and hang up."""

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with closing(connection):
                connection.recv(65_536)
                connection.sendall(answer)

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


JSON = b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", Failure.CLOSED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Failure.NOT_A_CONTROL_API),
        (b"HTTP/1.1 404 Not Found\r\n" + JSON, Failure.NOT_A_CONTROL_API),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Failure.NOT_A_CONTROL_API),
    ],
)
async def test_other_servers_are_no_control_api(answer: bytes, expected: Failure) -> None:
    with server_that_says(answer) as url:
        assert await failure_at(url) is expected


LONG = b"[" + b"1," * 40_000 + b"1]"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer(body: bytes, *headers: bytes) -> bytes:
    length = b"Content-Length: %d" % len(body)
    return b"\r\n".join([b"HTTP/1.1 200 OK", length, *headers, b"", body])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(answer(LONG), Failure.TOO_LONG, id="with its length"),
        pytest.param(
            CHUNKED + b"10000\r\n" + b"1" * 65_536 + b"\r\n", Failure.TOO_LONG, id="without an end"
        ),
        pytest.param(
            answer(gzip.compress(LONG), b"Content-Encoding: gzip"),
            Failure.NOT_A_CONTROL_API,
            id="compressed",
        ),
    ],
)
async def test_an_answer_is_not_read_beyond_its_bound(said: bytes, expected: Failure) -> None:
    with server_that_says(said) as url:
        assert await failure_at(url, max_answer=50_000) is expected


async def test_an_answer_of_many_levels_is_no_crash() -> None:
    with server_that_says(answer(b"[" * 200_000)) as url:
        assert await failure_at(url) is Failure.NOT_A_CONTROL_API


async def test_a_list_of_empty_pages_has_an_end() -> None:
    page = answer(b'{"items": [], "nextSkip": 1}', b"Connection: close")
    with server_that_says(page) as url:
        async with ControlClient(url, "token") as client:
            with pytest.raises(RequestFailed) as caught:
                await client.all_of("/v1/queues")
    assert caught.value.failure is Failure.TOO_LONG


async def test_silent_server_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postbus.client.control.ANSWER_S", 0.2)
    released = asyncio.Event()

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await failure_at(f"http://127.0.0.1:{port}") is Failure.LATE
        released.set()
