"""Connection strings of Service Bus: the address of a bus, and credentials for it.

Field names compare without case, values may contain `=`. Errors never repeat a value, since it may
be a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

PLAIN_PORT: Final = 5672
TLS_PORT: Final = 5671
NO_SUCH: Final = (
    "no connection string, which has the form"
    " Endpoint=sb://host;SharedAccessKeyName=name;SharedAccessKey=key"
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed connection string, with a rule's name and key, or a signature made with them.

    Credentials that it lacks, or has as an empty text, are None.
    """

    host: str
    port: int
    is_tls: bool
    rule: str | None = None
    key: str | None = field(default=None, repr=False)
    signature: str | None = field(default=None, repr=False)
    entity: str | None = None


def parse_connection_string(text: str) -> Endpoint:
    """Parse a connection string. Raises `ValueError` with a text for people."""
    values: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, equals, value = part.partition("=")
        if not equals or name.strip().lower() in values:
            raise ValueError(NO_SUCH)
        values[name.strip().lower()] = value.strip()
    try:
        address = urlsplit(values.get("endpoint", ""))
        host, port = address.hostname, address.port
    except ValueError:
        raise ValueError(NO_SUCH) from None
    if not host or address.scheme not in {"sb", "amqp", "amqps"}:
        raise ValueError(NO_SUCH)
    is_plain = values.get("usedevelopmentemulator", "").lower() == "true"
    rule, key = values.get("sharedaccesskeyname"), values.get("sharedaccesskey")
    signature = values.get("sharedaccesssignature")
    if not signature and not (rule and key):
        raise ValueError(
            "the connection string has neither SharedAccessKeyName with SharedAccessKey nor a"
            " SharedAccessSignature"
        )
    return Endpoint(
        host,
        port or (PLAIN_PORT if is_plain else TLS_PORT),
        not is_plain,
        rule or None,
        key or None,
        signature or None,
        values.get("entitypath") or None,
    )
