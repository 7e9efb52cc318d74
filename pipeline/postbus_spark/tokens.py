"""The credentials of the driver, and the tokens that it signs for executors.

Only the driver has a key: from a mounted file or its environment, never from an option, since Spark
shows options in plans and on its pages. A token is for one reader group or writer and outlives the
batch that it travels with: a task that is tried again has the token of its first attempt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from postbus.contract.connection_strings import parse_connection_string
from postbus.contract.shared_access import make_token
from postbus_spark.errors import InvalidCredentials

ENVIRONMENT: Final = "POSTBUS_CONNECTION_STRING"
LIFETIME_S: Final = 3_600
"""Our choice: longer than batches, and the epoch of a claim ends what a token may do earlier."""

MAX_FILE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """A connection string: the bus, and a rule with its key or a signature made with one."""

    base_url: str
    rule: str = ""
    key: str = field(default="", repr=False)
    signature: str = field(default="", repr=False)

    def token(self, path: str, now_s: float, lifetime_s: int = LIFETIME_S) -> str:
        """Return a token for a path and what is below it."""
        if self.signature:
            return self.signature
        return make_token(path.lower(), self.rule, self.key, int(now_s) + lifetime_s)


def load_credentials(file: str | None) -> Credentials:
    """Read the connection string of a file, or of the environment. Raises `InvalidCredentials`."""
    if file is None:
        text, source = os.environ.get(ENVIRONMENT, ""), f"the environment variable {ENVIRONMENT}"
        if not text.strip():
            raise InvalidCredentials(
                f"no connection string: set {ENVIRONMENT} where the driver runs, or name a file"
                " with the option connectionStringFile"
            )
    else:
        source = f"the file {file}"
        try:
            with Path(file).open("rb") as opened:
                text = opened.read(MAX_FILE_BYTES).decode()
        except OSError as error:
            raise InvalidCredentials(f"{source} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidCredentials(f"{source} has no text") from None
    try:
        return read_credentials(text)
    except ValueError as error:
        raise InvalidCredentials(f"{source}: {error}") from None


def read_credentials(text: str) -> Credentials:
    """Return the credentials of a connection string. Raises `ValueError`."""
    found = parse_connection_string(text)
    host = f"[{found.host}]" if ":" in found.host else found.host
    base_url = f"{'https' if found.is_tls else 'http'}://{host}:{found.port}"
    return Credentials(base_url, found.rule or "", found.key or "", found.signature or "")
