"""Frames: the eight-octet header, and transfers and dispositions that are read in place.

Forms that the usual clients do not write go through the codec; frames that look alike are in
`runs`. Source: AMQP 1.0 part 2, 2.3, 2.7.5, 2.7.6.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from postbus.amqp import performatives as p
from postbus.amqp.performatives import ACCEPTED, DeliveryState
from postbus.message.codec import DecodeError, decode_value, skip_value

HEADER: Final = struct.Struct(">IBBH")
AMQP_FRAME: Final = 0
SASL_FRAME: Final = 1
SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"
AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
MAX_TAG_BYTES: Final = 32
FRAME_HEAP_BYTES: Final = 256 << 10
"""Maximum heap of the values of one performative: 2,700 values. Our choice: the largest are
dispositions that change properties, whose bytes also fit one frame."""

EMPTY_FRAME: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"

_DISPOSITION: Final = struct.Struct(">IBBH3sBBBcBIBI6s")
"""Disposition: role, first, last, settled true, accepted, batchable false."""

_U32: Final = struct.Struct(">I").unpack_from

_DISPOSITION_HEAD: Final = struct.Struct(">8sIBI")
"""Disposition up to `last`: all before the octets of `first`, `first`, constructor, `last`."""

_DISPOSITION_HEAD_BYTES: Final = _DISPOSITION_HEAD.size

TransferFields: TypeAlias = tuple[
    int, int | None, bytes | None, int, bool, bool, DeliveryState | None, bool
]
"""handle, delivery-id, tag, message-format, settled, more, state, aborted"""


def frame(channel: int, body: bytes, frame_type: int = AMQP_FRAME) -> bytes:
    """Return a whole frame."""
    return HEADER.pack(len(body) + 8, 2, frame_type, channel) + body


def accepted_disposition(channel: int, is_receiver: bool, first: int, last: int) -> bytes:
    """Return a settled, accepted disposition of a range."""
    return _DISPOSITION.pack(
        _DISPOSITION.size, 2, 0, channel, b"\x00\x53\x15", 0xC0, _DISPOSITION.size - 13, 6,
        b"\x41" if is_receiver else b"\x42", 0x70, first, 0x70, last, b"\x41\x00\x53\x24\x45\x42",
    )  # fmt: skip


# --- the two hot lists and raw fields -----------------------------------------------------------


def parse_transfer(data: bytes, start: int, end: int) -> tuple[TransferFields, int]:
    """Return a transfer's fields and the start of its payload.

    The forms that every client writes are read in place; any other goes through the codec. Raises
    `DecodeError`.
    """
    pos = start + 3
    code = data[pos]
    if code == 0xC0 and pos + 2 < end:
        fields_end = pos + 2 + data[pos + 1]
        count = data[pos + 2]
        pos += 3
    elif code == 0xD0 and pos + 9 < end:
        fields_end = pos + 5 + _U32(data, pos + 1)[0]
        count = _U32(data, pos + 5)[0]
        pos += 9
    else:
        return _parse_any_transfer(data, start, end)
    if count >= 4 and fields_end <= end and fields_end - pos >= 5:
        handle = -1
        code = data[pos]
        if code == 0x43:
            handle, pos = 0, pos + 1
        elif code == 0x52:
            handle, pos = data[pos + 1], pos + 2
        code = data[pos]
        delivery_id = -1
        if code == 0x70:
            delivery_id, pos = _U32(data, pos + 1)[0], pos + 5
        elif code == 0x52:
            delivery_id, pos = data[pos + 1], pos + 2
        elif code == 0x43:
            delivery_id, pos = 0, pos + 1
        if handle >= 0 and delivery_id >= 0 and pos < fields_end and data[pos] == 0xA0:
            tag_end = pos + 2 + data[pos + 1]
            tail = data[tag_end:fields_end]
            simple = _TAILS.get(tail)
            if simple is not None and simple[0] == count and tag_end - pos <= MAX_TAG_BYTES + 2:
                tag = data[pos + 2 : tag_end]
                fields = (handle, delivery_id, tag, 0, simple[1], False, None, False)
                return fields, fields_end
    return _parse_any_transfer(data, start, end)


class TransferForm(NamedTuple):
    """Common part of the transfer frames of a link, learned from one; id, tag and payload differ.

    `head` follows the octets of the frame's size, up to the constructor of a four-octet
    delivery-id; `tag_kind` has constructor and length of the tag, `tail` follows the tag.
    `least_bytes`: size of such a frame without payload.
    """

    unpack: Callable[[bytes, int], tuple[int, bytes, int, bytes, bytes, bytes]]
    head: bytes
    tag_kind: bytes
    tail: bytes
    least_bytes: int
    is_settled: bool


SHORT_BINARY: Final = 0xA0


def learn_transfer(data: bytes, start: int, payload_at: int, channel: int) -> TransferForm | None:
    """Return the form of a plain transfer read by `parse_transfer`, or None for an unusual one."""
    pos = start + 6 if data[start + 3] == 0xC0 else start + 12
    pos += {0x43: 1, 0x52: 2}.get(data[pos], 5)
    if data[pos] != 0x70 or payload_at - pos < 7:
        return None
    id_at = pos + 1
    tag_kind = data[id_at + 4 : id_at + 6]
    tail = data[id_at + 6 + tag_kind[1] : payload_at]
    simple = _TAILS.get(tail)
    if tag_kind[0] != SHORT_BINARY or simple is None:
        return None
    head = _FRAME_REST.pack(2, AMQP_FRAME, channel) + data[start:id_at]
    layout = _transfer_layout(len(head), tag_kind[1], len(tail))
    return TransferForm(layout.unpack_from, head, tag_kind, tail, layout.size, simple[1])


_FRAME_REST: Final = struct.Struct(">BBH")
"""Header of a frame after its size: data offset in words, type, channel."""


@lru_cache(maxsize=256)  # a peer may alternate between forms
def _transfer_layout(head_bytes: int, tag_bytes: int, tail_bytes: int) -> struct.Struct:
    return struct.Struct(f">I{head_bytes}sI2s{tag_bytes}s{tail_bytes}s")


def _simple_tails() -> dict[bytes, tuple[int, bool]]:
    """Return the possible octets after the tag of a plain transfer -> (count of all fields,
    settled).

    Plain means: message-format 0, one frame, no state, not resumed, not aborted.
    """
    choices = (b"\x43\x40", b"\x42\x40\x41", b"\x42\x40", b"\x40", b"\x40", *[b"\x42\x40"] * 2)
    tails: dict[bytes, tuple[int, bool]] = {}
    rows = [b""]
    for index, octets in enumerate((*choices, b"\x42\x40\x41"), start=4):
        rows = [row + octets[at : at + 1] for row in rows for at in range(len(octets))]
        tails.update((row, (index, row[1:2] == b"\x41")) for row in rows)
    return tails


_TAILS: Final = _simple_tails()


def _parse_any_transfer(data: bytes, start: int, end: int) -> tuple[TransferFields, int]:
    value, payload_at = decode_value(data, start, end, max_heap_bytes=FRAME_HEAP_BYTES)
    return transfer_fields(p.performative_of(value)[1]), payload_at


def transfer_fields(fields: list[Any]) -> TransferFields:
    """Return the fields of a transfer that are used. Raises `DecodeError`."""
    delivery_id = fields[1]
    if delivery_id is not None:
        delivery_id = p.require_uint(delivery_id, "delivery-id")
    tag = fields[2]
    if tag is not None and (not isinstance(tag, bytes) or len(tag) > MAX_TAG_BYTES):
        raise DecodeError("delivery-tag is not a binary of at most 32 octets")
    return (
        p.require_uint(fields[0], "handle"),
        delivery_id,
        tag,
        p.optional_uint(fields[3], "message-format", 0),
        fields[4] is True,
        fields[5] is True,
        p.decode_state(fields[7]),
        fields[9] is True,
    )


_ACCEPTED_TAILS: Final = {
    b"\x41\x00\x53\x24\x45": True,
    b"\x42\x00\x53\x24\x45": False,
    b"\x41\x00\x53\x24\x45\x42": True,
    b"\x42\x00\x53\x24\x45\x42": False,
    b"\x41\x00\x53\x24\xc0\x01\x00": True,
    b"\x42\x00\x53\x24\xc0\x01\x00": False,
    b"\x42\x00\x53\x24\x45\x40": False,
    b"\x41\x00\x53\x24\x45\x40": True,
}


def _usual_heads() -> dict[bytes, dict[bytes, bool]]:
    """Return the octets before `first` in the usual disposition of a receiver -> its tails."""
    heads: dict[bytes, dict[bytes, bool]] = {}
    for tail, is_settled in _ACCEPTED_TAILS.items():
        count = 5 if tail.endswith((b"\x45", b"\x00")) else 6
        head = b"\x00\x53\x15\xc0" + bytes((len(tail) + 12, count)) + b"\x41\x70"
        heads.setdefault(head, {})[tail] = is_settled
    return heads


_USUAL_HEADS: Final = _usual_heads()


def parse_disposition(
    data: bytes, start: int, end: int
) -> tuple[int, int, bool, DeliveryState] | None:
    """Return (first, last, settled, accepted) of a receiver's usual form, None for any other."""
    if end - start < _DISPOSITION_HEAD_BYTES:
        return _parse_short_disposition(data, start, end)
    head, first, last_kind, last = _DISPOSITION_HEAD.unpack_from(data, start)
    tails = _USUAL_HEADS.get(head)
    if tails is None or last_kind != 0x70:
        return _parse_short_disposition(data, start, end)
    is_settled = tails.get(data[start + _DISPOSITION_HEAD_BYTES : end])
    if is_settled is None:
        return None
    return first, last, is_settled, ACCEPTED


class OutcomeForm(NamedTuple):
    """Common part of a receiver's frames that accept one delivery each, learned from one.

    `head` follows the octets of the frame's size, up to the octets of `first`; `tail` follows
    those of `last`.
    """

    unpack: Callable[[bytes, int], tuple[int, bytes, int, int, int, bytes]]
    head: bytes
    tail: bytes
    frame_bytes: int
    is_settled: bool


def learn_outcome(
    data: bytes, start: int, end: int, channel: int, *, is_settled: bool
) -> OutcomeForm | None:
    """Return the form of a disposition read by `parse_disposition`, None without a `last`."""
    if data[start + 12] != _FULL_UINT:
        return None
    head = _FRAME_REST.pack(2, AMQP_FRAME, channel) + data[start : start + 8]
    tail = data[start + _DISPOSITION_HEAD_BYTES : end]
    layout = _outcome_layout(len(head), len(tail))
    return OutcomeForm(layout.unpack_from, head, tail, layout.size, is_settled)


_FULL_UINT: Final = 0x70


@lru_cache(maxsize=16)
def _outcome_layout(head_bytes: int, tail_bytes: int) -> struct.Struct:
    return struct.Struct(f">I{head_bytes}sIBI{tail_bytes}s")


def _parse_short_disposition(
    data: bytes, start: int, end: int
) -> tuple[int, int, bool, DeliveryState] | None:
    """Read the form with a full-width `first` and a null `last`."""
    pos = start + 12
    if end - pos < 2 or data[start + 3] != 0xC0 or data[start + 6 : start + 8] != b"\x41\x70":
        return None
    is_settled = _ACCEPTED_TAILS.get(data[pos + 1 : end]) if data[pos] == 0x40 else None
    if is_settled is None:
        return None
    first = _U32(data, start + 8)[0]
    return first, first, is_settled, ACCEPTED


def raw_fields(data: bytes, start: int, end: int, indexes: tuple[int, int]) -> tuple[bytes, bytes]:
    """Return the encoded bytes of two fields of a performative's list; null when absent."""
    pos = skip_value(data, start + 1, end)  # the descriptor
    code = data[pos]
    if code == 0xC0:
        count, pos = data[pos + 2], pos + 3
    elif code == 0xD0:
        count, pos = _U32(data, pos + 5)[0], pos + 9
    else:
        count = 0
    found = [p.NULL, p.NULL]
    for index in range(min(count, max(indexes) + 1)):
        after = skip_value(data, pos, end)
        if index in indexes:
            found[indexes.index(index)] = bytes(data[pos:after])
        pos = after
    return found[0], found[1]
