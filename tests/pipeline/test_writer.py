"""Writers: messages are staged by executors and published once by the driver, whatever fails."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TypeVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle
from pyspark.sql.types import StructType

from postbus.contract.bulk import MAX_STAGED
from postbus_spark import Writer
from postbus_spark.errors import (
    InvalidOption,
    InvalidRequest,
    InvalidRows,
    InvalidSchema,
    MessageTooLarge,
    StagesGone,
    StaleWriter,
    Unauthorized,
    Unavailable,
    Unfinished,
    UnknownRows,
)
from postbus_spark.options import WriteOptions
from postbus_spark.publishing import TOKEN_S, WriterClient
from postbus_spark.staging import Staged, StageTask, requests, stage_rows
from postbus_spark.transport import PATIENCE_S
from postbus_spark.writer import BatchWriter, StagedRows, StreamWriter
from tests.pipeline.bulk_server import KEY, BulkServer, Fault, hang_up, refuse, say, send
from tests.pipeline.stored_rows import spark_schema
from tests.pipeline.test_transport import NoPauses

OPTIONS = WriteOptions("orders", "load")
SCHEMA = spark_schema(["body"])


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> NoPauses:
    passing = NoPauses()
    monkeypatch.setattr("postbus_spark.transport.pause", passing.sleep)
    monkeypatch.setattr("postbus_spark.transport.monotonic", lambda: passing.now_s)
    return passing


def rows(*bodies: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})


def section(body: bytes) -> bytes:
    return b"\x00\x53\x75\xa0" + bytes((len(body),)) + body


def sections(*bodies: bytes) -> list[bytes]:
    return [section(body) for body in bodies]


def stream() -> StreamWriter:
    return StreamWriter(OPTIONS, SCHEMA, is_overwrite=False)


def batch() -> BatchWriter:
    return BatchWriter(OPTIONS, SCHEMA, is_overwrite=False)


W = TypeVar("W", BatchWriter, StreamWriter)


def elsewhere(writer: W) -> W:
    """Return the writer as an executor gets it."""
    found: W = pickle.loads(cloudpickle.dumps(writer))
    return found


# --- requests -------------------------------------------------------------------------------------


def cut(arrays: list[list[bytes]], max_bytes: int, max_messages: int) -> list[tuple[bytes, int]]:
    return list(requests([pa.array(each, pa.binary()) for each in arrays], max_bytes, max_messages))


def test_requests_are_as_full_as_they_may_be() -> None:
    arrays = [[b"aa", b"bb", b"cc"], [], [b"dd", b"e" * 9, b"f"]]
    assert cut(arrays, 4, 9) == [(b"aabb", 2), (b"ccdd", 2), (b"e" * 9, 1), (b"f", 1)]
    assert cut(arrays, 99, 4) == [(b"aabbccdd", 4), (b"e" * 9 + b"f", 2)]
    assert cut([], 4, 9) == cut([[]], 4, 9) == []


@given(
    st.lists(st.lists(st.binary(min_size=5, max_size=40), max_size=9), max_size=4),
    st.integers(1, 100), st.integers(1, 9),
)  # fmt: skip
def test_requests_have_all_messages_in_order_within_their_limits(
    arrays: list[list[bytes]], max_bytes: int, max_messages: int
) -> None:
    found = cut(arrays, max_bytes, max_messages)
    assert b"".join(data for data, _ in found) == b"".join(b"".join(each) for each in arrays)
    assert sum(count for _, count in found) == sum(map(len, arrays))
    for data, count in found:
        assert 0 < count <= max_messages
        assert count == 1 or len(data) <= max_bytes


# --- streams --------------------------------------------------------------------------------------


def test_a_batch_is_staged_by_tasks_and_published_in_their_order(server: BulkServer) -> None:
    writer = stream()
    second = elsewhere(writer).write(iter([rows(b"c")]))
    first = elsewhere(writer).write(iter([rows(b"a"), rows(b"b")]))
    lost = elsewhere(writer).write(iter([rows(b"c")]))
    assert server.sent == []
    elsewhere(writer).commit([first, second], 0)
    assert server.sent == sections(b"a", b"b", b"c")
    assert len(lost.stages) == len(server.stages) == 1, "of the attempt that was not accepted"


def test_a_repeated_batch_is_not_sent_again_and_leaves_nothing_staged(server: BulkServer) -> None:
    for number in (0, 0, 1, 1):
        writer = stream()
        writer.commit([writer.write(iter([rows(b"%d" % number)]))], number)
    assert server.sent == sections(b"0", b"1")
    assert server.stages == {}


def test_a_batch_without_rows_is_published_too(server: BulkServer) -> None:
    writer = stream()
    writer.commit([writer.write(iter([])), writer.write(iter([rows()]))], 0)
    writer.commit([], 1)
    assert server.last is not None
    assert (server.last.batch, server.count("/stage")) == (1, 0)


def test_a_new_checkpoint_under_an_old_name_is_refused(server: BulkServer) -> None:
    writer = stream()
    writer.commit([], 7)
    staged = writer.write(iter([rows(b"a")]))
    with pytest.raises(StaleWriter, match=r"batch 7 was published\. A query with a new checkpoint"):
        writer.commit([staged], 0)
    assert server.stages == {}


def test_an_aborted_batch_leaves_nothing_staged(server: BulkServer) -> None:
    writer = stream()
    staged = writer.write(iter([rows(b"a")]))
    writer.abort([None, staged], 0)
    assert server.stages == {}
    with pytest.raises(StagesGone, match="Start the query again"):
        writer.commit([staged], 0)


def test_an_abort_while_the_bus_is_away_is_short_and_no_error(
    server: BulkServer, time: NoPauses, caplog: pytest.LogCaptureFixture
) -> None:
    writer = stream()
    staged = writer.write(iter([rows(b"a")]))
    server.call_faults.extend([refuse(503)] * 99)
    writer.abort([staged], 0)
    assert time.now_s < 10
    assert "1 stages of the writer load stay until the bus removes them" in caplog.text


def test_a_stream_goes_on_while_messages_are_left_and_the_next_batch_waits(
    server: BulkServer, time: NoPauses
) -> None:
    writer = stream()
    server.lefts.append(5)
    writer.commit([writer.write(iter([rows(b"a")]))], 0)
    assert time.pauses == []
    server.lefts.extend([5, 5, 5, 3, 0])  # the look, then three repetitions until it is done
    writer.commit([writer.write(iter([rows(b"b")]))], 1)
    assert len(time.pauses) == 2
    assert server.sent == sections(b"a", b"b")


def test_a_batch_that_arrives_slowly_is_no_error(
    server: BulkServer, time: NoPauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus_spark.publishing.BUSY_S", 60.0)
    server.lefts.extend(left for left in (3, 2, 1) for _ in range(12))
    client = WriterClient(OPTIONS)
    client.finish(client.publish(0, ()))
    assert time.now_s > 90


def test_a_batch_of_which_nothing_arrives_for_long_is_an_error(
    server: BulkServer, time: NoPauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus_spark.publishing.BUSY_S", 60.0)
    server.lefts.extend([2] * 9_999)
    client = WriterClient(OPTIONS)
    with pytest.raises(Unfinished, match=r"none of the 2 messages .* orders is full\. Nothing is"):
        client.finish(client.publish(0, ()))
    assert 50 < time.now_s <= 60


def test_a_busy_writer_is_waited_for(server: BulkServer, time: NoPauses) -> None:
    """Another program publishes between the look and the publication."""
    busy = refuse(429, b'{"code":"WriterBusy","detail":"busy"}', Retry_After="1")
    server.call_faults.extend([refuse(404, b'{"code":"WriterNotFound","detail":""}'), busy, busy])
    stream().commit([], 0)
    assert len(time.pauses) == 2


# --- faults of tasks ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [hang_up, refuse(503), refuse(429, Retry_After="2")])
def test_a_request_that_breaks_off_is_repeated(server: BulkServer, fault: Fault) -> None:
    writer = stream()
    server.call_faults.extend([fault, fault])
    staged = writer.write(iter([rows(b"a")]))
    server.call_faults.extend([fault, fault])
    writer.commit([staged], 0)
    assert server.sent == sections(b"a")


def test_a_task_that_fails_half_way_leaves_nothing_staged(server: BulkServer) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield rows(*[b"x"] * (MAX_STAGED + 500))
        assert len(server.stages) == 1
        raise RuntimeError("the row cannot be computed")

    with pytest.raises(RuntimeError, match="cannot be computed"):
        stream().write(batches())
    assert server.stages == {}


def test_a_row_that_is_no_message_fails_its_task_with_its_number(server: BulkServer) -> None:
    names = pa.RecordBatch.from_pydict({"message_id": ["fine", "m" * 129]})
    before = MAX_STAGED + 500
    with pytest.raises(InvalidRows, match=f"message_id of row {before + 1} of the task"):
        stage_rows(stream().task, [rows(*[b"x"] * before), names])
    assert server.stages == {}


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [(400, "InvalidRequest", InvalidRequest), (413, "MessageTooLarge", MessageTooLarge),
     (413, "Other", MessageTooLarge)],
)  # fmt: skip
def test_a_refused_message_is_named_by_its_row(
    server: BulkServer, status: int, code: str, error: type[Exception]
) -> None:
    said = b'{"code":"%s","detail":"message 3: it is bad."}' % code.encode()
    writer = stream()

    server.call_faults.extend([send, refuse(status, said)])
    batches = [rows(*[b"x"] * MAX_STAGED), rows(b"y")]
    place = rf"message 3: it is bad \(messages are counted from row {MAX_STAGED} "
    with pytest.raises(error, match=place):
        writer.write(iter(batches))
    assert 1 not in server.stages


def test_a_full_entity_is_waited_for_and_named(server: BulkServer, time: NoPauses) -> None:
    full = refuse(403, b'{"code":"QuotaExceeded","detail":"orders is full."}')
    server.call_faults.extend([full, full])
    writer = stream()
    assert len(writer.write(iter([rows(b"a")])).stages) == 1
    server.call_faults.extend([full] * 99)
    with pytest.raises(Unavailable, match=r"orders is full\. Receivers must make room"):
        writer.write(iter([rows(b"a")]))
    assert time.now_s < 2 * PATIENCE_S


@pytest.mark.parametrize("said", [b"", b"{}", b"[]", b'{"stage":null}', b'{"stage":"x"}'])
def test_an_answer_that_is_none_is_named(server: BulkServer, said: bytes) -> None:
    server.call_faults.append(say(said))
    with pytest.raises(UnknownRows, match="use the version that belongs to the bus"):
        stream().write(iter([rows(b"a")]))


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_is_written_once_and_waits_until_all_has_arrived(
    server: BulkServer, time: NoPauses
) -> None:
    writer = batch()
    staged = elsewhere(writer).write(iter([rows(b"a", b"b")]))
    server.lefts.extend([2, 2, 1])
    elsewhere(writer).commit([staged])
    assert not server.lefts
    assert server.sent == sections(b"a", b"b")

    again = batch()
    read: list[int] = []
    staged = elsewhere(again).write(read.append(1) or each for each in [rows(b"a"), rows(b"b")])
    again.commit([staged])
    assert (staged.stages, read) == ((), [1, 1])
    assert server.sent == sections(b"a", b"b")


def test_a_failed_run_may_be_repeated_under_its_name(server: BulkServer) -> None:
    writer = batch()
    staged = writer.write(iter([rows(b"a")]))
    writer.abort([staged, None])
    assert server.stages == {}
    writer = batch()
    writer.commit([writer.write(iter([rows(b"a")]))])
    assert server.sent == sections(b"a")


def test_a_run_needs_a_name_that_no_stream_has(server: BulkServer) -> None:
    stream().commit([], 3)
    writer = batch()
    with pytest.raises(StaleWriter):
        writer.commit([writer.write(iter([rows(b"a")]))])
    assert server.sent == []


def test_a_wrong_key_is_an_error_before_anything_is_computed(server: BulkServer) -> None:
    said = b"<Error><Code>401</Code><Detail>the token is wrong</Detail></Error>"
    server.call_faults.append(refuse(401, said))
    with pytest.raises(Unauthorized, match=r"the token is wrong\. .* writing one with Send"):
        batch()


@pytest.mark.parametrize("kind", [BatchWriter, StreamWriter])
def test_neither_overwriting_nor_other_columns(
    server: BulkServer, kind: type[BatchWriter | StreamWriter]
) -> None:
    with pytest.raises(InvalidOption, match=r"never replace others: use .*append"):
        kind(OPTIONS, SCHEMA, is_overwrite=True)
    with pytest.raises(InvalidSchema, match="made by the bus"):
        kind(OPTIONS, spark_schema(["position"]), is_overwrite=False)
    assert server.requests == []


# --- programs -------------------------------------------------------------------------------------


def test_a_program_publishes_under_its_own_numbers(server: BulkServer) -> None:
    writer = Writer(entity="orders", writer="load", rate="7")
    assert writer.last_batch() is None
    staged = stage_rows(stream().task, [rows(b"a"), rows(b"b")])
    assert staged == Staged((1,), 2)
    assert writer.publish(41, staged).messages == 2
    last = writer.last_batch()
    assert last is not None
    assert last.batch == 41
    for number in (-1, 2**63):
        with pytest.raises(InvalidOption, match=f"batch {number}: a whole number"):
            writer.publish(number, Staged((), 0))


# --- keys -----------------------------------------------------------------------------------------


def test_neither_key_nor_client_travels(server: BulkServer) -> None:
    for writer in (stream(), batch()):
        again = elsewhere(writer)
        assert KEY.encode() not in cloudpickle.dumps(writer)
        assert KEY.encode() not in cloudpickle.dumps(again)
        assert KEY.encode() not in pickle.dumps(writer.write(iter([rows(b"a")])))
        assert writer.task.token not in repr(writer) + repr(writer.task) + str(vars(writer))
    for holder in (WriterClient(OPTIONS), Writer(entity="orders", writer="load")):
        with pytest.raises(TypeError, match="stays with the driver"):
            cloudpickle.dumps(holder)


def test_tokens_are_for_the_writer_alone_and_last_a_day(server: BulkServer) -> None:
    writer = stream()
    writer.commit([writer.write(iter([rows(b"a")]))], 0)
    prefix = "SharedAccessSignature sr=orders%2F%24bulk%2Fwriters%2Fload&sig="
    assert all(token.startswith(prefix) for token in server.tokens)
    assert TOKEN_S == 86_400


def test_commit_messages_hold_numbers_only(server: BulkServer) -> None:
    staged = stream().write(iter([rows(b"a")]))
    assert vars(staged) == {"stages": (1,)}
    assert isinstance(staged, StagedRows)
    assert isinstance(stream().task, StageTask)
    assert isinstance(SCHEMA, StructType)
