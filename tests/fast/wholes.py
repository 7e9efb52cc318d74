"""Comparisons of whole engines and partitions: one uses the functions in C, the other Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from postbus.amqp.client import ClientConnection
from postbus.amqp.connection import Connection
from postbus.amqp.events import Event
from postbus.amqp.link import Link
from postbus.amqp.session import Session
from postbus.contract.entities import QueueProperties
from postbus.edge import message_ids
from postbus.entity.commands import Delivery, Disposition, Enqueue, ReceiveMode
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.message.codec import DecodeError
from postbus.message.envelope import Envelope
from postbus.message.runs import pack_copy_rows, pack_deliveries, slice_messages
from tests.amqp import fuzz_connection
from tests.amqp.fuzz_connection import LIMITS, Owner, check_output, mutate_frames, split_frames
from tests.entity.partition_rig import QUEUE, START_MS, Rig
from tests.fast import messages
from tests.fast.twins import pure_python, shown

CAPTURES = fuzz_connection.load_corpus()
FRAMES = [each for data in CAPTURES.values() for each in split_frames(data)[:40]]


# --- engines --------------------------------------------------------------------------------------


class Noting(Owner):
    """An owner that keeps what its engine gave it, by names instead of objects."""

    def __init__(self, engine: Connection, rng: random.Random) -> None:
        super().__init__(engine, rng)
        self.noted: list[Any] = []

    def handle(self, event: Event) -> None:
        self.noted.append(noted(event))
        super().handle(event)


def noted(event: Event) -> Any:
    """Return the contents of an event, sessions and links by name."""
    names = getattr(event, "_fields", None) or type(event).__slots__
    return type(event).__name__, [name_of(getattr(event, name)) for name in names]


def name_of(value: Any) -> Any:
    if isinstance(value, Link):
        return value.name
    if isinstance(value, Session):
        return value.remote_channel
    return value if isinstance(value, list | bytes) else repr(value)


def engine_of(name: str) -> Connection:
    """Return an engine for what the other side of a capture sent."""
    if name.startswith("broker-"):
        engine = ClientConnection(container_id="client", limits=LIMITS, hostname="host")
        engine.start()
        return engine
    return Connection(container_id="broker", limits=LIMITS)


def feed(name: str, pieces: list[bytes], rng: random.Random) -> tuple[list[Any], bytes]:
    """Return the events of an engine and what it wrote."""
    owner = Noting(engine_of(name), rng)
    for piece in pieces:
        owner.feed(piece)
    owner.engine.close()
    owner.out += b"".join(owner.engine.data_to_send())
    check_output(owner)
    return owner.noted, owner.out


def compare_pieces(name: str, pieces: list[bytes], seed: object = 1) -> bool:
    """Feed two engines the same; assert that they give and write the same."""
    accelerated = feed(name, pieces, random.Random(f"{seed}"))
    with pure_python():
        pure = feed(name, pieces, random.Random(f"{seed}"))
    assert accelerated == pure
    return len(accelerated[0]) > 3


def compare_engines(source: random.Random) -> bool:
    """Compare engines that are fed a damaged capture, with runs of frames in it."""
    name = source.choice(sorted(CAPTURES))
    its_frames = split_frames(CAPTURES[name])
    kept = source.randrange(7) if source.randrange(3) else 0
    rest = its_frames[kept:] or its_frames
    if source.randrange(2):
        rest = [again for each in rest for again in [each] * source.choice((1, 1, 3))]
    if source.randrange(4):
        rest = mutate_frames(rest, FRAMES, source)
    data, pieces = b"".join(its_frames[:kept] + rest), []
    while data:
        size = source.choice((1, 7, 100, 5_000, 1 << 20, 1 << 20))
        pieces.append(data[:size])
        data = data[size:]
    return compare_pieces(name, pieces[:2_000], source.randrange(2**32))


# --- a burst through all functions ----------------------------------------------------------------


def compare_bursts(source: random.Random) -> bool:
    """Compare what becomes of encoded messages from a read to frames and rows."""
    read = [each for each in messages.payloads(source) if type(each) is bytes]
    seed = source.randrange(2**32)
    accelerated = burst(read, seed)
    with pure_python():
        pure = burst(read, seed)
    assert accelerated == pure
    return not isinstance(accelerated, str)


def burst(read: list[bytes], seed: int) -> Any:
    """Slice, name, enqueue, receive, pack, store and complete messages; return all results."""
    try:
        envelopes = slice_messages(read)
    except DecodeError as error:
        return str(error)
    numbers = message_ids._NUMBERS
    message_ids._NUMBERS = iter(range(1, 100))  # type: ignore[misc, assignment]
    message_ids.name_messages(envelopes)
    message_ids._NUMBERS = numbers  # type: ignore[misc]
    rig = Rig(seed=seed)
    rig.apply(Enqueue(QUEUE, envelopes))
    rows = [(key, START_MS, each) for key, each in enumerate(envelopes)]
    deliveries = rig.receive("A", 10)
    packed = [pack_deliveries(deliveries, is_locked=is_locked) for is_locked in (True, False)]
    settled = rig.settle(Disposition.COMPLETE, *deliveries)
    return shown((envelopes, deliveries, packed, pack_copy_rows(rows), settled))


# --- partitions -----------------------------------------------------------------------------------


def sendable(source: random.Random) -> Envelope:
    """Return an envelope that a client can send, at times with an unusual field."""
    made = messages.usual_envelope(source)
    if not source.randrange(6):
        name, values = source.choice(SENDABLE)
        setattr(made, name, source.choice(values))
        if name == "properties":
            made.message_id = b"\xa1\x02m1"
    made.size_bytes = max(made.size_bytes, 100)
    return made


SENDABLE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("ttl_ms", (1, 500, 60_000)),
    ("scheduled_ms", (START_MS - 1, START_MS + 400)),
    ("priority", (4, 9)),
    ("session_id", (b"session", b"s" * 129)),
    ("partition_key", (b"key", b"k" * 129)),
    ("via_partition_key", (b"key",)),
    ("size_bytes", (262_143, 262_144, 262_145, 2**21)),
    (
        "properties",
        tuple(b"\x00\x53\x73\xc0\x05\x01\xa1\x02m1" + bytes(n) for n in (118, 119, 120)),
    ),
    ("application_properties", (bytes(32_768),)),
)

Step = Callable[[Rig, random.Random, list[Delivery]], Any]


def send(rig: Rig, source: random.Random, held: list[Delivery]) -> Any:
    del held
    burst_ = [sendable(source) for _ in range(source.choice((1, 3, 8)))]
    return rig.apply(Enqueue(QUEUE, burst_, is_atomic=not source.randrange(4)))


def receive(rig: Rig, source: random.Random, held: list[Delivery]) -> Any:
    name = source.choice("AB")
    found = rig.receive(name, source.choice((1, 4, 10)))
    held += found
    return found


def receive_and_delete(rig: Rig, source: random.Random, held: list[Delivery]) -> Any:
    del held
    return rig.receive("C", source.choice((1, 4)), mode=ReceiveMode.RECEIVE_AND_DELETE)


def settle(rig: Rig, source: random.Random, held: list[Delivery]) -> Any:
    count = source.randrange(len(held) + 1)
    taken, held[:count] = held[:count], held[: source.randrange(2) * min(1, count)]
    how = Disposition.COMPLETE if source.randrange(3) else source.choice(list(Disposition))
    return rig.settle(how, *taken)


def wait(rig: Rig, source: random.Random, held: list[Delivery]) -> Any:
    del held
    rig.advance(source.choice((1, 60, 600, 31_000)))


def crash(rig: Rig, source: random.Random, held: list[Delivery]) -> Any:
    if not source.randrange(3):
        rig.crash()
        held.clear()


STEPS: tuple[Step, ...] = (
    send, send, receive, receive, receive_and_delete, settle, settle, wait, crash,
)  # fmt: skip


def compare_partitions(source: random.Random) -> bool:
    """Compare partitions that get the same commands."""
    seed = source.randrange(2**32)
    steps = source.randrange(2, 14)
    accelerated = drive(seed, steps)
    with pure_python():
        pure = drive(seed, steps)
    for step, (ours, theirs) in enumerate(zip(accelerated, pure, strict=True)):
        assert ours == theirs, step
    return True


def drive(seed: int, steps: int) -> list[Any]:
    """Return what is known of a partition after each of some random commands."""
    source = random.Random(seed)
    settings: dict[str, Any] = {"lock_duration_ms": 30_000, "max_delivery_count": 3}
    settings["default_message_ttl_ms"] = source.choice((922_337_203_685_477, 50_000))
    budget_bytes = source.choice((1 << 30, 1 << 30, 2_000))
    rig = Rig(QueueProperties(**settings), seed=seed, budget_bytes=budget_bytes)
    rig.checks = False
    held: list[Delivery] = []
    found = []
    for _ in range(steps):
        step = source.choice(STEPS)
        reply = step(rig, source, held)
        found.append(shown((step.__name__, reply, rig.results, rig.tables, memory_of(rig))))
        rig.results.clear()
    return found


def memory_of(rig: Rig) -> list[Any]:
    """Return the entries of the queue in memory, with their locks in order."""
    queue = rig.state.entities[QUEUE]
    sub: Any = queue.active
    entries: list[QueuedMessage] = [*sub.order.messages(), *sub.locks.values()]
    return [sub.locks, entries, queue.size_bytes, sub.lock_timer_ms, queue.traffic]


WHOLES = (compare_engines, compare_bursts, compare_partitions)
