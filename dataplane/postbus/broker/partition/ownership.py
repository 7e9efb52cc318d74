"""Ownership of a partition: its life cycle, and the wait while another broker owns it (ADR 12).

One broker owns all partitions: a broker that waits for partition 0 claims no other one. Otherwise a
broker that takes over and one that wakes up could each claim some of the free partitions, and
neither would serve everything.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final
from uuid import UUID

import asyncpg

from postbus.broker.backoff import LAST_BACKOFF_S
from postbus.store.errors import Fenced, StoreError
from postbus.store.postgres import Store

logger = logging.getLogger(__name__)

OWNER_LOOK_S: Final = 0.25
"""Interval at which a waiting partition checks the owner's heartbeat; costs no statement."""

UNKNOWN_LOOK_S: Final = 1.0
"""The same for an owner of a version without heartbeats: each check is a connection and a claim.
At this interval its silence can still be proven."""

FIRST_LOOK_S: Final = 0.05
FIRST_S: Final = 2.0
"""Maximum wait of a partition until the owner of partition 0 is known. Our choice: longer than a
claim; the database of partition 0 may be unavailable while that of this partition is not."""


class HostStatus(Enum):
    """Life cycle of a partition: UNCLAIMED -> LOADING -> ACTIVE -> LOADING ... -> CLOSED."""

    UNCLAIMED = "unclaimed"
    LOADING = "loading"
    ACTIVE = "active"
    CLOSED = "closed"


class Ownership:
    """Ownership of one partition; survives its reloads.

    `held_by` is the owner while we wait, `fence_count` the number of times another broker claimed
    it.
    """

    def __init__(self, partition_id: int, store: Store) -> None:
        self.held_by: str | None = None
        self.fence_count = 0
        self._partition_id = partition_id
        self._store = store
        self._first: Ownership | None = None
        self._owner: UUID | None = None  # of `held_by`, if known
        self._is_claimed = False
        self._epoch = 0
        self._attempts = 0  # finished attempts to claim it
        self._is_ours = False

    @property
    def round_trip_s(self) -> float | None:
        """Duration of the last heartbeat to the store, None when there was none."""
        return self._store.beats.round_trip_s

    def follow(self, first: Ownership) -> None:
        """Claim only if no other broker owns partition 0; `first` is its ownership."""
        self._first = first

    async def wait_for_first(self, pause: Callable[[float], Awaitable[bool]]) -> None:
        """Wait until it may be claimed; raises Fenced while another broker owns partition 0.

        `pause` waits a number of seconds and returns whether to continue.
        """
        first, waited_s = self._first, 0.0
        if first is None:
            return
        attempts = first._attempts
        while not (first._is_claimed or first.held_by or first._attempts > attempts):
            if waited_s >= FIRST_S or not await pause(FIRST_LOOK_S):
                return
            waited_s += FIRST_LOOK_S
        if first.held_by is not None:
            await self._watch_owner()
            raise Fenced(first.held_by, first._owner)

    async def _watch_owner(self) -> None:
        """Beat in our database already now, so that a silent owner is not waited for twice."""
        try:
            await self._store.open()
            await self._store.beats.begin()
        except (StoreError, asyncpg.PostgresError) as error:  # the claim will wait for it
            extra = {"partition": self._partition_id, "error": str(error)}
            logger.debug("the owner cannot be watched in this database yet", extra=extra)

    def claimed(self, epoch: int) -> None:
        """Record that the partition is ours."""
        self._is_ours = self._is_claimed = True
        self._epoch, self.held_by = epoch, None

    def failed(self, error: Exception | None) -> None:
        """Record the end of a life or a failed attempt; log the owner once."""
        self._is_claimed = False
        self._attempts += 1
        if not isinstance(error, Fenced):
            self.held_by = None
            return
        detail, self._owner = str(error), error.owner
        extra: dict[str, object] = {"partition": self._partition_id, "owner": detail}
        if self._is_ours:
            self._is_ours = False
            self.fence_count += 1
            extra |= {"lost_epoch": self._epoch}
            logger.warning("partition was lost to another broker", extra=extra)
        elif self.held_by != detail:
            logger.warning("partition waits for another broker", extra=extra)
        self.held_by = detail

    async def outwait(self, error: Fenced, pause: Callable[[float], Awaitable[bool]]) -> None:
        """Wait while the owner has a heartbeat, at most `LAST_BACKOFF_S`: it may release this one.

        `pause` waits a number of seconds and returns whether to continue.
        """
        waited_s = 0.0
        look_s = UNKNOWN_LOOK_S if error.owner is None else OWNER_LOOK_S
        beats = self._store.beats
        if self._first is not None and error.owner == self._first._owner:
            beats = self._first._store.beats  # an owner has another identity in each database
        while await pause(look_s):
            waited_s += look_s
            is_held = error.owner is not None and beats.holds_on(error.owner)
            if not is_held or waited_s >= LAST_BACKOFF_S:
                return
