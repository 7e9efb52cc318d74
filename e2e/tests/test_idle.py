"""Idle entities are deleted by the bus, and their resources follow their policy.

Five minutes is the shortest time of idleness, and brokers in pods use real time, so this takes six
minutes: `make e2e-slow` runs it.
"""

from __future__ import annotations

from typing import Final

import pytest
from azure.core.exceptions import ResourceNotFoundError
from e2e.tests.bus import Bus
from e2e.tests.cluster import wait_for
from e2e.tests.manifests import queue

IDLE: Final = "PT5M"
LIMIT_S: Final = 480.0

pytestmark = pytest.mark.slow


def test_idle_queue_follows_its_policy(shared: Bus) -> None:
    space = shared.space
    gitops = queue("idle-gitops", shared.name, autoDeleteOnIdle=IDLE)
    gitops["metadata"]["labels"] = {"kustomize.toolkit.fluxcd.io/name": "apps"}
    space.apply(
        queue("idle-default", shared.name, autoDeleteOnIdle=IDLE),
        gitops,
        *(
            queue(
                f"idle-{policy.lower()}",
                shared.name,
                autoDeleteOnIdle=IDLE,
                operatorSpec={"onAutoDelete": policy},
            )
            for policy in ("KeepResource", "Recreate")
        ),
    )
    names = ("idle-default", "idle-gitops", "idle-keepresource", "idle-recreate")
    space.wait_ready(*(f"sbq/{name}" for name in names))
    first = space.get("sbq/idle-recreate")["status"]["entityId"]
    space.wait("delete", "sbq/idle-default", limit_s=LIMIT_S)
    for kept in ("idle-gitops", "idle-keepresource"):
        space.wait_condition(f"sbq/{kept}", "Ready", "Unknown", "AutoDeletedOnIdle")
        with shared.administration() as administration, pytest.raises(ResourceNotFoundError):
            administration.get_queue(kept)
    wait_for(
        lambda: space.get("sbq/idle-recreate")["status"]["entityId"], lambda found: found != first
    )
    space.kubectl("annotate", "sbq/idle-gitops", "postbus.dev/recreate-requested-at=now")
    space.wait_ready("sbq/idle-gitops")
