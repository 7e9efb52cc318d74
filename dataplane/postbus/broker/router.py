"""Routing from listeners to partitions: names to addresses, commands to hosts.

Listeners access partitions only through it: `edge` knows no host, store or partition state. A
remote partition will have the same interface over a peer stream, so every answer is a callback,
which may come at once or later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

from postbus.broker.address import Address
from postbus.broker.catalog.directory import Directory
from postbus.broker.partition.host import Host
from postbus.broker.partition.sinks import DeliverySink
from postbus.broker.placement import SPREAD
from postbus.broker.spread.partitioned import PartitionedEntities
from postbus.broker.spread.transactions import detects_duplicates, place_transaction
from postbus.contract.entities import (
    catalog_key,
)
from postbus.entity.commands import (
    OnReply,
    Refused,
    SubQueue,
    Transact,
    Transacted,
)
from postbus.entity.expects import Expects, R
from postbus.store.catalog import CatalogEntry

SUFFIXES = (
    ("/$transfer/$deadletterqueue", SubQueue.TRANSFER_DEAD_LETTER),
    ("/$deadletterqueue", SubQueue.DEAD_LETTER),
)


class Watcher(Protocol):
    """An observer of an entity's deletion; receivers are notified by its partition."""

    def deleted(self) -> None: ...


class Router:
    """Selects the partition of a command; allocates consumer numbers."""

    def __init__(self, hosts: Sequence[Host], directory: Directory) -> None:
        self._hosts = hosts
        self._directory = directory
        self._consumer_ids = itertools.count(1)
        self._partitioned = PartitionedEntities(hosts, self._detects_duplicates)
        self._watchers: dict[int, dict[Watcher, None]] = {}
        directory.on_deletion(self._notify_watchers)

    # --- names ----------------------------------------------------------------------------------

    def resolve(self, path: str, on_resolved: Callable[[Address | None], None]) -> None:
        """Find the entity of a path such as `orders/$DeadLetterQueue`, case-insensitively.

        `on_resolved` gets None for an unknown name; it may be called before this returns.
        """
        name = catalog_key(path)
        sub_queue = SubQueue.ACTIVE
        for suffix, candidate in SUFFIXES:
            if name.endswith(suffix):
                name, sub_queue = name[: -len(suffix)], candidate
                break
        entry = self._directory.find(name)
        if entry is None:
            on_resolved(None)
            return
        on_resolved(_address(entry, sub_queue))

    def address_of(self, entity_no: int, sub_queue: SubQueue) -> Address | None:
        """Return the address of an entity by its number, None if it was deleted."""
        entry = self._directory.numbered(entity_no)
        return None if entry is None else _address(entry, sub_queue)

    def _detects_duplicates(self, entity_no: int) -> bool:
        address = self._address_of(entity_no)
        return address is not None and detects_duplicates(address)

    def _address_of(self, entity_no: int) -> Address | None:
        return self.address_of(entity_no, SubQueue.ACTIVE)

    # --- commands -------------------------------------------------------------------------------

    @overload
    def submit(self, partition_id: int, command: Expects[R], on_reply: OnReply[R]) -> None: ...

    @overload
    def submit(
        self, partition_id: int, command: Expects[object], on_reply: None = None
    ) -> None: ...

    def submit(self, partition_id: int, command: Any, on_reply: Any = None) -> None:
        """Apply a command; `on_reply` is called once, after the commit that justifies the reply.

        If nothing has to be committed first, or the command is refused, `on_reply` and the sinks
        that the command concerns are called before this returns. A transaction goes to the
        partition of the messages it settles, regardless of `partition_id`.
        """
        if type(command) is Transact:
            self._transact(partition_id, command, on_reply)
        elif partition_id == SPREAD:
            self._partitioned.submit(command, on_reply)
        else:
            self._hosts[partition_id].submit(command, on_reply)

    def _transact(
        self, partition_id: int, command: Transact, on_reply: OnReply[Transacted] | None
    ) -> None:
        placed = place_transaction(command, self._address_of, len(self._hosts))
        if isinstance(placed, Refused):
            if on_reply is not None:
                on_reply(placed)
            return
        home, command = placed
        home = partition_id if home == SPREAD else home
        if home == SPREAD:
            self._partitioned.submit_anywhere(command, on_reply)
        else:
            self._hosts[home].submit(command, on_reply)

    def register_sink(self, partition_id: int, consumer_id: int, sink: DeliverySink) -> None:
        """Register the sink for a consumer's deliveries; call before submitting `AddConsumer`."""
        if partition_id == SPREAD:
            self._partitioned.register_sink(consumer_id, sink)
        else:
            self._hosts[partition_id].register_sink(consumer_id, sink)

    def unregister_sink(self, partition_id: int, consumer_id: int) -> None:
        """Remove a sink; deliveries still on their way to it return to their queue."""
        if partition_id == SPREAD:
            self._partitioned.unregister_sink(consumer_id)
        else:
            self._hosts[partition_id].unregister_sink(consumer_id)

    def new_consumer_id(self) -> int:
        return next(self._consumer_ids)

    # --- deletions ------------------------------------------------------------------------------

    def watch(self, entity_no: int, watcher: Watcher) -> None:
        """Notify a watcher when an entity is deleted, until `unwatch`."""
        self._watchers.setdefault(entity_no, {})[watcher] = None

    def unwatch(self, entity_no: int, watcher: Watcher) -> None:
        watchers = self._watchers.get(entity_no)
        if watchers is not None:
            watchers.pop(watcher, None)
            if not watchers:
                del self._watchers[entity_no]

    def _notify_watchers(self, entity_no: int) -> None:
        for watcher in list(self._watchers.get(entity_no, ())):
            watcher.deleted()


def _address(entry: CatalogEntry, sub_queue: SubQueue) -> Address:
    return Address(
        SPREAD if entry.is_partitioned else entry.home_partition,
        entry.entity_no,
        sub_queue,
        entry.name,
        entry.kind,
        entry.properties,
        entry.is_partitioned,
    )
