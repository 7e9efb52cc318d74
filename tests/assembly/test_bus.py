"""A whole bus in this process: start, listeners, metrics, restart, stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

import aiohttp
import asyncpg
import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import ServiceBusAuthenticationError, ServiceBusError

from postbus.assembly.bus import Bus, BusError
from postbus.assembly.listeners import Listener
from postbus.assembly.loading import LOADING_S
from postbus.assembly.store_trouble import explain_store_error
from postbus.broker.administration import DeletePolicy
from postbus.contract.entities import (
    DAY_MS,
    EntityStatus,
    NamespaceProperties,
    QueueProperties,
    Right,
    Sku,
    SkuProperties,
)
from postbus.contract.shared_access import make_token
from postbus.manifests.reader import BusDefinition, QueueDefinition, RuleDefinition, RuleKeys
from postbus.process.data_directory import DataDirectory
from postbus.process.embedded import EmbeddedPostgres
from postbus.process.settings import Settings
from postbus.store.errors import SchemaTooNew, StoreUnavailable
from postbus.store.postgres import Store
from tests.broker.putting import NEW, a_queue
from tests.conftest import dsn_of, make_database, run_psql
from tests.store.catalog_rig import FreeCatalog
from tests.store.driving import wait_until
from tests.store.relay import relaying

RunBus: TypeAlias = Callable[..., AbstractAsyncContextManager[Bus]]

pytestmark = pytest.mark.slow

ROOT_RULE = RuleDefinition("root", frozenset(Right), RuleKeys("first", "second"))


def definition(*queues: str, status: EntityStatus = EntityStatus.ACTIVE) -> BusDefinition:
    return BusDefinition(
        "test-bus",
        NamespaceProperties(),
        (ROOT_RULE, RuleDefinition("reader", frozenset({Right.LISTEN}), None)),
        tuple(QueueDefinition(name, QueueProperties(status=status), ()) for name in queues),
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="postbus-test-") as name:
        yield Path(name)


@pytest.fixture
def run_bus(folder: Path) -> RunBus:
    """Return a function that runs a bus on the folder of the test, on free ports."""

    @asynccontextmanager
    async def run(
        *queues: str,
        retention_ms: int = DAY_MS,
        sku: Sku = Sku.STANDARD,
        status: EntityStatus = EntityStatus.ACTIVE,
        on_step: Callable[[Bus, str], None] = lambda _bus, _step: None,
        loading_s: float = LOADING_S,
        **values: object,
    ) -> AsyncIterator[Bus]:
        ports = {
            "port": 0,
            "tls_port": 0,
            "http_port": 0,
            "metrics_port": 0,
            "control_port": 0,
            "grace_s": 1.0,
        }
        settings = Settings.model_validate({**ports, **values})
        with DataDirectory(folder / "bus") as data:
            is_embedded = settings.stores is None
            properties = NamespaceProperties(sku=SkuProperties(name=sku))
            defined = replace(
                definition(*queues, status=status),
                deleted_retention_ms=retention_ms,
                properties=properties,
            )
            bus = Bus(settings, defined, data, is_embedded=is_embedded, loading_s=loading_s)
            try:
                await bus.start(lambda step: on_step(bus, step))
                yield bus
            finally:
                await bus.stop()

    return run


def client_of(bus: Bus) -> ServiceBusClient:
    ((_, connection_string),) = bus.connection_strings()
    return ServiceBusClient.from_connection_string(connection_string, retry_total=0)


async def send(bus: Bus, queue: str, *bodies: str) -> None:
    async with client_of(bus) as client, client.get_queue_sender(queue) as sender:
        for body in bodies:
            await sender.send_messages(ServiceBusMessage(body))


async def receive(bus: Bus, queue: str, count: int) -> list[str]:
    received: list[str] = []
    async with client_of(bus) as client, client.get_queue_receiver(queue) as receiver:
        while len(received) < count:
            messages = await receiver.receive_messages(count - len(received), max_wait_time=10)
            assert messages, f"{len(received)} of {count} arrived"
            for message in messages:
                await receiver.complete_message(message)
                received.append(str(message))
    return received


async def scrape(bus: Bus) -> str:
    lines = dict(bus.summary())
    async with aiohttp.ClientSession() as session, session.get(lines["metrics"]) as answer:
        return await answer.text()


async def test_a_bus_waits_for_a_store_lost_during_the_load(run_bus: RunBus) -> None:
    async with run_bus("orders") as bus:
        await send(bus, "orders", "stored")

    def on_step(bus: Bus, step: str) -> None:
        if step == "loading partitions":
            assert bus._postgres is not None
            os.kill(bus._postgres.pid, signal.SIGKILL)
        elif step == "opening the listeners":
            assert bus._postgres is not None
            bus._postgres.restart()

    async with run_bus("orders", on_step=on_step, loading_s=0.1) as bus:
        assert await receive(bus, "orders", 1) == ["stored"]


async def test_a_bus_without_its_store_is_alive_and_not_ready(run_bus: RunBus) -> None:
    async with run_bus("orders") as bus, aiohttp.ClientSession() as session:
        metrics = dict(bus.summary())["metrics"].removesuffix("/metrics")
        host, port = bus.listeners()[Listener.HTTP]

        async def statuses() -> list[int]:
            urls = [f"{metrics}/healthz", f"{metrics}/readyz", f"http://{host}:{port}/health"]
            return [(await session.get(url)).status for url in urls]

        assert await statuses() == [200, 200, 200]
        assert bus._postgres is not None
        await asyncio.to_thread(bus._postgres.stop)

        async def is_away() -> bool:
            return await statuses() == [200, 503, 503]

        await wait_until(is_away)

        async def is_reason_given() -> bool:
            text = await (await session.get(f"{metrics}/readyz")).text()
            return text.startswith("not ready\nthe store") and "\npartition " in text

        await wait_until(is_reason_given)
        control = dict(bus.summary())["control"]
        token = Path(dict(bus.summary())["token"]).read_text(encoding="ascii").split()[0]
        headers = {"Authorization": f"Bearer {token}"}
        async with session.get(f"{control}/v1/status", headers=headers) as answer:
            health = await answer.json()
        assert not health["isReady"]
        assert {text.split()[0] for text in health["troubles"]} == {"the", "partition"}
        await asyncio.to_thread(bus._postgres.start)

        async def is_back() -> bool:
            return await statuses() == [200, 200, 200]

        await wait_until(is_back)


@pytest.mark.behaviour("S240")
async def test_declared_queues_are_there_and_survive_a_restart(run_bus: RunBus) -> None:
    async with run_bus("orders", "invoices") as bus:
        await send(bus, "orders", "one", "two")
        await send(bus, "invoices", "three")
    async with run_bus("orders") as bus:
        assert dict(bus.summary())["queues"] == "invoices, orders"
        assert await receive(bus, "orders", 2) == ["one", "two"]
        assert await receive(bus, "invoices", 1) == ["three"]


async def test_partitions_live_in_several_databases(
    run_bus: RunBus, postgres_server: EmbeddedPostgres
) -> None:
    names = ("bus_1", "bus_2")
    for name in names:
        make_database(postgres_server, name)
    stores = " ".join(dsn_of(postgres_server, name) for name in names)
    queues = [f"queue-{number}" for number in range(6)]
    async with run_bus(*queues, stores=stores) as bus:
        for queue in queues:
            await send(bus, queue, queue)
    homes = [await partitions_in(dsn) for dsn in stores.split()]
    assert all(homes)
    assert [{number % 2 for number in home} for home in homes] == [{0}, {1}]
    async with run_bus(*queues, stores=stores) as bus:
        for queue in queues:
            assert await receive(bus, queue, 1) == [queue]
    with pytest.raises(BusError, match=r"database 1 of 2.*was created as database 2 of 2"):
        async with run_bus(*queues, stores=" ".join(reversed(stores.split()))):
            pass
    for name in names:
        run_psql(postgres_server, f"drop database {name} with (force)")


@pytest.mark.slow
async def test_a_stop_releases_reachable_partitions_during_an_outage(
    run_bus: RunBus, postgres_server: EmbeddedPostgres
) -> None:
    names = ("away", "there")
    for name in names:
        make_database(postgres_server, name)
    there = dsn_of(postgres_server, "there")
    async with relaying(dsn_of(postgres_server, "away")) as (relay, dsn):
        queues = [f"queue-{number}" for number in range(6)]
        async with run_bus(*queues, stores=f"{dsn} {there}") as bus:
            owned = await partitions_in(there)
            relay.is_silent = True
            stopping = asyncio.create_task(bus.stop(0.0))
            look = await asyncio.wait_for(asyncpg.connect(there), 5.0)

            async def are_released() -> bool:
                sql = "select is_released from partition_{}.owner"
                return all([await look.fetchval(sql.format(number)) for number in owned])

            await wait_until(are_released, 4.0)
            assert not stopping.done()
            await look.close()
            async with asyncio.timeout(20.0):
                await stopping
    for name in names:
        run_psql(postgres_server, f"drop database {name} with (force)")


async def test_retained_entities_leave_the_store_when_their_time_is_over(
    run_bus: RunBus, postgres_server: EmbeddedPostgres
) -> None:
    """Also where nothing else makes its partition load."""
    make_database(postgres_server, "bus_retained")
    dsn = dsn_of(postgres_server, "bus_retained")
    async with run_bus(stores=dsn, retention_ms=1) as bus:
        await bus.administration.put(a_queue("orders", QueueProperties()), NEW)
        await send(bus, "orders", "one", "two")
        await bus.administration.delete("orders", policy=DeletePolicy.RETAIN)
    (home,) = set(await partitions_in(dsn)) - {0}
    look = await asyncpg.connect(dsn)

    async def count() -> int:
        return int(await look.fetchval(f"select count(*) from partition_{home}.message"))

    async def is_empty() -> bool:
        return await count() == 0

    try:
        assert await count() == 2
        async with run_bus(stores=dsn):
            await wait_until(is_empty)
    finally:
        await look.close()
    run_psql(postgres_server, "drop database bus_retained with (force)")


@pytest.mark.parametrize("step", ["unnotified", "half-way"])
async def test_remains_of_a_deleted_queue_are_dropped_at_the_start_after_a_crash(
    run_bus: RunBus, postgres_server: EmbeddedPostgres, step: str
) -> None:
    """The partition was not notified yet, or not all of its rows were deleted; nothing else lives
    there.
    """
    make_database(postgres_server, "bus_dropped")
    dsn = dsn_of(postgres_server, "bus_dropped")
    async with run_bus(stores=dsn) as bus:
        made = await bus.administration.put(a_queue("orders", QueueProperties()), NEW)
        await send(bus, "orders", "one", "two")
        store = Store(dsn, unsafe=True)
        await FreeCatalog(store).delete(made.entity_no)
        await store.close()
    (home,) = set(await partitions_in(dsn)) - {0}
    look = await asyncpg.connect(dsn)
    if step == "half-way":
        await look.execute(f"delete from partition_{home}.entity")

    async def counts() -> list[int]:
        tables = ("entity", "message")
        return [
            await look.fetchval(f"select count(*) from partition_{home}.{table}")
            for table in tables
        ]

    async def are_empty() -> bool:
        return await counts() == [0, 0]

    try:
        assert await counts() == [1 if step == "unnotified" else 0, 2]
        async with run_bus(stores=dsn):
            await wait_until(are_empty)
        assert sorted(await partitions_in(dsn)) == [0, home]  # no other was made for the question
        async with run_bus(stores=dsn) as bus:
            assert [host.partition_id for host in bus._hosts if host.is_loaded] == [0]
    finally:
        await look.close()
    run_psql(postgres_server, "drop database bus_dropped with (force)")


async def partitions_in(dsn: str) -> list[int]:
    look = await asyncpg.connect(dsn)
    try:
        names = [row["nspname"] for row in await look.fetch(PARTITION_SCHEMAS)]
    finally:
        await look.close()
    return [int(name.removeprefix("partition_")) for name in names]


ACTIVITY = """
select application_name from pg_stat_activity
where backend_type = 'client backend' and pid <> pg_backend_pid()
"""
PARTITION_SCHEMAS = """
select nspname from pg_namespace where nspname like 'partition\\_%' order by nspname
"""


async def test_one_busy_queue_leaves_the_other_partitions_alone(
    run_bus: RunBus, folder: Path
) -> None:
    async with run_bus("orders") as bus:
        await send(bus, "orders", "one", "two")
        assert await receive(bus, "orders", 2) == ["one", "two"]
        look = await asyncpg.connect(
            f"postgresql://postbus@/postgres?host={folder / 'bus' / 'postgres' / 'socket'}"
        )
        try:
            names = [row["application_name"] for row in await look.fetch(ACTIVITY)]
            schemas = [row["nspname"] for row in await look.fetch(PARTITION_SCHEMAS)]
        finally:
            await look.close()
    others = [name for name in names if not name.startswith("postbus writer")]
    assert sorted(others) == ["postbus beat", "postbus reader", "postbus side"], names
    assert len(names) <= 5, names
    writers = {name.rsplit(" ", 1)[1] for name in names if name.startswith("postbus writer")}
    assert len(writers) == 2, names  # the one of definitions and the one of the queue
    assert set(schemas) == {f"partition_{number}" for number in writers}  # the others have none


async def test_metrics_count_messages_in_queues(run_bus: RunBus) -> None:
    async with run_bus("orders") as bus:
        await send(bus, "orders", "one", "two")
        text = await scrape(bus)
    assert 'postbus_messages{entity="orders",kind="queue",state="active"} 2.0' in text
    assert 'postbus_messages_accepted_total{entity="orders",kind="queue"} 2.0' in text
    assert 'postbus_messages_completed_total{entity="orders",kind="queue"} 0.0' in text
    age = re.search(r'oldest_message_age_seconds{entity="orders",kind="queue"} (\S+)', text)
    assert age is not None
    assert 0 <= float(age[1]) < 60
    assert re.search(r'postbus_commit_seconds_count{partition="\d+"} [1-9]', text)
    assert 'postbus_connections{protocol="amqp"}' in text
    assert 'status="active"' in text


def value_of(text: str, name: str, **labels: str) -> float:
    """Return one number of a scrape, summed over labels that are not given."""
    values = [
        float(value)
        for found_labels, value in re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        if all(f'{label}="{text}"' in found_labels for label, text in labels.items())
    ]
    assert values, name
    return sum(values)


async def test_metrics_follow_messages(run_bus: RunBus) -> None:
    async with (
        run_bus("orders") as bus,
        client_of(bus) as client,
        client.get_queue_sender("orders") as sender,
    ):
        brief = ServiceBusMessage("brief", time_to_live=timedelta(milliseconds=1))
        await sender.send_messages(brief)
        await sender.send_messages([ServiceBusMessage(str(number)) for number in range(5)])
        later = datetime.now(UTC) + timedelta(hours=1)
        await sender.schedule_messages([ServiceBusMessage("later")] * 3, later)
        async with client.get_queue_receiver("orders") as receiver:
            messages: list[ServiceBusReceivedMessage] = []
            while len(messages) < 4:
                messages += await receiver.receive_messages(4 - len(messages), max_wait_time=5)
            await receiver.complete_message(messages[0])
            await receiver.dead_letter_message(messages[1])
            await receiver.abandon_message(messages[2])
            (again,) = await receiver.receive_messages(1, max_wait_time=5)
            assert again.delivery_count == 1
            text = await scrape(bus)
    states = {"active": 3, "locked": 2, "scheduled": 3, "dead_letter": 1}
    for state, count in states.items():
        assert value_of(text, "postbus_messages", entity="orders", state=state) == count
    flows = {"accepted": 9, "delivered": 5, "completed": 1, "dead_lettered": 1, "expired": 1}
    for flow, count in flows.items():
        assert value_of(text, f"postbus_messages_{flow}_total", entity="orders") == count
    assert value_of(text, "postbus_entity_size_bytes", entity="orders") > 0
    assert value_of(text, "postbus_window_bytes") > 0
    assert value_of(text, "postbus_data_volume_free_bytes") > 0
    whole = value_of(text, "postbus_data_volume_bytes")
    assert whole == shutil.disk_usage(tempfile.gettempdir()).total
    days_left = value_of(text, "postbus_certificate_expiry_timestamp_seconds") - time.time()
    assert 300 < days_left / 86_400 < 400
    assert value_of(text, "postbus_store_written_rows_total") >= 8
    assert 0 < value_of(text, "postbus_store_round_trip_seconds") < 60


async def test_no_message_is_receivable_while_receivers_are_refused(run_bus: RunBus) -> None:
    """Who scales consumers by this number starts none for a queue that was switched off."""
    receivable = {
        EntityStatus.ACTIVE: 2,
        EntityStatus.RECEIVE_DISABLED: 0,
        EntityStatus.SEND_DISABLED: 2,
        EntityStatus.DISABLED: 0,
    }
    for status, count in receivable.items():
        async with run_bus("orders", status=status) as bus:
            if status is EntityStatus.ACTIVE:
                await send(bus, "orders", "one", "two")
            text = await scrape(bus)
        found = {
            state: value_of(text, "postbus_messages", entity="orders", state=state)
            for state in ("active", "receivable")
        }
        assert found == {"active": 2, "receivable": count}, status


async def test_metrics_follow_connections(run_bus: RunBus) -> None:
    """In the Basic tier, which has fewer of them."""
    async with run_bus("orders", sku=Sku.BASIC) as bus:
        host, port = bus.listeners()[Listener.TLS]
        with pytest.raises(ssl.SSLError):  # its authority is not known here
            await asyncio.open_connection(host, port, ssl=ssl.create_default_context())
        ((_, connection_string),) = bus.connection_strings()
        wrong = connection_string.replace("SharedAccessKey=", "SharedAccessKey=x")
        client = ServiceBusClient.from_connection_string(wrong, retry_total=0)
        async with client:
            with pytest.raises(ServiceBusAuthenticationError):
                await client.get_queue_sender("orders").send_messages(ServiceBusMessage("x"))
        http = dict(bus.summary())["http"]
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{http}/orders/messages/head") as answer:
                assert answer.status == 401
            text = await scrape(bus)
            assert value_of(text, "postbus_connections", protocol="http") == 1
        assert value_of(text, "postbus_connections_failed_total") == 1
        assert value_of(text, "postbus_authentication_failures_total") == 1
        assert value_of(text, "postbus_connections_accepted_total", protocol="amqp") == 1
        requested = {"api": "runtime", "status": "401"}
        assert value_of(text, "postbus_http_requests_total", **requested) == 1
        assert bus._listeners is not None
        assert bus._listeners._front is not None
        assert bus._listeners._front._max_connections == 1_000
        bus._listeners._front._max_connections = 0
        reader, writer = await asyncio.open_connection(*bus.listeners()[Listener.PLAIN])
        assert await reader.read() == b""
        writer.close()
        assert value_of(await scrape(bus), "postbus_connections_refused_total") == 1


TAKE = """
with taker as (
    insert into postbus.broker (
        incarnation, broker_name, host, pid, boot_id, pid_namespace, started_ticks, data_lock,
        schema_version
    )
    select gen_random_uuid(), 'taker', 'elsewhere', 7, '', '', 1, '', max(schema_version)
    from postbus.broker
    returning incarnation
), taken as (
    update partition_{home}.owner
    set epoch = epoch + 1, broker_name = 'taker', incarnation = (select incarnation from taker)
)
select count(pg_terminate_backend(pid)) from pg_stat_activity
where application_name = 'postbus writer {home}'
"""
"""Statement of another broker's claim: it becomes the owner, and the earlier writer is ended."""


async def test_metrics_follow_partitions(run_bus: RunBus, folder: Path) -> None:
    dsn = f"postgresql://postbus@/postgres?host={folder / 'bus' / 'postgres' / 'socket'}"
    async with run_bus("orders") as bus:
        await send(bus, "orders", "one", "two")
    async with run_bus("orders") as bus:
        assert await receive(bus, "orders", 1) == ["one"]
        before = await scrape(bus)
        assert value_of(before, "postbus_store_reads_total") >= 1  # they were not in memory
        assert value_of(before, "postbus_store_read_rows_total") >= 2
        assert value_of(before, "postbus_journal_queued_bytes") == 0
        commits = value_of(before, "postbus_commit_seconds_count")
        (home,) = set(await partitions_in(dsn)) - {0}
        other = await asyncpg.connect(dsn)
        try:
            async with other.transaction():
                await other.execute(f"lock table partition_{home}.message in exclusive mode")
                sending = asyncio.create_task(send(bus, "orders", "x" * 10_000))
                while value_of(await scrape(bus), "postbus_journal_queued_bytes") < 10_000:
                    assert not sending.done()
            await sending
            after = await scrape(bus)
            assert value_of(after, "postbus_journal_queued_bytes") == 0
            assert value_of(after, "postbus_commit_seconds_count") > commits
            assert value_of(after, "postbus_partition_fences_total") == 0
            await other.execute(TAKE.format(home=home))
        finally:
            await other.close()

        async def is_reported() -> bool:
            return "owned by taker" in "".join(bus.readiness.troubles())

        # The client takes about as long to give up as we do to take our place again.
        waiting = asyncio.create_task(wait_until(is_reported))
        with suppress(ServiceBusError):  # refused, as another broker has taken it
            await send(bus, "orders", "three")
        await waiting
        async with asyncio.timeout(30):
            while value_of(await scrape(bus), "postbus_partition_fences_total") == 0:
                await asyncio.sleep(0)
        assert value_of(await scrape(bus), "postbus_partition_fences_total") == 1
        assert value_of(await scrape(bus), "postbus_partition_reloads_total") == 1


async def test_keys_are_made_only_where_none_were_given(run_bus: RunBus, folder: Path) -> None:
    async with run_bus("orders"):
        pass
    assert list(json.loads((folder / "bus" / "keys.json").read_text())) == ["test-bus/reader"]


async def test_tls_listener_serves_clients_that_trust_the_authority(run_bus: RunBus) -> None:
    async with run_bus("orders") as bus:
        assert bus.authority_file is not None
        context = ssl.create_default_context(cafile=str(bus.authority_file))
        host, port = bus.listeners()[Listener.TLS]
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.write(b"AMQP\x03\x01\x00\x00")
        assert await reader.readexactly(8) == b"AMQP\x03\x01\x00\x00"
        writer.close()


async def test_stop_ends_open_connections(run_bus: RunBus) -> None:
    async with run_bus("orders") as bus:
        _, port = bus.listeners()[Listener.PLAIN]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await bus.stop()
        async with asyncio.timeout(10):
            assert await reader.read() is not None
        writer.close()


async def test_taken_port_is_named_and_everything_is_released(run_bus: RunBus) -> None:
    async with run_bus("orders") as bus:
        _, taken = bus.listeners()[Listener.PLAIN]
        settings = Settings(port=taken, tls_port=0, http_port=0, metrics_port=0, control_port=0)
        with (
            tempfile.TemporaryDirectory(prefix="postbus-test-") as name,
            DataDirectory(Path(name)) as data,
        ):
            second = Bus(settings, definition("orders"), data, is_embedded=True)
            with pytest.raises(BusError, match=f"port {taken} on 127.0.0.1 is in use"):
                await second.start()
            assert not (data.postgres / "data" / "postmaster.pid").exists()


def test_trouble_with_the_store_is_explained_without_secrets() -> None:
    refused = StoreUnavailable("ConnectionRefusedError")
    refused.__cause__ = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)")
    assert "Connect call failed" in explain_store_error(refused)
    assert explain_store_error(SchemaTooNew("run the newer version")).endswith("newer version")


async def test_a_stop_does_not_wait_for_http_receives(run_bus: RunBus) -> None:
    async with run_bus("orders") as bus, aiohttp.ClientSession() as session:
        assert bus._listeners is not None
        runtime = bus._listeners._runtime
        assert runtime is not None
        http = dict(bus.summary())["http"]
        token = make_token(f"{http}/", "root", "first", int(time.time()) + 600)
        headers = {"Authorization": token}
        at = f"{http}/orders/messages/head?timeout=600"
        waiting = asyncio.create_task(session.post(at, headers=headers))
        async with asyncio.timeout(30):
            while not runtime._receives._waiting:
                await asyncio.sleep(0)
        async with asyncio.timeout(60):  # well below the grace period
            await bus.stop(grace_s=300)
        answer = await waiting
        assert answer.status == 503
        assert "stopping" in await answer.text()
