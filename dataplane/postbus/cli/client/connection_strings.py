"""Connection strings of Service Bus: address and credentials for AMQP.

Field names compare without case, values may contain `=`. Errors never repeat a value, since it may
be a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from postbus.cli.failures import ContextError

PLAIN_PORT: Final = 5672
TLS_PORT: Final = 5671
NO_SUCH: Final = (
    "no connection string: Endpoint=sb://host;SharedAccessKeyName=name;SharedAccessKey=key"
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed connection string, with a rule's name and key, or a signature made with them."""

    host: str
    port: int
    is_tls: bool
    rule: str | None = None
    key: str | None = field(default=None, repr=False)
    signature: str | None = field(default=None, repr=False)
    entity: str | None = None


def read_connection_string(text: str) -> Endpoint:
    """Parse a connection string; raises `ContextError`."""
    values: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, equals, value = part.partition("=")
        if not equals or name.strip().lower() in values:
            raise ContextError(NO_SUCH)
        values[name.strip().lower()] = value.strip()
    try:
        address = urlsplit(values.get("endpoint", ""))
        host, port = address.hostname, address.port
    except ValueError:
        raise ContextError(NO_SUCH) from None
    if not host or address.scheme not in {"sb", "amqp", "amqps"}:
        raise ContextError(NO_SUCH)
    is_plain = values.get("usedevelopmentemulator", "").lower() == "true"
    rule, key = values.get("sharedaccesskeyname"), values.get("sharedaccesskey")
    signature = values.get("sharedaccesssignature")
    if signature is None and not (rule and key):
        raise ContextError(
            "the connection string has neither SharedAccessKeyName with SharedAccessKey nor a"
            " SharedAccessSignature"
        )
    return Endpoint(
        host,
        port or (PLAIN_PORT if is_plain else TLS_PORT),
        not is_plain,
        rule,
        key,
        signature,
        values.get("entitypath") or None,
    )
