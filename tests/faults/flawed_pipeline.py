"""A pipeline with a flaw that the checker of `pipeline_kills` must find.

python tests/faults/flawed_pipeline.py FLAW run FILE …
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from postbus_spark.jobs import batches, runner
from postbus_spark.jobs.main import main
from postbus_spark.jobs.planning import planned
from postbus_spark.lake.layout import Batch, Table
from postbus_spark.publishing import WriterClient


def settle_early() -> None:
    """Settle a batch before it is processed."""
    process = batches.Batches.__call__

    def settled(self: batches.Batches, rows: Any, number: int) -> None:
        found = planned(self._document, self._readers, number)
        rows = rows.persist()
        rows.count()
        if found is not None:
            self._readers[0].client.settle(found.batch.epoch, found.batch.number)
        batches.planned = lambda *_: found  # type: ignore[attr-defined]
        process(self, rows, number)

    batches.Batches.__call__ = settled  # type: ignore[method-assign]


def forget_batches() -> None:
    """Publish a repeated batch under another number."""
    publish = WriterClient._publish

    def renumbered(self: WriterClient, batch: int, stages: Any) -> Any:
        return publish(self, time.time_ns() // 1_000_000 if stages else batch, stages)

    WriterClient._publish = renumbered  # type: ignore[method-assign]
    WriterClient.last_batch = lambda _: None  # type: ignore[method-assign]


def skip_trim() -> None:
    """Write a repeated batch into a table again."""

    def everything(_: Table, batch: Batch) -> Mapping[int, int]:
        return {number: first for number, (first, _) in batch.ranges.items()}

    Table.missing = everything  # type: ignore[method-assign,assignment]


def miss_no_state() -> None:
    """Go on with whatever state a checkpoint has."""
    runner.check_state = lambda *_: None  # type: ignore[attr-defined]


FLAWS: dict[str, Callable[[], None]] = {
    "settles": settle_early,
    "forgets": forget_batches,
    "untrimmed": skip_trim,
    "stateless": miss_no_state,
}

if __name__ == "__main__":
    FLAWS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
