"""Two loaded buses with an operator, scraped by a Prometheus with the labels of the chart."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
)
from azure.servicebus.exceptions import ServiceBusError
from kubernetes.aio.client import Configuration

from postbus_operator.annotations import BUS_LABEL, COMPONENT_LABEL
from postbus_operator.bus.access import open_sessions
from postbus_operator.bus.session import Periods
from postbus_operator.children.bus import NAME_LABEL
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.kube.resource_types import RESOURCES, SECRETS
from postbus_operator.running.health import HealthServer
from tests.dev_bus import DevBus, running_dev_bus
from tests.kube.api_server import ApiServer
from tests.kube.helm import SYSTEM, one, rendered
from tests.kube.operator_run import leading, make
from tests.kube.prometheus_server import Prometheus, Target, prometheus, scrape_config

BUSES: Final = {"shop": 1.0, "stock": 0.4}
"""Name -> share of the load."""

MONITORED: Final = {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor")}
RECONCILERS: Final = dict.fromkeys(("Queue", "Topic", "Subscription"), reconcile_entity)
PERIODS: Final = Periods(wait_s=1, counts_s=0.5, outage_s=0.5, pause_s=0.1)
QUEUE, TOPIC, SUBSCRIPTION = "orders", "order-events", "everything"


# --- load ---------------------------------------------------------------------------------------


@contextmanager
def load(bus: DevBus, share: float) -> Iterator[None]:
    """Send, receive and dead-letter in waves until the context ends.

    A machine under load loses locks; what fails is left to the next round. A reader group keeps
    what receivers settle, and nobody reads it.
    """
    _make_group(bus)
    stop = threading.Event()
    threads = [
        threading.Thread(target=work, args=(bus, share, stop))
        for work in (_send, _receive, _call_http)
    ]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in threads:
            each.join()


def _make_group(bus: DevBus) -> None:
    body = {"entity": QUEUE, "name": "lake", "start": "earliest"}
    request = urllib.request.Request(
        f"{bus.control}/v1/reader-groups/create",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {bus.token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 201


def _send(bus: DevBus, share: float, stop: threading.Event) -> None:
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_sender(QUEUE) as orders,
        client.get_topic_sender(TOPIC) as events,
    ):
        while not stop.wait(0.2):
            wave = 1.2 + math.sin(time.monotonic() / 8)
            count = max(1, round(20 * share * wave))
            with suppress(ServiceBusError):
                orders.send_messages([ServiceBusMessage(b"order" * 40) for _ in range(count)])
                events.send_messages([ServiceBusMessage(b"event" * 20) for _ in range(count)])


def _receive(bus: DevBus, share: float, stop: threading.Event) -> None:
    """Leave a part of the wave as backlog; every 20th message is dead-lettered."""
    most = max(4, round(26 * share))
    number = 0
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_receiver(QUEUE) as orders,
        client.get_subscription_receiver(TOPIC, SUBSCRIPTION) as events,
    ):
        while not stop.wait(0.1):
            for receiver in (orders, events):
                with suppress(ServiceBusError):
                    for message in receiver.receive_messages(most, max_wait_time=0.5):
                        number += 1
                        _settle(receiver, message, number)


def _settle(receiver: ServiceBusReceiver, message: ServiceBusReceivedMessage, number: int) -> None:
    if number % 20 == 0:
        reason = "UnknownCustomer" if number % 60 else "InvalidAddress"
        receiver.dead_letter_message(message, reason=reason)
    else:
        receiver.complete_message(message)


def _call_http(bus: DevBus, _share: float, stop: threading.Event) -> None:
    """Ask for health, and send with a wrong key."""
    refused = urllib.request.Request(
        f"{bus.http}/{QUEUE}/messages", b"order", {"Authorization": "SharedAccessSignature wrong"}
    )
    while not stop.wait(0.7):
        urllib.request.urlopen(f"{bus.http}/health").close()
        try:
            urllib.request.urlopen(refused).close()
        except urllib.error.HTTPError as error:
            error.close()


# --- resources ----------------------------------------------------------------------------------


def make_resources(server: ApiServer, namespace: str, buses: dict[str, DevBus]) -> None:
    """Make a Namespace for each bus, with entities; one has an owner that does not exist."""
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    for name, bus in buses.items():
        token = base64.b64encode(bus.token.encode()).decode()
        secret = {"metadata": {"name": f"{name}-control-token"}, "data": {"token": token}}
        server.request("POST", SECRETS.path(namespace), secret)
        make(server, "Namespace", name, namespace)
        owner = {"owner": {"name": name}}
        make(server, "Topic", f"{name}-news", namespace, spec=owner)
        spec = {"owner": {"name": f"{name}-news"}}
        make(server, "Subscription", f"{name}-audit", namespace, spec=spec)
    make(server, "Queue", "lost", namespace, spec={"owner": {"name": "unknown"}})


async def wait_in_waves(number: int) -> None:
    """Pause between two changes, longer and shorter in turn."""
    await asyncio.sleep(0.5 + 0.4 * math.sin(number / 5))


async def change_resources(server: ApiServer, namespace: str) -> None:
    """Make queues and delete some of them, without an end."""
    for number in range(1_000_000):
        spec = {
            "owner": {"name": list(BUSES)[number % 2]},
            "operatorSpec": {"deletionPolicy": "Delete"},
        }
        name = f"queue-{number}"
        await asyncio.to_thread(partial(make, server, "Queue", name, namespace, spec=spec))
        if number >= 8:
            path = RESOURCES["Queue"].path(namespace, f"queue-{number - 8}")
            await asyncio.to_thread(server.request, "DELETE", path)
        await wait_in_waves(number)


# --- all of it ----------------------------------------------------------------------------------


def _address(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


@asynccontextmanager
async def watched_buses(
    server: ApiServer, configuration: Configuration, program: Path, folder: Path, namespace: str
) -> AsyncIterator[Prometheus]:
    """Run buses, load, operator and Prometheus until the context ends."""
    monitors = rendered(MONITORED)
    async with AsyncExitStack() as stack:
        buses = {name: stack.enter_context(running_dev_bus("examples")) for name in BUSES}
        make_resources(server, namespace, buses)
        run = await stack.enter_async_context(
            leading(
                configuration,
                RECONCILERS,
                open_sessions=partial(open_sessions, periods=PERIODS),
                control_url=lambda resource: buses[resource.key.name].control,
                namespaces=[namespace],
            )
        )
        run.health.epoch = 1
        health = HealthServer(run.health, run.metrics, silence_s=600)
        port = await stack.enter_async_context(health.run("127.0.0.1", 0))
        brokers = [
            Target(
                _address(bus.metrics),
                namespace,
                f"{name}-broker-0",
                {NAME_LABEL: "postbus", COMPONENT_LABEL: "broker", BUS_LABEL: name},
            )
            for name, bus in buses.items()
        ]
        operators = [Target(f"127.0.0.1:{port}", SYSTEM, "postbus-operator-0", {})]
        configs: list[Any] = [
            scrape_config(one(monitors, "PodMonitor"), "brokers", brokers),
            scrape_config(one(monitors, "ServiceMonitor"), "operators", operators),
        ]
        found = stack.enter_context(prometheus(program, folder, *configs))
        for name, share in BUSES.items():
            stack.enter_context(load(buses[name], share))
        tasks = [
            asyncio.create_task(change_resources(server, namespace)),
            asyncio.create_task(run.health.measure_lag()),
        ]
        try:
            yield found
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
