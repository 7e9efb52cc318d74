"""The definition of the namespace set at run time.

A change is one commit that raises the version of the catalog. Called by
`broker/catalog/namespace.py` only.
"""

from __future__ import annotations

import json
from typing import Final

from postbus.contract.namespace import NamespaceDefinition
from postbus.store.catalog_change import CatalogFence, changing
from postbus.store.postgres import Store


class NamespaceStore:
    """Reads and writes one row. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def load(self) -> NamespaceDefinition | None:
        """Return the stored definition, None if there is none."""
        await self._store.open()
        async with self._store.aside() as connection:
            text = await connection.fetchval(LOAD)
        return None if text is None else NamespaceDefinition.model_validate(json.loads(text))

    async def put(self, definition: NamespaceDefinition, fence: CatalogFence) -> int:
        """Replace the definition; return the catalog's version."""
        text = definition.model_dump_json(by_alias=True)
        async with changing(self._store, fence) as change:
            await change.connection.execute(PUT, text)
        return change.version


LOAD: Final = "select definition from postbus.namespace"
PUT: Final = """
insert into postbus.namespace (definition) values ($1)
on conflict (is_only) do update set definition = excluded.definition
"""
