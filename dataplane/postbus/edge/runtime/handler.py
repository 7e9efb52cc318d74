"""Messages over HTTP: send, peek-lock, read and delete, complete, unlock, renew.

Serves `POST /{entity}/messages` and its relatives. Holds no state machine and uses the commands of
AMQP links: a sent message becomes an `Enqueue`, a receive is a consumer of the router, a lock token
finds its message alone. Nothing is answered before its commit. Source: Service Bus REST, runtime
operations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from aiohttp import web

from postbus.broker.access.authz import Grant
from postbus.broker.address import Address
from postbus.broker.router import Router
from postbus.contract.entities import NamespaceLimits, Right
from postbus.edge.access.attaching import attach_refusal
from postbus.edge.access.inflight_budget import InflightBudget
from postbus.edge.runtime.answers import body_of, headers_of, location_path
from postbus.edge.runtime.messages import (
    BATCH_TYPE,
    BROKER_PROPERTIES,
    BadMessage,
    batch_message,
    batch_of,
    single_message,
)
from postbus.edge.runtime.receives import Receives, release
from postbus.edge.runtime.requests import STATUSES, Action, RequestPath, refusal_of, target_of
from postbus.edge.runtime.values import http_date
from postbus.edge.web.authorization import RETRY_AFTER, HttpAuthorizer, HttpRefused
from postbus.edge.web.http_listener import SERVER
from postbus.edge.web.http_server import read_limited
from postbus.entity.commands import (
    Delivery,
    Disposition,
    Enqueue,
    Refusal,
    Refused,
    RenewLocks,
    Settle,
    SubQueue,
)
from postbus.entity.expects import Expects, R
from postbus.message.envelope import Envelope

ANSWER_S: Final = 60.0
"""Longest wait for the answer of a partition. A longer commit has failed by then or its result is
unknown; only loading a partition takes that long. Source: the default timeout of Service Bus."""

MEMBERS_A_STEP: Final = 500
"""Members of a batch parsed before other clients are served; about 10 ms."""

BUSY: Final = Refused(Refusal.BUSY)
LOST: Final = Refused(Refusal.LOCK_LOST)

Handling: TypeAlias = Callable[
    [web.BaseRequest, RequestPath, Address, Grant], Awaitable[web.StreamResponse]
]


class RuntimeHandler:
    """Answers the requests about messages of all connections."""

    def __init__(
        self,
        router: Router,
        authorizer: HttpAuthorizer,
        limits: NamespaceLimits,
        inflight: InflightBudget,
        receives: Receives | None = None,
    ) -> None:
        self._router = router
        self._authorizer = authorizer
        self._limits = limits
        self._inflight = inflight
        self._receives = receives or Receives(router)

    def follow_limits(self, limits: NamespaceLimits) -> None:
        """Apply the limits of another tier to new requests."""
        self._limits = limits

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; raises `HttpRefused`."""
        target = target_of(request.method, request.raw_path)
        is_send = target.action is Action.SEND
        needed = Right.SEND if is_send else Right.LISTEN
        grant = await self._authorizer.authorize(request, target.path, needed, below=target.below)
        address = await self._resolve(target)
        refused = attach_refusal(address, is_sender=is_send)
        if refused is None and not is_send and _needs_session(address):
            refused = Refused(
                Refusal.SESSION_REQUIRED, "Sessions are received over AMQP only, not over HTTP."
            )
        if refused is not None:
            raise refusal_of(refused, target)
        handling = self._handling_of(target.action)
        return await handling(request, target, address, grant)

    def _handling_of(self, action: Action) -> Handling:
        match action:
            case Action.SEND:
                return self._send
            case Action.PEEK_LOCK:
                return self._peek_lock
            case Action.READ_AND_DELETE:
                return self._read_and_delete
            case Action.COMPLETE:
                return self._complete
            case Action.UNLOCK:
                return self._unlock
            case Action.RENEW:
                return self._renew

    def stop(self) -> None:
        """End the waits of all receives."""
        self._receives.stop()

    async def _resolve(self, target: RequestPath) -> Address:
        resolved: asyncio.Future[Address | None] = asyncio.get_running_loop().create_future()

        def answer(address: Address | None) -> None:
            if not resolved.done():
                resolved.set_result(address)

        self._router.resolve(target.path, answer)
        address = await resolved
        if address is None:
            raise refusal_of(Refused(Refusal.ENTITY_NOT_FOUND), target)
        return address

    # --- sending --------------------------------------------------------------------------------

    async def _send(
        self, request: web.BaseRequest, target: RequestPath, address: Address, grant: Grant
    ) -> web.StreamResponse:
        """Store one message or a batch of them, all or none."""
        account = grant.account
        body = await self._body_of(request, target, address, account)
        self._authorizer.check_again(grant, Right.SEND)
        kind = request.headers.get("Content-Type")
        is_batch = kind is not None and kind.strip().lower() == BATCH_TYPE
        give_back = partial(self._inflight.give_back, account, len(body))
        self._inflight.take(account, len(body))
        try:
            if is_batch:
                envelopes = await _members(body)
            else:
                envelopes = [single_message(request.headers.items(), kind, body)]
        except BadMessage as error:
            give_back()
            raise HttpRefused(400, str(error)) from None
        except BaseException:
            give_back()
            raise
        command = Enqueue(address.entity_no, envelopes, is_atomic=is_batch)
        reply = await self._call(address, command, target.timeout_s, give_back)
        if isinstance(reply, Refused):
            raise refusal_of(reply, target)
        if reply.refusals:
            raise refusal_of(next(iter(reply.refusals.values())), target)
        return web.Response(status=201)

    async def _body_of(
        self, request: web.BaseRequest, target: RequestPath, address: Address, account: str
    ) -> bytes:
        """Read a body. Its received bytes, not the announced length, are charged to the key."""
        max_bytes = min(address.max_message_bytes(self._limits), self._limits.max_batch_bytes)
        if self._inflight.unanswered.is_used_up:
            raise refusal_of(BUSY, target)
        reading, come_bytes = self._inflight.reading, 0

        def count(size_bytes: int) -> None:
            nonlocal come_bytes
            if not reading.take(account, size_bytes):
                raise _share_is_used_up()
            come_bytes += size_bytes

        if self._inflight.is_full(account):
            raise _share_is_used_up()
        too_large = STATUSES[Refusal.MESSAGE_TOO_LARGE]
        try:
            return await read_limited(request, max_bytes, too_large, count)
        finally:
            reading.give_back(account, come_bytes)

    # --- receiving ------------------------------------------------------------------------------

    async def _peek_lock(
        self, request: web.BaseRequest, target: RequestPath, address: Address, grant: Grant
    ) -> web.StreamResponse:
        """Lock a message and return it; release one that cannot be represented."""
        delivery = await self._take(request, target, address, grant)
        if delivery is None:
            return web.Response(status=204)
        try:
            headers = headers_of(delivery, is_locked=True)
            at = location_path(target.path, delivery)
            headers["Server"] = SERVER  # sent from here, not by the server
            headers["Location"] = f"{request.scheme}://{request.host}{at}"
            answer = _shown(201, headers, delivery)
            await answer.prepare(request)
            await answer.write_eof()
            return answer
        except ConnectionError:
            release(self._router, address, [delivery.lock_token])
            return _for_nobody()
        except BaseException:
            release(self._router, address, [delivery.lock_token])
            raise

    async def _read_and_delete(
        self, request: web.BaseRequest, target: RequestPath, address: Address, grant: Grant
    ) -> web.StreamResponse:
        """Delete a message, then return it. Until then it is only locked (ADR 19)."""
        ends = asyncio.get_running_loop().time() + target.timeout_s
        while True:
            delivery = await self._take(request, target, address, grant)
            if delivery is None:
                return web.Response(status=204)
            tokens = [delivery.lock_token]
            if request.transport is None or request.transport.is_closing():
                release(self._router, address, tokens)
                return _for_nobody()
            settle = Settle(address.entity_no, address.sub_queue, tokens, Disposition.COMPLETE)
            reply = await self._call(address, settle, ANSWER_S)
            if isinstance(reply, Refused):
                if reply.refusal is Refusal.NOT_APPLIED:
                    release(self._router, address, tokens)
                raise refusal_of(reply, target)
            if not reply.lost:
                headers = headers_of(delivery, is_locked=False)
                return _shown(200, headers, delivery)
            # The partition was reloaded: the message still exists.
            left_s = ends - asyncio.get_running_loop().time()
            target = target.with_timeout(max(left_s, 0.0))

    async def _take(
        self, request: web.BaseRequest, target: RequestPath, address: Address, grant: Grant
    ) -> Delivery | None:
        """Return a message if the client still has the right; rules may change during a receive."""
        taken = await self._receives.take(
            address, target.timeout_s, request.transport, request.remote
        )
        if isinstance(taken, Refused):
            raise refusal_of(taken, target)
        if taken is not None:
            try:
                self._authorizer.check_again(grant, Right.LISTEN)
            except HttpRefused:
                release(self._router, address, [taken.lock_token])
                raise
        return taken

    # --- settling -------------------------------------------------------------------------------

    async def _complete(
        self, _request: web.BaseRequest, target: RequestPath, address: Address, _grant: Grant
    ) -> web.StreamResponse:
        return await self._settle(target, address, Disposition.COMPLETE)

    async def _unlock(
        self, _request: web.BaseRequest, target: RequestPath, address: Address, _grant: Grant
    ) -> web.StreamResponse:
        return await self._settle(target, address, Disposition.ABANDON)

    async def _settle(
        self, target: RequestPath, address: Address, disposition: Disposition
    ) -> web.StreamResponse:
        command = Settle(address.entity_no, address.sub_queue, [target.lock_token], disposition)
        reply = await self._call(address, command, target.timeout_s)
        if isinstance(reply, Refused):
            raise refusal_of(reply, target)
        if reply.lost:
            raise refusal_of(LOST, target)
        return web.Response(status=200)

    async def _renew(
        self, _request: web.BaseRequest, target: RequestPath, address: Address, _grant: Grant
    ) -> web.StreamResponse:
        command = RenewLocks(address.entity_no, address.sub_queue, [target.lock_token])
        reply = await self._call(address, command, target.timeout_s)
        if isinstance(reply, Refused):
            raise refusal_of(reply, target)
        until = http_date(reply.locked_until_ms[0])
        headers = {BROKER_PROPERTIES: f'{{"LockedUntilUtc":"{until}"}}'}
        return web.Response(status=200, headers=headers)

    # --- partitions -----------------------------------------------------------------------------

    async def _call(
        self,
        address: Address,
        command: Expects[R],
        timeout_s: float,
        on_reply: Callable[[], None] = lambda: None,
    ) -> R | Refused:
        """Return the result of a command; UNKNOWN when there is none in time.

        A client that disconnects cannot undo it. `on_reply` is called when the command is done,
        even if no client waits for it any more.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[R | Refused] = loop.create_future()

        def answer(reply: R | Refused) -> None:
            if not answered.done():
                answered.set_result(reply)

        def reply_to(reply: R | Refused) -> None:
            on_reply()
            answer(reply)

        self._router.submit(address.partition_id, command, reply_to)
        if answered.done():
            return answered.result()
        timer = loop.call_later(timeout_s or ANSWER_S, answer, Refused(Refusal.UNKNOWN))
        try:
            return await answered
        finally:
            timer.cancel()


def _share_is_used_up() -> HttpRefused:
    text = (
        "Too many bytes of messages are in flight with this key: wait for answers, then continue."
    )
    return HttpRefused(429, text, RETRY_AFTER)


async def _members(body: bytes) -> list[Envelope]:
    """Return the messages of a batch; others are served while a long one is parsed."""
    members = batch_of(body)
    envelopes: list[Envelope] = []
    for index, member in enumerate(members):
        if index and index % MEMBERS_A_STEP == 0:
            await asyncio.sleep(0)
        envelopes.append(batch_message(index, member))
    return envelopes


def _shown(status: int, headers: dict[str, str], delivery: Delivery) -> web.Response:
    return web.Response(status=status, headers=headers, body=body_of(delivery.envelope))


def _for_nobody() -> web.Response:
    """Return a response for a client that has disconnected; an error would be logged."""
    return web.Response(status=503)


def _needs_session(address: Address) -> bool:
    return address.requires_session and address.sub_queue is SubQueue.ACTIVE
