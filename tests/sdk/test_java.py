"""The official Java SDK and Qpid JMS, unmodified; Maven fetches before a bus is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.sdk.coverage import keep, read_calls
from tests.sdk.suites import run_suite

pytestmark = pytest.mark.sdk

PROJECT = Path(__file__).with_name("java")
CLIENTS = {"azure": "azure-messaging-servicebus", "jms": "qpid-jms-client"}
TRUSTED = (
    'keytool -importcert -noprompt -alias postbus -file "$POSTBUS_CA_FILE"'
    ' -keystore "$POSTBUS_TRUST_STORE" -storepass changeit && exec "$@"'
)


@pytest.fixture(scope="module")
def maven() -> str:
    maven = shutil.which("mvn")
    assert maven is not None, "install a JDK of version 17 or later and Maven"
    # A test that needs no bus: afterwards Maven has all it runs tests with.
    subprocess.run([maven, "-B", "-q", "test", "-Dtest=CoverageTest"], check=True, cwd=PROJECT)
    return maven


def version_of(artifact: str) -> str:
    text = (PROJECT / "pom.xml").read_text()
    found = re.search(rf"<artifactId>{artifact}</artifactId>\s*<version>(.+?)</version>", text)
    assert found is not None, artifact
    return found[1]


def test_java(postgres_server: EmbeddedPostgres, maven: str, tmp_path: Path) -> None:
    for transport in ("tls", "websocket"):
        variables = {
            "POSTBUS_TRANSPORT": transport,
            "POSTBUS_COVERAGE": str(tmp_path),
            "POSTBUS_TRUST_STORE": str(tmp_path / f"{transport}.p12"),
        }
        command = ["sh", "-c", TRUSTED, "sh", maven, "-B", "-q", "-o", "test"]
        run_suite(postgres_server, f"java_{transport}", command, PROJECT, variables)
    for folder, client in CLIENTS.items():
        keep(client, version_of(client), read_calls((tmp_path / folder).glob("*.json")))
