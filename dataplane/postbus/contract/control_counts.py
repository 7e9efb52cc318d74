"""Response bodies of the control API about the counts of many entities."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from postbus.contract.bodies import ResponseBody
from postbus.contract.control import CountDetails


class EntityCounts(ResponseBody):
    """Counts and size of an entity when they last changed; see `RuntimeInformation`.

    Counts, size and `accessed_at` are null while all partitions of the entity are unavailable. A
    later access alone is no change.
    """

    entity_id: int
    name: str
    kind: Literal["queue", "topic", "subscription"]
    message_count: int | None
    count_details: CountDetails | None
    size_in_bytes: int | None
    accessed_at: datetime | None
    availability: str
    unavailable_partitions: tuple[int, ...]
    subscription_count: int


class EntityCountsPage(ResponseBody):
    """Entities whose counts changed after a cursor, the latest change last.

    `cursor` begins the next request, at once unless `is_end`. `starts_over`: the cursor of the
    request is not of this run of the broker, and the list begins with all entities; those that it
    does not name until `is_end` no longer exist.
    """

    items: list[EntityCounts]
    cursor: str
    is_end: bool
    starts_over: bool
