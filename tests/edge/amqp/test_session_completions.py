"""Completions that arrive together, of several links or in any order, seen at the socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from postbus.entity.commands import Command, CompleteSessions, Disposition, Settle, SubQueue
from postbus.message.codec import Described, Symbol, Uint, Ulong, encode_value
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import (
    ACCEPTED,
    DETACH,
    DISPOSITION,
    REJECTED,
    RELEASED,
    TRANSFER,
    RawClient,
    described,
    frame,
    message,
)

ROOT = RULES[0]


@pytest.fixture
def raw(bus: BusThread) -> Iterator[RawClient]:
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        yield client


def settlement(delivery_id: int, outcome: int = ACCEPTED) -> bytes:
    return frame(DISPOSITION, True, Uint(delivery_id), Uint(delivery_id), False, described(outcome))


def of_session(session: str, body: bytes) -> bytes:
    properties = described(0x73, *[None] * 10, session)
    return encode_value(properties) + message(body)


def accept(raw: RawClient, queue: str, session: str, handle: int, credit: int) -> dict[bytes, int]:
    """Take a session on a link of its own and receive; return body -> delivery id."""
    wanted = Described(Ulong(0x137000000C), session)
    filters = {Symbol("com.microsoft:session-filter"): wanted}
    assert raw.attach_receiver(queue, handle, mode=0, filters=filters).fields[5] is not None
    raw.write(raw.flow(credit, handle=handle))
    transfers = [raw.expect(TRANSFER) for _ in range(credit)]
    return {each.payload[-1:]: int(each.fields[1]) for each in transfers}


class Watched:
    """Which commands the bus was given."""

    def __init__(self, bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[Command] = []
        submit = bus.router.submit

        def watch(partition_id: int, command: Command, on_reply: object = None) -> None:
            self.commands.append(command)
            submit(partition_id, command, on_reply)  # type: ignore[arg-type]

        monkeypatch.setattr(bus.router, "submit", watch)

    def count(self, kind: type[Command]) -> int:
        return sum(isinstance(each, kind) for each in self.commands)


@pytest.fixture
def held(bus: BusThread, raw: RawClient) -> tuple[str, dict[bytes, int], dict[bytes, int]]:
    """A queue of two sessions, two messages in each, received on two links of one connection."""
    queue = bus.queue(requires_session=True)
    raw.attach_sender(queue)
    sent = [("s", b"a"), ("t", b"b"), ("s", b"c"), ("t", b"d")]
    raw.write(*[raw.transfer(n, of_session(*each)) for n, each in enumerate(sent)])
    raw.dispositions(4)
    return queue, accept(raw, queue, "s", 1, 2), accept(raw, queue, "t", 2, 2)


def test_completions_of_several_links_are_one_command(
    bus: BusThread,
    raw: RawClient,
    held: tuple[str, dict[bytes, int], dict[bytes, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, first, second = held
    watched = Watched(bus, monkeypatch)
    ids = [first[b"a"], second[b"b"], first[b"c"], second[b"d"]]
    raw.write(*[settlement(each) for each in ids])
    assert raw.dispositions(4) == dict.fromkeys(ids, ACCEPTED)
    assert (watched.count(CompleteSessions), watched.count(Settle)) == (1, 0)
    assert bus.counts(queue).active == 0
    (connection,) = [each._connection for each in bus.listener._connections]
    assert connection is not None
    assert connection.unanswered_count == 0


def test_lost_completions_are_refused_alone(
    bus: BusThread, raw: RawClient, held: tuple[str, dict[bytes, int], dict[bytes, int]]
) -> None:
    queue, first, second = held
    (connection,) = [each._connection for each in bus.listener._connections]
    assert connection is not None
    endpoint: Any
    ((entity_no, _), endpoint), _ = connection.sessions._holders.items()
    (token, _) = [
        tag for link, tag in endpoint._link.session.unsettled.values() if link is endpoint._link
    ]

    async def complete_behind_its_back() -> None:
        command = Settle(entity_no, SubQueue.ACTIVE, [token], Disposition.COMPLETE, session_id=b"s")
        bus.router.submit(endpoint.place[0], command)

    bus.run(complete_behind_its_back())
    ids = [*second.values(), *first.values()]
    raw.write(*[settlement(each) for each in ids])
    expected = dict.fromkeys(ids, ACCEPTED) | {first[b"a"]: REJECTED}
    assert raw.dispositions(4) == expected
    assert bus.counts(queue).active == 0


def test_completions_that_could_not_be_stored_are_repeated(
    bus: BusThread,
    raw: RawClient,
    held: tuple[str, dict[bytes, int], dict[bytes, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client cannot take a settlement back: the broker repeats it, each link its own."""
    queue, first, second = held
    bus.refuse_next(monkeypatch, "not-applied", CompleteSessions)
    ids = [*first.values(), *second.values()]
    raw.write(*[settlement(each) for each in ids])
    assert raw.dispositions(4) == dict.fromkeys(ids, ACCEPTED)
    assert bus.counts(queue).active == 0


def test_completions_of_a_partition_that_was_reloaded_are_lost(
    bus: BusThread,
    raw: RawClient,
    held: tuple[str, dict[bytes, int], dict[bytes, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, first, second = held
    bus.refuse_next(monkeypatch, "unknown", CompleteSessions)
    ids = [*first.values(), *second.values()]
    raw.write(*[settlement(each) for each in ids])
    assert raw.dispositions(4) == dict.fromkeys(ids, REJECTED)
    assert bus.counts(queue).active == 4


def test_a_completion_comes_before_the_detach_behind_it(
    bus: BusThread, raw: RawClient, held: tuple[str, dict[bytes, int], dict[bytes, int]]
) -> None:
    """Messages completed before the session was released are completed."""
    queue, first, second = held
    raw.write(
        settlement(first[b"a"]),
        settlement(second[b"b"]),
        frame(DETACH, Uint(1), True),
        settlement(second[b"d"], RELEASED),
    )
    raw.expect(DETACH)
    assert raw.dispositions(2) == {second[b"b"]: ACCEPTED, second[b"d"]: RELEASED}
    assert bus.counts(queue).active == 2


def test_completions_in_any_order_are_answered_correctly(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    """The count of ids between first and last does not prove that they are consecutive."""
    raw.attach_sender(queue)
    raw.write(*[raw.transfer(n, message(b"m")) for n in range(5)])
    raw.dispositions(5)
    raw.attach_receiver(queue)
    raw.write(raw.flow(5))
    ids = [int(raw.expect(TRANSFER).fields[1]) for _ in range(5)]
    settled = [ids[0], ids[4], ids[2]]
    raw.write(*[settlement(each) for each in settled])
    assert raw.dispositions(3) == dict.fromkeys(settled, ACCEPTED)
    rest = [ids[3], ids[1]]
    raw.write(*[settlement(each) for each in rest])
    assert raw.dispositions(2) == dict.fromkeys(rest, ACCEPTED)
    assert bus.counts(queue).active == 0
