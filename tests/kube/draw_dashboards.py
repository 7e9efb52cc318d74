"""Draw the dashboards of the chart with the data of loaded buses: `make dashboard`.

python -m tests.kube.draw_dashboards docs/images [SECONDS]
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import pytest

from dashboards.drawing import Found, drawing
from tests.kube.api_server import api_server
from tests.kube.clients import configuration_of
from tests.kube.conftest import install_definitions
from tests.kube.dashboard_queries import dashboards, filled, values_of
from tests.kube.prometheus_server import Prometheus, program
from tests.kube.watched_buses import watched_buses

LOAD_S: Final = 150.0
RATE_S: Final = 30
"""Range of rates; counters need as long before the pictures begin."""

POINTS: Final = 60
"""Points of a series; more make the files larger, not clearer."""


def draw(prometheus: Prometheus, folder: Path, seconds: float) -> None:
    """Write a picture of each dashboard of the last seconds."""
    end_s = time.time()
    for name, dashboard in dashboards().items():
        values = values_of(prometheus, dashboard, f"{RATE_S}s")

        def ask(target: dict[str, Any], values: dict[str, str] = values) -> list[Found]:
            expression = filled(target["expr"], values)
            if target.get("instant"):
                found = prometheus.now(expression)
            else:
                step_s = seconds / POINTS
                found = prometheus.over_time(expression, end_s - seconds, end_s, step_s)
            return [
                Found(legend(target.get("legendFormat", ""), each.labels), each.labels, each.points)
                for each in found
            ]

        (folder / f"dashboard-{name}.svg").write_text(drawing(dashboard, ask), encoding="utf-8")


def legend(pattern: str, labels: dict[str, str]) -> str:
    """Return the legend of a series."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), pattern)


async def wait_for_history(prometheus: Prometheus, seconds: float) -> None:
    """Wait until the bus has been scraped for so long."""
    scraped = f"postbus_build_info offset {seconds:.0f}s"
    while not await asyncio.to_thread(prometheus.now, scraped):
        await asyncio.sleep(1)


async def main(folder: Path, seconds: float) -> None:
    """Run everything, wait, draw."""
    found = program()
    if found is None:
        sys.exit("no prometheus: run e2e/install.sh metrics")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="postbus-dashboards-") as work,
        api_server() as server,
    ):
        install_definitions(server)
        configuration = await configuration_of(server, patch)
        async with watched_buses(server, configuration, found, Path(work), "team-a") as prometheus:
            await wait_for_history(prometheus, RATE_S + seconds)
            await asyncio.to_thread(draw, prometheus, folder, seconds)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float((sys.argv[2:] or [LOAD_S])[0])))
