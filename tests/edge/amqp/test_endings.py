"""Links of disconnected clients are taken down over several iterations of the event loop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Any, cast

import pytest

from postbus.edge.amqp import listener
from postbus.edge.amqp.endings import LINKS_A_ROUND, Endings
from tests.edge.amqp.test_links import wait_until
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import RawClient

RULE = RULES[0]


class Gone:
    """A connection that is over."""

    def __init__(self, link_count: int) -> None:
        self.link_count = link_count
        self.rounds: list[int] = []

    def take_down(self, most: int) -> int:
        taken = min(most, self.link_count)
        self.link_count -= taken
        self.rounds.append(taken)
        return taken


async def next_round() -> None:
    await asyncio.sleep(0)


def ended(endings: Endings, *link_counts: int) -> list[Gone]:
    found = [Gone(each) for each in link_counts]
    for each in found:
        endings.add(cast(Any, each))
    return found


async def test_small_connections_are_taken_down_at_once() -> None:
    found = ended(Endings(), *[2] * 20)
    assert [each.link_count for each in found] == [0] * 20


async def test_an_iteration_takes_down_a_few_links_of_all_connections_together() -> None:
    first, second, third = ended(Endings(), LINKS_A_ROUND + 50, LINKS_A_ROUND, 3)
    assert (first.link_count, second.link_count, third.link_count) == (50, LINKS_A_ROUND, 3)
    await next_round()
    assert (first.link_count, second.link_count, third.link_count) == (0, 50, 3)
    await next_round()
    assert (second.link_count, third.link_count) == (0, 0)


async def test_each_iteration_has_its_own_limit() -> None:
    endings = Endings()
    ended(endings, LINKS_A_ROUND)
    await next_round()
    (later,) = ended(endings, LINKS_A_ROUND)
    assert later.link_count == 0


async def test_connections_without_links_count_too() -> None:
    found = ended(Endings(), *[0] * (LINKS_A_ROUND + 1))
    assert [each.rounds for each in found[-2:]] == [[0], []]
    await next_round()
    assert found[-1].rounds == [0]


@pytest.mark.slow
def test_all_links_of_a_disconnected_client_are_taken_down(bus: BusThread, queue: str) -> None:
    client = RawClient(bus.port, RULE.name, RULE.keys.primary)
    for handle in range(0, 1_000, 2):
        client.attach_sender(queue, handle)
        client.attach_receiver(queue, handle + 1)
    there = [each.connection for each in bus.listener._connections if each.connection is not None]
    connection = max(there, key=lambda each: each.link_count)
    assert connection.link_count == 1_000
    client.socket.close()
    wait_until(bus, lambda: connection.link_count == 0)
    wait_until(bus, lambda: bus.listener.inflight.links.used == 0)
    assert connection.engine.link_count == 0
    with RawClient(bus.port, RULE.name, RULE.keys.primary) as other:
        assert other.attach_sender(queue).fields[6] is not None


@pytest.mark.slow
def test_few_connections_are_described_at_once_where_they_have_many_links(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LINKS_OF_PAGE", 10)
    wait_until(bus, lambda: not bus.listener.connection_count)  # those of the test before go
    with ExitStack() as clients:
        for _ in range(3):
            client = RawClient(bus.port, RULE.name, RULE.keys.primary)
            clients.enter_context(client)
            for handle in range(6):
                client.attach_sender(queue, handle)

        async def page(skip: int) -> tuple[int, int]:
            found, count = bus.listener.described(skip, 100)
            assert all(len(each.links) == 6 for each in found)
            return len(found), count

        assert bus.run(page(0)) == (2, 3)
        assert bus.run(page(2)) == (1, 3)


@pytest.mark.slow
def test_unauthenticated_clients_are_closed_in_time(
    bus: BusThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Authenticated connections are checked each 15 s, others each second."""
    monkeypatch.setattr(listener, "UNAUTHENTICATED_MS", 2_500)
    with socket.create_connection(("127.0.0.1", bus.port), timeout=8) as client:
        client.sendall(b"AMQP\x03\x01\x00\x00")
        received = b"".join(iter(lambda: client.recv(65_536), b""))
    assert received.startswith(b"AMQP\x03")  # and then the end of the stream, within the timeout
