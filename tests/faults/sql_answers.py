"""A broken broker on purpose: it answers from the tables how far a group may read.

Of two commits in flight the later one may be visible first, and then its answer passes a message
that is not there yet. The checker must catch it. Run like `python -m postbus`; only the tests use
it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from postbus.__main__ import main
from postbus.broker.bulk import BulkAccess
from postbus.broker.partition.host import Host
from postbus.entity.group_commands import ListRanges, RangesListed
from postbus.store.journal import Journal

call = BulkAccess._call
submit = Journal.submit

NEXT = """
select coalesce(max(last) + 1, 0)
from {schema}.block b
cross join lateral (
    select max(m.row_key) as last from {schema}.message m
    where m.row_key >= b.first_key and m.row_key < b.first_key + b.size
) as visible
where b.entity_no = $1 and b.sub_queue = $2::smallint
"""


def release_ranges(self: Journal[Any], outcome: Any, parked: Any) -> None:
    """Release what can be read at once, without the commits before it."""
    if isinstance(outcome.reply, RangesListed):
        self._on_committed([(outcome, parked)])
    else:
        submit(self, outcome, parked)


async def call_or_look(self: BulkAccess, host: Host, command: Any) -> Any:
    """Return the reply of a partition, in which the end is what the tables show."""
    reply = await call(self, host, command)
    if not isinstance(command, ListRanges):
        return reply
    reader = host.bulk
    async with reader._store.bulk() as connection:
        end = await connection.fetchval(
            reader._sql(NEXT), command.entity_no, int(command.sub_queue)
        )
    return dataclasses.replace(reply, next_position=end, readable=end)


if __name__ == "__main__":
    Journal.submit = release_ranges  # type: ignore[method-assign]
    BulkAccess._call = call_or_look  # type: ignore[method-assign]
    sys.exit(main())
