"""Duplicate detection: accepted and dropped messages, and the stored ids."""

from __future__ import annotations

import random
import uuid

import pytest

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    Arrive,
    Arrived,
    Cancelled,
    CancelScheduled,
    Disposition,
    DropEntity,
    Enqueue,
    Enqueued,
    Refusal,
    Refused,
    Transact,
    Transacted,
)
from postbus.entity.outcomes import ForgetIds, Found, Needs, Outcome, RecordIds
from postbus.entity.queues import dedup
from postbus.entity.queues.dedup import SLOT_MS, SeenIds, digest_of
from postbus.message.codec import Ulong, encode_value
from postbus.message.envelope import Envelope
from tests.entity.partition_rig import QUEUE, START_MS, Rig, message

WINDOW_MS = 60_000
PROPERTIES = QueueProperties(
    requires_duplicate_detection=True, duplicate_detection_history_time_window_ms=WINDOW_MS
)


def named(name: str, **details: int) -> Envelope:
    """Make a message with an id in the encoding of clients."""
    envelope = message(name, **details)  # type: ignore[arg-type]
    envelope.message_id = encode_value(name)
    return envelope


def names(rig: Rig) -> list[str]:
    return sorted(rig.peek_names())


@pytest.mark.behaviour("S174")
def test_a_message_with_an_id_seen_before_is_accepted_and_dropped() -> None:
    rig = Rig(PROPERTIES)
    assert rig.send(named("a")) == [1]
    assert rig.send(named("a")) == [0]
    assert rig.send(named("b"), named("a"), named("b"), named("c")) == [2, 0, 0, 3]
    assert names(rig) == ["a", "b", "c"]


def test_equal_ids_are_accepted_without_duplicate_detection() -> None:
    rig = Rig()
    rig.send(named("a"), named("a"))
    assert names(rig) == ["a", "a"]
    assert rig.tables.seen == []


def test_the_window_counts_from_the_first_acceptance_only() -> None:
    rig = Rig(PROPERTIES)
    rig.send(named("a"))
    rig.advance(WINDOW_MS - 1)
    assert rig.send(named("a")) == [0]
    rig.advance(1)
    assert rig.send(named("a")) == [2]
    rig.advance(WINDOW_MS - 1)
    assert rig.send(named("a")) == [0]


def test_the_fate_of_the_first_message_does_not_matter() -> None:
    rig = Rig(PROPERTIES)
    rig.send(named("a"))
    (delivery,) = rig.receive()
    rig.settle(Disposition.COMPLETE, delivery)
    assert rig.send(named("a")) == [0]
    assert names(rig) == []


def test_messages_without_an_id_are_never_duplicates() -> None:
    rig = Rig(PROPERTIES)
    for message_id in (None, encode_value("")):
        reply = rig.apply(
            Enqueue(QUEUE, [Envelope(message_id=message_id, size_bytes=9) for _ in range(3)])
        )
        assert isinstance(reply, Enqueued)
        assert 0 not in reply.sequence_numbers
    assert rig.tables.seen == []


def test_ids_of_any_type_are_compared_as_the_text_that_clients_show() -> None:
    value = uuid.UUID("00112233-4455-6677-8899-AABBCCDDEEFF")
    assert digest_of(encode_value(value)) == digest_of(encode_value(str(value)))
    assert digest_of(encode_value(Ulong(7))) == digest_of(encode_value("7"))
    assert digest_of(encode_value(b"\xab")) == digest_of(encode_value("ab"))
    long = "x" * 300
    assert digest_of(encode_value(long)) == digest_of(b"\xb1\x00\x00\x01\x2c" + long.encode())
    assert digest_of(encode_value("a")) != digest_of(encode_value("A"))
    assert len(digest_of(encode_value("a")) or b"") == 16


def test_an_id_that_was_refused_was_not_accepted() -> None:
    rig = Rig(PROPERTIES)
    large = named("a", size_bytes=300_000)
    reply = rig.apply(Enqueue(QUEUE, [large, named("a"), named("b")]))
    assert isinstance(reply, Enqueued)
    assert reply.sequence_numbers == [0, 1, 2]
    assert reply.refusals is not None
    assert list(reply.refusals) == [0]
    batch = Enqueue(QUEUE, [named("c"), named("d", size_bytes=300_000)], is_atomic=True)
    assert isinstance(rig.apply(batch), Refused)
    assert rig.send(named("c")) == [3]


def test_a_full_queue_accepts_a_duplicate() -> None:
    rig = Rig(PROPERTIES)
    rig.send(*(named(f"m{n}", size_bytes=256 * 1024) for n in range(4_096)))
    full = rig.apply(Enqueue(QUEUE, [named("new", size_bytes=1)]))
    assert isinstance(full, Enqueued)
    assert full.refusals is not None
    assert full.refusals[0].refusal is Refusal.QUOTA_EXCEEDED
    assert rig.send(named("m7")) == [0]


def test_a_scheduled_duplicate_gets_an_unused_sequence_number() -> None:
    rig = Rig(PROPERTIES)
    due_ms = rig.now_ms + 5_000
    (first,) = rig.send(named("a", scheduled_ms=due_ms))
    (second,) = rig.send(named("a", scheduled_ms=due_ms))
    assert second > first
    assert isinstance(rig.apply(CancelScheduled(QUEUE, [second])), Refused)
    assert rig.send(named("a")) == [0]
    assert isinstance(rig.apply(CancelScheduled(QUEUE, [first])), Cancelled)
    assert rig.send(named("a")) == [0]  # accepted when it was scheduled
    rig.advance(10_000)
    assert names(rig) == []


def test_the_window_counts_from_scheduling_not_from_the_due_time() -> None:
    rig = Rig(PROPERTIES)
    rig.send(named("a", scheduled_ms=rig.now_ms + WINDOW_MS))
    rig.advance(WINDOW_MS)
    assert rig.send(named("a")) != [0]
    assert names(rig) == ["a", "a"]


def test_a_transaction_drops_its_duplicates() -> None:
    rig = Rig(PROPERTIES)
    rig.send(named("a"))
    sends = [Enqueue(QUEUE, [named(name)]) for name in ("a", "b", "b")]
    reply = rig.apply(Transact(list(sends)))
    assert isinstance(reply, Transacted)
    numbers = [part.sequence_numbers for part in reply.replies if isinstance(part, Enqueued)]
    assert [number != [0] for number in numbers] == [False, True, False]
    assert names(rig) == ["a", "b"]


def test_only_committed_ids_survive_a_crash() -> None:
    rig = Rig(PROPERTIES, is_auto=False)
    rig.commit()
    rig.submit(Enqueue(QUEUE, [named("a")]))
    rig.commit()
    rig.submit(Enqueue(QUEUE, [named("b")]))
    rig.crash()
    rig.is_auto = True
    assert rig.send(named("a"), named("b")) == [0, 257]
    assert names(rig) == ["a", "b"]


def test_a_change_of_the_window_takes_effect_at_once() -> None:
    rig = Rig(PROPERTIES)
    rig.send(named("a"))
    rig.advance(25_000)
    short = PROPERTIES.model_copy(update={"duplicate_detection_history_time_window_ms": 20_000})
    rig.put(short)
    assert rig.send(named("a")) == [2]
    rig.advance(10_000)
    rig.put(PROPERTIES)
    rig.advance(30_000)
    assert rig.send(named("a")) == [0]


def test_an_id_accepted_again_is_remembered_by_its_new_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dedup, "RECENT_IDS", 64)
    window_ms = 600_000  # swept once a minute
    rig = Rig(
        PROPERTIES.model_copy(update={"duplicate_detection_history_time_window_ms": window_ms})
    )
    rig.send(named("other"))
    rig.advance(10_000)
    rig.send(named("a"))
    rig.advance(window_ms + 30_000)
    (number,) = rig.send(named("a"))  # its window is over, its first time is not swept out yet
    assert number
    rig.send(*(named(f"m{n}") for n in range(100)))  # the oldest ones have to go
    rig.advance(dedup.RECENT_MS + 1_000)
    assert rig.send(named("a")) == [0]


def test_disabling_detection_forgets_all_ids() -> None:
    rig = Rig(PROPERTIES)
    rig.send(named("a"))
    rig.put(QueueProperties())
    assert rig.tables.seen == []
    assert rig.send(named("a")) == [2]
    rig.put(PROPERTIES)
    assert rig.send(named("a")) == [3]
    assert rig.send(named("a")) == [0]


def test_dropping_the_queue_forgets_its_ids() -> None:
    rig = Rig(PROPERTIES)
    rig.send(named("a"))
    rig.apply(DropEntity(QUEUE, 2))
    assert rig.tables.seen == []
    rig.advance(WINDOW_MS * 2)
    assert rig.state.next_deadline_ms is None


# --- older ids: probable in memory, certain in the tables -----------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep few ids exactly, in small buckets, so that the rest is exercised."""
    monkeypatch.setattr(dedup, "RECENT_IDS", 16)
    monkeypatch.setattr(dedup, "RECENT_MS", 0)
    monkeypatch.setattr(dedup, "BUCKET_IDS", 8)


@pytest.mark.usefixtures("few")
def test_older_ids_are_confirmed_by_the_tables() -> None:
    rig = Rig(PROPERTIES)
    for n in range(200):
        rig.send(named(f"m{n}"))
        rig.advance(10)
    rig.results.clear()
    assert rig.send(named("m3"), named("new"), named("m199")) == [0, 201, 0]
    lookups, outcome = rig.results
    assert isinstance(lookups, Needs)
    (entity_no, digest, from_ms, to_ms), known = lookups.ids
    assert known[1] == digest_of(encode_value("m199")), "it may be an older one by then"
    assert (entity_no, digest) == (QUEUE, digest_of(encode_value("m3")))
    assert from_ms <= START_MS + 30 <= to_ms
    assert to_ms - from_ms < SLOT_MS
    assert isinstance(outcome, Outcome)
    assert len(outcome.mutations) == 1


def exact_ones(rig: Rig, count: int) -> list[str]:
    """Return the names m0 ... that are known exactly at this moment."""
    entity = rig.state.entities.get(QUEUE)
    assert entity is not None
    assert entity.seen is not None
    recent = entity.seen._recent
    return [f"m{n}" for n in range(count) if digest_of(encode_value(f"m{n}")) in recent]


@pytest.mark.usefixtures("few")
def test_an_id_that_gets_old_while_the_tables_are_read_is_still_known() -> None:
    rig = Rig(PROPERTIES)
    for n in range(40):
        rig.send(named(f"m{n}"))
        rig.advance(10)
    last = exact_ones(rig, 40)[0]
    command = Enqueue(QUEUE, [named("m0"), named(last)])
    needs = rig.state.apply(command, rig.now_ms)
    assert isinstance(needs, Needs)
    found = Found()
    found.seen = rig.tables.read_ids(needs.ids)
    rig.send(*(named(f"other{n}") for n in range(40)))
    rig.advance(10)
    assert last not in exact_ones(rig, 40)
    outcome = rig.state.apply(command, rig.now_ms, found)
    assert isinstance(outcome, Outcome)
    assert outcome.reply == Enqueued([0, 0])


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("is_arrival", [False, True])
def test_an_id_does_not_get_old_within_a_command(is_arrival: bool) -> None:
    """A screened message is screened again when it is stored, after the messages before it."""
    rig = Rig(PROPERTIES)
    for n in range(40):
        rig.send(named(f"m{n}"))
        rig.advance(10)
    new = [named(f"new{n}") for n in range(40)]
    again = [named(name) for name in exact_ones(rig, 40)]
    assert again
    if is_arrival:
        messages = [*new, *again, named("large", size_bytes=1 << 40)]
        reply = rig.apply(Arrive(5, QUEUE, list(range(1, len(messages) + 1)), messages))
        assert isinstance(reply, Arrived)
        assert reply.count == len(messages) - 1
    else:
        replies = rig.apply(Transact([Enqueue(QUEUE, new), Enqueue(QUEUE, again)]))
        assert isinstance(replies, Transacted)
        assert replies.replies[1] == Enqueued([0] * len(again))
    assert len(names(rig)) == 80


@pytest.mark.usefixtures("few")
def test_a_hash_collision_with_a_known_id_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dedup, "digest_of", lambda message_id: b"\x07" * 8 + message_id[-3:].rjust(8)
    )
    rig = Rig(PROPERTIES)
    for n in range(100, 300):
        rig.send(named(str(n)))
        rig.advance(10)
    assert rig.send(named("100"), named("999"), named("101")) == [0, 201, 0]
    rig.crash()
    assert rig.send(named("100"), named("998"), named("299")) == [0, 257, 0]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seed", range(6))
def test_detection_is_exact_over_windows_and_restarts(seed: int) -> None:
    """Against a dict of first acceptances, with every path: recent, older, swept, loaded."""
    choose = random.Random(seed)
    rig = Rig(PROPERTIES)
    accepted: dict[str, int] = {}
    count = 0
    for _ in range(400):
        burst = [f"m{choose.randrange(400)}" for _ in range(choose.randint(1, 5))]
        is_new: list[bool] = []
        for name in burst:
            seen_ms = accepted.get(name)
            is_new.append(seen_ms is None or rig.now_ms - seen_ms >= WINDOW_MS)
            if is_new[-1]:
                accepted[name] = rig.now_ms
                count += 1
        numbers = rig.send(*(named(name) for name in burst))
        assert [number != 0 for number in numbers] == is_new
        if choose.random() < 0.03:
            rig.crash()
        rig.advance(choose.choice([0, 1, 50, 400, 3_000]))
    assert rig.state.counts(QUEUE).active == count  # type: ignore[union-attr]


@pytest.mark.usefixtures("few")
def test_ids_outside_the_window_are_deleted_from_memory_and_tables() -> None:
    rig = Rig(PROPERTIES)
    entity = rig.state.entities.get(QUEUE)
    assert entity is not None
    assert entity.seen is not None
    for n in range(500):
        rig.send(named(f"m{n}"))
        rig.advance(1)
    assert len(entity.seen) == 500
    rig.advance(WINDOW_MS // 2)
    rig.send(named("late"))
    rig.advance(WINDOW_MS // 2 + SLOT_MS + 10_500)
    assert len(entity.seen) == 1
    assert len(rig.tables.seen) == 1
    rig.advance(WINDOW_MS * 2)
    assert len(entity.seen) == 0
    assert rig.tables.seen == []
    assert rig.state.next_deadline_ms is None


def test_one_row_a_commit_is_written_and_deleted_by_time() -> None:
    rig = Rig(PROPERTIES)
    rig.send(*(named(f"m{n}") for n in range(10)))
    (row,) = rig.tables.seen
    assert row == RecordIds(QUEUE, START_MS, row.digests)
    assert row.digests[:16] == digest_of(encode_value("m0"))
    rig.results.clear()
    rig.advance(WINDOW_MS + 10_000)
    forgets = [
        mutation
        for result in rig.results
        if isinstance(result, Outcome)
        for mutation in result.mutations
        if isinstance(mutation, ForgetIds)
    ]
    assert forgets
    assert all(forget.entity_no == QUEUE for forget in forgets)
    assert rig.tables.seen == []


def test_above_the_bound_new_ids_are_refused_and_known_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dedup, "MAX_IDS", 3)
    rig = Rig(PROPERTIES)
    rig.send(named("a"), named("b"))
    reply = rig.apply(Enqueue(QUEUE, [named("c"), named("d"), named("a")]))
    assert isinstance(reply, Enqueued)
    assert reply.sequence_numbers == [3, 0, 0]
    assert reply.refusals is not None
    assert list(reply.refusals) == [1]
    assert reply.refusals[1].refusal is Refusal.QUOTA_EXCEEDED
    assert "shorter window" in reply.refusals[1].detail
    rig.advance(WINDOW_MS * 2)
    assert rig.send(named("d")) == [4]


def test_ids_not_committed_yet_are_never_looked_for_in_the_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dedup, "RECENT_IDS", 4)
    rig = Rig(PROPERTIES, is_auto=False)
    rig.commit()
    for n in range(50):
        rig.submit(Enqueue(QUEUE, [named(f"m{n}")]))
        rig.now_ms += 100
    replies = rig.submit(Enqueue(QUEUE, [named("m0")]))
    assert isinstance(rig.results[-1], Outcome)
    rig.commit()
    assert replies == [Enqueued([0])]


def test_many_ids_take_little_memory_and_no_long_step() -> None:
    """The measure of ten million is a benchmark; here the shape: buckets stay small."""
    rig = Rig(PROPERTIES)
    seen = SeenIds(QUEUE, rig.state._context, WINDOW_MS)
    random_bytes = random.Random(1).randbytes
    rows = [RecordIds(QUEUE, START_MS + n, random_bytes(16 * 64)) for n in range(1_000)]
    seen.load(rows)
    buckets = seen._index._buckets
    assert len(seen) == 64_000
    assert max(map(len, buckets)) <= dedup.BUCKET_IDS
    assert sum(len(bucket) * bucket.itemsize for bucket in buckets) < 9 * 64_000
    rig.state._context.now_ms = START_MS + 1_000
    for row in rows[::100]:
        digest = row.digests[-16:]
        found = seen._index.span(digest, START_MS + 1_000, START_MS - WINDOW_MS)
        if digest not in seen._recent:
            assert found is not None
            assert found[0] <= row.seen_ms <= found[1]
