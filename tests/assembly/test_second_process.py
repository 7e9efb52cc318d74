"""Two processes of one name on one Postgres: the second takes nothing while the first lives."""

from __future__ import annotations

import base64
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from postbus.fast import BUILD
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database, run_psql
from tests.faults.kill_nine import MANIFEST, QUEUE
from tests.faults.victims import Broker
from tests.ports import free_ports

HEALTHY = (200, f"ok\nbuild: {BUILD}\n")

pytestmark = pytest.mark.slow

LIMIT_S = 40.0
REPLACED, STORE = 8, 6
PORTS = ("PORT", "HTTP_PORT", "METRICS_PORT", "CONTROL_PORT")


class Process(Broker):
    """A process of `postbus serve` with the name of all, on ports that are known."""

    def __init__(self, folder: Path, dsn: str, sealing_key: Path, manifest: str = MANIFEST) -> None:
        folder.mkdir()
        chosen = map(str, free_ports(len(PORTS)))
        ports = dict(zip((f"POSTBUS_{name}" for name in PORTS), chosen, strict=True))
        more = {"POSTBUS_SEALING_KEY_FILE": str(sealing_key), "POSTBUS_IS_TLS_ENABLED": "false"}
        super().__init__(folder, dsn, ["-m", "postbus"], manifest, {**ports, **more})
        self.port = int(ports["POSTBUS_PORT"])
        self.metrics = f"http://127.0.0.1:{ports['POSTBUS_METRICS_PORT']}"

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body; 0 without an answer."""
        try:
            with urllib.request.urlopen(self.metrics + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()
        except OSError as error:
            return 0, str(error)

    @property
    def is_ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def lines(self, message: str) -> list[dict[str, str]]:
        return [line for line in self.logged() if line["message"] == message]

    def wait_ready(self) -> None:
        wait_until(lambda: self.is_ready or self.process.poll() is not None)
        assert self.process.poll() is None, self.output()

    def ends_with(self) -> int:
        return self.process.wait(LIMIT_S)

    def output(self) -> str:
        """Return all of its log, including lines that are not JSON."""
        return self._log.read_text(errors="replace")

    @property
    def life(self) -> str:
        """Return its name in other processes' messages, without its start time."""
        start = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
        return rf"process {self.process.pid} on host {socket.gethostname()}, running since {start}"


def wait_until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


@pytest.fixture
def start(postgres_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Return a function that starts a process in a folder of its own with some options."""
    sealing_key = tmp_path / "sealing.key"
    sealing_key.write_text(base64.b64encode(bytes(32)).decode())
    sealing_key.chmod(0o600)
    make_database(postgres_server, "twins")
    with ExitStack() as stack:
        stack.callback(run_psql, postgres_server, "drop database twins with (force)")

        def make(name: str, *options: str, **more: str) -> Process:
            made = Process(tmp_path / name, dsn_of(postgres_server, "twins"), sealing_key, **more)
            made.start(*options)
            stack.callback(lambda: made.kill())
            return made

        yield make


def test_a_second_process_waits_logs_the_owner_and_takes_over(
    start: Callable[..., Process],
) -> None:
    first = start("first")
    first.wait_ready()
    second = start("second")
    wait_until(lambda: "waits" in second.get("/readyz")[1])
    status, text = second.get("/readyz")
    assert status == 503
    assert re.search(rf"partition 0: waits: owned by broker-0, {first.life}", text)
    (line,) = [
        each for each in second.lines("partition waits for another broker") if not each["partition"]
    ]
    assert re.fullmatch(f"owned by broker-0, {first.life} in epoch 1", line["owner"])
    (why,) = second.lines(
        "manifests are not applied yet: the owner of partition 0 changes entities"
    )
    assert re.search(rf"and not by this one: owned by broker-0, {first.life}", why["why"])
    assert first.is_ready
    wait_until(lambda: "; Ctrl-C" in second.output())
    (standing,) = [line for line in second.output().splitlines() if "Ctrl-C" in line]
    assert re.match(rf"standby, the bus is owned by broker-0, {first.life} in epoch 1;", standing)
    first.stop()
    second.wait_ready()
    wait_until(lambda: "\nready; Ctrl-C" in second.output())


def test_a_resumed_process_claims_no_partition_and_logs_the_owner(
    start: Callable[..., Process],
) -> None:
    first = start("first")
    first.wait_ready()
    second = start("second")
    wait_until(lambda: "waits" in second.get("/readyz")[1])
    first.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: second.is_ready)
    first.process.send_signal(signal.SIGCONT)
    wait_until(lambda: first.get("/readyz")[0] == 503)
    wait_until(lambda: second.get("/readyz")[1] == "ready\n")
    host, pid = socket.gethostname(), second.process.pid
    lost = first.lines("partition was lost to another broker")
    assert {line["partition"] for line in lost} >= {0}
    for line in lost:
        assert line["owner"] == (
            f"taken over by broker-0, process {pid} on host {host} (it was silent for 3 s)"
        )
        assert line["lost_epoch"] == 1
    wait_until(
        lambda: re.search(rf"owned by broker-0, {second.life} in epoch 2", first.get("/readyz")[1])
    )
    counted = first.get("/metrics")[1]
    assert 'postbus_partition_fences_total{partition="0"} 1.0' in counted
    assert first.get("/readyz")[0] == 503


def test_take_over_requests_the_end_of_the_first_and_loses_no_message(
    start: Callable[..., Process],
) -> None:
    first = start("first")
    first.wait_ready()
    with (
        ServiceBusClient.from_connection_string(first.connection_string) as client,
        client.get_queue_sender(QUEUE) as sender,
    ):
        sender.send_messages(ServiceBusMessage("accepted"))
    second = start("second", "--take-over")
    assert first.ends_with() == REPLACED
    (line,) = first.lines("asked to end")
    host = socket.gethostname()
    assert line["by"] == f"broker-0, process {second.process.pid} on host {host}"
    assert "postbus: stopped because" in first.output()
    assert line["by"] in first.output().splitlines()[-1]
    second.wait_ready()
    with (
        ServiceBusClient.from_connection_string(second.connection_string) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        assert [str(each) for each in receiver.peek_messages()] == ["accepted"]
    first.start()  # a supervisor that starts it again does not make them fight
    wait_until(lambda: "waits" in first.get("/readyz")[1])
    assert second.is_ready


def test_take_over_works_in_the_folder_and_on_the_ports_of_the_first(
    start: Callable[..., Process],
) -> None:
    first = start("first")
    first.wait_ready()
    before = first.process
    first.start("--take-over")
    try:
        assert before.wait(LIMIT_S) == REPLACED
        first.wait_ready()
        assert first.process.poll() is None
    finally:
        before.kill()
        before.wait()


def test_take_over_of_a_paused_process_waits_for_its_silence(
    start: Callable[..., Process],
) -> None:
    first = start("first")
    first.wait_ready()
    first.process.send_signal(signal.SIGSTOP)
    second = start("second", "--take-over")
    waiting = rf"not ready\nwaiting for broker-0, {first.life} to end\n"
    wait_until(lambda: re.fullmatch(waiting, second.get("/readyz")[1]))
    assert second.get("/healthz") == HEALTHY
    second.wait_ready()
    first.process.send_signal(signal.SIGCONT)
    assert first.ends_with() == REPLACED  # it gets the request when it wakes up
    assert second.is_ready


def test_no_wait_ends_at_once_while_another_lives(start: Callable[..., Process]) -> None:
    first = start("first")
    first.wait_ready()
    second = start("second", "--no-wait")
    assert second.ends_with() == STORE
    text = second.output().splitlines()[-1]
    assert re.search(rf"postbus: broker-0, {first.life} is using this store", text), text
    first.kill()  # the rest of a killed process does not count as a living broker
    second.start("--no-wait")
    second.wait_ready()


@pytest.mark.parametrize("option", ["--take-over", "--no-wait"])
def test_the_process_of_another_bus_is_left_alone(
    start: Callable[..., Process], option: str
) -> None:
    first = start("first")
    first.wait_ready()
    other = start("other", option, manifest=MANIFEST.replace("faults", "other-bus"))
    assert other.ends_with() == STORE
    assert "belongs to the bus faults" in other.output()
    assert first.lines("asked to end") == []
    assert first.is_ready


def test_a_store_that_does_not_answer_is_reported_at_once(tmp_path: Path) -> None:
    [port] = free_ports(1)
    alone = Process(tmp_path / "alone", f"postgresql://bus@127.0.0.1:{port}/bus", tmp_path / "key")
    alone.start("--no-wait")
    try:
        assert alone.ends_with() == STORE
        assert "cannot be reached" in alone.output()
    finally:
        alone.kill()
