"""Answers that break off cost repetitions, never rows; refusals say what to do."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pyarrow as pa
import pytest

from postbus_spark import transport
from postbus_spark.batches import read_batches
from postbus_spark.client import GroupClient
from postbus_spark.errors import (
    BulkError,
    BusRestored,
    DataLoss,
    EntityNotFound,
    EntityRecreated,
    Fenced,
    GroupNotFound,
    InvalidRequest,
    NotAllowed,
    StaleCheckpoint,
    Unauthorized,
    Unavailable,
    UnknownRows,
)
from postbus_spark.options import Options
from postbus_spark.rows import RowRange, read_rows
from postbus_spark.transport import Bus, Patience, call
from tests.pipeline.bulk_server import (
    KEY,
    BulkServer,
    Fault,
    cut_after,
    hang_up,
    refuse,
    say,
)
from tests.pipeline.stored_rows import record_batch, sdk_row

OPTIONS = Options("orders", "lake")
ALL = [(0, number) for number in range(10)] + [(1, 100 + number) for number in range(5)]


class NoPauses:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s

    def patience(self) -> Patience:
        return Patience("the request", clock=lambda: self.now_s, sleep=self.sleep)


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoPauses]:
    passing = NoPauses()
    monkeypatch.setattr("postbus_spark.transport.pause", passing.sleep)
    yield passing
    for kept in transport._CONNECTIONS.values():
        for connections in kept.values():
            for connection in connections:
                connection.close()
        kept.clear()


def read_all() -> list[tuple[int, int]]:
    batches = read_batches(["partition", "position"], entity="orders", readerGroup="lake")
    return [(row["partition"], row["position"]) for each in batches for row in each.to_pylist()]


def wanted(server: BulkServer, end: int = 10) -> RowRange:
    [wanted] = GroupClient(OPTIONS).row_ranges(server.group(), {0: (0, end)}, 1)
    return wanted


def test_a_batch_reads_every_row_once_on_one_connection(server: BulkServer) -> None:
    assert read_all() == ALL
    assert read_all() == ALL
    assert server.connections == 1


def test_wherever_a_stream_of_rows_breaks_off_none_is_missing_or_twice(server: BulkServer) -> None:
    whole = server.stream({"partition": "0", "from": "0", "to": "10", "epoch": "0",
                           "columns": "position"})  # fmt: skip
    for size in range(0, len(whole), 61):
        for how in ("reset", "length", "complete"):
            server.faults.append(cut_after(size, how))
            assert read_all() == ALL, (size, how)
            assert not server.faults


def test_a_stream_without_its_marker_is_not_complete(server: BulkServer) -> None:
    """Arrow takes the end of a file for the end of a stream: the last rows would be missing."""
    whole = server.stream({"partition": "0", "from": "0", "to": "10", "epoch": "0",
                           "columns": "position"})  # fmt: skip
    server.requests.clear()
    server.faults.append(cut_after(len(whole) - 8, "complete"))
    assert read_all() == ALL
    assert server.count("from=10") == 0  # all rows were there, and the end was not believed
    assert server.count("partition=0&from=9") + server.count("partition=0&from=0") >= 1


def test_bytes_behind_the_marker_are_no_end(server: BulkServer) -> None:
    whole = server.stream({"partition": "0", "from": "0", "to": "3", "epoch": "0",
                           "columns": "position"})  # fmt: skip
    server.faults.append(say(whole + b"more"))
    assert read_all() == ALL


def test_a_long_range_may_break_off_often(server: BulkServer, time: NoPauses) -> None:
    """Patience begins again with every row."""
    server.rows[0] = [sdk_row(position=number) for number in range(120)]
    whole = server.stream({"partition": "0", "from": "0", "to": "3", "epoch": "0",
                           "columns": "position"})  # fmt: skip
    server.faults.extend([cut_after(len(whole) - 8)] * 35)
    assert len(read_all()) == 125
    assert len(time.pauses) == 35
    assert max(time.pauses) == transport.FIRST_PAUSE_S


@pytest.mark.parametrize(
    "fault",
    [
        hang_up,
        refuse(503),
        refuse(503, b'{"code":"Unavailable","detail":"loading"}', Retry_After="2"),
        refuse(429, b'{"code":"TooManyReaders","detail":"busy"}', Retry_After="1"),
        refuse(502, b"<html>", Connection="close"),
        refuse(504, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"),
        cut_after(3),
    ],
)
@pytest.mark.parametrize("kind", ["faults", "call_faults"])
def test_a_fault_is_repaired_by_a_repetition(server: BulkServer, fault: Fault, kind: str) -> None:
    getattr(server, kind).extend([fault, fault])
    assert read_all() == ALL


def test_the_pause_is_the_one_that_the_bus_asks_for(server: BulkServer, time: NoPauses) -> None:
    server.call_faults.append(refuse(503, Retry_After="3"))
    server.call_faults.append(refuse(503, Retry_After="3000"))
    read_all()
    assert time.pauses == [3.0, transport.LAST_PAUSE_S]


def test_a_bus_that_stays_away_is_an_error_with_what_to_do(
    server: BulkServer, time: NoPauses
) -> None:
    server.call_faults.extend([refuse(503, b'{"code":"Unavailable","detail":"no store"}')] * 99)
    with pytest.raises(Unavailable, match=r"no store \(status 503\)\. Nothing is lost: start"):
        call(Bus(server.url), "GET", "/orders/$bulk/ranges", "token", patience=time.patience())
    assert transport.PATIENCE_S - transport.LAST_PAUSE_S < time.now_s <= transport.PATIENCE_S


def test_a_bus_with_as_many_readers_as_it_can_have_is_waited_for(
    server: BulkServer, time: NoPauses
) -> None:
    server.call_faults.extend([refuse(429)] * 9_999)
    with pytest.raises(Unavailable, match="status 429"):
        call(Bus(server.url), "GET", "/orders/$bulk/ranges", "token", patience=time.patience())
    assert transport.BUSY_S - transport.LAST_PAUSE_S < time.now_s <= transport.BUSY_S


def test_nobody_at_the_address_is_an_error(time: NoPauses) -> None:
    with pytest.raises(Unavailable, match="refused"):
        call(Bus("http://127.0.0.1:1"), "GET", "/", "token", patience=time.patience())


def test_a_certificate_that_is_rejected_is_not_tried_again(time: NoPauses) -> None:
    error = ssl.SSLCertVerificationError("self-signed certificate")
    with pytest.raises(Unavailable, match="the option tlsCaFile"):
        time.patience().wait(error)
    assert time.pauses == []


def test_a_missing_file_of_certificates_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"/no/such\.pem of tlsCaFile"):
        call(Bus("https://127.0.0.1:1", "/no/such.pem"), "GET", "/", "token")


@pytest.mark.parametrize(
    ("status", "code", "error", "text"),
    [
        (400, "InvalidRequest", InvalidRequest, "detail"),
        (400, "NotAllowed", NotAllowed, "detail"),
        (403, "QuotaExceeded", NotAllowed, "detail"),
        (404, "EntityNotFound", EntityNotFound, "topic/Subscriptions/name"),
        (404, "GroupNotFound", GroupNotFound, "`postbus groups create`"),
        (409, "Fenced", Fenced, "Only one query at a time reads a group"),
        (409, "StaleCheckpoint", StaleCheckpoint, "Restore the newest checkpoint"),
        (409, "BusRestored", BusRestored, "Start with an empty checkpoint"),
        (410, "DataLoss", DataLoss, "failOnDataLoss to false"),
        (410, "Later", DataLoss, "detail"),
        (418, "Later", InvalidRequest, "detail"),
        (501, "Unavailable", NotAllowed, "detail"),
    ],
)
def test_a_refusal_is_an_error_with_the_way_out(
    server: BulkServer, status: int, code: str, error: type[BulkError], text: str
) -> None:
    said = b'{"code":"%s","detail":"the detail."}' % code.encode()
    server.call_faults.append(refuse(status, said))
    with pytest.raises(error) as raised:
        read_all()
    assert str(raised.value).startswith("the detail.")
    assert ".." not in str(raised.value)
    assert text in str(raised.value)


def test_a_rejected_token_is_told_as_the_bus_tells_it(server: BulkServer) -> None:
    said = b"<Error><Code>401</Code><Detail>ExpiredToken: it ended &amp; more.</Detail></Error>"
    server.faults.append(refuse(401, said))
    with pytest.raises(Unauthorized, match=r"it ended & more\. Reading needs a key"):
        read_all()


@pytest.mark.parametrize("said", [b"{}", b"no json", b'{"entity":1}'])
def test_an_answer_that_is_none_is_named(server: BulkServer, said: bytes) -> None:
    server.call_faults.append(say(said))
    with pytest.raises(UnknownRows, match="use the version that belongs to the bus"):
        read_all()


def test_rows_of_another_life_of_the_entity_are_refused(server: BulkServer) -> None:
    before = wanted(server)
    server.generation = "bus/8"
    with pytest.raises(EntityRecreated, match="deleted and created again"):
        list(read_rows(before, ["body"]))


def test_rows_of_a_newer_format_are_refused(server: BulkServer) -> None:
    older = wanted(server)._replace(metadata={"postbus.row_format": "0"})
    with pytest.raises(UnknownRows, match=r"postbus.row_format 1, and this connector knows 0"):
        list(read_rows(older, ["body"]))


@pytest.mark.parametrize("positions", [[3, 2], [2, 2], [9, 10], [-1, 4]])
def test_positions_out_of_order_are_refused(server: BulkServer, positions: list[int]) -> None:
    rows = [sdk_row(position=position) for position in positions]
    sink = pa.BufferOutputStream()
    batch = record_batch(rows, ["position"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    server.faults.append(say(sink.getvalue().to_pybytes()))
    with pytest.raises(UnknownRows, match="not in order"):
        list(read_rows(wanted(server), []))


# --- lost messages --------------------------------------------------------------------------------


def test_messages_that_are_gone_are_an_error(server: BulkServer) -> None:
    server.lows[0] = 4
    with pytest.raises(DataLoss, match="from position 0 of partition 0 on are gone up to 4"):
        read_all()


def test_messages_that_are_gone_may_be_left_out(
    server: BulkServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = wanted(server)
    server.lows[0] = 4
    options = {"entity": "orders", "readerGroup": "lake", "failOnDataLoss": "false"}
    batches = list(read_batches(["position"], **options))
    assert sum(batch.num_rows for batch in batches) == 11
    with pytest.raises(DataLoss, match="below 4 are deleted"):
        list(read_rows(before, []))
    rest = read_rows(before._replace(is_data_loss_fatal=False), [])
    assert [row for batch in rest for row in batch.column(0).to_pylist()] == [4, 5, 6, 7, 8, 9]
    assert "is read from position 4 on instead of 0" in caplog.text


# --- keys -----------------------------------------------------------------------------------------


def test_tokens_are_for_the_group_alone(server: BulkServer) -> None:
    read_all()
    assert len(set(server.tokens)) == 1
    token = server.tokens[0]
    assert token.startswith("SharedAccessSignature sr=orders%2F%24bulk%2Fgroups%2Flake&sig=")
    assert token.endswith("&skn=lake+reader")
    assert KEY not in token


def test_errors_and_ranges_show_no_token(server: BulkServer) -> None:
    shown = wanted(server)
    assert shown.token not in repr(shown)
    assert KEY not in repr(GroupClient(OPTIONS)._credentials)
    with pytest.raises(TypeError, match="stays with the driver"):
        GroupClient(OPTIONS).__reduce__()
