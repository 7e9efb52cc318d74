"""Damages of texts, for fuzzers."""

from __future__ import annotations

import random
from collections.abc import Sequence


def damaged(
    text: str, at: int, pool: Sequence[str], tokens: Sequence[str], source: random.Random
) -> str:
    """Return a text with a token inserted or put over it, a cut, or a piece of another text."""
    match source.randrange(4):
        case 0:
            return text[:at] + source.choice(tokens) + text[at:]
        case 1:
            token = source.choice(tokens)
            return text[:at] + token + text[at + len(token) :]
        case 2:
            return text[:at] + text[at + source.randint(1, 8) :]
        case _:
            other = source.choice(pool)
            start = source.randrange(len(other) + 1)
            return text[:at] + other[start : start + source.randint(1, 30)] + text[at:]
