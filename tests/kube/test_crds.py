"""Custom resource definitions on a real API server: what they refuse, in which words.

Each rule of `postbus_operator.crds` has a case here that only it refuses; a test counts them.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from postbus.cli.formats.manifest_text import manifests_of
from postbus_operator.crds import GROUP, KINDS, VERSION
from tests.cli.test_cli_import import whole_bus
from tests.kube.api_server import BIN, ApiError, ApiServer
from tests.kube.conftest import CRDS
from tests.kube.pipeline_specs import (
    ACCEPTED_PIPELINE_CHANGES,
    ACCEPTED_PIPELINES,
    MINIMAL_PIPELINE,
    REFUSED_PIPELINE_CHANGES,
    REFUSED_PIPELINES,
)

PLURALS: Final = {kind.name: kind.plural for kind in KINDS}
NUMBERS: Final = itertools.count(1)
LABEL: Final = {"app": "x"}

Spec = dict[str, Any]
MINIMAL: Final[dict[str, Spec]] = {
    "Namespace": {},
    "Queue": {"owner": {"name": "shop-bus"}},
    "Topic": {"owner": {"name": "shop-bus"}},
    "Subscription": {"owner": {"name": "events"}},
    "Pipeline": MINIMAL_PIPELINE,
}


def path_of(kind: str, name: str = "") -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/default/{PLURALS[kind]}/{name}".rstrip("/")


def resource(kind: str, spec: Spec, name: str = "") -> dict[str, Any]:
    """Return a resource; a field that is None is left out."""
    fields = {name: value for name, value in (MINIMAL[kind] | spec).items() if value is not None}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": kind,
        "metadata": {"name": name or f"{kind.lower()}-{next(NUMBERS)}"},
        "spec": fields,
    }


def put(server: ApiServer, wanted: dict[str, Any], *, is_dry: bool = True) -> dict[str, Any]:
    path = path_of(wanted["kind"], wanted["metadata"]["name"])
    stored: dict[str, Any] = server.apply(path, wanted, is_dry=is_dry)
    return stored


def refusal(server: ApiServer, wanted: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        put(server, wanted)
    assert caught.value.status in {422, 500}, caught.value  # 500: server-side apply, unknown field
    return caught.value.message


def operator(**fields: Any) -> Spec:
    return {"operatorSpec": fields}


def stores(*each: Spec) -> Spec:
    return operator(storage={"stores": list(each)})


def managed(name: str = "main", **fields: Any) -> Spec:
    return {"name": name, "managed": fields}


def rule(name: str = "one", **fields: Any) -> Spec:
    return {"rules": [{"name": name, **fields}]}


SQL: Final = {"sqlExpression": "a = 1"}
PREMIUM: Final = {"sku": {"name": "Premium"}}
PREMIUM_OF_ONE: Final = PREMIUM | {"premiumMessagingPartitions": 1}
DSN: Final = {"secretRef": {"name": "db"}}

# kind, spec, part of the error
REFUSED: Final = [
    # durations
    ("Queue", {"lockDuration": "PT4.999S"}, "must be between PT5S and PT5M"),
    ("Queue", {"lockDuration": "PT5M0.5S"}, "must be between PT5S and PT5M"),
    ("Queue", {"lockDuration": "P1D"}, "must be between PT5S and PT5M"),
    ("Queue", {"lockDuration": "PT"}, "use an ISO 8601 duration"),
    ("Queue", {"lockDuration": "P"}, "use an ISO 8601 duration"),
    ("Queue", {"lockDuration": "PT1M\n"}, "should match"),
    ("Queue", {"lockDuration": 60}, "expected string"),
    ("Queue", {"defaultMessageTimeToLive": "PT0.9S"}, "must be at least PT1S"),
    ("Queue", {"autoDeleteOnIdle": "PT4M59S"}, "must be at least PT5M"),
    (
        "Queue",
        {"duplicateDetectionHistoryTimeWindow": "PT19.9999999S"},
        "must be between PT20S and P7D",
    ),
    ("Queue", operator(history={"retention": "P91D"}), "must be between PT1M and P90D"),
    ("Namespace", operator(softDelete={"retention": "PT1S"}), "must be between PT1M and P90D"),
    # names
    ("Queue", {"entityName": "/orders"}, "should match"),
    ("Queue", {"entityName": "orders/"}, "should match"),
    ("Queue", {"entityName": "$orders"}, "should match"),
    ("Queue", {"entityName": "x" * 261}, "260"),
    ("Queue", {"entityName": "a//b"}, "entityName has no empty part"),
    ("Topic", {"entityName": "t/Subscriptions/s"}, "does not look like the path of a subscription"),
    ("Subscription", {"entityName": "x" * 51}, "50"),
    ("Subscription", {"entityName": "a/b"}, "should match"),
    ("Namespace", {"entityName": "short"}, "should match"),
    ("Namespace", {"entityName": "1-shop-bus"}, "should match"),
    ("Namespace", {"authorizationRules": [{"name": "a b", "rights": ["Send"]}]}, "should match"),
    (
        "Queue",
        {"authorizationRules": [{"name": "a", "rights": ["Send"], "secretName": ".."}]},
        "match",
    ),
    # values
    ("Queue", {"owner": None}, "spec.owner"),
    ("Queue", {"maxDeliveryCount": 0}, "greater than or equal to 1"),
    ("Queue", {"maxDeliveryCount": 2**31}, "maxDeliveryCount"),
    ("Queue", {"maxSizeInMegabytes": 1500}, "supported values"),
    ("Queue", {"maxMessageSizeInKilobytes": 256}, "greater than or equal to 1024"),
    ("Queue", {"status": "Paused"}, "supported values"),
    ("Queue", {"userMetadata": "x" * 1_025}, "1024"),
    ("Queue", {"lockDurations": "PT1M"}, "lockDurations"),
    ("Queue", operator(deletionPolicy="Purge"), "supported values"),
    ("Queue", operator(brokers=1), "brokers"),
    ("Namespace", {"sku": {"name": "Gold"}}, "supported values"),
    ("Namespace", {**PREMIUM, "premiumMessagingPartitions": 3}, "supported values"),
    ("Namespace", {"minimumTlsVersion": "1.1"}, "supported values"),
    ("Namespace", operator(brokers=0), "greater than or equal to 1"),
    ("Namespace", operator(brokers=17), "less than or equal to 16"),
    ("Namespace", operator(resources={"requests": {"cpu": "many"}}), "should match"),
    ("Namespace", operator(storage={"stores": []}), "should have at least 1 items"),
    (
        "Namespace",
        {"authorizationRules": [{"name": "a", "rights": ["Send"]}] * 2},
        "duplicate",
    ),
    ("Subscription", {"rules": [{"name": "a", "sqlFilter": SQL}] * 2}, "duplicate"),
    (
        "Subscription",
        {"rules": [{"name": f"r{number}", "sqlFilter": SQL} for number in range(101)]},
        "at most 100 items",
    ),
    # rules in CEL
    ("Queue", {"requiresSession": True, "forwardTo": "other"}, "cannot forward its messages"),
    (
        "Subscription",
        {"requiresSession": True, "forwardTo": "other"},
        "cannot forward its messages",
    ),
    ("Queue", {"entityName": "Orders", "forwardTo": "orders"}, "forwardTo names the queue itself"),
    (
        "Queue",
        {"entityName": "Orders", "forwardDeadLetteredMessagesTo": "orders"},
        "forwardDeadLetteredMessagesTo names the queue itself",
    ),
    ("Subscription", {"forwardTo": "Events"}, "forwardTo names the subscription's own topic"),
    (
        "Subscription",
        {"forwardDeadLetteredMessagesTo": "events"},
        "forwardDeadLetteredMessagesTo names the subscription's own topic",
    ),
    ("Subscription", {"isClientAffine": True}, "subscriptions of one client are not available yet"),
    (
        "Subscription",
        {"clientAffineProperties": {"clientId": "a"}},
        "subscriptions of one client are not available yet",
    ),
    ("Subscription", rule(), "set either sqlFilter or correlationFilter"),
    (
        "Subscription",
        rule(sqlFilter=SQL, correlationFilter={"label": "a"}),
        "set either sqlFilter or correlationFilter",
    ),
    (
        "Subscription",
        rule(filterType="TrueFilter", correlationFilter={"label": "a"}),
        "set either sqlFilter or correlationFilter",
    ),
    (
        "Subscription",
        rule(filterType="SqlFilter", correlationFilter={"label": "a"}),
        "filterType must name the filter that the rule has",
    ),
    ("Subscription", rule(filterType="TrueFilter", sqlFilter=SQL), "a TrueFilter has no other"),
    (
        "Subscription",
        rule(filterType="FalseFilter", sqlFilter={"sqlExpression": "1=1"}),
        "a FalseFilter no other than 1=0",
    ),
    (
        "Subscription",
        rule(correlationFilter={"properties": {}}),
        "should have at least 1 properties",
    ),
    ("Subscription", rule(correlationFilter={}), "should have at least 1 properties"),
    ("Topic", operator(history={"retention": "P1D"}), "a topic stores no messages"),
    ("Namespace", {"premiumMessagingPartitions": 2}, "only Premium can set its partitions"),
    ("Namespace", {"sku": {"name": "Basic", "tier": "Premium"}}, "tier must equal"),
    ("Namespace", {"sku": {"name": "Standard", "capacity": 2}}, "only Premium has a capacity"),
    ("Namespace", {"disableLocalAuth": True}, "signing in without a key is not available yet"),
    ("Namespace", {"alternateName": "old-bus"}, "an alternate name is not available yet"),
    (
        "Namespace",
        PREMIUM | {"premiumMessagingPartitions": 2} | operator(brokers=3),
        "set at most one broker for each partition",
    ),
    (
        "Namespace",
        PREMIUM | {"premiumMessagingPartitions": 1} | stores(managed("a"), managed("b")),
        "set at most one store for each partition",
    ),
    (
        "Namespace",
        operator(allowedNamespaces={"from": "Selector"}),
        "set selector together with from: Selector",
    ),
    (
        "Namespace",
        operator(allowedNamespaces={"from": "All", "selector": {"matchLabels": LABEL}}),
        "set selector together with from: Selector",
    ),
    (
        "Namespace",
        operator(
            allowedNamespaces={
                "from": "Selector",
                "selector": {"matchExpressions": [{"key": "a", "operator": "In"}]},
            }
        ),
        "In and NotIn need values",
    ),
    ("Namespace", stores({"name": "a"}), "set either postgres or managed"),
    (
        "Namespace",
        stores({"name": "a", "managed": {}, "postgres": DSN}),
        "set either postgres or managed",
    ),
    (
        "Namespace",
        operator(podTemplate={"env": [{"name": "A", "value": "1", "valueFrom": {}}]}),
        "set either value or valueFrom",
    ),
    (
        "Namespace",
        operator(podTemplate={"env": [{"name": "A", "valueFrom": {}}]}),
        "set either secretKeyRef or configMapKeyRef",
    ),
    (
        "Namespace",
        operator(service={"loadBalancerClass": "example.com/lb"}),
        "loadBalancerClass needs type: LoadBalancer",
    ),
    (
        "Namespace",
        operator(tls={"secretName": "a", "issuerRef": {"name": "b"}}),
        "set either secretName or issuerRef",
    ),
    *(("Pipeline", spec, said) for spec, said in REFUSED_PIPELINES),
]

# kind, spec before, spec after, part of the error
REFUSED_CHANGES: Final = [
    ("Queue", {"owner": {"name": "a"}}, {"owner": {"name": "b"}}, "owner cannot be changed"),
    (
        "Queue",
        {"owner": {"name": "a"}},
        {"owner": {"name": "a", "namespace": "b"}},
        "owner cannot be changed",
    ),
    (
        "Queue",
        {"owner": {"name": "a", "namespace": "b"}},
        {"owner": {"name": "a"}},
        "owner cannot be changed",
    ),
    ("Queue", {}, {"entityName": "other"}, "entityName cannot be changed"),
    ("Queue", {"entityName": "other"}, {}, "entityName cannot be changed"),
    ("Topic", {"entityName": "a"}, {"entityName": "b"}, "entityName cannot be changed"),
    ("Namespace", {"entityName": "shop-a"}, {"entityName": "shop-b"}, "entityName cannot be"),
    ("Queue", {}, {"requiresSession": True}, "requiresSession cannot be changed"),
    ("Queue", {"requiresSession": True}, {}, "requiresSession cannot be changed"),
    ("Subscription", {}, {"requiresSession": True}, "requiresSession cannot be changed"),
    (
        "Queue",
        {},
        {"requiresDuplicateDetection": True},
        "requiresDuplicateDetection cannot be changed",
    ),
    (
        "Topic",
        {},
        {"requiresDuplicateDetection": True},
        "requiresDuplicateDetection cannot be changed",
    ),
    ("Queue", {}, {"enablePartitioning": True}, "enablePartitioning cannot be changed"),
    ("Topic", {"enablePartitioning": True}, {}, "enablePartitioning cannot be changed"),
    (
        "Namespace",
        PREMIUM | {"premiumMessagingPartitions": 2},
        PREMIUM | {"premiumMessagingPartitions": 4},
        "the number of partitions is fixed",
    ),
    ("Namespace", PREMIUM, PREMIUM | {"premiumMessagingPartitions": 2}, "is fixed"),
    ("Namespace", PREMIUM | {"premiumMessagingPartitions": 2}, PREMIUM, "is fixed"),
    ("Namespace", PREMIUM, {"sku": {"name": "Standard"}}, "Premium cannot be left"),
    ("Namespace", PREMIUM, {}, "Premium cannot be left"),
    (
        "Namespace",
        stores(managed("a"), managed("b")),
        stores(managed("b"), managed("a")),
        "number, names and order of stores are fixed",
    ),
    (
        "Namespace",
        {},
        stores(managed("main"), managed("more")),
        "number, names and order of stores are fixed",
    ),
    (
        "Namespace",
        stores(managed("a")),
        stores({"name": "a", "postgres": DSN}),
        "a store stays managed or not",
    ),
    (
        "Namespace",
        stores({"name": "a", "postgres": DSN}),
        stores(managed("a")),
        "a store stays managed or not",
    ),
    (
        "Namespace",
        stores(managed("a", size="10Gi")),
        stores(managed("a", size="9000Mi")),
        "a volume cannot shrink",
    ),
    (
        "Namespace",
        stores(managed("a")),
        stores(managed("a", storageClassName="fast")),
        "the storage class of a volume cannot be changed",
    ),
    (
        "Namespace",
        stores(managed("a", storageClassName="fast")),
        stores(managed("a")),
        "the storage class of a volume cannot be changed",
    ),
    *(("Pipeline", before, after, said) for before, after, said in REFUSED_PIPELINE_CHANGES),
]

ACCEPTED: Final = [
    ("Queue", {}),
    ("Queue", {"lockDuration": "PT5M0S"}),
    ("Queue", {"lockDuration": "PT5S", "duplicateDetectionHistoryTimeWindow": "PT20S"}),
    ("Queue", {"autoDeleteOnIdle": "PT5M", "defaultMessageTimeToLive": "PT1S"}),
    (
        "Queue",
        {"duplicateDetectionHistoryTimeWindow": "P7D"} | operator(history={"retention": "P90D"}),
    ),
    ("Queue", {"lockDuration": "PT300.0S", "defaultMessageTimeToLive": "P10675199D"}),
    ("Queue", {"entityName": "Shop/Orders_1~x"}),
    ("Queue", {"forwardTo": "events", "forwardDeadLetteredMessagesTo": "dead"}),
    ("Queue", {"enableExpress": True, "status": "SendDisabled"}),
    ("Queue", {"maxDeliveryCount": 2_147_483_647, "maxMessageSizeInKilobytes": 102_400}),
    ("Queue", operator(history={"retention": "P7D"}, onAutoDelete="Recreate", adopt="Always")),
    ("Topic", {"supportOrdering": False}),
    ("Subscription", {"rules": []}),
    ("Subscription", rule("$Default", filterType="TrueFilter")),
    ("Subscription", rule(filterType="FalseFilter", sqlFilter={"sqlExpression": "1=0"})),
    ("Subscription", rule(sqlFilter=SQL | {"parameters": {"@a": 1, "b": {"duration": "PT5M"}}})),
    ("Subscription", rule(correlationFilter={"properties": {"a": True, "b": 1.5, "c": "x"}})),
    ("Subscription", rule(sqlFilter=SQL, action={"sqlExpression": "SET a = 2"})),
    ("Subscription", {"forwardTo": "events2", "duplicateDetectionHistoryTimeWindow": "PT1M"}),
    ("Namespace", {"zoneRedundant": True, "tags": {"team": "shop"}}),
    ("Namespace", PREMIUM | operator(brokers=16)),
    ("Namespace", stores({"name": "a", "postgres": DSN | {"sslMode": "verify-full"}})),
    ("Namespace", operator(podDisruptionBudget={"maxUnavailable": "50%"})),
    ("Namespace", operator(resources={"limits": {"memory": "1Gi", "cpu": 2}})),
    *(("Pipeline", spec) for spec in ACCEPTED_PIPELINES),
]

ACCEPTED_CHANGES: Final = [
    ("Queue", {}, {"lockDuration": "PT30S", "forwardTo": "other"}),
    ("Queue", {"status": "Disabled"}, {}),
    ("Namespace", {"sku": {"name": "Basic"}}, {"sku": {"name": "Standard"}}),
    ("Namespace", {"sku": {"name": "Standard"}}, {"sku": {"name": "Basic"}}),
    ("Namespace", {}, PREMIUM | operator(brokers=2)),
    (
        "Namespace",
        stores(managed("a", size="10Gi")),
        stores(managed("a", size="0.5Ti")),
    ),
    (
        "Namespace",
        stores({"name": "a", "postgres": DSN}),
        stores({"name": "a", "postgres": {"secretRef": {"name": "other", "key": "uri"}}}),
    ),
    *(("Pipeline", before, after) for before, after in ACCEPTED_PIPELINE_CHANGES),
]


def test_definitions_are_stored_as_they_are_written(
    definitions: dict[str, dict[str, Any]],
) -> None:
    """Otherwise GitOps tools see a difference for ever."""
    for file, stored in definitions.items():
        wanted = yaml.safe_load((CRDS / file).read_text())
        assert stored["spec"] == wanted["spec"], file
        conditions = {each["type"] for each in stored["status"]["conditions"]}
        assert "NonStructuralSchema" not in conditions


def test_kubectl_applies_them_on_the_client_s_side_without_a_difference(
    server: ApiServer,
) -> None:
    applied = kubectl(server, "apply", "--filename", str(CRDS))
    assert applied.returncode == 0, applied.stderr
    different = kubectl(server, "diff", "--filename", str(CRDS))
    assert (different.returncode, different.stdout) == (0, "")


def kubectl(server: ApiServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [BIN / "kubectl", f"--kubeconfig={server.kubeconfig()}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_kubectl_knows_short_names_columns_and_descriptions(server: ApiServer) -> None:
    put(server, resource("Queue", {}, "explained"), is_dry=False)
    shown = kubectl(server, "get", "sbq", "explained").stdout
    assert shown.split()[:7] == ["NAME", "READY", "REASON", "BUS", "STATUS", "ACTIVE", "DLQ"]
    assert "shop-bus" in shown
    explained = kubectl(server, "explain", "sbq.spec.lockDuration").stdout
    assert "Time that a receiver has for a message" in explained
    # The API server's own Namespace stays what `kubectl get namespace` means.
    assert "default" in kubectl(server, "get", "namespace").stdout


@pytest.mark.parametrize(("kind", "spec"), ACCEPTED)
def test_spec_is_accepted(server: ApiServer, kind: str, spec: Spec) -> None:
    stored = put(server, resource(kind, spec))
    assert contains(stored["spec"], {name: each for name, each in spec.items() if each is not None})


def contains(stored: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return all(contains(stored[name], each) for name, each in wanted.items())
    if isinstance(wanted, list):
        return all(contains(a, b) for a, b in zip(stored, wanted, strict=True))
    return bool(stored == wanted)


@pytest.mark.parametrize(("kind", "spec", "said"), REFUSED)
def test_spec_is_refused(server: ApiServer, kind: str, spec: Spec, said: str) -> None:
    assert said in refusal(server, resource(kind, spec))


@pytest.mark.parametrize(("kind", "before", "after", "said"), REFUSED_CHANGES)
def test_change_is_refused(
    server: ApiServer, kind: str, before: Spec, after: Spec, said: str
) -> None:
    wanted = resource(kind, before)
    put(server, wanted, is_dry=False)
    changed = copy.deepcopy(wanted) | {"spec": resource(kind, after)["spec"]}
    assert said in refusal(server, changed)


@pytest.mark.parametrize(("kind", "before", "after"), ACCEPTED_CHANGES)
def test_change_is_accepted(server: ApiServer, kind: str, before: Spec, after: Spec) -> None:
    wanted = resource(kind, before)
    put(server, wanted, is_dry=False)
    put(server, copy.deepcopy(wanted) | {"spec": resource(kind, after)["spec"]}, is_dry=False)


def test_every_rule_has_a_case() -> None:
    """A rule that several kinds share is tried with one of them."""
    cases = [(kind, said) for kind, _, said in REFUSED]
    cases += [(kind, said) for kind, _, _, said in REFUSED_CHANGES]
    rules = {rule for kind in KINDS for rule in kind.rules if "metadata" not in rule.expression}
    tried = {
        rule
        for rule in rules
        for kind in KINDS
        if rule in kind.rules
        and any(said in rule.message for each, said in cases if each == kind.name)
    }
    assert rules - tried == set()


@pytest.mark.parametrize(
    ("kind", "spec", "field"),
    [
        ("Queue", {"entityName": "orders", "forwardTo": "orders"}, "spec.forwardTo"),
        ("Subscription", {"forwardTo": "events"}, "spec.forwardTo"),
        ("Subscription", rule(filterType="SqlFilter"), "spec.rules[0].filterType"),
        ("Namespace", {"sku": {"name": "Basic", "capacity": 2}}, "spec.sku.capacity"),
        ("Namespace", operator(brokers=16) | PREMIUM_OF_ONE, "spec.operatorSpec.brokers"),
        ("Pipeline", {"owner": None}, "spec.owner"),
        ("Pipeline", {"checkpoint": {"path": "lake"}}, "spec.checkpoint.path"),
    ],
)
def test_refusal_names_the_field(server: ApiServer, kind: str, spec: Spec, field: str) -> None:
    assert f"{field}: Invalid value" in refusal(server, resource(kind, spec))


def test_queue_without_a_name_of_its_own_does_not_forward_to_itself(server: ApiServer) -> None:
    wanted = resource("Queue", {"forwardTo": "Orders"}, "orders")
    assert "forwardTo names the queue itself" in refusal(server, wanted)


def test_long_name_of_a_subscription_needs_a_shorter_one(server: ApiServer) -> None:
    name = "x" * 51
    assert "set spec.entityName" in refusal(server, resource("Subscription", {}, name))
    put(server, resource("Subscription", {"entityName": "short"}, name))


@pytest.mark.parametrize("name", ["shop", "1-shop-bus", "shop.bus", "x" * 51])
def test_namespace_whose_name_no_bus_has_needs_another(server: ApiServer, name: str) -> None:
    assert "set spec.entityName" in refusal(server, resource("Namespace", {}, name))
    put(server, resource("Namespace", {"entityName": "shop-bus"}, name))


def test_spec_cannot_be_left_out(server: ApiServer) -> None:
    wanted = resource("Namespace", {})
    del wanted["spec"]
    assert "spec" in refusal(server, wanted)


def test_defaults_are_written_into_the_object(server: ApiServer) -> None:
    spec = put(server, resource("Queue", {}))["spec"]
    assert spec["lockDuration"] == "PT1M"
    assert spec["operatorSpec"]["deletionPolicy"] == "DeleteIfEmpty"
    assert "maxMessageSizeInKilobytes" not in spec
    spec = put(server, resource("Namespace", {}))["spec"]
    assert spec["operatorSpec"]["storage"]["stores"] == [
        {
            "name": "main",
            "managed": {
                "size": "10Gi",
                "version": "15",
                "resources": {"requests": {}, "limits": {}},
            },
        }
    ]


def test_status_is_written_apart_from_the_spec(server: ApiServer) -> None:
    wanted = resource("Queue", {})
    put(server, wanted, is_dry=False)
    path = path_of("Queue", wanted["metadata"]["name"])
    condition = {
        "type": "Ready",
        "status": "True",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "reason": "Ready",
        "message": "",
    }
    said = {**wanted, "spec": {"lockDuration": "PT5M"}, "status": {"conditions": [condition]}}
    stored = server.request(
        "PATCH", f"{path}/status", {"status": said["status"]}, "application/merge-patch+json"
    )
    assert stored["status"]["conditions"] == [condition]
    assert stored["metadata"]["generation"] == 1


def test_namespace_scales_by_brokers(server: ApiServer) -> None:
    wanted = resource("Namespace", {})
    put(server, wanted, is_dry=False)
    path = f"{path_of('Namespace', wanted['metadata']['name'])}/scale"
    assert server.request("GET", path)["spec"]["replicas"] == 1


def test_exported_manifests_are_accepted(server: ApiServer) -> None:
    """What `postbus export` writes, `kubectl apply` takes."""
    exported = [each for each in manifests_of(whole_bus()) if each["kind"] in PLURALS]
    for document in exported:
        put(server, document)
    assert {each["kind"] for each in exported} == set(PLURALS) - {"Pipeline"}


def test_examples_are_accepted(server: ApiServer) -> None:
    tried = 0
    for path in sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["apiVersion"] == f"{GROUP}/{VERSION}":  # a Namespace may be the cluster's
                document["metadata"].pop("namespace", None)
                put(server, document)
                tried += 1
    assert tried > 5
