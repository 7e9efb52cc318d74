"""The client role of the engine: talks to a broker in tests, tools and benchmarks.

It opens the connection, begins sessions and attaches links; everything else (windows, credit,
frames, errors by reach) is the broker's engine seen from the other side. Source: AMQP 1.0 part 2,
2.4 to 2.7; part 5, 5.3.
"""

from __future__ import annotations

from heapq import heappush
from typing import Any, TypeVar

from postbus.amqp import conditions
from postbus.amqp import performatives as p
from postbus.amqp.conditions import AmqpConnectionError, AmqpError, AmqpSessionError
from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    ConnectionClosed,
    DeliveriesAnswered,
    Event,
    LinkAttached,
    LinkDrained,
    SessionBegun,
)
from postbus.amqp.frames import AMQP_HEADER, SASL_FRAME, SASL_HEADER, frame
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, Link, OutgoingLink
from postbus.amqp.performatives import DeliveryState, Terminus
from postbus.amqp.serial import SERIAL
from postbus.amqp.session import Session
from postbus.message.codec import (
    Array,
    Described,
    Symbol,
    Ulong,
    Ushort,
    decode_value,
    encode_value,
)

L = TypeVar("L", bound=Link)

UNKNOWN_HANDLE = -1
"""Remote handle of a link whose attach the peer has not answered."""


class ClientConnection(Connection):
    """The initiating side of a connection. Call `start`, write `data_to_send`, feed answers."""

    def __init__(
        self,
        *,
        container_id: str,
        limits: Limits,
        hostname: str | None = None,
        mechanism: str = "ANONYMOUS",
        initial_response: bytes | None = None,
        delivery_id_base: int = 0,
    ) -> None:
        super().__init__(
            container_id=container_id, limits=limits, delivery_id_base=delivery_id_base
        )
        self.hostname = hostname
        self._mechanism = mechanism
        self._initial_response = initial_response
        self._unanswered: dict[int, ClientSession] = {}

    def start(self) -> None:
        """Send the protocol header; SASL, the second header and open follow on their own."""
        self.write(SASL_HEADER)

    def begin(self) -> ClientSession:
        """Begin a session on an opened connection.

        The session may be used immediately: calls that need the answer are held, everything else is
        pipelined behind the begin.
        """
        assert self.is_opened, "a session cannot begin before the connection is open"
        channel = 0
        while channel in self._channels:
            channel += 1
        session = ClientSession(
            self,
            channel,
            channel,
            next_incoming_id=0,
            remote_window=0,
            remote_handle_max=0xFFFF_FFFF,
        )
        if self.is_closed:
            session.discard()  # the close overtook its caller; any call does nothing
            return session
        self._channels.add(channel)
        self._unanswered[channel] = session
        session.write(
            p.described_list(
                p.BEGIN,
                [
                    p.NULL,
                    p.uint(self.delivery_id_base),
                    p.uint(self.limits.incoming_window),
                    p.uint(0x7FFF_FFFF),
                    p.uint(self.limits.handle_max),
                    *[p.NULL] * 3,
                ],
            )
        )
        return session

    # --- parsing --------------------------------------------------------------------------------

    def _take_header(self, header: bytes, events: list[Event]) -> bool:
        wanted = AMQP_HEADER if self._is_authenticated else SASL_HEADER
        if header == wanted:
            self._awaits_header = False
            return True
        self._give_up(conditions.FRAMING_ERROR, "the peer speaks another protocol", events)
        return False

    def _take_sasl(self, data: bytes, start: int, end: int, events: list[Event]) -> None:
        value, _ = decode_value(data, start, end)
        code = p.code_of(value)
        if code == p.SASL_MECHANISMS and not self._is_authenticated:
            (offered,) = p.fields_of(value, 1)
            names = offered.items if isinstance(offered, Array) else [offered]
            if self._mechanism not in names:
                self._give_up(conditions.NOT_IMPLEMENTED, "SASL mechanism not offered", events)
                return
            fields = [
                encode_value(Symbol(self._mechanism)),
                encode_value(self._initial_response),
                encode_value(self.hostname),
            ]
            self.write(frame(0, p.described_list(p.SASL_INIT, fields), SASL_FRAME))
        elif code == p.SASL_OUTCOME and not self._is_authenticated:
            (outcome,) = p.fields_of(value, 1)
            if outcome != 0:
                self._give_up(conditions.UNAUTHORIZED_ACCESS, "SASL was refused", events)
                return
            self._is_authenticated = True
            self._awaits_header = True
            self.write(AMQP_HEADER)
            self._send_open()
        else:
            raise AmqpConnectionError(conditions.FRAMING_ERROR, "unexpected SASL frame")

    def _send_open(self) -> None:
        idle_ms = self.limits.idle_timeout_ms
        fields = [
            encode_value(self.container_id),
            encode_value(self.hostname),
            p.uint(self.limits.max_frame_bytes),
            encode_value(Ushort(self.limits.channel_max)),
            p.uint(idle_ms) if idle_ms else p.NULL,
            *[p.NULL] * 5,
        ]
        self.write(frame(0, p.described_list(p.OPEN, fields)))

    def _write_open(self) -> None:
        """Write nothing: the peer's open answers ours."""
        self.is_opened = True

    def _take_begin(self, fields: list[Any], channel: int, events: list[Event]) -> None:
        own_channel = p.require_uint(fields[0], "remote-channel", 0xFFFF)
        session = self._unanswered.pop(own_channel, None)
        if session is None or channel in self.sessions:
            raise AmqpConnectionError(
                conditions.ILLEGAL_STATE, "a begin that answers none of our sessions"
            )
        self.sessions[channel] = session
        session.receive_begin(fields, channel)
        events.append(SessionBegun(session))

    def _give_up(self, condition: str, description: str, events: list[Event]) -> None:
        """End a connection that is not open yet and so cannot be closed."""
        self._discard()
        events.append(ConnectionClosed(AmqpConnectionError(condition, description)))

    def _discard(self) -> None:
        for session in self._unanswered.values():
            session.discard()
        self._unanswered.clear()
        super()._discard()


class ClientSession(Session):
    """A session begun by us. Links are attached here and used after their `LinkAttached`."""

    def attach_sender(
        self,
        name: str,
        target: str | Described | None,
        *,
        source: str | Described | None = None,
        snd_settle_mode: int = 0,
        rcv_settle_mode: int = 0,
        properties: dict[str, Any] | None = None,
    ) -> OutgoingLink:
        """Attach a link to send on. A terminus is an address or a whole described value."""
        link = self._new_link(OutgoingLink, name, source, target, snd_settle_mode, rcv_settle_mode)
        self._begin_attach(link, properties)
        return link

    def attach_receiver(
        self,
        name: str,
        source: str | Described | None,
        *,
        target: str | Described | None = None,
        snd_settle_mode: int = 0,
        rcv_settle_mode: int = 1,
        properties: dict[str, Any] | None = None,
    ) -> IncomingLink:
        """Attach a link to receive on; credit is given with `grant` when it is attached."""
        link = self._new_link(IncomingLink, name, source, target, snd_settle_mode, rcv_settle_mode)
        link.max_message_bytes = self.connection.limits.max_message_bytes
        self._begin_attach(link, properties)
        return link

    def drain(self, link: IncomingLink) -> None:
        """Ask for the available messages and the return of unused credit: `LinkDrained` follows."""
        self.write_flow(
            link.handle, link.delivery_count % SERIAL, max(link.credit, 0), is_drain=True
        )

    def dispose(
        self, first: int, last: int, state: DeliveryState, *, is_settled: bool = False
    ) -> None:
        """Decide on the peer's deliveries; unsettled, `DeliveriesAnswered` follows."""
        if is_settled:
            self.write_disposition(True, first, last, state)
            return
        fields = [b"\x41", p.uint(first), p.uint(last), b"\x42", p.encode_state(state), b"\x42"]
        self.write(p.described_list(p.DISPOSITION, fields))

    # --- receiving ------------------------------------------------------------------------------

    def receive_begin(self, fields: list[Any], channel: int) -> None:
        """Take the answer to our begin and send the frames that were held for it."""
        self.remote_channel = channel
        self._next_incoming_id = p.require_uint(fields[1], "next-outgoing-id")
        self._remote_window = p.require_uint(fields[2], "incoming-window")
        self._remote_handle_max = p.optional_uint(fields[4], "handle-max", 0xFFFF_FFFF)

    def receive_attach(self, fields: list[Any], raw: tuple[bytes, bytes]) -> list[Event]:
        """Take the answer to an attach of ours; ignore one of a link given up meanwhile."""
        name, handle, role = fields[0], p.require_uint(fields[1], "handle"), fields[2]
        link = self._names.get((name, role)) if isinstance(name, str) else None
        if link is None or link.remote_handle != UNKNOWN_HANDLE:
            return []
        if handle in self.links:
            raise AmqpSessionError(conditions.HANDLE_IN_USE, "the handle is in use")
        link.remote_handle = handle
        self.links[handle] = link
        link.source = p.decode_terminus(fields[5], raw[0])
        link.target = p.decode_terminus(fields[6], raw[1])
        link.snd_settle_mode = p.optional_uint(fields[3], "snd-settle-mode", 2, 2)
        link.rcv_settle_mode = p.optional_uint(fields[4], "rcv-settle-mode", 0, 1)
        properties = fields[13] if isinstance(fields[13], dict) else {}
        link.properties = {str(key): value for key, value in properties.items()}
        if link.is_incoming:
            link.delivery_count = p.optional_uint(fields[9], "initial-delivery-count", 0)
        link.is_attached = True
        return [LinkAttached(link)]

    def receive_flow(self, fields: list[Any]) -> list[Event]:
        """Take a flow; a flow of a sender carries its delivery-count."""
        events = super().receive_flow(fields)
        link = self.links.get(fields[4]) if fields[4] is not None else None
        if isinstance(link, IncomingLink) and fields[5] is not None:
            advanced = (p.require_uint(fields[5], "delivery-count") - link.delivery_count) % SERIAL
            if advanced < SERIAL // 2:
                link.delivery_count += advanced
                link.credit = max(link.credit - advanced, 0)
            if fields[8] is True:
                events.append(LinkDrained(link))
        return events

    def receive_any_disposition(self, fields: list[Any], events: list[Event]) -> None:
        """Take a disposition; one of a sender answers ours."""
        role, first, last, settled, state, _ = fields
        if role is not False:
            super().receive_any_disposition(fields, events)
            return
        first = p.require_uint(first, "first")
        last = p.optional_uint(last, "last", first)
        events.append(DeliveriesAnswered(self, first, last, p.decode_state(state), settled is True))

    def _new_link(
        self,
        kind: type[L],
        name: str,
        source: str | Described | None,
        target: str | Described | None,
        snd_settle_mode: int,
        rcv_settle_mode: int,
    ) -> L:
        return kind(
            self,
            name,
            self._take_handle(),
            UNKNOWN_HANDLE,
            _terminus(source, p.SOURCE),
            _terminus(target, p.TARGET),
            snd_settle_mode,
            rcv_settle_mode,
            {},
        )

    def _begin_attach(self, link: Link, properties: dict[str, Any] | None) -> None:
        key = link.name, not link.is_incoming
        if key in self._names:
            heappush(self._free_handles, link.handle)
            raise AmqpError(conditions.NOT_ALLOWED, "a link of this name is attached")
        self._names[key] = link
        link._send_attach(None, properties)


def _terminus(value: str | Described | None, code: int) -> Terminus | None:
    """Return the terminus of an address, or of a described value as it is."""
    if value is None:
        return Terminus(None, p.described_list(code, [p.NULL]))
    if isinstance(value, str):
        value = Described(Ulong(code), [value])
    return p.decode_terminus(value, encode_value(value))
