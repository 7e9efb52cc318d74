"""A broker that starts VACUUM after a few rows, so that kills can hit it.

Run like `python -m postbus` with the number of rows before the command; only the tests use it.
"""

from __future__ import annotations

import sys
from typing import Any

from postbus.__main__ import main
from postbus.store.postgres import Store
from postbus.store.upkeep_limits import UpkeepLimits

make = Store.__init__
LIMITS = UpkeepLimits(vacuum_rows=int(sys.argv.pop(1))) if __name__ == "__main__" else None


def make_eager(self: Store, *arguments: Any, **named: Any) -> None:
    """Initialize a store that vacuums its partitions early."""
    make(self, *arguments, **named, upkeep_limits=LIMITS)


if __name__ == "__main__":
    Store.__init__ = make_eager  # type: ignore[method-assign]
    sys.exit(main())
