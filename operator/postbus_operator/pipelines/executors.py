"""Executors of a pipeline as pods of their own: what Spark in the driver's pod makes them from.

Pure. The driver runs in client mode: Spark's own scheduler makes the pods with the token of the
driver's account, and they go with the driver's pod, which owns them. Executors have neither a token
of the API server nor a key of the bus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from postbus.contract.operator_spec import Resources
from postbus.contract.pipeline import PodSize
from postbus_operator.annotations import COMPONENT_LABEL
from postbus_operator.children.pods import container_base, mount, pod_base

if TYPE_CHECKING:
    from postbus_operator.pipelines.workloads import Driver

Json = dict[str, Any]

EXECUTOR: Final = "executor"
POD_FILE: Final = "executor.yaml"
"""Template of the pods, beside the document."""

API_SERVER: Final = "k8s://https://kubernetes.default.svc"
DRIVER_PORT: Final = 7_078
BLOCKS_PORT: Final = 7_079
"""Spark's own ports on Kubernetes; fixed, so that a policy of the network can name them."""

FAILURES_PERIOD: Final = "1h"
"""Failures of executors count for so long. Spark's default is for ever, which ends a driver that
runs for weeks."""

HEAP_SHARE: Final = 3
"""A third of the memory is Java's heap: 512 MiB of 1.5 GiB. The rest is for the JVM itself, Python
and its workers, and the buffers of Arrow."""

LEAST_HEAP_MIB: Final = 512
"""Spark refuses to start below 450 MiB, of which the JVM keeps a few percent to itself."""

LOCAL_VOLUME: Final = "spark-local-dir-1"
"""Spark looks for this name, and would otherwise mount a volume of its own at its local folder."""


def heap_mib(size: PodSize) -> int:
    """Return Java's share of a pod's memory, in MiB."""
    return max(size.memory_mib // HEAP_SHARE, LEAST_HEAP_MIB)


def rights_for(metadata: Mapping[str, Any], role: str) -> list[Json]:
    """Return the account of a driver, and the binding to the role that lets it make pods.

    `role`: its kind and name, such as `ClusterRole/postbus-operator-driver`.
    """
    kind, _, name = role.partition("/")
    account = {"kind": "ServiceAccount", "name": metadata["name"]}
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata,
            # Only a driver that has executors mounts its token.
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [account | {"namespace": metadata["namespace"]}],
        },
    ]


def settings_of(driver: Driver, pod_file: str) -> dict[str, str]:
    """Return the settings of Spark in a driver that has executors.

    `$(POD_IP)` and `$(POD_NAME)` are filled in by the kubelet. Executors find the driver by the
    address of its pod: a name would be known to them a moment after the pod is.
    """
    runtime = driver.document.spec.runtime
    executor, heap = runtime.executor, heap_mib(runtime.executor)
    of_pods = {
        "namespace": driver.resource.key.namespace,
        "container.image": driver.image,
        "container.image.pullPolicy": driver.pull_policy,
        "driver.pod.name": "$(POD_NAME)",
        "executor.podTemplateFile": pod_file,
        "executor.podTemplateContainerName": EXECUTOR,
        "executor.request.cores": executor.core_request or str(executor.cores),
        # Of what it does not use it needs no rights: ConfigMaps, claims and Services of its own.
        "executor.disableConfigMap": "true",
        "driver.ownPersistentVolumeClaim": "false",
        "driver.reusePersistentVolumeClaim": "false",
        "driver.service.deleteOnTermination": "false",
    }
    return {
        "spark.driver.host": "$(POD_IP)",
        "spark.driver.port": str(DRIVER_PORT),
        "spark.driver.blockManager.port": str(BLOCKS_PORT),
        "spark.blockManager.port": str(BLOCKS_PORT),
        # Its ports are open to other pods: who connects needs a secret of this run.
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        "spark.executor.instances": str(runtime.executors),
        "spark.executor.cores": str(executor.cores),
        "spark.executor.memory": f"{heap}m",
        "spark.executor.memoryOverhead": f"{executor.memory_mib - heap}m",
        "spark.executor.failuresValidityInterval": FAILURES_PERIOD,
        **{f"spark.kubernetes.{name}": value for name, value in of_pods.items()},
    }


def variables_from(driver: Driver) -> list[Json]:
    """Return the Secrets whose keys are variables of all pods: executors write tables, too."""
    sources = driver.document.spec.runtime.env_from
    return [{"secretRef": {"name": each.secret_ref.name}} for each in sources]


def pod_template(
    driver: Driver, labels: Mapping[str, str], environment: list[Json], volumes: Mapping[str, Json]
) -> Json:
    """Return what Spark makes the pods from; it adds resources, names and arguments.

    `volumes`: by the folder where each is mounted, for writing unless it is a Secret.
    """
    container = {
        "name": EXECUTOR,
        **container_base(driver.image, driver.pull_policy, Resources()),
        # Spark's argument is `executor`.
        "command": ["postbus-pipeline"],
        "workingDir": "/tmp",
        "env": environment,
        "envFrom": variables_from(driver),
        "volumeMounts": [
            mount(each["name"], path, is_writable="secret" not in each)
            for path, each in volumes.items()
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": {**labels, COMPONENT_LABEL: EXECUTOR}},
        "spec": {
            **pod_base(),
            "containers": [container],
            "volumes": list(volumes.values()),
        },
    }
