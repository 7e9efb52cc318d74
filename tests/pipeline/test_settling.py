"""What a checkpoint says is committed, and what is settled for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from postbus_spark.errors import BulkError, InvalidOffset
from postbus_spark.jobs.settling import committed_ends, last_batch, settle_committed
from tests.pipeline.lake import Lake


def checkpoint(folder: Path, *ends: object, committed: int) -> Path:
    """Write the logs of a checkpoint as Spark does."""
    for log in ("offsets", "commits"):
        (folder / log).mkdir(parents=True)
    for number, end in enumerate(ends):
        source = end if isinstance(end, str) else json.dumps(end)
        (folder / "offsets" / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{source}')
        (folder / "offsets" / f".{number}.crc").write_bytes(b"crc")
    for number in range(committed):
        (folder / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    return folder


def test_the_end_of_the_last_committed_batch_counts(tmp_path: Path) -> None:
    ends = [{"v": 1, "entity": "orders", "generation": "g", "p": {"0": end}} for end in (5, 9, 12)]
    folder = checkpoint(tmp_path, *ends, committed=2)
    [found] = committed_ends(folder, 1)
    assert found is not None
    assert found.positions == {0: 9}
    assert (last_batch(folder), last_batch(folder, "offsets")) == (1, 2)


def test_an_empty_checkpoint_has_no_end(tmp_path: Path) -> None:
    assert committed_ends(tmp_path, 2) == [None, None]
    assert committed_ends(checkpoint(tmp_path, committed=0), 1) == [None]


@pytest.mark.parametrize("source", ["", "{", "5", '{"v": 1}', "-\n-"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(InvalidOffset):
        committed_ends(checkpoint(tmp_path, source, committed=1), 1)


def test_a_checkpoint_without_the_offsets_of_its_batch_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOffset, match="start with an empty checkpoint"):
        committed_ends(checkpoint(tmp_path, committed=1), 1)


def test_a_plan_is_settled_when_its_batch_is_committed(lake: Lake, tmp_path: Path) -> None:
    lake.send(b"one", b"two")
    client = lake.client()
    epoch = client.claim().epoch
    starts = {number: first for number, (first, _) in client.group().plan.ranges.items()}
    found = client.ranges()
    ends = {each.partition: each.next_position for each in found.partitions}
    planned = client.plan(epoch, {number: (starts[number], end) for number, end in ends.items()})
    other = client.offset(planned, {number: end + 1 for number, end in ends.items()})
    is_ahead = checkpoint(tmp_path / "ahead", other.json(), committed=1)
    assert settle_committed(client, is_ahead, epoch) is None
    end = client.offset(planned, ends).json()
    assert settle_committed(client, checkpoint(tmp_path / "begun", end, committed=0)) is None
    done = checkpoint(tmp_path / "done", end, committed=1)
    with pytest.raises(BulkError, match="epoch"):
        settle_committed(client, done, epoch - 1)
    assert not client.group().plan.is_settled

    settled = settle_committed(client, done)
    assert settled is not None
    assert settled.plan.is_settled
    assert settled.epoch > epoch, "the reader before is refused from then on"
    assert settle_committed(client, done) is None
