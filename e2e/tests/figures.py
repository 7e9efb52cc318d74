"""Figures that tests measure; the run ends with the list of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

FIGURES: Final[list[str]] = []
FILE: Final = os.environ.get("E2E_FIGURES")
"""File for the figures of several runs; its writer shows them."""


def record(what: str, seconds: float, limit_s: float) -> None:
    """Note a duration, and fail above its limit."""
    figure = f"{what}: {seconds:.1f} s (limit {limit_s:.0f} s)"
    if FILE is None:
        FIGURES.append(figure)
    else:
        with Path(FILE).open("a", encoding="utf-8") as file:
            file.write(f"{figure}\n")
    assert seconds <= limit_s, figure
