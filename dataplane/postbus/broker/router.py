"""The one way from a door to a partition: names to addresses, commands to hosts.

Edge code knows no host, no store and no partition state. A remote partition will be the same call
behind a peer stream, therefore everything answers by callback, at once or later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from postbus.broker.directory import Directory
from postbus.broker.host import DeliverySink, Host
from postbus.contract import QueueProperties
from postbus.entity.commands import Command, Reply, SubQueue

SUFFIXES = (
    ("/$transfer/$deadletterqueue", SubQueue.TRANSFER_DEAD_LETTER),
    ("/$deadletterqueue", SubQueue.DEAD_LETTER),
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a path leads. `name` is in the case it was created with."""

    partition_id: int
    entity_no: int
    sub_queue: SubQueue
    name: str
    properties: QueueProperties


class Clock(Protocol):
    """Entity time in milliseconds since the epoch (D16)."""

    def __call__(self) -> int: ...


class Router:
    """Chooses the partition; hands out consumer numbers."""

    def __init__(self, hosts: Sequence[Host], directory: Directory, clock: Clock) -> None:
        self._hosts = hosts
        self._directory = directory
        self._consumer_ids = itertools.count(1)
        self.now_ms = clock

    def resolve(self, path: str, on_resolved: Callable[[Address | None], None]) -> None:
        """Find the entity of a path such as `orders/$DeadLetterQueue`, case-insensitively.

        `on_resolved` gets None for a name the catalog does not know; it may be called before this
        returns.
        """
        name = path.strip("/").lower()
        sub_queue = SubQueue.ACTIVE
        for suffix, candidate in SUFFIXES:
            if name.endswith(suffix):
                name, sub_queue = name[: -len(suffix)], candidate
                break
        entry = self._directory.find(name)
        if entry is None:
            on_resolved(None)
            return
        on_resolved(
            Address(entry.home_partition, entry.entity_no, sub_queue, entry.name, entry.properties)
        )

    def submit(
        self,
        partition_id: int,
        command: Command,
        on_reply: Callable[[Reply], None] | None = None,
    ) -> None:
        """Apply a command; `on_reply` is called once, after the commit that justifies it."""
        self._hosts[partition_id].submit(command, on_reply)

    def register_sink(self, partition_id: int, consumer_id: int, sink: DeliverySink) -> None:
        """Name who gets the deliveries of a consumer; call before submitting `AddConsumer`."""
        self._hosts[partition_id].register_sink(consumer_id, sink)

    def unregister_sink(self, partition_id: int, consumer_id: int) -> None:
        """Forget a sink; what is still on its way to it goes back to its queue."""
        self._hosts[partition_id].unregister_sink(consumer_id)

    def new_consumer_id(self) -> int:
        return next(self._consumer_ids)
