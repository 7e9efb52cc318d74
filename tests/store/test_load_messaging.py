"""Loading of sessions: keys sorted by the session in their envelope."""

from __future__ import annotations

import time
from array import array

import pytest

from postbus.contract.entities import EntityKind, QueueProperties, SubscriptionProperties
from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import (
    InsertMessage,
    MoveMessage,
    PatchMessage,
    PutDefinition,
    ReserveBlock,
)
from postbus.message.envelope import Envelope
from postbus.message.rows import pack_envelope, session_id_of
from postbus.store import load_messaging
from postbus.store.postgres import Store
from tests.store.driving import (
    NOW_MS,
    block,
    connected,
    definition,
    insert,
    open_driven,
    outcome,
    reload,
)

ORDERS = PutDefinition(2, "orders", EntityKind.QUEUE, QueueProperties(requires_session=True), 3, 1)
SUB = PutDefinition(
    3, "t/Subscriptions/s", EntityKind.SUBSCRIPTION, SubscriptionProperties(requires_session=True),
    3, 1, 9,
)  # fmt: skip
ORDERS_BLOCKS = [
    ReserveBlock(2_000_000, 1_000, 2, SubQueue.ACTIVE, 1),
    ReserveBlock(2_002_000, 1_000, 2, SubQueue.ACTIVE, 1_001),
]
SUB_BLOCK = ReserveBlock(2_001_000, 1_000, 3, SubQueue.ACTIVE, 1)
DEAD_BLOCK = ReserveBlock(3_000_000, 1_000, 2, SubQueue.DEAD_LETTER, 0)


def in_session(row_key: int, session_id: bytes | None) -> InsertMessage:
    return InsertMessage(row_key, NOW_MS, Envelope(session_id=session_id, body=b"hello"))


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(),
        Envelope(session_id=b"s"),
        Envelope(session_id=b"", partition_key=b"p"),
        Envelope(partition_key=b"p"),
        Envelope(
            session_id="s\u00fc\x00".encode() * 40, priority=9, properties=b"\x00\x53\x73\x45"
        ),
        Envelope(session_id=b"s", ttl_ms=1, hop_count=3, message_id=b"\xa1\x01x"),
        Envelope(session_id=b"s", scheduled_ms=1, ttl_ms=2, priority=3),
        Envelope(session_id=b"s", annotations=b"\x01" * 70_000, annotation_count=3, priority=1),
    ],
)
def test_session_id_is_read_from_the_packed_envelope(envelope: Envelope) -> None:
    assert session_id_of(pack_envelope(envelope)) == envelope.session_id


async def test_keys_are_sorted_by_session(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_messaging, "PAGE_ROWS", 3)
    it = await open_driven(store)
    await it.commit(
        outcome(mutations=[definition(), block(), ORDERS, *ORDERS_BLOCKS, SUB, SUB_BLOCK])
    )
    await it.commit(outcome(mutations=[DEAD_BLOCK]))
    first = [in_session(2_000_000 + n, b"even" if n % 2 == 0 else b"odd") for n in range(10)]
    await it.commit(
        outcome(first),
        outcome([in_session(2_002_000, b"odd"), in_session(2_002_001, b"\x00\xff")]),
        outcome([in_session(2_001_000, b"odd"), in_session(2_001_001, None)]),
        outcome([insert(5), in_session(6, b"ignored")]),
    )
    await it.commit(
        outcome(deletes=[2_000_003]),
        outcome(mutations=[PatchMessage(2_000_002, True, None, None)]),
        outcome(
            mutations=[MoveMessage(2_000_004, 3_000_000, 2, SubQueue.DEAD_LETTER, 5, 1, None, None)]
        ),
    )
    it.journal.abandon()
    loaded = await reload(store)
    assert loaded.sessions == {
        2: {
            b"even": array("q", [2_000_000, 2_000_002, 2_000_006, 2_000_008]),
            b"odd": array("q", [2_000_001, 2_000_005, 2_000_007, 2_000_009, 2_002_000]),
            b"\x00\xff": array("q", [2_002_001]),
        },
        3: {b"odd": array("q", [2_001_000]), b"": array("q", [2_001_001])},
    }
    assert len(loaded.keys[2, SubQueue.ACTIVE]) == 10
    assert loaded.deferred == {(2, SubQueue.ACTIVE): {2_000_002: 3}}


@pytest.mark.slow
async def test_a_million_session_messages_load_in_seconds(store: Store, database: str) -> None:
    """Measured at 3 s for bodies of 1 KiB; own CPU time, so that a busy machine does not count."""
    it = await open_driven(store)
    await it.commit(outcome(mutations=[ORDERS, ReserveBlock(1, 1_000_000, 2, SubQueue.ACTIVE, 1)]))
    await it.journal.close()
    blob = pack_envelope(Envelope(session_id=b"0000000"))
    head, tail = blob.split(b"0000000")
    async with connected(database) as look:
        await look.execute(
            """
            insert into message (row_key, enqueued_ms, envelope, body)
            select n, 1, $1::bytea || convert_to(lpad((n % 100000)::text, 7, '0'), 'UTF8') || $2,
                   decode(repeat('ab', 1024), 'hex')
            from generate_series(1, 1000000) as n
            """,
            head,
            tail,
            timeout=120,
        )
        await look.execute("vacuum message", timeout=120)
    started = time.process_time()
    loaded = await reload(store)
    seconds = time.process_time() - started
    assert len(loaded.sessions[2]) == 100_000
    assert loaded.sessions[2][b"0000007"] == array("q", range(7, 1_000_000, 100_000))
    assert seconds < 10
