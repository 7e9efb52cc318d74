from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from postbus.contract import DAY_MS, Right, Sku
from postbus.manifests import BusDefinition, RuleKeys, read_manifests, read_one_bus
from postbus.yaml_documents import ManifestError

NAMESPACE = """\
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: shop-bus}
spec: {}
"""
QUEUE = """\
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: orders}
spec:
  owner: {name: shop-bus}
"""


def write(folder: Path, *documents: str, name: str = "bus.yaml") -> Path:
    path = folder / name
    path.write_text("---\n".join(dedent(document) for document in documents))
    return path


def read(folder: Path, *documents: str) -> BusDefinition:
    return read_one_bus([write(folder, *documents)])


def complaints(folder: Path, *documents: str) -> list[str]:
    path = write(folder, *documents)
    with pytest.raises(ManifestError) as caught:
        read_one_bus([path])
    return [str(problem).removeprefix(f"{path}") for problem in caught.value.problems]


# --- what is read -------------------------------------------------------------------------------


def test_queue_belongs_to_the_namespace_it_names(tmp_path: Path) -> None:
    bus = read(tmp_path, NAMESPACE, QUEUE)
    assert bus.name == "shop-bus"
    assert [queue.name for queue in bus.queues] == ["orders"]


def test_order_of_documents_does_not_matter(tmp_path: Path) -> None:
    assert read(tmp_path, QUEUE, NAMESPACE) == read(tmp_path, NAMESPACE, QUEUE)


def test_folder_is_read_file_by_file(tmp_path: Path) -> None:
    write(tmp_path, NAMESPACE, name="a.yaml")
    write(tmp_path, QUEUE, name="b.yml")
    write(tmp_path, "not: read", name="c.json")
    assert len(read_one_bus([tmp_path]).queues) == 1


def test_entity_name_wins_over_the_name_of_the_resource(tmp_path: Path) -> None:
    bus = read(tmp_path, NAMESPACE, QUEUE + "  entityName: Shop/Orders_1\n")
    assert bus.queues[0].name == "Shop/Orders_1"


@pytest.mark.behaviour("S92")
def test_properties_are_read(tmp_path: Path) -> None:
    spec = """\
      lockDuration: PT30S
      maxDeliveryCount: 3
      defaultMessageTimeToLive: P2D
      deadLetteringOnMessageExpiration: true
      status: SendDisabled
    """
    bus = read(tmp_path, NAMESPACE, QUEUE + dedent(spec).replace("\n", "\n  ").join(["  ", "\n"]))
    properties = bus.queues[0].properties
    assert properties.lock_duration_ms == 30_000
    assert properties.max_delivery_count == 3
    assert properties.default_message_ttl_ms == 2 * DAY_MS
    assert properties.dead_lettering_on_message_expiration is True
    assert properties.status.value == "SendDisabled"


@pytest.mark.behaviour("S100", "S266", "S277")
def test_defaults_are_those_of_the_tier(tmp_path: Path) -> None:
    bus = read(tmp_path, NAMESPACE.replace("{}", "{sku: {name: Basic}}"), QUEUE)
    assert bus.properties.sku.name is Sku.BASIC
    properties = bus.queues[0].properties
    assert properties.default_message_ttl_ms == 14 * DAY_MS
    assert properties.max_delivery_count == 10
    assert properties.dead_lettering_on_message_expiration is False


SECRET = """\
apiVersion: v1
kind: Secret
metadata: {name: shop-keys}
type: Opaque
data:
  primaryKey: b2xkLXByaW1hcnk=
  secondaryKey: c2Vjb25k
stringData:
  primaryKey: first
"""
WITH_RULES = """\
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: shop-bus}
spec:
  authorizationRules:
    - {name: everything, rights: [Manage], secretName: shop-keys}
    - {name: reader, rights: [Listen]}
"""


def test_keys_come_from_the_secret_that_the_rule_names(tmp_path: Path) -> None:
    first, second = read(tmp_path, WITH_RULES, SECRET).rules
    assert (first.name, first.rights) == ("everything", frozenset(Right))
    assert first.keys == RuleKeys("first", "second")
    assert (second.rights, second.keys) == (frozenset({Right.LISTEN}), None)


def test_keys_are_not_shown_in_text_of_objects(tmp_path: Path) -> None:
    text = repr(read(tmp_path, WITH_RULES, SECRET))
    assert "everything" in text
    assert "first" not in text
    assert "second" not in text


def test_queue_of_another_cluster_namespace_needs_permission(tmp_path: Path) -> None:
    queue = QUEUE.replace("{name: orders}", "{name: orders, namespace: team}").replace(
        "{name: shop-bus}", "{name: shop-bus, namespace: default}"
    )
    assert complaints(tmp_path, NAMESPACE, queue) == [
        ":10: spec.owner: the bus admits queues of its own cluster namespace default only"
    ]
    open_bus = NAMESPACE.replace("{}", "{operatorSpec: {allowedNamespaces: {from: All}}}")
    assert len(read(tmp_path, open_bus, queue).queues) == 1


# --- what is refused ----------------------------------------------------------------------------


def test_complaint_names_file_line_and_field(tmp_path: Path) -> None:
    assert complaints(tmp_path, NAMESPACE, QUEUE + "  lockDuration: PT6M\n") == [
        ":11: spec.lockDuration: must be between PT5S and PT5M"
    ]


def test_all_complaints_come_at_once(tmp_path: Path) -> None:
    found = complaints(
        tmp_path,
        NAMESPACE.replace("{}", "{sku: {name: Gold}}"),
        QUEUE + "  maxDeliveryCount: 0\n  status: Paused\n",
    )
    assert [line.split(": ")[1] for line in found] == [
        "spec.sku.name",
        "spec.maxDeliveryCount",
        "spec.status",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lockDurations: PT1M", "spec.lockDurations: unknown field; did you mean lockDuration?"),
        ("lockDuration: 60000", "spec.lockDuration: use an ISO 8601 duration"),
        ('maxDeliveryCount: "3"', "spec.maxDeliveryCount: input should be a valid integer"),
        ("requiresSession: true", "spec.requiresSession: sessions are not available yet"),
        ("requiresSession: 'yes'", "spec.requiresSession: input should be a valid boolean"),
        ("entityName: a//b", "spec.entityName: a queue's name has"),
        ("maxSizeInMegabytes: 10240", "spec.maxSizeInMegabytes: this tier allows 1024, 2048"),
        ("maxDeliveryCount: .nan", "this number cannot be used"),
        ("maxDeliveryCount: 99999999999999999999", "this number is too large"),
        ("status: !!binary aGk=", "values tagged"),
    ],
)
def test_mistake_in_a_queue(tmp_path: Path, line: str, expected: str) -> None:
    (found,) = complaints(tmp_path, NAMESPACE, QUEUE + f"  {line}\n")
    assert found.startswith(f":11: {expected}")


@pytest.mark.behaviour("S101")
def test_basic_namespace_refuses_more_than_fourteen_days(tmp_path: Path) -> None:
    basic = NAMESPACE.replace("{}", "{sku: {name: Basic}}")
    assert complaints(tmp_path, basic, QUEUE + "  defaultMessageTimeToLive: P15D\n") == [
        ":11: spec.defaultMessageTimeToLive: this tier allows at most P14D"
    ]


def test_owner_must_be_defined(tmp_path: Path) -> None:
    found = complaints(tmp_path, NAMESPACE, QUEUE.replace("shop-bus", "shop-buss"))
    assert found == [":10: spec.owner.name: the Namespace shop-buss is not among the manifests"]


def test_missing_field_is_reported_at_its_parent(tmp_path: Path) -> None:
    found = complaints(
        tmp_path, NAMESPACE, QUEUE.replace("owner: {name: shop-bus}", "status: Active")
    )
    assert found == [":9: spec.owner: this field is required"]


def test_secret_must_be_defined_and_hold_a_key(tmp_path: Path) -> None:
    expected = ":6: spec.authorizationRules[0].secretName: the Secret shop-keys "
    assert complaints(tmp_path, WITH_RULES) == [expected + "is not among the manifests"]
    empty = SECRET.replace("primaryKey", "somethingElse")
    assert complaints(tmp_path, WITH_RULES, empty) == [expected + "has no usable primaryKey"]


def test_secret_that_is_no_base64(tmp_path: Path) -> None:
    broken = SECRET.replace("c2Vjb25k", "'%%%'")
    assert complaints(tmp_path, WITH_RULES, broken) == [
        ":15: data.secondaryKey: must be base64 of UTF-8 text"
    ]


def test_same_queue_twice(tmp_path: Path) -> None:
    again = QUEUE.replace("name: orders", "name: orders-2") + "  entityName: ORDERS\n"
    (found,) = complaints(tmp_path, NAMESPACE, QUEUE, again)
    assert found.endswith("has a queue ORDERS already")
    (found,) = complaints(tmp_path, NAMESPACE, QUEUE, QUEUE)
    assert "the same object stands in" in found


@pytest.mark.parametrize(
    ("api_version", "kind", "expected"),
    [
        ("postbus.dev/v1alpha1", "Topic", "kind Topic is not available yet"),
        ("v1", "Namespace", "this is the cluster's own Namespace"),
        ("postbus.dev/v1", "Queue", "apiVersion of kind Queue must be postbus.dev/v1alpha1"),
        ("apps/v1", "Deployment", "apiVersion apps/v1, kind Deployment: only"),
    ],
)
def test_other_kinds(tmp_path: Path, api_version: str, kind: str, expected: str) -> None:
    document = f"apiVersion: {api_version}\nkind: {kind}\n"
    assert complaints(tmp_path, document)[0].startswith(f":2: kind: {expected}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n  - [", ":2: no valid YAML"),
        ("a: 1\na: 2", ":2: the key 'a' stands here twice"),
        ("- 1", ":1: a document must be a mapping"),
        ("? [a]\n: 1", ":1: keys must be plain text"),
        ("a: &a [*a]", ":1: the document is too large or nested too deeply"),
        ("a: \x01", ": no valid YAML"),
    ],
)
def test_text_that_is_no_manifest(tmp_path: Path, text: str, expected: str) -> None:
    (found,) = complaints(tmp_path, text)
    assert found.startswith(expected)


def test_aliases_do_not_make_a_small_file_large(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (found,) = complaints(tmp_path, "\n".join(levels))
    assert "too large" in found


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such file"):
        read_manifests([tmp_path / "absent.yaml"])
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ManifestError, match="not UTF-8"):
        read_manifests([tmp_path / "latin.yaml"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ManifestError, match=r"no \.yaml files"):
        read_manifests([empty])


def test_exactly_one_bus_is_wanted(tmp_path: Path) -> None:
    second = NAMESPACE.replace("shop-bus", "other-bus")
    (found,) = complaints(tmp_path, NAMESPACE, second)
    assert found.endswith("found shop-bus, other-bus")
    assert len(read_manifests([tmp_path / "bus.yaml"])) == 2
