"""Definitions that Azure takes and this bus has to mean something by, with the SDK's client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from azure.servicebus.management import ServiceBusAdministrationClient

from postbus.contract.entities import QueueProperties
from tests.edge.bus_thread import PARTITION_COUNT, BusThread
from tests.edge.sdk.test_sdk_administration import administration_of, refusal_of

pytestmark = pytest.mark.slow


@pytest.fixture
def administration(bus: BusThread) -> Iterator[ServiceBusAdministrationClient]:
    with administration_of(bus) as client:
        yield client


def test_the_size_of_a_partitioned_entity_is_that_of_all_its_parts(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    made = administration.create_queue(
        "big", enable_partitioning=True, max_size_in_megabytes=PARTITION_COUNT * 3072
    )
    assert made.max_size_in_megabytes == PARTITION_COUNT * 3072
    made.user_metadata = "changed"
    administration.update_queue(made)
    assert administration.get_queue("big").max_size_in_megabytes == PARTITION_COUNT * 3072
    entry = bus.administration.find("big")
    assert entry is not None
    assert entry.properties == QueueProperties(
        enable_partitioning=True,
        max_size_in_megabytes=3072,
        user_metadata="changed",
    )
    too_large = refusal_of(
        lambda: administration.create_queue("plain", max_size_in_megabytes=16 * 1024)
    )
    assert "maxSizeInMegabytes: this tier allows 1024, 2048" in too_large.message


def test_a_queue_may_forward_to_itself_and_the_log_warns(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    made = administration.create_queue("round", forward_to="round")
    assert made.forward_to.endswith("/round")
    (warned,) = [each for each in bus.log.records if getattr(each, "entity", None) == "round"]
    assert warned.levelname == "WARNING"
    assert getattr(warned, "field", None) == "forwardTo"
    assert "round -> round" in str(getattr(warned, "why", ""))


def test_an_entity_with_sessions_may_forward(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    target = bus.queue(requires_session=True)
    administration.create_queue("sessions", requires_session=True, forward_to=target)
    (warned,) = [each for each in bus.log.records if getattr(each, "entity", None) == "sessions"]
    assert "no session can be received" in str(getattr(warned, "why", ""))


def test_a_target_is_shown_as_the_url_that_was_sent_until_it_changes(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    target, other = bus.queue(), bus.queue()
    url = f"https://LOCALHOST/{target.upper()}"
    administration.create_queue("sent", forward_to=url, forward_dead_lettered_messages_to=f"{url}/")
    made = administration.get_queue("sent")
    assert (made.forward_to, made.forward_dead_lettered_messages_to) == (url, f"{url}/")
    entry = bus.administration.find("sent")
    assert entry is not None
    assert entry.properties == QueueProperties(
        forward_to=target.upper(), forward_dead_lettered_messages_to=target.upper()
    )
    _, stored = bus.run(bus._directory.catalog.store.load())
    assert entry.forwards_as_sent in [each.forwards_as_sent for each in stored]
    bus.change("sent", forward_to=target, max_delivery_count=7)  # by its name, and the same
    assert administration.get_queue("sent").forward_to == url
    bus.change("sent", forward_to=other)
    assert administration.get_queue("sent").forward_to == f"sb://localhost:{bus.port}/{other}"
    administration.create_topic("sent-topic")
    administration.create_subscription("sent-topic", "sub", forward_to=url)
    assert administration.get_subscription("sent-topic", "sub").forward_to == url
    administration.create_rule("sent-topic", "sub", "another")
    assert administration.get_subscription("sent-topic", "sub").forward_to == url
