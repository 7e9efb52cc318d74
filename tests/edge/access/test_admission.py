"""Unauthenticated connections are limited and evicted; authenticated ones stay, over every
protocol.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from postbus.broker.access.authz import NEVER_S, Grant
from postbus.contract.entities import Right
from postbus.edge.access.admission import (
    LOGGED_REFUSALS,
    PATIENCE_S,
    Admission,
    AdmissionControl,
)
from postbus.edge.access.bursts import QUIET_S
from postbus.message.codec import Symbol, Uint
from tests.edge.amqp.websocket_client import WebSocketClient
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.front_rig import AMQP_HEADER, HOST, answers_http, front, hangs_up, wait_until
from tests.edge.http_client import token_of
from tests.edge.raw_client import (
    ATTACH,
    BEGIN,
    OPEN,
    SASL_INIT,
    RawClient,
    described,
    frame,
)

ROOT = RULES[0]
CROWD = "192.0.2.1"
OTHER = "192.0.2.2"
TERMINI = (described(0x28, "$cbs"), described(0x29, "$cbs"))


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission_control(clock: Clock) -> AdmissionControl:
    return AdmissionControl(clock, most=10, most_of_address=5)


def grant(rule: str = "root") -> Grant:
    return Grant("", frozenset(Right), rule, NEVER_S)


def admit(
    admission_control: AdmissionControl,
    address: str = CROWD,
    count: int = 1,
    *,
    is_full: bool = False,
) -> list[Admission]:
    """Return those that were let in, of some that dial."""
    found = [admission_control.admit(address, is_full=is_full) for _ in range(count)]
    return [each for each in found if each is not None]


def cuts(found: list[Admission]) -> list[int]:
    """Return a list of which of them are cut, as it grows."""
    cut: list[int] = []
    for number, each in enumerate(found):
        each.hold(each, lambda number=number: cut.append(number))  # type: ignore[misc]
    return cut


def test_one_address_has_a_part_of_unauthenticated_connections(
    admission_control: AdmissionControl,
) -> None:
    assert len(admit(admission_control, CROWD, 20)) == 5
    assert len(admit(admission_control, OTHER, 20)) == 5
    assert len(admission_control) == 10


def test_an_address_of_many_clients_that_show_keys_is_not_bounded(
    admission_control: AdmissionControl,
) -> None:
    for _ in range(100):
        together = admit(admission_control, CROWD, 5)
        assert len(together) == 5
        for each in together:
            assert each.mark_authenticated(grant())
    assert len(admission_control) == admission_control.cut_count == 0


def test_small_namespace_admits_fewer() -> None:
    admission_control = AdmissionControl.within(1_000)
    assert len(admit(admission_control, CROWD, 1_000)) == 200
    assert len(admit(admission_control, OTHER, 1_000)) == 200
    admission_control.resize(5_000)  # it is Standard now
    assert len(admit(admission_control, CROWD, 5_000)) == 800
    admission_control = AdmissionControl.within(5_000)
    assert len(admit(admission_control, CROWD, 5_000)) == 1_000


def test_slow_connections_are_evicted_for_others_of_their_address(
    admission_control: AdmissionControl, clock: Clock
) -> None:
    first = admit(admission_control, CROWD, 5)
    cut = cuts(first)
    clock.now_s += PATIENCE_S - 1
    assert admit(admission_control) == []
    clock.now_s += 1
    assert len(admit(admission_control, CROWD, 9)) == 5
    assert cut == [0, 1, 2, 3, 4]
    assert (len(admission_control), admission_control.cut_count) == (5, 5)


def test_connections_of_a_crowded_address_are_evicted_for_other_addresses(clock: Clock) -> None:
    admission_control = AdmissionControl(clock, most=6, most_of_address=5)
    cut = cuts(admit(admission_control, CROWD, 5))
    assert len(admit(admission_control, OTHER, 2)) == 2
    assert cut == [0]
    assert len(admit(admission_control, OTHER, 9)) == 1  # until they are as many
    assert cut == [0, 1]


def test_of_many_addresses_the_oldest_goes_when_it_had_its_time(
    admission_control: AdmissionControl, clock: Clock
) -> None:
    each_its_own = [admit(admission_control, f"198.51.100.{number}")[0] for number in range(10)]
    cut = cuts(each_its_own)
    assert admit(admission_control, OTHER) == []
    clock.now_s += PATIENCE_S
    assert len(admit(admission_control, OTHER)) == 1
    assert cut == [0]


def test_full_namespace_admits_while_it_can_evict(
    admission_control: AdmissionControl, clock: Clock
) -> None:
    cut = cuts(admit(admission_control, CROWD, 2))
    assert len(admit(admission_control, OTHER, is_full=True)) == 1
    assert cut == [0]
    for each in list(admission_control._all):
        assert each.mark_authenticated(grant())
    assert admit(admission_control, OTHER, is_full=True) == []


def test_crowd_is_logged_once(
    admission_control: AdmissionControl, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        admit(admission_control, CROWD, 10)
        clock.now_s += 1
    assert [record.getMessage() for record in caplog.records] == [
        "too many unauthenticated connections"
    ]
    assert vars(caplog.records[0])["address"] == CROWD
    clock.now_s += QUIET_S
    admit(admission_control, CROWD, 10)
    assert len(caplog.records) == 2


def test_refusals_of_unauthenticated_clients_are_summed_up(
    admission_control: AdmissionControl, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (admission,) = admit(admission_control)
    logged = [admission.is_refusal_logged() for _ in range(1_000)]
    assert logged.count(True) == LOGGED_REFUSALS
    assert all(logged[:LOGGED_REFUSALS])
    assert [vars(record)["refused"] for record in caplog.records] == [100, 1_000]
    assert admit(admission_control, OTHER)[0].is_refusal_logged()
    clock.now_s += QUIET_S
    assert admission.is_refusal_logged()


def test_refusals_with_a_key_are_summed_up_above_some_a_second(
    admission_control: AdmissionControl, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (one, other) = admit(admission_control, CROWD, 2)
    assert one.mark_authenticated(grant("one"))
    assert other.mark_authenticated(grant("other"))
    for _ in range(3):
        assert [one.is_refusal_logged() for _ in range(400)].count(True) == 20
        assert other.is_refusal_logged()  # in the same second
        clock.now_s += 1
    assert [vars(record)["refused_more"] for record in caplog.records] == [1, 10, 100, 1_000]
    assert {vars(record)["rule"] for record in caplog.records} == {"one"}


def test_key_has_a_share_of_all_connections(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    admission_control = AdmissionControl(clock, max_connections=100)
    together = admit(admission_control, CROWD, 100)
    assert [each.mark_authenticated(grant("greedy")) for each in together].count(True) == 80
    assert [
        each.mark_authenticated(grant("later")) for each in admit(admission_control, OTHER, 20)
    ].count(True) == 16
    assert [vars(record)["refused"] for record in caplog.records] == [1, 10, 1]
    gone = together[0]
    gone.hold(gone, lambda: None)
    gone.release(gone)
    gone.release(gone)
    assert admission_control.of_keys.of("greedy") == 79
    assert not together[-1].mark_authenticated(grant("greedy"))  # another key has come meanwhile
    assert together[-1].account == ""
    assert admit(admission_control, OTHER)[0].mark_authenticated(grant("third"))


def test_table_of_refusals_is_bounded(
    admission_control: AdmissionControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.edge.access.bursts.MAX_SOURCES", 10)
    for number in range(100):
        admission_control.note_refusal(f"198.51.100.{number}")
    assert len(admission_control._refusals) == 10


def test_handed_over_connection_stays_unauthenticated(
    admission_control: AdmissionControl,
) -> None:
    (admission,) = admit(admission_control)
    admission.hold("first", lambda: None)
    admission.hold("second", lambda: None)
    admission.release("first")
    assert len(admission_control) == 1
    admission.release("second")
    admission.release("second")
    assert len(admission_control) == 0


# --- the listeners ------------------------------------------------------------------------------


def test_silent_clients_give_way(runner: asyncio.Runner) -> None:
    """Before the protocol is known, and over AMQP and HTTP."""
    clock = Clock()

    async def run() -> None:
        async with front(max_connections=3, admission_control=AdmissionControl(clock)) as listeners:
            port = await listeners.listen(HOST, 0)
            kept = [await asyncio.open_connection(HOST, port) for _ in range(3)]
            for (reader, writer), first in zip(
                kept, (b"A", AMQP_HEADER, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"), strict=True
            ):
                writer.write(first)
                if len(first) > 1:
                    assert await reader.read(1)
            assert len(listeners.admission_control) == 3
            clock.now_s += PATIENCE_S
            others = [await asyncio.open_connection(HOST, port) for _ in range(3)]
            for (reader, writer), _ in zip(kept, others, strict=True):
                assert await hangs_up(reader)
                writer.close()
            assert listeners.admission_control.cut_count == 3
            for _, writer in others:
                writer.close()
            await wait_until(
                lambda: listeners.connection_count == len(listeners.admission_control) == 0
            )
            assert await answers_http(port)

    runner.run(run())


@pytest.fixture
def crowded(bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function that fills the bus with unauthenticated connections."""
    clock = Clock()
    monkeypatch.setattr(bus.front.admission_control, "now_s", clock)
    kept: list[socket.socket] = []

    def crowd() -> None:
        monkeypatch.setattr(bus.front, "_max_connections", bus.front.connection_count + 3)
        for _ in range(3):
            made = socket.create_connection(("127.0.0.1", bus.port), timeout=10)
            made.sendall(AMQP_HEADER)
            assert made.recv(8) == AMQP_HEADER
            kept.append(made)
        clock.now_s += PATIENCE_S

    yield crowd
    for each in kept:
        each.close()


def ask(client: socket.socket, token: str, path: str = "/absent") -> bytes:
    text = f"DELETE {path} HTTP/1.1\r\nHost: here\r\nAuthorization: {token}\r\n\r\n"
    client.sendall(text.encode())
    return client.recv(65_536)


def test_clients_with_a_key_are_admitted_and_stay(
    bus: BusThread, crowded: Callable[[], None]
) -> None:
    before = bus.front.admission_control.cut_count
    with (
        RawClient(bus.port, ROOT.name, ROOT.keys.primary) as amqp,
        socket.create_connection(("127.0.0.1", bus.port), timeout=10) as http,
        ExitStack() as clients,
    ):
        assert ask(http, token_of(bus)).startswith(b"HTTP/1.1 404 ")
        websocket = RawClient(0, ROOT.name, ROOT.keys.primary, stream=WebSocketClient(bus.port))
        assert len(bus.front.admission_control) == 0
        crowded()
        for _ in range(3):  # each of them takes the place of one of the crowd
            client = RawClient(bus.port, ROOT.name, ROOT.keys.primary)
            assert client.outcome == 0
            clients.enter_context(client)
        assert bus.front.admission_control.cut_count == before + 3
        assert len(bus.front.admission_control) == 0
        assert ask(http, token_of(bus)).startswith(b"HTTP/1.1 404 ")
        queue = bus.queue()
        for each in (amqp, websocket):
            assert each.attach_sender(queue).fields[6] is not None
        websocket.socket.close()


@pytest.mark.parametrize("kind", ["links", "sessions", "requests"])
def test_unauthenticated_clients_cannot_fill_memory(bus: BusThread, kind: str) -> None:
    """By long names of links, by sessions, and by endless requests."""
    links = [
        frame(ATTACH, f"{number}{'x' * 60_000}", Uint(number), True, None, None, *TERMINI)
        for number in range(40)
    ]
    sessions = [
        frame(BEGIN, None, Uint(0), Uint(1), Uint(1), channel=number) for number in range(1, 4_000)
    ]
    link = frame(ATTACH, "to $cbs", Uint(0), False, None, None, *TERMINI, None, None, Uint(0))
    more = [
        frame(0x14, Uint(0), Uint(0), b"t", Uint(0), False, True, payload=b"x" * 50_000)
        for _ in range(40)
    ]
    with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client:
        client.sendall(
            AMQP_HEADER
            + frame(SASL_INIT, Symbol("ANONYMOUS"), b"", kind=1)
            + b"AMQP\x00\x01\x00\x00"
            + frame(OPEN, "client", "here")
            + frame(BEGIN, None, Uint(0), Uint(5_000), Uint(5_000))
        )
        with suppress(ConnectionError):
            for each in {"links": links, "sessions": sessions, "requests": [link, *more]}[kind]:
                client.sendall(each)
        received = b""
        with suppress(ConnectionError):
            while data := client.recv(1 << 20):
                received = received[-1_000:] + data
    assert b"authenticate first" in received
    assert len(bus.front.admission_control) == 0


def test_flood_of_refusals_is_a_few_lines(bus: BusThread) -> None:
    bus.front.admission_control._refusals.clear()
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client:
            assert ask(client, "").startswith(b"HTTP/1.1 401 ")
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client:
            client.sendall(AMQP_HEADER + frame(0x10, "out of place"))
            assert client.recv(8) == AMQP_HEADER
            client.recv(65_536)
    for _ in range(50):
        websocket = WebSocketClient(bus.port)
        websocket.socket.sendall(b"\xff\xff")
        assert websocket.close_code() == 1002
        websocket.close()
    assert len(bus.log.records) <= LOGGED_REFUSALS + 1
    assert bus.log.records[-1].getMessage() == "many requests of an unauthenticated client refused"
    with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client:
        for _ in range(3):
            assert ask(client, token_of(bus)).startswith(b"HTTP/1.1 404 ")
    assert [record.getMessage() for record in bus.log.records[-3:]] == ["refused"] * 3
