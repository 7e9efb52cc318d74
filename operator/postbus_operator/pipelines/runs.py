"""What the cluster says of a pipeline's pods, in the words of conditions. Pure.

Exit codes are those of `postbus-pipeline` (docs/guides/pipelines.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from postbus_operator.conditions import ConditionStatus
from postbus_operator.namespaces.workloads import last_words, observed_workload, pod_trouble
from postbus_operator.pipelines.workloads import ending_of, is_suspended

Json = Mapping[str, Any]

IMAGE_FIELD: Final = "runtime.image"
CHANGE: Final = ": change the spec to try again"
NEXT_RUN: Final = "the next run begins at its time"


class Run(NamedTuple):
    """The state of a pipeline's pods: the condition Ready, and which other one says the same.

    `exit_code` is that of the last run, if it failed. `also` is `Reconciling` while nobody is
    needed, and `Stalled` if somebody is. `is_starting`: a pod is not ready yet.
    """

    status: ConditionStatus
    reason: str
    message: str
    also: str | None = None
    exit_code: int | None = None
    is_starting: bool = False


class Trouble(NamedTuple):
    """A condition of its own for what ended a run."""

    type: str
    reason: str


TROUBLES: Final = {
    "Fenced": "Fenced",
    "DataLoss": "DataLoss",
    "StaleCheckpoint": "StaleCheckpoint",
    "BusRestored": "StaleCheckpoint",
    "EntityRecreated": "StaleCheckpoint",
    "InvalidOffset": "StaleCheckpoint",
}
"""Conditions by the name of the error: each asks for another way out."""

MESSAGES_DROPPED: Final = "MessagesDropped"

_ERROR: Final = re.compile(r"^the last run ended with exit code \d+: (\w+): ")

DECISION: Final = 20
"""Exit code after which nothing but a decision about messages helps."""

SUSPENDED: Final = Run("False", "Suspended", "suspended: set suspend to false to go on")


def is_steady(workload: Json) -> bool:
    """Return whether a StatefulSet or Job is as it shall be: pods say nothing that matters."""
    if workload["kind"] == "Job":
        return is_suspended(workload) or ending_of(workload) == "Complete"
    found = observed_workload(workload)
    available = workload.get("status", {}).get("availableReplicas", 0)
    return is_suspended(workload) or (found.is_current and available >= found.wanted)


def run_of(workload: Json, pods: Iterable[Json], *, is_repeated: bool = False) -> Run:
    """Return the state of a StatefulSet or Job. `pods`: the pipeline's, if it is not steady.

    `is_repeated`: another Job follows at the next time of a schedule.
    """
    is_job = workload["kind"] == "Job"
    ended = ending_of(workload)
    if ended == "Complete":
        return Run("True", "Completed", "what was there is processed; another spec runs again")
    if is_suspended(workload) and ended is None:
        return SUSPENDED
    if is_steady(workload):
        return Run("True", "Running", "the pipeline runs")
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))[::-1]
    if is_job and any(pod.get("status", {}).get("phase") == "Succeeded" for pod in newest):
        return Run("False", "Running", "the run is over, its Job not yet", "Reconciling")
    failed = _failure(newest)
    if failed is not None:
        return _failed(*failed, is_over=ended == "Failed", is_repeated=is_repeated)
    if ended == "Failed":
        return _given_up("the Job has failed, and its pods are gone", is_repeated=is_repeated)
    trouble = pod_trouble(newest[:1], IMAGE_FIELD)
    if trouble is not None:
        return Run("False", "PodNotStarting", trouble.text, "Reconciling")
    if is_job and workload.get("status", {}).get("active"):
        return Run("False", "Running", "the run has not ended yet", "Reconciling")
    return Run("False", "Starting", "the pod starts", "Reconciling")


def executor_trouble(pods: Iterable[Json]) -> str | None:
    """Return why an executor does not start; None: none is known. Spark replaces one that ends."""
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending"]
    trouble = pod_trouble(waiting, IMAGE_FIELD)
    return None if trouble is None else trouble.text


def trouble_of(run: Run, *, has_lost_messages: bool) -> Trouble | None:
    """Return the condition beside Ready that says what ended the last run; None: it needs none.

    `has_lost_messages`: the bus has dropped some that the reader group has not read.
    """
    if has_lost_messages:
        return Trouble("DataLoss", MESSAGES_DROPPED)
    found = _ERROR.match(run.message)
    if found is None or found[1] not in TROUBLES:
        return None
    return Trouble(TROUBLES[found[1]], found[1])


# --- schedules ----------------------------------------------------------------------------------


def are_steady(cron_job: Json, jobs: Iterable[Json]) -> bool:
    """Return whether pods of a CronJob say nothing that matters."""
    return is_suspended(cron_job) or all(map(_is_quiet, _latest(jobs)))


def run_of_schedule(cron_job: Json, jobs: Iterable[Json], pods: Sequence[Json]) -> Run:
    """Return the state of a CronJob: that of its last run. `pods`: all, if they are not steady.

    While a run has shown no failure, the verdict about the one before stands.
    """
    if is_suspended(cron_job):
        return SUSPENDED
    latest = _latest(jobs)
    going = next((each for each in latest[:1] if ending_of(each) is None), None)
    if going is not None:
        run = run_of(going, _pods_of(going, pods), is_repeated=True)
        if run.exit_code is not None or run.reason == "PodNotStarting":
            return run
    last = next((each for each in latest if ending_of(each) is not None), None)
    if last is not None and ending_of(last) == "Failed":
        found = run_of(last, _pods_of(last, pods), is_repeated=True)
    elif going is not None:
        found = Run("True", "Running", "a run has begun")
    elif last is not None:
        found = Run("True", "Waiting", f"the last run is complete; {NEXT_RUN}")
    else:
        found = Run("True", "Waiting", "the first run begins at the next time of the schedule")
    return found._replace(is_starting=going is not None and not _is_quiet(going))


def _latest(jobs: Iterable[Json]) -> list[Json]:
    """Return the two newest Jobs: the last one that has ended is among them."""
    ordered = sorted(jobs, key=lambda job: str(job["metadata"]["creationTimestamp"]))
    return ordered[:-3:-1]


def _is_quiet(job: Json) -> bool:
    """Return whether a Job is complete, or its only pod is ready."""
    status = job.get("status", {})
    return ending_of(job) == "Complete" or bool(status.get("ready") and not status.get("failed"))


def _pods_of(job: Json, pods: Iterable[Json]) -> list[Json]:
    uid = job["metadata"]["uid"]
    return [
        pod
        for pod in pods
        if any(each["uid"] == uid for each in pod["metadata"].get("ownerReferences") or ())
    ]


# --- exit codes ---------------------------------------------------------------------------------


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


def _failed(code: int, words: str, *, is_over: bool, is_repeated: bool) -> Run:
    said = f"the last run ended with exit code {code}: {words}"
    then = f"; {NEXT_RUN}" if is_repeated else ""
    match code:
        case 10:
            text = f"{said}. Correct what it names{then}"
            return Run("False", "ConfigurationError", text, "Stalled", code)
        case 20:
            return decision(f"{said}. Decide what shall become of messages{then or CHANGE}")
        case _ if is_over:
            return _given_up(f"{said}. No retry is left", code, is_repeated=is_repeated)
        case _:
            return Run("False", "Retrying", f"{said}. It is tried again", "Reconciling", code)


def _given_up(said: str, code: int | None = None, *, is_repeated: bool) -> Run:
    """Return a run without a retry; nobody is needed if another one follows."""
    if is_repeated:
        return Run("False", "RunFailed", f"{said}; {NEXT_RUN}", None, code)
    return Run("False", "RunFailed", f"{said}{CHANGE}", "Stalled", code)


def decision(message: str) -> Run:
    """Return a run after which another one would end in the same way."""
    return Run("False", "DecisionNeeded", message, "Stalled", DECISION)
