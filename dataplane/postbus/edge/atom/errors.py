"""Errors of administration for refusals: status, sub-code and text (one table).

Clients look at the status and, for a 403 or 409, for the sub-code in the text. They repeat 408, 429
and 5xx on their own, so no permanent refusal may have one of these.
"""

from __future__ import annotations

from typing import Final

from postbus.edge.web.authorization import HttpRefused
from postbus.entity.commands import Refusal, Refused

RETRY_S: Final = "1"
"""Retry-After while the store is unavailable. Our choice: clients double it themselves."""

BAD_REQUEST: Final = (400, 40000, "Bad Request.")
NOT_FOUND: Final = (404, 40400, "Not Found. The messaging entity could not be found.")
CONFLICT: Final = (
    409,
    40900,
    "Conflict. You're requesting an operation that isn't allowed in the resource's current state.",
)
QUOTA: Final = (403, 40300, "The maximum quota has been reached or exceeded.")
INVALID_OPERATION: Final = (403, 40301, "The operation is not valid.")
CHANGED: Final = (
    412,
    41200,
    "Precondition Failed. The entity was changed since its ETag was read.",
)
UNSURE: Final = (500, 50000, "Internal Server Error. The change may have had an effect.")
BUSY: Final = (503, 50300, "Server Busy. Nothing was changed; try again.")


def _answer_of(refusal: Refusal) -> tuple[int, int, str]:
    match refusal:
        case Refusal.ENTITY_NOT_FOUND | Refusal.MESSAGE_NOT_FOUND | Refusal.GROUP_NOT_FOUND:
            return NOT_FOUND
        case Refusal.ALREADY_EXISTS | Refusal.NOT_EMPTY:
            return CONFLICT
        case Refusal.CONFLICT:
            return CHANGED
        case Refusal.QUOTA_EXCEEDED | Refusal.STORE_FULL:
            return QUOTA
        case (
            Refusal.ARGUMENT_OUT_OF_RANGE
            | Refusal.NOT_ALLOWED
            | Refusal.MESSAGE_TOO_LARGE
            | Refusal.PROPERTIES_TOO_LARGE
            | Refusal.MESSAGE_MALFORMED
            | Refusal.SESSION_REQUIRED
            | Refusal.SESSION_NOT_SUPPORTED
            | Refusal.HOPS_EXCEEDED
            | Refusal.PUBLISH_TOO_LARGE
        ):
            return BAD_REQUEST
        case (
            Refusal.ENTITY_DISABLED
            | Refusal.SEND_DISABLED
            | Refusal.RECEIVE_DISABLED
            | Refusal.MESSAGE_LOCKED
            | Refusal.LOCK_LOST
            | Refusal.SESSION_LOCK_LOST
            | Refusal.SESSION_CANNOT_BE_LOCKED
            | Refusal.GROUP_FENCED
            | Refusal.STALE_CHECKPOINT
            | Refusal.BUS_RESTORED
        ):
            return INVALID_OPERATION
        case Refusal.NOT_APPLIED | Refusal.BUSY:
            return BUSY
        case Refusal.UNKNOWN:
            return UNSURE


REFUSALS: Final = {each: _answer_of(each) for each in Refusal}
"""Refusal -> status, sub-code, text."""


def explained(refused: Refused) -> HttpRefused:
    """Return the error of a refusal, with its detail after the text of Service Bus."""
    status, sub_code, text = REFUSALS[refused.refusal]
    return _error(status, sub_code, f"{text} {refused.detail}".strip())


def bad_request(detail: str) -> HttpRefused:
    """Return the error of a malformed request."""
    return explained(Refused(Refusal.ARGUMENT_OUT_OF_RANGE, detail))


def not_found(detail: str) -> HttpRefused:
    """Return the error of a request about something that does not exist."""
    return explained(Refused(Refusal.ENTITY_NOT_FOUND, detail))


def _error(status: int, sub_code: int, text: str) -> HttpRefused:
    headers = {"Retry-After": RETRY_S} if status == 503 else None
    end = "" if text.endswith(".") else "."
    return HttpRefused(status, f"SubCode={sub_code}. {text}{end}", headers)
