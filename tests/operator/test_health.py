"""Health says what a restart would repair, readiness what the process still waits for."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
import pytest

from postbus_operator.kube.cache import Cache
from postbus_operator.kube.resource_types import RESOURCES
from postbus_operator.kube.watches import Page, Watch, Watches
from postbus_operator.running.health import MAX_LAG_S, Health, HealthServer
from postbus_operator.running.metrics import Metrics
from tests.operator.objects import entity

QUEUES = Watch(RESOURCES["Queue"], "shop")
SILENCE_S = 180.0


@dataclass
class Clock:
    """A clock that the test moves."""

    seconds: float = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock)


def test_a_silent_watch_is_a_reason_for_a_restart(health: Health, clock: Clock) -> None:
    health.watches = Watches([QUEUES], clock())
    clock.seconds += SILENCE_S
    assert health.problems(SILENCE_S) == []
    clock.seconds += 1
    assert health.problems(SILENCE_S) == ["the watch of queues in shop has been silent for 181 s"]
    health.watches.heard(QUEUES, clock())
    assert health.problems(SILENCE_S) == []


def test_a_late_event_loop_is_a_reason_for_a_restart(health: Health) -> None:
    health.lag_s = MAX_LAG_S + 1
    assert health.problems(SILENCE_S) == ["the event loop is 11 s late"]


def test_a_leader_is_ready_when_its_lists_are_complete(health: Health, clock: Clock) -> None:
    health.epoch = 7
    health.waits_for = "not installed: queues of postbus.dev/v1alpha1"
    assert health.unready() == [health.waits_for, "the leader has not begun to watch"]
    health.waits_for = ""
    health.watches = Watches([QUEUES], clock())
    assert health.unready() == ["the list of queues in shop is not complete"]
    health.watches.page(QUEUES, Page([], 1, is_first=True, is_last=True))
    assert health.unready() == []


def test_a_standby_is_ready_while_the_api_server_answers_it(health: Health, clock: Clock) -> None:
    answered = clock()
    health.elector_answered_at = lambda: answered
    assert health.unready() == []
    clock.seconds += 61
    assert health.unready() == ["no answer about the Lease for 61 s"]
    assert health.problems(SILENCE_S) == []


async def test_the_three_paths_are_served(health: Health, clock: Clock) -> None:
    health.watches, health.cache = Watches([QUEUES], clock()), Cache()
    conditions = [
        {
            "type": "Ready",
            "status": "False",
            "reason": "OwnerNotReady",
            "lastTransitionTime": "2026-11-23T09:00:00Z",
        }
    ]
    health.cache.observe(entity("Queue", "orders") | {"status": {"conditions": conditions}})
    health.epoch = (5 << 24) + 3
    server = HealthServer(health, Metrics(), SILENCE_S)
    async with server.run("127.0.0.1", 0) as port, aiohttp.ClientSession() as session:

        async def get(path: str) -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                return answer.status, await answer.text()

        assert await get("/healthz") == (200, "ok\n")
        assert await get("/readyz") == (503, "the list of queues in shop is not complete\n")
        status, text = await get("/metrics")
        assert status == 200
        assert 'postbus_operator_resources{kind="Queue"} 1.0' in text
        assert "postbus_operator_lease_transitions 3.0" in text
        assert "postbus_operator_leader 1.0" in text
        assert 'resource="queues"' in text
        labels = 'condition="Ready",kind="Queue",reason="OwnerNotReady"'
        assert f"postbus_operator_conditions{{{labels}}} 1.0" in text
