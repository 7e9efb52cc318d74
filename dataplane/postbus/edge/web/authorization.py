"""Authorization over HTTP: the shared access signature of a request, and its refusal.

The same rules and keys as over AMQP. All errors over HTTP have one body, the one that the SDKs for
administration read (wire: ATOM, error bodies).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote
from xml.sax.saxutils import escape

from aiohttp import web

from postbus.broker.access.authz import Authorizer, Grant, TokenRefused, expired, has_right
from postbus.contract.entities import Right
from postbus.edge.access.admission import MAX_LOGGED_CHARS, Admission
from postbus.edge.access.auth_throttle import AuthThrottle, TooManyChecks
from postbus.entity.commands import Refusal

logger = logging.getLogger(__name__)

XML: Final = "application/xml"
ADMISSION: Final = web.RequestKey("admission", Admission)
"""Key of the connection's admission in a request; the connection may have presented a key before.
"""

AUTHORIZATION: Final = "Authorization"
RETRY_AFTER: Final = {"Retry-After": "1"}
CHALLENGE: Final = {"WWW-Authenticate": "SharedAccessSignature"}

NO_RIGHT: Final = "SubCode=40100."
NO_TOKEN: Final = "SubCode=40102."
BAD_TOKEN: Final = "SubCode=40103."
"""Numbers of the errors of status 401; texts of administration begin with one of them."""


class HttpRefused(Exception):
    """A request was refused; the text is for the client and says what to do."""

    def __init__(
        self,
        status: int,
        text: str,
        headers: Mapping[str, str] | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        """`refusal`: the broker's reason, if it is one of the broker's."""
        self.status = status
        self.refusal = refusal
        self.text = text
        self.headers = dict(headers or {})
        super().__init__(text)


class HttpAuthorizer:
    """Checks the `Authorization` of requests to one namespace."""

    def __init__(
        self,
        authorizer: Authorizer,
        namespace: str,
        real_time_s: Callable[[], float] = time.time,
        throttle: AuthThrottle | None = None,
        saw: Callable[[str], None] = lambda _account: None,
    ) -> None:
        """`saw` is called with the account of each authorized request."""
        self._authorizer = authorizer
        self._namespace = namespace
        self._real_time_s = real_time_s
        self._throttle = throttle or AuthThrottle()
        self._saw = saw

    async def authorize(
        self,
        request: web.BaseRequest,
        path: str,
        needed: Right,
        header: str = AUTHORIZATION,
        *,
        below: str = "",
    ) -> Grant:
        """Return the rights of a request on an entity's path; "" is the namespace.

        Raises `HttpRefused` 401 without a valid token, or without the right. `header` has the
        token, which may be for exactly the part `below` the entity. Refusals are delayed for
        addresses that guess keys; 429 where too many keys wait to be checked.
        """
        token = request.headers.get(header, "")
        if not token:
            text = f"MissingToken: Send a shared access signature in the header {header}."
            raise HttpRefused(401, f"{NO_TOKEN} {text}", CHALLENGE)
        admission = request.get(ADMISSION)

        def check() -> Grant:
            return self._authorizer.check_token(token, quote(path), self._real_time_s(), below)

        throttle = self._throttle
        is_known = throttle.is_active and admission is not None and admission.has_signed(token)
        try:
            grant = await throttle.check_key(request.remote, "http", check, is_known=is_known)
        except TokenRefused as error:
            raise HttpRefused(401, _bad_token(error), CHALLENGE) from None
        except TooManyChecks:
            text = "Too many keys from your address were refused: try again later."
            raise HttpRefused(429, text, {**RETRY_AFTER, "Connection": "close"}) from None
        if admission is not None and not admission.mark_authenticated(grant):
            text = "Too many connections are open with this key: close some, or use fewer."
            raise HttpRefused(429, text, {**RETRY_AFTER, "Connection": "close"})
        self._saw(grant.account)
        if not has_right(grant.rights, needed):
            raise self._missing(needed, path)
        return grant

    def check_again(self, grant: Grant, needed: Right) -> None:
        """Raise `HttpRefused` 401 when a right has ended: a rule has changed, or the token has
        expired.

        For requests that were authorized a while ago.
        """
        known = self._authorizer.renewed(grant)
        if known is None:
            gone = TokenRefused("The token is no longer valid: get a new one.")
            raise HttpRefused(401, _bad_token(gone), CHALLENGE)
        if known.expires_s <= self._real_time_s():
            raise HttpRefused(401, _bad_token(expired(known.expires_s)), CHALLENGE)
        if not has_right(known.rights, needed):
            raise self._missing(needed, grant.path)

    def _missing(self, needed: Right, path: str) -> HttpRefused:
        return HttpRefused(
            401,
            f"{NO_RIGHT} Unauthorized access. '{needed.value}' claim(s) are required to perform"
            f" this operation. Resource: 'sb://{self._namespace}/{path}'.",
            CHALLENGE,
        )


def _bad_token(refused: TokenRefused) -> str:
    """Return the text of a refused token; Service Bus gives that of an expired one no number."""
    text = f"{refused.code}: {refused}"
    return text if refused.code == "ExpiredToken" else f"{BAD_TOKEN} {text}"


def error_answer(
    refused: HttpRefused, namespace: str, path: str, *, is_logged: bool = True
) -> web.Response:
    """Return the response to a refused request:
    `<Error><Code>401</Code><Detail>…</Detail></Error>`.

    The text gets a tracking id that is also in the log, unless the error is not logged.
    """
    tracking_id = f"{uuid.uuid4()}_G0"
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    if is_logged:
        logger.info(
            "refused",
            extra={
                "tracking_id": tracking_id,
                "status": refused.status,
                "path": path[:MAX_LOGGED_CHARS],
            },
        )
    detail = _printable(
        f"{refused.text} TrackingId:{tracking_id}, SystemTracker:{namespace}:{path.strip('/')},"
        f" Timestamp:{now}"
    )
    return web.Response(
        status=refused.status,
        text=f"<Error><Code>{refused.status}</Code><Detail>{escape(detail)}</Detail></Error>",
        content_type=XML,
        charset="utf-8",
        headers=refused.headers,
    )


def _printable(text: str) -> str:
    """Return text without characters that XML cannot hold."""
    return "".join(each if each.isprintable() else "?" for each in text)
