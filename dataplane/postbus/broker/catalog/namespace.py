"""The definition of the namespace: its manifest, and changes while the bus runs.

Changes are stored beside the catalog and raise its version. The tier is that of the store for all
brokers: the owner of partition 0 changes it, with the limits of definitions and traffic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.preconditions import UNCONDITIONAL, Precondition, PutMode, refusal
from postbus.contract.entities import Sku
from postbus.contract.namespace import (
    NamespaceDefinition,
    NamespaceShape,
    change_problems,
    changed,
    in_force,
)
from postbus.entity.commands import Refusal
from postbus.store.namespace import NamespaceStore


class Namespace:
    """One namespace; call `load` first. `on_change` are called after each change."""

    def __init__(
        self, name: str, declared: NamespaceDefinition, store: NamespaceStore, directory: Directory
    ) -> None:
        """`declared`: the fields that manifests name; others are unset and can be put.

        The directory has the limits of the namespace, and gets those of another tier.
        """
        self.name = name
        self.definition = declared
        self.is_closed = False
        """True if sends are refused, after restarts too."""
        self._is_closing = False
        self.on_change: list[Callable[[NamespaceDefinition], None]] = []
        self._declared = declared
        self._put: NamespaceDefinition | None = None
        self._store = store
        self._directory = directory

    @property
    def shape(self) -> NamespaceShape:
        """The tier and the number of partitions."""
        return NamespaceShape(self.definition.sku.name, self._directory.limits.partition_count)

    async def load(self) -> None:
        """Read the stored definition, also after the catalog changed; raises `StoreUnavailable`."""
        stored = await self._store.load()
        self._put = stored.definition
        self._take_closed(stored.is_closed)
        shape = self.shape if stored.sku is None else self.shape._replace(sku=stored.sku)
        self._take(in_force(self._declared, self._put, shape))

    async def redeclare(self, declared: NamespaceDefinition) -> None:
        """Apply another manifest; `declare_sku` applies its tier.

        Raises `StoreUnavailable`; the manifest then applies at the next `load`.
        """
        self._declared = declared
        await self.load()

    async def declare_sku(self, wanted: Sku) -> None:
        """Change the tier to that of a manifest; raises `DirectoryRefusal`, and `NotWritten`."""
        async with self._directory.unchanged():
            problem = self.shape.tier_problem(wanted)
            if problem is not None:
                raise refusal(Refusal.NOT_ALLOWED, f"{problem}; the manifest says {wanted.value}")
            if wanted is not self.definition.sku.name:
                shape = self.shape._replace(sku=wanted)
                definition = in_force(self._declared, self._put, shape)
                fence = self._directory.catalog.fence()
                await self._write(self._store.put_sku(wanted, fence), definition)

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
            problems = change_problems(self.definition, wanted, self.shape)
            if problems:
                why = "; ".join(f"{field}: {reason}" for field, reason in problems.items())
                raise refusal(Refusal.NOT_ALLOWED, why)
            wanted = changed(self.definition, wanted, self.shape.partition_count)
            if wanted != self.definition:
                fence = self._directory.catalog.fence()
                await self._write(self._store.put(wanted, fence), wanted)
                self._put = wanted
            return self._directory.version

    @contextmanager
    def refusing_sends(self) -> Iterator[None]:
        """Refuse sends in a block; afterwards, if the namespace is closed then."""
        self._is_closing = True
        self._take_closed(self.is_closed)
        try:
            yield
        finally:
            self._is_closing = False
            self._take_closed(self.is_closed)

    async def put_closed(self, decide: Callable[[], bool]) -> None:
        """Close or open the namespace as decided while definitions do not change.

        Raises what `decide` raises, `DirectoryRefusal`, and `NotWritten`.
        """
        async with self._directory.unchanged():
            wanted = decide()
            if wanted is not self.is_closed:
                catalog = self._directory.catalog
                version = await catalog.written(
                    self._store.put_closed(wanted, catalog.fence()),
                    lambda: self.is_closed is wanted,
                )
                if version is not None:
                    catalog.version = version
                    self._take_closed(wanted)

    def _take_closed(self, is_closed: bool) -> None:
        self.is_closed = is_closed
        self._directory.refuses_sends = is_closed or self._is_closing

    async def _write(self, work: Awaitable[int], wanted: NamespaceDefinition) -> None:
        catalog = self._directory.catalog
        version = await catalog.written(work, lambda: self.definition == wanted)
        if version is not None:
            catalog.version = version
            self._take(wanted)

    def _take(self, definition: NamespaceDefinition) -> None:
        """Take over a durable definition and notify."""
        before, self.definition = self.definition, definition
        self._directory.limits = self.shape.limits  # the tier may be another since they were read
        if definition != before:
            for notify in self.on_change:
                notify(definition)
