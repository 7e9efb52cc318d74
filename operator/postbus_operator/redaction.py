"""Texts for people, without the secrets that errors of others may carry."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"

_VALUE: Final = r"(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\"']?[^\s\"',;&]+)"
_SECRETS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<kept>SharedAccessKey=)[^;\s\"']+",
        rf"(?P<kept>(?:password|\btoken|\bsig|\bsecret)[\"']?\s*[=:]\s*){_VALUE}",
        r"(?P<kept>\bBearer\s+)\S+",
    )
)
_WORD: Final = re.compile(r"\S+")
_ACCOUNT: Final = re.compile(r"://[^/:@]*:")
"""Begin of the password in an address; it ends at the last @ of the word."""


def redacted(text: str) -> str:
    """Return a text in which keys, passwords and tokens are replaced.

    The time is linear in the length: a broker may have written the text.
    """
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return _WORD.sub(_without_password, text)


def _without_password(match: re.Match[str]) -> str:
    word = match[0]
    account, end = _ACCOUNT.search(word), word.rfind("@")
    if account is None or end < account.end():
        return word
    return word[: account.end()] + HIDDEN + word[end:]
