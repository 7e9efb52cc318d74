"""Rows of the usual form give the same columns together as one by one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postbus.message.codec import Int, Symbol, encode_value
from postbus.message.envelope import Envelope
from postbus.message.rows import pack_envelope
from postbus_spark import decode
from postbus_spark.schema import arrow_schema
from tests.message.wire_values import properties, section
from tests.pipeline.stored_rows import (
    ALL_NAMES,
    ENQUEUED_MS,
    PLACE,
    Row,
    decoded,
    record_batch,
    row_of,
    sdk_row,
)

USUAL = [name for name in ALL_NAMES if name not in {"amqp", "application_properties_json"}]

WIDTHS = {
    0x40: 0, 0x41: 0, 0x42: 0, 0x43: 0, 0x44: 0, 0x45: 0, 0x50: 1, 0x51: 1, 0x52: 1, 0x53: 1,
    0x54: 1, 0x55: 1, 0x56: 1, 0x60: 2, 0x61: 2, 0x70: 4, 0x71: 4, 0x72: 4, 0x73: 4, 0x74: 4,
    0x80: 8, 0x81: 8, 0x82: 8, 0x83: 8, 0x84: 8, 0x94: 16, 0x98: 16, 0x4F: 0,
}  # fmt: skip

FIXED = st.sampled_from(sorted(WIDTHS)).flatmap(
    lambda code: st.binary(min_size=WIDTHS[code], max_size=WIDTHS[code]).map(
        lambda rest: bytes((code,)) + rest
    )
)
SHORT_TEXT = st.text(max_size=6).map(lambda text: encode_value(text))
LONG_TEXT = st.text(max_size=6).map(
    lambda text: b"\xb1" + len(text.encode()).to_bytes(4, "big") + text.encode()
)
OTHER = st.one_of(
    st.binary(max_size=4).map(encode_value),
    st.binary(max_size=4).map(lambda rest: b"\xa1" + bytes((len(rest),)) + rest),
    st.binary(max_size=4).map(lambda rest: b"\xa3" + bytes((len(rest),)) + rest),
    st.lists(st.integers(0, 9), max_size=2).map(encode_value),
    st.sampled_from(["DeadLetterReason", "a", "b"]).map(encode_value),
    LONG_TEXT,
    st.just(encode_value(Symbol("sym"))),
)
NAME = st.one_of(SHORT_TEXT, SHORT_TEXT, OTHER)
VALUE = st.one_of(SHORT_TEXT, FIXED, OTHER)


def compound(code: int, short: int, items: list[bytes], is_long: bool) -> bytes:
    """Return the list or map of a section, with a size that nobody checks."""
    if is_long:
        count = len(items).to_bytes(4, "big")
        return bytes((0, 0x53, code, short + 16)) + bytes(4) + count + b"".join(items)
    return bytes((0, 0x53, code, short, 0, len(items))) + b"".join(items)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Return rows of all kinds, some damaged; most of them are usual in most parts."""
    fields = draw(st.lists(st.one_of(SHORT_TEXT, st.just(b"\x40"), FIXED, OTHER), max_size=13))
    entries = draw(st.lists(st.tuples(NAME, VALUE), max_size=4))
    is_long = draw(st.booleans())
    kind = draw(st.sampled_from([0x75, 0x75, 0x77]))
    content = encode_value(draw(st.binary(max_size=8)))
    flags = draw(st.sampled_from([0, 1, 4, 5, 5, 2, 0x20]))
    ttl = draw(st.sampled_from([0, 60_000, 2**62, 2**63 - 1, 2**63])).to_bytes(8, "big")
    listed = compound(0x73, 0xC0, fields, is_long)
    envelope = bytes((1, flags)) + (ttl if flags & 4 else b"") + listed
    named = compound(0x74, 0xC1, [each for entry in entries for each in entry], is_long)
    parts: dict[str, bytes | None] = {
        "envelope": draw(st.sampled_from([envelope, envelope, pack_envelope(Envelope())])),
        "application_properties": draw(st.sampled_from([named, named, None])),
        "body": draw(st.sampled_from([bytes((0, 0x53, kind)) + content, None, b""])),
    }
    name = draw(st.sampled_from(sorted(parts)))
    if (whole := parts[name]) and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(2 if name == "envelope" else 0, len(whole)))
        parts[name] = whole[:at] + draw(st.sampled_from([b"", b"\x00", b"\xa1"])) + whole[at + 1 :]
    return {**row_of(Envelope()), **parts}


def check(batch: list[Row]) -> None:
    """Compare with the columns of rows that are decoded one by one, as JSON is asked for."""
    each = decoded(*batch, names=[*USUAL, "application_properties_json"])
    for row in each:
        del row["application_properties_json"]
    assert decoded(*batch, names=USUAL) == each


PLAIN = sdk_row(b"plain", message_id="m", application_properties={"a": "x", "n": 7})


@given(st.lists(rows(), min_size=1, max_size=6))
def test_rows_have_the_same_columns_together_as_one_by_one(others: list[Row]) -> None:
    mixed = [each for other in others for each in (other, PLAIN)]
    check([*mixed, PLAIN])


@example([(0x71, b"\xff\xff\xff\xff"), (0x54, b"\x80"), (0x81, b"\x80" + bytes(7))])
@example([(0x70, b"\xff\xff\xff\xff"), (0x53, b"\xff"), (0x81, b"\xff" * 8), (0x43, b"")])
@given(st.lists(st.tuples(st.sampled_from([0x50, 0x52, 0x55]), st.binary(min_size=1, max_size=1))))
def test_numbers_have_the_same_text(numbers: list[tuple[int, bytes]]) -> None:
    found = [
        row_of(Envelope(application_properties=compound(0x74, 0xC1, [b"\xa1\x01n", value], False)))
        for value in (bytes((code,)) + rest for code, rest in numbers)
    ]
    check([*found, PLAIN])


@pytest.mark.parametrize(
    "entries",
    [
        [("a", "1"), ("a", "2")],
        [("DeadLetterReason", "why"), ("DeadLetterErrorDescription", "what")],
        [("DeadLetterReason", Int(5))],
        [("", ""), ("ü", "ß")],
        [(f"n{number}", str(number)) for number in range(40)],
    ],
)
def test_entries_of_all_kinds_are_the_same(entries: list[tuple[str, object]]) -> None:
    items = [encode_value(each) for entry in entries for each in entry]  # type: ignore[arg-type]
    row = row_of(Envelope(application_properties=compound(0x74, 0xC1, items, True)))
    check([row, PLAIN, PLAIN])
    check([PLAIN, row, row, PLAIN, row])


@pytest.mark.parametrize(
    "body",
    [
        section(0x75, b"") + section(0x75, b"more"),
        section(0x75, b"data") + section(0x78, {}),
        section(0x75, b"data")[:-1],
        section(0x75, b"data") + b"rest",
        section(0x75, b"x" * 300),
        section(0x75, b"x" * 300) + section(0x75, b""),
        section(0x75, b"x" * 300)[:-1],
        section(0x76, [1]),
        b"\x00\x53\x75",
    ],
)
def test_bodies_of_all_forms_are_the_same(body: bytes) -> None:
    row = row_of(Envelope(body=body))
    check([PLAIN, row, row, PLAIN, PLAIN])


def test_text_that_is_not_utf8_makes_its_own_row_malformed_only() -> None:
    named = compound(0x74, 0xC1, [b"\xa1\x01a", b"\xa1\x01\xff"], False)
    listed = b"\x01\x00" + compound(0x73, 0xC0, [b"\xa1\x02\xc3\x28"], False)
    wrong = [
        row_of(Envelope(application_properties=named)),
        {**row_of(Envelope()), "envelope": listed},
    ]
    for row in wrong:
        check([PLAIN, row, PLAIN])
        found = decoded(PLAIN, row, PLAIN, names=USUAL)
        assert [each["is_malformed"] for each in found] == [False, True, False]


def test_times_to_live_of_all_sizes_end_in_time() -> None:
    lives = (0, 1, 60_000, 2**53, 2**62)
    batch = [row_of(Envelope(ttl_ms=each, properties=properties(to="t"))) for each in lives]
    check([*batch, *[PLAIN] * len(lives)])


def test_only_the_parts_that_a_schema_names_decide_what_is_usual() -> None:
    row = {**PLAIN, "body": section(0x77, "value")}
    names = ["position", "message_id", "application_properties"]
    assert decoded(row, names=names) == [
        {"position": 1, "message_id": "m", "application_properties": [("a", "x"), ("n", "7")]}
    ]
    assert decoded(row, names=["body", "enqueued_time"])[0]["body"] == b"value"


def test_usual_rows_are_not_decoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes | None] = []
    real = decode.read_properties

    def note(given: bytes | None) -> object:
        read.append(given)
        return real(given)

    monkeypatch.setattr(decode, "read_properties", note)
    unusual = {**PLAIN, "application_properties": section(0x74, {"list": [1]})}
    found = decoded(*[PLAIN] * 50, unusual, names=USUAL)
    assert len(read) == 1
    assert found[-1]["application_properties"] == [("list", "[1]")]


def test_a_slice_of_a_batch_is_decoded_as_its_own_rows() -> None:
    batch = [{**PLAIN, "position": at, "body": b"\x00\x53\x75\xa0\x01%d" % at} for at in range(9)]
    decoder = decode.Decoder(arrow_schema(USUAL), PLACE)
    found = decoder.decode(record_batch(batch).slice(3, 4)).to_pylist()
    assert [(each["position"], each["body"]) for each in found] == [
        (at, b"%d" % at) for at in range(3, 7)
    ]
    assert found[0]["enqueued_time"].timestamp() * 1_000 == ENQUEUED_MS
