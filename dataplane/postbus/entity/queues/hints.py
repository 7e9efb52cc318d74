"""Telling receivers that ask for little that there is more: the hints of ADR 24.

A receiver over several partitions demands messages where they are; a partition whose demand is used
up tells once when it has something. Not in sessions: each of them lies in one partition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.entity.outcomes import Available

if TYPE_CHECKING:
    from postbus.entity.queues.consumer import Consumer
    from postbus.entity.queues.sub_queue import SubQueueState


def arm(sub: SubQueueState, consumer: Consumer, *, is_wanted: bool) -> None:
    """Let a receiver be told, now or later, or not any more."""
    if is_wanted:
        if sub.hinted is None:
            sub.hinted = {}
        sub.hinted[consumer.consumer_id] = consumer
        tell(sub)
    elif sub.hinted:
        sub.hinted.pop(consumer.consumer_id, None)


def tell(sub: SubQueueState) -> None:
    """Tell all who want to know and have no demand left, if nobody waits for what there is."""
    if sub.waiting or not sub.hinted:
        return
    count = len(sub.returned) + len(sub.ready) + sub.backlog_count + len(sub.tail)
    if not count:
        return
    effects = sub.context.outcome.effects
    for consumer_id in list(sub.hinted):
        effects.append(Available(consumer_id, count))
    sub.hinted.clear()
