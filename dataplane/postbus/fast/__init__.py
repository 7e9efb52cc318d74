"""Choice of the build that handles bursts: functions in C (`_runs.pyx`), or their twins in Python.

`POSTBUS_ACCELERATE` decides when the process starts: `off` uses Python, all else the functions in
C if they were compiled. Both builds do the same (ADR 50). A module `runs` of each layer chooses
between them; nothing else imports `_runs`.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

IS_ACCELERATED: Final = (
    os.environ.get("POSTBUS_ACCELERATE") != "off" and find_spec("postbus.fast._runs") is not None
)

BUILD: Final = "accelerated" if IS_ACCELERATED else "pure Python"
"""Name of the build, for logs, health and figures."""
