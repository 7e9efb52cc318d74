"""Specs with the defaults that the API server writes, on buses of each tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postbus.contract.entities import NamespaceProperties
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import DEFINITION, controlled_bus, path_of
from tests.operator.small_cluster import small_cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("sku", "partitions", "lifetime", "size"),
    [
        ("Basic", None, "P14D", 256),
        ("Standard", None, "P10675199DT2H48M5.4775807S", 256),
        ("Premium", 2, "P10675199DT2H48M5.4775807S", 1024),
    ],
)
async def test_defaults_of_the_schema_are_those_of_the_tier(
    postgres_server: EmbeddedPostgres,
    tmp_path: Path,
    sku: str,
    partitions: int | None,
    lifetime: str,
    size: int,
) -> None:
    database = f"operator_tier_{sku.lower()}"
    make_database(postgres_server, database, template=TEMPLATE)
    wanted: dict[str, Any] = {"sku": {"name": sku}, "premiumMessagingPartitions": partitions}
    properties = NamespaceProperties.model_validate(wanted)
    definition = replace(DEFINITION, properties=properties, queues=())
    with controlled_bus(dsn_of(postgres_server, database), tmp_path, definition=definition) as bus:
        async with small_cluster(bus) as cluster:
            queue = cluster.apply("Queue", "orders")
            wrong = cluster.apply("Queue", "sessions", requiresSession=True)
            topic = cluster.apply("Topic", "events")
            await cluster.settle()
            assert cluster.condition(queue, "Ready") == ("True", "Ready")
            found = bus.caller.get(path_of("queues", "orders")).body
            assert found["properties"]["defaultMessageTimeToLive"] == lifetime
            assert found["properties"]["maxMessageSizeInKilobytes"] == size
            assert cluster.get(queue).status["partitioned"] is (sku == "Premium")
            is_basic = sku == "Basic"
            for key in (wrong, topic):
                valid = ("False", "SkuUnsupported") if is_basic else ("True", "Accepted")
                assert cluster.condition(key, "Valid") == valid, cluster.message(key, "Valid")
            version = bus.caller.get("/v1/namespace").body["version"]
            assert await cluster.settle() == 1
            await cluster.restart_operator()
            assert await cluster.settle() == 1
            assert bus.caller.get("/v1/namespace").body["version"] == version
