"""State between batches lies in the checkpoint alone: a run goes on with the newest, or stops.

What a group has settled is gone for a query that lost its state, and an older state would count
messages twice. So other than without state the reader group is no second log.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from postbus_spark.errors import PostbusSparkError
from postbus_spark.guard import ends_of
from postbus_spark.jobs.settling import last_batch, logged_ends

if TYPE_CHECKING:
    from postbus.contract.pipeline import PipelineSpec
    from postbus_spark.jobs.readers import Reader

ACCEPTED: Final = "state-is-lost"
"""File of a checkpoint: `reset` was run, and the next query begins without state."""

WAY_OUT: Final = (
    "Restore the newest checkpoint; or run `postbus-pipeline reset`, which begins with an empty"
    " state: windows that were open count only what comes from then on, and of the last batch rows"
    " may come twice"
)


class StateLost(PostbusSparkError):
    """A checkpoint has not the state of what its reader groups have read."""


def check_state(spec: PipelineSpec, readers: Sequence[Reader]) -> None:
    """Raise `StateLost` unless the checkpoint is where the groups are."""
    assert spec.checkpoint is not None  # the sources have reader groups
    checkpoint = Path(spec.checkpoint.path)
    last = last_batch(checkpoint, "offsets")
    has_state = (checkpoint / "state").is_dir()
    if not spec.is_stateful:
        if has_state:
            raise _lost(f"the checkpoint {checkpoint} has state, and no source has a watermark")
        return
    committed = last_batch(checkpoint)
    if committed is not None and not has_state:
        raise _lost(f"the checkpoint {checkpoint} has no state: it is of a query without one")
    for at, reader in enumerate(readers):
        plan = reader.client.group().plan
        who = f"plan {plan.number} of the reader group {reader.options['readerGroup']}"
        if last is None:
            if plan.number and not (checkpoint / ACCEPTED).exists():
                raise _lost(f"the checkpoint {checkpoint} is empty, and {who} was made")
            continue
        numbers = [last] if last == committed or last == 0 else [last, last - 1]
        ends = [logged_ends(checkpoint, each, len(readers))[at] for each in numbers]
        is_begun = last == 0 and committed is None  # its plan may not have been made
        if not is_begun and ends_of(plan) not in [each.positions for each in ends if each]:
            raise _lost(f"the checkpoint {checkpoint} is not where {who} ends")


def forget_state(checkpoint: Path) -> None:
    """Empty a checkpoint, and let the next query begin without state."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    (checkpoint / ACCEPTED).touch()


def _lost(what: str) -> StateLost:
    return StateLost(f"{what}. {WAY_OUT}")
