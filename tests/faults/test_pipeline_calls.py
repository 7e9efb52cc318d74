"""Kills come at the point they were asked for: what the bus and the pipeline have seen by then."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.pipeline_calls import Call, Moment, Point, Trap, relay_to

BODY = b"x" * 1_000
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + BODY
PLAN = b"POST /orders/%24bulk/groups/lake/plan HTTP/1.1\r\nContent-Length: 1000\r\n\r\n" + BODY
SETTLE = PLAN.replace(b"plan", b"settle")


@pytest.mark.parametrize(
    ("moment", "requests", "is_answered"),
    [(Moment.BEFORE, 1, False), (Moment.DURING, 1.5, False), (Moment.AFTER, 2, True)],
)
async def test_the_second_plan_is_cut_at_its_moment(
    moment: Moment, requests: float, is_answered: bool
) -> None:
    seen, fired = bytearray(), []
    ended = asyncio.Event()

    async def bus(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(10_000):
            seen.extend(part)
            if len(seen) % len(PLAN) == 0:
                writer.write(ANSWER)
        ended.set()
        writer.close()

    server = await asyncio.start_server(bus, "127.0.0.1", 0)
    async with relay_to(server.sockets[0].getsockname()[1]) as relay:
        relay.trap = Trap(Point(Call.PLAN, moment), 2, lambda: fired.append(len(seen)))
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(PLAN)
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        assert not fired
        writer.write(PLAN)
        assert await reader.read() == b""
        await asyncio.wait_for(ended.wait(), 10)
        writer.close()
    server.close()
    head = len(PLAN) - len(BODY)
    whole = int(requests)
    rest = head + len(BODY) // 2 if requests > whole else 0
    assert len(seen) == whole * len(PLAN) + rest
    assert len(fired) == 1
    assert (fired[0] == 2 * len(PLAN)) is is_answered


async def test_other_calls_pass() -> None:
    fired: list[int] = []

    async def bus(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(SETTLE))
        writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_server(bus, "127.0.0.1", 0)
    async with relay_to(server.sockets[0].getsockname()[1]) as relay:
        relay.trap = Trap(Point(Call.PLAN, Moment.BEFORE), 1, lambda: fired.append(1))
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(SETTLE)
        assert await reader.read() == ANSWER
        writer.close()
    server.close()
    assert fired == []
