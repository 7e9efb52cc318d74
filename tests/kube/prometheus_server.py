"""A Prometheus on loopback that scrapes as the monitors of the chart say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tests.kube.api_server import BIN
from tests.kube.helm import Object
from tests.ports import free_ports

INTERVAL: Final = "1s"
WAIT_S: Final = 60.0
META: Final = "__meta_kubernetes_pod_label_"


class Target(NamedTuple):
    """A pod as Prometheus discovers it. `address` has host and port."""

    address: str
    namespace: str
    pod: str
    labels: Mapping[str, str]


class Series(NamedTuple):
    """Labels, and points of a time in seconds since 1970 and a value."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


class Prometheus(NamedTuple):
    """A running server."""

    address: str

    def get(self, path: str, **parameters: object) -> Any:
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/{path}?{query}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def now(self, expression: str) -> list[Series]:
        """Return the present values of an expression."""
        found = self.get("query", query=expression)["result"]
        return [Series(each["metric"], [_point(each["value"])]) for each in found]

    def over_time(
        self, expression: str, start_s: float, end_s: float, step_s: float
    ) -> list[Series]:
        """Return the values of an expression at each step."""
        found = self.get("query_range", query=expression, start=start_s, end=end_s, step=step_s)
        return [
            Series(each["metric"], [_point(value) for value in each["values"]])
            for each in found["result"]
        ]


def _point(value: list[Any]) -> tuple[float, float]:
    return float(value[0]), float(value[1])


def program() -> Path | None:
    """Return Prometheus if it is there: `e2e/install.sh metrics` brings it."""
    found = shutil.which("prometheus") or shutil.which(BIN / "prometheus")
    return Path(found) if found else None


def scrape_config(monitor: Object, job: str, targets: list[Target]) -> Object:
    """Return what the Prometheus operator makes of a monitor for targets on this machine.

    `job` is the name of the job where the monitor has no `jobLabel`.
    """
    spec = monitor["spec"]
    [endpoint] = spec.get("podMetricsEndpoints") or spec["endpoints"]
    rules: list[Object] = []
    if label := spec.get("jobLabel"):
        rules.append({"source_labels": [_meta(label)], "target_label": "job"})
    rules += (
        {re.sub("[A-Z]", _snake, name): value for name, value in rule.items()}
        for rule in endpoint.get("relabelings", ())
    )
    return {
        "job_name": job,
        "scrape_interval": INTERVAL,
        "scrape_timeout": INTERVAL,
        "metrics_path": endpoint["path"],
        "relabel_configs": rules,
        "static_configs": [
            {
                "targets": [each.address],
                "labels": {"namespace": each.namespace, "pod": each.pod}
                | {_meta(name): value for name, value in each.labels.items()},
            }
            for each in targets
        ],
    }


def _meta(label: str) -> str:
    return META + re.sub(r"\W", "_", label)


def _snake(found: re.Match[str]) -> str:
    return "_" + found[0].lower()


@contextmanager
def prometheus(program: Path, folder: Path, *configs: Object) -> Iterator[Prometheus]:
    """Run a server until the context ends."""
    [port] = free_ports(1)
    settings = folder / "prometheus.yaml"
    settings.write_text(yaml.safe_dump({"scrape_configs": configs}))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={settings}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        _wait_until_ready(server, process, folder)
        yield server
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(server: Prometheus, process: subprocess.Popen[bytes], folder: Path) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.address}/-/ready").close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError((folder / "prometheus.log").read_text()[-4_000:])
