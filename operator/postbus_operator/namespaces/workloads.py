"""What the cluster says of the pods and volumes of a bus, in a form for conditions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Json = Mapping[str, Any]

FAILED_WAITS: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Reasons of a waiting container that somebody has to look at."""

IMAGE_WAITS: Final = frozenset(
    {"ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName"}
)
STORE_EXIT: Final = 6
"""Exit code of a broker that its databases refuse (docs/guides/settings.md)."""

MAX_DETAIL: Final = 600


@dataclass(frozen=True, slots=True)
class Workload:
    """A StatefulSet. `is_current`: all pods have its latest template; `existing`: its pods."""

    name: str
    wanted: int
    existing: int
    ready: int
    is_current: bool

    @property
    def is_ready(self) -> bool:
        """Whether all pods are ready and up to date."""
        return self.ready >= self.wanted and self.is_current


@dataclass(frozen=True, slots=True)
class PodTrouble:
    """A reason why a pod does not start. `exit_code` is that of its last container."""

    text: str
    exit_code: int | None = None


def observed_workload(stateful_set: Json) -> Workload:
    """Return the state of a StatefulSet."""
    wanted = stateful_set["spec"].get("replicas", 1)
    status = stateful_set.get("status", {})
    is_seen = status.get("observedGeneration", 0) >= stateful_set["metadata"].get("generation", 0)
    is_rolled = status.get("currentRevision") == status.get("updateRevision")
    # Pods of OnDelete stay as they are until somebody deletes them.
    by_hand = stateful_set["spec"].get("updateStrategy", {}).get("type") == "OnDelete"
    return Workload(
        name=stateful_set["metadata"]["name"],
        wanted=wanted,
        existing=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        is_current=is_seen and (is_rolled or by_hand),
    )


def claim_size(stateful_set: Json, claim: str) -> str | None:
    """Return the size in the template of a volume claim."""
    for template in stateful_set["spec"].get("volumeClaimTemplates", ()):
        if template["metadata"]["name"] == claim:
            found: str = template["spec"]["resources"]["requests"]["storage"]
            return found
    return None


def pod_trouble(pods: Iterable[Json], image_field: str = "operatorSpec.image") -> PodTrouble | None:
    """Return the first reason why a pod does not start; None: none is known.

    `image_field`: the field of the spec that chooses the image.
    """
    for pod in pods:
        status = pod.get("status", {})
        for condition in status.get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return PodTrouble(f"no node takes the pod: {condition.get('message', '')}")
        for container in status.get("containerStatuses", ()):
            found = _container_trouble(container, image_field)
            if found is not None:
                return found
    return None


def _container_trouble(container: Json, image_field: str) -> PodTrouble | None:
    waiting = container.get("state", {}).get("waiting", {})
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
        "terminated"
    )
    reason = waiting.get("reason", "")
    if reason in IMAGE_WAITS:
        image = container.get("image", "")
        return PodTrouble(f"image {image}: {reason}; load it, or set {image_field}")
    is_failing = reason in FAILED_WAITS or (not container.get("ready") and ended is not None)
    if not is_failing:
        return None
    if ended is None:
        return PodTrouble(f"{reason}: {waiting.get('message', '')}"[:MAX_DETAIL])
    code = ended.get("exitCode")
    said = last_words(ended.get("message", "")) or ended.get("reason", "")
    return PodTrouble(f"the last start ended with exit code {code}: {said}", code)


def last_words(log: str) -> str:
    """Return what the end of a log says to people: its last lines that are no JSON.

    If there are none, the message of the last line.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    plain: list[str] = []
    for line in reversed(lines):
        if line.startswith("{"):
            break
        plain.insert(0, line)
    if plain or not lines:
        return " ".join(plain)[:MAX_DETAIL]
    try:
        said = json.loads(lines[-1])
    except ValueError:  # the kubelet cuts the beginning of a long log
        return ""
    return str(said.get("message", ""))[:MAX_DETAIL]
