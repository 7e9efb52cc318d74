"""The control API under ten seconds of its own document; `make fuzz-control` takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edge.control_bus import controlled_bus
from tests.edge.fuzz_control import SECONDS, fuzz


@pytest.mark.slow
def test_nothing_is_answered_that_the_document_does_not_know(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus") as bus:
        assert fuzz(bus, SECONDS, tmp_path) == ""
