"""The bulk API: reader groups and ranges of rows as Arrow streams (ADR 42), and writers (ADR 45).

Serves `/{entity}/$bulk/…` on the ports for messages. Listen reads, claims, plans, settles and
rejects; Send stages and publishes; Manage makes, resets and drops groups, since a group holds disk
space. A token may be for one group
only (`orders/$bulk/groups/lake`): it then works nowhere else. A stream is complete only with the
marker that ends it, so that a reader never takes a part for the whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

from aiohttp import web

from postbus.broker.access.authz import Grant
from postbus.broker.address import Address
from postbus.broker.browse import Browse
from postbus.broker.bulk import BulkAccess, BulkRefused, Group, RowsMissing
from postbus.broker.operate.message_view import SUB_QUEUE_NAMES
from postbus.broker.row_chunks import RowChunk
from postbus.contract.bulk import (
    ENTITY_KEY,
    GENERATION_KEY,
    PARTITION_KEY,
    PRESENT_COLUMNS,
    ClaimReaderGroup,
    GroupRequest,
    PartitionRange,
    PlanRanges,
    PutReaderGroup,
    ReadableRanges,
    ReaderGroup,
    RejectedMessages,
    RejectMessages,
    ResetReaderGroup,
    SettlePlan,
    ShownPlan,
)
from postbus.contract.entities import EntityKind, Right
from postbus.edge.access.attaching import target_refusal
from postbus.edge.access.shares import Limit, Shares
from postbus.edge.bulk.arrow_stream import (
    END_OF_STREAM,
    ArrowStream,
    is_available,
    load_arrow,
)
from postbus.edge.bulk.requests import (
    SUB_QUEUES,
    Action,
    BulkError,
    BulkPath,
    invalid,
    json_answer,
    parse,
    read_body,
    refusal_of,
)
from postbus.edge.bulk.writers import WriterCalls
from postbus.edge.group_fields import KIND_NAMES, KINDS, limits_of, shown_limits
from postbus.edge.web.authorization import RETRY_AFTER, HttpAuthorizer, HttpRefused
from postbus.edge.web.http_listener import SERVER
from postbus.edge.web.http_server import read_limited
from postbus.entity.commands import SubQueue

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 64 << 10
"""A plan over all partitions has less than 4 KB, and a reject 22 KB of positions."""

MAX_STREAMS: Final = 16
"""Streams of rows at once, of which one key has at most half: each holds a chunk of about 1 MiB.
Our choice: they share one connection to each store."""

WRITE_S: Final = 60.0
"""Time for a reader to take `WRITE_BYTES`. Our choice: a task of Spark may wait for its sink."""

WRITE_BYTES: Final = 1 << 20

HEADERS: Final = {
    "Content-Type": "application/vnd.apache.arrow.stream",
    "Cache-Control": "no-store",
    "Server": SERVER,  # only answers that are not begun yet get it elsewhere
}
MANAGED: Final = frozenset(
    {Action.PUT_GROUP, Action.DROP_GROUP, Action.RESET, Action.FORGET_WRITER}
)
SENT: Final = frozenset({Action.STAGE, Action.PUBLISH, Action.ABORT, Action.GET_WRITER})
NO_ARROW: Final = "this broker has no pyarrow: install postbus with the extra `bulk`"

A = TypeVar("A", bound=GroupRequest)
WriterHandling: TypeAlias = Callable[
    [web.BaseRequest, BulkPath, Address, Grant], Awaitable[web.StreamResponse]
]
Handling: TypeAlias = Callable[[web.BaseRequest, BulkPath, Grant], Awaitable[web.StreamResponse]]


class BulkHandler:
    """Answers the requests of all connections."""

    def __init__(
        self, access: BulkAccess, authorizer: HttpAuthorizer, writers: WriterCalls
    ) -> None:
        self._access = access
        self._writers = writers
        self._browse = Browse(access)
        self._authorizer = authorizer
        self._streams = Shares(Limit(MAX_STREAMS))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; raises `HttpRefused` for a missing right only."""
        try:
            target = parse(request.method, request.raw_path)
            grant = await self._authorizer.authorize(
                request, target.path, _needed(target.action), below=target.below
            )
            return await self._handling_of(target.action)(request, target, grant)
        except BulkError as error:
            return error.answer()
        except BulkRefused as error:
            return refusal_of(error.refused, request.path).answer()
        except RowsMissing as error:
            return BulkError(410, "DataLoss", str(error)).answer()

    def _handling_of(self, action: Action) -> Handling:
        match action:
            case Action.RANGES:
                return self._ranges
            case Action.ROWS:
                return self._rows
            case Action.PUT_GROUP:
                return self._put
            case Action.GET_GROUP:
                return self._get
            case Action.DROP_GROUP:
                return self._drop
            case Action.CLAIM:
                return self._claim
            case Action.PLAN:
                return self._plan
            case Action.SETTLE:
                return self._settle
            case Action.REJECT:
                return self._reject
            case Action.RESET:
                return self._reset
            case Action.STAGE:
                return self._of_writer(self._writers.stage)
            case Action.PUBLISH:
                return self._of_writer(self._writers.publish)
            case Action.ABORT:
                return self._of_writer(self._writers.abort)
            case Action.GET_WRITER:
                return self._of_writer(self._writers.get)
            case Action.FORGET_WRITER:
                return self._of_writer(self._writers.forget)

    def _of_writer(self, handling: WriterHandling) -> Handling:
        async def handle(
            request: web.BaseRequest, target: BulkPath, grant: Grant
        ) -> web.StreamResponse:
            address = await self._access.resolve(target.path)
            if (refused := target_refusal(address)) is not None:
                raise BulkRefused(refused)
            return await handling(request, target, address, grant)

        return handle

    # --- groups ---------------------------------------------------------------------------------

    async def _put(
        self, request: web.BaseRequest, target: BulkPath, _: Grant
    ) -> web.StreamResponse:
        asked, address = await self._asked(request, target, PutReaderGroup)
        kind, limits = KINDS[asked.kind], limits_of(asked)
        group = await self._access.put_group(address, target.group, asked.start, kind, limits)
        return json_answer(self._shown(address, group), 201 if group.is_new else 200)

    async def _get(self, _: web.BaseRequest, target: BulkPath, __: Grant) -> web.StreamResponse:
        address = await self._resolve(target, target.sub_queue)
        group = await self._access.group(address, target.group)
        return json_answer(self._shown(address, group))

    async def _drop(self, _: web.BaseRequest, target: BulkPath, __: Grant) -> web.StreamResponse:
        address = await self._resolve(target, target.sub_queue)
        await self._access.drop_group(address, target.group)
        return web.Response(status=204)

    async def _reset(
        self, request: web.BaseRequest, target: BulkPath, _: Grant
    ) -> web.StreamResponse:
        asked, address = await self._asked(request, target, ResetReaderGroup)
        group = await self._access.reset_group(address, target.group, asked.start)
        return json_answer(self._shown(address, group))

    async def _claim(
        self, request: web.BaseRequest, target: BulkPath, _: Grant
    ) -> web.StreamResponse:
        asked, address = await self._asked(request, target, ClaimReaderGroup)
        reader = asked.reader if asked.reader.isprintable() else ""
        group = await self._access.claim_group(address, target.group, reader)
        return json_answer(self._shown(address, group))

    async def _plan(
        self, request: web.BaseRequest, target: BulkPath, _: Grant
    ) -> web.StreamResponse:
        asked, address = await self._asked(request, target, PlanRanges)
        group = await self._access.plan_ranges(address, target.group, asked.epoch, asked.ranges)
        return json_answer(self._shown(address, group))

    async def _settle(
        self, request: web.BaseRequest, target: BulkPath, _: Grant
    ) -> web.StreamResponse:
        asked, address = await self._asked(request, target, SettlePlan)
        group = await self._access.settle_plan(address, target.group, asked.epoch, asked.number)
        return json_answer(self._shown(address, group))

    async def _reject(
        self, request: web.BaseRequest, target: BulkPath, _: Grant
    ) -> web.StreamResponse:
        asked, address = await self._asked(request, target, RejectMessages)
        rejected, refused = await self._access.reject_rows(
            address,
            asked.partition,
            asked.positions,
            group=target.group,
            epoch=asked.epoch,
            reason=asked.reason,
            description=asked.description,
        )
        texts = {at: refusal_of(each, request.path).detail for at, each in refused.items()}
        return json_answer(RejectedMessages(rejected=rejected, refused=texts))

    def _shown(self, address: Address, group: Group) -> ReaderGroup:
        cursor, plan = group.cursor, group.plan
        return ReaderGroup.model_validate(
            {
                "entity": address.name,
                "sub_queue": SUB_QUEUE_NAMES[address.sub_queue],
                "name": group.name,
                "kind": KIND_NAMES[cursor.kind],
                "generation": self._access.generation(address),
                "epoch": cursor.epoch,
                "reader": cursor.reader,
                "plan": ShownPlan(
                    number=plan.number,
                    ranges=plan.ranges,
                    attempts=plan.attempts,
                    is_settled=plan.is_settled,
                ),
                "created": group.is_new,
                **shown_limits(cursor.limits),
            }
        )

    # --- reading --------------------------------------------------------------------------------

    async def _ranges(self, _: web.BaseRequest, target: BulkPath, __: Grant) -> web.StreamResponse:
        address = await self._resolve(target, target.sub_queue)
        group, splits, selection = None, target.number("splits", 1), target.selection()
        if target.group:
            group = self._shown(address, await self._access.group(address, target.group))
        if selection is not None:
            partitions = await self._browse.ranges(address, splits, selection)
        else:
            partitions = await self._access.ranges(address, splits, target.group or None)
        shown = ReadableRanges(
            entity=address.name,
            sub_queue=SUB_QUEUE_NAMES[address.sub_queue],
            generation=self._access.generation(address),
            partitions=tuple(
                PartitionRange(
                    partition=each.partition_id,
                    low=each.low,
                    next_position=each.next_position,
                    messages=each.live,
                    deferred=each.deferred,
                    average_bytes=each.average_bytes,
                    splits=each.splits,
                )
                for each in partitions
            ),
            group=group,
        )
        return json_answer(shown)

    async def _rows(
        self, request: web.BaseRequest, target: BulkPath, grant: Grant
    ) -> web.StreamResponse:
        address = await self._resolve(target, target.sub_queue)
        if not is_available():
            raise BulkError(501, "Unavailable", NO_ARROW)
        columns = target.columns()
        partition, chunks = self._chunks(target, address, columns)
        account = grant.account
        if not self._streams.take(account, 1):
            text = "too many streams of rows are open with this key: read the others first"
            raise BulkError(429, "TooManyReaders", text, RETRY_AFTER)
        try:
            # What is refused at once is answered; later the connection is cut.
            chunk = await anext(chunks, None)
            await asyncio.to_thread(load_arrow)
            metadata = {
                ENTITY_KEY: address.name,
                GENERATION_KEY: self._access.generation(address),
                PARTITION_KEY: str(partition),
            }
            stream = ArrowStream(columns, metadata)
            answer = web.StreamResponse(headers=HEADERS)
            await answer.prepare(request)
            try:
                await self._write(answer, stream.head(), grant)
                while chunk is not None:
                    batch, chunk = stream.batch(chunk), None
                    await self._write(answer, batch, grant)
                    del batch  # it may have 100 MB, and so may the next one
                    chunk = await anext(chunks, None)
                await self._write(answer, END_OF_STREAM, grant)
            except (BulkRefused, RowsMissing, HttpRefused, TimeoutError) as error:
                extra = {"entity": address.name, "reason": str(error) or "the reader is too slow"}
                logger.info("a stream of rows was cut", extra=extra)
                _cut(request)
            except Exception:
                _cut(request)  # an answer in the middle of another one would be taken for rows
                raise
            return answer
        finally:
            self._streams.give_back(account, 1)
            await chunks.aclose()

    def _chunks(
        self, target: BulkPath, address: Address, columns: list[str]
    ) -> tuple[int, AsyncGenerator[RowChunk]]:
        """Return partition and rows of a range, read by a group or in a mode."""
        selection = target.selection()
        if selection is None and not target.group:
            raise invalid("group: name the reader group that reads, or a mode")
        partition, first, end = (target.number(name) for name in ("partition", "from", "to"))
        with_properties, with_body = "application_properties" in columns, "body" in columns
        if selection is None:
            return partition, self._access.rows(
                address,
                partition,
                first,
                end,
                group=target.group,
                epoch=target.number("epoch"),
                with_properties=with_properties,
                with_body=with_body,
            )
        return partition, self._browse.rows(
            address,
            partition,
            first,
            end,
            selection,
            with_properties=with_properties,
            with_body=with_body,
            with_present=any(name in PRESENT_COLUMNS for name in columns),
            with_deliveries="delivery_count" in columns,
        )

    async def _write(
        self, answer: web.StreamResponse, data: bytes | memoryview, grant: Grant
    ) -> None:
        """Write, at the pace of the reader, as long as it has the right to read.

        A row may have 100 MB: in pieces it is copied but once, and a slow reader has time for it.
        Raises TimeoutError when it does not read, and `HttpRefused`.
        """
        for start in range(0, len(data), WRITE_BYTES):
            async with asyncio.timeout(WRITE_S):
                await answer.write(data[start : start + WRITE_BYTES])
            self._authorizer.check_again(grant, Right.LISTEN)

    async def _asked(
        self, request: web.BaseRequest, target: BulkPath, model: type[A]
    ) -> tuple[A, Address]:
        """Return the body of a request for a group, and the address that it names."""
        asked = read_body(await read_limited(request, MAX_BODY_BYTES), model)
        return asked, await self._resolve(target, SUB_QUEUES[asked.sub_queue])

    async def _resolve(self, target: BulkPath, sub_queue: SubQueue) -> Address:
        """Return the address of a sub-queue; raises `BulkError` for a topic."""
        address = await self._access.resolve(target.path)
        if address.sub_queue is not SubQueue.ACTIVE:
            text = "name the sub-queue as subQueue=deadLetter, not in the path"
            raise BulkError(404, "EntityNotFound", text)
        if address.kind is EntityKind.TOPIC:
            text = "a topic keeps no messages: read it through a subscription of your own"
            raise BulkError(409, "NotAllowed", text)
        return replace(address, sub_queue=sub_queue)


def _needed(action: Action) -> Right:
    if action in MANAGED:
        return Right.MANAGE
    return Right.SEND if action in SENT else Right.LISTEN


def _cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()
