"""Pipelines in pods: what the guide shows, ends of drivers under load, keys, deletions.

All share a bus and a claim; those that delete them come last. The image of pipelines must be on the
cluster. They run alone: brokers of other tests would wait for the processors that Spark takes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue
from e2e.tests.bus import Bus
from e2e.tests.cluster import TAG, Refused, Space, kubectl, wait_for
from e2e.tests.figures import record
from e2e.tests.manifests import POD_SECURITY, RESTRICTED, queue, resource

BUS: Final = "shop-bus"
EXAMPLE: Final = "examples/pipeline/price-orders.yaml"
IMAGE: Final = f"postbus-pipeline:{TAG}"
FOLDER: Final = "/tmp/lake"
LAKE: Final = [{"claimName": "lake", "mountPath": FOLDER}]

pytestmark = pytest.mark.alone

FIRST_ROW_S: Final = 90.0
NEXT_ROW_S: Final = 120.0
"""Limit from the end of a driver to the next row; Spark and its queries start in 20 s."""

GRACE_S: Final = 60.0
"""Limit for a batch to end; Kubernetes would kill the pod after twice that time."""

DELETED_S: Final = 60.0

CONTEXT: Final = (
    "postbus context set pod --control https://$(hostname -f):9465"
    " --ca-file /etc/postbus/tls/ca.crt --token-file /etc/postbus/control-token/token"
    " && postbus context use pod"
)

ROWS: Final = """
import json, sys
import pyarrow.dataset as ds
table = ds.dataset(sys.argv[1], partitioning="hive").to_table([sys.argv[2]])
print(json.dumps(table[sys.argv[2]].to_pylist()))
"""
"""A column of a table, as docs/guides/lake.md reads it."""


# --- bus, lake, messages ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bus(operator: None) -> Iterator[Bus]:
    """The bus of the example, a claim, and a pod that reads it."""
    with _shop(
        "pipelines", "orders", "live", "copies", "wrong", "spread", "first", "second"
    ) as bus:
        yield bus


@contextmanager
def _shop(prefix: str, *queues: str) -> Iterator[Bus]:
    space = Space.make(prefix)
    bus = Bus.make(space, BUS)
    try:
        space.apply(_claim(), _reader(), *(queue(name, BUS) for name in queues))
        bus.wait_ready()
        space.wait_ready(*(f"sbq/{name}" for name in queues))
        space.wait_ready("pod/reader")
        space.kubectl("exec", bus.broker, "--", "sh", "-c", CONTEXT)
        yield bus
    finally:
        bus.end()
        space.close()


def _claim() -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "lake"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }  # fmt: skip


def _reader() -> dict[str, Any]:
    container = {
        "name": "reader", "image": IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "lake", "mountPath": FOLDER, "readOnly": True}],
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": POD_SECURITY,
            "containers": [container],
            "volumes": [{"name": "lake", "persistentVolumeClaim": {"claimName": "lake"}}],
        },
    }  # fmt: skip


def column(space: Space, table: str, name: str) -> list[Any]:
    """Return a column of a table; nothing is there before its first commit."""
    path = f"{FOLDER}/{table}"
    try:
        shown = space.kubectl("exec", "reader", "--", "python", "-c", ROWS, path, name)
    except Refused as error:
        if "FileNotFoundError" in str(error):
            return []
        raise
    found: list[Any] = json.loads(shown)
    return found


def pipeline(name: str, **fields: Any) -> dict[str, Any]:
    """Return a continuous pipeline that drains the queue of its name into a table."""
    spec = {
        "owner": {"name": BUS},
        "sources": [
            {"name": "orders", "queue": name, "mode": "drain", "body": {"json": "number int"}}
        ],
        "transform": {
            "sql": {
                "numbers": "select body.number, partition, position, enqueued_time from orders",
            }
        },
        "sinks": [
            {"from": "numbers", "table": {"format": "parquet", "path": f"{FOLDER}/{name}"}},
            {"from": "malformed", "deadLetter": "orders"},
        ],
        "trigger": {"continuous": "PT0.5S"},
        "checkpoint": {"path": f"{FOLDER}/checkpoints/{name}"},
        "runtime": {"cores": 1},
        "volumes": LAKE,
    }
    return resource("Pipeline", name, spec | fields)


class Pipeline:
    """A continuous pipeline, and the numbers that its queue got, from 0 on."""

    def __init__(self, bus: Bus, name: str, **fields: Any) -> None:
        self.bus, self.space, self.name = bus, bus.space, name
        self.reference = f"sbpipe/{name}"
        self.pod = f"pod/{name}-pipeline-0"
        self.sent = 0
        self._failures: list[Exception] = []
        self.space.apply(pipeline(name, **fields))

    def send(self) -> None:
        """Send the next number."""
        self.bus.send(self.name, json.dumps({"number": self.sent}))
        self.sent += 1

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Send numbers all the time, while the block runs; none is refused."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._send, args=(is_over,))
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        assert self._failures == []

    def _send(self, is_over: threading.Event) -> None:
        try:
            with self.bus.sdk() as client, client.get_queue_sender(self.name) as sender:
                while not is_over.is_set():
                    sender.send_messages(ServiceBusMessage(json.dumps({"number": self.sent})))
                    self.sent += 1
        except Exception as error:  # noqa: BLE001 - the test's, not the thread's
            self._failures.append(error)

    def rows(self) -> list[int]:
        return column(self.space, self.name, "number")

    def wait_rows(self, count: int) -> list[int]:
        return wait_for(self.rows, lambda found: len(found) >= count, NEXT_ROW_S)

    def check(self) -> None:
        """Wait for the last number, and fail unless each is there once."""
        assert sorted(self.wait_rows(self.sent)) == list(range(self.sent))

    def uid(self) -> str:
        """Return the identity of its pod."""
        uid: str = self.space.get(self.pod)["metadata"]["uid"]
        return uid

    def wait_other_pod(self, former: str) -> None:
        wait_for(self.uid, lambda found: found != former)

    def group(self) -> dict[str, Any] | None:
        """Return its reader group on the bus."""
        shown = postbus(self.bus, "groups", "list", "--output=json")
        return next((each for each in json.loads(shown) if each["name"] == self.name), None)

    def unsettled(self) -> int:
        """Return the number of messages in its queue."""
        with self.bus.administration() as administration:
            found = administration.get_queue_runtime_properties(self.name)
        return int(found.active_message_count or 0)

    def has_rule(self) -> bool:
        """Return whether its rule is on the bus."""
        rules = json.loads(postbus(self.bus, "keys", "list", "--output=json"))
        return f"pipeline.{self.space.name}.{self.name}" in {each["name"] for each in rules}

    def delete(self) -> float:
        """Delete it; return the time until it is gone."""
        return self.space.delete(self.reference, limit_s=DELETED_S)


def postbus(bus: Bus, *arguments: str) -> str:
    """Run the command line in the broker's pod, as docs/guides/kubernetes-operations.md shows."""
    return bus.space.kubectl("exec", bus.broker, "--", "postbus", *arguments)


# --- runs ---------------------------------------------------------------------------------------


def test_the_example_of_the_guide_ends_with_a_row_and_two_dead_letters(bus: Bus) -> None:
    space = bus.space
    bus.send("orders", '{"sku": "apple", "amount": 2.5}', '{"sku": "pear"}', "no JSON")
    began = time.monotonic()
    space.kubectl("apply", "--filename", EXAMPLE)
    space.wait_condition("sbpipe/price-orders", "Ready", "True", "Completed", FIRST_ROW_S)
    record("pipeline that runs once, applied to completed", time.monotonic() - began, FIRST_ROW_S)
    assert column(space, "priced-orders", "price") == [3.0]
    dead = bus.take("orders", 2, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    assert {(str(each), each.dead_letter_reason) for each in dead} == {
        ('{"sku": "pear"}', "NoAmount"),
        ("no JSON", "MalformedBody"),
    }
    [job] = space.get("jobs")["items"]
    assert job["status"]["succeeded"] == 1
    assert "failed" not in job["status"]


def test_a_wrong_column_is_a_configuration_error_and_is_not_tried_again(bus: Bus) -> None:
    space = bus.space
    transform = {"sql": {"numbers": "select body.numbre, partition, position from orders"}}
    space.apply(pipeline("wrong", transform=transform, trigger={"once": True}))
    space.wait_condition("sbpipe/wrong", "Ready", "False", "ConfigurationError", FIRST_ROW_S)
    status = space.get("sbpipe/wrong")["status"]
    assert status["exitCode"] == 10
    [ready] = [each for each in status["conditions"] if each["type"] == "Ready"]
    assert ready["message"] == (
        "the last run ended with exit code 10: InvalidPipeline: spec.transform.sql.numbers:"
        " [FIELD_NOT_FOUND] No such struct field `numbre` in `number`. SQLSTATE: 42704. Correct"
        " what it names"
    )
    assert re.search(r"\nwrong +False +ConfigurationError ", space.kubectl("get", "sbpipe"))
    label = "--selector=postbus.dev/pipeline=wrong-pipeline"
    [pod] = space.kubectl("get", "pods", label, "--output=name").split()
    assert "Exception" not in space.kubectl("logs", pod)


@pytest.fixture(scope="module")
def live(bus: Bus) -> Pipeline:
    """A continuous pipeline into a table and a queue, with its first row."""
    began = time.monotonic()
    spec = pipeline("live")["spec"]
    spec["transform"]["sql"]["copies"] = "select to_json(body) as body from orders"
    spec["sinks"].append({"from": "copies", "queue": "copies"})
    made = Pipeline(bus, "live", transform=spec["transform"], sinks=spec["sinks"])
    made.send()
    assert made.wait_rows(1) == [0]
    record("pipeline applied to its first row", time.monotonic() - began, FIRST_ROW_S)
    return made


def test_a_continuous_pipeline_becomes_ready(live: Pipeline) -> None:
    live.space.wait_condition(live.reference, "Ready", "True", "Running")
    assert live.has_rule()
    assert live.group() is not None


@pytest.mark.slow
def test_drivers_that_end_under_load_leave_each_message_once(live: Pipeline) -> None:
    ways = {"deleted": ["--wait=false"], "killed": ["--grace-period=0", "--force"]}
    with live.under_load():
        for way, options in ways.items():
            former, began = live.uid(), time.monotonic()
            live.space.kubectl("delete", live.pod, *options)
            live.wait_other_pod(former)
            live.wait_rows(live.sent + 1)
            record(f"driver {way} to rows of the next", time.monotonic() - began, NEXT_ROW_S)
    live.check()


@pytest.mark.slow
def test_a_suspended_pipeline_settles_its_batch_and_goes_on_later(live: Pipeline) -> None:
    with live.under_load():
        live.wait_rows(live.sent + 1)
        live.space.patch(live.reference, {"spec": {"suspend": True}})
        began = time.monotonic()
        live.space.wait("delete", live.pod)
        record("suspended pipeline to the end of its pod", time.monotonic() - began, GRACE_S)
    live.space.wait_condition(live.reference, "Ready", "False", "Suspended")
    assert len(live.rows()) + live.unsettled() == live.sent
    live.space.patch(live.reference, {"spec": {"suspend": False}})
    live.check()


@pytest.mark.slow
def test_a_driver_follows_its_key_through_a_rotation(live: Pipeline) -> None:
    """The first step of a rotation, and its revocation: the second step takes minutes."""
    for change in ("postbus.dev/rotate=primary", "postbus.dev/rotate-"):
        former = live.uid()
        live.space.kubectl("annotate", live.reference, change)
        live.wait_other_pod(former)
        live.send()
        live.check()


# --- deletions ----------------------------------------------------------------------------------


def test_a_deleted_pipeline_leaves_its_queue_to_receivers(live: Pipeline) -> None:
    record("running pipeline deleted", live.delete(), DELETED_S)
    assert live.group() is None
    assert not live.has_rule()
    live.bus.send(live.name, "for a receiver")
    assert live.bus.texts(live.name, 1) == ["for a receiver"]
    copies = [json.loads(text)["number"] for text in live.bus.texts("copies", live.sent)]
    assert sorted(copies) == list(range(live.sent))


# --- executors ----------------------------------------------------------------------------------

EXECUTORS: Final = {
    "cores": 1,
    "executors": 2,
    "executor": {"cores": 1, "coreRequest": "50m", "memory": "1Gi"},
}
ENDS: Final = {
    "deleted": ["delete", "pod", "{}", "--wait=false"],
    "killed": ["delete", "pod", "{}", "--grace-period=0", "--force"],
    "ended by itself": ["exec", "{}", "--", "kill", "1"],
}
"""Ways in which executors end, with their commands."""


def executors(made: Pipeline) -> dict[str, Any]:
    """Return the pods of executors that run and are not about to end, by name."""
    label = f"postbus.dev/pipeline={made.name}-pipeline,app.kubernetes.io/component=executor"
    found = json.loads(made.space.kubectl("get", "pods", "--selector", label, "--output=json"))
    return {
        each["metadata"]["name"]: each
        for each in found["items"]
        if each["status"]["phase"] == "Running" and "deletionTimestamp" not in each["metadata"]
    }


def wait_replaced(made: Pipeline, former: str) -> None:
    """Wait until both executors run, without a former one."""

    def is_replaced(found: dict[str, Any]) -> bool:
        return len(found) == 2 and former not in found

    wait_for(lambda: executors(made), is_replaced, NEXT_ROW_S)


@pytest.mark.slow
def test_executors_and_drivers_that_end_under_load_leave_each_message_once(bus: Bus) -> None:
    """The queue has one partition: tasks of several batches go to either executor."""
    began = time.monotonic()
    made = Pipeline(bus, "spread", runtime=EXECUTORS)
    made.send()
    assert made.wait_rows(1) == [0]
    record(
        "pipeline with executors applied to its first row", time.monotonic() - began, FIRST_ROW_S
    )
    pods = wait_for(lambda: executors(made), lambda found: len(found) == 2, NEXT_ROW_S)
    for name, pod in pods.items():
        [owner] = pod["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Pod", made.uid())
        assert pod["spec"]["automountServiceAccountToken"] is False
        shown = made.space.kubectl("exec", name, "--", "ls", "/etc/postbus/connection")
        assert shown.split() == ["ca.crt"]
    with made.under_load():
        for way, command in ENDS.items():
            began, former = time.monotonic(), min(executors(made))
            made.space.kubectl(*(each.format(former) for each in command))
            wait_replaced(made, former)
            made.wait_rows(made.sent + 1)
            record(f"executor {way} to rows of the next", time.monotonic() - began, NEXT_ROW_S)
        driver, its_executors = made.uid(), set(executors(made))
        made.space.kubectl("delete", made.pod, "--grace-period=0", "--force")
        made.wait_other_pod(driver)
        wait_for(lambda: executors(made), its_executors.isdisjoint, NEXT_ROW_S)
        made.wait_rows(made.sent + 1)
    made.check()
    batch = made.space.get(made.reference)["status"]["lastBatch"]
    assert batch["number"] > 0
    record("running pipeline with executors deleted", made.delete(), DELETED_S)
    wait_for(lambda: executors(made), lambda found: not found)


@pytest.mark.slow
def test_a_queue_and_then_its_running_pipeline(bus: Bus) -> None:
    made = Pipeline(bus, "first")
    made.send()
    made.check()
    record("queue of a running pipeline deleted", bus.space.delete("sbq/first"), DELETED_S)
    bus.space.wait_condition(made.reference, "Ready", "False", "EntityNotReady")
    record("pipeline deleted after its queue", made.delete(), DELETED_S)
    assert made.group() is None
    assert not made.has_rule()


@pytest.mark.slow
def test_a_bus_and_then_its_running_pipeline(bus: Bus) -> None:
    made = Pipeline(bus, "second")
    made.send()
    made.check()
    record("bus of a running pipeline deleted", bus.space.delete(f"sbns/{BUS}"), DELETED_S)
    bus.space.wait_condition(made.reference, "Ready", "False", "OwnerNotReady")
    record("pipeline deleted after its bus", made.delete(), DELETED_S)
    wait_for(lambda: bus.space.exists(made.pod), lambda found: not found)


@pytest.mark.slow
def test_a_cluster_namespace_with_a_running_pipeline(operator: None) -> None:
    with _shop("pipelines-gone", "orders") as bus:
        made = Pipeline(bus, "orders")
        made.send()
        made.check()
        began = time.monotonic()
        kubectl("delete", "namespace", bus.space.name, f"--timeout={2 * DELETED_S:.0f}s")
        record("cluster namespace with a pipeline deleted", time.monotonic() - began, 2 * DELETED_S)
