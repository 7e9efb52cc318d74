"""HTTP requests with the standard library, for driver and executors.

Every request of the bulk API may be repeated, so that one that breaks off is sent again for a
while. Connections stay open: workers of Spark are used for many tasks.
"""

from __future__ import annotations

import html
import json
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import monotonic
from time import sleep as pause
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from postbus_spark.errors import BY_CODE, BY_STATUS, BulkError, InvalidRequest, Unavailable

CONNECT_S: Final = 10.0
ANSWER_S: Final = 60.0
"""Upper bound on the silence of the bus in an answer."""

PATIENCE_S: Final = 90.0
"""How long a request is repeated. Our choice: a standby takes over sooner than that."""

BUSY_S: Final = 1_800.0
"""How long a task waits until other tasks have read theirs: half of the life of its token."""

FIRST_PAUSE_S: Final = 0.1
LAST_PAUSE_S: Final = 5.0
MAX_IDLE: Final = 4
AGAIN: Final = frozenset({429, 500, 502, 503, 504})


class Bus(NamedTuple):
    """An address, and the file of certificates that it is checked with."""

    url: str
    ca_file: str | None = None


class Content(NamedTuple):
    """The body of a request."""

    kind: str
    data: bytes


class Refused(Exception):
    """An answer that asks to try again later."""

    def __init__(self, detail: str, pause_s: float | None = None, *, is_busy: bool = False) -> None:
        """`is_busy`: the bus works, with as many readers as it can have."""
        self.pause_s = pause_s
        self.is_busy = is_busy
        super().__init__(detail)


TRANSIENT: Final = (OSError, HTTPException, Refused)
"""What a repetition may repair, unless `is_permanent` knows better."""


def is_permanent(error: Exception) -> bool:
    return isinstance(error, ssl.SSLError) and not isinstance(
        error, ssl.SSLEOFError | ssl.SSLZeroReturnError
    )


class Patience:
    """Pauses between attempts, until too long nothing has come of them."""

    def __init__(
        self,
        what: str,
        *,
        limit_s: float = PATIENCE_S,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """`what` is the request, for the text of the error."""
        self._what = what
        self._limit_s = limit_s
        self._clock = clock or monotonic
        self._sleep = sleep or pause
        self._since_s = self._clock()
        self._pause_s = FIRST_PAUSE_S

    def progressed(self) -> None:
        """Begin again with short pauses."""
        self._since_s = self._clock()
        self._pause_s = FIRST_PAUSE_S

    def wait(self, error: Exception) -> None:
        """Wait before the next attempt. Raises `Unavailable` if there is to be none."""
        text = str(error) or type(error).__name__
        if is_permanent(error):
            raise Unavailable(
                f"{self._what}: the certificate or the TLS of the bus is rejected ({text}); name"
                " the authority's certificate with the option tlsCaFile"
            ) from None
        asked, limit_s = None, self._limit_s
        if isinstance(error, Refused):
            asked = error.pause_s
            limit_s = BUSY_S if error.is_busy else limit_s
        pause_s = self._pause_s if asked is None else max(self._pause_s, min(asked, LAST_PAUSE_S))
        waited_s = self._clock() - self._since_s
        if waited_s + pause_s > limit_s:
            raise Unavailable(
                f"{self._what} failed for {waited_s:.0f} s, the last time with: {text}. Nothing is"
                " lost: start the query again when the bus answers."
            ) from None
        self._sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)


def call(
    bus: Bus,
    method: str,
    target: str,
    token: str,
    body: object = None,
    patience: Patience | None = None,
) -> bytes:
    """Return the answer's body, sending the request again as long as that may help.

    `body` is sent as JSON. Raises `BulkError` for a refusal, `Unavailable`.
    """
    patience = patience or Patience(f"{method} {bus.url}{target}")
    content = None if body is None else Content("application/json", json.dumps(body).encode())
    while True:
        try:
            with answer(bus, method, target, token, content) as response:
                return response.read()
        except TRANSIENT as error:
            patience.wait(error)


@contextmanager
def answer(
    bus: Bus, method: str, target: str, token: str, content: Content | None = None
) -> Iterator[HTTPResponse]:
    """Return a good answer, whose connection is kept if it is read to its end.

    Raises `BulkError` for a refusal, and one of `TRANSIENT`.
    """
    headers = {"Authorization": token, "Accept": "application/json, */*;q=0.5"}
    if content is not None:
        headers["Content-Type"] = content.kind
    data = None if content is None else content.data
    connection, response = _sent(bus, method, target, data, headers)
    is_kept = False
    try:
        if response.status >= 300:
            said = response.read()
            is_kept = response.isclosed() and not response.will_close
            raise _error_of(response.status, response.getheader("Retry-After"), said)
        yield response
        is_kept = response.isclosed() and not response.will_close
    finally:
        if is_kept:
            _keep(bus, connection)
        else:
            connection.close()


def _sent(
    bus: Bus, method: str, target: str, content: bytes | None, headers: Mapping[str, str]
) -> tuple[HTTPConnection, HTTPResponse]:
    """Send a request on an open connection; on a new one if the bus has closed that meanwhile."""
    kept = _idle().get(bus, [])
    while kept:
        connection = kept.pop()
        try:
            connection.request(method, target, content, headers)
            return connection, connection.getresponse()
        except (OSError, HTTPException):
            connection.close()
    connection = _connected(bus)
    try:
        connection.request(method, target, content, headers)
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


CA_FILE: Final = "POSTBUS_CA_FILE"
"""Variable with the authority of the bus. Not SSL_CERT_FILE: with that other libraries would trust
nobody else, such as S3.
"""


def _connected(bus: Bus) -> HTTPConnection:
    parts = urlsplit(bus.url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        context = _tls(bus.ca_file or os.environ.get(CA_FILE))
        connection: HTTPConnection = HTTPSConnection(
            host, parts.port, timeout=CONNECT_S, context=context
        )
    else:
        connection = HTTPConnection(host, parts.port, timeout=CONNECT_S)
    connection.connect()
    connection.sock.settimeout(ANSWER_S)
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _tls(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        text = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"the file {ca_file} of tlsCaFile cannot be used: {text}") from None


# --- connections --------------------------------------------------------------------------------

_CONNECTIONS: Final[dict[int, dict[Bus, list[HTTPConnection]]]] = {}
"""Open connections without a request, by process: Spark forks its workers."""


def _idle() -> dict[Bus, list[HTTPConnection]]:
    return _CONNECTIONS.setdefault(os.getpid(), {})


def _keep(bus: Bus, connection: HTTPConnection) -> None:
    kept = _idle().setdefault(bus, [])
    if len(kept) < MAX_IDLE and connection.sock is not None:
        kept.append(connection)
    else:
        connection.close()


# --- refusals -----------------------------------------------------------------------------------

_DETAIL: Final = re.compile(r"<Detail>(.*?)</Detail>", re.DOTALL)


def _error_of(status: int, retry_after: str | None, said: bytes) -> BulkError | Refused:
    code, detail = _problem(said)
    shown = detail or f"the bus answered with status {status}"
    if code in BY_CODE:
        return BY_CODE[code](shown)
    if status in AGAIN:
        pause_s = _seconds(retry_after)
        return Refused(f"{shown} (status {status})", pause_s, is_busy=status == 429)
    return BY_STATUS.get(status, InvalidRequest)(shown)


def _problem(said: bytes) -> tuple[str, str]:
    """Return code and detail of a refusal: JSON of the bulk API, or XML of what stands before."""
    text = said.decode(errors="replace")
    try:
        problem = json.loads(text)
        return str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        found = _DETAIL.search(text)
        return "", html.unescape(found[1]).strip() if found else ""


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None
