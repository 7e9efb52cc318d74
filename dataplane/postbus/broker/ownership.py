"""Whose a partition is: its life cycle here, and the wait while another broker has it (ADR 12)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final

from postbus.broker.recovery import LAST_BACKOFF_S
from postbus.store.errors import Fenced
from postbus.store.postgres import Store

logger = logging.getLogger(__name__)

OWNER_LOOK_S: Final = 0.25
"""How often a partition that waits looks whether its owner still beats; no statement is sent."""

UNKNOWN_LOOK_S: Final = 1.0
"""The same where the owner is of a version that does not beat: each look is a connection and a
claim. Looks so far apart still prove its silence."""


class HostStatus(Enum):
    """Life cycle; UNCLAIMED -> LOADING -> ACTIVE -> LOADING ... -> CLOSED."""

    UNCLAIMED = "unclaimed"
    LOADING = "loading"
    ACTIVE = "active"
    CLOSED = "closed"


class Ownership:
    """Of one partition; outlives its reloads.

    `held_by` says who has it while we wait, `fence_count` how often it was taken from us.
    """

    def __init__(self, partition_id: int, store: Store) -> None:
        self.held_by: str | None = None
        self.fence_count = 0
        self._partition_id = partition_id
        self._store = store
        self._is_ours = False

    @property
    def round_trip_s(self) -> float | None:
        """How long the last beat to the store took, None when there was none."""
        return self._store.beats.round_trip_s

    def gained(self) -> None:
        """The partition is ours from here on."""
        self._is_ours, self.held_by = True, None

    def failed(self, error: Exception | None) -> None:
        """A life or an attempt to begin one ended; say who has the partition, once."""
        if not isinstance(error, Fenced):
            self.held_by = None
            return
        detail = str(error)
        extra = {"partition": self._partition_id, "owner": detail}
        if self._is_ours:
            self._is_ours = False
            self.fence_count += 1
            logger.warning("partition was lost to another broker", extra=extra)
        elif self.held_by != detail:
            logger.warning("partition waits for another broker", extra=extra)
        self.held_by = detail

    async def outwait(self, error: Fenced, pause: Callable[[float], Awaitable[bool]]) -> None:
        """Wait while the owner beats, `LAST_BACKOFF_S` at most: it may have released this one.

        `pause` waits so many seconds and says whether to go on.
        """
        waited_s = 0.0
        look_s = UNKNOWN_LOOK_S if error.owner is None else OWNER_LOOK_S
        while await pause(look_s):
            waited_s += look_s
            is_held = error.owner is not None and self._store.beats.holds_on(error.owner)
            if not is_held or waited_s >= LAST_BACKOFF_S:
                return
