"""Attempts at a batch that its rows did not end: the bus, a disk or an S3 has failed.

The bus counts how often a batch was begun, which bounds batches that kill their driver. What a
repetition can heal does not count: the checkpoint knows how many of the attempts were of this kind.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from postbus_spark.lake.layout import Batch

EXCUSED: Final = "excused-attempts"
"""File of a checkpoint."""


def excused(checkpoint: Path, batch: Batch) -> int:
    """Return how many attempts at a batch do not count, 0 if nothing readable says so."""
    with suppress(OSError, ValueError):
        found = json.loads((checkpoint / EXCUSED).read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("batch") == _name(batch):
            return int(found.get("attempts", 0))
    return 0


def excuse(checkpoint: Path, batch: Batch) -> None:
    """Do not count this attempt. One that cannot be noted counts: the same disk may have failed."""
    attempts = excused(checkpoint, batch) + 1
    made = checkpoint / f".{EXCUSED}"
    with suppress(OSError):
        made.write_text(json.dumps({"batch": _name(batch), "attempts": attempts}))
        os.replace(made, checkpoint / EXCUSED)


def _name(batch: Batch) -> list[object]:
    return [batch.group, batch.generation, batch.number]
