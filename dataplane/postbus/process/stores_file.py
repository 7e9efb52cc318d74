"""The file of POSTBUS_STORES_FILE: addresses of the databases, one a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

SCHEMES: Final = ("postgresql://", "postgres://")
MAX_FILE_BYTES: Final = 64 * 1024
"""Our choice: hundreds of addresses."""
MAX_PORT: Final = 65_535
HOST: Final = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]*)(:\d{1,5})?")


def read_stores_file(path: Path) -> list[str]:
    """Return the addresses in order; blank lines and lines that begin with `#` do not count.

    Raises ValueError with a text for people that contains no address.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ValueError(f"POSTBUS_STORES_FILE {path}: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"POSTBUS_STORES_FILE {path}: larger than {MAX_FILE_BYTES >> 10} KiB")
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not numbered:
        raise ValueError(
            f"POSTBUS_STORES_FILE {path}: there is no address in it; write one a line:"
            " postgresql://user:password@host/database"
        )
    for number, line in numbered:
        if not _is_address(line):
            raise ValueError(
                f"POSTBUS_STORES_FILE {path}: line {number} is not one address such as"
                " postgresql://user:password@host/database; in user and password write @ / ? # %"
                " and blanks as %40 %2F %3F %23 %25 %20"
            )
    return [line for _, line in numbered]


def _is_address(line: str) -> bool:
    """Return whether the driver can read a line as the address that its author meant."""
    if not line.startswith(SCHEMES) or len(line.split()) != 1 or "\ufffd" in line:
        return False
    try:
        parts = urlsplit(line)
        if parts.query:
            parse_qs(parts.query, strict_parsing=True)
    except ValueError:
        return False
    hosts = parts.netloc.rpartition("@")[2].split(",")
    is_clear = parts.netloc.count("@") <= 1 and "@" not in parts.path and not parts.fragment
    return is_clear and all(_is_host(host) for host in hosts)


def _is_host(text: str) -> bool:
    found = HOST.fullmatch(text)
    return found is not None and int((found[2] or ":5432")[1:]) <= MAX_PORT
