"""Request/response over a pair of links, as `$cbs` and `$management` nodes use it.

A request arrives on a link to the node; its response leaves on the link of the same session that
receives from the node, when there is credit for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from postbus.amqp import conditions
from postbus.amqp.events import OversizeReceived, TransferReceived
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.amqp.performatives import ACCEPTED, DeliveryState, Rejected, TransactionalState
from postbus.amqp.session import Session
from postbus.edge.amqp.link_context import PacedContext
from postbus.message.codec import DecodeError, decode_value, encode_list, encode_value
from postbus.message.sections import slice_message

REQUEST_CREDIT: Final = 100
MAX_OPEN_REQUESTS: Final = 1_000
"""Requests of one link without an answer above which others are refused."""

MAX_HELD_RESPONSES: Final = 1_000
"""Responses kept for a client that grants no credit; above this the oldest are dropped."""

MAX_ANSWER_BYTES: Final = 256 << 10
"""Bytes of answers that a connection may hold while further requests are taken: answers that wait
for credit, and those to be written in this iteration of the event loop."""

LARGE_ANSWERS: Final = frozenset(
    f"com.microsoft:{name}"
    for name in (
        "peek-message",
        "receive-by-sequence-number",
        "get-session-state",
        "get-message-sessions",
        "enumerate-rules",
    )
)
"""Operations whose answers may be as large as messages: a connection has one in flight at a time.
"""

REQUEST_BYTES: Final = 1 << 20
"""Maximum bytes of a request, for one that schedules messages beside a message of the largest size.
Lists of 10,000 lock tokens or numbers have 170 KB."""

HEAD_HEAP_BYTES: Final = 64 << 10
"""Heap of a request's properties: SDKs send ten."""

BODY_HEAP_BYTES: Final = 4 << 20
"""Heap of the values of a body: 10,000 lock tokens or numbers take 1 MB."""

SCHEDULE_HEAP_BYTES: Final = 16 << 20
"""The same of a body with messages, which are binary: 10,000 of them with their names."""


@dataclass(slots=True)
class Request:
    """A request whose body is still encoded, since authorization is checked first.

    `message_id` is its encoded value, echoed with its AMQP type. `transaction_id`: the transaction
    of the request. `account`: charged for its bytes while it waits.
    """

    message_id: bytes
    reply_to: str | None
    properties: dict[str, Any]
    encoded_body: bytes
    size_bytes: int
    transaction_id: bytes | None = None
    account: str = ""

    @property
    def operation(self) -> object:
        return self.properties.get("operation")

    @property
    def is_large_answer(self) -> bool:
        return isinstance(self.operation, str) and self.operation in LARGE_ANSWERS

    def body(self, max_heap_bytes: int = BODY_HEAP_BYTES) -> Any:
        """Return the value of the body. Raises `DecodeError`."""
        if not self.encoded_body:
            return None
        section, _ = decode_value(self.encoded_body, max_heap_bytes=max_heap_bytes)
        return section.value


@dataclass(slots=True)
class Response:
    """`properties` values are typed AMQP values; `body` goes into an amqp-value section."""

    properties: dict[str, Any]
    body: Any = None


Respond: TypeAlias = Callable[[Response], None]
Handle: TypeAlias = Callable[[Request, Respond], None]


class RequestContext(PacedContext, Protocol):
    """For endpoints of requests and responses."""

    large_answers: int
    """Requests in flight with answers that may be large."""

    held_answer_bytes: int
    """Bytes of answers that wait for credit."""

    def feed_starved(self) -> None:
        """Pump the endpoints that wait: something was read, settled or answered."""

    def response_endpoint(
        self, session: Session, node: str, reply_to: str | None
    ) -> ResponseEndpoint | None:
        """Return the link that takes the responses of a node in a session."""


class RequestEndpoint:
    """Endpoint of a client's request link. Requests are taken in order, and only while answers are
    sent.
    """

    idleness: Final = None
    """Clients keep these links for a token or a peek in an hour."""

    def __init__(
        self,
        connection: RequestContext,
        link: IncomingLink,
        node: str,
        handle: Handle,
        max_bytes: int,
    ) -> None:
        self.path = node
        self._max_bytes = max_bytes
        self._connection = connection
        self._link = link
        self._handle = handle
        self._waiting: deque[Request] = deque()  # not taken yet
        self._open = 0  # taken, without an answer

    def attach(self) -> None:
        self._link.accept(max_message_bytes=self._max_bytes, credit=REQUEST_CREDIT)

    def receive(self, transfers: list[TransferReceived]) -> None:
        """Settle each request; answer a client that ignores credit with a busy error."""
        for transfer in transfers:
            request = _request_of(transfer)
            if isinstance(request, Request):
                request = self._room_for(request)
            if not transfer.is_settled:
                outcome: DeliveryState = request if isinstance(request, Rejected) else ACCEPTED
                if isinstance(transfer.state, TransactionalState):
                    outcome = TransactionalState(transfer.state.transaction_id, outcome)
                self._link.settle(transfer.delivery_id, transfer.delivery_id, outcome)
            if isinstance(request, Request):
                self._waiting.append(request)
        self.pump()
        self._replenish()
        self._connection.flush_soon()

    def refuse_oversize(self, event: OversizeReceived) -> None:
        if not event.is_settled:
            text = f"A request may have {self._max_bytes} bytes."
            state = Rejected(conditions.MESSAGE_SIZE_EXCEEDED, text)
            self._link.settle(event.delivery_id, event.delivery_id, state)
            self._connection.flush_soon()

    def close(self) -> None:
        """Forget requests that were not taken."""
        while self._waiting:
            self._give_back(self._waiting.popleft())

    def pump(self) -> None:
        """Take requests while the client reads their answers."""
        while self._waiting and not self._must_wait():
            request = self._waiting.popleft()
            self._give_back(request)
            self._open += 1
            if request.is_large_answer:
                self._connection.large_answers += 1
            self._handle(request, partial(self._respond, request))

    def _room_for(self, request: Request) -> Request | Rejected:
        """Count a request, or answer that there is no budget for it."""
        connection = self._connection
        if self._open + len(self._waiting) >= MAX_OPEN_REQUESTS:
            return Rejected(conditions.SERVER_BUSY, "Too many requests wait for an answer.")
        if self._waiting and connection.inflight.is_full(connection.account):
            return Rejected(conditions.SERVER_BUSY, "Too many bytes wait for an answer.")
        request.account = connection.account
        connection.inflight.take(request.account, request.size_bytes)
        return request

    def _give_back(self, request: Request) -> None:
        self._connection.inflight.give_back(request.account, request.size_bytes)

    def _must_wait(self) -> bool:
        """Return whether the client must read first; if so, `pump` is called again after that."""
        connection = self._connection
        if connection.large_answers or connection.held_answer_bytes > MAX_ANSWER_BYTES:
            connection.note_starved(self)
            return True
        return connection.must_wait(self, self._link.session, MAX_ANSWER_BYTES)

    def _replenish(self) -> None:
        """Grant credit for answered requests only, since the others are kept in memory."""
        link = self._link
        credit = max(REQUEST_CREDIT - self._open - len(self._waiting), 0)
        if link.is_attached and link.credit < min(credit, REQUEST_CREDIT >> 1):
            link.grant(credit)
            self._connection.flush_soon()

    def _respond(self, request: Request, response: Response) -> None:
        self._open -= 1
        self._replenish()
        connection = self._connection
        if request.is_large_answer:
            connection.large_answers -= 1
            connection.feed_starved()
        endpoint = connection.response_endpoint(self._link.session, self.path, request.reply_to)
        if endpoint is not None:
            endpoint.send(encode_response(request, response))


class ResponseEndpoint:
    """Endpoint of a client's response link."""

    idleness: Final = None

    def __init__(self, connection: RequestContext, link: OutgoingLink, node: str) -> None:
        self.path = node
        self._connection = connection
        self._link = link
        self._held: deque[bytes] = deque()
        self._tag = 0

    def attach(self) -> None:
        self._link.accept()

    def answers(self, session: Session, node: str) -> bool:
        return self._link.session is session and self.path == node and self._link.is_attached

    def is_addressed(self, reply_to: str | None) -> bool:
        target = self._link.target
        return reply_to is not None and (
            reply_to == self._link.name or (target is not None and reply_to == target.address)
        )

    def send(self, payload: bytes) -> None:
        if len(self._held) == MAX_HELD_RESPONSES:
            self._pop()
        self._held.append(payload)
        self._connection.held_answer_bytes += len(payload)
        self.flowed()

    def flowed(self) -> None:
        """Send held responses as far as credit allows; responses are settled."""
        while self._held and self._link.credit > 0 and self._link.is_attached:
            self._tag += 1
            self._link.send(self._tag.to_bytes(16, "big"), (self._pop(),), is_settled=True)
        if self._link.is_draining:
            self._link.drained()
        self._connection.flush_soon()

    def close(self) -> None:
        while self._held:
            self._pop()

    def _pop(self) -> bytes:
        payload = self._held.popleft()
        self._connection.held_answer_bytes -= len(payload)
        return payload


def _request_of(transfer: TransferReceived) -> Request | Rejected:
    try:
        request = decode_request(transfer.payload)
    except DecodeError as error:
        return Rejected(conditions.DECODE_ERROR, str(error))
    if isinstance(transfer.state, TransactionalState):
        request.transaction_id = transfer.state.transaction_id
    return request


def decode_request(payload: bytes) -> Request:
    """Return a request. Raises `DecodeError`."""
    envelope = slice_message(payload, is_body_checked=False)
    if envelope.message_id is None:
        raise DecodeError("a request needs a message-id")
    reply_to = None
    if envelope.properties:
        section, _ = decode_value(envelope.properties, max_heap_bytes=HEAD_HEAP_BYTES)
        fields = section.value
        reply_to = fields[4] if len(fields) > 4 and isinstance(fields[4], str) else None
    properties: dict[str, Any] = {}
    if envelope.application_properties:
        encoded = envelope.application_properties
        section, _ = decode_value(encoded, max_heap_bytes=HEAD_HEAP_BYTES)
        if isinstance(section.value, dict):
            properties = {str(key): value for key, value in section.value.items()}
    return Request(envelope.message_id, reply_to, properties, envelope.body, len(payload))


def encode_response(request: Request, response: Response) -> bytes:
    """Return the response message, correlated with its request."""
    properties = encode_list([b"\x40"] * 5 + [request.message_id])
    return (
        b"\x00\x53\x73"
        + properties
        + b"\x00\x53\x74"
        + encode_value(response.properties)
        + b"\x00\x53\x77"
        + encode_value(response.body)
    )
