"""Two brokers of different names on one database: what one decides, the other does not undo."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

from postbus.broker.administration import AdministrationRefused, DeletePolicy, PutMode
from postbus.bus import Bus
from postbus.contract import NamespaceProperties, QueueProperties, Right
from postbus.data_directory import DataDirectory
from postbus.entity.commands import Refusal, Tick
from postbus.manifests import BusDefinition, QueueDefinition, RuleDefinition, RuleKeys
from postbus.settings import Settings
from tests.store.driving import wait_until

pytestmark = pytest.mark.slow

PORTS = ("port", "tls_port", "http_port", "metrics_port", "control_port")
SEALING_KEY = "00" * 32


def definition(*queues: str) -> BusDefinition:
    return BusDefinition(
        "test-bus",
        NamespaceProperties(),
        (RuleDefinition("root", frozenset(Right), RuleKeys("first" * 5, "second" * 4)),),
        tuple(QueueDefinition(name, QueueProperties(), ()) for name in queues),
    )


class Brokers:
    """Buses on one database, each with a folder of its own and the keys of all."""

    def __init__(self, folder: Path, dsn: str, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._dsn = dsn
        self._stack = stack

    async def start(self, name: str, *queues: str) -> Bus:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        settings = Settings.model_validate(
            dict.fromkeys(PORTS, 0)
            | {"stores": self._dsn, "broker_name": name, "grace_s": 1.0}
            | {"sealing_key_file": self._sealing_key()}
        )
        data = self._stack.enter_context(DataDirectory(folder))
        bus = Bus(settings, definition(*queues), data, is_embedded=False)
        self._stack.push_async_callback(bus.stop)
        await bus.start()
        return bus

    def _sealing_key(self) -> Path:
        file = self._folder / "sealing.key"
        if not file.exists():
            with DataDirectory(self._folder / "keys") as data:
                file.write_text(data.sealing_key(), encoding="ascii")
                file.chmod(0o600)
        return file


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="postbus-test-") as name:
        yield Path(name)


@pytest.fixture
async def brokers(folder: Path, database: str) -> AsyncIterator[Brokers]:
    async with AsyncExitStack() as stack:
        yield Brokers(folder, database, stack)


@asynccontextmanager
async def client_of(bus: Bus) -> AsyncIterator[ServiceBusClient]:
    ((_, address),) = bus.connection_strings()
    async with ServiceBusClient.from_connection_string(address, retry_total=0) as client:
        yield client


async def send(bus: Bus, queue: str, *bodies: str) -> None:
    async with client_of(bus) as client, client.get_queue_sender(queue) as sender:
        for body in bodies:
            await sender.send_messages(ServiceBusMessage(body))


async def peek(bus: Bus, queue: str) -> list[str]:
    async with client_of(bus) as client, client.get_queue_receiver(queue) as receiver:
        return [str(message) for message in await receiver.peek_messages(10)]


async def create(bus: Bus, queue: str) -> int:
    made = await bus.administration.put_queue(queue, QueueProperties(), mode=PutMode.CREATE)
    return made.entity_no


async def own(bus: Bus) -> None:
    """Return when this bus has all partitions in use, and partition 0."""

    async def is_ours() -> bool:
        return bus._directory is not None and bus._directory.catalog.epoch is not None

    await wait_until(is_ours, 30)


async def rows(dsn: str, sql: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetch(sql)
    finally:
        await connection.close()


async def test_queue_made_after_the_standby_started_survives_a_clean_takeover(
    brokers: Brokers,
) -> None:
    first = await brokers.start("first")
    second = await brokers.start("second")
    await create(first, "orders")
    await send(first, "orders", *"abcde")
    await first.stop()
    await own(second)
    assert await peek(second, "orders") == [*"abcde"]


async def test_queue_deleted_after_the_standby_started_does_not_come_back(
    brokers: Brokers, database: str
) -> None:
    first = await brokers.start("first")
    number = await create(first, "orders")
    await send(first, "orders", *"abc")
    second = await brokers.start("second")
    assert second.administration.find("orders") is not None
    await first.administration.delete("orders")
    await create(first, "orders")
    await send(first, "orders", "new")
    await first.stop()
    await own(second)
    found = second.administration.find("orders")
    assert found is not None
    assert found.entity_no > number
    assert await peek(second, "orders") == ["new"]
    (home,) = found.partitions
    copies = await rows(database, f"select entity_no from partition_{home}.entity")
    assert [copy["entity_no"] for copy in copies] == [found.entity_no]


async def test_standby_follows_the_catalog_and_changes_nothing(brokers: Brokers) -> None:
    first = await brokers.start("first", "declared")
    second = await brokers.start("second", "declared", "another")
    await create(first, "orders")

    async def is_known() -> bool:
        return second.administration.find("orders") is not None

    await wait_until(is_known, 10)
    for change in (
        second.administration.put_queue("mine", QueueProperties(), mode=PutMode.CREATE),
        second.administration.delete("orders"),
    ):
        with pytest.raises(AdministrationRefused) as caught:
            await change
        assert caught.value.refused.refusal is Refusal.NOT_APPLIED
        assert "owned by first" in str(caught.value)
    assert first.administration.find("another") is None
    await first.stop()
    await own(second)

    async def is_declared() -> bool:
        return second.administration.find("another") is not None

    await wait_until(is_declared, 10)
    assert await create(second, "mine")


async def test_standby_does_not_reap_what_was_restored(brokers: Brokers) -> None:
    first = await brokers.start("first")
    number = await create(first, "kept")
    await send(first, "kept", "a")
    await first.administration.delete("kept", policy=DeletePolicy.RETAIN)
    second = await brokers.start("second")
    await first.administration.restore(number)
    second.administration._now_ms = lambda: 1 << 60
    await second.administration.reap()
    await first.stop()
    await own(second)
    assert await peek(second, "kept") == ["a"]


async def test_deletion_by_a_broker_that_wakes_up_is_not_written(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All partitions agreed to an idle deletion; another owner has taken a message since."""
    first = await brokers.start("first")
    number = await create(first, "orders")
    catalog = first.administration._directory.catalog
    decided, goes_on = asyncio.Event(), asyncio.Event()
    write: Callable[..., object] = catalog.store.delete

    async def delete_late(*given: object) -> object:
        decided.set()
        await goes_on.wait()
        return await write(*given)  # type: ignore[misc]

    monkeypatch.setattr(catalog.store, "delete", delete_late)
    deletion = asyncio.ensure_future(
        first.administration.delete("orders", policy=DeletePolicy.DELETE_IF_EMPTY)
    )
    await decided.wait()
    for host in first._hosts:  # as if it had been away for longer than its partitions wait
        await host.stop()
    second = await brokers.start("second")
    await own(second)
    await send(second, "orders", "accepted")
    goes_on.set()
    with pytest.raises(AdministrationRefused):
        await deletion
    found = second.administration.find("orders")
    assert found is not None
    assert found.entity_no == number
    await second._hosts[found.partitions[0]].call(Tick())
    assert await peek(second, "orders") == ["accepted"]


async def test_older_caller_is_refused_by_every_broker(brokers: Brokers) -> None:
    first = await brokers.start("first")
    async with first._fence.admitted(3):
        await create(first, "a")
    second = await brokers.start("second")
    await first.stop()
    await own(second)
    with pytest.raises(Exception, match="epoch 3 has been here"):
        async with second._fence.admitted(2):
            await create(second, "b")
    assert second.administration.find("b") is None
