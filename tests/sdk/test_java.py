"""The official Java SDK, unmodified, against a bus of this run: `make test-sdk`.

Maven gets what it needs; its tests are in java/ and find the bus through the environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.bus_thread import BusThread

pytestmark = pytest.mark.sdk

PROJECT = Path(__file__).with_name("java")
LIMIT_S = 600


@pytest.fixture
def bus(postgres_server: EmbeddedPostgres) -> Iterator[BusThread]:
    make_database(postgres_server, "java", template=TEMPLATE)
    running = BusThread(dsn_of(postgres_server, "java"))
    running.start()
    yield running
    running.stop()


def test_transactions_and_sessions_of_the_java_sdk(bus: BusThread) -> None:
    maven = shutil.which("mvn")
    assert maven is not None, "install a JDK of version 17 or later and Maven"
    environment = {
        **os.environ,
        "POSTBUS_CONNECTION_STRING": bus.connection_string(),
        "POSTBUS_QUEUE": bus.queue(),
        "POSTBUS_OTHER_QUEUE": bus.queue(),
        "POSTBUS_SESSION_QUEUE": bus.queue(requires_session=True),
    }
    ended = subprocess.run(
        [maven, "-B", "-q", "test"],
        check=False,
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout[-8_000:] + ended.stderr[-2_000:]
    reports = list((PROJECT / "target" / "surefire-reports").glob("TEST-*.xml"))
    assert len(reports) == 2
