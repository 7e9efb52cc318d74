"""Connection strings, as commands read them."""

from __future__ import annotations

from postbus.cli.failures import ContextError
from postbus.contract.connection_strings import Endpoint, parse_connection_string


def read_connection_string(text: str) -> Endpoint:
    """Parse a connection string. Raises `ContextError`."""
    try:
        return parse_connection_string(text)
    except ValueError as error:
        raise ContextError(str(error)) from None
