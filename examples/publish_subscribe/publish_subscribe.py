"""One topic, three subscriptions: everything, large orders by SQL, one region by correlation.

Start a bus, and in another shell the program:

    postbus dev examples/publish_subscribe --ephemeral
    python examples/publish_subscribe/publish_subscribe.py ["Endpoint=sb://..."]

A publisher knows the topic only. The rules in bus.yaml select the messages of each subscription.
"""

from __future__ import annotations

import sys

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceivedMessage

LOCAL = (
    "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
    "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true"
)
TOPIC = "order-events"
EVENTS = [
    ("placed", {"order": "A-1", "amount": 250, "region": "eu"}),
    ("placed", {"order": "A-2", "amount": 1500, "region": "us"}),
    ("placed", {"order": "A-3", "amount": 4000, "region": "eu"}),
    ("cancelled", {"order": "A-2", "amount": 1500, "region": "us"}),
]


def publish(client: ServiceBusClient) -> None:
    with client.get_topic_sender(TOPIC) as sender:
        sender.send_messages(
            [
                # Rules see the subject as sys.Label, the properties by their names, never the body.
                ServiceBusMessage("{}", subject=label, application_properties=properties)
                for label, properties in EVENTS
            ]
        )
    print(f"published {len(EVENTS)} events")


def properties_of(message: ServiceBusReceivedMessage) -> dict[str, object]:
    """Return the application properties; the SDK returns strings as bytes."""
    found = {}
    for key, value in (message.application_properties or {}).items():
        name = key.decode() if isinstance(key, bytes) else key
        found[name] = value.decode() if isinstance(value, bytes) else value
    return found


def show(client: ServiceBusClient, subscription: str) -> None:
    print(f"\n{subscription}:")
    with client.get_subscription_receiver(TOPIC, subscription, max_wait_time=1) as receiver:
        for message in receiver:
            properties = properties_of(message)
            line = f"  {properties.pop('order')} {message.subject}"
            print(line, *(f"{name}={value}" for name, value in sorted(properties.items())))
            receiver.complete_message(message)


def main(connection_string: str = LOCAL) -> None:
    with ServiceBusClient.from_connection_string(connection_string) as client:
        publish(client)
        for subscription in ("archive", "large-orders", "europe"):
            show(client, subscription)


if __name__ == "__main__":
    main(*sys.argv[1:])
