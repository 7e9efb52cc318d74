"""A real API server takes all objects of generated buses, and returns them as they were wanted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from postbus_operator.children import desired
from postbus_operator.children.bus import Bus
from postbus_operator.children.comparison import is_current, with_digest
from postbus_operator.kube.resource_types import type_of
from postbus_operator.kube.slimming import slim
from tests.kube.api_server import ApiError, ApiServer
from tests.operator.buses import bus_of, buses

Json = dict[str, Any]
NAMESPACE = "apps"


@pytest.fixture(scope="module")
def apps(server: ApiServer) -> ApiServer:
    """A cluster namespace that admits pods of the restricted standard only."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    wanted = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": labels},
    }
    server.apply(f"/api/v1/namespaces/{NAMESPACE}", wanted)
    return server


def put(server: ApiServer, wanted: Json, *, is_dry: bool = True) -> Json:
    path = type_of(wanted).path(wanted["metadata"]["namespace"], wanted["metadata"]["name"])
    stored: Json = server.apply(path, wanted, is_dry=is_dry)
    return stored


def test_objects_of_generated_buses_are_accepted_and_returned_as_they_are(apps: ApiServer) -> None:
    @settings(
        max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(buses)
    def accepted(bus: Bus) -> None:
        for each in desired(bus):
            wanted = with_digest(each)
            assert is_current(slim(put(apps, wanted)), wanted)

    accepted()


def test_pods_of_generated_buses_keep_to_the_restricted_standard(apps: ApiServer) -> None:
    @settings(
        max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(buses)
    def admitted(bus: Bus) -> None:
        for each in desired(bus):
            if each["kind"] != "StatefulSet":
                continue
            template = each["spec"]["template"]
            claims = each["spec"].get("volumeClaimTemplates", ())
            volumes = [
                {"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": "a"}}
                for claim in claims
            ]
            spec = {**template["spec"], "volumes": [*template["spec"]["volumes"], *volumes]}
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**template["metadata"], "name": "one", "namespace": NAMESPACE},
                "spec": spec,
            }
            query = "?dryRun=All&fieldValidation=Strict"
            apps.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods{query}", pod)

    admitted()


@pytest.mark.parametrize("back", [False, True])
def test_the_strategy_of_an_upgrade_can_change(apps: ApiServer, back: bool) -> None:
    kinds = ["RollingUpdate", "OnDelete"]
    for each in reversed(kinds) if back else kinds:
        spec = {"operatorSpec": {"upgradeStrategy": {"type": each}}}
        bus = bus_of(spec, f"strategy-{back}".lower())
        (wanted,) = [
            with_digest(found)
            for found in desired(bus)
            if found["metadata"]["name"] == bus.child("broker") and found["kind"] == "StatefulSet"
        ]
        stored = put(apps, wanted, is_dry=False)
        assert stored["spec"]["updateStrategy"]["type"] == each
        assert is_current(slim(stored), wanted)


def test_a_store_that_grows_keeps_its_template(apps: ApiServer) -> None:
    def store(size: str, made: dict[str, str]) -> Json:
        found = {"name": "a", "managed": {"size": size}}
        bus = bus_of({"operatorSpec": {"storage": {"stores": [found]}}}, "growing")
        bus = Bus(bus.key, bus.uid, bus.spec, bus.platform, made)
        (wanted,) = [
            each
            for each in desired(bus)
            if each["metadata"]["name"] == "growing-store-a" and each["kind"] == "StatefulSet"
        ]
        return wanted

    put(apps, store("10Gi", {}), is_dry=False)
    stored = put(apps, store("20Gi", {"a": "10Gi"}), is_dry=False)
    (claim,) = stored["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"


def test_unlabelled_namespaces_of_the_tests_enforce_the_restricted_standard(
    server: ApiServer,
) -> None:
    container = {"name": "any", "image": "any"}
    pod = {"metadata": {"name": "any"}, "spec": {"containers": [container]}}
    with pytest.raises(ApiError, match="violates PodSecurity"):
        server.request("POST", "/api/v1/namespaces/default/pods?dryRun=All", pod)
