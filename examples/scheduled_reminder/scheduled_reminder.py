"""Reminders that arrive at their scheduled time, and one that is cancelled before.

Start a bus, and in another shell the program:

    postbus dev examples/scheduled_reminder --ephemeral
    python examples/scheduled_reminder/scheduled_reminder.py

The first reminder arrives after ten seconds. With a manual clock, an hour passes at once:

    postbus dev examples/scheduled_reminder --ephemeral --clock manual
    python examples/scheduled_reminder/scheduled_reminder.py 3600
    postbus clock advance 1h
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

LOCAL = (
    "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
    "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true"
)
QUEUE = "reminders"


async def schedule(client: ServiceBusClient, delay: timedelta) -> None:
    due = datetime.now(UTC) + delay
    texts = ["water the plants", "call the bank", "feed the cat"]
    async with client.get_queue_sender(QUEUE) as sender:
        numbers = await sender.schedule_messages([ServiceBusMessage(text) for text in texts], due)
        print(f"scheduled {len(numbers)} reminders for {due:%H:%M:%S} UTC")
        await sender.cancel_scheduled_messages(numbers[1])
        print(f"cancelled: {texts[1]}")


async def remind(client: ServiceBusClient, delay: timedelta, count: int) -> None:
    async with client.get_queue_receiver(QUEUE) as receiver:
        for message in await receiver.peek_messages(10):
            due = message.scheduled_enqueue_time_utc
            print(f"waiting for: {message}, {message.state.name.lower()} for {due:%H:%M:%S}")
        while count:
            wait_s = delay.total_seconds() + 30
            for message in await receiver.receive_messages(count, max_wait_time=wait_s):
                print(f"reminder: {message}")
                await receiver.complete_message(message)
                count -= 1


async def main(delay_s: str = "10", connection_string: str = LOCAL) -> None:
    delay = timedelta(seconds=float(delay_s))
    async with ServiceBusClient.from_connection_string(connection_string) as client:
        await schedule(client, delay)
        await remind(client, delay, count=2)
    print("done")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
