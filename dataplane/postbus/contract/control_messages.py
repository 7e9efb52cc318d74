"""Bodies of the control API for message operations: peek, delete, purge, resend.

All other bodies and the base classes are in `control`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from postbus.contract.bodies import Body, ResponseBody, SubQueueName
from postbus.contract.durations import DurationMs

MAX_SEQUENCE_NUMBERS: Final = 250
"""Maximum number of messages in a request or page."""

MAX_LOOKED_AT: Final = 1_000
MAX_SHOWN_BYTES: Final = 1024 * 1024

SequenceNumber = Annotated[int, Field(ge=0, le=2**63 - 1)]
Chosen = Annotated[list[SequenceNumber], Field(min_length=1, max_length=MAX_SEQUENCE_NUMBERS)]
Path = Annotated[str, Field(min_length=1, max_length=400)]
Where = Annotated[str, Field(min_length=1, max_length=1_024)]
BodyText = Annotated[str, Field(min_length=1, max_length=1_024)]
StateName = Literal["active", "deferred", "scheduled"]
Plain = str | int | float | bool | None


def _check_plain(value: object) -> object:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number has at most 64 bits")
    return value


PlainProperty = Annotated[Plain, BeforeValidator(_check_plain)]


class MessagesOf(Body):
    """The entity, a queue or `topic/Subscriptions/name`, and one of its sub-queues."""

    entity: Path
    sub_queue: SubQueueName = "main"


class PeekMessages(MessagesOf):
    """The messages to show. `where` is a SQL filter as in a rule; `body_bytes` 0: no bodies.

    `body_contains` selects messages whose body contains this text, as UTF-8.
    """

    from_number: SequenceNumber = 0
    count: int = Field(100, ge=1, le=MAX_SEQUENCE_NUMBERS)
    where: Where | None = None
    session_id: str | None = Field(None, max_length=128)
    state: StateName | None = None
    body_contains: BodyText | None = None
    body_bytes: int = Field(0, ge=0, le=MAX_SHOWN_BYTES)


class DeleteMessages(MessagesOf):
    """The messages to delete, by sequence number."""

    numbers: Chosen


class PurgeMessages(MessagesOf):
    """The messages to delete; without a filter all. `count`: maximum number to examine."""

    where: Where | None = None
    from_number: SequenceNumber = 0
    count: int = Field(MAX_LOOKED_AT, ge=1, le=MAX_LOOKED_AT)
    session_id: str | None = Field(None, max_length=128)
    state: StateName | None = None
    body_contains: BodyText | None = None
    dry_run: bool = False


class SummarizeMessages(MessagesOf):
    """The dead letters to summarize; `where` is a SQL filter as in a rule."""

    sub_queue: SubQueueName = "deadLetter"
    from_number: SequenceNumber = 0
    where: Where | None = None


class EditedMessage(Body):
    """Changes to a message that is resent.

    Fields that are left out stay; fields that are null are removed. The body is text or base64.
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
    """The dead letters to resend, in this order. `to` null: the entity they came from.

    Those that were resent `max_resends` times and came back are refused; null: however often.
    """

    sub_queue: SubQueueName = "deadLetter"
    numbers: Chosen
    to: Path | None = None
    edit: EditedMessage | None = None
    max_resends: int | None = Field(None, ge=1, le=1_000_000)


class ShownMessage(ResponseBody):
    """A message. Binary properties are base64, times ISO 8601; `body_bytes` is the full length.

    For a dead letter also the time of dead-lettering, the delivery count at that time, and the link
    name and address of its last receiver. `resends`: how often it was resent as a dead letter.
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
    resends: int = 0
    dead_letter_client: str | None
    application_properties: dict[str, Plain]
    body_kind: str
    body_bytes: int
    body_base64: str | None = Field(repr=False)
    is_malformed: bool


class RefusedMessage(ResponseBody):
    """A message that was left unchanged, and the reason."""

    number: int
    reason: str
    detail: str


class ExaminedMessages(ResponseBody):
    """Progress of a call through messages by sequence number."""

    next_number: int = Field(description="Sequence number to continue from.")
    is_end: bool = Field(description="True if no messages are left from there on.")
    looked_at: int = Field(description="Number of examined messages, selected or not.")
    failed: int = Field(
        description="Number of examined messages for which the filter could not be evaluated."
    )
    away: list[int] = Field(
        description="Partitions that did not answer; their messages are missing."
    )
    absent: list[str] = Field(description="Properties in the filter that no examined message has.")


class MessagePage(ExaminedMessages):
    """A page of messages by sequence number; may be empty before `is_end`.

    `total`: number of messages in the queue or sub-queue.
    """

    messages: list[ShownMessage]
    total: int | None


class DeadLetterGroup(ResponseBody):
    """Dead letters with the same reason and similar descriptions.

    Descriptions may differ in numbers, ids and addresses, for which `*` stands. `is_cut`: the
    description is longer. `example_number` is the first message; times are null for messages
    dead-lettered before times were recorded.
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


class MessageSummary(ExaminedMessages):
    """Groups of dead letters, largest first. Continue from `next_number` and add up the groups."""

    groups: list[DeadLetterGroup]
    total: int | None


class DeletedMessages(ResponseBody):
    """The deleted messages and the refused ones."""

    numbers: list[int]
    refused: list[RefusedMessage]


class PurgedMessages(ExaminedMessages):
    """Counts of selected and deleted messages (none in a dry run). Continue from `next_number`."""

    matched: int
    deleted: int
    refused: list[RefusedMessage]


class ResentMessage(ResponseBody):
    """A resent message: its number in the source and its new number in the target."""

    number: int
    new_number: int


class ResentMessages(ResponseBody):
    """The resent messages and the refused ones.

    `forwarded` messages are on their way to another partition and arrive exactly once; those that
    the target rejects permanently move to the transfer dead-letter queue of the source.
    """

    resent: list[ResentMessage]
    forwarded: list[int]
    refused: list[RefusedMessage]
