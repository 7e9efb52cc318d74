"""Frames: the eight-octet header and the templates of the two hot frames.

Source: AMQP 1.0 part 2, 2.3; the lists of transfer (2.7.5) and disposition (2.7.6).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeAlias

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
