"""A store records its owner: a start that would serve another bus's queues is refused."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from postbus.assembly.bus import Bus, BusError
from postbus.broker.access.authorization_rules import WantedRule
from postbus.cli.serving.running import DEFAULT_BUS
from postbus.contract.entities import Right
from postbus.process.data_directory import DataDirectory
from postbus.process.settings import Settings
from tests.broker.brokers_rig import PORTS, Brokers, brokers_on, definition, peek, send

pytestmark = pytest.mark.slow


@pytest.fixture
async def brokers(database: str) -> AsyncIterator[Brokers]:
    async with brokers_on(database) as made:
        first = await made.start("first", "orders")
        await send(first, "orders", "accepted")
        await first.stop()
        yield made


async def test_another_bus_is_refused_without_a_change(brokers: Brokers, database: str) -> None:
    for defined in (definition("orders", name="other-bus"), DEFAULT_BUS):
        with pytest.raises(BusError, match="belongs to the bus test-bus") as caught:
            await brokers.start_with("second", defined, brokers.sealing_key())
        assert caught.value.is_about_store  # exit code 6
        assert f"this bus is {defined.name}: start with the manifests of test-bus" in str(
            caught.value
        )
    look = await asyncpg.connect(database)
    names = [row["name"] for row in await look.fetch("select name from postbus.catalog")]
    assert names == ["orders"]
    await look.close()


async def test_another_sealing_key_is_refused_before_a_rule_was_made(brokers: Brokers) -> None:
    with pytest.raises(BusError, match="POSTBUS_SEALING_KEY_FILE") as caught:
        await brokers.start_with("second", definition("orders"), None)
    assert caught.value.is_about_store


async def test_the_remedies_in_the_error_work(brokers: Brokers, database: str) -> None:
    look = await asyncpg.connect(database)
    await look.execute("update postbus.store set namespace = null")
    await look.execute("delete from postbus.authorization_rule")
    await look.execute("update postbus.store set sealing_check = null")
    await look.close()
    renamed = await brokers.start_with("second", definition("orders", name="new-name"), None)
    assert renamed.summary()[0][1].startswith("new-name")
    with pytest.raises(BusError, match="belongs to the bus new-name"):
        await brokers.start("third", "orders")


async def test_an_embedded_store_follows_the_bus_it_lies_beside() -> None:
    settings = Settings.model_validate(dict.fromkeys(PORTS, 0) | {"grace_s": 1.0})

    async def start(data: DataDirectory, name: str) -> Bus:
        bus = Bus(settings, definition("orders", name=name), data, is_embedded=True)
        await bus.start()
        return bus

    with (
        tempfile.TemporaryDirectory(prefix="postbus-test-") as folder,
        DataDirectory(Path(folder) / "bus") as data,
    ):
        bus = await start(data, "one")
        await send(bus, "orders", "accepted")
        await bus.stop()
        (data.path / "sealing.key").unlink()
        bus = await start(data, "two")
        assert await peek(bus, "orders") == ["accepted"]
        assert bus._opened is not None
        await bus._opened.rules.put(None, WantedRule("made", frozenset({Right.SEND})))
        await bus.stop()
        (data.path / "sealing.key").unlink()
        with pytest.raises(BusError, match="seals its keys with another sealing key"):
            await start(data, "two")
