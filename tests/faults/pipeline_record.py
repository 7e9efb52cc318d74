"""The record of a pipeline under kills, and its check: each message has its effect once.

The kind of an order, which its body shows, decides where it belongs. A send whose answer was lost
may have happened or not: then all of its effects are there, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Order(Enum):
    """What an order is worth to a pipeline."""

    GOOD = "good"
    FREE = "free"  # without an amount: rejected by the query
    MALFORMED = "malformed"  # no JSON


class Sent(Enum):
    """What the sender knows of an order."""

    ACCEPTED = "accepted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Entry:
    """An order that was sent. `number` rises within its session."""

    order: Order
    result: Sent
    session: str
    number: int


@dataclass(slots=True)
class Record:
    """What was sent, by id, and where it was found at the end: ids in the order of each place."""

    sent: dict[str, Entry] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)


def check(
    record: Record, belongs: Mapping[str, Iterable[Order]], ordered: Iterable[str] = ()
) -> Iterator[str]:
    """Yield what is wrong. `belongs`: the orders of each place; `ordered`: the places that keep
    the order within a session.
    """
    counts = {place: Counter(ids) for place, ids in record.places.items()}
    for place, found in counts.items():
        wanted = set(belongs[place])
        doubled = [each for each, count in found.items() if count > 1]
        if doubled:
            yield f"{place}: {len(doubled)} orders are there twice, such as {min(doubled)}"
        foreign = [
            each
            for each in found
            if each not in record.sent or record.sent[each].order not in wanted
        ]
        if foreign:
            yield f"{place}: {len(foreign)} do not belong there, such as {min(foreign)}"
        lost = [
            each
            for each, entry in record.sent.items()
            if entry.order in wanted and entry.result is Sent.ACCEPTED and not found[each]
        ]
        if lost:
            yield f"{place}: {len(lost)} accepted orders are lost, such as {min(lost)}"
    yield from _torn(record, belongs, counts)
    for place in ordered:
        yield from _disordered(record, place)


def _torn(
    record: Record,
    belongs: Mapping[str, Iterable[Order]],
    counts: Mapping[str, Counter[str]],
) -> Iterator[str]:
    """Yield orders of unknown sends that had one of their effects without the others."""
    for each, entry in record.sent.items():
        homes = [place for place in counts if entry.order in set(belongs[place])]
        there = [place for place in homes if counts[place][each]]
        if entry.result is Sent.UNKNOWN and there and len(there) < len(homes):
            yield f"{each} is in {', '.join(there)} only"


def _disordered(record: Record, place: str) -> Iterator[str]:
    last: dict[str, int] = {}
    for each in record.places[place]:
        entry = record.sent.get(each)
        if entry is None:
            continue
        if entry.number < last.get(entry.session, -1):
            yield f"{place}: {each} comes after a later order of its session {entry.session}"
        last[entry.session] = entry.number
