"""The control API of a development bus: real broker, real Postgres, the official SDK."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver
from azure.servicebus.exceptions import MessageLockLostError, ServiceBusError

from postbus.assembly.bus import Bus
from postbus.broker.catalog.directory import home_of
from postbus.broker.operate import controls
from postbus.broker.partition.clock import ClockMode
from postbus.broker.partition.host import Host
from postbus.contract.entities import NamespaceProperties, QueueProperties, Right
from postbus.entity.apply_context import MAINTENANCE_LIMIT
from postbus.entity.commands import Command, Tick
from postbus.manifests.reader import BusDefinition, QueueDefinition, RuleDefinition, RuleKeys
from postbus.process.data_directory import DataDirectory
from postbus.process.settings import Settings
from tests.edge.bus_thread import sas_token

RunBus: TypeAlias = Callable[..., AbstractAsyncContextManager[Bus]]

pytestmark = pytest.mark.slow

MINUTE = timedelta(minutes=1)
SOON_S = 0.5
LONG_S = 10
DEAD_LETTER = ServiceBusSubQueue.DEAD_LETTER
QUEUE = "orders"
OTHER = "invoices"


def definition(**properties: object) -> BusDefinition:
    queue = QueueProperties.model_validate(
        {"dead_lettering_on_message_expiration": True, **properties}
    )
    return BusDefinition(
        "test-bus",
        NamespaceProperties(),
        (RuleDefinition("root", frozenset(Right), RuleKeys("first", "second")),),
        (QueueDefinition(QUEUE, queue, ()), QueueDefinition(OTHER, QueueProperties(), ())),
    )


@pytest.fixture
def run_bus(tmp_path: Path, database: str) -> RunBus:
    """Return a function that runs a development bus on the database of the test, on free ports."""

    @asynccontextmanager
    async def run(
        clock: ClockMode | None = ClockMode.MANUAL, **properties: object
    ) -> AsyncIterator[Bus]:
        ports = {"port": 0, "tls_port": 0, "http_port": 0, "metrics_port": 0, "control_port": 0}
        settings = Settings.model_validate({**ports, "grace_s": 1.0, "stores": database})
        with DataDirectory(tmp_path / "bus") as data:
            declared = definition(**properties)
            bus = Bus(settings, declared, data, is_embedded=False, dev_clock=clock)
            try:
                await bus.start()
                yield bus
            finally:
                await bus.stop()

    return run


@pytest.fixture
async def bus(run_bus: RunBus) -> AsyncIterator[Bus]:
    async with run_bus() as running:
        yield running


@pytest.fixture
async def client(bus: Bus) -> AsyncIterator[ServiceBusClient]:
    async with client_of(bus) as opened:
        yield opened


def client_of(bus: Bus) -> ServiceBusClient:
    ((_, connection_string),) = bus.connection_strings()
    return ServiceBusClient.from_connection_string(connection_string, retry_total=0)


async def call(
    bus: Bus, method: str, path: str, body: object = None, **options: Any
) -> tuple[int, Any]:
    """Return status and body of an answer; `body` None sends none."""
    response = dict(bus.summary())
    token = Path(response["token"]).read_text(encoding="ascii").strip()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        more = {"json": body, **options} if body is not None else options
        async with session.request(method, response["control"] + path, **more) as answer:
            kind = "json" if answer.ok else "problem+json"
            assert answer.content_type == f"application/{kind}"
            return answer.status, await answer.json()


async def advance(bus: Bus, duration: str) -> dict[str, Any]:
    status, response = await call(bus, "POST", "/v1/clock/advance", {"duration": duration})
    assert status == 200, response
    assert isinstance(response, dict)
    return response


async def send(client: ServiceBusClient, body: str, queue: str = QUEUE, **properties: Any) -> None:
    async with client.get_queue_sender(queue) as sender:
        await sender.send_messages(ServiceBusMessage(body, **properties))


async def receive_one(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    (message,) = await receiver.receive_messages(1, max_wait_time=LONG_S)
    return message


async def sample_of(bus: Bus, name: str = QUEUE) -> dict[str, int]:
    """Return state -> messages of an entity."""
    (found,) = (each for each in (await bus.sample()).entities if each.name == name)
    return found.messages


@pytest.fixture
def no_own_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the timers of hosts: only `advance` makes things happen."""
    monkeypatch.setattr(Host, "_tick", lambda _: None)


# --- time to live, schedules and locks ----------------------------------------------------------


@pytest.mark.behaviour("S70", "S74", "S75")
async def test_message_expires_and_is_dead_lettered(bus: Bus, client: ServiceBusClient) -> None:
    await send(client, "late", time_to_live=5 * MINUTE)
    await send(client, "in time", time_to_live=60 * MINUTE)
    await advance(bus, "PT5M")
    async with client.get_queue_receiver(QUEUE) as receiver:
        message = await receive_one(receiver)
        assert str(message) == "in time"
        await receiver.complete_message(message)
    async with client.get_queue_receiver(QUEUE, sub_queue=DEAD_LETTER) as letters:
        (letter,) = await letters.peek_messages(5)
    assert (str(letter), letter.dead_letter_reason) == ("late", "TTLExpiredException")


@pytest.mark.usefixtures("no_own_timers")
@pytest.mark.behaviour("S77")
async def test_due_events_have_happened_when_the_answer_comes(
    bus: Bus, client: ServiceBusClient
) -> None:
    await send(client, "late", time_to_live=2 * MINUTE)
    async with client.get_queue_receiver(QUEUE) as receiver:
        message = await receive_one(receiver)
        await advance(bus, "PT5M")
        assert ((await sample_of(bus))["active"], (await sample_of(bus))["dead_letter"]) == (0, 1)
        with pytest.raises(MessageLockLostError):
            await receiver.complete_message(message)


@pytest.mark.usefixtures("no_own_timers")
@pytest.mark.behaviour("S84", "S85")
async def test_more_schedules_than_one_step_takes_are_all_due(
    bus: Bus, client: ServiceBusClient
) -> None:
    count = MAINTENANCE_LIMIT + 500
    when = datetime.now(UTC) + timedelta(days=3)
    async with client.get_queue_sender(QUEUE) as sender:
        for first in range(0, count, 500):
            batch = [ServiceBusMessage(str(first + n)) for n in range(500)]
            await sender.schedule_messages(batch, when)
    assert ((await sample_of(bus))["scheduled"], (await sample_of(bus))["active"]) == (count, 0)
    await advance(bus, "P2DT23H")
    assert ((await sample_of(bus))["scheduled"], (await sample_of(bus))["active"]) == (count, 0)
    await advance(bus, "PT1H")
    assert ((await sample_of(bus))["scheduled"], (await sample_of(bus))["active"]) == (0, count)


@pytest.mark.usefixtures("no_own_timers")
async def test_work_undone_by_a_failed_commit_is_done_again(
    bus: Bus, client: ServiceBusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client.get_queue_sender(QUEUE) as sender:
        when = datetime.now(UTC) + timedelta(days=1)
        await sender.schedule_messages(ServiceBusMessage("one"), when)
    submit = Host.submit

    def submit_and_interrupt(host: Host, command: Command, *rest: Any) -> None:
        submit(host, command, *rest)
        if isinstance(command, Tick) and host.partition_id == home_of(QUEUE, 16):
            monkeypatch.setattr(Host, "submit", submit)
            asyncio.get_running_loop().call_soon(host.interrupt, 0.1)  # in flight by then

    monkeypatch.setattr(Host, "submit", submit_and_interrupt)
    await advance(bus, "P1D")
    assert Host.submit is submit
    assert ((await sample_of(bus))["scheduled"], (await sample_of(bus))["active"]) == (0, 1)


async def test_lock_made_in_moved_time_can_be_renewed_and_settled_by_the_sdk(
    bus: Bus, client: ServiceBusClient
) -> None:
    await advance(bus, "P2D")
    await send(client, "one")
    async with client.get_queue_receiver(QUEUE) as receiver:
        message = await receive_one(receiver)
        assert message.locked_until_utc is not None
        assert message.locked_until_utc > datetime.now(UTC) + timedelta(days=2)
        await receiver.renew_message_lock(message)
        await receiver.complete_message(message)
    assert (await sample_of(bus))["active"] == 0


async def test_connections_and_tokens_stay_on_real_time(bus: Bus, client: ServiceBusClient) -> None:
    async with client.get_queue_sender(QUEUE) as sender:
        await sender.send_messages(ServiceBusMessage("before"))
        connections = (await bus.sample()).listeners
        await advance(bus, "P30D")
        await sender.send_messages(ServiceBusMessage("after"))
        assert (await bus.sample()).listeners == connections
    assert (await sample_of(bus))["active"] == 2


async def test_a_jump_over_years_is_no_busy_loop(
    bus: Bus, client: ServiceBusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(client, "one", time_to_live=MINUTE)
    ticks: list[Command] = []
    submit = Host.submit

    def count(host: Host, command: Command, *rest: Any) -> None:
        ticks.extend([command] if isinstance(command, Tick) else [])
        submit(host, command, *rest)

    monkeypatch.setattr(Host, "submit", count)
    response = await advance(bus, "P3650D")
    assert response["offsetMs"] == 3_650 * 86_400_000
    assert len(ticks) <= 4  # two partitions are in use


# --- the clock ----------------------------------------------------------------------------------


async def test_clock_shows_its_offset_and_follows_real_time(bus: Bus) -> None:
    status, response = await call(bus, "GET", "/v1/clock")
    assert (status, response["mode"], response["offsetMs"]) == (200, "manual", 0)
    before = datetime.fromisoformat(response["now"])
    assert await advance(bus, "PT90S") != response
    assert (await advance(bus, "PT0.5S"))["offsetMs"] == 90_500
    _, response = await call(bus, "GET", "/v1/clock")
    now = datetime.fromisoformat(response["now"])
    assert timedelta(seconds=90.5) <= now - before < timedelta(seconds=100.5)
    assert now.timestamp() - time.time() == pytest.approx(90.5, abs=5)


async def test_time_of_the_wall_is_not_moved(run_bus: RunBus) -> None:
    async with run_bus(ClockMode.WALL) as bus:
        status, response = await call(bus, "POST", "/v1/clock/advance", {"duration": "PT5M"})
        assert (status, response["title"]) == (409, "Conflict")
        assert "postbus dev --clock manual" in response["detail"]
        _, response = await call(bus, "GET", "/v1/clock")
    assert (response["mode"], response["offsetMs"]) == ("wall", 0)


async def test_bus_that_is_not_for_development_has_no_clock_and_no_faults(
    run_bus: RunBus,
) -> None:
    async with run_bus(None) as bus:
        assert "clock" not in dict(bus.summary())
        requests = (
            ("GET", "/v1/clock", None),
            ("POST", ADVANCE, {"duration": "PT1S"}),
            ("POST", LOSE, {"entity": QUEUE}),
            ("POST", OUTAGE, {"duration": "PT1S"}),
        )
        for method, path, body in requests:
            status, response = await call(bus, method, path, body)
            assert (status, response["type"]) == (404, "urn:postbus:problem:not-here")
            assert "postbus dev" in response["detail"]


async def test_time_goes_on_after_a_restart_where_messages_left_it(
    run_bus: RunBus, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_bus() as bus:
        await advance(bus, "PT1H")
        async with client_of(bus) as client:
            await send(client, "one", time_to_live=2 * 60 * MINUTE)
    async with run_bus() as bus:
        _, response = await call(bus, "GET", "/v1/clock")
        assert 3_590_000 <= response["offsetMs"] <= 3_600_000
        await advance(bus, "PT1H")
        async with client_of(bus) as client, client.get_queue_receiver(QUEUE) as receiver:
            assert [str(each) for each in await receiver.receive_messages(1, SOON_S)] == ["one"]
    with caplog.at_level(logging.WARNING):
        async with run_bus(ClockMode.WALL):
            pass
    assert [record for record in caplog.records if "lie in the future" in record.message]


# --- faults -------------------------------------------------------------------------------------


async def test_lost_locks_settle_no_message_and_redeliver_it(
    bus: Bus, client: ServiceBusClient
) -> None:
    await send(client, "one")
    async with client.get_queue_receiver(QUEUE) as receiver:
        message = await receive_one(receiver)
        response = await call(bus, "POST", "/v1/faults/lose-locks", {"entity": "ORDERS"})
        assert response == (200, {"entity": "orders"})
        with pytest.raises(MessageLockLostError):
            await receiver.complete_message(message)
        again = await receive_one(receiver)
        assert (str(again), again.delivery_count) == ("one", 1)
        await receiver.complete_message(again)


async def test_store_that_is_away_comes_back_without_a_restart(
    bus: Bus, client: ServiceBusClient
) -> None:
    await send(client, "before")
    partition = home_of(QUEUE, 16)
    assert partition != home_of(OTHER, 16)
    body = {"duration": "PT1H", "partition": partition}
    response = await call(bus, "POST", "/v1/faults/store-outage", body)
    assert response == (200, {"duration": "PT1H", "partitions": [partition]})
    with pytest.raises(ServiceBusError):
        await send(client, "refused")
    await send(client, "elsewhere", OTHER)
    host = bus._hosts[partition]
    host._recovery._interrupted_until = 0.0  # as if the hour were over
    assert await host.call(Tick()) is not None
    async with asyncio.timeout(LONG_S):
        await controls.run_due(host)
    await send(client, "after")
    async with client.get_queue_receiver(QUEUE) as receiver:
        bodies = [str(await receive_one(receiver)) for _ in range(2)]
    assert bodies == ["before", "after"]


async def test_refusals_of_an_outage_are_one_line_over_all_listeners(
    bus: Bus, client: ServiceBusClient, caplog: pytest.LogCaptureFixture
) -> None:
    await send(client, "before")
    await call(bus, "POST", "/v1/faults/store-outage", {"duration": "PT1H"})
    with caplog.at_level(logging.INFO, logger="postbus.edge"):
        for number in range(2):
            with pytest.raises(ServiceBusError, match="TrackingId"):
                await send(client, f"refused {number}")
        assert await posted(bus, QUEUE) == 503
    found = [vars(each) for each in caplog.records if each.getMessage() == "refused"]
    assert [(each["condition"], each["entity"]) for each in found] == [
        ("com.microsoft:server-busy", QUEUE)
    ]


async def posted(bus: Bus, queue: str) -> int:
    """Send a message over HTTP; return the status."""
    ((_, connection_string),) = bus.connection_strings()
    parts = dict(each.split("=", 1) for each in connection_string.rstrip(";").split(";") if each)
    host = parts["Endpoint"].removeprefix("sb://").rstrip("/")
    rule, key = parts["SharedAccessKeyName"], parts["SharedAccessKey"]
    token = sas_token(f"http://{host}/{queue}", rule, key, int(time.time()) + 60)
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{host}/{queue}/messages", data=b"x", headers={"Authorization": token}
        ) as answer,
    ):
        return answer.status


async def test_outage_of_all_partitions_delays_due_events(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, response = await call(bus, "POST", "/v1/faults/store-outage", {"duration": "PT1M"})
    assert (status, response["partitions"]) == (200, list(range(16)))
    monkeypatch.setattr(controls, "CATCH_UP_S", 0.2)
    status, response = await call(bus, "POST", "/v1/clock/advance", {"duration": "PT1M"})
    assert status == 503
    homes = sorted({0, home_of(QUEUE, 16), home_of(OTHER, 16)})  # 0 is always loaded
    assert f"partitions {', '.join(map(str, homes))}" in response["detail"]
    assert (await call(bus, "GET", "/v1/clock"))[1]["offsetMs"] == 60_000


async def test_outage_ends_by_itself(bus: Bus, client: ServiceBusClient) -> None:
    await call(bus, "POST", "/v1/faults/store-outage", {"duration": "PT0.3S"})
    await advance(bus, "PT1M")  # waits for the store
    await send(client, "one")
    assert (await sample_of(bus))["active"] == 1


# --- refusals -----------------------------------------------------------------------------------

ADVANCE, LOSE, OUTAGE = "/v1/clock/advance", "/v1/faults/lose-locks", "/v1/faults/store-outage"
REFUSED_BODIES: list[tuple[str, object, int, str]] = [
    (ADVANCE, {}, 400, "duration: field required"),
    (ADVANCE, {"duration": "5 minutes"}, 400, "duration: use an ISO 8601 duration such as PT30S"),
    (ADVANCE, {"duration": "-PT5M"}, 400, "duration: use an ISO 8601 duration"),
    (ADVANCE, {"duration": 300}, 400, "duration: use an ISO 8601 duration"),
    (ADVANCE, {"duration": "PT0S"}, 400, "duration: must be longer than PT0S"),
    (ADVANCE, {"duration": "P999999D"}, 400, "duration: time would pass the year 2999"),
    (ADVANCE, {"duration": "PT5M", "by": "me"}, 400, "by: extra inputs are not permitted"),
    (ADVANCE, ["PT5M"], 400, "body: input should be an object"),
    (ADVANCE, {"duration": "P" + "1" * 5_000_000 + "D"}, 413, "at most"),
    (LOSE, {"entity": "nobody"}, 404, "there is no entity 'nobody'"),
    (LOSE, {"entity": ""}, 400, "entity: string should have at least 1 character"),
    (LOSE, {"entity": 7}, 400, "entity: input should be a valid string"),
    (OUTAGE, {"duration": "PT2H"}, 400, "duration: must be at most PT1H"),
    (OUTAGE, {"duration": "PT1S", "partition": 16}, 400, "partition: must be between 0 and 15"),
    (OUTAGE, {"duration": "PT1S", "partition": -1}, 400, "partition: input should be greater"),
]


async def test_bad_bodies_are_refused_with_instructions(bus: Bus) -> None:
    for path, body, status, words in REFUSED_BODIES:
        response = await call(bus, "POST", path, body)
        assert (response[0], words.lower() in response[1]["detail"].lower()) == (status, True), (
            response
        )
    for data in (b"", b"{", b"\xff", b"[" * 1_000, b'{"duration": NaN}'):
        headers = {"Content-Type": "application/json"}
        status, response = await call(bus, "POST", ADVANCE, data=data, headers=headers)
        assert (status, response["detail"].partition(":")[0]) in {(400, "body"), (400, "duration")}
    assert (await call(bus, "GET", "/v1/clock"))[1]["offsetMs"] == 0


async def test_unknown_paths_and_wrong_methods(bus: Bus) -> None:
    status, response = await call(bus, "GET", "/v1/clocks")
    assert (status, "/openapi.json" in response["detail"]) == (404, True)
    status, response = await call(bus, "GET", ADVANCE)
    assert (status, response["detail"]) == (405, "GET is not supported here, only POST")
    status, response = await call(bus, "OPTIONS", ADVANCE)
    assert status == 405
    status, response = await call(bus, "DELETE", "/v1/clock")
    assert (status, response["detail"]) == (405, "DELETE is not supported here, only GET")


@pytest.mark.parametrize(
    "host",
    ["attacker.example", "attacker.example:9465", "localhost.attacker.example", "10.0.0.1", "[::"],
)
async def test_rebound_host_names_are_refused(bus: Bus, host: str) -> None:
    for method, path in (("GET", "/v1/clock"), ("POST", ADVANCE), ("GET", "/nowhere")):
        body = {"duration": "PT5M"} if method == "POST" else None
        status, response = await call(bus, method, path, body, headers={"Host": host})
        assert (status, "localhost" in response["detail"]) == (403, True)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:9465"])
async def test_loopback_names_are_accepted(bus: Bus, host: str) -> None:
    status, _ = await call(bus, "GET", "/v1/clock", headers={"Host": host})
    assert status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_forms_of_a_foreign_page_are_refused(bus: Bus, kind: str) -> None:
    for path in (ADVANCE, LOSE, OUTAGE):
        headers = {"Content-Type": kind}
        status, response = await call(
            bus, "POST", path, data=b'{"duration": "PT5M"}', headers=headers
        )
        assert (status, "Content-Type" in response["detail"]) == (415, True)
    assert (await call(bus, "GET", "/v1/clock"))[1]["offsetMs"] == 0
