"""The bus under faults, its clients in a pod, and what is waited for after each fault."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from e2e.faults import node
from e2e.faults.checker import DESTINATIONS, Pending, accepted_paths, completed_paths
from e2e.faults.record import End, RecordFile
from e2e.tests.cluster import SYSTEM, Refused, Space, kubectl, wait_for
from e2e.tests.manifests import bus, program_pod, queue, subscription, topic

BUS: Final = "e2e-bus"
BROKER: Final = f"{BUS}-broker-0"
STORE: Final = f"{BUS}-store-main-0"
CLIENTS: Final = "clients"
OPERATORS: Final = "app.kubernetes.io/name=postbus-operator"
NODE: Final = "e2e-node"
LOCK: Final = "PT5S"
"""Shortest lock: messages of a client that went away come again soon."""

PROGRAM: Final = Path(__file__).with_name("client_program.py")

Json = dict[str, Any]


def is_ready(found: Json) -> bool:
    """Return whether a pod or a resource is ready, seen in its latest generation."""
    status = found.get("status", {})
    seen = status.get("observedGeneration", found["metadata"].get("generation"))
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    return (
        conditions.get("Ready") == "True"
        and "deletionTimestamp" not in found["metadata"]
        and seen == found["metadata"].get("generation")
    )


def hold(seconds: float) -> None:
    """Let a fault last: this is its duration, no wait for a condition."""
    time.sleep(seconds)


class Scene:
    """A bus with a queue, sessions, a topic, and entities that only the operator's work needs."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.system = Space(SYSTEM)
        self.record: RecordFile
        self.pending = Pending()
        self.numbers = iter(range(1, 1_000_000))

    def bus(self) -> Json:
        """Return the manifest of the bus. The broker looks for a library that is not there."""
        env = [{"name": "LD_PRELOAD", "value": "/tmp/clock.so"}]
        return bus(BUS, operator={"podTemplate": {"env": env}})

    def now(self) -> float:
        """Return the time of the clients' clock, which is this machine's."""
        return time.time()

    # --- beginning and end ----------------------------------------------------------------------

    def make(self) -> None:
        """Make the bus and start the clients."""
        fast = {"lockDuration": LOCK, "maxDeliveryCount": 2000}
        self.space.apply(
            self.bus(),
            queue("plain", BUS, **fast),
            queue("ordered", BUS, requiresSession=True, **fast),
            queue("changed", BUS),
            topic("events", BUS),
            subscription("all", "events", **fast),
            topic("owner", BUS),
            subscription("owned", "owner"),
        )
        self.space.wait_ready(f"sbns/{BUS}", limit_s=180)
        self.space.wait_ready("sbq/plain", "sbq/ordered", "sbsub/all", "sbsub/owned")
        pod = program_pod(CLIENTS, PROGRAM.read_text(), f"{BUS}-bus-root")
        self.space.apply(pod)
        self.space.wait_ready(f"pod/{CLIENTS}")
        folder = node.pod_folder(self.space.get(f"pod/{CLIENTS}")["metadata"]["uid"])
        self.folder = folder / "volumes" / "kubernetes.io~empty-dir" / "tmp"
        self.record = RecordFile(self.folder / "record")
        self.wait_served(self.now())

    def end_clients(self) -> None:
        """Stop sending, wait for the rest, and let the clients write what is left."""
        (self.folder / "end").touch()
        wait_for(self.pending_now, lambda found: not found, 60)
        (self.folder / "peek").touch()
        wait_for(self.pending_now, lambda _: End() in self.record.lines[-1:], 60)

    # --- observations ---------------------------------------------------------------------------

    def read(self) -> None:
        """Read on in the record of the clients."""
        self.pending.feed(self.record.read())

    def pending_now(self) -> list[tuple[str, str]]:
        """Return the accepted messages that nobody has completed."""
        self.read()
        return self.pending.before(float("inf"))

    def pods(self, selector: str = OPERATORS) -> list[Json]:
        """Return pods of the operator that are not being deleted."""
        said = self.system.kubectl("get", "pods", f"--selector={selector}", "--output=json")
        found: list[Json] = json.loads(said)["items"]
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def holder(self) -> str:
        """Return the holder of the Lease."""
        found = self.system.get("lease/postbus-operator")
        return str(found["spec"].get("holderIdentity", ""))

    def leader(self) -> Json:
        """Return the pod of the operator that leads. Raises Refused if none does."""
        holder = self.holder()
        for each in self.pods():
            if holder.startswith(each["metadata"]["name"]) and is_ready(each):
                return each
        raise Refused(f"no operator leads; the Lease has {holder!r}")

    def uid(self, pod: str) -> str:
        """Return the identity of a pod of the bus."""
        return str(self.space.get(f"pod/{pod}")["metadata"]["uid"])

    def is_here(self, reference: str) -> bool:
        return is_ready(self.space.get(reference))

    # --- recovery -------------------------------------------------------------------------------

    def wait_recovered(self, healed: float, limit_s: float) -> dict[str, float]:
        """Wait until bus and operator work, and what was accepted before is through.

        Return the seconds of each wait. Raises AssertionError with the name of the wait.
        """
        end = time.monotonic() + limit_s
        took: dict[str, float] = {}

        def wait(what: str, attempt: Callable[[], Any], wanted: Callable[[Any], Any]) -> None:
            start = time.monotonic()
            try:
                wait_for(attempt, wanted, max(1.0, end - start))
            except AssertionError as error:
                raise AssertionError(f"{what}: {str(error)[:500]}") from error
            took[what] = time.monotonic() - start

        wait("API server", lambda: kubectl("get", "--raw", "/readyz"), bool)
        for pod in (STORE, BROKER):
            wait(pod, lambda pod=pod: self.is_here(f"pod/{pod}"), bool)
        wait("messages", self.missing_since(healed), lambda found: not found)
        wait("leader", self.leader, bool)
        self.change_queue()
        for each in ("sbq/changed", f"sbns/{BUS}", "sbq/plain", "sbsub/all"):
            wait(each, lambda each=each: self.is_here(each), bool)
        wait("rest", lambda: self.pending_before(healed), lambda found: not found)
        return took

    def pending_before(self, moment: float) -> list[tuple[str, str]]:
        self.read()
        return self.pending.before(moment)

    def missing_since(self, since: float) -> Callable[[], list[str]]:
        """Return what looks for the paths that took or gave out no message since a moment."""
        paths = {each for found in DESTINATIONS.values() for each in found}
        seen = max(0, len(self.record.lines) - 2000)

        def missing() -> list[str]:
            self.read()
            lines = self.record.lines[seen:]
            sent, done = accepted_paths(lines, since), completed_paths(lines, since)
            return sorted((set(DESTINATIONS) - sent) | (paths - done))

        return missing

    def wait_served(self, since: float, limit_s: float = 90.0) -> None:
        """Wait until each path has taken and given out a message since a moment."""
        wait_for(self.missing_since(since), lambda found: not found, limit_s)

    def change_queue(self) -> int:
        """Change an entity, which the operator has to notice; return its maxDeliveryCount."""
        count = 5 + next(self.numbers) % 50
        change = {"spec": {"maxDeliveryCount": count}}
        wait_for(lambda: self.space.patch("sbq/changed", change) or True, bool, 30)
        return count


@contextmanager
def scene() -> Iterator[Scene]:
    """A scene in a cluster namespace of its own; the operator must be installed."""
    space = Space.make("faults")
    made = Scene(space)
    try:
        made.make()
        yield made
    finally:
        space.close()
