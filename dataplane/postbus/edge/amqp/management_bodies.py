"""Bodies of management requests and responses, in the widths clients expect.

Numbers are accepted in every AMQP width. Used by the management node and its groups of operations.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from postbus.amqp.conditions import AmqpError
from postbus.edge.amqp.requests import Respond, Response
from postbus.message.codec import Array, Int, Symbol
from postbus.message.delivery import uuid_to_token

MAX_LIST_ITEMS: Final = 10_000


class BadRequest(Exception):
    """The body of a request is not valid for its operation."""


def response(code: int, description: str, body: Any = None) -> Response:
    return Response({"statusCode": Int(code), "statusDescription": description}, body)


def ok(respond: Respond, body: Any) -> None:
    respond(response(200, "OK", body))


def failure(code: int, error: AmqpError) -> Response:
    return Response(
        {
            "statusCode": Int(code),
            "statusDescription": error.description,
            "errorCondition": Symbol(error.condition),
        }
    )


def integer(body: Any, name: str, default: int | None = None) -> int:
    value = body.get(name, default)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"{name} is missing or not a number")
    return int(value)


def text(body: Any, name: str) -> str | None:
    value = body.get(name)
    return value if isinstance(value, str) else None


def items(body: Any, name: str) -> list[Any]:
    value = body.get(name)
    if isinstance(value, Array):
        value = value.items
    if not isinstance(value, list) or not value or len(value) > MAX_LIST_ITEMS:
        raise BadRequest(f"{name} is missing, empty or too long")
    return value


def numbers(body: Any) -> list[int]:
    found = items(body, "sequence-numbers")
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in found):
        raise BadRequest("sequence-numbers contains a value that is not a number")
    return [int(each) for each in found]


def tokens(body: Any) -> list[bytes]:
    found = items(body, "lock-tokens")
    if not all(isinstance(each, uuid.UUID) for each in found):
        raise BadRequest("lock-tokens contains a value that is not a uuid")
    return [uuid_to_token(each) for each in found]


def session_id_of(body: Any) -> bytes | None:
    """Return the session of a request, or None. Raises `BadRequest`."""
    value = body.get("session-id")
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRequest("session-id is not a string")
    return value.encode()
