"""A start waits for a store that does not answer, and reports it; permanent errors end it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from azure.servicebus.exceptions import ServiceBusServerBusyError

from postbus.assembly.bus import Bus, BusError
from postbus.broker.placement import home_of
from postbus.cli.failures import Exit
from postbus.cli.serving.rivals import Meeting, meet_rivals
from postbus.contract.entities import QueueProperties
from postbus.fast import BUILD
from postbus.manifests.reader import QueueDefinition
from postbus.process.data_directory import DataDirectory
from postbus.process.embedded import EmbeddedPostgres
from postbus.process.settings import Settings
from postbus.store.postgres import Store
from tests.broker.brokers_rig import PORTS, client_of, definition, peek, send
from tests.broker.partition.test_host import until
from tests.conftest import dsn_of, make_database, run_psql
from tests.dev_bus import LIMIT_S, environment
from tests.ports import free_ports
from tests.store.driving import wait_until
from tests.store.relay import relaying

HEALTHY = (200, f"ok\nbuild: {BUILD}\n")

pytestmark = pytest.mark.slow

NUMBERS = itertools.count(1)
HERE, THERE = "invoices", "letters"
"""Queues with partitions in the first and in the second of two databases."""

SPREAD = "spread"
"""One that is partitioned over both."""

NOWHERE = "postgresql://me:hidden@127.0.0.1:1/bus"


@pytest.fixture(scope="module")
def servers(server_folder: Path) -> Iterator[list[EmbeddedPostgres]]:
    """Two servers that the tests stop."""
    made = [EmbeddedPostgres(server_folder / f"start-{n}", major=16) for n in range(2)]
    for server in made:
        server.start()
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def dsns(servers: list[EmbeddedPostgres]) -> Iterator[list[str]]:
    """A new database on each of the servers, which run again afterwards."""
    name = f"start_{next(NUMBERS)}"
    for server in servers:
        make_database(server, name)
    yield [dsn_of(server, name) for server in servers]
    for server in servers:
        server.start()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="postbus-test-") as name:
        yield Path(name)


def bus_of(data: DataDirectory, *dsns: str, queues: tuple[str, ...] = (HERE, THERE)) -> Bus:
    settings = Settings.model_validate(
        dict.fromkeys(PORTS, 0) | {"stores": " ".join(dsns), "grace_s": 1.0}
    )
    defined = definition(*queues)
    spread = QueueDefinition(SPREAD, QueueProperties(enable_partitioning=True), ())
    queue_definitions = [spread if one.name == SPREAD else one for one in defined.queues]
    defined = replace(defined, queues=tuple(queue_definitions))
    return Bus(settings, defined, data, is_embedded=False)


class Starting:
    """A bus and its start: the reported reasons for waiting, and the task."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.waits: list[str] = []
        self.task = asyncio.create_task(bus.start(self._note))

    def _note(self, step: str) -> None:
        if step.startswith("waiting for the store: "):
            self.waits.append(step)

    async def look(self, path: str) -> tuple[int, str]:
        url = dict(self.bus.summary())["metrics"].removesuffix("/metrics")
        async with aiohttp.ClientSession() as session, session.get(f"{url}{path}") as answer:
            return answer.status, await answer.text()

    async def is_ready(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.task), LIMIT_S)


@asynccontextmanager
async def starting(
    folder: Path, *dsns: str, queues: tuple[str, ...] = (HERE, THERE)
) -> AsyncIterator[Starting]:
    """Start a bus; it is stopped afterwards."""
    with DataDirectory(folder / "bus") as data:
        start = Starting(bus_of(data, *dsns, queues=queues))
        try:
            yield start
        finally:
            await start.bus.stop()
            await asyncio.wait({start.task})


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "postbus.store.outage" and record.levelno >= logging.WARNING
    ]


# --- no store at all ----------------------------------------------------------------------------


async def test_a_bus_reports_that_it_waits_for_its_store_and_starts(
    dsns: list[str],
    servers: list[EmbeddedPostgres],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await asyncio.to_thread(servers[0].stop)
    async with starting(folder, dsns[0]) as start:
        await until(lambda: bool(start.waits))
        assert (await start.look("/healthz"))[0] == 200
        status, text = await start.look("/readyz")
        assert status == 503
        store = r"the store at /\S+ is unavailable \(since \S+Z\): \w+.*\n"
        assert re.fullmatch(rf"not ready\nwaiting for the store\n{store}", text), text
        assert re.search(r'store_up\{.*store="1"\} 0.0', (await start.look("/metrics"))[1])
        await until(lambda: len(start.waits) > 4)
        assert not start.task.done()
        assert lines_of(caplog) == ["the store fails"]
        await asyncio.to_thread(servers[0].start)
        await start.is_ready()
        await send(start.bus, HERE, "accepted")
        assert await peek(start.bus, HERE) == ["accepted"]
        assert await start.look("/readyz") == (200, "ready\n")
        assert re.search(r'store_up\{.*store="1"\} 1.0', (await start.look("/metrics"))[1])


async def test_a_read_only_store_and_one_without_free_connections_are_waited_for(
    dsns: list[str], servers: list[EmbeddedPostgres], folder: Path
) -> None:
    name = f"weak_{next(NUMBERS)}"
    database = dsns[0].partition("@/")[2].partition("?")[0]
    run_psql(servers[0], f"create role {name} login connection limit 0")
    run_psql(servers[0], f"alter database {database} owner to {name}")
    run_psql(servers[0], f"alter database {database} set default_transaction_read_only = on")
    async with starting(folder, dsns[0].replace("//postbus@", f"//{name}@")) as start:
        await until(lambda: bool(start.waits))
        assert "too many connections" in start.waits[-1]
        run_psql(servers[0], f"alter role {name} connection limit -1")
        await until(lambda: "read-only" in start.waits[-1])
        assert "read-only" in (await start.look("/readyz"))[1]
        run_psql(servers[0], f"alter database {database} reset default_transaction_read_only")
        await start.is_ready()
        await send(start.bus, HERE, "accepted")


async def test_a_start_waits_for_a_store_lost_during_a_read(dsns: list[str], folder: Path) -> None:
    async with relaying(dsns[0]) as (relay, through):
        relay.pause_at = ("postbus side", b"sealing_check")  # the tables are made already
        async with starting(folder, through) as start:
            await asyncio.wait_for(relay.paused.wait(), LIMIT_S)
            await start.is_ready()
            assert len(start.waits) == 1
            await send(start.bus, HERE, "accepted")


async def test_a_silent_store_does_not_delay_the_stop(dsns: list[str], folder: Path) -> None:
    async with relaying(dsns[0]) as (relay, through):
        relay.is_silent = True
        async with starting(folder, through) as start:
            await until(lambda: "metrics" in dict(start.bus.summary()))
            assert (await start.look("/readyz"))[0] == 503
            began = time.monotonic()
            await start.bus.stop()
            assert time.monotonic() - began < 3.0  # a connection is given up after 5 s
            with pytest.raises(BusError, match="stopped while it started"):
                await start.task


@contextmanager
def serving(
    folder: Path, *options: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `postbus serve`; yield it and the address of its port for metrics."""
    [port] = free_ports(1)
    ports = [word for name in PORTS if name != "metrics_port" for word in (_option(name), "0")]
    ports += ["--metrics-port", str(port), *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "postbus", "serve", "--data", str(folder / "bus"), *ports],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def status_of(url: str) -> tuple[int, str] | None:
    """Return status and text, None without a listener."""
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return None


async def test_serve_reports_that_it_waits_and_ends_in_order(folder: Path) -> None:
    address = str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(LIMIT_S)
        with serving(folder, POSTBUS_STORES=NOWHERE, NOTIFY_SOCKET=address) as (process, url):
            notices: list[str] = []
            while sum("STATUS=waiting" in each for each in notices) < 3:
                notices.append(await asyncio.to_thread(lambda: manager.recv(4_096).decode()))
            at = (
                r"the store at 127\.0\.0\.1:1 is unavailable \(since \S+Z\): ConnectionRefusedError"
            )
            assert re.search(f"STATUS=waiting for the store: {at}", notices[-1] + notices[-2])
            assert "EXTEND_TIMEOUT_USEC=120000000" in notices
            health = await asyncio.to_thread(status_of, f"{url}/healthz")
            assert health == HEALTHY
            ready = await asyncio.to_thread(status_of, f"{url}/readyz")
            assert ready is not None
            assert ready[0] == 503
            assert re.search(at, ready[1])
            process.send_signal(signal.SIGTERM)
            out, logged = await asyncio.to_thread(process.communicate, None, LIMIT_S)
            assert process.returncode == 0
            manager.setblocking(False)
            while True:
                try:
                    notices.append(manager.recv(4_096).decode())
                except BlockingIOError:
                    break
    assert "STOPPING=1" in notices
    assert not [each for each in notices if "READY=1" in each]
    assert "hidden" not in out + logged + "".join(notices)
    assert logged.count("the store fails") == 1
    assert logged.count("waiting for the store") == 1


@pytest.mark.parametrize("options", [(), ("--take-over",)])
async def test_health_is_served_before_any_store_is_used(
    folder: Path, options: tuple[str, ...]
) -> None:
    with serving(folder, *options, POSTBUS_STORES=NOWHERE) as (process, url):

        async def is_waiting() -> bool:
            ready = await asyncio.to_thread(status_of, f"{url}/readyz")
            assert ready is None or ready[0] == 503
            assert process.poll() is None
            return ready is not None and "is unavailable" in ready[1]

        await wait_until(is_waiting)
        assert await asyncio.to_thread(status_of, f"{url}/healthz") == HEALTHY
        _, text = await asyncio.to_thread(status_of, f"{url}/readyz") or (0, "")
        at = r"the store at 127\.0\.0\.1:1 is unavailable \(since \S+Z\): ConnectionRefusedError"
        assert re.match(f"not ready\nwaiting for the store\n{at}", text)
        assert (
            "postbus_store_up"
            in (await asyncio.to_thread(status_of, f"{url}/metrics") or ("", ""))[1]
        )
        process.send_signal(signal.SIGTERM)
        _, logged = await asyncio.to_thread(process.communicate, None, LIMIT_S)
        assert (process.returncode, "Traceback" in logged) == (Exit.OK, False), logged


async def test_a_start_waits_for_the_process_that_uses_its_folder(
    dsns: list[str], folder: Path
) -> None:
    with (
        DataDirectory(folder / "bus") as data,  # as of a process that is still stopping
        serving(folder, POSTBUS_STORES=dsns[0]) as (process, url),
    ):
        waiting = f"not ready\nwaiting for process {os.getpid()}, which uses {data.path}\n"

        async def is_waiting() -> bool:
            assert process.poll() is None
            return await asyncio.to_thread(status_of, f"{url}/readyz") == (503, waiting)

        await wait_until(is_waiting)
        assert await asyncio.to_thread(status_of, f"{url}/healthz") == HEALTHY
        assert (await asyncio.to_thread(status_of, f"{url}/metrics") or (0, ""))[0] == 200
        data.close()

        async def is_ready() -> bool:
            assert process.poll() is None
            return await asyncio.to_thread(status_of, f"{url}/readyz") == (200, "ready\n")

        await wait_until(is_ready)


async def test_a_take_over_repeats_its_request_when_the_connection_is_lost(dsns: list[str]) -> None:
    steps: list[str] = []
    async with relaying(dsns[0]) as (relay, through):
        relay.deafen_at = ("postbus side", b"asked_by")
        store = Store(through)
        await meet_rivals(store, "bus", Meeting.TAKE_OVER, 1.0, steps.append)
        assert not store.outage.is_on
        await store.close()
    (step,) = steps
    assert re.match(
        r"waiting for the store: the store at /\S+ is unavailable \(since \S+Z\): \w+", step
    )


# --- one of several -----------------------------------------------------------------------------


async def started(folder: Path, *dsns: str) -> None:
    """Give both databases a message."""
    async with starting(folder, *dsns) as start:
        await start.is_ready()
        for queue in (HERE, THERE):
            await send(start.bus, queue, f"in {queue}")


def home_trouble(start: Starting) -> list[str]:
    return [text for text in start.bus.readiness.troubles() if text.startswith("partition")]


async def test_a_start_with_one_database_away_serves_the_rest_and_takes_it_in_later(
    dsns: list[str],
    servers: list[EmbeddedPostgres],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await started(folder, *dsns)
    await asyncio.to_thread(servers[1].stop)
    # Entities defined only now exist all the same.
    async with starting(folder, *dsns, queues=(HERE, THERE, SPREAD)) as start:
        await start.is_ready()
        assert await peek(start.bus, HERE) == [f"in {HERE}"]
        await send(start.bus, HERE, "another")
        with pytest.raises(ServiceBusServerBusyError):
            await send(start.bus, THERE, "refused")
        await send(start.bus, SPREAD, *map(str, range(8)))
        assert await received(start.bus, SPREAD, 8) == {str(n) for n in range(8)}
        status, text = await start.look("/readyz")
        away = r"the store at /\S+start-1\S* is unavailable \(since \S+Z\): \w+"
        assert status == 200
        assert re.match(rf"ready\n{away}.*\n(partition \d*[13579]: cannot be loaded: .*\n)+", text)
        metrics = (await start.look("/metrics"))[1]
        assert re.search(r'store_up\{.*store="1"\} 1.0', metrics)
        assert re.search(r'store_up\{.*store="2"\} 0.0', metrics)
        assert re.search(r'status_info\{.*status="loading"\} 1.0', metrics)
        assert lines_of(caplog) == ["the store fails"]
        # It stops in order, and starts so again.
        began = time.monotonic()
        await start.bus.stop()
        assert time.monotonic() - began < 5.0
        await is_released(dsns[0])
    async with starting(folder, *dsns) as start:
        await start.is_ready()
        await asyncio.to_thread(servers[1].start)
        await until(lambda: not start.bus.readiness.troubles())  # not requested
        assert await peek(start.bus, THERE) == [f"in {THERE}"]
        assert await peek(start.bus, HERE) == [f"in {HERE}", "another"]
        assert re.search(r'store_up\{.*store="2"\} 1.0', (await start.look("/metrics"))[1])


async def received(bus: Bus, queue: str, count: int) -> set[str]:
    bodies: set[str] = set()
    async with client_of(bus) as client, client.get_queue_receiver(queue) as receiver:
        while len(bodies) < count:
            messages = await receiver.receive_messages(count, max_wait_time=20)
            assert messages
            bodies |= {str(message) for message in messages}
    return bodies


async def is_released(dsn: str) -> None:
    """Check that each owned partition of a database was released in order."""
    connection = await asyncpg.connect(dsn)
    try:
        schemas = await connection.fetch(
            "select nspname from pg_namespace where nspname like 'partition_%'"
        )
        assert schemas
        for (schema,) in schemas:
            assert await connection.fetchval(f"select is_released from {schema}.owner"), schema
    finally:
        await connection.close()


async def test_entities_without_a_definition_are_found_in_a_database_that_comes_back(
    dsns: list[str], servers: list[EmbeddedPostgres], folder: Path
) -> None:
    """As a crash leaves it: the catalog has dropped a queue, its partition has not yet."""
    await started(folder, *dsns)
    connection = await asyncpg.connect(dsns[0])
    await connection.execute(f"update postbus.catalog set is_deleted = true where name = '{THERE}'")
    await connection.close()
    await asyncio.to_thread(servers[1].stop)
    with DataDirectory(folder / "bus") as data:
        bus = bus_of(data, *dsns, queues=(HERE,))
        try:
            await asyncio.wait_for(bus.start(), LIMIT_S)
            assert len(bus.readiness.troubles()) == 1  # the store; no partition there is in use
            await asyncio.to_thread(servers[1].start)
            left = home_of(THERE, partition_count=16)
            look = await asyncpg.connect(dsns[1])

            async def is_gone() -> bool:
                return not await look.fetchval(f"select count(*) from partition_{left}.message")

            await wait_until(is_gone)
            await look.close()
        finally:
            await bus.stop()


async def test_a_silent_database_delays_neither_start_nor_stop(
    dsns: list[str], folder: Path
) -> None:
    async with relaying(dsns[1]) as (relay, through):
        await started(folder, dsns[0], through)
        relay.is_silent = True
        async with starting(folder, dsns[0], through) as start:
            began = time.monotonic()
            await start.is_ready()
            assert time.monotonic() - began < 9.0  # one connection is given up after 5 s
            assert await peek(start.bus, HERE) == [f"in {HERE}"]
            began = time.monotonic()
            await start.bus.stop()
            assert time.monotonic() - began < 9.0
            await is_released(dsns[0])


async def test_another_database_in_the_place_of_one_that_was_away_is_not_used(
    dsns: list[str], folder: Path
) -> None:
    async with relaying(dsns[1]) as (relay, through):
        await started(folder, dsns[0], through)
        relay.is_silent = True
        async with starting(folder, dsns[0], through) as start:
            await start.is_ready()
            connection = await asyncpg.connect(dsns[1])
            await connection.execute("update postbus.store set bus_identity = gen_random_uuid()")
            relay.is_silent = False
            await until(lambda: "cannot be used" in start.bus.readiness.troubles()[0])
            assert "list all databases of that bus" in start.bus.readiness.troubles()[0]
            home = home_of(THERE, partition_count=16)
            assert not start.bus._hosts[home].is_loaded
            assert await connection.fetchval(f"select is_released from partition_{home}.owner")
            await connection.close()
            assert await peek(start.bus, HERE) == [f"in {HERE}"]


# --- permanent errors -------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
async def test_a_missing_database_ends_the_start_at_any_place_of_the_list(
    dsns: list[str], folder: Path, which: int
) -> None:
    await started(folder, *dsns)
    wrong = [dsn.replace("@/start_", "@/absent_") if n == which else dsn
             for n, dsn in enumerate(dsns)]  # fmt: skip
    with DataDirectory(folder / "bus") as data:
        bus = bus_of(data, *wrong)
        with pytest.raises(BusError, match=rf'database {which + 1} of 2.*"absent_') as caught:
            await bus.start()
        assert caught.value.is_about_store  # exit code 6


async def test_a_server_without_tls_ends_a_start_that_asks_for_it(
    dsns: list[str], folder: Path
) -> None:
    async with relaying(dsns[0], over_tcp=True) as (_, through):
        with DataDirectory(folder / "bus") as data:
            bus = bus_of(data, f"{through}&sslmode=require")
            with pytest.raises(BusError, match="rejected SSL upgrade") as caught:
                await bus.start()
            assert caught.value.is_about_store
