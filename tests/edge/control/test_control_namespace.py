"""A namespace that is changed while it runs: handshakes follow at once, and after a restart too."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from postbus.assembly.listeners import Listener
from postbus.assembly.opening import BusError
from postbus.contract.entities import NamespaceProperties
from postbus.manifests.reader import BusDefinition
from postbus.store.migrate import newest
from tests.edge.control.control_bus import DEFINITION, ControlledBus, controlled_bus, path_of

pytestmark = pytest.mark.slow


def declared_as(fields: Mapping[str, object]) -> BusDefinition:
    """Return the definition of a bus with this Namespace manifest."""
    return replace(DEFINITION, properties=NamespaceProperties.model_validate(fields))


def lets_in(bus: ControlledBus, version: ssl.TLSVersion) -> bool:
    """Return whether a client with this TLS version gets through the handshake."""
    context = ssl.create_default_context(cafile=str(bus.bus.authority_file))
    context.maximum_version = version
    with socket.create_connection(bus.bus.listeners()[Listener.TLS], timeout=60) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as secret:
                return secret.version() is not None
        except ssl.SSLError:
            return False


def test_the_minimum_tls_version_is_put_and_stays(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus") as bus:
        assert lets_in(bus, ssl.TLSVersion.TLSv1_2)
        assert bus.caller.put("/v1/namespace", {"minimumTlsVersion": "1.3"}).status == 200
        assert not lets_in(bus, ssl.TLSVersion.TLSv1_2)
        assert lets_in(bus, ssl.TLSVersion.TLSv1_3)
    with controlled_bus(database, tmp_path / "bus") as bus:
        response = bus.caller.get("/v1/namespace").body
        assert response["properties"]["minimumTlsVersion"] == "1.3"
        assert not lets_in(bus, ssl.TLSVersion.TLSv1_2)
        assert bus.caller.put("/v1/namespace", {}).status == 200
        assert lets_in(bus, ssl.TLSVersion.TLSv1_2)


def test_manifest_wins_at_a_start(database: str, tmp_path: Path) -> None:
    declared = declared_as({"minimumTlsVersion": "1.3"})
    with controlled_bus(database, tmp_path / "bus", definition=declared) as bus:
        changed = {"minimumTlsVersion": "1.2", "tags": {"a": "b"}}
        assert bus.caller.put("/v1/namespace", changed).status == 200
        assert lets_in(bus, ssl.TLSVersion.TLSv1_2)
    with controlled_bus(database, tmp_path / "bus", definition=declared) as bus:
        response = bus.caller.get("/v1/namespace").body["properties"]
        assert (response["minimumTlsVersion"], response["tags"]) == ("1.3", {"a": "b"})
        assert not lets_in(bus, ssl.TLSVersion.TLSv1_2)


def test_the_status_has_epoch_and_schema_version_of_claimed_partitions(
    database: str, tmp_path: Path
) -> None:
    seen = []
    for _ in range(2):
        with controlled_bus(database, tmp_path / "bus") as bus:
            bus.caller.put(path_of("queues", "one"), {})
            [home] = bus.caller.get(path_of("queues", "one")).body["partitions"]
            peek = {"entity": "one"}
            assert bus.caller.post("/v1/messages/peek", peek).status == 200  # claims it
            partitions = bus.caller.get("/v1/status").body["partitions"]
            seen.append(partitions[home])
            unclaimed = [each for each in partitions if each["epoch"] is None]
            assert unclaimed
            assert {each["schemaVersion"] for each in unclaimed} == {None}
    assert seen[1]["epoch"] > seen[0]["epoch"] > 0
    assert {each["schemaVersion"] for each in seen} == {newest("partition")}


@pytest.mark.behaviour("S144", "S148", "S149")
def test_a_premium_namespace_has_the_partitions_it_was_created_with(
    database: str, tmp_path: Path
) -> None:
    premium = {"sku": {"name": "Premium"}, "premiumMessagingPartitions": 4}
    with controlled_bus(database, tmp_path / "bus", definition=declared_as(premium)) as bus:
        assert bus.caller.get("/v1/namespace").body["partitionCount"] == 4
        assert bus.caller.put(path_of("queues", "asks-nothing"), {}).status == 201
        made = bus.caller.get(path_of("queues", "asks-nothing")).body
        assert (made["isPartitioned"], made["partitions"]) == (True, [0, 1, 2, 3])
        changed = bus.caller.put("/v1/namespace", premium | {"premiumMessagingPartitions": 8})
        assert (changed.status, changed.kind) == (409, "immutable")
    other = declared_as(premium | {"premiumMessagingPartitions": 8})
    with (
        pytest.raises(BusError, match="4 partitions, fixed at its creation, not 8"),
        controlled_bus(database, tmp_path / "bus", definition=other),
    ):
        pass


@pytest.mark.behaviour("S100", "S101")
def test_messages_of_a_basic_namespace_live_for_fourteen_days(
    database: str, tmp_path: Path
) -> None:
    basic, queue = declared_as({"sku": {"name": "Basic"}}), path_of("queues", "orders")
    with controlled_bus(database, tmp_path / "bus", definition=basic) as bus:
        assert bus.caller.put(queue, {}).status == 201
        assert bus.caller.get(queue).body["properties"]["defaultMessageTimeToLive"] == "P14D"
        refused = bus.caller.put(queue, {"defaultMessageTimeToLive": "P15D"})
        assert (refused.status, refused.kind) == (400, "invalid")
        assert "at most P14D" in str(refused.body)
