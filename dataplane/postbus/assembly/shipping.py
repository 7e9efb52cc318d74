"""Connects each host with those that take messages from its partition to their targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from postbus.broker.catalog.directory import Directory
from postbus.broker.partition.host import Host
from postbus.broker.partition.publisher import Publisher
from postbus.broker.partition.shipper import ForwardDestination, Shipper
from postbus.broker.writers import WriterAccess
from postbus.contract.entities import SubscriptionProperties, catalog_key
from postbus.store.catalog import CatalogEntry
from postbus.store.postgres import Store
from postbus.store.publishing import PublishingStore


def connect_hosts(
    hosts: Sequence[Host], directory: Directory, store_of: Callable[[int], Store]
) -> WriterAccess:
    """Connect all partitions with each other; call before one of them is claimed.

    `store_of` returns the database of a partition.
    """

    def target_of(name: str) -> ForwardDestination | None:
        entry = directory.find(catalog_key(name))
        return None if entry is None else _target(entry)

    def retained_targets_of(name: str) -> list[ForwardDestination]:
        found = [_target(entry) for entry in directory.retained_named(catalog_key(name))]
        return [target for target in found if target is not None]

    def numbered(entity_no: int) -> ForwardDestination | None:
        entry = directory.numbered(entity_no)
        return None if entry is None else _target(entry)

    parts = {}
    for host in hosts:
        host.ship_with(Shipper(host, hosts, target_of, retained_targets_of))
        store = PublishingStore(store_of(host.partition_id), host.partition_id)
        publisher = Publisher(host, store, hosts, numbered)
        host.publish_with(publisher)
        parts[host.partition_id] = (host, store, publisher)
    return WriterAccess(parts)


def _target(entry: CatalogEntry) -> ForwardDestination | None:
    """Return the target of messages; subscriptions accept messages of their topic only."""
    if isinstance(entry.properties, SubscriptionProperties):
        return None
    detects = entry.properties.requires_duplicate_detection
    return ForwardDestination(entry.entity_no, entry.home_partition, entry.is_partitioned, detects)
