"""Errors of the connector. Each text says what happened, to what, and what to do next.

Spark shows the text of an error and its class, so both are for people. None contains a key or a
token.
"""

from __future__ import annotations

from typing import ClassVar, Final


class PostbusSparkError(Exception):
    """Base of all errors of the connector."""


class InvalidOption(PostbusSparkError):
    """An option is unknown, missing or has a value that it cannot have."""


class InvalidSchema(PostbusSparkError):
    """A schema names a column that does not exist, or gives it another type."""


class InvalidRows(PostbusSparkError):
    """A row that is written has a value that a message cannot have."""


class InvalidCredentials(PostbusSparkError):
    """No connection string was found, or it cannot be read."""


class InvalidOffset(PostbusSparkError):
    """An offset is malformed, of a newer version, or of another entity or group."""


class UnsupportedSpark(PostbusSparkError):
    """The version of PySpark is too old."""


class UnknownRows(PostbusSparkError):
    """The bus sends rows that this version of the connector does not know."""


class Unavailable(PostbusSparkError):
    """The bus did not answer for a while, or answers broke off. A later attempt may succeed."""


class Unfinished(PostbusSparkError):
    """A batch is published, and the bus could not send the rest of it for a while."""


class BulkError(PostbusSparkError):
    """The bus refused a call. `way_out` completes the text."""

    way_out: ClassVar[str] = ""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(f"{detail.rstrip('.')}. {self.way_out}".strip())

    def __reduce__(self) -> tuple[type[BulkError], tuple[str]]:
        return type(self), (self.detail,)


class InvalidRequest(BulkError):
    """The bus rejects a request of the connector."""


class NotAllowed(BulkError):
    """The entity cannot be read this way, or its definition forbids it at present."""


class Unauthorized(BulkError):
    """The key or token is rejected, or lacks a right."""

    way_out = (
        "Reading needs a key with the right Listen on the entity, writing one with Send. A token of"
        " a task that reads ends an hour after its batch was planned, of one that writes a day"
        " after its batch began."
    )


class EntityNotFound(BulkError):
    """There is no such entity."""

    way_out = (
        "Check the option entity: a queue, topic/Subscriptions/name to read, or a topic to write."
    )


class WriterNotFound(BulkError):
    """Nothing was published under the name of a writer."""


class GroupNotFound(BulkError):
    """There is no such reader group."""

    way_out = "Create it first, with `postbus groups create`: from then on it keeps its messages."


class Fenced(BulkError):
    """Another reader has claimed the reader group."""

    way_out = (
        "Only one query at a time reads a group: stop one of the two, or give this one a group of"
        " its own. To take the group back, start this query again."
    )


class StaleCheckpoint(BulkError):
    """A checkpoint is older than the reader group."""

    way_out = (
        "Going on would process messages a second time. Restore the newest checkpoint; or start"
        " with an empty one, which goes on where the group is; or accept the repetition and set the"
        " group back with `postbus groups reset`."
    )


class BusRestored(BulkError):
    """A checkpoint or a range is ahead of the bus: its store was restored from a backup."""

    way_out = (
        "Positions behind the backup mean other messages now. Start with an empty checkpoint, which"
        " goes on where the group is; sinks then have what the bus has lost, and may get messages"
        " twice."
    )


class DataLoss(BulkError):
    """Messages that were to be read are gone."""

    way_out = (
        "To go on with what is left, set the group with `postbus groups reset`, or the option"
        " failOnDataLoss to false."
    )


class StaleWriter(BulkError):
    """A later batch was published under the name of the writer."""

    way_out = (
        "A query with a new checkpoint counts its batches from 0: give it a name of its own with"
        " the option writer. Otherwise another query writes under this name, or the checkpoint is"
        " an old copy: stop that query, or restore the newest checkpoint."
    )


class StagesGone(BulkError):
    """Messages that were staged for a batch are no longer there."""

    way_out = (
        "Nothing of the batch was sent. Start the query again, which repeats the batch: staged"
        " messages are kept for a day."
    )


class QuotaExceeded(NotAllowed):
    """The entity or its store is full."""

    way_out = (
        "Receivers must make room. Staged messages take room, too: a batch must fit into what is"
        " free."
    )


class MessageTooLarge(BulkError):
    """A message is larger than the entity accepts."""


class EntityRecreated(BulkError):
    """An entity was deleted and created again since an offset was written."""

    way_out = (
        "Its messages are others now: start with an empty checkpoint and a group of the new entity."
    )


BY_CODE: Final[dict[str, type[BulkError]]] = {
    "InvalidRequest": InvalidRequest,
    "EntityNotFound": EntityNotFound,
    "GroupNotFound": GroupNotFound,
    "Fenced": Fenced,
    "StaleCheckpoint": StaleCheckpoint,
    "BusRestored": BusRestored,
    "DataLoss": DataLoss,
    "NotAllowed": NotAllowed,
    "QuotaExceeded": QuotaExceeded,
    "WriterNotFound": WriterNotFound,
    "StaleWriter": StaleWriter,
    "StagesGone": StagesGone,
}
"""Code of a refusal that a later attempt does not change -> its error."""

BY_STATUS: Final[dict[int, type[BulkError]]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: EntityNotFound,
    410: DataLoss,
    413: MessageTooLarge,
    501: NotAllowed,
}
"""Status of a refusal without a known code -> its error."""
