"""State shared by the entities of one partition: `ApplyContext`, receivers and outbox."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from postbus.contract.entities import NamespaceLimits
from postbus.entity.apply_context import ApplyContext
from postbus.entity.traffic import Traffic
from postbus.entity.window import Window

if TYPE_CHECKING:
    from postbus.entity.queues.sub_queue import Consumer, SubQueueState
    from postbus.entity.topics.publish_limits import PublishLimits
    from postbus.entity.transfer.outbox import Outbox


class PartitionContext(ApplyContext):
    """See the module's docstring.

    `consumers` are receivers of clients, each with the sub-queue or session it receives from.
    """

    __slots__ = ("consumers", "outbox", "publish_limits")

    outbox: Outbox

    def __init__(
        self,
        *,
        random: Random,
        token_suffix: bytes,
        first_key: int,
        window: Window,
        limits: NamespaceLimits,
        publish_limits: PublishLimits,
        traffic: dict[int, Traffic],
    ) -> None:
        super().__init__(
            random=random,
            token_suffix=token_suffix,
            first_key=first_key,
            window=window,
            limits=limits,
            traffic=traffic,
        )
        self.publish_limits = publish_limits
        self.consumers: dict[int, tuple[SubQueueState, Consumer]] = {}
