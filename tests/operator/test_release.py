"""Deletion of resources: what is asked of whom, and when it is over."""

from __future__ import annotations

from typing import Any

import pytest

from postbus.contract.control import DeletionPolicy
from postbus_operator.annotations import FINALIZER
from postbus_operator.bus.marks import mark_of
from postbus_operator.bus.view import LiveEntity
from postbus_operator.entities.idle import is_kept_by_a_tool, policy_of
from postbus_operator.entities.owners import NoOwner, Owner, is_owner_gone, owner_of, selects
from postbus_operator.entities.release import (
    AskTheBus,
    Blocked,
    Delete,
    Free,
    release,
    release_known,
    release_unasked,
)
from postbus_operator.objects import Key, Resource
from tests.operator.objects import entity, shown

DELETED = {"deletionTimestamp": "2026-11-23T10:00:00Z", "finalizers": [FINALIZER]}


def deleted(operator_spec: dict[str, Any], **annotations: str) -> Resource:
    notes = {f"postbus.dev/{name.replace('_', '-')}": each for name, each in annotations.items()}
    metadata = DELETED | {"annotations": notes}
    return Resource.from_object(
        "Queue", entity("Queue", "orders", metadata=metadata, operatorSpec=operator_spec)
    )


def live_of(resource: Resource, mark: str | None = None) -> LiveEntity:
    return LiveEntity("queue", "orders", 5, "hash", mark_of(resource) if mark is None else mark, 7)


@pytest.mark.parametrize(
    ("policy", "call"),
    [
        ("Delete", DeletionPolicy.RETAIN),
        ("DeleteIfEmpty", DeletionPolicy.DELETE_IF_EMPTY),
        ("Retain", None),
        (None, DeletionPolicy.DELETE_IF_EMPTY),
    ],
)
def test_words_of_a_resource_are_other_words_of_the_control_api(
    policy: str | None, call: DeletionPolicy | None
) -> None:
    resource = deleted({} if policy is None else {"deletionPolicy": policy})
    if call is None:
        assert release(resource, is_owner_gone=False) == Free()
    else:
        assert release(resource, is_owner_gone=False) == AskTheBus()
        assert release_known(resource, live_of(resource)) == Delete(call, 7)


@pytest.mark.parametrize("policy", ["Delete", "DeleteIfEmpty", "Retain"])
@pytest.mark.parametrize("protection", [True, False])
def test_an_owner_that_goes_and_force_free_at_once(policy: str, protection: bool) -> None:
    spec = {"deletionPolicy": policy, "deletionProtection": protection}
    assert release(deleted(spec, paused="true"), is_owner_gone=True) == Free()
    assert release(deleted(spec, force_release="true"), is_owner_gone=False) == Free()


@pytest.mark.parametrize("mark", ["", "terraform", "postbus.dev/queues/shop/other/1"])
def test_what_is_not_its_own_is_left_alone(mark: str) -> None:
    resource = deleted({"deletionProtection": True})
    assert release_known(resource, live_of(resource, mark)) == Free()
    assert release_known(resource, None) == Free()


def test_protection_and_pause_hold_a_deletion_and_say_what_ends_it() -> None:
    for spec, notes, words in (
        ({"deletionProtection": True}, {}, "deletionProtection"),
        ({"deletionProtection": True, "deletionPolicy": "Retain"}, {}, "deletionProtection"),
        ({}, {"paused": "true"}, "postbus.dev/paused"),
    ):
        resource = deleted(spec, **notes)
        assert release(resource, is_owner_gone=False) == AskTheBus()
        step = release_known(resource, live_of(resource))
        assert isinstance(step, Blocked)
        assert words in step.message


def test_bus_that_does_not_answer_holds_only_what_it_has() -> None:
    assert release_unasked(deleted({}), "no pod is ready") == Free()
    made = Resource.from_object(
        "Queue", entity("Queue", "orders", metadata=DELETED) | {"status": {"entityId": "5"}}
    )
    step = release_unasked(made, "no pod is ready")
    assert isinstance(step, Blocked)
    assert "no pod is ready" in step.message
    assert "force-release" in step.message


@pytest.mark.parametrize("policy", ["DetachOnDelete", "Observe"])
def test_detached_and_observed_entities_are_never_deleted(policy: str) -> None:
    resource = deleted({"reconcilePolicy": policy, "deletionPolicy": "Delete"})
    assert release(resource, is_owner_gone=False) == Free()


# --- owners -------------------------------------------------------------------------------------


def cluster(*found: dict[str, Any]) -> Any:
    resources = [Resource.from_object(each["kind"], each) for each in found]
    return {each.key: each for each in resources}.get


BUS = shown("Namespace", "bus", spec={})
GOING = shown("Namespace", "bus", spec={}, metadata=DELETED)
TOPIC = entity("Topic", "events")
SUBSCRIPTION = Resource.from_object("Subscription", entity("Subscription", "s", owner="events"))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((BUS, TOPIC), None),
        ((BUS,), "NotFound"),
        ((TOPIC,), "NotFound"),
        ((GOING, TOPIC), "Deleting"),
        ((BUS, TOPIC | {"metadata": TOPIC["metadata"] | DELETED}), "Deleting"),
    ],
)
def test_a_subscription_needs_its_topic_and_the_bus(found: Any, reason: str | None) -> None:
    owner = owner_of(SUBSCRIPTION, cluster(*found), lambda name: {})
    assert is_owner_gone(SUBSCRIPTION, cluster(*found)) is (reason is not None)
    if reason is None:
        assert isinstance(owner, Owner)
        assert (owner.direct.key.kind, owner.bus.key.kind) == ("Topic", "Namespace")
    else:
        assert isinstance(owner, NoOwner)
        assert owner.reason == reason


@pytest.mark.parametrize(
    ("allowed", "namespace", "is_admitted"),
    [
        ({}, "shop", True),
        ({}, "team", False),
        ({"from": "Same"}, "team", False),
        ({"from": "All"}, "team", True),
        ({"from": "Selector", "selector": {"matchLabels": {"a": "b"}}}, "team", True),
        ({"from": "Selector", "selector": {"matchLabels": {"a": "c"}}}, "team", False),
        ({"from": "Selector", "selector": {"matchLabels": {"a": "c"}}}, "shop", True),
    ],
)
def test_allowed_namespaces_decide(allowed: Any, namespace: str, is_admitted: bool) -> None:
    bus = shown("Namespace", "bus", spec={"operatorSpec": {"allowedNamespaces": allowed}})
    above = {"name": "bus", "namespace": "shop"}
    queue = entity("Queue", "orders", namespace=namespace) | {"spec": {"owner": above}}
    found = owner_of(Resource.from_object("Queue", queue), cluster(bus), lambda name: {"a": "b"})
    assert isinstance(found, Owner) is is_admitted


@pytest.mark.parametrize(
    ("expression", "is_selected"),
    [
        ({"operator": "In", "values": ["b", "c"]}, True),
        ({"operator": "NotIn", "values": ["b"]}, False),
        ({"operator": "Exists"}, True),
        ({"operator": "DoesNotExist"}, False),
    ],
)
def test_selectors_are_those_of_kubernetes(expression: Any, is_selected: bool) -> None:
    selector = {"matchExpressions": [{"key": "a"} | expression]}
    assert selects(selector, {"a": "b"}) is is_selected
    opposite = expression["operator"] in ("NotIn", "DoesNotExist")
    assert selects(selector, {}) is opposite
    assert selects({}, {})


# --- idle deletion ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "annotations"),
    [
        ({"argocd.argoproj.io/instance": "shop"}, {}),
        ({"app.kubernetes.io/instance": "shop"}, {}),
        ({"kustomize.toolkit.fluxcd.io/name": "shop"}, {}),
        ({"helm.toolkit.fluxcd.io/name": "shop"}, {}),
        ({"app.kubernetes.io/managed-by": "Helm"}, {}),
        ({}, {"argocd.argoproj.io/tracking-id": "shop:postbus.dev/Queue:shop/orders"}),
        ({}, {"meta.helm.sh/release-name": "shop"}),
    ],
)
def test_resources_that_a_tool_keeps_stay_after_idle_deletion(
    labels: dict[str, str], annotations: dict[str, str]
) -> None:
    metadata = {"labels": labels, "annotations": annotations}
    kept = Resource.from_object("Queue", entity("Queue", "orders", metadata=metadata))
    assert is_kept_by_a_tool(kept)
    assert policy_of(kept) == "KeepResource"
    said = entity(
        "Queue", "orders", metadata=metadata, operatorSpec={"onAutoDelete": "DeleteResource"}
    )
    assert policy_of(Resource.from_object("Queue", said)) == "DeleteResource"


@pytest.mark.parametrize("labels", [{}, {"app.kubernetes.io/managed-by": "team-shop"}])
def test_resources_of_people_go_with_their_idle_entity(labels: dict[str, str]) -> None:
    own = Resource.from_object("Queue", entity("Queue", "orders", metadata={"labels": labels}))
    assert policy_of(own) == "DeleteResource"
    assert own.key == Key("Queue", "shop", "orders")
