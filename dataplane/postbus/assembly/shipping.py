"""Connects each host with the shipper that takes messages from its partition to their targets."""

from __future__ import annotations

from collections.abc import Sequence

from postbus.broker.catalog.directory import Directory
from postbus.broker.partition.host import Host
from postbus.broker.partition.shipper import ForwardDestination, Shipper
from postbus.contract.entities import SubscriptionProperties, catalog_key
from postbus.store.catalog import CatalogEntry


def connect_shippers(hosts: Sequence[Host], directory: Directory) -> None:
    """Connect all partitions with each other; call before one of them is claimed."""

    def target_of(name: str) -> ForwardDestination | None:
        entry = directory.find(catalog_key(name))
        return None if entry is None else _target(entry)

    def retained_targets_of(name: str) -> list[ForwardDestination]:
        found = [_target(entry) for entry in directory.retained_named(catalog_key(name))]
        return [target for target in found if target is not None]

    for host in hosts:
        host.ship_with(Shipper(host, hosts, target_of, retained_targets_of))


def _target(entry: CatalogEntry) -> ForwardDestination | None:
    """Return the target of messages; subscriptions accept messages of their topic only."""
    if isinstance(entry.properties, SubscriptionProperties):
        return None
    detects = entry.properties.requires_duplicate_detection
    return ForwardDestination(entry.entity_no, entry.home_partition, entry.is_partitioned, detects)
