"""Several whole buses on one database, each with a name and a folder, and the keys of all."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

from postbus.assembly.bus import Bus
from postbus.contract.entities import NamespaceProperties, QueueProperties, Right
from postbus.manifests.reader import BusDefinition, QueueDefinition, RuleDefinition, RuleKeys
from postbus.process.data_directory import DataDirectory
from postbus.process.settings import Settings

LOADING_S = 0.5
"""Wait of a start for partitions; a standby loads none."""
PORTS = ("port", "tls_port", "http_port", "metrics_port", "control_port")


def definition(*queues: str, name: str = "test-bus") -> BusDefinition:
    return BusDefinition(
        name,
        NamespaceProperties(),
        (RuleDefinition("root", frozenset(Right), RuleKeys("first" * 5, "second" * 4)),),
        tuple(QueueDefinition(queue, QueueProperties(), ()) for queue in queues),
    )


class Brokers:
    """Buses on one database, each with a folder of its own and the keys of all."""

    def __init__(self, folder: Path, dsn: str, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._dsn = dsn
        self._stack = stack

    async def start(self, name: str, *queues: str) -> Bus:
        """Start the broker of a name; its manifests declare some queues."""
        return await self.start_with(name, definition(*queues), self.sealing_key())

    async def start_with(self, name: str, defined: BusDefinition, sealing_key: Path | None) -> Bus:
        """Start a broker with this definition; None: with a sealing key of its own."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        settings = Settings.model_validate(
            dict.fromkeys(PORTS, 0)
            | {"stores": self._dsn, "broker_name": name, "grace_s": 1.0}
            | {"sealing_key_file": sealing_key}
        )
        async with AsyncExitStack() as stack:
            data = stack.enter_context(DataDirectory(folder))
            bus = Bus(settings, defined, data, is_embedded=False, loading_s=LOADING_S)
            stack.push_async_callback(bus.stop)
            await bus.start()
            self._stack.push_async_exit(stack.pop_all())
        return bus

    def sealing_key(self) -> Path:
        """Return the file with the key of all brokers."""
        file = self._folder / "sealing.key"
        if not file.exists():
            with DataDirectory(self._folder / "keys") as data:
                file.write_text(data.sealing_key(), encoding="ascii")
                file.chmod(0o600)
        return file


@asynccontextmanager
async def brokers_on(dsn: str) -> AsyncIterator[Brokers]:
    """Lend a starter of brokers; running ones are stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="postbus-test-") as name:
        async with AsyncExitStack() as stack:
            yield Brokers(Path(name), dsn, stack)


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
