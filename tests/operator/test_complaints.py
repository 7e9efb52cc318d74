"""docs/kubernetes-complaints.md has each of the 70 complaints once, and names tests that exist."""

from __future__ import annotations

import re

from tests.named_tests import ROOT, named_tests

DOCUMENT = "docs/kubernetes-complaints.md"


def test_each_complaint_has_a_test_or_a_reason() -> None:
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    numbers = [int(each) for each in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert sorted(numbers) == list(range(1, 71))
    ours, _, others = text.partition("## Not ours, or not yet")
    assert len(named_tests(DOCUMENT)) == len(re.findall(r"^\| \d+ \|", ours, re.MULTILINE))
    assert len(re.findall(r"^\| \d+ \|", others, re.MULTILINE)) <= 10
