"""Writes the generated parts of the charts: definitions, settings and alerts, tables of values.

`python -m postbus_operator.generate.chartgen charts docs/alerts.yaml docs/operator-alerts.yaml`
writes; with `--check` it compares. A template is the definition of `crds/` with the values of the
chart in its metadata. The groups of all files of alerts are one file in the chart. The table of a
README lists the values that `values.yaml` describes in comments that begin with `# --`, and the
settings of the operator, whose schema is that of `Settings`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic.alias_generators import to_camel

from postbus_operator.crdgen import texts
from postbus_operator.crds import GROUP
from postbus_operator.settings import Settings

CRD_CHART: Final = "postbus-crds"
OPERATOR_CHART: Final = "postbus"
BEGIN: Final = "<!-- values: written by `make crds` -->\n"
END: Final = "<!-- end of values -->\n"

HEAD: Final = "# Written by `make crds` from crds/{name}.\n"
ANNOTATIONS: Final = """\
    {{- if .Values.keep }}
    helm.sh/resource-policy: keep
    {{- end }}
    {{- with .Values.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
"""
LABELS: Final = """\
    app.kubernetes.io/name: postbus
    app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
    {{- with .Values.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
"""

DERIVED: Final = {
    "namespaces", "image", "store_image", "pipeline_image", "driver_role",
    "image_pull_policy",
    "lease_name", "lease_namespace", "identity", "http_host", "http_port",
}  # fmt: skip
"""Settings that follow from other values, or that nobody changes in a cluster."""

KEPT_WORDS: Final = (
    "type", "enum", "minimum", "exclusiveMinimum", "maximum", "minLength", "maxLength",
)  # fmt: skip


# --- templates of definitions -------------------------------------------------------------------


def crd_templates() -> dict[str, str]:
    """Return the name of each template of the CRD chart and its text."""
    return {name: _template(name, text) for name, text in texts().items()}


def _template(name: str, text: str) -> str:
    """Return a definition with places for values in its metadata.

    Raises:
        ValueError: the definition has no such places, or helm would read a part as a template.
    """
    if "{{" in text:
        raise ValueError(f"{name}: helm reads {{{{ as the begin of an action")
    made = HEAD.format(name=name) + text.partition("\n")[2]
    for label, added in (
        (f"{GROUP}/arm-api-version", ANNOTATIONS),
        ("servicebinding.io/provisioned-service", LABELS),
    ):
        places = re.findall(rf"^    {re.escape(label)}: .*\n", made, re.MULTILINE)
        if len(places) != 1:
            raise ValueError(f"{name}: {len(places)} lines with {label}")
        made = made.replace(places[0], places[0] + added)
    return made


# --- tables of values ---------------------------------------------------------------------------


def readme(chart: Path, more: str = "") -> str:
    """Return the README of a chart with the table of its values, and more rows.

    Raises:
        ValueError: it has no place for the table.
    """
    text = (chart / "README.md").read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{chart}/README.md: no place for the table of values")
    return before + begin + "\n" + values_table(chart) + more + "\n" + end + after


def values_table(chart: Path) -> str:
    """Return the described values of a chart as a table: name, default, meaning."""
    text = (chart / "values.yaml").read_text(encoding="utf-8")
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for path, default, meaning in described_values(text):
        shown = "" if default is None else f"`{json.dumps(default)}`"
        rows.append(f"| `{path}` | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"


def described_values(text: str) -> Iterator[tuple[str, Any, str]]:
    """Yield path, default and description of each value that has a description."""
    lines = text.splitlines()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        yield from _described(root, lines, "")


def _described(
    mapping: yaml.MappingNode, lines: list[str], prefix: str
) -> Iterator[tuple[str, Any, str]]:
    for key, node in mapping.value:
        path = f"{prefix}{key.value}"
        meaning = _comment_above(lines, key.start_mark.line)
        if meaning:
            yield path, yaml.safe_load(yaml.serialize(node)), meaning
        elif isinstance(node, yaml.MappingNode):
            yield from _described(node, lines, f"{path}.")


def _comment_above(lines: list[str], at: int) -> str:
    """Return the comment right above a line if it is a description."""
    words: list[str] = []
    while at and lines[at - 1].lstrip().startswith("#"):
        at -= 1
        words.insert(0, lines[at].strip().removeprefix("#").strip())
    said = " ".join(words)
    return said.removeprefix("-- ") if said.startswith("-- ") else ""


# --- settings of the operator -------------------------------------------------------------------


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of `settings`: the operator's settings that users may set."""
    found = Settings.model_json_schema()["properties"]
    properties = {
        to_camel(name): {word: each[word] for word in KEPT_WORDS if word in each}
        for name, each in found.items()
        if name not in DERIVED
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings_table() -> str:
    """Return these settings as rows of the table of values."""
    rows = []
    for name, each in Settings.model_json_schema()["properties"].items():
        if name not in DERIVED:
            meaning = " ".join(each["description"].split()).partition(" Default: ")[0]
            rows.append(
                f"| `settings.{to_camel(name)}` | `{json.dumps(each['default'])}` | {meaning} |"
            )
    return "\n".join(rows) + "\n"


def values_schema(chart: Path) -> str:
    """Return the schema of a chart's values with that of the settings in it."""
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    schema["properties"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2) + "\n"


# --- files --------------------------------------------------------------------------------------


GROUPS: Final = "groups:\n"


def joined_alerts(files: Sequence[Path]) -> str:
    """Return the groups of several files of rules as one file."""
    made = f"# Written by `make crds` from {', '.join(each.name for each in files)}.\n"
    for number, each in enumerate(files):
        head, groups, rules = each.read_text(encoding="utf-8").partition(GROUPS)
        made += head + (groups if number == 0 else "") + rules
    return made


def chart_files(charts: Path, alerts: Sequence[Path]) -> dict[Path, str]:
    """Return the path of each generated file and its text."""
    crds, operator = charts / CRD_CHART, charts / OPERATOR_CHART
    made = {crds / "templates" / name: text for name, text in crd_templates().items()}
    made[crds / "README.md"] = readme(crds)
    made[operator / "README.md"] = readme(operator, settings_table())
    made[operator / "values.schema.json"] = values_schema(operator)
    made[operator / "files" / "alerts.yaml"] = joined_alerts(alerts)
    return made


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them; return the exit code."""
    is_check = "--check" in arguments
    charts, *alerts = (Path(each) for each in arguments if not each.startswith("-"))
    is_stale = False
    for path, text in chart_files(charts, alerts).items():
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path}: not what its source says; run make crds")
            is_stale = True
    return 1 if is_stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
