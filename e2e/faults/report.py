"""The lines of a run: one for each fault, a table by fault, and totals."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from e2e.faults.record import Line, of_kind

from tests.faults.history import Delivered, Result, Sent, Settled


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that is over. Times in seconds since the epoch; `refused_s`: no send was accepted."""

    name: str
    start: float
    healed: float
    end: float
    refused_s: float
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds of each wait of the recovery."""

    @property
    def recovered_s(self) -> float:
        """Time from the end of the fault until everything works."""
        return self.end - self.healed


def line(number: int, done: Done) -> str:
    """Return the line of a fault."""
    return (
        f"{number:4}  {done.name:28} lasted {done.healed - done.start:5.1f} s"
        f"  recovered {done.recovered_s:5.1f} s  refused {done.refused_s:5.1f} s{longest(done)}"
    )


def longest(done: Done) -> str:
    """Return the longest wait of a recovery, if it was long."""
    name = max(done.waits, key=lambda each: done.waits[each], default="")
    return f"  ({name} {done.waits[name]:.0f} s)" if done.waits.get(name, 0.0) > 5 else ""


def table(done: list[Done]) -> str:
    """Return a line for each kind of fault: how many, medians and the worst."""
    kinds: dict[str, list[Done]] = defaultdict(list)
    for each in done:
        kinds[each.name].append(each)
    rows = ["| fault | times | recovered, median / worst | refused, median / worst |"]
    rows.append("|---|---|---|---|")
    for name, found in sorted(kinds.items()):
        recovered = [each.recovered_s for each in found]
        refused = [each.refused_s for each in found]
        rows.append(
            f"| {name} | {len(found)} | {median(recovered):.1f} / {max(recovered):.1f} s"
            f" | {median(refused):.1f} / {max(refused):.1f} s |"
        )
    return "\n".join(rows)


def totals(done: list[Done], lines: list[Line], seconds: float) -> str:
    """Return one line about all messages."""
    sent, settled = of_kind(lines, Sent), of_kind(lines, Settled)
    accepted = sum(each.result is Result.ACCEPTED for each in sent)
    completed = sum(each.result is Result.ACCEPTED for each in settled)
    return (
        f"{len(done)} faults in {seconds:.0f} s: {accepted} sends accepted,"
        f" {len(sent) - accepted} without an answer, {len(of_kind(lines, Delivered))} deliveries,"
        f" {completed} completions confirmed, {len(settled) - completed} without an answer"
    )
