"""docs/guides/bulk.md works: its commands run in one shell, and its codes are those of the API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from postbus.contract.bulk import BulkProblem
from postbus.edge.bulk import requests as bulk_requests
from postbus.edge.bulk.handler import MAX_STREAMS
from postbus.entity.groups import MAX_GROUPS
from tests.dev_bus import running_dev_bus
from tests.docs.test_docs import BULK, lines_of_shell, words


@pytest.mark.slow
def test_bulk_reads_find_what_the_guide_says(tmp_path: Path) -> None:
    with running_dev_bus("examples") as bus:
        lines = lines_of_shell(BULK, bus, tmp_path)
    assert "one" in lines[lines.index("2 rows") - 1]
    assert "['active']" in lines
    assert '{"rejected":2,"refused":{}}' in lines
    published = '"messages":3,"left":0,"isDone":true,"waitsFor":""}'
    assert lines[-4] == '{"writer":"prices","batch":1,' + published
    assert [line[-8:] for line in lines[-3:]] == [f'"row {n}"}}' for n in range(3)]


def test_codes_of_bulk_reads_are_those_of_the_guide() -> None:
    text = BULK.read_text(encoding="utf-8").partition("## When it fails")[2]
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", text, re.MULTILINE)
    shown = {
        (int(status), code)
        for statuses, codes in rows
        for status in statuses.split(",")
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert {code for _, code in shown} == set(get_args(BulkProblem.model_fields["code"].annotation))
    assert {each for each in bulk_requests.ANSWERS.values() if each not in shown} == set()
    assert f"at most {MAX_GROUPS} groups" in words(BULK)
    streams = {8: "eight"}[MAX_STREAMS // 2]
    assert f"A key may have {streams} streams at once" in words(BULK)
