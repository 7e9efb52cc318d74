"""Which file lets this user control the bus on a port of this machine.

A bus leaves a note of where its tokens are, in a folder only its user may enter; the command line
reads it. So commands need no option, whatever folder they are typed in. A note holds no token; it
ends with the process id of the bus, so that one whose bus was killed is known and removed.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


def leave_note(port: int, token_file: Path) -> None:
    """Say where the tokens of the bus on a control port are; else options say it."""
    try:
        note = notes_folder(is_wanted=True) / f"control-{port}"
        for known in note.parent.glob("control-*"):
            with suppress(OSError, ValueError):  # another bus may be removing it
                _read(known)
        descriptor, name = tempfile.mkstemp(dir=note.parent)  # mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{token_file}\n{os.getpid()}\n")
        os.replace(name, note)
    except OSError as error:
        logger.info("no note of the control tokens is left", extra={"error": str(error)})


def remove_note(port: int) -> None:
    """Forget a bus that stops."""
    try:
        folder = notes_folder()
        (folder / f"control-{port}").unlink(missing_ok=True)
        folder.rmdir()  # unless there are others
    except OSError as error:
        logger.debug("the folder of notes stays", extra={"error": str(error)})


def token_file_of(port: int) -> Path | None:
    """Return the file of a running bus, None when there is no note of one."""
    try:
        return _read(notes_folder() / f"control-{port}")
    except (OSError, ValueError):
        return None


def _read(note: Path) -> Path | None:
    """Return what a note says; one whose bus is dead is removed. Raises OSError, ValueError."""
    token_file, _, pid = note.read_text(encoding="utf-8").strip().rpartition("\n")
    if token_file and pid.isdecimal() and is_alive(int(pid)):
        return Path(token_file)
    note.unlink(missing_ok=True)
    return None


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def notes_folder(*, is_wanted: bool = False) -> Path:
    """Return the user's folder of notes; raises OSError when others could have made it."""
    path = Path(tempfile.gettempdir()) / f"postbus-{os.geteuid()}"
    if is_wanted:
        path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} is not only this user's")
    return path
