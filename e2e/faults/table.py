"""The faults by name: each one injects, and returns when nothing holds the cluster back any more.

What a fault itself must show (a leader that was refused, an entity that follows) it waits for; that
bus and operator work again is waited for after each one (`Scene.wait_recovered`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from e2e.faults import cluster_faults, operator_faults, pod_faults
from e2e.faults.scene import Scene

Inject = Callable[[Scene, random.Random], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `share`: how often it is in a deck; `limit_s`: of its recovery.

    A slow one takes minutes and comes only when it is asked for.
    """

    name: str
    inject: Inject
    share: int = 1
    limit_s: float = 120.0
    is_slow: bool = False


FAULTS: Final = (
    Fault("broker-delete", pod_faults.delete_broker, 2),
    Fault("broker-force-delete", pod_faults.force_delete_broker, 2),
    Fault("broker-kill", pod_faults.kill_broker),
    Fault("broker-pause", pod_faults.pause_broker, 2),
    Fault("broker-clock-ahead", pod_faults.clock_ahead),
    Fault("store-delete", pod_faults.delete_store, 2),
    Fault("store-force-delete", pod_faults.force_delete_store, 2),
    Fault("store-kill", pod_faults.kill_store),
    Fault("store-pause", pod_faults.pause_store, 2),
    Fault("store-away", pod_faults.store_away_shortly),
    Fault("store-silent-at-start", pod_faults.store_silent_at_start_shortly),
    Fault("broker-and-store-kill", pod_faults.kill_both),
    Fault("leader-delete", operator_faults.delete_leader),
    Fault("leader-force-delete", operator_faults.force_delete_leader),
    Fault("leader-kill", operator_faults.kill_leader),
    Fault("leader-pause", operator_faults.pause_leader),
    Fault("two-leaders", operator_faults.two_leaders),
    Fault("lease-delete", operator_faults.delete_lease),
    Fault("operator-away-create", operator_faults.away_during_create),
    Fault("operator-away-update", operator_faults.away_during_update),
    Fault("operator-away-delete", operator_faults.away_during_delete),
    Fault("bus-recreated", operator_faults.recreate_bus, limit_s=180),
    Fault("topic-recreated", operator_faults.recreate_topic),
    Fault("node-drain", cluster_faults.drain_node),
    Fault("api-server-restart", cluster_faults.restart_api_server, 2),
    Fault("api-server-pause", cluster_faults.pause_api_server),
    Fault("etcd-restart", cluster_faults.restart_etcd, 2),
    Fault("operator-away-idle", operator_faults.away_during_idle_deletion, is_slow=True),
    Fault("store-away-10-min", pod_faults.store_away_long, is_slow=True, limit_s=180),
    Fault(
        "store-silent-at-start-10-min",
        pod_faults.store_silent_at_start_long,
        is_slow=True,
        limit_s=180,
    ),
)


def deck(seed: int, count: int, faults: tuple[Fault, ...]) -> list[Fault]:
    """Return faults in the order that a seed decides; each comes by its share."""
    chance = random.Random(seed)
    drawn: list[Fault] = []
    while len(drawn) < count:
        cards = [each for each in faults for _ in range(each.share)]
        chance.shuffle(cards)
        drawn += cards
    return drawn[:count]
