"""An address that leads to a connection pooler is refused: it would break the fence."""

from __future__ import annotations

import asyncpg
import pytest
from asyncpg.exceptions import ClientConfigurationError

from postbus.store.connections import connect, is_shared
from postbus.store.errors import StoreMisconfigured
from postbus.store.postgres import Store
from tests.store.pooler import pooling
from tests.store.relay import relaying


async def test_a_transaction_pooler_is_refused(database: str) -> None:
    async with pooling(database) as through:
        with pytest.raises(StoreMisconfigured, match=r"pooler.*address of Postgres itself"):
            await Store(through).open()


async def test_a_proxy_that_gives_each_client_a_backend_is_accepted(database: str) -> None:
    """It may answer startups itself, so that clients do not know their backend."""
    connection = await connect(database, "test", {})
    assert not await is_shared(database, connection, connection.get_server_pid())
    assert not await is_shared(database, connection, backend=1)
    await connection.close()
    async with relaying(database) as (_, through):
        store = Store(through)
        await store.open()
        await store.close()


async def test_a_pooler_that_refuses_settings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """PgBouncer does, unless it is told to ignore each of them."""

    async def refuse(*_: object, **__: object) -> None:
        raise asyncpg.ProtocolViolationError("unsupported startup parameter: jit")

    monkeypatch.setattr(asyncpg, "connect", refuse)
    with pytest.raises(ClientConfigurationError, match="pooler"):
        await connect("postgresql://a@b/c", "test", {})
