"""An API server whose answers fail, an operator that is killed after each write, silent watches.

Brokers and API server are real, with a proxy between them and the operator.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.bus.access import open_sessions
from postbus_operator.kube import api as api_module
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of
from tests.kube.api_server import ApiServer
from tests.kube.clients import configuration_of
from tests.kube.faulty_proxy import (
    Answer,
    FaultyProxy,
    Request,
    broken_off,
    faulty_proxy,
    no_answer,
    proxied,
    status,
)
from tests.kube.operator_run import Run, eventually, leading
from tests.kube.shop import PERIODS, Shop
from tests.kube.test_entity_resources import EPOCHS, RECONCILERS

pytestmark = pytest.mark.slow

ENTITIES = (("Queue", "orders"), ("Topic", "events"), ("Subscription", "audit"))


def few(cases: Iterable[str], *always: str) -> list[Any]:
    """Return the cases as parameters, of which `make test-kube` runs those named."""
    rest = pytest.mark.thorough
    return [each if each in always else pytest.param(each, marks=rest) for each in cases]


FAILURES: dict[str, Answer] = {
    "409": status(409),
    "422": status(422),
    "429": status(429, **{"Retry-After": "1"}),
    "500": status(500),
    "503": status(503),
    "time-out": no_answer,
    "broken-off": broken_off,
}


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "kube_failures", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("broker")
    with controlled_bus(dsn_of(postgres_server, "kube_failures"), folder) as bus:
        yield bus


@pytest.fixture
async def configuration(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Configuration:
    return await configuration_of(server, monkeypatch)


@pytest.fixture
def shop(server: ApiServer, running: ControlledBus) -> Shop:
    made = Shop(server, running)
    made.make("Namespace", "bus")
    return made


@asynccontextmanager
async def operator(
    configuration: Configuration, shop: Shop, control_url: str = ""
) -> AsyncIterator[Run]:
    """Run an operator of the shop's namespace."""
    address = control_url or shop.running.caller.address
    async with leading(
        configuration,
        RECONCILERS,
        open_sessions=partial(open_sessions, periods=PERIODS),
        control_url=lambda bus: address,
        epoch=next(EPOCHS),
        namespaces=(shop.name,),
    ) as run:
        yield run


def make_entities(shop: Shop) -> None:
    shop.make("Queue", "orders", maxDeliveryCount=3)
    shop.make("Topic", "events")
    shop.make("Subscription", "audit", owner={"name": "events"})


async def are_ready(shop: Shop) -> None:
    for kind, name in ENTITIES:
        await eventually(partial(shop.is_ready, kind, name), name)


async def are_gone(shop: Shop) -> None:
    for kind, name in ENTITIES:
        await eventually(partial(shop.is_gone, kind, name), name)


def each_fails_twice(answer: Answer) -> Callable[[Request], Answer | None]:
    """Return a rule by which the first two writes of each kind to each object fail."""
    seen: dict[tuple[str, str], itertools.count[int]] = {}

    def instead(request: Request) -> Answer | None:
        if not request.number:
            return None
        count = seen.setdefault((request.method, request.path), itertools.count())
        return answer if next(count) < 2 else None

    return instead


@pytest.mark.parametrize("failure", few(FAILURES, "429", "time-out"))
async def test_entities_follow_although_each_write_fails_twice(
    failure: str, configuration: Configuration, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "REQUEST_S", 1.0)
    async with proxied(configuration) as (proxy, through), operator(through, shop) as run:
        proxy.instead = each_fails_twice(FAILURES[failure])
        make_entities(shop)
        await are_ready(shop)
        assert len(proxy.failed) >= 2 * len(ENTITIES)
        for kind, name in ENTITIES:
            shop.delete(kind, name)
        await are_gone(shop)
        assert not run.task.done()
        assert run.health.problems(60) == []


async def test_retry_after_is_obeyed(configuration: Configuration, shop: Shop) -> None:
    """The first write of a queue is refused for three seconds."""
    loop = asyncio.get_running_loop()
    times: list[float] = []

    def instead(request: Request) -> Answer | None:
        if not request.path.endswith("/orders"):
            return None
        if request.number:
            times.append(loop.time())
        return status(429, **{"Retry-After": "3"}) if request.number and len(times) == 1 else None

    async with proxied(configuration) as (proxy, through), operator(through, shop):
        proxy.instead = instead
        shop.make("Queue", "orders")
        await eventually(partial(shop.is_ready, "Queue", "orders"))
    assert times[1] - times[0] >= 3


# --- killed after each write ----------------------------------------------------------------------


class Killer:
    """Cancels the operator as soon as a number of writes has been done; a kill has no answer."""

    def __init__(self, after: int) -> None:
        self._left = after
        self.run: Run | None = None
        self.has_killed = False

    def __call__(self, request: Request) -> None:
        # Only what follows the start counts: kopf and the sessions write nothing then.
        if self.run is None or self.has_killed:
            return
        self._left -= 1
        if self._left == 0:
            self.has_killed = True
            self.run.task.cancel()


@asynccontextmanager
async def between(
    configuration: Configuration, shop: Shop, killer: Killer
) -> AsyncIterator[tuple[Run, FaultyProxy, FaultyProxy]]:
    """Run an operator with a proxy before the API server and one before the bus."""
    async with AsyncExitStack() as stack:
        api, through = await stack.enter_async_context(proxied(configuration))
        bus = await stack.enter_async_context(faulty_proxy(shop.running.caller.address))
        api.after = bus.after = killer
        killer.run = run = await stack.enter_async_context(operator(through, shop, bus.url))
        yield run, api, bus


async def until_killed_or(killer: Killer, done: Callable[[], bool]) -> None:
    await eventually(lambda: killer.has_killed or done())


@pytest.mark.parametrize("phase", few(("create", "update", "delete"), "delete"))
async def test_an_operator_killed_after_any_write_leaves_nothing_undone(
    phase: str, configuration: Configuration, server: ApiServer, running: ControlledBus
) -> None:
    """Writes to the API server and to the bus alike; the one after the last kill has none left."""
    for number in itertools.count(1):
        shop = Shop(server, running)
        shop.make("Namespace", "bus")
        if phase != "create":
            make_entities(shop)
            async with operator(configuration, shop):
                await are_ready(shop)
        begin, is_done = PHASES[phase]
        begin(shop)
        killer = Killer(number)
        async with between(configuration, shop, killer):
            await until_killed_or(killer, partial(is_done, shop))
        async with operator(configuration, shop):
            await eventually(partial(is_done, shop), f"{phase}, killed after write {number}")
        if phase == "delete":
            for path in (
                path_of("queues", shop.entity("orders")),
                path_of("topics", shop.entity("events")),
            ):
                assert running.caller.get(path).status == 404, number
        if not killer.has_killed:
            break
    assert number > LEAST_WRITES[phase]


LEAST_WRITES = {"create": 6, "update": 3, "delete": 5}


def change_entities(shop: Shop) -> None:
    for kind, name in (("Queue", "orders"), ("Subscription", "audit")):
        shop.change(kind, name, spec={"maxDeliveryCount": 7})
    shop.change("Topic", "events", spec={"defaultMessageTimeToLive": "PT1H"})


def are_all_ready(shop: Shop) -> bool:
    return all(shop.is_ready(kind, name) for kind, name in ENTITIES)


def are_all_changed(shop: Shop) -> bool:
    caller = shop.running.caller
    queue = caller.get(path_of("queues", shop.entity("orders"))).body["properties"]
    topic = caller.get(path_of("topics", shop.entity("events"))).body["properties"]
    is_seen = all(
        shop.get(kind, name)["status"]["observedGeneration"]
        == shop.get(kind, name)["metadata"]["generation"]
        for kind, name in ENTITIES
    )
    return (
        (queue["maxDeliveryCount"], topic["defaultMessageTimeToLive"]) == (7, "PT1H")
        and is_seen
        and are_all_ready(shop)
    )


def delete_entities(shop: Shop) -> None:
    for kind, name in ENTITIES:
        shop.delete(kind, name)


def are_all_gone(shop: Shop) -> bool:
    return all(shop.is_gone(kind, name) for kind, name in ENTITIES)


PHASES: dict[str, tuple[Callable[[Shop], None], Callable[[Shop], Any]]] = {
    "create": (make_entities, are_all_ready),
    "update": (change_entities, are_all_changed),
    "delete": (delete_entities, are_all_gone),
}


# --- silent watches -------------------------------------------------------------------------------


async def test_silent_watches_make_an_operator_unhealthy_though_requests_are_answered(
    configuration: Configuration, shop: Shop
) -> None:
    """Its successor, which kubelet starts then, does what the silence hid."""
    async with proxied(configuration) as (proxy, through):
        async with operator(through, shop) as run:
            assert run.health.problems(3) == []
            proxy.watches_speak.clear()
            shop.make("Queue", "orders")
            problems = await eventually(lambda: run.health.problems(3))
            assert any("has been silent for" in each for each in problems)
            assert shop.condition("Queue", "orders") == ("", "")
        proxy.watches_speak.set()
        async with operator(through, shop) as run:
            await eventually(partial(shop.is_ready, "Queue", "orders"))
            assert run.health.problems(3) == []


async def test_watches_that_are_heard_again_in_time_need_no_restart(
    configuration: Configuration, shop: Shop
) -> None:
    async with proxied(configuration) as (proxy, through), operator(through, shop) as run:
        proxy.watches_speak.clear()
        shop.make("Queue", "orders")
        await eventually(lambda: run.health.problems(2))
        proxy.watches_speak.set()
        await eventually(partial(shop.is_ready, "Queue", "orders"))
        assert not run.task.done()
