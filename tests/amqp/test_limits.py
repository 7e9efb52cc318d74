"""Limits of one connection."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from postbus.amqp import conditions
from postbus.amqp.events import LinkDetached, SessionEnded
from postbus.amqp.limits import Limits
from postbus.message.codec import Described, Uint, Ulong, Ushort
from tests.amqp.wire import ACCEPTED as ACCEPTED_VALUE
from tests.amqp.wire import (
    ATTACH,
    BASE,
    BEGIN,
    DETACH,
    DISPOSITION,
    END,
    SOURCE,
    TARGET,
    TRANSFER,
    Client,
    error_of,
    frame,
    performative,
)


def test_frame_size() -> None:
    client = Client(Limits(max_frame_bytes=512)).open()
    client.begin()
    client.sender()
    body = performative(TRANSFER, Uint(0), Uint(0), b"t")
    client.feed(frame(0, body + b"x" * (512 - 8 - len(body))))
    assert len(client.events) == 1
    client.feed(b"\x00\x00\x02\x01")
    assert not client.engine.is_closed
    client.feed(b"\x02\x00\x00\x00")  # the header alone is enough
    client.expect_closed(conditions.FRAMING_ERROR)


def test_channel_max() -> None:
    client = Client(Limits(channel_max=3)).open()
    client.begin(3)
    client.send(BEGIN, None, Uint(0), Uint(1), Uint(1), channel=4)
    client.expect_closed(conditions.FRAMING_ERROR)


def test_channel_max_of_the_peer() -> None:
    client = Client().authenticate()
    client.send(0x10, "me", None, None, Ushort(1))
    client.engine.data_to_send()
    client.begin(0)
    client.begin(1)
    client.send(BEGIN, None, Uint(0), Uint(1), Uint(1), channel=2)
    client.expect_closed(conditions.RESOURCE_LIMIT_EXCEEDED)


def test_handle_max() -> None:
    client = Client(Limits(handle_max=3)).open()
    client.begin()
    client.receiver("a", 3)
    client.send(ATTACH, "b", Uint(4), True, None, None, SOURCE, TARGET)
    client.expect_closed(conditions.FRAMING_ERROR)


def test_handle_max_of_the_peer() -> None:
    client = Client().open()
    client.begin(handle_max=1)
    client.receiver("a", 0)
    client.receiver("b", 1)
    client.send(ATTACH, "c", Uint(2), True, None, None, SOURCE, TARGET)
    (event,) = client.events
    assert isinstance(event, SessionEnded)
    assert error_of(client.reply(END).fields[0])[0] == conditions.RESOURCE_LIMIT_EXCEEDED


def test_links_of_a_connection_are_refused_one_by_one() -> None:
    client = Client(Limits(max_links=2)).open()
    client.begin(0)
    client.begin(1)
    link = client.receiver("a", 0)
    client.receiver("b", 0, channel=1)
    assert client.send(ATTACH, "c", Uint(1), True, None, None, SOURCE, TARGET) == []
    attach, detach = client.replies()
    assert (attach.code, detach.code) == (ATTACH, DETACH)
    assert error_of(detach.fields[2])[0] == conditions.RESOURCE_LIMIT_EXCEEDED
    assert client.engine.link_count == 2
    link.detach()
    client.receiver("d", 2)
    client.send(END, channel=1)
    assert client.engine.link_count == 1
    client.receiver("e", 3)
    client.engine.close()
    assert client.engine.link_count == 0


@pytest.mark.parametrize("field", ["name", "source", "target"])
def test_a_link_that_would_keep_much_is_refused(field: str) -> None:
    client = Client().open()
    client.begin()
    long = "n" * 4_096
    source = Described(Ulong(0x28), [long]) if field == "source" else SOURCE
    target = Described(Ulong(0x29), [long]) if field == "target" else TARGET
    name = long if field == "name" else "a"
    assert client.send(ATTACH, name, Uint(0), True, None, None, source, target) == []
    attach, detach = client.replies()
    assert (attach.code, detach.code) == (ATTACH, DETACH)
    assert error_of(detach.fields[2])[0] == conditions.RESOURCE_LIMIT_EXCEEDED
    assert client.engine.link_count == 0
    client.receiver("n" * 3_000, 0)
    assert client.engine.link_count == 1


def test_unfinished_deliveries_are_limited_over_all_links() -> None:
    client = Client(Limits(max_message_bytes=1_000, max_partial_messages=3)).open()
    client.begin()
    for handle in range(4):
        client.sender(f"s{handle}", handle, size=1_000)
    for handle in range(3):
        assert client.transfer(handle, b"x" * 1_000, handle=handle, more=True) == []
    client.transfer(3, b"x", handle=3, more=True)
    (event,) = client.events
    assert isinstance(event, LinkDetached)
    assert event.error is not None
    assert event.error.condition == conditions.RESOURCE_LIMIT_EXCEEDED
    assert client.engine.partial_bytes == 3_000
    assert len(client.transfer(0, b"", handle=0)) == 1
    assert client.engine.partial_bytes == 2_000
    client.send(DETACH, Uint(1), True)
    assert client.engine.partial_bytes == 1_000
    client.send(END)
    assert client.engine.partial_bytes == 0


@pytest.mark.slow
def test_endless_empty_frames_of_a_delivery_take_no_memory() -> None:
    client = Client().open()
    client.begin()
    client.sender()
    part = frame(0, performative(TRANSFER, Uint(0), Uint(0), b"t", Uint(0), False, True))
    client.feed(part)
    tracemalloc.start()
    for _ in range(20):
        assert client.feed(part * 500) == []
        client.engine.data_to_send()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.slow
def test_wide_dispositions_over_and_over_take_bounded_time() -> None:
    client = Client(Limits(max_frame_bytes=65_536)).open()
    client.begin(window=100_000)
    link = client.receiver(credit=20_000)
    client.flow(window=100_000)
    for number in range(20_000):
        link.send(number.to_bytes(16, "big"), (b"m",), is_settled=False)
    client.engine.data_to_send()
    wide = frame(
        0,
        performative(DISPOSITION, True, Uint(BASE), Uint(BASE + 2**31 - 1), False, ACCEPTED_VALUE),
    )
    started = time.perf_counter()
    (event,) = client.feed(wide)
    assert len(event.tags) == 20_000  # type: ignore[union-attr]
    for _ in range(100):
        client.feed(wide)
        assert client.events == []
    assert time.perf_counter() - started < 5
