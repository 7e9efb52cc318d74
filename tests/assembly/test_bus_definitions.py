"""Application of manifests by a bus, in an order in which all can be created."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import TypeAlias

import pytest

from postbus.assembly.bus import Bus, BusError
from postbus.manifests.reader import read_one_bus
from postbus.process.data_directory import DataDirectory
from postbus.process.settings import Settings

RunBus: TypeAlias = Callable[..., AbstractAsyncContextManager[Bus]]

NAMESPACE = """\
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: test-bus}
spec: {}
"""


def manifest(kind: str, name: str, spec: str = "", owner: str = "test-bus") -> str:
    lines = "".join(f"  {line}\n" for line in dedent(spec).splitlines())
    return (
        f"apiVersion: postbus.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\n"
        f"spec:\n  owner: {{name: {owner}}}\n{lines}"
    )


@pytest.fixture
def run_bus(database: str, tmp_path: Path) -> Iterator[RunBus]:
    """Return a function that runs a bus of manifests on the database of the test."""
    with tempfile.TemporaryDirectory(prefix="postbus-test-") as name:

        @asynccontextmanager
        async def run(*documents: str) -> AsyncIterator[Bus]:
            path = tmp_path / "bus.yaml"
            path.write_text("---\n".join((NAMESPACE, *documents)))
            ports = {
                "port": 0,
                "tls_port": 0,
                "http_port": 0,
                "metrics_port": 0,
                "control_port": 0,
                "grace_s": 1.0,
            }
            settings = Settings.model_validate({**ports, "stores": database})
            with DataDirectory(Path(name) / "bus") as data:
                bus = Bus(settings, read_one_bus([path]), data, is_embedded=False)
                try:
                    await bus.start()
                    yield bus
                finally:
                    await bus.stop()

        yield run


def forwards_of(bus: Bus) -> dict[str, object]:
    assert bus._opened is not None
    return {
        entry.name: getattr(entry.properties, "forward_to", None)
        for entry in bus._opened.directory.entries()
    }


@pytest.mark.slow
async def test_targets_are_created_before_entities_that_forward_to_them(run_bus: RunBus) -> None:
    first = [
        manifest("Queue", "a", "forwardTo: b\nforwardDeadLetteredMessagesTo: c"),
        manifest("Queue", "b", "forwardTo: c"),
        manifest("Queue", "c", "forwardDeadLetteredMessagesTo: a"),
    ]
    async with run_bus(*first) as bus:
        assert forwards_of(bus) == {"a": "b", "b": "c", "c": None}
        version = bus._opened.directory.version if bus._opened else 0
    async with run_bus(*first) as bus:
        assert bus._opened is not None
        assert bus._opened.directory.version == version  # nothing changed, nothing was written
    turned = [
        manifest("Queue", "c"),
        manifest("Queue", "b", "forwardTo: a"),
        manifest("Queue", "a", "forwardTo: c"),
    ]
    async with run_bus(*turned) as bus:
        assert forwards_of(bus) == {"a": "c", "b": "a", "c": None}


@pytest.mark.slow
async def test_a_change_that_is_refused_ends_the_start_with_a_reason(run_bus: RunBus) -> None:
    async with run_bus(manifest("Queue", "orders")):
        pass
    with pytest.raises(BusError, match=r"invalid queue orders: requiresSession: cannot be"):
        async with run_bus(manifest("Queue", "orders", "requiresSession: true")):
            pass


@pytest.mark.slow
@pytest.mark.behaviour("S147")
async def test_a_partitioned_queue_is_loaded_in_all_sixteen_partitions(run_bus: RunBus) -> None:
    async with run_bus(manifest("Queue", "orders", "enablePartitioning: true")) as bus:
        assert len((await bus.sample()).partitions) == 16
        assert await kinds(bus) == ["queue"]


async def kinds(bus: Bus) -> list[str]:
    return sorted(entity.kind for entity in (await bus.sample()).entities)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.behaviour("S241")
async def test_topics_of_the_examples_are_made_and_loaded_again(run_bus: RunBus) -> None:
    documents = (EXAMPLES / "topics.yaml").read_text().replace("example-bus", "test-bus")
    topics = [documents, manifest("Queue", "orders")]
    async with run_bus(*topics) as bus:
        lines = dict(bus.summary())
        assert lines["topics"] == "order-events"
        assert lines["subscriptions"].count("order-events/Subscriptions/") == 3
        assert await kinds(bus) == ["queue", *["subscription"] * 3, "topic"]
        assert bus._opened is not None
        version = bus._opened.directory.version
    async with run_bus(*topics) as bus:
        assert bus._opened is not None
        assert bus._opened.directory.version == version
        assert await kinds(bus) == ["queue", *["subscription"] * 3, "topic"]
        assert not bus.readiness.troubles()
