"""One API server for all tests of this folder, with the custom resource definitions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.api_server import ApiServer, api_server, missing_programs

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRDS = Path(__file__).resolve().parent.parent.parent / "crds"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.kube)


@pytest.fixture(scope="session")
def bare_server() -> Iterator[ApiServer]:
    missing = missing_programs()
    if missing:
        pytest.fail(f"{', '.join(missing)}: not built yet; run make kube-tools")
    with api_server() as server:
        yield server


@pytest.fixture(scope="session")
def definitions(bare_server: ApiServer) -> dict[str, dict[str, Any]]:
    """The definitions as the server returned them, by file name."""
    return install_definitions(bare_server)


def install_definitions(bare_server: ApiServer) -> dict[str, dict[str, Any]]:
    stored = {}
    for path in sorted(CRDS.glob("*.yaml")):
        wanted = yaml.safe_load(path.read_text())
        bare_server.apply(f"{DEFINITIONS}/{wanted['metadata']['name']}", wanted)
        stored[path.name] = wanted["metadata"]["name"]
    return {file: wait_until_established(bare_server, name) for file, name in stored.items()}


def wait_until_established(server: ApiServer, name: str) -> dict[str, Any]:
    for _ in range(600):
        found: dict[str, Any] = server.request("GET", f"{DEFINITIONS}/{name}")
        conditions = {each["type"]: each for each in found.get("status", {}).get("conditions", ())}
        if conditions.get("Established", {}).get("status") == "True":
            return found
        assert conditions.get("NamesAccepted", {}).get("status") != "False", conditions
        time.sleep(0.05)
    raise AssertionError(f"{name} was not established: {conditions}")


@pytest.fixture(scope="session")
def server(bare_server: ApiServer, definitions: dict[str, dict[str, Any]]) -> ApiServer:
    return bare_server
