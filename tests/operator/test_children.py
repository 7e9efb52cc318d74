"""Objects of a bus hold together, keep secrets out of sight and fit restricted Pod Security."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from postbus.contract.resources import NamespaceDocument
from postbus_operator.children import desired
from postbus_operator.children.broker import (
    GRACE_S,
    HAND_OVER_S,
    MANIFEST_FILE,
    PRE_STOP_S,
    environment_problem,
)
from postbus_operator.children.bus import CONTROL_PORT, Bus
from postbus_operator.children.store import max_connections
from tests.operator.buses import bus_of, buses

Json = dict[str, Any]


def of_kind(objects: list[Json], kind: str) -> dict[str, Json]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pods(objects: list[Json]) -> list[Json]:
    return [each["spec"]["template"] for each in of_kind(objects, "StatefulSet").values()]


def broker(bus: Bus) -> Json:
    found: Json = of_kind(desired(bus), "StatefulSet")[f"{bus.name}-broker"]
    return found


def container_of(stateful_set: Json) -> Json:
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    found: Json = container
    return found


def selected_by(selector: Json, labels: Json) -> bool:
    return selector.items() <= labels.items()


@given(buses)
def test_the_same_bus_gives_the_same_objects(bus: Bus) -> None:
    assert json.dumps(desired(bus)) == json.dumps(desired(bus))


@given(buses)
def test_no_two_objects_have_a_name(bus: Bus) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in desired(bus)]
    assert len(set(names)) == len(names)


@given(buses)
def test_pods_keep_to_the_restricted_standard(bus: Bus) -> None:
    """Source: Pod Security Standards, policy Restricted."""
    for pod in pods(desired(bus)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        kinds = {kind for each in spec["volumes"] for kind in each if kind != "name"}
        assert kinds <= {"secret", "configMap", "emptyDir"}
        for container in spec["containers"]:
            assert container["imagePullPolicy"] != "Always"
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container["ports"])


@given(buses)
def test_each_mount_has_its_volume_and_the_whole_of_it(bus: Bus) -> None:
    for each in of_kind(desired(bus), "StatefulSet").values():
        claims = [
            claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())
        ]
        volumes = [volume["name"] for volume in each["spec"]["template"]["spec"]["volumes"]]
        mounts = container_of(each)["volumeMounts"]
        assert sorted(mount["name"] for mount in mounts) == sorted([*volumes, *claims])
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        assert not any("subPath" in mount for mount in mounts)
        writable = {mount["name"] for mount in mounts if not mount.get("readOnly")}
        assert writable <= {"data", "tmp", "run"}


@given(buses)
def test_no_secret_is_in_an_object_besides_secrets(bus: Bus) -> None:
    objects = desired(bus)
    assert not of_kind(objects, "Secret")
    for pod in pods(objects):
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", ()):
                assert not variable.get("value", "").startswith("postgres")
                assert not {"TOKEN", "KEY", "PASSWORD"} & set(variable["name"].split("_")[-1:])


@given(buses)
def test_ports_of_services_and_policies_are_those_of_pods(bus: Bus) -> None:
    objects = desired(bus)
    for service in of_kind(objects, "Service").values():
        (pod,) = [
            each
            for each in pods(objects)
            if selected_by(service["spec"]["selector"], each["metadata"]["labels"])
        ]
        named = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    policies = of_kind(objects, "NetworkPolicy")
    for policy in policies.values():
        selector = policy["spec"]["podSelector"]["matchLabels"]
        chosen = [
            each for each in pods(objects) if selected_by(selector, each["metadata"]["labels"])
        ]
        assert chosen
        opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        for pod in chosen:
            held = {port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
            assert opened == held
    assert bool(policies) == bus.spec.operator_spec.network_policy.enabled


@given(buses)
def test_stateful_sets_select_their_own_pods_alone(bus: Bus) -> None:
    objects = desired(bus)
    services = of_kind(objects, "Service")
    for each in of_kind(objects, "StatefulSet").values():
        spec = each["spec"]
        chosen = [
            pod
            for pod in pods(objects)
            if selected_by(spec["selector"]["matchLabels"], pod["metadata"]["labels"])
        ]
        assert chosen == [spec["template"]]
        headless = services[spec["serviceName"]]
        assert headless["spec"]["clusterIP"] == "None"
        assert headless["spec"]["publishNotReadyAddresses"] is True


@given(buses)
def test_all_objects_go_with_the_resource(bus: Bus) -> None:
    for each in desired(bus):
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Namespace", bus.key.name, bus.uid)
        assert owner["blockOwnerDeletion"] is False
        assert "app.kubernetes.io/instance" not in each["metadata"]["labels"]
        for claim in each["spec"].get("volumeClaimTemplates", ()) if "spec" in each else ():
            assert "ownerReferences" not in claim["metadata"]


@given(buses)
def test_the_manifest_names_what_cannot_change_at_run_time(bus: Bus) -> None:
    config = of_kind(desired(bus), "ConfigMap")[bus.child("manifest")]
    said = json.loads(config["data"][MANIFEST_FILE])
    assert said["spec"].keys() <= {"entityName", "sku", "premiumMessagingPartitions"}
    assert said["spec"]["sku"].keys() == {"name"}
    if len(bus.bus_name) <= 50 and "." not in bus.bus_name and not bus.bus_name[0].isdigit():
        NamespaceDocument.model_validate(said)


@given(buses)
@settings(max_examples=25)
def test_a_change_that_needs_no_restart_changes_no_pod(bus: Bus) -> None:
    """What the control API, Services and policies take is not in the template."""
    changed = bus.spec.model_copy(
        update={
            "tags": {"a": "b"},
            "minimum_tls_version": "1.3",
            "public_network_access": "Disabled",
            "operator_spec": bus.spec.operator_spec.model_copy(
                update={"deletion_protection": True, "deletion_policy": "Retain"}
            ),
        }
    )
    other = Bus(bus.key, bus.uid, changed, bus.platform)
    assert pods(desired(bus)) == pods(desired(other))


def test_a_pod_has_time_for_all_steps_of_its_end() -> None:
    spec = broker(bus_of({}))["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > PRE_STOP_S + GRACE_S + HAND_OVER_S


def test_probes_ask_for_what_a_restart_can_mend() -> None:
    container = container_of(broker(bus_of({})))
    paths = {
        name: container[name]["httpGet"]["path"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 86_400


@pytest.mark.parametrize(
    ("limit", "window"),
    [(None, None), ("640Mi", 268_435_456), ("1Gi", 429_496_729), ("1Mi", 1_048_576)],
)
def test_the_window_follows_the_memory_limit(limit: str | None, window: int | None) -> None:
    limits = {} if limit is None else {"memory": limit}
    bus = bus_of({"operatorSpec": {"resources": {"limits": limits}}})
    said = {each["name"]: each.get("value") for each in container_of(broker(bus))["env"]}
    assert said.get("POSTBUS_WINDOW_BYTES") == (None if window is None else str(window))


def test_a_user_sets_no_variable_of_the_operator() -> None:
    def problem(*names: str) -> str | None:
        env = [{"name": name, "value": "x"} for name in names]
        bus = bus_of({"operatorSpec": {"podTemplate": {"env": env}}})
        return environment_problem(bus.spec.operator_spec.pod_template)

    assert problem("TZ", "POSTBUS_LOG_LEVEL") is None
    assert "POSTBUS_HOST is set by the operator" in str(problem("POSTBUS_HOST"))
    assert "TZ twice" in str(problem("TZ", "A", "TZ"))


def test_a_bus_that_is_not_public_has_no_address_outside() -> None:
    spec = {
        "publicNetworkAccess": "Disabled",
        "operatorSpec": {"service": {"type": "LoadBalancer", "loadBalancerClass": "a/b"}},
    }
    objects = desired(bus_of(spec))
    service = of_kind(objects, "Service")["shop-bus"]["spec"]
    assert service["type"] == "ClusterIP"
    assert "loadBalancerClass" not in service
    policy = of_kind(objects, "NetworkPolicy")["shop-bus-broker"]["spec"]
    assert all("from" in rule for rule in policy["ingress"])


def test_the_control_api_is_for_the_operator_in_its_namespace_alone() -> None:
    """One peer with both selectors: two peers would admit each pod of either."""
    [rule] = [
        each
        for each in of_kind(desired(bus_of({})), "NetworkPolicy")["shop-bus-broker"]["spec"][
            "ingress"
        ]
        if CONTROL_PORT in {port["port"] for port in each["ports"]}
    ]
    assert rule["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "postbus-system"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "postbus-operator"}},
        }
    ]


def test_a_store_hears_brokers_and_backups_of_its_bus_and_connects_to_nobody() -> None:
    policy = of_kind(desired(bus_of({})), "NetworkPolicy")["shop-bus-store"]["spec"]
    [rule] = policy["ingress"]
    assert all(each.keys() == {"podSelector"} for each in rule["from"])
    peers = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    assert {each["postbus.dev/bus"] for each in peers} == {"shop-bus"}
    assert {each["app.kubernetes.io/component"] for each in peers} == {"broker", "backup"}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy


def test_a_store_keeps_the_template_that_it_was_made_with() -> None:
    spec = {"operatorSpec": {"storage": {"stores": [{"name": "a", "managed": {"size": "20Gi"}}]}}}
    bus = bus_of(spec)
    made = Bus(bus.key, bus.uid, bus.spec, bus.platform, {"a": "10Gi"})
    for each, size in ((bus, "20Gi"), (made, "10Gi")):
        (claim,) = of_kind(desired(each), "StatefulSet")["shop-bus-store-a"]["spec"][
            "volumeClaimTemplates"
        ]
        assert claim["spec"]["resources"]["requests"]["storage"] == size


def test_a_store_takes_the_connections_of_two_brokers() -> None:
    """Docs: 2 for each partition + 4; other brokers and another number of them restart none."""
    standard = max_connections(bus_of({}))
    assert standard >= 2 * (2 * 16 + 4)
    assert standard == max_connections(bus_of({"sku": {"name": "Premium"}}))
    one = bus_of({"sku": {"name": "Premium"}, "premiumMessagingPartitions": 1})
    assert max_connections(one) < 32
