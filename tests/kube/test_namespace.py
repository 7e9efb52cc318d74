"""A Namespace on a real API server: what is made of it, what is said of it, what stays of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from postbus_operator.annotations import WATCH_LABEL
from postbus_operator.certificates import leaf_data, new_authority
from postbus_operator.children import desired
from postbus_operator.children.bus import Bus, Json
from postbus_operator.kube.resource_types import (
    NETWORK_POLICIES,
    RESOURCES,
    SECRETS,
    SERVICES,
    STATEFUL_SETS,
    VOLUME_CLAIMS,
)
from postbus_operator.namespaces.deletion import PURGE_AT, sweep
from postbus_operator.objects import Key
from tests.assembly.test_start_waits import starting
from tests.broker.partition.test_host import until
from tests.edge.control.control_bus import ControlledBus, controlled_bus
from tests.kube.api_server import ApiServer
from tests.kube.bus_rig import Rig, rig_on

DSN = b"postgresql://user:p%40ss@db.example.org/shop"
EXTERNAL = {
    "operatorSpec": {
        "storage": {
            "stores": [
                {
                    "name": "main",
                    "postgres": {"secretRef": {"name": "db"}, "caSecretRef": {"name": "db-ca"}},
                }
            ]
        }
    }
}


@pytest.fixture
async def rig(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with rig_on(server, monkeypatch) as made:
        yield made


@pytest.fixture
def running(database: str, tmp_path: Path) -> Iterator[ControlledBus]:
    with controlled_bus(database, tmp_path / "bus") as bus:
        yield bus


def send(bus: ControlledBus, count: int) -> None:
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_sender("declared") as sender,
    ):
        sender.send_messages([ServiceBusMessage("x") for _ in range(count)])


def operator(**fields: Any) -> dict[str, Any]:
    return {"operatorSpec": fields}


async def make_ready(rig: Rig, running: ControlledBus) -> None:
    await rig.look()
    await rig.make_claim("shop-bus-store-main", "10Gi")
    await rig.is_ready("shop-bus-store-main", "shop-bus-broker")
    rig.sessions.session = rig.session_with(running)
    await rig.look()


async def test_a_new_bus_gets_its_objects_in_one_look(rig: Rig) -> None:
    await rig.put({})
    outcome = await rig.look()
    assert outcome.has_finalizer
    for name in ("shop-bus-broker", "shop-bus-store-main"):
        assert await rig.get(STATEFUL_SETS, name) is not None
    assert await rig.get(SERVICES, "shop-bus") is not None
    assert rig.condition("Valid") == ("True", "Accepted", "the spec is valid")
    ready = rig.condition("Ready")
    assert ready is not None
    assert ready[:2] == ("False", "Provisioning")
    assert rig.condition("Stalled") is None
    assert rig.condition("Reconciling") is not None


async def test_a_bus_that_does_not_start_is_looked_at_less_and_less(rig: Rig) -> None:
    await rig.put({})
    pauses = []
    for minutes in (0, 1, 10):
        rig.later = timedelta(minutes=minutes)
        pauses.append((await rig.look()).retry_s)
    assert pauses[0] == 2
    assert pauses[1] is not None
    assert 10 < pauses[1] < 20
    assert pauses[2] == 30


async def test_a_second_look_writes_nothing(rig: Rig) -> None:
    await rig.put({})
    await rig.look()
    first = rig.outcome
    await rig.look()
    assert rig.writes == []
    assert first is not None
    assert rig.outcome is not None
    assert rig.outcome.status == first.status


async def test_a_resync_of_a_whole_bus_reads_no_secret(rig: Rig, running: ControlledBus) -> None:
    await rig.put({})
    await make_ready(rig, running)
    await rig.look()
    await rig.look()
    assert rig.requests == []


async def test_objects_of_a_whole_bus_are_compared_again_when_one_of_them_changes(
    rig: Rig, running: ControlledBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.put({})
    await make_ready(rig, running)
    await rig.look()
    compared = 0

    def counted(bus: Bus) -> list[Json]:
        nonlocal compared
        compared += 1
        return desired(bus)

    monkeypatch.setattr("postbus_operator.namespaces.reconciler.desired", counted)
    await rig.look()
    assert compared == 0
    change = {"spec": {"selector": {"app.kubernetes.io/component": "else"}}}
    await rig.request("PATCH", SERVICES, "shop-bus", change)
    await rig.look()
    assert (compared, rig.writes) == (1, ["apply"])
    await rig.look()
    await rig.look()
    assert compared == 2  # once more after the write
    await rig.delete(NETWORK_POLICIES, "shop-bus-broker")
    await rig.look()
    assert (compared, rig.writes) == (3, ["apply"])
    await rig.look()
    await rig.put(operator(networkPolicy={"enabled": False}))
    await rig.look()
    assert await rig.get(NETWORK_POLICIES, "shop-bus-broker") is None


async def test_a_bus_that_answers_is_ready(rig: Rig, running: ControlledBus) -> None:
    await rig.put(operator(softDelete={"retention": "P30D"}) | {"tags": {"team": "shop"}})
    await make_ready(rig, running)
    outcome = await rig.look()
    assert rig.condition("Ready") == ("True", "Ready", "the bus takes messages")
    assert rig.condition("StorageReady") == ("True", "Ready", "all databases answer")
    assert rig.condition("PartitionsReady") == ("True", "AllReady", "16 of 16 are ready")
    assert rig.condition("Reconciling") is None
    assert outcome.retry_s is None
    status = outcome.status
    assert status is not None
    said = status.model_dump(by_alias=True)
    assert said["serviceBusEndpoint"] == f"sb://shop-bus.{rig.namespace}.svc.cluster.local/"
    assert said["readyPartitions"] == said["desiredPartitions"] == 16
    assert said["provisioningState"] == "Succeeded"
    told = running.caller.get("/v1/namespace").body
    assert told["properties"]["softDelete"] == {"retention": "P30D"}
    assert told["properties"]["tags"] == {"team": "shop"}


async def test_applications_get_a_secret_with_the_connection_string(
    rig: Rig, running: ControlledBus
) -> None:
    await rig.put({"authorizationRules": [{"name": "app", "rights": ["Send"]}]})
    await make_ready(rig, running)
    assert rig.outcome is not None
    assert rig.outcome.status is not None
    binding = rig.outcome.status.binding
    assert binding is not None
    found = await rig.data_of(binding.name)
    assert any(b"SharedAccessKeyName=app" in each for each in found.values())
    assert rig.condition("SecretsSynced") is not None
    rig.sessions.session = None
    await rig.look()
    assert rig.outcome.status.binding == binding
    assert rig.condition("SecretsSynced") is not None


async def test_drift_is_repaired(rig: Rig) -> None:
    await rig.put({})
    await rig.look()
    change = {"spec": {"template": {"spec": {"enableServiceLinks": True}}}}
    await rig.request("PATCH", STATEFUL_SETS, "shop-bus-broker", change)
    await rig.delete(SERVICES, "shop-bus")
    await rig.look()
    assert rig.writes == ["apply", "apply"]
    found = await rig.get(STATEFUL_SETS, "shop-bus-broker")
    assert found is not None
    assert found["spec"]["template"]["spec"]["enableServiceLinks"] is False


async def test_a_rule_that_somebody_adds_to_a_policy_goes(rig: Rig) -> None:
    await rig.put({})
    await rig.look()
    before = await rig.get(NETWORK_POLICIES, "shop-bus-broker")
    assert before is not None
    wide = {"spec": {"ingress": [*before["spec"]["ingress"], {}]}}
    await rig.request("PATCH", NETWORK_POLICIES, "shop-bus-broker", wide)
    await rig.look()
    found = await rig.get(NETWORK_POLICIES, "shop-bus-broker")
    assert found is not None
    assert found["spec"] == before["spec"]


async def test_observe_names_differences_and_writes_nothing(rig: Rig) -> None:
    await rig.put({})
    await rig.look()
    await rig.delete(SERVICES, "shop-bus")
    await rig.put(operator(reconcilePolicy="Observe", networkPolicy={"enabled": False}))
    await rig.look()
    assert rig.writes == []
    drifted = rig.condition("Drifted")
    assert drifted is not None
    assert drifted[1] == "ObserveOnly"
    assert "Service shop-bus" in drifted[2]
    assert "NetworkPolicy shop-bus-broker" in drifted[2]


async def test_what_is_no_longer_wanted_goes(rig: Rig) -> None:
    await rig.put({})
    await rig.look()
    await rig.put(operator(networkPolicy={"enabled": False}))
    await rig.look()
    assert await rig.get(NETWORK_POLICIES, "shop-bus-broker") is None
    assert await rig.get(NETWORK_POLICIES, "shop-bus-store") is None


async def test_a_foreign_object_of_the_name_is_left_alone(rig: Rig) -> None:
    await rig.put_secret("shop-bus-tls", mine=b"1")
    await rig.put({})
    await rig.look()
    assert await rig.data_of("shop-bus-tls") == {"mine": b"1"}
    stalled = rig.condition("Stalled")
    assert stalled is not None
    assert stalled[1] == "NameTaken"
    assert rig.outcome is not None
    assert [each.reason for each in rig.outcome.events] == ["NameTaken"]
    await rig.look()
    assert rig.outcome.events == ()
    assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is None


# --- validity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason", "said"),
    [
        (operator(brokers=3), "BrokersUnsupported", "several brokers are not there yet"),
        ({"zoneRedundant": True}, "ZonesUnsupported", "zoneRedundant to false"),
        (
            operator(podTemplate={"env": [{"name": "POSTBUS_HOST", "value": "a"}]}),
            "InvalidSpec",
            "POSTBUS_HOST is set by the operator",
        ),
    ],
)
async def test_a_spec_that_cannot_be_is_not_valid(
    rig: Rig, spec: dict[str, Any], reason: str, said: str
) -> None:
    await rig.put(spec)
    await rig.look()
    valid, ready, stalled = map(rig.condition, ("Valid", "Ready", "Stalled"))
    assert valid is not None
    assert ready is not None
    assert stalled is not None
    assert valid[:2] == ("False", reason)
    assert said in valid[2]
    assert ready[:2] == ("False", "Invalid")
    assert rig.condition("Reconciling") is None


async def test_a_resource_of_253_characters_has_a_bus(rig: Rig) -> None:
    name = "x" * 253
    await rig.put({"entityName": "shop-bus"}, name)
    await rig.look(name)
    assert rig.condition("Valid") == ("True", "Accepted", "the spec is valid")
    assert rig.condition("Stalled") is None


async def test_what_the_api_server_refuses_is_explained(rig: Rig) -> None:
    await rig.put(operator(podTemplate={"affinity": {"nodes": "near"}}))
    await rig.look()
    stalled = rig.condition("Stalled")
    assert stalled is not None
    assert stalled[1] == "InvalidSpec"
    assert "StatefulSet shop-bus-broker" in stalled[2]
    assert "nodes" in stalled[2]


# --- secrets ------------------------------------------------------------------------------------


async def test_secrets_may_come_in_any_order(rig: Rig) -> None:
    await rig.put(EXTERNAL)
    await rig.look()
    synced = rig.condition("SecretsSynced")
    assert synced is not None
    assert synced[:2] == ("False", "SourceMissing")
    assert "Secret db is missing" in synced[2]
    assert rig.condition("Stalled") is None
    assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is None
    await rig.put_secret("db", uri=DSN)
    await rig.look()
    synced = rig.condition("SecretsSynced")
    assert synced is not None
    assert "Secret db has no key dsn" in synced[2]
    await rig.put_secret("db", dsn=DSN + b"\n")
    authority = new_authority("db", rig.now)
    await rig.put_secret("db-ca", ca_crt=authority.bundle)
    await rig.look()
    assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is not None
    stores = await rig.data_of("shop-bus-stores")
    lines = stores["stores"].decode().splitlines()
    assert lines[1:] == [
        DSN.decode() + "?sslrootcert=/etc/postbus/stores/store-main-ca.crt&sslmode=verify-full"
    ]
    assert stores["store-main-ca.crt"] == authority.bundle


@pytest.mark.parametrize(
    "dsn", [b"db.example.org", b"postgresql://a@b c/d", b"x\npostgresql://a/b"]
)
async def test_a_malformed_address_is_explained_without_it(rig: Rig, dsn: bytes) -> None:
    await rig.put(EXTERNAL)
    await rig.put_secret("db", dsn=dsn)
    await rig.look()
    stalled = rig.condition("Stalled")
    assert stalled is not None
    assert stalled[1] == "SecretInvalid"
    assert dsn.decode() not in stalled[2]


async def test_an_authority_of_a_database_must_be_one_that_has_not_expired(rig: Rig) -> None:
    await rig.put(EXTERNAL)
    await rig.put_secret("db", dsn=DSN)
    old = new_authority("db", rig.now - timedelta(days=4_000)).bundle
    for text, said in ((b"garbage", "not a certificate"), (old, "ca.crt expired at")):
        await rig.put_secret("db-ca", ca_crt=text)
        await rig.look()
        stalled = rig.condition("Stalled")
        assert stalled is not None
        assert stalled[1] == "SecretInvalid"
        assert said in stalled[2]
        assert "replace it" in stalled[2]
        assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is None
    await rig.put_secret("db-ca", ca_crt=new_authority("db", rig.now).bundle)
    await rig.look()
    assert rig.condition("Stalled") is None
    assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is not None
    rig.later += timedelta(days=4_000)
    await rig.look()
    assert "expired" in str(rig.condition("Stalled"))
    assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is not None


async def test_generated_secrets_are_good_and_stay(rig: Rig) -> None:
    await rig.put({})
    await rig.look()
    names = ["sealing-key", "ca", "control-token", "tls", "stores", "store-main-auth"]
    before = [await rig.data_of(f"shop-bus-{each}") for each in names]
    await rig.put(operator(service={"annotations": {"a": "b"}}))
    await rig.look()
    assert [await rig.data_of(f"shop-bus-{each}") for each in names] == before


async def test_a_lost_sealing_key_is_not_replaced(rig: Rig) -> None:
    await rig.put({})
    await rig.look()
    await rig.make_claim("shop-bus-store-main", "10Gi")
    key = await rig.data_of("shop-bus-sealing-key")
    await rig.delete(SECRETS, "shop-bus-sealing-key")
    await rig.look()
    stalled = rig.condition("Stalled")
    assert stalled is not None
    assert "restore it from a backup" in stalled[2]
    await rig.put_secret("shop-bus-sealing-key", key=key["key"])
    await rig.look()
    assert rig.condition("Stalled") is None


async def test_a_secret_that_lost_its_label_is_watched_again(rig: Rig) -> None:
    """Unwatched it would be read at each look, and would outlive the retention of the bus."""
    await rig.put({})
    await rig.look()
    unwatched = {"metadata": {"labels": {WATCH_LABEL: None}}}
    await rig.request("PATCH", SECRETS, "shop-bus-sealing-key", unwatched)
    await rig.look()
    found = await rig.get(SECRETS, "shop-bus-sealing-key")
    assert found is not None
    assert found["metadata"]["labels"][WATCH_LABEL] == "true"


async def test_certificates_are_renewed_in_time(rig: Rig) -> None:
    await rig.put({})
    await rig.look()
    before = await rig.data_of("shop-bus-tls")
    rig.later += timedelta(days=300)
    await rig.look()
    after = await rig.data_of("shop-bus-tls")
    assert after["tls.crt"] != before["tls.crt"]
    assert after["ca.crt"] == before["ca.crt"]


async def test_a_certificate_of_the_user_is_used_if_it_is_good(rig: Rig) -> None:
    await rig.put(operator(tls={"secretName": "mine"}))
    await rig.look()
    assert "Secret mine is missing" in str(rig.condition("SecretsSynced"))
    made = leaf_data(new_authority("mine", rig.now), ["bus.example.org"], rig.now, None)
    await rig.put_secret("mine", tls_crt=made["tls.crt"], tls_key=b"garbage")
    await rig.look()
    stalled = rig.condition("Stalled")
    assert stalled is not None
    assert stalled[1] == "SecretInvalid"
    await rig.put_secret("mine", tls_crt=made["tls.crt"], tls_key=made["tls.key"])
    await rig.look()
    assert rig.condition("Stalled") is None
    assert (await rig.data_of("shop-bus-tls"))["tls.crt"] == made["tls.crt"]


async def test_cert_manager_must_be_installed(rig: Rig) -> None:
    await rig.put(operator(tls={"issuerRef": {"name": "letsencrypt"}}))
    await rig.look()
    stalled = rig.condition("Stalled")
    assert stalled is not None
    assert stalled[1] == "NotInstalled"
    assert "cert-manager" in stalled[2]


async def test_a_broker_says_what_it_waits_for(rig: Rig, tmp_path: Path) -> None:
    """A real broker on this machine, whose database is away."""
    address = "postgresql://postbus:secret@127.0.0.1:9/postbus"
    async with starting(tmp_path, address) as start:
        await until(lambda: bool(start.waits))
        metrics = dict(start.bus.summary())["metrics"]
        rig.health_url = lambda key: metrics.replace("/metrics", "/readyz")
        await rig.put({})
        await rig.look()
        await rig.is_ready("shop-bus-store-main")
        await rig.look()
    storage = rig.condition("StorageReady")
    assert storage is not None
    assert storage[:2] == ("False", "Unreachable")
    assert "waiting for the store: the store at 127.0.0.1:9 is unavailable" in storage[2]
    assert "secret" not in storage[2]


# --- volumes ------------------------------------------------------------------------------------


async def test_a_volume_grows_or_the_reason_is_named(rig: Rig, server: ApiServer) -> None:
    for name, can_grow in (("grows", True), ("stays", False)):
        storage_class = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": "example.org/none",
            "allowVolumeExpansion": can_grow,
        }
        server.apply(f"/apis/storage.k8s.io/v1/storageclasses/{name}", storage_class)

    def spec(name: str, size: str) -> dict[str, Any]:
        stores = [{"name": "main", "managed": {"size": size, "storageClassName": name}}]
        return operator(storage={"stores": stores})

    for bus, name in (("growing", "grows"), ("staying", "stays")):
        claim = f"data-{bus}-store-main-0"
        await rig.put(spec(name, "10Gi"), bus)
        await rig.look(bus)
        await rig.make_claim(f"{bus}-store-main", "10Gi", name)
        await rig.request("PATCH", VOLUME_CLAIMS, f"{claim}/status", {"status": {"phase": "Bound"}})
        await rig.put(spec(name, "20Gi"), bus)
        await rig.look(bus)
        found = await rig.get(VOLUME_CLAIMS, claim)
        assert found is not None
        size = found["spec"]["resources"]["requests"]["storage"]
        if name == "grows":
            assert size == "20Gi"
            assert rig.condition("Stalled") is None
            await rig.look(bus)
            assert rig.writes == []
        else:
            assert size == "10Gi"
            stalled = rig.condition("Stalled")
            assert stalled is not None
            assert "allowVolumeExpansion" in stalled[2]
        template = await rig.get(STATEFUL_SETS, f"{bus}-store-main")
        assert template is not None
        (first,) = template["spec"]["volumeClaimTemplates"]
        assert first["spec"]["resources"]["requests"]["storage"] == "10Gi"


# --- deletion -----------------------------------------------------------------------------------


async def marks(rig: Rig) -> dict[str, str | None]:
    await rig.see()
    found = {}
    for name in ("sealing-key", "ca", "store-main-auth"):
        each = await rig.get(SECRETS, f"shop-bus-{name}")
        found[name] = each and each["metadata"].get("annotations", {}).get(PURGE_AT)
    claim = await rig.get(VOLUME_CLAIMS, "data-shop-bus-store-main-0")
    found["claim"] = claim and claim["metadata"].get("annotations", {}).get(PURGE_AT)
    return found


def wait_for_the_next_second() -> None:
    """Let an object be younger than those before: the API server writes whole seconds."""
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.01)


async def gone(rig: Rig) -> None:
    assert await rig.get(RESOURCES["Namespace"], "shop-bus") is None


async def test_deletion_keeps_data_for_the_retention(rig: Rig) -> None:
    await rig.put(operator(deletionPolicy="Delete", softDelete={"retention": "P2D"}))
    await rig.look()
    await rig.make_claim("shop-bus-store-main", "10Gi")
    key = await rig.data_of("shop-bus-sealing-key")
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    outcome = await rig.look()
    await gone(rig)
    assert [each.type for each in outcome.events] == ["Normal"]
    found = await marks(rig)
    assert None not in found.values()
    rig.later += timedelta(days=1)
    await sweep(rig.context)
    assert await marks(rig) == found
    # A new resource has it all, and the marks are gone.
    await rig.put(operator(deletionPolicy="Delete", softDelete={"retention": "P2D"}))
    rig.later += timedelta(days=2)
    await rig.see()
    await sweep(rig.context)
    await rig.look()
    assert set((await marks(rig)).values()) == {None}
    assert await rig.data_of("shop-bus-sealing-key") == key


async def test_a_second_look_at_a_deletion_does_not_prolong_the_retention(rig: Rig) -> None:
    """As after a crash before the finalizer went."""
    await rig.put(operator(deletionPolicy="Delete"))
    await rig.look()
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.see()
    resource = rig.cache.get(Key("Namespace", rig.namespace, "shop-bus"))
    assert resource is not None
    await rig.reconciler(rig.context, resource)
    found = await marks(rig)
    assert found["sealing-key"] is not None
    rig.later += timedelta(days=1)
    await rig.look()
    await gone(rig)
    assert await marks(rig) == found


@pytest.mark.parametrize(
    ("policy", "annotations"),
    [({"reconcilePolicy": "Observe"}, {}), ({}, {"postbus.dev/paused": "true"})],
    ids=["observed", "paused"],
)
async def test_data_of_a_bus_that_is_left_alone_has_no_end(
    rig: Rig, policy: dict[str, str], annotations: dict[str, str]
) -> None:
    await rig.put(operator(deletionPolicy="Delete"))
    await rig.look()
    await rig.put(operator(deletionPolicy="Delete", **policy), **annotations)
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.look()
    await gone(rig)
    assert set((await marks(rig)).values()) == {None}


async def test_data_goes_when_its_retention_has_ended(rig: Rig) -> None:
    await rig.put(operator(deletionPolicy="Delete"))
    await rig.look()
    await rig.make_claim("shop-bus-store-main", "10Gi")
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.look()
    await rig.see()
    rig.later += timedelta(days=8)
    await sweep(rig.context)
    assert await rig.get(SECRETS, "shop-bus-sealing-key") is not None  # the volume goes first
    await rig.see()
    await sweep(rig.context)
    assert await rig.get(SECRETS, "shop-bus-sealing-key") is None
    claim = await rig.get(VOLUME_CLAIMS, "data-shop-bus-store-main-0")
    assert claim is None or claim["metadata"]["deletionTimestamp"]


async def test_a_bus_that_is_being_deleted_gets_no_new_objects(rig: Rig) -> None:
    """Argo CD deletes children first; the bus waits for the end of its protection here."""
    await rig.put(operator(deletionProtection=True))
    await rig.look()
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.delete(STATEFUL_SETS, "shop-bus-broker")
    await rig.delete(SERVICES, "shop-bus")
    await rig.look()
    assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is None
    assert await rig.get(SERVICES, "shop-bus") is None


async def test_keys_of_an_external_database_are_never_deleted(rig: Rig) -> None:
    await rig.put(operator(**EXTERNAL["operatorSpec"], deletionPolicy="Delete"))
    await rig.look()
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.look()
    await gone(rig)
    assert (await marks(rig))["sealing-key"] is None
    assert await rig.get(SECRETS, "shop-bus-sealing-key") is not None


async def test_retain_needs_no_operator(rig: Rig) -> None:
    await rig.put(operator(deletionPolicy="Retain"))
    outcome = await rig.look()
    assert not outcome.has_finalizer
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await gone(rig)


async def test_a_protected_bus_waits(rig: Rig) -> None:
    await rig.put(operator(deletionPolicy="Retain", deletionProtection=True))
    await rig.look()
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.look()
    blocked = rig.condition("DeletionBlocked")
    assert blocked is not None
    assert "deletionProtection to false" in blocked[2]
    await rig.put(operator(deletionPolicy="Retain"))
    await rig.look()
    await gone(rig)


async def test_a_forced_deletion_asks_nobody(rig: Rig) -> None:
    await rig.put(operator(deletionProtection=True))
    await rig.look()
    await rig.delete(SECRETS, "shop-bus-ca")
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.put(operator(deletionProtection=True), **{"postbus.dev/force-release": "true"})
    await rig.look()
    assert rig.requests == []
    await gone(rig)


async def test_a_bus_with_messages_keeps_its_data_for_good(
    rig: Rig, running: ControlledBus
) -> None:
    await rig.put({})
    await make_ready(rig, running)
    await asyncio.to_thread(send, running, 3)
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    outcome = await rig.look()
    await gone(rig)
    (event,) = outcome.events
    assert (event.type, event.reason) == ("Warning", "NotEmpty")
    assert "declared (3)" in event.message
    assert set((await marks(rig)).values()) == {None}


async def test_an_empty_bus_is_closed_and_opened_by_its_next_resource(
    rig: Rig, running: ControlledBus
) -> None:
    await rig.put({})
    await make_ready(rig, running)
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.look()
    await gone(rig)
    assert None not in (await marks(rig)).values()
    told = running.caller.get("/v1/namespace").body
    assert told["isClosed"] is True
    await rig.put({})
    await rig.look()
    assert set((await marks(rig)).values()) == {None}
    await rig.is_ready("shop-bus-store-main", "shop-bus-broker")
    await rig.look()
    assert rig.condition("Ready") == ("True", "Ready", "the bus takes messages")
    await asyncio.to_thread(send, running, 1)


async def test_a_bus_that_does_not_answer_is_released_in_time(
    rig: Rig, running: ControlledBus
) -> None:
    await rig.put({})
    await make_ready(rig, running)
    rig.sessions.session = None
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.look()
    blocked = rig.condition("DeletionBlocked")
    assert blocked is not None
    assert blocked[1] == "BackendUnavailable"
    rig.later += timedelta(seconds=10)
    outcome = await rig.look()
    await gone(rig)
    assert outcome.events[0].reason == "EmptinessUnknown"
    assert set((await marks(rig)).values()) == {None}


async def test_a_bus_without_brokers_is_released_at_once(rig: Rig, running: ControlledBus) -> None:
    """As in a namespace of the cluster that is deleted: its pods go first."""
    await rig.put({})
    await make_ready(rig, running)
    rig.sessions.session = None
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.delete(STATEFUL_SETS, "shop-bus-broker")
    await rig.look()
    await gone(rig)


async def test_detached_objects_stay(rig: Rig) -> None:
    await rig.put(operator(reconcilePolicy="DetachOnDelete"))
    await rig.look()
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.look()
    await gone(rig)
    found = await rig.get(STATEFUL_SETS, "shop-bus-broker")
    assert found is not None
    assert "ownerReferences" not in found["metadata"]
    await rig.put({})
    await rig.look()
    found = await rig.get(STATEFUL_SETS, "shop-bus-broker")
    assert found is not None
    assert len(found["metadata"]["ownerReferences"]) == 1


async def test_a_bus_may_start_empty(rig: Rig) -> None:
    await rig.put(operator(deletionPolicy="Delete"))
    await rig.look()
    key = await rig.data_of("shop-bus-sealing-key")
    await rig.delete(RESOURCES["Namespace"], "shop-bus")
    await rig.look()
    await asyncio.to_thread(wait_for_the_next_second)
    await rig.put({}, **{"postbus.dev/start-empty": "true"})
    await rig.look()
    await rig.look()
    assert await rig.data_of("shop-bus-sealing-key") != key
    assert rig.condition("Stalled") is None


async def test_a_paused_bus_is_left_alone(rig: Rig) -> None:
    await rig.put({}, **{"postbus.dev/paused": "true"})
    await rig.look()
    assert rig.writes == []
    ready = rig.condition("Ready")
    assert ready is not None
    assert ready[1] == "Paused"
