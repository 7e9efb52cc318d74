"""One AMQP session: windows, delivery ids, links by handle, dispositions.

Source: AMQP 1.0 part 2, 2.5. A delivery id is assigned when its transfer is written, so ids
are consecutive over all links of the session even if some deliveries were held for a window.

Import circle of this module with `connection`, `link` and `events`: a link writes its frames
through its session and a session through its connection, and the events of a connection name the
link and session. Interfaces between them would add calls or names to every frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import repeat
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
    TransfersReceived,
    UnknownDeliveries,
)
from postbus.amqp.frames import (
    OutcomeForm,
    TransferFields,
    TransferForm,
    accepted_disposition,
    frame,
    learn_outcome,
    learn_transfer,
    parse_disposition,
    parse_transfer,
)
from postbus.amqp.link import IncomingLink, Link, OutgoingLink
from postbus.amqp.performatives import ACCEPTED, DeliveryState
from postbus.amqp.runs import (
    TRANSFER_BYTES,
    LinkFrames,
    scan_outcomes,
    scan_transfers,
)
from postbus.amqp.serial import SERIAL, gaps_of, known_between
from postbus.message.codec import encode_value

if TYPE_CHECKING:
    from postbus.amqp.connection import Connection

_Unsettled: TypeAlias = tuple[OutgoingLink, bytes]
"""A delivery without an answer of ours to its outcome: link, tag."""

_Held: TypeAlias = tuple[OutgoingLink, LinkFrames, bytes, tuple[bytes, ...], bool, int]

_Begun: TypeAlias = tuple[OutgoingLink, int, bytes, bytes, int, bool, int]
"""link, delivery-id, tag, payload, bytes written, settled, message-format"""


class Session:
    """Server side of a session; created by the connection when a begin arrives."""

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
        self.is_ended = False
        self.unsettled: dict[int, _Unsettled] = {}
        self.links: dict[int, Link] = {}  # by the handle of the peer
        self._names: dict[tuple[str, bool], Link] = {}
        self._handle_count = 0
        self._free_handles: list[int] = []  # a heap of handles below the count
        self._detaching: dict[int, int] = {}  # the peer's handle -> ours, until its detach comes
        self._remote_handle_max = remote_handle_max
        self._next_incoming_id = next_incoming_id
        self._window_size = connection.limits.incoming_window
        self._window_left = self._window_size
        self._next_outgoing_id = connection.delivery_id_base
        self._next_delivery_id = connection.delivery_id_base
        self._remote_window = remote_window
        self._held: deque[_Held] = deque()
        self._begun: _Begun | None = None  # a delivery interrupted by a closed window
        self._drained: dict[OutgoingLink, None] = {}  # drains to answer when no delivery is held
        self._decided: set[int] = set()  # unsettled deliveries with an outcome from the peer
        self.form: TransferForm | None = None
        """Form of the current transfers, on `_form_link`."""
        self.outcome_form: OutcomeForm | None = None
        self._form_link: IncomingLink | None = None

    # --- sending --------------------------------------------------------------------------------

    def write(self, body: bytes) -> None:
        """Write a performative on this session's channel."""
        if not self.is_ended:
            self.connection.write(frame(self.channel, body))

    def write_flow(
        self,
        handle: int | None = None,
        delivery_count: int = 0,
        credit: int = 0,
        *,
        is_drain: bool = False,
    ) -> None:
        """Write a flow with all fields that clients use; refreshes the incoming window."""
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
        """Answer the peer's dispositions on our deliveries and forget these."""
        count = min((last - first) % SERIAL, len(self.unsettled)) + 1
        for ids in (range(first, min(first + count, SERIAL)), range(first + count - SERIAL)):
            self._decided.difference_update(ids)
            deque(map(self.unsettled.pop, ids, repeat(None)), maxlen=0)  # faster than a loop
        self.write_disposition(False, first, last, state)

    def settle_unknown(self, first: int, last: int, state: DeliveryState) -> None:
        """Answer a disposition on deliveries that are unknown to this session."""
        self.write_disposition(False, first, last, state)

    def send_transfer(
        self,
        link: OutgoingLink,
        pack: LinkFrames,
        tag: bytes,
        parts: tuple[bytes, ...],
        is_settled: bool,
        message_format: int,
    ) -> None:
        """Write a delivery, or hold it until the peer's incoming window opens.

        No delivery is held, or half written, while the window is open.
        """
        if self._remote_window <= 0 or self._held:
            self._held.append((link, pack, tag, parts, is_settled, message_format))
            return
        self._write_transfer(link, pack, tag, parts, is_settled, message_format)

    def send_transfers(
        self,
        link: OutgoingLink,
        pack: LinkFrames,
        tags: list[bytes],
        parts: list[tuple[bytes, ...]],
        payload_bytes: list[int],
        is_settled: bool,
    ) -> None:
        """Write or hold many deliveries of one link, like `send_transfer`."""
        connection, first, count = self.connection, self._next_delivery_id, len(tags)
        if (
            count > self._remote_window
            or self._held
            or max(payload_bytes) > connection.payload_limit
            or first + count >= SERIAL
        ):
            for tag, each in zip(tags, parts, strict=True):
                self.send_transfer(link, pack, tag, each, is_settled, 0)
            return
        self._next_delivery_id = first + count
        self._next_outgoing_id = (self._next_outgoing_id + count) % SERIAL
        self._remote_window -= count
        if not is_settled:
            self.unsettled.update(enumerate([(link, tag) for tag in tags], first))
        out = pack(first, tags, parts, payload_bytes, is_settled)
        connection.write_all(out, sum(payload_bytes) + count * TRANSFER_BYTES)

    @property
    def held_count(self) -> int:
        """Deliveries waiting for the peer's window."""
        return len(self._held) + (self._begun is not None)

    def held_of(self, link: OutgoingLink) -> int:
        """Deliveries of one link whose first frame is not written."""
        return sum(entry[0] is link for entry in self._held)

    def write_drained(self, link: OutgoingLink) -> None:
        """Answer a drain after all deliveries sent before it."""
        if self._held or self._begun is not None:
            self._drained[link] = None
        else:
            self.write_flow(
                link.handle, link.delivery_count % SERIAL, max(link.credit, 0), is_drain=True
            )

    def end(self, error: AmqpError | None = None) -> None:
        """End the session from our side."""
        if not self.is_ended:
            self.write(p.described_list(p.END, [p.encode_error(error)]))
            self.discard()

    # --- receiving ------------------------------------------------------------------------------

    def receive_attach(self, fields: list[Any], raw: tuple[bytes, bytes]) -> list[Event]:
        """Take an attach. A link of the same name and direction is stolen (2.6.1)."""
        events: list[Event] = []
        name, handle, role = fields[0], p.require_uint(fields[1], "handle"), fields[2]
        if not isinstance(name, str) or not isinstance(role, bool):
            raise AmqpConnectionError(conditions.DECODE_ERROR, "attach without name or role")
        if handle > self.connection.limits.handle_max:
            raise AmqpConnectionError(conditions.FRAMING_ERROR, "handle above handle-max")
        if handle in self.links:
            raise AmqpSessionError(conditions.HANDLE_IN_USE, "the handle is in use")
        if handle in self._detaching:  # the peer did not answer our detach
            heappush(self._free_handles, self._detaching.pop(handle))
        former = self._names.get((name, role))
        if former is not None:
            error = AmqpLinkError(conditions.STOLEN, "a link of the same name was attached")
            former.detach(error)
            events.append(LinkDetached(former, True, error))
        kind = OutgoingLink if role else IncomingLink
        known = self.connection.link_properties
        properties = fields[13] if isinstance(fields[13], dict) else {}
        link = kind(
            self,
            name,
            self._take_handle(),
            handle,
            p.decode_terminus(fields[5], raw[0]),
            p.decode_terminus(fields[6], raw[1]),
            p.optional_uint(fields[3], "snd-settle-mode", 2, 2),
            p.optional_uint(fields[4], "rcv-settle-mode", 0, 1),
            {
                str(key): value
                for key, value in properties.items()
                if key in known and isinstance(value, str | int)
            },
        )
        link.attach_bytes = len(name.encode()) + len(raw[0]) + len(raw[1])
        link.attach_bytes += sum(
            len(each) for each in link.properties.values() if type(each) is str
        )
        if not role:
            link.delivery_count = p.optional_uint(fields[9], "initial-delivery-count", 0)
        self.links[handle] = link
        self._names[name, role] = link
        connection, limits = self.connection, self.connection.limits
        connection.link_count += 1
        if connection.link_count > limits.max_links:
            text = f"a connection may have {limits.max_links} links"
            link.refuse(AmqpLinkError(conditions.RESOURCE_LIMIT_EXCEEDED, text))
        elif link.attach_bytes > limits.max_attach_bytes:
            text = (
                "name, source, target and properties of a link may have"
                f" {limits.max_attach_bytes} bytes together"
            )
            link.refuse(AmqpLinkError(conditions.RESOURCE_LIMIT_EXCEEDED, text))
        else:
            events.append(LinkAttached(link))
        return events

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
        link = None if handle is None else self.links.get(p.require_uint(handle, "handle"))
        if isinstance(link, OutgoingLink):
            delivery_count = fields[5]
            if delivery_count is not None:
                delivery_count = p.require_uint(delivery_count, "delivery-count")
            credit = p.optional_uint(fields[6], "link-credit", 0)
            link.on_flow(delivery_count, credit, is_draining=fields[8] is True)
            if link.is_attached:
                events.append(LinkFlowed(link))
        self._flush_held()
        if fields[9] is True:
            if link is None or not link.is_attached:
                self.write_flow()
            elif isinstance(link, IncomingLink):
                self.write_flow(link.handle, link.delivery_count % SERIAL, max(link.credit, 0))
            elif isinstance(link, OutgoingLink) and not link.is_draining:
                link.echo_flow()
        return events

    def receive_transfers(
        self, form: TransferForm, data: bytes, pos: int, events: list[Event]
    ) -> int:
        """Take the whole frames at `pos` that look like the last transfer; return their end."""
        link = self._form_link
        assert link is not None
        if not link.is_attached or link.partial_transfer:
            return pos
        most_bytes = self.connection.limits.max_frame_bytes
        if link.max_message_bytes > 0:
            most_bytes = min(most_bytes, form.least_bytes + link.max_message_bytes)
        ids, tags, payloads, end = scan_transfers(form, data, pos, most_bytes)
        if ids:
            count = len(ids)
            self._next_incoming_id = (self._next_incoming_id + count) & 0xFFFF_FFFF
            self._window_left -= count
            if self._window_left < self._window_size >> 1:
                self.write_flow()
            link.delivery_count += count
            link.credit -= count
            events.append(TransfersReceived(link, ids, tags, payloads, form.is_settled))
        return end

    def receive_transfer_frame(
        self, data: bytes, start: int, end: int, events: list[Event]
    ) -> None:
        """Take a transfer in place, at `start`."""
        fields, payload_at = parse_transfer(data, start, end)
        event = self.receive_transfer(fields, data[payload_at:end])
        if event is not None:
            events.append(event)
            if type(event) is TransferReceived:
                self._learn(event.link, data, start, payload_at, fields)

    def _learn(
        self, link: IncomingLink, data: bytes, start: int, payload_at: int, fields: TransferFields
    ) -> None:
        """Expect further transfers of the same form; a frame of a multi-frame delivery teaches
        nothing.
        """
        if fields[1] is not None and not fields[3] and fields[6] is None:
            self.form = learn_transfer(data, start, payload_at, self.remote_channel)
            self._form_link = link

    def receive_transfer(self, fields: TransferFields, payload: bytes) -> Event | None:
        """Take one transfer frame; return an event with the last frame of a delivery."""
        handle, delivery_id, tag, message_format, is_settled, more, state, is_aborted = fields
        self._next_incoming_id = (self._next_incoming_id + 1) % SERIAL
        self._window_left -= 1
        if self._window_left < self._window_size >> 1:
            self.write_flow()
        link = self.links.get(handle)
        if link is None:
            if handle in self._detaching:
                return None  # it crossed our detach
            raise AmqpSessionError(conditions.UNATTACHED_HANDLE, "transfer on an unknown handle")
        if not isinstance(link, IncomingLink):
            raise AmqpSessionError(conditions.ERRANT_LINK, "transfer on a receiving link")
        if not link.is_attached:
            return _detach_for(link, conditions.TRANSFER_LIMIT_EXCEEDED, "transfer without credit")
        if link.partial_transfer is None:
            if delivery_id is None:
                text = "first transfer of a delivery without delivery-id"
                return _detach_for(link, conditions.INVALID_FIELD, text)
            if not more and not is_aborted:
                link.delivery_count += 1
                link.credit -= 1
                if 0 < link.max_message_bytes < len(payload):
                    return OversizeReceived(link, delivery_id, is_settled, state)
                return TransferReceived(
                    link, delivery_id, tag or b"", message_format, is_settled, state, payload
                )
            link.partial_transfer = (delivery_id, tag or b"", message_format, is_settled, state)
            link.partial_since_ms = self.connection.last_received_ms
        elif delivery_id is not None and delivery_id != link.partial_transfer[0]:
            text = "another delivery began before the former was complete"
            return _detach_for(link, conditions.INVALID_FIELD, text)
        return self._receive_part(link, payload, is_settled, more, state, is_aborted)

    def _receive_part(
        self,
        link: IncomingLink,
        payload: bytes,
        is_settled: bool,
        more: bool,
        state: DeliveryState | None,
        is_aborted: bool,
    ) -> Event | None:
        """Take one frame of a multi-frame delivery."""
        connection, partial = self.connection, link.partial
        size = len(partial) + len(payload)
        if link.is_oversize or 0 < link.max_message_bytes < size:
            self._drop_partial(link)  # dropped on arrival, so that the link and its credit continue
            link.is_oversize = True
        elif not is_aborted:
            partial += payload
            connection.partial_bytes += len(payload)
            limits = connection.limits
            if connection.partial_bytes > limits.max_partial_messages * limits.max_message_bytes:
                text = "too many deliveries are under way"
                return _detach_for(link, conditions.RESOURCE_LIMIT_EXCEEDED, text)
        if more and not is_aborted:
            return None
        assert link.partial_transfer is not None
        delivery_id, tag, message_format, was_settled, first_state = link.partial_transfer
        is_oversize, whole = link.is_oversize, bytes(partial)
        self._forget_partial(link)
        link.delivery_count += 1
        if is_aborted:
            link.grant(max(link.credit, 0))  # no event follows, so its credit is returned here
            return None
        link.credit -= 1
        if is_oversize:
            return OversizeReceived(
                link, delivery_id, is_settled or was_settled, state or first_state
            )
        return TransferReceived(
            link,
            delivery_id,
            tag,
            message_format,
            is_settled or was_settled,
            state or first_state,
            whole,
        )

    def receive_outcomes(
        self, form: OutcomeForm, data: bytes, pos: int, events: list[Event]
    ) -> int:
        """Take the whole frames at `pos` that look like the last acceptance; return their end."""
        ids, end = scan_outcomes(form, data, pos)
        distinct = set(ids)
        if distinct and self.unsettled.keys() >= distinct and self._decided.isdisjoint(distinct):
            links, tags = zip(*map(self.unsettled.__getitem__, ids), strict=True)
            if links.count(links[0]) == len(ids) == len(distinct):
                self._update(ids, links[0], tags, form.is_settled, ACCEPTED, events)
                return end
        for delivery_id in ids:
            self.receive_disposition(delivery_id, delivery_id, form.is_settled, ACCEPTED, events)
        return end

    def receive_disposition_frame(
        self, data: bytes, start: int, end: int, events: list[Event]
    ) -> bool:
        """Take a disposition in place if it has the usual form; return whether it has."""
        usual = parse_disposition(data, start, end)
        if usual is None:
            return False
        first, last, is_settled, state = usual
        if first == last:
            channel = self.remote_channel
            self.outcome_form = learn_outcome(data, start, end, channel, is_settled=is_settled)
        entry = self.unsettled.get(first)
        if first == last and entry is not None and first not in self._decided:
            self._update([first], entry[0], [entry[1]], is_settled, state, events)
        else:
            self.receive_disposition(first, last, is_settled, state, events)
        return True

    def receive_any_disposition(self, fields: list[Any], events: list[Event]) -> None:
        """Take a disposition of any other form."""
        role, first, last, settled, state, _ = fields
        first = p.require_uint(first, "first")
        last = p.optional_uint(last, "last", first)
        # a sender's disposition carries no news: our answers settled its deliveries
        if role is True:
            self.receive_disposition(first, last, settled is True, p.decode_state(state), events)

    def receive_disposition(
        self,
        first: int,
        last: int,
        is_settled: bool,
        state: DeliveryState | None,
        events: list[Event],
    ) -> None:
        """Take the peer's outcome of our deliveries; ranges are clamped to unsettled ids."""
        entry = self.unsettled.get(first)
        if first != last or entry is None or state is None or first in self._decided:
            self._receive_range(first, last, is_settled, state, events)
        elif is_settled or type(state) is not p.Received:
            self._update([first], entry[0], [entry[1]], is_settled, state, events)

    def _receive_range(
        self,
        first: int,
        last: int,
        is_settled: bool,
        state: DeliveryState | None,
        events: list[Event],
    ) -> None:
        """Take an outcome of several deliveries, or of unknown or decided ones."""
        if not is_settled and (state is None or type(state) is p.Received):
            return  # carries no outcome yet
        known = known_between(self.unsettled, first, last)
        if not is_settled:
            for start, end in gaps_of(first, last, known):
                events.append(UnknownDeliveries(self, start, end, state))
        for delivery_id in known:
            if delivery_id not in self._decided:
                link, tag = self.unsettled[delivery_id]
                self._update([delivery_id], link, [tag], is_settled, state, events)

    def receive_detach(self, fields: list[Any]) -> Event | None:
        """Take a detach; ignore one that crossed ours for a link that is already gone."""
        handle = p.require_uint(fields[0], "handle")
        link = self.links.get(handle)
        if link is not None:
            link.detach(None, is_closed=fields[1] is True)
        if handle in self._detaching:
            heappush(self._free_handles, self._detaching.pop(handle))
        if link is None:
            return None
        error = p.decode_error(fields[2])
        is_closed = fields[1] is True
        return LinkDetached(link, is_closed, error)

    def receive_end(self) -> None:
        """Take the peer's end of the session."""
        if not self.is_ended:
            self.write(p.described_list(p.END, [p.NULL]))
            self.discard()

    def forget_link(self, link: Link) -> None:
        """Free a link's name, and its handles after the peer's detach; drop its unsettled
        deliveries.
        """
        self.links.pop(link.remote_handle, None)
        self._names.pop((link.name, not link.is_incoming), None)
        self._detaching[link.remote_handle] = link.handle
        self.connection.link_count -= 1
        if isinstance(link, IncomingLink):
            self._forget_partial(link)
        elif isinstance(link, OutgoingLink):
            if link.open_count:  # a full scan; links are rarely detached with unsettled deliveries
                gone = [key for key, entry in self.unsettled.items() if entry[0] is link]
                for delivery_id in gone:
                    del self.unsettled[delivery_id]
                self._decided.difference_update(gone)
            self._drained.pop(link, None)
            if self._held:
                self._held = deque(entry for entry in self._held if entry[0] is not link)
            if self._begun is not None and self._begun[0] is link:
                self._begun = None

    # --- internals ------------------------------------------------------------------------------

    def _update(
        self,
        ids: list[int],
        link: OutgoingLink,
        tags: Sequence[bytes],
        is_settled: bool,
        state: DeliveryState | None,
        events: list[Event],
    ) -> None:
        """Report deliveries; join those of the previous event if they have the same outcome."""
        if is_settled:
            deque(map(self.unsettled.pop, ids), maxlen=0)  # faster than a loop
            link.open_count -= len(ids)
        else:
            self._decided.update(ids)
        if events:
            event = events[-1]
            if (
                type(event) is DeliveriesUpdated
                and event.link is link
                and event.state is state
                and event.is_settled is is_settled
            ):
                event.delivery_ids += ids
                event.tags += tags
                return
        events.append(DeliveriesUpdated(link, ids, list(tags), state, is_settled))

    def _write_transfer(
        self,
        link: OutgoingLink,
        pack: LinkFrames,
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
            out = pack(delivery_id, [tag], [parts], [size], is_settled)
            connection.write_all(out, TRANSFER_BYTES + size)
            return
        whole = b"".join(parts)
        self._write_frames((link, delivery_id, tag, whole, 0, is_settled, message_format))

    def _write_frames(self, begun: _Begun) -> None:
        """Write a delivery in frames of the peer's frame size as far as its window allows.

        The rest is held in `_begun`.
        """
        link, delivery_id, tag, payload, start, is_settled, message_format = begun
        step = self.connection.payload_limit
        self._begun = None
        more = True
        while more:
            if self._remote_window <= 0:
                self._begun = (link, delivery_id, tag, payload, start, is_settled, message_format)
                return
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
            start += step

    def _flush_held(self) -> None:
        """Write deliveries held for the window, in order, then the answers to drains."""
        held = self._held
        if self._begun is not None:
            self._write_frames(self._begun)
        while held and self._remote_window > 0:
            self._write_transfer(*held.popleft())
        if self._drained and not held and self._begun is None:
            drained, self._drained = self._drained, {}
            for link in drained:
                self.write_drained(link)

    def _take_handle(self) -> int:
        """Return the lowest handle that is free."""
        if self._free_handles:
            return heappop(self._free_handles)
        handle = self._handle_count
        if handle > self._remote_handle_max:
            raise AmqpSessionError(conditions.RESOURCE_LIMIT_EXCEEDED, "too many links")
        self._handle_count += 1
        return handle

    def _drop_partial(self, link: IncomingLink) -> None:
        self.connection.partial_bytes -= len(link.partial)
        link.partial = bytearray()

    def _forget_partial(self, link: IncomingLink) -> None:
        self._drop_partial(link)
        link.is_oversize = False
        link.partial_transfer = None

    def discard(self) -> None:
        """Forget everything; write nothing more."""
        self.is_ended = True
        self.connection.link_count -= len(self.links)
        for link in self.links.values():
            link.is_attached = False
            if isinstance(link, IncomingLink):
                self._forget_partial(link)
        self.links.clear()
        self._names.clear()
        self._detaching.clear()
        self._held.clear()
        self._begun = None
        self._drained.clear()
        self._decided.clear()
        self.form = self._form_link = self.outcome_form = None
        self.unsettled.clear()


def _detach_for(link: IncomingLink, condition: str, text: str) -> LinkDetached:
    error = AmqpLinkError(condition, text)
    link.detach(error)
    return LinkDetached(link, True, error)
