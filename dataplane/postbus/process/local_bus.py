"""Announcements by which the command line finds a bus on this machine.

A bus that listens writes an `Announcement` to a file and removes it when it stops. Commands look in
three places, by what they know of the bus:

- its data directory: `bus.json` in it;
- the data directory that it would have, had it not been started with `--ephemeral`: a note
  `bus-<hash of that path>`;
- its control port: a note `bus-<port>`, without a key.

Notes are in a folder of the temporary directory that only its user may enter. A note that a killed
bus left is recognized by its process id and removed; a `bus.json` is removed by the next bus there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from postbus.process.private_file import write_private

logger = logging.getLogger(__name__)

FILE_NAME: Final = "bus.json"


@dataclass(frozen=True, slots=True)
class Announcement:
    """Addresses of a running bus. `control` and `metrics` are URLs, files are whole paths."""

    bus: str | None
    """Name of the bus; None for a control port alone."""
    pid: int
    control: str | None
    connection_string: str | None = field(default=None, repr=False)
    endpoint: str | None = None
    """A connection string without a rule and its key."""
    token_file: str | None = None
    ca_file: str | None = None
    metrics: str | None = None

    def write(self, path: Path) -> None:
        """Write the announcement for its owner only; raises OSError."""
        write_private(path, (json.dumps(asdict(self), indent=1) + "\n").encode())


def connection_string(endpoint: str, rule: str, key: str) -> str:
    """Return a connection string of an endpoint such as `Endpoint=sb://localhost:5672`."""
    address, _, more = endpoint.partition(";")
    parts = [address, f"SharedAccessKeyName={rule}", f"SharedAccessKey={key}", more]
    return ";".join(filter(None, parts))


# --- finding ------------------------------------------------------------------------------------


def bus_of_data_directory(data: Path) -> Announcement | None:
    """Return the announcement of the bus of a data directory, None if none runs there."""
    return _read(data / FILE_NAME) or _read_note(_name_of_data(data))


def bus_at_control_port(port: int) -> Announcement | None:
    """Return the announcement of this user's bus at a port, None if there is none."""
    return _read_note(_name_of_port(port))


# --- announcing ---------------------------------------------------------------------------------


@contextlib.contextmanager
def announced_as(data: Path, announcement: Announcement) -> Iterator[None]:
    """Announce a bus as if its data were in this folder, in which nothing is created."""
    _leave_note(_name_of_data(data), announcement)
    try:
        yield
    finally:
        _remove_note(_name_of_data(data))


def announce_control_port(port: int, url: str, token_file: Path) -> None:
    """Announce the control API on a port, also before the bus is ready."""
    announcement = Announcement(None, os.getpid(), url, token_file=str(token_file))
    _leave_note(_name_of_port(port), announcement)


def withdraw_control_port(port: int) -> None:
    """Withdraw the announcement of a bus that stops."""
    _remove_note(_name_of_port(port))


# --- notes --------------------------------------------------------------------------------------


def _name_of_data(data: Path) -> str:
    name = hashlib.sha256(str(data.absolute()).encode("utf-8", "surrogateescape")).hexdigest()
    return f"bus-{name[:32]}"


def _name_of_port(port: int) -> str:
    return f"bus-{port}"


def _leave_note(name: str, announcement: Announcement) -> None:
    """Write a note and remove those of killed buses. Without it, commands need options for port and
    tokens.
    """
    try:
        folder = _notes_folder(is_wanted=True)
        for known in folder.glob("bus-*"):
            _read_note(known.name)
        announcement.write(folder / name)
    except OSError as error:
        logger.info(
            "the note of the bus cannot be written", extra={"note": name, "error": str(error)}
        )


def _read_note(name: str) -> Announcement | None:
    """Return the content of a note; remove one of a bus that has ended."""
    try:
        note = _notes_folder() / name
        found = _read(note)
        if found is None or not _is_alive(found.pid):
            note.unlink(missing_ok=True)  # another process may be removing it
            return None
    except OSError:
        return None
    return found


def _remove_note(name: str) -> None:
    """Remove our note, and the folder when it was the last one."""
    try:
        folder = _notes_folder()
        found = _read(folder / name)
        if found is not None and found.pid == os.getpid():
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()  # unless there are others
    except OSError as error:
        logger.debug("the folder of notes cannot be removed", extra={"error": str(error)})


def _notes_folder(*, is_wanted: bool = False) -> Path:
    """Return the user's folder of notes; raises OSError when others could have created it."""
    path = Path(tempfile.gettempdir()) / f"postbus-{os.geteuid()}"
    if is_wanted:
        path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} is not only this user's")
    return path


def _read(path: Path) -> Announcement | None:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return Announcement(**held) if isinstance(held["pid"], int) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_alive(pid: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
