"""One bus a module, a fresh name or queue a test; see control_bus.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import Caller, ControlledBus, controlled_bus, path_of

NAMES = (f"entity-{number}" for number in itertools.count(1))


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest,
    postgres_server: EmbeddedPostgres,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ControlledBus]:
    database = request.path.stem.removeprefix("test_")
    make_database(postgres_server, database, template=TEMPLATE)
    folder = tmp_path_factory.mktemp("control")
    with controlled_bus(dsn_of(postgres_server, database), folder) as bus:
        yield bus


@pytest.fixture
def api(running: ControlledBus) -> Caller:
    return running.caller


@pytest.fixture
def name() -> str:
    return next(NAMES)


@pytest.fixture
def queue(api: Caller, name: str) -> str:
    assert api.put(path_of("queues", name), {}).status == 201
    return name
