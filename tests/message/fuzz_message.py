"""Fuzzes the value codec and the slicer: `python tests/message/fuzz_message.py SECONDS [SEED]`.

Mutates the captured messages of the corpus. For all octets, only `DecodeError` may come
out, nothing may take long, and accepted messages must survive storing and delivery unchanged.
"""

from __future__ import annotations

import random
import struct
import sys
import time
from pathlib import Path

from postbus.message.codec import DecodeError, decode_value, encode_value, skip_value
from postbus.message.delivery import encode_message
from postbus.message.envelope import Envelope
from postbus.message.patch import PropertiesTooLarge, check_properties, merge_properties
from postbus.message.rows import pack_envelope, unpack_envelope
from postbus.message.sections import explode_batch, slice_message
from tests.fuzz_bounds import Bounds, program_arguments

CORPUS = Path(__file__).parent / "corpus"
SLOW_SECONDS = 1.0

TOKENS = [
    *(bytes((code,)) for code in (0x00, 0x40, 0x41, 0x43, 0x45, 0x53, 0x80, 0x98, 0xFF)),
    *(bytes((code, size)) for code in (0xA0, 0xA1, 0xA3, 0xC0, 0xC1, 0xE0) for size in (0, 1, 255)),
    *(
        bytes((code,)) + struct.pack(">I", size)
        for code in (0xB0, 0xB1, 0xB3, 0xD0, 0xD1, 0xF0, 0x70)
        for size in (0, 1, 4, 2**31, 2**32 - 1)
    ),
    *(bytes((0x00, 0x53, code)) for code in range(0x6F, 0x7A)),
    b"\xa3\x13x-opt-partition-key",
    b"\xa3\x1cx-opt-scheduled-enqueue-time",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
]


def load_corpus() -> list[bytes]:
    return [bytes.fromhex(path.read_text()) for path in sorted(CORPUS.glob("*.hex"))]


def mutated(corpus: list[bytes], source: random.Random) -> bytes:
    """Return a message with one to eight damages."""
    data = bytearray(source.choice(corpus))
    for _ in range(source.randint(1, 8)):
        at = source.randrange(len(data) + 1)
        match source.randrange(6):
            case 0:
                data[at : at + 1] = bytes((source.randrange(256),))
            case 1 if data:
                data[min(at, len(data) - 1)] ^= 1 << source.randrange(8)
            case 2:
                data[at:at] = source.choice(TOKENS)
            case 3:
                token = source.choice(TOKENS)
                data[at : at + len(token)] = token
            case 4:
                del data[at : at + source.randint(1, 12)]
            case _:
                other = source.choice(corpus)
                start = source.randrange(len(other))
                data[at:at] = other[start : start + source.randint(1, 40)]
    return bytes(data)


def check_values(data: bytes) -> None:
    """Decode all values of a buffer; each must survive encoding and decoding."""
    pos = 0
    try:
        while pos < len(data):
            value, after = decode_value(data, pos)
            assert after == skip_value(data, pos, len(data)) <= len(data)
            encoded = encode_value(value)
            assert encode_value(decode_value(encoded)[0]) == encoded
            pos = after
    except DecodeError:
        return


def check_envelope(envelope: Envelope) -> None:
    """Store, deliver and patch accepted messages."""
    check_properties(envelope)
    stored = unpack_envelope(
        pack_envelope(envelope), envelope.application_properties, envelope.body
    )
    assert same(stored, envelope)
    for ttl_ms in (stored.ttl_ms, None):
        data = encode_message(
            stored,
            sequence=1,
            enqueued_ms=2,
            delivery_count=0,
            ttl_ms=ttl_ms,
            locked_until_ms=3,
            lock_token=bytes(16),
        )
        if ttl_ms is not None:  # other times: the same message to clients that ignore them
            assert slice_message(data).message_id == envelope.message_id
            assert slice_message(data).session_id == envelope.session_id
    assert same(slice_message(data), envelope)
    try:
        merge_properties(envelope.application_properties, {"DeadLetterReason": "fuzz"})
    except (DecodeError, PropertiesTooLarge):
        return


def same(left: Envelope, right: Envelope) -> bool:
    names = set(Envelope.__slots__) - {"size_bytes", "ttl_ms"}
    return all(getattr(left, name) == getattr(right, name) for name in names)


def check(data: bytes) -> int:
    """Run everything on one input; return the number of accepted messages."""
    check_values(data)
    accepted = 0
    try:
        check_envelope(slice_message(data))
        accepted += 1
    except DecodeError:
        pass
    try:
        for member in explode_batch(data):
            check_envelope(member)
            accepted += 1
    except DecodeError:
        pass
    return accepted


def fuzz(
    seconds: float, seed: int, max_inputs: int | None = None, bounds: Bounds | None = None
) -> tuple[int, int]:
    """Return the numbers of tried inputs and of accepted messages."""
    bounds = bounds or Bounds()
    source = random.Random(seed)
    corpus = load_corpus()
    pool = list(corpus)
    ends_at = time.monotonic() + seconds
    tried = accepted = 0
    while time.monotonic() < ends_at and (max_inputs is None or tried < max_inputs):
        data = mutated(pool, source)
        started = time.process_time()
        try:
            with bounds.step():
                found = check(data)
        except BaseException:
            sys.stderr.write(f"seed {seed}, input {tried}: {data.hex()}\n")
            raise
        assert time.process_time() - started < SLOW_SECONDS, data.hex()
        tried += 1
        accepted += found
        if found and 0 < len(data) < 4_096 and source.random() < 0.05:
            pool[len(corpus) :] = [*pool[len(corpus) :][-200:], data]
    return tried, accepted


def main() -> None:
    seconds, seed = program_arguments()
    bounds = Bounds()
    tried, accepted = fuzz(seconds, seed, bounds=bounds)
    sys.stdout.write(f"{tried} inputs, {accepted} messages accepted, seed {seed}, {bounds}\n")


if __name__ == "__main__":
    main()
