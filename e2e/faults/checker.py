"""What a record of clients says about the bus: lost, doubled and reordered messages, and gaps.

Pure: it gets the record, and moments in seconds of the clients' clock, which is the node's. The
rules are those of tests/faults/history.py and one more about the order of a session, over all its
holders. At least once is the promise: a message that comes again is a violation only if its
completion had been confirmed, and a request that raised was done or not.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from e2e.faults.record import End, Line, Seen, Trouble, of_kind

from tests.faults.history import (
    FROM_ABSENCE,
    Delivered,
    Died,
    Result,
    Sent,
    Settled,
    Topology,
    Violation,
    check,
)

DESTINATIONS: Final = {"plain": ["plain"], "ordered": ["ordered"], "events": ["events/all"]}
PLACES: Final = [
    (path, place)
    for path in ("plain", "ordered", "events/all")
    for place in ("active", "dead-letter")
]
TOPOLOGY: Final = Topology(lambda path, _: DESTINATIONS[path], {})


def violations(
    lines: list[Line], disturbed: Iterable[tuple[float, float]], *, is_end: bool = True
) -> list[Violation]:
    """Return all violations.

    `disturbed`: beginning and end of each fault, during which locks may have been lost. Only at the
    end, when clients have written what is left, a message that is nowhere is lost.
    """
    events = [each for each in lines if not isinstance(each, Trouble | Seen | End)]
    deaths = [Died(at) for start, end in disturbed for at in seconds(start, end)]
    if not is_end:
        found = check([*events, *deaths], TOPOLOGY) + overtaken(lines)
        return [each for each in found if each.invariant not in {*FROM_ABSENCE, "I14"}]
    unseen = set(PLACES) - {(each.path, each.place) for each in of_kind(lines, Seen)}
    found = check([*events, *deaths], TOPOLOGY)
    found += overtaken(lines)
    if unseen:
        found = [each for each in found if each.invariant not in FROM_ABSENCE]
        found += [Violation("unseen", path, "", f"{place} was not seen") for path, place in unseen]
    return found


def seconds(start: float, end: float) -> Iterator[float]:
    """Yield the moments of a time, a second apart."""
    while start < end:
        yield start
        start += 1.0
    yield end


def overtaken(lines: list[Line]) -> list[Violation]:
    """I6: no message of a session is delivered for the first time after one that was sent later.

    Messages that raised when they were sent have no order: they may have been stored late.
    """
    first: dict[tuple[str, str], int] = {}
    for moment, each in enumerate(of_kind(lines, Delivered)):
        first.setdefault((each.path, each.id), moment)
    sent: dict[tuple[str, str], list[Sent]] = defaultdict(list)
    for each in of_kind(lines, Sent):
        if each.session is not None and each.result is Result.ACCEPTED:
            sent[each.path, each.session].append(each)
    found = []
    for (path, session), messages in sent.items():
        latest, overtaken_by = -1, ""
        for each in messages:
            moment = first.get((path, each.id))
            if moment is None:
                continue
            if moment < latest:
                what = f"of session {session} was delivered before {overtaken_by}, sent earlier"
                found.append(Violation("I6", path, each.id, what))
            else:
                latest, overtaken_by = moment, each.id
    return found


class Pending:
    """The accepted messages that no completion may have removed yet."""

    def __init__(self) -> None:
        self._accepted: dict[tuple[str, str], float] = {}
        self._gone_early: set[tuple[str, str]] = set()

    def feed(self, lines: Iterable[Line]) -> None:
        """Take the next lines; the answer to a send may be later than the completion."""
        for each in lines:
            if isinstance(each, Sent) and each.result is Result.ACCEPTED:
                for path in DESTINATIONS[each.path]:
                    if (path, each.id) in self._gone_early:
                        self._gone_early.discard((path, each.id))
                    else:
                        self._accepted[path, each.id] = each.ended
            elif isinstance(each, Settled) and each.result is not Result.REFUSED:
                key = each.path, each.id
                if self._accepted.pop(key, None) is None:
                    self._gone_early.add(key)

    def before(self, moment: float) -> list[tuple[str, str]]:
        """Return those that were accepted before a moment."""
        return sorted(key for key, at in self._accepted.items() if at < moment)


def accepted_paths(lines: Iterable[Line], after: float) -> set[str]:
    """Return the paths that accepted a message which was sent after a moment."""
    return {
        each.path
        for each in lines
        if isinstance(each, Sent) and each.result is Result.ACCEPTED and each.started > after
    }


def completed_paths(lines: Iterable[Line], after: float) -> set[str]:
    """Return the paths where a completion that began after a moment was confirmed."""
    return {
        each.path
        for each in lines
        if isinstance(each, Settled) and each.result is Result.ACCEPTED and each.started > after
    }


def refused_for(lines: Iterable[Line], path: str, start: float, end: float) -> float:
    """Return the longest time without an accepted message of a path that meets this period."""
    times = [
        each.ended
        for each in lines
        if isinstance(each, Sent) and each.path == path and each.result is Result.ACCEPTED
    ]
    gaps = [
        later - earlier
        for earlier, later in itertools.pairwise(times)
        if later > start and earlier < end
    ]
    return max(gaps, default=0.0)
