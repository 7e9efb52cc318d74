"""Throws mutated captures at both roles of the engine: `fuzz_connection.py SECONDS [SEED]`.

The captures in corpus/ are one side of real conversations (the Python SDK, Qpid Proton): those
named client-* are fed to a broker engine, those named broker-* to a client engine. For all
bytes the engine raises nothing, answers in whole legal frames, gives a reason to close, keeps
memory within its limits and does not hang.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from postbus.amqp.client import ClientConnection, ClientSession
from postbus.amqp.conditions import AmqpLinkError
from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveriesUpdated,
    Event,
    LinkAttached,
    LinkFlowed,
    OversizeReceived,
    SaslInitReceived,
    TransferReceived,
    UnknownDeliveries,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.amqp.performatives import ACCEPTED, RELEASED, Rejected
from postbus.message.codec import Described, decode_value
from tests.fuzz_bounds import Bounds

CORPUS = Path(__file__).parent / "corpus"
LIMITS = Limits(
    max_frame_bytes=16_384,
    max_message_bytes=20_000,
    channel_max=15,
    handle_max=15,
    incoming_window=8,
)
SECONDS_A_CASE = 2.0
FULL_LISTS = {0x10: 10, 0x11: 8, 0x12: 14, 0x13: 11, 0x14: 11, 0x15: 6, 0x16: 3, 0x17: 1, 0x18: 1}
NUMBERS = (0, 1, 2, 7, 8, 255, 256, 511, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF)
CONSTRUCTORS = bytes.fromhex(
    "00 40 41 42 43 44 45 50 51 52 53 54 55 56 60 61 70 71 72 73 74 80 81 82 83 84 94 98"
    "a0 a1 a3 b0 b1 b3 c0 c1 d0 d1 e0 f0"
)


def load_corpus() -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))}


# --- mutation -----------------------------------------------------------------------------------


def split_frames(data: bytes) -> list[bytes]:
    """Cut a capture into protocol headers and frames."""
    found = []
    while data:
        size = 8 if data[:4] == b"AMQP" else max(int.from_bytes(data[:4], "big"), 8)
        found.append(data[:size])
        data = data[size:]
    return found


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change a few octets at random."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(6):
            case 0 if changed:
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at] = rng.choice(CONSTRUCTORS)
            case 2:
                changed[at : at + 4] = rng.choice(NUMBERS).to_bytes(4, "big")
            case 3:
                changed[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 4:
                del changed[at : at + rng.choice((1, 2, 8, 40))]
            case _:
                other = rng.randrange(len(changed)) if changed else 0
                changed[at:at] = changed[other : other + rng.choice((1, 4, 20, 100))]
    return bytes(changed)


def mutate_frames(frames: list[bytes], others: list[bytes], rng: random.Random) -> list[bytes]:
    """Change, drop, repeat, swap or borrow whole frames; sizes are put right most of the time."""
    frames = list(frames)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(frames))
        match rng.randrange(7):
            case 0 | 1 | 2:
                head, body = frames[at][:8], mutate_bytes(frames[at][8:], rng)
                if rng.randrange(8) and head[:4] != b"AMQP":
                    head = (len(body) + 8).to_bytes(4, "big") + head[4:]
                frames[at] = head + body
            case 3 if len(frames) > 1:
                del frames[at]
            case 4:
                frames[at:at] = [frames[at]] * rng.choice((1, 2, 20))
            case 5:
                other = rng.randrange(len(frames))
                frames[at], frames[other] = frames[other], frames[at]
            case _:
                frame = rng.choice(others)
                if rng.randrange(2):
                    frame = frame[:6] + rng.choice((0, 1, 2, 999)).to_bytes(2, "big") + frame[8:]
                frames.insert(at, frame)
    return frames


# --- one case -----------------------------------------------------------------------------------


class Owner:
    """Uses an engine as the edge may use it, at random."""

    def __init__(self, engine: Connection, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.out = b""
        self.closed: ConnectionClosed | None = None

    def feed(self, data: bytes) -> None:
        while True:
            events = list(one_by_one(self.engine.receive_data(data, 1)))
            for event in events:
                assert self.closed is None, "an event after the connection closed"
                self.handle(event)
            self.out += b"".join(self.engine.data_to_send())
            if not any(type(event) is SaslInitReceived for event in events):
                break
            data = b""
        assert len(self.engine._rest) <= LIMITS.max_frame_bytes
        budget = LIMITS.max_partial_messages * LIMITS.max_message_bytes
        assert 0 <= self.engine.partial_bytes <= budget

    def handle(self, event: Event) -> None:
        rng = self.rng
        match event:
            case SaslInitReceived():
                if rng.randrange(20):
                    self.engine.accept_sasl()
                else:
                    self.engine.refuse_sasl()
            case ConnectionOpened() if isinstance(self.engine, ClientConnection):
                for _ in range(2):  # the Python SDK's first channel is 1
                    self.attach(self.engine.begin())
            case ConnectionClosed():
                self.closed = event
            case LinkAttached(link):
                if isinstance(self.engine, ClientConnection) and isinstance(link, IncomingLink):
                    link.grant(10)
                elif isinstance(self.engine, ClientConnection) or not rng.randrange(10):
                    pass  # a client has nothing to answer; a broker may still be looking it up
                elif not rng.randrange(6):
                    link.refuse(AmqpLinkError("amqp:not-found", "no such queue"))
                elif isinstance(link, IncomingLink):
                    link.accept(max_message_bytes=20_000, credit=rng.choice((0, 5, 1_000)))
                elif isinstance(link, OutgoingLink):
                    link.accept()
            case TransferReceived(link, delivery_id) | OversizeReceived(link, delivery_id):
                state = rng.choice((ACCEPTED, Rejected("amqp:not-allowed", "no")))
                link.settle(delivery_id, delivery_id, state)
            case LinkFlowed(link):
                self.send_some(link)
                if link.is_draining:
                    link.drained()
            case DeliveriesUpdated(link, ids, _, state, is_settled) if not is_settled:
                link.settle(ids[0], ids[0], state or RELEASED)
                if not rng.randrange(10):
                    link.detach(AmqpLinkError("amqp:link:detach-forced", "enough"))
            case UnknownDeliveries(session, first, last):
                assert (last - first) % 2**32 <= 2**16
                session.settle_unknown(first, last, Rejected("amqp:not-found", "unknown"))
            case _:
                pass

    def attach(self, session: ClientSession) -> None:
        """Attach under names the captures use, so that their answers find their links."""
        for name in names_of(load_corpus()):
            session.attach_receiver(name, "queue")
            session.attach_sender(name, "queue")

    def send_some(self, link: OutgoingLink) -> None:
        for number in range(min(max(link.credit, 0), self.rng.choice((0, 1, 3)))):
            payload = bytes(self.rng.choice((1, 400, 5_000)))
            link.send(number.to_bytes(16, "big"), (payload,), is_settled=not number % 2)


def names_of(corpus: dict[str, bytes]) -> list[str]:
    names = {
        value.value[0]
        for name, data in corpus.items()
        if name.startswith("broker-")
        for frame in split_frames(data)
        if frame[8:11] == b"\x00\x53\x12"
        for value in [decode_value(frame, 8)[0]]
    }
    return sorted(names)[:6]


def check_output(owner: Owner) -> None:
    """Every answer is a whole frame, its performative in the form that all clients read."""
    last = None
    for frame in split_frames(owner.out):
        if frame[:4] == b"AMQP":
            continue
        assert int.from_bytes(frame[:4], "big") == len(frame)
        assert frame[4] == 2
        if len(frame) == 8:
            continue
        assert frame[8:10] == b"\x00\x53"
        value, end = decode_value(frame, 8)
        assert isinstance(value, Described)
        last = value
        if frame[5] == 0:
            assert len(value.value) == FULL_LISTS[value.descriptor]
            assert end == len(frame) or value.descriptor == 0x14
    if owner.closed is not None and owner.engine.is_opened:
        assert last is not None
        assert last.descriptor == 0x18, "the last frame is not a close"
        if type(owner.closed.error).__name__ == "AmqpConnectionError":
            condition, description, _ = last.value[0].value
            assert condition
            assert description


def run_case(corpus: dict[str, bytes], seed: int) -> None:
    """Run one mutated capture. Raises the first error found; the seed repeats it."""
    rng = random.Random(seed)
    name = rng.choice(sorted(corpus))
    frames = split_frames(corpus[name])
    others = [each for data in corpus.values() for each in split_frames(data)[:40]]
    kept = rng.randrange(7) if rng.randrange(3) else 0  # the opening is left alone now and then
    frames = frames[:kept] + mutate_frames(frames[kept:] or frames, others, rng)
    data = b"".join(frames)
    if not rng.randrange(6):
        data = mutate_bytes(data, rng)
    engine: Connection
    if name.startswith("broker-"):
        engine = ClientConnection(container_id="client", limits=LIMITS, hostname="host")
        engine.start()
    else:
        engine = Connection(container_id="broker", limits=LIMITS)
    owner = Owner(engine, rng)
    began = time.perf_counter()
    while data:
        size = rng.choice((1, 7, 100, 5_000, 1 << 20))
        owner.feed(data[:size])
        data = data[size:]
    engine.tick(1_000_000_000)
    engine.close()
    owner.out += b"".join(engine.data_to_send())
    assert engine.is_closed
    took = time.perf_counter() - began
    assert took < SECONDS_A_CASE, f"{took:.1f} s"
    check_output(owner)


def main(arguments: list[str]) -> int:
    seconds = float(arguments[0]) if arguments else 10.0
    seed = int(arguments[1]) if len(arguments) > 1 else random.SystemRandom().getrandbits(48)
    corpus = load_corpus()
    deadline = time.monotonic() + seconds
    count, bounds = 0, Bounds()
    while time.monotonic() < deadline:
        try:
            with bounds.step():
                run_case(corpus, seed + count)
        except Exception:
            sys.stderr.write(f"failed: fuzz_connection.py 1 {seed + count}\n")
            raise
        count += 1
    sys.stdout.write(f"{count} cases from seed {seed}: nothing wrong, {bounds}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
