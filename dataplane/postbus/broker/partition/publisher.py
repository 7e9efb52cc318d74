"""Sends what writers of the bulk API have published, one batch of each writer at a time (ADR 45).

A published batch lies in the home partition of its entity until it has arrived. It is sent in
chunks, in the order of its numbers, as an outbox sends: the partitions of the entity remember the
last number, so that a repeated message is stored once. A chunk is sent while the one before is
committed, and stored only after it. A target that is full, disabled or unavailable is waited for.
Nothing here is durable; after a reload of the partition the rest of each batch is sent from its
first stage on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import zip_longest
from typing import Final, Protocol

from postbus.broker.backoff import Backoff
from postbus.broker.partition.shipper import Destination, ForwardDestination
from postbus.broker.placement import split
from postbus.entity.commands import Arrive, Arrived, NotePublication, Refused
from postbus.entity.expects import Expects, R
from postbus.message.envelope import Envelope
from postbus.message.sections import slice_message
from postbus.message.sequence import split_sequence
from postbus.store.errors import StoreError, StoreUnavailable
from postbus.store.publishing import Publication, PublishingStore, Stage

logger = logging.getLogger(__name__)

CHUNK_MESSAGES: Final = 256
CHUNK_BYTES: Final = 1 << 20
"""Maximum messages and bytes of one command, a larger message alone. Our choice: about 3 ms of the
event loop, and a commit."""
SENDING_CHUNKS: Final = 2
"""Chunks of a partition's writers that are on their way at the same time."""
CHUNKS_PER_S: Final = 10
"""Chunks a second of a batch with a rate, if that is enough for it."""
SWEEP_S: Final = 3_600.0


class Home(Protocol):
    """The host of the partition where batches lie."""

    partition_id: int

    @property
    def epoch(self) -> int | None: ...

    def clock(self) -> int: ...

    async def call(self, command: Expects[R]) -> R | Refused: ...

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]: ...


class SentBatch:
    """A batch that is being sent. `arrived`: messages of stages in the store that arrived.

    `ahead`: the messages of its next stage, if they are read already. `waits_for`: why nothing
    arrives at present, "" if something does.
    """

    def __init__(self, publication: Publication) -> None:
        self.publication = publication
        self.arrived = 0
        self.ahead: bytes | None = None
        self.waits_for = ""
        self.done = asyncio.Event()


class Publisher:
    """The publisher of one partition."""

    def __init__(
        self,
        home: Home,
        store: PublishingStore,
        destinations: Sequence[Destination],
        find: Callable[[int], ForwardDestination | None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`destinations` are the hosts of all partitions, in order; `find` takes the number of an
        entity, and returns None for one that is deleted.
        """
        self._home = home
        self._store = store
        self._destinations = destinations
        self._find = find
        self._sleep = sleep
        self._monotonic_s = monotonic_s
        self._batches: dict[tuple[int, str], SentBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(SENDING_CHUNKS)

    def start(self) -> None:
        """Go on with the batches of a partition that was loaded."""
        self._run(self._keep_sweeping())
        self.look()

    def drop(self) -> None:
        """Stop sending: the partition is not ours any more, or is loaded again."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._batches.clear()

    def look(self) -> None:
        """Send the batches that are in the store, now or when it answers."""
        self._run(self._look())

    def look_again(self, entity_no: int, writer: str) -> None:
        """Find out what became of a publishing whose commit is not known: send it, or forget it."""
        self._run(self._look_again(entity_no, writer))

    def batch(self, entity_no: int, writer: str) -> SentBatch | None:
        """Return the batch of a writer that is being sent."""
        return self._batches.get((entity_no, writer))

    async def refresh(self) -> None:
        """Begin to send the batches that are in the store. Raises StoreUnavailable."""
        for publication in await self._store.publications():
            place = publication.entity_no, publication.writer
            if place not in self._batches:
                batch = self._batches[place] = SentBatch(publication)
                self._run(self._send(batch))

    async def sweep(self) -> None:
        """Remove stages that nobody published. Raises StoreUnavailable and Fenced."""
        while await self._store.sweep(self._epoch(), self._home.clock()):
            await self._sleep(0)

    # --- tasks ----------------------------------------------------------------------------------

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = self._home.start(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self.refresh()
            except StoreError as error:
                self._log("batches of writers could not be read", error)
                await self._sleep(backoff.next_s())
            else:
                return

    async def _look_again(self, entity_no: int, writer: str) -> None:
        backoff = Backoff()
        while True:
            try:
                await self.sweep()  # waits for a transaction that is still under way
                break
            except StoreError as error:
                self._log("what a writer has published is not known", error)
            await self._sleep(backoff.next_s())
        await self._look()
        if (entity_no, writer) not in self._batches:
            await self._home.call(NotePublication(entity_no, writer, is_open=False))

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                await self.sweep()
            except StoreError as error:
                self._log("stages of writers could not be removed", error)
            await self._sleep(SWEEP_S)

    async def _send(self, batch: SentBatch) -> None:
        """Send a batch to its end; a failure of ours is logged, and it begins again."""
        backoff = Backoff()
        publication = batch.publication
        place = publication.entity_no, publication.writer
        await self._home.call(NotePublication(*place, is_open=True))
        while True:
            try:
                await self._send_stages(batch, backoff)
                break
            except Exception as error:  # noqa: BLE001 - logged; a supervised boundary, it waits
                batch.waits_for = str(error) or type(error).__name__
                self._log("a batch of a writer could not be sent", error)
            await self._sleep(backoff.next_s())
        del self._batches[place]
        await self._home.call(NotePublication(*place, is_open=False))
        batch.done.set()

    async def _send_stages(self, batch: SentBatch, backoff: Backoff) -> None:
        publication = batch.publication
        pace = _Pace(publication.rate, self._monotonic_s, self._sleep)
        while stages := await self._store.stages(publication.entity_no, publication.writer):
            if self._find(publication.entity_no) is None:
                batch.waits_for = "the entity is deleted"
                await self.sweep()  # of an entity that cannot be restored
                await self._sleep(backoff.next_s())
                continue
            batch.arrived, batch.ahead = 0, None
            sent: Stage | None = None
            for stage, after in zip_longest(stages, stages[1:]):
                data, batch.ahead = batch.ahead, None
                if data is None:
                    data = await self._store.data(stage.stage_no)
                # While messages are committed, there is time for the stages before and after.
                await _finish(
                    self._send_stage(batch, stage, data, pace),
                    self._read_ahead(batch, after),
                    self._remove(batch, sent),
                )
                sent = stage
                backoff.reset()
            await self._remove(batch, sent)

    async def _read_ahead(self, batch: SentBatch, stage: Stage | None) -> None:
        """Read the next stage, unless many batches hold one already."""
        if stage is not None and len(self._batches) <= SENDING_CHUNKS:
            batch.ahead = await self._store.data(stage.stage_no)

    async def _remove(self, batch: SentBatch, stage: Stage | None) -> None:
        if stage is not None:
            await self._store.arrived(self._epoch(), stage.stage_no)
            batch.arrived -= stage.message_count

    async def _send_stage(self, batch: SentBatch, stage: Stage, data: bytes, pace: _Pace) -> None:
        """Send a stage, with two chunks on their way unless there is a rate or one was refused."""
        line = _Line(is_short=pace.is_limited)
        first = stage.first_number
        try:
            for messages in _chunks(split_sequence(data), pace.chunk_messages):
                await pace.wait()
                chunk = self._send_chunk(batch, first, messages, line.last, line)
                await line.add(asyncio.create_task(chunk))
                pace.sent(len(messages))
                first += len(messages)
            await line.end()
        finally:
            await line.cancel()

    async def _send_chunk(
        self,
        batch: SentBatch,
        first: int,
        messages: Sequence[bytes],
        before: asyncio.Task[None] | None,
        line: _Line,
    ) -> None:
        """Send messages with numbers from `first` on until all have arrived.

        `before`: the chunk before, if it may be on its way. Where that has not arrived this one is
        refused, and sent again after it.
        """
        left = dict(enumerate(messages, first))
        backoff = Backoff()
        while left:
            if before is not None and before.done():
                before.result()  # raises if it failed
                before = None
            target = self._find(batch.publication.entity_no)
            if target is None:
                raise StoreUnavailable("the entity is deleted")
            # Decoded each time: a target may modify a message before it fails.
            decoded = {number: slice_message(each) for number, each in left.items()}
            numbers = list(left)
            count = len(self._destinations)
            places = split([target.partition_of(n, decoded[n], count) for n in numbers])
            after = {} if before is None else dict(line.last_numbers)
            line.note({place: numbers[part[-1]] for place, part in places.items()})
            async with self._turns:
                refused = await asyncio.gather(
                    *(
                        self._arrive(
                            partition_id,
                            batch.publication,
                            {numbers[at]: decoded[numbers[at]] for at in part},
                            after.get(partition_id, 0),
                            left,
                        )
                        for partition_id, part in places.items()
                    )
                )
            if left and before is not None:
                line.is_short = True
                await before
                continue
            waits_for = next((each for each in refused if each is not None), None)
            if len(left) < len(numbers):
                backoff.reset()
            elif waits_for is not None:
                batch.waits_for = f"{waits_for.refusal.value}: {waits_for.detail}".rstrip(": ")
                await self._sleep(backoff.next_s())
        batch.arrived += len(messages)
        batch.waits_for = ""

    async def _arrive(
        self,
        partition_id: int,
        publication: Publication,
        messages: dict[int, Envelope],
        after: int,
        left: dict[int, bytes],
    ) -> Refused | None:
        """Send messages to a partition, and remove those that arrived from `left`."""
        source, entity_no = -publication.slot, publication.entity_no
        numbers, envelopes = list(messages), list(messages.values())
        command = Arrive(source, entity_no, numbers, envelopes, after=after)
        reply = await self._destinations[partition_id].call(command)
        if not isinstance(reply, Arrived):
            return reply
        for number in numbers[: reply.count]:
            del left[number]
        return reply.refused

    def _epoch(self) -> int:
        epoch = self._home.epoch
        if epoch is None:
            raise StoreUnavailable("the partition is loading")
        return epoch

    def _log(self, text: str, error: Exception) -> None:
        extra = {"partition": self._home.partition_id, "error": str(error)}
        logger.warning(text, extra=extra)


class _Pace:
    """The pace of a batch: never more messages than its rate allows since it began, or went on."""

    def __init__(
        self,
        rate: int | None,
        monotonic_s: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._rate = rate
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._free_s = monotonic_s()
        self.is_limited = rate is not None
        self.chunk_messages = CHUNK_MESSAGES
        if rate is not None:
            self.chunk_messages = min(max(rate // CHUNKS_PER_S, 1), CHUNK_MESSAGES)

    async def wait(self) -> None:
        """Wait until the next chunk may be sent."""
        if (wait_s := self._free_s - self._monotonic_s()) > 0:
            await self._sleep(wait_s)

    def sent(self, count: int) -> None:
        """Note messages; the next ones wait as long as these take at the rate."""
        if self._rate is not None:
            self._free_s = max(self._free_s, self._monotonic_s()) + count / self._rate


class _Line:
    """The chunks of a stage that are on their way, in order: `SENDING_CHUNKS`, or one if short."""

    def __init__(self, *, is_short: bool) -> None:
        self.is_short = is_short
        self.last_numbers: dict[int, int] = {}
        """Partition -> number of the last message that was sent there."""
        self._chunks: deque[asyncio.Task[None]] = deque()

    @property
    def last(self) -> asyncio.Task[None] | None:
        return self._chunks[-1] if self._chunks else None

    def note(self, sent: Mapping[int, int]) -> None:
        """Note the last number for each partition; a repetition of earlier ones changes none."""
        for partition_id, number in sent.items():
            self.last_numbers[partition_id] = max(number, self.last_numbers.get(partition_id, 0))

    async def add(self, chunk: asyncio.Task[None]) -> None:
        """Add a chunk; return when there is room for the next one. Raises what a chunk raises."""
        self._chunks.append(chunk)
        while len(self._chunks) > (0 if self.is_short else SENDING_CHUNKS - 1):
            await self._chunks[0]
            self._chunks.popleft()

    async def end(self) -> None:
        """Await all chunks. Raises what a chunk raises."""
        while self._chunks:
            await self._chunks[0]
            self._chunks.popleft()

    async def cancel(self) -> None:
        """End chunks after a failure."""
        for chunk in self._chunks:
            chunk.cancel()
        await asyncio.gather(*self._chunks, return_exceptions=True)


async def _finish(*parts: Awaitable[None]) -> None:
    """Await all parts to their end, then raise the error of one that failed."""
    for each in await asyncio.gather(*parts, return_exceptions=True):
        if each is not None:
            raise each


def _chunks(messages: Iterable[bytes], most: int) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size_bytes = 0
    for encoded in messages:
        if chunk and (len(chunk) == most or size_bytes + len(encoded) > CHUNK_BYTES):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(encoded)
        size_bytes += len(encoded)
    if chunk:
        yield chunk
