"""LIKE patterns: `%` matches any run of characters, `_` any one, others match themselves.

Matching takes time in proportion to the text, whatever the pattern: it never backtracks. The table
of a pattern with `_` is some two hundred times as large as its text: a few short ones are cached,
others are made for each match.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

MAX_PATTERN_CHARS: Final = 1_024
"""Maximum length of a pattern; one from a property may be longer than any rule. Our choice."""

MAX_TEXT_CHARS: Final = 4_096
"""Maximum length of a text that is matched. Our choice: the limit of a dead letter's
description."""

READY_CHARS: Final = 64
READY_TABLES: Final = 256
"""Number of cached tables, and maximum length of their patterns: at most some 3 MiB. Our choice."""

FIND_STEPS: Final = 1
TABLE_STEPS: Final = 4
"""Cost of a character of a text, in a literal search or in a table; in steps, see `steps`."""

PATTERN_STEPS: Final = 10
READY_STEPS: Final = 4
"""Cost of a character of a pattern whose table is made for one match, or may be cached: the cost
must not depend on the cache."""

Matcher = Callable[[str], bool]


class Pattern(NamedTuple):
    """A pattern ready to match, and the cost of matching: once, and for each character of a
    text.
    """

    fits: Matcher
    once_steps: int
    char_steps: int


_ANY_RUN: Final = None
_ANY_ONE: Final = ""


class PatternError(ValueError):
    """A LIKE pattern is not valid."""


def rule_pattern(pattern: str, escape: str | None) -> Pattern:
    """Return a pattern of a rule, which is matched repeatedly. Raises `PatternError`."""
    items = _items(pattern, escape)
    if _ANY_ONE not in items:
        return _literal(_pieces(items))
    if len(pattern) <= READY_CHARS:

        def fits(text: str) -> bool:
            return _table(pattern, escape)(text)

        return Pattern(fits, READY_STEPS * len(pattern), TABLE_STEPS)

    def fits_once(text: str) -> bool:
        return _bits(_items(pattern, escape))(text)

    return Pattern(fits_once, PATTERN_STEPS * len(pattern), TABLE_STEPS)


def message_pattern(pattern: str, escape: str | None) -> Pattern:
    """Return a pattern that came with a message, without caching it. Raises `PatternError`."""
    items = _items(pattern, escape)
    if _ANY_ONE in items:
        return Pattern(_bits(items), 0, TABLE_STEPS)
    return _literal(_pieces(items))


@lru_cache(maxsize=READY_TABLES)
def _table(pattern: str, escape: str | None) -> Matcher:
    return _bits(_items(pattern, escape))


def _literal(pieces: list[str]) -> Pattern:
    """Return a pattern of literal pieces with runs between them."""
    if len(pieces) == 1:
        return Pattern(pieces[0].__eq__, 0, 0)
    first, *middle, last = pieces
    if not middle:
        if not last:
            return Pattern(lambda text: text.startswith(first), 0, 0)
        if not first:
            return Pattern(lambda text: text.endswith(last), 0, 0)
    elif not first and not last and len(middle) == 1:
        return Pattern(lambda text: middle[0] in text, 0, FIND_STEPS)
    return Pattern(_finder(first, tuple(middle), last), 0, FIND_STEPS)


def _items(pattern: str, escape: str | None) -> list[str | None]:
    """Return a character, `_ANY_ONE` or `_ANY_RUN` for each part of the pattern.

    Raises `PatternError`.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"a LIKE pattern has at most {MAX_PATTERN_CHARS} characters")
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
    """Return the literal texts between the runs, without empty ones in the middle."""
    pieces = [""]
    for item in items:
        if item is None:
            pieces.append("")
        else:
            pieces[-1] += item
    return [pieces[0], *filter(None, pieces[1:-1]), *pieces[1:][-1:]]


def _finder(first: str, middle: tuple[str, ...], last: str) -> Matcher:
    """Search for each piece after the previous one; the leftmost match is always sufficient."""
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
    """Follow all paths through the pattern at once: bit n is set if n items have matched."""
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
