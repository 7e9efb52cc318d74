"""Writers of the bulk API: stage, publish, abort (ADR 45).

Send stages and publishes; Manage forgets a writer, whose batches could then come twice.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from postbus.broker.access.authz import Grant
from postbus.broker.address import Address
from postbus.broker.writers import (
    NoWriter,
    Published,
    StagesGone,
    StaleBatch,
    WriterAccess,
    WriterBusy,
)
from postbus.contract.bulk import (
    MAX_STAGE_BYTES,
    MAX_STAGED,
    AbortedStages,
    AbortStages,
    PublishBatch,
    PublishedBatch,
    StagedMessages,
)
from postbus.contract.entities import Right
from postbus.edge.access.inflight_budget import InflightBudget
from postbus.edge.bulk.requests import BulkError, BulkPath, json_answer, read_body
from postbus.edge.web.authorization import RETRY_AFTER, HttpAuthorizer
from postbus.edge.web.http_server import read_limited
from postbus.message.sequence import LENGTH_BYTES, MEDIA_TYPE, BadSequence, split_sequence

MAX_BODY_BYTES: Final = 2 << 20
"""65,536 stages, with the numbers that they have."""

MAX_SINGLE_BYTES: Final = 32 << 20
"""Bytes of a request with one message. Our choice: half of a key's share of bodies."""


class WriterCalls:
    """Answers the requests for writers."""

    def __init__(
        self,
        access: WriterAccess,
        authorizer: HttpAuthorizer,
        inflight: InflightBudget,
    ) -> None:
        self._access = access
        self._authorizer = authorizer
        self._inflight = inflight

    async def stage(
        self, request: web.BaseRequest, target: BulkPath, address: Address, grant: Grant
    ) -> web.Response:
        """Store messages invisibly. Received bytes are charged to the key until they are stored."""
        kind = request.headers.get("Content-Type", "").strip().lower()
        if kind != MEDIA_TYPE:
            raise BulkError(415, "InvalidRequest", f"send a sequence of messages as {MEDIA_TYPE}")
        account, reading, come_bytes = grant.account, self._inflight.reading, 0

        def count(size_bytes: int) -> None:
            nonlocal come_bytes
            if not reading.take(account, size_bytes):
                text = "too many bytes of messages are in flight with this key: wait for answers"
                raise BulkError(429, "TooManyReaders", text, RETRY_AFTER)
            come_bytes += size_bytes

        try:
            data = await read_limited(request, MAX_SINGLE_BYTES, 413, count)
            self._authorizer.check_again(grant, Right.SEND)
            if len(data) > MAX_STAGE_BYTES and not _is_one(data):
                text = f"messages of more than {MAX_STAGE_BYTES} bytes together are several stages"
                raise BulkError(413, "MessageTooLarge", text)
            try:
                if (messages := sum(1 for _ in split_sequence(data))) > MAX_STAGED:
                    text = f"{messages} messages, at most {MAX_STAGED} may be in a stage"
                    raise BulkError(413, "MessageTooLarge", text)
                if not messages:
                    raise BulkError(400, "InvalidRequest", "there is no message to stage")
                staged = await self._access.stage(address, target.writer, data)
            except BadSequence as error:
                raise BulkError(400, "InvalidRequest", str(error)) from None
        finally:
            reading.give_back(account, come_bytes)
        shown = StagedMessages(
            stage=staged.stage_no, messages=staged.message_count, bytes=staged.size_bytes
        )
        return json_answer(shown, 201)

    async def publish(
        self, request: web.BaseRequest, target: BulkPath, address: Address, _: Grant
    ) -> web.Response:
        """Make stages a batch, once; wait some seconds for its messages to arrive."""
        asked = read_body(await read_limited(request, MAX_BODY_BYTES), PublishBatch)
        try:
            published = await self._access.publish(
                address, target.writer, asked.batch, asked.stages, asked.rate
            )
        except StaleBatch as error:
            raise BulkError(409, "StaleWriter", str(error)) from None
        except StagesGone as error:
            raise BulkError(410, "StagesGone", str(error)) from None
        except WriterBusy as error:
            raise BulkError(429, "WriterBusy", str(error), RETRY_AFTER) from None
        return json_answer(_shown(target, published))

    async def abort(
        self, request: web.BaseRequest, target: BulkPath, address: Address, _: Grant
    ) -> web.Response:
        """Remove stages that are not published."""
        asked = read_body(await read_limited(request, MAX_BODY_BYTES), AbortStages)
        count = await self._access.abort(address, target.writer, asked.stages)
        return json_answer(AbortedStages(aborted=count))

    async def get(
        self, _: web.BaseRequest, target: BulkPath, address: Address, __: Grant
    ) -> web.Response:
        """Show the last batch of a writer."""
        try:
            return json_answer(_shown(target, await self._access.writer(address, target.writer)))
        except NoWriter as error:
            raise BulkError(404, "WriterNotFound", str(error)) from None

    async def forget(
        self, _: web.BaseRequest, target: BulkPath, address: Address, __: Grant
    ) -> web.Response:
        """Remove a writer whose messages have arrived, with what it staged."""
        try:
            await self._access.forget(address, target.writer)
        except NoWriter as error:
            raise BulkError(404, "WriterNotFound", str(error)) from None
        except WriterBusy as error:
            raise BulkError(429, "WriterBusy", str(error), RETRY_AFTER) from None
        return web.Response(status=204)


def _shown(target: BulkPath, published: Published) -> PublishedBatch:
    return PublishedBatch(
        writer=target.writer,
        batch=published.batch,
        messages=published.message_count,
        left=published.left,
        is_done=not published.left,
        waits_for=published.waits_for,
    )


def _is_one(data: bytes) -> bool:
    return int.from_bytes(data[:LENGTH_BYTES], "big") + LENGTH_BYTES == len(data)
