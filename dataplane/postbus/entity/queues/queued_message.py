"""A message in the memory of a sub-queue: a plain slotted object of the hot path."""

from __future__ import annotations

from postbus.entity.commands import Receiver
from postbus.message.envelope import Envelope


class QueuedMessage:
    """One message in the ready window, returned, or locked.

    `envelope` is None while only the row holds it (a stub); `size_bytes` and `ttl_ms` are set from
    then on. `failures` counts failed deliveries, `recorded` the attempts the tables know (ADR 19).
    `token` is None unless locked; `locked_until_ms` means something only with a token. `receiver`:
    its last receiver, set by the first delivery.
    """

    __slots__ = (
        "enqueued_ms",
        "envelope",
        "failures",
        "is_deferred",
        "locked_until_ms",
        "receiver",
        "recorded",
        "row_key",
        "sequence",
        "size_bytes",
        "token",
        "ttl_ms",
    )

    locked_until_ms: int
    receiver: Receiver | None
    size_bytes: int
    ttl_ms: int | None

    def __init__(
        self, row_key: int, sequence: int, enqueued_ms: int, envelope: Envelope | None
    ) -> None:
        self.row_key = row_key
        self.sequence = sequence
        self.enqueued_ms = enqueued_ms
        self.envelope = envelope
        self.failures = 0
        self.recorded = 0
        self.token: bytes | None = None
        self.is_deferred = False

    @property
    def weight_bytes(self) -> int:
        """Size of the message, loaded or not."""
        return self.size_bytes if self.envelope is None else self.envelope.size_bytes

    @property
    def own_ttl_ms(self) -> int | None:
        """The sender's time to live, loaded or not."""
        return self.ttl_ms if self.envelope is None else self.envelope.ttl_ms
