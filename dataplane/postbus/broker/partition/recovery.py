"""Recovery of a partition after failures: backoff, and whether to commit one by one.

Pure bookkeeping of one host; time is injected.
"""

from __future__ import annotations

from collections.abc import Callable

from postbus.broker.backoff import Backoff
from postbus.store.errors import StoreUnavailable

GOOD_S = 10.0
"""A life that committed something and lasted this long resets the failure count. Our choice: twice
the longest backoff, so that repeated failures are never retried without a pause."""
REPEATED = 2
"""Number of equal failures after which the next life commits one by one."""

INTERRUPTED = "a test requested an outage"


class Recovery:
    """Counts failures of one partition. `commit_count` is raised by the host."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._backoff = Backoff()
        self._loaded_at: float | None = None
        self._kind: tuple[object, ...] = ()
        self._repeated = 0
        self._interrupted_until = 0.0
        self.commit_count = 0
        self.wait_s = 0.0
        """Seconds to wait before the next attempt to load."""

    @property
    def is_one_by_one(self) -> bool:
        """True if the same failure was repeated, so that its cause should fail alone."""
        return self._repeated >= REPEATED

    def loaded(self) -> None:
        """Record the begin of a life."""
        self._loaded_at = self._monotonic_s()
        self.commit_count = 0

    def failed(self, commit_error: Exception | None) -> None:
        """Record the end of a life or attempt to load; `commit_error` if a commit failed.

        An outage is no evidence about the work: it neither starts nor ends the one-by-one mode.
        """
        if self._was_good():
            self._backoff.reset()
            self._kind, self._repeated = (), 0
        self._loaded_at = None
        left_s = self._interrupted_until - self._monotonic_s()
        # a simulated outage ends at its given time
        self.wait_s = self._backoff.next_s(left_s if left_s > 0 else None)
        if commit_error is None or isinstance(commit_error, StoreUnavailable):
            return
        kind = _kind_of(commit_error)
        self._repeated = self._repeated + 1 if kind == self._kind else 1
        self._kind = kind

    def interrupt(self, duration_s: float) -> None:
        """Let every attempt fail for a duration; a longer interruption is not shortened."""
        until = self._monotonic_s() + duration_s
        self._interrupted_until = max(self._interrupted_until, until)

    def check_interruption(self) -> None:
        """Raise `StoreUnavailable` while an interruption lasts."""
        if self._monotonic_s() < self._interrupted_until:
            raise StoreUnavailable(INTERRUPTED)

    def _was_good(self) -> bool:
        return (
            self._loaded_at is not None
            and self.commit_count > 0
            and self._monotonic_s() - self._loaded_at >= GOOD_S
        )


def _kind_of(error: Exception) -> tuple[object, ...]:
    """Return a key that is equal for failures of the same work, even if clients repeat it."""
    names = ("sqlstate", "schema_name", "table_name", "constraint_name")
    return (type(error), *(getattr(error, name, None) for name in names))
