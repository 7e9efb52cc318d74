"""Each field of an entity does what it says, seen through the official SDK.

All entities are applied at once, on one bus; each case then looks at its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusMessage,
    ServiceBusMessageState,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import (
    MessageSizeExceededError,
    MessagingEntityDisabledError,
    ServiceBusError,
)
from e2e.tests.bus import WAIT_S, Bus, receiver_of
from e2e.tests.cluster import wait_for
from e2e.tests.manifests import queue, subscription, topic

KEY: Final = "a-key-of-the-application-1"

QUEUES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "disabled": {"status": "Disabled"},
    "send-disabled": {"status": "SendDisabled"},
    "receive-disabled": {"status": "ReceiveDisabled"},
    "short-lock": {"lockDuration": "PT5S"},
    "one-delivery": {"maxDeliveryCount": 1},
    "short-life": {"defaultMessageTimeToLive": "PT1S", "deadLetteringOnMessageExpiration": True},
    "short-life-only": {"defaultMessageTimeToLive": "PT1S"},
    "sessions": {"requiresSession": True},
    "once": {
        "requiresDuplicateDetection": True, "duplicateDetectionHistoryTimeWindow": "PT1M",
    },
    "large": {"maxMessageSizeInKilobytes": 3072},
    "forwards": {"forwardTo": "plain"},
    "forwards-dead": {"forwardDeadLetteredMessagesTo": "plain"},
    "noted": {"userMetadata": "team checkout"},
    "sized": {"maxSizeInMegabytes": 2048},
    "idle": {"autoDeleteOnIdle": "PT1H"},
    "unbatched": {"enableBatchedOperations": False},
    "express": {"enableExpress": True},
    "renamed": {"entityName": "team/renamed"},
    "remembers": {"operatorSpec": {"history": {"retention": "PT1H"}}},
    "rights": {
        "authorizationRules": [
            {"name": "sender", "rights": ["Send"]},
            {"name": "listener", "rights": ["Listen"]},
            {"name": "manager", "rights": ["Listen", "Send", "Manage"]},
        ],
    },
    "own-keys": {
        "authorizationRules": [{"name": "app", "rights": ["Send"], "secretName": "own-keys"}],
    },
    "own-secret": {
        "authorizationRules": [{"name": "app", "rights": ["Send", "Listen"]}],
        "operatorSpec": {
            "secrets": {"primaryConnectionString": {"name": "access", "key": "SERVICEBUS"}}
        },
    },
}  # fmt: skip
TOPICS: Final[dict[str, dict[str, Any]]] = {
    "events": {"userMetadata": "events"},
    "events-disabled": {"status": "SendDisabled"},
    "events-once": {"requiresDuplicateDetection": True},
    "events-short": {"defaultMessageTimeToLive": "PT1S"},
    "events-sized": {"maxSizeInMegabytes": 2048, "supportOrdering": False},
    "events-rights": {"authorizationRules": [{"name": "publisher", "rights": ["Send"]}]},
}
CORRELATION: Final = {"label": "vip", "properties": {"colour": "red"}}
SUBSCRIPTIONS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "all": ("events", {}),
    "sql": ("events", {"rules": [{
        "name": "large",
        "sqlFilter": {"sqlExpression": "amount > @least", "parameters": {"@least": 100}},
    }]}),
    "correlation": ("events", {"rules": [{"name": "vip", "correlationFilter": CORRELATION}]}),
    "true": ("events", {"rules": [{"name": "true", "filterType": "TrueFilter"}]}),
    "false": ("events", {"rules": [{"name": "false", "filterType": "FalseFilter"}]}),
    "action": ("events", {"rules": [{
        "name": "mark",
        "sqlFilter": {"sqlExpression": "amount = 1"},
        "action": {"sqlExpression": "SET marked = 'yes'"},
    }]}),
    "sub-receive-disabled": ("events", {"status": "ReceiveDisabled"}),
    "sub-lock": ("events", {"lockDuration": "PT5S"}),
    "sub-one-delivery": ("events", {"maxDeliveryCount": 1}),
    "sub-short-life": (
        "events", {"defaultMessageTimeToLive": "PT1S", "deadLetteringOnMessageExpiration": True}
    ),
    "sub-forwards": ("events", {"forwardTo": "collects"}),
    "sub-sessions": ("events", {"requiresSession": True}),
    "sub-faulty": ("events", {"rules": [{
        "name": "faulty", "sqlFilter": {"sqlExpression": "amount / nothing > 1"},
    }]}),
    "sub-renamed": ("events", {"entityName": "other"}),
    "sub-noted": ("events", {"userMetadata": "note", "autoDeleteOnIdle": "PT1H"}),
    "sub-once": ("events-once", {}),
    "sub-of-short": ("events-short", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def bus(shared: Bus) -> Iterator[Bus]:
    """The shared bus with all entities of the tables."""
    space = shared.space
    space.kubectl("create", "secret", "generic", "own-keys", f"--from-literal=primaryKey={KEY}")
    space.kubectl("label", "secret", "own-keys", "postbus.dev/watch=true")
    space.apply(
        queue("collects", shared.name),
        *(queue(name, shared.name, **spec) for name, spec in QUEUES.items()),
        *(topic(name, shared.name, **spec) for name, spec in TOPICS.items()),
        *(subscription(name, owner, **spec) for name, (owner, spec) in SUBSCRIPTIONS.items()),
    )
    references = [
        *(f"sbq/{name}" for name in QUEUES),
        *(f"sbt/{name}" for name in TOPICS),
        *(f"sbsub/{name}" for name in SUBSCRIPTIONS),
    ]
    space.wait_ready(*references)
    yield shared
    space.kubectl("delete", *references, "--wait=false")


def publish(bus: Bus, path: str, *messages: ServiceBusMessage) -> None:
    with bus.sdk() as client, client.get_topic_sender(path) as sender:
        sender.send_messages(list(messages))


@contextmanager
def receiving(bus: Bus, path: str, **options: Any) -> Iterator[Any]:
    with bus.sdk() as client, receiver_of(client, path, **options) as receiver:
        yield receiver


def one(receiver: Any) -> Any:
    [message] = receiver.receive_messages(1, max_wait_time=WAIT_S)
    return message


def dead_letter(bus: Bus, path: str) -> Any:
    """Return the first dead letter of a queue or subscription, and complete it."""
    with receiving(bus, path, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
        message = one(receiver)
        receiver.complete_message(message)
        return message


# --- status -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["disabled", "send-disabled"])
def test_status_refuses_sends(bus: Bus, name: str) -> None:
    with pytest.raises(MessagingEntityDisabledError):
        bus.send(name, "refused")


@pytest.mark.parametrize("name", ["disabled", "receive-disabled", "events/sub-receive-disabled"])
def test_status_refuses_receivers(bus: Bus, name: str) -> None:
    with pytest.raises(MessagingEntityDisabledError), receiving(bus, name) as receiver:
        receiver.receive_messages(1, max_wait_time=1)


def test_status_of_a_topic_refuses_sends(bus: Bus) -> None:
    with pytest.raises(MessagingEntityDisabledError):
        publish(bus, "events-disabled", ServiceBusMessage("refused"))


def test_status_that_lets_send_stores_messages(bus: Bus) -> None:
    bus.send("receive-disabled", "stored")
    bus.space.patch("sbq/receive-disabled", {"spec": {"status": "Active"}})
    bus.space.wait("jsonpath={.status.status}=Active", "sbq/receive-disabled")
    assert bus.texts("receive-disabled", 1) == ["stored"]


# --- locks, deliveries, time to live ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lock"),
    [("plain", 60), ("short-lock", 5), ("events/all", 60), ("events/sub-lock", 5)],
)
def test_lock_duration(bus: Bus, name: str, lock: int) -> None:
    give(bus, name, ServiceBusMessage("locked", subject="lock"))
    with receiving(bus, name) as receiver:
        message = one(receiver)
        left = (message.locked_until_utc - datetime.now(UTC)).total_seconds()
        receiver.complete_message(message)
    assert lock - 4 < left <= lock + 1


def give(bus: Bus, name: str, *messages: ServiceBusMessage) -> None:
    """Send to a queue, or to the topic of a subscription that nothing else is in."""
    owner, slash, _ = name.partition("/")
    if slash:
        drain(bus, name)
        publish(bus, owner, *messages)
    else:
        bus.send(name, *messages)


def drain(bus: Bus, path: str) -> list[Any]:
    """Return the messages of a queue or subscription, which has none afterwards."""
    found: list[Any] = []
    with receiving(bus, path, receive_mode="receiveanddelete") as receiver:
        while batch := receiver.receive_messages(100, max_wait_time=1):
            found += batch
    return found


@pytest.mark.parametrize("name", ["one-delivery", "events/sub-one-delivery"])
def test_max_delivery_count(bus: Bus, name: str) -> None:
    give(bus, name, ServiceBusMessage("returned"))
    with receiving(bus, name) as receiver:
        receiver.abandon_message(one(receiver))
    assert dead_letter(bus, name).dead_letter_reason == "MaxDeliveryCountExceeded"


@pytest.mark.parametrize("name", ["short-life", "events/sub-short-life"])
def test_time_to_live_with_dead_letters(bus: Bus, name: str) -> None:
    give(bus, name, ServiceBusMessage("late"))
    wait_for(lambda: expire(bus, name), lambda found: found == [])
    assert dead_letter(bus, name).dead_letter_reason == "TTLExpiredException"


def expire(bus: Bus, path: str) -> list[Any]:
    """Return what can be peeked; a message expires when a receiver asks for messages."""
    with receiving(bus, path) as receiver:
        for message in receiver.receive_messages(1, max_wait_time=1):
            receiver.abandon_message(message)
        found: list[Any] = receiver.peek_messages()
        return found


def test_time_to_live_without_dead_letters(bus: Bus) -> None:
    bus.send("short-life-only", "gone")
    wait_for(lambda: expire(bus, "short-life-only"), lambda found: found == [])
    with bus.administration() as administration:
        wait_for(
            lambda: administration.get_queue_runtime_properties("short-life-only"),
            lambda found: found.total_message_count == 0,
        )


def test_time_to_live_of_a_topic(bus: Bus) -> None:
    publish(bus, "events-short", ServiceBusMessage("late", time_to_live=timedelta(hours=1)))
    with receiving(bus, "events-short/sub-of-short") as receiver:
        message = receiver.peek_messages()
    assert all(each.time_to_live <= timedelta(seconds=1) for each in message)


# --- sessions, duplicates, sizes, forwards ------------------------------------------------------


def test_requires_session(bus: Bus) -> None:
    with pytest.raises(ServiceBusError):
        bus.send("sessions", "without")
    bus.send("sessions", ServiceBusMessage("with", session_id="one"))
    with receiving(bus, "sessions", session_id=NEXT_AVAILABLE_SESSION) as receiver:
        assert receiver.session.session_id == "one"
        receiver.complete_message(one(receiver))


def test_requires_session_of_a_subscription(bus: Bus) -> None:
    publish(bus, "events", ServiceBusMessage("with", session_id="two"))
    with receiving(bus, "events/sub-sessions", session_id="two") as receiver:
        receiver.complete_message(one(receiver))


def test_duplicate_detection(bus: Bus) -> None:
    bus.send("once", ServiceBusMessage("first", message_id="1"))
    bus.send("once", ServiceBusMessage("again", message_id="1"), "last")
    assert bus.texts("once", 2) == ["first", "last"]


def test_duplicate_detection_of_a_topic(bus: Bus) -> None:
    publish(bus, "events-once", ServiceBusMessage("first", message_id="1"))
    publish(bus, "events-once", ServiceBusMessage("again", message_id="1"))
    publish(bus, "events-once", ServiceBusMessage("last", message_id="2"))
    assert bus.texts("events-once/sub-once", 2) == ["first", "last"]


def test_largest_message(bus: Bus) -> None:
    body = os.urandom(2_000_000)
    bus.send("large", ServiceBusMessage(body))
    [found] = bus.take("large", 1)
    assert b"".join(found.body) == body
    with pytest.raises((MessageSizeExceededError, ValueError)):
        bus.send("plain", ServiceBusMessage(body))


def test_forwards(bus: Bus) -> None:
    drain(bus, "plain")
    bus.send("forwards", "through")
    assert bus.texts("plain", 1) == ["through"]


def test_forwards_dead_letters(bus: Bus) -> None:
    drain(bus, "plain")
    bus.send("forwards-dead", "dead")
    with receiving(bus, "forwards-dead") as receiver:
        receiver.dead_letter_message(one(receiver), reason="tested")
    [found] = bus.take("plain", 1)
    assert found.dead_letter_reason == "tested"


def test_subscription_forwards(bus: Bus) -> None:
    drain(bus, "collects")
    publish(bus, "events", ServiceBusMessage("collected"))
    assert "collected" in bus.texts("collects", 1)


# --- rules --------------------------------------------------------------------------------------

MATCHES: Final = [
    ("all", {"amount": 1}, None, True),
    ("true", {"amount": 1}, None, True),
    ("false", {"amount": 1}, None, False),
    ("sql", {"amount": 101}, None, True),
    ("sql", {"amount": 100}, None, False),
    ("correlation", {"colour": "red"}, "vip", True),
    ("correlation", {"colour": "blue"}, "vip", False),
    ("correlation", {"colour": "red"}, None, False),
    ("action", {"amount": 1}, None, True),
    ("other", {"amount": 1}, None, True),
]


@pytest.fixture(scope="module")
def selected(bus: Bus) -> dict[str, dict[str, Any]]:
    """What each subscription got of the messages of all cases: subscription -> text -> message."""
    names = dict.fromkeys(name for name, *_ in MATCHES)
    publish(
        bus,
        "events",
        *(
            ServiceBusMessage(f"case {number}", application_properties=properties, subject=subject)
            for number, (_, properties, subject, _) in enumerate(MATCHES)
        ),
    )
    return {name: {str(each): each for each in drain(bus, f"events/{name}")} for name in names}


@pytest.mark.parametrize("number", range(len(MATCHES)), ids=[each[0] for each in MATCHES])
def test_rules_select(selected: dict[str, dict[str, Any]], number: int) -> None:
    name, _, _, matches = MATCHES[number]
    found = selected[name].get(f"case {number}")
    assert (found is not None) == matches
    if found is not None:
        marked = (found.application_properties or {}).get(b"marked")
        assert (marked is not None) == (name == "action")


def test_rules_that_fail_dead_letter(bus: Bus) -> None:
    message = ServiceBusMessage("faulty", application_properties={"amount": 1, "nothing": 0})
    publish(bus, "events", message)
    assert str(dead_letter(bus, "events/sub-faulty")) == "faulty"


# --- properties that the administration client shows --------------------------------------------

SHOWN: Final[list[tuple[str, Callable[[Any], Any], Any]]] = [
    ("noted", lambda found: found.user_metadata, "team checkout"),
    ("sized", lambda found: found.max_size_in_megabytes, 2048),
    ("idle", lambda found: found.auto_delete_on_idle, timedelta(hours=1)),
    ("unbatched", lambda found: found.enable_batched_operations, False),
    ("express", lambda found: found.enable_express, True),
    ("once", lambda found: found.duplicate_detection_history_time_window, timedelta(minutes=1)),
    ("team/renamed", lambda found: found.name, "team/renamed"),
    ("large", lambda found: found.max_message_size_in_kilobytes, 3072),
]


@pytest.mark.parametrize(("name", "get", "wanted"), SHOWN, ids=[each[0] for each in SHOWN])
def test_administration_client_shows(
    bus: Bus, name: str, get: Callable[[Any], Any], wanted: object
) -> None:
    with bus.administration() as administration:
        assert get(administration.get_queue(name)) == wanted


def test_administration_client_shows_topics_and_subscriptions(bus: Bus) -> None:
    with bus.administration() as administration:
        assert administration.get_topic("events").user_metadata == "events"
        sized = administration.get_topic("events-sized")
        assert (sized.max_size_in_megabytes, sized.support_ordering) == (2048, False)
        noted = administration.get_subscription("events", "sub-noted")
        assert (noted.user_metadata, noted.auto_delete_on_idle) == ("note", timedelta(hours=1))


def test_path_of_an_entity_may_have_parts(bus: Bus) -> None:
    bus.send("team/renamed", "named")
    with bus.sdk() as client, client.get_queue_receiver("team/renamed") as receiver:
        assert str(one(receiver)) == "named"


# --- rights and Secrets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "may_send", "may_listen"),
    [("sender", True, False), ("listener", False, True), ("manager", True, True)],
)
def test_rights_of_a_queue(bus: Bus, rule: str, may_send: bool, may_listen: bool) -> None:
    with bus.sdk(f"rights-queue-{rule}") as client:
        with allowed(may_send), client.get_queue_sender("rights") as sender:
            sender.send_messages(ServiceBusMessage("sent"))
        with allowed(may_listen), client.get_queue_receiver("rights") as receiver:
            receiver.peek_messages()


def allowed(is_allowed: bool) -> Any:
    return nothing() if is_allowed else pytest.raises(ServiceBusError)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def test_rights_of_a_topic(bus: Bus) -> None:
    with (
        bus.sdk("events-rights-topic-publisher") as client,
        client.get_topic_sender("events-rights") as sender,
    ):
        sender.send_messages(ServiceBusMessage("sent"))


def test_key_of_the_users_secret(bus: Bus) -> None:
    assert bus.secret("own-keys-queue-app")["primaryKey"] == KEY
    with bus.sdk("own-keys-queue-app") as client, client.get_queue_sender("own-keys") as sender:
        sender.send_messages(ServiceBusMessage("sent"))


def test_changed_key_of_the_users_secret_is_followed(bus: Bus) -> None:
    other = f"{KEY}-changed"
    bus.space.patch("secret/own-keys", {"stringData": {"primaryKey": other}})
    wait_for(lambda: bus.secret("own-keys-queue-app")["primaryKey"], lambda found: found == other)
    with bus.sdk("own-keys-queue-app") as client, client.get_queue_sender("own-keys") as sender:
        sender.send_messages(ServiceBusMessage("sent"))


def test_connection_string_under_a_chosen_name(bus: Bus) -> None:
    text = bus.secret("access")["SERVICEBUS"]
    assert text == bus.secret("own-secret-queue-app")["connectionString"]


def test_history_keeps_settled_messages(bus: Bus) -> None:
    """The official SDK has no call for it: seen in the definition that the operator applied."""
    bus.send("remembers", "settled")
    assert bus.texts("remembers", 1) == ["settled"]
    assert bus.space.condition("sbq/remembers", "Programmed") == ("True", "Applied")


def test_scheduled_message_is_counted_in_the_status(bus: Bus) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    bus.send("sized", ServiceBusMessage("later", scheduled_enqueue_time_utc=later))
    with receiving(bus, "sized") as receiver:
        [found] = receiver.peek_messages()
    assert found.state is ServiceBusMessageState.SCHEDULED
    path = "{.status.countDetails.scheduledMessageCount}=1"
    bus.space.wait(f"jsonpath={path}", "sbq/sized", limit_s=120)
