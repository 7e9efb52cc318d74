"""Messages as decoded record batches, without Spark and without a JVM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from postbus_spark.decode import Decoder, Place
from postbus_spark.errors import DataLoss, GroupNotFound, InvalidOption
from postbus_spark.guard import check_mode, starts_of
from postbus_spark.offsets import check_offset
from postbus_spark.options import Options, read_options
from postbus_spark.rows import RowRange, read_rows
from postbus_spark.schema import arrow_schema, default_columns

if TYPE_CHECKING:
    import pyarrow as pa

    from postbus.contract.bulk import ReadableRanges, ReaderGroup
    from postbus_spark.client import GroupClient


BATCH_BYTES: Final = 4 << 20
"""Stored rows that are decoded together, unless one has more. Source: measured, larger ones gain
little."""


def read_batches(columns: Sequence[str] | None = None, **options: str) -> Iterator[pa.RecordBatch]:
    """Yield the messages from a reader group's place on, as record batches of about 4 MiB.

    Options are those of Spark: `read_batches(entity="orders", readerGroup="lake")`. The group stays
    where it is. With the mode peek or history: what is there, without a group. Raises one of
    `postbus_spark.errors`.
    """
    checked = read_options(options)
    if columns is None:
        columns = [
            column.name
            for column in default_columns(
                checked.properties_format,
                is_raw_included=checked.is_raw_included,
                is_history=checked.mode == "history",
            )
        ]
    schema = arrow_schema(columns)
    for each in row_ranges(checked, 1):
        yield from decoded(each, schema)


def row_ranges(options: Options, count: int) -> list[RowRange]:
    """Return what a batch reads, in about `count` ranges."""
    from postbus_spark.client import BrowseClient, GroupClient

    if options.is_groupless:
        return BrowseClient(options).row_ranges(count)
    client = GroupClient(options)
    group, ranges = readable(client, options)
    return client.row_ranges(group, ranges, count)


def readable(
    client: GroupClient, options: Options
) -> tuple[ReaderGroup, dict[int, tuple[int, int]]]:
    """Return the group and what a batch reads of each partition."""
    found = client.ranges()
    group = group_of(found, options)
    check_mode(group, options)
    if options.is_plan_only:
        raise InvalidOption("option endingOffsets: it is for streams, leave it out")
    if group.kind == "drain":
        raise InvalidOption(
            f"the reader group {group.name} drains {options.entity}, and a batch would settle"
            " nothing: read it as a stream, with the trigger availableNow to read what is there"
        )
    first = client.offset(group, starts_of(group.plan))
    if options.starting is not None:
        check_offset(options.starting, first)
        first = options.starting
    starts = lost_skipped(found, first.positions, options)
    ends = {each.partition: each.next_position for each in found.partitions}
    return group, {
        number: (start, max(start, ends.get(number, start))) for number, start in starts.items()
    }


def group_of(found: ReadableRanges, options: Options) -> ReaderGroup:
    """Return the group that was asked for. Raises `GroupNotFound`."""
    if found.group is None:
        raise GroupNotFound(f"{options.entity} has no reader group {options.reader_group}")
    return found.group


def lost_skipped(
    found: ReadableRanges, starts: Mapping[int, int], options: Options
) -> dict[int, int]:
    """Return where reading begins. Raises `DataLoss` if messages from there on are gone.

    Unless the option `failOnDataLoss` is false: then it begins with what is left.
    """
    lows = {each.partition: each.low for each in found.partitions}
    for number, start in sorted(starts.items()):
        if options.is_data_loss_fatal and start < lows.get(number, 0):
            raise DataLoss(
                f"messages of {options.entity} from position {start} of partition {number} on are"
                f" gone up to {lows[number]}: their retention ended before they were read"
            )
    return {number: max(start, lows.get(number, 0)) for number, start in starts.items()}


def decoded(wanted: RowRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a range."""
    place = Place(wanted.entity, wanted.sub_queue, wanted.partition)
    decoder = Decoder(schema, place, has_present=wanted.selection is not None)
    for rows in _joined(read_rows(wanted, decoder.stored_columns)):
        yield decoder.decode(rows)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in fewer batches, since each one costs what hundreds of its rows do."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if held and size + batch.nbytes > BATCH_BYTES:
            yield from _one(held)
            held, size = [], 0
        held.append(batch)
        size += batch.nbytes
    if held:
        yield from _one(held)


def _one(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Return the rows as one batch; as several if they do not fit into one."""
    import pyarrow as pa

    return pa.Table.from_batches(batches).combine_chunks().to_batches() if batches[1:] else batches
