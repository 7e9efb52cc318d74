"""The messages of a pipeline's sources: as streams, as those of a batch, and without any.

Spark hands one frame to `foreachBatch`: of several sources it has the rows of all, with the name of
theirs in the column `source`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, functions

from postbus_spark.jobs.arrangement import arranged, kept_by
from postbus_spark.jobs.frames import SOURCE, InvalidPipeline, check_sinks, frames_of
from postbus_spark.reader import read_parts
from postbus_spark.schema import ddl, default_columns

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postbus.contract.bulk import ReaderGroup
    from postbus.contract.pipeline import PipelineSpec
    from postbus_spark.jobs.readers import Reader


def streams_of(spark: SparkSession, readers: Sequence[Reader]) -> dict[str, DataFrame]:
    """Return the messages of each source."""
    frames = {
        reader.source.name: spark.readStream.format("postbus").options(**reader.options).load()
        for reader in readers
    }
    return _tagged(frames)


def empty_streams(spark: SparkSession, spec: PipelineSpec) -> dict[str, DataFrame]:
    """Return streams with the columns of messages, to check queries without a bus."""
    columns = [
        functions.lit(None).cast(column.sql_type).alias(column.name)
        for column in default_columns("map", is_raw_included=False)
    ]
    rate = spark.readStream.format("rate")
    return _tagged({source.name: rate.load().select(*columns) for source in spec.sources})


def _tagged(frames: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
    if len(frames) == 1:
        return dict(frames)
    return {name: frame.withColumn(SOURCE, functions.lit(name)) for name, frame in frames.items()}


def joint(frames: Mapping[str, DataFrame]) -> DataFrame:
    """Return the rows of all sources."""
    return reduce(DataFrame.unionByName, frames.values())


def parted(spec: PipelineSpec, rows: DataFrame) -> dict[str, DataFrame]:
    """Return the rows of each source."""
    if len(spec.sources) == 1:
        return {spec.source.name: rows}
    return {
        source.name: rows.where(functions.col(SOURCE) == source.name) for source in spec.sources
    }


def planned_rows(spark: SparkSession, reader: Reader, group: ReaderGroup) -> DataFrame:
    """Return the messages that a group has planned, as the reader of its epoch."""
    columns = default_columns("map", is_raw_included=False)
    names = [column.name for column in columns]
    ranges = {} if group.plan.is_settled else group.plan.ranges
    if not ranges:
        return spark.createDataFrame([], ddl(columns))
    parts = reader.client.row_ranges(group, ranges, spark.sparkContext.defaultParallelism)
    numbers = spark.range(0, len(parts), 1, len(parts))
    return numbers.mapInArrow(partial(read_parts, parts, names), ddl(columns))


def batch_messages(
    spark: SparkSession, readers: Sequence[Reader], groups: Sequence[ReaderGroup]
) -> dict[str, DataFrame]:
    """Return the messages of each source that are planned now."""
    return _tagged(
        {
            reader.source.name: planned_rows(spark, reader, group)
            for reader, group in zip(readers, groups, strict=True)
        }
    )


# --- checks -------------------------------------------------------------------------------------


def check_frames(spec: PipelineSpec, spark: SparkSession) -> dict[str, DataFrame]:
    """Return the frames of a batch without rows. Raises `InvalidPipeline`."""
    if spec.is_stateful:
        frames = frames_of(spec, empty_streams(spark, spec))
        arranged(spec, frames)
        check_sinks(spec, frames)
        return frames
    columns = ddl(default_columns("map", is_raw_included=False))
    empty = {source.name: spark.createDataFrame([], columns) for source in spec.sources}
    frames = frames_of(spec, _tagged(empty))
    check_sinks(spec, frames)
    is_sql = spec.transform is not None and spec.transform.sql is not None
    if is_sql and len(spec.sources) > 1:
        _check_joins(spec, frames_of(spec, empty_streams(spark, spec)))
    return frames


def _check_joins(spec: PipelineSpec, streams: Mapping[str, DataFrame]) -> None:
    for name in {sink.origin for sink in spec.sinks}:
        if "Join" in kept_by(streams[name]).states:
            raise InvalidPipeline(
                f"spec.transform.sql.{name}",
                "it joins sources batch by batch, so rows of different batches would never meet:"
                " give each of these sources a watermark",
            )
