"""Send and receive with the official SDK.

Start a bus with `make dev` (or `postbus dev examples/`) first. Then:

    python examples/send_receive.py ["Endpoint=sb://...;UseDevelopmentEmulator=true"]
"""

from __future__ import annotations

import sys

from azure.servicebus import ServiceBusClient, ServiceBusMessage

LOCAL = (
    "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
    "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true"
)


def main(connection_string: str = LOCAL, queue: str = "orders") -> int:
    with ServiceBusClient.from_connection_string(connection_string) as client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages([ServiceBusMessage(f"order {number}") for number in range(3)])
        print("sent 3 messages")
        with client.get_queue_receiver(queue, max_wait_time=2) as receiver:
            received = 0
            for message in receiver:
                print(f"received {message} as number {message.sequence_number}")
                receiver.complete_message(message)
                received += 1
    return received


if __name__ == "__main__":
    main(*sys.argv[1:])
