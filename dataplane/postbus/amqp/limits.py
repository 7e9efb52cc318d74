"""Limits of one connection, enforced before memory is spent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in milliseconds. Defaults are ours unless a source is named."""

    max_frame_bytes: int = 65_536
    """Largest frame we accept; the frame size of the .NET and Go clients."""

    max_message_bytes: int = 1_048_576
    """Largest delivery on a link whose node sets no smaller one."""

    channel_max: int = 4_095
    """Highest channel number; .NET opens one session for each link."""

    handle_max: int = 1_023
    """Highest handle of a session."""

    max_links: int = 4_096
    """Links of a connection over all its sessions; further links are refused one by one."""

    max_attach_bytes: int = 4_096
    """Total bytes of a link's name, source, target and properties, which are kept."""

    incoming_window: int = 5_000
    """Transfers of a session that a peer may have in flight."""

    max_partial_messages: int = 8
    """Partially received deliveries of the largest size, over all links of a connection."""

    idle_timeout_ms: int = 240_000
    """Announced to peers; Service Bus's value. A silent peer is closed after it."""
