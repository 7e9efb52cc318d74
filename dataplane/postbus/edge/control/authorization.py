"""Authorization of the control API, by tokens of a file or by client certificates.

The file is read again when it changes. It may hold several tokens, one a line, so that a new one
can be distributed before the old one is removed. A line is a token with all scopes, or `name
scope,scope token`. Tokens are compared in constant time; wrong ones are delayed like wrong keys,
right ones never wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import ssl
from pathlib import Path
from typing import Final

from aiohttp import web

from postbus.edge.access.auth_throttle import AuthThrottle
from postbus.edge.control.callers import NAME, ControlCaller, Scope, certified, scopes_of

logger = logging.getLogger(__name__)

LEAST_TOKEN_CHARS: Final = 20
"""Our choice: invented tokens are shorter; of random base64 this is 120 bits."""

MOST_TOKENS: Final = 16
MOST_FILE_BYTES: Final = 64 * 1024
MOST_DELAYED: Final = 16
"""Wrong tokens that may wait for their answers at a time. Our choice, as all of these."""


class TokenFileError(Exception):
    """The file of tokens cannot be used; the text is for the user and contains no token."""


class NotAuthorized(Exception):
    """A caller has no token, or a wrong one. `is_too_often`: it should wait before the next
    attempt.
    """

    def __init__(self, detail: str, *, is_too_often: bool = False) -> None:
        self.is_too_often = is_too_often
        super().__init__(detail)


class ControlAuthorizer:
    """Authenticates callers. `token_file` None: only certificates are accepted."""

    def __init__(
        self,
        token_file: Path | None,
        throttle: AuthThrottle,
        *,
        accepts_certificates: bool = False,
    ) -> None:
        """Read the file; raises `TokenFileError`."""
        self._token_file = token_file
        self._throttle = throttle
        self._accepts_certificates = accepts_certificates
        self._read_as: tuple[int, int, int] | None = None
        self._known: tuple[tuple[bytes, ControlCaller], ...] = ()
        self._delayed = 0
        if token_file is not None:
            try:
                self._read_as, self._known = _stamp(token_file), _read(token_file)
            except OSError as error:
                reason = (error.strerror or "cannot be read").lower()
                raise TokenFileError(f"the control tokens {token_file}: {reason}") from error
            if not self._known:
                raise TokenFileError(
                    f"the control tokens {token_file}: there is no token in it; write one a line"
                )

    async def authorize(self, request: web.BaseRequest) -> ControlCaller:
        """Return the authenticated caller; raises `NotAuthorized`."""
        caller = _certified(request) if self._accepts_certificates else None
        if caller is not None:
            return caller
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if not token and not scheme:
            raise NotAuthorized(
                "send the header `Authorization: Bearer <token>`; the token is in the file that"
                " the broker names when it starts (POSTBUS_CONTROL_TOKEN_FILE)"
            )
        caller = self._find(token.strip()) if scheme.lower() == "bearer" else None
        if caller is not None:
            return caller
        await self._slow_down(request.remote)
        raise NotAuthorized("this token is not one of the broker's file of control tokens")

    def _find(self, token: str) -> ControlCaller | None:
        self._read_again()
        digest = _digest(token)
        found = [
            caller if hmac.compare_digest(digest, known) else None for known, caller in self._known
        ]
        # every token was compared
        return next((caller for caller in found if caller is not None), None)

    def _read_again(self) -> None:
        """Reload a changed file; one that is missing or broken for now changes nothing."""
        if self._token_file is None:
            return
        try:
            stamp = _stamp(self._token_file)
            if stamp == self._read_as:
                return
            self._known, self._read_as = _read(self._token_file), stamp
            logger.info("control tokens reloaded", extra={"count": len(self._known)})
        except (OSError, TokenFileError) as error:
            logger.warning("control tokens cannot be reloaded", extra={"error": str(error)})

    async def _slow_down(self, remote: str | None) -> None:
        """Delay the answer to a wrong token, longer each time; raises `NotAuthorized` when many
        wait.
        """
        delay_s = self._throttle.note_refused(remote, "control", "wrong token")
        if self._delayed >= MOST_DELAYED:
            raise NotAuthorized("too many wrong tokens: wait a minute", is_too_often=True)
        if delay_s:
            self._delayed += 1
            try:
                await asyncio.sleep(delay_s)
            finally:
                self._delayed -= 1


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[tuple[bytes, ControlCaller], ...]:
    """Return digest and caller of each token; raises OSError or `TokenFileError`."""
    with path.open("rb") as file:
        content = file.read(MOST_FILE_BYTES + 1)
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if len(content) > MOST_FILE_BYTES or len(numbered) > MOST_TOKENS:
        raise TokenFileError(f"the control tokens {path}: at most {MOST_TOKENS} lines")
    try:
        return tuple(_read_line(number, line) for number, line in numbered)
    except ValueError as error:
        raise TokenFileError(f"the control tokens {path}: {error}") from None


def _read_line(number: int, line: str) -> tuple[bytes, ControlCaller]:
    """Parse a line, a token or `name scope,scope token`; raises ValueError."""
    *said, token = line.split()
    if len(token) < LEAST_TOKEN_CHARS or not token.isascii():
        raise ValueError(
            f"a token has at least {LEAST_TOKEN_CHARS} ASCII characters (line {number});"
            " `openssl rand -base64 32` generates one"
        )
    digest = _digest(token)
    if not said:
        return digest, ControlCaller(f"token {digest.hex()[:8]}", frozenset({Scope.ALL}))
    if len(said) != 2 or NAME.fullmatch(said[0]) is None:
        raise ValueError(f"line {number} is neither a token nor `name scopes token`")
    try:
        return digest, ControlCaller(f"token {said[0]}", scopes_of(said[1]))
    except ValueError:
        known = ", ".join(scope.value for scope in Scope)
        raise ValueError(f"line {number}: scopes are {known}, with commas between them") from None


def _digest(token: str) -> bytes:
    """Return the digest to compare: it hides the length too."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _certified(request: web.BaseRequest) -> ControlCaller | None:
    transport = request.transport
    tls = transport.get_extra_info("ssl_object") if transport is not None else None
    return certified(tls) if isinstance(tls, ssl.SSLObject) else None
