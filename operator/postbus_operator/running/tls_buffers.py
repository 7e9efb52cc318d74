"""Buffers of TLS connections: the operator has two to four to each bus, most of them waiting."""

from __future__ import annotations

from asyncio import sslproto
from typing import Final

BUFFER_BYTES: Final = 16 * 1024
"""One record of TLS; an answer of 1,000 changes is then read in some tens of parts."""


def limit_tls_buffers() -> None:
    """Have later connections read through small buffers.

    asyncio gives each one 256 KiB and fills them with zeros: with 100 buses these were a third of
    the operator's memory.
    """
    sslproto.SSLProtocol.max_size = BUFFER_BYTES
