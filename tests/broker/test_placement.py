"""Placement of messages of a partitioned entity, and the rules of transactions."""

from __future__ import annotations

import uuid

import pytest

from postbus.broker.address import Address
from postbus.broker.placement import (
    SPREAD,
    key_of,
    partition_of_key,
    partition_of_number,
    partition_of_token,
)
from postbus.broker.spread.transactions import check_transaction_send, place_transaction
from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import (
    Disposition,
    Enqueue,
    Refusal,
    Refused,
    Settle,
    SubQueue,
    Transact,
)
from postbus.message.codec import Ulong, encode_value
from postbus.message.ids import id_text
from tests.broker.partition_rig import message

ID = uuid.UUID("6F9619FF-8B86-D011-B42D-00CF4FC964FF")


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        ("Order-1", "Order-1"),
        ("ü" * 200, "ü" * 200),
        ("", ""),
        (ID, "6f9619ff-8b86-d011-b42d-00cf4fc964ff"),
        (Ulong(0), "0"),
        (Ulong(2**64 - 1), "18446744073709551615"),
        (b"\x00\xff", "00ff"),
    ],
)
def test_a_message_id_has_one_text(message_id: object, text: str) -> None:
    assert id_text(encode_value(message_id)) == text


@pytest.mark.behaviour("S166", "S168", "S170", "S173", "S175", "S176")
def test_the_key_is_the_session_then_the_partition_key_then_an_id_that_matters() -> None:
    everything = message(session="s", key="s", message_id="m")
    assert key_of(everything, detects_duplicates=True) == b"s"
    assert key_of(message(key="k", message_id="m"), detects_duplicates=True) == b"k"
    assert key_of(message(session="s", message_id="m"), detects_duplicates=True) == b"s"
    assert key_of(message(message_id="m"), detects_duplicates=True) == b"m"
    assert key_of(message(message_id="m"), detects_duplicates=False) is None
    assert key_of(message(), detects_duplicates=True) is None


@pytest.mark.behaviour("S167")
def test_a_key_never_changes_its_partition() -> None:
    """Stored messages have these places: a change of the function would lose their order."""
    places = [partition_of_key(key, 16) for key in (b"", b"a", b"customer-17", "ü".encode())]
    assert places == PLACES
    spread = [partition_of_key(b"%d" % n, 16) for n in range(16_000)]
    assert all(900 < spread.count(partition_id) < 1_100 for partition_id in range(16))


PLACES = [4, 15, 1, 7]


def test_numbers_and_tokens_name_their_partition() -> None:
    assert partition_of_number(1) == 0
    assert partition_of_number((15 << 48) + 1) == 15
    assert partition_of_token(bytes(8) + b"\x00\x0f" + bytes(6)) == 15
    assert partition_of_token(b"short") == 0


# --- transactions ---------------------------------------------------------------------------------


def address(entity_no: int = 1, *, home: int = SPREAD, **properties: object) -> Address:
    return Address(
        home,
        entity_no,
        SubQueue.ACTIVE,
        f"q{entity_no}",
        EntityKind.QUEUE,
        QueueProperties.model_validate(properties),
        home == SPREAD,
    )


def keys_of(place: Address, *messages: object) -> list[object]:
    """Return the placement of each message of one transaction."""
    keys: list[object] = []
    key: bytes | None = None
    for each in messages:
        checked = check_transaction_send(place, each, key)
        keys.append(checked.refusal if isinstance(checked, Refused) else checked)
        if not isinstance(checked, Refused):
            key = checked
    return keys


@pytest.mark.behaviour("S190", "S191", "S192")
def test_equal_keys_go_together() -> None:
    by_session = [message(session="s"), message(session="s", key="s")]
    assert keys_of(address(requires_session=True), *by_session) == [b"s", b"s"]
    assert keys_of(address(), message(key="k"), message(key="k")) == [b"k", b"k"]
    detecting = address(requires_duplicate_detection=True)
    assert keys_of(detecting, message(message_id="m"), message(message_id="m")) == [b"m", b"m"]


@pytest.mark.behaviour("S193", "S194", "S198", "S214", "S234", "S235", "S237")
def test_other_keys_or_none_are_refused_in_a_partitioned_entity() -> None:
    refused = Refusal.NOT_ALLOWED
    assert keys_of(address(), message()) == [refused]
    assert keys_of(address(), message(message_id="m")) == [refused]
    assert keys_of(address(), message(key="a"), message(key="b")) == [b"a", refused]
    assert keys_of(address(), message(key="a"), message()) == [b"a", refused]
    sessions = address(requires_session=True)
    assert keys_of(sessions, message(session="a"), message(session="b")) == [b"a", refused]
    detecting = address(requires_duplicate_detection=True)
    assert keys_of(detecting, message(message_id="a"), message(message_id="b")) == [b"a", refused]


@pytest.mark.behaviour("S196", "S197", "S236")
def test_a_session_entity_needs_the_session_as_key() -> None:
    for place in (address(requires_session=True), address(requires_session=True, home=3)):
        assert keys_of(place, message(key="k")) == [Refusal.SESSION_REQUIRED]
        assert keys_of(place, message(session="s", key="k")) == [Refusal.NOT_ALLOWED]
    assert keys_of(address(requires_session=True), message(session="s", key="s")) == [b"s"]


@pytest.mark.behaviour("S199")
def test_an_entity_of_one_partition_takes_any_sessions() -> None:
    place = address(requires_session=True, home=3)
    assert keys_of(place, message(session="a"), message(session="b")) == [None, None]
    assert keys_of(address(home=3), message(), message(key="a")) == [None, None]


def token(partition_id: int) -> bytes:
    return bytes(8) + partition_id.to_bytes(2, "big") + bytes(6)


def complete(entity_no: int, *partitions: int) -> Settle:
    tokens = [token(each) for each in partitions]
    return Settle(entity_no, SubQueue.ACTIVE, tokens, Disposition.COMPLETE)


PLACED = {
    1: address(1),
    2: address(2, home=2),
    3: address(3, home=3),
}


def placed(*operations: Enqueue | Settle) -> tuple[int, Transact] | Refused:
    return place_transaction(Transact(list(operations)), PLACED.get, 16)


def test_a_transaction_runs_in_the_partition_of_its_settlements() -> None:
    send = Enqueue(3, [message()], is_atomic=True)
    found = placed(send, complete(2, 2))
    assert not isinstance(found, Refused)
    home, command = found
    assert home == 2
    assert command.operations[1] == complete(2, 2)
    forwarded = command.operations[0]
    assert isinstance(forwarded, Enqueue)
    assert (forwarded.entity_no, forwarded.via, forwarded.is_atomic) == (2, "q3", True)
    assert forwarded.messages is send.messages
    assert send.via is None


def test_a_transaction_that_only_sends_goes_to_its_first_message() -> None:
    keyed = [message(key="a")]
    place = partition_of_key(b"a", 16)
    assert placed(Enqueue(1, keyed)) == (place, Transact([Enqueue(1, keyed)]))
    assert placed(Enqueue(2, keyed)) == (2, Transact([Enqueue(2, keyed)]))
    assert placed(Enqueue(1, [message()]))[0] == SPREAD
    found = placed(Enqueue(3, keyed), Enqueue(1, keyed))
    assert found == (3, Transact([Enqueue(3, keyed), Enqueue(3, keyed, via="q1")]))
    via = Enqueue(1, [message(key="elsewhere")], via="q3")
    via.messages[0].via_partition_key = b"a"
    assert placed(via) == (place, Transact([via]))


def test_settlements_of_two_partitions_or_of_none_are_refused() -> None:
    refused = placed(complete(1, 2), complete(1, 3))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.NOT_ALLOWED
    lost = placed(complete(1, 77))
    assert isinstance(lost, Refused)
    assert lost.refusal is Refusal.LOCK_LOST
    assert placed(complete(1, 5)) == (5, Transact([complete(1, 5)]))
