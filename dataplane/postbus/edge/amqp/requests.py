"""Request/response over a pair of links, as `$cbs` and `$management` nodes use it.

A request arrives on a link to the node; its response leaves on the link of the same session that
receives from the node, when there is credit for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from postbus.amqp import conditions
from postbus.amqp.events import OversizeReceived, TransferReceived
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.amqp.performatives import ACCEPTED, DeliveryState, Rejected, TransactionalState
from postbus.amqp.session import Session
from postbus.message.codec import DecodeError, decode_value, encode_list, encode_value
from postbus.message.sections import slice_message

if TYPE_CHECKING:
    from postbus.edge.amqp.connection import AmqpConnection

REQUEST_CREDIT: Final = 100
MAX_OPEN_REQUESTS: Final = 1_000
"""Requests of one link without an answer above which others are refused."""

MAX_HELD_RESPONSES: Final = 1_000
MAX_HELD_BYTES: Final = 8 << 20
"""Responses kept for a client that grants no credit; more are dropped, oldest first."""

REQUEST_SPARE_BYTES: Final = 1 << 20
"""What a management request may have beside a message of the largest size, which it may schedule.
It is also the most that a client may send to `$cbs` before it has shown a key."""


@dataclass(slots=True)
class Request:
    """A decoded request. `message_id` is its encoded value, echoed with its AMQP type.

    `transaction_id`: the transaction the client made it part of.
    """

    message_id: bytes
    reply_to: str | None
    properties: dict[str, Any]
    body: Any
    transaction_id: bytes | None = None


@dataclass(slots=True)
class Response:
    """`properties` values are typed AMQP values; `body` goes into an amqp-value section."""

    properties: dict[str, Any]
    body: Any = None


Respond: TypeAlias = Callable[[Response], None]
Handle: TypeAlias = Callable[[Request, Respond], None]


class RequestDoor:
    """Behind a client's request link."""

    idleness: Final = None
    """Clients keep these links for a token or a peek in an hour."""

    def __init__(
        self,
        connection: AmqpConnection,
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
        self._open = 0  # requests without an answer

    def attach(self) -> None:
        self._link.accept(max_message_bytes=self._max_bytes, credit=REQUEST_CREDIT)

    def receive(self, transfers: list[TransferReceived]) -> None:
        """Settle and handle each request; a client that ignores credit is told that we are busy."""
        for transfer in transfers:
            request = _request_of(transfer)
            if self._open >= MAX_OPEN_REQUESTS:
                request = Rejected(conditions.SERVER_BUSY, "Too many requests wait for an answer.")
            if not transfer.is_settled:
                outcome: DeliveryState = request if isinstance(request, Rejected) else ACCEPTED
                if isinstance(transfer.state, TransactionalState):
                    outcome = TransactionalState(transfer.state.transaction_id, outcome)
                self._link.settle(transfer.delivery_id, transfer.delivery_id, outcome)
            if isinstance(request, Request):
                self._open += 1
                self._handle(request, partial(self._respond, request))
        self._replenish()
        self._connection.flush_soon()

    def refuse_oversize(self, event: OversizeReceived) -> None:
        if not event.is_settled:
            text = f"A request may have {self._max_bytes} bytes."
            state = Rejected(conditions.MESSAGE_SIZE_EXCEEDED, text)
            self._link.settle(event.delivery_id, event.delivery_id, state)
            self._connection.flush_soon()

    def close(self) -> None:
        """Nothing is kept for a request link."""

    def _replenish(self) -> None:
        """Let the client ask again as it is answered: what it asked for is kept meanwhile."""
        link, credit = self._link, REQUEST_CREDIT - self._open
        if link.is_attached and link.credit < min(credit, REQUEST_CREDIT >> 1):
            link.grant(credit)
            self._connection.flush_soon()

    def _respond(self, request: Request, response: Response) -> None:
        self._open -= 1
        self._replenish()
        door = self._connection.response_door(self._link.session, self.path, request.reply_to)
        if door is not None:
            door.send(encode_response(request, response))


class ResponseDoor:
    """Behind a client's response link."""

    idleness: Final = None

    def __init__(self, connection: AmqpConnection, link: OutgoingLink, node: str) -> None:
        self.path = node
        self._connection = connection
        self._link = link
        self._held: deque[bytes] = deque(maxlen=MAX_HELD_RESPONSES)
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
        self._held.append(payload)
        self.flowed()
        while len(self._held) > 1 and sum(map(len, self._held)) > MAX_HELD_BYTES:
            self._held.popleft()

    def flowed(self) -> None:
        """Send what is held as far as there is credit; responses are settled."""
        while self._held and self._link.credit > 0 and self._link.is_attached:
            self._tag += 1
            self._link.send(self._tag.to_bytes(16, "big"), (self._held.popleft(),), is_settled=True)
        if self._link.is_draining:
            self._link.drained()
        self._connection.flush_soon()

    def close(self) -> None:
        self._held.clear()


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
    envelope = slice_message(payload)
    if envelope.message_id is None:
        raise DecodeError("a request needs a message-id")
    reply_to = None
    if envelope.properties:
        section, _ = decode_value(envelope.properties)
        fields = section.value
        reply_to = fields[4] if len(fields) > 4 and isinstance(fields[4], str) else None
    properties: dict[str, Any] = {}
    if envelope.application_properties:
        section, _ = decode_value(envelope.application_properties)
        if isinstance(section.value, dict):
            properties = {str(key): value for key, value in section.value.items()}
    body = None
    if envelope.body:
        section, _ = decode_value(envelope.body)
        body = section.value
    return Request(envelope.message_id, reply_to, properties, body)


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
