"""Events of the engine for its owner, in the order they happened on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from postbus.amqp.conditions import AmqpError
    from postbus.amqp.link import IncomingLink, Link, OutgoingLink
    from postbus.amqp.performatives import DeliveryState
    from postbus.amqp.session import Session


@dataclass(slots=True)
class SaslInitReceived:
    """Answer with `Connection.accept_sasl` or `Connection.refuse_sasl`."""

    mechanism: str
    initial_response: bytes
    hostname: str | None


@dataclass(slots=True)
class ConnectionOpened:
    container_id: str
    hostname: str | None
    properties: dict[Any, Any]


@dataclass(slots=True)
class ConnectionClosed:
    """Write what `data_to_send` returns, then close the transport."""

    error: AmqpError | None


@dataclass(slots=True)
class SessionBegun:
    session: Session


@dataclass(slots=True)
class SessionEnded:
    """The session ended, and all its links with it."""

    session: Session


@dataclass(slots=True)
class LinkAttached:
    """Answer with `accept` or `refuse` of the link."""

    link: Link


@dataclass(slots=True)
class LinkFlowed:
    """The peer granted or withdrew credit, or asks to drain: see `limit` and `is_draining`."""

    link: OutgoingLink


@dataclass(slots=True)
class LinkDetached:
    link: Link
    is_closed: bool
    error: AmqpError | None


class TransferReceived(NamedTuple):
    """One complete delivery from the peer."""

    link: IncomingLink
    delivery_id: int
    delivery_tag: bytes
    message_format: int
    is_settled: bool
    state: DeliveryState | None
    payload: bytes


class TransfersReceived(NamedTuple):
    """Complete deliveries of one link that came in one read and look alike, in order.

    All lists have one length. They have no state and message-format 0.
    """

    link: IncomingLink
    delivery_ids: list[int]
    tags: list[bytes]
    payloads: list[bytes]
    is_settled: bool

    def each(self) -> list[TransferReceived]:
        """Return the same deliveries one by one."""
        return [
            TransferReceived(self.link, delivery_id, tag, 0, self.is_settled, None, payload)
            for delivery_id, tag, payload in zip(
                self.delivery_ids, self.tags, self.payloads, strict=True
            )
        ]


@dataclass(slots=True)
class OversizeReceived:
    """A delivery larger than the link allows was dropped; answer it unless it is settled."""

    link: IncomingLink
    delivery_id: int
    is_settled: bool
    state: DeliveryState | None


@dataclass(slots=True)
class DeliveriesUpdated:
    """The peer's disposition on our deliveries; `tags[i]` belongs to `delivery_ids[i]`."""

    link: OutgoingLink
    delivery_ids: list[int]
    tags: list[bytes]
    state: DeliveryState | None
    is_settled: bool


@dataclass(slots=True)
class UnknownDeliveries:
    """A disposition on ids that are not unsettled here; answer through `Session.settle_unknown`."""

    session: Session
    first: int
    last: int
    state: DeliveryState | None


@dataclass(slots=True)
class DeliveriesAnswered:
    """The peer's disposition, as a sender, on its deliveries `first` to `last`; clients only."""

    session: Session
    first: int
    last: int
    state: DeliveryState | None
    is_settled: bool


@dataclass(slots=True)
class LinkDrained:
    """The peer gave up the credit it had left; clients only."""

    link: IncomingLink


SingleEvent: TypeAlias = (
    SaslInitReceived
    | ConnectionOpened
    | ConnectionClosed
    | SessionBegun
    | SessionEnded
    | LinkAttached
    | LinkFlowed
    | LinkDetached
    | TransferReceived
    | OversizeReceived
    | DeliveriesUpdated
    | UnknownDeliveries
    | DeliveriesAnswered
    | LinkDrained
)

Event: TypeAlias = SingleEvent | TransfersReceived


def one_by_one(events: Iterable[Event]) -> Iterator[SingleEvent]:
    """Yield events with runs of transfers taken apart, for owners that gain nothing from them."""
    for event in events:
        if isinstance(event, TransfersReceived):
            yield from event.each()
        else:
            yield event
