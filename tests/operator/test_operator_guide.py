"""The guide of the operator's process lists its settings and metrics, with their defaults."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from postbus_operator.running.health import Health, HealthServer
from postbus_operator.running.leading import show_queue
from postbus_operator.running.metrics import RESULTS, Metrics
from postbus_operator.running.work_queue import WorkQueue
from postbus_operator.settings import PREFIX, Settings, SettingsError, load_settings

GUIDE = (
    Path(__file__).resolve().parents[2] / "docs" / "guides" / "kubernetes-operator.md"
).read_text(encoding="utf-8")


def test_each_setting_is_in_the_guide_with_its_default() -> None:
    rows = re.findall(r"^\| `(POSTBUS_OPERATOR_\w+)` \| (.+?) \|", GUIDE, re.MULTILINE)
    listed = dict(rows)
    assert list(listed) == [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    for name, field in Settings.model_fields.items():
        text = listed[f"{PREFIX}{name.upper()}"].strip("`")
        if isinstance(field.default, int | float | str) and field.default and "image" not in name:
            assert text == str(field.default), name


def test_each_metric_is_in_the_guide() -> None:
    metrics = Metrics()
    HealthServer(Health(), metrics, 180)
    show_queue(metrics, WorkQueue(None))
    metrics.set_age("queues", "", 1.0)
    metrics.set_resources("Queue", 1)
    served = set(re.findall(r"^# TYPE (\w+) ", metrics.text().decode(), re.MULTILINE))
    # Times of creation belong to counters and histograms.
    served = {name for name in served if not name.endswith("_created")}
    listed = set(re.findall(r"^\| `(postbus_operator_\w+)` \|", GUIDE, re.MULTILINE))
    assert listed == served
    for result in RESULTS:
        assert f"`{result}`" in GUIDE


def test_help_names_each_setting() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "postbus_operator", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    ).stdout
    for name in Settings.model_fields:
        assert f"{PREFIX}{name.upper()}\n" in shown


def test_namespaces_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}NAMESPACES", "shop, platform,")
    assert load_settings().namespaces == ("shop", "platform")
    monkeypatch.setenv(f"{PREFIX}NAMESPACES", "")
    assert load_settings().namespaces == ()


def test_periods_of_the_lease_must_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}RENEW_DEADLINE_S", "15")
    with pytest.raises(SettingsError, match="renew_deadline_s"):
        load_settings()
