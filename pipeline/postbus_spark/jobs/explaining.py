"""What a pipeline does and where it is, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from postbus.contract.pipeline import ordered_queries
from postbus_spark.jobs.batches import tables_of
from postbus_spark.jobs.settling import last_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from postbus.contract.bulk import ReadableRanges
    from postbus.contract.pipeline import PipelineDocument, Sink


def explained(document: PipelineDocument, frames: Mapping[str, DataFrame]) -> Iterator[str]:
    """Yield the steps of a batch, and the columns of each output."""
    spec = document.spec
    source, limits = spec.source, spec.limits
    if spec.trigger.continuous_ms is not None:
        yield f"Every {spec.trigger.continuous_ms / 1000:g} s:"
    elif spec.trigger.schedule is not None:
        yield f"At the times of {spec.trigger.schedule} (UTC), for what is there:"
    else:
        yield "Once, for what is there:"
    bounds = [
        f"{most} {unit}"
        for most, unit in (
            (limits.max_messages_per_trigger, "messages"),
            (limits.max_bytes_per_trigger, "bytes"),
        )
        if most
    ]
    yield (
        f"1. plan up to {' or '.join(bounds) or 'all messages'} of {source.entity}"
        f" ({source.sub_queue}) for the reader group {document.group}, a {source.mode}"
    )
    steps = [f"read them as {source.name}"]
    steps += [f"read {each.folder} as {each.name}" for each in spec.lookups]
    if spec.transform is not None and spec.transform.python is not None:
        steps.append(f"call {spec.transform.python.module}.{spec.transform.python.function}")
    elif spec.transform is not None:
        steps.append(f"query {', '.join(ordered_queries(spec.transform.sql or {}))}")
    steps += [_shown_sink(sink) for sink in spec.sinks if sink.table is not None]
    steps += [_shown_sink(sink) for sink in spec.sinks if sink.entity is not None]
    steps += [_shown_sink(sink) for sink in spec.sinks if sink.dead_letter is not None]
    steps += [f"commit in {spec.checkpoint.path}", "settle the plan"]
    for number, step in enumerate(steps, 2):
        yield f"{number}. {step}"
    for name, frame in frames.items():
        yield ""
        yield f"{name}:"
        for field in frame.schema.fields:
            yield f"  {field.name} {field.dataType.simpleString()}"


def _shown_sink(sink: Sink) -> str:
    if sink.table is not None:
        table = sink.table
        folders = "/".join(table.partition_by) or "no folders"
        return f"add {sink.origin} to the {table.format} table {table.path} ({folders})"
    if sink.entity is not None:
        return f"send {sink.origin} to {sink.entity}"
    return f"dead-letter {sink.origin} in {sink.dead_letter}"


def status(document: PipelineDocument, found: ReadableRanges) -> Iterator[str]:
    """Yield where the reader group, the checkpoint and the tables are."""
    group = found.group
    if group is None:
        yield f"{found.entity} has no reader group {document.group}"
    else:
        plan = group.plan
        state = "settled" if plan.is_settled else f"not settled, attempt {plan.attempts}"
        yield f"reader group {group.name}, a {group.kind}: plan {plan.number}, {state}"
        nexts = {each.partition: each.next_position for each in found.partitions}
        for number, (first, end) in sorted(plan.ranges.items()):
            yield f"  partition {number}: [{first}, {end}), the bus has up to {nexts.get(number)}"
    committed = last_batch(Path(document.spec.checkpoint.path))
    yield f"checkpoint: {'empty' if committed is None else f'batch {committed} is committed'}"
    for table in tables_of(document).values():
        table.load()
        mark = table.mark
        if mark is None:
            yield f"table {table.folder}: takes what comes next"
            continue
        ends = ", ".join(f"{number}: {end}" for number, end in sorted(mark.ends.items()))
        yield f"table {table.folder}: commit {table.version}, plan {mark.number}, ends {ends}"
