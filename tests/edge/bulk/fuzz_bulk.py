"""Fuzzes the bulk API: `python -m tests.edge.bulk.fuzz_bulk SECONDS [SEED]`.

Damages addresses and bodies of requests: only a refusal with a text that can be sent may come out,
or a request within the limits of the contract. Damages sequences of
messages in the same way. And makes chunks of rows of any shape, also one that
is a part of a larger row: what Arrow reads of them is what they were made of.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from postbus.broker.row_chunks import RowChunk
from postbus.contract.bulk import (
    GROUP_NAME,
    MAX_POSITION,
    PRESENT_COLUMNS,
    ROW_COLUMNS,
    AbortStages,
    BulkProblem,
    ClaimReaderGroup,
    PlanRanges,
    PublishBatch,
    PutReaderGroup,
    ResetReaderGroup,
    SettlePlan,
)
from postbus.edge.bulk.arrow_stream import END_OF_STREAM, ArrowStream
from postbus.edge.bulk.requests import ANSWERS, BulkError, parse, read_body, refusal_of
from postbus.entity.commands import Refusal, Refused
from postbus.message.sequence import BadSequence, read_sequence, split_sequence
from postbus.store.browse_rows import Present
from postbus.store.bulk_reads import Columns
from tests.edge.bulk.writer_client import message, sequence
from tests.fuzz_bounds import fuzz_program
from tests.text_damages import damaged

METHODS = ("GET", "PUT", "POST", "DELETE", "HEAD", "")

ADDRESSES = [
    "/orders/$bulk/ranges?subQueue=deadLetter&group=lake&splits=64",
    "/a/b-c/$bulk/rows?partition=0&from=1&to=1176846646689136&group=lake&epoch=3&columns=body",
    "/orders/$bulk/ranges?mode=peek&splits=1024&subQueue=transferDeadLetter",
    "/a/$bulk/rows?mode=history&partition=0&from=0&to=9&enqueuedFrom=1&enqueuedTo=2&columns=state",
    "/news/Subscriptions/all/$BULK/groups/lake?subQueue=transferDeadLetter",
    "/orders/$bulk/groups/l-a_k.e9/plan",
    "/orders/$bulk/groups/lake/claim/",
    "http://here:5300/orders/$bulk/groups/%6Cake/settle",
    "/orders/$bulk/groups/lake/reject",
    "/orders/$bulk/writers/price.orders-1/stage",
    "/a/b-c/$bulk/writers/w/publish",
    "//orders/%24bulk/$bulk/$bulk/groups/lake/reset",
]
BODIES = [
    '{"start": "earliest", "kind": "tap", "subQueue": "main"}',
    '{"start": "2030-01-01T00:00:00+01:00"}',
    '{"maxPinnedBytes": 2000000, "maxPinnedAge": "P1DT2H", "onPinLimit": "drop"}',
    '{"start": {"0": 12, "63": 9223372036854775807}}',
    '{"reader": "driver 1 of lake", "subQueue": "deadLetter"}',
    '{"epoch": 3, "ranges": {"0": [1, 20], "1": [5, 5]}, "subQueue": "main"}',
    '{"epoch": 9223372036854775807, "number": 7}',
    '{"batch": 12, "stages": [1800000000000, 3], "rate": 500}',
    '{"stages": []}',
    "",
]
MODELS: tuple[type[BaseModel], ...] = (
    PutReaderGroup,
    ResetReaderGroup,
    ClaimReaderGroup,
    PlanRanges,
    SettlePlan,
    PublishBatch,
    AbortStages,
)
TOKENS = [
    *'{}[]",:\\/%?&#.=-+ \t\n\r\0;@',
    *('""', "null", "true", "NaN", "-1", "1e999", "9" * 40, "9" * 5_000, "[" * 3_000),
    *("%2F", "%00", "%FF", "%", "//", "/$bulk/", "/$bulk", "groups/", "rows?", "://", "$bulk"),
    *("\\u0000", "\\ud800", "\ud800", "é", "\U0001f600", "\u212a", "x" * 130, "a=1&" * 40),
    *("mode=", "&mode=peek", "&mode=history", "&enqueuedFrom=", "&enqueuedTo=1", ",settlement"),
    *('"0":', '"00":', '"start":', '"ranges":', '"epoch":', "9223372036854775808", "0001-01-01"),
]


def mutated(pool: list[str], source: random.Random) -> str:
    """Return a text with up to four damages."""
    text = source.choice(pool)
    for _ in range(source.randint(0, 4)):
        text = damaged(text, source.randrange(len(text) + 1), pool, TOKENS, source)
    return text


def expect_answer(error: BulkError, source: object) -> None:
    """Check that a refusal can be sent and says something."""
    assert error.detail, source
    answer = error.answer()
    assert 400 <= answer.status < 500, source
    assert isinstance(answer.body, bytes)
    problem = BulkProblem.model_validate_json(answer.body)
    assert problem.code == error.code, source


def check_address(source: random.Random) -> bool:
    text = mutated(ADDRESSES, source)
    try:
        target = parse(source.choice(METHODS), text)
    except BulkError as error:
        expect_answer(error, text)
        return False
    assert target.path, text
    assert target.path.isprintable(), text
    assert not target.writer or re.fullmatch(GROUP_NAME, target.writer), text
    assert not target.group or re.fullmatch(GROUP_NAME, target.group), text
    assert target.below.startswith("$bulk/"), text
    assert target.below.isprintable(), text
    expect_answer(refusal_of(Refused(source.choice(REFUSALS)), target.path), text)
    for name in ("partition", "from", "to", "epoch", "splits"):
        try:
            assert 0 <= target.number(name, 0) <= MAX_POSITION, text
        except BulkError as error:
            expect_answer(error, text)
    try:
        selection = target.selection()
        known = ROW_COLUMNS if selection is None else ROW_COLUMNS + PRESENT_COLUMNS
        assert set(target.columns()) <= set(known), text
        assert selection is None or not target.group, text
        assert selection is None or 0 <= selection.from_ms <= selection.to_ms <= MAX_POSITION, text
        assert target.sub_queue is not None
    except BulkError as error:
        expect_answer(error, text)
    return True


REFUSALS = [each for each in Refusal if ANSWERS[each][0] < 500]


def check_body(source: random.Random) -> bool:
    text = mutated(BODIES, source)
    data = text.encode(errors=source.choice(("surrogatepass", "replace")))
    model = source.choice(MODELS)
    try:
        said = read_body(data, model)
    except BulkError as error:
        expect_answer(error, text)
        return False
    again = read_body(said.model_dump_json(by_alias=True).encode(), model)
    assert again == said, text
    json.dumps(said.model_dump(mode="json"), allow_nan=False)
    return True


def check_sequence(source: random.Random) -> bool:
    """Damage a sequence of messages: it is refused, or has the messages that its lengths say."""
    messages = [
        message(source.randbytes(source.choice((0, 1, 300))), **source.choice(MESSAGE_FIELDS))
        for _ in range(source.randrange(4))
    ]
    data = bytearray(sequence(messages))
    for _ in range(source.randint(0, 3)):
        at = source.randrange(len(data) + 1)
        match source.randrange(3):
            case 0:
                data[at : at + source.randrange(9)] = source.randbytes(source.randrange(9))
            case 1:
                del data[at : at + source.randrange(1, 200)]
            case _:
                data[at:at] = data[: source.randrange(len(data) + 1)]
    try:
        found = list(read_sequence(bytes(data)))
    except BadSequence as error:
        refused = str(error)
    else:
        refused = ""
    assert not refused or re.match(r"message \d+: .", refused), data
    if refused:
        return False
    encoded = list(split_sequence(bytes(data)))
    assert len(found) == len(encoded), data
    assert sequence(encoded) == data
    return True


MESSAGE_FIELDS: tuple[dict[str, Any], ...] = (
    {"message_id": "id"},
    {"session_id": "session", "key": "key"},
    {"scheduled_ms": 2**40},
)


def check_stream(source: random.Random) -> bool:
    """Encode some chunks and read them."""
    known = ROW_COLUMNS + PRESENT_COLUMNS
    wanted = [name for name in known if source.randrange(3)] or ["body"]
    source.shuffle(wanted)
    stream = ArrowStream(wanted, {"entity": mutated(ADDRESSES, source).encode(errors="replace")
                                  .decode()})  # fmt: skip
    parts = [bytes(stream.head())]
    expected: list[dict[str, object]] = []
    for _ in range(source.randrange(4)):
        chunk, rows = made_chunk(source)
        parts.append(bytes(stream.batch(chunk)))
        expected += [{name: row[name] for name in known if name in wanted} for row in rows]
    data = b"".join([*parts, END_OF_STREAM])
    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)
    assert table.to_pylist() == expected
    return True


def made_chunk(source: random.Random) -> tuple[RowChunk, list[dict[str, object]]]:
    """Return a chunk as the store sends it, and its rows."""
    count = source.choice((1, 2, 7, 8, 9, 64, 65, 300))
    first = source.randrange(MAX_POSITION - 10 * count)
    positions = sorted(source.sample(range(first, first + 10 * count), count))
    offset = -source.randrange(first + 1)
    is_active = bool(source.randrange(2))
    numbers = [
        position + offset if is_active else source.randrange(MAX_POSITION) for position in positions
    ]
    times = [source.randrange(-MAX_POSITION, MAX_POSITION) for _ in positions]
    envelopes = [source.randbytes(source.choice((1, 30, 100))) for _ in positions]
    properties = values_of(source, count)
    bodies = values_of(source, count)
    columns = Columns(
        count,
        positions[-1],
        0,
        packed(">q", positions),
        b"" if is_active else packed(">q", numbers),
        packed(">q", times),
        packed(">i", [len(each) for each in envelopes]),
        b"".join(envelopes),
        *joined(properties),
        *joined(bodies),
    )
    present, changes = made_present(source, count)
    values = zip(positions, numbers, times, envelopes, properties, bodies, strict=True)
    rows: list[dict[str, object]] = [
        dict(zip(ROW_COLUMNS, row, strict=True)) | change
        for row, change in zip(values, changes, strict=True)
    ]
    return RowChunk(columns, offset, present), rows


def made_present(source: random.Random, count: int) -> tuple[Present, list[dict[str, object]]]:
    """Return what changes later as the store sends it, and as columns of rows."""
    settled = [source.random() < source.choice((0.0, 0.5, 1.0)) for _ in range(count)]
    counts = [0 if each else source.randrange(MAX_POSITION) for each in settled]
    times = [source.randrange(MAX_POSITION) if each else 0 for each in settled]
    states = ["" if each else source.choice(("active", "deferred", "")) for each in settled]
    ends = [source.choice(("completed", "purged", "")) if each else "" for each in settled]
    present = Present(
        packed(">q", counts),
        *joined([each.encode() for each in states])[1:],
        bytes(settled),
        packed(">q", times),
        *joined([each.encode() for each in ends])[1:],
    )
    rows = zip(settled, counts, states, times, ends, strict=True)
    return present, [
        dict(zip(PRESENT_COLUMNS, (None, None, time_ms, end), strict=True))
        if is_settled
        else dict(zip(PRESENT_COLUMNS, (deliveries, state, None, None), strict=True))
        for is_settled, deliveries, state, time_ms, end in rows
    ]


def values_of(source: random.Random, count: int) -> list[bytes | None]:
    """Return values, of which all, some or none are absent."""
    absent = source.choice((0.0, 0.1, 0.9, 1.0))
    return [
        None if source.random() < absent else source.randbytes(source.choice((0, 1, 8, 200)))
        for _ in range(count)
    ]


def joined(values: Sequence[bytes | None]) -> tuple[bytes, bytes, bytes]:
    return (
        bytes(each is not None for each in values),
        packed(">i", [len(each or b"") for each in values]),
        b"".join(each or b"" for each in values),
    )


def packed(code: str, numbers: Sequence[int]) -> bytes:
    return b"".join(struct.pack(code, number) for number in numbers)


CHECKS = (check_address, check_body, check_sequence, check_stream)


if __name__ == "__main__":
    fuzz_program(CHECKS)
