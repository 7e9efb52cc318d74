"""What the cluster says of a pipeline's pods, in the words of conditions. Pure.

Exit codes are those of `postbus-pipeline` (docs/guides/pipelines.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from postbus_operator.conditions import ConditionStatus
from postbus_operator.namespaces.workloads import last_words, observed_workload, pod_trouble
from postbus_operator.pipelines.workloads import is_suspended

Json = Mapping[str, Any]

IMAGE_FIELD: Final = "runtime.image"


class Run(NamedTuple):
    """The state of a pipeline's pods: the condition Ready, and which other one says the same.

    `exit_code` is that of the last run, if it failed. `also` is `Reconciling` while nobody is
    needed, and `Stalled` if somebody is.
    """

    status: ConditionStatus
    reason: str
    message: str
    also: str | None = None
    exit_code: int | None = None


def is_steady(workload: Json) -> bool:
    """Return whether a StatefulSet or Job is as it shall be: pods say nothing that matters."""
    if workload["kind"] == "Job":
        return is_suspended(workload) or _job_ended(workload) == "Complete"
    found = observed_workload(workload)
    available = workload.get("status", {}).get("availableReplicas", 0)
    return is_suspended(workload) or (found.is_current and available >= found.wanted)


def run_of(workload: Json, pods: Iterable[Json]) -> Run:
    """Return the state of a StatefulSet or Job. `pods`: the pipeline's, if it is not steady."""
    is_job = workload["kind"] == "Job"
    ended = _job_ended(workload) if is_job else None
    if ended == "Complete":
        return Run("True", "Completed", "what was there is processed; another spec runs again")
    if is_suspended(workload) and ended is None:
        return Run("False", "Suspended", "suspended: set suspend to false to go on")
    if is_steady(workload):
        return Run("True", "Running", "the pipeline runs")
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))[::-1]
    if is_job and any(pod.get("status", {}).get("phase") == "Succeeded" for pod in newest):
        return Run("False", "Running", "the run is over, its Job not yet", "Reconciling")
    failed = _failure(newest)
    if failed is not None:
        return _failed(*failed, is_over=ended == "Failed")
    if ended == "Failed":
        text = "the Job has failed, and its pods are gone: change the spec to try again"
        return Run("False", "RunFailed", text, "Stalled")
    trouble = pod_trouble(newest[:1], IMAGE_FIELD)
    if trouble is not None:
        return Run("False", "PodNotStarting", trouble.text, "Reconciling")
    if is_job and workload.get("status", {}).get("active"):
        return Run("False", "Running", "the run has not ended yet", "Reconciling")
    return Run("False", "Starting", "the pod starts", "Reconciling")


def _job_ended(job: Json) -> str | None:
    """Return `Complete` or `Failed`; None: the Job goes on."""
    for each in job.get("status", {}).get("conditions", ()):
        if each["type"] in {"Complete", "Failed"} and each["status"] == "True":
            return str(each["type"])
    return None


def _failure(pods: Iterable[Json]) -> tuple[int, str] | None:
    """Return exit code and last words of the newest run that failed."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            for state in (container.get("state", {}), container.get("lastState", {})):
                ended = state.get("terminated")
                if ended and ended.get("exitCode"):
                    words = last_words(ended.get("message", "")) or ended.get("reason", "")
                    return int(ended["exitCode"]), words
    return None


def _failed(code: int, words: str, *, is_over: bool) -> Run:
    said = f"the last run ended with exit code {code}: {words}"
    match code:
        case 10:
            text = f"{said}. Correct what it names"
            return Run("False", "ConfigurationError", text, "Stalled", code)
        case 20:
            text = f"{said}. Decide what shall become of messages"
            return Run("False", "DecisionNeeded", text, "Stalled", code)
        case _ if is_over:
            text = f"{said}. No retry is left: change the spec to try again"
            return Run("False", "RunFailed", text, "Stalled", code)
        case _:
            return Run("False", "Retrying", f"{said}. It is tried again", "Reconciling", code)
