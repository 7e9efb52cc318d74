"""AMQP conditions and texts of refusals.

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

LOCK_LOST: Final = (
    "The lock supplied is invalid. Either the lock expired, or the message has already been removed"
    " from the queue. For more information please see https://aka.ms/ServiceBusExceptions ."
)
SESSION_NOT_SUPPORTED: Final = (
    "A sessionful message receiver cannot be created on an entity that does not require sessions."
    " Ensure RequiresSession is set to true when creating a Queue or Subscription to enable"
    " sessionful behavior."
)


def _condition_of(refusal: Refusal) -> tuple[str, int]:
    match refusal:
        case Refusal.ENTITY_NOT_FOUND | Refusal.GROUP_NOT_FOUND:
            return conditions.NOT_FOUND, 404
        case Refusal.ENTITY_DISABLED | Refusal.SEND_DISABLED | Refusal.RECEIVE_DISABLED:
            return conditions.ENTITY_DISABLED, 403
        case Refusal.QUOTA_EXCEEDED | Refusal.STORE_FULL:
            return conditions.RESOURCE_LIMIT_EXCEEDED, 403
        case Refusal.MESSAGE_TOO_LARGE | Refusal.PROPERTIES_TOO_LARGE | Refusal.PUBLISH_TOO_LARGE:
            return conditions.MESSAGE_SIZE_EXCEEDED, 403
        case Refusal.MESSAGE_MALFORMED:
            return conditions.DECODE_ERROR, 400
        case Refusal.ARGUMENT_OUT_OF_RANGE:
            return conditions.ARGUMENT_OUT_OF_RANGE, 400
        case Refusal.LOCK_LOST:
            return conditions.MESSAGE_LOCK_LOST, 410
        case Refusal.SESSION_LOCK_LOST:
            return conditions.SESSION_LOCK_LOST, 410
        case Refusal.SESSION_CANNOT_BE_LOCKED:
            return conditions.SESSION_CANNOT_BE_LOCKED, 410
        case Refusal.SESSION_REQUIRED | Refusal.SESSION_NOT_SUPPORTED | Refusal.NOT_ALLOWED:
            return conditions.NOT_ALLOWED, 400
        case Refusal.HOPS_EXCEEDED:
            return conditions.NOT_ALLOWED, 403
        case Refusal.MESSAGE_LOCKED | Refusal.CONFLICT | Refusal.NOT_EMPTY:
            return conditions.NOT_ALLOWED, 409
        case Refusal.GROUP_FENCED | Refusal.STALE_CHECKPOINT | Refusal.BUS_RESTORED:
            return conditions.NOT_ALLOWED, 409
        case Refusal.ALREADY_EXISTS:
            return conditions.ENTITY_ALREADY_EXISTS, 409
        case Refusal.MESSAGE_NOT_FOUND:
            return conditions.MESSAGE_NOT_FOUND, 404
        case Refusal.NOT_APPLIED | Refusal.BUSY:
            return conditions.SERVER_BUSY, 503
        case Refusal.UNKNOWN:
            return conditions.TIMEOUT, 408


def _text_of(refusal: Refusal) -> str:
    match refusal:
        case Refusal.ENTITY_NOT_FOUND:  # JavaScript's and .NET's clients recognise this sentence
            return (
                "The messaging entity '{path}' could not be found."
                " To know more visit https://aka.ms/sbResourceMgrExceptions."
            )
        case Refusal.ENTITY_DISABLED:
            return "Messaging entity '{path}' is currently disabled."
        case Refusal.SEND_DISABLED:
            return "Messaging entity '{path}' is currently disabled for sending."
        case Refusal.RECEIVE_DISABLED:
            return "Messaging entity '{path}' is currently disabled for receiving."
        case Refusal.QUOTA_EXCEEDED:
            return "The maximum entity size has been reached or exceeded for Queue: '{path}'."
        case Refusal.STORE_FULL:
            return "The store is full. Receive messages or add disk space."
        case Refusal.MESSAGE_TOO_LARGE:
            return "The message is larger than '{path}' allows."
        case Refusal.PROPERTIES_TOO_LARGE:
            return "The properties of the message are larger than allowed."
        case Refusal.MESSAGE_MALFORMED:
            return "The message is not a valid AMQP message."
        case Refusal.ARGUMENT_OUT_OF_RANGE:
            return "An argument is out of range."
        case Refusal.LOCK_LOST:
            return LOCK_LOST
        case Refusal.SESSION_LOCK_LOST:
            return (
                "The session lock has expired on the MessageSession. Accept a new MessageSession."
            )
        case Refusal.SESSION_CANNOT_BE_LOCKED:
            return "The requested session cannot be accepted. It may be locked by another receiver."
        case Refusal.SESSION_REQUIRED:
            return "The entity '{path}' requires sessions."
        case Refusal.SESSION_NOT_SUPPORTED:
            return SESSION_NOT_SUPPORTED
        case Refusal.HOPS_EXCEEDED:
            return "The message was forwarded too many times."
        case Refusal.PUBLISH_TOO_LARGE:
            return "The publish makes too many copies at once. Split it into smaller batches."
        case Refusal.ALREADY_EXISTS:
            return "The name already exists in '{path}'."
        case Refusal.MESSAGE_NOT_FOUND:
            return "There is no message with this number in the required state."
        case Refusal.MESSAGE_LOCKED:
            return "The message is locked by a receiver of '{path}'."
        case Refusal.NOT_ALLOWED:
            return "The operation is not allowed on '{path}'."
        case Refusal.CONFLICT:
            return "The definition of '{path}' was changed since it was read. Read it again."
        case Refusal.NOT_EMPTY:
            return "The entity '{path}' holds messages or is in use."
        case Refusal.GROUP_NOT_FOUND:
            return "There is no such reader group of '{path}'."
        case Refusal.GROUP_FENCED:
            return "Another reader has the reader group of '{path}'."
        case Refusal.STALE_CHECKPOINT:
            return "The checkpoint of the reader is older than its group of '{path}'."
        case Refusal.BUS_RESTORED:
            return "The checkpoint of the reader is newer than '{path}'."
        case Refusal.NOT_APPLIED:
            return "The store could not take the operation; it had no effect. Try again."
        case Refusal.UNKNOWN:
            return "The store did not answer in time; the operation may have had an effect."
        case Refusal.BUSY:
            return "The broker is busy. Try again in a moment."


REFUSALS: Final = {each: (*_condition_of(each), _text_of(each)) for each in Refusal}
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
