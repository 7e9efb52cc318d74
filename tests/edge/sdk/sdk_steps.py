"""Common steps of tests with the unmodified SDK; `path` is a queue's, or a subscription's.

A path such as `topic/Subscriptions/name` can be used in the SDK's queue methods too.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)

from postbus.broker.administration import RuntimeInformation
from postbus.broker.catalog.directory import home_of
from postbus.contract.entities import LIMITS, Sku, subscription_path
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge import bus_thread
from tests.edge.bus_thread import BusThread

SOON_S = 0.5
LONG_S = 10.0
DEAD = ServiceBusSubQueue.DEAD_LETTER
TRANSFER_DEAD = ServiceBusSubQueue.TRANSFER_DEAD_LETTER


def path_of(topic: str, subscription: str = "all") -> str:
    return subscription_path(topic, subscription)


def send(client: ServiceBusClient, path: str, *bodies: str, **properties: object) -> None:
    """Send one message for each body, one after the other, its body as its id."""
    with client.get_queue_sender(path) as sender:
        for body in bodies:
            sender.send_messages(
                ServiceBusMessage(body, **{"message_id": body[:128], **properties})
            )


def send_each(
    client: ServiceBusClient, path: str, messages: Mapping[str, Mapping[str, object]]
) -> None:
    """Send messages one after the other over one link: body -> its further properties."""
    with client.get_queue_sender(path) as sender:
        for body, properties in messages.items():
            sender.send_messages(ServiceBusMessage(body, **properties))


def send_together(
    client: ServiceBusClient, path: str, bodies: Sequence[str], **properties: object
) -> None:
    """Send a batch."""
    with client.get_queue_sender(path) as sender:
        sender.send_messages(
            [ServiceBusMessage(body, **{"message_id": body[:128], **properties}) for body in bodies]
        )


def receive(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    """Receive a number of messages and leave them locked."""
    taken: list[ServiceBusReceivedMessage] = []
    while len(taken) < count:
        more = receiver.receive_messages(count - len(taken), max_wait_time=LONG_S)
        assert more, f"only {len(taken)} of {count} came: {bodies_of(taken)}"
        taken += more
    return taken


def take(
    client: ServiceBusClient, path: str, count: int, **options: object
) -> list[ServiceBusReceivedMessage]:
    """Receive and complete a number of messages."""
    with client.get_queue_receiver(path, **options) as receiver:
        taken = receive(receiver, count)
        for message in taken:
            receiver.complete_message(message)
    return taken


def peek_all(
    client: ServiceBusClient, path: str, **options: object
) -> list[ServiceBusReceivedMessage]:
    """Browse until nothing is left."""
    seen: list[ServiceBusReceivedMessage] = []
    with client.get_queue_receiver(path, **options) as receiver:
        while page := receiver.peek_messages(
            50, sequence_number=seen[-1].sequence_number + 1 if seen else 0
        ):
            seen += page
    return seen


def bodies_of(messages: Sequence[ServiceBusReceivedMessage]) -> list[str]:
    return [str(message) for message in messages]


def dead_letter(
    client: ServiceBusClient,
    path: str,
    count: int,
    reason: str | None = None,
    text: str | None = None,
) -> None:
    """Receive a number of messages and dead-letter them."""
    with client.get_queue_receiver(path) as receiver:
        for message in receive(receiver, count):
            receiver.dead_letter_message(message, reason=reason, error_description=text)


# --- the bus --------------------------------------------------------------------------------------


def eventually(bus: BusThread, is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds in the bus's own loop."""
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline, "did not happen"
        bus.run(asyncio.sleep(0.01))


STEMS = itertools.count(1)


def named(bus: BusThread, partition_id: int) -> str:
    """Return a new name whose home is a given partition."""
    count = len(bus._hosts)
    names = (f"home-{number}" for number in STEMS)
    return next(name for name in names if home_of(name, count) == partition_id % count)


def exists(bus: BusThread, path: str) -> bool:
    return bus._directory.find(path.lower()) is not None


def total(bus: BusThread, path: str) -> RuntimeInformation:
    """Return the counts of an entity: the sum over its partitions."""
    return bus.run(bus.administration.runtime(path))


def is_empty(bus: BusThread, path: str, sub_queue: ServiceBusSubQueue | None = None) -> bool:
    """Return whether nothing is stored there, locked or not; without `sub_queue` nothing scheduled
    too.
    """
    counts = total(bus, path)
    if sub_queue is None:
        return counts.active + counts.scheduled == 0
    return (counts.dead_letter if sub_queue is DEAD else counts.transfer_dead_letter) == 0


def reload_all(bus: BusThread) -> None:
    """Let every partition lose its memory, as after a restart; locks are lost with it."""
    homes = {entry.home_partition: entry.name for entry in bus._directory.entries()}
    for partition_id in range(len(bus._hosts)):
        name = homes.get(partition_id) or bus.queue(named(bus, partition_id))
        bus.counts(name)  # it is loaded
        bus.reload(name)


def start_wide(server: EmbeddedPostgres, name: str, count: int, sku: Sku) -> BusThread:
    """Start a bus with a number of partitions, all of a tier."""
    make_database(server, name, template=TEMPLATE)
    limits = replace(LIMITS[sku], partition_count=count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus_thread, "PARTITION_COUNT", count)
        bus = BusThread(dsn_of(server, name), limits)
        bus.start()
    return bus
