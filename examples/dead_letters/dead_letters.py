"""Failing messages: retry, dead-letter with a reason, inspect, repair and resend them.

Start a bus, and in another shell the program:

    postbus dev examples/dead_letters --ephemeral
    python examples/dead_letters/dead_letters.py ["Endpoint=sb://..."]
"""

from __future__ import annotations

import json
import sys

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSubQueue

LOCAL = (
    "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
    "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true"
)
QUEUE = "invoices"
DEAD_LETTERS = ServiceBusSubQueue.DEAD_LETTER
INVOICES = [
    {"id": "I-1", "amount": "12.50"},
    {"id": "I-2", "amount": "12,50"},
    {"id": "I-3"},
]


def send(client: ServiceBusClient) -> None:
    with client.get_queue_sender(QUEUE) as sender:
        sender.send_messages(
            [ServiceBusMessage(json.dumps(each), message_id=each["id"]) for each in INVOICES]
        )
    print(f"sent {len(INVOICES)} invoices")


def work(client: ServiceBusClient) -> None:
    """Book valid invoices, abandon failing ones for a retry, dead-letter incomplete ones."""
    with client.get_queue_receiver(QUEUE, max_wait_time=1) as receiver:
        for message in receiver:
            invoice = json.loads(str(message))
            attempt = message.delivery_count + 1
            if "amount" not in invoice:
                text = "an invoice needs an amount"
                receiver.dead_letter_message(message, "incomplete", text)
                print(f"  {invoice['id']}: incomplete, dead-lettered at once")
                continue
            try:
                amount = float(invoice["amount"])
            except ValueError as error:
                print(f"  {invoice['id']}: attempt {attempt} failed: {error}")
                receiver.abandon_message(message)
                continue
            receiver.complete_message(message)
            print(f"  {invoice['id']}: booked {amount:.2f}")


def inspect_reasons(client: ServiceBusClient) -> None:
    """Print the dead letters with their reasons; peeking locks and changes nothing."""
    with client.get_queue_receiver(QUEUE, sub_queue=DEAD_LETTERS) as receiver:
        for letter in receiver.peek_messages(100):
            why = letter.dead_letter_reason, letter.dead_letter_error_description
            print(f"  {letter.message_id}: {': '.join(map(str, why))}")


def repair(client: ServiceBusClient) -> None:
    """Send a repaired copy, then complete the dead letter; discard incomplete ones."""
    with (
        client.get_queue_receiver(QUEUE, sub_queue=DEAD_LETTERS, max_wait_time=1) as receiver,
        client.get_queue_sender(QUEUE) as sender,
    ):
        for letter in receiver:
            invoice = json.loads(str(letter))
            if letter.dead_letter_reason == "MaxDeliveryCountExceeded":
                invoice["amount"] = invoice["amount"].replace(",", ".")
                copy = ServiceBusMessage(json.dumps(invoice), message_id=letter.message_id)
                sender.send_messages(copy)
                print(f"  {letter.message_id}: repaired and resent")
            else:
                print(f"  {letter.message_id}: discarded")
            receiver.complete_message(letter)


def main(connection_string: str = LOCAL) -> None:
    with ServiceBusClient.from_connection_string(connection_string) as client:
        send(client)
        for title, step in [
            ("working", work),
            ("dead letters and their reasons", inspect_reasons),
            ("repairing", repair),
            ("working again", work),
        ]:
            print(f"\n{title}:")
            step(client)


if __name__ == "__main__":
    main(*sys.argv[1:])
