"""Figures that tests measure; the run ends with the list of them."""

from __future__ import annotations

from typing import Final

FIGURES: Final[list[str]] = []


def record(what: str, seconds: float, limit_s: float) -> None:
    """Note a duration, and fail above its limit."""
    FIGURES.append(f"{what}: {seconds:.1f} s (limit {limit_s:.0f} s)")
    assert seconds <= limit_s, FIGURES[-1]
