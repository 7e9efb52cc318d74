"""How long a partition waits for the broker that has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from postbus.broker.ownership import OWNER_LOOK_S, UNKNOWN_LOOK_S, Ownership
from postbus.store.errors import Fenced
from postbus.store.postgres import Store


@pytest.mark.parametrize(("owner", "waited_s"), [("known", OWNER_LOOK_S), (None, UNKNOWN_LOOK_S)])
async def test_the_next_claim_comes_later_where_nobody_beats(
    owner: str | None, waited_s: float
) -> None:
    """A claim is a connection: sixteen partitions shall not make sixty of them a second."""
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
