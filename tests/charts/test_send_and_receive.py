"""The program of `helm test` and of the quickstart, on a bus with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusMessage

from postbus.process.embedded import EmbeddedPostgres
from tests.charts.programs import program, secret_of, tls_bus
from tests.edge.bus_thread import BusThread

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bus(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BusThread]:
    with tls_bus(postgres_server, "charts", tmp_path_factory.mktemp("tls")) as running:
        yield running


@pytest.fixture
def queue(bus: BusThread) -> str:
    return bus.queue()


@pytest.fixture
def secret(bus: BusThread, queue: str, tmp_path: Path) -> Path:
    for key, value in secret_of(bus, queue).items():
        (tmp_path / key).write_bytes(value)
    return tmp_path


def test_messages_come_back(
    bus: BusThread, queue: str, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program("send_and_receive").main(str(secret)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"sent 3 messages to {queue}"
    assert said[1:] == [f"received hello {n} as number {n + 1}" for n in range(3)]
    assert bus.counts(queue).active == 0


def test_lost_messages_are_an_error(
    secret: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here they are scheduled for tomorrow."""
    tomorrow = {"scheduled_enqueue_time_utc": datetime.now(UTC) + timedelta(days=1)}
    ours = program("send_and_receive")
    monkeypatch.setattr(ours, "WAIT_S", 0.5)
    monkeypatch.setattr(ours, "ServiceBusMessage", partial(ServiceBusMessage, **tomorrow))
    assert ours.main(str(secret)) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "received 0 of 3 messages"
