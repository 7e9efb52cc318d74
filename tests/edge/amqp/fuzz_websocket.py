"""Fuzzes the WebSocket reader: `python -m tests.edge.amqp.fuzz_websocket SECONDS [SEED]`.

A case is a random conversation of a client: fragments, control frames between them, all lengths of
head. It is cut into random reads. The written stream must come out for all cuts; a mutated
conversation is read or refused with a close code, and nothing is kept but an unfinished head.
"""

from __future__ import annotations

import random
import sys
import time

from postbus.edge.amqp.websocket_frames import FrameReader, WebSocketError
from tests.fuzz_bounds import Bounds

MAX_MESSAGE_BYTES = 100_000
MAX_KEPT_BYTES = 131
"""The longest control frame; heads of others are shorter."""
CODES = {1002, 1003, 1007, 1009}
SIZES = (0, 1, 2, 3, 4, 5, 124, 125, 126, 127, 4_000, 65_535, 65_536, 70_000)
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def frame(rng: random.Random, opcode: int, payload: bytes, *, is_last: bool = True) -> bytes:
    """Return a frame of a client; its length may be written longer than needed."""
    size, mask = len(payload), rng.randbytes(4)
    head = bytes([(0x80 if is_last else 0) | opcode])
    if size < 126 and (opcode >= CLOSE or rng.random() < 0.9):
        head += bytes([0x80 | size])
    elif size < 65_536 and rng.random() < 0.9:
        head += b"\xfe" + size.to_bytes(2, "big")
    else:
        head += b"\xff" + size.to_bytes(8, "big")
    keys = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return head + mask + (int.from_bytes(payload, "big") ^ keys).to_bytes(size, "big")


def conversation(rng: random.Random) -> tuple[list[bytes], bytes]:
    """Return frames and the stream that they carry."""
    frames: list[bytes] = []
    stream = b""
    for _ in range(rng.randrange(1, 8)):
        left = rng.choice(SIZES)
        opcode = BINARY
        while True:
            part = rng.randbytes(rng.randint(0, left))
            left -= len(part)
            if rng.random() < 0.5:
                part += rng.randbytes(left)
                left = 0
            stream += part
            frames.append(frame(rng, opcode, part, is_last=not left))
            opcode = CONTINUATION
            if rng.random() < 0.3:
                frames.append(
                    frame(rng, rng.choice((PING, PONG)), rng.randbytes(rng.choice(SIZES[:8])))
                )
            if not left:
                break
    return frames, stream


def mutated(rng: random.Random, frames: list[bytes]) -> bytes:
    frames = list(frames)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(frames))
        changed = bytearray(frames[at])
        match rng.randrange(5):
            case 0:
                changed[:1] = rng.randbytes(1)
                changed[rng.randrange(min(len(changed), 14))] = rng.randrange(256)
            case 1:
                del changed[rng.randrange(len(changed) + 1) :]
            case 2:
                frames.insert(at, frame(rng, CLOSE, rng.randbytes(rng.randrange(6))))
            case 3:
                frames.insert(at, frame(rng, rng.randrange(16), rng.randbytes(rng.randrange(200))))
            case _:
                changed += rng.randbytes(rng.randrange(20))
        frames[at] = bytes(changed)
    return b"".join(frames)


def read(rng: random.Random, data: bytes) -> tuple[bytes, int | None]:
    """Return the stream of some bytes and the code of the close frame."""
    reader = FrameReader(MAX_MESSAGE_BYTES)
    stream, at = b"", 0
    code = None
    while at < len(data):
        size = rng.choice((1, 2, 3, 5, 13, 100, 65_536, 1 << 20))
        received = reader.receive(data[at : at + size])
        at += size
        stream += received.payload
        code = received.close_code if code is None else code
        assert len(reader._rest) <= MAX_KEPT_BYTES
    return stream, code


def run_case(seed: int) -> None:
    rng = random.Random(seed)
    frames, stream = conversation(rng)
    assert read(rng, b"".join(frames)) == (stream, None)
    broken = mutated(rng, frames)
    found = []
    for _ in range(2):
        try:
            found.append(read(rng, broken))
        except WebSocketError as error:
            found.append((b"", -error.code))
    assert found[0] == found[1], "the cuts made a difference"
    assert found[0][1] is None or found[0][1] >= 0 or -found[0][1] in CODES


def main(arguments: list[str]) -> int:
    seconds = float(arguments[0]) if arguments else 10.0
    seed = int(arguments[1]) if len(arguments) > 1 else random.SystemRandom().getrandbits(48)
    deadline = time.monotonic() + seconds
    count, bounds = 0, Bounds()
    while time.monotonic() < deadline:
        try:
            with bounds.step():
                run_case(seed + count)
        except Exception:
            sys.stderr.write(f"failed: fuzz_websocket 1 {seed + count}\n")
            raise
        count += 1
    sys.stdout.write(f"{count} cases from seed {seed}: nothing wrong, {bounds}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
