"""The functions for bursts in C do what their twins in Python do, for the same input (ADR 50)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postbus.amqp import runs as frame_runs
from postbus.entity.commands import StoredRow
from postbus.entity.queues import runs as queue_runs
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.fast import IS_ACCELERATED
from postbus.message import runs as message_runs
from postbus.message.delivery import MOST_ANNOTATION_BYTES
from postbus.message.envelope import Envelope
from postbus.message.rows import pack_envelope
from postbus.message.sections import slice_message
from tests.fast import comparisons, frames, messages
from tests.fast.comparisons import COMPARISONS, MOST_BYTES, complete, lock, named, written
from tests.fast.messages import FIRST_KEY, NOW_MS, ODDITIES
from tests.fast.twins import REASON, agree, shown
from tests.fast.wholes import CAPTURES, WHOLES, compare_pieces
from tests.message.wire_values import all_captured

if not IS_ACCELERATED:
    pytest.skip(REASON, allow_module_level=True)

pytestmark = pytest.mark.slow

SOURCES = st.randoms(use_true_random=False)


def title(compare: Callable[..., Any]) -> str:
    return compare.__name__.removeprefix("compare_")


@pytest.mark.parametrize("compare", COMPARISONS, ids=title)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(source=SOURCES)
def test_a_function_does_what_its_twin_does(
    compare: Callable[[random.Random], bool], source: random.Random
) -> None:
    compare(source)


@pytest.mark.parametrize("compare", WHOLES, ids=title)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_wholes_do_the_same_with_either_build(
    compare: Callable[[random.Random], bool], seed: int
) -> None:
    compare(random.Random(seed))


# --- frames ---------------------------------------------------------------------------------------


def scan_transfers(given: Any) -> Any:
    return agree(lambda each: frame_runs.scan_transfers(*each), given)


def scan_outcomes(given: Any) -> Any:
    return agree(lambda each: frame_runs.scan_outcomes(*each), given)


TRANSFERS = [frames.transfer(300 + number, b"x" * number) for number in range(3)]
TRANSFER_FORM = frames.form_of_transfer(TRANSFERS[0], b"")
OUTCOMES = [frames.outcome(300 + number) for number in range(3)]
OUTCOME_FORM = frames.form_of_outcome(OUTCOMES[0])


def ends(found: list[bytes]) -> list[int]:
    return [len(b"".join(found[: index + 1])) for index in range(len(found))]


def test_a_read_of_transfers_may_end_at_each_octet() -> None:
    data = b"".join(TRANSFERS)
    for size in range(len(data) + 1):
        for pos in (0, len(TRANSFERS[0]), size, size + 1):
            *lists, end = scan_transfers([TRANSFER_FORM, data[:size], pos, 512])
            whole = [each for each in ends(TRANSFERS) if pos < each <= size]
            assert end == max([pos, *whole])
            assert {len(each) for each in lists} == {len(whole)}


@pytest.mark.parametrize("tail", frames.ACCEPTED, ids=bytes.hex)
def test_a_read_of_outcomes_may_end_at_each_octet(tail: bytes) -> None:
    """One form ends with a null, as all octets do in memory."""
    read = [frames.outcome(300 + number, tail=tail) for number in range(3)]
    form, data = frames.form_of_outcome(read[0]), b"".join(read)
    for size in range(len(data) + 1):
        for pos in (0, len(read[0]), size, size + 1):
            ids, end = scan_outcomes([form, data[:size], pos])
            whole = [each for each in ends(read) if pos < each <= size]
            assert end == max([pos, *whole])
            assert len(ids) == len(whole)


def changes(octet: int) -> set[int]:
    return {octet ^ 1, octet ^ 0x80, 0, 0xFF, (octet + 1) & 0xFF, (octet - 1) & 0xFF} - {octet}


def test_each_octet_of_a_frame_may_be_another_one() -> None:
    for index in range(len(TRANSFERS[1])):
        for octet in changes(TRANSFERS[1][index]):
            other = TRANSFERS[1][:index] + bytes((octet,)) + TRANSFERS[1][index + 1 :]
            data = TRANSFERS[0] + other + TRANSFERS[2] + bytes(300)
            scan_transfers([TRANSFER_FORM, data, 0, 512])
    for index in range(len(OUTCOMES[1])):
        for octet in changes(OUTCOMES[1][index]):
            other = OUTCOMES[1][:index] + bytes((octet,)) + OUTCOMES[1][index + 1 :]
            scan_outcomes([OUTCOME_FORM, OUTCOMES[0] + other + OUTCOMES[2] + bytes(300), 0])


@pytest.mark.parametrize("more", [0, 500])
def test_sizes_of_frames_from_the_wire_are_compared_only(more: int) -> None:
    least, rest = TRANSFER_FORM.least_bytes, len(TRANSFERS[1]) - 4
    sizes = {*range(least - 2, least + rest + 3), 512, 513, 2**31 - 1, 2**31, 2**32 - 1, 0, 1, 7}
    for size in sizes:
        damaged = size.to_bytes(4, "big") + TRANSFERS[1][4:]
        data = TRANSFERS[0] + damaged + bytes(more)
        for most in (least - 1, least, least + 1, 512, 2**32):
            scan_transfers([TRANSFER_FORM, data, 0, most])
    for size in {*range(40), 2**31 - 1, 2**31, 2**32 - 1}:
        damaged = size.to_bytes(4, "big") + OUTCOMES[1][4:]
        scan_outcomes([OUTCOME_FORM, OUTCOMES[0] + damaged + bytes(more), 0])


def test_frames_of_each_form_are_scanned() -> None:
    for tail in frames.TAILS:
        for tag in (b"", b"tag1", bytes(16), bytes(32)):
            one = frames.transfer(0xFFFF_FFFF, b"xyz", tag=tag, tail=tail)
            form = frames.form_of_transfer(one, b"xyz")
            ids, tags, payloads, end = scan_transfers([form, one * 2, 0, 512])
            assert ids == [0xFFFF_FFFF] * 2
            assert (tags, payloads, end) == ([tag] * 2, [b"xyz"] * 2, 2 * len(one))
    for tail in frames.ACCEPTED:
        one = frames.outcome(0x8000_0000, tail=tail)
        assert scan_outcomes([frames.form_of_outcome(one), one * 2, 0])[0] == [0x8000_0000] * 2


def test_large_payloads_are_not_copied_into_one_buffer() -> None:
    for size in (frame_runs.JOINED_BYTES, frame_runs.JOINED_BYTES + 1):
        tags, parts = [bytes(16), b"t" * 16], [(bytes(size),), (b"", bytes(size))]
        agree(written, [0, 1, 7, tags, parts, [size] * 2, True])
        out = frame_runs.link_frames(0, 1)(7, tags, parts, [size] * 2, True)
        assert (len(out) == 1) is (size == frame_runs.JOINED_BYTES)


HEAD, TAIL = b"head", b"tail"


@pytest.mark.parametrize(
    ("tags", "parts", "sizes"),
    [
        ([bytes(15)], [(b"x",)], [1]),
        ([bytes(17)], [(b"x",)], [1]),
        ([messages.Octets(16)], [(b"x",)], [1]),
        ([bytearray(16)], [(b"x",)], [1]),
        ([None], [(b"x",)], [1]),
        ([bytes(16)], [(b"x",)], [0]),
        ([bytes(16)], [(b"x",)], [2]),
        ([bytes(16)], [(b"x",)], [-1]),
        ([bytes(16)], [(b"x",)], [2**63 - 1]),
        ([bytes(16)], [(b"x",)], [2**63]),
        ([bytes(16)], [(b"x",)], [None]),
        ([bytes(16)], [(messages.Octets(b"x"),)], [1]),
        ([bytes(16)], [(bytearray(b"x"),)], [1]),
        ([bytes(16)], [(None,)], [1]),
        ([bytes(16)], [[b"x"]], [1]),
        ([bytes(16)], [None], [0]),
        ([bytes(16)], [(b"x",), (b"x",)], [1, 1]),
        ([bytes(16)] * 2, [(b"x",)] * 2, [1]),
        ([bytes(16)] * 2, [(b"x",)], [1] * 2),
        ([bytes(16)] * 2, [(b"x",)] * 2, [2, 0]),
        ((bytes(16),), [(b"x",)], [1]),
    ],
)
def test_frames_with_other_parts_than_announced_are_not_packed(
    tags: Any, parts: Any, sizes: Any
) -> None:
    from postbus.fast import _runs

    with pytest.raises((ValueError, TypeError, OverflowError)):
        _runs.pack_transfers(HEAD, TAIL, 1, tags, parts, sizes)


# --- messages -------------------------------------------------------------------------------------

DATA = b"\x00\x53\x75\xa0\x04body"
DURABLE = b"\x00\x53\x70\xc0\x02\x01\x41"
ID = b"\xa1\x04id-1"
USUAL_MESSAGES = [
    DATA,
    b"\x00\x53\x75\xb0\x00\x00\x00\x02ab",
    DURABLE + DATA,
    b"\x00\x53\x70\xc0\x04\x03\x42\x40\x40" + DATA,
    b"\x00\x53\x70\xc0\x06\x05\x41\x40\x40\x42\x43" + DATA,
    b"\x00\x53\x73\xc0\x07\x01" + ID + DATA,
    DURABLE + b"\x00\x53\x73\xc0\x12\x01\x98" + bytes(range(16)) + DATA,
    DURABLE + b"\x00\x53\x73\xc0\x0a\x04" + ID + b"\x40\xa1\x00" + DATA,
    b"\x00\x53\x73\xc0\x10\x0a" + ID + b"\x40" * 9 + DATA,
    b"\x00\x53\x73\xc0\x1f\x0b" + ID + b"\x40\x40\xa1\x02to\xa3\x02ct" + b"\x40" * 3
    + b"\x83" + bytes(8) + b"\x40\x40" + DATA,
    b"\x00\x53\x73\xc0\x13\x0d" + ID + b"\x40" * 12 + DATA,
    b"\x00\x53\x73\xc0\x01\x00" + b"\x00\x53\x74\xc1\x07\x02\xa1\x01k\xa1\x01v" + DATA,
    b"\x00\x53\x74\xd1\x00\x00\x00\x0a\x00\x00\x00\x02\xa1\x01k\xa1\x01v" + DATA,
]  # fmt: skip


def slice_messages(payloads: list[Any]) -> Any:
    return agree(message_runs.slice_messages, payloads)


def in_c(payloads: list[Any]) -> int:
    """Return how many messages are sliced in C."""
    return len(message_runs.in_c.slice_messages(payloads))


@pytest.mark.parametrize("payload", USUAL_MESSAGES, ids=range(len(USUAL_MESSAGES)))
def test_usual_messages_are_sliced_in_c(payload: bytes) -> None:
    assert in_c([payload] * 3) == 3
    assert len(slice_messages([payload] * 3)) == 3


@pytest.mark.parametrize("payload", USUAL_MESSAGES, ids=range(len(USUAL_MESSAGES)))
def test_a_message_may_end_at_each_octet(payload: bytes) -> None:
    for size in range(len(payload) + 1):
        slice_messages([payload, payload[:size], payload])
        slice_messages([payload[size:]])


@pytest.mark.parametrize("payload", USUAL_MESSAGES, ids=range(len(USUAL_MESSAGES)))
def test_each_octet_of_a_message_may_be_another_one(payload: bytes) -> None:
    for index in range(len(payload)):
        for octet in range(256):
            changed = payload[:index] + bytes((octet,)) + payload[index + 1 :]
            for envelope in message_runs.in_c.slice_messages([changed]):  # else Python slices it
                assert shown(envelope) == shown(slice_message(changed))


@pytest.mark.parametrize("place", range(13))
def test_a_property_may_be_of_each_type(place: int) -> None:
    for field in {*messages.IDS, *messages.FIELDS}:
        for message_id in (ID, b"\x40", b"\x98" + bytes(16)):
            fields = [message_id, *[b"\x40"] * 12]
            fields[place] = field
            for count in range(place + 1, 14):
                items = b"".join(fields[:count])
                begin = b"\x00\x53\x73\xc0" + bytes((len(items) + 1, count))
                slice_messages([begin + items + DATA])


LISTS = [
    (0x70, 0xC0, 5, b"\x41\x40\x40\x42\x43"),
    (0x73, 0xC0, 1, b"\x98" + bytes(16)),
    (0x73, 0xC0, 1, b"\xa1\x05id-\x00\x00"),
    (0x73, 0xC0, 3, ID + b"\x40\xa1\x02to"),
    (0x73, 0xC0, 9, ID + b"\x40" * 7 + b"\x83" + bytes(8)),
    (0x73, 0xC0, 11, ID + b"\x40" * 7 + b"\xa1\x02to\xa3\x02\x00\x00\x40"),
    (0x73, 0xC0, 11, b"\x40" * 9 + b"\x83" + bytes(8) + b"\x40"),
    (0x74, 0xC1, 2, b"\xa1\x01k\xa1\x01v"),
]


@pytest.mark.parametrize(("code", "form", "count", "items"), LISTS)
def test_fields_may_end_beyond_their_list(code: int, form: int, count: int, items: bytes) -> None:
    """What follows begins with a null, which may pass for the last octet of a field."""
    begin = b"\x00\x53" + bytes((code, form))
    for size in range(len(items) + 1):
        for counted in range(16):
            whole = begin + bytes((size + 1, counted)) + items[:size] + DATA
            slice_messages([whole])
            slice_messages([DURABLE + whole])
        begin32 = begin[:3] + bytes((form + 0x10,)) + (size + 4).to_bytes(4, "big")
        for counted in (0, count - 1, count, count + 1, size, size + 1, 2**31, 2**32 - 1):
            slice_messages([begin32 + counted.to_bytes(4, "big") + items[:size] + DATA])


def test_captured_messages_and_all_that_is_cut_off_them() -> None:
    for data in all_captured().values():
        for size in {*range(min(len(data), 600)), len(data)}:
            slice_messages([DATA, data[:size]])


@pytest.mark.parametrize("other", [None, 7, "text", bytearray(DATA), messages.Octets(DATA), [], ()])
def test_only_octets_are_sliced_in_c(other: Any) -> None:
    assert in_c([DATA, other, DATA]) == 1
    slice_messages([DATA, other, DATA])


# --- envelopes with one unusual field -------------------------------------------------------------


def usual() -> Envelope:
    """Return an envelope that all functions in C take."""
    return Envelope(
        100, message_id=b"\xa1\x02m1", properties=b"\x00\x53\x73\xc0\x05\x01\xa1\x02m1", body=DATA
    )


ONE_ODDITY = [(name, value) for name, values in ODDITIES.items() for value in values]


def with_field(name: str, value: Any) -> list[Any]:
    envelope = usual()
    setattr(envelope, name, value)
    return [usual(), envelope, usual()]


def entries(envelopes: list[Envelope]) -> list[QueuedMessage]:
    """Return locked messages with these envelopes."""
    found = []
    for number, envelope in enumerate(envelopes):
        entry = QueuedMessage(FIRST_KEY + number, number, NOW_MS, envelope)
        entry.token, entry.locked_until_ms = b"token-%d" % number, NOW_MS + 1
        found.append(entry)
    return found


@pytest.mark.parametrize(("name", "value"), ONE_ODDITY, ids=[each[0] for each in ONE_ODDITY])
def test_an_envelope_may_have_one_unusual_field(name: str, value: Any) -> None:
    envelopes = with_field(name, value)
    agree(named, (envelopes, 5))
    agree(comparisons.checked, envelopes)
    rows = [(number, NOW_MS, each) for number, each in enumerate(envelopes)]
    agree(message_runs.pack_copy_rows, rows)
    for is_locked in (True, False):
        sent = [(bytes(range(16)), NOW_MS, 5, 6, 0, None, each) for each in envelopes]
        agree(partial(message_runs.pack_deliveries, is_locked=is_locked), sent)
    batch = entries(envelopes)
    agree(lambda each: lock(each, {}, {}), batch)
    tokens = [each.token for each in batch]
    held = dict(zip(tokens, batch, strict=True))
    agree(lambda each: complete(*each, {}), (tokens, held, batch))


def test_usual_messages_are_done_in_c() -> None:
    envelopes = [usual(), usual(), usual()]
    assert queue_runs.in_c.check(envelopes, 100, 10, 0) == (3, 300)
    assert message_runs.in_c.name_messages(envelopes, b"", b"", iter(())) == 3
    assert message_runs.in_c.pack_rows([(1, 2, each) for each in envelopes])[1] == 3
    sent = [(bytes(16), NOW_MS, 5, 6, 255, None, each) for each in envelopes]
    for layout in (message_runs.LOCKED, message_runs.UNLOCKED):
        parts: list[Any] = []
        assert message_runs.in_c.pack_deliveries(sent, layout, parts, []) == 300
        assert len(parts) == 3
    batch = entries(envelopes)
    held = {each.token: each for each in batch}
    assert queue_runs.in_c.complete(list(held), held, NOW_MS, []) == (3, 300)
    assert len(queue_runs.in_c.lock(batch, held, None, NOW_MS, FIRST_KEY, bytes(24), b"")) == 3
    found = [record(pack_envelope(each)) for each in envelopes]
    assert len(message_runs.in_c.unpack_rows(found, StoredRow)) == 3


def record(blob: Any, **columns: Any) -> tuple[Any, ...]:
    """Return a record of a usual row, with other values in some columns."""
    usual_columns = (2**40, NOW_MS, blob, None, b"body", None, None, None, None)
    return tuple((dict(zip(RECORD, usual_columns, strict=True)) | columns).values())


RECORD = (
    "row_key", "enqueued_ms", "envelope", "application_properties", "body", "body_id",
    "patch", "due_sequence", "kept",
)  # fmt: skip


def test_a_record_may_have_one_unusual_column() -> None:
    usual_record = record(pack_envelope(usual()))
    others: dict[str, tuple[Any, ...]] = {
        "application_properties": (b"", b"properties"), "body": (None, b""), "body_id": (1, 2),
        "patch": ((True, None, None), (None, 2**31, None), (False, 0, b"patched")),
        "due_sequence": (0, 5, 2**40), "row_key": (0, -1, 2**62), "enqueued_ms": (0, -1, 2**62),
        "kept": ((5, 1, None, None, None, None), (5, 1, NOW_MS, 3, b"link", "1.2.3.4")),
    }  # fmt: skip
    for name, values in others.items():
        for value in values:
            odd = record(pack_envelope(usual()), **{name: value})
            agree(comparisons.stored, [usual_record, odd, usual_record])


def test_each_octet_of_an_envelope_in_a_row_may_differ() -> None:
    blob = pack_envelope(usual())
    for index in range(len(blob)):
        for octet in range(256):
            agree(comparisons.stored, [record(blob[:index] + bytes((octet,)) + blob[index + 1 :])])
    for size in range(2, len(blob)):
        agree(comparisons.stored, [record(blob[:size])])


def test_rows_of_other_lengths_end_a_run() -> None:
    assert message_runs.in_c.unpack_rows([(5, 6), record(b"")], StoredRow) == []
    with pytest.raises(TypeError, match="tuple"):
        message_runs.in_c.unpack_rows([], dict)
    with pytest.raises(TypeError, match="seven"):
        queue_runs.in_c.load([(1, 2)], 5)


def test_tuples_made_in_c_have_the_hash_of_others() -> None:
    """Newer Pythons keep the hash of a tuple in it."""
    inserts: list[Any] = []
    (entry,) = queue_runs.in_c.arrive([usual()], 5, 0, NOW_MS, inserts)
    (delivery,) = queue_runs.in_c.lock([entry], {}, None, NOW_MS, 0, bytes(8), bytes(8))
    (row,) = message_runs.in_c.unpack_rows([record(pack_envelope(usual()))], StoredRow)
    for made in (inserts[0], delivery, row):
        assert hash(made) == hash(tuple(made))


NUMBERS = (0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, True, False, 1.0, None, "1")


def test_a_delivery_may_have_one_unusual_field() -> None:
    tokens = [bytes(size) for size in (0, 8, 15, 17, 32)]
    tokens += [messages.Octets(16), bytearray(16), None]
    other: dict[int, Any] = {
        0: tokens, 1: NUMBERS, 2: NUMBERS, 3: NUMBERS, 4: (*NUMBERS, 1, 254, 255, 256, 2**32),
        5: (0, 1, 60_000, 2**32), 6: (None, 7, messages.LaterEnvelope()),
    }  # fmt: skip
    for at, values in other.items():
        for value in values:
            fields: list[Any] = [bytes(range(16)), NOW_MS, 5, 6, 0, None, usual()]
            first = tuple(fields)
            fields[at] = value
            for odd in (tuple(fields), fields, tuple(fields[:6]), (*fields, None)):
                for is_locked in (True, False):
                    pack = partial(message_runs.pack_deliveries, is_locked=is_locked)
                    agree(pack, [first, odd, first])
    for odd in (None, 7, b"1234567", []):
        agree(partial(message_runs.pack_deliveries, is_locked=True), [first, odd, first])


@pytest.mark.parametrize("is_locked", [True, False])
@pytest.mark.parametrize("is_durable", [True, False])
def test_deliveries_have_annotations_up_to_the_limit(is_locked: bool, is_durable: bool) -> None:
    limit = MOST_ANNOTATION_BYTES
    for size in {*range(20), *range(limit - 2, limit + 30), 250, 255, 256, 300}:
        for count in (0, 1, 2, 99, 100, 101, 124, 125, 128, 250):
            envelope = usual()
            envelope.is_durable = is_durable
            envelope.annotations, envelope.annotation_count = b"a" * size, count
            sent = [(bytes(range(16)), NOW_MS, 2**62, 6, 255, None, envelope)] * 2
            agree(partial(message_runs.pack_deliveries, is_locked=is_locked), sent)


def test_a_row_may_have_one_unusual_field() -> None:
    first = (1, NOW_MS, usual())
    for at in (0, 1):
        for value in NUMBERS:
            fields: list[Any] = [1, NOW_MS, usual()]
            fields[at] = value
            for odd in (tuple(fields), fields):
                agree(message_runs.pack_copy_rows, [first, odd, first])
    others = (None, 7, (1, NOW_MS), (1, NOW_MS, usual(), 1), (1, NOW_MS, messages.LaterEnvelope()))
    for odd in others:
        agree(message_runs.pack_copy_rows, [first, odd, first])


def test_message_ids_of_rows_are_those_at_the_begin_of_the_properties() -> None:
    """Each octet of section and id may differ; then Python stores the id beside the section."""
    section = usual().properties
    for index in range(len(section)):
        for octet in range(256):
            envelope = usual()
            envelope.properties = section[:index] + bytes((octet,)) + section[index + 1 :]
            agree(message_runs.pack_copy_rows, [(1, NOW_MS, envelope)])
    for message_id in (b"\xa1\x02m1", b"\xa1\x02m\x00"):  # octets are followed by a null
        section = section[:6] + message_id
        for size in range(len(section) + 1):
            envelope = usual()
            envelope.properties, envelope.message_id = section[:size], message_id
            agree(message_runs.pack_copy_rows, [(1, NOW_MS, envelope)])


def test_messages_without_id_are_named_with_consecutive_numbers() -> None:
    envelopes = [
        Envelope(100),
        usual(),
        Envelope(100),
        Envelope(100, properties=b"\x00\x53\x73\x45"),
    ]
    assert agree(named, ([*envelopes, Envelope(100)], 0xFF)) == 0x103
    for first in (0, 1, 0x0123_4567_89AB_CDEF, 2**63 - 2):
        agree(named, ([Envelope(100)], first))


# --- entries of a queue with one unusual field ----------------------------------------------------

ENTRY_ODDITIES: dict[str, tuple[Any, ...]] = {
    "enqueued_ms": NUMBERS,
    "envelope": (None, 7, messages.LaterEnvelope()),
    "failures": (0, 1, 9, 10, 11, -1, 2**63, -(2**63) - 1, True, False, None),
    "is_deferred": (True,),
    "locked_until_ms": (NOW_MS - 1, NOW_MS, NOW_MS + 1, *NUMBERS),
    "recorded": (1, 2, *NUMBERS),
    "row_key": (FIRST_KEY - 1, FIRST_KEY, *NUMBERS),
    "sequence": NUMBERS,
    "token": (None, b"", b"other"),
}
ONE_ENTRY_ODDITY = [(name, value) for name, values in ENTRY_ODDITIES.items() for value in values]


@pytest.mark.parametrize(
    ("name", "value"), ONE_ENTRY_ODDITY, ids=[each[0] for each in ONE_ENTRY_ODDITY]
)
def test_an_entry_may_have_one_unusual_field(name: str, value: Any) -> None:
    batch = entries([usual(), usual(), usual()])
    tokens = [each.token for each in batch]
    setattr(batch[1], name, value)
    if name == "envelope":
        batch[1].size_bytes, batch[1].ttl_ms = 50, None
    for options in ({}, {"is_main": False}, {"default_ttl_ms": 1_000}):
        agree(partial(lock_with, options), batch)
    held = dict(zip(tokens, batch, strict=True))
    agree(lambda each: complete(*each, {}), (tokens, held, batch))


def lock_with(options: dict[str, Any], batch: list[Any]) -> Any:
    return lock(batch, {b"before": None}, options)


@pytest.mark.parametrize("odd", [None, 7, b"octets", messages.LaterEnvelope(), [], Envelope])
def test_an_object_of_another_class_ends_a_run(odd: Any) -> None:
    envelopes, batch = [usual(), odd, usual()], [*entries([usual(), usual()])]
    batch.insert(1, odd)
    agree(named, (envelopes, 5))
    agree(comparisons.checked, envelopes)
    agree(lambda each: lock(each, {}, {}), batch)
    held = {b"%d" % number: each for number, each in enumerate(batch)}
    agree(lambda each: complete(list(each), each, [], {}), held)
    assert queue_runs.in_c.check(envelopes, 100, 99, 99)[0] == 1
    assert message_runs.in_c.name_messages(envelopes, b"", b"", iter(())) == 1


@pytest.mark.parametrize("token", [b"", b"token-1", bytes(16), bytes(17), None, 7, "token-0", []])
def test_unknown_and_repeated_tokens(token: Any) -> None:
    batch = entries([usual(), usual(), usual()])
    held = {each.token: each for each in batch}
    agree(
        lambda each: complete(*each, {}), ([b"token-0", token, b"token-1", b"token-0"], held, batch)
    )


def test_limits_of_usual_messages_are_those_of_python() -> None:
    for size in (MOST_BYTES - 1, MOST_BYTES, MOST_BYTES + 1):
        agree(comparisons.checked, with_field("size_bytes", size))
    ids = [b"\xa1" + bytes((size,)) + b"i" * size for size in range(118, 132)]
    for message_id in ids:
        envelope = usual()
        envelope.message_id = message_id
        envelope.properties = b"\x00\x53\x73\xc0" + bytes((len(message_id) + 1, 1)) + message_id
        agree(comparisons.checked, [usual(), envelope, usual()])
    for size in (127, 128, 129, 130):  # an id as long as no section of this size can have
        envelope = usual()
        envelope.properties, envelope.message_id = b"p" * size, b"\xa1\x81" + b"i" * 129
        agree(comparisons.checked, [usual(), envelope, usual()])
    for size in (32_767, 32_768, 32_769):
        agree(comparisons.checked, with_field("application_properties", b"a" * size))


def test_messages_arrive_with_consecutive_keys() -> None:
    envelopes = [usual(), None, usual()]
    for key, offset in ((0, 0), (FIRST_KEY, -5), (2**62, 2**61), (-1, 1)):
        inserts: list[Any] = [(1, 2, usual())]
        agree(lambda each, k=key, o=offset: queue_runs.arrive(each[0], k, o, NOW_MS, each[1]),
              (envelopes, inserts))  # fmt: skip


# --- whole engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CAPTURES))
@pytest.mark.parametrize("step", [1 << 20, 500, 7])
def test_engines_take_captures_in_the_same_way(name: str, step: int) -> None:
    data = CAPTURES[name]
    compare_pieces(name, [data[at : at + step] for at in range(0, len(data), step)])
