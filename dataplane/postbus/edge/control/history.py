"""Control API of past definitions: changes, tombstones and restores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from postbus.broker.administration import Administration
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.contract.control import EntityChange, EntityChanges, ProblemType, Tombstone, Tombstones
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
        with _too_old():
            version, found = await self._administration.changes(
                call.number("since"), call.number("wait")
            )
        items = [
            EntityChange(
                version=each.version,
                entity_id=each.entity_no,
                name=each.name,
                kind=each.kind.value,
                change="deleted" if each.is_deleted else "put",
            )
            for each in found
        ]
        return Answer(EntityChanges(version=version, items=items))

    async def _tombstones(self, call: Call) -> Answer:
        since, version = call.number("since"), self._administration.version
        with _too_old():
            found = await self._administration.tombstones(since, MOST_TOMBSTONES)
        items = [
            Tombstone(
                entity_id=each.entity_no,
                name=each.name,
                kind=each.kind.value,
                reason=each.reason.value,
                version=each.version,
                deleted_at=_time(each.deleted_ms),
                restorable_until=None
                if each.restorable_until_ms is None
                else _time(each.restorable_until_ms),
            )
            for each in found
        ]
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
