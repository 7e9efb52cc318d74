"""Progress of a command that takes a while, shown on a terminal only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.cli.failures import err

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """Counts what is done; shown on a terminal only."""

    def __init__(self, title: str | None, total: int | None) -> None:
        self._shown: Progress | None = None
        self._title = title
        self._total = total
        self.done = 0

    def __enter__(self) -> ProgressBar:
        if self._title is not None and err.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._shown = Progress(*columns, console=err, transient=True)
            self._shown.start()
            self._task = self._shown.add_task(self._title, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()

    def advance(self, count: int = 1) -> None:
        """Add to the count."""
        self.done += count
        if self._shown is not None:
            self._shown.advance(self._task, count)


def progress_bar(title: str | None, total: int | None) -> ProgressBar:
    """Return a progress bar; hidden without a title, a counter without a total."""
    return ProgressBar(title, total)
