"""Settles what Spark has committed: it does so itself one batch late, and never for the last one.

The checkpoint of a query has `commits/<batch>` for each finished batch and `offsets/<batch>`, whose
third line is the end of the batch, as the source gave it. Source: Spark's OffsetSeqLog, version 1.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from postbus_spark.errors import InvalidOffset
from postbus_spark.guard import ends_of
from postbus_spark.offsets import Offset, read_offset

if TYPE_CHECKING:
    from postbus.contract.bulk import ReaderGroup
    from postbus_spark.client import GroupClient

LOG: Final = logging.getLogger("postbus_spark.jobs")


def last_batch(checkpoint: Path, log: str = "commits") -> int | None:
    """Return the number of the last batch in a log of a checkpoint, None without one."""
    try:
        names = [entry.name for entry in (checkpoint / log).iterdir()]
    except FileNotFoundError:
        return None
    numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
    return max(numbers, default=None)


def logged_ends(checkpoint: Path, number: int, count: int) -> list[Offset | None]:
    """Return where a batch ends in each of `count` sources, None: Spark has not read it yet.

    Raises `InvalidOffset`.
    """
    file = checkpoint / "offsets" / str(number)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        version, _, *sources = lines
        if version != "v1" or len(sources) != count:
            raise ValueError(
                f"it has version {version} and {len(sources)} sources, the document {count}"
            )
        return [None if each == "-" else read_offset(json.loads(each)) for each in sources]
    except (OSError, ValueError) as error:
        raise InvalidOffset(
            f"the file {file} of the checkpoint cannot be used ({error}): start with an empty"
            " checkpoint, which goes on where the reader group is"
        ) from None


def committed_ends(checkpoint: Path, count: int) -> list[Offset | None]:
    """Return where the last finished batch ends in each of `count` sources.

    Raises `InvalidOffset`.
    """
    number = last_batch(checkpoint)
    if number is None:
        return [None for _ in range(count)]
    return logged_ends(checkpoint, number, count)


def settle_committed(
    client: GroupClient, checkpoint: Path, epoch: int | None = None, at: int = 0, count: int = 1
) -> ReaderGroup | None:
    """Settle the plan of the group if Spark has committed its batch; return the settled group.

    `epoch`: of the reader that runs. Without it the group is claimed first. `at`: which of `count`
    sources the group reads. Raises `BulkError`.
    """
    end = committed_ends(checkpoint, count)[at]
    if end is None:
        return None
    group = client.group()
    plan = group.plan
    is_same = end == client.offset(group, end.positions)
    if plan.is_settled or not is_same or end.positions != ends_of(plan):
        return None
    if epoch is None:
        epoch = client.claim().epoch
    settled = client.settle(epoch, plan.number)
    LOG.info("plan %s of the reader group %s is settled", plan.number, group.name)
    return settled
