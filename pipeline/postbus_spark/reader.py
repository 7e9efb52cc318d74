"""Reads as a batch, and what both readers do in executors.

A batch read looks at a group without claiming, planning or settling anything: it gets the messages
from the group's place on, and a second one gets them again. Modes without a group get what is
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from postbus_spark.schema import check_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from postbus.contract.bulk import ReaderGroup
    from postbus_spark.client import GroupClient
    from postbus_spark.options import Options
    from postbus_spark.rows import RowRange


class RangePartition(InputPartition):
    """One task: a range of a partition of the entity."""

    def __init__(self, value: RowRange) -> None:
        super().__init__(value)


class BatchReader(DataSourceReader):
    """The reader of `spark.read`. It is pickled for executors: it has neither key nor client."""

    def __init__(self, options: Options, schema: StructType) -> None:
        """Raises `InvalidSchema`."""
        check_schema(schema)
        self.options = options
        self.schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return tasks for what can be read, at least as many as `minPartitions`."""
        from postbus_spark.batches import row_ranges

        return [
            RangePartition(each) for each in row_ranges(self.options, self.options.min_partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task, in an executor."""
        return read_task(self.schema, partition)


def read_task(schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task. Spark makes one without a range if there is none."""
    if not isinstance(partition, RangePartition):
        return iter(())
    from pyspark.sql.pandas.types import to_arrow_schema

    from postbus_spark.batches import decoded

    return decoded(partition.value, to_arrow_schema(schema, timezone="UTC"))


def read_parts(
    parts: Sequence[RowRange], names: Sequence[str], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield these columns of the parts that have the numbers in the rows, in an executor."""
    from postbus_spark.batches import decoded
    from postbus_spark.schema import arrow_schema

    schema = arrow_schema(names)
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield from decoded(parts[number], schema)


def tasks(
    client: GroupClient,
    group: ReaderGroup,
    ranges: Mapping[int, tuple[int, int]],
    count: int,
) -> list[InputPartition]:
    """Return the tasks that read ranges."""
    return [RangePartition(each) for each in client.row_ranges(group, ranges, count)]
