"""A server of the bulk API for faults of the network, which a real bus cannot be asked for.

It answers from memory as `postbus.contract.bulk` says, and does to the next answers what a test
wants. What readers do on a real bus is in `test_real_bus.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
from pydantic import BaseModel

from postbus.contract.bulk import (
    MAX_STAGE_BYTES,
    MAX_STAGED,
    AbortedStages,
    AbortStages,
    BulkProblem,
    ClaimReaderGroup,
    PartitionRange,
    PlanRanges,
    PublishBatch,
    PublishedBatch,
    ReadableRanges,
    ReaderGroup,
    SettlePlan,
    ShownPlan,
    StagedMessages,
)
from postbus.message.sequence import MEDIA_TYPE, read_sequence
from tests.pipeline.stored_rows import GENERATION, Row, record_batch

KEY = "c2VjcmV0LWtleS1vZi10aGUtYnVz"
BATCH_ROWS = 3

Fault = Callable[["_Handler", int, bytes, dict[str, str]], None]


class Refusal(Exception):
    """A refusal of the double."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        self.status = status
        self.problem = BulkProblem(code=code, detail=detail)
        super().__init__(detail)


class BulkServer:
    """A queue `orders` and its group `lake`. `faults`: what happens to the next answers of rows."""

    def __init__(self, rows: dict[int, list[Row]]) -> None:
        self.rows = rows
        self.generation = GENERATION
        self.lows = dict.fromkeys(rows, 0)
        self.epoch = 0
        self.plan = ShownPlan(
            number=0, ranges=dict.fromkeys(rows, (0, 0)), attempts=0, is_settled=True
        )
        self.reader = ""
        self.faults: deque[Fault] = deque()
        self.call_faults: deque[Fault] = deque()
        self.requests: list[str] = []
        self.tokens: list[str] = []
        self.connections = 0
        self.stage_count = 0
        self.stages: dict[int, list[bytes]] = {}
        self.sent: list[bytes] = []
        self.last: PublishedBatch | None = None
        self.lefts: deque[int] = deque()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.bulk = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.connection_string = (
            f"Endpoint=sb://127.0.0.1:{self._server.server_port};SharedAccessKeyName=lake reader;"
            f"SharedAccessKey={KEY};UseDevelopmentEmulator=true"
        )

    @contextmanager
    def running(self) -> Iterator[BulkServer]:
        thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def count(self, part: str) -> int:
        return sum(part in request for request in self.requests)

    # --- the API --------------------------------------------------------------------------------

    def group(self) -> ReaderGroup:
        return ReaderGroup(
            entity="orders", sub_queue="main", name="lake", kind="tap", generation=self.generation,
            epoch=self.epoch, reader=self.reader, plan=self.plan,
        )  # fmt: skip

    def ranges(self, splits: int) -> ReadableRanges:
        partitions = tuple(
            PartitionRange(
                partition=number,
                low=self.lows[number],
                next_position=rows[-1]["position"] + 1 if rows else 0,
                messages=len(rows),
                average_bytes=100,
                splits=tuple(
                    rows[len(rows) * part // splits]["position"] for part in range(1, splits)
                ),
            )
            for number, rows in self.rows.items()
        )
        return ReadableRanges(
            entity="orders", sub_queue="main", generation=self.generation, partitions=partitions,
            group=self.group(),
        )  # fmt: skip

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> BaseModel:
        match method, path:
            case "GET", "/orders/$bulk/ranges":
                return self.ranges(int(query.get("splits", 1)))
            case "GET", "/orders/$bulk/groups/lake":
                return self.group()
            case "POST", "/orders/$bulk/groups/lake/claim":
                self.reader = ClaimReaderGroup.model_validate_json(body).reader
                self.epoch += 1
                return self.group()
            case "POST", "/orders/$bulk/groups/lake/plan":
                self._plan(PlanRanges.model_validate_json(body))
                return self.group()
            case "POST", "/orders/$bulk/groups/lake/settle":
                settle = SettlePlan.model_validate_json(body)
                self._check_epoch(settle.epoch)
                if settle.number == self.plan.number:
                    self.plan = self.plan.model_copy(update={"is_settled": True})
                return self.group()
            case _, "/orders/$bulk/writers/load" | "/orders/$bulk/writers/load/publish":
                return self._published(body)
            case "POST", "/orders/$bulk/writers/load/stage":
                return self._stage(body)
            case "POST", "/orders/$bulk/writers/load/abort":
                named = AbortStages.model_validate_json(body).stages
                found = [self.stages.pop(each) for each in named if each in self.stages]
                return AbortedStages(aborted=len(found))
        raise Refusal(404, "GroupNotFound", "there is no such group")

    # --- writers --------------------------------------------------------------------------------

    def _stage(self, body: bytes) -> StagedMessages:
        messages = [envelope.body for envelope in read_sequence(body)]
        assert len(messages) == 1 or len(body) <= MAX_STAGE_BYTES
        assert 0 < len(messages) <= MAX_STAGED
        number = self.stage_count = self.stage_count + 1
        self.stages[number] = messages
        return StagedMessages(stage=number, messages=len(messages), bytes=len(body))

    def _published(self, body: bytes) -> PublishedBatch:
        """Publish as `postbus.contract.bulk` says; `lefts` are what the next answers have left."""
        if body:
            asked = PublishBatch.model_validate_json(body)
            if self.last is not None and asked.batch < self.last.batch:
                raise Refusal(409, "StaleWriter", f"batch {self.last.batch} was published")
            if self.last is None or asked.batch > self.last.batch:
                if any(each not in self.stages for each in asked.stages):
                    raise Refusal(410, "StagesGone", "stages are gone")
                found = [each for stage in asked.stages for each in self.stages.pop(stage)]
                self.sent += found
                self.last = PublishedBatch(
                    writer="load", batch=asked.batch, messages=len(found), left=0, is_done=True,
                    waits_for="",
                )  # fmt: skip
        if self.last is None:
            raise Refusal(404, "WriterNotFound", "there is no such writer")
        left = self.lefts.popleft() if self.lefts else 0
        waits_for = "orders is full" if left else ""
        return self.last.model_copy(
            update={"left": left, "is_done": not left, "waits_for": waits_for}
        )

    def _plan(self, plan: PlanRanges) -> None:
        self._check_epoch(plan.epoch)
        if plan.ranges == self.plan.ranges and not self.plan.is_settled:
            return
        for number, (first, _) in plan.ranges.items():
            if first != self.plan.ranges[number][1]:
                raise Refusal(409, "StaleCheckpoint", "the reader goes on elsewhere")
        self.plan = ShownPlan(
            number=self.plan.number + 1, ranges=plan.ranges, attempts=1, is_settled=False
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Refusal(409, "Fenced", f"the reader group lake was claimed by {self.reader}")

    def stream(self, query: dict[str, str]) -> bytes:
        number, first = int(query["partition"]), int(query["from"])
        self._check_epoch(int(query["epoch"]))
        if first < self.lows[number]:
            raise Refusal(410, "DataLoss", f"messages below {self.lows[number]} are deleted")
        rows = [row for row in self.rows[number] if first <= row["position"] < int(query["to"])]
        sink = pa.BufferOutputStream()
        names = query["columns"].split(",")
        schema = record_batch([], names).schema
        if self.generation != GENERATION:
            metadata = {**schema.metadata, b"postbus.generation": self.generation.encode()}
            schema = schema.with_metadata(metadata)
        with pa.ipc.new_stream(sink, schema) as writer:
            for at in range(0, len(rows), BATCH_ROWS):
                writer.write_batch(
                    record_batch(rows[at : at + BATCH_ROWS], names).replace_schema_metadata(
                        schema.metadata
                    )
                )
        return sink.getvalue().to_pybytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.bulk: BulkServer = self.server.bulk  # type: ignore[attr-defined]
        self.bulk.connections += 1

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.bulk.requests.append(f"{self.command} {self.path}")
        self.bulk.tokens.append(self.headers.get("Authorization", ""))
        is_sequence = path.endswith("/stage")
        assert not body or (self.headers["Content-Type"] == MEDIA_TYPE) is is_sequence
        is_rows = path == "/orders/$bulk/rows"
        headers = {"Content-Type": "application/json"}
        try:
            if is_rows:
                headers["Content-Type"] = "application/vnd.apache.arrow.stream"
                status, content = 200, self.bulk.stream(query)
            else:
                found = self.bulk.answer(self.command, path, query, body)
                status, content = (
                    201 if is_sequence else 200,
                    found.model_dump_json(by_alias=True).encode(),
                )
        except Refusal as refusal:
            headers["Content-Type"] = "application/json"
            status, content = refusal.status, refusal.problem.model_dump_json().encode()
        faults = self.bulk.faults if is_rows else self.bulk.call_faults
        if faults:
            faults.popleft()(self, status, content, headers)
        else:
            send(self, status, content, headers)


# --- what happens to answers ----------------------------------------------------------------------


def send(handler: _Handler, status: int, content: bytes, headers: dict[str, str]) -> None:
    """Send an answer as it is, in chunks."""
    _begin(handler, status, {**headers, "Transfer-Encoding": "chunked"})
    for at in range(0, len(content), 500):
        chunk = content[at : at + 500]
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
    handler.wfile.write(b"0\r\n\r\n")


def cut_after(size: int, how: str = "reset") -> Fault:
    """Send the first octets, then break off: `reset`, or as if it were `complete`."""

    def fault(handler: _Handler, status: int, content: bytes, headers: dict[str, str]) -> None:
        part = content[:size]
        if how == "complete":
            send(handler, status, part, headers)
            return
        if how == "length":
            _begin(handler, status, {**headers, "Content-Length": str(len(content))})
            handler.wfile.write(part)
        else:
            _begin(handler, status, {**headers, "Transfer-Encoding": "chunked"})
            if part:
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        handler.wfile.flush()
        handler.close_connection = True

    return fault


def refuse(status: int, text: bytes = b"", **more: str) -> Fault:
    def fault(handler: _Handler, _status: int, _content: bytes, _headers: dict[str, str]) -> None:
        named = {name.replace("_", "-"): value for name, value in more.items()}
        _begin(handler, status, {"Content-Length": str(len(text)), **named})
        handler.wfile.write(text)

    return fault


def say(content: bytes) -> Fault:
    """Send other bytes as a good answer."""

    def fault(handler: _Handler, _status: int, _content: bytes, headers: dict[str, str]) -> None:
        send(handler, 200, content, headers)

    return fault


def hang_up(handler: _Handler, _status: int, _content: bytes, _headers: dict[str, str]) -> None:
    """Close the connection without an answer, after the request was done."""
    handler.close_connection = True


def _begin(handler: _Handler, status: int, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
