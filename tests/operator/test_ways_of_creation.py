"""A queue is the same, whoever creates it: a manifest, the SDK, the control API, a resource."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus.management import ServiceBusAdministrationClient

from postbus.assembly.listeners import Listener
from postbus.contract.entities import QueueProperties
from postbus.manifests.reader import QueueDefinition
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import DEFINITION, ControlledBus, controlled_bus, path_of
from tests.operator.small_cluster import small_cluster

pytestmark = pytest.mark.slow

WANTED: dict[str, Any] = {"lockDuration": "PT30S", "maxDeliveryCount": 7, "requiresSession": True}


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "operator_ways", template=TEMPLATE)
    queue = QueueProperties(lock_duration_ms=30_000, max_delivery_count=7, requires_session=True)
    definition = replace(DEFINITION, queues=(QueueDefinition("of-a-manifest", queue, ()),))
    database = dsn_of(postgres_server, "operator_ways")
    folder = tmp_path_factory.mktemp("operator")
    with controlled_bus(database, folder, definition=definition) as bus:
        yield bus


def administration_of(running: ControlledBus) -> ServiceBusAdministrationClient:
    _, port = running.bus.listeners()[Listener.TLS]
    text = running.connection_string.replace(";UseDevelopmentEmulator=true", "")
    return ServiceBusAdministrationClient.from_connection_string(
        re.sub(r"sb://[^/;]+", f"sb://localhost:{port}", text),
        connection_verify=str(running.bus.authority_file),
    )


@pytest.mark.behaviour("S152")
async def test_a_queue_is_the_same_by_manifest_sdk_control_api_and_resource(
    running: ControlledBus,
) -> None:
    with administration_of(running) as sdk:
        sdk.create_queue(
            "of-the-sdk",
            lock_duration=timedelta(seconds=30),
            max_delivery_count=7,
            requires_session=True,
        )
    running.caller.put(path_of("queues", "of-the-api"), WANTED)
    async with small_cluster(running) as cluster:
        cluster.apply("Queue", "of-a-resource", **WANTED)
        await cluster.settle()
    names = ("of-a-manifest", "of-the-sdk", "of-the-api", "of-a-resource")
    found = [running.caller.get(path_of("queues", name)).body for name in names]
    assert [each["properties"] for each in found] == [found[0]["properties"]] * 4
    assert len({each["appliedHash"] for each in found}) == 1
    assert found[0]["properties"]["maxDeliveryCount"] == 7
