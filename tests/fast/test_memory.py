"""Memory as the functions in C use it: places of slots, whole objects, counted references."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import pytest

from postbus.amqp import runs as frame_runs
from postbus.entity.commands import Delivery, StoredRow
from postbus.entity.outcomes import InsertMessage
from postbus.entity.queues import runs as queue_runs
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.fast import IS_ACCELERATED
from postbus.message import runs as message_runs
from postbus.message.envelope import LEAST_BYTES, Envelope
from tests.fast import frames
from tests.fast.twins import REASON

if not IS_ACCELERATED:
    pytest.skip(REASON, allow_module_level=True)

pytestmark = pytest.mark.slow

_runs: Any = importlib.import_module("postbus.fast._runs")

NOW_MS = 1_700_000_000_000
TOKEN = bytes(range(16))
PROPERTIES = b"\x00\x53\x73\xc0\x05\x01\xa1\x02m1"
BODY = b"\x00\x53\x75\xa0\x04body"


# --- what is checked when an object is made -------------------------------------------------------


def slotted(*names: str, base: type = object, **more: Any) -> type:
    return type("Slotted", (base,), {"__slots__": names, **more})


class WithProperty:
    __slots__ = ("a",)


WithProperty.b = property(lambda _: 5)  # type: ignore[attr-defined]
WithProperty.__slots__ = ("a", "b")  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("owner", "names", "error"),
    [
        (slotted("a", "b"), ("a",), TypeError),
        (slotted("a"), ("a", "b"), TypeError),
        (slotted("a", "b"), ("a", "c"), TypeError),
        (slotted("a"), ("a", "a"), TypeError),
        (slotted(*(f"f{number:02}" for number in range(21))),
         tuple(f"f{number:02}" for number in range(21)), TypeError),
        (WithProperty, ("a", "b"), TypeError),
        (slotted("__dict__", "a"), ("__dict__", "a"), TypeError),
        (slotted("__weakref__", "a"), ("__weakref__", "a"), TypeError),
        (slotted(base=slotted("a")), ("a",), TypeError),
        (type("Open", (), {}), ("a",), AttributeError),
        (slotted("_Slotted__a"), ("__a",), TypeError),
        (None, ("a",), TypeError),
        (slotted("a"), None, TypeError),
        (slotted("a"), ["a"], TypeError),
        (int, ("a",), AttributeError),
        ("text", ("a",), TypeError),
    ],
)  # fmt: skip
def test_a_class_with_other_slots_is_refused(owner: Any, names: Any, error: type) -> None:
    with pytest.raises(error):
        _runs.Slots(owner, names)


@pytest.mark.parametrize(
    ("owner", "names"),
    [(WithProperty, ("a", "b")), (slotted("__dict__", "a"), ("__dict__", "a"))],
)
def test_a_descriptor_of_another_kind_is_not_read(owner: type, names: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match="is no slot"):
        _runs.Slots(owner, names)


def test_slots_are_those_of_a_class_in_any_order() -> None:
    _runs.Slots(slotted("b", "a"), ("a", "b"))
    _runs.Slots(slotted(*(f"f{number:02}" for number in range(20))),
                tuple(f"f{number:02}" for number in range(20)))  # fmt: skip
    assert sorted(_runs.ENVELOPE) == sorted(Envelope.__slots__)
    assert sorted(_runs.QUEUED) == sorted(QueuedMessage.__slots__)


def test_runs_of_other_classes_are_refused() -> None:
    _runs.QueueRuns(Envelope, QueuedMessage, InsertMessage, Delivery)
    for classes in (
        (QueuedMessage, QueuedMessage, InsertMessage, Delivery),
        (Envelope, Envelope, InsertMessage, Delivery),
        (Envelope, QueuedMessage, list, Delivery),
        (Envelope, QueuedMessage, InsertMessage, dict),
        (Envelope, QueuedMessage, InsertMessage, None),
    ):
        with pytest.raises(TypeError):
            _runs.QueueRuns(*classes)
    for heads in (b"", b"abc", b"abcde"):
        with pytest.raises(ValueError, match="two octets"):
            _runs.MessageRuns(Envelope, LEAST_BYTES, heads)
    for wrong in ((QueuedMessage, 1, b"head"), (Envelope, 1, None), (None, 1, b"head")):
        with pytest.raises(TypeError):
            _runs.MessageRuns(*wrong)


PLACES = (0, 1, 2, 18, 20, 28, 36)
OCTETS = bytes(44)


def test_places_of_a_layout_are_inside_of_its_octets() -> None:
    _runs.Layout(OCTETS, PLACES, 9)
    _runs.Layout(OCTETS[:36], (*PLACES[:2], -1, *PLACES[3:6], -1), 9)
    ends = (44, 44, 29, 43, 37, 37, 37)
    for index, first_outside in enumerate(ends):
        lowest = -1 if index in (2, 6) else 0
        _runs.Layout(OCTETS, changed(index, first_outside - 1), 9)
        _runs.Layout(OCTETS, changed(index, lowest), 9)
        for place in (first_outside, lowest - 1, 2**62, -(2**62)):
            with pytest.raises(ValueError, match="outside"):
                _runs.Layout(OCTETS, changed(index, place), 9)


def changed(index: int, place: int) -> tuple[int, ...]:
    return (*PLACES[:index], place, *PLACES[index + 1 :])


def test_a_layout_has_seven_places() -> None:
    for places in ((), PLACES[:6], (*PLACES, 0)):
        with pytest.raises(ValueError, match="seven places"):
            _runs.Layout(OCTETS, places, 9)
    with pytest.raises(TypeError):
        _runs.Layout(None, PLACES, 9)


@pytest.mark.parametrize("name", ["Slots", "Layout", "MessageRuns", "QueueRuns"])
def test_there_is_no_object_without_its_arguments(name: str) -> None:
    kind = getattr(_runs, name)
    with pytest.raises(TypeError):
        kind.__new__(kind)


def test_forms_of_frames_are_checked() -> None:
    form = frames.form_of_transfer(frames.transfer(payload=b""), b"")
    data = frames.transfer() * 2
    for wrong in (
        form._replace(tag_kind=b"\xa0"),
        form._replace(tag_kind=b""),
        form._replace(least_bytes=0),
        form._replace(least_bytes=len(form.head) + 9),
        form._replace(tail=bytes(form.least_bytes)),
    ):
        with pytest.raises(ValueError, match="no form"):
            _runs.scan_transfers(wrong, data, 0, 512)
    for pos in (-1, -(2**63)):
        with pytest.raises(ValueError, match="no form"):
            _runs.scan_transfers(form, data, pos, 512)
    for wrong in (form._replace(head=None), form._replace(tail=None), form[:3], (), None):
        with pytest.raises((TypeError, ValueError)):
            _runs.scan_transfers(wrong, data, 0, 512)
    outcome = frames.form_of_outcome(frames.outcome())
    for changed_bytes in (0, outcome.frame_bytes - 1, outcome.frame_bytes + 1):
        with pytest.raises(ValueError, match="no form"):
            _runs.scan_outcomes(outcome._replace(frame_bytes=changed_bytes), data, 0)
    with pytest.raises(ValueError, match="no form"):
        _runs.scan_outcomes(outcome, data, -1)
    for wrong in (outcome._replace(head=None), outcome._replace(tail=None), outcome[:3], ()):
        with pytest.raises((TypeError, ValueError)):
            _runs.scan_outcomes(wrong, data, 0)
    for octets in (None, bytearray(data), memoryview(data), "text"):
        with pytest.raises(TypeError):
            _runs.scan_transfers(form, octets, 0, 512)
        with pytest.raises(TypeError):
            _runs.scan_outcomes(outcome, octets, 0)


def test_a_lock_needs_eight_random_octets() -> None:
    batch, held = [queued(), queued()], {}
    with pytest.raises(ValueError, match="fewer random"):
        queue_runs.in_c.lock(batch, held, None, NOW_MS, 0, bytes(15), b"suffix")
    assert not held
    found = queue_runs.in_c.lock(batch, held, None, NOW_MS, 0, bytes(8) + b"\xff" * 8, b"")
    assert [each[0] for each in found] == [bytes(8), b"\xff" * 8] == list(held)


# --- objects that cannot be -----------------------------------------------------------------------


def envelope() -> Envelope:
    return Envelope(100, message_id=b"\xa1\x02m1", properties=PROPERTIES, body=BODY)


def queued() -> QueuedMessage:
    return QueuedMessage(1_000, 5, NOW_MS, envelope())


def use(made: Envelope, entry: QueuedMessage) -> None:
    """Give an envelope and an entry to each function that takes one."""
    message_c, queue_c = message_runs.in_c, queue_runs.in_c
    held: dict[Any, Any] = {b"token": entry}
    sent = [(TOKEN, NOW_MS, 5, 6, 0, None, made)]
    for call in (
        lambda: message_c.name_messages([made], b"\xa1\x20" + TOKEN, PROPERTIES[:6], count(1)),
        lambda: message_c.pack_deliveries(sent, message_runs.LOCKED, [], []),
        lambda: message_c.pack_deliveries(sent, message_runs.UNLOCKED, [], []),
        lambda: message_c.pack_rows([(1, NOW_MS, made)]),
        lambda: queue_c.check([made], 1_000, 100, 100),
        lambda: queue_c.arrive([made], 1, 2, NOW_MS, []),
        lambda: queue_c.lock([entry], held, None, NOW_MS, 0, bytes(8), b"suffix"),
        lambda: queue_c.load([StoredRow(1, NOW_MS, None, 0, False, made)], 5),
        lambda: queue_c.complete(list(held), held, 0, []),
    ):
        try:
            call()
        except (AttributeError, TypeError):
            continue


@pytest.mark.parametrize("name", Envelope.__slots__)
def test_an_envelope_with_an_empty_slot_does_no_harm(name: str) -> None:
    for value in (None, 7, b"", [], "text"):
        made = envelope()
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
        entry = queued()
        entry.envelope = made
        use(made, entry)
    use(Envelope.__new__(Envelope), QueuedMessage.__new__(QueuedMessage))


@pytest.mark.parametrize("name", QueuedMessage.__slots__)
def test_an_entry_with_an_empty_slot_does_no_harm(name: str) -> None:
    for value in (None, 7, b"", [], "text"):
        entry = queued()
        entry.token = b"token"
        if value is not None:
            setattr(entry, name, value)
        elif hasattr(entry, name):
            delattr(entry, name)
        use(envelope(), entry)


# --- references -----------------------------------------------------------------------------------


def test_messages_are_not_visited_by_the_collector() -> None:
    """They are in no cycle, and a visit of a million of them would be a pause."""
    sliced = message_runs.slice_messages([BODY])
    rows: list[InsertMessage] = []
    found: list[Any] = [*sliced, *queue_runs.arrive(sliced, 2**40, 2**41, NOW_MS, rows), *rows]
    found += queue_runs.load([StoredRow(2**50, NOW_MS, None, 0, False, sliced[0], None)], 2**40)
    assert len(found) == 4
    assert not any(gc.is_tracked(each) for each in found)
    unusual = [Envelope(100, ttl_ms=5), Envelope(100, session_id=b"s")]
    assert all(gc.is_tracked(each) for each in unusual)
    stored = queue_runs.arrive(unusual, 2**40, 2**41, NOW_MS, rows)
    assert not any(gc.is_tracked(each) for each in [*unusual, *stored])


ROUNDS = 5_000


class Inputs(NamedTuple):
    """Objects that are given to the functions again and again."""

    form: Any
    outcome: Any
    read: bytes
    outcomes: bytes
    payloads: list[Any]
    envelopes: list[Any]
    sent: list[Any]
    rows: list[Any]
    batch: list[Any]
    records: list[Any]


def inputs() -> Inputs:
    """Return usual inputs that end with an unusual one."""
    usual = [envelope(), envelope()]
    odd = Envelope(100, ttl_ms=5, priority=4, session_id=b"s", scheduled_ms=5)
    sent = [(bytearray(TOKEN), 1, 2, 3, 4, None, usual[0])]
    sent[:0] = [tuple.__new__(Delivery, (TOKEN, NOW_MS, 5, 2**40, 0, None, usual[0]))]
    entries = [QueuedMessage(2**40 + number, 2**41, NOW_MS, usual[0]) for number in range(3)]
    entries[2].failures = 2**64
    for entry in entries:
        entry.token, entry.receiver, entry.locked_until_ms = bytes(8), None, NOW_MS
    durable = b"\x00\x53\x70\xc0\x02\x01\x41"
    return Inputs(
        frames.form_of_transfer(frames.transfer(payload=b""), b""),
        frames.form_of_outcome(frames.outcome()),
        frames.transfer(2**31) * 3 + b"rest",
        frames.outcome(2**31) * 3 + b"rest",
        [durable + PROPERTIES + BODY, BODY, PROPERTIES, 2**70],
        [*usual, odd, 2**70],
        sent,
        [(2**50, NOW_MS, usual[0]), (1, 2, odd)],
        entries,
        [(2**50, NOW_MS, b"\1\1" + PROPERTIES, None, BODY, *[None] * 4), (1, 2)],
    )


def calls(given: Inputs) -> dict[str, Callable[[], Any]]:
    """Return calls that leave their inputs as they are, those that raise included."""
    message_c, queue_c = message_runs.in_c, queue_runs.in_c
    tags, parts = [TOKEN] * 2, [(b"a", b"bc")] * 2

    def locks() -> None:
        held: dict[Any, Any] = {}
        queue_c.lock(given.batch, held, None, NOW_MS, 0, bytes(24), b"suffix-a")
        queue_c.complete([*held, b"unknown"], held, 0, [])

    def failing(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises((TypeError, ValueError, StopIteration)):
                call()

        return run

    def named(numbers: Any) -> Any:
        nameless = Envelope(2**40)
        return message_c.name_messages([nameless, *given.envelopes], b"h" * 18, b"s" * 6, numbers)

    pack = frame_runs.link_frames(0, 1)
    return {
        "scan_transfers": lambda: _runs.scan_transfers(given.form, given.read, 0, 512),
        "scan_outcomes": lambda: _runs.scan_outcomes(given.outcome, given.outcomes, 0),
        "pack_transfers": lambda: pack(2**31, tags, parts, [3, 3], True),
        "pack_transfers fails": failing(lambda: pack(2**31, tags, parts, [3, 2], True)),
        "slice_messages": lambda: message_c.slice_messages(given.payloads),
        "name_messages": lambda: named(count(2**40)),
        "name_messages fails": failing(lambda: named(iter(()))),
        "pack_deliveries": lambda: [
            message_c.pack_deliveries(given.sent, layout, [], [])
            for layout in (message_runs.LOCKED, message_runs.UNLOCKED)
        ],
        "pack_rows": lambda: message_c.pack_rows(given.rows),
        "check": lambda: queue_c.check(given.envelopes, 2**40, 100, 100),
        "arrive": lambda: queue_c.arrive(given.envelopes, 2**40, 2**41, NOW_MS, []),
        "lock, complete": locks,
        "unpack_rows": lambda: message_c.unpack_rows(given.records, StoredRow),
        "unpack_rows fails": failing(lambda: message_c.unpack_rows(given.records, dict)),
        "load": lambda: queue_c.load([(2**50, NOW_MS, None, 0, False, None, None)] * 2, 2**40),
        "load fails": failing(lambda: queue_c.load([(1, 2)], 5)),
        "Layout": lambda: _runs.Layout(OCTETS, PLACES, 9),
        "Layout fails": failing(lambda: _runs.Layout(OCTETS, changed(1, 99), 9)),
        "QueueRuns": lambda: _runs.QueueRuns(Envelope, QueuedMessage, InsertMessage, Delivery),
        "QueueRuns fails": failing(lambda: _runs.QueueRuns(Envelope, Envelope, tuple, tuple)),
    }


def references(given: Inputs) -> list[int]:
    """Return the numbers of references to inputs and their parts, which nothing else has."""
    found: list[Any] = [*given, *given.payloads, *given.envelopes, *given.batch, TOKEN, PROPERTIES]
    found += [given.form.head, given.form.tail, given.outcome.head, given.outcome.tail]
    found += [given.envelopes[0].body, given.envelopes[0].message_id, given.batch[0].row_key]
    return [sys.getrefcount(each) for each in found]


@pytest.mark.parametrize("name", calls(inputs()))
def test_no_reference_is_lost_or_kept(name: str) -> None:
    given = inputs()
    call = calls(given)[name]
    for _ in range(50):
        call()
    gc.collect()
    classes = (Envelope, QueuedMessage, InsertMessage, Delivery, None, True, False, b"")
    before = references(given), [sys.getrefcount(each) for each in classes]
    blocks = sys.getallocatedblocks()
    for _ in range(ROUNDS):
        call()
    gc.collect()
    assert abs(sys.getallocatedblocks() - blocks) < ROUNDS / 10
    assert references(given) == before[0]
    for one, other in zip(before[1], classes, strict=True):
        assert abs(sys.getrefcount(other) - one) < ROUNDS / 10
