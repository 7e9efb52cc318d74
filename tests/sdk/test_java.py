"""The official Java SDK and Qpid JMS, unmodified, with Maven and JUnit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from postbus.embedded import EmbeddedPostgres
from tests.sdk.suites import run_suite

pytestmark = pytest.mark.sdk

PROJECT = Path(__file__).with_name("java")
# The JVM takes authorities from a store of its own.
RUN = """
keytool -importcert -noprompt -alias bus -file "$POSTBUS_CA_FILE" \\
    -keystore "$TRUST_STORE" -storetype PKCS12 -storepass changeit 2>&1
export JAVA_TOOL_OPTIONS="-Djavax.net.ssl.trustStore=$TRUST_STORE \\
    -Djavax.net.ssl.trustStorePassword=changeit"
exec "$MAVEN" --offline --batch-mode --quiet test
"""


@pytest.fixture(scope="module")
def maven() -> str:
    maven = shutil.which("mvn")
    assert maven is not None, "install a JDK of version 17 or later and Maven"
    # Surefire chooses what it needs when it runs, so it runs once without a test.
    no_test = ["-Dtest=None", "-Dsurefire.failIfNoSpecifiedTests=false"]
    subprocess.run([maven, "--batch-mode", "--quiet", "test", *no_test], check=True, cwd=PROJECT)
    return maven


def test_java(postgres_server: EmbeddedPostgres, maven: str, tmp_path: Path) -> None:
    said = {"MAVEN": maven, "TRUST_STORE": str(tmp_path / "trust.p12")}
    run_suite(postgres_server, "java", ["sh", "-euc", RUN], PROJECT, said)
    reports = list((PROJECT / "target" / "surefire-reports").glob("TEST-*.xml"))
    assert len(reports) == len(list(PROJECT.rglob("*Test.java")))
