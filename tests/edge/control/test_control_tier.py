"""A namespace whose tier changes: its partitions, entities and messages stay (S146)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import ServiceBusAdministrationClient

from postbus.assembly.opening import BusError
from postbus.contract.entities import NamespaceProperties
from postbus.manifests.reader import BusDefinition, read_one_bus
from tests.cli.command_line import CommandLine
from tests.edge.control.control_bus import DEFINITION, ControlledBus, controlled_bus, path_of

pytestmark = pytest.mark.slow

ALL = list(range(16))
BODIES = [f"m{number}" for number in range(12)]
WIDE = {"enablePartitioning": True, "maxSizeInMegabytes": 2048}
LONG_S = 10


def declared(**said: Any) -> BusDefinition:
    """Return the definition of a bus with this Namespace manifest and no entities."""
    properties = NamespaceProperties.model_validate(said)
    return replace(DEFINITION, properties=properties, queues=())


STANDARD, PREMIUM = declared(sku={"name": "Standard"}), declared(sku={"name": "Premium"})


@contextmanager
def client_of(bus: ControlledBus) -> Iterator[ServiceBusClient]:
    with ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client:
        yield client


@contextmanager
def administration_of(bus: ControlledBus, folder: Path) -> Iterator[ServiceBusAdministrationClient]:
    tls = urlsplit(dict(bus.bus.summary())["amqps"])
    with ServiceBusAdministrationClient.from_connection_string(
        re.sub("sb://[^;]*", f"sb://{tls.netloc}", bus.connection_string),
        connection_verify=str(folder / "tls" / "ca.pem"),
        retry_total=0,
    ) as administration:
        yield administration


def create(bus: ControlledBus) -> None:
    """Create entities of both kinds, with messages in each."""
    for name, said in (("wide", WIDE), ("plain", {})):
        assert bus.caller.put(path_of("queues", name), said).status == 201
    assert bus.caller.put(path_of("topics", "events"), WIDE).status == 201
    assert bus.caller.put(path_of("topics", "events", "subscriptions", "all"), {}).status == 201
    with client_of(bus) as client:
        for name in ("wide", "plain"):
            with client.get_queue_sender(name) as sender:
                for body in BODIES:
                    sender.send_messages(ServiceBusMessage(body))
        with client.get_topic_sender("events") as publisher:
            for body in BODIES:
                publisher.send_messages(ServiceBusMessage(body))


def taken(client: ServiceBusClient, count: int) -> list[list[str]]:
    """Receive and complete so many messages of each entity; return their bodies."""
    bodies = []
    for receiver in (
        client.get_queue_receiver("wide"),
        client.get_queue_receiver("plain"),
        client.get_subscription_receiver("events", "all"),
    ):
        found: list[str] = []
        with receiver:
            while len(found) < count:
                messages = receiver.receive_messages(count - len(found), max_wait_time=LONG_S)
                assert messages
                for message in messages:
                    receiver.complete_message(message)
                    found.append(str(message))
        bodies.append(found)
    return bodies


def places(bus: ControlledBus, name: str) -> tuple[bool, list[int]]:
    """Return whether a queue is partitioned, and its partitions."""
    answer = bus.caller.get(path_of("queues", name)).body
    return answer["isPartitioned"], answer["partitions"]


def send_large(bus: ControlledBus, queue: str) -> None:
    with client_of(bus) as client, client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("x" * 600_000))


@pytest.mark.behaviour("S146", "S144", "S147", "S149")
def test_messages_of_a_standard_namespace_are_received_in_premium(
    database: str, tmp_path: Path
) -> None:
    folder = tmp_path / "bus"
    with controlled_bus(database, folder, definition=STANDARD) as bus:
        create(bus)
        home = places(bus, "plain")
        with pytest.raises(ServiceBusError):
            send_large(bus, "plain")
        with client_of(bus) as client:
            first = taken(client, 4)
            premium = {"sku": {"name": "Premium", "capacity": 2}}
            assert bus.caller.put("/v1/namespace", premium).status == 200
            second = taken(client, 4)  # over a connection that was open
        shown = bus.caller.get("/v1/namespace").body
        assert (shown["partitionCount"], shown["properties"]["sku"]["name"]) == (16, "Premium")
        assert shown["properties"]["premiumMessagingPartitions"] is None
        assert (places(bus, "wide"), places(bus, "plain")) == ((True, ALL), home)
        assert bus.caller.put(path_of("queues", "new"), {}).status == 201
        assert places(bus, "new") == (True, ALL)
        send_large(bus, "new")
    with pytest.raises(BusError, match="stays Premium, but the manifest says Standard"):
        restarted(database, folder, STANDARD)
    other = declared(sku={"name": "Premium"}, premiumMessagingPartitions=4)
    with pytest.raises(
        BusError, match="16 partitions, fixed at its creation, not 4 as in the manifest"
    ):
        restarted(database, folder, other)
    for definition in (declared(), PREMIUM):
        with controlled_bus(database, folder, definition=definition) as bus:
            shown = bus.caller.get("/v1/namespace").body
            assert (shown["partitionCount"], shown["properties"]["sku"]["name"]) == (16, "Premium")
            assert (places(bus, "wide"), places(bus, "plain")) == ((True, ALL), home)
            assert places(bus, "new") == (True, ALL)
            with client_of(bus) as client:
                second = [more + some for more, some in zip(second, taken(client, 2), strict=True)]
    wide, plain, published = (a + b for a, b in zip(first, second, strict=True))
    assert (sorted(wide), plain, sorted(published)) == (sorted(BODIES), BODIES, sorted(BODIES))


def restarted(database: str, folder: Path, definition: BusDefinition) -> None:
    with controlled_bus(database, folder, definition=definition):
        pass


@pytest.mark.behaviour("S146")
def test_the_manifest_makes_a_standard_namespace_premium(database: str, tmp_path: Path) -> None:
    folder = tmp_path / "bus"
    with controlled_bus(database, folder, definition=STANDARD) as bus:
        create(bus)
        home = places(bus, "plain")
    with controlled_bus(database, folder, definition=PREMIUM) as bus:
        assert bus.caller.get("/v1/namespace").body["partitionCount"] == 16
        assert (places(bus, "wide"), places(bus, "plain")) == ((True, ALL), home)
        changed = bus.caller.put(path_of("queues", "plain"), {"maxMessageSizeInKilobytes": 2048})
        assert changed.status == 200
        send_large(bus, "plain")
        with client_of(bus) as client:
            wide, plain, published = taken(client, len(BODIES))
        assert (sorted(wide), plain, sorted(published)) == (sorted(BODIES), BODIES, sorted(BODIES))
        lines = bus.caller.get("/v1/audit?caller=manifests").body["items"]
        found = [each["detail"] for each in lines if each["verb"] == "put namespace"]
        assert found == [{"sku": "Premium"}]


@pytest.mark.behaviour("S146")
def test_sdk_reads_the_tier_and_updates_existing_entities(database: str, tmp_path: Path) -> None:
    folder = tmp_path / "bus"
    with (
        controlled_bus(database, folder, definition=STANDARD) as bus,
        administration_of(bus, folder) as administration,
    ):
        create(bus)
        assert administration.get_namespace_properties().messaging_sku == "Standard"
        before = [administration.get_queue(name) for name in ("wide", "plain")]
        premium = {"sku": {"name": "Premium", "capacity": 4}}
        assert bus.caller.put("/v1/namespace", premium).status == 200
        seen = administration.get_namespace_properties()
        assert (seen.messaging_sku, seen.messaging_units) == ("Premium", 4)
        for queue in before:
            after = administration.get_queue(queue.name)
            assert after.max_size_in_megabytes == queue.max_size_in_megabytes
            assert after.enable_partitioning == queue.enable_partitioning
            after.max_delivery_count = 3
            administration.update_queue(after)
            again = administration.get_queue(queue.name)
            assert again.max_delivery_count == 3
            assert again.max_size_in_megabytes == queue.max_size_in_megabytes
        assert before[0].max_size_in_megabytes == 16 * 2048
        made = administration.create_queue("large", max_size_in_megabytes=81_920)
        assert (made.enable_partitioning, made.max_message_size_in_kilobytes) == (True, 1024)


def test_premium_is_never_left_and_partitions_never_change(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus", definition=STANDARD) as bus:
        caller = bus.caller
        premium = {"sku": {"name": "Premium"}}
        refused = caller.put("/v1/namespace", premium | {"premiumMessagingPartitions": 4})
        assert (refused.status, refused.kind) == (409, "immutable")
        assert "16 partitions, fixed at its creation" in refused.body["detail"]
        for tier in ("Basic", "Standard", "Premium"):
            assert caller.put("/v1/namespace", {"sku": {"name": tier}}).status == 200
            shown = caller.get("/v1/namespace").body["properties"]
            assert shown["sku"]["name"] == tier
        for tier in ("Basic", "Standard"):
            refused = caller.put("/v1/namespace", {"sku": {"name": tier}})
            assert (refused.status, refused.kind) == (409, "immutable")
            assert "stays Premium" in refused.body["detail"]
        refused = caller.put("/v1/namespace", premium | {"premiumMessagingPartitions": 2})
        assert (refused.status, refused.kind) == (409, "immutable")
        shown = caller.get("/v1/namespace").body["properties"]
        assert caller.put("/v1/namespace", shown).status == 200
        lines = caller.get("/v1/audit").body["items"]
        tiers = [each["detail"].get("sku") for each in lines if each["outcome"] == "done"]
        assert [each for each in tiers if each] == ["Premium", "Standard", "Basic"]


def test_reload_of_a_manifest_changes_the_tier(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus", definition=STANDARD) as bus:
        create(bus)
        with pytest.raises(BusError, match="16 partitions, fixed at its creation, not 4"):
            bus.run(
                bus.bus.redefine(declared(sku={"name": "Premium"}, premiumMessagingPartitions=4))
            )
        bus.run(bus.bus.redefine(PREMIUM))
        assert bus.caller.get("/v1/namespace").body["properties"]["sku"]["name"] == "Premium"
        assert bus.caller.put(path_of("queues", "new"), {}).status == 201
        send_large(bus, "new")
        with pytest.raises(BusError, match="stays Premium"):
            bus.run(bus.bus.redefine(STANDARD))
        with client_of(bus) as client:
            assert taken(client, len(BODIES))[1] == BODIES


MANIFESTS = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: test-bus}
spec:
  sku: {name: Standard}
  authorizationRules: [{name: root, rights: [Manage]}]
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: wide}
spec: {owner: {name: test-bus}, enablePartitioning: true}
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: plain}
spec: {owner: {name: test-bus}}
"""


@pytest.mark.behaviour("S146")
def test_manifests_and_exports_of_existing_entities_still_apply(
    database: str, tmp_path: Path
) -> None:
    file, exported = tmp_path / "bus.yaml", tmp_path / "exported.yaml"
    command_line = CommandLine(tmp_path)
    for tier in ("Standard", "Premium"):
        file.write_text(MANIFESTS.replace("Standard", tier))
        command_line.ok("check", str(file))
        definition = read_one_bus([file])
        with controlled_bus(database, tmp_path / "bus", definition=definition) as bus:
            assert places(bus, "wide") == (True, ALL)
            assert not places(bus, "plain")[0]
            control = ("--control", bus.caller.address, "--token-file", str(bus.token_file))
            command_line.ok("context", "set", tier, *control)
            command_line.ok("context", "use", tier)
            if tier == "Premium":
                assert bus.caller.put(path_of("queues", "new"), {}).status == 201
            command_line.ok("diff", str(file))
            exported.write_text(command_line.ok("export"))
            command_line.ok("check", str(exported))
            assert "unchanged" in command_line.ok("apply", str(exported))
            command_line.ok("diff", str(exported))
            other = file.read_text().replace(tier, "Basic")
            (tmp_path / "other.yaml").write_text(other.replace("enablePartitioning: true", ""))
            says = "stays Premium" if tier == "Premium" else "change it with PUT"
            command_line.fails("apply", str(tmp_path / "other.yaml"), code=4, says=says)


def test_entities_of_a_manifest_without_a_tier_have_the_defaults_of_the_store(
    database: str, tmp_path: Path
) -> None:
    file, folder = tmp_path / "bus.yaml", tmp_path / "bus"
    with controlled_bus(database, folder, definition=PREMIUM):
        pass
    file.write_text(MANIFESTS.replace("  sku: {name: Standard}\n", "").replace("true", "false"))
    with controlled_bus(database, folder, definition=read_one_bus([file])) as bus:
        made = bus.caller.get(path_of("queues", "plain")).body["properties"]
        assert made["maxMessageSizeInKilobytes"] == 1024
        send_large(bus, "plain")
