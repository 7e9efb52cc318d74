"""Parser of requests about messages, and their table of refusals.

Pure parsing of method, path and query for the runtime API. Names of entities may have slashes, so a
path is read from the right.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final
from urllib.parse import parse_qsl, unquote

from postbus.edge.refusals import REFUSALS
from postbus.edge.web.authorization import RETRY_AFTER, HttpRefused
from postbus.entity.commands import Refusal, Refused
from postbus.message.delivery import uuid_to_token

DEFAULT_TIMEOUT_S: Final = 60.0
"""Timeout of a request that gives none. Source: Service Bus REST, the query's timeout."""

MAX_TIMEOUT_S: Final = 3_600.0
"""Upper bound of timeouts. Our choice: no proxy keeps a silent connection for longer."""


def _status_of(refusal: Refusal) -> int:
    match refusal:
        case (
            Refusal.MESSAGE_MALFORMED
            | Refusal.ARGUMENT_OUT_OF_RANGE
            | Refusal.SESSION_CANNOT_BE_LOCKED
            | Refusal.SESSION_REQUIRED
            | Refusal.SESSION_NOT_SUPPORTED
            | Refusal.NOT_ALLOWED
        ):
            return 400
        case (
            Refusal.ENTITY_DISABLED
            | Refusal.SEND_DISABLED
            | Refusal.RECEIVE_DISABLED
            | Refusal.QUOTA_EXCEEDED
            | Refusal.STORE_FULL
            | Refusal.MESSAGE_TOO_LARGE
            | Refusal.PROPERTIES_TOO_LARGE
            | Refusal.HOPS_EXCEEDED
            | Refusal.PUBLISH_TOO_LARGE
        ):
            return 403
        case (
            Refusal.ENTITY_NOT_FOUND
            | Refusal.GROUP_NOT_FOUND
            | Refusal.MESSAGE_NOT_FOUND
            | Refusal.LOCK_LOST
            | Refusal.SESSION_LOCK_LOST
        ):
            return 404
        case (  # not answers about one message
            Refusal.ALREADY_EXISTS
            | Refusal.MESSAGE_LOCKED
            | Refusal.CONFLICT
            | Refusal.NOT_EMPTY
            | Refusal.GROUP_FENCED
            | Refusal.STALE_CHECKPOINT
            | Refusal.BUS_RESTORED
        ):
            return 409
        case Refusal.NOT_APPLIED | Refusal.BUSY:
            return 503
        case Refusal.UNKNOWN:
            return 504


STATUSES: Final = {each: _status_of(each) for each in Refusal}
"""Refusal -> status. 503 had no effect and may be repeated; 504 may have had one.
Source: Service Bus REST, send message and its relatives."""

UNKNOWN_SEND: Final = (
    "The store did not answer in time; the message may have been stored. Send it again only if a"
    " second copy does no harm: give it a MessageId and let the entity detect duplicates."
)
UNKNOWN_DELETION: Final = (
    "The store did not answer in time; the message may have been deleted. If not, it is delivered"
    " again."
)
UNKNOWN_SETTLEMENT: Final = (
    "The store did not answer in time; the operation may have had an effect. Repeat it: 404 means"
    " that the lock is gone."
)


class Action(Enum):
    """The operation of a request."""

    SEND = "send"
    PEEK_LOCK = "peek-lock"
    READ_AND_DELETE = "read and delete"
    COMPLETE = "complete"
    UNLOCK = "unlock"
    RENEW = "renew"


_METHODS: Final = {
    "": {"POST": Action.SEND},
    "head": {"POST": Action.PEEK_LOCK, "DELETE": Action.READ_AND_DELETE},
    "lock": {"DELETE": Action.COMPLETE, "PUT": Action.UNLOCK, "POST": Action.RENEW},
}


_UNKNOWN: Final = {
    Action.SEND: UNKNOWN_SEND,
    Action.READ_AND_DELETE: UNKNOWN_DELETION,
}


@dataclass(frozen=True, slots=True)
class RequestPath:
    """A parsed request path: `path` is the entity's, decoded, in the case of the request.

    `lock_token` is a delivery tag. `below`: the rest of the address, such as `messages/head`.
    """

    action: Action
    path: str
    timeout_s: float
    lock_token: bytes = b""
    below: str = "messages"

    def with_timeout(self, timeout_s: float) -> RequestPath:
        return replace(self, timeout_s=timeout_s)


def target_of(method: str, raw_path: str) -> RequestPath:
    """Parse method and path of a request. Raises `HttpRefused` 400, 404, 405."""
    raw, _, query = raw_path.partition("?")
    if "://" in raw:  # the absolute form, as sent to proxies
        raw = "/" + raw.partition("://")[2].partition("/")[2]
    parts = raw.strip("/").split("/")
    match [part.lower() for part in parts]:
        case [_, *_, "messages"]:
            form, entity = "", parts[:-1]
        case [_, *_, "messages", "head"]:
            form, entity = "head", parts[:-2]
        case [_, *_, "messages", _, _]:
            form, entity = "lock", parts[:-3]
        case _:
            raise HttpRefused(
                404,
                "Messages are at /{entity}/messages, /{entity}/messages/head and"
                " /{entity}/messages/{message id}/{lock token}.",
            )
    methods = _METHODS[form]
    action = methods.get(method)
    if action is None:
        allowed = ", ".join(methods)
        raise HttpRefused(405, f"This address supports {allowed} only.", {"Allow": allowed})
    path = "/".join(_decoded(part) for part in entity)
    token = _token(parts[-1]) if form == "lock" else b""
    below = unquote("/".join(parts[len(entity) :]))
    return RequestPath(action, path, _timeout_s(query), token, below)


def refusal_of(refused: Refused, target: RequestPath) -> HttpRefused:
    """Return the error of a command that was refused."""
    refusal = refused.refusal
    status = STATUSES[refusal]
    if refusal is Refusal.UNKNOWN:
        text = _UNKNOWN.get(target.action, UNKNOWN_SETTLEMENT)
    else:
        text = REFUSALS[refusal][2].format(path=target.path)
    if refused.detail:
        text = f"{text} {refused.detail[:1].upper()}{refused.detail[1:]}"
    return HttpRefused(status, text, RETRY_AFTER if status == 503 else None, refusal)


def _decoded(part: str) -> str:
    try:
        text = unquote(part, errors="strict")
    except UnicodeDecodeError:
        raise HttpRefused(400, "The path is not percent-encoded UTF-8.") from None
    if not text or not text.isprintable():
        raise HttpRefused(
            400, "The path does not name an entity: write its name as it was created."
        )
    return text


def _token(part: str) -> bytes:
    try:
        return uuid_to_token(uuid.UUID(unquote(part)))
    except ValueError:
        text = "The lock token is not a GUID: take it from Location or BrokerProperties."
        raise HttpRefused(400, text) from None


def _timeout_s(query: str) -> float:
    if not query:
        return DEFAULT_TIMEOUT_S
    values = [value for name, value in parse_qsl(query) if name.lower() == "timeout"]
    if not values:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(values[-1])
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s < math.inf:
        raise HttpRefused(400, "timeout must be a number of seconds, 0 or more.")
    return min(timeout_s, MAX_TIMEOUT_S)
