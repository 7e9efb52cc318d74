"""A broker that is paused, loses its partition to another one, and resumes."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from postbus.message.codec import decode_value
from postbus.message.sections import slice_message
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database
from tests.edge.raw_client import (
    ACCEPTED,
    DISPOSITION,
    FLOW,
    REJECTED,
    TRANSFER,
    Frame,
    RawClient,
    described,
    frame,
    message,
)
from tests.faults.kill_nine import MANIFEST, QUEUE
from tests.faults.victims import KEY, Broker, wait_for_port

pytestmark = pytest.mark.slow

NO_EFFECT = "com.microsoft:server-busy"
UNKNOWN = "com.microsoft:timeout"
LOCK_LOST = "com.microsoft:message-lock-lost"


@pytest.fixture
def brokers(postgres_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[tuple[Broker, Broker]]:
    """Two brokers of different names on one database; the second is not started yet."""
    make_database(postgres_server, "paused_broker")
    dsn = dsn_of(postgres_server, "paused_broker")
    sealing_key = tmp_path / "sealing.key"
    sealing_key.write_text(base64.b64encode(bytes(32)).decode())
    sealing_key.chmod(0o600)
    with ExitStack() as stack:
        pair = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            environment = {
                "POSTBUS_BROKER_NAME": name,
                "POSTBUS_SEALING_KEY_FILE": str(sealing_key),
            }
            pair.append(Broker(tmp_path / name, dsn, ["-m", "postbus"], MANIFEST, environment))
        pair[0].start()
        stack.callback(pair[0].kill)
        yield pair[0], pair[1]


def connect(broker: Broker) -> RawClient:
    asyncio.run(wait_for_port(broker.port))
    return RawClient(broker.port, "RootManageSharedAccessKey", KEY)


def send(client: RawClient, names: range) -> None:
    """Send messages with these numbers as ids and delivery ids, without waiting for answers."""
    client.write(*[client.transfer(number, message(b"x" * 100, str(number))) for number in names])


def number_of(delivery: Frame) -> int:
    encoded = slice_message(delivery.payload).message_id
    assert encoded is not None
    return int(decode_value(encoded)[0])


def receive_and_complete(client: RawClient) -> int:
    """Receive and complete the next message; return its number."""
    delivery = client.expect(TRANSFER)
    client.write(complete(delivery, settled=True))
    return number_of(delivery)


def complete(delivery: Frame, *, settled: bool) -> bytes:
    return frame(DISPOSITION, True, delivery.fields[1], None, settled, described(ACCEPTED))


class Answers:
    """Answers of a broker: outcomes of sends and of settlements by delivery id."""

    def __init__(self) -> None:
        self.sends: dict[int, str] = {}
        self.settlements: dict[int, str] = {}

    def read(self, client: RawClient, sends: int, settlements: int) -> None:
        """Read until this many are known. Only answers and flows may come."""
        while len(self.sends) < sends or len(self.settlements) < settlements:
            found = client.read()
            if found.code == FLOW:
                continue
            assert found.code == DISPOSITION, found
            is_of_sends, first, last, _, state = found.fields[:5]
            outcome = "accepted"
            if int(state.descriptor) != ACCEPTED:
                assert int(state.descriptor) == REJECTED
                outcome = str(state.value[0].value[0])
            known = self.sends if is_of_sends else self.settlements
            for delivery_id in range(first, (first if last is None else last) + 1):
                assert delivery_id not in known
                known[delivery_id] = outcome


@pytest.mark.behaviour("S2", "S47", "S61", "S65", "S67")
def test_broker_that_resumes_after_a_takeover_sends_no_false_answers(
    brokers: tuple[Broker, Broker],
) -> None:
    first, second = brokers
    answers = Answers()
    with connect(first) as old:
        old.attach_sender(QUEUE)
        old.attach_receiver(QUEUE)
        send(old, range(50))
        answers.read(old, 50, 0)
        old.write(old.flow(10))
        locked = [old.expect(TRANSFER) for _ in range(10)]
        send(old, range(50, 250))  # some are on their way when the broker stops
        answers.read(old, 100, 0)
        first.process.send_signal(signal.SIGSTOP)
        send(old, range(250, 300))
        old.write(*[complete(each, settled=False) for each in locked])
        old.write(old.flow(30, count=10))

        second.start()
        try:
            with connect(second) as new:
                new.attach_sender(QUEUE)
                new.attach_receiver(QUEUE)
                new.write(new.flow(5_000))
                delivered = Counter(receive_and_complete(new) for _ in range(100))
                first.process.send_signal(signal.SIGCONT)  # the partition is the second's now
                answers.read(old, 300, 10)
                new.write(new.transfer(0, message(b"", "-1"), settled=True))
                while not delivered[-1]:
                    delivered[receive_and_complete(new)] += 1
        finally:
            second.stop()
        check(answers, delivered)

    with connect(first) as again:  # it claims the partition that was given up
        again.attach_sender(QUEUE)
        for number in range(2_000):
            answers = Answers()
            send(again, range(number, number + 1))
            answers.read(again, 1, 0)
            if answers.sends[number] == "accepted":
                break
            assert answers.sends[number] in (NO_EFFECT, UNKNOWN)
        else:
            pytest.fail("the first broker did not take up again")


def check(answers: Answers, delivered: Counter[int]) -> None:
    """Compare the answers of the paused broker with the stored state."""
    assert set(answers.settlements.values()) == {LOCK_LOST}
    assert set(answers.sends.values()) <= {"accepted", NO_EFFECT, UNKNOWN}
    assert all(answers.sends[number] != "accepted" for number in range(250, 300))
    assert set(delivered.values()) == {1}
    for number, outcome in answers.sends.items():
        if outcome == "accepted":
            assert number in delivered
        elif outcome == NO_EFFECT:
            assert number not in delivered
