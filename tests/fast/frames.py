"""Reads of frames for both builds: runs that look alike, with others, damaged and cut off ones.

All choices come from a source of random numbers, which Hypothesis or a fuzzer gives.
"""

from __future__ import annotations

import random
import struct
from typing import Any

from postbus.amqp.frames import (
    _ACCEPTED_TAILS,
    _TAILS,
    OutcomeForm,
    TransferForm,
    learn_outcome,
    learn_transfer,
    parse_disposition,
    parse_transfer,
)
from tests.amqp.fuzz_connection import (
    NUMBERS,
    load_corpus,
    mutate_bytes,
    mutate_frames,
    split_frames,
)

TAILS = sorted(_TAILS)
USUAL_TAIL = b"\x43\x42\x42\x40\x40\x42\x42\x42"
ACCEPTED = sorted(_ACCEPTED_TAILS)
HOSTILE_SIZES = (0, 1, 7, 8, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)


def transfer(
    delivery_id: int = 300,
    payload: bytes = b"payload",
    *,
    channel: int = 0,
    handle: bytes = b"\x43",
    tag: bytes = bytes(16),
    tail: bytes = USUAL_TAIL,
) -> bytes:
    """Return a frame with a plain transfer."""
    fields = handle + b"\x70" + struct.pack(">I", delivery_id)
    fields += b"\xa0" + bytes((len(tag),)) + tag + tail
    body = b"\x00\x53\x14\xc0" + bytes((len(fields) + 1, _TAILS[tail][0])) + fields + payload
    return struct.pack(">IBBH", len(body) + 8, 2, 0, channel) + body


def form_of_transfer(frame: bytes, payload: bytes) -> TransferForm:
    channel = int.from_bytes(frame[6:8], "big")
    form = learn_transfer(frame, 8, len(frame) - len(payload), channel)
    assert form is not None
    return form


def outcome(
    first: int = 300, last: int | None = None, *, channel: int = 0, tail: bytes = ACCEPTED[0]
) -> bytes:
    """Return a frame with a receiver's disposition that accepts deliveries."""
    count = 5 if tail.endswith((b"\x45", b"\x00")) else 6
    body = b"\x00\x53\x15\xc0" + bytes((len(tail) + 12, count)) + b"\x41\x70"
    body += struct.pack(">IBI", first, 0x70, first if last is None else last) + tail
    return struct.pack(">IBBH", len(body) + 8, 2, 0, channel) + body


def form_of_outcome(frame: bytes, *, is_settled: bool = True) -> OutcomeForm:
    channel = int.from_bytes(frame[6:8], "big")
    form = learn_outcome(frame, 8, len(frame), channel, is_settled=is_settled)
    assert form is not None
    return form


def damaged(source: random.Random, data: bytes) -> bytes:
    """Change an octet, a size, or what is there."""
    changed = bytearray(data)
    at = source.randrange(len(changed) + 1)
    match source.randrange(5):
        case 0 if at < len(changed):
            changed[at] ^= 1 << source.randrange(8)
        case 1:
            changed[:4] = source.choice(HOSTILE_SIZES).to_bytes(4, "big")
        case 2:
            changed[at : at + 4] = source.choice(NUMBERS).to_bytes(4, "big")
        case 3:
            del changed[at : at + source.choice((1, 2, 8))]
        case _:
            changed[at:at] = bytes(source.choice((1, 2, 8)))
    return bytes(changed)


def transfers_read(source: random.Random) -> list[Any]:
    """Return the arguments of `scan_transfers`: form, octets, position, maximum frame size."""
    same: dict[str, Any] = {
        "channel": source.choice((0, 1, 0xFFFF)),
        "handle": source.choice((b"\x43", b"\x52\x01")),
        "tag": bytes(source.choice((16, 16, 16, 4, 0, 32))),
        "tail": USUAL_TAIL if source.randrange(3) else source.choice(TAILS),
    }
    form = form_of_transfer(transfer(payload=b"", **same), b"")
    frames = []
    for _ in range(source.randrange(7)):
        tag = source.randbytes(len(same["tag"]))
        payload = source.randbytes(source.choice((0, 1, 5, 60)))
        changes: dict[str, Any] = {}
        if not source.randrange(12):
            changes = source.choice(
                ({"channel": 3}, {"handle": b"\x52\x02"}, {"tag": b"longer" + tag[:20]},
                 {"tail": source.choice(TAILS)})
            )  # fmt: skip
        number = source.choice((0, 1, 300, 0x7FFF_FFFF, 0xFFFF_FFFF))
        frames.append(transfer(number, payload, **{**same, "tag": tag, **changes}))
    data, pos = read_of(source, frames)
    most = source.choice((form.least_bytes, form.least_bytes + 5, 512, 512, 1 << 20, 2**32, 0))
    return [form, data, pos, most]


def outcomes_read(source: random.Random) -> list[Any]:
    """Return the arguments of `scan_outcomes`: form, octets, position."""
    channel, tail = source.choice((0, 1, 0xFFFF)), source.choice(ACCEPTED)
    form = form_of_outcome(outcome(channel=channel, tail=tail))
    frames = []
    for _ in range(source.randrange(7)):
        number = source.choice((0, 1, 300, 0x7FFF_FFFF, 0xFFFF_FFFF))
        last, its_tail = number, tail
        if not source.randrange(12):
            last = source.choice((0, 1, 300, 301))
        if not source.randrange(12):
            its_tail = source.choice(ACCEPTED)
        frames.append(outcome(number, last, channel=channel, tail=its_tail))
    data, pos = read_of(source, frames)
    return [form, data, pos]


def read_of(source: random.Random, frames: list[bytes]) -> tuple[bytes, int]:
    """Return frames with what is before and after them in a read, some damaged; and their place."""
    if frames and not source.randrange(3):
        at = source.randrange(len(frames))
        frames[at] = damaged(source, frames[at])
    before = source.choice((b"", b"", b"\x00" * 8, b"x"))
    data = before + b"".join(frames)
    match source.randrange(6):
        case 0:
            data = data[: source.randrange(len(data) + 1)]
        case 1:
            data += source.randbytes(source.choice((1, 4, 60)))
        case 2:
            data += b"\xff" * 100
    return data, source.choice((len(before), len(before), len(before), len(data), len(data) + 9))


def captured_forms() -> list[tuple[TransferForm | OutcomeForm, bytes]]:
    """Return the forms of captured frames, each with the frames from there on."""
    found: list[tuple[TransferForm | OutcomeForm, bytes]] = []
    for data in load_corpus().values():
        pos = 0
        for each in split_frames(data):
            form: TransferForm | OutcomeForm | None = None
            channel = int.from_bytes(each[6:8], "big")
            if each[8:11] == b"\x00\x53\x14":
                _, payload_at = parse_transfer(each, 8, len(each))
                form = learn_transfer(each, 8, payload_at, channel)
            elif each[8:11] == b"\x00\x53\x15" and parse_disposition(each, 8, len(each)):
                form = learn_outcome(each, 8, len(each), channel, is_settled=True)
            if form is not None:
                found.append((form, data[pos:]))
            pos += len(each)
    return found


CAPTURED = captured_forms()


def captured_read(source: random.Random) -> list[Any]:
    """Return the arguments of a scan: a captured form, its frames, some damaged or repeated."""
    form, data = source.choice(CAPTURED)
    rest = split_frames(data)[:20]
    if source.randrange(2):
        rest = [rest[0]] * source.choice((1, 2, 5)) + rest
    if source.randrange(3):
        rest = mutate_frames(rest, rest, source)
    read = b"".join(rest)
    if not source.randrange(3):
        read = mutate_bytes(read, source)
    return [form, read, source.choice((0, 0, 0, len(rest[0]))), source.choice((512, 16_384, 2**32))]


def packed_link(source: random.Random) -> list[Any]:
    """Return the arguments of `link_frames` and of its result."""
    tags, parts, sizes = [], [], []
    for _ in range(source.randrange(1, 6)):
        payload = tuple(
            source.randbytes(source.choice((0, 1, 60))) if source.randrange(20) else bytes(20_000)
            for _ in range(source.choice((4, 4, 1, 0)))
        )
        tags.append(source.randbytes(16))
        parts.append(payload)
        sizes.append(sum(map(len, payload)))
    first = source.choice((0, 1, 0x4000_0000, 0xFFFF_FFFF - len(tags)))
    channel, handle = source.choice((0, 7, 0xFFFF)), source.choice((0, 1, 0xFFFF_FFFF))
    return [channel, handle, first, tags, parts, sizes, bool(source.randrange(2))]
