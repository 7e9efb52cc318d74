"""The option that rewrites scenario transcripts: `pytest tests/entity --rewrite`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what scenarios do now into their transcripts; review the diff",
    )
