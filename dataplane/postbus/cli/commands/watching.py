"""`get --watch`: a table that refreshes, with rates and the growth of dead letters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from postbus.cli.failures import out
from postbus.cli.formats.output import Format, print_objects

PAUSE_S: Final = 2.0
AVAILABLE: Final = "Available"
COLUMNS: Final = {
    "name": "name",
    "status": "status",
    "active": "active",
    "incomingRate": "in/s",
    "outgoingRate": "out/s",
    "oldestAge": "oldest",
    "deadLetter": "dead",
    "deadLetterRate": "dead/s",
}


async def watched(
    look: Callable[[], Awaitable[list[dict[str, Any]]]],
    output: Format,
    pause_s: float = PAUSE_S,
) -> None:
    """Show the rows of `look` until interrupted; changes are relative to the previous rows."""
    before: dict[str, dict[str, Any]] = {}
    looked_s = 0.0
    while True:
        found, now_s = await look(), time.monotonic()
        rows = [with_change(each, before.get(each["name"]), now_s - looked_s) for each in found]
        before, looked_s = {each["name"]: each for each in found}, now_s
        if out.is_terminal:
            out.clear()
        out.print(f"{datetime.now().astimezone():%H:%M:%S}", markup=False)
        print_objects(rows, output, with_availability(COLUMNS, rows), "no entities")
        await asyncio.sleep(pause_s)


def with_availability(
    columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> Mapping[str, str]:
    """Return the columns, with availability if an entity in the rows is not available."""
    if all(row["availability"] == AVAILABLE for row in rows):
        return columns
    return {**columns, "availability": "availability"}


def with_change(
    row: dict[str, Any], before: dict[str, Any] | None, seconds: float
) -> dict[str, Any]:
    """Return a row with the change of its dead letters per second; 0 while one is unknown."""
    now, then = row["deadLetter"], None if before is None else before["deadLetter"]
    change = 0.0 if now is None or then is None else (now - then) / seconds
    return {**row, "deadLetterRate": f"{change:+.1f}" if abs(change) >= 0.05 else "0"}
