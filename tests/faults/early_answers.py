"""A broken broker on purpose: it answers before the commit. The checker must catch it.

Run like `python -m postbus`; only the tests use it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from postbus.__main__ import main
from postbus.store.journal import Journal

commit = Journal.submit


def answer_and_commit(self: Journal[Any], outcome: Any, parked: Any) -> None:
    """Release the outcome at once, then commit it without waiting callers."""
    self._on_committed([(outcome, parked)])
    commit(self, dataclasses.replace(outcome, effects=[]), None)


if __name__ == "__main__":
    Journal.submit = answer_and_commit  # type: ignore[method-assign]
    sys.exit(main())
