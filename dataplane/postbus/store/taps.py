"""The cursors of reader groups, as far as they keep settled rows from deletion (ADR 42).

Follows durable mutations, so that it is never ahead of the tables. Called by `retention.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import DropCursor, PutCursor

ALL_KEYS: Final = (1 << 63) - 1


class Pins:
    """The cursors of one entity's groups, and the progress of deletion below them.

    `first_key`: below it no settled row is left that may be deleted for its key. `scanned_ms`: the
    same for rows settled before it, whose retention has ended.
    """

    __slots__ = ("_cursors", "first_key", "scanned_ms")

    def __init__(self) -> None:
        self._cursors: dict[tuple[SubQueue, str], int] = {}
        self.first_key = 0
        self.scanned_ms = 0

    def bounds(self) -> list[int]:
        """Return for each sub-queue, in order of its number, the lowest cursor of its groups."""
        return [
            min((at for (of, _), at in self._cursors.items() if of is kind), default=ALL_KEYS)
            for kind in SubQueue
        ]

    def move(self, sub_queue: SubQueue, name: str, settled: int | None) -> bool:
        """Take over the cursor of a group, None when it was dropped; return whether one is left."""
        before = self.bounds()[sub_queue]
        if settled is None:
            self._cursors.pop((sub_queue, name), None)
        else:
            self._cursors[sub_queue, name] = settled
        if self.bounds()[sub_queue] > before:
            self.first_key = min(self.first_key, before)
        return bool(self._cursors)


class Taps:
    """The groups of a partition by entity: taps, and drains for what they have rejected."""

    def __init__(self) -> None:
        self._pins: dict[int, Pins] = {}

    def of(self, entity_no: int) -> Pins | None:
        """Return the cursors of an entity, None if it has no group."""
        return self._pins.get(entity_no)

    def put(self, put: PutCursor) -> None:
        pins = self._pins.setdefault(put.entity_no, Pins())
        pins.move(put.sub_queue, put.name, put.cursor.settled)

    def drop(self, drop: DropCursor) -> None:
        pins = self._pins.get(drop.entity_no)
        if pins is not None and not pins.move(drop.sub_queue, drop.name, None):
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
