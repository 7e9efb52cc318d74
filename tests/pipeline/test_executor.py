"""The command of an executor, from what Spark writes into its container."""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus_spark.jobs.executor import executor_arguments
from postbus_spark.jobs.failures import NoExecutor
from postbus_spark.jobs.main import main

HOME = Path("/opt/spark")
GIVEN = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@10.0.0.7:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "512m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.8",
    "SPARK_EXECUTOR_POD_NAME": "prices-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
}


def test_an_executor_gets_what_spark_says_of_it() -> None:
    command = executor_arguments(GIVEN, HOME)
    assert command == [
        "-Xms512m", "-Xmx512m", "-cp", "/opt/spark/jars/*",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        "--driver-url", "spark://CoarseGrainedScheduler@10.0.0.7:7078", "--executor-id", "3",
        "--cores", "2", "--app-id", "spark-1", "--hostname", "10.0.0.8",
        "--resourceProfileId", "0", "--podName", "prices-exec-3",
    ]  # fmt: skip


def test_options_of_java_are_in_the_order_of_their_numbers_and_whole() -> None:
    options = {f"SPARK_JAVA_OPT_{number}": f"-Dx={number} y" for number in (10, 2, 0)}
    command = executor_arguments(GIVEN | options | {"SPARK_JAVA_OPT_X": "-z"}, HOME)
    assert command[:3] == ["-Dx=0 y", "-Dx=2 y", "-Dx=10 y"]
    assert "-z" not in command


def test_a_class_path_of_the_user_comes_first() -> None:
    command = executor_arguments(GIVEN | {"SPARK_CLASSPATH": "/jars/own.jar"}, HOME)
    assert command[command.index("-cp") + 1] == "/jars/own.jar:/opt/spark/jars/*"


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_a_process_that_spark_has_not_started_is_no_executor(name: str) -> None:
    given = {each: value for each, value in GIVEN.items() if each != name}
    with pytest.raises(NoExecutor, match=rf"{name} is not set: .*runtime\.executors"):
        executor_arguments(given, HOME)


def test_the_command_by_hand_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(Path(__file__).parent / "nowhere"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert main(["executor"]) == 10
    assert "NoExecutor: SPARK_EXECUTOR_MEMORY is not set" in capsys.readouterr().err
