"""Pipelines on a bus that was restored from a backup; `test_spark` runs them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusReceiver
from pyspark.sql import SparkSession

from postbus.process.embedded import EmbeddedPostgres
from postbus_spark.jobs.failures import ExitCode, exit_code, shown
from postbus_spark.jobs.main import main
from postbus_spark.lake.layout import TableAhead
from tests.conftest import TEMPLATE, dsn_of, make_database, run_psql
from tests.edge.bus_thread import RULES, BusThread
from tests.pipeline.lake import Lake
from tests.pipeline.pipelines import TRANSFORM, Pipe, order

DATABASE, BACKUP = "restored_pipeline", "backup_of_pipeline"
SENT = "select sku as message_id, to_json(struct(price)) as body from priced"


class Site:
    """A bus that ends and begins again, and a pipeline from a queue to a table and a queue."""

    def __init__(self, server: EmbeddedPostgres, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._queues: list[str] = []
        make_database(server, DATABASE, template=TEMPLATE)

    @contextmanager
    def running(self) -> Iterator[Pipe]:
        bus = BusThread(dsn_of(self._server, DATABASE), has_usual_port=False)
        bus.start()
        try:
            if not self._queues:
                self._queues = [bus.queue(), bus.queue()]
                Lake(bus, self._queues[0], self._folder).create(kind="drain")
            pipe = Pipe(Lake(bus, self._queues[0], self._folder))
            pipe.rule = RULES[0].name
            pipe.spec["transform"] = {"sql": TRANSFORM["sql"] | {"sent": SENT}}
            pipe.spec["sinks"].append({"from": "sent", "queue": self._queues[1]})
            yield pipe
        finally:
            bus.stop()

    def back_up(self) -> None:
        make_database(self._server, BACKUP, template=DATABASE)

    def restore(self) -> None:
        run_psql(self._server, f"drop database {DATABASE}")
        make_database(self._server, DATABASE, template=BACKUP)

    def sent(self, pipe: Pipe) -> list[str]:
        """Return the ids of the messages that the pipeline has sent."""
        with pipe.lake.bus.client() as client:
            receiver: ServiceBusReceiver
            with client.get_queue_receiver(self._queues[1]) as receiver:
                return [str(each.message_id) for each in receiver.peek_messages(50)]


@pytest.fixture
def site(postgres_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[Site]:
    yield Site(postgres_server, tmp_path)
    for name in (DATABASE, BACKUP):
        run_psql(postgres_server, f"drop database {name}")


class RestoreTests:
    """What a pipeline does when its bus has forgotten what table and checkpoint know."""

    @pytest.mark.thorough
    def test_a_restored_bus_stops_a_pipeline_until_a_reset(
        self, spark: SparkSession, site: Site
    ) -> None:
        with site.running() as pipe:
            pipe.lake.send(order("a"), order("b"))
            pipe.run(spark)
            pipe.lake.send(order("waits"))
        site.back_up()
        with site.running() as pipe:
            pipe.lake.send(order("lost"))
            pipe.run(spark)
            assert site.sent(pipe) == ["a", "b", "waits", "lost"]
        site.restore()
        with site.running() as pipe:
            for _ in range(2):
                with pytest.raises(Exception, match="Start with an empty checkpoint") as failed:
                    pipe.run(spark)
                assert exit_code(failed.value) is ExitCode.STOPPED
                assert "BusRestored: " in shown(failed.value)
            shutil.rmtree(pipe.checkpoint)
            with pytest.raises(TableAhead, match="the bus was restored from a backup"):
                pipe.run(spark)
            assert pipe.skus() == ["a", "b", "lost", "waits"]
            assert site.sent(pipe) == ["a", "b"]
            assert main(["reset", str(pipe.file)]) == 0
            pipe.lake.send(order("new"))
            pipe.run(spark)
            # The bus has the message that waited and not what came of it, so both sinks get it.
            assert pipe.skus() == ["a", "b", "lost", "new", "waits", "waits"]
            assert site.sent(pipe) == ["a", "b", "waits", "new"]
            assert pipe.lake.group().plan.is_settled
            assert main(["verify", str(pipe.file)]) == 0
