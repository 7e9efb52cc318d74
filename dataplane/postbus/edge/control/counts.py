"""Control API of message counts: of one entity, and of all that changed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from postbus.broker.administration import Administration, EntityRuntime, EntityTraffic
from postbus.broker.administration import RuntimeInformation as Counted
from postbus.contract.control import (
    CountDetails,
    MessageRates,
    RuntimeInformation,
)
from postbus.contract.control_counts import EntityCounts, EntityCountsPage
from postbus.edge.control.calls import Answer, Call, Handler


class ControlCounts:
    """Handlers of counts of many entities."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def operations(self) -> Mapping[str, Handler]:
        return {"listCounts": self._list}

    async def _list(self, call: Call) -> Answer:
        page = await self._administration.runtime_since(call.text("since"), call.number("top"))
        answer = EntityCountsPage(
            items=[_moved(each) for each in page.items],
            cursor=page.cursor,
            is_end=page.is_end,
            starts_over=page.starts_over,
        )
        return Answer(answer)


def runtime_of(counted: Counted, traffic: EntityTraffic) -> RuntimeInformation:
    """Return the answer about one entity."""
    rates = traffic.rates
    return RuntimeInformation(
        message_count=_total(counted),
        count_details=_details(counted),
        size_in_bytes=counted.size_bytes,
        accessed_at=_time(counted.accessed_ms),
        availability=counted.availability.value,
        unavailable_partitions=counted.unavailable_partitions,
        subscription_count=counted.subscription_count,
        rates=None
        if rates is None
        else MessageRates(
            incoming=rates.accepted, outgoing=rates.delivered, completed=rates.completed
        ),
        oldest_message_age_seconds=traffic.oldest_age_s,
    )


def _moved(entity: EntityRuntime) -> EntityCounts:
    counted, is_known = entity.runtime, entity.is_known
    return EntityCounts(
        entity_id=entity.entity_no,
        name=entity.name,
        kind=entity.kind.value,
        message_count=_total(counted) if is_known else None,
        count_details=_details(counted) if is_known else None,
        size_in_bytes=counted.size_bytes if is_known else None,
        accessed_at=_time(counted.accessed_ms) if is_known else None,
        availability=counted.availability.value,
        unavailable_partitions=counted.unavailable_partitions,
        subscription_count=counted.subscription_count,
    )


def _details(counted: Counted) -> CountDetails:
    return CountDetails(
        active_message_count=counted.active,
        dead_letter_message_count=counted.dead_letter,
        scheduled_message_count=counted.scheduled,
        transfer_message_count=counted.transfer,
        transfer_dead_letter_message_count=counted.transfer_dead_letter,
    )


def _total(counted: Counted) -> int:
    return (
        counted.active
        + counted.dead_letter
        + counted.scheduled
        + counted.transfer
        + counted.transfer_dead_letter
    )


def _time(value_ms: int) -> datetime:
    return datetime.fromtimestamp(value_ms / 1_000, UTC)
