"""The wait of a partition for the broker that owns it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from postbus.broker.partition.ownership import (
    FIRST_LOOK_S,
    FIRST_S,
    OWNER_LOOK_S,
    UNKNOWN_LOOK_S,
    Ownership,
)
from postbus.store.errors import Fenced, StoreUnavailable
from postbus.store.postgres import Store


@pytest.mark.parametrize(("owner", "waited_s"), [("known", OWNER_LOOK_S), (None, UNKNOWN_LOOK_S)])
async def test_the_next_claim_comes_later_without_a_beating_owner(
    owner: str | None, waited_s: float
) -> None:
    """A claim is a connection: sixteen partitions must not open sixty of them a second."""
    beats = SimpleNamespace(holds_on=lambda _: False)
    ownership = Ownership(3, cast(Store, SimpleNamespace(beats=beats)))
    error: Any = Fenced("an owner of an earlier version")
    error.owner = owner
    waits: list[float] = []

    async def pause(seconds: float) -> bool:
        waits.append(seconds)
        return True

    await ownership.outwait(error, pause)
    assert waits == [waited_s]


class Waits:
    """The pauses of a partition between its checks: `then` is called at the second one."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.seconds: list[float] = []
        self._then = then

    async def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        if len(self.seconds) == 2:
            self._then()
        return True


def second_of(first: Ownership) -> Ownership:
    store = cast(Store, SimpleNamespace(beats=None))
    made = Ownership(3, store)
    made.follow(first)
    return made


@pytest.mark.parametrize(
    ("then", "looks"),
    [
        (lambda first: first.claimed(1), 2),
        (lambda first: first.failed(StoreUnavailable("away")), 2),  # that may last: go on alone
        (lambda first: None, round(FIRST_S / FIRST_LOOK_S)),
    ],
)
async def test_a_partition_waits_until_the_owner_of_the_first_is_known(
    then: Callable[[Ownership], None], looks: int
) -> None:
    first = Ownership(0, cast(Store, SimpleNamespace(beats=None)))
    waits = Waits(lambda: then(first))
    await second_of(first).wait_for_first(waits)
    assert len(waits.seconds) == pytest.approx(looks, abs=1)


async def test_a_partition_is_not_claimed_while_the_first_is_anothers(database: str) -> None:
    """It watches its own database meanwhile: the owner's silence there counts from now on."""
    first, identity = Ownership(0, cast(Store, SimpleNamespace(beats=None))), uuid4()
    waits = Waits(lambda: first.failed(Fenced("owned by another", identity)))
    store = Store(database)
    second = Ownership(3, store)
    second.follow(first)
    with pytest.raises(Fenced, match="owned by another") as caught:
        await second.wait_for_first(waits)
    assert caught.value.owner == identity
    assert store.beats.identity is not None
    first.claimed(2)
    await second.wait_for_first(waits)
    assert len(waits.seconds) == 2
    await store.close()


async def test_an_unavailable_database_does_not_stop_waiting_for_the_owner() -> None:
    first = Ownership(0, cast(Store, SimpleNamespace(beats=None)))
    first.failed(Fenced("owned by another", uuid4()))
    second = Ownership(3, Store("postgresql://nobody@127.0.0.1:1/none"))
    second.follow(first)
    with pytest.raises(Fenced, match="owned by another"):
        await second.wait_for_first(Waits(lambda: None))


async def test_a_partition_waits_for_the_owner_where_that_owner_beats() -> None:
    """An owner has another identity in each database."""
    identity, looks = uuid4(), iter([True, True, False])
    of_first = SimpleNamespace(beats=SimpleNamespace(holds_on=lambda _: next(looks)))
    first = Ownership(0, cast(Store, of_first))
    first.failed(error := Fenced("owned by another", identity))
    elsewhere = SimpleNamespace(beats=SimpleNamespace(holds_on=lambda _: False))
    second = Ownership(3, cast(Store, elsewhere))
    second.follow(first)
    waits = Waits(lambda: None)
    await second.outwait(error, waits)
    assert waits.seconds == [OWNER_LOOK_S] * 3
