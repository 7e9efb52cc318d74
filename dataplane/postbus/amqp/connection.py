"""One AMQP connection, server side: bytes in, events out, bytes to send.

Order of the methods: receive data, answer, get bytes, time, parsing. No input raises: a violation
closes the connection, ends the session or detaches the link, with a condition and a description.
Source: AMQP 1.0 part 2, 2.4; part 5, 5.3.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from postbus.amqp import conditions
from postbus.amqp import performatives as p
from postbus.amqp.conditions import (
    AmqpConnectionError,
    AmqpError,
    AmqpSessionError,
)
from postbus.amqp.events import (
    ConnectionClosed,
    ConnectionOpened,
    Event,
    SaslInitReceived,
    SessionBegun,
    SessionEnded,
)
from postbus.amqp.frames import (
    AMQP_FRAME,
    AMQP_HEADER,
    EMPTY_FRAME,
    FRAME_HEAP_BYTES,
    HEADER,
    SASL_FRAME,
    SASL_HEADER,
    frame,
    raw_fields,
    transfer_fields,
)
from postbus.amqp.limits import Limits
from postbus.amqp.runs import TRANSFER_BYTES
from postbus.amqp.session import Session
from postbus.message.codec import (
    Array,
    DecodeError,
    Symbol,
    Ubyte,
    Ushort,
    decode_value,
    encode_value,
)

MIN_FRAME_BYTES: Final = 512
ANONYMOUS: Final = "ANONYMOUS"
HOT: Final = b"\x00\x53"
"""First bytes of a performative in the usual form, with a smallulong descriptor."""


class Connection:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        container_id: str,
        limits: Limits,
        sasl_mechanisms: tuple[str, ...] = ("MSSBCBS", "PLAIN", "ANONYMOUS", "EXTERNAL"),
        delivery_id_base: int = 0x4000_0000,
        link_properties: frozenset[str] = frozenset(),
    ) -> None:
        """`link_properties`: names of the attach properties that are kept for the owner."""
        self.link_properties = link_properties
        self.container_id = container_id
        self.limits = limits
        self.delivery_id_base = delivery_id_base
        self.remote_container_id = ""
        self.is_opened = False
        self.is_closed = False
        self.payload_limit = MIN_FRAME_BYTES - TRANSFER_BYTES
        self.partial_bytes = 0
        """Bytes of deliveries whose last frame has not arrived."""
        self.link_count = 0
        self._mechanisms = sasl_mechanisms
        self._rest = b""
        self._out: list[bytes] = []
        self.out_bytes = 0
        self._awaits_header = True
        self._is_authenticated = False
        self._sasl_pending = False
        self.sessions: dict[int, Session] = {}  # by the channel of the peer
        self._channels: set[int] = set()
        self._ended_channels: set[int] = set()
        self._remote_channel_max = 0xFFFF
        self._remote_idle_ms = 0
        self.last_received_ms = 0
        self._last_sent_ms = 0
        self._has_written = False

    # --- receive data ---------------------------------------------------------------------------

    def receive_data(self, data: bytes, now_ms: int) -> list[Event]:
        """Take bytes from the transport. `now_ms` is real (monotonic) time."""
        self.last_received_ms = now_ms
        events: list[Event] = []
        if self.is_closed:
            return events
        if self._rest:
            data = self._rest + data
        try:
            used = self._parse(data, events)
        except AmqpConnectionError as error:
            self._fail(error, events)
            return events
        except DecodeError as error:
            self._fail(AmqpConnectionError(conditions.DECODE_ERROR, str(error)), events)
            return events
        except (IndexError, struct.error):  # the in-place parsers rely on Python's own bounds
            cut_off = AmqpConnectionError(conditions.DECODE_ERROR, "the frame is cut off")
            self._fail(cut_off, events)
            return events
        self._rest = data[used:] if used < len(data) and not self.is_closed else b""
        if self._sasl_pending and len(self._rest) > self.limits.max_frame_bytes:
            text = "too much was sent before the SASL outcome"
            self._fail(AmqpConnectionError(conditions.FRAMING_ERROR, text), events)
        return events

    # --- answer ---------------------------------------------------------------------------------

    def accept_sasl(self) -> None:
        """Accept the peer's SASL init."""
        self._sasl_pending = False
        self._is_authenticated = True
        self._awaits_header = True
        self.write(frame(0, p.described_list(p.SASL_OUTCOME, [b"\x50\x00"]), SASL_FRAME))

    def refuse_sasl(self, code: int = 1) -> None:
        """Refuse (1: authentication, 2: system, 4: transient); the transport should be closed."""
        self._sasl_pending = False
        self.is_closed = True
        outcome = p.described_list(p.SASL_OUTCOME, [encode_value(Ubyte(code))])
        self.write(frame(0, outcome, SASL_FRAME))

    def close(self, error: AmqpError | None = None) -> None:
        """Close from our side; write what is pending, then close the transport."""
        if self.is_closed:
            return
        if self.is_opened:
            self.write(frame(0, p.described_list(p.CLOSE, [p.encode_error(error)])))
        self._discard()

    def discard(self) -> None:
        """Forget everything, including pending writes; the transport is gone.

        Sessions and links refer to each other, so that they would otherwise keep their memory until
        a garbage collection.
        """
        self._discard()
        self._out = []
        self.out_bytes = 0
        self.remote_container_id = ""

    # --- get bytes ------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Queue bytes for the transport."""
        self._out.append(data)
        self.out_bytes += len(data)

    def write_all(self, buffers: list[bytes], size_bytes: int) -> None:
        """Queue frames without joining their parts."""
        self._out += buffers
        self.out_bytes += size_bytes

    def data_to_send(self) -> list[bytes]:
        """Return and forget the buffers to write, in order."""
        out = self._out
        if out:
            self._out = []
            self.out_bytes = 0
            if out[0] is not EMPTY_FRAME or len(out) > 1:  # `tick` notes its own
                self._has_written = True
        return out

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Event]:
        """Send a heartbeat when due; close a peer that has been silent for too long."""
        events: list[Event] = []
        if self.is_closed:
            return events
        if self._has_written:
            self._has_written = False
            self._last_sent_ms = now_ms
        idle_ms = self.limits.idle_timeout_ms
        if not self.last_received_ms:
            self.last_received_ms = now_ms
        if idle_ms and now_ms - self.last_received_ms >= idle_ms:
            error = AmqpConnectionError(
                conditions.RESOURCE_LIMIT_EXCEEDED, "nothing was received within the idle timeout"
            )
            self._fail(error, events)
        elif (
            self.is_opened
            and self._remote_idle_ms
            and now_ms - self._last_sent_ms >= self._remote_idle_ms // 2
        ):
            self.write(EMPTY_FRAME)
            self._last_sent_ms = now_ms
        return events

    @property
    def session_count(self) -> int:
        return len(self.sessions)

    @property
    def tick_interval_ms(self) -> int:
        """Interval at which `tick` should be called."""
        intervals = [each for each in (self.limits.idle_timeout_ms, self._remote_idle_ms) if each]
        return max(min(intervals, default=60_000) // 4, 100)

    # # --- parsing --------------------------------------------------------------------------------

    def _parse(self, data: bytes, events: list[Event]) -> int:
        """Consume whole frames; return how many bytes were used."""
        pos, size = 0, len(data)
        max_frame_bytes = self.limits.max_frame_bytes
        sessions = self.sessions
        while size - pos >= 8 and not self.is_closed:
            if self._sasl_pending:
                break
            if self._awaits_header:
                if not self._take_header(data[pos : pos + 8], events):
                    return size
                pos += 8
                continue
            frame_bytes, offset, frame_type, channel = HEADER.unpack_from(data, pos)
            start = pos + offset * 4
            end = pos + frame_bytes
            if offset < 2 or start > end or frame_bytes > max_frame_bytes:
                raise AmqpConnectionError(conditions.FRAMING_ERROR, "malformed or oversize frame")
            if end > size:
                break
            begin, pos = pos, end
            if frame_type == SASL_FRAME:
                self._take_sasl(data, start, end, events)
            elif frame_type != AMQP_FRAME or not self._is_authenticated:
                raise AmqpConnectionError(conditions.FRAMING_ERROR, "unexpected frame type")
            elif start < end:
                session = sessions.get(channel)
                if session is None or session.is_ended:
                    self._take_other(data, start, end, channel, events)
                    continue
                alike_end = self._take_alike(session, data, begin, events)
                if alike_end > begin:
                    pos = alike_end
                    continue
                try:
                    self._take_frame(session, data, start, end, events)
                except AmqpSessionError as error:  # ends just that
                    session.end(error)
                    events.append(SessionEnded(session))
        return pos

    def _take_header(self, header: bytes, events: list[Event]) -> bool:
        """Answer a protocol header; False when the transport must be closed."""
        if header == SASL_HEADER and not self._is_authenticated:
            self._awaits_header = False
            mechanisms = encode_value(Array(0xA3, [Symbol(name) for name in self._mechanisms]))
            body = p.described_list(p.SASL_MECHANISMS, [mechanisms])
            self.write(SASL_HEADER + frame(0, body, SASL_FRAME))
            return True
        # A connection without a SASL layer is treated as ANONYMOUS; @azure/service-bus skips the
        # layer when it has a shared access signature instead of a key.
        if header == AMQP_HEADER and (self._is_authenticated or ANONYMOUS in self._mechanisms):
            self._is_authenticated = True
            self._awaits_header = False
            self.write(AMQP_HEADER)
            return True
        self.write(AMQP_HEADER if self._is_authenticated else SASL_HEADER)
        self._discard()
        events.append(ConnectionClosed(None))
        return False

    def _take_sasl(self, data: bytes, start: int, end: int, events: list[Event]) -> None:
        if self._is_authenticated:
            raise AmqpConnectionError(conditions.FRAMING_ERROR, "unexpected SASL frame")
        value, _ = decode_value(data, start, end, max_heap_bytes=FRAME_HEAP_BYTES)
        if p.code_of(value) != p.SASL_INIT:
            raise AmqpConnectionError(conditions.FRAMING_ERROR, "expected sasl-init")
        mechanism, response, hostname = p.fields_of(value, 3)
        if not isinstance(mechanism, str):
            raise AmqpConnectionError(conditions.DECODE_ERROR, "sasl-init without mechanism")
        self._sasl_pending = True
        events.append(
            SaslInitReceived(
                str(mechanism),  # not a Symbol
                response if isinstance(response, bytes) else b"",
                hostname if isinstance(hostname, str) else None,
            )
        )

    def _take_alike(self, session: Session, data: bytes, pos: int, events: list[Event]) -> int:
        """Take the frames at `pos` that look like the last ones of their kind; return their end."""
        form, outcome_form = session.form, session.outcome_form
        if form is not None and data.startswith(form.head, pos + 4):
            return session.receive_transfers(form, data, pos, events)
        if outcome_form is not None and data.startswith(outcome_form.head, pos + 4):
            return session.receive_outcomes(outcome_form, data, pos, events)
        return pos

    def _take_frame(
        self, session: Session, data: bytes, start: int, end: int, events: list[Event]
    ) -> None:
        """Take a performative of a session; transfers and dispositions are parsed in place."""
        if end - start > 3 and data.startswith(HOT, start):
            code = data[start + 2]
            if code == p.TRANSFER:
                session.receive_transfer_frame(data, start, end, events)
                return
            if code == p.DISPOSITION and session.receive_disposition_frame(
                data, start, end, events
            ):
                return
        self._take_other(data, start, end, session.remote_channel, events)

    def _take_other(
        self, data: bytes, start: int, end: int, channel: int, events: list[Event]
    ) -> None:
        value, payload_at = decode_value(data, start, end, max_heap_bytes=FRAME_HEAP_BYTES)
        code, fields = p.performative_of(value)
        if code == p.OPEN:
            self._take_open(fields, events)
            return
        if not self.is_opened:
            raise AmqpConnectionError(conditions.ILLEGAL_STATE, "the first frame is not open")
        if code == p.CLOSE:
            self.write(frame(0, p.described_list(p.CLOSE, [p.NULL])))
            self._discard()
            events.append(ConnectionClosed(p.decode_error(fields[0])))
            return
        if code == p.BEGIN:
            self._take_begin(fields, channel, events)
            return
        session = self.sessions.get(channel)
        if session is None or session.is_ended:
            if session is None and channel not in self._ended_channels:
                raise AmqpConnectionError(conditions.NOT_ALLOWED, "no session on this channel")
            if session is not None and code == p.END:
                self._forget_session(session)
            return  # frames that crossed an end
        if code == p.ATTACH:
            raw = raw_fields(data, start, end, (5, 6))
            events += session.receive_attach(fields, raw)
        elif code == p.FLOW:
            events += session.receive_flow(fields)
        elif code == p.DETACH:
            event = session.receive_detach(fields)
            if event is not None:
                events.append(event)
        elif code == p.END:
            session.receive_end()
            self._forget_session(session)
            events.append(SessionEnded(session))
        elif code == p.TRANSFER:
            event = session.receive_transfer(transfer_fields(fields), data[payload_at:end])
            if event is not None:
                events.append(event)
        elif code == p.DISPOSITION:
            session.receive_any_disposition(fields, events)
        else:
            raise AmqpConnectionError(conditions.NOT_ALLOWED, "not a frame of a session")

    def _take_open(self, fields: list[Any], events: list[Event]) -> None:
        if self.is_opened:
            raise AmqpConnectionError(conditions.ILLEGAL_STATE, "open was sent twice")
        container_id, hostname = fields[0], fields[1]
        if not isinstance(container_id, str):
            raise AmqpConnectionError(conditions.INVALID_FIELD, "open without container-id")
        max_frame_bytes = p.optional_uint(fields[2], "max-frame-size", 0xFFFF_FFFF)
        if max_frame_bytes < MIN_FRAME_BYTES:
            raise AmqpConnectionError(conditions.INVALID_FIELD, "max-frame-size is below 512")
        max_frame_bytes = min(max_frame_bytes, 1 << 20)
        self.payload_limit = max_frame_bytes - TRANSFER_BYTES - 64
        self._remote_channel_max = p.optional_uint(fields[3], "channel-max", 0xFFFF, 0xFFFF)
        self._remote_idle_ms = p.optional_uint(fields[4], "idle-time-out", 0)
        self.remote_container_id = container_id
        self._write_open()
        properties = fields[9] if isinstance(fields[9], dict) else {}
        events.append(
            ConnectionOpened(
                container_id, hostname if isinstance(hostname, str) else None, properties
            )
        )

    def _write_open(self) -> None:
        self.is_opened = True
        idle_ms = self.limits.idle_timeout_ms
        fields = [
            encode_value(self.container_id),
            p.NULL,
            p.uint(self.limits.max_frame_bytes),
            encode_value(Ushort(self.limits.channel_max)),
            p.uint(idle_ms) if idle_ms else p.NULL,
            *[p.NULL] * 5,
        ]
        self.write(frame(0, p.described_list(p.OPEN, fields)))

    def _take_begin(self, fields: list[Any], channel: int, events: list[Event]) -> None:
        known = self.sessions.get(channel)
        if known is not None and not known.is_ended:
            raise AmqpConnectionError(conditions.ILLEGAL_STATE, "the channel has a session")
        if channel > self.limits.channel_max:
            raise AmqpConnectionError(conditions.FRAMING_ERROR, "channel above channel-max")
        if known is not None:  # the peer left our end without an answer
            self._forget_session(known)
        own_channel = 0
        while own_channel in self._channels:
            own_channel += 1
        if own_channel > self._remote_channel_max:
            raise AmqpConnectionError(conditions.RESOURCE_LIMIT_EXCEEDED, "too many sessions")
        session = Session(
            self,
            own_channel,
            channel,
            next_incoming_id=p.require_uint(fields[1], "next-outgoing-id"),
            remote_window=p.require_uint(fields[2], "incoming-window"),
            remote_handle_max=p.optional_uint(fields[4], "handle-max", 0xFFFF_FFFF),
        )
        self.sessions[channel] = session
        self._channels.add(own_channel)
        session.write(
            p.described_list(
                p.BEGIN,
                [
                    encode_value(Ushort(channel)),
                    p.uint(self.delivery_id_base),
                    p.uint(self.limits.incoming_window),
                    p.uint(0x7FFF_FFFF),
                    p.uint(self.limits.handle_max),
                    p.NULL,
                    p.NULL,
                    p.NULL,
                ],
            )
        )
        events.append(SessionBegun(session))

    def _forget_session(self, session: Session) -> None:
        del self.sessions[session.remote_channel]
        self._channels.discard(session.channel)
        self._ended_channels.add(session.remote_channel)

    def _fail(self, error: AmqpConnectionError, events: list[Event]) -> None:
        """Close for a violation of the peer."""
        if not self.is_opened and self._is_authenticated and not self._awaits_header:
            self._write_open()  # a close may only follow an open of ours
        self.close(error)
        events.append(ConnectionClosed(error))

    def _discard(self) -> None:
        self.is_closed = True
        self._rest = b""
        self._sasl_pending = False
        for session in self.sessions.values():
            session.discard()
        self.sessions.clear()
        self._channels.clear()
