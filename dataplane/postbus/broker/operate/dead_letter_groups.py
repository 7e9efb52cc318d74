"""Groups dead letters by reason and by the common part of their descriptions.

Pure; used by `message_operations`. Words of a description that contain a digit, an @ or ://
(numbers, ids, times, addresses) differ between deaths of one cause, so they are removed before
descriptions are compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from postbus.broker.operate.message_view import death_of
from postbus.entity.commands import PeekedMessage

MAX_GROUPS: Final = 100
"""Maximum number of groups of a page. Our choice: with their texts some 60 KiB."""

DESCRIPTION_CHARS: Final = 300
"""Maximum length of a description that is compared and shown. Our choice."""

TAKEN_OUT: Final = "*"

_WORD: Final = re.compile(r"[^\s,;()\[\]{}\"'<>=|]+")
_VARIES: Final = re.compile(r"[0-9@]|://")
_ENDS: Final = ".:!?"


@dataclass(slots=True)
class DeadLetterGroup:
    """Dead letters with the same cause. Times in milliseconds, None if unknown.

    `description` has `*` for each word that was removed; `is_cut`: it is longer. `example` is the
    number of the first message, with its id and full description.
    """

    reason: str | None
    description: str | None
    is_cut: bool
    count: int
    first_ms: int | None
    last_ms: int | None
    example: int
    example_id: str | None
    example_description: str | None


class DeadLetterGroups:
    """The groups of one page."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str | None, str | None], DeadLetterGroup] = {}
        self._alike: dict[str, str] = {}

    def add(self, message: PeekedMessage) -> bool:
        """Count a message; return False if it needs one more group than a page may have."""
        reason, text, message_id = death_of(message.envelope)
        description = None if text is None else self._without_details(text[:DESCRIPTION_CHARS])
        at_ms = None if message.death is None else message.death.at_ms
        group = self._groups.get((reason, description))
        if group is None:
            if len(self._groups) == MAX_GROUPS:
                return False
            is_cut = text is not None and len(text) > DESCRIPTION_CHARS
            self._groups[reason, description] = DeadLetterGroup(
                reason, description, is_cut, 1, at_ms, at_ms, message.sequence, message_id, text
            )
            return True
        group.count += 1
        if at_ms is not None:
            group.first_ms = at_ms if group.first_ms is None else min(group.first_ms, at_ms)
            group.last_ms = at_ms if group.last_ms is None else max(group.last_ms, at_ms)
        return True

    def largest_first(self) -> tuple[DeadLetterGroup, ...]:
        return tuple(sorted(self._groups.values(), key=lambda group: -group.count))

    def _without_details(self, text: str) -> str:
        found = self._alike.get(text)
        if found is None:
            found = self._alike[text] = without_details(text)
        return found


def without_details(text: str) -> str:
    """Return a description without the words that differ between deaths of one cause."""
    return _WORD.sub(_plain_word, text)


def _plain_word(found: re.Match[str]) -> str:
    word = found[0]
    if _VARIES.search(word) is None:
        return word
    return TAKEN_OUT + word[len(word.rstrip(_ENDS)) :]
