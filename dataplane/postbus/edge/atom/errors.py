"""Errors of administration for refusals: status, sub-code and text (one table).

Clients look at the status and, for a 403 or 409, for the sub-code in the text. They repeat 408, 429
and 5xx on their own, so no permanent refusal may have one of these.
"""

from __future__ import annotations

from typing import Final

from postbus.edge.web.authorization import HttpRefused
from postbus.entity.commands import Refusal, Refused

RETRY_S: Final = "1"
"""Retry-After while the store is away. Our choice: clients double it themselves."""

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

REFUSALS: Final = {
    Refusal.ENTITY_NOT_FOUND: NOT_FOUND,
    Refusal.MESSAGE_NOT_FOUND: NOT_FOUND,
    Refusal.ALREADY_EXISTS: CONFLICT,
    Refusal.NOT_EMPTY: CONFLICT,
    Refusal.CONFLICT: CHANGED,
    Refusal.QUOTA_EXCEEDED: QUOTA,
    Refusal.STORE_FULL: QUOTA,
    Refusal.ARGUMENT_OUT_OF_RANGE: BAD_REQUEST,
    Refusal.NOT_ALLOWED: BAD_REQUEST,
    Refusal.MESSAGE_TOO_LARGE: BAD_REQUEST,
    Refusal.PROPERTIES_TOO_LARGE: BAD_REQUEST,
    Refusal.MESSAGE_MALFORMED: BAD_REQUEST,
    Refusal.SESSION_REQUIRED: BAD_REQUEST,
    Refusal.SESSION_NOT_SUPPORTED: BAD_REQUEST,
    Refusal.HOPS_EXCEEDED: BAD_REQUEST,
    Refusal.PUBLISH_TOO_LARGE: BAD_REQUEST,
    Refusal.ENTITY_DISABLED: INVALID_OPERATION,
    Refusal.SEND_DISABLED: INVALID_OPERATION,
    Refusal.RECEIVE_DISABLED: INVALID_OPERATION,
    Refusal.MESSAGE_LOCKED: INVALID_OPERATION,
    Refusal.LOCK_LOST: INVALID_OPERATION,
    Refusal.SESSION_LOCK_LOST: INVALID_OPERATION,
    Refusal.SESSION_CANNOT_BE_LOCKED: INVALID_OPERATION,
    Refusal.NOT_APPLIED: BUSY,
    Refusal.BUSY: BUSY,
    Refusal.UNKNOWN: UNSURE,
}
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
