"""Events have names that follow from what they say, so that replicas post each once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from postbus_operator.kube.event_posting import MAX_NOTE, event_object
from postbus_operator.objects import Resource
from postbus_operator.outcome import Event
from tests.operator.objects import entity

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
RESOURCE = Resource.from_object("Queue", entity("Queue", "orders"))


def name_of(event: Event, now: datetime = NOON, instance: str = "a") -> str:
    return event_object(RESOURCE, event, instance, now)["metadata"]["name"]


def test_the_same_event_of_an_hour_has_the_same_name_in_all_replicas() -> None:
    event = Event("Normal", "Restored", "with 3 messages")
    assert name_of(event) == name_of(event, NOON + timedelta(minutes=59), "b")
    assert name_of(event) != name_of(event, NOON + timedelta(minutes=60))
    assert name_of(event) != name_of(Event("Normal", "Restored", "with 4 messages"))
    assert name_of(event) != name_of(Event("Warning", "Restored", "with 3 messages"))


def test_an_event_names_its_object_and_carries_no_secret() -> None:
    made = event_object(RESOURCE, Event("Warning", "Refused", "password=hush"), "a", NOON)
    assert made["note"] == "password=***"
    assert made["regarding"]["uid"] == RESOURCE.uid
    assert made["eventTime"] == "2026-11-23T12:00:00.000000Z"


def test_long_texts_and_names_fit() -> None:
    resource = Resource.from_object("Queue", entity("Queue", "a" * 199 + "." + "b" * 53))
    made = event_object(resource, Event("Normal", "Said", "x" * 5_000), "i" * 300, NOON)
    assert len(made["note"]) == MAX_NOTE
    assert len(made["metadata"]["name"]) <= 253
    assert ".." not in made["metadata"]["name"]
    assert len(made["reportingInstance"]) == 128
