"""The demand of a receiver link without its link: credit in, commands out, time as an argument."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postbus.edge.amqp.demand_window import ANSWER_DRAIN, DemandLimits, DemandWindow
from postbus.entity.commands import DemandSet, Refusal, Refused, SetDemand

LIMITS = DemandLimits()
FEW = DemandLimits(step=8, step_bytes=1_000, max_unsettled=20, drain_s=0.1)
BUSY = Refused(Refusal.BUSY)
MAX_ROUNDS = 200
"""Commands within which the model of an entity comes to rest."""


def window(limits: DemandLimits = LIMITS, average_bytes: int = 1) -> DemandWindow:
    made = DemandWindow(limits, average_bytes)
    made.restart(1)
    return made


def deliver(demand: DemandWindow, count: int, credit: int, size_bytes: int = 1) -> int:
    """Hand out deliveries as an endpoint with locks does; return how many the client got."""
    taken = demand.receive(count, credit)
    if taken:
        demand.unsettled_count += taken
        demand.note_sent(taken, size_bytes * taken)
    return taken


def drain(demand: DemandWindow, credit: int, now_s: float = 0.0) -> SetDemand:
    command = demand.request_drain(credit, is_held=False, now_s=now_s)
    assert isinstance(command, SetDemand)
    assert command.is_drain
    return command


# --- demand -------------------------------------------------------------------------------------


def test_defaults_answer_a_drain_before_sdks_give_up() -> None:
    assert LIMITS.drain_s < 0.2
    assert LIMITS.step_bytes < 16 << 20


def test_demand_is_the_credit_without_delivered_messages() -> None:
    demand = window()
    assert demand.request(10, is_held=False) == SetDemand(1, 10)
    assert deliver(demand, 4, 10) == 4
    assert demand.is_in_step(6)
    assert demand.request(6, is_held=False) is None
    assert demand.request(16, is_held=False) == SetDemand(1, 20)


def test_small_raises_wait_until_they_are_a_quarter_of_the_credit() -> None:
    demand = window()
    demand.request(100, is_held=False)
    assert demand.request(133, is_held=False) is None
    assert demand.request(134, is_held=False) == SetDemand(1, 134)


def test_withdrawn_credit_lowers_the_demand_at_once() -> None:
    demand = window()
    demand.request(100, is_held=False)
    assert demand.request(99, is_held=False) == SetDemand(1, 99)
    assert demand.request(-5, is_held=False) == SetDemand(1, 0)


def test_deliveries_without_credit_are_not_taken() -> None:
    demand = window()
    demand.request(10, is_held=False)
    assert deliver(demand, 10, 3) == 3
    assert demand.receive(1, -1) == 0
    assert demand.unsettled_count == 3


def test_endless_credit_is_used_step_by_step() -> None:
    demand = window()
    assert demand.request(1 << 31, is_held=False) == SetDemand(1, LIMITS.step)
    assert not demand.is_in_step(1 << 31)


def test_step_follows_the_size_of_the_last_deliveries() -> None:
    demand = window(average_bytes=1 << 20)
    assert demand.request(100, is_held=False) == SetDemand(1, 4)
    deliver(demand, 4, 100, size_bytes=1 << 18)  # expected from now on: 640 KiB
    assert demand.request(96, is_held=False) == SetDemand(1, 4 + 6)
    large = window(average_bytes=1 << 30)
    assert large.request(100, is_held=False) == SetDemand(1, 1)


def test_unsettled_deliveries_bound_the_demand() -> None:
    demand = window(DemandLimits(max_unsettled=10))
    assert demand.request(100, is_held=False) == SetDemand(1, 10)
    deliver(demand, 10, 100)
    assert not demand.is_in_step(90)
    assert demand.request(90, is_held=False) is None
    assert demand.settle(4)
    assert not demand.settle(1)
    assert demand.request(90, is_held=False) == SetDemand(1, 15)


def test_a_client_that_does_not_read_gets_requested_messages_only() -> None:
    demand = window()
    demand.request(10, is_held=False)
    deliver(demand, 4, 10)
    assert demand.request(96, is_held=True) is None
    assert demand.request(3, is_held=True) == SetDemand(1, 7)
    assert demand.request(96, is_held=False) == SetDemand(1, 100)


def test_a_refused_demand_is_requested_again() -> None:
    demand = window()
    command = demand.request(10, is_held=False)
    assert command is not None
    assert demand.request(10, is_held=False) is None
    assert demand.note_refused(command)
    assert not demand.is_in_step(10)
    assert demand.request(10, is_held=False) == command


def test_a_new_consumer_begins_at_zero() -> None:
    demand = window()
    old = demand.request(10, is_held=False)
    assert old is not None
    deliver(demand, 4, 10)
    demand.restart(2)
    assert not demand.note_refused(old)
    assert demand.request(6, is_held=False) == SetDemand(2, 6)
    assert demand.unsettled_count == 4


# --- drain --------------------------------------------------------------------------------------


def test_a_drain_without_credit_is_answered_at_once() -> None:
    assert window().request_drain(0, is_held=False, now_s=0.0) is ANSWER_DRAIN


def test_a_drain_is_answered_when_the_entity_has_no_more() -> None:
    demand = window()
    command = drain(demand, 10)
    assert command.limit == 10
    deliver(demand, 3, 10)
    assert demand.drain is command
    assert demand.end_drain(command, DemandSet(3), is_draining=True) is ANSWER_DRAIN
    assert demand.drain is None
    assert demand.drain_due_s is None
    assert demand.is_in_step(0)


def test_a_drain_goes_on_while_the_entity_has_more() -> None:
    demand = window(FEW)
    command = drain(demand, 10)
    assert command.limit == 8
    deliver(demand, 8, 10)
    assert demand.end_drain(command, DemandSet(8), is_draining=True) is None
    assert drain(demand, 2).limit == 10


def test_a_drain_with_too_many_unsettled_deliveries_is_answered() -> None:
    """A client that waits for the drain before it settles must not wait for ever."""
    demand = window(DemandLimits(max_unsettled=10))
    deliver(demand, 10, 100)
    assert demand.request_drain(90, is_held=False, now_s=0.0) is ANSWER_DRAIN


def test_a_refused_drain_is_answered() -> None:
    demand = window()
    command = drain(demand, 10)
    assert demand.end_drain(command, BUSY, is_draining=True) is ANSWER_DRAIN


def test_a_drain_that_the_client_gave_up_is_not_answered() -> None:
    demand = window()
    command = drain(demand, 10)
    assert demand.end_drain(command, DemandSet(0), is_draining=False) is None
    assert demand.request(10, is_held=False) == SetDemand(1, 10)
    assert demand.expire_drain(1.0, is_draining=False, is_held=False) is None
    assert demand.drain_due_s is None


def test_a_drain_that_the_client_gave_up_does_not_delay_the_next_one() -> None:
    demand = window()
    drain(demand, 10, now_s=1.0)
    assert demand.expire_drain(1.1, is_draining=False, is_held=False) is None
    assert demand.drain is None
    drain(demand, 10, now_s=2.0)
    assert demand.expire_drain(2.1, is_draining=True, is_held=False) is ANSWER_DRAIN


def test_a_late_drain_is_answered_at_its_time() -> None:
    demand = window()
    drain(demand, 10, now_s=5.0)
    assert demand.drain_due_s == 5.0 + LIMITS.drain_s
    assert demand.expire_drain(5.05, is_draining=True, is_held=False) is None
    assert demand.expire_drain(5.1, is_draining=True, is_held=False) is ANSWER_DRAIN
    assert demand.drain is None
    assert demand.drain_due_s is None
    assert demand.expire_drain(9.0, is_draining=True, is_held=False) is None


def test_further_steps_of_a_drain_do_not_move_its_time() -> None:
    demand = window(FEW)
    command = drain(demand, 10, now_s=5.0)
    deliver(demand, 8, 10)
    demand.end_drain(command, DemandSet(8), is_draining=True)
    drain(demand, 2, now_s=5.06)
    assert demand.drain_due_s == 5.1


def test_a_drain_waits_for_a_client_that_does_not_read() -> None:
    demand = window()
    assert demand.request_drain(10, is_held=True, now_s=0.0) is None
    assert demand.drain_due_s is None
    drain(demand, 10, now_s=1.0)
    assert demand.expire_drain(1.2, is_draining=True, is_held=True) is None
    assert demand.drain_due_s == 1.2 + LIMITS.drain_s
    assert demand.expire_drain(1.4, is_draining=True, is_held=False) is ANSWER_DRAIN


def test_the_reply_to_a_late_drain_does_not_answer_the_next_one() -> None:
    demand = window()
    late = drain(demand, 3)
    demand.expire_drain(0.1, is_draining=True, is_held=False)
    following = drain(demand, 4, now_s=0.2)
    for reply in (DemandSet(0), Refused(Refusal.NOT_APPLIED)):
        assert demand.end_drain(late, reply, is_draining=True) is None
    assert demand.drain is following
    assert demand.end_drain(following, DemandSet(0), is_draining=True) is ANSWER_DRAIN


def test_the_reply_to_a_late_drain_makes_later_demand_known_as_lowered() -> None:
    demand = window()
    late = drain(demand, 3)
    demand.expire_drain(0.1, is_draining=True, is_held=False)
    assert demand.request(5, is_held=False) == SetDemand(1, 5)
    assert demand.end_drain(late, DemandSet(0), is_draining=False) is None
    assert demand.request(5, is_held=False) == SetDemand(1, 5)


def test_the_reply_to_a_drain_of_a_former_consumer_is_ignored() -> None:
    demand = window()
    former = drain(demand, 3)
    demand.restart(2)
    assert demand.drain is None
    following = drain(demand, 3)
    assert demand.end_drain(former, DemandSet(0), is_draining=True) is None
    assert demand.drain is following


# --- model --------------------------------------------------------------------------------------


class LinkModel(RuleBasedStateMachine):
    """A window between a client and an entity that answers late, refuses or is loaded again."""

    def __init__(self) -> None:
        super().__init__()
        self.demand = window(FEW)
        self.now_s = 0.0
        # client
        self.credit = 0
        self.is_draining = False
        self.is_reading = True
        self.unsettled = 0
        # entity
        self.consumer_id = 1
        self.messages = 0
        self.limit = 0
        self.delivered = 0
        self.commands: deque[SetDemand] = deque()

    @initialize(messages=st.integers(0, 30))
    def fill(self, messages: int) -> None:
        self.messages = messages

    # --- steps of the endpoint ------------------------------------------------------------------

    def pump(self) -> None:
        demand = self.demand
        if demand.drain is not None:
            return
        is_held = not self.is_reading
        if self.is_draining:
            result = demand.request_drain(self.credit, is_held=is_held, now_s=self.now_s)
            if result is ANSWER_DRAIN:
                self.answer_drain()
            elif isinstance(result, SetDemand):
                assert demand.drain_due_s is not None
                self.submit(result)
            else:
                assert is_held
        else:
            requested = max(demand._demand - demand._delivered, 0)
            command = demand.request(self.credit, is_held=is_held)
            if command is not None:
                assert not is_held or command.limit - demand._delivered <= requested
                self.submit(command)
                assert demand.request(self.credit, is_held=is_held) is None

    def submit(self, command: SetDemand) -> None:
        open_count = command.limit - self.demand._delivered
        assert open_count <= max(self.credit, 0)
        assert open_count <= FEW.step
        self.commands.append(command)

    def answer_drain(self) -> None:
        assert self.is_draining
        self.is_draining = False
        self.credit = 0

    # --- steps of the client --------------------------------------------------------------------

    @rule(credit=st.sampled_from([0, 3, 10, 40]), is_draining=st.sampled_from([True, True, False]))
    def flow(self, credit: int, is_draining: bool) -> None:
        self.credit, self.is_draining = credit, is_draining
        self.pump()

    @precondition(lambda self: self.unsettled)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.unsettled))
        self.unsettled -= count
        if self.demand.settle(count):
            self.pump()

    @rule(is_reading=st.booleans())
    def read(self, is_reading: bool) -> None:
        self.is_reading = is_reading
        self.pump()

    # --- steps of the entity --------------------------------------------------------------------

    @rule(count=st.integers(1, 10))
    def enqueue(self, count: int) -> None:
        self.messages += count
        self.hand_out()

    def hand_out(self) -> None:
        count = min(self.messages, max(self.limit - self.delivered, 0))
        if not count:
            return
        taken = self.demand.receive(count, self.credit)
        assert 0 <= taken <= max(self.credit, 0)
        self.delivered += count
        self.messages -= taken  # the others return
        self.credit -= taken
        self.unsettled += taken
        if taken:
            self.demand.unsettled_count += taken
            self.demand.note_sent(taken, 50 * taken)
        if self.is_draining or not self.demand.is_in_step(self.credit):
            self.pump()

    @precondition(lambda self: self.commands)
    @rule()
    def process(self) -> None:
        command = self.commands.popleft()
        if command.consumer_id != self.consumer_id:
            self.reply(command, Refused(Refusal.NOT_APPLIED))
            return
        self.limit = command.limit
        self.hand_out()
        if command.is_drain:
            self.limit = self.delivered
        self.reply(command, DemandSet(self.delivered))

    @precondition(lambda self: self.commands)
    @rule()
    def refuse(self) -> None:
        self.reply(self.commands.popleft(), BUSY)

    def reply(self, command: SetDemand, reply: DemandSet | Refused) -> None:
        if command.is_drain:
            was_under_way = command is self.demand.drain
            result = self.demand.end_drain(command, reply, is_draining=self.is_draining)
            if result is ANSWER_DRAIN:
                assert was_under_way
                assert isinstance(reply, Refused) or not self.messages or not self.credit
                self.answer_drain()
            self.pump()
        elif isinstance(reply, Refused) and self.demand.note_refused(command):
            self.pump()

    @rule()
    def load_again(self) -> None:
        self.consumer_id += 1
        self.limit = self.delivered = 0
        self.demand.restart(self.consumer_id)
        assert self.demand.drain is None
        self.pump()

    # --- time -----------------------------------------------------------------------------------

    @rule(wait_s=st.sampled_from([0.04, 0.1]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        if self.demand.drain_due_s is not None and self.demand.drain_due_s <= self.now_s:
            result = self.demand.expire_drain(
                self.now_s, is_draining=self.is_draining, is_held=not self.is_reading
            )
            if result is ANSWER_DRAIN:
                assert self.is_reading
                self.answer_drain()
            self.pump()

    @rule()
    def outwait_the_entity(self) -> None:
        """A client that reads has its answer in time, though the entity does nothing."""
        self.read(is_reading=True)
        self.wait(FEW.drain_s)
        assert not self.is_draining

    @rule()
    def come_to_rest(self) -> None:
        """Messages do not wait while a client reads, has credit and few unsettled deliveries."""
        self.read(is_reading=True)
        for _ in range(MAX_ROUNDS):
            if self.commands:
                self.process()
        assert not self.commands
        assert not self.is_draining
        is_full = self.unsettled >= FEW.max_unsettled
        assert self.messages == 0 or self.credit <= 0 or is_full

    @invariant()
    def limits_hold(self) -> None:
        assert self.credit >= 0
        assert self.unsettled == self.demand.unsettled_count <= FEW.max_unsettled


LinkModel.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestLinkModel = pytest.mark.slow(LinkModel.TestCase)
