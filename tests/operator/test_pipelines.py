"""Pipelines: names and objects from a spec, and what pods say of a run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postbus.contract.control_groups import ReaderGroupDescription
from postbus.contract.pipeline import Source
from postbus_operator.kube.cache import Cache, entities_of
from postbus_operator.names import MAX_STATEFUL_SET, child_name, pipeline_name, store_name
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import SpecInvalid
from postbus_operator.pipelines.batches import batch_of
from postbus_operator.pipelines.draft import PipelineDraft
from postbus_operator.pipelines.keys import rights_of, rule_name
from postbus_operator.pipelines.lag import lag_of, limit_s
from postbus_operator.pipelines.rivals import check_rivals, document_of, is_group_shared
from postbus_operator.pipelines.runs import (
    are_steady,
    executor_trouble,
    run_of,
    run_of_schedule,
    trouble_of,
)
from postbus_operator.pipelines.workloads import Driver, held_for, labels_of, objects_of
from tests.operator.objects import entity

Json = dict[str, Any]
SERVICE = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", fullmatch=True)
LAKE = {"claimName": "lake", "mountPath": "/lake"}


def pipeline(name: str = "prices", created: str = "2026-11-23T09:00:00Z", **fields: Any) -> Json:
    spec: Json = {
        "sources": [{"name": "orders", "queue": "orders", "mode": "drain"}],
        "sinks": [{"from": "orders", "deadLetter": "orders"}],
        "trigger": {"continuous": "PT1S"},
        "checkpoint": {"path": f"/lake/checkpoints/{name}"},
    }
    return entity("Pipeline", name, metadata={"creationTimestamp": created}, **(spec | fields))


def resource(*arguments: str, **fields: Any) -> Resource:
    return Resource.from_object("Pipeline", pipeline(*arguments, **fields))


def objects(found: Resource) -> list[Json]:
    connection = {"connectionString": "digest"}
    return objects_of(Driver(found, document_of(found), "image", "Never", connection))


# --- names --------------------------------------------------------------------------------------


@given(names, names)
@example("a", "a-store-b")
@example("x" * 44, "x" * 43)
@example("1.2", "pipeline-1-2")
def test_names_of_objects_fit_and_are_no_others(one: str, other: str) -> None:
    name = pipeline_name(one)
    assert len(name) <= MAX_STATEFUL_SET
    assert SERVICE.fullmatch(name)
    assert one == other or name != pipeline_name(other)
    assert name not in {f"{child_name(other)}-broker", store_name(child_name(other), "pipeline")}


def test_rules_of_pipelines_have_names_that_a_bus_accepts() -> None:
    assert rule_name(Key("Pipeline", "shop", "prices")) == "pipeline.shop.prices"
    long = [rule_name(Key("Pipeline", "n" * 63, f"{'x' * 252}{end}")) for end in "ab"]
    assert len(set(long)) == 2
    assert all(len(each) <= 256 for each in long)


def test_a_key_may_send_only_if_a_sink_names_an_entity() -> None:
    assert rights_of(document_of(resource()).spec) == ["Listen"]
    sinks = [{"from": "orders", "topic": "copies"}]
    assert rights_of(document_of(resource(sinks=sinks)).spec) == ["Listen", "Send"]
    table = {"name": "orders", "table": {"format": "delta", "path": "/lake/orders"}}
    found = resource(sources=[table], sinks=sinks, checkpoint=None)
    assert rights_of(document_of(found).spec) == ["Send"]


def test_replays_of_one_queue_are_no_rivals() -> None:
    source = {"name": "orders", "queue": "orders", "mode": "history"}
    fields = {"sources": [source], "checkpoint": None, "trigger": {"once": True}}
    earlier = resource(**fields)
    later = resource("late", "2026-11-23T09:00:01Z", **fields)
    check_rivals(later, document_of(later), [earlier])
    assert not is_group_shared(earlier, Source.model_validate(source), [later])


def test_any_source_of_two_pipelines_may_be_read_with_one_group() -> None:
    both = [{"name": name, "queue": name, "readerGroup": "lake"} for name in ("orders", "returns")]
    earlier = resource(sources=both)
    fields: Json = {"checkpoint": {"path": "/lake/late"}, "sources": [both[1]]}
    fields["sinks"] = [{"from": "returns", "topic": "copies"}]
    later = resource("late", "2026-11-23T09:00:01Z", **fields)
    with pytest.raises(SpecInvalid, match="reads returns with the reader group lake: set another"):
        check_rivals(later, document_of(later), [earlier])
    orders, returns = map(Source.model_validate, both)
    assert is_group_shared(earlier, returns, [later])
    assert not is_group_shared(earlier, orders, [later])


# --- objects ------------------------------------------------------------------------------------


def test_a_job_is_another_one_only_if_the_run_is() -> None:
    once = {"trigger": {"once": True}}
    [_, job] = objects(resource(**once))
    for same in ({"suspend": True}, {"operatorSpec": {"deletionPolicy": "Retain"}}):
        assert objects(resource(**once, **same))[1]["metadata"]["name"] == job["metadata"]["name"]
    for other in ({"limits": {"maxAttempts": 2}}, {"runtime": {"memory": "4Gi"}}):
        assert objects(resource(**once, **other))[1]["metadata"]["name"] != job["metadata"]["name"]


@pytest.mark.parametrize(
    ("trigger", "kind"),
    [
        ({"continuous": "PT1S"}, "StatefulSet"),
        ({"schedule": "*/5 * * * *"}, "CronJob"),
        ({"once": True}, "Job"),
    ],
)
def test_what_has_an_end_is_a_job(trigger: Json, kind: str) -> None:
    assert objects(resource(trigger=trigger))[1]["kind"] == kind


def test_jobs_of_a_schedule_run_what_is_there_as_a_job_does_that_runs_once() -> None:
    [document, found] = objects(resource(trigger={"schedule": "*/5 * * * *"}))
    [other, job] = objects(resource(trigger={"once": True}))
    assert (found["spec"]["schedule"], found["spec"]["timeZone"]) == ("*/5 * * * *", "Etc/UTC")
    assert found["spec"]["concurrencyPolicy"] == "Forbid"
    texts = [each["data"]["pipeline.yaml"] for each in (document, other)]
    assert json.loads(texts[0])["spec"]["trigger"] == {"once": True}
    assert texts[0] == texts[1]
    run, once = found["spec"]["jobTemplate"]["spec"], job["spec"]
    for each in (run, once):
        each["template"]["metadata"].pop("annotations")
    assert once == {"suspend": False, **run}


def test_a_changed_document_or_key_makes_another_pod_and_suspension_does_not() -> None:
    def template(connection: str = "digest", **fields: Any) -> Json:
        found = resource(**fields)
        driver = Driver(found, document_of(found), "i", "Never", {"connectionString": connection})
        made: Json = objects_of(driver)[1]["spec"]["template"]
        return made

    assert template(suspend=True) == template()
    assert template(limits={"maxAttempts": 2}) != template()
    assert template("another") != template()


def test_a_pipeline_that_waits_for_a_decision_has_no_pods_for_this_spec() -> None:
    def stateful_set_of(held: str | None = None) -> Json:
        found = resource()
        made: Json = objects_of(Driver(found, document_of(found), "i", "Never", {}, held))[1]
        return made

    held, again = stateful_set_of("exit code 20: why"), stateful_set_of()
    assert (held["spec"]["replicas"], again["spec"]["replicas"]) == (0, 1)
    assert held["spec"]["template"] == again["spec"]["template"]
    assert held_for(held, resource()) == "exit code 20: why"
    assert held_for(again, resource()) is None
    assert held_for(None, resource()) is None
    assert held_for(held, replace(resource(), generation=2)) is None


def test_the_heap_of_a_small_pod_is_what_spark_needs() -> None:
    for memory, heap in (("1Gi", 512), ("1536Mi", 512), ("6Gi", 2_048)):
        [_, found] = objects(resource(runtime={"memory": memory}))
        [container] = found["spec"]["template"]["spec"]["containers"]
        arguments = environment(container)["PYSPARK_SUBMIT_ARGS"]
        assert f"--driver-memory {heap}m " in arguments


def environment(container: Json) -> Json:
    return {each["name"]: each.get("value") for each in container["env"]}


def with_executors(**fields: Any) -> tuple[list[Json], Json]:
    """Return objects of a pipeline with executors, and the template of their pods."""
    executor = {"cores": 2, "memory": "1536Mi"}
    found = resource(runtime={"cores": 1, "executors": 3, "executor": executor}, **fields)
    keys = {"connectionString": "digest", "ca.crt": "digest"}
    made = objects_of(Driver(found, document_of(found), "i", "Never", keys, role="Role/drivers"))
    [document] = [each for each in made if each["kind"] == "ConfigMap"]
    return made, json.loads(document["data"]["executor.yaml"])


def test_executors_get_the_memory_and_cores_that_the_document_says() -> None:
    made, _ = with_executors()
    [container] = made[-1]["spec"]["template"]["spec"]["containers"]
    shown = environment(container)
    arguments = shown["PYSPARK_SUBMIT_ARGS"]
    assert arguments.startswith("--master k8s://https://kubernetes.default.svc --driver-memory ")
    for name, value in {
        "executor.instances": "3",
        "executor.cores": "2",
        "executor.memory": "512m",
        "executor.memoryOverhead": "1024m",
        "kubernetes.executor.request.cores": "2",
        "driver.host": "$(POD_IP)",
        "authenticate": "true",
    }.items():
        assert f"--conf spark.{name}={value} " in arguments
    names = [each["name"] for each in container["env"]]
    assert names.index("POD_IP") < names.index("PYSPARK_SUBMIT_ARGS")
    assert shown["SPARK_LOCAL_IP"] == "$(POD_IP)"


@pytest.mark.parametrize("trigger", [{"continuous": "PT1S"}, {"schedule": "0 * * * *"}])
def test_a_driver_has_the_token_and_its_executors_have_neither_token_nor_key(trigger: Json) -> None:
    made, template = with_executors(trigger=trigger)
    account, binding, _, workload = made
    assert (account["kind"], binding["kind"]) == ("ServiceAccount", "RoleBinding")
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "drivers",
    }  # fmt: skip
    run = workload["spec"].get("jobTemplate", workload)
    pod = run["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is True
    assert template["spec"]["automountServiceAccountToken"] is False
    [connection] = [each for each in template["spec"]["volumes"] if "secret" in each]
    assert connection["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    [executor] = template["spec"]["containers"]
    assert environment(executor)["POSTBUS_CA_FILE"] == "/etc/postbus/connection/ca.crt"
    assert not labels_of(resource()).items() <= template["metadata"]["labels"].items()


def test_executors_have_the_volumes_of_the_document_and_a_local_folder() -> None:
    for volumes, mounted in (
        ([LAKE], {"/lake", "/tmp"}),
        ([LAKE | {"mountPath": "/tmp"}], {"/tmp"}),
    ):
        _, template = with_executors(volumes=volumes, checkpoint={"path": "/notes"})
        [container] = template["spec"]["containers"]
        mounts = container["volumeMounts"]
        assert {each["mountPath"] for each in mounts if not each.get("readOnly")} == mounted
        assert {each["name"] for each in mounts} == {
            each["name"] for each in template["spec"]["volumes"]
        }
        # Spark would mount another volume there.
        [local] = [each["name"] for each in mounts if each["mountPath"] == "/tmp"]
        assert local == "spark-local-dir-1"


def test_a_pipeline_without_executors_has_no_account() -> None:
    made = objects(resource())
    assert [each["kind"] for each in made] == ["ConfigMap", "StatefulSet"]
    pod = made[-1]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod


@pytest.mark.parametrize(
    ("volumes", "path", "mounted"),
    [
        ([LAKE], "/lake/checkpoints", {"/lake", "/tmp"}),
        ([LAKE], "/lakes", {"/lake", "/tmp", "/lakes"}),
        ([], "/checkpoints/a", {"/tmp", "/checkpoints/a"}),
        ([], "/tmp/a", {"/tmp"}),
        ([{"claimName": "lake", "mountPath": "/tmp"}], "/tmp/a", {"/tmp"}),
    ],
)
def test_what_is_written_is_below_a_mount(volumes: Any, path: str, mounted: set[str]) -> None:
    [_, found] = objects(resource(volumes=volumes, checkpoint={"path": path}))
    pod = found["spec"]["template"]["spec"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert {each["mountPath"] for each in mounts if not each.get("readOnly")} == mounted
    assert {each["name"] for each in mounts} == {each["name"] for each in pod["volumes"]}


# --- others -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mount_path", "path", "is_refused"),
    [
        ("/mnt", "/mnt/checkpoints/prices", True),
        ("/mnt", "/mnt/checkpoints/prices/below", True),
        ("/mnt", "/mnt/checkpoints", True),
        ("/mnt", "/mnt/checkpoints/prices2", False),
        ("/mnt", "/elsewhere", False),
    ],
)
def test_a_folder_of_a_claim_has_one_checkpoint(
    mount_path: str, path: str, is_refused: bool
) -> None:
    earlier = resource(volumes=[LAKE])
    later = resource(
        "late",
        "2026-11-23T09:00:01Z",
        volumes=[{"claimName": "lake", "mountPath": mount_path}],
        checkpoint={"path": path},
    )
    others = [later, earlier]
    check_rivals(earlier, document_of(earlier), others)
    if not is_refused:
        check_rivals(later, document_of(later), others)
        return
    with pytest.raises(SpecInvalid, match="Pipeline shop/prices has its checkpoint"):
        check_rivals(later, document_of(later), others)


@pytest.mark.parametrize("uids", ["ab", "ba"])
def test_of_two_pipelines_of_one_second_the_accepted_one_stays(uids: str) -> None:
    """Times of the API server are seconds. A driver that runs keeps group and folder."""
    accepted = resource(volumes=[LAKE])
    valid = {"type": "Valid", "status": "True", "observedGeneration": accepted.generation}
    status = {"conditions": [valid | {"lastTransitionTime": "2026-11-23T09:00:00Z"}]}
    accepted = replace(accepted, uid=uids[0], status=status)
    other = resource("other", volumes=[LAKE], checkpoint={"path": "/lake/checkpoints/prices"})
    other = replace(other, uid=uids[1])
    check_rivals(accepted, document_of(accepted), [accepted, other])
    with pytest.raises(SpecInvalid, match="Pipeline shop/prices has its checkpoint"):
        check_rivals(other, document_of(other), [accepted, other])


def test_a_pipeline_is_no_entity_and_is_found_by_those_that_it_uses() -> None:
    cache = Cache()
    source = {"name": "o", "topic": "Events", "subscription": "all"}
    sinks = [{"from": "o", "queue": "copies"}, {"from": "o", "queue": "copies"}]
    cache.observe(pipeline("orders", sources=[source], sinks=sinks))
    cache.observe(entity("Queue", "orders", 2))
    cache.observe(entity("Queue", "copies", 3))
    queue, found = (cache.get(Key(kind, "shop", "orders")) for kind in ("Queue", "Pipeline"))
    assert queue is not None
    assert found is not None
    assert entities_of(found) == ["Events/Subscriptions/all", "copies"]
    assert cache.claimants(queue) == [queue]
    assert cache.claimants(found) == [found]
    bus = Key("Namespace", "shop", "bus")
    assert cache.named(bus, "orders") == [queue]
    for path in ("copies", "events/subscriptions/all"):
        assert cache.forwarding_to(bus, path) == [found]
    cache.forget(pipeline("orders") | {"metadata": pipeline("orders")["metadata"]})
    assert cache.claimants(queue) == [queue]


# --- lag ----------------------------------------------------------------------------------------


def group(lag_s: float | None, unread: int | None = 7) -> ReaderGroupDescription:
    return ReaderGroupDescription(
        entity="orders", sub_queue="main", name="prices", kind="drain", epoch=1, reader="",
        plan_number=1, attempts=0, is_settled=True, unread_messages=unread, lag_seconds=lag_s,
        max_pinned_bytes=None, max_pinned_age_ms=None, on_pin_limit="fail",
    )  # fmt: skip


def shown_after(status: Json, lag_s: float, unread: int = 7, limit_s: float | None = 600) -> Json:
    found = Resource.from_object("Pipeline", pipeline() | {"status": status})
    draft = PipelineDraft(found, datetime(2026, 11, 27, tzinfo=UTC))
    lag = lag_of([group(lag_s, unread)])
    assert lag is not None
    draft.note_lag(lag, limit_s)
    outcome = draft.outcome()
    assert outcome.status is not None
    return outcome.status.model_dump(by_alias=True, exclude_none=True, mode="json")


@pytest.mark.parametrize(("lag_s", "unread"), [(None, 7), (60, None)])
def test_a_lag_that_the_bus_does_not_know_is_none(lag_s: float | None, unread: int | None) -> None:
    assert lag_of([group(lag_s, unread)]) is None


def test_a_pipeline_that_keeps_up_shows_no_fluctuation() -> None:
    assert lag_of([group(9.9, 5_000)]) == (0, 0)
    assert lag_of([group(9.9, 5_000), group(30, 7)]) == (5_007, 30)
    assert lag_of([group(30, 7), group(None, None)]) is None
    assert lag_of([group(10.2, 5_000)]) == (5_000, 10)
    first = shown_after({}, 0, 0)
    assert (first["lagMessages"], first["lagSeconds"]) == (0, 0)
    assert shown_after(first, 3, 800) == first


def test_a_lag_is_shown_again_when_it_has_changed_by_a_tenth() -> None:
    before = shown_after({}, 100, 50)
    assert (before["lagMessages"], before["lagSeconds"]) == (50, 100)
    assert shown_after(before, 105, 52) == before
    for lag_s, unread in ((112, 52), (105, 60), (0, 0)):
        after = shown_after(before, lag_s, unread)
        assert after["lagSeconds"] == lag_s
    assert shown_after(after, 0, 0) == after


def test_a_pipeline_lags_from_its_limit_on() -> None:
    def types(**fields: Any) -> list[str]:
        return [each["type"] for each in shown_after({}, **fields)["conditions"]]

    assert types(lag_s=599.9) == []
    assert types(lag_s=600) == ["Lagging"]
    assert types(lag_s=10**6, limit_s=None) == []


@pytest.mark.parametrize(
    ("trigger", "max_lag", "limit"),
    [
        ({"continuous": "PT1S"}, None, 600),
        ({"continuous": "PT10M"}, None, 1_800),
        ({"continuous": "PT10M"}, "PT1M", 60),
        ({"schedule": "0 * * * *"}, None, None),
        ({"schedule": "0 * * * *"}, "PT2H", 7_200),
        ({"once": True}, None, None),
    ],
)
def test_what_runs_at_times_lags_only_if_its_spec_says_when(
    trigger: Json, max_lag: str | None, limit: float | None
) -> None:
    operator_spec = {} if max_lag is None else {"maxLag": max_lag}
    found = resource(trigger=trigger, operatorSpec=operator_spec)
    assert limit_s(document_of(found).spec) == limit


# --- the last batch -----------------------------------------------------------------------------

NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)


def planned(number: int, *, attempts: int = 1, is_settled: bool = True) -> ReaderGroupDescription:
    batch = {"plan_number": number, "attempts": attempts, "is_settled": is_settled}
    return group(0).model_copy(update=batch)


def test_a_group_without_a_plan_has_no_batch() -> None:
    assert batch_of([planned(0, attempts=0)], None, NOON) is None


def test_a_batch_of_several_groups_has_the_sum_of_their_plans() -> None:
    """A group without new messages has settled its own."""
    shown = batch_of(
        [planned(7, attempts=3), planned(5, is_settled=False), planned(0, attempts=0)], None, NOON
    )
    assert shown is not None
    assert (shown.number, shown.attempts, shown.settled) == (12, 1, False)


def test_batches_that_follow_each_other_are_shown_after_a_pause() -> None:
    first = batch_of([planned(7)], None, NOON)
    assert first is not None
    assert (first.number, first.settled, first.time) == (7, True, "2026-11-27T12:00:00Z")
    assert batch_of([planned(7)], first, NOON + timedelta(hours=1)) is first
    soon, later = (NOON + timedelta(minutes=each) for each in (9, 10))
    assert batch_of([planned(500, is_settled=False)], first, soon) is first
    shown = batch_of([planned(600, is_settled=False)], first, later)
    assert shown is not None
    assert (shown.number, shown.settled, shown.time) == (600, False, "2026-11-27T12:10:00Z")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (planned(7, is_settled=False), planned(7)),
        (planned(7), planned(8, attempts=2, is_settled=False)),
        (planned(7, attempts=2, is_settled=False), planned(8)),
        (planned(7), planned(1)),
    ],
    ids=["settled", "begun again", "recovered", "group made again"],
)
def test_a_batch_that_stood_still_is_shown_at_once(
    before: ReaderGroupDescription, after: ReaderGroupDescription
) -> None:
    shown = batch_of([after], batch_of([before], None, NOON), NOON + timedelta(seconds=1))
    assert shown is not None
    assert (shown.number, shown.attempts) == (after.plan_number, after.attempts)
    assert (shown.settled, shown.time) == (after.is_settled, "2026-11-27T12:00:01Z")


# --- pods ---------------------------------------------------------------------------------------


def stateful_set(**status: Any) -> Json:
    return {
        "kind": "StatefulSet",
        "metadata": {"name": "prices-pipeline", "generation": 1},
        "spec": {"replicas": 1},
        "status": {"observedGeneration": 1, **status},
    }


def job(*conditions: str, **status: Any) -> Json:
    shown = [{"type": each, "status": "True"} for each in conditions]
    return {
        "kind": "Job",
        "metadata": {"name": "prices-pipeline-1", "generation": 1},
        "spec": {},
        "status": {"conditions": shown, **status},
    }


def pod(created: str = "2026", **container: Any) -> Json:
    return {
        "metadata": {"creationTimestamp": created},
        "status": {"containerStatuses": [{"name": "pipeline", **container}]},
    }


def ended(code: int, words: str = "") -> Json:
    return {"terminated": {"exitCode": code, "message": words, "reason": "Error"}}


def test_a_pod_that_has_just_started_again_is_not_ready_yet() -> None:
    """Otherwise a pipeline that ends after ten seconds would be ready for those."""
    again = pod(ready=True, state={"running": {}}, lastState=ended(10, "JavaMissing: install it"))
    found = run_of(stateful_set(readyReplicas=1), [again])
    assert (found.status, found.reason, found.also) == ("False", "ConfigurationError", "Stalled")
    assert "JavaMissing: install it" in found.message
    steady = stateful_set(readyReplicas=1, availableReplicas=1)
    assert run_of(steady, [again])[:2] == ("True", "Running")


def test_the_newest_pod_of_a_job_counts() -> None:
    pods = [pod("2026-01-01", state=ended(1, "old")), pod("2026-01-02", state=ended(20, "new"))]
    found = run_of(job("Failed"), pods)
    assert (found.reason, found.exit_code) == ("DecisionNeeded", 20)
    assert run_of(job("Complete"), pods)[:2] == ("True", "Completed")


def test_a_pod_that_has_succeeded_before_its_job_is_no_trouble() -> None:
    failed = pod("2026-01-01", ready=False, state=ended(1))
    done = pod("2026-01-02", ready=False, state={"terminated": {"exitCode": 0}})
    done["status"]["phase"] = "Succeeded"
    for pods in ([done], [failed, done]):
        assert run_of(job(), pods)[:2] == ("False", "Running")
    assert run_of(job("Complete"), [done])[:2] == ("True", "Completed")


def test_a_job_without_retries_needs_somebody() -> None:
    found = run_of(job("Failed"), [pod(state=ended(137))])
    assert (found.reason, found.also, found.exit_code) == ("RunFailed", "Stalled", 137)
    assert run_of(job(), [pod(state=ended(137))])[1] == "Retrying"
    assert run_of(job("Failed"), [])[1] == "RunFailed"
    assert run_of(job(active=1), [pod(state={"running": {}})])[1] == "Running"


def test_an_image_that_is_missing_is_named_with_its_field() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull"}}
    found = run_of(stateful_set(), [pod(image="postbus-pipeline:1", state=waiting)])
    assert found.reason == "PodNotStarting"
    assert "runtime.image" in found.message


@pytest.mark.parametrize(
    ("code", "error", "condition"),
    [
        (1, "Fenced", ("Fenced", "Fenced")),
        (20, "DataLoss", ("DataLoss", "DataLoss")),
        (20, "StaleCheckpoint", ("StaleCheckpoint", "StaleCheckpoint")),
        (20, "BusRestored", ("StaleCheckpoint", "BusRestored")),
        (20, "Poison", None),
        (10, "InvalidPipeline", None),
    ],
)
def test_the_error_of_a_run_is_a_condition_of_its_own_until_another_run_is_ready(
    code: int, error: str, condition: tuple[str, str] | None
) -> None:
    run = run_of(stateful_set(), [pod(state=ended(code, f"{error}: DataLoss: what happened"))])
    assert trouble_of(run, has_lost_messages=False) == condition
    ready = run_of(stateful_set(readyReplicas=1, availableReplicas=1), [])
    assert trouble_of(ready, has_lost_messages=False) is None
    assert trouble_of(ready, has_lost_messages=True) == ("DataLoss", "MessagesDropped")


def test_a_condition_for_what_ended_a_run_goes_with_the_next_run() -> None:
    def types(status: Json, said: str, found: Any) -> Json:
        made = Resource.from_object("Pipeline", pipeline() | {"status": status})
        draft = PipelineDraft(made, NOON)
        draft.note_trouble(said, found)
        outcome = draft.outcome()
        assert outcome.status is not None
        return outcome.status.model_dump(by_alias=True, exclude_none=True, mode="json")

    run = run_of(stateful_set(), [pod(state=ended(20, "DataLoss: messages are gone"))])
    shown = types({}, run.message, trouble_of(run, has_lost_messages=False))
    [condition] = shown["conditions"]
    assert (condition["type"], condition["status"]) == ("DataLoss", "True")
    assert "messages are gone" in condition["message"]
    assert types(shown, "", None)["conditions"] == []


def test_an_executor_that_has_ended_is_replaced_and_no_trouble() -> None:
    over = pod(state=ended(137), ready=False)
    over["status"]["phase"] = "Failed"
    waits = pod(image="i", state={"waiting": {"reason": "ImagePullBackOff"}})
    waits["status"]["phase"] = "Pending"
    assert executor_trouble([over]) is None
    assert "ImagePullBackOff" in str(executor_trouble([over, waits]))


# --- schedules ----------------------------------------------------------------------------------

CRON_JOB: Json = {"kind": "CronJob", "metadata": {"name": "prices-pipeline"}, "spec": {}}


def job_at(hour: int, *conditions: str, **status: Any) -> Json:
    made = job(*conditions, **status)
    metadata = {"uid": str(hour), "creationTimestamp": f"2026-01-01T{hour:02}:00:00Z"}
    return made | {"metadata": metadata}


def pod_of(run: Json, **container: Any) -> Json:
    made = pod(run["metadata"]["creationTimestamp"], **container)
    made["metadata"]["ownerReferences"] = [{"uid": run["metadata"]["uid"]}]
    return made


def test_a_schedule_without_runs_waits_for_the_first_one() -> None:
    assert are_steady(CRON_JOB, [])
    found = run_of_schedule(CRON_JOB, [], [])
    assert (found.status, found.reason, found.also) == ("True", "Waiting", None)
    assert not found.is_starting


def test_a_suspended_schedule_says_so_whatever_its_last_run_did() -> None:
    suspended = CRON_JOB | {"spec": {"suspend": True}}
    assert are_steady(suspended, [job_at(1, "Failed")])
    assert run_of_schedule(suspended, [job_at(1, "Failed")], [])[:2] == ("False", "Suspended")


@pytest.mark.parametrize(
    ("code", "reason", "also"),
    [
        (10, "ConfigurationError", "Stalled"),
        (20, "DecisionNeeded", "Stalled"),
        (1, "RunFailed", None),
    ],
)
def test_the_last_run_of_a_schedule_counts_until_another_one_has_ended(
    code: int, reason: str, also: str | None
) -> None:
    failed, going = job_at(2, "Failed"), job_at(3, active=1, ready=1)
    runs = [job_at(1, "Complete"), failed]
    pods = [pod_of(failed, state=ended(code, "what it said"))]
    found = run_of_schedule(CRON_JOB, runs, pods)
    assert (found.status, found.reason, found.also) == ("False", reason, also)
    assert "what it said" in found.message
    assert "the next run begins at its time" in found.message
    assert found.exit_code == code
    assert run_of_schedule(CRON_JOB, [going, *runs], pods) == found
    completed = [job_at(3, "Complete"), *runs]
    assert run_of_schedule(CRON_JOB, completed, pods)[:2] == ("True", "Waiting")


def test_a_run_that_begins_is_looked_at_until_its_pod_is_ready() -> None:
    before, begun = job_at(1, "Complete"), job_at(2, active=1)
    found = run_of_schedule(CRON_JOB, [before, begun], [])
    assert (found.status, found.reason, found.is_starting) == ("True", "Running", True)
    assert not are_steady(CRON_JOB, [before, begun])
    ready = job_at(2, active=1, ready=1)
    assert not run_of_schedule(CRON_JOB, [before, ready], []).is_starting
    assert are_steady(CRON_JOB, [before, ready])
    assert not are_steady(CRON_JOB, [job_at(1, "Failed"), ready])
    again = job_at(2, active=1, ready=1, failed=1)
    assert not are_steady(CRON_JOB, [before, again])
    found = run_of_schedule(CRON_JOB, [before, again], [pod_of(again, state=ended(1))])
    assert (found.reason, found.also) == ("Retrying", "Reconciling")


def test_a_pod_of_an_earlier_run_says_nothing_of_this_one() -> None:
    earlier, begun = job_at(1, "Complete", failed=1), job_at(2, active=1)
    pods = [pod_of(earlier, state=ended(1, "old"))]
    assert run_of_schedule(CRON_JOB, [earlier, begun], pods)[:2] == ("True", "Running")
