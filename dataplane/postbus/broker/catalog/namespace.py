"""The definition of the namespace: its manifest, and changes while the bus runs.

Immutable fields come from the manifest alone. Changes of the others are stored beside the catalog
and raise its version; they concern listeners and the administration, and no partition follows them.
"""

from __future__ import annotations

from collections.abc import Callable

from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.preconditions import UNCONDITIONAL, Precondition, PutMode, refusal
from postbus.contract.namespace import NamespaceDefinition, changed, immutable_fields, in_force
from postbus.entity.commands import Refusal
from postbus.store.namespace import NamespaceStore


class Namespace:
    """One namespace; call `load` first. `on_change` are called after each change."""

    def __init__(
        self, name: str, declared: NamespaceDefinition, store: NamespaceStore, directory: Directory
    ) -> None:
        """`declared`: the fields that manifests name; others are unset and can be put."""
        self.name = name
        self.definition = declared
        self.on_change: list[Callable[[NamespaceDefinition], None]] = []
        self._declared = declared
        self._store = store
        self._directory = directory

    async def load(self) -> None:
        """Read the stored definition, also after the catalog changed; raises `StoreUnavailable`."""
        before, put = self.definition, await self._store.load()
        self.definition = in_force(self._declared, put)
        if self.definition != before:
            for notify in self.on_change:
                notify(self.definition)

    async def redeclare(self, declared: NamespaceDefinition) -> None:
        """Apply another manifest, with the same immutable fields.

        Raises `StoreUnavailable`; the manifest then applies at the next `load`.
        """
        self._declared = declared
        await self.load()

    async def put(
        self, wanted: NamespaceDefinition, condition: Precondition = UNCONDITIONAL
    ) -> int:
        """Change the definition; return the version of the catalog afterwards.

        An equal definition changes nothing. Versions of the condition are the catalog's. Raises
        `DirectoryRefusal`, and `NotWritten`.
        """
        async with self._directory.unchanged(condition):
            if condition.mode is PutMode.CREATE:
                raise refusal(Refusal.ALREADY_EXISTS, "the namespace exists")
            fields = immutable_fields(self.definition, wanted)
            if fields:
                raise refusal(Refusal.NOT_ALLOWED, _why_not(fields))
            wanted = changed(self.definition, wanted)
            if wanted != self.definition:
                await self._write(wanted)
            return self._directory.version

    async def _write(self, wanted: NamespaceDefinition) -> None:
        catalog = self._directory.catalog
        version = await catalog.written(
            self._store.put(wanted, catalog.fence()), lambda: self.definition == wanted
        )
        if version is None:
            return
        catalog.version = version
        self.definition = wanted
        for notify in self.on_change:
            notify(wanted)


def _why_not(fields: list[str]) -> str:
    whys = {
        "authorizationRules": "are changed at /v1/authorization-rules, those of a manifest there",
    }
    for_life = "cannot be changed: create another namespace and move the messages"
    return "; ".join(f"{field} {whys.get(field, for_life)}" for field in fields)
