"""Secrets with connection strings: names, contents, chosen names."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from azure.servicebus import parse_connection_string
from hypothesis import given
from hypothesis import strategies as st

from postbus.contract.entities import ROOT_RULE_NAME
from postbus_operator.keys.contents import (
    Endpoint,
    RuleKeys,
    WantedSecret,
    secret_name,
    wanted_secrets,
)
from postbus_operator.keys.rules import KeyPair, Problem
from postbus_operator.objects import Key
from tests.operator.test_keys import resource

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
ENDPOINT = Endpoint("shop.shop.svc", b"-----BEGIN CERTIFICATE-----")
KEYS = KeyPair("p/r+m=a", "secondary")
APP = RuleKeys("app", KEYS)
QUEUE = {"owner": {"name": "shop"}, "entityName": "Sales/Orders"}


def secrets_of(
    spec: dict[str, Any], *rules: RuleKeys, kind: str = "Queue"
) -> tuple[list[WantedSecret], list[Problem]]:
    return wanted_secrets(resource(kind, spec), ENDPOINT, rules, NOON)


# --- names --------------------------------------------------------------------------------------


def test_names_are_readable() -> None:
    assert secret_name(Key("Queue", "shop", "orders"), "worker") == "orders-queue-worker"
    assert secret_name(Key("Namespace", "shop", "shop"), ROOT_RULE_NAME) == "shop-bus-root"
    name = secret_name(Key("Topic", "shop", "events"), "AppReader_1")
    assert re.fullmatch(r"events-topic-app-reader-1-[0-9a-f]{8}", name)


def test_a_rule_cannot_have_the_name_of_another_secret_of_a_bus() -> None:
    for word in ("ca", "tls", "worker-tls", "sealing-key", "control-token", "stores", "root"):
        assert secret_name(Key("Namespace", "shop", "shop"), word) != f"shop-bus-{word}"


RULE_NAMES = st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,254}[A-Za-z0-9])?", fullmatch=True)
NAMES = st.from_regex(
    r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?){0,3}",
    fullmatch=True,
)


@given(NAMES, RULE_NAMES, RULE_NAMES)
def test_any_name_is_one_of_kubernetes_and_rules_of_a_resource_differ(
    name: str, one: str, two: str
) -> None:
    key = Key("Queue", "shop", name)
    made = secret_name(key, one)
    assert len(made) <= 253
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", made)
    assert (made == secret_name(key, two)) == (one == two)


# --- contents -----------------------------------------------------------------------------------


def test_a_secret_has_connection_strings_and_the_keys_of_a_service_binding() -> None:
    (secret,), problems = secrets_of(QUEUE, APP)
    assert problems == []
    assert secret.type == "servicebinding.io/postbus"
    assert secret.data["ca.crt"] == ENDPOINT.ca
    text = {key: value.decode() for key, value in secret.data.items()}
    assert text["uri"] == "amqps://app:p%2Fr%2Bm%3Da@shop.shop.svc:5671/Sales/Orders"
    assert (text["type"], text["provider"]) == ("postbus", "postbus")
    assert (text["host"], text["port"]) == ("shop.shop.svc", "5671")
    assert (text["username"], text["password"]) == ("app", KEYS.primary)
    assert text["connectionString"] == text["primaryConnectionString"]
    assert text["endpoint"] == "sb://shop.shop.svc/"
    for key, value in (("primary", KEYS.primary), ("secondary", KEYS.secondary)):
        assert text[f"{key}Key"] == value
        parsed = parse_connection_string(text[f"{key}ConnectionString"])
        assert parsed.fully_qualified_namespace == "shop.shop.svc"
        assert parsed.entity_path == text["entityPath"] == "Sales/Orders"
        assert (parsed.shared_access_key_name, parsed.shared_access_key) == ("app", value)


def test_keys_of_a_namespace_have_no_entity() -> None:
    (secret,), _ = secrets_of({}, RuleKeys(ROOT_RULE_NAME, KEYS), kind="Namespace")
    assert b"EntityPath" not in secret.data["connectionString"]
    assert "entityPath" not in secret.data
    assert secret.data["uri"].endswith(b":5671/")


def test_a_public_authority_needs_no_certificate() -> None:
    found, _ = wanted_secrets(
        resource("Queue", QUEUE), Endpoint("bus.example.org", None), [APP], NOON
    )
    assert "ca.crt" not in found[0].data


def test_the_object_belongs_to_its_resource_and_has_base64() -> None:
    owner = resource("Queue", QUEUE)
    (secret,), _ = wanted_secrets(owner, ENDPOINT, [APP], NOON)
    made = secret.manifest(owner)
    (reference,) = made["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["name"], reference["uid"]) == ("Queue", "orders", "uid-2")
    assert base64.b64decode(made["data"]["password"]).decode() == KEYS.primary


@pytest.mark.parametrize(
    "policy",
    [{"deletionPolicy": "Retain"}, {"reconcilePolicy": "DetachOnDelete"}],
    ids=["retained", "detached"],
)
def test_the_object_stays_with_what_its_keys_are_of(policy: dict[str, str]) -> None:
    owner = resource("Queue", QUEUE | {"operatorSpec": policy})
    (secret,), _ = wanted_secrets(owner, ENDPOINT, [APP], NOON)
    metadata = secret.manifest(owner)["metadata"]
    assert "ownerReferences" not in metadata
    assert metadata["annotations"]["postbus.dev/resource"] == "Queue/shop/orders"


def test_a_hidden_key_is_in_no_secret_and_the_secret_says_since_when() -> None:
    spec = QUEUE | {"operatorSpec": {"secrets": {"primaryKey": {"name": "mine", "key": "k"}}}}
    found, _ = secrets_of(
        spec, RuleKeys("app", KEYS, "primary"), RuleKeys("users", KeyPair("c", "d"))
    )
    hidden, users, mine = found
    for secret in (hidden, mine):
        assert not any(KEYS.primary.encode() in value for value in secret.data.values())
        assert secret.annotations["postbus.dev/hidden-key"] == "primary"
        assert secret.annotations["postbus.dev/hidden-since"] == "2026-11-23T12:00:00Z"
    assert mine.data == {"k": b"secondary"}
    assert users.data["password"] == b"c"
    assert "postbus.dev/hidden-key" not in users.annotations


# --- chosen names -------------------------------------------------------------------------------


def test_chosen_secrets_get_values_of_the_first_rule() -> None:
    chosen = {
        "endpoint": {"name": "address", "key": "url"},
        "primaryKey": {"name": "mine", "key": "one"},
        "secondaryConnectionString": {"name": "mine", "key": "two"},
    }
    spec = QUEUE | {"operatorSpec": {"secrets": chosen}}
    found, problems = secrets_of(spec, APP, RuleKeys("other", KeyPair("c", "d")))
    by_name = {each.name: each for each in found}
    assert problems == []
    assert by_name["address"].data == {"url": b"sb://shop.shop.svc/"}
    assert by_name["address"].type == "Opaque"
    assert by_name["mine"].data["one"] == KEYS.primary.encode()
    assert (
        by_name["mine"].data["two"].endswith(b"SharedAccessKey=secondary;EntityPath=Sales/Orders")
    )


def test_a_chosen_name_can_be_that_of_a_rules_secret() -> None:
    chosen = {"primaryKey": {"name": "orders-queue-app", "key": "sas"}}
    (secret,), _ = secrets_of(QUEUE | {"operatorSpec": {"secrets": chosen}}, APP)
    assert secret.type == "servicebinding.io/postbus"
    assert secret.data["sas"] == secret.data["password"]


def test_chosen_keys_without_a_rule_are_reported_and_the_endpoint_is_written() -> None:
    chosen = {
        "endpoint": {"name": "address", "key": "url"},
        "primaryKey": {"name": "mine", "key": "one"},
    }
    (secret,), (problem,) = secrets_of(QUEUE | {"operatorSpec": {"secrets": chosen}})
    assert secret.name == "address"
    assert problem.reason == "SourceMissing"
    assert "operatorSpec.secrets names primaryKey" in problem.message
    assert "authorizationRules" in problem.message


def test_texts_of_objects_contain_no_key() -> None:
    found, _ = secrets_of(QUEUE, APP)
    assert KEYS.primary not in repr((found, APP, ENDPOINT))
    assert KEYS.secondary not in repr((found, APP, ENDPOINT))
