"""AMQP conditions and texts of refusals (one total table).

Each text contains a tracking id that is also in the broker's log, so that a user's error can be
found.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, TypeAlias

from postbus.amqp import conditions
from postbus.amqp.conditions import AmqpLinkError
from postbus.contract.entities import Right
from postbus.edge.access.admission import MAX_LOGGED_CHARS
from postbus.edge.access.refusal_sums import SUMMED
from postbus.entity.commands import Refusal, Refused

logger = logging.getLogger(__name__)

IsLogged: TypeAlias = Callable[[Refusal | None, str], bool]

REFUSALS: Final = {
    Refusal.ENTITY_NOT_FOUND: (
        conditions.NOT_FOUND,
        404,
        # JavaScript's and .NET's clients recognise this sentence.
        (
            "The messaging entity '{path}' could not be found."
            " To know more visit https://aka.ms/sbResourceMgrExceptions."
        ),
    ),
    Refusal.ENTITY_DISABLED: (
        conditions.ENTITY_DISABLED,
        403,
        "Messaging entity '{path}' is currently disabled.",
    ),
    Refusal.SEND_DISABLED: (
        conditions.ENTITY_DISABLED,
        403,
        "Messaging entity '{path}' is currently disabled for sending.",
    ),
    Refusal.RECEIVE_DISABLED: (
        conditions.ENTITY_DISABLED,
        403,
        "Messaging entity '{path}' is currently disabled for receiving.",
    ),
    Refusal.QUOTA_EXCEEDED: (
        conditions.RESOURCE_LIMIT_EXCEEDED,
        403,
        "The maximum entity size has been reached or exceeded for Queue: '{path}'.",
    ),
    Refusal.STORE_FULL: (
        conditions.RESOURCE_LIMIT_EXCEEDED,
        403,
        "The store is full. Receive messages or add disk space.",
    ),
    Refusal.MESSAGE_TOO_LARGE: (
        conditions.MESSAGE_SIZE_EXCEEDED,
        403,
        "The message is larger than '{path}' allows.",
    ),
    Refusal.PROPERTIES_TOO_LARGE: (
        conditions.MESSAGE_SIZE_EXCEEDED,
        403,
        "The properties of the message are larger than allowed.",
    ),
    Refusal.MESSAGE_MALFORMED: (
        conditions.DECODE_ERROR,
        400,
        "The message is not a valid AMQP message.",
    ),
    Refusal.ARGUMENT_OUT_OF_RANGE: (
        conditions.ARGUMENT_OUT_OF_RANGE,
        400,
        "An argument is out of range.",
    ),
    Refusal.LOCK_LOST: (
        conditions.MESSAGE_LOCK_LOST,
        410,
        (
            "The lock supplied is invalid. Either the lock expired, or the message has already"
            " been removed from the queue. For more information please see"
            " https://aka.ms/ServiceBusExceptions ."
        ),
    ),
    Refusal.SESSION_LOCK_LOST: (
        conditions.SESSION_LOCK_LOST,
        410,
        "The session lock has expired on the MessageSession. Accept a new MessageSession.",
    ),
    Refusal.SESSION_CANNOT_BE_LOCKED: (
        conditions.SESSION_CANNOT_BE_LOCKED,
        410,
        "The requested session cannot be accepted. It may be locked by another receiver.",
    ),
    Refusal.SESSION_REQUIRED: (
        conditions.NOT_ALLOWED,
        400,
        "The entity '{path}' requires sessions.",
    ),
    Refusal.SESSION_NOT_SUPPORTED: (
        conditions.NOT_ALLOWED,
        400,
        (
            "A sessionful message receiver cannot be created on an entity that does not require"
            " sessions. Ensure RequiresSession is set to true when creating a Queue or"
            " Subscription to enable sessionful behavior."
        ),
    ),
    Refusal.HOPS_EXCEEDED: (
        conditions.NOT_ALLOWED,
        403,
        "The message was forwarded too many times.",
    ),
    Refusal.PUBLISH_TOO_LARGE: (
        conditions.MESSAGE_SIZE_EXCEEDED,
        403,
        "The publish makes too many copies at once. Split it into smaller batches.",
    ),
    Refusal.ALREADY_EXISTS: (
        conditions.ENTITY_ALREADY_EXISTS,
        409,
        "The name already exists in '{path}'.",
    ),
    Refusal.MESSAGE_NOT_FOUND: (
        conditions.MESSAGE_NOT_FOUND,
        404,
        "There is no message with this number in the required state.",
    ),
    Refusal.MESSAGE_LOCKED: (
        conditions.NOT_ALLOWED,
        409,
        "The message is locked by a receiver of '{path}'.",
    ),
    Refusal.NOT_ALLOWED: (
        conditions.NOT_ALLOWED,
        400,
        "The operation is not allowed on '{path}'.",
    ),
    Refusal.CONFLICT: (
        conditions.NOT_ALLOWED,
        409,
        "The definition of '{path}' was changed since it was read. Read it again.",
    ),
    Refusal.NOT_EMPTY: (
        conditions.NOT_ALLOWED,
        409,
        "The entity '{path}' holds messages or is in use.",
    ),
    Refusal.NOT_APPLIED: (
        conditions.SERVER_BUSY,
        503,
        "The store could not take the operation; it had no effect. Try again.",
    ),
    Refusal.UNKNOWN: (
        conditions.TIMEOUT,
        408,
        "The store did not answer in time; the operation may have had an effect.",
    ),
    Refusal.BUSY: (
        conditions.SERVER_BUSY,
        503,
        "The broker is busy. Try again in a moment.",
    ),
}
"""Refusal -> AMQP condition, status code of a management response, text."""


class ErrorMapper:
    """Makes errors for one namespace."""

    def __init__(self, namespace: str, is_logged: IsLogged = lambda _refusal, _path: True) -> None:
        """`is_logged`: whether the next error is logged individually."""
        self._namespace = namespace
        self._is_logged = is_logged

    def refused(self, reply: Refused, path: str) -> AmqpLinkError:
        """Return the error of a refusal and log it with its tracking id."""
        condition, _, text = REFUSALS[reply.refusal]
        text = text.format(path=path)
        if reply.detail:
            text = f"{text} {reply.detail}"
        return self.error(condition, text, path, reply.refusal)

    def missing_right(self, right: Right, path: str) -> AmqpLinkError:
        """Return the error of a link that no grant covers, or no longer covers."""
        text = (
            f"Unauthorized access. '{right.value}' claim(s) are required to perform this "
            f"operation. Resource: 'sb://{self._namespace}/{path}'."
        )
        return self.error(conditions.UNAUTHORIZED_ACCESS, text, path)

    def error(
        self, condition: str, text: str, path: str, refusal: Refusal | None = None
    ) -> AmqpLinkError:
        """Return an error with tracking id, system tracker and time.

        At level DEBUG the log has also the errors that are otherwise only counted in summaries.
        """
        tracking_id = f"{uuid.uuid4()}_G0"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        is_logged = self._is_logged(refusal, path)
        if is_logged or (refusal in SUMMED and logger.isEnabledFor(logging.DEBUG)):
            entity = path[:MAX_LOGGED_CHARS]
            logger.log(
                logging.INFO if is_logged else logging.DEBUG,
                "refused",
                extra={"tracking_id": tracking_id, "condition": condition, "entity": entity},
            )
        return AmqpLinkError(
            condition,
            f"{text} Reference:{uuid.uuid4()}, TrackingId:{tracking_id}, "
            f"SystemTracker:{self._namespace}:Queue:{path}, Timestamp:{now}",
        )


def status_code(refusal: Refusal) -> int:
    """Return the status code of a management response."""
    return REFUSALS[refusal][1]
