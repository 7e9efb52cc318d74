"""The `$cbs` node: tokens for audiences.

202 grants, 401 refuses the token, 404 reports that the entity does not exist. Missing rights are
reported later, at the attach, as clients expect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from postbus.broker.access.authz import Authorizer, Grant, TokenRefused, audience_path
from postbus.broker.address import Address
from postbus.broker.router import Router
from postbus.edge.access.admission import Admission
from postbus.edge.access.auth_throttle import TooManyChecks
from postbus.edge.amqp.addresses import parse_address
from postbus.edge.amqp.requests import HEAD_HEAP_BYTES, Request, Respond, Response
from postbus.edge.refusals import ErrorMapper
from postbus.message.codec import DecodeError, Int


class TokenContext(Protocol):
    """The connection as the node sees it."""

    router: Router
    error_mapper: ErrorMapper
    authorizer: Authorizer
    admission: Admission

    @property
    def real_time_s(self) -> Callable[[], float]: ...
    def add_grant(self, grant: Grant) -> None: ...
    def count_refused_token(self) -> None: ...
    def check_key(self, check: Callable[[], None], *, is_known: bool = False) -> None: ...
    def refuse_slowly(self, why: str, answer: Callable[[], None]) -> None: ...


class TokenNode:
    """Handles the put-token requests of one connection."""

    def __init__(self, connection: TokenContext) -> None:
        self._connection = connection

    def handle(self, request: Request, respond: Respond) -> None:
        """Check a token and keep its grant."""
        properties = request.properties
        audience = properties.get("name")
        if request.operation != "put-token" or not isinstance(audience, str):
            respond(_status(400, "Send put-token with a name."))
            return
        # The type cannot be used: Python's client calls its shared access signatures "jwt" too.
        try:
            body = request.body(HEAD_HEAP_BYTES)
        except DecodeError:
            body = None
        token = body if isinstance(body, str) else ""
        connection = self._connection
        check = partial(self._check, token, audience, respond)
        try:
            connection.check_key(check, is_known=connection.admission.has_signed(token))
        except TooManyChecks:
            respond(_status(503, "Too many keys from your address were refused: try again later."))

    def _check(self, token: str, audience: str, respond: Respond) -> None:
        try:
            grant = self._connection.authorizer.check_token(
                token, audience, self._connection.real_time_s()
            )
        except TokenRefused as error:
            self._connection.count_refused_token()
            refusal = _status(401, f"{error.code}: {error}")
            self._connection.refuse_slowly(str(error), partial(respond, refusal))
            return
        path = audience_path(audience)
        entity = parse_address("/" + path).entity_path
        if not entity:
            self._connection.add_grant(grant)
            respond(_status(202, "Accepted"))
            return

        def resolved(address: Address | None) -> None:
            if address is None:
                text = f"The messaging entity '{audience}' could not be found."
                error = self._connection.error_mapper.error("amqp:not-found", text, entity)
                respond(_status(404, error.description))
                return
            self._connection.add_grant(grant)
            respond(_status(202, "Accepted"))

        self._connection.router.resolve(entity, resolved)


def _status(code: int, description: str) -> Response:
    return Response({"status-code": Int(code), "status-description": description})
