"""The reference of fields for people, from the same schemas as the definitions.

`python -m postbus_operator.generate.reference FILE` writes it; with `--check` it compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from postbus.contract.resources import API_VERSION
from postbus_operator.crdgen import Schema, schema_of
from postbus_operator.crds import KINDS, Kind

HEAD: Final = f"""\
# Kubernetes: reference of fields

<!-- Written by `make crds`. -->

The custom resources of `{API_VERSION}`, as `kubectl explain` shows them. The definitions are in
[crds](../../crds), which come with the [operator](kubernetes.md). Without a cluster `postbus dev`
and `postbus serve` read the same documents as [manifests](getting-started.md).

Fields of Azure Service Bus have its names and defaults. Durations are ISO 8601, such as `PT30S`,
`PT5M` or `P14D`. A field marked *for life* cannot be changed. In paths, `[]` stands for each item
of a list.
"""


def reference_text() -> str:
    """Return the whole page."""
    return HEAD + "".join(_kind(kind) for kind in KINDS)


def _kind(kind: Kind) -> str:
    schema = schema_of(kind)
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    rules = [rule for rule in kind.rules if "oldSelf" not in rule.expression]
    names = f"`{kind.plural}`, `{kind.singular}`, `{kind.short_name}`"
    lines = [
        f"\n## {kind.name}\n",
        f"{schema['description']} For kubectl: {names}.\n",
        "| field of `spec` | type | default | meaning |",
        "|---|---|---|---|",
        *(_row(path, field, kind) for path, field in _fields(spec, "")),
        "\nThe API server also refuses:\n",
        *(f"- {rule.message}" for rule in rules),
        "\n| field of `status` | meaning |",
        "|---|---|",
        *(f"| `{path}` | {field['description']} |" for path, field in _fields(status, "")),
    ]
    return "\n".join(lines) + "\n"


def _fields(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield the fields that hold values, with their paths."""
    for name, field in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        items = field.get("items", {})
        if "properties" in items:
            yield from _fields(items, f"{below}[]")
        elif "properties" in field:
            yield from _fields(field, below)
        else:
            yield below, field


def _row(path: str, field: Schema, kind: Kind) -> str:
    default = _code(field["default"]) if "default" in field else ""
    meaning = field["description"] + (" *For life.*" if _is_for_life(path, kind) else "")
    return f"| `{path}` | {_type(field)} | {default} | {meaning} |"


def _is_for_life(path: str, kind: Kind) -> bool:
    fixed = {
        f"{rule.path}.{rule.field}".strip(".").removeprefix("spec.")
        for rule in kind.rules
        if "cannot be changed" in rule.message
    }
    return path in fixed or path.partition(".")[0] in fixed


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(_code(each) for each in field["enum"])
    if "x-kubernetes-int-or-string" in field:
        return "number or text"
    match field.get("type"):
        case "array":
            return f"list of {_type(field['items'])}"
        case "object" if "additionalProperties" in field:
            return f"map of {_type(field['additionalProperties'])}"
        case "string":
            return "duration" if field.get("pattern", "").startswith("^P(") else "text"
        case None:
            return "value"
        case other:
            return str(other) + _range(field)


def _range(field: Schema) -> str:
    least, most = field.get("minimum"), field.get("maximum")
    if least is None and most is None:
        return ""
    return f", {least} to {most}" if most is not None else f", at least {least}"


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` compare it; return the exit code."""
    is_check = "--check" in arguments
    [path] = [Path(each) for each in arguments if not each.startswith("-")]
    if not is_check:
        path.write_text(reference_text(), encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == reference_text():
        return 0
    print(f"{path}: not what the models say; run make crds")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
