"""Pipelines on a real API server, with a real broker behind their bus.

Controllers and nodes are missing: what they would say of pods is written by the tests.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from kubernetes.aio.client import Configuration

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.bus.access import open_sessions
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.kube.resource_types import (
    CLUSTER_NAMESPACES,
    CONFIG_MAPS,
    CRON_JOBS,
    JOBS,
    PODS,
    RESOURCES,
    ROLE_BINDINGS,
    SECRETS,
    SERVICE_ACCOUNTS,
    STATEFUL_SETS,
)
from postbus_operator.pipelines.reconciler import reconcile_pipeline
from postbus_spark.jobs.documents import read_pipeline
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus
from tests.kube.api_server import ApiServer
from tests.kube.clients import configuration_of
from tests.kube.operator_run import Run, eventually, leading
from tests.kube.pipeline_shop import (
    NAME,
    begins,
    completes,
    ends,
    fails,
    found,
    groups,
    has,
    is_gone,
    is_suspended,
    jobs,
    lag,
    make_pipeline,
    message,
    names,
    replicas,
    rights,
    runs,
    say,
    send,
    started,
)
from tests.kube.shop import MERGE, PERIODS, Shop
from tests.operator.live_bus import advance, leads

pytestmark = pytest.mark.slow

RECONCILERS = {"Queue": reconcile_entity, "Pipeline": reconcile_pipeline}
EPOCHS = itertools.count(1)


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "kube_pipelines", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("broker")
    with controlled_bus(dsn_of(postgres_server, "kube_pipelines"), folder) as bus:
        yield bus


@pytest.fixture
async def configuration(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Configuration:
    return await configuration_of(server, monkeypatch)


@pytest.fixture
def shop(server: ApiServer, running: ControlledBus) -> Iterator[Shop]:
    """A cluster namespace whose pipelines leave no rule: a bus has twelve at most."""
    made = Shop(server, running)
    authority = base64.b64encode(b"the authority of the bus").decode()
    metadata = {"name": "bus-ca", "labels": {"postbus.dev/watch": "true"}}
    server.request(
        "POST", SECRETS.path(made.name), {"metadata": metadata, "data": {"ca.crt": authority}}
    )
    made.make("Namespace", "bus")
    yield made
    path = "/v1/authorization-rules"
    for each in running.caller.get(path).body["items"]:
        if each["name"].startswith("pipeline."):
            running.caller.delete(f"{path}/{each['name']}")


@asynccontextmanager
async def operator(configuration: Configuration, shop: Shop, **settings: Any) -> AsyncIterator[Run]:
    async with leading(
        configuration,
        RECONCILERS,
        open_sessions=partial(open_sessions, periods=PERIODS),
        control_url=lambda bus: shop.running.caller.address,
        epoch=next(EPOCHS),
        still_leads=leads,
        **({"namespaces": (shop.name,)} | settings),
    ) as run:
        yield run


# --- continuous ---------------------------------------------------------------------------------


async def test_a_continuous_pipeline_lives_from_its_queue_to_its_deletion(
    configuration: Configuration, shop: Shop, tmp_path: Path
) -> None:
    async with operator(configuration, shop):
        make_pipeline(shop)
        await has(shop, "False", "EntityNotReady")
        assert shop.entity("orders") in message(shop)
        assert groups(shop) == {}
        shop.make("Queue", "orders")
        await started(shop)
        assert groups(shop) == {"prices": "drain"}
        assert shop.get("Pipeline", "prices")["status"]["readerGroup"] == "prices"
        assert rights(shop) == ["Listen"]

        (tmp_path / "pipeline.yaml").write_text(found(shop, CONFIG_MAPS)["data"]["pipeline.yaml"])
        document = read_pipeline(tmp_path / "pipeline.yaml")
        assert document.spec.source.entity == shop.entity("orders")
        runs(shop)
        await has(shop, "True", "Running")

        shop.change("Pipeline", "prices", spec={"suspend": True})
        await has(shop, "False", "Suspended")
        assert replicas(shop) == 0
        assert groups(shop) == {"prices": "drain"}
        shop.change("Pipeline", "prices", spec={"suspend": False})
        await eventually(lambda: replicas(shop) == 1)

        shop.delete("Pipeline", "prices")
        blocked = partial(shop.condition, "Pipeline", "prices", "DeletionBlocked")
        await eventually(lambda: blocked() == ("True", "DriverEnds"))
        assert replicas(shop) == 0
        assert groups(shop) == {"prices": "drain"}
        say(shop, STATEFUL_SETS, NAME, replicas=0, availableReplicas=0, readyReplicas=0)
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
    assert groups(shop) == {}
    assert rights(shop) is None
    assert is_gone(shop, SECRETS, NAME)


async def test_the_pod_is_restricted_and_has_a_key_that_is_mounted(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        shop.make("Queue", "copies")
        sinks = [{"from": "orders", "queue": shop.entity("copies")}]
        access = {"envFrom": [{"secretRef": {"name": "lake-access"}}]}
        make_pipeline(shop, sinks=sinks, runtime={"memory": "1536Mi", **access})
        await started(shop)
    assert rights(shop) == ["Listen", "Send"]
    stateful_set = found(shop, STATEFUL_SETS)
    [owner] = stateful_set["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Pipeline", "prices")
    pod = stateful_set["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    [container] = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "1536Mi"},
        "limits": {"memory": "1536Mi"},
    }
    assert container["envFrom"] == access["envFrom"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert "--driver-memory 512m" in variables["PYSPARK_SUBMIT_ARGS"]
    assert variables["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert variables["POSTBUS_CA_FILE"] == "/etc/postbus/connection/ca.crt"
    mounts = {each["mountPath"]: each.get("readOnly", False) for each in container["volumeMounts"]}
    assert mounts == {
        "/etc/postbus/pipeline": True,
        "/etc/postbus/connection": True,
        "/lake": False,
        "/tmp": False,
    }
    secret = found(shop, SECRETS)["data"]
    connection = base64.b64decode(secret["connectionString"]).decode()
    assert connection.startswith(f"Endpoint=sb://bus.{shop.name}.svc.cluster.local/;")
    assert "EntityPath" not in connection
    assert connection.partition("SharedAccessKey=")[2] not in str(stateful_set)


async def test_only_a_driver_with_executors_has_rights_on_the_api_server(
    configuration: Configuration, shop: Shop
) -> None:
    """The role is the chart's; here the operator may bind every one."""
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        for type in (SERVICE_ACCOUNTS, ROLE_BINDINGS):
            assert is_gone(shop, type, NAME)
        executor = {"cores": 2, "coreRequest": "500m", "memory": "1536Mi"}
        runtime = {"cores": 1, "executors": 3, "executor": executor}
        shop.change("Pipeline", "prices", spec={"runtime": runtime})
        pod = lambda: found(shop, STATEFUL_SETS)["spec"]["template"]["spec"]  # noqa: E731
        await eventually(lambda: pod().get("serviceAccountName") == NAME)
        said = "if executors can mount lake on"
        await eventually(lambda: said in message(shop, "Valid"))
        binding = found(shop, ROLE_BINDINGS)
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": NAME, "namespace": shop.name}
        ]
        assert binding["roleRef"]["name"] == "postbus-operator-driver"
        assert found(shop, SERVICE_ACCOUNTS)["automountServiceAccountToken"] is False
        assert pod()["automountServiceAccountToken"] is True
        template = json.loads(found(shop, CONFIG_MAPS)["data"]["executor.yaml"])
        restricted = {"metadata": {"name": "exec-1", **template["metadata"]}}
        place = f"{PODS.path(shop.name)}?dryRun=All"
        label = {"pod-security.kubernetes.io/enforce": "restricted"}
        path = CLUSTER_NAMESPACES.path(None, shop.name)
        shop.server.request("PATCH", path, {"metadata": {"labels": label}}, MERGE)
        shop.server.request("POST", place, template | restricted)

        shop.change("Pipeline", "prices", spec={"runtime": {"executors": 0}})
        await eventually(lambda: is_gone(shop, ROLE_BINDINGS, NAME))
        await eventually(lambda: is_gone(shop, SERVICE_ACCOUNTS, NAME))
        assert pod()["automountServiceAccountToken"] is False
        assert "executor.yaml" not in found(shop, CONFIG_MAPS)["data"]


@pytest.mark.parametrize(
    ("code", "reason", "also"),
    [
        (10, "ConfigurationError", "Stalled"),
        (1, "Retrying", "Reconciling"),
    ],
)
async def test_the_exit_code_of_a_run_says_who_is_needed(
    configuration: Configuration, shop: Shop, code: int, reason: str, also: str
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        template = found(shop, STATEFUL_SETS)["spec"]["template"]
        ends(shop, template, code, "StaleCheckpoint: older than the group")
        say(shop, STATEFUL_SETS, NAME, replicas=1, readyReplicas=0)
        await has(shop, "False", reason)
        assert f"exit code {code}: StaleCheckpoint: older than the group" in message(shop)
        assert shop.condition("Pipeline", "prices", also) == ("True", reason)
        assert shop.get("Pipeline", "prices")["status"]["exitCode"] == code
        runs(shop)
        await has(shop, "True", "Running")
        assert "exitCode" not in shop.get("Pipeline", "prices")["status"]


async def test_a_continuous_pipeline_that_needs_a_decision_ends_until_its_spec_changes(
    configuration: Configuration, shop: Shop
) -> None:
    words = "exit code 20: StaleCheckpoint: older than the group"
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        template = found(shop, STATEFUL_SETS)["spec"]["template"]
        ends(shop, template, 20, "StaleCheckpoint: older than the group")
        say(shop, STATEFUL_SETS, NAME, replicas=1, readyReplicas=0)
        await has(shop, "False", "DecisionNeeded")
        await eventually(lambda: replicas(shop) == 0)
        shop.server.request("DELETE", f"{PODS.path(shop.name, f'{NAME}-0')}?gracePeriodSeconds=0")
        say(shop, STATEFUL_SETS, NAME, replicas=0)
    before = shop.get("Pipeline", "prices")["status"]
    async with operator(configuration, shop) as run:
        await eventually(lambda: run.looked_at("prices") >= 1)
        assert shop.get("Pipeline", "prices")["status"] == before
        assert words in message(shop)
        assert shop.condition("Pipeline", "prices", "Stalled") == ("True", "DecisionNeeded")
        assert before["exitCode"] == 20
        stale = partial(shop.condition, "Pipeline", "prices", "StaleCheckpoint")
        assert stale() == ("True", "StaleCheckpoint")
        assert words in message(shop, "StaleCheckpoint")
        assert replicas(shop) == 0
        shop.change("Pipeline", "prices", spec={"suspend": True})
        await has(shop, "False", "Suspended")
        shop.change("Pipeline", "prices", spec={"suspend": False})
        await started(shop)
        assert stale() == ("", "")
        assert replicas(shop) == 1
        assert "exitCode" not in shop.get("Pipeline", "prices")["status"]


async def test_a_pipeline_shows_its_lag_and_has_a_condition_from_its_limit_on(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        send(shop, shop.entity("orders"))
        await advance(shop.running.caller, "PT15M")
        runs(shop)
        await has(shop, "True", "Running")
        await eventually(lambda: lag(shop) > (0, 0))
        assert lag(shop)[0] == 1
        assert lag(shop)[1] >= 15 * 60
        lagging = partial(shop.condition, "Pipeline", "prices", "Lagging")
        assert lagging() == ("True", "Behind")
        assert "600 s" in message(shop, "Lagging")
        shop.change("Pipeline", "prices", spec={"operatorSpec": {"maxLag": "PT1H"}})
        await eventually(lambda: lagging() == ("", ""))
        assert shop.condition("Pipeline", "prices") == ("True", "Running")


async def test_a_pipeline_that_lags_says_that_its_executors_do_not_start(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop, runtime={"executors": 1})
        await started(shop)
        template = json.loads(found(shop, CONFIG_MAPS)["data"]["executor.yaml"])
        metadata = {"metadata": {"name": "prices-exec-1", **template["metadata"]}}
        shop.server.request("POST", PODS.path(shop.name), template | metadata)
        full = {"type": "PodScheduled", "status": "False", "message": "1 Insufficient cpu"}
        say(shop, PODS, "prices-exec-1", phase="Pending", conditions=[full])
        send(shop, shop.entity("orders"))
        await advance(shop.running.caller, "PT15M")
        runs(shop)
        lagging = partial(shop.condition, "Pipeline", "prices", "Lagging")
        await eventually(lambda: lagging() == ("True", "ExecutorNotStarting"))
        assert message(shop, "Lagging").endswith("no node takes the pod: 1 Insufficient cpu")


async def test_a_restart_of_the_operator_writes_nothing(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        runs(shop)
        await has(shop, "True", "Running")
    before = shop.get("Pipeline", "prices"), found(shop, STATEFUL_SETS), found(shop, CONFIG_MAPS)
    async with operator(configuration, shop) as run:
        await eventually(lambda: run.looked_at("prices") >= 1)
    after = shop.get("Pipeline", "prices"), found(shop, STATEFUL_SETS), found(shop, CONFIG_MAPS)
    assert after == before


# --- once ---------------------------------------------------------------------------------------


async def test_a_pipeline_that_runs_once_is_a_job_for_each_document(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop, trigger={"once": True}, suspend=True)
        await has(shop, "False", "Suspended")
        [first] = jobs(shop)
        assert first["spec"]["suspend"] is True
        shop.change("Pipeline", "prices", spec={"suspend": False})
        await started(shop)
        [job] = jobs(shop)
        assert (job["metadata"]["uid"], job["spec"]["suspend"]) == (first["metadata"]["uid"], False)
        [rule, _] = job["spec"]["podFailurePolicy"]["rules"]
        assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [10, 20])

        template = job["spec"]["template"]
        ends(shop, template, 20, "DataLoss: messages are gone")
        over = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}
        now = "2026-01-01T00:00:00Z"
        going = {"type": "FailureTarget", "status": "True", "reason": "PodFailurePolicy"}
        say(shop, JOBS, job["metadata"]["name"], startTime=now, failed=1, conditions=[going, over])
        await has(shop, "False", "DecisionNeeded")
        shop.change("Pipeline", "prices", spec={"limits": {"maxAttempts": 6}})
        await eventually(lambda: names(shop) and job["metadata"]["name"] not in names(shop))
        [later] = names(shop)
        await has(shop, "False", "Starting")
        shop.change("Pipeline", "prices", spec={"trigger": {"once": None, "continuous": "PT1S"}})
        await eventually(lambda: names(shop) == [] and replicas(shop) == 1)
        shop.change("Pipeline", "prices", spec={"trigger": {"once": True, "continuous": None}})
        await eventually(lambda: names(shop) == [later] and replicas(shop) == 0)


# --- schedules ----------------------------------------------------------------------------------

SCHEDULE: Final = {"schedule": "*/5 * * * *", "continuous": None, "once": None}


async def test_a_schedule_is_a_cron_job_whose_last_run_counts(
    configuration: Configuration, shop: Shop, tmp_path: Path
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop, trigger={"schedule": "*/5 * * * *"})
        await has(shop, "True", "Waiting")
        assert groups(shop) == {"prices": "drain"}
        (tmp_path / "pipeline.yaml").write_text(found(shop, CONFIG_MAPS)["data"]["pipeline.yaml"])
        assert read_pipeline(tmp_path / "pipeline.yaml").spec.trigger.once

        begins(shop, f"{NAME}-1")
        await has(shop, "True", "Running")
        completes(shop, f"{NAME}-1")
        await has(shop, "True", "Waiting")
        fails(shop, begins(shop, f"{NAME}-2"), 20, "DataLoss: messages are gone")
        await has(shop, "False", "DecisionNeeded")
        assert "DataLoss: messages are gone" in message(shop)
        assert shop.condition("Pipeline", "prices", "Stalled") == ("True", "DecisionNeeded")
        assert shop.get("Pipeline", "prices")["status"]["exitCode"] == 20

        shop.change("Pipeline", "prices", spec={"trigger": {"schedule": "61 * * * *"}})
        valid = partial(shop.condition, "Pipeline", "prices", "Valid")
        await eventually(lambda: valid() == ("False", "InvalidSpec"))
        assert "end of range (61)" in message(shop, "Valid")


async def test_a_run_of_a_schedule_ends_with_its_suspension_its_document_and_its_pipeline(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop, trigger={"schedule": "*/5 * * * *"})
        await has(shop, "True", "Waiting")
        first, second, third = (f"{NAME}-{number}" for number in range(1, 4))
        begins(shop, first)
        completes(shop, first)
        begins(shop, second)
        await has(shop, "True", "Running")

        shop.change("Pipeline", "prices", spec={"suspend": True})
        await has(shop, "False", "Suspended")
        assert is_suspended(shop, CRON_JOBS)
        assert is_suspended(shop, JOBS, second)
        assert not is_suspended(shop, JOBS, first)
        shop.change("Pipeline", "prices", spec={"suspend": False})
        await eventually(lambda: not is_suspended(shop, JOBS, second))
        assert not is_suspended(shop, CRON_JOBS)

        shop.change("Pipeline", "prices", spec={"limits": {"maxAttempts": 6}})
        await eventually(lambda: names(shop) == [first])
        await has(shop, "True", "Waiting")
        begins(shop, third)
        await has(shop, "True", "Running")
        shop.delete("Pipeline", "prices")
        blocked = partial(shop.condition, "Pipeline", "prices", "DeletionBlocked")
        await eventually(lambda: blocked() == ("True", "DriverEnds"))
        assert is_suspended(shop, CRON_JOBS)
        assert is_suspended(shop, JOBS, third)
        assert groups(shop) == {"prices": "drain"}
        say(shop, JOBS, third, active=0, ready=0)
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
    assert groups(shop) == {}


async def test_a_pipeline_that_gets_or_loses_a_schedule_leaves_its_former_workload(
    configuration: Configuration, shop: Shop
) -> None:
    """A version before had a StatefulSet for schedules, too."""
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        shop.change("Pipeline", "prices", spec={"trigger": SCHEDULE})
        await has(shop, "True", "Waiting")
        assert replicas(shop) == 0
        begins(shop, f"{NAME}-1")
        await has(shop, "True", "Running")
        shop.change("Pipeline", "prices", spec={"trigger": {"schedule": None, "once": True}})
        await eventually(lambda: is_gone(shop, CRON_JOBS, NAME))
        await eventually(lambda: len(names(shop)) == 1 and f"{NAME}-1" not in names(shop))


async def test_a_replay_has_a_key_and_no_reader_group(
    configuration: Configuration, shop: Shop
) -> None:
    """Neither has a deletion one to drop, also when the result of a look is lost."""
    orders = {"name": "orders", "queue": shop.entity("orders"), "mode": "history"}
    table = {"format": "parquet", "path": "/lake/orders"}
    sinks = [{"from": "orders", "queue": shop.entity("copies"), "rate": 500}]
    once = {"trigger": {"once": True}, "checkpoint": None, "sinks": sinks}
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        shop.make("Queue", "copies")
        make_pipeline(shop, sources=[orders], **once)
        make_pipeline(shop, "other", sources=[orders], **once)
        make_pipeline(shop, "table", sources=[{"name": "orders", "table": table}], **once)
        for name in ("prices", "other", "table"):
            await started(shop, name)
        assert len(jobs(shop)) == 3
        assert rights(shop) == ["Listen", "Send"]
        assert rights(shop, "table") == ["Send"]
        assert groups(shop) == {}
        assert "readerGroup" not in shop.get("Pipeline", "prices")["status"]
        [job] = [each for each in jobs(shop) if each["metadata"]["name"].startswith(NAME)]
        [container] = job["spec"]["template"]["spec"]["containers"]
        writable = {
            each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")
        }
        assert writable == {"/lake", "/tmp"}
    path = RESOURCES["Pipeline"].path(shop.name, "prices", "status")
    shop.server.request("PATCH", path, {"status": {"conditions": None}}, MERGE)
    async with operator(configuration, shop):
        for name in ("prices", "other", "table"):
            shop.delete("Pipeline", name)
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
        await eventually(lambda: shop.is_gone("Pipeline", "table"))
    assert rights(shop) is None
    assert rights(shop, "table") is None


# --- what is refused ----------------------------------------------------------------------------


async def test_the_later_of_two_pipelines_with_one_group_is_invalid_until_the_other_goes(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        source = {"name": "o", "queue": shop.entity("ORDERS"), "mode": "drain"}
        sinks = [{"from": "o", "deadLetter": "o"}]
        sources = [source | {"readerGroup": "prices"}]
        make_pipeline(shop, "twin", sources=sources, sinks=sinks)
        valid = partial(shop.condition, "Pipeline", "twin", "Valid")
        await eventually(lambda: valid() == ("False", "GroupTaken"))
        assert f"Pipeline {shop.name}/prices reads" in message(shop, "Valid", "twin")
        shop.delete("Pipeline", "prices")
        await eventually(lambda: valid() == ("True", "Accepted"))
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
        await started(shop, "twin")
        assert groups(shop) == {"prices": "drain"}


async def test_the_later_of_two_pipelines_with_one_checkpoint_is_invalid(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        make_pipeline(
            shop,
            "other",
            checkpoint={"path": "/mnt/checkpoints/prices"},
            volumes=[{"claimName": "lake", "mountPath": "/mnt"}],
            sinks=[{"from": "orders", "deadLetter": "orders"}],
        )
        valid = partial(shop.condition, "Pipeline", "other", "Valid")
        await eventually(lambda: valid() == ("False", "CheckpointTaken"))
        assert f"Pipeline {shop.name}/prices" in message(shop, "Valid", "other")
    assert groups(shop) == {"prices": "drain"}


async def test_what_the_document_alone_shows_is_named_field_by_field(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(
            shop,
            sinks=[{"from": "priced", "deadLetter": "orders"}],
            transform={"sql": {"cheap": "select 1"}},
        )
        valid = partial(shop.condition, "Pipeline", "prices", "Valid")
        await eventually(lambda: valid() == ("False", "InvalidSpec"))
    text = message(shop, "Valid")
    assert "spec.sinks.0.from: there is no priced" in text
    assert "spec.transform.sql.cheap: its rows go nowhere" in text
    assert groups(shop) == {}


async def test_a_pipeline_elsewhere_gets_no_key_of_the_bus(
    configuration: Configuration, shop: Shop
) -> None:
    """Its key would be for the queues of all tenants."""
    elsewhere = f"{shop.name}-tenant"
    shop.server.request("POST", "/api/v1/namespaces", {"metadata": {"name": elsewhere}})
    shop.change("Namespace", "bus", spec={"operatorSpec": {"allowedNamespaces": {"from": "All"}}})
    async with operator(configuration, shop, namespaces=(shop.name, elsewhere)):
        shop.make("Queue", "orders")
        tenant = copy.copy(shop)
        tenant.name = elsewhere
        owner = {"name": "bus", "namespace": shop.name}
        source = {"name": "orders", "queue": shop.entity("orders"), "mode": "drain"}
        make_pipeline(tenant, owner=owner, sources=[source])
        resolved = partial(tenant.condition, "Pipeline", "prices", "OwnerResolved")
        await eventually(lambda: resolved() == ("False", "NotPermitted"))
    assert shop.name in message(tenant)
    assert groups(shop) == {}
    assert rights(tenant) is None


async def test_resources_elsewhere_do_not_hold_up_a_pipeline_of_the_bus(
    configuration: Configuration, shop: Shop
) -> None:
    """Neither an older claim to its reader group, nor one to its queue that is not admitted."""
    elsewhere = f"{shop.name}-other"
    shop.server.request("POST", "/api/v1/namespaces", {"metadata": {"name": elsewhere}})
    async with operator(configuration, shop, namespaces=(shop.name, elsewhere)):
        shop.make("Queue", "orders")
        await eventually(lambda: shop.is_ready("Queue", "orders"))
        other = copy.copy(shop)
        other.name = elsewhere
        owner = {"name": "bus", "namespace": shop.name}
        other.make("Queue", "orders", owner=owner, entityName=shop.entity("orders"))
        source = {"name": "orders", "queue": shop.entity("orders"), "mode": "drain"}
        make_pipeline(other, owner=owner, sources=[source])
        for kind, name in (("Queue", "orders"), ("Pipeline", "prices")):
            resolved = partial(other.condition, kind, name, "OwnerResolved")
            await eventually(lambda resolved=resolved: resolved()[0] == "False")
        make_pipeline(shop)
        await started(shop)
        shop.delete("Pipeline", "prices")
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
    assert groups(shop) == {}


async def test_a_group_is_not_left_to_a_pipeline_that_cannot_use_it(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
        source = {"name": "orders", "queue": shop.entity("orders"), "readerGroup": "prices"}
        table = {"format": "parquet", "path": "/lake/tapped"}
        make_pipeline(shop, "tap", sources=[source], sinks=[{"from": "orders", "table": table}])
        valid = partial(shop.condition, "Pipeline", "tap", "Valid")
        await eventually(lambda: valid() == ("False", "GroupTaken"))
        shop.delete("Pipeline", "prices")
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
        await started(shop, "tap")
    assert groups(shop) == {"prices": "tap"}


async def test_a_deletion_leaves_a_group_that_another_pipeline_has_made_meanwhile(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop, suspend=True)
        await has(shop, "False", "Suspended")  # no look without an event from here on
        group = {"entity": shop.entity("orders"), "subQueue": "main", "name": "prices"}
        for request, body in (("delete", group), ("create", group | {"kind": "tap"})):
            answer = shop.running.caller.post(f"/v1/reader-groups/{request}", body)
            assert answer.status in {200, 201}
        shop.delete("Pipeline", "prices")
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
    assert groups(shop) == {"prices": "tap"}


async def test_an_object_of_somebody_else_is_left_alone(
    configuration: Configuration, shop: Shop
) -> None:
    foreign = {"metadata": {"name": NAME}, "data": {"mine": "1"}}
    shop.server.request("POST", CONFIG_MAPS.path(shop.name), foreign)
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        valid = partial(shop.condition, "Pipeline", "prices", "Valid")
        await eventually(lambda: valid() == ("False", "NameTaken"))
    assert found(shop, CONFIG_MAPS)["data"] == {"mine": "1"}
    assert is_gone(shop, STATEFUL_SETS, NAME)


async def test_a_group_of_another_kind_is_left_alone(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        await eventually(lambda: shop.is_ready("Queue", "orders"))
        body = {"entity": shop.entity("orders"), "name": "prices", "kind": "tap"}
        assert shop.running.caller.post("/v1/reader-groups/create", body).status == 201
        make_pipeline(shop)
        valid = partial(shop.condition, "Pipeline", "prices", "Valid")
        await eventually(lambda: valid() == ("False", "GroupKindDiffers"))
        shop.delete("Pipeline", "prices")
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
    assert groups(shop) == {"prices": "tap"}


async def test_each_source_of_a_pipeline_has_a_group(
    configuration: Configuration, shop: Shop
) -> None:
    """The group that another pipeline reads with is that one's when the first is deleted."""
    orders, returns = (shop.entity(name) for name in ("orders", "returns"))
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        shop.make("Queue", "returns")
        late = {"name": "returns", "queue": returns, "readerGroup": "late"}
        drained = {"name": "orders", "queue": orders, "mode": "drain"}
        make_pipeline(shop, sources=[drained, late])
        await started(shop)
        assert groups(shop) == {"prices": "drain", "late": "tap"}
        table = {"from": "returns", "table": {"format": "parquet", "path": "/lake/returns"}}
        make_pipeline(shop, "others", sources=[late], sinks=[table])
        valid = partial(shop.condition, "Pipeline", "others", "Valid")
        await eventually(lambda: valid() == ("False", "GroupTaken"))
        shop.delete("Pipeline", "prices")
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
    assert groups(shop) == {"late": "tap"}


# --- deletion -----------------------------------------------------------------------------------


async def test_a_retained_group_outlives_its_pipeline(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop, operatorSpec={"deletionPolicy": "Retain"})
        await started(shop)
        shop.delete("Pipeline", "prices")
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
    assert groups(shop) == {"prices": "drain"}
    assert rights(shop) is None


async def test_a_deletion_waits_for_the_bus_unless_the_bus_goes(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
    shop.server.request("DELETE", SECRETS.path(shop.name, "bus-control-token"))
    shop.delete("Pipeline", "prices")
    async with operator(configuration, shop):
        blocked = partial(shop.condition, "Pipeline", "prices", "DeletionBlocked")
        await eventually(lambda: blocked() == ("True", "BackendUnavailable"))
        assert "postbus.dev/force-release=true" in message(shop, "DeletionBlocked")
        shop.delete("Namespace", "bus")
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))


async def test_a_deletion_drops_what_a_look_has_made_whose_result_is_lost(
    configuration: Configuration, shop: Shop
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders")
        make_pipeline(shop)
        await started(shop)
    path = RESOURCES["Pipeline"].path(shop.name, "prices", "status")
    lost = {"status": {"conditions": None, "binding": None}}
    assert shop.server.request("PATCH", path, lost, MERGE)["status"]["readerGroup"] == "prices"
    shop.server.request("DELETE", SECRETS.path(shop.name, NAME))
    shop.delete("Pipeline", "prices")
    async with operator(configuration, shop):
        await eventually(lambda: shop.is_gone("Pipeline", "prices"))
    assert groups(shop) == {}
    assert rights(shop) is None
