"""A small asynchronous AMQP client for `send` and `receive`: our engine, a socket, futures.

One connection with one session. Every failure is a `RefusedError` with the text of the bus; no text
contains a key. A message counts as sent when the bus has confirmed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, assert_never

from rich.markup import escape

from postbus.amqp.client import ClientConnection, ClientSession
from postbus.amqp.conditions import SERVER_BUSY, AmqpError
from postbus.amqp.events import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveriesAnswered,
    DeliveriesUpdated,
    LinkAttached,
    LinkDetached,
    LinkDrained,
    LinkFlowed,
    OversizeReceived,
    SaslInitReceived,
    SessionBegun,
    SessionEnded,
    SingleEvent,
    TransferReceived,
    UnknownDeliveries,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, Link, OutgoingLink
from postbus.amqp.performatives import (
    SOURCE,
    Accepted,
    DeliveryState,
    Modified,
    Rejected,
    Released,
)
from postbus.cli.failures import ContextError, RefusedError, err
from postbus.contract.connection_strings import Endpoint
from postbus.message.codec import (
    Described,
    Int,
    Symbol,
    Ulong,
    decode_value,
    encode_value,
)

PATIENT_S: Final = 1.0
"""Wait for an answer after which a message says why nothing happens."""

ANSWER_S: Final = 30.0
"""Timeout for an answer; the bus itself waits while the store is unavailable."""

SESSION_FILTER: Final = "com.microsoft:session-filter"
SESSION_TIMEOUT: Final = "com.microsoft:timeout"
NOISE: Final = re.compile(r" To know more visit \S+ Reference:[^,]+,")
"""Parts of Service Bus's error texts for clients that parse them; logs have the tracking id."""

TAG_BYTES: Final = 8
MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""Above the largest message of Premium, 100 MiB."""


class BusyError(RefusedError):
    """The bus is busy; the request had no effect and may be retried."""


class NoSessionError(RefusedError):
    """No session had messages within the wait."""


class AmqpSession:
    """An open connection with one session, made by `connected`."""

    def __init__(self, engine: ClientConnection, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._writer = writer
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._attaching: dict[Link, asyncio.Future[None]] = {}
        self._endpoints: dict[Link, Sender | Receiver] = {}
        self._session: ClientSession
        self.failure: RefusedError | None = None
        """The failure that ended the connection."""
        self._is_late_printed = False

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Feed the engine until the connection ends."""
        failure: RefusedError = RefusedError(
            "the bus closed the connection; unconfirmed messages may be lost"
        )
        try:
            while data := await reader.read(1 << 18):
                for event in one_by_one(self._engine.receive_data(data, _now_ms())):
                    self._take(event)
                self.flush()
        except RefusedError as error:
            failure = error
        except (OSError, AmqpError) as error:
            failure = RefusedError(f"the connection broke: {_reason(error)}")
        finally:
            self._fail(failure)

    async def tick(self) -> None:
        """Keep the connection alive."""
        while True:
            await asyncio.sleep(self._engine.tick_interval_ms / 1_000)
            for event in one_by_one(self._engine.tick(_now_ms())):
                self._take(event)
            self.flush()

    async def open(self) -> None:
        """Open the connection and begin the session."""
        self._engine.start()
        self.flush()
        await self.answer_of(self._opened)
        self._session = self._engine.begin()

    def close(self) -> None:
        """Close the connection; pending requests get no answer."""
        self._engine.close()
        self.flush()
        self._writer.close()

    def flush(self) -> None:
        """Write the engine's pending output."""
        if not self._writer.is_closing():
            self._writer.writelines(self._engine.data_to_send())

    async def drained(self) -> None:
        """Wait until the socket has taken most of the written data."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise RefusedError(f"the connection broke: {_reason(error)}") from None

    async def answer_of(self, future: asyncio.Future[Any], *, expected_s: float = 0) -> Any:
        """Return the answer, expected within `expected_s`; raises `RefusedError`, also if late."""
        self.flush()
        if self.failure is not None:
            raise self.failure
        await asyncio.wait({future}, timeout=expected_s + PATIENT_S)
        if not future.done():
            self.print_late(f"the bus has not answered yet: waiting up to {ANSWER_S:.0f} s")
        try:
            return await asyncio.wait_for(asyncio.shield(future), ANSWER_S)
        except TimeoutError:
            raise RefusedError(f"the bus did not answer within {ANSWER_S:.0f} s") from None

    def print_late(self, why: str) -> None:
        """Print, once, why nothing seems to happen."""
        if not self._is_late_printed:
            self._is_late_printed = True
            err.print(f"[yellow]postbus:[/yellow] {escape(why)}")

    # --- links ----------------------------------------------------------------------------------

    async def sender(self, address: str) -> Sender:
        """Attach a link to send on."""
        link = self._session.attach_sender(f"to-{address}-{uuid.uuid4()}", address)
        sender = Sender(self, link)
        await self._attach(link, sender)
        return sender

    async def receiver(
        self, address: str, session_id: str | None = None, *, wait_s: float | None = None
    ) -> Receiver:
        """Attach a link to receive on; `session_id` "" takes the next session that has messages.

        `wait_s`: how long to wait for such a session.
        """
        source: str | Described = address
        properties = None
        if session_id is not None:
            filters = {Symbol(SESSION_FILTER): session_id or None}
            source = Described(Ulong(SOURCE), [address, *[None] * 6, filters])
            if wait_s is not None:
                properties = {SESSION_TIMEOUT: Ulong(int(wait_s * 1_000))}
        name = f"from-{address}-{uuid.uuid4()}"
        link = self._session.attach_receiver(name, source, properties=properties)
        receiver = Receiver(self, self._session, link)
        await self._attach(link, receiver, wait_s or 0 if session_id == "" else 0)
        return receiver

    async def _attach(self, link: Link, endpoint: Sender | Receiver, expected_s: float = 0) -> None:
        self._endpoints[link] = endpoint
        self._attaching[link] = asyncio.get_running_loop().create_future()
        await self.answer_of(self._attaching[link], expected_s=expected_s)

    async def look(self, address: str) -> None:
        """Peek, to distinguish an empty entity from an unavailable store; raises `RefusedError`."""
        receiver = await self.receiver(f"{address}/$management")
        receiver.grant(1)
        sender = await self.sender(f"{address}/$management")
        wanted = {"from-sequence-number": 1, "message-count": Int(1)}
        request = [
            Described(Ulong(0x73), ["look", None, "$management", None, receiver.name]),
            Described(Ulong(0x74), {"operation": "com.microsoft:peek-message"}),
            Described(Ulong(0x77), wanted),
        ]
        await sender.send(b"".join(map(encode_value, request)))
        delivery = await receiver.next(ANSWER_S)
        if delivery is None:
            raise RefusedError(f"the bus cannot read {address}")
        code, text = _status_of(delivery.payload)
        if code >= 500:
            raise RefusedError(f"the bus cannot read {address}: {NOISE.sub('', text)}")

    async def sign_in(self, audience: str, token: str) -> None:
        """Authenticate with a shared access signature (CBS)."""
        receiver = await self.receiver("$cbs")
        receiver.grant(1)
        sender = await self.sender("$cbs")
        properties = {
            "operation": "put-token",
            "type": "servicebus.windows.net:sastoken",
            "name": audience,
        }
        request = [
            Described(Ulong(0x73), ["sign-in", None, "$cbs", None, "cbs"]),
            Described(Ulong(0x74), properties),
            Described(Ulong(0x77), token),
        ]
        await sender.send(b"".join(map(encode_value, request)))
        delivery = await receiver.next(ANSWER_S)
        if delivery is None:
            raise RefusedError("the bus did not answer the authentication request")
        code, text = _status_of(delivery.payload)
        if code not in {200, 202}:
            raise RefusedError(f"the bus refuses the signature: {text} ({code})")

    # --- events ---------------------------------------------------------------------------------

    def _take(self, event: SingleEvent) -> None:
        match event:
            case ConnectionOpened():
                if not self._opened.done():
                    self._opened.set_result(None)
            case LinkAttached(link):
                self._attached(link)
            case LinkDetached(link, _, error):
                self._detached(link, _refusal(error, "the bus detached the link"))
            case SessionEnded():
                raise RefusedError("the bus ended the session")
            case ConnectionClosed(error):
                raise _refusal(error, "the bus closed the connection")
            case TransferReceived():
                self._receiver(event.link).arrived(event)
            case DeliveriesAnswered(_, first, last, state, _):
                for endpoint in self._endpoints.values():
                    if isinstance(endpoint, Receiver):
                        endpoint.answered(first, last, state)
            case DeliveriesUpdated():
                self._sender(event.link).updated(event)
            case LinkFlowed(link):
                self._sender(link).flowed()
            case LinkDrained(link):
                self._receiver(link).emptied()
            case SessionBegun() | SaslInitReceived() | OversizeReceived() | UnknownDeliveries():
                pass
            case _:
                assert_never(event)

    def _sender(self, link: Link) -> Sender:
        endpoint = self._endpoints[link]
        assert isinstance(endpoint, Sender)
        return endpoint

    def _receiver(self, link: Link) -> Receiver:
        endpoint = self._endpoints[link]
        assert isinstance(endpoint, Receiver)
        return endpoint

    def _attached(self, link: Link) -> None:
        """Handle an attach; one without a terminus is the first half of a refusal."""
        terminus = link.source if link.is_incoming else link.target
        waiting = self._attaching[link]
        if terminus is not None and not waiting.done():
            waiting.set_result(None)

    def _detached(self, link: Link, failure: RefusedError) -> None:
        waiting = self._attaching.pop(link, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(failure)
        self._endpoints[link].fail(failure)

    def _fail(self, failure: RefusedError) -> None:
        self.failure = self.failure or failure
        for waiting in (self._opened, *self._attaching.values()):
            if not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()  # nobody may be waiting for it any more
        for endpoint in self._endpoints.values():
            endpoint.fail(failure)


class Sender:
    """Sends on one link as its credit allows."""

    def __init__(self, session: AmqpSession, link: OutgoingLink) -> None:
        self.session = session
        self._link = link
        self._number = 0
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._has_credit = asyncio.Event()
        self._failure: RefusedError | None = None

    async def send(self, payload: bytes) -> None:
        """Send one message and wait for its confirmation."""
        await self.confirmed(await self.begin(payload))

    async def begin(self, payload: bytes) -> asyncio.Future[None]:
        """Send one message as soon as there is credit; await the result with `confirmed`."""
        while self._failure is None and self._link.credit <= 0:
            self._has_credit.clear()
            await self.session.answer_of(asyncio.ensure_future(self._has_credit.wait()))
        if self._failure is not None:
            raise self._failure
        self._number += 1
        tag = self._number.to_bytes(TAG_BYTES, "big")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[tag] = future
        self._link.send(tag, (payload,), is_settled=False)
        self.session.flush()
        await self.session.drained()
        return future

    async def confirmed(self, future: asyncio.Future[None]) -> None:
        """Wait until the bus has stored a message; raises `RefusedError`."""
        await self.session.answer_of(future)

    def updated(self, event: DeliveriesUpdated) -> None:
        """Handle outcomes of deliveries."""
        for delivery_id, tag in zip(event.delivery_ids, event.tags, strict=True):
            waiting = self._waiting.pop(tag, None)
            if not event.is_settled:
                self._link.settle(delivery_id, delivery_id, event.state or Accepted())
            if waiting is None or waiting.done():
                continue
            match event.state:
                case Accepted():
                    waiting.set_result(None)
                case Rejected(condition, description):
                    error = AmqpError(condition or "rejected", description or "")
                    waiting.set_exception(_refusal(error, "the bus refuses the message"))
                case Released() | Modified():
                    waiting.set_exception(BusyError("the bus is busy: send the message again"))
                case _:
                    waiting.set_exception(
                        RefusedError("the bus did not report the outcome of the message")
                    )

    def flowed(self) -> None:
        """Handle more credit."""
        if self._link.credit > 0:
            self._has_credit.set()

    def fail(self, failure: RefusedError) -> None:
        """Fail everything that waits."""
        self._failure = self._failure or failure
        self._has_credit.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()
        self._waiting.clear()


class Receiver:
    """Receives on one link, peek-lock: a delivery is kept until it is settled."""

    def __init__(self, session: AmqpSession, amqp: ClientSession, link: IncomingLink) -> None:
        self._session = session
        self._amqp = amqp
        self._link = link
        self._arrived: deque[TransferReceived] = deque()
        self._news = asyncio.Event()
        self._answers: dict[int, asyncio.Future[DeliveryState | None]] = {}
        self._drained = asyncio.Event()
        self._failure: RefusedError | None = None

    @property
    def name(self) -> str:
        """Name of the link; a reply-to address for requests."""
        return self._link.name

    @property
    def session_id(self) -> str | None:
        """The session that was granted."""
        source = self._link.source
        for key, value in ((source.filters if source else None) or {}).items():
            if str(key) == SESSION_FILTER:
                found = value.value if isinstance(value, Described) else value
                return None if found is None else str(found)
        return None

    @property
    def credit(self) -> int:
        """Outstanding credit: requested deliveries that have not arrived."""
        return self._link.credit

    @property
    def waiting(self) -> int:
        """Deliveries that have arrived and were not taken with `next`."""
        return len(self._arrived)

    def grant(self, count: int) -> None:
        """Set the credit to this number of deliveries."""
        self._link.grant(count)
        self._session.flush()

    async def next(self, wait_s: float) -> TransferReceived | None:
        """Return the next delivery, None when there is none within the wait."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            remaining_s = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._news.wait(), max(remaining_s, 0))
            except TimeoutError:
                return None
        return self._arrived.popleft()

    async def withdraw(self) -> list[TransferReceived]:
        """Drain the credit; return deliveries that arrived in the meantime."""
        if self._failure is None and self._link.credit > 0:
            self._drained.clear()
            self._amqp.drain(self._link)
            self._session.flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), ANSWER_S)
        left = list(self._arrived)
        self._arrived.clear()
        return left

    async def settle(self, delivery_id: int, state: DeliveryState) -> None:
        """Settle a delivery and wait until the bus has stored it; raises `RefusedError`."""
        await self.settled(self.decide(delivery_id, state), state)

    def decide(
        self, delivery_id: int, state: DeliveryState
    ) -> asyncio.Future[DeliveryState | None]:
        """Settle a delivery; await the result with `settled`. Raises `RefusedError`."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[DeliveryState | None] = asyncio.get_running_loop().create_future()
        self._answers[delivery_id] = future
        self._amqp.dispose(delivery_id, delivery_id, state)
        self._session.flush()
        return future

    async def settled(
        self, future: asyncio.Future[DeliveryState | None], state: DeliveryState
    ) -> None:
        """Wait until the bus has stored a settlement; raises `RefusedError`."""
        answer = await self._session.answer_of(future)
        if isinstance(answer, Rejected) and (
            not isinstance(state, Rejected) or answer.condition is not None
        ):
            error = AmqpError(answer.condition or "rejected", answer.description or "")
            raise _refusal(error, "the bus refuses the settlement")

    def arrived(self, delivery: TransferReceived) -> None:
        """Handle a delivery."""
        self._arrived.append(delivery)
        self._news.set()

    def answered(self, first: int, last: int, state: DeliveryState | None) -> None:
        """Handle answers to settlements."""
        for delivery_id in range(first, last + 1):
            waiting = self._answers.pop(delivery_id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(state)

    def emptied(self) -> None:
        """Handle the end of a drain."""
        self._drained.set()

    def fail(self, failure: RefusedError) -> None:
        """Fail everything that waits."""
        self._failure = self._failure or failure
        self._news.set()
        self._drained.set()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()
        self._answers.clear()


# --- connecting ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(
    endpoint: Endpoint, audience: str, ca_file: str | None = None
) -> AsyncIterator[AmqpSession]:
    """Connect and authenticate for an entity; raises `RefusedError` and `ContextError`."""
    where = f"{endpoint.host}:{endpoint.port}"
    trust = _trust(ca_file) if endpoint.is_tls else None
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(endpoint.host, endpoint.port, ssl=trust), ANSWER_S
        )
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            f"the certificate of {where} is not trusted ({error.verify_message}): set its"
            " CA with postbus context set NAME --ca-file FILE"
        ) from None
    except ssl.SSLError as error:
        raise RefusedError(f"TLS with {where} failed: {error.reason}") from None
    except (TimeoutError, OSError) as error:
        raise RefusedError(
            f"no bus answers at {where} ({_reason(error)}): start one with postbus dev, or select"
            " another with postbus context use"
        ) from None
    session = AmqpSession(_engine(endpoint), writer)
    tasks = [asyncio.create_task(session.run(reader))]
    try:
        await session.open()
        tasks.append(asyncio.create_task(session.tick()))
        if endpoint.signature is not None:
            await session.sign_in(f"amqp://{endpoint.host}/{audience}", endpoint.signature)
        yield session
    finally:
        session.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _engine(endpoint: Endpoint) -> ClientConnection:
    has_key = endpoint.signature is None
    return ClientConnection(
        container_id=f"postbus-cli-{uuid.uuid4()}",
        limits=Limits(max_message_bytes=MAX_MESSAGE_BYTES),
        hostname=endpoint.host,
        mechanism="PLAIN" if has_key else "ANONYMOUS",
        initial_response=f"\0{endpoint.rule}\0{endpoint.key}".encode() if has_key else None,
    )


def _trust(ca_file: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context()
        if ca_file is not None:
            context.load_verify_locations(ca_file)
        return context
    except (OSError, ssl.SSLError):
        raise ContextError(f"CA file {ca_file}: contains no certificates (PEM)") from None


def _refusal(error: AmqpError | None, otherwise: str) -> RefusedError:
    if error is None:
        return RefusedError(otherwise)
    if error.description == "SASL was refused":
        return RefusedError("the bus refuses the key: check the connection string")
    text = NOISE.sub("", error.description or otherwise)
    if error.condition == SESSION_TIMEOUT:
        return NoSessionError(text)
    if error.condition == SERVER_BUSY:
        return BusyError(f"{text} ({error.condition})")
    return RefusedError(f"{text} ({error.condition})")


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def _status_of(payload: bytes) -> tuple[int, str]:
    at, values = 0, {}
    while at < len(payload):
        section, at = decode_value(payload, at)
        if isinstance(section, Described) and section.descriptor == 0x74:
            values = section.value
    code = values.get("status-code", values.get("statusCode", 0))
    text = values.get("status-description", values.get("statusDescription", ""))
    return int(code or 0), str(text)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
