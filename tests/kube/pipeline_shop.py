"""Pipelines of a cluster namespace, and what controllers and nodes would say of their pods."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from postbus_operator.kube.resource_types import (
    CRON_JOBS,
    JOBS,
    PODS,
    STATEFUL_SETS,
    ResourceType,
)
from tests.kube.api_server import ApiError
from tests.kube.operator_run import eventually
from tests.kube.shop import MERGE, Shop

NAME: Final = "prices-pipeline"
LAKE: Final = [{"claimName": "lake", "mountPath": "/lake"}]


def make_pipeline(shop: Shop, name: str = "prices", **fields: Any) -> None:
    orders = {"name": "orders", "queue": shop.entity("orders"), "mode": "drain"}
    spec = {
        "sources": [orders],
        "sinks": [
            {"from": "orders", "table": {"format": "parquet", "path": "/lake/orders"}},
            {"from": "orders", "deadLetter": "orders"},
        ],
        "trigger": {"continuous": "PT1S"},
        "checkpoint": {"path": f"/lake/checkpoints/{name}"},
        "volumes": LAKE,
    }
    given = {name: each for name, each in (spec | fields).items() if each is not None}
    shop.make("Pipeline", name, **given)


def groups(shop: Shop) -> dict[str, str]:
    """Return the kinds of the reader groups of the shop's queues, by name."""
    found = shop.running.caller.get("/v1/reader-groups").body["items"]
    return {each["name"]: each["kind"] for each in found if each["entity"].startswith(shop.name)}


def rights(shop: Shop, pipeline: str = "prices") -> list[str] | None:
    """Return the rights of a pipeline's rule on the bus."""
    for each in shop.running.caller.get("/v1/authorization-rules").body["items"]:
        if each["name"] == f"pipeline.{shop.name}.{pipeline}":
            return sorted(each["rights"])
    return None


def found(shop: Shop, type: ResourceType, name: str = NAME) -> Any:
    return shop.server.request("GET", type.path(shop.name, name))


def is_gone(shop: Shop, type: ResourceType, name: str) -> bool:
    try:
        found(shop, type, name)
    except ApiError as error:
        return error.status == 404
    return False


def jobs(shop: Shop) -> list[Any]:
    items: list[Any] = shop.server.request("GET", JOBS.path(shop.name))["items"]
    return items


def names(shop: Shop) -> list[str]:
    """Return the names of all Jobs."""
    return [each["metadata"]["name"] for each in jobs(shop)]


def replicas(shop: Shop) -> Any:
    return found(shop, STATEFUL_SETS)["spec"]["replicas"]


def say(shop: Shop, type: ResourceType, name: str, **status: Any) -> None:
    """Write what a controller says of a workload."""
    path = type.path(shop.name, name, "status")
    shop.server.request("PATCH", path, {"status": status}, MERGE)


def runs(shop: Shop) -> None:
    generation = found(shop, STATEFUL_SETS)["metadata"]["generation"]
    say(
        shop, STATEFUL_SETS, NAME, replicas=1, readyReplicas=1, availableReplicas=1,
        currentRevision="a", updateRevision="a", observedGeneration=generation,
    )  # fmt: skip


def ends(shop: Shop, template: Any, code: int, words: str, **metadata: Any) -> None:
    """Write what the kubelet says of a container that has ended."""
    wanted = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{NAME}-0", **template["metadata"], **metadata},
        "spec": template["spec"],
    }
    path = PODS.path(shop.name, f"{NAME}-0")
    shop.server.apply(path, wanted)
    container = {
        "name": "pipeline",
        "image": "postbus-pipeline",
        "imageID": "",
        "ready": False,
        "restartCount": 1,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": code, "message": words, "reason": "Error"}},
    }
    status = {"status": {"containerStatuses": [container]}}
    shop.server.request("PATCH", f"{path}/status", status, MERGE)


def send(shop: Shop, queue: str) -> None:
    with ServiceBusClient.from_connection_string(shop.running.connection_string) as client:
        client.get_queue_sender(queue).send_messages(ServiceBusMessage("a"))


def lag(shop: Shop) -> tuple[int, int]:
    status = shop.get("Pipeline", "prices")["status"]
    return status["lagMessages"], status["lagSeconds"]


def message(shop: Shop, type: str = "Ready", name: str = "prices") -> str:
    conditions = shop.get("Pipeline", name)["status"]["conditions"]
    return next((str(each["message"]) for each in conditions if each["type"] == type), "")


async def has(shop: Shop, status: str, reason: str, name: str = "prices") -> None:
    """Wait for the condition Ready."""
    check = partial(shop.condition, "Pipeline", name)
    await eventually(lambda: check() == (status, reason), f"{name} {reason}, not {check()}")


async def started(shop: Shop, name: str = "prices") -> None:
    """Wait until a pipeline has a workload whose pod starts."""
    said = "the pod starts"
    await eventually(lambda: message(shop, name=name) == said, f"{name}: {said}")


def owned_by(owner: Any) -> list[Any]:
    metadata = owner["metadata"]
    names = {name: metadata[name] for name in ("name", "uid")}
    return [{"apiVersion": "batch/v1", "kind": owner["kind"], "controller": True, **names}]


def begins(shop: Shop, name: str) -> Any:
    """Make a Job as the controller of CronJobs does, with a pod that is ready; return it."""
    cron_job = found(shop, CRON_JOBS)
    template = cron_job["spec"]["jobTemplate"]
    metadata = {**template["metadata"], "name": name, "ownerReferences": owned_by(cron_job)}
    wanted = {"metadata": metadata, "spec": template["spec"]}
    made = shop.server.request("POST", JOBS.path(shop.name), wanted)
    active = [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "namespace": shop.name}]
    say(shop, CRON_JOBS, NAME, active=active)
    say(shop, JOBS, name, startTime="2026-01-01T00:00:00Z", active=1, ready=1)
    return made


def is_suspended(shop: Shop, type: ResourceType, name: str = NAME) -> bool:
    return bool(found(shop, type, name)["spec"]["suspend"])


def completes(shop: Shop, name: str) -> None:
    now = "2026-01-01T00:00:00Z"
    ended = [{"type": type, "status": "True"} for type in ("SuccessCriteriaMet", "Complete")]
    status: dict[str, Any] = {"active": None, "ready": 0, "succeeded": 1, "completionTime": now}
    say(shop, JOBS, name, conditions=ended, **status)


def fails(shop: Shop, run: Any, code: int, words: str) -> None:
    ends(shop, run["spec"]["template"], code, words, ownerReferences=owned_by(run))
    ended = [{"type": type, "status": "True"} for type in ("FailureTarget", "Failed")]
    name = run["metadata"]["name"]
    say(shop, JOBS, name, active=None, ready=0, failed=1, conditions=ended)
