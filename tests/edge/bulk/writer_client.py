"""Requests of writers of the bulk API, and encoded messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from postbus.message.codec import Symbol, Timestamp, encode_list, encode_value
from postbus.message.sequence import MEDIA_TYPE
from tests.edge.http_client import Answer, HttpClient

NULL = encode_value(None)


def message(
    body: bytes,
    message_id: str | None = None,
    session_id: str | None = None,
    key: str | None = None,
    scheduled_ms: int | None = None,
) -> bytes:
    """Return an encoded message."""
    annotations = b""
    if key is not None:
        annotations += encode_value(Symbol("x-opt-partition-key")) + encode_value(key)
    if scheduled_ms is not None:
        annotations += encode_value(Symbol("x-opt-scheduled-enqueue-time"))
        annotations += encode_value(Timestamp(scheduled_ms))
    count = 2 * ((key is not None) + (scheduled_ms is not None))
    fields = [encode_value(message_id), *[NULL] * 9, encode_value(session_id)]
    head = b""
    if count:
        size = len(annotations) + 4
        head = b"\x00\x53\x72\xd1" + size.to_bytes(4, "big") + count.to_bytes(4, "big")
        head += annotations
    data = b"\x00\x53\x75\xb0" + len(body).to_bytes(4, "big") + body
    return head + b"\x00\x53\x73" + encode_list(fields) + data


def sequence(messages: Sequence[bytes]) -> bytes:
    """Return messages as the body of a request."""
    return b"".join(len(each).to_bytes(4, "big") + each for each in messages)


class WriterClient:
    """A writer of one entity."""

    def __init__(self, http: HttpClient, entity: str, name: str = "loader") -> None:
        self.http = http
        self.entity = entity
        self.name = name

    async def call(
        self, method: str, below: str = "", body: bytes | str | None = None, kind: str = ""
    ) -> Answer:
        headers = {"Content-Type": kind} if kind else None
        path = f"/{self.entity}/$bulk/writers/{self.name}{below}"
        return await self.http.call(method, path, body, headers)

    async def stage_raw(self, data: bytes, kind: str = MEDIA_TYPE) -> Answer:
        return await self.call("POST", "/stage", data, kind)

    async def stage(self, *messages: bytes) -> int:
        """Stage messages; return the number of the stage."""
        answer = await self.stage_raw(sequence(messages))
        assert answer.status == 201, answer.body
        assert json.loads(answer.body)["messages"] == len(messages)
        return int(json.loads(answer.body)["stage"])

    async def publish_raw(self, batch: object, stages: object, **more: object) -> Answer:
        body = json.dumps({"batch": batch, "stages": stages, **more})
        return await self.call("POST", "/publish", body, "application/json")

    async def publish(self, batch: int, *stages: int, **more: object) -> dict[str, Any]:
        answer = await self.publish_raw(batch, stages, **more)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)  # type: ignore[no-any-return]

    async def abort(self, *stages: int) -> int:
        body = json.dumps({"stages": stages})
        answer = await self.call("POST", "/abort", body, "application/json")
        assert answer.status == 200, answer.body
        return int(json.loads(answer.body)["aborted"])
