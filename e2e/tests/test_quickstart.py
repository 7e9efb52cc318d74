"""From nothing to the first message, as the guide to Kubernetes says."""

from __future__ import annotations

import re
import time
from typing import Final

import pytest
from e2e.tests.cluster import Space, run
from e2e.tests.figures import record
from e2e.tests.guide import quickstart

FIRST_MESSAGE_S: Final = 60.0


@pytest.mark.alone
@pytest.mark.smoke
def test_quickstart_of_the_guide_works_as_written(installed_at: float) -> None:
    lines = quickstart()
    shop = Space("shop")
    try:
        run("bash", "-euc", lines.apply)
        shown = run("bash", "-euc", lines.wait)
        assert re.search(r"namespace\.postbus\.dev/shop-bus +True +Ready", shown)
        assert re.search(r"queue\.postbus\.dev/orders +True +Ready", shown)
        log = run("bash", "-euc", lines.job)
        assert "received hello 2 as number 3" in log
        record(
            "helm install to the first message", time.monotonic() - installed_at, FIRST_MESSAGE_S
        )
    finally:
        shop.close()
