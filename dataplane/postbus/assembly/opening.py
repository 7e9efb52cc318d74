"""Opens the stores of a bus, and reads namespace, entities and rules.

`bus` calls it once, before any partition is claimed. Temporary errors are waited for; errors that
need a human end the start. Nothing here serves clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import asyncpg

from postbus.assembly.declared_keys import DeclaredKeys
from postbus.assembly.store_trouble import explain_store_error
from postbus.broker.access.authorization_rules import AuthorizationRules, KeysUnreadable
from postbus.broker.access.authz import Authorizer
from postbus.broker.access.caller_fence import CallerFence
from postbus.broker.access.sealing import KeySeal
from postbus.broker.backoff import Backoff
from postbus.broker.catalog.change_tasks import ChangeTasks
from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.namespace import Namespace
from postbus.manifests.reader import BusDefinition
from postbus.process.data_directory import DataDirectory, new_key
from postbus.process.settings import Settings
from postbus.store.authorization import AuthorizationStore
from postbus.store.belonging import record_belonging
from postbus.store.caller_epoch import CallerEpochStore
from postbus.store.catalog import CatalogStore
from postbus.store.errors import StoreError, StoreUnavailable
from postbus.store.namespace import NamespaceStore
from postbus.store.stores import Stores


class BusError(Exception):
    """The bus cannot start; the text is for the user."""

    def __init__(self, message: str, *, is_about_store: bool = False) -> None:
        self.is_about_store = is_about_store
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Opened:
    """State in the stores of a bus. `created_ms`: creation time of the namespace, in real time."""

    directory: Directory
    namespace: Namespace
    rules: AuthorizationRules
    fence: CallerFence
    created_ms: int


class Opening:
    """Opens the stores of one bus.

    `is_embedded`: the store is beside the keys of the bus and was just started, so that there is
    nothing to wait for.
    """

    def __init__(
        self,
        stores: Stores,
        definition: BusDefinition,
        seal: KeySeal,
        keys: DeclaredKeys,
        authorizer: Authorizer,
        change_tasks: ChangeTasks,
        *,
        is_embedded: bool,
    ) -> None:
        self._stores = stores
        self._definition = definition
        self._seal = seal
        self._keys = keys
        self._authorizer = authorizer
        self._change_tasks = change_tasks
        self._is_embedded = is_embedded

    async def open(self, on_wait: Callable[[str], None]) -> Opened:
        """Check and migrate the stores, read them, load the authorization rules.

        Waits for the first store; `on_wait` is called with the reason before each pause. Raises
        `BusError`.
        """
        outage, backoff = self._stores.first.outage, Backoff()
        while (opened := await self._opened_or_away()) is None:
            on_wait(outage.text or "")
            await backoff.pause()
        outage.ended()
        return opened

    async def _opened_or_away(self) -> Opened | None:
        try:
            return await self._open()
        except StoreUnavailable as error:
            if self._is_embedded:
                raise BusError(explain_store_error(error), is_about_store=True) from error
            self._stores.first.outage.failed(error)
            return None
        except (StoreError, asyncpg.PostgresError, OSError, ValueError) as error:
            raise BusError(explain_store_error(error), is_about_store=True) from error
        except KeysUnreadable as error:
            raise BusError(str(error)) from error

    async def _open(self) -> Opened:
        stores, definition = self._stores, self._definition
        await stores.open()
        await record_belonging(
            stores.first, definition.name, self._seal.check, is_embedded=self._is_embedded
        )
        properties = definition.properties
        namespaces = NamespaceStore(stores.first)
        shape = await namespaces.shape(
            properties.declared_sku, properties.premium_messaging_partitions
        )
        catalog = CatalogStore(stores.first)
        directory = Directory(catalog, shape.limits)
        await directory.load()
        namespace = Namespace(definition.name, definition.declared, namespaces, directory)
        await namespace.load()
        directory.catalog.on_read.append(namespace.load)
        return Opened(
            directory,
            namespace,
            await self._open_rules(directory),
            CallerFence(CallerEpochStore(stores.first), directory.catalog),
            await catalog.created_ms(),
        )

    async def _open_rules(self, directory: Directory) -> AuthorizationRules:
        """Load declared and stored authorization rules."""
        rules = AuthorizationRules(
            AuthorizationStore(self._stores.first),
            self._seal,
            directory,
            self._authorizer,
            self._keys.rules(),
            new_key,
            self._change_tasks,
            self._keys.keep,
        )
        await rules.load()
        directory.catalog.on_read.append(rules.load)
        directory.on_deletion(lambda _entity_no: rules.refresh())
        directory.on_restore(lambda _entity_no: rules.refresh())
        return rules


def read_seal(settings: Settings, data: DataDirectory) -> KeySeal:
    """Return the seal for keys in the store; raises `BusError`."""
    file = settings.sealing_key_file
    try:
        text = data.sealing_key() if file is None else file.read_text(encoding="ascii")
        return KeySeal.from_text(text)
    except (OSError, ValueError) as error:
        raise BusError(f"the sealing key cannot be used: {error}") from error
