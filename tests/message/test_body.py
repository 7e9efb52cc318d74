"""Bodies as people read them, for any content of senders."""

from __future__ import annotations

import struct
import time

import pytest

from postbus.message.body import MAX_READ_BYTES, MAX_SECTIONS, BodyKind, read_body
from postbus.message.codec import Symbol, Ulong, encode_list, encode_value

DATA, SEQUENCE, VALUE, FOOTER = b"\x00\x53\x75", b"\x00\x53\x76", b"\x00\x53\x77", b"\x00\x53\x78"
MEGABYTE = 1 << 20


def list_of(item: bytes, size_bytes: int) -> bytes:
    count = size_bytes // len(item)
    return b"\xd0" + struct.pack(">II", 4 + count * len(item), count) + item * count


@pytest.mark.parametrize(
    ("body", "kind", "content"),
    [
        (b"", BodyKind.NONE, b""),
        (DATA + encode_value(b"one") + DATA + encode_value(b"two"), BodyKind.DATA, b"onetwo"),
        (DATA + encode_value(b"one") + FOOTER + b"\xc1\x01\x00", BodyKind.DATA, b"one"),
        (b"\x00" + encode_value(Symbol("amqp:data:binary")) + b"\xa0\x01x", BodyKind.DATA, b"x"),
        (b"\x00\x80" + struct.pack(">Q", 0x75) + b"\xa0\x01x", BodyKind.DATA, b"x"),
        (VALUE + encode_value("text"), BodyKind.VALUE, b"text"),
        (VALUE + encode_value(b"binary"), BodyKind.VALUE, b"binary"),
        (VALUE + encode_value(Ulong(7)), BodyKind.VALUE, b"7"),
        (VALUE + encode_value({"a": 1}), BodyKind.VALUE, b"{'a': 1}"),
        (SEQUENCE + encode_list([encode_value("a")]), BodyKind.SEQUENCE, b"['a']"),
    ],
)
def test_messages_of_clients_are_read(body: bytes, kind: BodyKind, content: bytes) -> None:
    assert read_body(body) == (kind, content)


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"\x00",
        b"\x00\x53",
        b"\x00\x53\x75",
        b"\x00\x53\x75\xb0\xff\xff\xff\xff",
        b"\x00\x53\x70\x45",  # a section, but none of a body
        b"\x00" * 200,
        b"\x00" + list_of(b"\x40", MEGABYTE) + b"\xa0\x01x",  # for a descriptor
        DATA + b"\x70\x7f\xff\xff\xff",  # a number: so many bytes would be two gigabytes
        DATA + encode_list([encode_value(1)]),
        VALUE + b"\xa1\x01\xff",
    ],
)
def test_a_payload_without_body_is_shown_unchanged(body: bytes) -> None:
    assert read_body(body) == (BodyKind.MALFORMED, body)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (VALUE + list_of(b"\x40", MEGABYTE), BodyKind.VALUE),
        (VALUE + list_of(b"\xc1\x01\x00", MEGABYTE), BodyKind.VALUE),
        (VALUE + b"\x00\x53\x01" + list_of(b"\x40", MEGABYTE), BodyKind.VALUE),
        (SEQUENCE + list_of(b"\xa1\x00", MEGABYTE), BodyKind.SEQUENCE),
        ((SEQUENCE + list_of(b"\x40", MAX_READ_BYTES // 2)) * 3, BodyKind.SEQUENCE),
        ((DATA + b"\xa0\x00") * (MAX_SECTIONS + 1), BodyKind.DATA),
    ],
)
def test_values_that_are_slow_to_read_are_not_read(body: bytes, kind: BodyKind) -> None:
    started = time.process_time()
    assert read_body(body) == (kind, body)
    assert time.process_time() - started < 0.5


def test_long_texts_and_binaries_are_read() -> None:
    text = "x" * MEGABYTE
    assert read_body(VALUE + encode_value(text)) == (BodyKind.VALUE, text.encode())
    data = text.encode()
    assert read_body((DATA + encode_value(data)) * 3) == (BodyKind.DATA, data * 3)
