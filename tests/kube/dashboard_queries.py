"""Dashboards of the chart, and their queries with the values of variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from tests.kube.api_server import ROOT
from tests.kube.prometheus_server import Prometheus

FOLDER: Final = ROOT / "charts" / "postbus" / "dashboards"
LABEL_VALUES: Final = re.compile(r"label_values\((.+), (\w+)\)")


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the dashboards by the names of their files."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.iterdir())}


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a query with the values of variables."""
    for name, value in values.items():
        text = text.replace(f"${name}", value)
    assert "$" not in text, text
    return text


def values_of(
    prometheus: Prometheus, dashboard: dict[str, Any], rate_interval: str
) -> dict[str, str]:
    """Return the values of variables as Grafana chooses them: all, or the first one."""
    values = {"__rate_interval": rate_interval}
    for each in dashboard["templating"]["list"]:
        if each["type"] != "query":
            continue
        metric, label = LABEL_VALUES.fullmatch(each["query"]["query"]).groups()
        matching = {"match[]": filled(metric, values)}
        found = prometheus.get(f"label/{label}/values", **matching)
        assert found, each["name"]
        values[each["name"]] = each.get("allValue") or found[0]
    return values
