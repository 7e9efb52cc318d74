"""Orders with several steps and two workers: each order has one worker at a time, in order.

Start a bus, and in another shell the program:

    postbus dev examples/order_workflow --ephemeral
    python examples/order_workflow/order_workflow.py ["Endpoint=sb://..."]

Each order is a session. A worker acquires the next order with messages, no other worker gets them
in the meantime, and the state of the session has the finished steps for the next worker.
"""

from __future__ import annotations

import asyncio
import json
import sys

from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver
from azure.servicebus.exceptions import OperationTimeoutError

LOCAL = (
    "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
    "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true"
)
QUEUE = "order-steps"
ORDERS = ["A-1", "A-2", "A-3"]
STEPS = ["placed", "paid", "packed", "shipped"]


async def send_steps(client: ServiceBusClient) -> None:
    """Send the steps of all orders, mixed."""
    async with client.get_queue_sender(QUEUE) as sender:
        for step in STEPS:
            await sender.send_messages(
                [ServiceBusMessage(step, session_id=order) for order in ORDERS]
            )
    print(f"sent {len(STEPS)} steps of {len(ORDERS)} orders")


async def work(client: ServiceBusClient, worker: str) -> None:
    """Work on one order after the other until there is none for two seconds."""
    while True:
        try:
            async with client.get_queue_receiver(
                QUEUE, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=2
            ) as receiver:
                await take_steps(receiver, worker)
        except OperationTimeoutError:
            return


async def take_steps(receiver: ServiceBusReceiver, worker: str) -> None:
    """Do up to two steps of an order, then release it for any worker."""
    session = receiver.session
    state = await session.get_state()
    done: list[str] = json.loads(state) if state else []
    for message in await receiver.receive_messages(2):
        step = str(message)
        if step not in done:  # otherwise a worker died between set_state and complete_message
            assert step == STEPS[len(done)], "a session keeps the order of its messages"
            done.append(step)
            await session.set_state(json.dumps(done))
        await receiver.complete_message(message)
        print(f"{worker}: order {session.session_id} is {step}")
    if done == STEPS:
        await session.set_state(None)  # a session without messages and state uses no space


async def main(connection_string: str = LOCAL) -> None:
    # Without retries the error "no session" comes after one wait, not after four.
    async with ServiceBusClient.from_connection_string(connection_string, retry_total=0) as client:
        await send_steps(client)
        await asyncio.gather(work(client, "Ada"), work(client, "Ben"))
    print("nothing left to do")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
