"""How the commands of a folder find the bus that runs there: `bus.json` in its data directory.

`postbus dev` writes it when it is ready and removes it when it stops; the command line reads it.
It holds a key, so only its owner may read it. After a kill it is stale, and nobody answers there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

FILE_NAME: Final = "bus.json"


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a running bus is reached. `control` is a URL, the files are whole paths."""

    bus: str
    pid: int
    control: str | None
    connection_string: str | None = field(default=None, repr=False)
    token_file: str | None = None
    ca_file: str | None = None

    def text(self) -> str:
        """Return what the file holds."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_announcement(data: Path) -> Announcement | None:
    """Return what the bus of a data directory said of itself, None when none runs there."""
    try:
        said = json.loads((data / FILE_NAME).read_text(encoding="utf-8"))
        return Announcement(**said)
    except (OSError, ValueError, TypeError):
        return None
