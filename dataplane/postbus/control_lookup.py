"""Which file lets this user control the bus on a port of this machine.

A bus leaves a note of where its tokens are, in a folder only its user may enter; the command line
reads it. So commands need no option, whatever folder they are typed in. A note holds no token.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def leave_note(port: int, token_file: Path) -> None:
    """Say where the tokens of the bus on a control port are; else options say it."""
    try:
        note = _folder(is_wanted=True) / f"control-{port}"
        descriptor, name = tempfile.mkstemp(dir=note.parent)  # mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{token_file}\n")
        os.replace(name, note)
    except OSError as error:
        logger.info("no note of the control tokens is left", extra={"error": str(error)})


def remove_note(port: int) -> None:
    """Forget a bus that stops."""
    try:
        folder = _folder()
        (folder / f"control-{port}").unlink(missing_ok=True)
        folder.rmdir()  # unless there are others
    except OSError as error:
        logger.debug("the folder of notes stays", extra={"error": str(error)})


def token_file_of(port: int) -> Path | None:
    """Return the file of a running bus, None when there is no note of one."""
    try:
        text = (_folder() / f"control-{port}").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return Path(text) if text else None


def _folder(*, is_wanted: bool = False) -> Path:
    """Return the user's folder of notes; raises OSError when others could have made it."""
    path = Path(tempfile.gettempdir()) / f"postbus-{os.geteuid()}"
    if is_wanted:
        path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} is not only this user's")
    return path
