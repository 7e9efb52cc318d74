"""Hints to receivers that more messages are available than they demanded (ADR 24).

A receiver over several partitions demands messages where they are. A partition without demand left
sends one hint when it has messages. Sessions have no hints: each is in one partition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.entity.outcomes import Available

if TYPE_CHECKING:
    from postbus.entity.queues.consumer import Consumer
    from postbus.entity.queues.sub_queue import SubQueueState


def arm(sub: SubQueueState, consumer: Consumer, *, is_wanted: bool) -> None:
    """Send a receiver one hint, now or later; withdraw it if it is not wanted."""
    if is_wanted:
        if sub.hinted is None:
            sub.hinted = {}
        sub.hinted[consumer.consumer_id] = consumer
        send(sub)
    elif sub.hinted:
        sub.hinted.pop(consumer.consumer_id, None)


def send(sub: SubQueueState) -> None:
    """Send hints if messages are available and no receiver with demand waits for them."""
    if sub.waiting or not sub.hinted:
        return
    count = len(sub.returned) + len(sub.ready) + sub.backlog_count + len(sub.tail)
    if not count:
        return
    effects = sub.context.outcome.effects
    for consumer_id in list(sub.hinted):
        effects.append(Available(consumer_id, count))
    sub.hinted.clear()
