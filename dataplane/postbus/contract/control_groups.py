"""Bodies of the control API about reader groups; reading itself is the bulk API's."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field

from postbus.contract.bodies import ResponseBody, SubQueueName
from postbus.contract.bulk import GROUP_NAME, GroupKindName, PinLimited, ShownLimits, Start
from postbus.contract.control_messages import MessagesOf

GroupName = Annotated[str, Field(pattern=GROUP_NAME)]


class OfReaderGroup(MessagesOf):
    """A reader group of an entity's sub-queue."""

    name: GroupName


class CreateReaderGroup(OfReaderGroup, PinLimited):
    """A reader group to create; an existing one stays where it is, and gets limits that are named.

    A `tap` reads beside receivers. A `drain` reads instead of them: they are refused, and messages
    leave when the group has settled them. `start`: `earliest` begins with the oldest message that
    is there, `latest` behind the newest, a time with the messages enqueued from then on; omitted,
    a tap begins with `latest`, and a drain always with `earliest`.
    """

    kind: GroupKindName = "tap"
    start: Start | AwareDatetime | None = None


class MoveReaderGroup(OfReaderGroup):
    """A group that goes on elsewhere; its reader is refused from then on."""

    start: Start | AwareDatetime


class ReaderGroupDescription(ShownLimits):
    """A reader group: who reads, and how far.

    `unread_messages`: at most so many lie behind the last plan; null while a partition is
    unavailable. `is_settled`: the last plan is processed. `attempts`: readers that planned it.

    `lag_seconds`: age of the first message that is not processed, 0 without one. `kept_bytes`:
    about so much the messages take that receivers have settled and the group has not.
    `is_over_limit`: that is beyond a limit; or the group drops, and messages are deleted that it
    has not read (`has_lost_messages`), until it is reset. All four are as of the last look, every
    ten seconds or so; null before the first, and while a partition is unavailable.
    """

    entity: str
    sub_queue: SubQueueName
    name: str
    kind: GroupKindName
    epoch: int
    reader: str
    plan_number: int
    attempts: int
    is_settled: bool
    unread_messages: int | None
    lag_seconds: float | None = None
    kept_bytes: int | None = None
    is_over_limit: bool | None = None
    has_lost_messages: bool | None = None


class ReaderGroupList(ResponseBody):
    """All reader groups. Those of `unavailable_partitions` are missing."""

    items: list[ReaderGroupDescription]
    unavailable_partitions: tuple[int, ...]


class DroppedReaderGroup(ResponseBody):
    """The group that was deleted."""

    entity: str
    name: str
