"""The operator with the rights that the chart grants, and no others: each is used, none is missed.

The programs of the API server's audit log say what was asked. There are no nodes here: what
controllers and people do is done by the test.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from postbus_operator.kube.resource_types import (
    CERTIFICATES,
    CHILDREN,
    DISRUPTION_BUDGETS,
    EVENTS,
    NETWORK_POLICIES,
    RESOURCES,
    SECRETS,
    STATEFUL_SETS,
    VOLUME_CLAIMS,
    ResourceType,
)
from postbus_operator.namespaces.deletion import PURGE_AT
from tests.kube.api_server import (
    OPERATOR_TOKEN,
    ROOT,
    ApiError,
    ApiServer,
    api_server,
    missing_programs,
)
from tests.kube.conftest import DEFINITIONS, wait_until_established
from tests.kube.helm import SYSTEM, Object, Values, helm, rendered
from tests.kube.pipeline_specs import MINIMAL_PIPELINE

WAIT_S: Final = 60.0
PLACE: Final = "team-a"
BROKERS: Final = "shop-bus-broker"
STORE: Final = "shop-bus-store-main"
CLAIM: Final = f"data-{STORE}-0"
MERGE: Final = "application/merge-patch+json"
PAST: Final = "2026-01-01T00:00:00Z"
SCOPED: Final[Values] = {"rbac": {"scope": "namespace"}, "watchNamespaces": [PLACE]}

LEAST_SECRET: Final = 20
"""Characters of the shortest secret of a bus."""

Grant = tuple[str, str, str]
"""Verb, group, resource."""

BUS, ENTITIES = "postbus.dev", ("queues", "topics", "subscriptions")
UNUSED: Final[dict[str, set[Grant]]] = {
    "a conflict with another writer": {
        ("get", BUS, each) for each in ("busnamespaces", "pipelines", *ENTITIES)
    },
    "a broker that deletes idle entities": {("delete", BUS, each) for each in ENTITIES},
    "several brokers": {
        (verb, "policy", "poddisruptionbudgets") for verb in ("get", "create", "patch")
    },
    "a bus that answers, for its pipelines": {
        (verb, "batch", each)
        for each in ("jobs", "cronjobs")
        for verb in ("get", "create", "patch", "delete")
    },
    "pipelines with executors": {
        ("bind", "rbac.authorization.k8s.io", "clusterroles"),
        ("bind", "rbac.authorization.k8s.io", "roles"),
        *(
            (verb, group, each)
            for group, each in (
                ("", "serviceaccounts"),
                ("rbac.authorization.k8s.io", "rolebindings"),
            )
            for verb in ("get", "create", "patch", "delete")
        ),
    },
}
"""Rights for what does not happen here, or not always."""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A server with what helm installs, and nothing of other tests: each object is made anew."""
    missing = missing_programs()
    if missing:
        pytest.fail(f"{', '.join(missing)}: not built yet; run make kube-tools")
    with api_server() as running:
        release(running, "install", "postbus-crds", "charts/postbus-crds", "--create-namespace")
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PLACE}}
        running.apply(f"/api/v1/namespaces/{PLACE}", namespace)
        yield running


def release(server: ApiServer, *arguments: str, values: Values | None = None) -> None:
    done = helm(
        *arguments, "--namespace", SYSTEM, "--kubeconfig", str(server.kubeconfig()), values=values
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def operator(server: ApiServer, log: Path, **settings: str) -> Iterator[None]:
    """Run the operator as the account of the release."""
    environment = os.environ | {
        "KUBECONFIG": str(server.kubeconfig(OPERATOR_TOKEN)),
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("dataplane", "operator")),
        "POSTBUS_OPERATOR_LEASE_NAMESPACE": SYSTEM,
        "POSTBUS_OPERATOR_RESYNC_S": "1",
        "POSTBUS_OPERATOR_HTTP_HOST": "127.0.0.1",
        "POSTBUS_OPERATOR_HTTP_PORT": "0",
        **{f"POSTBUS_OPERATOR_{name.upper()}": value for name, value in settings.items()},
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "postbus_operator"],
            env=environment, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            yield
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait()


def wait_for(check: Callable[[], Any], what: str) -> Any:
    """Return what a check returns once it is true; what is not found is not there yet."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        try:
            found = check()
        except ApiError as error:
            if error.status != 404:
                raise
            found = None
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {WAIT_S:g} s: {what}")


def wait_until_gone(server: ApiServer, type: ResourceType, name: str) -> None:
    def is_gone() -> bool:
        try:
            return "deletionTimestamp" in get(server, type, name)["metadata"]
        except ApiError as error:
            return error.status == 404

    wait_for(is_gone, f"{name} is deleted")


def get(server: ApiServer, type: ResourceType, name: str) -> Object:
    found: Object = server.request("GET", type.path(PLACE, name))
    return found


def patch(server: ApiServer, type: ResourceType, name: str, change: Object) -> None:
    server.request("PATCH", type.path(PLACE, *name.split("/")), change, MERGE)


def put(server: ApiServer, kind: str, name: str, spec: Object) -> None:
    type = RESOURCES[kind]
    metadata = {"name": name, "namespace": PLACE}
    wanted = {"apiVersion": type.api_version, "kind": kind, "metadata": metadata, "spec": spec}
    server.apply(type.path(PLACE, name), wanted)


def has_status(server: ApiServer, kind: str, name: str) -> Any:
    return get(server, RESOURCES[kind], name).get("status", {}).get("conditions")


# --- the life of a bus --------------------------------------------------------------------------


ENTITY_NAMES: Final = (
    ("Queue", "orders"), ("Topic", "events"), ("Subscription", "billing"), ("Pipeline", "prices"),
)  # fmt: skip


def bus(size: str = "1Gi", *, has_policy: bool = True) -> Object:
    return {
        "operatorSpec": {
            "deletionPolicy": "Delete",
            "networkPolicy": {"enabled": has_policy},
            "storage": {"stores": [{"name": "main", "managed": {"size": size}}]},
        }
    }


def live_through(server: ApiServer) -> None:
    """Make a bus and entities, grow it, change it, delete it, and let its retention pass."""
    put(server, "Namespace", "shop-bus", bus())
    put(server, "Queue", "orders", {"owner": {"name": "shop-bus"}})
    put(server, "Topic", "events", {"owner": {"name": "shop-bus"}})
    put(server, "Subscription", "billing", {"owner": {"name": "events"}})
    put(server, "Pipeline", "prices", MINIMAL_PIPELINE)
    for kind, name in ENTITY_NAMES:
        wait_for(
            lambda kind=kind, name=name: has_status(server, kind, name), f"{kind} has a status"
        )
    make_claim(server, wait_for(lambda: get(server, STATEFUL_SETS, STORE), "a store"))
    make_budget(server)
    put(server, "Namespace", "shop-bus", bus("2Gi", has_policy=False))
    wait_until_gone(server, NETWORK_POLICIES, BROKERS)
    wait_until_gone(server, DISRUPTION_BUDGETS, BROKERS)

    def size() -> str:
        claim = get(server, VOLUME_CLAIMS, CLAIM)
        return str(claim["spec"]["resources"]["requests"]["storage"])

    wait_for(lambda: size() == "2Gi", "the claim grows")
    # The bus first: no broker answers here, and while the bus stays its entities wait for one.
    for kind, name in (("Namespace", "shop-bus"), *ENTITY_NAMES):
        server.request("DELETE", RESOURCES[kind].path(PLACE, name))
        wait_until_released(server, kind, name)
    for type, name in ((VOLUME_CLAIMS, CLAIM), (SECRETS, "shop-bus-sealing-key")):
        kept = get(server, type, name)
        assert kept["metadata"]["annotations"][PURGE_AT]
        patch(server, type, name, {"metadata": {"annotations": {PURGE_AT: PAST}}})
        wait_until_gone(server, type, name)


def secrets_in(server: ApiServer) -> set[str]:
    """Return texts of the Secrets of the namespace that nobody else may see, line by line."""
    return {
        line
        for each in server.request("GET", SECRETS.path(PLACE))["items"]
        for name, packed in each["data"].items()
        if name not in {"tls.crt", "ca.crt"}
        for text in (packed, base64.b64decode(packed).decode())
        for line in text.splitlines()
        if len(line) >= LEAST_SECRET and "PRIVATE KEY" not in line
    }


def make_budget(server: ApiServer) -> None:
    """Make what an operator with several brokers has left."""
    labels = get(server, STATEFUL_SETS, BROKERS)["metadata"]["labels"]
    wanted = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": BROKERS, "labels": labels},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }
    server.apply(DISRUPTION_BUDGETS.path(PLACE, BROKERS), wanted)


def make_claim(server: ApiServer, store: Object) -> None:
    """Do what the controller of StatefulSets does; its volume can grow."""
    server.apply(
        "/apis/storage.k8s.io/v1/storageclasses/growing",
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "growing"},
            "provisioner": "none",
            "allowVolumeExpansion": True,
        },
    )
    [template] = store["spec"]["volumeClaimTemplates"]
    metadata = {"name": CLAIM, "labels": template["metadata"]["labels"]}
    spec = template["spec"] | {"storageClassName": "growing"}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
    server.request("POST", VOLUME_CLAIMS.path(PLACE), claim | {"spec": spec})
    bound = {"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}}
    patch(server, VOLUME_CLAIMS, f"{CLAIM}/status", bound)


def wait_until_released(server: ApiServer, kind: str, name: str) -> None:
    """A finalizer of the operator would hold it."""

    def is_released() -> bool:
        try:
            get(server, RESOURCES[kind], name)
        except ApiError as error:
            return error.status == 404
        return False

    wait_for(is_released, f"{kind} {name} is released")


# --- what was asked -----------------------------------------------------------------------------


def granted(values: Values) -> set[Grant]:
    """Return the rights of the operator's own roles."""
    return {
        (verb, group, resource)
        for each in rendered(values)
        if each["kind"] in {"ClusterRole", "Role"}
        and each["metadata"]["name"] in {"postbus-operator", "postbus-operator-lease"}
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def asked(requests: list[Object]) -> set[Grant]:
    """Return the rights that requests needed; an apply that creates needs two."""
    found = set()
    for each in requests:
        target = each.get("objectRef")
        if target is None:  # discovery
            continue
        resource = "/".join(filter(None, (target["resource"], target.get("subresource"))))
        group = target.get("apiGroup", "")
        found.add((each["verb"], group, resource))
        if each["verb"] == "patch" and each.get("responseStatus", {}).get("code") == 201:
            found.add(("create", group, resource))
    return found


def refused(requests: list[Object]) -> list[str]:
    return [
        f"{each['verb']} {each['requestURI']}"
        for each in requests
        if each.get("responseStatus", {}).get("code") in {401, 403}
    ]


def shown(server: ApiServer, log: Path) -> dict[str, str]:
    """Return all texts that others than readers of Secrets may see, by where they are."""
    release = ("--namespace", SYSTEM, "--kubeconfig", str(server.kubeconfig()))
    paths = [type.path(PLACE) for type in (*RESOURCES.values(), *CHILDREN) if type is not SECRETS]
    values = helm("get", "all", "postbus", *release)
    assert values.returncode == 0, values.stderr
    return {
        "log": log.read_text(encoding="utf-8"),
        "audit": (server.folder / "audit.jsonl").read_text(encoding="utf-8"),
        "helm": values.stdout,
        "events": json.dumps(server.request("GET", EVENTS.path(PLACE))),
        **{path: json.dumps(server.request("GET", path)) for path in paths},
    }


@pytest.mark.parametrize("values", [{}, SCOPED], ids=["cluster", "namespace"])
def test_each_right_is_used_and_none_is_missed(
    server: ApiServer, tmp_path: Path, values: Values
) -> None:
    release(server, "install", "postbus", "charts/postbus", values=values)
    settings = {"namespaces": PLACE} if values else {}
    with operator(server, tmp_path / "log", **settings):
        live_through(server)
    requests = server.audit()
    assert refused(requests) == []
    used, allowed = asked(requests), granted(values)
    assert used <= allowed
    assert allowed - used <= set().union(*UNUSED.values())
    assert (("watch", "", "namespaces") in used) is not bool(values)


def test_each_right_for_certificates_is_used_and_none_is_missed(
    server: ApiServer, tmp_path: Path
) -> None:
    values: Values = SCOPED | {"rbac": {"scope": "namespace", "certManager": True}}
    define_certificates(server)
    release(server, "install", "postbus", "charts/postbus", values=values)
    with operator(server, tmp_path / "log", namespaces=PLACE):
        tls = {"issuerRef": {"name": "letsencrypt"}}
        put(server, "Namespace", "shop-bus", {"operatorSpec": {"tls": tls}})
        wait_for(lambda: get(server, CERTIFICATES, "shop-bus-tls"), "a certificate")
    requests = server.audit()
    assert refused(requests) == []
    used, allowed = (
        {each for each in found if each[1] == CERTIFICATES.group}
        for found in (asked(requests), granted(values))
    )
    assert used == allowed


def define_certificates(server: ApiServer) -> None:
    """Define the kind of cert-manager, with any fields."""
    name = f"{CERTIFICATES.plural}.{CERTIFICATES.group}"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True}
    wanted = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {
            "group": CERTIFICATES.group,
            "scope": "Namespaced",
            "names": {"kind": CERTIFICATES.kind, "plural": CERTIFICATES.plural},
            "versions": [version | {"schema": {"openAPIV3Schema": schema}}],
        },
    }
    server.apply(f"{DEFINITIONS}/{name}", wanted)
    wait_until_established(server, name)


def test_no_secret_is_in_logs_events_statuses_audit_or_values(
    server: ApiServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    release(server, "install", "postbus", "charts/postbus", values=SCOPED)
    with operator(server, log, namespaces=PLACE, log_level="debug"):
        put(server, "Namespace", "own-bus", bus())
        put(server, "Queue", "mine", {"owner": {"name": "own-bus"}})
        wait_for(lambda: get(server, STATEFUL_SETS, "own-bus-broker"), "brokers")
        wait_for(lambda: has_status(server, "Queue", "mine"), "a status")
        secrets = secrets_in(server)
        texts = shown(server, log)
    assert len(secrets) > 10
    assert "own-bus-stores" in texts["audit"]
    assert {
        (place, secret) for place, text in texts.items() for secret in secrets if secret in text
    } == set()
