"""Throttles failed authentication by source address.

All listeners share one `AuthThrottle`. The more tokens and passwords of an address are refused, the
longer its refusals wait. While several refusals of an address wait for their answers, further keys
of that address are not checked: a client that disconnects instead of waiting gains nothing. A good
key may therefore queue at an address that guesses keys; a key that its connection has presented
before never queues. Refusals are logged at increasing counts, not one by one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Final, TypeVar

from postbus.broker.access.authz import TokenRefused
from postbus.edge.access.bursts import Bursts, is_power_of_ten
from postbus.edge.access.shares import Limit, Shares

logger = logging.getLogger(__name__)

T = TypeVar("T")

FREE_REFUSALS: Final = 3
"""Refusals of a burst that are answered immediately, for mistyped keys."""

FIRST_DELAY_S: Final = 0.1
"""Delay of the next answer; it doubles with each further refusal."""

MAX_DELAY_S: Final = 5.0
"""Our choice: far below what SDKs wait for a token."""

MAX_UNANSWERED: Final = 8
"""Unanswered refusals of an address up to which further keys are checked. With the longest delay
that is 1.6 keys a second, about 115 in the first minute."""

MAX_QUEUED: Final = 16
"""Keys of an address that may wait to be checked: ten seconds, half of the time that a client
without a key may stay."""

ALL_QUEUED: Final = 1_024
"""Keys of all addresses that may wait to be checked. Our choice: each holds a token and its
connection."""

SUBNET_BITS: Final = 64
"""IPv6 addresses with this prefix in common count as one client."""


class TooManyChecks(Exception):
    """Too many keys of the address wait to be checked; this one was not checked."""


@dataclass(slots=True)
class _Guessed:
    """An address whose refusals wait for their answers."""

    unanswered: int = 0
    queued: deque[Callable[[], None]] = field(default_factory=deque)


class AuthThrottle:
    """Counts refusals and delays the checks of keys. Times are monotonic, in seconds."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        """`call_later` is by default that of the running event loop."""
        self.now_s = now_s
        self.call_later = call_later or _call_later
        self._refusals = Bursts()
        self._guessed: dict[str, _Guessed] = {}
        self.queued = Shares(Limit(ALL_QUEUED))
        """Keys that wait to be checked, by address."""
        self.sent_away_count = 0
        """Keys that were not checked because too many waited."""

    @property
    def is_active(self) -> bool:
        """Return whether a refusal waits for its answer, so that keys may have to queue."""
        return bool(self._guessed)

    def admit(self, address: str | None, check: Callable[[], None]) -> None:
        """Call `check` now, or when fewer refusals of the address wait for their answers.

        `check` is called once and has to find out whether its client is still connected. Raises
        `TooManyChecks`.
        """
        source = source_of(address) if self._guessed else ""
        guessed = self._guessed.get(source)
        if guessed is None or guessed.unanswered < MAX_UNANSWERED:
            check()
        elif len(guessed.queued) < MAX_QUEUED and self.queued.take(source, 1):
            guessed.queued.append(check)
        else:
            self.sent_away_count += 1
            raise TooManyChecks

    async def check_key(
        self, address: str | None, protocol: str, check: Callable[[], T], *, is_known: bool = False
    ) -> T:
        """Return the result of `check` when its turn has come; raise its `TokenRefused` after the
        delay.

        `is_known`: the connection has presented this key before. Raises `TooManyChecks`.
        """
        checked: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def refused(error: Exception) -> None:
            if not checked.done():
                checked.set_exception(error)

        def look() -> None:
            if checked.done():  # the client has disconnected
                return
            try:
                checked.set_result(check())
            except TokenRefused as error:
                self.refuse(address, protocol, str(error), partial(refused, error))
            except Exception as error:  # noqa: BLE001 - the awaiting caller handles it
                refused(error)

        if is_known:
            look()
        else:
            self.admit(address, look)
        return await checked

    def refuse(
        self, address: str | None, protocol: str, why: str, answer: Callable[[], None]
    ) -> None:
        """Count a refused key; `answer` is called now or after the delay."""
        delay_s = self.note_refused(address, protocol, why)
        if not delay_s:
            answer()
            return
        source = source_of(address)
        self._guessed.setdefault(source, _Guessed()).unanswered += 1

        def answer_late() -> None:
            answer()
            self._go_on(source)

        self.call_later(delay_s, answer_late)

    def note_refused(self, address: str | None, protocol: str, why: str) -> float:
        """Count a refusal and return the delay of its answer in seconds."""
        source = source_of(address)
        count = self._refusals.note(source, self.now_s())
        _log(source, protocol, why, count)
        over = count - FREE_REFUSALS
        if over <= 0:
            return 0.0
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(over - 1, 30))

    def _go_on(self, source: str) -> None:
        """Note an answered refusal: check waiting keys until enough of them are refused."""
        guessed = self._guessed[source]
        guessed.unanswered -= 1
        while guessed.queued and guessed.unanswered < MAX_UNANSWERED:
            self.queued.give_back(source, 1)
            guessed.queued.popleft()()
        if not guessed.unanswered:
            del self._guessed[source]


def source_of(address: str | None) -> str:
    """Return what counts as one client: an IPv4 address, or an IPv6 network."""
    try:
        found = ip_address(address or "")
    except ValueError:
        return address or "unknown"
    if not isinstance(found, IPv6Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    shift = found.max_prefixlen - SUBNET_BITS
    return f"{IPv6Address(int(found) >> shift << shift)}/{SUBNET_BITS}"


def _log(source: str, protocol: str, why: str, count: int) -> None:
    """Log the first refusal of a burst, then at each power of ten."""
    if count == 1:
        logger.warning("key refused", extra={"address": source, "protocol": protocol, "why": why})
    elif is_power_of_ten(count):
        logger.warning(
            "keys are being guessed",
            extra={"address": source, "protocol": protocol, "refused": count},
        )


def _call_later(delay_s: float, callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, callback)
