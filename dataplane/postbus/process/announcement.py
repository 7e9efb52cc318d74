"""How the commands of a folder find the bus that runs there: `bus.json` in its data directory.

A bus writes it when it is ready and removes it when it stops; the command line reads it. It holds
a key, so only its owner may read it. After a kill it is stale, and nobody answers there. One whose
data directory nobody knows the name of, with `--ephemeral`, leaves it among the notes of its user.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from postbus.process.control_lookup import is_alive, notes_folder

FILE_NAME: Final = "bus.json"


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a running bus is reached. `control` and `metrics` are URLs, files are whole paths."""

    bus: str
    pid: int
    control: str | None
    connection_string: str | None = field(default=None, repr=False)
    endpoint: str | None = None
    """A connection string without a rule and its key."""
    token_file: str | None = None
    ca_file: str | None = None
    metrics: str | None = None

    def text(self) -> str:
        """Return what the file holds."""
        return json.dumps(asdict(self), indent=1) + "\n"


def connection_string(endpoint: str, rule: str, key: str) -> str:
    """Return a connection string of an endpoint such as `Endpoint=sb://localhost:5672`."""
    address, _, more = endpoint.partition(";")
    parts = [address, f"SharedAccessKeyName={rule}", f"SharedAccessKey={key}", more]
    return ";".join(filter(None, parts))


def read_announcement(data: Path) -> Announcement | None:
    """Return what the bus of a data directory said of itself, None when none runs there."""
    found = _read(data / FILE_NAME)
    if found is None:
        with contextlib.suppress(OSError):
            found = _read(_note_of(notes_folder(), data))
            if found is not None and not is_alive(found.pid):
                found = None
    return found


@contextlib.contextmanager
def announced_as(data: Path, announcement: Announcement) -> Iterator[None]:
    """Let a bus be found as if its data lay in this folder, where it makes nothing."""
    from postbus.process.data_directory import write_private

    note: Path | None = None
    try:
        note = _note_of(notes_folder(is_wanted=True), data)
        for known in note.parent.glob("bus-*"):  # what was killed
            held = _read(known)
            if held is not None and not is_alive(held.pid):
                known.unlink(missing_ok=True)
        write_private(note, announcement.text().encode())
    except OSError:  # the tokens' file and the port can be named by options
        note = None
    try:
        yield
    finally:
        found = None if note is None else _read(note)
        if note is not None and found is not None and found.pid == announcement.pid:
            with contextlib.suppress(OSError):
                note.unlink()
                note.parent.rmdir()  # unless there are others


def _note_of(folder: Path, data: Path) -> Path:
    name = hashlib.sha256(str(data.absolute()).encode("utf-8", "surrogateescape")).hexdigest()
    return folder / f"bus-{name[:32]}"


def _read(path: Path) -> Announcement | None:
    try:
        return Announcement(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
