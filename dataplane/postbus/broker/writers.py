"""Writers of the bulk API: messages that are staged, and published as one decision (ADR 45).

Called by the bulk API. Everything of a writer lies in the home partition of its entity, the first
one of an entity in all partitions. A call may be repeated: a stage is published once, and a batch
has its messages once, whatever was answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from postbus.broker.address import Address
from postbus.broker.bulk import BulkRefused, store_errors
from postbus.broker.partition.host import Host
from postbus.broker.partition.publisher import Publisher
from postbus.broker.placement import SPREAD, has_two_keys
from postbus.broker.spread.partitioned import TWO_KEYS
from postbus.broker.spread.replies import away
from postbus.entity.commands import CheckSends, NotePublication, Refusal, Refused, Tick
from postbus.message.envelope import Envelope
from postbus.message.sequence import read_sequence
from postbus.store.errors import StoreError
from postbus.store.publishing import (
    MAX_STAGES,
    Exhausted,
    Gone,
    PublishingStore,
    Sending,
    Stale,
    WriterState,
)

PARSED_AT_ONCE: Final = 250
"""Messages parsed before other clients are served; about 2 ms."""
STAGES_OF_A_MS: Final = 1 << 10
"""Numbers of stages follow the clock, so that a restored store does not give one twice."""

DONE_S: Final = 5.0
"""Longest wait of a call for a batch to arrive."""


class NoWriter(Exception):
    """There is no such writer."""


class StaleBatch(Exception):
    """A later batch was published."""


class StagesGone(Exception):
    """Stages that were to be published do not exist any more."""


class WriterBusy(Exception):
    """Messages of an earlier batch are still to arrive."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A stage with its messages, and their size as quotas count it."""

    stage_no: int
    message_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Published:
    """The last batch of a writer; see `contract.bulk.PublishedBatch`."""

    batch: int
    message_count: int
    left: int
    waits_for: str


Parts: TypeAlias = tuple[Host, PublishingStore, Publisher]


class WriterAccess:
    """See the module's docstring."""

    def __init__(self, parts: Mapping[int, Parts]) -> None:
        """Take the host, the tables and the publisher of each partition."""
        self._parts = parts
        self._last_stage_no = 0

    async def stage(self, address: Address, writer: str, data: bytes) -> Staged:
        """Check a sequence of messages as a send is checked, and store it invisibly.

        Raises `BulkRefused`, and `BadSequence` for a malformed message.
        """
        host, store, _ = await self._home(address)
        epoch = _epoch_of(host)
        with store_errors():
            stages, held_bytes = await store.held_bytes(address.entity_no)
        if stages >= MAX_STAGES:
            text = f"{MAX_STAGES} stages wait to be published: publish or abort some"
            raise BulkRefused(Refused(Refusal.QUOTA_EXCEEDED, text))
        if address.partition_id == SPREAD:
            held_bytes //= len(self._parts)
        count = size_bytes = 0
        chunk: list[Envelope] = []
        for envelope in read_sequence(data):
            chunk.append(envelope)
            if len(chunk) == PARSED_AT_ONCE:
                size_bytes += await self._check(
                    host, address, chunk, count, held_bytes + size_bytes
                )
                count += len(chunk)
                chunk = []
                await asyncio.sleep(0)
        if chunk:
            size_bytes += await self._check(host, address, chunk, count, held_bytes + size_bytes)
            count += len(chunk)
        now_ms = host.clock()
        number = max(self._last_stage_no + 1, now_ms * STAGES_OF_A_MS)
        self._last_stage_no = number
        with store_errors():
            await store.add(
                epoch,
                number,
                address.entity_no,
                writer,
                now_ms,
                message_count=count,
                size_bytes=size_bytes,
                data=data,
            )
        return Staged(number, count, size_bytes)

    async def publish(
        self, address: Address, writer: str, batch: int, stages: Sequence[int], rate: int | None
    ) -> Published:
        """Decide that stages are a writer's batch, and wait for a while until it has arrived.

        A repeated call waits for the batch that is there. Raises `BulkRefused`, `StaleBatch`,
        `StagesGone`, `WriterBusy`.
        """
        host, store, publisher = await self._home(address)
        epoch = _epoch_of(host)  # before the note, which a reload forgets
        note = NotePublication(address.entity_no, writer, is_open=True)
        _raise_refused(await host.call(note))
        try:
            with store_errors():
                decided = await store.publish(
                    epoch, address.entity_no, writer, batch, stages, rate, host.clock()
                )
        except BaseException:
            publisher.look_again(address.entity_no, writer)
            raise
        is_open = not isinstance(decided, Gone | Exhausted) and bool(decided.left)
        if is_open:
            try:
                await publisher.refresh()
            except StoreError:
                publisher.look()
        elif publisher.batch(address.entity_no, writer) is None:  # else it notes its end itself
            await host.call(NotePublication(address.entity_no, writer, is_open=False))
        match decided:
            case Stale(later):
                raise StaleBatch(
                    f"the writer {writer} has published batch {later}, and this is {batch}: what"
                    " publishes it began again from an older checkpoint"
                )
            case Gone(missing):
                raise StagesGone(
                    f"the stages {missing[:10]} of the writer {writer} do not exist: they were"
                    " aborted, published, or waited longer than a day; stage the batch again"
                )
            case Sending(earlier, left):
                raise WriterBusy(
                    f"{left} messages of batch {earlier} of the writer {writer} are still to"
                    " arrive: repeat the call"
                )
            case Exhausted(what):
                text = f"{address.name} has {what}, as many as it may have"
                raise BulkRefused(Refused(Refusal.QUOTA_EXCEEDED, text))
            case WriterState():
                return await self._arrival(address, writer, decided)

    async def writer(self, address: Address, writer: str) -> Published:
        """Return the last batch of a writer. Raises `BulkRefused` and `NoWriter`."""
        _, store, publisher = await self._home(address)
        with store_errors():
            state = await store.writer(address.entity_no, writer)
        if state is None:
            raise NoWriter(f"{address.name} has no writer {writer}")
        sent = publisher.batch(address.entity_no, writer) if state.left else None
        arrived, waits_for = (0, "") if sent is None else (sent.arrived, sent.waits_for)
        left = max(state.left - arrived, 1) if state.left else 0
        return Published(state.batch, state.message_count, left, waits_for)

    async def abort(self, address: Address, writer: str, stages: Sequence[int]) -> int:
        """Remove stages that are not published; return their number. Raises `BulkRefused`."""
        host, store, _ = await self._home(address)
        with store_errors():
            return await store.abort(_epoch_of(host), address.entity_no, writer, stages)

    async def forget(self, address: Address, writer: str) -> None:
        """Remove a writer: its batches may come again. Raises as `writer`, and `WriterBusy`."""
        host, store, _ = await self._home(address)
        with store_errors():
            is_gone = await store.forget(_epoch_of(host), address.entity_no, writer)
        if not is_gone:
            state = await self.writer(address, writer)
            raise WriterBusy(f"{state.left} messages of the writer {writer} are still to arrive")

    async def _check(
        self, host: Host, address: Address, messages: list[Envelope], first: int, held_bytes: int
    ) -> int:
        """Return the size of messages that a send would store. Raises `BulkRefused`."""
        if address.partition_id == SPREAD:
            for index, envelope in enumerate(messages, first):
                if has_two_keys(envelope):
                    raise _of_message(index, TWO_KEYS)
        checked = await host.call(CheckSends(address.entity_no, messages, held_bytes))
        if isinstance(checked, Refused):
            raise BulkRefused(checked)
        if checked.index is not None and checked.refused is not None:
            raise _of_message(first + checked.index, checked.refused)
        return sum(envelope.size_bytes for envelope in messages)

    async def _arrival(self, address: Address, writer: str, decided: WriterState) -> Published:
        """Wait until a batch has arrived, at most `DONE_S`."""
        _, _, publisher = await self._home(address)
        sent = publisher.batch(address.entity_no, writer)
        if sent is not None:
            try:
                async with asyncio.timeout(DONE_S):
                    await sent.done.wait()
                return Published(decided.batch, decided.message_count, 0, "")
            except TimeoutError:
                pass
        elif not decided.left:
            return Published(decided.batch, decided.message_count, 0, "")
        return await self.writer(address, writer)

    async def _home(self, address: Address) -> Parts:
        """Return the parts of the home partition, which is loaded then."""
        parts = self._parts[0 if address.partition_id == SPREAD else address.partition_id]
        host = parts[0]
        if (refused := away(host)) is not None:
            raise BulkRefused(refused)
        if not host.is_loaded:
            _raise_refused(await host.call(Tick()))
        return parts


def _epoch_of(host: Host) -> int:
    if host.epoch is None:
        raise BulkRefused(Refused(Refusal.NOT_APPLIED, "the partition is loading"))
    return host.epoch


def _of_message(index: int, refused: Refused) -> BulkRefused:
    detail = refused.detail or refused.refusal.value
    return BulkRefused(Refused(refused.refusal, f"message {index}: {detail}"))


def _raise_refused(reply: object) -> None:
    if isinstance(reply, Refused):
        raise BulkRefused(reply)
