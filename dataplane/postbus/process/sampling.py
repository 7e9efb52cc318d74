"""Samples of a running bus for its metrics: the only module that reads the counters of all
parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from postbus import __version__
from postbus.broker.catalog.directory import Directory
from postbus.broker.operate.message_view import SUB_QUEUE_NAMES
from postbus.broker.partition.activity import oldest_age_ms
from postbus.broker.partition.clock import EntityClock
from postbus.broker.partition.host import Host
from postbus.broker.partition.ownership import HostStatus
from postbus.contract.entities import EntityKind, EntityStatus
from postbus.entity.commands import SubQueue
from postbus.entity.group_commands import Cursor
from postbus.entity.window import WindowBudget
from postbus.process.group_metrics import GroupSample
from postbus.process.metrics import (
    FLOWS,
    MAX_ENTITY_LABELS,
    BusSample,
    CommitSample,
    EntitySample,
    PartitionSample,
    StoreSample,
    summed,
)
from postbus.store.catalog import CatalogEntry
from postbus.store.counters import COMMIT_BOUNDS_S, StoreCounters
from postbus.store.pinned import Pinned, joined
from postbus.store.postgres import Store

LOOK_S: Final = 2.0
"""Time that a scrape waits for the ages of messages; less than the timeout of Prometheus."""

READS_AT_ONCE: Final = 8
RECEIVABLE: Final = frozenset({EntityStatus.ACTIVE, EntityStatus.SEND_DISABLED})
"""Statuses in which messages can be received: consumers are scaled by what they may get."""

AT_ONCE: Final = 100
"""Entities examined at a time: a millisecond or two."""


class Sampler:
    """Reads stores, hosts and directory at each scrape. `prepare` first, then `sample`.

    There are values from the first second on: `directory` is set after it was read.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        stores: Sequence[Store],
        clock: EntityClock,
        budget: WindowBudget,
        add_listeners: Callable[[BusSample], None],
    ) -> None:
        """`add_listeners` completes a sample with the counts of listeners."""
        self.directory: Directory | None = None
        self._hosts = hosts
        self._stores = stores
        self._clock = clock
        self._budget = budget
        self._add_listeners = add_listeners
        self._oldest: dict[tuple[int, int], int] = {}
        self._entities: list[EntitySample] = []
        self._groups: list[GroupSample] = []

    def sample(self) -> BusSample:
        """Return values for the metrics; entities as of the last `prepare`."""
        sample = BusSample(
            __version__,
            now_ms=self._clock(),
            window_bytes=self._budget.used_bytes,
            window_limit_bytes=self._budget.limit_bytes,
        )
        self._add_listeners(sample)
        sample.stores = [
            StoreSample(number, store.where, store.is_open and not store.outage.is_on)
            for number, store in enumerate(self._stores, 1)
        ]
        sample.partitions = [
            PartitionSample(
                host.partition_id,
                host.status.value,
                host.reload_count,
                host.ownership.fence_count,
                host.queued_bytes,
                host.is_full,
                _commits(host.counters),
                host.ownership.round_trip_s,
            )
            for host in self._hosts
            if host.status is not HostStatus.UNCLAIMED
        ]
        sample.entities, sample.groups = self._entities, self._groups
        return sample

    async def prepare(self) -> None:
        """Examine all entities, a few at a time, so that clients are served in between."""
        await self._look_for_oldest()
        found: list[EntitySample] = []
        groups: list[GroupSample] = []
        for number, entry in enumerate(self._entries(), 1):
            sample = self._entity(entry)
            if sample is not None:
                found.append(sample)
                groups += self._groups_of(entry)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        self._entities, self._groups = found, groups

    async def _look_for_oldest(self) -> None:
        """Find the ages of the oldest messages; leave out those that are not available in time."""
        self._oldest = {}
        slots = asyncio.Semaphore(READS_AT_ONCE)
        looks = [
            asyncio.ensure_future(self._look(slots, host, entry.entity_no))
            for entry in self._labelled()
            for host in self._loaded(entry)
        ]
        if looks:
            _, late = await asyncio.wait(looks, timeout=LOOK_S)
            for look in late:
                look.cancel()

    async def _look(self, slots: asyncio.Semaphore, host: Host, entity_no: int) -> None:
        age_ms = await oldest_age_ms(host, entity_no, slots)
        if age_ms is not None:
            # On the clock of each database, as in the sample.
            self._oldest[host.partition_id, entity_no] = self._clock() - age_ms

    def _labelled(self) -> list[CatalogEntry]:
        """Return approximately the entities that have labels of their own."""
        return self._entries()[: 3 * MAX_ENTITY_LABELS]

    def _entries(self) -> list[CatalogEntry]:
        return [] if self.directory is None else self.directory.entries()

    def _loaded(self, entry: CatalogEntry) -> list[Host]:
        assert self.directory is not None
        hosts = (self._hosts[home] for home in self.directory.homes_of(entry))
        return [host for host in hosts if host.is_loaded]

    def _entity(self, entry: CatalogEntry) -> EntitySample | None:
        """Return one entity, the parts of a partitioned one summed; None if nothing is loaded."""
        parts = [part for host in self._loaded(entry) if (part := self._part(entry, host))]
        return summed(entry.kind.value, entry.name, parts) if parts else None

    def _groups_of(self, entry: CatalogEntry) -> list[GroupSample]:
        """Return the reader groups of an entity that have been looked at in all its partitions."""
        homes: dict[tuple[SubQueue, str], Cursor] = {}
        parts: dict[tuple[SubQueue, str], list[Pinned | None]] = {}
        for host in self._loaded(entry):
            entity = None if host.state is None else host.state.entities.get(entry.entity_no)
            for sub_queue, name, cursor in [] if entity is None else entity.listed_groups():
                pinned = host.pinned((entry.entity_no, sub_queue, name))
                parts.setdefault((sub_queue, name), []).append(pinned)
                if cursor.plan is not None:
                    homes[sub_queue, name] = cursor
        found = []
        for (sub_queue, name), cursor in homes.items():
            known = [part for part in parts[sub_queue, name] if part is not None]
            if len(known) < len(parts[sub_queue, name]):
                continue
            pinned = joined(known)
            found.append(
                GroupSample(
                    entry.kind.value,
                    entry.name,
                    SUB_QUEUE_NAMES[sub_queue],
                    name,
                    pinned.unread,
                    pinned.oldest_ms,
                    pinned.kept_bytes,
                    cursor.epoch,
                    0 if cursor.plan is None else cursor.plan.attempts,
                    pinned.is_over,
                )
            )
        return found

    def _part(self, entry: CatalogEntry, host: Host) -> EntitySample | None:
        entity_no = entry.entity_no
        counts, traffic = host.counts(entity_no), host.traffic.get(entity_no)
        if counts is None or host.state is None:
            return None
        messages = {
            "active": counts.active,
            "locked": host.state.locked_count(entity_no),
            "scheduled": counts.scheduled,
            "dead_letter": counts.dead_letter,
            "transfer": counts.transfer,
            "transfer_dead_letter": counts.transfer_dead_letter,
        }
        if entry.kind is not EntityKind.TOPIC:
            is_open = entry.properties.status in RECEIVABLE
            messages["receivable"] = counts.active if is_open else 0
        return EntitySample(
            entry.kind.value,
            entry.name,
            messages,
            counts.size_bytes,
            {} if traffic is None else {flow: getattr(traffic, flow) for flow in FLOWS},
            self._oldest.get((host.partition_id, entity_no)) if counts.active else None,
            {} if traffic is None else dict(traffic.deaths),
        )


def _commits(counters: StoreCounters) -> CommitSample:
    bounds = [*COMMIT_BOUNDS_S, float("inf")]
    return CommitSample(
        list(zip(bounds, accumulate(counters.commit_counts), strict=True)),
        counters.commit_seconds,
        counters.written_rows,
        counters.reads,
        counters.read_rows,
    )
