"""Objects of a pipeline: the ConfigMap of its document, and the workload that runs it.

Pure. A continuous pipeline is a StatefulSet of one, since two drivers of a group would end each
other. One that runs once is a Job whose name has a digest of the document: its template cannot be
changed, and another document is another run. One with a schedule is a CronJob of such Jobs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from postbus.contract.operator_spec import ResourceAmounts, Resources
from postbus.contract.pipeline import PipelineDocument
from postbus.contract.resources import API_VERSION
from postbus_operator.annotations import COMPONENT_LABEL, MANAGED_BY_LABEL, RESOURCE
from postbus_operator.children.bus import NAME_LABEL, OPERATOR_NAME, Json
from postbus_operator.children.pods import (
    container_base,
    empty_volume,
    mount,
    pod_base,
    secret_volume,
)
from postbus_operator.names import pipeline_name
from postbus_operator.objects import Resource
from postbus_operator.pipelines.executors import (
    API_SERVER,
    LOCAL_VOLUME,
    POD_FILE,
    heap_mib,
    pod_template,
    rights_for,
    settings_of,
    variables_from,
)

PIPELINE: Final = "pipeline"
PIPELINE_LABEL: Final = "postbus.dev/pipeline"
DOCUMENT_ANNOTATION: Final = "postbus.dev/document"
CONNECTION_ANNOTATION: Final = "postbus.dev/connection"
HELD_ANNOTATION: Final = "postbus.dev/held"
"""On a StatefulSet without pods: the generation of the spec that needs a decision, and why."""

DOCUMENT: Final = "/etc/postbus/pipeline"
DOCUMENT_FILE: Final = "pipeline.yaml"
CONNECTION: Final = "/etc/postbus/connection"
CONNECTION_FILE: Final = "connectionString"
AUTHORITY_FILE: Final = "ca.crt"
ERROR_FILE: Final = "/dev/termination-log"
"""What a container writes there is in the pod's status; the log has more than its error."""

TMP: Final = "/tmp"

GRACE_S: Final = 120
"""Time for the batch that runs to end. Our choice: one that is killed is repeated."""

STEADY_S: Final = 30
"""Time that a driver must run to count as available. Spark and the check of the queries take about
ten seconds on a free machine; what is wrong with configuration is found in them."""

RETRIES: Final = 6
"""Retries of a Job, with pauses of 10 s to 6 min: Kubernetes' default."""

LATE_S: Final = 3_600
"""Longest delay of a run, after which its time is left out. Our choice: a control plane that is
away costs no night, and a pipeline that goes on in the morning does not start the run of the night.
"""

FINAL_CODES: Final = (10, 20)
"""Exit codes of `postbus-pipeline` after which another attempt ends in the same way."""

NOT_OF_THE_RUN: Final = ("suspend", "operatorSpec")
"""Fields of a spec that change nothing of what a run does."""


@dataclass(frozen=True, slots=True)
class Driver:
    """A pipeline as its objects are made from it.

    `connection`: digests of the values of its Secret, by key. `held`: why it makes no pods until
    its spec changes. `role`: that of drivers which make executors, with its kind.
    """

    resource: Resource
    document: PipelineDocument
    image: str
    pull_policy: str
    connection: Mapping[str, str]
    held: str | None = None
    role: str = ""

    @property
    def has_executors(self) -> bool:
        """Whether Spark makes pods for the work."""
        return self.document.spec.runtime.executors > 0

    @property
    def name(self) -> str:
        """The name of its objects, except Jobs."""
        return pipeline_name(self.resource.key.name)

    @property
    def digest(self) -> str:
        """The digest of what a run does."""
        spec = self.resource.spec
        counted = {name: each for name, each in spec.items() if name not in NOT_OF_THE_RUN}
        return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def job_name(self) -> str:
        """The name of the Job for this document."""
        return f"{self.name}-{self.digest}"


def labels_of(resource: Resource) -> dict[str, str]:
    """Return the labels of a pipeline's pods."""
    name = pipeline_name(resource.key.name)
    return {NAME_LABEL: "postbus", COMPONENT_LABEL: PIPELINE, PIPELINE_LABEL: name}


def objects_of(driver: Driver) -> list[Json]:
    """Return all objects but the Secret, in the order in which they are applied."""
    trigger = driver.document.spec.trigger
    if trigger.schedule is not None:
        workload = _cron_job(driver, trigger.schedule)
    else:
        workload = _job(driver) if trigger.once else _stateful_set(driver)
    rights = rights_for(_metadata(driver, driver.name), driver.role) if driver.has_executors else []
    return [*rights, _document(driver), workload]


def _metadata(driver: Driver, name: str) -> Json:
    resource = driver.resource
    return {
        "name": name,
        "namespace": resource.key.namespace,
        "labels": {**labels_of(resource), MANAGED_BY_LABEL: OPERATOR_NAME},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": resource.key.kind,
                "name": resource.key.name,
                "uid": resource.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def _document(driver: Driver) -> Json:
    """Return the document as a pod runs it: the times of a schedule are those of the CronJob."""
    key, spec = driver.resource.key, driver.resource.spec
    if driver.document.spec.trigger.schedule is not None:
        spec = {**spec, "trigger": {"once": True}}
    document = {
        "apiVersion": API_VERSION,
        "kind": key.kind,
        "metadata": {"name": key.name, "namespace": key.namespace},
        "spec": spec,
    }
    data = {DOCUMENT_FILE: json.dumps(document, indent=2) + "\n"}
    if driver.has_executors:
        pod = pod_template(
            driver,
            labels_of(driver.resource),
            _named(_common_environment(driver)),
            _executor_volumes(driver),
        )
        data[POD_FILE] = json.dumps(pod, indent=2) + "\n"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(driver, driver.name),
        "data": data,
    }


def _stateful_set(driver: Driver) -> Json:
    metadata = _metadata(driver, driver.name)
    if driver.held is not None:
        metadata["annotations"] = {HELD_ANNOTATION: f"{driver.resource.generation} {driver.held}"}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": 0 if driver.document.spec.suspend or driver.held is not None else 1,
            "serviceName": driver.name,
            "podManagementPolicy": "Parallel",
            "minReadySeconds": STEADY_S,
            "revisionHistoryLimit": 2,
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
            "selector": {"matchLabels": labels_of(driver.resource)},
            "template": _template(driver),
        },
    }


def _job(driver: Driver) -> Json:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(driver, driver.job_name),
        "spec": {"suspend": driver.document.spec.suspend, **_run(driver)},
    }


def _cron_job(driver: Driver, schedule: str) -> Json:
    key = driver.resource.key
    labels = {**labels_of(driver.resource), MANAGED_BY_LABEL: OPERATOR_NAME}
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": _metadata(driver, driver.name),
        "spec": {
            "schedule": schedule,
            "timeZone": "Etc/UTC",
            "suspend": driver.document.spec.suspend,
            # Two drivers of a group would end each other.
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": LATE_S,
            # The pods of the last failure say what it was.
            "successfulJobsHistoryLimit": 1,
            "failedJobsHistoryLimit": 1,
            "jobTemplate": {
                # The controller's Jobs have no owner but the CronJob.
                "metadata": {"labels": labels, "annotations": {RESOURCE: "/".join(key)}},
                "spec": _run(driver),
            },
        },
    }


def _run(driver: Driver) -> Json:
    """Return the spec of a Job that runs the document until what was there is processed."""
    template = _template(driver)
    template["spec"]["restartPolicy"] = "Never"
    is_final = {"containerName": PIPELINE, "operator": "In", "values": list(FINAL_CODES)}
    return {
        "backoffLimit": RETRIES,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": is_final},
                # A node that is drained is no failure of the run.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        "template": template,
    }


def _template(driver: Driver) -> Json:
    volumes, mounts = _volumes(driver)
    runtime = driver.document.spec.runtime
    amounts = Resources(
        requests=ResourceAmounts(cpu=runtime.cores, memory=runtime.memory),
        limits=ResourceAmounts(memory=runtime.memory),
    )
    file = f"{CONNECTION}/{CONNECTION_FILE}"
    container = {
        "name": PIPELINE,
        **container_base(driver.image, driver.pull_policy, amounts),
        "command": [
            "postbus-pipeline",
            "run",
            f"{DOCUMENT}/{DOCUMENT_FILE}",
            "--connection-string-file",
            file,
            "--error-file",
            ERROR_FILE,
        ],
        "workingDir": TMP,
        "env": _environment(driver),
        "envFrom": variables_from(driver),
        "volumeMounts": mounts,
    }
    return {
        "metadata": {
            "labels": labels_of(driver.resource),
            "annotations": {
                DOCUMENT_ANNOTATION: driver.digest,
                # The driver reads its key once: with another one it begins again.
                CONNECTION_ANNOTATION: driver.connection.get(CONNECTION_FILE, ""),
            },
        },
        "spec": {
            **pod_base(),
            **(_account(driver) if driver.has_executors else {}),
            # A process with the number 1 would ignore SIGTERM until it has a handler.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [container],
            "volumes": volumes,
        },
    }


def _account(driver: Driver) -> Json:
    return {"serviceAccountName": driver.name, "automountServiceAccountToken": True}


def _environment(driver: Driver) -> list[Json]:
    runtime = driver.document.spec.runtime
    # The ports of Spark ask nobody for a key, and nothing outside the pod needs them.
    master, address, settings = f"local[{runtime.cores}]", "127.0.0.1", {}
    places: list[Json] = []
    if driver.has_executors:
        master, address = API_SERVER, "$(POD_IP)"
        settings = settings_of(driver, f"{DOCUMENT}/{POD_FILE}")
        fields = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
        places = [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ]
    arguments = [
        f"--master {master} --driver-memory {heap_mib(runtime)}m",
        *(f"--conf {name}={value}" for name, value in settings.items()),
        "pyspark-shell",
    ]
    values = {
        **_common_environment(driver),
        "PYSPARK_SUBMIT_ARGS": " ".join(arguments),
        "SPARK_LOCAL_DIRS": TMP,
        "SPARK_LOCAL_IP": address,
    }
    return [*places, *_named(values)]


def _common_environment(driver: Driver) -> dict[str, str]:
    """Return the variables that executors have, too."""
    values = {"HOME": TMP}
    if AUTHORITY_FILE in driver.connection:
        values["POSTBUS_CA_FILE"] = f"{CONNECTION}/{AUTHORITY_FILE}"
    return values


def _named(values: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _volumes(driver: Driver) -> tuple[list[Json], list[Json]]:
    """Return the volumes of a pod and their mounts; what lies in none of them goes with the pod."""
    volumes: list[Json] = [
        {"name": "document", "configMap": {"name": driver.name}},
        secret_volume("connection", driver.name),
    ]
    mounts = [mount("document", DOCUMENT), mount("connection", CONNECTION)]
    folders = _folders(driver)
    checkpoint = driver.document.spec.checkpoint
    notes = [] if checkpoint is None else [checkpoint.path]
    for path in notes:
        if not any(f"{path}/".startswith(f"{folder}/") for folder in folders):
            folders[path] = empty_volume("checkpoint")
    volumes += folders.values()
    mounts += [mount(each["name"], path, is_writable=True) for path, each in folders.items()]
    return volumes, mounts


def _folders(driver: Driver) -> dict[str, Json]:
    """Return the volumes that driver and executors have, by their folder."""
    folders: dict[str, Json] = {
        each.mount_path: {
            "name": f"volume-{number}",
            "persistentVolumeClaim": {"claimName": each.claim_name},
        }
        for number, each in enumerate(driver.document.spec.volumes)
    }
    folders.setdefault(TMP, empty_volume("tmp"))
    return folders


def _executor_volumes(driver: Driver) -> dict[str, Json]:
    """Return the volumes of an executor by their folder: of the Secret only what is no secret."""
    folders = _folders(driver)
    folders[TMP] = folders[TMP] | {"name": LOCAL_VOLUME}
    if AUTHORITY_FILE in driver.connection:
        authority = secret_volume("connection", driver.name)
        authority["secret"]["items"] = [{"key": AUTHORITY_FILE, "path": AUTHORITY_FILE}]
        folders[CONNECTION] = authority
    return folders


def runs(pod: Mapping[str, Any], driver: Driver) -> bool:
    """Return whether a pod runs this document, not a former one, and was not ended."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    is_ended = metadata.get("deletionTimestamp") is not None
    return annotations.get(DOCUMENT_ANNOTATION) == driver.digest and not is_ended


def held_for(found: Mapping[str, Any] | None, resource: Resource) -> str | None:
    """Return why a StatefulSet makes no pods for the present spec; None: it may make them."""
    annotations = {} if found is None else found["metadata"].get("annotations") or {}
    generation, _, why = annotations.get(HELD_ANNOTATION, "").partition(" ")
    return why if generation == str(resource.generation) else None


def is_run_of(job: Mapping[str, Any], cron_job: Mapping[str, Any]) -> bool:
    """Return whether a Job is one of a CronJob."""
    owners = job["metadata"].get("ownerReferences") or ()
    return any(each["uid"] == cron_job["metadata"]["uid"] for each in owners)


def has_document_of(job: Mapping[str, Any], cron_job: Mapping[str, Any]) -> bool:
    """Return whether a Job runs the document that the next Job of a CronJob will run."""
    templates = (job["spec"]["template"], cron_job["spec"]["jobTemplate"]["spec"]["template"])
    one, other = (each["metadata"]["annotations"][DOCUMENT_ANNOTATION] for each in templates)
    return bool(one == other)


def ending_of(job: Mapping[str, Any]) -> str | None:
    """Return `Complete` or `Failed`; None: the Job goes on."""
    for each in job.get("status", {}).get("conditions", ()):
        if each["type"] in {"Complete", "Failed"} and each["status"] == "True":
            return str(each["type"])
    return None


def is_suspended(found: Mapping[str, Any]) -> bool:
    """Return whether a workload makes no pods."""
    spec = found["spec"]
    return bool(spec.get("suspend") or spec.get("replicas") == 0)


def has_pods(found: Mapping[str, Any]) -> bool:
    """Return whether a workload has pods that run, or are about to end; of a CronJob, Jobs have."""
    status = found.get("status", {})
    is_job = found["kind"] == "Job"
    return any(map(status.get, ("active", "terminating") if is_job else ("replicas",)))


def suspension(found: Mapping[str, Any]) -> Json:
    """Return the change that ends the pods of a workload, and makes no others."""
    return {"spec": {"replicas": 0} if found["kind"] == "StatefulSet" else {"suspend": True}}
