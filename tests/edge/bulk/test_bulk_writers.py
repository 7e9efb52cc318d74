"""Writers: messages that are staged invisibly and published as a batch, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusReceivedMessage

from postbus.broker import writers
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.contract.bulk import MAX_STAGE_BYTES, MAX_STAGED
from postbus.edge.bulk.writers import MAX_SINGLE_BYTES
from postbus.message.codec import encode_value
from postbus.store.errors import StoreUnavailable
from tests.edge.bulk.bulk_client import problem_of, wait_until
from tests.edge.bulk.writer_client import WriterClient, message, sequence
from tests.edge.bus_thread import BusThread
from tests.edge.http_client import HttpClient, token_of


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)
    assert not bus.listener.inflight.reading.used


@pytest.fixture
def writer(http: HttpClient, queue: str) -> WriterClient:
    return WriterClient(http, queue)


async def bodies(http: HttpClient, queue: str, count: int) -> list[bytes]:
    """Return and delete messages."""
    return [(await http.take(queue, 5)).body for _ in range(count)]


async def test_staged_messages_are_invisible_until_they_are_published_once(
    http: HttpClient, queue: str, writer: WriterClient
) -> None:
    first = await writer.stage(message(b"one", "1"), message(b"two", "2"))
    second = await writer.stage(message(b"three"))
    assert http.bus.counts(queue).active == 0
    published = await writer.publish(7, first, second)
    assert published == {
        "writer": "loader", "batch": 7, "messages": 3, "left": 0, "isDone": True, "waitsFor": "",
    }  # fmt: skip
    assert await writer.publish(7, first, second) == published
    assert await writer.publish(7) == published, "the stages of a repetition do not matter"
    assert http.bus.counts(queue).active == 3
    assert await bodies(http, queue, 3) == [b"one", b"two", b"three"]
    shown = await writer.call("GET")
    assert json.loads(shown.body) == published


async def test_stages_arrive_in_the_order_in_which_they_are_published(
    http: HttpClient, queue: str, writer: WriterClient
) -> None:
    stages = [await writer.stage(message(b"%d" % n)) for n in range(4)]
    await writer.publish(1, *reversed(stages))
    assert await bodies(http, queue, 4) == [b"3", b"2", b"1", b"0"]


async def test_an_older_batch_is_stale_and_changes_nothing(
    http: HttpClient, queue: str, writer: WriterClient
) -> None:
    await writer.publish(5, await writer.stage(message(b"new")))
    late = await writer.stage(message(b"old"))
    refused = await writer.publish_raw(4, [late])
    assert problem_of(refused) == (409, "StaleWriter")
    assert "batch 5" in json.loads(refused.body)["detail"]
    assert http.bus.counts(queue).active == 1
    await writer.publish(6, late)
    assert http.bus.counts(queue).active == 2


async def test_a_batch_without_messages_is_noted(writer: WriterClient) -> None:
    assert (await writer.publish(3))["isDone"]
    assert problem_of(await writer.publish_raw(2, [])) == (409, "StaleWriter")


async def test_writers_of_an_entity_do_not_know_each_other(
    http: HttpClient, queue: str, writer: WriterClient
) -> None:
    other = WriterClient(http, queue, "other")
    stage = await writer.stage(message(b"mine"))
    refused = await other.publish_raw(1, [stage])
    assert problem_of(refused) == (410, "StagesGone")
    assert await other.abort(stage) == 0
    await other.publish(9)
    assert (await writer.publish(1, stage))["messages"] == 1
    assert http.bus.counts(queue).active == 1


async def test_an_aborted_stage_cannot_be_published(
    http: HttpClient, queue: str, writer: WriterClient
) -> None:
    kept, gone = await writer.stage(message(b"kept")), await writer.stage(message(b"gone"))
    assert await writer.abort(gone, gone + 1) == 1
    refused = await writer.publish_raw(1, [kept, gone])
    assert problem_of(refused) == (410, "StagesGone")
    assert http.bus.counts(queue).active == 0
    await writer.publish(1, kept)
    assert await writer.abort(kept) == 0
    assert http.bus.counts(queue).active == 1


async def test_a_batch_waits_for_a_full_target_and_nothing_is_lost(
    http: HttpClient, bus: BusThread
) -> None:
    queue = bus.queue()
    writer = WriterClient(http, queue)
    stage = await writer.stage(*[message(b"%d" % n) for n in range(600)])
    bus.change(queue, status="SendDisabled")
    publishing = asyncio.create_task(writer.publish(1, stage))
    waiting = WriterClient(http, queue)
    while True:
        shown = json.loads((await waiting.call("GET")).body)
        if shown.get("waitsFor"):
            break
    assert (shown["left"], shown["isDone"]) == (600, False)
    assert "send-disabled" in shown["waitsFor"]
    assert problem_of(await waiting.publish_raw(2, [])) == (429, "WriterBusy")
    bus.change(queue, status="Active")
    await publishing
    await wait_until(lambda: bus.counts(queue).active == 600)
    assert (await writer.publish(1))["isDone"]
    assert (await bodies(http, queue, 600)) == [b"%d" % n for n in range(600)]


async def test_a_batch_goes_on_after_its_partition_was_loaded_again(
    http: HttpClient, bus: BusThread
) -> None:
    queue = bus.queue()
    writer = WriterClient(http, queue)
    stages = [
        await writer.stage(*[message(b"%d" % (100 * s + n)) for n in range(100)]) for s in range(3)
    ]
    bus.change(queue, status="SendDisabled")
    await writer.publish_raw(1, stages)
    bus.reload(queue)
    bus.change(queue, status="Active")
    await wait_until(lambda: bus.counts(queue).active == 300)
    assert (await bodies(http, queue, 300)) == [b"%d" % n for n in range(300)]


async def test_sessions_duplicates_topics_and_schedules_hold_as_for_a_send(
    http: HttpClient, bus: BusThread
) -> None:
    sessions = bus.queue(requiresSession=True)
    writer = WriterClient(http, sessions)
    refused = await writer.stage_raw(sequence([message(b"a", session_id="s"), message(b"b")]))
    assert problem_of(refused) == (400, "InvalidRequest")
    assert json.loads(refused.body)["detail"].startswith("message 1: ")
    await writer.publish(
        1, await writer.stage(*[message(b"%d" % n, session_id="s") for n in range(5)])
    )

    def received() -> list[ServiceBusReceivedMessage]:
        with (
            bus.client() as client,
            client.get_queue_receiver(sessions, session_id=NEXT_AVAILABLE_SESSION) as receiver,
        ):
            return receiver.receive_messages(5, max_wait_time=5)

    found = await asyncio.to_thread(received)
    assert [str(each) for each in found] == ["0", "1", "2", "3", "4"]

    once = bus.queue(requiresDuplicateDetection=True)
    writer = WriterClient(http, once)
    await writer.publish(1, await writer.stage(message(b"a", "id"), message(b"b", "id")))
    await writer.publish(2, await writer.stage(message(b"c", "id"), message(b"d", "new")))
    assert await bodies(http, once, 2) == [b"a", b"d"]

    topic, subscription = bus.topic(), "all"
    path = f"{topic}/Subscriptions/{subscription}"
    bus.subscription(topic, subscription)
    writer = WriterClient(http, topic)
    await writer.publish(1, await writer.stage(message(b"to all")))
    assert bus.counts(path).active == 1
    refused = await WriterClient(http, path).stage_raw(sequence([message(b"x")]))
    assert problem_of(refused) == (409, "NotAllowed")

    later = bus.queue()
    writer = WriterClient(http, later)
    due_ms = bus.clock() + 3_600_000
    await writer.publish(1, await writer.stage(message(b"later", scheduled_ms=due_ms)))
    assert (bus.counts(later).active, bus.counts(later).scheduled) == (0, 1)


async def test_partitioned_entity_takes_each_message_once(http: HttpClient, bus: BusThread) -> None:
    spread = bus.queue(enablePartitioning=True)
    writer = WriterClient(http, spread)
    keyed = [message(b"k%d" % n, key=f"key {n % 5}") for n in range(50)]
    stage = await writer.stage(*keyed, *[message(b"%d" % n) for n in range(50)])
    published = await writer.publish(1, stage)
    assert (published["messages"], published["isDone"]) == (100, True)
    await writer.publish(1, stage)
    got = await bodies(http, spread, 100)
    assert sorted(got) == sorted([b"k%d" % n for n in range(50)] + [b"%d" % n for n in range(50)])
    refused = await writer.stage_raw(sequence([message(b"x", session_id="a", key="b")]))
    assert problem_of(refused) == (409, "NotAllowed")
    assert json.loads(refused.body)["detail"].startswith("message 0: ")


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (b"", 400, "no message"),
        (b"\0\0", 400, "message 0: the sequence ends before it"),
        (b"\0\0\0\x09abc", 400, "message 0: the sequence ends before it"),
        (b"\xff\xff\xff\xff" + bytes(40), 400, "message 0"),
        (sequence([message(b"x"), b"\x00\x53\x99\x00"]), 400, "message 1: "),
        (sequence([message(b"x"), message(b"y")[:-1]]), 400, "message 1: "),
        (sequence([b"\x00\x53\x77" + encode_value("v"), b"\x00\x53\x77"]), 400, "message 1: "),
    ],
    ids=["nothing", "half a length", "cut", "huge length", "section", "cut message", "cut value"],
)
async def test_malformed_sequence_is_refused_as_a_whole(
    http: HttpClient, queue: str, writer: WriterClient, data: bytes, status: int, text: str
) -> None:
    refused = await writer.stage_raw(data)
    assert refused.status == status
    assert text in json.loads(refused.body)["detail"]
    assert await writer.abort(*range(3)) == 0


async def test_size_of_a_stage_is_limited(http: HttpClient, writer: WriterClient) -> None:
    many = await writer.stage_raw(sequence([message(b"")] * (MAX_STAGED + 1)))
    assert problem_of(many) == (413, "MessageTooLarge")
    large = await writer.stage_raw(sequence([message(bytes(300_000))]))
    assert problem_of(large) == (413, "MessageTooLarge")
    assert json.loads(large.body)["detail"].startswith("message 0: ")
    together = await writer.stage_raw(bytes(MAX_STAGE_BYTES + (1 << 20)))
    assert together.status == 413
    other = await writer.stage_raw(sequence([message(b"x")]), "application/json")
    assert problem_of(other) == (415, "InvalidRequest")


@pytest.mark.parametrize(
    "body",
    [
        '{"batch": -1, "stages": []}',
        '{"batch": 1, "stages": [1, 1]}',
        '{"batch": 1}',
        '{"batch": 1.5, "stages": []}',
        '{"batch": 1, "stages": [], "rate": 0}',
        '{"batch": 9223372036854775808, "stages": []}',
        '{"batch": 1, "stages": ["x"]}',
        '{"batch": 1, "stages": [], "more": 1}',
        "[]",
        "",
    ],
)
async def test_malformed_batch_is_refused(writer: WriterClient, body: str) -> None:
    refused = await writer.call("POST", "/publish", body, "application/json")
    assert problem_of(refused) == (400, "InvalidRequest")
    assert problem_of(await writer.call("GET")) == (404, "WriterNotFound")


async def test_names_and_methods_that_do_not_exist_are_refused(
    http: HttpClient, queue: str, writer: WriterClient
) -> None:
    assert (await WriterClient(http, queue, "Loader").call("GET")).status == 400
    assert (await writer.call("PUT")).status == 405
    assert (await writer.call("POST", "/claim")).status == 404
    assert (await WriterClient(http, "nowhere").call("GET")).status == 404
    assert problem_of(await writer.call("DELETE")) == (404, "WriterNotFound")


async def test_forgotten_writer_begins_again(
    http: HttpClient, queue: str, writer: WriterClient
) -> None:
    await writer.publish(5, await writer.stage(message(b"a")))
    left = await writer.stage(message(b"never published"))
    assert (await writer.call("DELETE")).status == 204
    assert problem_of(await writer.publish_raw(5, [left])) == (410, "StagesGone")
    await writer.publish(0, await writer.stage(message(b"b")))
    assert await bodies(http, queue, 2) == [b"a", b"b"]


async def test_queue_that_awaits_messages_is_not_empty(http: HttpClient, bus: BusThread) -> None:
    queue = bus.queue()
    writer = WriterClient(http, queue)
    stage = await writer.stage(message(b"accepted"))
    bus.change(queue, status="SendDisabled")
    await writer.publish_raw(1, [stage])
    with pytest.raises(DirectoryRefusal, match="holds 1 message"):
        bus.run(bus._directory.delete_if_empty(queue))
    bus.change(queue, status="Active")
    await wait_until(lambda: bus.counts(queue).active == 1)
    assert await bodies(http, queue, 1) == [b"accepted"]
    assert (await writer.publish(1))["isDone"]
    assert bus.run(bus._directory.delete_if_empty(queue))


async def test_right_of_a_writer(http: HttpClient, bus: BusThread, queue: str) -> None:
    writer = WriterClient(http, queue)
    http.token = token_of(bus, "listener")
    assert (await writer.stage_raw(sequence([message(b"x")]))).status == 401
    assert (await writer.publish_raw(1, [])).status == 401
    http.token = token_of(bus, "sender")
    await writer.publish(1, await writer.stage(message(b"x")))
    assert (await writer.call("DELETE")).status == 401


async def test_staged_messages_count_in_the_quota(
    http: HttpClient, queue: str, writer: WriterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables, _ = http.bus.writers._parts[home(http, queue)]
    held = tables.held_bytes

    async def nearly_full(entity_no: int) -> tuple[int, int]:
        stages, size_bytes = await held(entity_no)
        return stages, size_bytes + (1 << 30) - 3_000

    monkeypatch.setattr(tables, "held_bytes", nearly_full)
    stage = await writer.stage(message(bytes(1_000)))
    refused = await writer.stage_raw(sequence([message(b"small"), message(bytes(2_000))]))
    assert problem_of(refused) == (403, "QuotaExceeded")
    assert json.loads(refused.body)["detail"].startswith("message 1: ")
    assert await writer.abort(stage) == 1
    await writer.stage(message(b"small"), message(bytes(2_000)))


async def test_messages_of_a_stage_count_together(
    http: HttpClient, queue: str, writer: WriterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables, _ = http.bus.writers._parts[home(http, queue)]

    async def nearly_full(_: int) -> tuple[int, int]:
        return 0, (1 << 30) - 3_000

    monkeypatch.setattr(tables, "held_bytes", nearly_full)
    monkeypatch.setattr(writers, "PARSED_AT_ONCE", 1)
    refused = await writer.stage_raw(sequence([message(bytes(900))] * 4))
    assert problem_of(refused) == (403, "QuotaExceeded")
    assert json.loads(refused.body)["detail"].startswith("message 3: ")


async def test_batch_whose_commit_is_not_known_is_sent_without_a_repetition(
    http: HttpClient, queue: str, writer: WriterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables, _ = http.bus.writers._parts[home(http, queue)]
    publish = tables.publish

    async def lose_the_answer(*arguments: Any) -> Any:
        monkeypatch.setattr(tables, "publish", publish)
        await publish(*arguments)
        raise StoreUnavailable("the connection was lost")

    monkeypatch.setattr(tables, "publish", lose_the_answer)
    stage = await writer.stage(message(b"accepted, perhaps"))
    refused = await writer.publish_raw(1, [stage])
    assert problem_of(refused) == (503, "Unavailable")
    await wait_until(lambda: http.bus.counts(queue).active == 1)
    assert (await writer.publish(1, stage))["isDone"]
    assert http.bus.counts(queue).active == 1


async def test_publishing_that_failed_leaves_no_trace(
    http: HttpClient, queue: str, writer: WriterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables, _ = http.bus.writers._parts[home(http, queue)]
    publish = tables.publish

    async def fail(*_: Any) -> Any:
        monkeypatch.setattr(tables, "publish", publish)
        raise StoreUnavailable("the connection was lost")

    monkeypatch.setattr(tables, "publish", fail)
    stage = await writer.stage(message(b"never accepted"))
    assert problem_of(await writer.publish_raw(1, [stage])) == (503, "Unavailable")
    assert problem_of(await writer.call("GET")) == (404, "WriterNotFound")

    async def is_deleted() -> bool:
        try:
            return await http.bus._directory.delete_if_empty(queue)
        except DirectoryRefusal:
            return False

    await wait_until(lambda: http.bus.run(is_deleted()))


async def test_stage_is_refused_while_the_bus_cannot_take_messages(
    http: HttpClient, queue: str, writer: WriterClient
) -> None:
    stage = await writer.stage(message(b"before"))
    http.bus.change(queue, status="SendDisabled")
    refused = await writer.stage_raw(sequence([message(b"x")]))
    assert problem_of(refused) == (409, "NotAllowed")
    http.bus.change(queue, status="Active")
    await writer.publish(1, stage)


async def test_large_message_is_alone_in_its_stage(premium_bus: BusThread) -> None:
    queue = premium_bus.queue(max_message_size_in_kilobytes=102_400)
    body = bytes(range(256)) * (30 << 12)
    async with aiohttp.ClientSession() as session:
        http = HttpClient(premium_bus, session)
        writer = WriterClient(http, queue)
        refused = await writer.stage_raw(sequence([message(body), message(b"x")]))
        assert problem_of(refused) == (413, "MessageTooLarge")
        assert (await writer.publish(1, await writer.stage(message(body))))["messages"] == 1
        assert (await http.take(queue, 30)).body == body
        refused = await writer.stage_raw(sequence([message(bytes(MAX_SINGLE_BYTES))]))
        assert refused.status == 413


def home(http: HttpClient, queue: str) -> int:
    entry = http.bus._directory.find(queue)
    assert entry is not None
    return entry.home_partition
