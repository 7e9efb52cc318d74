"""What one connection may use, enforced before memory is spent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in milliseconds. Defaults are ours unless a source is named."""

    max_frame_bytes: int = 65_536
    """Largest frame we take; the frame size of the .NET and Go clients."""

    max_message_bytes: int = 1_048_576
    """Largest delivery on a link whose node sets no smaller one."""

    channel_max: int = 4_095
    """Highest channel number; .NET opens one session for each link."""

    handle_max: int = 1_023
    """Highest handle of a session."""

    incoming_window: int = 5_000
    """Transfers a peer may have on the way in a session."""

    max_unsettled: int = 20_000
    """Deliveries to a peer that may wait for a disposition in one session."""

    max_held_transfers: int = 20_000
    """Deliveries held back in one session until the peer's window opens."""

    idle_timeout_ms: int = 240_000
    """Announced to peers; Service Bus's value. A silent peer is closed after it."""

    sasl_frames: int = 8
    """SASL frames before the connection is refused."""
