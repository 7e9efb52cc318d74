"""Models and custom resource definitions say the same of random specs.

The models are asked by `postbus check`, the definitions by `kubectl apply`. Where they differ on
purpose, `is_stricter` says so: an API server refuses what the broker accepts as Azure does.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from postbus.contract.entities import PREMIUM_SIZES_MB
from postbus_operator.crds import KINDS
from tests.kube.api_server import ApiError, ApiServer
from tests.kube.test_crds import MINIMAL, Spec, path_of, resource

DOCUMENTS: Final = {kind.name: kind.document for kind in KINDS}

numbers = st.integers(0, 400)
durations = st.one_of(
    st.builds(
        lambda days, hours, minutes, ms: f"P{days}DT{hours}H{minutes}M{ms / 1_000:.3f}S",
        st.integers(0, 100),
        st.integers(0, 30),
        st.integers(0, 10),
        st.integers(0, 61_000),
    ),
    st.sampled_from(["PT0.999S", "PT1S", "PT4.999S", "PT5S", "PT5M", "PT5M0.001S", "PT4M60S"]),
    st.sampled_from(["PT19.999S", "PT20S", "PT59S", "PT1M", "PT299S", "P7D", "P7DT0.001S"]),
    st.sampled_from(["P90D", "P90DT0.001S"]),
    st.builds(lambda s: f"PT{s}S", numbers),
    st.builds(lambda m: f"PT{m}M", numbers),
    st.builds(lambda d: f"P{d}D", numbers),
    st.text("PTDHMS0123456789.", max_size=12),
    st.sampled_from(
        ["P", "PT", "P1DT", "PT5M\n", " PT5M", "pt5m", "P1W", "PT1H30", "PT.5S", "PT5.S"]
    ),
)
names = st.one_of(
    st.text("aZ09._-/~$ ", min_size=0, max_size=60),
    st.text("aZ09-", min_size=4, max_size=52),
    st.sampled_from(
        ["x" * 260, "x" * 261, "a//b", "t/subscriptions/s", "a/Subscriptions/b", "ü", "a\n"]
    ),
)
booleans = st.one_of(st.booleans(), st.just("true"), st.just(1))
targets = st.one_of(st.sampled_from(["", "other", "a/b", "x" * 260, "x" * 261]))
rights = st.lists(st.sampled_from(["Listen", "Send", "Manage", "Own"]), max_size=3, unique=True)
authorization = st.lists(
    st.fixed_dictionaries({"name": names, "rights": rights}, optional={"secretName": names}),
    max_size=3,
)
policies = st.sampled_from(["Delete", "DeleteIfEmpty", "Retain", "Purge", ""])
sql = st.fixed_dictionaries(
    {"sqlExpression": st.sampled_from(["1=1", "1=0", "a = 1", "", "x" * 1_024, "x" * 1_025])},
    optional={"compatibilityLevel": st.sampled_from([20, "20"])},
)
correlation = st.dictionaries(
    st.sampled_from(["label", "to", "sessionId", "contentType", "subject"]),
    st.sampled_from(["a", "", 1]),
    max_size=2,
)
filters = st.fixed_dictionaries(
    {"name": st.one_of(names, st.just("$Default"), st.just("one"))},
    optional={
        "filterType": st.sampled_from(
            ["SqlFilter", "CorrelationFilter", "TrueFilter", "FalseFilter", "Like"]
        ),
        "sqlFilter": sql,
        "correlationFilter": correlation,
        "action": sql,
    },
)
entity_operator = st.fixed_dictionaries(
    {},
    optional={
        "deletionPolicy": policies,
        "deletionProtection": booleans,
        "onAutoDelete": st.sampled_from(["KeepResource", "Recreate", "DeleteResource", "Keep"]),
        "adopt": st.sampled_from(["IfMatching", "Always", "Never", "Maybe"]),
        "history": st.fixed_dictionaries({}, optional={"retention": durations}),
    },
)
stored = {
    "lockDuration": durations,
    "maxDeliveryCount": st.sampled_from([0, 1, 2_147_483_647, 2_147_483_648, "1", 1.5]),
    "deadLetteringOnMessageExpiration": booleans,
    "requiresSession": booleans,
    "forwardTo": targets,
    "forwardDeadLetteredMessagesTo": targets,
}
shared = {
    "entityName": names,
    "status": st.sampled_from(["Active", "Disabled", "SendDisabled", "ReceiveDisabled", "active"]),
    "defaultMessageTimeToLive": durations,
    "autoDeleteOnIdle": durations,
    "userMetadata": st.sampled_from(["", "x" * 1_024, "x" * 1_025, 1]),
    "operatorSpec": entity_operator,
    "unknown": st.just(1),
}
sized = {
    "maxSizeInMegabytes": st.sampled_from([1_024, 5_120, 81_920, 1_025, 0, "1024"]),
    "maxMessageSizeInKilobytes": st.sampled_from([256, 1_023, 1_024, 102_400, 102_401]),
    "duplicateDetectionHistoryTimeWindow": durations,
    "authorizationRules": authorization,
}
quantities = st.sampled_from(
    ["500m", "1Gi", "1.5", 2, 0, -1, "1gi", "", "1e3", "0.5Ti", "1Gi ", True]
)
operators = st.fixed_dictionaries(
    {},
    optional={
        "brokers": st.integers(0, 17),
        "deletionPolicy": policies,
        "image": st.sampled_from(["a:1", "", "x" * 512, "x" * 513]),
        "resources": st.fixed_dictionaries(
            {}, optional={"requests": st.dictionaries(st.sampled_from(["cpu", "gpu"]), quantities)}
        ),
        "storage": st.fixed_dictionaries(
            {
                "stores": st.lists(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from(["a", "b", "A", "-", "x" * 30, "x" * 31])},
                        optional={
                            "managed": st.fixed_dictionaries(
                                {}, optional={"size": quantities, "version": st.just("15")}
                            ),
                            "postgres": st.just({"secretRef": {"name": "db"}}),
                        },
                    ),
                    max_size=3,
                )
            }
        ),
        "service": st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["ClusterIP", "LoadBalancer", "ExternalName"]),
                "loadBalancerClass": st.sampled_from(["a/b", ""]),
            },
        ),
        "tls": st.fixed_dictionaries(
            {},
            optional={"secretName": st.just("a"), "issuerRef": st.just({"name": "b"})},
        ),
        "allowedNamespaces": st.fixed_dictionaries(
            {},
            optional={
                "from": st.sampled_from(["Same", "All", "Selector"]),
                "selector": st.just({"matchLabels": {"a": "b"}}),
            },
        ),
        "podDisruptionBudget": st.fixed_dictionaries(
            {"maxUnavailable": st.sampled_from([0, 16, 17, "50%", "101%", "x"])}
        ),
        "softDelete": st.fixed_dictionaries({}, optional={"retention": durations}),
    },
)
SPECS: Final[dict[str, dict[str, Any]]] = {
    "Queue": {**shared, **stored, **sized},
    "Topic": {**shared, **sized, "supportOrdering": booleans},
    "Subscription": {
        **shared,
        **stored,
        "rules": st.lists(filters, max_size=3),
        "isClientAffine": booleans,
    },
    "Namespace": {
        "entityName": names,
        "sku": st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["Basic", "Standard", "Premium", "Gold"]),
                "tier": st.sampled_from(["Standard", "Premium"]),
                "capacity": st.sampled_from([1, 2, 3]),
            },
        ),
        "premiumMessagingPartitions": st.sampled_from([1, 2, 3, 8]),
        "minimumTlsVersion": st.sampled_from(["1.2", "1.3", "1.1"]),
        "zoneRedundant": booleans,
        "disableLocalAuth": booleans,
        "alternateName": st.just("shop-old"),
        "tags": st.dictionaries(st.text(max_size=3), st.sampled_from(["", "a", 1]), max_size=2),
        "authorizationRules": authorization,
        "operatorSpec": operators,
    },
}


def specs(kind: str) -> st.SearchStrategy[Spec]:
    """Specs with few fields: with many, nearly each would have a mistake."""
    fields = SPECS[kind]
    return st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=3).flatmap(
        lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen})
    )


def is_stricter(kind: str, spec: Spec) -> bool:
    """Return whether the definition refuses what the model leaves to the broker."""
    forwards = [spec.get(name) for name in ("forwardTo", "forwardDeadLetteredMessagesTo")]
    rules = [rule["name"] for rule in spec.get("rules") or []]  # whole documents are checked for it
    own = {"Queue": spec.get("entityName", "some-thing"), "Subscription": "events"}.get(kind, "")
    return (
        bool(spec.get("requiresSession") and spec.get("forwardTo") is not None)
        or any(each is not None and each.lower() == own.lower() for each in forwards)
        or spec.get("maxSizeInMegabytes", 1_024) not in PREMIUM_SIZES_MB
        or spec.get("maxMessageSizeInKilobytes", 1_024) < 1_024
        or len(set(rules)) < len(rules)
    )


def model_accepts(kind: str, document: dict[str, Any]) -> bool:
    try:
        DOCUMENTS[kind].model_validate_json(json.dumps(document), strict=True)
    except ValidationError:
        return False
    return not is_stricter(kind, document["spec"])


def server_accepts(server: ApiServer, document: dict[str, Any]) -> tuple[bool, str]:
    query = "?dryRun=All&fieldValidation=Strict"
    try:
        server.request("POST", path_of(document["kind"]) + query, document)
    except ApiError as error:
        refused = error
    else:
        return True, ""
    assert refused.status in {400, 422}
    return False, refused.message


@pytest.mark.parametrize("count", [80, pytest.param(1_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", sorted(SPECS))
def test_model_and_api_server_agree(server: ApiServer, kind: str, count: int) -> None:
    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(specs(kind))
    @example({})
    @example({"rules": [{"name": "one", "filterType": "TrueFilter"}] * 2})
    def agree(spec: Spec) -> None:
        document = resource(kind, spec, "some-thing")
        document["spec"] = MINIMAL[kind] | spec
        accepted, said = server_accepts(server, document)
        assert model_accepts(kind, document) == accepted, (spec, said)

    agree()
