"""Counts the rows that Spark leaves out of a state because they come behind the watermark.

Spark shows them in the progress of a query only. A window counts those of one batch, task and key
as one row, since they are grouped before they meet the watermark.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

LOG: Final = logging.getLogger("postbus_spark.jobs")


class LateRows:
    """The late rows of the queries of one process."""

    def __init__(self) -> None:
        self.total = 0
        self._seen: tuple[str, str] | None = None
        """Run and time of the last progress that is counted."""

    def count(self, query: StreamingQuery) -> None:
        """Count what the query has reported since the last call, and log batches with late rows."""
        run = str(query.runId)
        after = self._seen[1] if self._seen is not None and self._seen[0] == run else ""
        for progress in query.recentProgress:
            if progress.timestamp <= after:
                continue
            self._seen = run, progress.timestamp
            late = sum(each.numRowsDroppedByWatermark for each in progress.stateOperators)
            if late:
                self.total += late
                LOG.warning(
                    "batch %s: %s rows are later than the watermark and left out, %s since the"
                    " process began", progress.batchId, late, self.total,
                )  # fmt: skip
