"""Guessing keys is slow, and right keys are not slowed."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from postbus.edge import bursts, suspicion
from postbus.edge.bursts import QUIET_S
from postbus.edge.suspicion import MAX_DELAY_S, Suspicion, source_of
from postbus.message.codec import Symbol
from tests.edge.bus_thread import RULES, BusThread, sas_token
from tests.edge.raw_client import SASL_INIT, RawClient, frame

ROOT = RULES[0]


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def refuse(doubts: Suspicion, count: int, address: str = "192.0.2.1") -> list[float]:
    return [doubts.note_refused(address, "amqp", "wrong") for _ in range(count)]


def test_answers_wait_longer_and_longer() -> None:
    doubts = Suspicion(Clock())
    assert refuse(doubts, 12) == [0, 0, 0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert refuse(doubts, 2_000)[-1] == MAX_DELAY_S
    assert refuse(doubts, 1, "192.0.2.2") == [0]


def test_burst_is_over_after_a_quiet_minute() -> None:
    clock = Clock()
    doubts = Suspicion(clock)
    refuse(doubts, 10)
    clock.now_s += QUIET_S - 1
    assert refuse(doubts, 1) == [MAX_DELAY_S]
    clock.now_s += QUIET_S
    assert refuse(doubts, 1) == [0]


def test_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "MAX_SOURCES", 100)
    doubts = Suspicion(Clock())
    refuse(doubts, 10, "192.0.2.1")
    for number in range(99):
        refuse(doubts, 1, f"198.51.100.{number}")
    assert refuse(doubts, 1, "192.0.2.1") == [MAX_DELAY_S]  # it was not quiet for longest
    for number in range(100):
        refuse(doubts, 1, f"203.0.113.{number}")
    assert len(doubts._refusals) == 100
    assert refuse(doubts, 1, "192.0.2.1") == [0]


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


def test_log_hears_of_the_first_and_of_each_tenfold(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        refuse(Suspicion(Clock()), 1_234)
    assert [record.getMessage() for record in caplog.records] == [
        "key refused",
        *["keys are being guessed"] * 3,
    ]
    assert [getattr(record, "refused", 1) for record in caplog.records] == [1, 10, 100, 1_000]


# --- the doors ----------------------------------------------------------------------------------


@pytest.fixture
def guarded(bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> BusThread:
    """The bus while somebody guesses."""
    monkeypatch.setattr(bus.suspicion, "now_s", Clock())
    monkeypatch.setattr(suspicion, "FIRST_DELAY_S", 0.5)
    monkeypatch.setattr(suspicion, "MAX_DELAY_S", 0.5)
    bus.suspicion._refusals.clear()
    refuse(bus.suspicion, 10, "127.0.0.1")
    return bus


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
def test_http_shares_what_amqp_saw(guarded: BusThread) -> None:
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
def test_client_that_does_not_wait_for_its_refusal_harms_nobody(guarded: BusThread) -> None:
    init = frame(SASL_INIT, Symbol("PLAIN"), f"\0{ROOT.name}\0wrong".encode(), kind=1)
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as client:
        client.sendall(b"AMQP\x03\x01\x00\x00" + init)
    with RawClient(guarded.port, ROOT.name, "wrong") as later:
        assert later.outcome == 1  # and the answer to the first found nobody
    with RawClient(guarded.port, ROOT.name, ROOT.keys.primary) as good:
        assert good.outcome == 0
