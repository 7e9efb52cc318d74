"""The cursors of reader groups, as far as they keep settled rows from deletion (ADR 42).

Follows durable mutations, so that it is never ahead of the tables. Called by `retention.py`, and by
`pinned.py` for taps that release rows beyond their limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

from postbus.entity.commands import SubQueue
from postbus.entity.group_commands import Limits
from postbus.entity.outcomes import DropCursor, PutCursor

if TYPE_CHECKING:
    from postbus.store.pinned import Pinned

ALL_KEYS: Final = (1 << 63) - 1

Place: TypeAlias = tuple[int, SubQueue, str]
"""Entity, sub-queue and name of a group."""


class Tap:
    """One tap: it keeps rows from `at` on. `pinned`: the last estimate of what it keeps.

    `released`: beyond its limits it keeps nothing below this position. A load forgets it: what was
    deleted is in `low_mark`, and the rest is released again.
    """

    __slots__ = ("limits", "pinned", "released", "settled")

    def __init__(self, settled: int, limits: Limits) -> None:
        self.settled = settled
        self.limits = limits
        self.released = 0
        self.pinned: Pinned | None = None

    @property
    def at(self) -> int:
        """The position below which the tap needs nothing."""
        return max(self.settled, self.released)


class Pins:
    """The cursors of one entity's groups, and the progress of deletion below them.

    `first_key`: below it no settled row is left that may be deleted for its key. `scanned_ms`: the
    same for rows settled before it, whose retention has ended.
    """

    __slots__ = ("first_key", "scanned_ms", "taps")

    def __init__(self) -> None:
        self.taps: dict[tuple[SubQueue, str], Tap] = {}
        self.first_key = 0
        self.scanned_ms = 0

    def bounds(self) -> list[int]:
        """Return for each sub-queue, in order of its number, the lowest cursor of its groups."""
        return [
            min((tap.at for (of, _), tap in self.taps.items() if of is kind), default=ALL_KEYS)
            for kind in SubQueue
        ]

    def put(self, put: PutCursor) -> None:
        """Take over the cursor of a tap; one that is placed again keeps what is left there."""
        before = self.bounds()[put.sub_queue]
        cursor = put.cursor
        tap = self.taps.get((put.sub_queue, put.name))
        if tap is None or put.is_placed:
            self.taps[put.sub_queue, put.name] = Tap(cursor.settled, cursor.limits)
        else:
            tap.settled, tap.limits = cursor.settled, cursor.limits
        self._follow(put.sub_queue, before)

    def drop(self, sub_queue: SubQueue, name: str) -> bool:
        """Forget a tap; return whether one is left."""
        before = self.bounds()[sub_queue]
        self.taps.pop((sub_queue, name), None)
        self._follow(sub_queue, before)
        return bool(self.taps)

    def release(self, sub_queue: SubQueue, name: str, position: int) -> None:
        """Let a tap keep nothing below a position."""
        before = self.bounds()[sub_queue]
        self.taps[sub_queue, name].released = position
        self._follow(sub_queue, before)

    def _follow(self, sub_queue: SubQueue, before: int) -> None:
        """Look at the rows below a bound that rose."""
        if self.bounds()[sub_queue] > before:
            self.first_key = min(self.first_key, before)


class Taps:
    """The groups of a partition by entity: taps, and drains for what they have rejected."""

    def __init__(self) -> None:
        self._pins: dict[int, Pins] = {}

    def of(self, entity_no: int) -> Pins | None:
        """Return the cursors of an entity, None if it has no group."""
        return self._pins.get(entity_no)

    def places(self) -> list[Place]:
        """Return the places of all taps."""
        return [(number, *of) for number, pins in self._pins.items() for of in pins.taps]

    def find(self, place: Place) -> Tap | None:
        """Return a tap, None if there is none."""
        entity_no, sub_queue, name = place
        pins = self._pins.get(entity_no)
        return None if pins is None else pins.taps.get((sub_queue, name))

    def release(self, place: Place, position: int) -> None:
        """Let a tap keep nothing below a position."""
        entity_no, sub_queue, name = place
        self._pins[entity_no].release(sub_queue, name, position)

    def put(self, put: PutCursor) -> None:
        self._pins.setdefault(put.entity_no, Pins()).put(put)

    def drop(self, drop: DropCursor) -> None:
        pins = self._pins.get(drop.entity_no)
        if pins is not None and not pins.drop(drop.sub_queue, drop.name):
            del self._pins[drop.entity_no]

    def forget(self, entity_no: int) -> None:
        """Forget the groups of a dropped entity."""
        self._pins.pop(entity_no, None)

    def look_again(self, entity_no: int) -> None:
        """Look at all rows below the cursors again: the history that kept some has ended."""
        pins = self._pins.get(entity_no)
        if pins is not None:
            pins.first_key = 0

    def note_settled(self, entity_no: int, row_keys: Iterable[int]) -> None:
        """Record rows that were settled."""
        pins = self._pins.get(entity_no)
        if pins is not None:
            pins.first_key = min(pins.first_key, *row_keys)
