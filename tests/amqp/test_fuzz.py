"""A short run of the fuzz target, the unchanged captures, and earlier findings."""

from __future__ import annotations

import random

import pytest

from postbus.amqp.client import ClientConnection
from postbus.amqp.connection import Connection
from postbus.amqp.events import LinkAttached, TransferReceived
from tests.amqp.fuzz_connection import (
    LIMITS,
    Owner,
    check_output,
    load_corpus,
    run_case,
    split_frames,
)
from tests.amqp.wire import FLOW, Client

CORPUS = load_corpus()


class Willing(random.Random):
    """Makes an owner that accepts everything: no choice is ever zero."""

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return 1


@pytest.mark.parametrize("name", sorted(CORPUS))
@pytest.mark.parametrize("is_whole", [True, False])
def test_captures_are_taken_without_an_error(name: str, is_whole: bool) -> None:
    engine: Connection
    if name.startswith("broker-"):
        engine = ClientConnection(container_id="client", limits=LIMITS)
        engine.start()
    else:
        engine = Connection(container_id="broker", limits=LIMITS)
    owner = Owner(engine, Willing(1))
    seen: list[type] = []
    handle = owner.handle

    def watch(event: object) -> None:
        seen.append(type(event))
        handle(event)  # type: ignore[arg-type]

    owner.handle = watch  # type: ignore[method-assign, assignment]
    for each in split_frames(CORPUS[name]):
        for piece in [each] if is_whole else [each[at : at + 1] for at in range(len(each))]:
            owner.feed(piece)
    assert owner.closed is None or owner.closed.error is None
    check_output(owner)
    if name.startswith("client-"):
        assert LinkAttached in seen
        assert TransferReceived in seen


def test_aborted_delivery_beyond_the_credit_is_answered_with_none() -> None:
    """Found by the fuzz: the credit given back was negative and could not be encoded."""
    client = Client().open()
    client.begin()
    client.sender(credit=0)
    client.transfer(1)
    client.transfer(2, more=True)
    client.transfer(None, is_aborted=True)
    assert client.reply(FLOW).fields[6] == 0


@pytest.mark.slow
def test_mutated_captures_are_answered_with_legal_frames() -> None:
    for seed in range(2_000):
        run_case(CORPUS, seed)


@pytest.mark.slow
def test_noise_is_answered_with_legal_frames() -> None:
    rng = random.Random(5)
    opening = CORPUS["client-proton"][:200]
    for _ in range(300):
        owner = Owner(Connection(container_id="broker", limits=LIMITS), rng)
        owner.feed(opening[: rng.randrange(200)] + rng.randbytes(400))
        check_output(owner)
