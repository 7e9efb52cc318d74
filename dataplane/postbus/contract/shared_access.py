"""Shared access signatures: tokens that are signed with the key of a rule, as SDKs make them."""

from __future__ import annotations

import base64
import hmac
from typing import Final
from urllib.parse import quote_plus

SAS_PREFIX: Final = "SharedAccessSignature "


def make_token(resource: str, rule: str, key: str, expires_s: int) -> str:
    """Return a token for a URI or path and everything below it.

    `expires_s`: seconds since the epoch.
    """
    encoded = quote_plus(resource)
    signature = quote_plus(sign(encoded, str(expires_s), key))
    return f"{SAS_PREFIX}sr={encoded}&sig={signature}&se={expires_s}&skn={quote_plus(rule)}"


def sign(resource: str, expiry: str, key: str) -> str:
    """Return the base64 signature of a token; `resource` must be URL-encoded."""
    digest = hmac.digest(key.encode(), f"{resource}\n{expiry}".encode(), "sha256")
    return base64.b64encode(digest).decode()
