"""The accounts of a sub-queue: every message that comes and goes leaves them as they were."""

from __future__ import annotations

from dataclasses import dataclass

from postbus.entity.queues.ledger import Ledger
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.entity.window import MESSAGE_OVERHEAD_BYTES, Window, WindowBudget
from postbus.message.envelope import Envelope, SharedBody


@dataclass
class Entity:
    size_bytes: int = 0

    def shrink(self, size_bytes: int) -> None:
        self.size_bytes -= size_bytes


class Accounts:
    """A ledger with all that it writes to."""

    def __init__(self) -> None:
        self.entity = Entity()
        self.window = Window(WindowBudget(1 << 20))
        self.ledger = Ledger(self.entity, self.window)

    def state(self) -> tuple[int, int, int, int]:
        window = self.window
        return self.ledger.live, self.entity.size_bytes, window.count, window.used_bytes


def queued(envelope: Envelope | None, size_bytes: int = 0) -> QueuedMessage:
    message = QueuedMessage(1, 1, 0, envelope)
    message.size_bytes = size_bytes
    return message


def test_a_removed_message_restores_all_counts() -> None:
    it = Accounts()
    envelope = Envelope(size_bytes=300)
    it.ledger.store(1, 300)
    assert it.state() == (1, 300, 0, 0)
    it.ledger.load(envelope)
    assert it.state() == (1, 300, 1, 300 + MESSAGE_OVERHEAD_BYTES)
    it.ledger.leave(queued(envelope))
    assert it.state() == (0, 0, 0, 0)


def test_a_message_that_was_unloaded_leaves_with_the_size_it_had() -> None:
    it = Accounts()
    it.ledger.store(2, 700)
    it.ledger.load_all([Envelope(size_bytes=300), Envelope(size_bytes=400)], 700)
    it.ledger.unload(Envelope(size_bytes=300))
    it.ledger.unload(Envelope(size_bytes=400))
    assert it.state() == (2, 700, 0, 0)
    it.ledger.leave(queued(None, 300))
    it.ledger.leave_unloaded(400)
    assert it.state() == (0, 0, 0, 0)


def test_a_body_in_common_counts_once_into_the_window_until_the_last_copy_is_gone() -> None:
    it = Accounts()
    body = SharedBody(1_000)
    copies = [Envelope(size_bytes=1_200, shared=body) for _ in range(3)]
    it.ledger.store(3, 3_600)
    it.ledger.load_all(copies, 3_600, is_shared=True)
    assert it.state() == (3, 3_600, 3, 3_600 - 2_000 + 3 * MESSAGE_OVERHEAD_BYTES)
    it.ledger.leave(queued(copies[0]))
    it.ledger.unload(copies[1])
    assert it.state() == (2, 2_400, 1, 1_200 + MESSAGE_OVERHEAD_BYTES)
    it.ledger.release(body)
    it.ledger.leave_all(1, 1_200, 1, 1_200)
    assert it.state() == (0, 0, 0, 0)


def test_a_message_that_grows_is_accounted_for_where_it_is() -> None:
    it = Accounts()
    it.ledger.restore(1)
    it.ledger.load(Envelope(size_bytes=300))
    it.ledger.correct(300)
    it.ledger.resize(50)
    assert it.state() == (1, 350, 1, 350 + MESSAGE_OVERHEAD_BYTES)
