"""Guessing keys is slow, and right keys are not slowed."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import cast

import pytest

from postbus.edge.access import auth_throttle, bursts
from postbus.edge.access.auth_throttle import (
    ALL_QUEUED,
    FREE_REFUSALS,
    MAX_DELAY_S,
    MAX_QUEUED,
    MAX_UNANSWERED,
    AuthThrottle,
    TooManyChecks,
    source_of,
)
from postbus.edge.access.bursts import QUIET_S
from postbus.edge.amqp.connection import AmqpConnection
from postbus.edge.amqp.late_calls import LateCalls
from postbus.message.codec import Described, Symbol, Ulong, encode_value
from tests.edge.access.two_keys import goes_on, p99_s, sender_of
from tests.edge.amqp.test_links import wait_until
from tests.edge.amqp.test_wire import request
from tests.edge.bus_thread import RULES, BusThread, sas_token
from tests.edge.raw_client import OPEN, SASL_INIT, TRANSFER, RawClient, described, frame

ROOT = RULES[0]


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def refuse(throttle: AuthThrottle, count: int, address: str = "192.0.2.1") -> list[float]:
    return [throttle.note_refused(address, "amqp", "wrong") for _ in range(count)]


def test_answers_wait_longer_and_longer() -> None:
    throttle = AuthThrottle(Clock())
    assert refuse(throttle, 12) == [0, 0, 0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert refuse(throttle, 2_000)[-1] == MAX_DELAY_S
    assert refuse(throttle, 1, "192.0.2.2") == [0]


def test_burst_is_over_after_a_quiet_minute() -> None:
    clock = Clock()
    throttle = AuthThrottle(clock)
    refuse(throttle, 10)
    clock.now_s += QUIET_S - 1
    assert refuse(throttle, 1) == [MAX_DELAY_S]
    clock.now_s += QUIET_S
    assert refuse(throttle, 1) == [0]


def test_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "MAX_SOURCES", 100)
    throttle = AuthThrottle(Clock())
    refuse(throttle, 10, "192.0.2.1")
    for number in range(99):
        refuse(throttle, 1, f"198.51.100.{number}")
    assert refuse(throttle, 1, "192.0.2.1") == [MAX_DELAY_S]  # it was not quiet for longest
    for number in range(100):
        refuse(throttle, 1, f"203.0.113.{number}")
    assert len(throttle._refusals) == 100
    assert refuse(throttle, 1, "192.0.2.1") == [0]


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, "unknown"),
        ("", "unknown"),
        ("odd", "odd"),
    ],
)
def test_a_client_is_an_address_or_a_network(address: str | None, source: str) -> None:
    assert source_of(address) == source


def test_first_refusal_and_each_power_of_ten_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        refuse(AuthThrottle(Clock()), 1_234)
    assert [record.getMessage() for record in caplog.records] == [
        "key refused",
        *["keys are being guessed"] * 3,
    ]
    assert [getattr(record, "refused", 1) for record in caplog.records] == [1, 10, 100, 1_000]


# --- the listeners ------------------------------------------------------------------------------


@pytest.fixture
def guarded(bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> BusThread:
    """A bus with failed authentications under way."""
    monkeypatch.setattr(bus.throttle, "now_s", Clock())
    monkeypatch.setattr(auth_throttle, "FIRST_DELAY_S", 0.5)
    monkeypatch.setattr(auth_throttle, "MAX_DELAY_S", 0.5)
    bus.throttle._refusals.clear()
    refuse(bus.throttle, 10, "127.0.0.1")
    return bus


class Timers:
    """Timers like those of an event loop; time passes when a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        heappush(self._due, (self.now_s + delay_s, next(self._numbers), callback))

    def advance(self, duration_s: float) -> None:
        until_s = self.now_s + duration_s
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, callback = heappop(self._due)
            callback()
        self.now_s = until_s


class Guesser:
    """A client that tries keys at an address and counts the results."""

    def __init__(self, throttle: AuthThrottle, address: str = "192.0.2.1") -> None:
        self._doubts = throttle
        self._address = address
        self.checked = self.answered = self.sent_away = 0

    def guess(self) -> None:
        def check() -> None:
            self.checked += 1
            self._doubts.refuse(self._address, "amqp", "wrong", answer)

        def answer() -> None:
            self.answered += 1

        try:
            self._doubts.admit(self._address, check)
        except TooManyChecks:
            self.sent_away += 1


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def throttle(timers: Timers) -> AuthThrottle:
    return AuthThrottle(lambda: timers.now_s, timers.call_later)


def test_keys_are_not_checked_while_refusals_wait(throttle: AuthThrottle, timers: Timers) -> None:
    guesser = Guesser(throttle)
    for _ in range(100):
        guesser.guess()
    assert guesser.checked == FREE_REFUSALS + MAX_UNANSWERED
    assert guesser.answered == FREE_REFUSALS
    assert guesser.sent_away == 100 - guesser.checked - MAX_QUEUED
    other = Guesser(throttle, "192.0.2.2")
    other.guess()
    assert other.answered == 1
    timers.advance(60)
    assert guesser.answered == guesser.checked == 100 - guesser.sent_away
    assert (throttle._guessed, throttle.queued.used) == ({}, 0)


def test_keys_refused_unchecked_are_counted(throttle: AuthThrottle) -> None:
    """One address has too many waiting refusals, or all together have."""
    guessers = [Guesser(throttle, f"198.51.100.{number}") for number in range(100)]
    for guesser in guessers:
        for _ in range(30):
            guesser.guess()
    assert guessers[0].sent_away == 30 - guessers[0].checked - MAX_QUEUED
    assert throttle.sent_away_count == sum(guesser.sent_away for guesser in guessers)


def test_two_keys_a_second_at_most_over_a_minute(throttle: AuthThrottle, timers: Timers) -> None:
    """For any number of clients, with and without waiting for answers."""
    guesser = Guesser(throttle)
    for _ in range(600):
        for _ in range(50):
            guesser.guess()
        timers.advance(0.1)
    assert 60 < guesser.checked <= 120


def test_valid_keys_are_checked_in_order_and_free_their_place(
    throttle: AuthThrottle, timers: Timers
) -> None:
    guesser = Guesser(throttle)
    for _ in range(FREE_REFUSALS + MAX_UNANSWERED):
        guesser.guess()
    passed: list[int] = []
    for number in range(5):
        throttle.admit("192.0.2.1", functools.partial(passed.append, number))
    assert passed == []
    timers.advance(0.11)
    assert passed == [0, 1, 2, 3, 4]


def test_all_addresses_together_queue_within_bounds(throttle: AuthThrottle) -> None:
    for number in range(200):
        guesser = Guesser(throttle, f"198.51.100.{number}")
        for _ in range(100):
            guesser.guess()
    assert throttle.queued.used <= ALL_QUEUED
    assert Guesser(throttle, "192.0.2.1").guess() is None  # which is looked at as ever


async def test_waiting_is_given_up_with_the_request(throttle: AuthThrottle, timers: Timers) -> None:
    guesser = Guesser(throttle)
    for _ in range(FREE_REFUSALS + MAX_UNANSWERED):
        guesser.guess()
    looked: list[str] = []

    def judged(name: str, *, is_known: bool = False) -> asyncio.Task[None]:
        work = throttle.check_key(
            "192.0.2.1", "http", lambda: looked.append(name), is_known=is_known
        )
        return asyncio.create_task(work)

    gone, stays = judged("gone"), judged("stays")
    await asyncio.sleep(0)
    await judged("known", is_known=True)
    gone.cancel()
    await asyncio.sleep(0)
    timers.advance(1)
    await stays
    assert looked == ["known", "stays"]


def took_s(since_s: float) -> float:
    return time.monotonic() - since_s


def ask(bus: BusThread, token: str) -> bytes:
    with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client:
        text = f"GET /none HTTP/1.1\r\nHost: here\r\nAuthorization: {token}\r\n\r\n"
        client.sendall(text.encode())
        return client.recv(20)


@pytest.mark.slow
def test_wrong_password_waits_and_a_right_one_does_not(guarded: BusThread) -> None:
    began_s = time.monotonic()
    with RawClient(guarded.port, ROOT.name, ROOT.keys.primary) as client:
        assert client.outcome == 0
    assert took_s(began_s) < 0.5
    began_s = time.monotonic()
    with RawClient(guarded.port, ROOT.name, "wrong") as client:
        assert client.outcome == 1
    assert took_s(began_s) >= 0.5


@pytest.mark.slow
def test_http_and_amqp_share_refusal_counts(guarded: BusThread) -> None:
    expiry = int(time.time()) + 60
    began_s = time.monotonic()
    good = sas_token("http://here", ROOT.name, ROOT.keys.primary, expiry)
    assert not ask(guarded, good).startswith(b"HTTP/1.1 401")
    assert took_s(began_s) < 0.5
    began_s = time.monotonic()
    wrong = sas_token("http://here", ROOT.name, "wrong", expiry)
    assert ask(guarded, wrong).startswith(b"HTTP/1.1 401")
    assert took_s(began_s) >= 0.5


@pytest.mark.slow
def test_client_that_does_not_wait_for_its_refusal_delays_no_other(guarded: BusThread) -> None:
    init = frame(SASL_INIT, Symbol("PLAIN"), f"\0{ROOT.name}\0wrong".encode(), kind=1)
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as client:
        client.sendall(b"AMQP\x03\x01\x00\x00" + init)
    with RawClient(guarded.port, ROOT.name, "wrong") as later:
        assert later.outcome == 1  # and the answer to the first had no receiver
    with RawClient(guarded.port, ROOT.name, ROOT.keys.primary) as good:
        assert good.outcome == 0


# --- guessing over the wire -----------------------------------------------------------------------


@pytest.fixture
def watched(bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BusThread, Timers]]:
    """The bus and the time of its refusals."""
    timers = Timers()
    monkeypatch.setattr(bus.throttle, "now_s", lambda: timers.now_s)
    monkeypatch.setattr(bus.throttle, "call_later", timers.call_later)
    bus.throttle._refusals.clear()
    yield bus, timers
    bus.run(passed(timers, 120))
    assert (bus.throttle._guessed, bus.throttle.queued.used) == ({}, 0)


async def passed(timers: Timers, duration_s: float) -> None:
    timers.advance(duration_s)


def counted(monkeypatch: pytest.MonkeyPatch, of: object, name: str) -> Callable[[], int]:
    """Return a function that returns how often a method was called."""
    calls = itertools.count()
    method = getattr(of, name)
    seen = [0]

    def call(*arguments: object, **named: object) -> object:
        seen[0] = next(calls) + 1
        return method(*arguments, **named)

    monkeypatch.setattr(of, name, call)
    return lambda: seen[0]


def plain_guess(number: int) -> bytes:
    response = f"\0{ROOT.name}\0guess {number}".encode()
    return b"AMQP\x03\x01\x00\x00" + frame(SASL_INIT, Symbol("PLAIN"), response, kind=1)


def http_guess(number: int) -> bytes:
    token = sas_token("http://here", ROOT.name, f"guess {number}", 2**31)
    return f"GET /none HTTP/1.1\r\nHost: here\r\nAuthorization: {token}\r\n\r\n".encode()


@pytest.mark.slow
@pytest.mark.parametrize("guess", [plain_guess, http_guess])
def test_fifty_connections_that_do_not_wait_try_two_keys_a_second(
    watched: tuple[BusThread, Timers],
    guess: Callable[[int], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, timers = watched
    admitted = counted(monkeypatch, bus.throttle, "admit")
    method = "check_password" if guess is plain_guess else "check_token"
    looked_at = counted(monkeypatch, bus.authorizer, method)
    numbers = itertools.count(1)
    for _ in range(60):
        with ExitStack() as clients:
            for _ in range(50):
                client = socket.create_connection(("127.0.0.1", bus.port), timeout=10)
                clients.enter_context(client).sendall(guess(number := next(numbers)))
            wait_until(bus, lambda number=number: admitted() == number)  # type: ignore[misc]
        bus.run(passed(timers, 1))
    assert 60 < looked_at() <= 120


@pytest.mark.slow
def test_authenticated_client_is_not_delayed_and_others_queue(
    watched: tuple[BusThread, Timers],
) -> None:
    bus, timers = watched
    queue = bus.queue()
    url = f"amqp://here/{queue}"
    properties = {"operation": "put-token", "name": url}
    good = sas_token(url, ROOT.name, ROOT.keys.primary, 2**31)
    with ExitStack() as clients:
        other = clients.enter_context(RawClient(bus.port, ROOT.name, ROOT.keys.primary))
        send = sender_of(other, queue)
        undisturbed_s = p99_s(send)
        known = clients.enter_context(RawClient(bus.port, "", ""))
        assert b"Accepted" in request(known, "$cbs", "1", properties, good).payload
        for number in range(FREE_REFUSALS + MAX_UNANSWERED):
            client = socket.create_connection(("127.0.0.1", bus.port), timeout=10)
            clients.enter_context(client).sendall(plain_guess(number))
        wait_until(bus, lambda: len(bus.throttle._guessed) == 1)
        guessed = next(iter(bus.throttle._guessed.values()))
        wait_until(bus, lambda: guessed.unanswered == MAX_UNANSWERED)
        put = encode_value(described(0x73, "2", None, None, None, "answers"))
        put += encode_value(Described(Ulong(0x74), properties))
        put += encode_value(Described(Ulong(0x77), good))
        known.write(known.transfer(1, put, handle=20, settled=True))
        assert b"Accepted" in known.expect(TRANSFER).payload
        late = socket.create_connection(("127.0.0.1", bus.port), timeout=10)
        init = frame(
            SASL_INIT, Symbol("PLAIN"), f"\0{ROOT.name}\0{ROOT.keys.primary}".encode(), kind=1
        )
        clients.enter_context(late).sendall(
            b"AMQP\x03\x01\x00\x00" + init + b"AMQP\x00\x01\x00\x00" + frame(OPEN, "late", "here")
        )
        wait_until(bus, lambda: len(guessed.queued) == 1)
        bus.run(passed(timers, 0.11))
        received = b""
        while b"postbus" not in received:  # its open, which came with the init, is answered
            received += late.recv(65_536)
        for number in range(100):
            client = socket.create_connection(("127.0.0.1", bus.port), timeout=10)
            clients.enter_context(client).sendall(plain_guess(1_000 + number))
        wait_until(bus, lambda: bus.throttle.queued.used == MAX_QUEUED)
        with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as surplus:
            assert surplus.outcome == 4
        assert goes_on(send, undisturbed_s)
        http = clients.enter_context(socket.create_connection(("127.0.0.1", bus.port), timeout=10))
        http.sendall(http_guess(1))
        assert http.recv(65_536).startswith(b"HTTP/1.1 429 ")


def test_keys_refused_unchecked_are_forgotten(throttle: AuthThrottle) -> None:
    """With their requests, which may be a megabyte."""
    late = LateCalls()
    connection = cast(AmqpConnection, SimpleNamespace(address="192.0.2.1"))
    guesser = Guesser(throttle)
    for _ in range(FREE_REFUSALS + MAX_UNANSWERED):
        guesser.guess()
    sent_away = 0
    for _ in range(100):
        try:
            late.admit(connection, throttle, guesser.guess)
        except TooManyChecks:
            sent_away += 1
    assert (sent_away, len(late._waiting)) == (100 - MAX_QUEUED, MAX_QUEUED)
