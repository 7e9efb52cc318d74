"""Tables of docs/guides/pipelines.md are those of the code, and the program of lake.md works."""

from __future__ import annotations

import argparse
import hashlib
import re
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import StructType

from postbus.contract.entities import Model
from postbus.contract.pipeline import PipelineSpec
from postbus.contract.yaml_documents import _models_of
from postbus_spark import errors
from postbus_spark.jobs import failures
from postbus_spark.jobs.main import _parser
from postbus_spark.lake import layout
from postbus_spark.lake.delta import DeltaTable
from postbus_spark.lake.iceberg import IcebergTable
from postbus_spark.lake.parquet import ParquetTable
from postbus_spark.lake.places import TableUnavailable
from tests.dev_bus import ROOT

GUIDES = ROOT / "docs" / "guides"
GUIDE = (GUIDES / "pipelines.md").read_text(encoding="utf-8")
LAKE = (GUIDES / "lake.md").read_text(encoding="utf-8")


ONE_ROW = {"Owner", "LakeTable", "TablePlace", "PythonFunction"}


def part(title: str) -> str:
    return GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def fields_of(model: type[Model], before: str = "") -> set[str]:
    """Return the paths of a model's fields, without those of models that are shown in one row."""
    found = set()
    for name, info in model.model_fields.items():
        path = f"{before}{info.alias or name}"
        below = list(_models_of(info.annotation))
        found.add(path)
        if len(below) == 1 and below[0].__name__ not in ONE_ROW:
            is_list = "tuple" in str(info.annotation)
            found |= fields_of(below[0], f"{path}[]." if is_list else f"{path}.")
    return found


def test_fields_of_the_guide_are_those_of_the_model() -> None:
    rows = re.findall(r"^\| `([\w.\[\]]+)` \|", part("The document"), re.MULTILINE)
    known = fields_of(PipelineSpec)
    assert set(rows) - known == set()
    shown_together = {
        "sources[].topic", "sources[].subscription", "sources[].body", "sources[].watermark",
        "trigger.continuous", "trigger.once", "trigger.schedule", "transform", "sinks", "limits",
        "checkpoint",
        "sinks[].topic", "runtime", "runtime.envFrom", "runtime.envFrom[].secretRef", "volumes",
        "runtime.executor", "operatorSpec", "lookups[].delta",
    }  # fmt: skip
    assert known - set(rows) == shown_together


def test_commands_of_the_guide_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| `([\w-]+)(?: [A-Z]+)?` \|", part("Commands"), re.MULTILINE)
    [commands] = [
        action.choices
        for action in _parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    assert rows == list(commands)


def test_exit_codes_and_errors_of_the_guide_are_those_of_the_program() -> None:
    codes = re.findall(r"^\| (\d+) \|", part("When it fails"), re.MULTILINE)
    assert [int(code) for code in codes] == list(failures.ExitCode)
    line = next(line for line in GUIDE.splitlines() if line.startswith("| 20 |"))
    assert set(re.findall(r"`(\w+)`", line)) == {each.__name__ for each in failures.STOPPED}
    named = set(re.findall(r"^\| `(\w+)` \|", part("When it fails"), re.MULTILINE))
    own = {*failures.STOPPED, *failures.CONFIGURATION, layout.TableTaken, TableUnavailable}
    known = {each.__name__ for each in own if each.__module__ != errors.__name__}
    assert named == known - {"ManifestError"}


@pytest.mark.parametrize(
    ("kind", "place", "printed"),
    [
        (ParquetTable, "/tmp/lake/priced-orders", "2 rows, ['sku', 'date', 'hour']\n"),
        (
            DeltaTable,
            "/tmp/lake/priced-orders-delta",
            "2 rows, ['sku', 'date', 'hour']\npartition 0 ends at 2\n",
        ),
        (
            IcebergTable,
            "/tmp/lake",
            "2 rows, ['sku', 'date', 'hour']\n{\"reader\": 1, \"ends\": {\"0\": 2}}\n",
        ),
    ],
)
def test_a_table_is_read_as_the_guide_shows(
    tmp_path: Path, kind: Any, place: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = layout.Batch("orders", "g", "lake", 1, 1, 1, {0: (0, 2)})
    catalog = layout.CatalogTable(f"sqlite:///{tmp_path}/catalog/lake.db", "shop.orders", None)
    more = [catalog] if kind is IcebergTable else []
    table = kind(tmp_path / "table" if more else tmp_path, ("date", "hour"), *more)
    table.open()
    staged = f"{table.staging(batch)}/one.parquet"
    periods = {"date": 2 * [date(1970, 1, 1)], "hour": pa.array([0, 0], pa.int32())}
    pq.write_table(pa.table({"sku": ["a", "b"], **(periods if more else {})}), staged)
    size = Path(staged).stat().st_size
    file = layout.StagedFile(
        staged, 0, 0, 1, 0, 2, size, 0, 1, hashlib.sha256(Path(staged).read_bytes()).hexdigest()
    )
    table.commit(batch, StructType().add("sku", "string"), [file])
    Path(table.staging(batch), "left.parquet").write_bytes(b"not whole")
    programs = re.findall(r"^```python\n(.*?)^```$", LAKE, re.MULTILINE | re.DOTALL)
    [program] = [each for each in programs if re.search(rf"{place}[\"/]catalog|{place}\"", each)]
    exec(compile(program.replace(place, str(tmp_path)), "lake.md", "exec"), {})
    assert re.sub(r'(?<="reader": ).*(?="ends")', "1, ", capsys.readouterr().out) == printed
