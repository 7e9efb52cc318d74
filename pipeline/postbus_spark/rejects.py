"""Dead-letter messages that a pipeline cannot use, from the driver (`foreachBatch`).

A drained message stays in the planned range until that is settled; the dead-letter queue gets a
copy at once. So a batch that is repeated, and rejects again, changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from postbus.contract.bulk import MAX_REJECTED, RejectMessages
from postbus_spark.client import GroupClient
from postbus_spark.errors import NotAllowed
from postbus_spark.options import read_options


def reject_messages(
    places: Iterable[tuple[int, int]], *, reason: str, description: str = "", **options: str
) -> int:
    """Dead-letter messages of the batch that is read now; return how many were so by this call.

    `places`: the columns partition and position of each. Options are those of the stream. Raises
    one of `postbus_spark.errors`; `NotAllowed` if the group is a tap, or a message is locked.
    """
    client = GroupClient(read_options(options))
    return reject_places(client, client.group().epoch, places, reason, description)


def reject_places(
    client: GroupClient,
    epoch: int,
    places: Iterable[tuple[int, int]],
    reason: str,
    description: str,
) -> int:
    """Dead-letter messages as the reader of an epoch; return how many were so by this call."""
    by_partition: dict[int, list[int]] = defaultdict(list)
    for partition, position in places:
        by_partition[int(partition)].append(int(position))
    rejected = 0
    for partition, positions in sorted(by_partition.items()):
        for start in range(0, len(positions), MAX_REJECTED):
            answer = client.reject(
                RejectMessages(
                    epoch=epoch,
                    partition=partition,
                    positions=tuple(positions[start : start + MAX_REJECTED]),
                    reason=reason,
                    description=description,
                )
            )
            if answer.refused:
                position, text = min(answer.refused.items())
                raise NotAllowed(f"position {position} of partition {partition}: {text}")
            rejected += answer.rejected
    return rejected
