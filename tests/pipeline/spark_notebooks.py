"""Notebooks of the examples, cell by cell. Part of `test_spark`, whose session they get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.edge.bus_thread import BusThread
from tests.pipeline.lake import Lake

FOLDER = Path(__file__).parents[2] / "examples" / "pipeline"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def run_notebook(name: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, Any]:
    """Run the cells of a notebook in one process; return its names."""
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    names: dict[str, Any] = {}
    for cell in json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}.ipynb {cell['id']}", "exec"), names)
    return names


class NotebookTests:
    def test_notebooks_have_no_outputs(self) -> None:
        assert [path.stem for path in NOTEBOOKS] == ["dead-letters", "history"]
        for path in NOTEBOOKS:
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                assert not cell.get("outputs"), path
                assert cell.get("execution_count") is None, path

    def test_dead_letters_are_chosen(
        self,
        spark: SparkSession,
        lake: Lake,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        lake.send(*(b"%d" % number for number in range(5)))
        lake.dead_letter(3, "NoPrice")
        lake.dead_letter(2, "TooOld")
        file = tmp_path / "numbers"
        names = run_notebook(
            "dead-letters",
            monkeypatch,
            ENTITY=lake.entity,
            CONNECTION_FILE=lake.connection_file(),
            REASON="TooOld",
            NUMBERS=str(file),
        )
        assert dict(zip(names["causes"]["reason"], names["causes"]["letters"], strict=True)) == {
            "NoPrice": 3,
            "TooOld": 2,
        }
        assert names["by_hour"]["count"].sum() == 5
        assert file.read_text(encoding="utf-8").split() == ["4", "5"]
        assert f"postbus dlq resend {lake.entity} --numbers-file" in capsys.readouterr().out

    def test_a_history_is_looked_at(
        self,
        spark: SparkSession,
        bus: BusThread,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        lake = Lake(bus, bus.queue(historyRetention="P1D"), tmp_path)
        lake.send(b'{"amount": 2.5}', b'{"amount": 4}', b"no JSON")
        bus.advance(3_000)
        lake.complete(2)
        names = run_notebook(
            "history",
            monkeypatch,
            ENTITY=lake.entity,
            CONNECTION_FILE=lake.connection_file(),
        )
        ended = names["ended"].to_dict("list")
        assert ended == {"settlement": [None, "completed"], "count": [1, 2]}
        assert all(3 <= each < 60 for each in names["times"]["p50_p95_p99"][0])
        assert names["amounts"]["total"].tolist() == [6.5]
