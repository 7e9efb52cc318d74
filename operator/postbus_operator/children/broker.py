"""The StatefulSet of the brokers, and the disruption budget of several.

All that a broker reads at its start only is in the pod template: environment, arguments, image. So
a change of it rolls the pods, and nothing else does. Files are read again: certificates within 5 s,
tokens and addresses of databases when they are needed, the manifest at the next start, which has
nothing that a running bus does not know from the control API.
"""

from __future__ import annotations

import json
from typing import Any, Final

from postbus.contract.operator_spec import EnvironmentVariable, PodTemplate
from postbus.contract.resources import API_VERSION
from postbus_operator.children.bus import (
    BROKER,
    CONTROL_PORT,
    HTTP_PORT,
    METRICS_PORT,
    TLS_PORT,
    Bus,
    Json,
)
from postbus_operator.children.pods import (
    container_base,
    empty_volume,
    http_probe,
    mount,
    pod_base,
    secret_volume,
)
from postbus_operator.children.quantities import quantity_value

DATA: Final = "/var/lib/postbus"
TLS: Final = "/etc/postbus/tls"
STORES: Final = "/etc/postbus/stores"
SEALING_KEY: Final = "/etc/postbus/sealing-key"
CONTROL_TOKEN: Final = "/etc/postbus/control-token"
MANIFESTS: Final = "/etc/postbus/manifests"
MANIFEST_FILE: Final = "namespace.yaml"
STORES_FILE: Final = "stores"
KEY_FILE: Final = "key"
TOKEN_FILE: Final = "token"

START: Final = (
    f"if mkdir {DATA}/started 2>/dev/null; then set -- --take-over; fi\n"
    f'exec postbus serve {MANIFESTS} "$@"'
)
"""The first start in a pod takes over, a later one waits. A pod that was deleted by force may run
on, on a node that cannot be reached: its successor ends it through the database, and the kubelet's
restart of the old container finds the folder and takes nothing back."""

PRE_STOP_S: Final = 2
"""Time for Services and load balancers to leave out a pod before it closes its ports. Our choice:
an EndpointSlice reaches all nodes within a second or two; with a single broker new connections wait
for this time, too."""

GRACE_S: Final = 10
HAND_OVER_S: Final = 20
"""Upper bound that a broker sets itself for releasing its partitions (`STOP_S` of its bus)."""

SPARE_S: Final = 3
START_LIMIT_S: Final = 86_400
"""A broker waits for its databases as long as it takes; the probe gives up after a day."""

WINDOW_SHARE: Final = 0.4
"""Part of the memory limit for messages that are ready to be delivered. With a window of 256 MiB a
broker used 630 MiB at its peak, with 20,000 messages of 255 KiB in 16 busy queues
(docs/benchmarks.md), which is 0.4 of 640 MiB; the rest is the program, connections, and messages on
their way."""

LEAST_WINDOW: Final = 1024 * 1024

CHANGEABLE: Final = frozenset({"POSTBUS_WINDOW_BYTES", "POSTBUS_LOG_LEVEL"})
"""Settings of the operator that `podTemplate.env` may replace."""


def broker_objects(bus: Bus) -> list[Json]:
    """Return the StatefulSet, and the budget if nodes may be drained without an outage."""
    found = [_stateful_set(bus)]
    if bus.brokers > 1:
        budget = bus.spec.operator_spec.pod_disruption_budget.max_unavailable
        found.append(
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": bus.metadata(bus.child("broker"), BROKER),
                "spec": {
                    "maxUnavailable": budget,
                    "selector": {"matchLabels": bus.labels(BROKER)},
                    "unhealthyPodEvictionPolicy": "AlwaysAllow",
                },
            }
        )
    return found


def manifest(bus: Bus) -> Json:
    """Return the ConfigMap with the manifest of `serve`.

    What it names wins at each start: it names what cannot differ from the store, and the tier.
    """
    properties: Json = {"entityName": bus.bus_name, "sku": {"name": bus.spec.sku.name.value}}
    if bus.spec.premium_messaging_partitions is not None:
        properties["premiumMessagingPartitions"] = bus.spec.premium_messaging_partitions
    document = {
        "apiVersion": API_VERSION,
        "kind": "Namespace",
        "metadata": {"name": bus.name},
        "spec": properties,
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": bus.metadata(bus.child("manifest"), BROKER),
        "data": {MANIFEST_FILE: json.dumps(document, indent=2) + "\n"},
    }


def environment_problem(template: PodTemplate) -> str | None:
    """Return the mistake in the environment that a user sets; the API server cannot see it."""
    names = [each.name for each in template.env]
    for name in names:
        if names.count(name) > 1:
            return f"podTemplate.env has {name} twice: leave one out"
        if name in OWN_SETTINGS and name not in CHANGEABLE:
            return f"podTemplate.env: {name} is set by the operator: leave it out"
    return None


def _stateful_set(bus: Bus) -> Json:
    operator = bus.spec.operator_spec
    strategy: Json = {"type": operator.upgrade_strategy.type}
    if operator.upgrade_strategy.type == "RollingUpdate":
        strategy["rollingUpdate"] = {"partition": 0}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": bus.metadata(bus.child("broker"), BROKER),
        "spec": {
            "replicas": bus.brokers,
            "serviceName": bus.child("brokers"),
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 2,
            "updateStrategy": strategy,
            "selector": {"matchLabels": bus.labels(BROKER)},
            "template": _template(bus),
        },
    }


def _template(bus: Bus) -> Json:
    template = bus.spec.operator_spec.pod_template
    said = template.model_dump(mode="json", by_alias=True, exclude_none=True)
    metadata: Json = {"labels": {**template.labels, **bus.labels(BROKER)}}
    if template.annotations:
        metadata["annotations"] = template.annotations
    spec: Json = {
        **pod_base(),
        "terminationGracePeriodSeconds": PRE_STOP_S + GRACE_S + HAND_OVER_S + SPARE_S,
        "containers": [_container(bus)],
        "volumes": [
            empty_volume("data"),
            empty_volume("tmp"),
            {"name": "manifest", "configMap": {"name": bus.child("manifest")}},
            secret_volume("tls", bus.child("tls")),
            secret_volume("stores", bus.child("stores")),
            secret_volume("sealing-key", bus.child("sealing-key")),
            secret_volume("control-token", bus.child("control-token")),
        ],
        "topologySpreadConstraints": _spread(bus),
    }
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        if said.get(name):
            spec[name] = said[name]
    return {"metadata": metadata, "spec": spec}


def _container(bus: Bus) -> Json:
    operator = bus.spec.operator_spec
    image = operator.image or bus.platform.image
    return {
        "name": BROKER,
        **container_base(image, bus.platform.image_pull_policy, operator.resources),
        "command": ["sh", "-ec", START, "postbus"],
        "env": _environment(bus),
        "ports": [
            {"name": "amqps", "containerPort": TLS_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
        ],
        "startupProbe": http_probe("/readyz", period_s=1, failures=START_LIMIT_S),
        "readinessProbe": http_probe("/readyz", period_s=2, failures=2),
        "livenessProbe": http_probe("/healthz", period_s=10, failures=6, timeout_s=5),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "volumeMounts": [
            mount("data", DATA, is_writable=True),
            mount("tmp", "/tmp", is_writable=True),
            mount("manifest", MANIFESTS),
            mount("tls", TLS),
            mount("stores", STORES),
            mount("sealing-key", SEALING_KEY),
            mount("control-token", CONTROL_TOKEN),
        ],
    }


OWN_SETTINGS: Final = {
    "POSTBUS_DATA": f"{DATA}/data",
    "POSTBUS_STORES_FILE": f"{STORES}/{STORES_FILE}",
    "POSTBUS_SEALING_KEY_FILE": f"{SEALING_KEY}/{KEY_FILE}",
    "POSTBUS_CONTROL_TOKEN_FILE": f"{CONTROL_TOKEN}/{TOKEN_FILE}",
    "POSTBUS_TLS_CERTIFICATE_FILE": f"{TLS}/tls.crt",
    "POSTBUS_TLS_KEY_FILE": f"{TLS}/tls.key",
    "POSTBUS_TLS_NAMES": "",
    "POSTBUS_BROKER_NAME": "",
    "POSTBUS_HOST": "0.0.0.0",
    "POSTBUS_METRICS_HOST": "0.0.0.0",
    "POSTBUS_CONTROL_HOST": "0.0.0.0",
    "POSTBUS_GRACE_S": str(GRACE_S),
    "POSTBUS_LOG_FORMAT": "json",
    "POSTBUS_LOG_LEVEL": "info",
    "POSTBUS_WINDOW_BYTES": "",
    # Left at their defaults, on which ports and Services rely.
    "POSTBUS_STORES": "",
    "POSTBUS_PORT": "",
    "POSTBUS_TLS_PORT": "",
    "POSTBUS_HTTP_PORT": "",
    "POSTBUS_METRICS_PORT": "",
    "POSTBUS_CONTROL_PORT": "",
    "POSTBUS_IS_PLAIN_ENABLED": "",
    "POSTBUS_IS_TLS_ENABLED": "",
    "POSTBUS_IS_METRICS_ENABLED": "",
    "POSTBUS_IS_CONTROL_ENABLED": "",
    "POSTBUS_IS_CONTROL_TLS_ENABLED": "",
}
"""Settings that are the operator's; the empty ones depend on the bus, or stay unset."""


def _environment(bus: Bus) -> list[Json]:
    operator = bus.spec.operator_spec
    values: dict[str, Any] = {
        **OWN_SETTINGS,
        "POSTBUS_TLS_NAMES": ",".join(bus.client_names),
        "POSTBUS_WINDOW_BYTES": _window_bytes(bus),
    }
    pod_name = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}
    made: dict[str, Json] = {
        "POSTBUS_BROKER_NAME": {"name": "POSTBUS_BROKER_NAME", "valueFrom": pod_name}
    }
    made |= {name: {"name": name, "value": value} for name, value in values.items() if value}
    made |= {each.name: _user_variable(each) for each in operator.pod_template.env}
    return [made[name] for name in sorted(made)]


def _user_variable(variable: EnvironmentVariable) -> Json:
    said: Json = variable.model_dump(mode="json", by_alias=True, exclude_none=True)
    if not said.get("value"):
        said.pop("value", None)  # the API server leaves an empty value out
    return said


def _window_bytes(bus: Bus) -> str:
    """Return the window for the memory limit, "" without one: the broker's default."""
    limit = bus.spec.operator_spec.resources.limits.memory
    if limit is None:
        return ""
    return str(max(LEAST_WINDOW, int(quantity_value(limit) * WINDOW_SHARE)))


def _spread(bus: Bus) -> list[Json]:
    """Return the user's rules, else: brokers apart on nodes and zones if there is room."""
    wanted = bus.spec.operator_spec.pod_template.topology_spread_constraints
    if wanted:
        return list(wanted)
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": bus.labels(BROKER)},
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]
