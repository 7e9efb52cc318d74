"""Messages in each state, and what a bus says of them without changing any."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from e2e.tests.bus import WAIT_S, Bus
from e2e.tests.manifests import queue, subscription, topic

QUEUE: Final = "stored"
SESSIONS: Final = "stored-sessions"
TOPIC: Final = "stored-news"
ALL: Final = f"{TOPIC}/stored-all"
RED: Final = f"{TOPIC}/stored-red"
COUNT: Final = 20
LARGE: Final = 200 * 1024
STATE: Final = b"what the session knows"
RULES: Final = [{"name": "red", "sqlFilter": {"sqlExpression": "colour = 'red'"}}]

Seen = list[tuple[Any, ...]]
"""A message each: all that a client can see of it."""


def resources(owner: str) -> list[dict[str, Any]]:
    """Return the entities that hold them."""
    return [
        queue(QUEUE, owner),
        queue(SESSIONS, owner, requiresSession=True),
        topic(TOPIC, owner),
        subscription("stored-all", TOPIC),
        subscription("stored-red", TOPIC, rules=RULES),
    ]


def references() -> list[str]:
    return [
        f"sbq/{QUEUE}",
        f"sbq/{SESSIONS}",
        f"sbt/{TOPIC}",
        "sbsub/stored-all",
        "sbsub/stored-red",
    ]


def message(number: int, **options: Any) -> ServiceBusMessage:
    colour = "red" if number % 2 else "blue"
    return ServiceBusMessage(
        f"stored {number}", message_id=f"id-{number}", subject="stored",
        application_properties={"colour": colour, "number": number}, **options,
    )  # fmt: skip


def store(bus: Bus) -> None:
    """Send messages; leave one scheduled, deferred, dead-lettered, and delivered twice."""
    with bus.sdk() as client:
        with client.get_queue_sender(QUEUE) as sender:
            sender.send_messages([message(number) for number in range(COUNT)])
            sender.send_messages(ServiceBusMessage(b"x" * LARGE, message_id="large"))
            sender.schedule_messages(message(COUNT), datetime.now(UTC) + timedelta(days=2))
        with client.get_queue_receiver(QUEUE) as receiver:
            first, second, third = receiver.receive_messages(3, max_wait_time=WAIT_S)
            receiver.defer_message(first)
            receiver.dead_letter_message(second, reason="wrong", error_description="for a test")
            receiver.abandon_message(third)
            # The count of a second delivery is durable before it is sent (ADR 19).
            [again] = receiver.receive_messages(1, max_wait_time=WAIT_S)
            assert again.message_id == third.message_id
            receiver.abandon_message(again)
        with client.get_queue_sender(SESSIONS) as sender:
            for name in ("a", "b"):
                sender.send_messages([message(at, session_id=name) for at in range(COUNT)])
        with client.get_queue_receiver(SESSIONS, session_id="a") as receiver:
            receiver.session.set_state(STATE)
        with client.get_topic_sender(TOPIC) as sender:
            sender.send_messages([message(number) for number in range(COUNT)])


def seen_of(message: ServiceBusReceivedMessage) -> tuple[Any, ...]:
    properties = message.application_properties or {}
    return (
        message.sequence_number, str(message), message.message_id, message.subject,
        sorted(properties.items()), message.session_id, message.delivery_count, message.state,
        message.enqueued_time_utc, message.scheduled_enqueue_time_utc, message.expires_at_utc,
        message.dead_letter_reason, message.dead_letter_error_description,
    )  # fmt: skip


def stored(bus: Bus) -> dict[str, Seen]:
    """Return what a client sees of each, by where it is."""
    found: dict[str, Seen] = {}
    dead = ServiceBusSubQueue.DEAD_LETTER
    with bus.sdk() as client:
        receivers = {
            QUEUE: client.get_queue_receiver(QUEUE),
            "dead": client.get_queue_receiver(QUEUE, sub_queue=dead),
            ALL: client.get_subscription_receiver(TOPIC, "stored-all"),
            RED: client.get_subscription_receiver(TOPIC, "stored-red"),
            "a": client.get_queue_receiver(SESSIONS, session_id="a"),
            "b": client.get_queue_receiver(SESSIONS, session_id="b"),
        }
        for name, made in receivers.items():
            with made as receiver:
                found[name] = [seen_of(each) for each in receiver.peek_messages(4 * COUNT)]
                if name == "a":
                    found["state"] = [(bytes(receiver.session.get_state()),)]
    return found


def take_all(bus: Bus) -> None:
    """Receive and complete what is there, and check that all of it came in order."""
    left = [*range(2, COUNT)]  # of the first two one is deferred, one is dead
    texts = bus.texts(QUEUE, COUNT - 1)
    assert texts[:-1] == [f"stored {number}" for number in left]
    assert texts[-1] == "x" * LARGE
    assert bus.texts(ALL, COUNT) == [f"stored {number}" for number in range(COUNT)]
    assert bus.texts(RED, COUNT // 2) == [f"stored {number}" for number in range(1, COUNT, 2)]
    for name in ("a", "b"):
        texts = bus.texts(SESSIONS, COUNT, session_id=name)
        assert texts == [f"stored {number}" for number in range(COUNT)]
    assert bus.texts(QUEUE, 1, sub_queue=ServiceBusSubQueue.DEAD_LETTER) == ["stored 1"]
