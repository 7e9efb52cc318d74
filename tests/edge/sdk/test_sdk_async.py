"""The asynchronous client of azure-servicebus: overlapping work on one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceiveMode, ServiceBusSubQueue
from azure.servicebus.aio import AutoLockRenewer, ServiceBusClient, ServiceBusReceiver
from azure.servicebus.exceptions import MessageSizeExceededError, ServiceBusError

from tests.edge.bus_thread import BusThread

pytestmark = pytest.mark.slow

LONG_S = 10


@pytest.fixture
async def client(bus: BusThread) -> AsyncIterator[ServiceBusClient]:
    text = bus.connection_string()
    async with ServiceBusClient.from_connection_string(text, retry_total=0) as opened:
        yield opened


async def take(receiver: ServiceBusReceiver, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        messages = await receiver.receive_messages(count - len(found), max_wait_time=LONG_S)
        assert messages
        for message in messages:
            await receiver.complete_message(message)
            found.append(str(message))
    return found


@pytest.mark.behaviour("S1", "S47")
async def test_send_receive_and_complete(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    async with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as all_:
        batch = await sender.create_message_batch()
        for number in range(10):
            batch.add_message(ServiceBusMessage(str(number)))
        await sender.send_messages(batch)
        await sender.send_messages([ServiceBusMessage("10"), ServiceBusMessage("11")])
        assert await take(all_, 12) == [str(number) for number in range(12)]
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S20")
async def test_ten_senders_at_a_time_send_everything(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    """Each coroutine has a sender of its own: the SDK's senders are not safe to share."""

    async def send(numbers: range) -> None:
        async with client.get_queue_sender(queue) as sender:
            for number in numbers:
                await sender.send_messages(ServiceBusMessage(str(number)))

    await asyncio.gather(*(send(range(start, start + 10)) for start in range(0, 100, 10)))
    assert bus.counts(queue).active == 100
    async with client.get_queue_receiver(queue) as receiver:
        found = await take(receiver, 100)
    assert sorted(found, key=int) == [str(number) for number in range(100)]


@pytest.mark.behaviour("S9", "S16")
async def test_only_the_sender_of_a_bad_message_sees_an_error(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    async def send(body: bytes) -> bool:
        async with client.get_queue_sender(queue) as sender:
            try:
                await sender.send_messages(ServiceBusMessage(body))
            except MessageSizeExceededError:
                return False
        return True

    results = await asyncio.gather(*map(send, [b"x"] * 9 + [b"x" * 300_000]))
    assert results == [True] * 9 + [False]
    assert bus.counts(queue).active == 9


async def test_every_operation_of_the_receiver(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    async with client.get_queue_sender(queue) as sender:
        await sender.send_messages([ServiceBusMessage(str(number)) for number in range(4)])
    async with client.get_queue_receiver(queue) as receiver:
        messages: list[Any] = []
        while len(messages) < 4:
            messages += await receiver.receive_messages(4 - len(messages), max_wait_time=LONG_S)
        abandoned, deferred, dead, completed = messages
        assert await receiver.renew_message_lock(abandoned)
        await receiver.abandon_message(abandoned)
        await receiver.defer_message(deferred)
        await receiver.dead_letter_message(dead, reason="r", error_description="d")
        await receiver.complete_message(completed)
        (again,) = await receiver.receive_deferred_messages(deferred.sequence_number)
        await receiver.complete_message(again)
        assert await take(receiver, 1) == ["0"]
        assert await receiver.peek_messages(4, sequence_number=1) == []
    counts = bus.counts(queue)
    assert (counts.active, counts.dead_letter) == (0, 1)
    dead_letters = client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    async with dead_letters as receiver:
        assert await take(receiver, 1) == ["2"]


async def test_schedule_and_cancel(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    due = bus.now() + timedelta(days=1)
    async with client.get_queue_sender(queue) as sender:
        numbers = await sender.schedule_messages(
            [ServiceBusMessage("one"), ServiceBusMessage("two")], due
        )
        await sender.cancel_scheduled_messages(numbers[0])
        with pytest.raises(ServiceBusError):
            await sender.cancel_scheduled_messages(numbers)
    assert bus.counts(queue).scheduled == 1


async def test_iteration_with_prefetch(client: ServiceBusClient, queue: str) -> None:
    async with client.get_queue_sender(queue) as sender:
        await sender.send_messages([ServiceBusMessage(str(number)) for number in range(50)])
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    async with client.get_queue_receiver(
        queue, receive_mode=mode, prefetch_count=20, max_wait_time=1
    ) as receiver:
        found = [str(message) async for message in receiver]
    assert found == [str(number) for number in range(50)]


async def test_auto_renewer(premium_bus: BusThread) -> None:
    queue = premium_bus.queue(lock_duration_ms=5_000)
    text = premium_bus.connection_string()
    async with (
        ServiceBusClient.from_connection_string(text, retry_total=0) as client,
        client.get_queue_sender(queue) as sender,
        client.get_queue_receiver(queue) as receiver,
        AutoLockRenewer() as renewer,
    ):
        await sender.send_messages(ServiceBusMessage("one"))
        (message,) = await receiver.receive_messages(1, max_wait_time=LONG_S)
        renewed = asyncio.Event()
        renew = receiver.renew_message_lock

        async def note(*args: object, **options: object) -> object:
            until = await renew(*args, **options)
            renewed.set()
            return until

        receiver.renew_message_lock = note
        renewer.register(receiver, message, max_lock_renewal_duration=30)
        async with asyncio.timeout(LONG_S):
            await renewed.wait()
        await receiver.complete_message(message)
    assert premium_bus.counts(queue).active == 0


async def test_a_session_of_a_subscription_has_order_state_and_lock(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    name = bus.subscription(topic, requiresSession=True)
    async with client.get_topic_sender(topic) as sender:
        for body in ("a", "b"):
            await sender.send_messages(ServiceBusMessage(body, session_id="s1"))
    assert await listed(client.list_subscription_sessions(topic, name)) == ["s1"]
    async with client.get_subscription_receiver(topic, name, session_id="s1") as receiver:
        session = receiver.session
        before = session.locked_until_utc
        bus.advance(5_000)
        assert await session.renew_lock() > before
        assert await session.get_state() is None
        await session.set_state("seen")
        assert await session.get_state() == b"seen"
        assert await take(receiver, 2) == ["a", "b"]


async def test_sessions_of_a_queue_are_listed(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue(requiresSession=True)
    async with client.get_queue_sender(queue) as sender:
        for session in ("s2", "s1"):
            await sender.send_messages(ServiceBusMessage("x", session_id=session))
    assert sorted(await listed(client.list_queue_sessions(queue))) == ["s1", "s2"]


async def listed(found: AsyncIterator[str]) -> list[str]:
    return [each async for each in found]
