"""`postbus-operator` as processes: hand-over, loss of the Lease, health and metrics of all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from postbus_operator.kube.resource_types import LEASES
from postbus_operator.leader import TRANSITIONS, epoch_of
from tests.kube.api_server import ApiError, ApiServer

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 60.0


class Operator:
    """A process. `port` is that of health and metrics."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def port(self) -> int:
        return int(wait_for(lambda: re.search(r"metrics on port (\d+)", self.log), self.log)[1])

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        pattern = rf"^postbus_operator_{name} (\S+)$"
        return float(re.search(pattern, self.get("/metrics")[1], re.MULTILINE)[1])

    def ended(self) -> int:
        return self.process.wait(WAIT_S)


def wait_for(check: Callable[[], Any], what: object = "") -> Any:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found = check()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {WAIT_S:g} s: {what}")


@pytest.fixture
def lease() -> str:
    return f"process-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(server: ApiServer, lease: str, tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    with ExitStack() as stack:

        def start(**settings: str) -> Operator:
            path = tmp_path / f"{uuid.uuid4().hex}.log"
            environment = (
                os.environ
                | {
                    "KUBECONFIG": str(server.kubeconfig()),
                    "PYTHONPATH": os.pathsep.join(
                        str(ROOT / each) for each in ("dataplane", "operator")
                    ),
                    "POSTBUS_OPERATOR_LEASE_NAME": lease,
                    "POSTBUS_OPERATOR_LEASE_NAMESPACE": "default",
                    "POSTBUS_OPERATOR_LEASE_DURATION_S": "3",
                    "POSTBUS_OPERATOR_RENEW_DEADLINE_S": "2",
                    "POSTBUS_OPERATOR_RETRY_PERIOD_S": "0.3",
                    "POSTBUS_OPERATOR_NAMESPACES": "default",
                    "POSTBUS_OPERATOR_HTTP_HOST": "127.0.0.1",
                    "POSTBUS_OPERATOR_HTTP_PORT": "0",
                    "POSTBUS_OPERATOR_LOG_FORMAT": "human",
                }
                | {f"POSTBUS_OPERATOR_{name.upper()}": value for name, value in settings.items()}
            )
            log = stack.enter_context(path.open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", "postbus_operator"],
                env=environment,
                stdout=log,
                stderr=log,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return Operator(process, path)

        yield start


@pytest.fixture
def held(server: ApiServer, lease: str) -> Callable[[], dict]:
    """The Lease with a holder."""

    def held() -> dict:
        def find() -> dict | None:
            try:
                found = server.request("GET", LEASES.path("default", lease))
            except ApiError:
                return None
            return found if found["spec"].get("holderIdentity") else None

        return wait_for(find, "a holder")

    return held


def leads(operator: Operator) -> bool:
    assert operator.process.poll() is None, operator.log
    return operator.metric("leader") == 1 and operator.get("/readyz")[0] == 200


def test_a_standby_answers_and_takes_over_from_a_killed_leader(
    start: Callable[..., Operator], held: Callable[[], dict]
) -> None:
    leader = start()
    wait_for(lambda: leads(leader), leader.log)
    standby = start()
    wait_for(lambda: standby.get("/readyz")[0] == 200)
    assert standby.metric("leader") == 0
    assert standby.get("/healthz") == (200, "ok\n")
    before = epoch_of(held())
    assert leader.metric("lease_transitions") == before & TRANSITIONS
    leader.process.kill()
    wait_for(lambda: leads(standby), standby.log)
    assert epoch_of(held()) == before + 1
    assert standby.metric("lease_transitions") == (before + 1) & TRANSITIONS


def test_a_leader_that_is_asked_to_end_hands_over_at_once(
    start: Callable[..., Operator], held: Callable[[], dict]
) -> None:
    """Long before its Lease would expire."""
    leader = start(lease_duration_s="3600", renew_deadline_s="1800")
    wait_for(lambda: leads(leader), leader.log)
    standby = start(lease_duration_s="3600", renew_deadline_s="1800")
    wait_for(lambda: standby.get("/readyz")[0] == 200)
    leader.process.send_signal(signal.SIGTERM)
    assert leader.ended() == 0, leader.log
    wait_for(lambda: leads(standby), standby.log)
    standby.process.send_signal(signal.SIGTERM)
    assert standby.ended() == 0, standby.log


def test_a_standby_ends_when_it_is_asked_to(
    start: Callable[..., Operator], held: Callable[[], dict]
) -> None:
    leader = start()
    wait_for(lambda: leads(leader), leader.log)
    standby = start()
    wait_for(lambda: standby.get("/readyz")[0] == 200)
    standby.process.send_signal(signal.SIGTERM)
    assert standby.ended() == 0, standby.log
    assert leads(leader)


def test_a_leader_that_was_paused_ends_when_it_continues(
    start: Callable[..., Operator], held: Callable[[], dict]
) -> None:
    leader = start()
    wait_for(lambda: leads(leader), leader.log)
    standby = start()
    leader.process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: leads(standby), standby.log)
    finally:
        leader.process.send_signal(signal.SIGCONT)
    assert leader.ended() == 1
    assert "leadership lost: no renewal for 2 s" in leader.log
    assert leads(standby)


def test_a_leader_whose_lease_is_deleted_ends(
    start: Callable[..., Operator], held: Callable[[], dict], server: ApiServer, lease: str
) -> None:
    leader = start()
    wait_for(lambda: leads(leader), leader.log)
    before = epoch_of(held())
    server.request("DELETE", LEASES.path("default", lease))
    assert leader.ended() == 1
    assert "leadership lost: the Lease was deleted" in leader.log
    successor = start()
    wait_for(lambda: leads(successor), successor.log)
    assert epoch_of(held()) > before


def test_metrics_name_all_watches_and_results(
    start: Callable[..., Operator], held: Callable[[], dict]
) -> None:
    leader = start()
    wait_for(lambda: leads(leader), leader.log)
    text = leader.get("/metrics")[1]
    for name in ("busnamespaces", "queues", "statefulsets", "secrets"):
        line = f'postbus_operator_watch_age_seconds{{namespace="default",resource="{name}"}}'
        assert line in text
    # no values: the cluster namespace is that of other tests too
    assert 'postbus_operator_reconciles_total{kind="Queue",result="done"} ' in text
    assert 'postbus_operator_api_requests_total{code="201",verb="create"}' in text
    assert "\npostbus_operator_queue_depth " in text


def test_wrong_settings_are_refused_by_name(start: Callable[..., Operator]) -> None:
    unknown = start(worker="3")
    assert unknown.ended() == 3
    assert "POSTBUS_OPERATOR_WORKER is no setting: did you mean POSTBUS_OPERATOR_WORKERS?" in (
        unknown.log
    )
    wrong = start(workers="none")
    assert wrong.ended() == 3
    assert "POSTBUS_OPERATOR_WORKERS: " in wrong.log
