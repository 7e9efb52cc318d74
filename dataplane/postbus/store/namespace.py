"""What the namespace itself was told to be while it ran, beside the catalog.

A change is one commit that raises the catalog's version. Called by `broker/namespace.py` only.
"""

from __future__ import annotations

import json
from typing import Final

from postbus.namespace_contract import NamespaceDefinition
from postbus.store.catalog import LOCK_MS, LOCK_VERSION, raise_version
from postbus.store.postgres import Store


class NamespaceStore:
    """Reads and writes one row. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def load(self) -> tuple[int, NamespaceDefinition | None]:
        """Return the catalog's version, and what was put last; None: nothing was.

        Waits for a writer that is under way, so that what a lost connection left is known.
        """
        await self._store.open()
        async with self._store.aside() as connection, connection.transaction():
            await connection.execute(f"set local lock_timeout = {LOCK_MS}")
            version = await connection.fetchval(LOCK_VERSION)
            text = await connection.fetchval(LOAD)
        if text is None:
            return int(version), None
        return int(version), NamespaceDefinition.model_validate(json.loads(text))

    async def put(self, definition: NamespaceDefinition) -> int:
        """Store a definition in place of the one before; return the catalog's version."""
        await self._store.open()
        text = definition.model_dump_json(by_alias=True)
        async with self._store.aside() as connection, connection.transaction():
            version, _ = await raise_version(connection)
            await connection.execute(PUT, text)
        return version


LOAD: Final = "select definition from postbus.namespace"
PUT: Final = """
insert into postbus.namespace (definition) values ($1)
on conflict (is_only) do update set definition = excluded.definition
"""
