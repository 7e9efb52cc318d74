"""Metrics of reader groups (ADR 42), from cursors and estimates that are in memory.

Upkeep estimates about every ten seconds what each group has before it (`store/pinned.py`): a scrape
reads nothing from the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

MAX_GROUP_LABELS: Final = 500
"""Groups with labels of their own, the first by entity, sub-queue and name; the rest is summed as
`other`. Our choice, as for entities: an entity has at most 32 groups."""

OTHER: Final = "other"
LABELS: Final = ["kind", "entity", "sub_queue", "group"]


@dataclass(slots=True)
class GroupSample:
    """One reader group at this moment, over all partitions; `kind` is that of its entity.

    `unread` messages are not processed, `oldest_ms` is the enqueued time of the first, None without
    one. `kept_bytes`: of settled messages that stay for groups. `attempts`: of the present plan.
    """

    kind: str
    entity: str
    sub_queue: str
    name: str
    unread: int
    oldest_ms: int | None
    kept_bytes: int
    epoch: int
    attempts: int
    is_over: bool = False


def bounded_groups(groups: Iterable[GroupSample]) -> list[GroupSample]:
    """Return at most `MAX_GROUP_LABELS` groups, and the others as one."""
    found = sorted(groups, key=lambda each: (each.entity, each.sub_queue, each.name, each.kind))
    kept, rest = found[:MAX_GROUP_LABELS], found[MAX_GROUP_LABELS:]
    if rest:
        times_ms = [each.oldest_ms for each in rest if each.oldest_ms is not None]
        other = GroupSample(
            OTHER,
            OTHER,
            OTHER,
            OTHER,
            unread=sum(each.unread for each in rest),
            oldest_ms=min(times_ms, default=None),
            kept_bytes=sum(each.kept_bytes for each in rest),
            epoch=max(each.epoch for each in rest),
            attempts=max(each.attempts for each in rest),
            is_over=any(each.is_over for each in rest),
        )
        kept.append(other)
    return kept


def group_families(groups: Iterable[GroupSample], now_ms: int) -> Iterator[Metric]:
    """Yield the families of reader groups."""
    lag = GaugeMetricFamily(
        "postbus_reader_group_lag_messages",
        "Messages that a reader group has not processed, an estimate.",
        labels=LABELS,
    )
    age = GaugeMetricFamily(
        "postbus_reader_group_lag_seconds",
        "Age of the oldest message that a reader group has not processed.",
        labels=LABELS,
    )
    kept = GaugeMetricFamily(
        "postbus_reader_group_kept_bytes",
        "Bytes of settled messages that stay for a reader group, an estimate.",
        labels=LABELS,
    )
    epoch = GaugeMetricFamily(
        "postbus_reader_group_epoch", "Epoch of a reader group's last claim.", labels=LABELS
    )
    attempts = GaugeMetricFamily(
        "postbus_reader_group_attempts",
        "Readers that have begun the present plan of a reader group.",
        labels=LABELS,
    )
    over = GaugeMetricFamily(
        "postbus_reader_group_over_limit_info",
        "Whether a reader group is beyond a limit of what it keeps.",
        labels=LABELS,
    )
    for group in bounded_groups(groups):
        name = [group.kind, group.entity, group.sub_queue, group.name]
        lag.add_metric(name, group.unread)
        age_ms = 0 if group.oldest_ms is None else max(now_ms - group.oldest_ms, 0)
        age.add_metric(name, age_ms / 1_000)
        kept.add_metric(name, group.kept_bytes)
        epoch.add_metric(name, group.epoch)
        attempts.add_metric(name, group.attempts)
        over.add_metric(name, group.is_over)
    yield from (lag, age, kept, epoch, attempts, over)
