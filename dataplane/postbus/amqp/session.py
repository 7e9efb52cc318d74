"""One AMQP session: windows, delivery ids, links by handle, dispositions.

Source: AMQP 1.0 part 2, 2.5. Delivery ids are taken when a transfer is written, so they are
consecutive over all links of the session whatever waited for a window.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from postbus.amqp import conditions
from postbus.amqp import performatives as p
from postbus.amqp.conditions import (
    AmqpConnectionError,
    AmqpError,
    AmqpLinkError,
    AmqpSessionError,
)
from postbus.amqp.events import (
    DeliveriesUpdated,
    Event,
    LinkAttached,
    LinkDetached,
    LinkFlowed,
    OversizeReceived,
    TransferReceived,
    UnknownDeliveries,
)
from postbus.amqp.frames import LinkFrame, accepted_disposition, frame
from postbus.amqp.link import SERIAL, IncomingLink, Link, OutgoingLink
from postbus.amqp.performatives import ACCEPTED, DeliveryState
from postbus.message.codec import encode_value

if TYPE_CHECKING:
    from postbus.amqp.connection import Connection

TransferFields: TypeAlias = tuple[
    int, int | None, bytes | None, int, bool, bool, DeliveryState | None, bool
]
"""handle, delivery-id, tag, message-format, settled, more, state, aborted"""

_Held: TypeAlias = tuple[OutgoingLink, LinkFrame, bytes, tuple[bytes, ...], bool, int]


class Session:
    """Server side of a session; made by the connection when a begin arrives."""

    def __init__(
        self,
        connection: Connection,
        channel: int,
        remote_channel: int,
        *,
        next_incoming_id: int,
        remote_window: int,
        remote_handle_max: int,
    ) -> None:
        self.connection = connection
        self.channel = channel
        self.remote_channel = remote_channel
        self.context: Any = None
        self.is_ended = False
        self.unsettled: dict[int, tuple[OutgoingLink, bytes]] = {}
        self._links: dict[int, Link] = {}
        self._names: dict[tuple[str, bool], Link] = {}
        self._handles: set[int] = set()
        self._remote_handle_max = remote_handle_max
        self._next_incoming_id = next_incoming_id
        self._window_size = connection.limits.incoming_window
        self._window_left = self._window_size
        self._next_outgoing_id = connection.delivery_id_base
        self._next_delivery_id = connection.delivery_id_base
        self._remote_window = remote_window
        self._held: deque[_Held] = deque()

    # --- sending --------------------------------------------------------------------------------

    def write(self, body: bytes) -> None:
        """Write a performative on this session's channel."""
        self.connection.write(frame(self.channel, body))

    def write_flow(
        self,
        handle: int | None = None,
        delivery_count: int = 0,
        credit: int = 0,
        *,
        is_drain: bool = False,
    ) -> None:
        """Write a flow with all fields clients look at; refreshes the incoming window."""
        self._window_left = self._window_size
        link_fields = [p.NULL] * 3
        if handle is not None:
            link_fields = [p.uint(handle), p.uint(delivery_count), p.uint(credit)]
        self.write(
            p.described_list(
                p.FLOW,
                [
                    p.uint(self._next_incoming_id),
                    p.uint(self._window_size),
                    p.uint(self._next_outgoing_id),
                    p.uint(0x7FFF_FFFF),
                    *link_fields,
                    p.NULL,
                    encode_value(is_drain),
                    b"\x42",
                    p.NULL,
                ],
            )
        )

    def write_disposition(
        self, is_receiver: bool, first: int, last: int, state: DeliveryState
    ) -> None:
        """Settle a range of deliveries of one direction."""
        if self.is_ended:
            return
        if state is ACCEPTED:
            self.connection.write(accepted_disposition(self.channel, is_receiver, first, last))
            return
        self.write(
            p.described_list(
                p.DISPOSITION,
                [
                    encode_value(is_receiver),
                    p.uint(first),
                    p.uint(last),
                    b"\x41",
                    p.encode_state(state),
                    b"\x42",
                ],
            )
        )

    def settle_outgoing(self, first: int, last: int, state: DeliveryState) -> None:
        """Answer dispositions of the peer on our deliveries and forget them."""
        for delivery_id in range(first, last + 1):
            self.unsettled.pop(delivery_id, None)
        self.write_disposition(False, first, last, state)

    def settle_unknown(self, first: int, last: int, state: DeliveryState) -> None:
        """Answer a disposition on deliveries this session does not know."""
        self.write_disposition(False, first, last, state)

    def send_transfer(
        self,
        link: OutgoingLink,
        pack: LinkFrame,
        tag: bytes,
        parts: tuple[bytes, ...],
        is_settled: bool,
        message_format: int,
    ) -> None:
        """Write a delivery, or hold it until the peer's incoming window opens."""
        if self._remote_window <= 0 or self._held:
            self._held.append((link, pack, tag, parts, is_settled, message_format))
            return
        self._write_transfer(link, pack, tag, parts, is_settled, message_format)

    @property
    def held_count(self) -> int:
        """Deliveries waiting for the peer's window."""
        return len(self._held)

    def end(self, error: AmqpError | None = None) -> None:
        """End the session from our side."""
        if not self.is_ended:
            self.write(p.described_list(p.END, [p.encode_error(error)]))
            self._discard()

    # --- receiving ------------------------------------------------------------------------------

    def receive_attach(self, fields: list[Any], raw: tuple[bytes, bytes]) -> Event:
        """Take an attach. Raises session errors for handles and names in use."""
        name, handle, role = fields[0], p.require_uint(fields[1], "handle"), fields[2]
        if not isinstance(name, str) or not isinstance(role, bool):
            raise AmqpConnectionError(conditions.DECODE_ERROR, "attach without name or role")
        if handle > self.connection.limits.handle_max:
            raise AmqpConnectionError(conditions.FRAMING_ERROR, "handle above handle-max")
        if handle in self._links:
            raise AmqpSessionError(conditions.HANDLE_IN_USE, "the handle is in use")
        if (name, role) in self._names:
            raise AmqpSessionError(conditions.HANDLE_IN_USE, "a link of this name is attached")
        kind = OutgoingLink if role else IncomingLink
        properties = fields[13] if isinstance(fields[13], dict) else {}
        link = kind(
            self,
            name,
            self._free_handle(),
            handle,
            p.decode_terminus(fields[5], raw[0]),
            p.decode_terminus(fields[6], raw[1]),
            p.optional_uint(fields[3], "snd-settle-mode", 2, 2),
            p.optional_uint(fields[4], "rcv-settle-mode", 0, 1),
            {str(key): value for key, value in properties.items()},
        )
        if not role:
            link.delivery_count = p.optional_uint(fields[9], "initial-delivery-count", 0)
        self._links[handle] = link
        self._names[name, role] = link
        self._handles.add(link.handle)
        return LinkAttached(link)

    def receive_flow(self, fields: list[Any]) -> list[Event]:
        """Take the peer's windows and, with a handle, its credit."""
        next_incoming = p.optional_uint(
            fields[0], "next-incoming-id", self.connection.delivery_id_base
        )
        window = p.require_uint(fields[1], "incoming-window")
        on_the_way = (self._next_outgoing_id - next_incoming) % SERIAL
        self._remote_window = window - on_the_way if on_the_way < SERIAL // 2 else window
        events: list[Event] = []
        handle = fields[4]
        link = None if handle is None else self._links.get(p.require_uint(handle, "handle"))
        if isinstance(link, OutgoingLink):
            delivery_count = fields[5]
            if delivery_count is not None:
                delivery_count = p.require_uint(delivery_count, "delivery-count")
            credit = p.optional_uint(fields[6], "link-credit", 0)
            link.on_flow(delivery_count, credit, is_draining=fields[8] is True)
            if link.is_attached:
                events.append(LinkFlowed(link))
        if self._held:
            self._flush_held()
        if fields[9] is True:
            if isinstance(link, OutgoingLink):
                if not link.is_draining:
                    link.echo_flow()
            elif isinstance(link, IncomingLink):
                self.write_flow(link.handle, link.delivery_count % SERIAL, link.credit)
            else:
                self.write_flow()
        return events

    def receive_transfer(self, fields: TransferFields, payload: bytes) -> Event | None:
        """Take one transfer frame; returns an event with the last frame of a delivery."""
        handle, delivery_id, tag, message_format, is_settled, more, state, is_aborted = fields
        self._next_incoming_id = (self._next_incoming_id + 1) % SERIAL
        self._window_left -= 1
        if self._window_left < self._window_size >> 1:
            self.write_flow()
        link = self._links.get(handle)
        if link is None:
            if self.connection.is_handle_crossing(self, handle):
                return None
            raise AmqpSessionError(conditions.UNATTACHED_HANDLE, "transfer on an unknown handle")
        if not isinstance(link, IncomingLink):
            raise AmqpSessionError(conditions.ERRANT_LINK, "transfer on a receiving link")
        if link.partial_transfer is None:
            if delivery_id is None:
                raise AmqpLinkError(conditions.INVALID_FIELD, "first transfer without delivery-id")
            if not more and not is_aborted:
                link.delivery_count += 1
                link.credit -= 1
                if _is_oversize(link, len(payload)):
                    return OversizeReceived(link, delivery_id, is_settled)
                return TransferReceived(
                    link, delivery_id, tag or b"", message_format, is_settled, state, payload
                )
            link.partial_transfer = (delivery_id, tag or b"", message_format, is_settled, state)
        if is_aborted:
            _forget_partial(link)
            link.delivery_count += 1
            return None
        link.partial_bytes += len(payload)
        is_oversize = _is_oversize(link, link.partial_bytes)
        if is_oversize:
            link.partial.clear()  # dropped as it comes, so that the link and its credit go on
        else:
            link.partial.append(payload)
        if more:
            return None
        delivery_id, tag, message_format, was_settled, first_state = link.partial_transfer
        whole = b"".join(link.partial)
        _forget_partial(link)
        link.delivery_count += 1
        link.credit -= 1
        if is_oversize:
            return OversizeReceived(link, delivery_id, is_settled or was_settled)
        return TransferReceived(
            link,
            delivery_id,
            tag,
            message_format,
            is_settled or was_settled,
            state or first_state,
            whole,
        )

    def receive_disposition(
        self,
        first: int,
        last: int,
        is_settled: bool,
        state: DeliveryState | None,
        events: list[Event],
    ) -> None:
        """Take the peer's outcome of our deliveries; ranges are clamped to what is unsettled."""
        unsettled = self.unsettled
        if first == last:
            entry = unsettled.get(first)
            if entry is None:
                if not is_settled:
                    events.append(UnknownDeliveries(self, first, first, state))
                return
            self._update(entry[0], first, entry[1], is_settled, state, events)
            return
        count = (last - first) % SERIAL + 1
        if count > len(unsettled):
            chosen = [key for key in unsettled if (key - first) % SERIAL < count]
        else:
            ids = ((first + step) % SERIAL for step in range(count))
            chosen = [key for key in ids if key in unsettled]
        if not chosen and not is_settled:
            events.append(UnknownDeliveries(self, first, first, state))
        for delivery_id in chosen:
            link, tag = unsettled[delivery_id]
            self._update(link, delivery_id, tag, is_settled, state, events)

    def receive_detach(self, fields: list[Any]) -> Event | None:
        """Take a detach; one for a link that is gone already crossed ours and is ignored."""
        link = self._links.get(p.require_uint(fields[0], "handle"))
        if link is None:
            return None
        error = p.decode_error(fields[2])
        is_closed = fields[1] is True
        link.detach(None, is_closed=is_closed)
        return LinkDetached(link, is_closed, error)

    def receive_end(self) -> None:
        """The peer ended the session."""
        if not self.is_ended:
            self.write(p.described_list(p.END, [p.NULL]))
            self._discard()

    def link_of(self, handle: int) -> Link | None:
        return self._links.get(handle)

    def links(self) -> list[Link]:
        return list(self._links.values())

    def forget_link(self, link: Link) -> None:
        """Free a link's handles and name; its unsettled deliveries are dropped."""
        self._links.pop(link.remote_handle, None)
        self._names.pop((link.name, not link.is_incoming), None)
        self._handles.discard(link.handle)
        self.connection.note_gone(self, link.remote_handle)
        if isinstance(link, IncomingLink):
            _forget_partial(link)
        else:
            gone = [key for key, entry in self.unsettled.items() if entry[0] is link]
            for delivery_id in gone:
                del self.unsettled[delivery_id]
            if self._held:
                self._held = deque(entry for entry in self._held if entry[0] is not link)

    # --- internals ------------------------------------------------------------------------------

    def _update(
        self,
        link: OutgoingLink,
        delivery_id: int,
        tag: bytes,
        is_settled: bool,
        state: DeliveryState | None,
        events: list[Event],
    ) -> None:
        """Report one delivery, joined to the event before it when that says the same."""
        if is_settled:
            del self.unsettled[delivery_id]
        if events:
            event = events[-1]
            if (
                type(event) is DeliveriesUpdated
                and event.link is link
                and event.state is state
                and event.is_settled is is_settled
            ):
                event.delivery_ids.append(delivery_id)
                event.tags.append(tag)
                return
        events.append(DeliveriesUpdated(link, [delivery_id], [tag], state, is_settled))

    def _write_transfer(
        self,
        link: OutgoingLink,
        pack: LinkFrame,
        tag: bytes,
        parts: tuple[bytes, ...],
        is_settled: bool,
        message_format: int,
    ) -> None:
        delivery_id = self._next_delivery_id
        self._next_delivery_id = (delivery_id + 1) & 0xFFFF_FFFF
        if not is_settled:
            self.unsettled[delivery_id] = (link, tag)
        size = 0
        for part in parts:
            size += len(part)
        connection = self.connection
        if size <= connection.payload_limit and len(tag) == 16 and not message_format:
            self._remote_window -= 1
            self._next_outgoing_id = (self._next_outgoing_id + 1) & 0xFFFF_FFFF
            connection.write_parts(pack(size, delivery_id, tag, is_settled), parts, size)
            return
        self._write_frames(link, delivery_id, tag, b"".join(parts), is_settled, message_format)

    def _write_frames(
        self,
        link: OutgoingLink,
        delivery_id: int,
        tag: bytes,
        payload: bytes,
        is_settled: bool,
        message_format: int,
    ) -> None:
        """Write a delivery in as many frames as the peer's max-frame-size asks for."""
        step = self.connection.payload_limit
        for start in range(0, max(len(payload), 1), step):
            chunk = payload[start : start + step]
            more = start + step < len(payload)
            first = [p.uint(delivery_id), encode_value(tag), p.uint(message_format)]
            fields = [
                p.uint(link.handle),
                *(first if start == 0 else [p.NULL] * 3),
                encode_value(is_settled),
                encode_value(more),
                p.NULL,
                p.NULL,
                b"\x42",
                b"\x42",
                b"\x42",
            ]
            self._remote_window -= 1
            self._next_outgoing_id = (self._next_outgoing_id + 1) % SERIAL
            self.write(p.described_list(p.TRANSFER, fields) + chunk)

    def _flush_held(self) -> None:
        held = self._held
        while held and self._remote_window > 0:
            self._write_transfer(*held.popleft())

    def _free_handle(self) -> int:
        handle = 0
        while handle in self._handles:
            handle += 1
        if handle > self._remote_handle_max:
            raise AmqpSessionError(conditions.RESOURCE_LIMIT_EXCEEDED, "too many links")
        return handle

    def _discard(self) -> None:
        self.is_ended = True
        self._links.clear()
        self._names.clear()
        self._handles.clear()
        self._held.clear()
        self.unsettled.clear()


def _is_oversize(link: IncomingLink, size: int) -> bool:
    return 0 < link.max_message_bytes < size


def _forget_partial(link: IncomingLink) -> None:
    link.partial.clear()
    link.partial_bytes = 0
    link.partial_transfer = None
