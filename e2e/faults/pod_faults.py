"""Faults of broker and store: deleted, killed, stopped, away, with a clock that is ahead."""

from __future__ import annotations

import base64
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from e2e.faults import node
from e2e.faults.scene import BROKER, NODE, STORE, Scene, hold, is_ready
from e2e.tests.cluster import Space, kubectl, wait_for

CLOCK: Final = Path(__file__).with_name("clock.c")
LONG_S: Final = 600.0


def delete(space: Space, pod: str) -> None:
    """Delete a pod as a person does."""
    space.kubectl("delete", "pod", pod, "--wait=false")


def force_delete(space: Space, pod: str) -> None:
    """Delete a pod without waiting for its end, as with a node that is lost."""
    space.kubectl("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")


def kill(scene: Scene, *pods: str) -> None:
    """Kill the processes of pods of the bus; their containers start again."""
    node.send(
        signal.SIGKILL, [each for pod in pods for each in node.processes_of_pod(scene.uid(pod))]
    )


def pause(scene: Scene, pod: str, seconds: float) -> None:
    """Stop the processes of a pod of the bus for a while."""
    with node.stopped(node.processes_of_pod(scene.uid(pod))):
        hold(seconds)


def delete_broker(scene: Scene, chance: random.Random) -> None:
    delete(scene.space, BROKER)


def force_delete_broker(scene: Scene, chance: random.Random) -> None:
    force_delete(scene.space, BROKER)


def kill_broker(scene: Scene, chance: random.Random) -> None:
    kill(scene, BROKER)


def pause_broker(scene: Scene, chance: random.Random) -> None:
    pause(scene, BROKER, chance.uniform(1, 12))


def delete_store(scene: Scene, chance: random.Random) -> None:
    delete(scene.space, STORE)


def force_delete_store(scene: Scene, chance: random.Random) -> None:
    force_delete(scene.space, STORE)


def kill_store(scene: Scene, chance: random.Random) -> None:
    kill(scene, STORE)


def pause_store(scene: Scene, chance: random.Random) -> None:
    pause(scene, STORE, chance.uniform(1, 12))


def kill_both(scene: Scene, chance: random.Random) -> None:
    kill(scene, BROKER, STORE)


# --- a store that is away -------------------------------------------------------------------------


@contextmanager
def cordoned() -> Iterator[None]:
    """Let no new pod start while the block runs."""
    kubectl("cordon", NODE)
    try:
        yield
    finally:
        wait_for(lambda: kubectl("uncordon", NODE), bool, 60)


def store_away(scene: Scene, seconds: float) -> None:
    """Take the store's pod away; its broker must wait, not start again."""
    before = starts(scene)
    with cordoned():
        delete(scene.space, STORE)
        hold(seconds)
    assert starts(scene) == before, f"the broker started again: {starts(scene)}, not {before}"


def starts(scene: Scene) -> tuple[str, int]:
    """Return identity and number of restarts of the broker's pod."""
    pod = scene.space.get(f"pod/{BROKER}")
    return pod["metadata"]["uid"], sum(
        each["restartCount"] for each in pod["status"].get("containerStatuses", ())
    )


def store_away_shortly(scene: Scene, chance: random.Random) -> None:
    store_away(scene, chance.uniform(3, 15))


def store_away_long(scene: Scene, chance: random.Random) -> None:
    store_away(scene, LONG_S)


def store_silent_at_start(scene: Scene, seconds: float) -> None:
    """Start a broker whose store accepts connections and answers nothing."""
    with node.stopped(node.processes_of_pod(scene.uid(STORE))):
        force_delete(scene.space, BROKER)
        hold(seconds)


def store_silent_at_start_shortly(scene: Scene, chance: random.Random) -> None:
    store_silent_at_start(scene, chance.uniform(3, 12))


def store_silent_at_start_long(scene: Scene, chance: random.Random) -> None:
    store_silent_at_start(scene, LONG_S)


# --- a clock that is ahead ------------------------------------------------------------------------


def clock_ahead(scene: Scene, chance: random.Random) -> None:
    """Let a broker serve with a clock ten minutes ahead, then another one with the right clock.

    The environment of the broker's container names a library (LD_PRELOAD) that is not there as a
    rule. /tmp outlives a container: the next one loads it. That needs no right but `kubectl exec`.
    """
    write_to_broker(scene, "/tmp/clock.so", library())
    write_to_broker(scene, "/tmp/clock-ahead", b"")
    before = starts(scene)
    kill(scene, BROKER)
    wait_for(lambda: starts(scene), lambda found: found != before, 60)
    wait_for(lambda: scene.space.get(f"pod/{BROKER}"), is_ready, 90)
    said = scene.space.kubectl(
        "exec", BROKER, "--", "python", "-c", "import time; print(time.time())"
    )
    ahead_s = float(said) - scene.now()
    assert ahead_s > 500, f"the clock is only {ahead_s:.0f} s ahead"
    scene.wait_served(scene.now())
    hold(chance.uniform(0, 5))
    force_delete(scene.space, BROKER)


def library() -> bytes:
    """Compile the library."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "clock.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(CLOCK)]
        subprocess.run(command, check=True, capture_output=True)
        return made.read_bytes()


def write_to_broker(scene: Scene, path: str, content: bytes) -> None:
    program = f"import base64,sys; open({path!r},'wb').write(base64.b64decode(sys.stdin.read()))"
    arguments: list[Any] = ["exec", "--stdin", BROKER, "--", "python", "-c", program]
    scene.space.kubectl(*arguments, given=base64.b64encode(content).decode())
