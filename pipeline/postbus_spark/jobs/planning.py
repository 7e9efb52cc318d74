"""The batch that is processed now, and the number under which sinks know it.

One stateless source: the number of its group's plan. Several: the sum of the numbers of their
plans, which rises with each batch, since a batch plans something in at least one group. With
state: the number that Spark gives it within one query, as batches without messages have rows, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from postbus_spark.errors import Fenced, InvalidOffset
from postbus_spark.lake.layout import Batch

if TYPE_CHECKING:
    from postbus.contract.bulk import ReaderGroup
    from postbus.contract.pipeline import PipelineDocument
    from postbus_spark.jobs.readers import Reader


class Planned(NamedTuple):
    """A batch, and the groups as they were when it began. `is_first`: nobody has processed it.

    `query`: the query within which its number counts, "" if that is of the bus.
    """

    batch: Batch
    groups: tuple[ReaderGroup, ...]
    is_first: bool
    query: str


def planned_batch(group: ReaderGroup, entity: str) -> Batch:
    """Return the batch that a group reads now. Raises `Fenced` if there is none."""
    plan = group.plan
    if plan.is_settled:
        raise Fenced(f"plan {plan.number} of {group.name} was settled while it was processed")
    return Batch(
        entity=entity,
        generation=group.generation,
        group=group.name,
        epoch=group.epoch,
        number=plan.number,
        attempts=plan.attempts,
        ranges=dict(plan.ranges),
    )


def planned(document: PipelineDocument, readers: Sequence[Reader], number: int) -> Planned | None:
    """Return the batch that Spark processes under a number, None if it has no row.

    Raises `Fenced` if the only group has none.
    """
    groups = tuple(reader.client.group() for reader in readers)
    if document.spec.has_places:
        batch = planned_batch(groups[0], readers[0].entity)
        return Planned(batch, groups, batch.attempts == 1, "")
    attempts = [group.plan.attempts for group in groups if not group.plan.is_settled]
    query = ""
    if document.spec.is_stateful:
        assert document.spec.checkpoint is not None  # the sources have reader groups
        query = query_of(Path(document.spec.checkpoint.path))
    elif attempts:
        number = sum(group.plan.number for group in groups)
    else:
        return None  # of several sources none had a message when the query began
    ranges = [each for group in groups for _, each in sorted(group.plan.ranges.items())]
    batch = Batch(
        entity=", ".join(reader.entity for reader in readers),
        generation=" ".join([query, *(group.generation for group in groups)]),
        group=document.metadata.name,
        epoch=sum(group.epoch for group in groups),
        number=number,
        attempts=max(attempts, default=1),
        ranges=dict(enumerate(ranges)),
        has_places=False,
    )
    return Planned(batch, groups, min(attempts, default=1) == 1, query)


def query_of(checkpoint: Path) -> str:
    """Return the id of the query that a checkpoint is of. Raises `InvalidOffset`."""
    file = checkpoint / "metadata"
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidOffset(
            f"the file {file} of the checkpoint cannot be used ({error}): restore it from a backup,"
            " or run `postbus-pipeline reset`"
        ) from None
