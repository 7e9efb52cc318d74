"""The end of a session's lock, as links of both receive modes see it at the socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from postbus.edge.amqp import session_links
from postbus.message.codec import Described, Symbol, Ulong
from tests.edge.amqp.test_session_completions import of_session
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import ATTACH, DETACH, TRANSFER, Frame, RawClient

SETTLED, UNSETTLED = 1, 0


@pytest.fixture
def raw(bus: BusThread) -> Iterator[RawClient]:
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as client:
        yield client


def accept(raw: RawClient, queue: str, handle: int, mode: int) -> Frame:
    """Ask for the session `s`; return the answer to the attach."""
    filters = {Symbol("com.microsoft:session-filter"): Described(Ulong(0x137000000C), "s")}
    return raw.attach_receiver(queue, handle, mode=mode, filters=filters)


@pytest.fixture
def queue(bus: BusThread, raw: RawClient) -> str:
    """A queue with one message in a session."""
    name = bus.queue(requires_session=True, lock_duration_ms=5_000)
    raw.attach_sender(name)
    raw.write(raw.transfer(0, of_session("s", b"x")))
    raw.dispositions(1)
    return name


def test_a_link_that_holds_no_lock_of_a_message_may_detach_by_itself(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session_links.GRACE_S == 2
    monkeypatch.setattr(session_links, "GRACE_S", 0.2)
    assert accept(raw, queue, 1, SETTLED).fields[5] is not None
    raw.write(raw.flow(5))
    raw.expect(TRANSFER)
    bus.advance(5_001)
    # The lock has no grace: another link of the same connection gets the session.
    attached = accept(raw, queue, 2, SETTLED)
    assert (attached.code, attached.fields[5] is not None) == (ATTACH, True)
    raw.write(raw.transfer(1, of_session("s", b"y")))
    raw.dispositions(1)
    assert bus.counts(queue).active == 1  # the first link is not given it, with all its credit
    detached = raw.expect(DETACH)
    assert detached.fields[0] == 1
    assert str(detached.fields[2].value[0]) == "com.microsoft:session-lock-lost"
    raw.write(raw.flow(5, handle=2))
    assert raw.expect(TRANSFER).fields[0] == 2  # the session is still the other link's


def test_a_link_with_lost_locks_is_detached_at_once(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_links, "GRACE_S", 60)
    assert accept(raw, queue, 1, UNSETTLED).fields[5] is not None
    bus.advance(5_001)
    detached = raw.expect(DETACH)
    assert str(detached.fields[2].value[0]) == "com.microsoft:session-lock-lost"
