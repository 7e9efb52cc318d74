"""The cache keeps the newest version of each object, slim, with indexes that follow it."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from postbus_operator.certificates import BACKDATE, LEAF_LIFE, leaf_data, new_authority
from postbus_operator.kube.cache import Cache, ObjectKey
from postbus_operator.kube.resource_types import RESOURCES, SECRETS, STATEFUL_SETS
from postbus_operator.kube.slimming import value_digest
from postbus_operator.objects import Key
from postbus_operator.reconcile import RECONCILERS
from tests.operator.objects import entity, shown

BUS = Key("Namespace", "shop", "bus")


def cache_of(*objects: dict) -> Cache:
    cache = Cache()
    for each in objects:
        assert cache.observe(each) is not None
    return cache


def names(resources) -> list[str]:
    return [each.key.name for each in resources]


def test_an_older_version_changes_nothing() -> None:
    """The answer to a write is here before the event of the write before it."""
    cache = cache_of(entity("Queue", "orders", 7, lockDuration="PT2M"))
    assert cache.observe(entity("Queue", "orders", 6, lockDuration="PT1M")) is None
    assert cache.observe(entity("Queue", "orders", 7, lockDuration="PT1M")) is None
    assert cache.get(Key("Queue", "shop", "orders")).spec["lockDuration"] == "PT2M"


def test_a_late_answer_does_not_bring_a_deleted_object_back() -> None:
    cache = cache_of(entity("Queue", "orders", 7))
    assert cache.forget(entity("Queue", "orders", 9)) is not None
    assert cache.observe(entity("Queue", "orders", 8)) is None
    assert cache.get(Key("Queue", "shop", "orders")) is None
    assert cache.observe(entity("Queue", "orders", 10)) is not None


def test_a_late_deletion_does_not_remove_the_next_object_of_that_name() -> None:
    cache = cache_of(entity("Queue", "orders", 7), entity("Queue", "orders", 10))
    assert cache.forget(entity("Queue", "orders", 9)) is None
    assert cache.get(Key("Queue", "shop", "orders")) is not None


def test_a_change_says_what_was_there_before() -> None:
    cache = Cache()
    assert cache.observe(entity("Queue", "orders", 1)).before is None
    change = cache.observe(entity("Queue", "orders", 2))
    assert (change.before.resource_version, change.after.resource_version) == ("1", "2")
    assert cache.forget(entity("Queue", "orders", 3)).after is None


def test_entities_are_found_by_their_owner_in_any_order_of_arrival() -> None:
    cache = cache_of(
        entity("Subscription", "large", owner="events"),
        entity("Queue", "orders"),
        entity("Topic", "events"),
        entity("Queue", "elsewhere", owner="other"),
    )
    assert names(cache.owned_by(BUS)) == ["orders", "events"]
    assert names(cache.owned_by(Key("Topic", "shop", "events"))) == ["large"]
    subscription = cache.get(Key("Subscription", "shop", "large"))
    assert cache.bus_of(subscription) == BUS
    cache.forget(entity("Topic", "events", 2))
    assert cache.bus_of(subscription) is None


def test_a_secret_without_an_owner_is_of_the_resource_that_it_names() -> None:
    """A copy in another namespace is of nobody, also if a resource there has the name."""
    cache = Cache()
    note = {"annotations": {"postbus.dev/resource": "Queue/shop/orders"}}
    for namespace in ("shop", "other"):
        cache.observe(shown("Secret", "left", namespace=namespace, metadata=note))
    (found,) = cache.secrets_owned_by(Key("Queue", "shop", "orders"))
    assert found["metadata"]["namespace"] == "shop"
    assert cache.secrets_owned_by(Key("Queue", "other", "orders")) == []
    for text in ("", "Queue", "Pod/shop/orders", "Queue/shop/orders/x"):
        odd = {"annotations": {"postbus.dev/resource": text}}
        cache.observe(shown("Secret", "odd", metadata=odd))


def test_an_entity_of_another_namespace_is_owned_by_the_bus_it_names() -> None:
    cache = cache_of(
        entity("Queue", "orders", namespace="team", owner={"name": "bus", "namespace": "shop"})
        | {"spec": {"owner": {"name": "bus", "namespace": "shop"}}}
    )
    assert names(cache.owned_by(BUS)) == ["orders"]


def test_claimants_of_a_name_are_listed_oldest_first_whatever_their_case() -> None:
    early, late = "2026-11-23T09:00:00Z", "2026-11-23T10:00:00Z"
    cache = cache_of(
        entity("Queue", "a", entityName="Orders", metadata={"creationTimestamp": late}),
        entity("Topic", "orders", metadata={"creationTimestamp": early}),
        entity("Queue", "other", owner="another-bus", entityName="orders"),
    )
    found = cache.claimants(cache.get(Key("Queue", "shop", "a")))
    assert names(found) == ["orders", "a"]


def test_forwarders_are_those_of_the_same_bus() -> None:
    cache = cache_of(
        entity("Queue", "audit"),
        entity("Queue", "orders", forwardTo="Audit"),
        entity("Queue", "self", forwardDeadLetteredMessagesTo="audit"),
        entity("Queue", "elsewhere", owner="other", forwardTo="audit"),
        entity("Topic", "events"),
        entity("Subscription", "all", owner="events", forwardTo="audit"),
    )
    audit = cache.get(Key("Queue", "shop", "audit"))
    assert sorted(names(cache.forwarders_to(audit))) == ["all", "orders", "self"]
    cache.observe(entity("Queue", "orders", 2))
    assert sorted(names(cache.forwarders_to(audit))) == ["all", "self"]


def test_resources_are_found_by_each_secret_that_they_name() -> None:
    bus = shown(
        "Namespace",
        "bus",
        spec={
            "authorizationRules": [{"name": "app", "rights": ["Send"], "secretName": "app-keys"}],
            "operatorSpec": {
                "tls": {"secretName": "certificate"},
                "secrets": {"endpoint": {"name": "address", "key": "endpoint"}},
                "storage": {
                    "stores": [
                        {
                            "name": "main",
                            "postgres": {
                                "secretRef": {"name": "database", "key": "dsn"},
                                "caSecretRef": {"name": "authority", "key": "ca.crt"},
                            },
                        }
                    ]
                },
            },
        },
    )
    cache = cache_of(bus)
    for secret in ("app-keys", "certificate", "address", "database", "authority"):
        assert names(cache.referencing_secret("shop", secret)) == ["bus"], secret
    for other in ("main", "app", "dsn"):
        assert cache.referencing_secret("shop", other) == []


def test_values_of_secrets_are_digests() -> None:
    value = b64encode(b"hush").decode()
    secret = shown("Secret", "keys", data={"password": value}, metadata={"managedFields": [{}]})
    cache = cache_of(secret)
    kept = cache.find(SECRETS, "shop", "keys")
    assert kept["data"] == {"password": value_digest(value)}
    assert "managedFields" not in kept["metadata"]
    assert secret["data"] == {"password": value}


def test_the_end_of_a_certificate_is_kept_beside_the_digests() -> None:
    now = datetime(2026, 11, 23, 9, tzinfo=UTC)
    authority = new_authority("bus", now)
    leaf = leaf_data(authority, ["bus.shop.svc"], now, None)
    values = {
        "bus-tls": leaf,
        "garbage": {"tls.crt": b"-----BEGIN CERTIFICATE-----"},
        "empty": {"tls.crt": b""},
        "other": {"password": b"hush"},
    }
    secrets = {
        name: shown(
            "Secret", name, data={key: b64encode(each).decode() for key, each in of.items()}
        )
        for name, of in values.items()
    }
    secrets["odd"] = shown("Secret", "odd", data={"tls.crt": "no base64"}, certificateEnd=1)
    cache = cache_of(*secrets.values())
    end = now + LEAF_LIFE - BACKDATE
    assert cache.certificate_ends() == {("shop", "bus-tls"): end.timestamp()}
    cache.forget(shown("Secret", "bus-tls", 2))
    assert cache.certificate_ends() == {}


def test_kubectls_copy_of_an_object_is_not_kept() -> None:
    last = "kubectl.kubernetes.io/last-applied-configuration"
    cache = cache_of(entity("Queue", "orders", metadata={"annotations": {last: "{}", "a": "b"}}))
    assert cache.get(Key("Queue", "shop", "orders")).annotations == {"a": "b"}


def test_children_are_found_by_the_label_of_their_bus() -> None:
    labels = {"postbus.dev/bus": "bus"}
    cache = cache_of(
        shown("StatefulSet", "bus-broker", metadata={"labels": labels}),
        shown("Secret", "bus-tls", metadata={"labels": labels}),
        shown("Secret", "other"),
    )
    found = cache.children_of("shop", "bus")
    assert [each["metadata"]["name"] for each in found] == ["bus-tls", "bus-broker"]
    cache.forget(shown("StatefulSet", "bus-broker", 2, metadata={"labels": labels}))
    assert len(cache.children_of("shop", "bus")) == 1


def test_objects_of_other_types_are_ignored() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "resourceVersion": "1"}}
    assert Cache().observe(pod) is None


def test_what_a_list_lacks_is_dropped_unless_it_is_newer() -> None:
    cache = cache_of(shown("StatefulSet", "old", 4), shown("StatefulSet", "new", 9))
    for key in cache.keys_of(STATEFUL_SETS, "shop"):
        cache.drop(key, 6)
    assert cache.keys_of(STATEFUL_SETS, None) == [ObjectKey(STATEFUL_SETS, "shop", "new")]


def test_each_kind_has_a_type() -> None:
    assert set(RESOURCES) == {"Namespace", "Queue", "Topic", "Subscription", "Pipeline"}
    assert set(RECONCILERS) <= set(RESOURCES)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["observe", "forget"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(1, 30),
        st.sampled_from(["bus", "other"]),
        st.sampled_from([None, "a", "b"]),
    ),
    max_size=40,
)


@given(STEPS)
def test_indexes_equal_a_walk_over_all_resources(steps) -> None:
    """And the newest version decides, whatever the order of arrival."""
    cache = Cache()
    newest: dict[str, tuple[int, dict | None]] = {}
    for verb, name, version, owner, target in steps:
        spec = {} if target is None else {"forwardTo": target}
        found = entity("Queue", name, version, owner=owner, **spec)
        known = newest.get(name, (-1, None))
        if verb == "observe":
            cache.observe(found)
            if version > known[0]:
                newest[name] = version, found
        else:
            cache.forget(found)
            if version >= known[0]:
                newest[name] = version, None
    left = {name: found for name, (_, found) in newest.items() if found is not None}
    assert {each.key.name for each in cache.of_kind("Queue")} == set(left)
    for owner in ("bus", "other"):
        expected = sorted(n for n, f in left.items() if f["spec"]["owner"]["name"] == owner)
        assert names(cache.owned_by(Key("Namespace", "shop", owner))) == expected
    for resource in cache.of_kind("Queue"):
        expected = sorted(
            name
            for name, found in left.items()
            if found["spec"].get("forwardTo") == resource.key.name
            and found["spec"]["owner"]["name"] == resource.owner.name
            and name != resource.key.name
        )
        assert names(cache.forwarders_to(resource)) == expected
