"""Every number that code, tests or documents cite leads to the page that explains it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("dataplane", "tests", "bench", "examples", "docs")
ENDINGS = {".py", ".sql", ".md", ".toml", ".yaml"}
MIGRATIONS = ROOT / "dataplane" / "postbus" / "store" / "migrations"  # append-only

ADR = re.compile(r"\bADRs? (\d+)")
PROMISE = re.compile(r"(?<![\w%/-])S(\d{1,3})(?![\w%])")
INVARIANT = re.compile(r"(?<![\w%])I(\d{1,2})(?![\w%])")
UNKNOWN = re.compile(r"(?<![\w%#.\"'])[DNX]\d{1,2}(?![\w%.])")
"""Numbers of lists that are not in the repository."""


def texts() -> list[tuple[str, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("this is no checkout")
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return [
        (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in paths
        if path.suffix in ENDINGS and path.parent != MIGRATIONS and path != Path(__file__)
    ]


@pytest.fixture(scope="module")
def documents() -> list[tuple[str, str]]:
    return texts()


def unresolved(
    documents: list[tuple[str, str]], pattern: re.Pattern[str], known: set[int]
) -> list[str]:
    return [
        f"{name}: {match[0]}"
        for name, text in documents
        for match in pattern.finditer(text)
        if int(match[1]) not in known
    ]


def test_decision_records_have_numbers_of_their_own() -> None:
    numbers = Counter(int(path.name[:4]) for path in (ROOT / "docs" / "adr").glob("*.md"))
    assert [number for number, count in numbers.items() if count > 1] == []
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_cited_decisions_exist(documents: list[tuple[str, str]]) -> None:
    known = {int(path.name[:4]) for path in (ROOT / "docs" / "adr").glob("*.md")}
    assert unresolved(documents, ADR, known) == []


def test_cited_behaviours_exist(documents: list[tuple[str, str]]) -> None:
    listed = tomllib.loads((ROOT / "docs" / "behaviours.toml").read_text(encoding="utf-8"))
    known = {int(each[1:]) for each in listed if re.fullmatch(r"S\d+", each)}
    for table in listed.values():
        if isinstance(table, dict):
            known |= {int(each[1:]) for each in table if re.fullmatch(r"S\d+", each)}
    in_code = [each for each in documents if each[0].startswith(("dataplane", "docs"))]
    assert known
    assert unresolved(in_code, PROMISE, known) == []


def test_cited_invariants_exist(documents: list[tuple[str, str]]) -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    known = {int(each) for each in re.findall(r"^\| I(\d+) \|", page, re.MULTILINE)}
    faults = [each for each in documents if each[0].startswith(("tests/faults", "docs"))]
    assert known
    assert unresolved(faults, INVARIANT, known) == []


def test_missing_lists_are_not_cited(documents: list[tuple[str, str]]) -> None:
    code = [(name, text) for name, text in documents if name.endswith((".py", ".sql"))]
    found = [f"{name}: {match[0]}" for name, text in code for match in UNKNOWN.finditer(text)]
    assert found == []
