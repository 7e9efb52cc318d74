"""The record of every message of a run with faults, and the check against the promises of the bus.

A driver records the observations of clients; `check` compares the record with the promises: nothing
accepted is lost or doubled, locks and sessions have one holder, transactions are atomic, every copy
of a publish arrives once, deadlines hold. Times are seconds of one clock. A lost answer is
`Result.UNKNOWN`: then both results are allowed, but one of them completely.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

SKEW_S = 2.0
"""Largest difference between the time of an event in the broker and in the record."""

OWNER_SKEW_S = 0.5
LOAD_S = 5.0
"""Longest time that a load takes after the pause of its process."""
"""The same between the clocks of two brokers on one machine."""


class Result(Enum):
    """Result of a request for the client."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Sent:
    """A message sent to an entity. Only entities that detect duplicates get an `id` again."""

    path: str
    id: str
    result: Result
    started: float
    ended: float
    session: str | None = None
    due: float | None = None
    ttl_s: float | None = None
    transaction: str | None = None
    properties: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message that reached a client. `token` "" is receive-and-delete; `by_number`: deferred."""

    path: str
    id: str
    at: float
    sequence: int
    count: int
    token: str
    locked_until: float = 0.0
    enqueued: float = 0.0
    hold: int | None = None
    by_number: bool = False
    by: str = ""
    """Broker that delivered it, of several."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A settlement of one delivery. `kind`: complete, abandon, defer or dead-letter."""

    path: str
    id: str
    token: str
    kind: str
    result: Result
    started: float
    ended: float
    transaction: str | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """A session held by one receiver; `ended` is when it was released or found lost."""

    number: int
    path: str
    session: str
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class StateAccess:
    """A write (with its `result`) or a read of a session's state."""

    path: str
    session: str
    at: float
    value: bytes
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    path: str
    id: str
    result: Result


@dataclass(frozen=True, slots=True)
class TransactionEnded:
    name: str
    result: Result


@dataclass(frozen=True, slots=True)
class Died:
    """Broker or store were killed: locks and sessions are gone."""

    at: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A broker loaded the partition of an entity, in an epoch: all locks are released."""

    path: str
    at: float
    by: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Paused:
    """A broker stood still, and may have been in the middle of a load."""

    by: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Defined:
    """An entity was created or deleted. Each generation of a name has its own `path`."""

    path: str
    is_deleted: bool
    result: Result


@dataclass(frozen=True, slots=True)
class Listed:
    """An entity that is defined at the end."""

    path: str


@dataclass(frozen=True, slots=True)
class Left:
    """A message at the end. `place`: active, deferred, scheduled, dead-letter or transfer."""

    path: str
    place: str
    id: str
    sequence: int
    count: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of messages that the broker reports at the end."""

    path: str
    place: str
    count: int


Event = (
    Sent
    | Delivered
    | Settled
    | Hold
    | StateAccess
    | Cancelled
    | TransactionEnded
    | Died
    | Loaded
    | Paused
    | Defined
    | Listed
    | Left
    | Counted
)


@dataclass
class Topology:
    """The destinations of messages, and the properties of entities.

    `destinations(path, properties)` returns all entities that get a message sent to `path`.
    Paths in `deduplicating` store an id once, those in `at_most_once` are read with
    receive-and-delete, which loses messages in transit with the connection. With `lock_s`, the lock
    duration, the locks show when the broker delivered the messages.
    """

    destinations: Callable[[str, Mapping[str, object]], Iterable[str]]
    max_delivery_count: Mapping[str, int]
    deduplicating: frozenset[str] = frozenset()
    at_most_once: frozenset[str] = frozenset()
    lock_s: float | None = None


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken invariant: number, place and description; docs/faults.md explains the numbers."""

    invariant: str
    path: str
    id: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.path} {self.id}: {self.what}"


FROM_ABSENCE = frozenset({"I1", "I13", "I20"})
"""Invariants that are violated by what is not found at the end. An unseen place violates none."""

Key = tuple[str, str]


class History:
    """The record, indexed for the checks."""

    def __init__(self, events: Iterable[Event], topology: Topology) -> None:
        self.topology = topology
        self.sent: list[Sent] = []
        self.delivered: dict[Key, list[Delivered]] = defaultdict(list)
        self.settled: dict[Key, list[Settled]] = defaultdict(list)
        self.left: dict[Key, list[Left]] = defaultdict(list)
        self.holds: dict[Key, list[Hold]] = defaultdict(list)
        self.states: dict[Key, list[StateAccess]] = defaultdict(list)
        self.cancelled: dict[Key, Result] = {}
        self.transactions: dict[str, Result] = {}
        self.deaths: list[float] = []
        self.counted: list[Counted] = []
        self.loads: dict[str, list[Loaded]] = defaultdict(list)
        self.pauses: list[Paused] = []
        self.defined: dict[str, list[Defined]] = defaultdict(list)
        self.listed: set[str] = set()
        for event in events:
            self._sort(event)
        self.deaths.sort()
        for loads in self.loads.values():
            loads.sort(key=lambda load: load.epoch)
        for delivered in self.delivered.values():
            delivered.sort(key=lambda each: each.at)
        for states in self.states.values():
            states.sort(key=lambda each: each.at)

    def _sort(self, event: Event) -> None:
        match event:
            case Sent():
                self.sent.append(event)
            case Delivered(path, name):
                self.delivered[path, name].append(event)
            case Settled(path, name):
                self.settled[path, name].append(event)
            case Left(path, _, name):
                self.left[path, name].append(event)
            case Hold(_, path, session):
                self.holds[path, session].append(event)
            case StateAccess(path, session):
                self.states[path, session].append(event)
            case Cancelled(path, name, result):
                self.cancelled[path, name] = result
            case TransactionEnded(name, result):
                self.transactions[name] = result
            case Died(at):
                self.deaths.append(at)
            case Loaded(path):
                self.loads[path].append(event)
            case Paused():
                self.pauses.append(event)
            case Defined(path):
                self.defined[path].append(event)
            case Listed(path):
                self.listed.add(path)
            case Counted():
                self.counted.append(event)

    def was_paused(self, load: Loaded, at: float) -> bool:
        """Return whether the broker of a load was paused at a moment, and woke up in the load."""
        return any(
            each.by == load.by and each.start <= at <= each.end and load.at <= each.end + LOAD_S
            for each in self.pauses
        )

    def died_between(self, path: str, start: float, end: float) -> bool:
        """Return whether locks and sessions of an entity may have been lost."""
        moments = itertools.chain(self.deaths, (load.at for load in self.loads.get(path, ())))
        return any(start - SKEW_S <= at <= end + SKEW_S for at in moments)

    def delivered_at(self, delivered: Delivered) -> float:
        """Return the time of the delivery in the broker, from its lock if possible."""
        if self.topology.lock_s is None or not delivered.token or delivered.hold is not None:
            return delivered.at
        return delivered.locked_until - self.topology.lock_s

    def may_be_deleted(self, path: str) -> bool:
        return any(
            each.is_deleted and each.result is not Result.REFUSED
            for each in self.defined.get(path, ())
        )

    def result_of(self, event: Sent | Settled) -> Result:
        """Return the final result of a request: work in a transaction ends with it."""
        if event.transaction is None or event.result is not Result.ACCEPTED:
            return event.result
        return self.transactions.get(event.transaction, Result.UNKNOWN)

    def completions(self, key: Key) -> Iterator[tuple[Result, float, float]]:
        """Yield result, start and end of every request that removes a message."""
        for each in self.settled.get(key, ()):
            if each.kind == "complete":
                yield self.result_of(each), each.started, each.ended
        for delivered in self.delivered.get(key, ()):
            if not delivered.token:
                yield Result.ACCEPTED, delivered.at, delivered.at

    def was_seen(self, key: Key) -> bool:
        """Return whether a copy was certainly stored."""
        return key in self.delivered or key in self.left


def check(events: Iterable[Event], topology: Topology) -> list[Violation]:
    """Return all violations of the promises."""
    history = History(events, topology)
    found: list[Violation] = []
    for rule in (
        _stored,
        _transactions,
        _copies,
        _locks,
        _counts,
        _reasons,
        _deadlines,
        _sessions,
        _states,
        _numbers,
        _reported,
        _owners,
        _definitions,
    ):
        found += rule(history)
    return found


# --- where messages are ---------------------------------------------------------------------------


def _stored(history: History) -> Iterator[Violation]:
    """I1, I14, I17: every accepted message exists, at every destination."""
    for sent in history.sent:
        if history.result_of(sent) is not Result.ACCEPTED:
            continue
        if history.cancelled.get((sent.path, sent.id)) in (Result.ACCEPTED, Result.UNKNOWN):
            continue
        for path in history.topology.destinations(sent.path, sent.properties):
            key = path, sent.id
            is_gone = any(result is not Result.REFUSED for result, _, _ in history.completions(key))
            is_left = key in history.left or _is_in_transfer(history, sent)
            is_left = is_left or history.may_be_deleted(path)
            if not (is_gone or is_left or path in history.topology.at_most_once):
                if sent.ttl_s is not None:
                    continue  # it may have expired without a trace
                yield Violation("I1", path, sent.id, "accepted and nowhere")


def _is_in_transfer(history: History, sent: Sent) -> bool:
    return any(each.place == "transfer" for each in history.left.get((sent.path, sent.id), ()))


def _transactions(history: History) -> Iterator[Violation]:
    """I13: everything in a transaction happened, or nothing."""
    stored: dict[str, set[bool]] = defaultdict(set)
    for sent in history.sent:
        if sent.transaction is None or sent.result is not Result.ACCEPTED:
            continue
        paths = list(history.topology.destinations(sent.path, sent.properties))
        is_stored = any(history.was_seen((path, sent.id)) for path in paths) or _is_in_transfer(
            history, sent
        )
        stored[sent.transaction].add(is_stored)
        end = history.transactions.get(sent.transaction, Result.UNKNOWN)
        if end is Result.REFUSED and is_stored:
            yield Violation("I13", sent.path, sent.id, f"of {sent.transaction}, rolled back")
    for name, fates in stored.items():
        if len(fates) > 1:
            yield Violation("I13", "", name, "some messages are stored, others are not")


def _copies(history: History) -> Iterator[Violation]:
    """I2, I5, I7, I12, I14, I16: one copy at each destination, in one place, until completed."""
    expected: dict[Key, int] = defaultdict(int)
    for sent in history.sent:
        if history.result_of(sent) is Result.REFUSED:
            continue
        for path in history.topology.destinations(sent.path, sent.properties):
            expected[path, sent.id] += 1
        expected[sent.path, sent.id] += 0
    for key in {*history.delivered, *history.left}:
        path, name = key
        if not expected.get(key) and not _is_transfer_only(history, key):
            yield Violation("I14", path, name, "is here and was not sent here")
        left = history.left.get(key, [])
        delivered = history.delivered.get(key, [])
        numbers = {each.sequence for each in delivered} | {each.sequence for each in left}
        if len(left) > 1:
            places = ", ".join(each.place for each in left)
            yield Violation("I5", path, name, f"is in several places: {places}")
        if len(numbers) > 1:
            rule = "I7" if path in history.topology.deduplicating else "I5"
            yield Violation(rule, path, name, f"has several numbers: {sorted(numbers)}")
        completed = [
            end for result, _, end in history.completions(key) if result is Result.ACCEPTED
        ]
        if completed and left:
            yield Violation("I2", path, name, f"was completed and is left in {left[0].place}")
        for each in delivered:
            if any(end < each.at - SKEW_S for end in completed):
                yield Violation("I2", path, name, "was delivered after its completion")
        if sum(not each.token for each in delivered) > 1:
            yield Violation("I16", path, name, "was received and deleted twice")


def _is_transfer_only(history: History, key: Key) -> bool:
    left = history.left.get(key, [])
    return key not in history.delivered and all(each.place == "transfer" for each in left)


# --- locks, counts, reasons -----------------------------------------------------------------------


def _locks(history: History) -> Iterator[Violation]:
    """I3, I4: one live lock a message; a replaced token settles no message."""
    for key, delivered in history.delivered.items():
        path, name = key
        settled = history.settled.get(key, [])
        starts = {each.token: each.started for each in settled}
        for earlier, later in itertools.pairwise(delivered):
            free = min(earlier.locked_until, starts.get(earlier.token, earlier.locked_until))
            if (
                earlier.token
                and later.at + SKEW_S < free
                and earlier.hold is None
                and not history.died_between(path, earlier.at, later.at)
            ):
                times = (
                    f"at {earlier.at:.1f} until {earlier.locked_until:.1f} and at {later.at:.1f}"
                )
                yield Violation("I3", path, name, f"was locked twice at once: {times}")
            for each in settled:
                if (
                    each.token == earlier.token != later.token
                    and history.result_of(each) is Result.ACCEPTED
                    and each.started > later.at + SKEW_S
                ):
                    yield Violation("I4", path, name, f"a stale token could {each.kind} it")


def _counts(history: History) -> Iterator[Violation]:
    """I8: counts rise and stay below the limit; a crash may lose the last one."""
    for key, delivered in history.delivered.items():
        path, name = key
        most = history.topology.max_delivery_count.get(path)
        for each in delivered:
            if most is not None and each.count >= most:
                yield Violation("I8", path, name, f"was delivered with the count {each.count}")
        for earlier, later in itertools.pairwise(delivered):
            if later.count < earlier.count and not history.died_between(path, earlier.at, later.at):
                yield Violation(
                    "I8", path, name, f"its count fell from {earlier.count} to {later.count}"
                )


def _reasons(history: History) -> Iterator[Violation]:
    """I9: a dead letter has the reason of its cause."""
    lives = {
        (path, sent.id): sent.ttl_s
        for sent in history.sent
        for path in history.topology.destinations(sent.path, sent.properties)
    }
    for key, left in history.left.items():
        path, name = key
        requested = any(
            each.kind == "dead-letter" and history.result_of(each) is not Result.REFUSED
            for each in history.settled.get(key, ())
        )
        most = history.topology.max_delivery_count.get(path, 0)
        for each in left:
            if each.place != "dead-letter":
                continue
            allowed = {
                "MaxDeliveryCountExceeded": each.count >= most,
                "TTLExpiredException": lives.get(key) is not None,
            }.get(each.reason or "", requested)
            if not allowed:
                yield Violation("I9", path, name, f"was dead-lettered as {each.reason}")


def _deadlines(history: History) -> Iterator[Violation]:
    """I10, I11, I12: nothing expired, early or cancelled is delivered; deferred by number only."""
    for sent in history.sent:
        for path in history.topology.destinations(sent.path, sent.properties):
            key = path, sent.id
            delivered = history.delivered.get(key, [])
            for each in delivered:
                if sent.due is not None and each.at < sent.due - SKEW_S:
                    yield Violation("I11", path, sent.id, "was delivered before its time")
                if sent.ttl_s is not None and each.at > each.enqueued + sent.ttl_s + SKEW_S:
                    yield Violation("I10", path, sent.id, "was delivered after it had expired")
            if delivered and history.cancelled.get((sent.path, sent.id)) is Result.ACCEPTED:
                yield Violation("I11", path, sent.id, "was cancelled and delivered")
    for key, settled in history.settled.items():
        path, name = key
        for each_settled in settled:
            if each_settled.kind == "defer" and (
                history.result_of(each_settled) is Result.ACCEPTED
            ):
                for later in history.delivered.get(key, ()):
                    if later.at > each_settled.ended + SKEW_S and not later.by_number:
                        yield Violation("I12", path, name, "was deferred and delivered unasked")


# --- sessions -------------------------------------------------------------------------------------


def _sessions(history: History) -> Iterator[Violation]:
    """I6: one holder at a time, and no first delivery overtakes an available lower number."""
    for (path, session), holds in history.holds.items():
        holds.sort(key=lambda hold: hold.started)
        for earlier, later in itertools.pairwise(holds):
            if later.started + SKEW_S < earlier.ended and not history.died_between(
                path, earlier.started, later.started
            ):
                yield Violation("I6", path, session, "had two holders")
    order: dict[int, list[Delivered]] = defaultdict(list)
    for delivered in history.delivered.values():
        for each in delivered:
            if each.hold is not None:
                order[each.hold].append(each)
    accepted_at = {(sent.path, sent.id): sent.ended for sent in history.sent}
    for deliveries in order.values():
        deliveries.sort(key=lambda each: each.at)
        highest: Delivered | None = None
        seen: set[int] = set()
        for each in deliveries:
            was_there = accepted_at.get((each.path, each.id), each.at)
            if (
                highest is not None
                and each.sequence < highest.sequence
                and each.sequence not in seen
                and not each.by_number
                and was_there + SKEW_S < highest.at
            ):
                yield Violation(
                    "I6", each.path, each.id, f"{highest.sequence} was delivered before it"
                )
            seen.add(each.sequence)
            if highest is None or each.sequence > highest.sequence:
                highest = each


def _states(history: History) -> Iterator[Violation]:
    """I6: a read returns the last accepted write, or a later one with unknown result."""
    for (path, session), accesses in history.states.items():
        allowed = {b""}
        for each in accesses:
            if each.result is Result.ACCEPTED:
                allowed = {each.value}
            elif each.result is Result.UNKNOWN:
                allowed.add(each.value)
            elif each.result is None:
                if each.value not in allowed:
                    yield Violation("I6", path, session, f"its state is {each.value!r}")
                allowed = {each.value}


# --- numbers and reports --------------------------------------------------------------------------


def _numbers(history: History) -> Iterator[Violation]:
    """I15: a number names one message of an entity."""
    named: dict[tuple[str, int], str] = {}
    for (path, name), delivered in history.delivered.items():
        for each in delivered:
            other = named.setdefault((path, each.sequence), name)
            if other != name:
                yield Violation("I15", path, name, f"has the number {each.sequence} of {other}")


def _reported(history: History) -> Iterator[Violation]:
    """I18: the counts of the broker are correct."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for left in history.left.values():
        for each in left:
            found[each.path, each.place] += 1
    for counted in history.counted:
        there = found[counted.path, counted.place]
        if there != counted.count:
            yield Violation(
                "I18", counted.path, counted.place, f"counted {counted.count}, found {there}"
            )


# --- several brokers ------------------------------------------------------------------------------


def _owners(history: History) -> Iterator[Violation]:
    """I19: a message is delivered only by the current owner of its partition.

    A broker that is paused in a load ends it when it wakes up; it delivers nothing then.
    """
    for path, loads in history.loads.items():
        for earlier, later in itertools.pairwise(loads):
            if later.at < earlier.at and not history.was_paused(earlier, later.at):
                what = f"{earlier.by} loaded it after {later.by} had taken it"
                yield Violation("I19", path, str(earlier.epoch), what)
    for (path, name), delivered in history.delivered.items():
        loads = history.loads.get(path, [])
        ends = [*(load.at for load in loads[1:]), float("inf")]
        for each in delivered:
            at = history.delivered_at(each)
            if loads and not any(
                load.by == each.by and load.at - OWNER_SKEW_S <= at <= end + OWNER_SKEW_S
                for load, end in zip(loads, ends, strict=False)
            ):
                what = f"was delivered at {at:.1f} by {each.by}, which did not have its partition"
                yield Violation("I19", path, name, what)


def _definitions(history: History) -> Iterator[Violation]:
    """I20: created entities exist, deleted ones do not."""
    for path, defined in history.defined.items():
        is_created = any(not each.is_deleted and each.result is Result.ACCEPTED for each in defined)
        is_deleted = any(each.is_deleted and each.result is Result.ACCEPTED for each in defined)
        if is_created and path not in history.listed and not history.may_be_deleted(path):
            yield Violation("I20", path, "", "was created and is not there")
        if is_deleted and path in history.listed:
            yield Violation("I20", path, "", "was deleted and is there")
