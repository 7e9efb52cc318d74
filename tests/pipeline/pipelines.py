"""A pipeline on a real bus: its document, its runs and what is in its table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deltalake
import pyarrow.dataset as ds
import yaml
from pyspark.sql import SparkSession

from postbus.contract.pipeline import PipelineDocument
from postbus_spark.jobs.documents import read_pipeline
from postbus_spark.jobs.readers import readers_of
from postbus_spark.jobs.runner import Runner
from postbus_spark.jobs.schedules import SYSTEM, Clock
from postbus_spark.lake.iceberg import loaded
from postbus_spark.lake.layout import CatalogTable
from tests.pipeline.lake import GROUP, Lake

PRICED = "select body.sku, body.amount * 2 as price, partition, position, enqueued_time from orders"
TRANSFORM = {
    "sql": {
        "priced": f"{PRICED} where body.amount > 0",
        "rejected": "select partition, position, 'NoPrice' as reason from orders"
        " where not coalesce(body.amount > 0, false)",
    }
}


def order(sku: str, amount: object = 1) -> bytes:
    return f'{{"sku": "{sku}", "amount": {amount}}}'.encode()


class Pipe:
    """Orders of a queue: priced ones into a table, others to the dead-letter queue."""

    def __init__(self, lake: Lake, table_format: str = "parquet", **spec: Any) -> None:
        self.lake = lake
        self.format = table_format
        self.table = lake.folder / "priced"
        self.place: dict[str, Any] = {"format": table_format, "path": str(self.table)}
        if table_format == "iceberg":
            uri = f"sqlite:///{lake.folder}/catalog/lake.db"
            self.place |= {"name": "shop.priced", "catalog": {"uri": uri}}
        self.checkpoint = lake.folder / "checkpoint"
        self.file = lake.folder / "pipeline.yaml"
        self.rule = "listener"
        self.spec: dict[str, Any] = {
            "sources": [
                {
                    "name": "orders",
                    "queue": lake.entity,
                    "mode": "drain",
                    "readerGroup": GROUP,
                    "body": {"json": "sku string, amount double"},
                }
            ],
            "transform": TRANSFORM,
            "sinks": [
                {"from": "priced", "table": self.place},
                {"from": "rejected", "deadLetter": "orders"},
                {"from": "malformed", "deadLetter": "orders"},
            ],
            "trigger": {"once": True},
            "checkpoint": {"path": str(self.checkpoint)},
            **spec,
        }

    def document(self) -> PipelineDocument:
        write_document(self.file, self.spec)
        return read_pipeline(self.file)

    def runner(self, *, is_tried_again: bool = False, clock: Clock = SYSTEM) -> Runner:
        document = self.document()
        readers = readers_of(document, self.lake.connection_file(self.rule))
        return Runner(document, readers, is_tried_again=is_tried_again, clock=clock)

    def run(self, spark: SparkSession, *, is_tried_again: bool = False) -> None:
        self.runner(is_tried_again=is_tried_again).run(spark)

    def rows(self) -> list[dict[str, Any]]:
        """Return what plain pyarrow reads, deltalake, or pyiceberg."""
        if self.format == "iceberg":
            table = loaded(CatalogTable(self.place["catalog"]["uri"], self.place["name"], None))
            return [] if table is None else table.scan().to_arrow().to_pylist()
        if self.format == "delta":
            is_made = deltalake.DeltaTable.is_deltatable(str(self.table))
            table = deltalake.DeltaTable(self.table).to_pyarrow_table() if is_made else None
            return [] if table is None else table.to_pylist()
        if not self.table.exists():
            return []
        return ds.dataset(self.table, partitioning="hive").to_table().to_pylist()

    def skus(self) -> list[str]:
        return sorted(row["sku"] for row in self.rows())


def write_document(file: Path, spec: Mapping[str, Any], **more: Any) -> None:
    document = {
        "apiVersion": "postbus.dev/v1alpha1",
        "kind": "Pipeline",
        "metadata": {"name": "price-orders"},
        "spec": spec,
        **more,
    }
    file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
