"""The two kinds of link, seen from the broker.

An `IncomingLink` brings messages from the peer, an `OutgoingLink` takes messages to it. Links know
credit and their attach; delivery ids and windows belong to the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postbus.amqp import performatives as p
from postbus.amqp.conditions import AmqpError
from postbus.amqp.performatives import NULL, DeliveryState, Terminus
from postbus.amqp.runs import link_frames
from postbus.amqp.serial import SERIAL
from postbus.message.codec import Symbol, Ubyte, encode_value

if TYPE_CHECKING:
    from postbus.amqp.session import Session


class Link:
    """Common part of both kinds of link."""

    __slots__ = (
        "attach_bytes",
        "delivery_count",
        "handle",
        "is_attach_sent",
        "is_attached",
        "is_detach_sent",
        "name",
        "properties",
        "rcv_settle_mode",
        "remote_handle",
        "session",
        "snd_settle_mode",
        "source",
        "target",
    )

    is_incoming = False

    def __init__(
        self,
        session: Session,
        name: str,
        handle: int,
        remote_handle: int,
        source: Terminus | None,
        target: Terminus | None,
        snd_settle_mode: int,
        rcv_settle_mode: int,
        properties: dict[Any, Any],
    ) -> None:
        self.session = session
        self.name = name
        self.handle = handle
        self.remote_handle = remote_handle
        self.source = source
        self.target = target
        self.snd_settle_mode = snd_settle_mode
        self.rcv_settle_mode = rcv_settle_mode
        self.properties = properties
        self.attach_bytes = 0
        """Bytes kept of the peer's attach, as received."""
        self.delivery_count = 0
        self.is_attached = False
        self.is_attach_sent = False
        self.is_detach_sent = False

    @property
    def is_gone(self) -> bool:
        """Return whether the link was detached or its session ended, possibly before its answer."""
        return self.is_detach_sent or self.session.is_ended

    def refuse(self, error: AmqpError) -> None:
        """Answer the attach with a null terminus and a closing detach, as clients expect."""
        if not self.is_attach_sent:
            self.detach(error)

    def detach(self, error: AmqpError | None = None, *, is_closed: bool = True) -> None:
        """Detach from our side; later frames of the peer for this handle are ignored."""
        if self.is_gone:
            return
        if not self.is_attach_sent:  # a peer may only see a detach of what it saw attached
            self._send_attach(None, None, is_refused=True)
        self.is_detach_sent = True
        self.is_attached = False
        self.session.write(
            p.described_list(
                p.DETACH, [p.uint(self.handle), encode_value(is_closed), p.encode_error(error)]
            )
        )
        self.session.forget_link(self)

    def _send_attach(
        self,
        max_message_bytes: int | None,
        properties: dict[str, Any] | None,
        *,
        is_refused: bool = False,
    ) -> None:
        self.is_attach_sent = True
        source = NULL if self.source is None else self.source.raw
        target = NULL if self.target is None else self.target.raw
        if is_refused and self.is_incoming:
            target = NULL
        elif is_refused:
            source = NULL
        tagged = {Symbol(key): value for key, value in (properties or {}).items()}
        self.session.write(
            p.described_list(
                p.ATTACH,
                [
                    encode_value(self.name),
                    p.uint(self.handle),
                    encode_value(self.is_incoming),
                    encode_value(Ubyte(self.snd_settle_mode)),
                    encode_value(Ubyte(self.rcv_settle_mode)),
                    source,
                    target,
                    NULL,
                    b"\x42",
                    NULL if self.is_incoming else p.uint(0),
                    NULL if max_message_bytes is None else p.ulong(max_message_bytes),
                    NULL,
                    NULL,
                    encode_value(tagged) if tagged else NULL,
                ],
            )
        )


class IncomingLink(Link):
    """A link on which the peer sends."""

    __slots__ = (
        "credit",
        "is_oversize",
        "max_message_bytes",
        "partial",
        "partial_since_ms",
        "partial_transfer",
    )

    is_incoming = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.credit = 0
        self.max_message_bytes = 0
        self.partial = bytearray()
        self.partial_since_ms = 0
        self.is_oversize = False
        self.partial_transfer: tuple[int, bytes, int, bool, DeliveryState | None] | None = None

    def accept(
        self, *, max_message_bytes: int, credit: int, properties: dict[str, Any] | None = None
    ) -> None:
        """Attach and grant `credit` deliveries; do nothing when the link is gone."""
        if self.is_gone:
            return
        self.max_message_bytes = max_message_bytes
        self.is_attached = True
        self._send_attach(max_message_bytes, properties)
        self.grant(credit)

    def grant(self, credit: int) -> None:
        """Set the peer's credit (not an increment)."""
        self.credit = credit
        if self.is_attached:
            self.session.write_flow(self.handle, self.delivery_count % SERIAL, credit)

    def settle(self, first: int, last: int, state: DeliveryState) -> None:
        """Settle the peer's deliveries `first` to `last` with one outcome."""
        self.session.write_disposition(True, first, last, state)


class OutgoingLink(Link):
    """A link on which the peer receives.

    `limit` is the number of deliveries since the attach that the peer's credit allows, comparable
    with `sent`; drained credit is not part of it. `open_count` deliveries are not settled.
    """

    __slots__ = ("_pack", "is_draining", "limit", "max_message_bytes", "open_count", "sent")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent = 0
        self.limit = 0
        self.open_count = 0
        self.is_draining = False
        self.max_message_bytes: int | None = None
        self._pack = link_frames(self.session.channel, self.handle)

    @property
    def credit(self) -> int:
        return self.limit - self.sent

    def accept(self, properties: dict[str, Any] | None = None) -> None:
        """Attach; deliveries may follow as credit allows. Do nothing when the link is gone."""
        if self.is_gone:
            return
        self.is_attached = True
        self._send_attach(None, properties)

    def send(
        self, tag: bytes, parts: tuple[bytes, ...], *, is_settled: bool, message_format: int = 0
    ) -> None:
        """Send one delivery; it is held until the session's window allows it.

        `parts` are joined on the wire. The caller has to check `credit` and `is_attached`.
        """
        if not self.is_attached:
            return
        self.sent += 1
        self.delivery_count += 1
        if not is_settled:
            self.open_count += 1
        self.session.send_transfer(self, self._pack, tag, parts, is_settled, message_format)

    def send_all(
        self,
        tags: list[bytes],
        parts: list[tuple[bytes, ...]],
        payload_bytes: list[int],
        *,
        is_settled: bool,
    ) -> None:
        """Send several deliveries with tags of 16 octets, as `send` does; the lists have one
        length.
        """
        if not self.is_attached:
            return
        count = len(tags)
        self.sent += count
        self.delivery_count += count
        if not is_settled:
            self.open_count += count
        self.session.send_transfers(self, self._pack, tags, parts, payload_bytes, is_settled)

    def on_flow(self, delivery_count: int | None, credit: int, *, is_draining: bool) -> None:
        """Take the peer's credit (2.6.7)."""
        if delivery_count is None:
            delivery_count = 0
        behind = (self.delivery_count - delivery_count) % SERIAL
        if behind >= SERIAL // 2:
            behind = 0
        self.limit = self.sent + max(credit - behind, 0)
        self.is_draining = is_draining

    def drained(self) -> None:
        """Answer a drain: give up the remaining credit."""
        self.delivery_count += max(self.credit, 0)
        self.limit = self.sent
        self.is_draining = False
        if self.is_attached:
            self.session.write_drained(self)

    def echo_flow(self) -> None:
        """Send the peer our view of the link; deliveries held for its window count as not sent."""
        held = self.session.held_of(self)
        credit = min(max(self.credit, 0) + held, SERIAL - 1)
        self.session.write_flow(self.handle, (self.delivery_count - held) % SERIAL, credit)

    def settle(self, first: int, last: int, state: DeliveryState) -> None:
        """Settle deliveries `first` to `last` in answer to the peer's dispositions."""
        self.open_count -= (last - first) % SERIAL + 1
        self.session.settle_outgoing(first, last, state)
