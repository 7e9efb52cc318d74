"""What stands between a pipeline and its bus, and kills at the n-th call of a kind.

Kills at exact points need no switch in the product: a request of the bulk API shows where a batch
is. The SDK's clients connect to the bus itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import NamedTuple
from urllib.parse import unquote

CHUNK = 64 * 1024
MAX_HEAD = 64 * 1024


class Call(Enum):
    """A request of the bulk API, or of the control API to resend, by the end of its path."""

    PLAN = r"/\$bulk/groups/[^/]+/plan"
    READ = r"/\$bulk/rows"
    STAGE = r"/\$bulk/writers/[^/]+/stage"
    PUBLISH = r"/\$bulk/writers/[^/]+/publish"
    REJECT = r"/\$bulk/groups/[^/]+/reject"
    SETTLE = r"/\$bulk/groups/[^/]+/settle"
    RESEND = r"/v1/messages/resend"


class Moment(Enum):
    """Of a call: before the bus sees it, half of it (of the rows, if they are read), or when the
    bus has answered and the pipeline has not heard of it.
    """

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


class Point(NamedTuple):
    """A moment of a call."""

    call: Call
    moment: Moment

    def __str__(self) -> str:
        return f"{self.moment.value} {self.call.name.lower()}"


class Trap:
    """A kill at a point, armed for the n-th call. `fire` ends the victim and must not wait."""

    def __init__(self, point: Point, count: int, fire: Callable[[], None]) -> None:
        self.point = point
        self.sprung = asyncio.Event()
        self._left = count
        self._fire = fire

    def counts(self, call: Call | None) -> bool:
        """Return whether this call is the one."""
        if call is not self.point.call or self.sprung.is_set():
            return False
        self._left -= 1
        return self._left == 0

    def spring(self) -> None:
        self._fire()
        self.sprung.set()


class Relay:
    """Carries HTTP connections of a pipeline to the port of a broker, as long as there is one."""

    def __init__(self, broker_port: int) -> None:
        self.port = 0
        self.trap: Trap | None = None
        self._broker_port = broker_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            from_bus, to_bus = await asyncio.open_connection("127.0.0.1", self._broker_port)
            await _Carried(self, reader, writer, from_bus, to_bus).carry()
        writer.transport.abort()

    def trap_of(self, call: Call | None) -> Trap | None:
        return self.trap if self.trap is not None and self.trap.counts(call) else None


class _Carried:
    """A connection, whose requests follow one another."""

    def __init__(
        self,
        relay: Relay,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_bus: asyncio.StreamReader,
        to_bus: asyncio.StreamWriter,
    ) -> None:
        self._relay = relay
        self._reader = reader
        self._writer = writer
        self._from_bus = from_bus
        self._to_bus = to_bus
        self._of_answer: Trap | None = None

    async def carry(self) -> None:
        answers = asyncio.create_task(self._carry_answers())
        try:
            while await self._carry_request():
                pass
        finally:
            answers.cancel()
            self._to_bus.transport.abort()

    async def _carry_request(self) -> bool:
        """Carry a request; return False when the victim is dead."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        left = length_of(head)
        trap = self._relay.trap_of(call_of(head))
        if trap is not None and trap.point.moment is Moment.BEFORE:
            trap.spring()
            return False
        is_cut = trap is not None and trap.point.moment is Moment.DURING and left > 1
        if trap is not None and not is_cut:
            self._of_answer = trap
        self._to_bus.write(head)
        end = left // 2 if is_cut else 0
        while left > end:
            part = await self._reader.read(min(CHUNK, left - end))
            if not part:
                return False
            self._to_bus.write(part)
            await self._to_bus.drain()
            left -= len(part)
        if trap is not None and is_cut:
            trap.spring()
            return False
        return True

    async def _carry_answers(self) -> None:
        with suppress(OSError):
            while part := await self._from_bus.read(CHUNK):
                trap, self._of_answer = self._of_answer, None
                if trap is not None:
                    if trap.point.moment is Moment.DURING:
                        self._writer.write(part[: len(part) // 2])
                        await self._writer.drain()
                    trap.spring()
                    break
                self._writer.write(part)
                await self._writer.drain()
        self._writer.transport.abort()


def call_of(head: bytes) -> Call | None:
    """Return the call of a request's head."""
    target = unquote(head.split(b" ", 2)[1].decode("ascii")).partition("?")[0]
    for call in Call:
        if re.search(f"{call.value}$", target):
            return call
    return None


def length_of(head: bytes) -> int:
    """Return the length of a request's body, in bytes."""
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)\r\n", head)
    return int(found[1]) if found else 0


@asynccontextmanager
async def relay_to(broker_port: int) -> AsyncIterator[Relay]:
    """Listen on a free port of loopback."""
    relay = Relay(broker_port)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0, limit=MAX_HEAD)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
