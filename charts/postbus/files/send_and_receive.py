"""Send messages to a queue and receive them, with a Secret that the operator has written.

python send_and_receive.py FOLDER     the mounted Secret: connectionString, entityPath, ca.crt
"""

from __future__ import annotations

import sys
from pathlib import Path

from azure.servicebus import ServiceBusClient, ServiceBusMessage

MESSAGES = 3
WAIT_S = 20


def main(folder: str) -> int:
    """Return the exit code: 0 if all messages came back."""
    secret = Path(folder)
    authority = secret / "ca.crt"
    queue = (secret / "entityPath").read_text()
    client = ServiceBusClient.from_connection_string(
        (secret / "connectionString").read_text(),
        connection_verify=str(authority) if authority.exists() else None,
    )
    with client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages([ServiceBusMessage(f"hello {n}") for n in range(MESSAGES)])
        print(f"sent {MESSAGES} messages to {queue}")
        received = 0
        with client.get_queue_receiver(queue, max_wait_time=WAIT_S) as receiver:
            for message in receiver:
                print(f"received {message} as number {message.sequence_number}")
                receiver.complete_message(message)
                received += 1
                if received == MESSAGES:
                    return 0
    print(f"received {received} of {MESSAGES} messages")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
