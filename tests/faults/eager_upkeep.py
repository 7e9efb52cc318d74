"""A broker whose VACUUM comes after a few rows, so that kills can hit it.

Run like `python -m postbus` with the number of rows before the command; only the tests use it.
"""

from __future__ import annotations

import sys

from postbus.__main__ import main
from postbus.store import upkeep

if __name__ == "__main__":
    upkeep.VACUUM_ROWS = int(sys.argv.pop(1))  # type: ignore[misc]
    sys.exit(main())
