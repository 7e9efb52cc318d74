"""Connections without a key are bounded and give way; those with one stay, through every door."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from postbus.broker.access.authz import NEVER_S, Grant
from postbus.contract.entities import Right
from postbus.edge.access.bursts import QUIET_S
from postbus.edge.access.unauthenticated import (
    PATIENCE_S,
    TOLD_REFUSALS,
    Stranger,
    Strangers,
)
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
def strangers(clock: Clock) -> Strangers:
    return Strangers(clock, most=10, most_of_address=5)


def grant(rule: str = "root") -> Grant:
    return Grant("", frozenset(Right), rule, NEVER_S)


def admit(
    strangers: Strangers, address: str = CROWD, count: int = 1, *, is_full: bool = False
) -> list[Stranger]:
    """Return those that were let in, of some that dial."""
    found = [strangers.admit(address, is_full=is_full) for _ in range(count)]
    return [each for each in found if each is not None]


def cuts(found: list[Stranger]) -> list[int]:
    """Return a list of which of them are cut, as it grows."""
    cut: list[int] = []
    for number, each in enumerate(found):
        each.hold(each, lambda number=number: cut.append(number))  # type: ignore[misc]
    return cut


def test_one_address_has_a_part_of_the_strangers(strangers: Strangers) -> None:
    assert len(admit(strangers, CROWD, 20)) == 5
    assert len(admit(strangers, OTHER, 20)) == 5
    assert len(strangers) == 10


def test_an_address_of_many_clients_that_show_keys_is_not_bounded(strangers: Strangers) -> None:
    for _ in range(100):
        together = admit(strangers, CROWD, 5)
        assert len(together) == 5
        for each in together:
            assert each.show_key(grant())
    assert len(strangers) == strangers.cut_count == 0


def test_small_house_has_room_for_fewer() -> None:
    strangers = Strangers.within(1_000)
    assert len(admit(strangers, CROWD, 1_000)) == 200
    assert len(admit(strangers, OTHER, 1_000)) == 200
    strangers = Strangers.within(5_000)
    assert len(admit(strangers, CROWD, 5_000)) == 1_000


def test_who_takes_long_gives_way_to_others_of_its_address(
    strangers: Strangers, clock: Clock
) -> None:
    first = admit(strangers, CROWD, 5)
    cut = cuts(first)
    clock.now_s += PATIENCE_S - 1
    assert admit(strangers) == []
    clock.now_s += 1
    assert len(admit(strangers, CROWD, 9)) == 5
    assert cut == [0, 1, 2, 3, 4]
    assert (len(strangers), strangers.cut_count) == (5, 5)


def test_crowd_gives_way_to_other_addresses_at_once(clock: Clock) -> None:
    strangers = Strangers(clock, most=6, most_of_address=5)
    cut = cuts(admit(strangers, CROWD, 5))
    assert len(admit(strangers, OTHER, 2)) == 2
    assert cut == [0]
    assert len(admit(strangers, OTHER, 9)) == 1  # until they are as many
    assert cut == [0, 1]


def test_of_many_addresses_the_oldest_goes_when_it_had_its_time(
    strangers: Strangers, clock: Clock
) -> None:
    each_its_own = [admit(strangers, f"198.51.100.{number}")[0] for number in range(10)]
    cut = cuts(each_its_own)
    assert admit(strangers, OTHER) == []
    clock.now_s += PATIENCE_S
    assert len(admit(strangers, OTHER)) == 1
    assert cut == [0]


def test_full_house_has_room_for_as_long_as_it_has_strangers(
    strangers: Strangers, clock: Clock
) -> None:
    cut = cuts(admit(strangers, CROWD, 2))
    assert len(admit(strangers, OTHER, is_full=True)) == 1
    assert cut == [0]
    for each in list(strangers._all):
        assert each.show_key(grant())
    assert admit(strangers, OTHER, is_full=True) == []


def test_log_hears_once_of_a_crowd(
    strangers: Strangers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        admit(strangers, CROWD, 10)
        clock.now_s += 1
    assert [record.getMessage() for record in caplog.records] == [
        "too many connections without a key"
    ]
    assert vars(caplog.records[0])["address"] == CROWD
    clock.now_s += QUIET_S
    admit(strangers, CROWD, 10)
    assert len(caplog.records) == 2


def test_refusals_of_strangers_are_summed_up(
    strangers: Strangers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (stranger,) = admit(strangers)
    told = [stranger.is_refusal_told() for _ in range(1_000)]
    assert told.count(True) == TOLD_REFUSALS
    assert all(told[:TOLD_REFUSALS])
    assert [vars(record)["refused"] for record in caplog.records] == [100, 1_000]
    assert admit(strangers, OTHER)[0].is_refusal_told()
    clock.now_s += QUIET_S
    assert stranger.is_refusal_told()


def test_refusals_with_a_key_are_summed_up_above_some_a_second(
    strangers: Strangers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (one, other) = admit(strangers, CROWD, 2)
    assert one.show_key(grant("one"))
    assert other.show_key(grant("other"))
    for _ in range(3):
        assert [one.is_refusal_told() for _ in range(400)].count(True) == 20
        assert other.is_refusal_told()  # in the same second
        clock.now_s += 1
    assert [vars(record)["refused_more"] for record in caplog.records] == [1, 10, 100, 1_000]
    assert {vars(record)["rule"] for record in caplog.records} == {"one"}


def test_key_has_a_share_of_all_connections(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    strangers = Strangers(clock, max_connections=100)
    together = admit(strangers, CROWD, 100)
    assert [each.show_key(grant("greedy")) for each in together].count(True) == 80
    assert [each.show_key(grant("later")) for each in admit(strangers, OTHER, 20)].count(True) == 16
    assert [vars(record)["refused"] for record in caplog.records] == [1, 10, 1]
    gone = together[0]
    gone.hold(gone, lambda: None)
    gone.release(gone)
    gone.release(gone)
    assert strangers.of_keys.of("greedy") == 79
    assert not together[-1].show_key(grant("greedy"))  # another key has come meanwhile
    assert together[-1].account == ""
    assert admit(strangers, OTHER)[0].show_key(grant("third"))


def test_table_of_refusals_is_bounded(
    strangers: Strangers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.edge.access.bursts.MAX_SOURCES", 10)
    for number in range(100):
        strangers.note_refusal(f"198.51.100.{number}")
    assert len(strangers._refusals) == 10


def test_connection_that_is_handed_over_stays_a_stranger(strangers: Strangers) -> None:
    (stranger,) = admit(strangers)
    stranger.hold("first", lambda: None)
    stranger.hold("second", lambda: None)
    stranger.release("first")
    assert len(strangers) == 1
    stranger.release("second")
    stranger.release("second")
    assert len(strangers) == 0


# --- the doors ----------------------------------------------------------------------------------


def test_silent_clients_give_way(runner: asyncio.Runner) -> None:
    """Whatever door they are at: nobody knows yet, AMQP, HTTP."""
    clock = Clock()

    async def run() -> None:
        async with front(max_connections=3, strangers=Strangers(clock)) as listeners:
            port = await listeners.listen(HOST, 0)
            kept = [await asyncio.open_connection(HOST, port) for _ in range(3)]
            for (reader, writer), first in zip(
                kept, (b"A", AMQP_HEADER, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"), strict=True
            ):
                writer.write(first)
                if len(first) > 1:
                    assert await reader.read(1)
            assert len(listeners.strangers) == 3
            clock.now_s += PATIENCE_S
            others = [await asyncio.open_connection(HOST, port) for _ in range(3)]
            for (reader, writer), _ in zip(kept, others, strict=True):
                assert await hangs_up(reader)
                writer.close()
            assert listeners.strangers.cut_count == 3
            for _, writer in others:
                writer.close()
            await wait_until(lambda: listeners.connection_count == len(listeners.strangers) == 0)
            assert await answers_http(port)

    runner.run(run())


@pytest.fixture
def crowded(bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return what lets strangers take all the room of the bus."""
    clock = Clock()
    monkeypatch.setattr(bus.front.strangers, "now_s", clock)
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


def test_clients_with_a_key_find_room_and_keep_it(
    bus: BusThread, crowded: Callable[[], None]
) -> None:
    before = bus.front.strangers.cut_count
    with (
        RawClient(bus.port, ROOT.name, ROOT.keys.primary) as amqp,
        socket.create_connection(("127.0.0.1", bus.port), timeout=10) as http,
        ExitStack() as clients,
    ):
        assert ask(http, token_of(bus)).startswith(b"HTTP/1.1 404 ")
        websocket = RawClient(0, ROOT.name, ROOT.keys.primary, stream=WebSocketClient(bus.port))
        assert len(bus.front.strangers) == 0
        crowded()
        for _ in range(3):  # each of them takes the place of one of the crowd
            client = RawClient(bus.port, ROOT.name, ROOT.keys.primary)
            assert client.outcome == 0
            clients.enter_context(client)
        assert bus.front.strangers.cut_count == before + 3
        assert len(bus.front.strangers) == 0
        assert ask(http, token_of(bus)).startswith(b"HTTP/1.1 404 ")
        queue = bus.queue()
        for each in (amqp, websocket):
            assert each.attach_sender(queue).fields[6] is not None
        websocket.socket.close()


@pytest.mark.parametrize("kind", ["links", "sessions", "requests"])
def test_stranger_fills_no_memory(bus: BusThread, kind: str) -> None:
    """However it tries: names of links, sessions, requests that do not end."""
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
            + frame(OPEN, "stranger", "here")
            + frame(BEGIN, None, Uint(0), Uint(5_000), Uint(5_000))
        )
        with suppress(ConnectionError):
            for each in {"links": links, "sessions": sessions, "requests": [link, *more]}[kind]:
                client.sendall(each)
        said = b""
        with suppress(ConnectionError):
            while data := client.recv(1 << 20):
                said = said[-1_000:] + data
    assert b"authenticate first" in said
    assert len(bus.front.strangers) == 0


def test_flood_of_refusals_is_a_few_lines(bus: BusThread) -> None:
    bus.front.strangers._refusals.clear()
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
    assert len(bus.log.records) <= TOLD_REFUSALS + 1
    assert bus.log.records[-1].getMessage() == "much is refused to a client without a key"
    with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client:
        for _ in range(3):
            assert ask(client, token_of(bus)).startswith(b"HTTP/1.1 404 ")
    assert [record.getMessage() for record in bus.log.records[-3:]] == ["refused"] * 3
