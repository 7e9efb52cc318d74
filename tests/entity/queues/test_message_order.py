"""The order of a sub-queue without the sub-queue: messages and keys in, the lowest ones out."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postbus.entity.queues.message_order import MessageOrder
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.message.envelope import Envelope
from tests.entity.partition_checks import check_order

ENVELOPE = Envelope(size_bytes=100)


def queued(row_key: int) -> QueuedMessage:
    return QueuedMessage(row_key, row_key, row_key, ENVELOPE)


def order_of(*row_keys: int, backlog: Iterable[int] = (), tail: Iterable[int] = ()) -> MessageOrder:
    """Make an order of ready messages, keys, and loaded messages behind them."""
    order = MessageOrder()
    order.extend([queued(row_key) for row_key in row_keys])
    order.append_keys(list(backlog))
    order.extend([queued(row_key) for row_key in tail])
    return order


def taken(order: MessageOrder, count: int = 100) -> list[int]:
    return [message.row_key for message in order.take(count)]


def load(order: MessageOrder, row_key: int) -> None:
    """Load a key or a stub as a row that was read does."""
    stub = order.stub_of(row_key)
    if stub is None:
        order.load_next([queued(row_key)])
    else:
        stub.envelope = ENVELOPE
        order.note_loaded(stub)


def put_back(order: MessageOrder, *row_keys: int, is_loaded: bool = True) -> None:
    for row_key in row_keys:
        message = queued(row_key)
        if not is_loaded:
            message.envelope = None
        order.put_back(message)


# --- taking and returning -------------------------------------------------------------------------


def test_messages_are_taken_in_the_order_in_which_they_came() -> None:
    order = order_of(1, 2, 3, 4)
    assert taken(order, 3) == [1, 2, 3]
    assert taken(order, 3) == [4]
    assert order.is_empty


def test_returned_messages_come_first_and_in_order() -> None:
    order = order_of(1, 2, 3, 4, 5)
    order.take(4)
    put_back(order, 4, 1, 3)
    assert taken(order, 2) == [1, 3]
    put_back(order, 2)
    assert taken(order) == [2, 4, 5]


def test_nothing_behind_a_stub_is_taken() -> None:
    order = order_of(1, 2, 3)
    order.take(2)
    put_back(order, 1)
    put_back(order, 2, is_loaded=False)
    assert order.has_absent
    assert order.stub_keys(5) == [2]
    assert taken(order) == [1]
    assert taken(order) == []
    load(order, 2)
    assert not order.has_absent
    assert taken(order) == [2, 3]


def test_nothing_behind_the_backlog_is_taken() -> None:
    order = order_of(1, backlog=[2, 3], tail=[4])
    assert taken(order) == [1]
    load(order, 2)
    assert taken(order) == [2]
    load(order, 3)
    assert taken(order) == [3, 4]


def test_only_one_ready_message_is_taken_as_the_only_one() -> None:
    assert MessageOrder().take_only() is None
    assert order_of(1, 2).take_only() is None
    assert order_of(1, backlog=[2]).take_only() is None
    order = order_of(1, 2)
    put_back(order, *taken(order, 1))
    assert order.take_only() is None
    message = order_of(7).take_only()
    assert message is not None
    assert message.row_key == 7


# --- arrivals -------------------------------------------------------------------------------------


def test_a_message_is_not_ready_before_a_backlog() -> None:
    order = order_of(1)
    assert order.append_ready(queued(2))
    order.append_keys([3])
    assert not order.append_ready(queued(4))
    assert list(order.row_keys()) == [1, 2, 3]


def test_no_key_is_added_behind_the_tail() -> None:
    order = order_of(backlog=[1], tail=[2])
    with pytest.raises(AssertionError):
        order.append_keys([3])
    assert [message.row_key for message in order.unload_tail()] == [2]
    order.append_keys([3])
    assert list(order.next_keys(9)) == [1, 2, 3]


def test_keys_of_an_earlier_life_are_a_backlog() -> None:
    order = MessageOrder()
    order.restore(array("q", [4, 6]))
    assert order.oldest() == (4, None)
    assert (len(order), order.front_count, order.backlog_count) == (2, 0, 2)


# --- unloading and loading ------------------------------------------------------------------------


def test_ready_messages_become_the_first_keys() -> None:
    order = order_of(1, 2, backlog=[3, 4], tail=[5])
    assert [message.row_key for message in order.unload_ready()] == [1, 2]
    assert list(order.next_keys(9)) == [1, 2, 3, 4]
    assert [message.row_key for message in order.messages()] == [5]
    for row_key in (1, 2, 3, 4):
        load(order, row_key)
    assert taken(order) == [1, 2, 3, 4, 5]


def test_rows_are_wanted_below_the_low_water_mark_or_for_a_stub() -> None:
    assert not order_of(1).wants_rows(2)
    assert order_of(1, backlog=[2]).wants_rows(2)
    assert not order_of(1, 2, backlog=[3]).wants_rows(2)
    order = order_of(1, 2, 3)
    order.take(1)
    put_back(order, 1, is_loaded=False)
    assert order.wants_rows(2)


def test_the_first_keys_alone_can_be_loaded() -> None:
    order = order_of(1, backlog=[2, 3, 4])
    with pytest.raises(AssertionError):
        order.load_next([queued(3)])
    order = order_of(1, backlog=[2, 3, 4])
    order.load_next([queued(2), queued(3)])
    assert list(order.next_keys(9)) == [4]
    order.load_next([])
    assert taken(order) == [1, 2, 3]


def test_a_returned_message_that_is_unloaded_is_a_stub() -> None:
    order = order_of(1, 2)
    put_back(order, *taken(order))
    (first, _) = order.returned()
    first.envelope = None
    order.note_unloaded(first)
    assert order.is_absent(1)
    assert not order.is_absent(2)
    assert order.stub_of(1) is first
    assert taken(order) == []


# --- taking out -----------------------------------------------------------------------------------


def test_messages_are_cut_out_of_every_collection() -> None:
    order = order_of(1, 2, 3, 4, 5, backlog=[6, 7, 8], tail=[9, 10])
    order.take(2)
    put_back(order, 1)
    put_back(order, 2, is_loaded=False)
    order.cut({2, 4, 7, 10, 99})
    assert list(order.row_keys()) == [1, 3, 5, 6, 8, 9]
    assert order.stub_of(2) is None
    check_order(order)


def test_returned_messages_stay_in_order_when_one_is_cut_out() -> None:
    order = order_of(1, 2, 3, 4, 5, 6, 7)
    order.take(7)
    put_back(order, 1, 5, 2, 6, 7, 3, 4)  # a heap that is none without 2
    order.cut({2})
    assert taken(order) == [1, 3, 4, 5, 6, 7]


def test_the_tail_is_ready_when_the_backlog_was_cut_out() -> None:
    order = order_of(backlog=[1, 2, 3], tail=[4])
    load(order, 1)
    order.cut({2, 3})
    assert taken(order) == [1, 4]
    check_order(order)


def test_a_cleared_order_is_as_new() -> None:
    order = order_of(1, 2, backlog=[3], tail=[4])
    order.take(1)
    put_back(order, 1, is_loaded=False)
    order.clear()
    assert order.is_empty
    assert not order.has_absent
    check_order(order)
    order.extend([queued(5)])
    assert taken(order) == [5]


# --- reading --------------------------------------------------------------------------------------


def test_the_oldest_is_the_first_of_all_collections() -> None:
    assert MessageOrder().oldest() is None
    order = order_of(1, 2, backlog=[3])
    assert order.oldest() == (1, 1)
    put_back(order, *taken(order, 2))
    assert order.oldest() == (1, 1)
    order.cut({1, 2})
    assert order.oldest() == (3, None)


def test_the_first_messages_are_read_from_any_key_in_all_collections() -> None:
    order = order_of(1, 2, 3, 4, backlog=[5, 6], tail=[7, 8])
    put_back(order, *reversed(taken(order, 2)))

    def first(limit: int, from_key: int = 0) -> list[tuple[int, bool]]:
        found = order.first(limit, from_key)
        assert all(message is None or message.row_key == key for key, message in found)
        return [(key, message is not None) for key, message in found]

    assert first(3) == [(1, True), (2, True), (3, True)]
    assert first(4, 4) == [(4, True), (5, False), (6, False), (7, True)]
    assert first(9, 6) == [(6, False), (7, True), (8, True)]
    assert first(9, 9) == []
    assert first(0) == []
    assert len(first(99)) == 8
    assert [order.lowest_key(key) for key in (0, 2, 4, 5, 7, 9)] == [1, 2, 4, 5, 7, None]


# --- against a sorted list ------------------------------------------------------------------------


class OrderModel(RuleBasedStateMachine):
    """An order beside a sorted list of the keys that are here.

    `loaded` are those with an envelope, `returned` those that had been taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order = MessageOrder()
        self.keys: list[int] = []
        self.loaded: set[int] = set()
        self.returned: set[int] = set()
        self.away: dict[int, QueuedMessage] = {}
        self.last_key = 0

    def new_keys(self, count: int) -> list[int]:
        """Make keys above all others, with gaps."""
        first = self.last_key + 2
        self.last_key = first + 2 * count
        return list(range(first, self.last_key, 2))

    def is_key(self, row_key: int) -> bool:
        return row_key not in self.loaded and row_key not in self.returned

    def backlog(self) -> list[int]:
        return [row_key for row_key in self.keys if self.is_key(row_key)]

    def front(self) -> list[int]:
        """Return the keys before the backlog."""
        backlog = self.backlog()
        return [key for key in self.keys if not backlog or key < backlog[0]]

    def tail(self) -> list[int]:
        front, backlog = self.front(), self.backlog()
        return self.keys[len(front) + len(backlog) :]

    def forget(self, row_keys: Iterable[int]) -> None:
        gone = set(row_keys)
        self.keys = [row_key for row_key in self.keys if row_key not in gone]
        self.loaded -= gone
        self.returned -= gone

    # --- steps ------------------------------------------------------------------------------------

    @initialize(count=st.integers(0, 4))
    def restore(self, count: int) -> None:
        self.keys = self.new_keys(count)
        self.order.restore(array("q", self.keys))

    @rule(count=st.integers(0, 5))
    def extend(self, count: int) -> None:
        row_keys = self.new_keys(count)
        self.order.extend([queued(row_key) for row_key in row_keys])
        self.keys += row_keys
        self.loaded.update(row_keys)

    @rule()
    def append_ready(self) -> None:
        has_backlog = bool(self.backlog())
        (row_key,) = self.new_keys(1)
        assert self.order.append_ready(queued(row_key)) is not has_backlog
        if not has_backlog:
            self.keys.append(row_key)
            self.loaded.add(row_key)

    @rule(count=st.integers(1, 4))
    def append_keys(self, count: int) -> None:
        self.unload_tail(sys.maxsize)
        assert not self.order.has_tail
        row_keys = self.new_keys(count)
        self.order.append_keys(row_keys)
        self.keys += row_keys

    @rule(limit=st.integers(1, 6) | st.just(sys.maxsize))
    def unload_tail(self, limit: int) -> None:
        tail = self.tail()[:limit]
        assert [message.row_key for message in self.order.unload_tail(limit)] == tail
        self.loaded -= set(tail)

    @rule(limit=st.integers(1, 6) | st.just(sys.maxsize))
    def unload_ready(self, limit: int) -> None:
        ready = [row_key for row_key in self.front() if row_key not in self.returned][-limit:]
        assert [message.row_key for message in self.order.unload_ready(limit)] == ready
        self.loaded -= set(ready)

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        expected: list[int] = []
        for row_key in self.keys[:count]:
            if row_key not in self.loaded:
                break
            expected.append(row_key)
        messages = self.order.take(count)
        assert [message.row_key for message in messages] == expected
        self.away.update((message.row_key, message) for message in messages)
        self.forget(expected)

    @rule()
    def take_only(self) -> None:
        message = self.order.take_only()
        if len(self.keys) == 1 and self.keys[0] in self.loaded - self.returned:
            assert message is not None
            assert message.row_key == self.keys[0]
            self.away[message.row_key] = message
            self.forget([message.row_key])
        else:
            assert message is None

    @precondition(lambda self: self.away)
    @rule(data=st.data(), is_loaded=st.booleans())
    def put_back(self, data: st.DataObject, is_loaded: bool) -> None:
        row_key = data.draw(st.sampled_from(sorted(self.away)))
        message = self.away.pop(row_key)
        if not is_loaded:
            message.envelope = None
        self.order.put_back(message)
        self.keys = sorted([*self.keys, row_key])
        self.returned.add(row_key)
        if is_loaded:
            self.loaded.add(row_key)

    @precondition(lambda self: self.returned & self.loaded)
    @rule(data=st.data())
    def unload_returned(self, data: st.DataObject) -> None:
        row_key = data.draw(st.sampled_from(sorted(self.returned & self.loaded)))
        (message,) = (each for each in self.order.returned() if each.row_key == row_key)
        message.envelope = None
        self.order.note_unloaded(message)
        self.loaded.discard(row_key)

    @precondition(lambda self: set(self.keys) - self.loaded)
    @rule(count=st.integers(1, 6))
    def load(self, count: int) -> None:
        """Read rows in order: stubs come before keys."""
        wanted = [row_key for row_key in self.keys if row_key not in self.loaded][:count]
        stubs = [row_key for row_key in wanted if row_key in self.returned]
        for row_key in stubs:
            load(self.order, row_key)
        self.order.load_next([queued(row_key) for row_key in wanted[len(stubs) :]])
        self.loaded.update(wanted)

    @precondition(lambda self: self.last_key)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        row_keys = data.draw(st.sets(st.integers(1, self.last_key), max_size=6))
        self.order.cut(row_keys - self.away.keys())
        self.forget(row_keys - self.away.keys())

    @precondition(lambda self: self.backlog())
    @rule()
    def cut_backlog(self) -> None:
        backlog = self.backlog()
        self.order.cut(set(backlog))
        self.forget(backlog)

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def is_in_order(self) -> None:
        check_order(self.order)

    @invariant()
    def counts_are_exact(self) -> None:
        order = self.order
        assert len(order) == len(self.keys)
        assert order.is_empty is not bool(self.keys)
        assert order.front_count == len(self.front())
        assert order.backlog_count == len(self.backlog())

    @invariant()
    def absent_messages_are_known(self) -> None:
        order = self.order
        backlog = self.backlog()
        stubs = sorted(self.returned - self.loaded)
        ready = [row_key for row_key in self.front() if row_key not in self.returned]
        absent = {key for key in range(self.last_key + 2) if order.is_absent(key)}
        assert absent == set(self.keys) - self.loaded
        assert order.has_absent is bool(absent)
        assert order.stub_keys(2) == stubs[:2]
        assert list(order.next_keys(2)) == backlog[:2]
        assert [key for key in self.keys if order.stub_of(key)] == stubs
        assert order.wants_rows(2) is bool(stubs or (backlog and len(ready) < 2))

    @invariant()
    def everything_is_read_in_order(self) -> None:
        order = self.order
        assert list(order.row_keys()) == self.keys
        assert [message.row_key for message in order.returned()] == sorted(self.returned)
        assert [message.row_key for message in order.front()] == self.front()
        objects = [key for key in self.keys if not self.is_key(key)]
        assert [message.row_key for message in order.messages()] == objects
        expected = [(key, not self.is_key(key)) for key in self.keys]
        for start in (0, self.last_key // 2):
            rest = [each for each in expected if each[0] >= start]
            assert order.lowest_key(start) == (rest[0][0] if rest else None)
            for limit in (1, 3, 99):
                found = order.first(limit, start)
                assert [(key, each is not None) for key, each in found] == rest[:limit]
        oldest = order.oldest()
        assert (oldest and oldest[0]) == (self.keys[0] if self.keys else None)
        if oldest is not None:
            assert (oldest[1] is None) is self.is_key(oldest[0])


OrderModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOrderModel = pytest.mark.slow(OrderModel.TestCase)
