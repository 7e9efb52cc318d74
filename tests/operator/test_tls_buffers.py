"""Memory of TLS connections, of which the operator has some for each bus."""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from typing import Any

import pytest

from postbus_operator.running.tls_buffers import BUFFER_BYTES, limit_tls_buffers


async def test_a_connection_reads_through_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def buffer() -> bytearray:
        loop, context = asyncio.get_running_loop(), ssl.create_default_context()
        made: Any = sslproto.SSLProtocol(loop, asyncio.Protocol(), context, None)
        return made._ssl_buffer

    usual = 256 * 1024  # asyncio's, also after a test that ran a whole operator
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", usual)
    assert len(buffer()) == usual > BUFFER_BYTES
    limit_tls_buffers()
    assert len(buffer()) == BUFFER_BYTES
