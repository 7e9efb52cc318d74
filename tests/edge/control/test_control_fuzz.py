"""The control API under a little of its own document; `make fuzz-control` takes ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edge.control.control_bus import controlled_bus
from tests.edge.control.fuzz_control import fuzz


@pytest.mark.slow
def test_answers_match_the_openapi_document(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus") as bus:
        found = fuzz(bus, tmp_path, "--phases", "fuzzing", "--max-examples", "3")
    assert found == ""
