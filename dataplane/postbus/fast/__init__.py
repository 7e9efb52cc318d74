"""Choice of the build that handles bursts: functions in C (`_runs.pyx`), or their twins in Python.

`POSTBUS_ACCELERATE` decides when the process starts: `off` uses Python, all else the functions in
C if they were compiled, of this version. Both builds do the same (ADR 50). A module `runs` of each
layer chooses between them; nothing else imports `_runs`.
"""

from __future__ import annotations

import os
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final


def _is_outdated() -> bool:
    """Return whether the compiled module is of another source than the one beside it."""
    from postbus.fast import _runs

    source = Path(__file__).with_name("_runs.pyx").read_bytes()
    return sha256(source).hexdigest() != _runs.SOURCE


_IS_WANTED = os.environ.get("POSTBUS_ACCELERATE") != "off"
_IS_COMPILED = _IS_WANTED and find_spec("postbus.fast._runs") is not None

IS_OUTDATED: Final = _IS_COMPILED and _is_outdated()
"""True if the compiled module is not used because it is of another version."""

IS_ACCELERATED: Final = _IS_COMPILED and not IS_OUTDATED

BUILD: Final = "accelerated" if IS_ACCELERATED else "pure Python"
"""Name of the build, for logs, health and figures."""
