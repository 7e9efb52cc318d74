"""Reader groups of pipelines on their bus."""

from __future__ import annotations

from postbus.contract.control_groups import OfReaderGroup, ReaderGroupDescription
from postbus_operator.bus.session import BusSession
from postbus_operator.outcome import BackendUnavailable


async def find_group(
    session: BusSession, group: OfReaderGroup, *, is_fresh: bool = True
) -> ReaderGroupDescription | None:
    """Return a reader group of the bus; None: there is none of this name.

    `is_fresh`: as it is now, and not as a look for another pipeline found it. Raises
    BackendUnavailable while partitions are, one of which may have it.
    """
    listed = await session.reader_groups(is_fresh=is_fresh)
    wanted = (group.entity.lower(), group.sub_queue, group.name)
    for each in listed.items:
        if (each.entity.lower(), each.sub_queue, each.name) == wanted:
            return each
    if listed.unavailable_partitions:
        raise BackendUnavailable("partitions of the bus are unavailable, and perhaps the group's")
    return None
