"""The credentials of the driver, and the tokens that it signs for executors.

Only the driver has a key: from a mounted file or its environment, never from an option, since Spark
shows options in plans and on its pages. A token is for one reader group and outlives the batch that
it travels with: a task that is tried again has the token of its first attempt.
"""

from __future__ import annotations

import base64
import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote_plus, urlsplit

from postbus_spark.errors import InvalidCredentials

ENVIRONMENT: Final = "POSTBUS_CONNECTION_STRING"
LIFETIME_S: Final = 3_600
"""Our choice: longer than batches, and the epoch of a claim ends what a token may do earlier."""

PLAIN_PORT: Final = 5672
TLS_PORT: Final = 5671
MAX_FILE_BYTES: Final = 64 * 1024

_FORM: Final = "Endpoint=sb://host;SharedAccessKeyName=name;SharedAccessKey=key"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A connection string: the bus, and a rule with its key or a signature made with one."""

    base_url: str
    rule: str = ""
    key: str = field(default="", repr=False)
    signature: str = field(default="", repr=False)

    def token(self, path: str, now_s: float) -> str:
        """Return a token for a path and what is below it."""
        if self.signature:
            return self.signature
        resource = quote_plus(path.lower())
        expiry = str(int(now_s) + LIFETIME_S)
        digest = hmac.digest(self.key.encode(), f"{resource}\n{expiry}".encode(), "sha256")
        signature = quote_plus(base64.b64encode(digest))
        return (
            f"SharedAccessSignature sr={resource}&sig={signature}&se={expiry}"
            f"&skn={quote_plus(self.rule)}"
        )


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
        return read_connection_string(text)
    except ValueError as error:
        raise InvalidCredentials(f"{source} has no connection string: {error}") from None


def read_connection_string(text: str) -> Credentials:
    """Parse a connection string. Raises `ValueError`, whose text never repeats a value."""
    values: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, equals, value = part.partition("=")
        if not equals or name.strip().lower() in values:
            raise ValueError(f"it has the form {_FORM}")
        values[name.strip().lower()] = value.strip()
    try:
        address = urlsplit(values.get("endpoint", ""))
        host, port = address.hostname, address.port
    except ValueError:
        host = port = None
        address = urlsplit("")
    if not host or address.scheme not in {"sb", "amqp", "amqps"}:
        raise ValueError(f"it has the form {_FORM}")
    is_plain = values.get("usedevelopmentemulator", "").lower() == "true"
    rule, key = values.get("sharedaccesskeyname", ""), values.get("sharedaccesskey", "")
    signature = values.get("sharedaccesssignature", "")
    if not signature and not (rule and key):
        raise ValueError(
            "it has neither SharedAccessKeyName with SharedAccessKey nor SharedAccessSignature"
        )
    shown = f"[{host}]" if ":" in host else host
    scheme, usual = ("http", PLAIN_PORT) if is_plain else ("https", TLS_PORT)
    return Credentials(f"{scheme}://{shown}:{port or usual}", rule, key, signature)
