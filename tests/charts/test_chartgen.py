"""Generated parts of the charts: in step with their sources, and nothing lost on the way."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from pydantic.alias_generators import to_camel

from postbus_operator.crdgen import texts
from postbus_operator.generate import chartgen
from postbus_operator.generate.chartgen import (
    CRD_CHART,
    DERIVED,
    OPERATOR_CHART,
    crd_templates,
    described_values,
    main,
)
from postbus_operator.settings import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
CHARTS = ROOT / "charts"
ALERTS = [str(ROOT / "docs" / name) for name in ("alerts.yaml", "operator-alerts.yaml")]
ACTION_LINE = re.compile(r"^ *\{\{.*\}\}\n", re.MULTILINE)

every_chart = pytest.mark.parametrize(
    "chart", sorted(path.parent for path in CHARTS.glob("*/Chart.yaml")), ids=lambda path: path.name
)


def test_files_are_what_their_sources_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", str(CHARTS), *ALERTS]) == 0
    copy = tmp_path / "charts"
    shutil.copytree(CHARTS, copy)
    queues = copy / CRD_CHART / "templates" / "queues.yaml"
    queues.write_text("kind: Queue\n")
    readme = copy / CRD_CHART / "README.md"
    readme.write_text(readme.read_text().replace("`keep`", "`kept`"))
    assert main(["--check", str(copy), *ALERTS]) == 1
    said = capsys.readouterr().out
    assert f"{queues}: not what its source says; run make crds" in said
    assert f"{readme}: not what its source says" in said
    assert main([str(copy), *ALERTS]) == 0
    assert queues.read_text() == (CHARTS / CRD_CHART / "templates" / "queues.yaml").read_text()
    assert main(["--check", str(copy), *ALERTS]) == 0


@pytest.mark.parametrize("name", sorted(texts()))
def test_template_without_its_actions_is_the_definition(name: str) -> None:
    """The places for values stand in the metadata; schema and names are those of `crds/`."""
    template = crd_templates()[name]
    plain = yaml.safe_load(
        ACTION_LINE.sub("", template).replace("{{ .Chart.AppVersion | quote }}", "0")
    )
    wanted = yaml.safe_load(texts()[name])
    assert plain["spec"] == wanted["spec"]
    assert plain["metadata"]["annotations"] == wanted["metadata"]["annotations"] | {
        "helm.sh/resource-policy": "keep"
    }
    assert plain["metadata"]["labels"].items() >= wanted["metadata"]["labels"].items()


def test_definition_that_helm_would_misread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, said in (("a: '{{ b }}'\n", "helm reads"), ("a: b\n", "0 lines with")):
        monkeypatch.setattr(chartgen, "texts", lambda text=text: {"queues.yaml": text})
        with pytest.raises(ValueError, match=said):
            crd_templates()


@every_chart
def test_version_is_that_of_the_distribution(chart: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert metadata["appVersion"] == metadata["version"] == project["version"]


@every_chart
def test_definitions_named_for_artifact_hub_are_all_there_are(chart: Path) -> None:
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    if shown := metadata["annotations"].get("artifacthub.io/crds"):
        definitions = [yaml.safe_load(text) for text in texts().values()]
        assert sorted((each["name"], each["kind"]) for each in yaml.safe_load(shown)) == sorted(
            (each["metadata"]["name"], each["spec"]["names"]["kind"]) for each in definitions
        )


@every_chart
def test_every_value_has_a_schema_and_a_description(chart: Path) -> None:
    """The schema is strict, so a value that it lacks could not be set."""
    text = (chart / "values.yaml").read_text()
    schema = json.loads((chart / "values.schema.json").read_text())
    described = {path for path, _, _ in described_values(text)}

    def visit(values: dict[str, object], schema: dict[str, object], prefix: str) -> None:
        known = schema["properties"]
        assert schema["additionalProperties"] is False, prefix
        assert set(known) == set(values), prefix
        for name, value in values.items():
            path = f"{prefix}{name}"
            if path not in described and path != "settings":
                visit(value, known[name], f"{path}.")

    visit(yaml.safe_load(text), schema, "")


def test_settings_are_those_of_the_operator() -> None:
    """Each is either a value of its own or follows from others; the schema has its limits."""
    schema = json.loads((CHARTS / OPERATOR_CHART / "values.schema.json").read_text())
    settings = schema["properties"]["settings"]["properties"]
    assert settings["workers"] == {"type": "integer", "minimum": 1, "maximum": 1_000}
    assert settings["logFormat"] == {"type": "string", "enum": ["human", "json"]}
    assert settings["retryPeriodS"] == {"type": "number", "exclusiveMinimum": 0}
    names = {to_camel(name): name for name in Settings.model_fields}
    assert set(settings) == {to for to, name in names.items() if name not in DERIVED}
    environment = (CHARTS / OPERATOR_CHART / "templates" / "_helpers.tpl").read_text()
    derived = {
        name.lower() for name in re.findall(r"- name: POSTBUS_OPERATOR_(\w+)\n", environment)
    }
    # The others are right as they are in a pod: its name, its namespace, its port.
    assert DERIVED - derived == {"lease_namespace", "identity", "http_host", "http_port"}
    assert Settings.model_fields["http_port"].default == 8080
    policies = schema["properties"]["image"]["properties"]["pullPolicy"]["enum"]
    found = Settings.model_json_schema()["properties"]["image_pull_policy"]
    assert policies == found["enum"]


def test_descriptions_are_the_comments_above_values() -> None:
    text = "# -- One,\n# two.\na: 1\n# Not described.\nb:\n  # -- Three.\n  c: {d: [x]}\n"
    assert list(described_values(text)) == [("a", 1, "One, two."), ("b.c", {"d": ["x"]}, "Three.")]


def test_a_readme_needs_a_place_for_the_table(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A chart\n")
    with pytest.raises(ValueError, match="no place"):
        chartgen.readme(tmp_path)
