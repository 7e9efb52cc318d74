"""Figures of a run with their limits, as rows of a table of docs/benchmarks.md."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

FEW: Final = 10.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value. `limit` None: it is only told."""

    what: str
    value: float
    unit: str
    limit: float | None = None
    goal: float | None = None
    remark: str = ""

    @property
    def is_missed(self) -> bool:
        """Whether the value is above its limit."""
        return self.limit is not None and self.value > self.limit

    def row(self) -> str:
        """Return a row; a value above its limit is bold."""
        shown = f"{_short(self.value)} {self.unit}".strip()
        shown = f"**{shown}**" if self.is_missed else shown
        shown += f" ({self.remark})" if self.remark else ""
        limits = ["" if each is None else _short(each) for each in (self.limit, self.goal)]
        return f"| {self.what} | {shown} | {limits[0]} | {limits[1]} |"


@dataclass
class Report:
    """The figures so far, and the load of the machine beside each."""

    figures: list[Figure] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def note(
        self,
        what: str,
        value: float,
        unit: str = "s",
        limit: float | None = None,
        goal: float | None = None,
        remark: str = "",
    ) -> None:
        """Note a figure and show it."""
        made = Figure(what, value, unit, limit, goal, remark)
        self.figures.append(made)
        self.loads.append(f"{os.getloadavg()[0]:.1f}")
        print(f"  {made.row()}", flush=True)

    def text(self) -> str:
        """Return the table."""
        head = [
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load of the machine {', '.join(self.loads)}",
            "",
            "| | measured | must | goal |",
            "|---|---|---|---|",
        ]
        return "\n".join([*head, *(each.row() for each in self.figures)])

    @property
    def missed(self) -> list[Figure]:
        """The figures above their limits."""
        return [each for each in self.figures if each.is_missed]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= FEW else f"{value:.2f}"
