"""Requests of the bulk API, and rows as lists of dicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from postbus.contract.bulk import ReadableRanges, ReaderGroup
from postbus.edge.bulk.handler import BulkHandler
from tests.edge.bus_thread import BusThread
from tests.edge.http_client import Answer, HttpClient

LAST_CHUNK = b"0\r\n\r\n"
"""The end of an answer that is complete."""
JSON = {"Content-Type": "application/json"}


class BulkClient:
    """A reader of one entity."""

    def __init__(self, http: HttpClient, entity: str, sub_queue: str = "main") -> None:
        self.http = http
        self.entity = entity
        self.sub_queue = sub_queue

    async def call(self, method: str, below: str, body: object = None) -> Answer:
        content = None if body is None else json.dumps(body)
        path = f"/{self.entity}/$bulk/{below}"
        return await self.http.call(method, path, content, JSON if content else None)

    async def create(
        self, name: str = "lake", start: object = "earliest", *, kind: str = "tap"
    ) -> Answer:
        body = {"start": start, "subQueue": self.sub_queue, "kind": kind}
        return await self.call("PUT", f"groups/{name}", body)

    async def post(self, verb: str, name: str = "lake", **fields: object) -> Answer:
        return await self.call(
            "POST", f"groups/{name}/{verb}", {"subQueue": self.sub_queue, **fields}
        )

    async def ranges(self, group: str | None = None, splits: int = 1) -> ReadableRanges:
        named = "" if group is None else f"&group={group}"
        answer = await self.call("GET", f"ranges?subQueue={self.sub_queue}&splits={splits}{named}")
        assert answer.status == 200, answer.body
        return ReadableRanges.model_validate_json(answer.body)

    async def claim(self, name: str = "lake", reader: str = "test") -> ReaderGroup:
        answer = await self.post("claim", name, reader=reader)
        assert answer.status == 200, answer.body
        return group_of(answer)

    async def plan_all(self, group: ReaderGroup) -> ReaderGroup:
        """Plan to read everything that is there."""
        found = await self.ranges(group.name)
        ranges = {
            str(each.partition): [group.plan.ranges[each.partition][1], each.next_position]
            for each in found.partitions
        }
        answer = await self.post("plan", group.name, epoch=group.epoch, ranges=ranges)
        assert answer.status == 200, answer.body
        return group_of(answer)

    async def stream(
        self, partition: int, first: int, end: int, epoch: int, *, columns: str = "",
        group: str = "lake",
    ) -> Answer:  # fmt: skip
        chosen = f"&columns={columns}" if columns else ""
        return await self.call(
            "GET",
            f"rows?partition={partition}&from={first}&to={end}&group={group}&epoch={epoch}"
            f"&subQueue={self.sub_queue}{chosen}",
        )

    async def read(self, group: ReaderGroup, *, columns: str = "") -> list[dict[str, Any]]:
        """Return the rows of a plan, in order of partition and position."""
        rows: list[dict[str, Any]] = []
        for partition, (first, end) in sorted(group.plan.ranges.items()):
            answer = await self.stream(
                partition, first, end, group.epoch, columns=columns, group=group.name
            )
            assert answer.status == 200, answer.body
            rows += table_of(answer).to_pylist()
        return rows


def group_of(answer: Answer) -> ReaderGroup:
    return ReaderGroup.model_validate_json(answer.body)


def table_of(answer: Answer) -> pa.Table:
    return pa.ipc.open_stream(answer.body).read_all()


def problem_of(answer: Answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["code"]


def bodies_of(rows: Sequence[dict[str, Any]]) -> list[bytes]:
    """Return the data of each body: a section with one vbin8."""
    return [row["body"][5:] for row in rows]


def handler_of(bus: BusThread) -> BulkHandler:
    found = bus.http._handlers["bulk"]
    assert isinstance(found, BulkHandler)
    return found


async def wait_until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.01)


async def nothing_is_held(bus: BusThread) -> None:
    """Wait until all streams have given back their places, and their connection is free."""
    streams = handler_of(bus)._streams
    lock = bus._hosts[0]._store._bulk._lock
    await wait_until(lambda: not streams.used and not lock.locked())
    assert streams._of == {}


def fields_of(http: HttpClient) -> bytes:
    """Return the fields of a request without a body, the last of its connection."""
    return f"Host: localhost\r\nAuthorization: {http.token}\r\nConnection: close\r\n\r\n".encode()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection ends, in whatever way."""
    got = b""
    async with asyncio.timeout(30):
        try:
            while part := await reader.read(65_536):
                got += part
        except ConnectionError:
            pass
    return got


async def streamed(bulk: BulkClient, group: ReaderGroup) -> list[bytes]:
    """Return the bytes of each stream of a plan."""
    found = []
    for partition, (first, end) in sorted(group.plan.ranges.items()):
        answer = await bulk.stream(partition, first, end, group.epoch, group=group.name)
        assert answer.status == 200, answer.body
        found.append(answer.body)
    return found


async def reaped(bus: BusThread) -> None:
    """Delete all settled rows that may be deleted, in place of the broker's own upkeep."""

    async def reap() -> None:
        for host in bus._hosts:
            if host._upkeep is not None:
                host._upkeep.cancel()
                with suppress(asyncio.CancelledError):
                    await host._upkeep
            while host._journal is not None and await host._journal.upkeep(bus.clock()):
                pass

    await asyncio.get_running_loop().run_in_executor(None, lambda: bus.run(reap()))
