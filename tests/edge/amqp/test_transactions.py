"""Transactions at the socket: coordinator, transactional sends and settlements, and their ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from postbus.broker.access.authz import KeyRule
from postbus.contract.entities import Right
from postbus.edge.access.shares import Limit, Shares
from postbus.edge.amqp import transactions
from postbus.edge.amqp.receiver_links import ReceiverEndpoint
from postbus.message.codec import Described, Symbol, Ubyte, Uint, Ulong, encode_value
from tests.edge.amqp.test_links import wait_until
from tests.edge.amqp.test_wire import request
from tests.edge.bus_thread import RULES, BusThread, Keys, sas_token
from tests.edge.raw_client import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    REJECTED,
    TRANSFER,
    Frame,
    RawClient,
    described,
    frame,
    message,
)

pytestmark = pytest.mark.slow

COORDINATOR = 9
DECLARE, DISCHARGE, DECLARED, TRANSACTIONAL = 0x31, 0x32, 0x33, 0x34
VIA = Symbol("com.microsoft:transfer-destination-address")


class TransactionClient(RawClient):
    """A client with a link to the coordinator."""

    def __init__(
        self, bus: BusThread, rule: str = RULES[0].name, key: str = RULES[0].keys.primary
    ) -> None:
        super().__init__(bus.port, rule, key)
        self._next_id = 0
        self.write(
            frame(
                ATTACH, "coordinator", Uint(COORDINATOR), False, Ubyte(2), Ubyte(0),
                described(0x28, "here"), described(0x30), None, None, Uint(0),
            )
        )  # fmt: skip
        attached = self.expect(ATTACH)
        assert attached.fields[6] is not None
        assert int(attached.fields[6].descriptor) == 0x30

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def request(self, code: int, *fields: Any) -> Described:
        """Send a request to the coordinator and return the state it is answered with."""
        body = encode_value(Described(Ulong(0x77), described(code, *fields)))
        delivery_id = self.next_id()
        self.write(self.transfer(delivery_id, body, handle=COORDINATOR))
        return self.state_of(delivery_id)

    def state_of(self, delivery_id: int) -> Described:
        fields = self.expect(DISPOSITION).fields
        assert fields[1] == delivery_id
        assert fields[3] is True
        state = fields[4]
        assert isinstance(state, Described)
        return state

    def declare(self) -> bytes:
        state = self.request(DECLARE, None)
        assert int(state.descriptor) == DECLARED
        (transaction_id,) = state.value
        assert 0 < len(transaction_id) <= 32
        return bytes(transaction_id)

    def discharge(self, transaction_id: bytes, *, fail: bool = False) -> Described:
        return self.request(DISCHARGE, transaction_id, fail)

    def discharge_frame(self, transaction_id: bytes) -> bytes:
        """Return a discharge as bytes, for a segment with other frames."""
        discharge = described(DISCHARGE, transaction_id, False)
        body = encode_value(Described(Ulong(0x77), discharge))
        return self.transfer(self.next_id(), body, handle=COORDINATOR)

    def send_in(
        self, transaction_id: bytes, payload: bytes, *, handle: int = 0, batch: bool = False
    ) -> Described:
        delivery_id = self.next_id()
        state = described(TRANSACTIONAL, transaction_id, None)
        message_format = Uint(0x8001_3700 if batch else 0)
        self.write(
            frame(
                TRANSFER, Uint(handle), Uint(delivery_id), delivery_id.to_bytes(4, "big"),
                message_format, False, False, None, state, payload=payload,
            )
        )  # fmt: skip
        return self.state_of(delivery_id)

    def settle_in(self, transaction_id: bytes, delivery_id: int, outcome: Described) -> Described:
        state = described(TRANSACTIONAL, transaction_id, outcome)
        self.write(frame(DISPOSITION, True, Uint(delivery_id), Uint(delivery_id), False, state))
        return self.state_of(delivery_id)

    def receive(self, address: str, count: int, handle: int = 1) -> list[Frame]:
        self.attach_receiver(address, handle)
        self.write(self.flow(count, handle=handle))
        return [self.expect(TRANSFER) for _ in range(count)]

    def lock(self, queue: str, *bodies: bytes) -> list[int]:
        """Send messages and receive them; return the delivery ids. The sender has handle 0."""
        self.attach_sender(queue)
        self.write(*[self.transfer(self.next_id(), message(body)) for body in bodies])
        self.dispositions(len(bodies))
        return [int(taken.fields[1]) for taken in self.receive(queue, len(bodies))]


@pytest.fixture
def client(bus: BusThread) -> Iterator[TransactionClient]:
    with TransactionClient(bus) as opened:
        yield opened


def accepts(state: Described, transaction_id: bytes) -> bool:
    """Return whether an answer is "accepted" within a transaction."""
    return (
        int(state.descriptor) == TRANSACTIONAL
        and state.value[0] == transaction_id
        and int(state.value[1].descriptor) == ACCEPTED
    )


def condition(state: Described) -> str:
    assert int(state.descriptor) == REJECTED
    return str(state.value[0].value[0])


def complete() -> Described:
    return described(ACCEPTED)


def test_sends_take_effect_when_the_transaction_commits(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    client.attach_sender(queue)
    transaction = client.declare()
    for number in range(3):
        assert accepts(client.send_in(transaction, message(b"%d" % number)), transaction)
    assert bus.counts(queue).active == 0
    assert int(client.discharge(transaction).descriptor) == ACCEPTED
    assert bus.counts(queue).active == 3


def test_a_failed_transaction_has_no_effect(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    client.attach_sender(queue)
    transaction = client.declare()
    client.send_in(transaction, message(b"never"))
    assert int(client.discharge(transaction, fail=True).descriptor) == ACCEPTED
    assert bus.counts(queue).active == 0
    assert condition(client.discharge(transaction)) == "amqp:transaction:unknown-id"


@pytest.mark.behaviour("S251")
def test_a_dead_letter_is_completed_and_resent_in_one_commit(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    (delivery_id,) = client.lock(queue, b"bad")
    client.write(
        frame(DISPOSITION, True, Uint(delivery_id), Uint(delivery_id), False, described(REJECTED))
    )
    client.expect(DISPOSITION)
    (dead,) = client.receive(f"{queue}/$DeadLetterQueue", 1, handle=2)
    for fail in (True, False):
        transaction = client.declare()
        if fail:
            client.send_in(transaction, message(b"again"))
        else:
            settled = client.settle_in(transaction, int(dead.fields[1]), complete())
            assert accepts(settled, transaction)
            client.send_in(transaction, message(b"again"))
        client.discharge(transaction, fail=fail)
        counts = bus.counts(queue)
        assert (counts.active, counts.dead_letter) == ((0, 1) if fail else (1, 0))


def test_a_lost_lock_refuses_the_settlement_and_rolls_back(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    (taken,) = client.lock(queue, b"a")
    bus.advance(61_000)
    transaction = client.declare()
    client.send_in(transaction, message(b"never"))
    refused = client.settle_in(transaction, taken, complete())
    assert condition(refused) == "com.microsoft:message-lock-lost"
    assert condition(client.discharge(transaction)) == "amqp:transaction:rollback"
    assert bus.counts(queue).active == 1


def test_a_lock_that_is_lost_before_the_discharge_rolls_back(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    (taken,) = client.lock(queue, b"a")
    transaction = client.declare()
    assert accepts(client.settle_in(transaction, taken, complete()), transaction)
    client.send_in(transaction, message(b"never"))
    bus.advance(61_000)
    assert condition(client.discharge(transaction)) == "amqp:transaction:rollback"
    assert bus.counts(queue).active == 1


def test_unknown_transactions_are_refused_and_links_live_on(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    client.attach_sender(queue)
    unknown = "amqp:transaction:unknown-id"
    assert condition(client.send_in(b"nobody", message(b"a"))) == unknown
    assert condition(client.discharge(b"nobody")) == unknown
    client.write(client.transfer(client.next_id(), message(b"plain")))
    client.expect(DISPOSITION)
    (taken,) = client.receive(queue, 1)
    assert condition(client.settle_in(b"nobody", int(taken.fields[1]), complete())) == unknown
    assert bus.counts(queue).active == 1


def test_a_settled_outcome_in_an_unknown_transaction_is_counted_once(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    """Nothing is kept of the other deliveries of its link when that goes."""
    (taken, _) = client.lock(queue, b"m", b"m")
    wait_until(bus, lambda: len(bus.listener._connections) == 1)  # that of the test before goes
    (connection,) = [each._connection for each in bus.listener._connections]
    assert connection is not None
    (endpoint,) = [
        each for each in connection._endpoints.values() if isinstance(each, ReceiverEndpoint)
    ]
    session = endpoint._link.session
    state = described(TRANSACTIONAL, b"nobody", complete())
    first = Uint(taken)
    client.write(frame(DISPOSITION, True, first, first, True, state))
    client.declare()  # answered next: the outcome was not
    client.write(frame(DETACH, Uint(1), True))
    client.expect(DETACH)
    assert session.unsettled == {}


def test_invalid_requests_are_rejected(client: TransactionClient) -> None:
    delivery_id = client.next_id()
    client.write(client.transfer(delivery_id, b"\x00\x53\x77\xa1\x02hi", handle=COORDINATOR))
    assert condition(client.state_of(delivery_id)) == "amqp:not-implemented"
    delivery_id = client.next_id()
    client.write(client.transfer(delivery_id, b"\xff", handle=COORDINATOR))
    assert condition(client.state_of(delivery_id)) == "amqp:not-implemented"
    assert client.declare()


def test_a_transaction_holds_a_hundred_messages(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    client.attach_sender(queue)
    transaction = client.declare()
    for _ in range(transactions.MAX_MESSAGES):
        assert accepts(client.send_in(transaction, message(b"m")), transaction)
    assert condition(client.send_in(transaction, message(b"m"))) == "amqp:not-allowed"
    assert condition(client.discharge(transaction)) == "amqp:transaction:rollback"
    assert bus.counts(queue).active == 0


def test_one_message_that_is_refused_rolls_all_back(
    bus: BusThread, client: TransactionClient
) -> None:
    queue = bus.queue(requires_session=True)
    client.attach_sender(queue)
    transaction = client.declare()
    client.send_in(transaction, message(b"no session"))
    assert condition(client.discharge(transaction)) == "amqp:transaction:rollback"
    assert bus.counts(queue).active == 0


@pytest.mark.parametrize("how", ["coordinator", "connection"])
def test_transactions_that_end_early_are_rolled_back(bus: BusThread, queue: str, how: str) -> None:
    with TransactionClient(bus) as client:
        client.attach_sender(queue)
        transaction = client.declare()
        client.send_in(transaction, message(b"never"))
        if how == "coordinator":
            client.write(frame(DETACH, Uint(COORDINATOR), True))
            client.expect(DETACH)
            refused = client.send_in(transaction, message(b"too late"))
            assert condition(refused) == "amqp:transaction:unknown-id"
    assert bus.counts(queue).active == 0


def test_transactions_being_committed_are_not_rolled_back(bus: BusThread, queue: str) -> None:
    account = bus.listener.inflight
    with TransactionClient(bus) as client:
        client.attach_sender(queue)
        transaction = client.declare()
        client.send_in(transaction, message(b"stored"))
        detach = frame(DETACH, Uint(COORDINATOR), True)
        client.write(client.discharge_frame(transaction), detach)  # before it can be answered
        client.expect(DETACH)
        client.write(client.transfer(client.next_id(), message(b"after")))
        client.expect(DISPOSITION)  # its commit comes behind that of the transaction
        assert bus.counts(queue).active == 2
        assert (account.unanswered.used, account.waiting.used) == (0, 0)


def test_a_discharge_waits_for_the_check_of_every_lock(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    taken = client.lock(queue, b"m", b"m")
    transaction = client.declare()
    state = described(TRANSACTIONAL, transaction, complete())
    plain = client.transfer(client.next_id(), message(b"m"))  # answers come behind its commit
    settlements = [frame(DISPOSITION, True, Uint(each), Uint(each), False, state) for each in taken]
    discharge_id = client._next_id
    client.write(plain, *settlements, client.discharge_frame(transaction))
    answers = [client.expect(DISPOSITION).fields for _ in range(4)]
    (discharged,) = [
        fields[4] for fields in answers if fields[0] is True and fields[1] == discharge_id
    ]
    assert int(discharged.descriptor) == ACCEPTED
    assert bus.counts(queue).active == 1


def test_a_transaction_that_stays_open_too_long_is_rolled_back(
    bus: BusThread, client: TransactionClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "LIFETIME_S", 0.0)
    client.attach_sender(queue)
    transaction = client.declare()
    assert condition(client.discharge(transaction)) == "amqp:transaction:timeout"
    assert bus.counts(queue).active == 0


def test_messages_to_another_entity_go_through_the_first_ones_outbox(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    other = bus.queue()
    (taken,) = client.lock(queue, b"work")
    client.attach_sender(other, handle=3)
    transaction = client.declare()
    client.settle_in(transaction, taken, complete())
    client.send_in(transaction, message(b"result"), handle=3)
    assert int(client.discharge(transaction).descriptor) == ACCEPTED
    (result,) = client.receive(other, 1, handle=4)
    assert result.payload.endswith(b"result")
    assert bus.counts(queue).active == 0


def test_a_via_link_sends_through_an_entity(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    other = bus.queue()
    client.write(
        frame(
            ATTACH, "via", Uint(5), False, Ubyte(2), Ubyte(0), described(0x28, "here"),
            described(0x29, queue), None, None, Uint(0), None, None, None, {VIA: other},
        )
    )  # fmt: skip
    assert client.expect(ATTACH).fields[6] is not None
    transaction = client.declare()
    assert accepts(client.send_in(transaction, message(b"through"), handle=5), transaction)
    assert int(client.discharge(transaction).descriptor) == ACCEPTED
    (result,) = client.receive(other, 1, handle=4)
    assert result.payload.endswith(b"through")
    delivery_id = client.next_id()
    client.write(client.transfer(delivery_id, message(b"alone"), handle=5))
    assert int(client.state_of(delivery_id).descriptor) == ACCEPTED
    client.write(client.flow(2, handle=4, count=1))
    assert client.expect(TRANSFER).payload.endswith(b"alone")


def test_a_via_link_needs_both_entities_and_rights(bus: BusThread, queue: str) -> None:
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as client:
        client.write(
            frame(
                ATTACH, "via", Uint(5), False, Ubyte(2), Ubyte(0), described(0x28, "here"),
                described(0x29, queue), None, None, Uint(0), None, None, None, {VIA: "nobody"},
            )
        )  # fmt: skip
        assert client.expect(ATTACH).fields[6] is None
        assert str(client.expect(DETACH).fields[2].value[0]) == "amqp:not-found"


def test_receive_and_delete_is_no_part_of_a_transaction(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    client.attach_sender(queue)
    client.write(client.transfer(client.next_id(), message(b"a")))
    client.expect(DISPOSITION)
    client.attach_receiver(queue, 1, mode=1)
    client.write(client.flow(1))
    taken = client.expect(TRANSFER)
    assert taken.fields[4] is True
    transaction = client.declare()
    state = described(TRANSACTIONAL, transaction, complete())
    delivery_id = Uint(taken.fields[1])
    client.write(frame(DISPOSITION, True, delivery_id, delivery_id, False, state))
    assert condition(client.state_of(int(delivery_id))) == "com.microsoft:message-lock-lost"


def test_the_coordinator_grants_credit_for_ever(client: TransactionClient) -> None:
    for _ in range(transactions.REQUEST_CREDIT):
        assert int(client.discharge(client.declare()).descriptor) == ACCEPTED


@pytest.mark.parametrize("is_discharged", [True, False])
def test_timed_out_transactions_allow_new_ones(
    client: TransactionClient, monkeypatch: pytest.MonkeyPatch, is_discharged: bool
) -> None:
    monkeypatch.setattr(transactions, "LIFETIME_S", 0.0)
    monkeypatch.setattr(transactions, "MAX_OPEN", 3)
    for _ in range(5):
        transaction = client.declare()
        if is_discharged:
            assert condition(client.discharge(transaction)) == "amqp:transaction:timeout"
            assert condition(client.discharge(transaction)) == "amqp:transaction:unknown-id"


def test_a_client_without_a_key_may_open_few(bus: BusThread, client: TransactionClient) -> None:
    for each in list(bus.listener._connections):
        assert each._connection is not None
        each._connection._grants._grants.clear()  # as if it had come without one
    for _ in range(transactions.MAX_OPEN_UNKNOWN):
        client.declare()
    assert condition(client.request(DECLARE, None)) == "amqp:resource-limit-exceeded"


def test_open_transactions_do_not_block_other_clients(
    bus: BusThread, client: TransactionClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = bus.listener.inflight
    monkeypatch.setattr(account, "waiting", Shares(Limit(200_000)))
    client.attach_sender(queue)
    rolled_back, committed = client.declare(), client.declare()
    assert accepts(client.send_in(rolled_back, message(b"x" * 50_000)), rolled_back)
    assert accepts(client.send_in(committed, message(b"x" * 40_000)), committed)
    assert account.unanswered.used == 0
    assert account.waiting.used > 90_000
    refused = client.send_in(rolled_back, message(b"x" * 50_000))
    assert condition(refused) == "com.microsoft:server-busy"
    assert condition(client.discharge(rolled_back)) == "amqp:transaction:rollback"
    assert int(client.discharge(committed).descriptor) == ACCEPTED
    assert (account.unanswered.used, account.waiting.used) == (0, 0)
    assert bus.counts(queue).active == 1


@pytest.mark.parametrize("payload", [b"\xff", message(b"x" * 300_000)], ids=["broken", "too large"])
def test_a_settled_send_that_is_refused_rolls_back(
    bus: BusThread, client: TransactionClient, queue: str, payload: bytes
) -> None:
    client.attach_sender(queue)
    transaction = client.declare()
    client.send_in(transaction, message(b"good"))
    delivery_id = client.next_id()
    state = described(TRANSACTIONAL, transaction, None)
    pieces = [payload[start : start + 60_000] for start in range(0, len(payload), 60_000)]
    for piece in pieces:
        client.write(
            frame(
                TRANSFER, Uint(0), Uint(delivery_id), b"tag", Uint(0), True,
                piece is not pieces[-1], None, state, payload=piece,
            )
        )  # fmt: skip
    assert condition(client.discharge(transaction)) == "amqp:transaction:rollback"
    assert bus.counts(queue).active == 0


def attach_via(client: RawClient, queue: str, destination: str) -> Frame:
    client.write(
        frame(
            ATTACH, "via", Uint(5), False, Ubyte(2), Ubyte(0), described(0x28, "here"),
            described(0x29, queue), None, None, Uint(0), None, None, None, {VIA: destination},
        )
    )  # fmt: skip
    return client.expect(ATTACH)


def test_one_bad_message_through_an_entity_fails_alone(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    assert attach_via(client, queue, bus.queue()).fields[6] is not None
    payloads = [message(b"good"), message(b"bad", "x" * 129), message(b"good")]
    ids = [client.next_id() for _ in payloads]
    client.write(
        *[
            client.transfer(each, payload, handle=5)
            for each, payload in zip(ids, payloads, strict=True)
        ]
    )
    assert client.dispositions(3) == dict(zip(ids, [ACCEPTED, REJECTED, ACCEPTED], strict=True))
    assert bus.listener.inflight.unanswered.used == 0


def test_messages_are_not_forwarded_to_entities_that_cannot_be_sent_to(
    bus: BusThread, client: TransactionClient, queue: str
) -> None:
    topic = bus.topic()
    bus.subscription(topic, "all")
    for destination in (f"{queue}/$DeadLetterQueue", f"{topic}/Subscriptions/all"):
        assert attach_via(client, queue, destination).fields[6] is None
        assert str(client.expect(DETACH).fields[2].value[0]) == "amqp:not-allowed"
        client.write(frame(DETACH, Uint(5), True))


def test_a_via_link_ends_with_the_right_to_its_destination(bus: BusThread) -> None:
    scoped, other = bus.queue("scoped"), bus.queue()
    with RawClient(bus.port, "of-one-queue", "only here") as client:
        expires_s = int(bus.real_time_s()) + 3_600
        resource = f"sb://localhost/{other}"
        token = sas_token(resource, RULES[0].name, RULES[0].keys.primary, expires_s)
        properties = {
            "operation": "put-token",
            "type": "servicebus.windows.net:sastoken",
            "name": resource,
        }
        request(client, "$cbs", "id", properties, token)
        assert attach_via(client, scoped, other).fields[6] is not None
        bus.age_tokens(3_700)
        assert str(client.expect(DETACH).fields[2].value[0]) == "amqp:unauthorized-access"


# --- rights ---------------------------------------------------------------------------------------

ROBOT = KeyRule("robot", frozenset({Right.SEND, Right.LISTEN}), Keys("robot's key", "second"))


@pytest.fixture
def robot(bus: BusThread) -> Iterator[TransactionClient]:
    """A client with another rule than the other tests."""
    bus.set_rules(*RULES, ROBOT)
    with TransactionClient(bus, "robot", "robot's key") as opened:
        yield opened
    bus.set_rules(*RULES)


@pytest.mark.parametrize("lost", ["rule", "key", "right"])
def test_a_lost_right_ends_waiting_operations(
    bus: BusThread, robot: TransactionClient, queue: str, lost: str
) -> None:
    robot.attach_sender(queue)
    transaction = robot.declare()
    assert accepts(robot.send_in(transaction, message(b"x" * 1_000)), transaction)
    assert bus.listener.inflight.waiting.used > 1_000
    now = {
        "rule": [],
        "key": [replace(ROBOT, keys=Keys("another", "second"))],
        "right": [replace(ROBOT, rights=frozenset({Right.LISTEN}))],
    }[lost]
    bus.set_rules(*RULES, *now)
    assert bus.listener.inflight.waiting.used == 0
    assert str(robot.expect(DETACH).fields[2].value[0]) == "amqp:unauthorized-access"
    answer = robot.discharge(transaction)
    assert condition(answer) == "amqp:transaction:rollback"
    assert "'Send' claim(s) are required" in answer.value[0].value[1]
    bus.set_rules(*RULES, ROBOT)  # forgotten operations do not come back
    assert bus.counts(queue).active == 0


def test_settlements_wait_no_longer_than_the_right_to_listen(
    bus: BusThread, robot: TransactionClient, queue: str
) -> None:
    (taken,) = robot.lock(queue, b"a")
    transaction = robot.declare()
    assert accepts(robot.settle_in(transaction, taken, complete()), transaction)
    bus.set_rules(*RULES, replace(ROBOT, rights=frozenset({Right.SEND})))
    robot.expect(DETACH)
    assert condition(robot.discharge(transaction)) == "amqp:transaction:rollback"
    assert bus.counts(queue).active == 1


def test_discharge_checks_the_tokens_again(bus: BusThread) -> None:
    """The right was not checked since it ended; forwarding to a target needs a right there too."""
    scoped, other = bus.queue("scoped"), bus.queue()
    expires_s = int(bus.real_time_s()) + 3_600
    resource = f"sb://localhost/{other}"
    fields = {"operation": "put-token", "type": "x", "name": resource}
    token = sas_token(resource, RULES[0].name, RULES[0].keys.primary, expires_s)
    with TransactionClient(bus, "of-one-queue", "only here") as client:
        request(client, "$cbs", "id", fields, token)
        client.attach_sender(scoped, 3)
        client.attach_sender(other, 4)
        transaction = client.declare()
        for handle in (3, 4):
            sent = client.send_in(transaction, message(b"x"), handle=handle)
            assert accepts(sent, transaction)
        bus.real_shift_s += 3_601
        answer = client.discharge(transaction)
        assert condition(answer) == "amqp:transaction:rollback"
        assert other in answer.value[0].value[1]
        assert bus.counts(scoped).active == bus.counts(other).active == 0
    bus.delete(scoped)
