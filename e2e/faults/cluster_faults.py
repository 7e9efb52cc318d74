"""Faults of the cluster: its API server, etcd, and the node."""

from __future__ import annotations

import random
import signal
import subprocess

from e2e.faults import node
from e2e.faults.pod_faults import cordoned
from e2e.faults.scene import BROKER, NODE, STORE, Scene, hold
from e2e.tests.cluster import Refused, wait_for

DRAINED = "app.kubernetes.io/name in (postbus, postbus-operator)"
"""Not the clients, which nobody would make again, and not the DNS that they need."""


def restart_program(name: str, chance: random.Random) -> None:
    what = chance.choice([signal.SIGTERM, signal.SIGKILL])
    found = node.processes_of_program(name)
    assert found, f"{name} does not run"
    node.send(what, found)


def restart_api_server(scene: Scene, chance: random.Random) -> None:
    restart_program("kube-apiserver", chance)


def pause_api_server(scene: Scene, chance: random.Random) -> None:
    """Stop the API server: its connections stay, and say nothing."""
    with node.stopped(node.processes_of_program("kube-apiserver")):
        hold(chance.uniform(2, 14))


def restart_etcd(scene: Scene, chance: random.Random) -> None:
    restart_program("etcd", chance)


def drain_node(scene: Scene, chance: random.Random) -> None:
    """Drain the node, and let pods come back after a while.

    There is no other node, so the budget of the operators keeps one of them: the drain does not
    end, as on a cluster that has no room.
    """
    before = {pod: scene.uid(pod) for pod in (BROKER, STORE)}
    command = [
        "kubectl", "drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s",
        f"--pod-selector={DRAINED}",
    ]  # fmt: skip
    with cordoned():
        drain = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for pod, uid in before.items():
                wait_for(
                    lambda pod=pod: uid_of(scene, pod), lambda found, uid=uid: found != uid, 60
                )
            hold(chance.uniform(0, 4))
        finally:
            drain.kill()
            drain.wait()


def uid_of(scene: Scene, pod: str) -> str:
    """Return the identity of a pod; empty if there is none."""
    try:
        return scene.uid(pod)
    except Refused as error:
        if "NotFound" in str(error):
            return ""
        raise
