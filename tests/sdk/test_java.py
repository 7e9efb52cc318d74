"""The official Java SDK and Qpid JMS, unmodified, with Maven and JUnit."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from postbus.embedded import EmbeddedPostgres
from tests.sdk.coverage import Calls, Methods, keep
from tests.sdk.suites import run_suite

pytestmark = pytest.mark.sdk

PROJECT = Path(__file__).with_name("java")
CLIENT = "azure-messaging-servicebus"
PACKAGE = "com.azure.messaging.servicebus"
JACOCO = "0.8.13"
# The blocking clients, which call the asynchronous ones.
CLASSES = (
    "ServiceBusSenderClient",
    "ServiceBusReceiverClient",
    "ServiceBusSessionReceiverClient",
    "ServiceBusProcessorClient",
    "ServiceBusRuleManagerClient",
    "ServiceBusMessageBatch",
    "administration.ServiceBusAdministrationClient",
)
# The JVM takes authorities from a store of its own.
RUN = """
keytool -importcert -noprompt -alias bus -file "$POSTBUS_CA_FILE" \\
    -keystore "$TRUST_STORE" -storetype PKCS12 -storepass changeit 2>&1
export JAVA_TOOL_OPTIONS="-Djavax.net.ssl.trustStore=$TRUST_STORE \\
    -Djavax.net.ssl.trustStorePassword=changeit $AGENT"
exec "$MAVEN" --offline --batch-mode --quiet test
"""


@pytest.fixture(scope="module")
def maven() -> str:
    maven = shutil.which("mvn")
    assert maven is not None, "install a JDK of version 17 or later and Maven"
    # Surefire chooses what it needs when it runs, so it runs once without a test.
    no_test = ["-Dtest=None", "-Dsurefire.failIfNoSpecifiedTests=false"]
    quiet = [maven, "--batch-mode", "--quiet"]
    subprocess.run([*quiet, "test", *no_test], check=True, cwd=PROJECT)
    for artifact in (
        f"org.jacoco.agent:{JACOCO}:jar:runtime",
        f"org.jacoco.cli:{JACOCO}:jar:nodeps",
    ):
        get = [*quiet, "dependency:get", f"-Dartifact=org.jacoco:{artifact}", "-Dtransitive=false"]
        subprocess.run(get, check=True, cwd=PROJECT)
    return maven


def jar(group: str, name: str, version: str, ending: str = "") -> Path:
    return Path.home() / ".m2/repository" / group / name / version / f"{name}-{version}{ending}.jar"


def calls_of(profile: Path, sdk: Path) -> Methods:
    """Return which public methods ran; the suite passed, so those that ran worked."""
    report = profile.with_suffix(".xml")
    cli = jar("org/jacoco", "org.jacoco.cli", JACOCO, "-nodeps")
    command = ["java", "-jar", str(cli), "report", str(profile), "--classfiles", str(sdk)]
    subprocess.run([*command, "--xml", str(report)], check=True, capture_output=True)
    ran: set[tuple[str, str]] = set()
    for each in ET.parse(report).iter("class"):
        for method in each.iter("method"):
            counters = {one.get("type"): one.get("covered") for one in method.iter("counter")}
            if counters.get("METHOD") != "0":
                ran.add((str(each.get("name")).replace("/", "."), str(method.get("name"))))
    methods: Methods = {}
    for name in CLASSES:
        full = f"{PACKAGE}.{name}"
        said = ["javap", "-public", "-cp", str(sdk), full]
        shown = subprocess.run(said, check=True, capture_output=True, text=True).stdout
        for method in re.findall(r" (\w+)\(", shown):
            was_run = (full, method) in ran
            methods[f"{name.rpartition('.')[2]}.{method}"] = Calls(was_run, was_run)
    return methods


def test_java(postgres_server: EmbeddedPostgres, maven: str, tmp_path: Path) -> None:
    agent = jar("org/jacoco", "org.jacoco.agent", JACOCO, "-runtime")
    profile = tmp_path / "profile"
    options = f"destfile={profile},includes={PACKAGE}.*"
    said = {"MAVEN": maven, "TRUST_STORE": str(tmp_path / "trust.p12")}
    said["AGENT"] = f"-javaagent:{agent}={options}"
    run_suite(postgres_server, "java", ["sh", "-euc", RUN], PROJECT, said)
    reports = list((PROJECT / "target" / "surefire-reports").glob("TEST-*.xml"))
    assert len(reports) == len(list(PROJECT.rglob("*Test.java")))
    project = (PROJECT / "pom.xml").read_text()
    found = re.search(rf"<artifactId>{CLIENT}</artifactId>\s*<version>(.*?)<", project)
    assert found is not None
    version = found[1]
    keep(CLIENT, version, calls_of(profile, jar("com/azure", CLIENT, version)))
