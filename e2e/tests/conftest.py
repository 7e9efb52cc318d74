"""An installed operator for the whole run, and a bus that most tests share.

Tests take KUBECONFIG and E2E_IMAGE_TAG, the tag of the images that the cluster has (dev). With
E2E_KEEP_OPERATOR the operator stays installed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from e2e.tests.bus import Bus
from e2e.tests.cluster import SYSTEM, Space, kubectl, run, wait_for
from e2e.tests.figures import FIGURES
from e2e.tests.guide import quickstart

ORDER: Final = (
    "test_cluster", "test_quickstart", "test_fields", "test_rotation", "test_deletion",
    "test_bad_input", "test_operations", "*", "test_uninstall",
)  # fmt: skip
"""Modules that come first and last: what others need, those that take long, what removes it all."""

INSTALLING: Final = Path(tempfile.gettempdir()) / "postbus-e2e-installing"
"""Lock of the one of several runs that installs what is missing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {name: number for number, name in enumerate(ORDER)}
    items.sort(key=lambda item: names.get(item.path.stem, names["*"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("measured")
    for line in FIGURES:
        terminalreporter.write_line(line)


def is_installed(release: str, namespace: str) -> bool:
    """Return whether helm has a release; a cluster that is too busy to answer is asked again."""
    command = f"helm list --all --short --filter=^{release}$ --namespace={namespace}"
    [listed] = wait_for(lambda: [run(*command.split())], bool)
    return bool(listed.strip())


def install_operator() -> bool:
    """Install as the guide says what is missing; return whether the operator was."""
    definitions, operator = quickstart().installs
    with INSTALLING.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_installed("postbus-crds", "default"):
            run("bash", "-euc", definitions)
        if is_installed("postbus", SYSTEM):
            return False
        run("bash", "-euc", operator)
        return True


def uninstall_operator() -> None:
    run("helm", "uninstall", "postbus", "--namespace", SYSTEM)


def wait_for_operator() -> None:
    """Wait until the new pods run and the former ones have ended."""
    kubectl(
        "--namespace", SYSTEM, "rollout", "status", "deployment/postbus-operator", "--timeout=90s"
    )
    label = "--selector=app.kubernetes.io/name=postbus-operator"
    wait_for(
        lambda: kubectl("--namespace", SYSTEM, "get", "pods", label, "--output=name").split(),
        lambda pods: len(pods) <= 2,
    )


@pytest.fixture(scope="session")
def installed_at() -> Iterator[float]:
    """Install the operator as the guide says; the value is when that began. It stays for others if
    it was there before.
    """
    began = time.monotonic()
    is_ours = install_operator()
    yield began
    is_kept = "E2E_KEEP_OPERATOR" in os.environ
    if is_ours and not is_kept and is_installed("postbus", SYSTEM):
        if is_installed("postbus-crds", "default"):
            wait_for(
                lambda: kubectl("get", "postbus", "-A", "--output=name"), lambda found: not found
            )
        uninstall_operator()


@pytest.fixture(scope="session")
def operator(installed_at: float) -> None:
    wait_for_operator()


@pytest.fixture(scope="session")
def shared(operator: None) -> Iterator[Bus]:
    """A bus for all tests that change only entities of their own."""
    space = Space.make("shared")
    bus = Bus.make(space, "e2e-bus")
    try:
        bus.wait_ready()
        yield bus
    finally:
        bus.end()
        space.close()


@pytest.fixture
def space(operator: None) -> Iterator[Space]:
    """A cluster namespace for one test."""
    made = Space.make("test")
    try:
        yield made
    finally:
        made.close()
