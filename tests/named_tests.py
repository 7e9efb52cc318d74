"""Tests that a document names, as `tests/kube/test_crds.py::test_spec_is_refused`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
NAMED: Final = re.compile(r"`((?:e2e/)?tests/[\w/]+\.py)::(test_\w+)`")


def named_tests(document: str) -> list[tuple[str, str]]:
    """Return file and name of each test that a document names; all of them exist."""
    found: list[tuple[str, str]] = NAMED.findall((ROOT / document).read_text(encoding="utf-8"))
    for path, name in found:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE), (path, name)
    return found


def names_in(path: str) -> set[str]:
    """Return the names of the tests in a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    return set(re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE))
