"""Faulty and hostile readers of the bulk API: a clear answer each, and others are not affected."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import aiohttp
import pytest

from postbus.broker.row_chunks import RowChunk
from postbus.edge.bulk import handler
from postbus.edge.bulk.arrow_stream import ArrowStream
from postbus.edge.bulk.handler import MAX_STREAMS
from postbus.edge.bulk.requests import BulkError, parse
from postbus.store.bulk_reads import BulkReader, Columns
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from tests.edge.bulk.bulk_client import (
    LAST_CHUNK,
    BulkClient,
    bodies_of,
    fields_of,
    group_of,
    handler_of,
    nothing_is_held,
    problem_of,
    rest_of,
    table_of,
    wait_until,
)
from tests.edge.bulk.fuzz_bulk import CHECKS, check_stream
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.http_client import HttpClient, token_of
from tests.fuzz_bounds import fuzz

GROUP = "/{queue}/$bulk/groups/lake"
ROWS = "/{queue}/$bulk/rows?group=lake&epoch=1&partition={partition}&from=0&to=9"


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)
    await nothing_is_held(bus)


async def filled(http: HttpClient, queue: str, count: int, size_bytes: int) -> str:
    """Store messages, and return the address of a stream of all."""
    bulk = BulkClient(http, queue)
    assert (await bulk.create()).status == 201
    for _ in range(count):
        assert (await http.send(queue, b"x" * size_bytes)).status == 201
    group = await bulk.plan_all(await bulk.claim())
    [(partition, (first, end))] = group.plan.ranges.items()
    return (
        f"/{queue}/$bulk/rows?group=lake&epoch={group.epoch}&partition={partition}"
        f"&from={first}&to={end}"
    )


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/{queue}/$bulk", 404, "below /{entity}/$bulk/"),
        ("GET", "/{queue}/$bulk/", 404, "below /{entity}/$bulk/"),
        ("GET", "/{queue}/$bulk/$bulk/ranges", 404, "below /{entity}/$bulk/"),
        ("GET", "/{queue}/$bulk/ranges/more", 404, "below /{entity}/$bulk/"),
        ("POST", "/{queue}/$bulk/groups/lake/expel", 404, "below /{entity}/$bulk/"),
        ("GET", "/$bulk/ranges", 400, "does not name an entity"),
        ("GET", "/nowhere/$bulk/ranges", 404, "there is no nowhere"),
        ("GET", "/{queue}/$DeadLetterQueue/$bulk/ranges", 404, "subQueue=deadLetter"),
        ("GET", "/{queue}%FF/$bulk/ranges", 400, "UTF-8"),
        ("GET", "/{queue}%00/$bulk/ranges", 400, "no name has"),
        ("GET", "/{queue}/$bulk/ranges?splits=1&splits=2", 400, "occurs twice"),
        ("GET", "/{queue}/$bulk/ranges?splits=-1", 400, "splits: must be a number"),
        ("GET", "/{queue}/$bulk/ranges?splits=9223372036854775808", 400, "must be a number"),
        ("GET", "/{queue}/$bulk/ranges?splits=%D9%A1", 400, "must be a number"),
        ("GET", "/{queue}/$bulk/ranges?splits=" + "9" * 9_000, 400, "must be a number"),
        ("GET", "/{queue}/$bulk/ranges?subQueue=scheduled", 400, "must be one of"),
        ("GET", "/{queue}/$bulk/ranges?epoch=1", 400, "not a parameter"),
        ("GET", "/{queue}/$bulk/ranges?%FF=1", 400, "not a parameter"),
        ("GET", "/{queue}/$bulk/ranges?" + "x" * 9_000, 400, "not a parameter"),
        ("GET", "/{queue}/$bulk/ranges?" + "a=1&" * 100, 400, "too many parameters"),
        ("GET", "/{queue}/$bulk/ranges?group=Lake", 400, "small letters"),
        ("GET", "/{queue}/$bulk/ranges?group=lake%0A", 400, "small letters"),
        ("GET", "/{queue}/$bulk/groups/a%2Fb", 400, "small letters"),
        ("GET", "/{queue}/$bulk/groups/..", 400, "small letters"),
        ("GET", "/{queue}/$bulk/groups/" + "x" * 129, 400, "small letters"),
        ("GET", "/{queue}/$BULK/groups/%6Cake", 404, "no reader group lake"),
        ("GET", "http://elsewhere/{queue}/$bulk/groups/lake", 404, "no reader group lake"),
        ("GET", "/{queue}/$bulk/rows", 400, "group: name the reader group"),
        ("GET", ROWS + "&columns=", 400, "columns: '' is none of"),
        ("GET", ROWS + "&columns=body,secret", 400, "columns: 'secret' is none of"),
        ("GET", ROWS + "&columns=" + "body," * 3_000, 400, "columns: '' is none of"),
        ("GET", ROWS.replace("to=9", "to="), 400, "to: must be a number"),
        ("GET", ROWS.replace("from=0", "from=10"), 400, "ends before it begins"),
        ("GET", ROWS, 404, "no reader group lake"),
        ("GET", ROWS.replace("{partition}", "9"), 400, "no partition 9"),
        ("HEAD", "/{queue}/$bulk/ranges", 405, ""),
        ("OPTIONS", GROUP, 405, "only PUT, GET, DELETE"),
        ("PATCH", GROUP, 405, "only PUT, GET, DELETE"),
        ("GET", GROUP + "/claim", 405, "only POST"),
    ],
)
async def test_addresses_are_parsed_or_refused(
    http: HttpClient, method: str, path: str, status: int, words: str
) -> None:
    queue = http.bus.queue()
    partition = str((await BulkClient(http, queue).ranges()).partitions[0].partition)
    path = path.replace("{queue}", queue).replace("{partition}", partition)
    answer = await raw(http, method, path)
    assert answer[0] == status, answer
    assert words in answer[1]
    assert words or not answer[1]


@pytest.mark.parametrize("raw_query", [b"\xff=1", b"splits=\xff", b"\xed\xa0\x80=1", b"group=\xff"])
async def test_bytes_that_are_no_text_are_refused(
    http: HttpClient, queue: str, raw_query: bytes
) -> None:
    head = f"GET /{queue}/$bulk/ranges?".encode() + raw_query + b" HTTP/1.1\r\n"
    status, text = await raw_request(http, head + fields_of(http))
    assert status == 400, text


async def test_an_encoded_dollar_sign_leads_to_no_other_api(http: HttpClient, queue: str) -> None:
    for method, path in (
        ("PUT", f"/{queue}/%24bulk/groups/lake"),
        ("POST", f"/{queue}/%24bulk/groups/lake/claim"),
        ("GET", f"/{queue}/%24bulk/ranges"),
    ):
        answer = await http.call(method, path)
        assert answer.status in (400, 401, 404, 405), (path, answer.body)
    assert problem_of(await http.call("GET", f"/{queue}/$bulk/groups/lake"))[0] == 404


async def raw(http: HttpClient, method: str, target: str) -> tuple[int, str]:
    return await raw_request(http, f"{method} {target} HTTP/1.1\r\n".encode() + fields_of(http))


async def raw_request(http: HttpClient, data: bytes) -> tuple[int, str]:
    """Send bytes; return status and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.bus.port)
    writer.write(data)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "body", "words"),
    [
        ("claim", b"[]", "body: Input should be an object"),
        ("claim", b"{", "body: Invalid JSON"),
        ("claim", b"\xff\xfe", "body: Invalid JSON"),
        ("claim", b"[" * 60_000, "body: Invalid JSON"),
        ("claim", b'{"x":' * 10_000, "body: Invalid JSON"),
        ("claim", b'{"reader": "\\ud800"}', "body: Invalid JSON"),
        ("claim", b'{"reader": "' + b"x" * 201 + b'"}', "reader: "),
        ("claim", b'{"subQueue": "scheduled"}', "subQueue: "),
        ("claim", b'{"sub_queue": "main"}', "sub_queue: "),
        ("claim", b'{"extra": 1}', "extra: "),
        ("plan", b"{}", "epoch: "),
        ("plan", b'{"epoch": 1, "ranges": {}}', "ranges: "),
        ("plan", b'{"epoch": -1, "ranges": {"0": [1, 2]}}', "epoch: "),
        ("plan", b'{"epoch": 1, "ranges": {"64": [1, 2]}}', "ranges.64"),
        ("plan", b'{"epoch": 1, "ranges": {"0": [1]}}', "ranges.0"),
        ("plan", b'{"epoch": 1, "ranges": {"0": [1, 9223372036854775808]}}', "ranges.0.1"),
        ("plan", b'{"epoch": 1, "ranges": {"0": [1, 1e400]}}', "ranges.0.1"),
        (
            "plan",
            b'{"epoch": 1, "ranges": {"0": [1, ' + b"9" * 5_000 + b"]}}",
            "number out of range",
        ),
        ("settle", b'{"epoch": 1, "number": 9223372036854775808}', "number: "),
        ("reset", b'{"start": "yesterday"}', "start"),
        ("reset", b'{"start": {"0": -1}}', "start"),
        ("reset", b'{"start": "0001-01-01T00:00:00"}', "start"),
        ("reset", b'{"start": 1e300}', "start"),
        ("reset", b"null", "body: "),
    ],
)
async def test_invalid_bodies_are_refused(
    http: HttpClient, queue: str, verb: str, body: bytes, words: str
) -> None:
    await BulkClient(http, queue).create()
    answer = await http.call("POST", f"/{queue}/$bulk/groups/lake/{verb}", body)
    assert answer.status == 400, answer.body
    assert words in json.loads(answer.body)["detail"]
    found = await http.call("GET", f"/{queue}/$bulk/groups/lake")
    assert group_of(found).plan.number == 0


@pytest.mark.parametrize(
    "start",
    ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00+23:59", 0, -1e11],
)
async def test_a_group_begins_at_any_time_of_the_calendar(
    http: HttpClient, queue: str, start: object
) -> None:
    answer = await BulkClient(http, queue).create(start=start)
    assert answer.status in (201, 400), answer.body


async def test_a_name_with_a_null_character_does_not_stop_the_partition(
    http: HttpClient, queue: str
) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    before = http.bus.reload_count(queue)
    assert (await bulk.claim(reader="a\0b")).reader == ""
    assert (await http.send(queue, "there")).status == 201
    assert http.bus.reload_count(queue) == before


async def test_bodies_are_bounded_and_plain(http: HttpClient, queue: str) -> None:
    path = f"/{queue}/$bulk/groups/lake"
    assert (await http.call("PUT", path, b" " * 70_000)).status == 413
    encoded = await http.call("PUT", path, b"{}", {"Content-Encoding": "gzip"})
    assert encoded.status == 415
    expected = await http.call("PUT", path, b'{"start": "latest"}', {"Expect": "100-continue"})
    assert expected.status == 201
    chunked = (
        f"POST {path}/claim HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: localhost\r\n"
        f"Authorization: {http.token}\r\nConnection: close\r\n\r\n"
    ).encode()
    status, text = await raw_request(http, chunked + b'10\r\n{"reader": "me"}\r\n0\r\n\r\n')
    assert (status, '"reader":"me"' in text) == (200, True), text
    smuggled = await raw_request(
        http, chunked.replace(b"\r\nHost", b"\r\nContent-Length: 3\r\nHost") + b"0\r\n\r\n"
    )
    assert smuggled[0] == 400


async def test_no_call_logs_a_token_or_a_payload(
    http: HttpClient, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    bulk = BulkClient(http, queue)
    await bulk.create()
    await http.send(queue, "the secret payload")
    group = await bulk.plan_all(await bulk.claim())
    assert len(await bulk.read(group)) == 1
    await bulk.post("plan", epoch=0, ranges={"0": [1, 2]})
    await http.call("GET", f"/{queue}/$bulk/ranges", headers={"Authorization": http.token + "x"})
    logged = " ".join(str(vars(record)) for record in http.bus.log.records)
    logged += " ".join(str(vars(record)) for record in caplog.records if record.name != "asyncio")
    assert "the secret payload" not in logged
    assert "sig=" not in logged


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_streams_of_one_key_are_limited_and_others_are_served(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = await filled(http, queue, 40, 200_000)
    answers = await asyncio.gather(*(http.call("GET", at) for _ in range(100)))
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= MAX_STREAMS // 2
    for answer in answers:
        if answer.status == 429:
            assert problem_of(answer) == (429, "TooManyReaders")
            assert int(answer.headers["Retry-After"]) > 0
        else:
            assert table_of(answer).num_rows == 40


@pytest.mark.slow
async def test_a_key_without_a_stream_finds_room_beside_one_that_never_reads(
    http: HttpClient, queue: str
) -> None:
    at = await filled(http, queue, 60, 200_000)
    sockets = [await never_reading(http, at) for _ in range(MAX_STREAMS)]
    streams = handler_of(http.bus)._streams
    await wait_until(lambda: streams.used >= MAX_STREAMS // 2)
    assert (await http.call("GET", at)).status == 429
    listener = token_of(http.bus, "listener")
    other = await http.call("GET", at, headers={"Authorization": listener})
    assert table_of(other).num_rows == 60
    for each in sockets:
        each.close()


@pytest.mark.slow
async def test_a_reader_that_never_reads_is_cut(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "WRITE_S", 0.2)
    at = await filled(http, queue, 60, 200_000)
    stalled = await never_reading(http, at, read_bytes=1)
    await nothing_is_held(http.bus)
    cut = [each for each in http.bus.log.records if "stream of rows was cut" in each.getMessage()]
    assert len(cut) == 1
    stalled.close()


@pytest.mark.slow
async def test_readers_that_hang_up_give_everything_back(http: HttpClient, queue: str) -> None:
    at = await filled(http, queue, 60, 200_000)
    for _ in range(3 * MAX_STREAMS):
        stalled = await never_reading(http, at, read_bytes=1)
        stalled.close()
    await nothing_is_held(http.bus)
    assert table_of(await http.call("GET", at)).num_rows == 60


async def never_reading(http: HttpClient, at: str, read_bytes: int = 0) -> socket.socket:
    """Open a stream with a small window and read nothing, or just its beginning."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", http.bus.port))
    await loop.sock_sendall(connection, f"GET {at} HTTP/1.1\r\n".encode() + fields_of(http))
    if read_bytes:
        await loop.sock_recv(connection, read_bytes)
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_a_stream_ends_with_the_right_to_read(http: HttpClient, queue: str, how: str) -> None:
    at = await filled(http, queue, 60, 200_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.bus.port, limit=4_096)
    writer.write(f"GET {at} HTTP/1.1\r\n".encode() + fields_of(http))
    got = await reader.readexactly(1_000)
    if how == "expired":
        http.bus.real_shift_s = 1_000_000.0
    else:
        http.bus.set_rules(*RULES[1:])
    try:
        got += await rest_of(reader)
        assert not got.endswith(LAST_CHUNK)
        assert len(got) < 60 * 200_000
        await nothing_is_held(http.bus)
    finally:
        http.bus.set_rules(*RULES)
        writer.close()


@pytest.mark.slow
async def test_an_error_of_ours_in_the_middle_cuts_the_stream(
    http: HttpClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer there would be read as rows."""
    at = await filled(http, queue, 20, 200_000)
    batch = ArrowStream.batch
    made = 0

    def failing(stream: ArrowStream, chunk: RowChunk) -> memoryview:
        nonlocal made
        made += 1
        if made == 2:
            raise RuntimeError("says the test")
        return batch(stream, chunk)

    monkeypatch.setattr(ArrowStream, "batch", failing)
    status, got = await cut_answer(http, at)
    assert status == 200
    assert not got.endswith(LAST_CHUNK)
    assert b"HTTP/1.1 500" not in got
    assert len(http.bus.log.errors()) == 1
    http.bus.log.records.clear()


async def cut_answer(http: HttpClient, at: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.bus.port)
    writer.write(f"GET {at} HTTP/1.1\r\n".encode() + fields_of(http))
    head = await reader.readuntil(b"\r\n\r\n")
    got = await rest_of(reader)
    writer.close()
    return int(head.split()[1]), got


@pytest.mark.slow
async def test_a_stream_is_cut_when_the_store_fails_and_the_next_one_is_whole(
    http: HttpClient, queue: str
) -> None:
    at = await filled(http, queue, 90, 200_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.bus.port, limit=4_096)
    writer.write(f"GET {at} HTTP/1.1\r\n".encode() + fields_of(http))
    await reader.readuntil(b"\r\n\r\n")
    read = BulkReader.read
    store = http.bus._hosts[0]._store

    async def without_connection(*arguments: Any, **more: Any) -> Columns:
        raise StoreUnavailable("says the test")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(BulkReader, "read", without_connection)
        assert not (await rest_of(reader)).endswith(LAST_CHUNK)
        refused = await http.call("GET", at)
        assert problem_of(refused) == (503, "Unavailable")
        assert int(refused.headers["Retry-After"]) > 0
    writer.close()
    assert BulkReader.read is read
    await asyncio.get_running_loop().run_in_executor(None, _end_connection, http.bus, store)
    assert table_of(await http.call("GET", at)).num_rows == 90


def _end_connection(bus: BusThread, store: Store) -> None:
    """End the connection for reads of ranges, as its server does when it restarts."""

    async def end() -> None:
        async with store.bulk() as connection:
            connection.terminate()

    bus.run(end())


async def test_a_reader_without_the_right_sees_nothing(http: HttpClient, queue: str) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    await http.send(queue, "one")
    group = await bulk.plan_all(await bulk.claim())
    [(partition, (first, end))] = group.plan.ranges.items()
    answer = await bulk.stream(partition, first, end, group.epoch)
    assert (answer.headers["Server"], answer.headers["Cache-Control"]) == ("Postbus", "no-store")
    http.token = token_of(http.bus, "sender")
    assert (await bulk.stream(partition, first, end, group.epoch)).status == 401
    http.token = token_of(http.bus, "listener")
    assert bodies_of(await bulk.read(group)) == [b"one"]
    assert (await bulk.call("DELETE", "groups/lake")).status == 401
    assert (await bulk.create("other")).status == 401
    assert (await bulk.post("reset", start="earliest")).status == 401


def test_a_refusal_that_cites_what_is_no_text_can_be_sent() -> None:
    """A parser may pass bytes that are no UTF-8 on as lone surrogates."""
    with pytest.raises(BulkError) as caught:
        parse("GET", "/orders/$bulk/ranges?\udcff=1")
    answer = caught.value.answer()
    assert answer.status == 400
    assert answer.text is not None
    assert json.loads(answer.text)["detail"] == "?: is not a parameter of this operation"


@pytest.mark.slow
def test_streams_do_not_import_pandas() -> None:
    """It would be imported in the event loop, and stop it for 0.4 s."""
    program = (
        "import random, sys; from tests.edge.bulk.fuzz_bulk import made_chunk;"
        "from postbus.contract.bulk import ROW_COLUMNS;"
        "from postbus.edge.bulk.arrow_stream import ArrowStream, load_arrow;"
        "load_arrow(); stream = ArrowStream(ROW_COLUMNS, {});"
        "[stream.batch(made_chunk(random.Random(n))[0]) for n in range(20)];"
        "sys.exit('pandas' in sys.modules)"
    )
    assert find_spec("pandas") is not None, "else this shows nothing"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
def test_fuzzed_requests_are_refused_and_rows_are_read_as_they_were() -> None:
    check_stream(random.Random(0))  # imports Arrow, which takes longer than any input
    tried, accepted = fuzz(CHECKS, seconds=10, seed=7)
    assert tried > 600
    assert accepted > tried / 3
