"""Generate the custom resource definitions from the models of the contract.

`python -m postbus_operator.crdgen crds` writes a file for each kind. The files are what an API
server returns for them: no default is written that it would leave out. JSON schema of pydantic
becomes a structural schema (https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/):
no references, no null, no alternatives but "integer or string".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from postbus.contract.durations import parse_duration_ms
from postbus_operator.crds import (
    ARM_API_VERSION,
    GROUP,
    KINDS,
    OVERRIDES,
    VERSION,
    Column,
    Kind,
    Rule,
)
from postbus_operator.descriptions import describe

Schema = dict[str, Any]

LIST_KEYS: Final = {
    "authorizationRules": "name",
    "conditions": "type",
    "env": "name",
    "partitions": "id",
    "rules": "name",
    "stores": "name",
}
"""Lists whose items have a key, so that several writers can own items -> the key."""

SETS: Final = {"rights"}
FREE: Final = {"affinity", "topologySpreadConstraints[]"}
"""Objects that Kubernetes checks when it makes the pod."""

KEPT_WORDS: Final = (
    "type", "format", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern",
)  # fmt: skip
DURATION_PARTS: Final = (("D", 86_400), ("H", 3_600), ("M", 60), ("S", 1))


# --- schemas ------------------------------------------------------------------------------------


class _Structural:
    """Turns the schema of one model into a structural one."""

    def __init__(self, model: type[BaseModel]) -> None:
        # Defaults are written as users write them in this mode: PT1M, not 60000.
        self._schema = model.model_json_schema(mode="serialization")
        self._definitions = self._schema.get("$defs", {})

    def convert(self, path: str) -> Schema:
        return self._object(self._schema, path)

    def _any(self, schema: Mapping[str, Any], path: str) -> Schema:
        schema = self._resolved(schema)
        options = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
        if len(options) == 1:
            return self._any({**schema, **options[0], "anyOf": ()}, path)
        if options:
            return self._alternatives([self._resolved(each) for each in options])
        if path.rpartition(".")[2] in FREE:
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        kind = schema.get("type", "null")
        if kind == "object":
            return self._object(schema, path)
        if kind == "array":
            return self._array(schema, path)
        if kind == "null":
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        kept = _kept(schema)
        if "const" in schema:
            kept["enum"] = [schema["const"]]
        rules = list(_duration_rules(schema))
        return kept | ({"x-kubernetes-validations": rules} if rules else {})

    def _resolved(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        if "$ref" not in schema:
            return dict(schema)
        found = self._definitions[schema["$ref"].rpartition("/")[2]]
        return {**found, **{word: each for word, each in schema.items() if word != "$ref"}}

    @staticmethod
    def _alternatives(options: list[dict[str, Any]]) -> Schema:
        if {each.get("type") for each in options} == {"integer", "string"} and len(options) == 2:
            merged = {word: value for each in options for word, value in _kept(each).items()}
            del merged["type"]
            return {**merged, "x-kubernetes-int-or-string": True}
        return {"x-kubernetes-preserve-unknown-fields": True}

    def _array(self, schema: Mapping[str, Any], path: str) -> Schema:
        name = path.rpartition(".")[2]
        made: Schema = {"type": "array", "items": self._any(schema["items"], f"{path}[]")}
        made |= {word: schema[word] for word in ("minItems", "maxItems") if word in schema}
        if name in SETS:
            made["x-kubernetes-list-type"] = "set"
        elif name in LIST_KEYS and "properties" in made["items"]:
            made["x-kubernetes-list-type"] = "map"
            made["x-kubernetes-list-map-keys"] = [LIST_KEYS[name]]
        else:
            made["x-kubernetes-list-type"] = "atomic"
        return made

    def _object(self, schema: Mapping[str, Any], path: str) -> Schema:
        if "properties" not in schema:
            # A structural schema knows no patterns of names: they need a rule.
            patterns = schema.get("patternProperties") or {"": schema["additionalProperties"]}
            [values] = patterns.values()
            words = ("minProperties", "maxProperties")
            limit = {word: schema[word] for word in words if word in schema}
            values = {"type": "string"} if values is True else self._any(values, f"{path}{{}}")
            return {"type": "object", "additionalProperties": values, **limit}
        properties = {}
        for name, field in schema["properties"].items():
            below = f"{path}.{name}"
            made = {"description": describe(below), **self._any(field, below)}
            default = _pruned(field.get("default"))
            if default is not None and default not in ([], {}):
                made["default"] = default
            made |= OVERRIDES.get(name, {})
            properties[name] = {word: each for word, each in made.items() if each is not None}
        required = schema.get("required")
        return {
            "type": "object",
            **({"required": sorted(required)} if required else {}),
            "properties": properties,
        }


def _kept(schema: Mapping[str, Any]) -> Schema:
    return {word: schema[word] for word in KEPT_WORDS if word in schema}


def _pruned(value: Any) -> Any:
    """Return a default without nulls, which the API server does not store."""
    if isinstance(value, dict):
        return {name: _pruned(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_pruned(each) for each in value]
    return value


def _duration_rules(schema: Mapping[str, Any]) -> Iterator[Schema]:
    if "x-minimum" not in schema:
        return
    least, most = schema["x-minimum"], schema.get("x-maximum")
    seconds = _in_seconds("self")
    in_range = f"{seconds} >= {_seconds(least)}"
    said = f"must be at least {least}"
    if most is not None:
        in_range += f" && {seconds} <= {_seconds(most)}"
        said = f"must be between {least} and {most}"
    yield {
        "rule": "self.size() > 1 && !self.endsWith('T')",
        "message": "use an ISO 8601 duration such as PT30S, PT5M or P14D",
    }
    yield {"rule": in_range, "message": said}


def _seconds(text: str) -> str:
    return f"{parse_duration_ms(text) / 1_000}"


def _in_seconds(value: str) -> str:
    """Return an expression for the seconds of a duration that its pattern admits."""
    return (
        "("
        + " + ".join(
            f"({value}.contains('{unit}')"
            f" ? double({value}.find('[0-9.]+{unit}').replace('{unit}', '')) : 0.0)"
            f" * {seconds}.0"
            for unit, seconds in DURATION_PARTS
        )
        + ")"
    )


# --- rules, columns, definitions ----------------------------------------------------------------


def _place(schema: Schema, path: str) -> Schema:
    """Return the schema at a path such as `spec.rules[].correlationFilter`."""
    for name in path.split(".") if path else ():
        schema = schema["properties"][name.removesuffix("[]")]
        if name.endswith("[]"):
            schema = schema["items"]
    return schema


def _add_rule(schema: Schema, rule: Rule) -> None:
    said: Schema = {"rule": rule.expression, "message": rule.message, "reason": "FieldValueInvalid"}
    if rule.field:
        said["fieldPath"] = f".{rule.field}"
    _place(schema, rule.path).setdefault("x-kubernetes-validations", []).append(said)


def _column(column: Column) -> Schema:
    shown: Schema = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return shown | ({"priority": column.priority} if column.priority else {})


def schema_of(kind: Kind) -> Schema:
    """Return the structural schema of a kind's objects."""
    spec = _Structural(kind.spec).convert("spec")
    schema: Schema = {
        "type": "object",
        "description": describe(kind.name),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {"description": describe("spec"), **spec},
            "status": {
                "description": describe("status"),
                **_Structural(kind.status).convert("status"),
            },
        },
    }
    for rule in kind.rules:
        _add_rule(schema, rule)
    return schema


def definition_of(kind: Kind) -> Schema:
    """Return the CustomResourceDefinition of a kind."""
    subresources: Schema = {"status": {}}
    if kind.has_scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.operatorSpec.brokers",
            "statusReplicasPath": ".status.brokers",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{GROUP}",
            "annotations": {f"{GROUP}/arm-api-version": ARM_API_VERSION},
            "labels": {"servicebinding.io/provisioned-service": "true"},
        },
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.singular,
                "shortNames": [kind.short_name],
                "categories": ["postbus", "messaging"],
            },
            "scope": "Namespaced",
            "conversion": {"strategy": "None"},
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema_of(kind)},
                    "subresources": subresources,
                    "additionalPrinterColumns": [_column(each) for each in kind.columns],
                }
            ],
        },
    }


def texts() -> dict[str, str]:
    """Return the name of each file and its text."""
    return {
        f"{kind.plural}.yaml": "# Written by `make crds`.\n"
        + yaml.safe_dump(definition_of(kind), sort_keys=False, width=100, allow_unicode=True)
        for kind in KINDS
    }


def main(arguments: list[str]) -> int:
    """Write the files into a folder, or with `--check` compare them; return the exit code."""
    is_check = "--check" in arguments
    [folder] = [Path(each) for each in arguments if not each.startswith("-")]
    wanted = texts()
    if is_check:
        stale = [
            name
            for name, text in wanted.items()
            if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != text
        ]
        extra = sorted({each.name for each in folder.glob("*.yaml")} - set(wanted))
        for name in stale + extra:
            print(f"{folder / name}: not what the models say; run make crds")
        return 1 if stale or extra else 0
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
