"""LIKE patterns: `%` is any run of characters, `_` any one of them, the rest is itself.

Matching takes time in proportion to the text, whatever the pattern: nothing ever backtracks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

MAX_PATTERN_CHARS: Final = 1_024
"""Longest pattern; one that comes from a property may be longer than any rule. Our choice."""

Matcher = Callable[[str], bool]

_ANY_RUN: Final = None
_ANY_ONE: Final = ""


class PatternError(ValueError):
    """A LIKE pattern is not valid."""


@lru_cache(maxsize=1_024)
def matcher(pattern: str, escape: str | None) -> Matcher:
    """Return a function that says whether a text fits. Raises `PatternError`."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"a LIKE pattern has at most {MAX_PATTERN_CHARS} characters")
    items = _items(pattern, escape)
    if _ANY_ONE in items:
        return _bits(items)
    pieces = _pieces(items)
    if len(pieces) == 1:
        return pieces[0].__eq__
    first, *middle, last = pieces
    if not middle:
        if not last:
            return lambda text: text.startswith(first)
        if not first:
            return lambda text: text.endswith(last)
    elif not first and not last and len(middle) == 1:
        return lambda text: middle[0] in text
    return _finder(first, tuple(middle), last)


def _items(pattern: str, escape: str | None) -> list[str | None]:
    """Return a character, `_ANY_ONE` or `_ANY_RUN` for each part of the pattern."""
    items: list[str | None] = []
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            character = next(characters, "")
            if not character:
                raise PatternError("a LIKE pattern ends with its escape character")
            items.append(character)
        elif character == "%":
            items.append(_ANY_RUN)
        else:
            items.append(_ANY_ONE if character == "_" else character)
    return items


def _pieces(items: list[str | None]) -> list[str]:
    """Return the literal texts between the runs; empty ones in the middle say nothing."""
    pieces = [""]
    for item in items:
        if item is None:
            pieces.append("")
        else:
            pieces[-1] += item
    return [pieces[0], *filter(None, pieces[1:-1]), *pieces[1:][-1:]]


def _finder(first: str, middle: tuple[str, ...], last: str) -> Matcher:
    """Look for each piece after the one before; the leftmost place is always good enough."""
    least = len(first) + len(last)

    def fits(text: str) -> bool:
        if len(text) < least or not text.startswith(first) or not text.endswith(last):
            return False
        pos, end = len(first), len(text) - len(last)
        for piece in middle:
            found = text.find(piece, pos, end)
            if found < 0:
                return False
            pos = found + len(piece)
        return True

    return fits


def _bits(items: list[str | None]) -> Matcher:
    """Follow all ways through the pattern at once: bit n says that n items are behind us."""
    ones = 0
    runs = 0
    accepting: dict[str, int] = {}
    count = 0
    for item in items:
        if item is None:
            runs |= 1 << count
            continue
        if item == _ANY_ONE:
            ones |= 1 << count
        else:
            accepting[item] = accepting.get(item, 0) | 1 << count
        count += 1
    steps = {character: bits | ones for character, bits in accepting.items()}
    done = 1 << count

    def fits(text: str) -> bool:
        reached = 1
        for character in text:
            reached = (reached & steps.get(character, ones)) << 1 | reached & runs
            if not reached:
                return False
        return bool(reached & done)

    return fits
