"""Bodies of the control API about messages by hand: show, delete, purge, send again.

The rest, and what all bodies have in common, is in `control_contract`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from postbus.contract.control import Body, ResponseBody
from postbus.contract.entities import DurationMs

MAX_SEQUENCE_NUMBERS: Final = 250
"""How many messages a request may name, or a page show."""

MAX_LOOKED_AT: Final = 1_000
MAX_SHOWN_BYTES: Final = 1024 * 1024

SequenceNumber = Annotated[int, Field(ge=0, le=2**63 - 1)]
Chosen = Annotated[list[SequenceNumber], Field(min_length=1, max_length=MAX_SEQUENCE_NUMBERS)]
Path = Annotated[str, Field(min_length=1, max_length=400)]
Where = Annotated[str, Field(min_length=1, max_length=1_024)]
BodyText = Annotated[str, Field(min_length=1, max_length=1_024)]
SubQueueName = Literal["main", "deadLetter", "transferDeadLetter"]
StateName = Literal["active", "deferred", "scheduled"]
Plain = str | int | float | bool | None


def _check_plain(value: object) -> object:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number has at most 64 bits")
    return value


PlainProperty = Annotated[Plain, BeforeValidator(_check_plain)]


class MessagesOf(Body):
    """Whose messages: a queue, or `topic/Subscriptions/name`, and which of its sub-queues."""

    entity: Path
    sub_queue: SubQueueName = "main"


class PeekMessages(MessagesOf):
    """Which messages to show. `where` is a SQL filter as of a rule; `body_bytes` 0: no bodies.

    `body_contains`: only those with this text in their body, as UTF-8.
    """

    from_number: SequenceNumber = 0
    count: int = Field(100, ge=1, le=MAX_SEQUENCE_NUMBERS)
    where: Where | None = None
    session_id: str | None = Field(None, max_length=128)
    state: StateName | None = None
    body_contains: BodyText | None = None
    body_bytes: int = Field(0, ge=0, le=MAX_SHOWN_BYTES)


class DeleteMessages(MessagesOf):
    """Which messages to delete, by sequence number."""

    numbers: Chosen


class PurgeMessages(MessagesOf):
    """Which messages to delete, by filter; without one all. `count`: how many to look at."""

    where: Where | None = None
    from_number: SequenceNumber = 0
    count: int = Field(MAX_LOOKED_AT, ge=1, le=MAX_LOOKED_AT)
    session_id: str | None = Field(None, max_length=128)
    state: StateName | None = None
    body_contains: BodyText | None = None
    dry_run: bool = False


class SummarizeMessages(MessagesOf):
    """Which dead letters to sum up; `where` is a SQL filter as of a rule."""

    sub_queue: SubQueueName = "deadLetter"
    from_number: SequenceNumber = 0
    where: Where | None = None


class EditedMessage(Body):
    """What is changed of a message that is sent again.

    What is not said stays; a field that is null is removed. The body is text or base64.
    """

    body: str | None = None
    body_base64: str | None = Field(None, pattern=r"^[A-Za-z0-9+/]*={0,2}$")
    message_id: str | None = None
    session_id: str | None = None
    subject: str | None = None
    content_type: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    reply_to_session_id: str | None = None
    to: str | None = None
    partition_key: str | None = None
    properties: dict[str, PlainProperty] = Field(default_factory=dict)
    removed_properties: list[str] = Field(default_factory=list)


class ResendMessages(MessagesOf):
    """Which dead letters to send again, in this order, and where: `to` null is where they died."""

    sub_queue: SubQueueName = "deadLetter"
    numbers: Chosen
    to: Path | None = None
    edit: EditedMessage | None = None


class ShownMessage(ResponseBody):
    """A message. Binary properties are base64, times ISO 8601; `body_bytes` is the whole length.

    Of a dead letter: when it became one, how often it had been delivered by then, and name of link
    and address of the receiver it died with.
    """

    sequence_number: int
    sub_queue: SubQueueName
    state: StateName
    message_id: str | None
    session_id: str | None
    partition_key: str | None
    correlation_id: str | None
    subject: str | None
    content_type: str | None
    to: str | None
    reply_to: str | None
    reply_to_session_id: str | None
    enqueued_at: datetime
    scheduled_at: datetime | None
    expires_at: datetime | None
    time_to_live: DurationMs | None
    delivery_count: int
    size_in_bytes: int
    enqueued_sequence_number: int | None
    dead_letter_reason: str | None
    dead_letter_description: str | None
    dead_letter_source: str | None
    dead_lettered_at: datetime | None
    dead_letter_deliveries: int | None
    dead_letter_link: str | None
    dead_letter_client: str | None
    application_properties: dict[str, Plain]
    body_kind: str
    body_bytes: int
    body_base64: str | None = Field(repr=False)
    is_malformed: bool


class RefusedMessage(ResponseBody):
    """A message that nothing was done to, and why."""

    number: int
    reason: str
    detail: str


class Walked(ResponseBody):
    """How far a call came among messages in order of number. Go on from `next_number`.

    `failed`: how many the filter could not be evaluated for. `away`: partitions that did not
    answer, whose messages are missing. `absent`: properties that the filter names and none of the
    messages that were looked at has.
    """

    next_number: int
    is_end: bool
    looked_at: int
    failed: int
    away: list[int]
    absent: list[str]


class MessagePage(Walked):
    """Messages in order of number; may be empty before `is_end`.

    `total`: how many there are in the queue or sub-queue. The rest as wherever messages are walked.
    """

    messages: list[ShownMessage]
    total: int | None


class DeadLetterGroup(ResponseBody):
    """Dead letters of one reason and, but for numbers, ids and addresses, one description.

    Each word that was taken out is a `*`; `is_cut`: the description went on. `example_number` is
    the first of them; the times are null of what died before times were kept.
    """

    reason: str | None
    description: str | None
    is_cut: bool
    count: int
    first_at: datetime | None
    last_at: datetime | None
    example_number: int
    example_message_id: str | None
    example_description: str | None


class MessageSummary(Walked):
    """Of what dead letters died, the largest group first. Go on from `next_number`, and add up."""

    groups: list[DeadLetterGroup]
    total: int | None


class DeletedMessages(ResponseBody):
    """What was deleted, and what was not."""

    numbers: list[int]
    refused: list[RefusedMessage]


class PurgedMessages(Walked):
    """How many were selected and deleted, none in a dry run. Go on from `next_number`."""

    matched: int
    deleted: int
    refused: list[RefusedMessage]


class ResentMessage(ResponseBody):
    """A message that was sent again has another number where it is."""

    number: int
    new_number: int


class ResentMessages(ResponseBody):
    """What was sent again.

    `forwarded` are on their way to another partition, exactly once; what the target refuses for
    good comes into the transfer dead-letter queue of the source.
    """

    resent: list[ResentMessage]
    forwarded: list[int]
    refused: list[RefusedMessage]
