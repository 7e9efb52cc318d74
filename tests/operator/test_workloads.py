"""What pods and StatefulSets say, in words that name the next step."""

from __future__ import annotations

from typing import Any

import pytest

from postbus_operator.namespaces.workloads import (
    claim_size,
    last_words,
    observed_workload,
    pod_trouble,
)

Json = dict[str, Any]


def stateful_set(kind: str = "RollingUpdate", **status: Any) -> Json:
    return {
        "metadata": {"name": "shop-broker", "generation": 2},
        "spec": {"replicas": 1, "updateStrategy": {"type": kind}},
        "status": {
            "observedGeneration": 2,
            "replicas": 1,
            "readyReplicas": 1,
            "currentRevision": "a",
            "updateRevision": "a",
            **status,
        },
    }


def pod(container: Json, *conditions: Json) -> Json:
    return {"status": {"conditions": list(conditions), "containerStatuses": [container]}}


def test_a_workload_is_ready_when_all_its_pods_have_the_newest_template() -> None:
    assert observed_workload(stateful_set()).is_ready
    for status in ({"readyReplicas": 0}, {"updateRevision": "b"}, {"observedGeneration": 1}):
        assert not observed_workload(stateful_set(**status)).is_ready
    assert not observed_workload({"metadata": {"name": "a", "generation": 1}, "spec": {}}).is_ready


def test_pods_that_are_replaced_by_hand_may_be_old() -> None:
    assert observed_workload(stateful_set("OnDelete", updateRevision="b")).is_ready


def test_the_size_of_a_template_is_found_by_its_name() -> None:
    claim = {
        "metadata": {"name": "data"},
        "spec": {"resources": {"requests": {"storage": "10Gi"}}},
    }
    found = {"spec": {"volumeClaimTemplates": [claim]}}
    assert claim_size(found, "data") == "10Gi"
    assert claim_size(found, "other") is None


@pytest.mark.parametrize(
    ("found", "said", "code"),
    [
        (
            pod({}, {"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}),
            "no node takes the pod: 0/1 nodes",
            None,
        ),
        (
            pod({"image": "postbus:x", "state": {"waiting": {"reason": "ErrImageNeverPull"}}}),
            "image postbus:x: ErrImageNeverPull; load it, or set operatorSpec.image",
            None,
        ),
        (
            pod(
                {
                    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                    "lastState": {
                        "terminated": {"exitCode": 6, "message": '{"a": 1}\nno rights\n'}
                    },
                }
            ),
            "the last start ended with exit code 6: no rights",
            6,
        ),
        (
            pod(
                {
                    "ready": False,
                    "state": {"running": {}},
                    "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                }
            ),
            "the last start ended with exit code 137: OOMKilled",
            137,
        ),
        (
            pod({"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "x"}}}),
            "CreateContainerConfigError: x",
            None,
        ),
    ],
)
def test_the_reason_of_a_pod_that_does_not_start_is_named(
    found: Json, said: str, code: int | None
) -> None:
    trouble = pod_trouble([pod({"ready": True, "state": {"running": {}}}), found])
    assert trouble is not None
    assert (trouble.text, trouble.exit_code) == (said, code)


def test_a_pod_that_just_starts_is_no_trouble() -> None:
    starting = {"ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
    restarted = {
        "ready": True,
        "state": {"running": {}},
        "lastState": {"terminated": {"exitCode": 137}},
    }
    assert pod_trouble([pod(starting), pod(restarted), {"status": {}}]) is None


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        ('{"message": "step"}\nwrong password\nset another\n', "wrong password set another"),
        ('{"message": "first"}\n{"message": "last"}\n', "last"),
        ('the end of a line"}\n{"message": "last"}', "last"),
        ('{"message": "cut', ""),
    ],
)
def test_the_last_words_of_a_log_are_those_for_people(log: str, said: str) -> None:
    assert last_words(log) == said
