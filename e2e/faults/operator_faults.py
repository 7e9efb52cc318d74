"""Faults of the operator: deleted, killed, stopped, two leaders, no Lease, away during changes."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from azure.core.exceptions import ResourceNotFoundError
from e2e.faults import node
from e2e.faults.pod_faults import delete, force_delete
from e2e.faults.scene import BUS, OPERATORS, Scene, hold
from e2e.tests.bus import Bus
from e2e.tests.cluster import Refused, wait_for
from e2e.tests.manifests import queue, topic

DEPLOYMENT: Final = "deployment/postbus-operator"
LEASE: Final = "lease/postbus-operator"
REPLICAS: Final = 2
IDLE: Final = "PT5M"
"""The shortest time of idleness that a queue can have."""


def delete_leader(scene: Scene, chance: random.Random) -> None:
    delete(scene.system, scene.leader()["metadata"]["name"])


def force_delete_leader(scene: Scene, chance: random.Random) -> None:
    force_delete(scene.system, scene.leader()["metadata"]["name"])


def kill_leader(scene: Scene, chance: random.Random) -> None:
    node.send(signal.SIGKILL, node.processes_of_pod(scene.leader()["metadata"]["uid"]))


def pause_leader(scene: Scene, chance: random.Random) -> None:
    """Stop the leader for less than its Lease lasts."""
    with node.stopped(node.processes_of_pod(scene.leader()["metadata"]["uid"])):
        hold(chance.uniform(1, 8))


def two_leaders(scene: Scene, chance: random.Random) -> None:
    """Stop the leader until another one leads, then let it go on: it must see that, and end."""
    wait_for_both(scene)
    leader = scene.leader()
    name = leader["metadata"]["name"]
    before = ends(scene, name)
    with node.stopped(node.processes_of_pod(leader["metadata"]["uid"])):
        wait_for(scene.leader, lambda found: found["metadata"]["name"] != name, 60)
        scene.change_queue()
    wait_for(lambda: ends(scene, name), lambda found: found not in ([], before), 60)
    said = scene.system.kubectl("logs", name, "--previous")
    assert "leadership lost" in said, said[-500:]


def ends(scene: Scene, pod: str) -> Any:
    """Return how the container of an operator ended before; nothing if it did not."""
    statuses = scene.system.get(f"pod/{pod}")["status"]["containerStatuses"]
    return [each["lastState"] for each in statuses if each.get("lastState")]


def wait_for_both(scene: Scene) -> None:
    """Wait for all replicas; those that kubelet holds back after their end are made again."""
    for pod in scene.pods():
        states = [each.get("state", {}) for each in pod["status"].get("containerStatuses", ())]
        if any("waiting" in each for each in states):
            delete(scene.system, pod["metadata"]["name"])
    wait_for(
        lambda: scene.system.get(DEPLOYMENT)["status"].get("readyReplicas", 0),
        lambda found: found >= REPLICAS,
    )


def delete_lease(scene: Scene, chance: random.Random) -> None:
    """Delete the Lease; the leader ends, another one makes it again."""
    before = scene.system.get(LEASE)["metadata"]["uid"]
    scene.system.kubectl("delete", LEASE)
    wait_for(lambda: scene.system.get(LEASE)["metadata"]["uid"], lambda found: found != before, 60)


# --- away during changes --------------------------------------------------------------------------


@contextmanager
def operator_away(scene: Scene) -> Iterator[None]:
    """Have no operator while the block runs."""

    def scale(replicas: int) -> str:
        return scene.system.kubectl("scale", DEPLOYMENT, f"--replicas={replicas}")

    scale(0)
    try:
        scene.system.kubectl(
            "wait", "--for=delete", "pod", f"--selector={OPERATORS}", "--timeout=60s"
        )
        yield
    finally:
        wait_for(lambda: scale(REPLICAS), bool, 60)


def away_during_create(scene: Scene, chance: random.Random) -> None:
    name = f"made-{next(scene.numbers)}"
    with operator_away(scene):
        scene.space.apply(queue(name, BUS))
    scene.space.wait_ready(f"sbq/{name}")
    scene.space.delete(f"sbq/{name}")


def away_during_update(scene: Scene, chance: random.Random) -> None:
    with operator_away(scene):
        count = scene.change_queue()
    wait_for(lambda: scene.is_here("sbq/changed"), bool)
    said = definition(scene, "changed").max_delivery_count
    assert said == count, f"the bus has maxDeliveryCount {said}, not {count}"


def away_during_delete(scene: Scene, chance: random.Random) -> None:
    name = f"goes-{next(scene.numbers)}"
    scene.space.apply(queue(name, BUS))
    scene.space.wait_ready(f"sbq/{name}")
    with operator_away(scene):
        scene.space.start_deletion(f"sbq/{name}")
    scene.space.wait("delete", f"sbq/{name}")
    assert definition(scene, name) is None, f"the bus still has {name}"


def away_during_idle_deletion(scene: Scene, chance: random.Random) -> None:
    """Let the bus delete an idle queue while no operator sees it; its resource must follow."""
    name = f"idle-{next(scene.numbers)}"
    scene.space.apply(queue(name, BUS, autoDeleteOnIdle=IDLE))
    scene.space.wait_ready(f"sbq/{name}")
    with operator_away(scene):
        wait_for(lambda: definition(scene, name), lambda found: found is None, 480)
        assert scene.space.exists(f"sbq/{name}")
    scene.space.wait("delete", f"sbq/{name}")


def definition(scene: Scene, name: str) -> Any:
    """Return what the bus has of a queue, None if it has none. Raises Refused without an answer."""
    at = Bus(scene.space, BUS)
    try:
        with at.administration() as administration:
            return administration.get_queue(name)
    except ResourceNotFoundError:
        return None
    except Exception as error:
        raise Refused(f"queue {name}: {error}") from error
    finally:
        at.end()


# --- owners ---------------------------------------------------------------------------------------


def recreate_bus(scene: Scene, chance: random.Random) -> None:
    """Delete the bus and make it again: what belongs to it has an owner with another UID."""
    before = scene.space.get(f"sbns/{BUS}")["metadata"]["uid"]
    scene.space.delete(f"sbns/{BUS}")
    scene.space.apply(scene.bus())
    assert scene.space.get(f"sbns/{BUS}")["metadata"]["uid"] != before
    scene.space.wait_ready(f"sbns/{BUS}", limit_s=120)


def recreate_topic(scene: Scene, chance: random.Random) -> None:
    """The same with a topic and its subscription."""
    scene.space.delete("sbt/owner")
    scene.space.wait_condition("sbsub/owned", "OwnerResolved", "False", "NotFound")
    scene.space.apply(topic("owner", BUS))
    wait_for(lambda: scene.is_here("sbt/owner") and scene.is_here("sbsub/owned"), bool)
    wait_for(lambda: subscriptions(scene), lambda found: found == ["owned"], 30)


def subscriptions(scene: Scene) -> list[str]:
    at = Bus(scene.space, BUS)
    try:
        with at.administration() as administration:
            return [each.name for each in administration.list_subscriptions("owner")]
    except Exception as error:
        raise Refused(f"subscriptions: {error}") from error
    finally:
        at.end()
