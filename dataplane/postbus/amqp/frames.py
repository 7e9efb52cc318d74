"""Frames: the eight-octet header, and the two hot frames both ways.

Transfers and dispositions leave by precompiled templates and are read in place; every form the
usual clients do not write goes through the codec. Source: AMQP 1.0 part 2, 2.3, 2.7.5, 2.7.6.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeAlias

from postbus.amqp import performatives as p
from postbus.amqp.performatives import ACCEPTED, DeliveryState
from postbus.message.codec import DecodeError, Described, decode_value, skip_value

HEADER: Final = struct.Struct(">IBBH")
AMQP_FRAME: Final = 0
SASL_FRAME: Final = 1
SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"
AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
EMPTY_FRAME: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"

_TRANSFER: Final = struct.Struct(">IBBH3sBBBBIBIBB16scccccccc")
"""Transfer with a 16-octet tag: handle, delivery-id, tag, message-format 0, settled, more false,
rcv-settle-mode null, state null, resume false, aborted false, batchable false."""

TRANSFER_BYTES: Final = _TRANSFER.size

_DISPOSITION: Final = struct.Struct(">IBBH3sBBBcBIBI6s")
"""Disposition: role, first, last, settled true, accepted, batchable false."""

_U32: Final = struct.Struct(">I").unpack_from

_DISPOSITION_HEAD: Final = struct.Struct(">3sBBBBBIBI")
"""Disposition up to `last`: descriptor, list8, size, count, role, two full-width numbers."""

_DISPOSITION_HEAD_BYTES: Final = _DISPOSITION_HEAD.size

TransferFields: TypeAlias = tuple[
    int, int | None, bytes | None, int, bool, bool, DeliveryState | None, bool
]
"""handle, delivery-id, tag, message-format, settled, more, state, aborted"""

LinkFrame: TypeAlias = Callable[[int, int, bytes, bool], bytes]


def frame(channel: int, body: bytes, frame_type: int = AMQP_FRAME) -> bytes:
    """Return a whole frame."""
    return HEADER.pack(len(body) + 8, 2, frame_type, channel) + body


def link_frame(channel: int, handle: int) -> LinkFrame:
    """Return the packer of a link's single-frame transfers.

    Its arguments: bytes of the payload, delivery id, 16-octet tag, whether it is settled.
    """
    pack = _TRANSFER.pack
    size = TRANSFER_BYTES
    length = size - 8 - 5  # what follows the size octet of the list

    def pack_transfer(payload_bytes: int, delivery_id: int, tag: bytes, is_settled: bool) -> bytes:
        return pack(
            size + payload_bytes, 2, 0, channel, b"\x00\x53\x14", 0xC0, length, 11, 0x70, handle,
            0x70, delivery_id, 0xA0, 16, tag, b"\x43", b"\x41" if is_settled else b"\x42",
            b"\x42", b"\x40", b"\x40", b"\x42", b"\x42", b"\x42",
        )  # fmt: skip

    return pack_transfer


def accepted_disposition(channel: int, is_receiver: bool, first: int, last: int) -> bytes:
    """Return a settled, accepted disposition of a range."""
    return _DISPOSITION.pack(
        _DISPOSITION.size, 2, 0, channel, b"\x00\x53\x15", 0xC0, _DISPOSITION.size - 13, 6,
        b"\x41" if is_receiver else b"\x42", 0x70, first, 0x70, last, b"\x41\x00\x53\x24\x45\x42",
    )  # fmt: skip


# --- the two hot lists and raw fields -----------------------------------------------------------


def parse_transfer(data: bytes, start: int, end: int) -> tuple[TransferFields, int]:
    """Return a transfer's fields and where its payload starts.

    The forms every client writes for its hot frame are read in place; any other goes through the
    codec. Raises `DecodeError`.
    """
    pos = start + 3
    code = data[pos]
    if code == 0xC0 and pos + 2 < end:
        fields_end = pos + 2 + data[pos + 1]
        count = data[pos + 2]
        pos += 3
        if 4 <= count <= 6 and fields_end <= end and fields_end - pos >= 8:
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
                # message-format 0, then settled false or true and more false where they are given
                simple = _TAILS.get(tail)
                if simple is not None and simple[0] == count:
                    tag = data[pos + 2 : tag_end]
                    fields = (handle, delivery_id, tag, 0, simple[1], False, None, False)
                    return fields, fields_end
    return _parse_any_transfer(data, start, end)


_TAILS: Final = {
    b"\x43": (4, False),
    b"\x43\x42": (5, False),
    b"\x43\x41": (5, True),
    b"\x43\x42\x42": (6, False),
    b"\x43\x41\x42": (6, True),
    b"\x43\x40\x42": (6, False),
    b"\x40\x42\x42": (6, False),
}


def _parse_any_transfer(data: bytes, start: int, end: int) -> tuple[TransferFields, int]:
    value, payload_at = decode_value(data, start, end)
    if not isinstance(value.value, list):
        raise DecodeError("transfer is not a list")
    fields = p.fields_of(value, 11)
    delivery_id = fields[1]
    if delivery_id is not None:
        delivery_id = p.require_uint(delivery_id, "delivery-id")
    tag = fields[2]
    if tag is not None and (not isinstance(tag, bytes) or len(tag) > 32):
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
    ), payload_at


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


def parse_disposition(
    data: bytes, start: int, end: int
) -> tuple[int, int, bool, DeliveryState] | None:
    """Return (first, last, settled, accepted) of the usual form, None for any other."""
    pos = start + 3
    if end - pos < 8 or data[pos] != 0xC0 or data[pos + 3] != 0x41:
        return None
    pos += 4
    code = data[pos]
    if code == 0x70 and end - pos > 6:
        first, pos = _U32(data, pos + 1)[0], pos + 5
    elif code == 0x52:
        first, pos = data[pos + 1], pos + 2
    elif code == 0x43:
        first, pos = 0, pos + 1
    else:
        return None
    code = data[pos]
    if code == 0x70 and end - pos > 5:
        last, pos = _U32(data, pos + 1)[0], pos + 5
    elif code == 0x40:
        last, pos = first, pos + 1
    elif code == 0x52:
        last, pos = data[pos + 1], pos + 2
    elif code == 0x43:
        last, pos = 0, pos + 1
    else:
        return None
    settled = _ACCEPTED_TAILS.get(data[pos:end])
    if settled is None:
        return None
    return first, last, settled, ACCEPTED


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
