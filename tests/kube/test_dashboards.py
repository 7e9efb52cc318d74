"""Every query of every dashboard, asked of a Prometheus that scraped loaded buses."""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus_operator.annotations import BUS_LABEL
from tests.kube.api_server import ApiServer
from tests.kube.clients import configuration_of
from tests.kube.dashboard_queries import dashboards, filled, values_of
from tests.kube.helm import one, rendered
from tests.kube.prometheus_server import Prometheus, program
from tests.kube.watched_buses import BUSES, MONITORED, watched_buses

pytestmark = pytest.mark.slow

WAIT_S = 120.0


def without_data(prometheus: Prometheus) -> Iterator[str]:
    """Yield each query that gives no data, with its panel."""
    for name, dashboard in dashboards().items():
        values = values_of(prometheus, dashboard, rate_interval="10s")
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                series = prometheus.now(filled(target["expr"], values))
                legend = target.get("legendFormat", "")
                labels = re.findall(r"{{(\w+)}}", legend)
                if not any(math.isfinite(value) for each in series for _, value in each.points):
                    yield f"{name}: {panel['title']}: {target['expr']}"
                elif not all(
                    each.labels.get(each_label) for each in series for each_label in labels
                ):
                    yield f"{name}: {panel['title']}: no label for {legend}: {series[0]}"


async def wait_for_data(prometheus: Prometheus) -> None:
    """Wait until every query gives data."""
    end = time.monotonic() + WAIT_S
    missing = ["everything"]
    while missing and time.monotonic() < end:
        await asyncio.sleep(0.5)
        try:
            missing = await asyncio.to_thread(lambda: list(without_data(prometheus)))
        except AssertionError as error:  # a variable without a value yet
            missing = [str(error)]
    assert missing == []


async def test_every_query_of_every_panel_gives_data(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = program()
    if found is None:
        pytest.skip("no prometheus: run e2e/install.sh metrics")
    configuration = await configuration_of(server, monkeypatch)
    namespace = f"team-{uuid.uuid4().hex[:8]}"
    async with watched_buses(server, configuration, found, tmp_path, namespace) as prometheus:
        await wait_for_data(prometheus)
        names = await asyncio.to_thread(prometheus.get, "label/bus/values")
        assert set(names) == set(BUSES)


def test_label_of_a_bus_is_that_of_its_pods() -> None:
    monitor = one(rendered(MONITORED), "PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    [rule] = [each for each in endpoint["relabelings"] if each["targetLabel"] == "bus"]
    [source] = rule["sourceLabels"]
    assert source == "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", BUS_LABEL)
