"""Control API of past definitions: changes, tombstones and restores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from postbus.broker.administration import Administration
from postbus.broker.administration import EntityChange as KnownChange
from postbus.broker.administration import Tombstone as KnownTombstone
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.contract.control import (
    EntityChange,
    EntityChanges,
    ProblemType,
    Tombstone,
    Tombstones,
    applied_hash,
)
from postbus.edge.control.calls import Answer, Call, ControlRefused, Handler
from postbus.edge.control.entities import applied
from postbus.entity.commands import Refusal

MOST_TOMBSTONES = 1_000


class ControlHistory:
    """Handlers of changes, tombstones and restores."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def operations(self) -> Mapping[str, Handler]:
        return {
            "listChanges": self._changes,
            "listTombstones": self._tombstones,
            "restoreEntity": self._restore,
        }

    async def _changes(self, call: Call) -> Answer:
        since, wait_s = call.number("since"), call.number("wait")
        with _too_old():
            version, found = await self._administration.changes(since, wait_s, call.number("begun"))
        items = [_change(each) for each in found]
        is_idle = wait_s > 0 and version == since
        # Not in other answers: while definitions change, each would count all entities.
        cursor = await self._administration.counts_feed.cursor() if is_idle else None
        return Answer(EntityChanges(version=version, items=items, counts_cursor=cursor))

    async def _tombstones(self, call: Call) -> Answer:
        since, version = call.number("since"), self._administration.version
        with _too_old():
            found = await self._administration.tombstones(since, MOST_TOMBSTONES)
        items = [_tombstone(each) for each in found]
        last = max((each.version for each in items), default=since)
        is_all = len(items) < MOST_TOMBSTONES
        return Answer(Tombstones(version=max(last, version) if is_all else last, items=items))

    async def _restore(self, call: Call) -> Answer:
        number = call.names["entity_id"]
        if not (number.isascii() and number.isdecimal()) or len(number) > 10:
            raise ControlRefused(
                404,
                f"{number} is not the entityId of a tombstone; /v1/tombstones lists them",
                ProblemType.NOT_FOUND,
            )
        restored = await self._administration.restore(int(number))
        return applied(self._administration, restored, is_new=False)


def _change(change: KnownChange) -> EntityChange:
    entity, tombstone = change.entity, change.tombstone
    if entity is not None:
        rules = [rule.properties for rule in entity.rules]
        return EntityChange(
            version=change.version,
            entity_id=entity.entity_no,
            name=entity.name,
            kind=entity.kind.value,
            change="put",
            managed_by=entity.managed_by,
            applied_hash=applied_hash(entity.properties, rules),
        )
    assert tombstone is not None
    gone = _tombstone(tombstone)
    return EntityChange(
        version=gone.version,
        entity_id=gone.entity_id,
        name=gone.name,
        kind=gone.kind,
        change="deleted",
        managed_by=gone.managed_by,
        reason=gone.reason,
        restorable_until=gone.restorable_until,
    )


def _tombstone(known: KnownTombstone) -> Tombstone:
    until_ms = known.restorable_until_ms
    return Tombstone(
        entity_id=known.entity_no,
        name=known.name,
        kind=known.kind.value,
        reason=known.reason.value,
        version=known.version,
        deleted_at=_time(known.deleted_ms),
        restorable_until=None if until_ms is None else _time(until_ms),
        managed_by=known.managed_by,
    )


@contextmanager
def _too_old() -> Iterator[None]:
    """Answer 410 when part of the history is no longer known."""
    try:
        yield
    except DirectoryRefusal as error:
        if error.refused.refusal is not Refusal.ARGUMENT_OUT_OF_RANGE:
            raise
        raise ControlRefused(410, str(error), ProblemType.TOO_OLD) from error


def _time(value_ms: int) -> datetime:
    return datetime.fromtimestamp(value_ms / 1_000, UTC)
