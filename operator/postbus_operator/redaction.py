"""Texts for people, without the secrets that errors of others may carry."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"

_SECRETS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<kept>SharedAccessKey=)[^;\s\"']+",
        r"(?P<kept>\b(?:password|token|sig|secret)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+",
        r"(?P<kept>://[^\s/:@]*:)[^\s@]+(?=@)",
        r"(?P<kept>\bBearer\s+)\S+",
    )
)


def redacted(text: str) -> str:
    """Return a text in which keys, passwords and tokens are replaced."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return text
