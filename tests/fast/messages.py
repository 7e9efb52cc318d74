"""Messages, envelopes and queue entries for both builds: usual ones, some with an oddity.

All choices come from a source of random numbers, which Hypothesis or a fuzzer gives.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from postbus.entity.commands import Delivery
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.message.delivery import MOST_ANNOTATION_BYTES
from postbus.message.envelope import Envelope, SharedBody
from postbus.message.rows import pack_envelope
from tests.message.fuzz_message import load_corpus, mutated

NOW_MS = 1_700_000_000_000
FIRST_KEY = 1_000
CORPUS = load_corpus()
HUGE = (2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1)
SIZES = (0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1)


class Octets(bytes):
    """Octets of another class than `bytes`, for which nothing in C is meant."""


# --- encoded messages -----------------------------------------------------------------------------


def usual_payload(source: random.Random) -> bytes:
    """Return a message of the sections that programs send, with a few unusual fields."""
    parts = []
    if source.randrange(3):
        parts.append(header(source))
    if source.randrange(4):
        parts.append(properties(source))
    if source.randrange(2):
        parts.append(application_properties(source))
    if source.randrange(12):
        parts.append(data_section(source))
    if not source.randrange(12):
        parts.append(source.choice(OTHER_SECTIONS))
        if source.randrange(2):
            source.shuffle(parts)
    return b"".join(parts)


OTHER_SECTIONS = (
    bytes.fromhex("005371c10100"),
    bytes.fromhex("005372c10702a303782d6141"),
    bytes.fromhex("00537245"),
    bytes.fromhex("005370 45"),
    bytes.fromhex("00537345"),
    bytes.fromhex("005375a00178"),
    bytes.fromhex("00537741"),
    bytes.fromhex("005378c10100"),
    bytes.fromhex("0080000000000000007541"),
)


def section(source: random.Random, code: int, kind: int, items: bytes, count: int) -> bytes:
    """Return a list or a map in its short or long form; size and count are wrong at times."""
    is_long = len(items) > 254 or count > 255 or not source.randrange(4)
    size = len(items) + (4 if is_long else 1)
    match source.randrange(40):
        case 0:
            count += source.choice((-1, 1, 2))
        case 1:
            size += source.choice((-1, 1))
        case 2:
            size, count = source.choice(SIZES), source.choice((count, *SIZES))
    if is_long:
        body = bytes((kind + 0x10,)) + struct.pack(">II", size & 0xFFFFFFFF, count & 0xFFFFFFFF)
    else:
        body = bytes((kind, size & 0xFF, count & 0xFF))
    return b"\x00\x53" + bytes((code,)) + body + items


def header(source: random.Random) -> bytes:
    fields = [
        source.choice((b"\x40", b"\x41", b"\x42", b"\x41", b"\x56\x01", b"\x43")),
        source.choice((b"\x40", b"\x40", b"\x40", b"\x50\x04", b"\x40")),
        source.choice((b"\x40", b"\x40", b"\x70\x00\x00\x03\xe8", b"\x43", b"\x40", b"\x52\x01")),
        b"\x42",
        b"\x43",
    ]
    if source.randrange(3):
        fields[1:3] = b"\x40", b"\x40"
    count = source.choice((0, 1, 1, 1, 2, 3, 4, 5))
    return section(source, 0x70, 0xC0, b"".join(fields[:count]), count)


def properties(source: random.Random) -> bytes:
    count = source.choice((0, 1, 1, 2, 3, 8, 9, 10, 11, 12, 13))
    fields = [source.choice(IDS), *(source.choice(FIELDS) for _ in range(12))]
    if source.randrange(2):
        fields[1:] = [b"\x40"] * 12
    if source.randrange(4):
        fields[10] = b"\x40"  # no group-id
    return section(source, 0x73, 0xC0, b"".join(fields[:count]), count)


IDS = (
    b"\x40",
    b"\xa1\x02m1",
    b"\xa1\x00",
    b"\xa1\x24" + b"0123456789abcdef" * 2 + b"0123",
    b"\xa1\x80" + b"x" * 128,
    b"\xa1\x81" + b"x" * 129,
    b"\xa1\x02\xc3\xa9",
    b"\xa1\x02\xc3\x28",
    b"\xa1\xf0ab",
    b"\x98" + bytes(range(16)),
    b"\x98\x01\x02",
    b"\x44",
    b"\x53\x05",
    b"\x80" + bytes(8),
    b"\xa0\x02\x01\x02",
    b"\xb1\x00\x00\x00\x02m1",
    b"\xa3\x02m1",
)
FIELDS = (
    b"\x40",
    b"\x40",
    b"\xa1\x03abc",
    b"\xa1\x00",
    b"\xa3\x04text",
    b"\xa3\xff",
    b"\xa1\x20ab",
    b"\xa0\x02ab",
    b"\x83" + NOW_MS.to_bytes(8, "big"),
    b"\x83\x00",
    b"\xb1\x00\x00\x00\x01a",
    b"\x43",
    b"\x98" + bytes(16),
    b"\x00",
)


def application_properties(source: random.Random) -> bytes:
    count = source.choice((0, 1, 2, 3))
    pairs = b"".join(
        source.choice((b"\xa1\x01k\xa1\x01v", b"\xa1\x03key\x54\x05", b"\xa1\x01z\x41"))
        for _ in range(count)
    )
    odd = source.randrange(12) == 0
    return section(source, 0x74, 0xC1, pairs + b"\x40" * odd, 2 * count + odd)


def data_section(source: random.Random) -> bytes:
    body = b"b" * source.choice((0, 1, 2, 5, 100, 255, 256, 300))
    size = len(body)
    if not source.randrange(16):
        size = source.choice((size + 1, max(size - 1, 0), *SIZES))
    if size < 256 and source.randrange(4):
        return b"\x00\x53\x75\xa0" + bytes((size,)) + body
    return b"\x00\x53\x75\xb0" + struct.pack(">I", size) + body


def payloads(source: random.Random) -> list[Any]:
    """Return encoded messages: usual, captured, damaged, cut off, or no bytes at all."""
    found: list[Any] = []
    for _ in range(source.randrange(6)):
        data = usual_payload(source)
        match source.randrange(16):
            case 0 | 1:
                data = mutated([data or b"\x00", *CORPUS], source)
            case 2:
                data = mutated([data or b"\x00"], source)
            case 3:
                data = data[: source.randrange(len(data) + 1)]
            case 6 | 7:
                data = data[: source.choice(section_starts(data)) + source.randrange(16)]
            case 4:
                data = source.choice(CORPUS)
            case 5 if not source.randrange(3):
                found.append(source.choice((Octets(data), bytearray(data), None, "text", 7)))
                continue
        found.append(data)
    return found


def section_starts(data: bytes) -> list[int]:
    """Return where sections may begin, and the end."""
    return [at for at in range(len(data)) if data.startswith(b"\x00\x53", at)] + [len(data)]


# --- envelopes ------------------------------------------------------------------------------------


def usual_envelope(source: random.Random) -> Envelope:
    """Return an envelope as `slice_message` makes them of usual messages."""
    message_id = source.choice((None, None, b"\xa1\x02m1", b"\x98" + bytes(range(16))))
    section_ = source.choice((b"", b"\x00\x53\x73\xc0\x01\x00"))
    if message_id is not None:
        more = source.choice((b"", b"\x40\x40", b"\x40\x40\xa1\x05label"))
        count = {0: 1, 2: 3, 9: 4}[len(more)]
        section_ = b"\x00\x53\x73\xc0" + bytes((len(message_id + more) + 1, count))
        section_ += message_id + more
    return Envelope(
        size_bytes=source.choice((100, 101, 5_000)),
        is_durable=bool(source.randrange(2)),
        message_id=message_id,
        properties=section_,
        application_properties=source.choice((b"", b"\x00\x53\x74\xc1\x01\x00")),
        body=source.choice((b"", b"\x00\x53\x75\xa0\x01x", b"\x00\x53\x75\xb0" + bytes(300))),
    )


_ID = b"\xa1\x02m1"
_PAIR = b"\xa3\x01a\x41"

ODDITIES: dict[str, tuple[Any, ...]] = {
    "annotation_count": (1, 2, 99, 100, 101, 124, 125, 128, -1, True, False, None, *HUGE),
    "annotations": (
        _PAIR, _PAIR * 10, b"x" * MOST_ANNOTATION_BYTES, b"x" * (MOST_ANNOTATION_BYTES + 1),
        b"x" * 255, b"x" * 256, Octets(_PAIR), bytearray(_PAIR), None,
    ),
    "application_properties": (
        b"\x00\x53\x74\xd1" + struct.pack(">II", 32_768 - 8, 2) + bytes(32_768 - 12),
        b"\x00\x53\x74\xd1" + struct.pack(">II", 32_769 - 8, 2) + bytes(32_769 - 12),
        b"x" * 32_767, b"x" * 32_768, b"x" * 32_769, b"x" * 65_537,
        Octets(b"\x00\x53\x74\xc1\x01\x00"), Octets(), bytearray(b"ab"), None, 7,
    ),
    "body": (Octets(b"ab"), Octets(), bytearray(b"ab"), None, "text"),
    "dead_letter_source": (b"", b"queue"),
    "delivery_annotations": (b"\x00\x00\x00\x02" + _PAIR, Octets(), bytearray(), None),
    "hop_count": (1, 2, 255, 256, -1, True, False, None, *HUGE),
    "is_durable": (True, False),
    "message_id": (
        b"", b"\x40", b"\xa1\x02m2", b"\xa1\x02m", b"\xa1\x03m1x", _ID, Octets(_ID),
        b"\x98" + bytes(16), b"x" * 300, b"\xa1\x81" + b"x" * 129,
    ),
    "origin_sequence": (0, 1, -1, *HUGE),
    "partition_key": (b"", b"key", b"k" * 128, b"k" * 129),
    "priority": (0, 4, 9, 255, 256, True),
    "properties": (
        b"", b"\x00\x53\x73\xc0\x01\x00", b"\x00\x53\x73\x45",
        b"\x00\x53\x73\xd0\x00\x00\x00\x08\x00\x00\x00\x01" + _ID,
        b"\x00\x53\x73\xc0\x05\x01" + _ID, b"\x00\x53\x73\xc0\x06\x02\x40" + _ID,
        b"\x00\x53\x74\xc0\x05\x01" + _ID, b"\x00\x53\x73\xc0\x05\x01",
        b"\x00\x53\x73\xc0\x84\x01\xa1\x80" + b"x" * 128, b"x" * 127, b"x" * 128, b"x" * 129,
        b"x" * 65_537, Octets(b"\x00\x53\x73\xc0\x05\x01" + _ID), Octets(),
        bytearray(b"\x00\x53\x73\xc0\x05\x01" + _ID),
    ),
    "scheduled_ms": (0, NOW_MS - 1, NOW_MS, NOW_MS + 1, *HUGE),
    "session_id": (b"", b"session", b"s" * 128, b"s" * 129),
    "shared": (SharedBody(10),),
    "size_bytes": (
        0, -1, 99, 1_000, 9_999, 10_000, 10_001, 2**40, True, 2**63, 2**64, -(2**63) - 1,
    ),
    "ttl_ms": (0, 1, 1_000, 2**32, 922_337_203_685_477, -1, *HUGE),
    "via_partition_key": (b"", b"key", b"k" * 129),
}  # fmt: skip
"""Field -> values that are unusual, or at a limit of what is."""


def envelope(source: random.Random, *, oddities: int = 8) -> Envelope:
    """Return an envelope, of which one in `oddities` has a field or two from `ODDITIES`."""
    made = usual_envelope(source)
    while not source.randrange(oddities):
        name = source.choice(NAMES)
        setattr(made, name, source.choice(ODDITIES[name]))
    return made


NAMES = sorted(ODDITIES)


class LaterEnvelope(Envelope):
    """Another class with the same slots."""

    __slots__ = ()


def foreign(source: random.Random) -> Any:
    """Return an object of a class that no list of a burst has."""
    return source.choice((None, 7, b"octets", LaterEnvelope(), Envelope, object(), [], ()))


def some(
    source: random.Random, make: Callable[[random.Random], Any], *, most: int = 7
) -> list[Any]:
    """Return a few objects, at times the same one twice, or a foreign one between them."""
    made = [make(source) for _ in range(source.randrange(most + 1))]
    if made and not source.randrange(8):
        made.append(source.choice(made))
    if not source.randrange(24):
        made.insert(source.randrange(len(made) + 1), foreign(source))
    return made


# --- queue entries and deliveries -----------------------------------------------------------------


def queued(source: random.Random) -> QueuedMessage:
    """Return a message that waits, usually loaded, new and not failed."""
    row_key = source.choice((FIRST_KEY - 1, FIRST_KEY, FIRST_KEY + 1, FIRST_KEY + 99))
    enqueued_ms = source.choice((NOW_MS - 1_000, NOW_MS - 1, NOW_MS))
    made = QueuedMessage(row_key, row_key + 7, enqueued_ms, envelope(source, oddities=12))
    match source.randrange(24):
        case 0:
            made.failures = source.choice((1, 2, 9, 10, 11, -1, False, True, *HUGE[1:]))
        case 1:
            made.envelope = None
            made.size_bytes, made.ttl_ms = 200, source.choice((None, 10))
        case 2:
            made.row_key = source.choice((0, -1, True, *HUGE))
        case 3:
            made.sequence = source.choice((0, -1, *HUGE))
        case 4:
            made.is_deferred = True
        case 5:
            made.recorded = source.choice((1, 2, -1, True, *HUGE))
        case 6:
            made.envelope = foreign(source)
    return made


def locked(source: random.Random) -> QueuedMessage:
    """Return a message that is locked, usually for a while yet."""
    made = queued(source)
    made.token = source.randbytes(8) + source.choice((b"--suffix", b"--other-", b"short"))
    made.locked_until_ms = NOW_MS + source.choice((30_000, 30_000, 30_000, 1, 0, -1, *HUGE))
    made.receiver = None
    return made


def delivery(source: random.Random) -> Any:
    """Return a delivery, usually one that a receiver of a queue without TTL gets."""
    fields: list[Any] = [
        source.randbytes(16), NOW_MS + 30_000, source.randrange(2**62), NOW_MS,
        source.choice((0, 0, 0, 1, 2, 255, 256)), None, envelope(source),
    ]  # fmt: skip
    if not source.randrange(8):
        match source.randrange(7):
            case 0:
                token = source.randbytes(source.choice((0, 15, 16, 17)))
                fields[0] = source.choice((token, Octets(token), bytearray(token)))
            case 1 | 2 | 3 as at:
                fields[at] = source.choice((0, 1, -1, True, *HUGE))
            case 4:
                fields[4] = source.choice((-1, 254, 255, 256, True, 2**32, *HUGE))
            case 5:
                fields[5] = source.choice((0, 1, 60_000, 2**32, 922_337_203_685_477))
            case _:
                fields[6] = LaterEnvelope()
    match source.randrange(24):
        case 0:
            return tuple(fields)
        case 1:
            return fields
        case 2 if not source.randrange(4):
            return tuple(fields[:6])
        case 3 if not source.randrange(4):
            return (*fields, 1)
    return tuple.__new__(Delivery, fields)


def row(source: random.Random) -> Any:
    """Return a row of a new message."""
    fields: list[Any] = [source.randrange(2**62), NOW_MS, envelope(source)]
    if not source.randrange(8):
        fields[source.randrange(2)] = source.choice((0, 1, -1, True, *HUGE))
    if not source.randrange(24):
        return source.choice((fields, tuple(fields[:2]), (*fields, 1)))
    return tuple(fields)


def record(source: random.Random) -> Any:
    """Return the columns of a stored row as the reader gets them."""
    stored = envelope(source, oddities=16)
    try:
        blob = pack_envelope(stored)
    except Exception:  # noqa: BLE001 - no row has such an envelope
        blob = b"\1\1"
    if not source.randrange(8):
        blob = mutated([blob], source)
    columns: list[Any] = [
        source.randrange(2**62), NOW_MS, blob,
        source.choice((None, b"", b"properties")), source.choice((None, b"", b"body")),
        None, None, None, None,
    ]  # fmt: skip
    if not source.randrange(8):
        patch, kept = (True, 2, b"patched"), (7, 2, None, None, None, None)
        at, value = source.choice(((5, 1), (5, 2), (6, patch), (7, 7), (8, kept)))
        columns[at] = value
    return tuple(columns)
