"""Requests to the API server as its audit log tells them: who wrote what in a span of time."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
OPERATOR: Final = "system:serviceaccount:postbus-system:postbus-operator"


def log_of(state: str) -> Path:
    """Return the log of the own node whose files are in a folder."""
    return Path(state) / "node" / "log" / "audit.jsonl"


DEFAULT: Final = log_of(os.environ.get("E2E_STATE") or str(Path(__file__).parents[1] / ".state"))


@dataclass(frozen=True, slots=True)
class Written:
    """Writes of one user: verb and resource -> count; `refused` of them were refused."""

    counts: Counter[str]
    refused: int

    @property
    def total(self) -> int:
        """Return the number of writes."""
        return self.counts.total()

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items())) or "none"


def now() -> str:
    """Return the time as the log writes it: texts that compare as times do."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def writes(log: Path, begin: str, end: str, user: str = OPERATOR) -> Written:
    """Count the writes of a user that began in a span of time, but those of Leases."""
    counts: Counter[str] = Counter()
    refused = 0
    for part in _parts(log):
        with part.open("rb") as lines:
            for line in lines:
                if user.encode() not in line:
                    continue
                entry: dict[str, Any] = json.loads(line)
                if not begin <= entry["requestReceivedTimestamp"] < end:
                    continue
                if entry["user"]["username"] != user or entry["verb"] not in WRITES:
                    continue
                of = entry.get("objectRef") or {}
                if of.get("resource") == "leases":
                    continue
                what = "/".join(filter(None, (of.get("resource"), of.get("subresource"))))
                counts[f"{entry['verb']} {what}"] += 1
                refused += entry["responseStatus"]["code"] >= 400
    return Written(counts, refused)


def _parts(log: Path) -> list[Path]:
    """Return the log with what the API server has put aside of it, which it does at 100 MB."""
    if not log.exists():
        raise FileNotFoundError(f"{log}: no audit log; name it with --audit")
    return [*sorted(log.parent.glob(f"{log.stem}-*{log.suffix}")), log]
