"""An executor of Spark in a pod that the driver has made: the program `java` with its arguments.

Spark gives a container its settings as variables and the argument `executor`, which the entry point
of its own images turns into a command (resource-managers/kubernetes, entrypoint.sh).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from postbus_spark.jobs.failures import JavaMissing, NoExecutor

MAIN: Final = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
ARGUMENTS: Final = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
MEMORY: Final = "SPARK_EXECUTOR_MEMORY"
_OPTION: Final = re.compile(r"SPARK_JAVA_OPT_(\d+)")


def run_executor() -> None:
    """Become the executor that the environment describes. Raises `NoExecutor`, `JavaMissing`."""
    spark = importlib.util.find_spec("pyspark")
    assert spark is not None  # part of the installation
    assert spark.origin is not None
    home = Path(spark.origin).parent
    arguments = executor_arguments(os.environ, home)
    java = _java(os.environ)
    os.execve(java, [java, *arguments], os.environ | {"SPARK_HOME": str(home)})


def executor_arguments(environment: Mapping[str, str], home: Path) -> list[str]:
    """Return the arguments of `java`. `home`: the folder of Spark. Raises `NoExecutor`."""
    missing = [name for name in (MEMORY, *ARGUMENTS.values()) if name not in environment]
    if missing:
        raise NoExecutor(
            f"{missing[0]} is not set: Spark starts executors itself, in pods of a pipeline whose"
            " runtime.executors is above 0"
        )
    options = {
        int(found[1]): environment[found[0]]
        for found in map(_OPTION.fullmatch, environment)
        if found
    }
    places = [environment.get("SPARK_CLASSPATH", ""), f"{home}/jars/*"]
    heap = environment[MEMORY]
    return [
        *(options[number] for number in sorted(options)),
        f"-Xms{heap}",
        f"-Xmx{heap}",
        "-cp",
        os.pathsep.join(filter(None, places)),
        MAIN,
        *(part for name, variable in ARGUMENTS.items() for part in (name, environment[variable])),
    ]


def _java(environment: Mapping[str, str]) -> str:
    home = environment.get("JAVA_HOME")
    found = shutil.which(f"{home}/bin/java" if home else "java")
    if found is None:
        raise JavaMissing("Spark needs Java 17 or 21, and there is no java on PATH: install it")
    return found
