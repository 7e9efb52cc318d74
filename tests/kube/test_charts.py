"""Charts rendered by helm, and accepted by a real API server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Final

import pytest
import yaml

from postbus_operator.kube.resource_types import (
    CHILDREN,
    CLUSTER_NAMESPACES,
    EVENTS,
    PODS,
    RESOURCES,
    ROLE_BINDINGS,
)
from tests.kube.api_server import OPERATOR, ROOT, ApiError, ApiServer
from tests.kube.conftest import CRDS, DEFINITIONS
from tests.kube.helm import SYSTEM, Object, Values, helm, of_kind, one, rendered

WATCHED: Final = ["team-a", "team-b"]

SCOPED: Final[Values] = {"rbac": {"scope": "namespace"}, "watchNamespaces": WATCHED}
WIKI: Final = "https://wiki.example.org/postbus/"
LABEL: Final = {"team": "messaging"}
EVERYTHING: Final[Values] = {
    "global": {"imageRegistry": "registry.example.org/mirror", "imagePullSecrets": ["mirror"]},
    "image": {"digest": f"sha256:{'a' * 64}", "pullSecrets": ["own"], "pullPolicy": "Never"},
    "storeImage": {"registry": "other.example.org:5000", "tag": "v2"},
    "replicas": 3,
    "rbac": {"certManager": True},
    "serviceAccount": {"name": "bus", "annotations": {"a.example.org/b": "c"}},
    "resources": {"limits": {"cpu": 1, "memory": "1Gi"}},
    "hostUsers": False,
    "commonLabels": LABEL,
    "deploymentAnnotations": {"a.example.org/b": "c"},
    "podAnnotations": {"a.example.org/b": "c"},
    "podLabels": {"tier": "system"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "arch", "operator": "In", "values": ["amd64"]}]}
                ]
            }
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "system-cluster-critical",
    "extraArgs": ["--help"],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example.org"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "podDisruptionBudget": {"maxUnavailable": "50%"},
    "metrics": {"serviceAnnotations": {"prometheus.io/scrape": "true"}},
    "networkPolicy": {
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "apiServerPorts": [8443],
        "apiServerTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    },
    "preDelete": {"enabled": True},
    "test": {"namespace": "team-a", "storageClassName": "fast", "timeoutSeconds": 60},
    "settings": {"workers": 64, "logLevel": "debug", "clusterDomain": "example.org"},
}
BARE: Final[Values] = {
    "fullnameOverride": "bus",
    "replicas": 1,
    "rbac": {"create": False},
    "serviceAccount": {"create": False, "name": "theirs"},
    "podSecurityContext": {"runAsUser": None, "fsGroup": None},
    "topologySpreadConstraints": [],
    "networkPolicy": {"enabled": False},
}
EXAMPLES: Final[dict[str, Values]] = {
    "defaults": {},
    "namespaces": SCOPED,
    "everything": EVERYTHING,
    "bare": BARE,
}
MONITORED: Final[Values] = {
    name: {"enabled": True, "labels": {"release": "prometheus"}}
    for name in ("serviceMonitor", "podMonitor", "prometheusRule")
}

every_example = pytest.mark.parametrize("values", EXAMPLES.values(), ids=EXAMPLES)


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for each in objects:
        if each["kind"] == "Pod":
            yield each["metadata"]["name"], each["spec"]
        elif "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def operator(objects: list[Object]) -> Object:
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return container


def environment(objects: list[Object]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in operator(objects)["env"]}


# --- the API server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plurals(server: ApiServer) -> dict[tuple[str, str], tuple[str, bool]]:
    """(apiVersion, kind) -> plural, whether in a namespace; by the discovery of the server."""
    groups = [
        version["groupVersion"]
        for group in server.request("GET", "/apis")["groups"]
        for version in group["versions"]
    ]
    found = {}
    for version in ("v1", *groups):
        path = f"/api/{version}" if version == "v1" else f"/apis/{version}"
        for each in server.request("GET", path)["resources"]:
            if "/" not in each["name"]:
                found[version, each["kind"]] = (each["name"], each["namespaced"])
    return found


@pytest.fixture(scope="module", autouse=True)
def namespaces(server: ApiServer) -> None:
    for name in (SYSTEM, *WATCHED):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        server.apply(
            f"/api/v1/namespaces/{name}",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
        )


def path_of(plurals: dict[tuple[str, str], tuple[str, bool]], found: Object) -> str:
    version = found["apiVersion"]
    plural, is_namespaced = plurals[version, found["kind"]]
    start = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    if is_namespaced:
        start += f"/namespaces/{found['metadata']['namespace']}"
    return f"{start}/{plural}/{found['metadata']['name']}"


@pytest.mark.parametrize("chart", ["postbus-crds", "postbus"])
def test_helm_has_no_complaints(chart: str) -> None:
    done = helm("lint", "--strict", "--quiet", f"charts/{chart}")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


@every_example
def test_api_server_accepts_every_object(
    server: ApiServer, plurals: dict[tuple[str, str], tuple[str, bool]], values: Values
) -> None:
    """An unknown field would be an error: fieldValidation=Strict."""
    for each in rendered(values):
        server.apply(path_of(plurals, each), each, is_dry=True)


@every_example
def test_pods_satisfy_the_restricted_standard(server: ApiServer, values: Values) -> None:
    found = dict(pod_specs(rendered(values)))
    assert found
    for name, spec in found.items():
        assert create_pod(server, name, spec)
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]
            assert container["imagePullPolicy"] in {"IfNotPresent", "Never"}
    spec["securityContext"] = {}
    with pytest.raises(ApiError, match="violates PodSecurity"):
        create_pod(server, name, spec)


def create_pod(server: ApiServer, name: str, spec: Object) -> bool:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    return bool(server.request("POST", f"/api/v1/namespaces/{SYSTEM}/pods?dryRun=All", pod))


def test_token_is_projected_and_expires() -> None:
    for name, spec in pod_specs(rendered(EVERYTHING)):
        [token] = [each for each in spec["volumes"] if each["name"] == "token"]
        [source] = [
            each["serviceAccountToken"]
            for each in token["projected"]["sources"]
            if "serviceAccountToken" in each
        ]
        assert source["expirationSeconds"] < 4_000, name
        [container] = spec["containers"]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts["token"] == "/var/run/secrets/kubernetes.io/serviceaccount"


# --- definitions --------------------------------------------------------------------------------


def test_definitions_of_the_chart_are_those_of_the_folder(server: ApiServer) -> None:
    annotations = {"argocd.argoproj.io/sync-options": "ServerSideApply=true"}
    made = rendered({"annotations": annotations, "labels": LABEL}, "postbus-crds")
    wanted = {
        each["metadata"]["name"]: each
        for each in (yaml.safe_load(path.read_text()) for path in CRDS.glob("*.yaml"))
    }
    assert {each["metadata"]["name"] for each in made} == set(wanted)
    for each in made:
        name = each["metadata"]["name"]
        assert each["spec"] == wanted[name]["spec"]
        server.apply(f"{DEFINITIONS}/{name}", each, is_dry=True)
        assert each["metadata"]["annotations"] == wanted[name]["metadata"]["annotations"] | {
            "helm.sh/resource-policy": "keep",
            **annotations,
        }
        assert each["metadata"]["labels"].items() >= LABEL.items()


def test_definitions_are_kept_unless_the_user_says_no() -> None:
    for each in rendered({"keep": False}, "postbus-crds"):
        assert "helm.sh/resource-policy" not in each["metadata"]["annotations"]


def test_no_chart_has_a_custom_resource() -> None:
    """Helm sorts by kind, and would apply a kind Namespace before everything else."""
    for values in EXAMPLES.values():
        assert [each for each in rendered(values) if "postbus.dev" in each["apiVersion"]] == []


# --- rights -------------------------------------------------------------------------------------


def rules(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for each in objects:
        for rule in each.get("rules", ()):
            yield each["metadata"]["name"], rule


def test_no_chart_has_a_webhook() -> None:
    """One that does not answer would block the cluster: definitions have rules instead."""
    for chart, values in (("postbus", EVERYTHING), ("postbus-crds", {})):
        kinds = {each["kind"] for each in rendered(values, chart)}
        assert not {each for each in kinds if "Webhook" in each or "Admission" in each}


@every_example
def test_no_rule_has_a_wildcard(values: Values) -> None:
    for name, rule in rules(rendered(values)):
        assert "*" not in str(rule), name
        for verb in rule["verbs"]:
            assert verb in {
                "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection",
                "bind",
            }, name  # fmt: skip


def may(server: ApiServer, verb: str, group: str, plural: str, namespace: str, name: str) -> bool:
    resource, _, part = plural.partition("/")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": part,
        "namespace": namespace,
        "name": name,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": OPERATOR, "resourceAttributes": attributes},
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(server.request("POST", path, review)["status"]["allowed"])


@pytest.fixture
def granted(
    server: ApiServer, plurals: dict[tuple[str, str], tuple[str, bool]]
) -> Iterator[list[str]]:
    """Apply objects with rights while a test runs; it adds their paths."""
    paths: list[str] = []
    yield paths
    for path in paths:
        server.request("DELETE", path)


def grant(
    server: ApiServer,
    plurals: dict[tuple[str, str], tuple[str, bool]],
    granted: list[str],
    values: Values,
) -> None:
    for each in rendered(values):
        if each["apiVersion"] == "rbac.authorization.k8s.io/v1":
            path = path_of(plurals, each)
            server.apply(path, each)
            granted.append(path)


GRANTS: Final = [
    ("watch", "postbus.dev", "busnamespaces", ""),
    ("patch", "postbus.dev", "queues/status", ""),
    ("delete", "postbus.dev", "subscriptions", ""),
    ("watch", "", "secrets", ""),
    ("create", "apps", "statefulsets", ""),
    ("create", "batch", "jobs", ""),
    ("patch", "", "persistentvolumeclaims", ""),
    ("create", "events.k8s.io", "events", ""),
]
REFUSED: Final = [
    ("delete", "postbus.dev", "busnamespaces", ""),
    ("create", "postbus.dev", "queues", ""),
    ("delete", "apps", "statefulsets", ""),
    ("create", "", "persistentvolumeclaims", ""),
    ("create", "", "pods", ""),
    ("create", "", "pods/exec", ""),
    ("create", "rbac.authorization.k8s.io", "roles", ""),
    ("update", "coordination.k8s.io", "leases", "of-somebody-else"),
]


def wait_until_granted(server: ApiServer) -> None:
    """The authorizer of the API server learns of roles by its own watch."""
    for _ in range(100):
        if all(may(server, *each[:3], "team-a", each[3]) for each in GRANTS):
            return
        time.sleep(0.05)
    raise AssertionError([each for each in GRANTS if not may(server, *each[:3], "team-a", each[3])])


@pytest.mark.parametrize("scope", ["cluster", "namespace"])
def test_operator_has_its_rights_and_no_other(
    server: ApiServer,
    plurals: dict[tuple[str, str], tuple[str, bool]],
    granted: list[str],
    scope: str,
) -> None:
    is_cluster = scope == "cluster"
    grant(server, plurals, granted, {} if is_cluster else SCOPED)
    wait_until_granted(server)
    for namespace in WATCHED:
        assert all(may(server, *each[:3], namespace, each[3]) for each in GRANTS)
    for verb, group, plural, name in GRANTS:
        assert may(server, verb, group, plural, "default", name) is is_cluster
    for verb, group, plural, name in REFUSED:
        assert not may(server, verb, group, plural, "team-a", name)
    assert may(server, "watch", "", "namespaces", "", "") is is_cluster
    assert may(server, "update", "coordination.k8s.io", "leases", SYSTEM, "postbus-operator")
    assert not may(server, "get", "coordination.k8s.io", "leases", "team-a", "postbus-operator")


def test_rights_are_for_the_types_that_the_operator_knows() -> None:
    [found] = [
        each for each in of_kind(rendered(), "ClusterRole")
        if each["metadata"]["name"] == "postbus-operator"
    ]  # fmt: skip
    granted = {
        (group, resource): set(rule["verbs"])
        for rule in found["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    kinds = {(type.group, type.plural) for type in RESOURCES.values()}
    watched = {*kinds, *((type.group, type.plural) for type in CHILDREN)}
    watched.add((CLUSTER_NAMESPACES.group, CLUSTER_NAMESPACES.plural))
    other = {(group, f"{plural}/status") for group, plural in kinds}
    other |= {(EVENTS.group, EVENTS.plural), (PODS.group, PODS.plural)}
    other.add((ROLE_BINDINGS.group, "clusterroles"))
    assert granted.keys() == watched | other
    assert all(granted[each] >= {"list", "watch"} for each in watched)


def test_certificates_are_granted_only_to_those_who_use_them() -> None:
    groups = {group for _, rule in rules(rendered()) for group in rule["apiGroups"]}
    assert "cert-manager.io" not in groups
    more = {group for _, rule in rules(rendered(EVERYTHING)) for group in rule["apiGroups"]}
    assert more - groups == {"cert-manager.io"}


def test_roles_of_people_are_aggregated_and_the_operators_are_not() -> None:
    labels = {
        each["metadata"]["name"]: {
            label for label in each["metadata"]["labels"] if "/aggregate-to-" in label
        }
        for each in of_kind(rendered(), "ClusterRole")
    }
    start = "rbac.authorization.k8s.io/aggregate-to-"
    assert labels == {
        "postbus-operator": set(),
        "postbus-operator-driver": set(),
        "postbus-operator-view": {f"{start}view"},
        "postbus-operator-edit": {f"{start}edit"},
        "postbus-operator-admin": {f"{start}admin"},
        "postbus-operator-servicebinding": set(),
    }
    binding = one(rendered(), "ClusterRole", "postbus-operator-servicebinding")
    assert binding["metadata"]["labels"]["servicebinding.io/controller"] == "true"
    assert of_kind(rendered({"rbac": {"aggregate": False}}), "ClusterRole") == [
        one(rendered(), "ClusterRole", name)
        for name in ("postbus-operator", "postbus-operator-driver")
    ]


@every_example
def test_the_operator_binds_the_role_of_drivers_and_no_other(values: Values) -> None:
    """Drivers make pods with it, in their own cluster namespace."""
    made = rendered(values)
    bound = [
        (resource, name)
        for _, rule in rules(made)
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [None])
        if "bind" in rule["verbs"]
    ]
    roles = [
        each
        for each in (*of_kind(made, "ClusterRole"), *of_kind(made, "Role"))
        if each["metadata"]["name"].endswith("-driver")
    ]
    assert {(f"{each['kind'].lower()}s", each["metadata"]["name"]) for each in roles} == set(bound)
    verbs = ["get", "list", "watch", "create", "delete", "deletecollection"]
    for each in roles:
        assert each["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}]
    for each in of_kind(made, "Deployment"):
        [container] = each["spec"]["template"]["spec"]["containers"]
        environment = {item["name"]: item.get("value") for item in container["env"]}
        names = {f"{role['kind']}/{role['metadata']['name']}" for role in roles}
        assert {environment["POSTBUS_OPERATOR_DRIVER_ROLE"]} == names or not names


def test_operators_of_two_namespaces_share_no_object() -> None:
    """Both may be called `postbus`, so what has no namespace names it."""

    def identities(namespace: str) -> set[tuple[str, str, str]]:
        done = helm(
            "template", "postbus", "charts/postbus", "--namespace", namespace,
            values={"rbac": {"scope": "namespace"}, "watchNamespaces": [f"{namespace}-buses"]},
        )  # fmt: skip
        return {
            (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"])
            for each in yaml.safe_load_all(done.stdout)
            if each
        }

    assert identities("one").isdisjoint(identities("two"))


# --- what depends on values ---------------------------------------------------------------------


def test_a_budget_needs_two_operators() -> None:
    """For one operator it would hold up the drain of its node."""
    assert one(rendered(), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert of_kind(rendered({"replicas": 1}), "PodDisruptionBudget") == []
    assert (
        of_kind(rendered({"podDisruptionBudget": {"enabled": False}}), "PodDisruptionBudget") == []
    )


def test_monitoring_is_rendered_on_demand_only() -> None:
    """A cluster without these definitions refuses the objects."""
    kinds = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not kinds & {each["kind"] for each in rendered(EVERYTHING)}
    made = rendered(MONITORED)
    assert kinds <= {each["kind"] for each in made}
    assert all(one(made, kind)["metadata"]["labels"]["release"] == "prometheus" for kind in kinds)
    monitor = one(made, "ServiceMonitor")["spec"]
    service = one(made, "Service")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {each["port"] for each in monitor["endpoints"]} == {
        each["name"] for each in service["spec"]["ports"]
    }
    files = [ROOT / "docs" / name for name in ("alerts.yaml", "operator-alerts.yaml")]
    groups = [each for file in files for each in yaml.safe_load(file.read_text())["groups"]]
    assert one(made, "PrometheusRule")["spec"] == {"groups": groups}
    at_wiki = rendered(MONITORED | {"prometheusRule": {"enabled": True, "runbookUrl": WIKI}})
    for group in one(at_wiki, "PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["runbook_url"].startswith(f"{WIKI}docs/guides/")
    scoped = rendered(SCOPED | MONITORED)
    assert one(scoped, "PodMonitor")["spec"]["namespaceSelector"] == {"matchNames": WATCHED}


def test_dashboards_are_rendered_on_demand_as_their_files() -> None:
    assert not any("-dashboard-" in each["metadata"]["name"] for each in rendered(EVERYTHING))
    folder = ROOT / "charts" / "postbus" / "dashboards"
    annotations = {"grafana_folder": "Messaging"}
    made = rendered({"dashboards": {"enabled": True, "annotations": annotations}})
    found = {}
    for each in of_kind(made, "ConfigMap"):
        if each["metadata"]["labels"].get("grafana_dashboard") == "1":
            assert each["metadata"]["annotations"] == annotations
            found |= each["data"]
    assert found == {f"postbus-{path.name}": path.read_text() for path in folder.iterdir()}


def test_labels_of_the_chart_stay_on_its_objects() -> None:
    """Operands with the labels of a release would look like a part of it to GitOps tools."""
    made = rendered({"commonLabels": LABEL | {"app.kubernetes.io/name": "mine"}})
    for each in made:
        assert each["metadata"]["labels"].items() >= LABEL.items(), each["metadata"]["name"]
        assert each["metadata"]["labels"]["app.kubernetes.io/name"] != "mine"
    assert "messaging" not in str(operator(made))


def test_selectors_match_the_operator_only() -> None:
    made = rendered(EVERYTHING)
    deployment = one(made, "Deployment")["spec"]
    wanted = deployment["selector"]["matchLabels"]
    assert deployment["template"]["metadata"]["labels"].items() >= wanted.items()
    assert one(made, "Service")["spec"]["selector"] == wanted
    assert one(made, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == wanted
    assert one(made, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == wanted
    [spread] = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == wanted
    for labels in (
        one(made, "Pod")["metadata"]["labels"],
        one(made, "Job")["spec"]["template"]["metadata"]["labels"],
    ):
        assert not labels.items() >= wanted.items()


@pytest.mark.parametrize(
    ("values", "image", "store"),
    [
        ({}, "postbus:0.1.0", "postbus-store:0.1.0"),
        ({"image": {"tag": "dev"}}, "postbus:dev", "postbus-store:dev"),
        (
            {"global": {"imageRegistry": "r.example.org/x/"}, "storeImage": {"tag": "old"}},
            "r.example.org/x/postbus:0.1.0",
            "r.example.org/x/postbus-store:old",
        ),
        (
            {"global": {"imageRegistry": "r"}, "image": {"registry": "own:5000", "tag": "1"}},
            "own:5000/postbus:1",
            "own:5000/postbus-store:1",
        ),
        (
            EVERYTHING,
            f"registry.example.org/mirror/postbus@sha256:{'a' * 64}",
            "other.example.org:5000/postbus-store:v2",
        ),
    ],
    ids=["defaults", "tag", "registry of all", "own registry", "digest"],
)
def test_images_of_operator_and_operands(values: Values, image: str, store: str) -> None:
    made = rendered(values)
    assert {
        container["image"] for _, spec in pod_specs(made) for container in spec["containers"]
    } == {image}
    assert environment(made)["POSTBUS_OPERATOR_IMAGE"] == image
    assert environment(made)["POSTBUS_OPERATOR_STORE_IMAGE"] == store


def test_pull_secrets_are_those_of_image_and_cluster() -> None:
    for _, spec in pod_specs(rendered(EVERYTHING)):
        assert spec["imagePullSecrets"] == [{"name": "mirror"}, {"name": "own"}]


def test_network_policy_lets_through_what_the_operator_needs() -> None:
    spec = one(rendered(), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    ports = [[port["port"] for port in rule["ports"]] for rule in spec["egress"]]
    assert ports == [[53, 53], [443, 6443], [9464, 9465]]
    [metrics] = spec["ingress"][0]["from"]
    assert metrics["namespaceSelector"]["matchLabels"] == {"postbus.dev/metrics": "true"}
    [broker] = spec["egress"][2]["to"]
    assert broker["namespaceSelector"] == {}
    [broker] = one(rendered(SCOPED), "NetworkPolicy")["spec"]["egress"][2]["to"]
    [expression] = broker["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == WATCHED


# --- releases -----------------------------------------------------------------------------------


def release(server: ApiServer, *arguments: str, values: Values | None = None) -> None:
    command, *rest = arguments
    done = helm(
        command, "postbus", *rest, "--namespace", SYSTEM,
        "--kubeconfig", str(server.kubeconfig()), values=values,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def names_of(server: ApiServer, path: str) -> set[str]:
    found = server.request("GET", f"{path}?labelSelector=app.kubernetes.io/instance=postbus")
    return {each["metadata"]["name"] for each in found["items"]}


def test_release_changes_its_scope_and_leaves_nothing(server: ApiServer) -> None:
    roles = "/apis/rbac.authorization.k8s.io/v1"
    release(server, "install", "charts/postbus", values={})
    assert "postbus-operator" in names_of(server, f"{roles}/clusterroles")
    release(server, "upgrade", "charts/postbus", values=SCOPED)
    assert "postbus-operator" not in names_of(server, f"{roles}/clusterroles")
    assert names_of(server, f"{roles}/namespaces/team-a/roles") == {
        "postbus-operator",
        "postbus-operator-driver",
    }
    release(server, "uninstall")
    for path in (
        f"{roles}/clusterroles",
        f"{roles}/clusterrolebindings",
        f"{roles}/roles",
        f"{roles}/rolebindings",
        "/apis/apps/v1/deployments",
        "/apis/networking.k8s.io/v1/networkpolicies",
        "/apis/policy/v1/poddisruptionbudgets",
        "/api/v1/services",
        "/api/v1/serviceaccounts",
        "/api/v1/configmaps",
    ):
        assert names_of(server, path) == set(), path


def test_definitions_stay_when_their_release_goes(server: ApiServer) -> None:
    """They exist already here: the release takes them over."""
    release(server, "install", "charts/postbus-crds", "--take-ownership")
    release(server, "uninstall")
    for path in CRDS.glob("*.yaml"):
        name = yaml.safe_load(path.read_text())["metadata"]["name"]
        found = server.request("GET", f"{DEFINITIONS}/{name}")
        assert "deletionTimestamp" not in found["metadata"]


# --- values that make no sense ------------------------------------------------------------------

NONSENSE: Final = [
    ({"replica": 2}, "additional properties 'replica' not allowed"),
    ({"replicas": 0}, "/replicas': minimum"),
    ({"replicas": "two"}, "/replicas': got string, want integer"),
    ({"image": {"pullPolicy": "Always"}}, "/image/pullPolicy': value must be one of"),
    ({"image": {"tag": "a b"}}, "/image/tag'"),
    ({"image": {"digest": "sha256:1234"}}, "/image/digest'"),
    ({"image": {"name": "postbus"}}, "/image': additional properties 'name'"),
    ({"global": {"imageRegistry": "https://r.example.org"}}, "/global/imageRegistry'"),
    ({"rbac": {"scope": "world"}}, "/rbac/scope': value must be one of"),
    ({"rbac": {"scope": "namespace"}}, "/watchNamespaces': minItems"),
    ({"watchNamespaces": ["team-a"]}, "/watchNamespaces': maxItems"),
    (SCOPED | {"watchNamespaces": ["team-*"]}, "/watchNamespaces/0'"),
    (SCOPED | {"watchNamespaces": ["a", "a"]}, "/watchNamespaces': items at 0 and 1 are equal"),
    ({"commonLabels": {"a": 1}}, "/commonLabels/a': got number, want string"),
    ({"fullnameOverride": "Bus"}, "/fullnameOverride'"),
    ({"podDisruptionBudget": {"maxUnavailable": 0}}, "/podDisruptionBudget/maxUnavailable'"),
    ({"networkPolicy": {"metricsFrom": [{}]}}, "/networkPolicy/metricsFrom/0'"),
    ({"terminationGracePeriodSeconds": 5}, "/terminationGracePeriodSeconds'"),
    ({"settings": {"worker": 1}}, "/settings': additional properties 'worker'"),
    ({"settings": {"workers": 0}}, "/settings/workers': minimum"),
    ({"settings": {"logLevel": "loud"}}, "/settings/logLevel': value must be one of"),
]


@pytest.mark.parametrize(("values", "said"), NONSENSE, ids=lambda each: str(each)[:60])
def test_values_without_sense_are_refused_by_name(values: Values, said: str) -> None:
    done = helm("template", "postbus", "charts/postbus", values=values)
    assert done.returncode != 0
    assert said in done.stderr


# --- notes --------------------------------------------------------------------------------------


def notes(server: ApiServer, values: Values) -> str:
    done = helm(
        "install", "postbus", "charts/postbus", "--namespace", SYSTEM, "--dry-run=server",
        "--kubeconfig", str(server.kubeconfig()), values=values,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def test_notes_name_a_bus_and_a_queue_that_the_api_server_accepts(
    server: ApiServer, plurals: dict[tuple[str, str], tuple[str, bool]]
) -> None:
    text = notes(server, SCOPED)
    assert "serves: team-a, team-b." in text
    assert "kubectl create namespace" not in text
    manifest = re.search(r"-n team-a -f - <<'END'\n(.*?)^END$", text, re.DOTALL | re.MULTILINE)
    assert manifest is not None
    found = list(yaml.safe_load_all(manifest[1]))
    assert [each["kind"] for each in found] == ["Namespace", "Queue"]
    for each in found:
        each["metadata"]["namespace"] = "team-a"
        server.apply(path_of(plurals, each), each, is_dry=True)
    assert "serves the whole cluster" in notes(server, {})
    assert "kubectl create namespace shop" in notes(server, {})
