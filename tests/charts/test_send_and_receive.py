"""The program of `helm test` and of the quickstart, on a bus with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import yaml
from azure.servicebus import ServiceBusMessage

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.keys.contents import secret_name
from postbus_operator.objects import Key
from tests.charts.programs import PROGRAMS, program, secret_of, tls_bus
from tests.dev_bus import ROOT
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
    said = capsys.readouterr().out.replace(queue, "orders")
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    assert f"```console\n{said}```\n" in guide
    assert bus.counts(queue).active == 0


def test_the_quickstart_has_this_program() -> None:
    """Its ConfigMap holds it as text, so that readers see what runs."""
    quickstart = ROOT / "examples" / "kubernetes" / "quickstart.yaml"
    documents = {each["kind"]: each for each in yaml.safe_load_all(quickstart.read_text())}
    data = documents["ConfigMap"]["data"]
    assert data == {"send_and_receive.py": (PROGRAMS / "send_and_receive.py").read_text()}
    pod = documents["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    [rule] = documents["Queue"]["spec"]["authorizationRules"]
    written = secret_name(Key("Queue", "shop", "orders"), rule["name"])
    assert volumes["bus"]["secret"]["secretName"] == written
    assert volumes["program"]["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]
    assert pod["containers"][0]["command"] == ["python", "/program/send_and_receive.py", "/bus"]


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
