"""Fields of a Namespace: what clients see, and what its objects are."""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Final

import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.servicebus.management import NamespaceProperties
from e2e.tests.bus import Bus
from e2e.tests.cluster import Space
from e2e.tests.manifests import queue

NAME: Final = "dressed-bus"
HOST: Final = "bus.example.test"
OPERATOR: Final[dict[str, Any]] = {
    "resources": {"requests": {"cpu": "20m"}, "limits": {"memory": "512Mi"}},
    "podTemplate": {
        "labels": {"team": "shop"},
        "annotations": {"example.test/note": "one"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "example.test/bus", "operator": "Exists"}],
        "env": [{"name": "EXAMPLE", "value": "one"}],
    },
    "service": {"type": "NodePort", "annotations": {"example.test/note": "two"}, "names": [HOST]},
    "networkPolicy": {"enabled": False},
    "secrets": {"primaryConnectionString": {"name": "access", "key": "SERVICEBUS"}},
}


@pytest.fixture(scope="module")
def dressed(operator: None) -> Iterator[Bus]:
    """A Premium bus with all fields that one can have at once."""
    space = Space.make("dressed")
    bus = Bus.make(space, NAME, partitions=2, operator=OPERATOR)
    spec = {
        "minimumTlsVersion": "1.3",
        "tags": {"team": "shop"},
        "authorizationRules": [
            {"name": "all", "rights": ["Manage", "Send", "Listen"]},
            {"name": "listener", "rights": ["Listen"]},
        ],
    }
    space.patch(f"sbns/{NAME}", {"spec": spec})
    space.apply(queue("orders", NAME))
    try:
        bus.wait_ready()
        space.wait_ready("sbq/orders")
        yield bus
    finally:
        bus.end()
        space.close()


def pod_of(bus: Bus) -> dict[str, Any]:
    return bus.space.get(f"pod/{bus.broker}")


def test_pod_has_the_fields_of_its_template(dressed: Bus) -> None:
    pod = pod_of(dressed)
    assert pod["metadata"]["labels"]["team"] == "shop"
    assert pod["metadata"]["annotations"]["example.test/note"] == "one"
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert "example.test/bus" in [each.get("key") for each in pod["spec"]["tolerations"]]
    [container] = pod["spec"]["containers"]
    assert {"name": "EXAMPLE", "value": "one"} in container["env"]
    assert container["resources"]["limits"]["memory"] == "512Mi"
    assert container["resources"]["requests"]["cpu"] == "20m"


def test_service_has_its_type_and_annotations(dressed: Bus) -> None:
    service = dressed.space.get(f"service/{NAME}")
    assert service["spec"]["type"] == "NodePort"
    assert service["metadata"]["annotations"]["example.test/note"] == "two"
    assert {each["port"] for each in service["spec"]["ports"]} == {443, 5671, 5300}


def test_no_network_policy_where_none_is_wanted(dressed: Bus, shared: Bus) -> None:
    assert dressed.space.get("networkpolicies")["items"] == []
    assert shared.space.get("networkpolicies")["items"]


def test_partitions_are_as_many_as_the_spec_says(dressed: Bus) -> None:
    status = dressed.space.get(f"sbns/{NAME}")["status"]
    assert (status["desiredPartitions"], status["readyPartitions"]) == (2, 2)
    assert [each["id"] for each in status["partitions"]] == [0, 1]


def test_clients_see_name_and_tier(shared: Bus) -> None:
    with shared.administration() as administration:
        found: NamespaceProperties = administration.get_namespace_properties()
    assert (found.name, found.messaging_sku) == (shared.name, "Premium")


def test_certificate_has_the_further_names(dressed: Bus) -> None:
    assert HOST in names_in_certificate(dressed, ssl.TLSVersion.TLSv1_3)


def test_older_tls_is_refused(dressed: Bus, shared: Bus) -> None:
    with pytest.raises(ssl.SSLError):
        names_in_certificate(dressed, ssl.TLSVersion.TLSv1_2)
    assert names_in_certificate(shared, ssl.TLSVersion.TLSv1_2)


def names_in_certificate(bus: Bus, version: ssl.TLSVersion) -> list[str]:
    """Connect with one version of TLS, and return the names in the verified certificate."""
    data = bus.space.get(f"secret/{bus.name}-ca")["data"]["ca.crt"]
    context = ssl.create_default_context(cadata=base64.b64decode(data).decode())
    context.minimum_version = context.maximum_version = version
    host = f"{bus.name}.{bus.space.name}.svc"
    address = ("127.0.0.1", bus.local_port())
    with (
        socket.create_connection(address, timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        found: Any = secure.getpeercert()
    return [name for _, name in found["subjectAltName"]]


def test_rules_of_the_bus_are_those_of_the_spec(dressed: Bus) -> None:
    space = dressed.space
    assert space.exists(f"secret/{NAME}-bus-all")
    assert not space.exists(f"secret/{NAME}-bus-root")
    assert (
        dressed.secret("access")["SERVICEBUS"]
        == dressed.secret(f"{NAME}-bus-all")["connectionString"]
    )
    with (
        dressed.sdk(f"{NAME}-bus-listener") as client,
        client.get_queue_receiver("orders") as receiver,
    ):
        assert receiver.peek_messages() == []


def test_bus_of_the_same_queue_names_is_another_one(dressed: Bus, shared: Bus) -> None:
    shared.space.apply(queue("only-shared", shared.name))
    shared.space.wait_ready("sbq/only-shared")
    shared.send("only-shared", "here")
    with dressed.administration(f"{NAME}-bus-all") as administration:
        with pytest.raises(ResourceNotFoundError):
            administration.get_queue("only-shared")
        assert administration.get_queue("orders").name == "orders"
    assert shared.texts("only-shared", 1) == ["here"]
