"""Stages messages in an executor: the bus stores them where nobody sees them.

A task stages what it encodes and returns the numbers of its stages. The driver publishes those of
the attempts that Spark accepts; stages of other attempts are removed by the bus after a day, so a
task may be tried again, or twice at a time, and a request may be repeated.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from postbus.message.sequence import MEDIA_TYPE
from postbus_spark.encode import encode_rows
from postbus_spark.errors import BulkError, PostbusSparkError, QuotaExceeded, UnknownRows
from postbus_spark.rows import bulk_path
from postbus_spark.transport import TRANSIENT, Bus, Content, Patience, answer, call

if TYPE_CHECKING:
    import pyarrow as pa

ABORT_S: Final = 5.0
"""How long removing stages is tried. Our choice: the bus removes them by itself after a day."""

LOG: Final = logging.getLogger("postbus_spark")


class StageTask(NamedTuple):
    """What staging takes; it travels to executors. Limits are those of a request."""

    bus: Bus
    entity: str
    writer: str
    token: str
    max_bytes: int
    max_messages: int

    def __repr__(self) -> str:
        """Return the writer without its token."""
        return f"StageTask({self.entity} {self.writer})"

    def path(self, action: str) -> str:
        return bulk_path(self.entity, "writers", self.writer, action)


class Staged(NamedTuple):
    """Stages in the order of their messages, and the number of those."""

    stages: tuple[int, ...]
    messages: int


def stage_rows(
    task: StageTask, batches: Iterable[pa.RecordBatch], clock: Callable[[], float] = time.time
) -> Staged:
    """Stage the rows of a task in their order; if that fails, nothing stays staged.

    Raises `InvalidRows`, `BulkError`, `Unavailable`.
    """
    stages: list[int] = []
    messages = 0
    try:
        for data, count in requests(_encoded(batches, clock), task.max_bytes, task.max_messages):
            stages.append(_stage(task, data, messages))
            messages += count
    except BaseException:
        abort_stages(task, stages)
        raise
    return Staged(tuple(stages), messages)


def abort_stages(task: StageTask, stages: Sequence[int]) -> None:
    """Remove stages that were not published, if the bus answers now."""
    if not stages:
        return
    patience = Patience(f"removing stages of {task!r}", limit_s=ABORT_S)
    body = {"stages": list(stages)}
    try:
        call(task.bus, "POST", task.path("abort"), task.token, body, patience)
    except PostbusSparkError as error:
        LOG.warning(
            "%s stages of the writer %s stay until the bus removes them after a day: %s",
            len(stages), task.writer, error,
        )  # fmt: skip


def requests(
    arrays: Iterable[pa.Array], max_bytes: int, max_messages: int
) -> Iterator[tuple[bytes, int]]:
    """Yield bodies of requests with their numbers of messages, each as full as it may be.

    A message that is larger than a request may be is alone in one.
    """
    pending, count = bytearray(), 0
    for array in arrays:
        offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
        data = memoryview(array.buffers()[2])
        first, end = 0, len(array)
        while first < end:
            room = int(offsets[first]) + max_bytes - len(pending)
            fits = int(np.searchsorted(offsets, room, side="right")) - 1
            fits = min(fits, first + max_messages - count)
            if fits <= first and pending:
                yield bytes(pending), count
                pending, count = bytearray(), 0
                continue
            fits = max(fits, first + 1)
            pending += data[offsets[first] : offsets[fits]]
            count += fits - first
            first = fits
    if pending:
        yield bytes(pending), count


def _encoded(batches: Iterable[pa.RecordBatch], clock: Callable[[], float]) -> Iterator[pa.Array]:
    row = 0
    for batch in batches:
        yield from encode_rows(batch, row, int(clock() * 1_000))
        row += batch.num_rows


def _stage(task: StageTask, data: bytes, first_row: int) -> int:
    """Return the number of a stage. A full entity is waited for as a bus that is away."""
    patience = Patience(f"staging messages for {task.entity} at {task.bus.url}")
    content = Content(MEDIA_TYPE, data)
    while True:
        try:
            with answer(task.bus, "POST", task.path("stage"), task.token, content) as response:
                return int(json.loads(response.read())["stage"])
        except (*TRANSIENT, QuotaExceeded) as error:
            patience.wait(error)
        except BulkError as error:
            if not first_row:
                raise
            place = f"messages are counted from row {first_row} of the task on"
            raise type(error)(f"{error.detail.rstrip('.')} ({place})") from None
        except (ValueError, KeyError, TypeError):
            raise UnknownRows(
                "the bus answers in a way that this connector does not know: use the version that"
                " belongs to the bus"
            ) from None
