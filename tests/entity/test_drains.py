"""Reader groups that drain: instead of receivers, each message once, and rejects (ADR 42)."""

from __future__ import annotations

from collections.abc import Set
from random import Random

import pytest

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    AcceptSession,
    AddConsumer,
    DeleteBySequence,
    DeleteMessages,
    Delivery,
    Disposition,
    MessagesHandled,
    ReceiveDeferred,
    ReceiveMode,
    Refusal,
    Refused,
    ResendBySequence,
)
from postbus.entity.group_commands import (
    ClaimGroup,
    Cursor,
    DropGroup,
    FollowHome,
    GroupDropped,
    GroupKind,
    ListRanges,
    PlanRange,
    PutGroup,
    RangesListed,
    RejectRows,
    ResetGroup,
    RowsRejected,
    SettleRange,
)
from postbus.entity.outcomes import Outcome, PutCursor, Settling
from postbus.entity.queues.message_order import MessageOrder
from postbus.entity.sessions.messages_by_session import MessagesBySession
from tests.entity.partition_rig import ACTIVE, DLQ, QUEUE, Rig, message, name_of, properties_of
from tests.entity.test_groups import cursor_of, refusal_of
from tests.entity.transfer.forward_rig import Bus

HOME = 3
DRAIN = GroupKind.DRAIN


class Drain:
    """A pipeline that reads one sub-queue of the rig, as the store would let it."""

    def __init__(self, rig: Rig, sub_queue: object = ACTIVE, name: str = "lake") -> None:
        self.rig = rig
        self.place = (QUEUE, sub_queue, name)
        self.epoch = 0

    def create(self) -> Drain:
        cursor_of(self.rig.apply(PutGroup(*self.place, DRAIN, 0)))
        cursor_of(self.rig.apply(ResetGroup(*self.place, {HOME: 0}, is_first=True)))
        return self.claim()

    def claim(self) -> Drain:
        self.epoch = cursor_of(self.rig.apply(ClaimGroup(*self.place, "driver"))).epoch
        return self

    def listed(self) -> RangesListed:
        listed = self.rig.apply(ListRanges(*self.place))
        assert isinstance(listed, RangesListed)
        return listed

    @property
    def cursor(self) -> Cursor:
        cursor = self.listed().cursor
        assert cursor is not None
        return cursor

    def plan(self, end: int | None = None) -> list[str]:
        """Plan from the end of the last plan; return what is read."""
        cursor = self.cursor
        assert cursor.plan is not None
        first = cursor.plan.ranges[HOME][1]
        last = self.listed().readable if end is None else end
        if first == last:
            self.settle()
            return []
        cursor_of(self.rig.apply(PlanRange(*self.place, self.epoch, {HOME: (first, last)})))
        return self.read()

    def read(self) -> list[str]:
        """Return the names of the planned messages, as the store reads them."""
        return [name_of(self.rig.tables.rows[key][1]) for key in self.keys()]

    def keys(self) -> list[int]:
        cursor, tables = self.cursor, self.rig.tables
        assert cursor.plan is not None
        first, end = cursor.plan.ranges[HOME]
        if cursor.plan.is_settled:
            return []  # what is settled is refused
        assert (cursor.settled, cursor.planned) == (first, end)
        found = []
        for key in sorted(tables.rows):
            block = tables.block_of(key)
            if not first <= key < end or (block.entity_no, block.sub_queue) != self.place[:2]:
                continue
            _, how, settled_ms = tables.settled.get(key, (0, None, 0))
            is_own = how is Settling.REJECTED and settled_ms >= cursor.placed_ms
            patch = tables.patches.get(key)
            if (how is None or is_own) and not (patch is not None and patch.is_deferred):
                found.append(key)
        return found

    def settle(self) -> None:
        plan = self.cursor.plan
        assert plan is not None
        cursor_of(self.rig.apply(SettleRange(*self.place, self.epoch, plan.number)))

    def reject(self, *names: str, reason: str = "NoPrice") -> RowsRejected:
        named = {name_of(self.rig.tables.rows[key][1]): key for key in self.keys()}
        keys = [named[name] for name in names]
        reply = self.rig.apply(RejectRows(*self.place, self.epoch, keys, reason, "no price"))
        assert isinstance(reply, RowsRejected), reply
        return reply


def names(deliveries: list[Delivery]) -> list[str]:
    return [name_of(each.envelope) for each in deliveries]


def test_a_drain_takes_each_message_once_and_leaves_nothing() -> None:
    rig = Rig()
    rig.send(*[f"m{n}" for n in range(5)])
    drain = Drain(rig).create()
    assert drain.plan() == ["m0", "m1", "m2", "m3", "m4"]
    rig.send("late")
    rig.crash()
    assert drain.claim().read() == ["m0", "m1", "m2", "m3", "m4"]
    assert drain.plan() == ["late"], "a plan settles the one before"
    rig.tick_now()
    assert len(rig.tables.rows) == 1
    drain.settle()
    rig.tick_now()
    assert rig.tables.rows == {}
    assert rig.peek_names() == []
    entity = rig.state.entities[QUEUE]
    assert (entity.message_count, entity.total_bytes) == (0, 0)


def test_a_large_range_is_removed_in_parts_also_after_a_crash() -> None:
    rig = Rig()
    rig.send(*[f"m{n}" for n in range(3_500)])
    drain = Drain(rig).create()
    assert len(drain.plan()) == 3_500
    drain.settle()
    assert len(rig.tables.rows) == 2_500
    for command in (DropGroup(*drain.place), ResetGroup(*drain.place, {HOME: 0})):
        assert refusal_of(rig.apply(command)) is Refusal.BUSY
    assert (
        refusal_of(
            rig.apply(FollowHome(*drain.place, drain.epoch + 1, "driver", 0, 0, is_placed=True))
        )
        is Refusal.BUSY
    )
    rig.send("later")
    rig.crash()
    rig.advance(1_000)
    assert rig.peek_names() == ["later"]
    assert drain.claim().plan() == ["later"]
    drain.settle()
    assert rig.apply(DropGroup(*drain.place)) == GroupDropped(True)


def test_commands_during_a_removal_do_not_hasten_it() -> None:
    rig = Rig()
    rig.send(*[f"m{n}" for n in range(3_500)])
    drain = Drain(rig).create()
    drain.plan()
    for _ in range(20):
        drain.settle()
        assert len(rig.tables.rows) == 2_500, "others have the partition meanwhile"
    rig.advance(10)
    assert len(rig.tables.rows) == 1_500
    rig.advance(10)
    assert len(rig.tables.rows) == 500
    rig.advance(10)
    assert rig.tables.rows == {}
    rig.advance(10)
    assert rig.state.next_deadline_ms is None


def test_a_removal_looks_for_its_sessions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    search = MessagesBySession._sessions_below

    def counted(self: MessagesBySession, end_key: int) -> list[bytes]:
        searches.append(end_key)
        return search(self, end_key)

    monkeypatch.setattr(MessagesBySession, "_sessions_below", counted)
    rig = Rig(QueueProperties(requires_session=True), budget_bytes=200_000)
    rig.send(*[message(f"m{n}", session=f"s{n % 300}") for n in range(3_500)])
    drain = Drain(rig).create()
    drain.plan()
    rig.send(*[message(f"n{n}", session=f"s{n}") for n in range(310)])
    drain.settle()
    rig.advance(100)
    assert len(rig.tables.rows) == 310
    assert len(searches) == 2, "the second one finds that nothing is left"
    assert len(drain.plan()) == 310
    drain.settle()
    assert rig.tables.rows == {}


@pytest.mark.parametrize("budget_bytes", [1 << 30, 5_000])
def test_messages_of_which_only_the_key_is_loaded_are_removed_too(budget_bytes: int) -> None:
    rig = Rig(budget_bytes=budget_bytes)
    rig.send(*[message(f"m{n}", size_bytes=1_000) for n in range(20)])
    rig.crash()
    rig.send(*[message(f"n{n}", size_bytes=1_000) for n in range(20)])
    drain = Drain(rig).create()
    assert len(drain.plan()) == 40
    drain.settle()
    assert rig.tables.rows == {}
    assert rig.state.entities[QUEUE].message_count == 0
    assert rig.budget.used_bytes == 0


def test_receivers_are_refused_with_the_name_of_the_group() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    [held] = rig.receive("A")
    drain = Drain(rig).create()
    client = rig.clients[rig.names["A"]]
    assert client.ended is Refusal.NOT_ALLOWED
    for command in (
        AddConsumer(QUEUE, ACTIVE, 99, ReceiveMode.PEEK_LOCK),
        ReceiveDeferred(QUEUE, ACTIVE, [1], ReceiveMode.PEEK_LOCK),
        DeleteMessages(QUEUE, ACTIVE, 10, None),
    ):
        reply = rig.apply(command)
        assert refusal_of(reply) is Refusal.NOT_ALLOWED
        assert isinstance(reply, Refused)
        assert "lake" in reply.detail
    assert drain.plan() == [], "a receiver still has the first message"
    rig.settle(Disposition.ABANDON, held)
    assert drain.plan() == ["a", "b", "c"]
    rig.apply(DropGroup(*drain.place))
    assert names(rig.receive("B", 3)) == ["a", "b", "c"], "what is not settled stays"
    assert refusal_of(rig.apply(PutGroup(QUEUE, DLQ, "x", DRAIN, 5))) is (
        Refusal.ARGUMENT_OUT_OF_RANGE
    ), "what lies below its start would be lost"


def test_a_drain_ends_before_what_a_receiver_has_locked() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    first, second = rig.receive("A", 2)
    rig.settle(Disposition.ABANDON, first)
    drain = Drain(rig).create()
    assert drain.plan() == ["a"]
    listed = drain.listed()
    reply = rig.apply(
        PlanRange(*drain.place, drain.epoch, {HOME: (listed.readable, listed.next_position)})
    )
    assert refusal_of(reply) is Refusal.ARGUMENT_OUT_OF_RANGE
    rig.settle(Disposition.COMPLETE, second)
    assert drain.plan() == ["c"]


def test_deferred_messages_are_left_out_and_counted() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    _, second, *_ = held = rig.receive("A", 3)
    rig.settle(Disposition.DEFER, second)
    rig.settle(Disposition.ABANDON, held[0], held[2])
    drain = Drain(rig).create()
    assert drain.listed().deferred == 1
    assert drain.plan() == ["a", "c"]
    [deferred] = set(range(*drain.keys())) - set(drain.keys())
    reply = rig.apply(RejectRows(*drain.place, drain.epoch, [deferred], "x", ""))
    assert reply == RowsRejected(0, [], {})
    drain.settle()
    rig.crash()
    assert rig.peek_names() == ["b"]
    assert drain.claim().listed().deferred == 1


def test_nothing_else_takes_what_is_planned() -> None:
    rig = Rig(QueueProperties(default_message_ttl_ms=60_000))
    numbers = rig.send("a", "b")
    drain = Drain(rig).create()
    drain.plan()
    rig.send("c")
    reply = rig.apply(DeleteBySequence(QUEUE, ACTIVE, [*numbers, numbers[-1] + 1]))
    assert isinstance(reply, MessagesHandled)
    assert {number: each.refusal for number, each in reply.refused.items()} == dict.fromkeys(
        numbers, Refusal.MESSAGE_LOCKED
    )
    assert list(reply.done) == [numbers[-1] + 1]
    rig.advance(120_000)
    assert drain.read() == ["a", "b"]


def test_dead_letters_are_drained_and_not_resent_meanwhile() -> None:
    rig = Rig()
    rig.send("a", "b")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive(count=2))
    drain = Drain(rig, DLQ).create()
    assert drain.plan() == ["a", "b"]
    reply = rig.apply(ResendBySequence(QUEUE, DLQ, [1], QUEUE))
    assert isinstance(reply, MessagesHandled)
    assert reply.refused[1].refusal is Refusal.MESSAGE_LOCKED
    key = drain.keys()[0]
    refused = rig.apply(RejectRows(*drain.place, drain.epoch, [key], "x", ""))
    assert refusal_of(refused) is Refusal.NOT_ALLOWED
    drain.settle()
    assert rig.peek_names(DLQ) == []
    assert names(rig.receive(count=1)) == [], "the main queue has receivers"


def test_rejected_messages_move_once_and_the_range_reads_the_same() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    drain = Drain(rig).create()
    before = drain.plan()
    assert drain.reject("b") == RowsRejected(1, [], {})
    assert drain.reject("b", "c") == RowsRejected(1, [], {})
    rig.crash()
    assert drain.claim().read() == before
    assert drain.reject("b", "c") == RowsRejected(0, [], {})
    dead = rig.peek(sub_queue=DLQ)
    assert [name_of(each.envelope) for each in dead] == ["b", "c"]
    assert [each.sequence for each in dead] == [2, 3]
    assert properties_of(dead[0].envelope) == {
        "DeadLetterReason": "NoPrice", "DeadLetterErrorDescription": "no price",
    }  # fmt: skip
    assert rig.peek_names() == ["a"]
    drain.settle()
    assert rig.peek_names() == []
    assert len(rig.tables.settled) == 2, "their rows are deleted in the background"
    rig.apply(DropGroup(*drain.place))
    again = Drain(rig, name="later")
    rig.now_ms += 1
    assert again.create().plan() == [], "what another group rejected is done"


def test_a_reject_of_many_cuts_the_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[int] = []
    cut = MessageOrder.cut

    def counted(self: MessageOrder, row_keys: Set[int]) -> None:
        cuts.append(len(row_keys))
        cut(self, row_keys)

    monkeypatch.setattr(MessageOrder, "cut", counted)
    rig = Rig()
    rig.send(*[f"m{n}" for n in range(300)])
    drain = Drain(rig).create()
    read = drain.plan()
    assert drain.reject(*read[20:220]).rejected == 200
    assert cuts == [200], "each looks at all messages in memory"
    assert rig.peek_names() == read[:20] + read[220:]


def test_only_the_reader_of_the_planned_range_rejects() -> None:
    rig = Rig()
    rig.send("a", "b")
    drain = Drain(rig).create()
    drain.plan()
    [key, _] = drain.keys()
    rig.send("c")
    end = drain.cursor.planned
    for epoch, named, refusal in (
        (drain.epoch - 1, key, Refusal.GROUP_FENCED),
        (drain.epoch, end, Refusal.ARGUMENT_OUT_OF_RANGE),
    ):
        reply = rig.apply(RejectRows(*drain.place, epoch, [named], "x", ""))
        assert refusal_of(reply) is refusal
    drain.settle()
    reply = rig.apply(RejectRows(*drain.place, drain.epoch, [key], "x", ""))
    assert refusal_of(reply) is Refusal.ARGUMENT_OUT_OF_RANGE
    rig.apply(PutGroup(QUEUE, ACTIVE, "tap", GroupKind.TAP, 0))
    reply = rig.apply(RejectRows(QUEUE, ACTIVE, "tap", 0, [key], "x", ""))
    assert refusal_of(reply) is Refusal.NOT_ALLOWED
    reply = rig.apply(RejectRows(*drain.place, drain.epoch, list(range(251)), "x", ""))
    assert refusal_of(reply) is Refusal.ARGUMENT_OUT_OF_RANGE


def test_one_group_drains_a_sub_queue_and_taps_read_beside_it() -> None:
    rig = Rig()
    rig.send("a", "b")
    drain = Drain(rig).create()
    assert refusal_of(rig.apply(PutGroup(QUEUE, ACTIVE, "two", DRAIN, 0))) is Refusal.CONFLICT
    rig.apply(PutGroup(QUEUE, ACTIVE, "tap", GroupKind.TAP, 0))
    drain.plan()
    drain.reject("a")
    drain.settle()
    assert rig.peek_names() == []
    hows = sorted(how for _, how, _ in rig.tables.settled.values())
    assert hows == [Settling.COMPLETED, Settling.REJECTED]
    assert len(rig.tables.rows) == 3


def test_a_reset_reads_again_what_is_left() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    drain = Drain(rig).create()
    drain.plan(drain.listed().readable - 1)
    drain.settle()
    drain.plan()
    drain.reject("c")
    position = drain.cursor.settled
    reply = rig.apply(ResetGroup(*drain.place, {HOME: position}))
    assert refusal_of(reply) is Refusal.ARGUMENT_OUT_OF_RANGE
    rig.now_ms += 1
    cursor_of(rig.apply(ResetGroup(*drain.place, {HOME: 0})))
    assert drain.claim().plan() == []
    assert rig.peek_names(DLQ) == ["c"]


@pytest.mark.parametrize("has_session", [False, True])
def test_what_is_drained_is_not_forwarded(has_session: bool) -> None:
    properties = {"requires_session": has_session}
    bus = Bus({1: Rig(QueueProperties(**properties)), 2: Rig()}, {"far": (2, QUEUE)})
    rig = bus.rigs[1]
    session = "s" if has_session else None
    rig.send(message("a", session=session))
    drain = Drain(rig).create()
    rig.put(QueueProperties(forward_to="far", **properties))
    rig.send(message("b", session=session))
    rig.tick_now()
    bus.settle()
    rig.crash()
    rig.tick_now()
    bus.settle()
    assert bus.rigs[2].peek_names() == []
    assert drain.claim().plan() == ["a", "b"]
    drain.settle()
    rig.send(message("c", session=session))
    rig.apply(DropGroup(*drain.place))
    rig.tick_now()
    bus.settle()
    assert bus.rigs[2].peek_names() == ["c"]


def test_a_follower_settles_and_freezes_what_the_home_has_decided() -> None:
    rig = Rig()
    numbers = rig.send("a", "b")
    place = (QUEUE, ACTIVE, "lake")
    cursor_of(rig.apply(PutGroup(*place, DRAIN, 0)))
    end = max(rig.tables.rows) + 1
    cursor = cursor_of(rig.apply(FollowHome(*place, 5, "driver", 0, end)))
    assert (cursor.settled, cursor.planned) == (0, end)
    reply = rig.apply(DeleteBySequence(QUEUE, ACTIVE, numbers))
    assert isinstance(reply, MessagesHandled)
    assert len(reply.refused) == 2
    rig.apply(FollowHome(*place, 5, "driver", end - 1, end))
    rig.tick_now()
    assert rig.peek_names() == ["b"]


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_follower_that_missed_a_reset_begins_with_what_is_left(is_settled: bool) -> None:
    """A claim brings the news of a reset that failed on its way: what was rejected stays so."""
    rig = Rig()
    rig.send("a", "b")
    place = (QUEUE, ACTIVE, "lake")
    cursor_of(rig.apply(PutGroup(*place, DRAIN, 0)))
    end = max(rig.tables.rows) + 1
    rig.apply(FollowHome(*place, 5, "driver", 0, end))
    rig.apply(RejectRows(*place, 5, [end - 1], "x", ""))
    if is_settled:
        rig.apply(FollowHome(*place, 5, "driver", end, end))
    rig.advance(1_000)
    cursor = cursor_of(rig.apply(FollowHome(*place, 7, "driver", 0, 0)))
    assert (cursor.settled, cursor.placed_ms) == (0, rig.now_ms)
    outcome = rig.results[-1]
    assert isinstance(outcome, Outcome)
    assert outcome.mutations == [PutCursor(*place, cursor, is_placed=True)]


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_each_message_has_one_end(seed: int) -> None:
    """Receivers before it, crashes, repeated reads, rejects and claims, with sessions or not."""
    random = Random(seed)
    has_session = seed % 2 == 1
    rig = Rig(
        QueueProperties(requires_session=has_session, max_delivery_count=50),
        budget_bytes=random.choice([3_000, 1 << 30]),
        seed=seed,
    )
    sent: list[str] = []
    ended: list[str] = []

    def send() -> None:
        fresh = [f"m{len(sent) + n}" for n in range(random.randrange(1, 40))]
        session = f"s{random.randrange(3)}" if has_session else None
        rig.send(*[message(name, session=session) for name in fresh])
        sent.extend(fresh)

    for step in range(6):
        send()
        ended += received(rig, f"r{step}", random, has_session=has_session)
    drain = Drain(rig).create()
    processed: list[str] = []
    rejected: list[str] = []
    for _ in range(40):
        read = drain.plan(_some_end(drain, random))
        refuse = [name for name in read if random.random() < 0.2]
        for name in refuse:
            if random.random() < 0.7:
                drain.reject(name)
        if random.random() < 0.5:
            rig.crash()
            drain.claim()
        if random.random() < 0.3:
            rig.advance(random.choice([1, 50, 70_000]))
        if random.random() < 0.3:
            send()
        assert drain.read() == read
        if refuse:
            drain.reject(*refuse)
        processed += [name for name in read if name not in refuse]
        rejected += refuse
        if random.random() < 0.5:
            drain.settle()
    rig.advance(200_000)
    while read := drain.plan():
        processed += read
    drain.settle()
    rig.advance(1_000)
    deferred = rig.peek_names()
    assert len(deferred) == drain.listed().deferred
    dead = rig.peek_names(DLQ)
    assert sorted(dead) == sorted(rejected)
    assert sorted(processed + rejected + ended + deferred) == sorted(sent)
    rig.crash()
    assert sorted(rig.peek_names()) == sorted(deferred)


def received(rig: Rig, name: str, random: Random, *, has_session: bool) -> list[str]:
    """Receive some messages before there is a drain; return the names of those completed."""
    if has_session:
        if rig.accept(name) is None:
            return []
        rig.demand(name, 5)
        held = rig.inbox(name)
    else:
        held = rig.receive(name, 5)
    completed = []
    for each in held:
        how = random.choice([Disposition.COMPLETE, Disposition.DEFER, Disposition.ABANDON, None])
        if how is None:
            continue  # its lock expires
        session = rig.clients[rig.names[name]].session
        rig.settle(how, each, session_id=session.encode() if session else None)
        if how is Disposition.COMPLETE:
            completed.append(each)
    return names(completed)


def _some_end(drain: Drain, random: Random) -> int:
    cursor, listed = drain.cursor, drain.listed()
    assert cursor.plan is not None
    first = cursor.plan.ranges[HOME][1]
    live = [key for key in sorted(drain.rig.tables.rows) if first <= key < listed.readable]
    if not live or random.random() < 0.2:
        return max(first, listed.readable)
    return random.choice(live) + 1


def test_accepting_a_session_is_refused() -> None:
    rig = Rig(QueueProperties(requires_session=True))
    rig.send(message("a", session="s"))
    assert rig.accept("A", "s") == "s"
    Drain(rig).create()
    assert rig.clients[rig.names["A"]].ended is Refusal.NOT_ALLOWED
    reply = rig.apply(AcceptSession(QUEUE, 99, ReceiveMode.PEEK_LOCK, b"s"))
    assert refusal_of(reply) is Refusal.NOT_ALLOWED
