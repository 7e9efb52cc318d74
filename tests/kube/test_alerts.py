"""Alerts as Prometheus's own tool reads them: those of the documents, and those of the chart."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.kube.api_server import BIN, ROOT
from tests.kube.helm import one, rendered


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool") or shutil.which(BIN / "promtool")
    if program is None:
        pytest.skip("no promtool: run e2e/install.sh metrics")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", "tests/alerts_test.yaml", "tests/operator_alerts_test.yaml")


def test_alerts_of_the_chart_are_rules_of_prometheus(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    made = one(rendered({"prometheusRule": {"enabled": True}}), "PrometheusRule")
    rules.write_text(yaml.safe_dump(made["spec"]))
    promtool("check", "rules", "--lint-fatal", rules)
