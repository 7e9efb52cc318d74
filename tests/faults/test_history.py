"""The checker of recorded histories finds each violation, and none in a good history."""

from __future__ import annotations

import pytest

from tests.faults.history import (
    Cancelled,
    Counted,
    Defined,
    Delivered,
    Died,
    Event,
    Hold,
    Left,
    Listed,
    Loaded,
    Paused,
    Result,
    Sent,
    Settled,
    StateAccess,
    Topology,
    TransactionEnded,
    check,
)

OK, NO, MAYBE = Result.ACCEPTED, Result.REFUSED, Result.UNKNOWN


def destinations(path: str, properties: object) -> list[str]:
    assert isinstance(properties, dict)
    if path == "topic":
        return ["topic/a"] + (["topic/b"] if properties.get("b") else [])
    return ["target"] if path == "source" else [path]


TOPOLOGY = Topology(
    destinations, {"q": 3}, deduplicating=frozenset({"once"}), at_most_once=frozenset({"fast"})
)


def sent(name: str = "m", path: str = "q", result: Result = OK, **fields: object) -> Sent:
    return Sent(path, name, result, 0.0, 1.0, **fields)


def got(name: str = "m", path: str = "q", at: float = 2.0, **more: object) -> Delivered:
    fields = {"sequence": 1, "count": 0, "token": "t1", "locked_until": 62.0, "enqueued": 1.0}
    return Delivered(path, name, at, **{**fields, **more})


def done(
    name: str = "m",
    path: str = "q",
    kind: str = "complete",
    result: Result = OK,
    at: float = 3.0,
    token: str = "t1",
    **fields: object,
) -> Settled:
    return Settled(path, name, token, kind, result, at, at + 0.1, **fields)


def left(name: str = "m", path: str = "q", place: str = "active", **fields: object) -> Left:
    return Left(path, place, name, **{"sequence": 1, "count": 0, **fields})


GOOD: dict[str, list[Event]] = {
    "completed": [sent(), got(), done()],
    "left": [sent(), left(), Counted("q", "active", 1)],
    "refused": [sent(result=NO)],
    "unknown and there": [sent(result=MAYBE), left()],
    "unknown and not there": [sent(result=MAYBE)],
    "completion unknown": [sent(), got(), done(result=MAYBE)],
    "again after an abandon": [
        sent(),
        got(),
        done(kind="abandon"),
        got(at=4.0, count=1, token="u"),
        left(count=1),
    ],
    "again after a death": [sent(), got(), Died(3.0), got(at=4.0, token="u"), left()],
    "published": [sent(path="topic"), left(path="topic/a")],
    "published twice": [
        sent(path="topic", properties={"b": 1}),
        left(path="topic/a"),
        left(path="topic/b"),
    ],
    "forwarded": [sent(path="source"), left(path="target")],
    "not forwarded": [sent(path="source"), left(path="source", place="transfer")],
    "a duplicate": [sent(path="once"), sent(path="once"), left(path="once")],
    "expired": [sent(ttl_s=1.0)],
    "cancelled": [sent(due=9.0), Cancelled("q", "m", OK)],
    "rolled back": [sent(transaction="t"), TransactionEnded("t", NO)],
    "committed": [sent(transaction="t"), TransactionEnded("t", OK), left()],
    "lost on the way": [sent(path="fast")],
    "a state": [StateAccess("q", "s", 1.0, b"a", OK), StateAccess("q", "s", 2.0, b"a")],
    "a state nobody knows of": [
        StateAccess("q", "s", 1.0, b"a", MAYBE),
        StateAccess("q", "s", 2.0, b""),
    ],
    "taken over": [
        Loaded("q", 0.5, "one", 1),
        sent(),
        got(by="one"),
        Loaded("q", 3.0, "two", 2),
        got(at=3.5, token="u", by="two", count=1),
        left(),
    ],
    "paused in a load, and another one took over": [
        Paused("one", 0.2, 3.2),
        Loaded("q", 3.5, "one", 1),
        Loaded("q", 3.0, "two", 2),
        sent(),
        got(at=4.0, by="two"),
        left(),
    ],
    "a queue that was deleted": [
        Defined("q", False, OK),
        sent(),
        Defined("q", True, MAYBE),
    ],
    "a queue that was created": [Defined("q", False, OK), Listed("q")],
    "a session in order": [
        sent("a", session="s"),
        sent("b", session="s"),
        Hold(1, "q", "s", 1.0, 9.0),
        got("a", hold=1),
        got("b", hold=1, sequence=2, token="t2", at=2.1),
        done("a"),
        done("b", token="t2"),
    ],
}

BAD: dict[str, tuple[str, list[Event]]] = {
    "lost": ("I1", [sent()]),
    "one copy lost": ("I1", [sent(path="topic", properties={"b": 1}), left(path="topic/a")]),
    "lost on the way to the target": ("I1", [sent(path="source")]),
    "lost with its transaction": ("I1", [sent(transaction="t"), TransactionEnded("t", OK)]),
    "back after completion": ("I2", [sent(), got(), done(), got(at=9.0, token="u", count=1)]),
    "left after completion": ("I2", [sent(), got(), done(), left()]),
    "two holders": ("I3", [sent(), got(), got(at=9.0, token="u", count=1), left()]),
    "stale token": (
        "I4",
        [sent(), got(locked_until=3.0), got(at=4.0, token="u", count=1), done(at=9.0)],
    ),
    "two places": ("I5", [sent(), left(), left(place="dead-letter", reason="x")]),
    "two numbers": ("I5", [sent(), got(), done(), left(sequence=7)]),
    "a duplicate kept": (
        "I7",
        [sent(path="once"), sent(path="once"), got(path="once"), left(path="once", sequence=2)],
    ),
    "overtaken in a session": (
        "I6",
        [
            sent("a", session="s"),
            sent("b", session="s"),
            got("b", hold=1, sequence=2, token="t2", at=5.0),
            got("a", hold=1, at=6.0),
            left("a"),
            left("b", sequence=2),
        ],
    ),
    "a session held twice": ("I6", [Hold(1, "q", "s", 1.0, 9.0), Hold(2, "q", "s", 3.0, 9.0)]),
    "a state lost": (
        "I6",
        [StateAccess("q", "s", 1.0, b"a", OK), StateAccess("q", "s", 2.0, b"")],
    ),
    "too often": ("I8", [sent(), got(count=3), left()]),
    "a count that falls": (
        "I8",
        [sent(), got(count=2), done(kind="abandon"), got(at=4.0, count=1, token="u"), left()],
    ),
    "a wrong reason": (
        "I9",
        [sent(), left(place="dead-letter", reason="TTLExpiredException")],
    ),
    "an early death": (
        "I9",
        [sent(), left(place="dead-letter", reason="MaxDeliveryCountExceeded", count=1)],
    ),
    "expired and delivered": ("I10", [sent(ttl_s=1.0), got(at=9.0), left()]),
    "too early": ("I11", [sent(due=30.0), got(at=9.0), left()]),
    "cancelled and delivered": (
        "I11",
        [sent(due=1.0), Cancelled("q", "m", OK), got(at=9.0), left()],
    ),
    "deferred and delivered": (
        "I12",
        [sent(), got(), done(kind="defer"), got(at=9.0, token="u", count=1), left()],
    ),
    "half a transaction": (
        "I13",
        [
            sent("a", transaction="t"),
            sent("b", transaction="t"),
            left("a"),
            TransactionEnded("t", MAYBE),
        ],
    ),
    "stored and rolled back": (
        "I13",
        [sent(transaction="t"), TransactionEnded("t", NO), left()],
    ),
    "at the wrong subscription": (
        "I14",
        [sent(path="topic"), left(path="topic/a"), left(path="topic/b")],
    ),
    "refused and there": ("I14", [sent(result=NO), left()]),
    "one number for two": ("I15", [sent("a"), sent("b"), got("a"), got("b"), left("a"), left("b")]),
    "deleted and received again": (
        "I16",
        [sent(path="fast"), got(path="fast", token=""), got(path="fast", token="", at=2.5)],
    ),
    "delivered by a former owner": (
        "I19",
        [
            Loaded("q", 0.5, "one", 1),
            sent(),
            Loaded("q", 3.0, "two", 2),
            got(at=4.0, by="one"),
            left(),
        ],
    ),
    "loaded after it was taken": (
        "I19",
        [Loaded("q", 3.5, "one", 1), Loaded("q", 3.0, "two", 2)],
    ),
    "loaded long after a pause": (
        "I19",
        [Paused("one", 2.0, 3.2), Loaded("q", 9.0, "one", 1), Loaded("q", 3.0, "two", 2)],
    ),
    "loaded while another one was paused": (
        "I19",
        [Paused("two", 2.0, 3.2), Loaded("q", 3.5, "one", 1), Loaded("q", 3.0, "two", 2)],
    ),
    "paused in a load, and delivered after it": (
        "I19",
        [
            Paused("one", 0.2, 3.2),
            Loaded("q", 3.5, "one", 1),
            Loaded("q", 3.0, "two", 2),
            sent(),
            got(at=4.0, by="one"),
            left(),
        ],
    ),
    "two holders after a takeover": (
        "I3",
        [
            sent(),
            Loaded("q", 3.0, "two", 2),
            got(at=9.0, by="two"),
            got(at=15.0, token="u", count=1, by="two"),
            left(),
        ],
    ),
    "a queue lost": ("I20", [Defined("q", False, OK)]),
    "a queue that came back": (
        "I20",
        [Defined("q", False, OK), Defined("q", True, OK), Listed("q")],
    ),
    "miscounted": ("I18", [sent(), left(), Counted("q", "active", 2)]),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_has_no_violation(name: str) -> None:
    assert check(GOOD[name], TOPOLOGY) == []


@pytest.mark.parametrize("name", BAD)
def test_each_invariant_is_found_broken(name: str) -> None:
    invariant, events = BAD[name]
    assert invariant in {violation.invariant for violation in check(events, TOPOLOGY)}
