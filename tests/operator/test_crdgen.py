"""Custom resource definitions: canonical, complete, in step with the models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from postbus.contract.resources import Owner, QueueSpec
from postbus_operator.crdgen import definition_of, main, schema_of, texts
from postbus_operator.crds import KINDS, Kind
from postbus_operator.descriptions import DESCRIPTIONS, key_of
from postbus_operator.generate import reference

CRDS = Path(__file__).resolve().parent.parent.parent / "crds"
MOST_BYTES = 100 * 1024

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def schemas(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema with its path."""
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from schemas(each, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from schemas(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from schemas(schema["additionalProperties"], f"{path}{{}}")


def spec_of(kind: str) -> dict[str, Any]:
    [found] = [each for each in KINDS if each.name == kind]
    spec: dict[str, Any] = schema_of(found)["properties"]["spec"]
    return spec


def test_files_are_what_the_models_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(CRDS)]) == 0
    assert main([str(tmp_path)]) == 0
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == texts()
    (tmp_path / "queues.yaml").write_text("kind: Queue\n")
    (tmp_path / "sagas.yaml").touch()
    assert main(["--check", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "queues.yaml: not what the models say; run make crds" in said
    assert "sagas.yaml" in said


@every_kind
def test_definition_fits_client_side_apply(kind: Kind) -> None:
    """kubectl keeps it in an annotation, and those have 256 KiB together."""
    assert len(yaml.safe_dump(definition_of(kind)).encode()) < MOST_BYTES


@every_kind
def test_schema_is_structural(kind: Kind) -> None:
    for path, schema in schemas(schema_of(kind), ""):
        assert {"$ref", "$defs", "anyOf", "allOf", "oneOf", "title", "const"}.isdisjoint(schema)
        is_free = (
            "x-kubernetes-preserve-unknown-fields" in schema
            or "x-kubernetes-int-or-string" in schema
        )
        assert "type" in schema or is_free, path
        assert "nullable" not in schema, path


@every_kind
def test_strings_with_rules_are_bounded(kind: Kind) -> None:
    """The API server estimates the cost of a rule from the longest value."""
    for path, schema in schemas(schema_of(kind), ""):
        if "x-kubernetes-validations" in schema and schema.get("type") == "string":
            assert schema["maxLength"] <= 260, path


@every_kind
def test_lists_say_how_writers_share_them(kind: Kind) -> None:
    for path, schema in schemas(schema_of(kind), ""):
        if schema.get("type") == "array":
            assert schema["x-kubernetes-list-type"] in {"map", "set", "atomic"}, path
            keys = schema.get("x-kubernetes-list-map-keys", [])
            assert set(keys) <= set(schema["items"].get("required", ())), path


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("spec.rules", "name"),
        ("spec.authorizationRules", "name"),
        ("status.conditions", "type"),
        ("spec.operatorSpec.storage.stores", "name"),
    ],
)
def test_items_of_a_list_have_a_key(path: str, key: str) -> None:
    found = [
        schema["x-kubernetes-list-map-keys"]
        for kind in KINDS
        for name, schema in schemas(schema_of(kind), "")
        if name == path
    ]
    assert found
    assert all(keys == [key] for keys in found)


def test_every_field_has_a_description_and_none_is_left_over() -> None:
    used = {kind.name for kind in KINDS} | {"spec", "status"}
    for kind in KINDS:
        for part in ("spec", "status"):
            for path, schema in schemas(schema_of(kind)["properties"][part], part):
                if path != part and not path.endswith(("[]", "{}")):
                    assert schema["description"]
                    used.add(key_of(path))
    assert used == set(DESCRIPTIONS)


def test_defaults_are_those_of_the_models() -> None:
    spec = spec_of("Queue")["properties"]
    shown = QueueSpec(owner=Owner(name="bus")).model_dump(
        by_alias=True, mode="json", exclude_none=True
    )
    ours = {name: field["default"] for name, field in spec.items() if "default" in field}
    assert ours == {
        name: value
        for name, value in shown.items()
        if name not in {"owner", "maxMessageSizeInKilobytes", "authorizationRules"}
    }
    assert ours["lockDuration"] == "PT1M"


def test_nested_defaults_are_written_out() -> None:
    """A bare `{}` would be checked before the fields below it have their defaults."""
    default = spec_of("Namespace")["properties"]["operatorSpec"]["default"]
    assert default["brokers"] == 1
    assert default["storage"]["stores"][0]["managed"]["size"] == "10Gi"
    assert default["allowedNamespaces"] == {"from": "Same"}


def test_names_never_collide_with_those_of_kubernetes() -> None:
    names = {kind.name: definition_of(kind)["spec"]["names"] for kind in KINDS}
    assert names["Namespace"]["plural"] == "busnamespaces"
    assert [each["shortNames"] for each in names.values()] == [
        ["sbns"],
        ["sbq"],
        ["sbt"],
        ["sbsub"],
        ["sbpipe"],
    ]
    for each in names.values():
        # `kubectl delete all --all` must not delete queues.
        assert each["categories"] == ["postbus", "messaging"]


def test_reference_has_every_field_and_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = CRDS.parent / "docs" / "guides" / "kubernetes-reference.md"
    assert reference.main(["--check", str(page)]) == 0
    text = page.read_text()
    assert "| `lockDuration` | duration | `PT1M` | Time that a receiver has" in text
    assert "| `requiresSession` | boolean | `false` | Messages have sessions" in text
    assert "*For life.*" in next(line for line in text.splitlines() if "`owner.name`" in line)
    assert "*For life.*" not in next(line for line in text.splitlines() if "`sku.name`" in line)
    for kind in KINDS:
        for rule in kind.rules:
            assert "oldSelf" in rule.expression or f"- {rule.message}" in text
    stale = tmp_path / "reference.md"
    assert reference.main(["--check", str(stale)]) == 1
    assert "run make crds" in capsys.readouterr().out
    assert reference.main([str(stale)]) == 0
    assert stale.read_text() == text
