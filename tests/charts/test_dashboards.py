"""Dashboards of the chart: what their builders say, with queries of metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import promql_parser
import pytest

from dashboards.drawing import Found, drawing, shown
from dashboards.generate import main, texts

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "charts" / "postbus" / "dashboards"
FOREIGN = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")

every_dashboard = pytest.mark.parametrize("name", sorted(texts()))


def dashboard(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return found


def expressions(made: dict[str, Any]) -> Iterator[str]:
    for panel in made["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def test_files_are_what_their_builders_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", str(FOLDER)]) == 0
    copy = tmp_path / "dashboards"
    shutil.copytree(FOLDER, copy)
    (copy / "bus.json").write_text("{}\n")
    (copy / "buses.json").unlink()
    (copy / "old.json").write_text("{}\n")
    assert main(["--check", str(copy)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{copy / name}: not what its builder says; run make crds"
        for name in ("bus.json", "buses.json", "old.json")
    ]
    assert main([str(copy)]) == 0
    assert {path.name: path.read_text() for path in copy.iterdir()} == texts()


@every_dashboard
def test_queries_name_metrics_of_the_guides(name: str) -> None:
    guides = "".join(
        (ROOT / "docs" / "guides" / page).read_text()
        for page in ("metrics.md", "kubernetes-operator.md")
    )
    known = set(re.findall(r"^\| `(postbus_\w+)`", guides, re.MULTILINE)) | FOREIGN
    for expression in expressions(dashboard(name)):
        parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
        used = set(re.findall(r"\b(?:postbus|process)_\w+|\bup\b", parsed.prettify()))
        assert used, expression
        assert {each if each in known else HISTOGRAM.sub("", each) for each in used} <= known


@every_dashboard
def test_panels_do_not_overlap_and_say_what_they_show(name: str) -> None:
    made = dashboard(name)
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"].endswith(".")
            assert panel["datasource"]["uid"] == "$datasource"


@every_dashboard
def test_variables_of_queries_are_those_of_the_dashboard(name: str) -> None:
    made = dashboard(name)
    variables = {each["name"] for each in made["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps([*expressions(made)])))
    assert variables - {"datasource"} == used - {"__rate_interval"}


def test_links_lead_to_dashboards() -> None:
    ids = {dashboard(name)["uid"] for name in texts()}
    assert len(ids) == len(texts())
    text = "".join(texts().values())
    assert set(re.findall(r"/d/([\w-]+)", text)) <= ids


# --- pictures -----------------------------------------------------------------------------------


@every_dashboard
def test_every_panel_is_drawn(name: str) -> None:
    made = dashboard(name)
    asked = []

    def ask(target: dict[str, Any]) -> list[Found]:
        asked.append(target)
        points = [(1_700_000_000.0 + at, at % 7 * 1_000.0) for at in range(60)]
        labels = {"namespace": "team-a", "bus": "<shop>"}
        return [Found(f"a & {each}", labels, points) for each in range(2)][: asked_series(target)]

    def asked_series(target: dict[str, Any]) -> int:
        return 1 if target.get("instant") else 2

    picture = ElementTree.fromstring(drawing(made, ask))
    said = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    for panel in made["panels"]:
        assert any(panel["title"] in each for each in said)
    assert len(asked) == sum(len(panel.get("targets", ())) for panel in made["panels"])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 s"),
        (0.0125, "s", "12.5 ms"),
        (90, "s", "1.5 min"),
        (397 * 86_400, "s", "397 d"),
        (1_536, "bytes", "1.5 KiB"),
        (4_440, "short", "4.44 K"),
        (17, "none", "17"),
        (0.198, "percentunit", "19.8%"),
        (350, "mps", "350 msg/s"),
        (float("nan"), "s", "-"),
    ],
)
def test_values_are_shown_in_their_unit(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text
