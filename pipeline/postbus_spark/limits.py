"""Cuts what can be read to the size of a batch, and a range to tasks.

The bus gives positions that divide the messages of a partition into parts of about equal size.
Between two of them positions may have gaps, which are as large as the blocks of other entities: a
part without gaps is as wide as it has messages, and only such a part is cut inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from postbus.contract.bulk import PartitionRange

Positions = Mapping[int, int]

SPLITS: Final = 256
"""Parts to ask for. Our choice: a part is 0.4 % of what is there, and a list of them 4 KiB."""


def widest(starts: Positions, ranges: Sequence[PartitionRange]) -> tuple[int, int]:
    """Return upper bounds of the messages and bytes from `starts` on."""
    widths = [(max(0, each.next_position - starts[each.partition]), each) for each in ranges]
    return (
        sum(width for width, _ in widths),
        sum(width * max(1, each.average_bytes) for width, each in widths),
    )


def limited_ends(
    starts: Positions,
    ends: Positions,
    ranges: Sequence[PartitionRange],
    max_messages: int,
    max_bytes: int,
) -> dict[int, int]:
    """Return where a batch of about the limits ends, in proportion to what each partition has.

    A limit of 0 is none. Nothing from `ends` on is read, but at least one message before.
    """
    parts = {
        each.partition: list(_parts(each, starts[each.partition], ends[each.partition]))
        for each in ranges
    }
    counts = {number: sum(count for _, _, count in each) for number, each in parts.items()}
    total = sum(counts.values())
    room = max_messages or total
    if max_bytes:
        size = sum(counts[each.partition] * max(1, each.average_bytes) for each in ranges)
        room = min(room, total * max_bytes // max(1, size))
    shares = _shares(counts, max(1, room))
    return {number: _cut(starts[number], each, shares[number]) for number, each in parts.items()}


def _parts(found: PartitionRange, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, upper bound of the messages) of the parts between two positions.

    Parts have the same number of messages and are at least as wide, so that a narrow one tells how
    many the others have at most. Not the narrowest: the bus divides into about equal parts. Where
    nothing is to be divided, positions passed over no messages.
    """
    if not found.splits:
        if start < stop:
            yield start, stop, 0
        return
    bounds = [found.low, *found.splits, found.next_position]
    pairs = [(first, end) for first, end in pairwise(bounds) if first < end]
    widths = sorted(end - first for first, end in pairs)
    most = widths[len(widths) // 4] + 1 if widths else 0  # parts differ by one
    firsts = set(found.splits)
    has_all = len(firsts) < len(found.splits)  # fewer messages than parts: each begins one
    for low, high in pairs:
        first, end = max(low, start), min(high, stop)
        if first < end and has_all:
            yield first, end, int(low in firsts and low >= start)
        elif first < end:
            yield first, end, min(end - first, most)


def parts_of(found: PartitionRange, partitions: int) -> list[tuple[int, int]]:
    """Return (first, end) of the parts of a partition, each `partitions` splits of the bus wide."""
    bounds = [found.low, *found.splits[partitions - 1 :: partitions], found.next_position]
    return [(first, end) for first, end in pairwise(bounds) if first < end]


def _shares(counts: Mapping[int, int], room: int) -> dict[int, int]:
    """Divide room in proportion; what is left of it goes to those with the largest rests."""
    total = sum(counts.values())
    if total <= room:
        return dict(counts)
    shares = {number: count * room // total for number, count in counts.items()}
    by_rest = sorted(counts, key=lambda number: -(counts[number] * room % total))
    for number in by_rest[: room - sum(shares.values())]:
        shares[number] += 1
    return shares


def _cut(start: int, parts: Sequence[tuple[int, int, int]], room: int) -> int:
    position = start
    for first, end, count in parts:
        if count <= room:
            position, room = end, room - count
            continue
        if end - first <= count:
            return first + room if room else position
        # Where the messages of a part with gaps lie is unknown: it is read whole, or not yet.
        return end if position == start and room else position
    return position


def divided(
    ranges: Mapping[int, tuple[int, int]], count: int, found: Sequence[PartitionRange] = ()
) -> list[tuple[int, int, int]]:
    """Return (partition, first, end) of about `count` tasks with about as many messages each.

    `found`: where the messages of partitions lie, of those with gaps between them.
    """
    known = {each.partition: each for each in found}
    parts = {
        number: _weighed(known.get(number), *span)
        for number, span in sorted(ranges.items())
        if span[0] < span[1]
    }
    weights = {number: sum(weight for *_, weight in each) for number, each in parts.items()}
    total = sum(weights.values())
    tasks = []
    for number, each in parts.items():
        first, end = ranges[number]
        pieces = min(end - first, max(1, -(-count * weights[number] // total)))
        inner = (_at(each, weights[number] * piece // pieces) for piece in range(1, pieces))
        bounds = sorted({first, *inner, end})
        tasks += [(number, *pair) for pair in pairwise(bounds)]
    return tasks


def _weighed(found: PartitionRange | None, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return (first, end, weight) of parts of a range: messages at most, else positions."""
    parts = [] if found is None else list(_parts(found, start, stop))
    if any(weight for *_, weight in parts):
        return parts
    return [(start, stop, stop - start)]


def _at(parts: Sequence[tuple[int, int, int]], wanted: int) -> int:
    """Return the position before which about this much of the parts' weight lies."""
    for first, end, weight in parts:
        if wanted <= weight:
            return first + (end - first) * wanted // max(weight, 1)
        wanted -= weight
    return parts[-1][1]
