"""From the charts, definitions and images of an older commit to these, and back; `e2e/upgrade.sh`.

Each test goes on where the one before ended. The commands are those of the guide. Clients in pods
send and receive all the time; stored messages are looked at and not touched until the end.

E2E_FROM is the folder of the older version, E2E_NEXT that of a version after this one, whose
brokers change the tables of partitions so that those of this version must not use them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from e2e.tests.bus import Bus
from e2e.tests.cluster import ROOT, SYSTEM, TAG, Space, kubectl, run, wait_for
from e2e.tests.conftest import is_installed
from e2e.tests.figures import record
from e2e.tests.manifests import queue
from e2e.tests.stored import Seen, references, resources, store, stored, take_all
from e2e.tests.traffic import LOCK, traffic

pytestmark = pytest.mark.skipif("E2E_FROM" not in os.environ, reason="e2e/upgrade.sh runs it")

REFUSED_S: Final = 60.0
"""Sends are refused no longer than that, also on a loaded machine, while broker and store are
replaced."""

ROLLED_S: Final = 240.0
OPERATOR: Final = "deployment/postbus-operator"
NAME: Final = "e2e-bus"
QUEUE, SESSIONS = "orders", "visits"
OWN: Final = "postbus,statefulsets,services,configmaps,secrets,networkpolicies"
NEWER: Final = "run the newer version"
SECTION: Final = "Upgrade and go back"
ASK: Final = """
import sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen("http://127.0.0.1:9464/readyz")
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, answer.read().decode())
"""


@dataclass(frozen=True)
class Version:
    """A folder of source, and the tag of the images that were made of it."""

    folder: Path
    tag: str


OLD: Final = Version(Path(os.environ.get("E2E_FROM", "")), "upgrade-from")
NEW: Final = Version(ROOT, TAG)
NEXT: Final = Version(Path(os.environ.get("E2E_NEXT", "")), "upgrade-next")


def guide() -> list[str]:
    """Return the commands: definitions and chart, chart back, definitions back."""
    text = (ROOT / "docs" / "guides" / "kubernetes-buses.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def type_in(command: str, version: Version) -> None:
    """Run a command of the guide in the folder of a version, with its tag."""
    command = command.replace("image.tag=dev", f"image.tag={version.tag}")
    run("bash", "-euc", f"cd {version.folder} && {command}")


# --- the bus ------------------------------------------------------------------------------------


@dataclass
class Site:
    """A bus with stored messages, and what was seen of it before the first upgrade."""

    bus: Bus
    messages: dict[str, Seen]
    secrets: dict[str, dict[str, str]]

    @property
    def space(self) -> Space:
        return self.bus.space

    def check(self) -> None:
        """Fail unless all is ready, and messages and keys are as they were."""
        self.bus.wait_ready(ROLLED_S)
        self.space.wait_ready(*entities())
        for each in (f"sbns/{NAME}", *entities()):
            wait_for(lambda each=each: unusual(self.space.get(each)), lambda found: not found)
        assert stored(self.bus) == self.messages
        assert keys(self.space) == self.secrets


def entities() -> list[str]:
    return [*references(), f"sbq/{QUEUE}", f"sbq/{SESSIONS}"]


def unusual(resource: dict[str, Any]) -> list[str]:
    """Return the conditions that a resource has not at rest."""
    status, generation = resource["status"], resource["metadata"]["generation"]
    found = [each["type"] for each in status["conditions"] if each["status"] != "True"]
    found += [
        each["type"]
        for each in status["conditions"]
        if each["type"] in {"Reconciling", "Stalled", "Drifted"}
    ]
    return found if status["observedGeneration"] == generation else [*found, "generation"]


def keys(space: Space) -> dict[str, dict[str, str]]:
    """Return what applications have of the bus, and its certificates."""
    found = json.loads(space.kubectl("get", "secrets", "--output=json"))["items"]
    return {
        each["metadata"]["name"]: {
            name: base64.b64decode(value).decode() for name, value in each["data"].items()
        }
        for each in found
    }


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """The older version, installed and in use."""
    assert not is_installed("postbus", SYSTEM), "Postbus is installed here already"
    charts = OLD.folder / "charts"
    system = ["--namespace", SYSTEM, "--create-namespace", "--set", f"image.tag={OLD.tag}"]
    run("helm", "upgrade", "--install", "postbus-crds", str(charts / "postbus-crds"))
    run("helm", "install", "postbus", str(charts / "postbus"), *system, "--wait")
    space = Space.make("upgrade")
    bus = Bus.make(space, NAME)
    rules = [{"name": "app", "rights": ["Send", "Listen"]}]
    space.apply(
        queue(QUEUE, NAME, authorizationRules=rules, lockDuration=LOCK),
        queue(SESSIONS, NAME, authorizationRules=rules, lockDuration=LOCK, requiresSession=True),
        *resources(NAME),
    )
    try:
        bus.wait_ready()
        space.wait_ready(*entities())
        store(bus)
        yield Site(bus, stored(bus), keys(space))
    finally:
        bus.end()
        space.close()
        wait_for(lambda: kubectl("get", "postbus", "-A", "--output=name"), lambda found: not found)
        run("helm", "uninstall", "postbus", "--namespace", SYSTEM)


# --- what happens -------------------------------------------------------------------------------


def sets(space: Space) -> dict[str, dict[str, Any]]:
    found = json.loads(space.kubectl("get", "statefulsets", "--output=json"))["items"]
    return {each["metadata"]["name"]: each for each in found}


def is_rolled(space: Space, tag: str) -> bool:
    """Return whether all pods have the images of a version, and are ready."""
    for each in sets(space).values():
        status, [container] = each["status"], each["spec"]["template"]["spec"]["containers"]
        is_new = status.get("currentRevision") == status.get("updateRevision")
        is_seen = status.get("observedGeneration") == each["metadata"]["generation"]
        if not container["image"].endswith(f":{tag}") or not (is_new and is_seen):
            return False
        if status.get("readyReplicas", 0) != each["spec"]["replicas"]:
            return False
    return True


@contextmanager
def clients(site: Site, step: str) -> Iterator[dict[str, Any]]:
    """Let clients work meanwhile; all that they sent must come, once and in order."""
    pods = re.sub(r"\W+", "-", step)
    account: dict[str, Any] = {}
    with (
        traffic(site.space, f"{QUEUE}-queue-app", f"{pods}-plain") as plain,
        traffic(site.space, f"{SESSIONS}-queue-app", f"{pods}-session", "visit") as ordered,
    ):
        yield account
    plain.check()
    ordered.check()
    each = (plain.account, ordered.account)
    account["refused_for"] = max(float(one["refused_for"]) for one in each)
    account["accepted"] = sum(int(one["accepted"]) for one in each)


def roll(site: Site, step: str, version: Version, *commands: str) -> None:
    """Type commands, and wait until each StatefulSet has changed once."""
    before = sets(site.space)
    with clients(site, step) as account:
        began = time.monotonic()
        for each in commands:
            type_in(each, version)
        installed = time.monotonic()
        wait_for(lambda: is_rolled(site.space, version.tag), bool, ROLLED_S)
        rolled = time.monotonic()
        site.bus.wait_ready()
    record(f"{step}: commands of helm", installed - began, 120)
    record(f"{step}: operator is new, pods are new and ready", rolled - installed, ROLLED_S)
    record(f"{step}: sends refused", account["refused_for"], REFUSED_S)
    after = sets(site.space)
    grown = {
        name: after[name]["metadata"]["generation"] - each["metadata"]["generation"]
        for name, each in before.items()
    }
    assert set(grown.values()) == {1}, grown
    site.check()


def versions(space: Space) -> dict[str, str]:
    """Return the version of each object; counts of messages may still be written."""
    found = json.loads(space.kubectl("get", OWN, "--output=json"))["items"]
    return {
        f"{each['kind']} {each['metadata']['name']}": each["metadata"]["resourceVersion"]
        for each in found
        if each["metadata"]["name"] not in {QUEUE, SESSIONS}
    }


def looks_of_leader() -> dict[str, float]:
    """Return how often the leader has finished a look, by kind; empty while it has looks to do."""
    selector = "--selector=app.kubernetes.io/name=postbus-operator"
    names = kubectl("--namespace", SYSTEM, "get", "pods", selector, "--output=name").split()
    for name in names:
        pod = name.removeprefix("pod/")
        path = f"/api/v1/namespaces/{SYSTEM}/pods/{pod}:8080/proxy/metrics"
        text = kubectl("get", "--raw", path)
        if not re.search(r"^postbus_operator_leader 1\.0$", text, re.MULTILINE):
            continue
        waiting = re.findall(
            r"^postbus_operator_(?:queue_depth|reconciles_running) (\S+)$", text, re.MULTILINE
        )
        if any(float(each) for each in waiting):
            return {}
        counted = re.findall(
            r'^postbus_operator_reconciles_total\{kind="(\w+)",result="done"\} (\S+)$',
            text,
            re.MULTILINE,
        )
        return {kind: float(count) for kind, count in counted}
    return {}


def messages_of(space: Space, name: str) -> dict[str, tuple[str, str, str]]:
    found = space.get(name)["status"]["conditions"]
    return {each["type"]: (each["status"], each["reason"], each["message"]) for each in found}


# --- in this order ------------------------------------------------------------------------------


def test_an_upgrade_loses_nothing_and_replaces_each_pod_once(site: Site) -> None:
    definitions, chart, _, _ = guide()
    roll(site, "upgrade", NEW, definitions, chart)


def test_after_an_upgrade_nothing_is_written(site: Site) -> None:
    kubectl("--namespace", SYSTEM, "rollout", "restart", OPERATOR)
    kubectl("--namespace", SYSTEM, "rollout", "status", OPERATOR, "--timeout=120s")
    before = versions(site.space)
    wanted = {"Namespace": 1, "Queue": 4, "Topic": 1, "Subscription": 2}
    wait_for(
        looks_of_leader,
        lambda found: all(found.get(kind, 0) >= count for kind, count in wanted.items()),
    )
    assert versions(site.space) == before


def test_the_way_back_loses_nothing(site: Site) -> None:
    _, _, chart_back, definitions_back = guide()
    roll(site, "back", OLD, chart_back)
    type_in(definitions_back, OLD)
    site.check()


def test_the_upgrade_can_be_repeated(site: Site) -> None:
    definitions, chart, _, _ = guide()
    roll(site, "upgrade again", NEW, definitions, chart)


def test_a_version_that_does_not_know_the_tables_says_so_and_going_forward_heals(
    site: Site,
) -> None:
    space = site.space
    definitions, chart, chart_back, _ = guide()
    roll(site, "next version", NEXT, definitions, chart)
    with clients(site, "newer tables") as account:
        type_in(chart_back, NEW)
        space.wait_condition(f"sbns/{NAME}", "Stalled", "True", "SchemaTooNew", ROLLED_S)
        wait_for(
            lambda: space.condition(f"sbns/{NAME}", "Ready"), lambda found: found[0] == "False"
        )
        said = messages_of(space, f"sbns/{NAME}")
        assert said["Ready"] == said["StorageReady"] == ("False", *said["Stalled"][1:])
        for part in (NEWER, "the messages are safe; install the newer chart again"):
            assert part in said["Stalled"][2]
        space.wait_event(NAME, "SchemaTooNew")
        assert NEWER in space.kubectl("logs", site.bus.broker)
        readiness = space.kubectl("exec", site.bus.broker, "--", "python", "-c", ASK)
        assert readiness.startswith("503 ")
        assert NEWER in readiness
        healing = time.monotonic()
        type_in(chart, NEXT)
        wait_for(lambda: is_rolled(space, NEXT.tag), bool, ROLLED_S)
        site.bus.wait_ready()
        record("forward from newer tables: ready", time.monotonic() - healing, ROLLED_S)
    assert account["accepted"]
    site.check()


def test_what_was_stored_can_be_received(site: Site) -> None:
    take_all(site.bus)
