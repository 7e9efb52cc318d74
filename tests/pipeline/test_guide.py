"""The tables of the guide are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from postbus_spark import errors
from postbus_spark.limits import SPLITS
from postbus_spark.options import _OPTIONS, _WRITE_OPTIONS, DEFAULT_BYTES_PER_TRIGGER
from postbus_spark.schema import COLUMNS, WRITTEN
from postbus_spark.transport import BUSY_S, PATIENCE_S

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "spark.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    part = GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (`.*)\|$", part, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_options_of_the_guide_are_those_of_the_source() -> None:
    assert {name.strip("`") for name, *_ in rows("Options")} == set(_OPTIONS)
    assert str(DEFAULT_BYTES_PER_TRIGGER) in GUIDE
    assert f"{100 / SPLITS:.1f} %" in GUIDE


def test_columns_of_the_guide_are_those_of_the_source() -> None:
    found = [(name.strip("`"), kind.strip("`")) for name, kind, _ in rows("Columns")]
    assert found == [(column.name, column.sql_type) for column in COLUMNS]


def test_options_and_columns_of_writing_are_those_of_the_source() -> None:
    found = rows("Write messages")
    written = [cells for cells in found if cells[0].strip("`") in WRITTEN]
    assert [(name.strip("`"), kind.replace("`", "")) for name, kind, _ in written] == [
        (name, " or ".join(types)) for name, types in WRITTEN.items()
    ]
    options = [cells[0] for cells in found if cells not in written]
    assert set(re.findall(r"\w+", " ".join(options))) == set(_WRITE_OPTIONS)


def test_errors_of_the_guide_are_those_of_the_source() -> None:
    named = {name for cell, _ in rows("When it fails") for name in re.findall(r"\w+", cell)}
    classes = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, errors.PostbusSparkError)
    }
    assert classes - named == {"PostbusSparkError", "BulkError", "InvalidRequest"}
    assert named <= classes
    assert f"{PATIENCE_S:.0f} s" in GUIDE
    assert BUSY_S == 1_800
