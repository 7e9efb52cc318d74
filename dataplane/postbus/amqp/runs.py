"""Runs of frames: those of one read that look alike, and transfers that are written together.

The functions here define what `postbus.fast` does in C, where it is used (ADR 50).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from postbus.amqp.frames import OutcomeForm, TransferForm
from postbus.fast import IS_ACCELERATED

if TYPE_CHECKING or IS_ACCELERATED:
    from postbus.fast import _runs

_TRANSFER: Final = struct.Struct(">I16sI2s16s8s")
"""Transfer with a 16-octet tag: size; header and list up to the handle; delivery-id; constructor
and length of the tag; tag; message-format 0, settled, more false, rcv-settle-mode null, state null,
resume false, aborted false, batchable false."""

_TRANSFER_HEAD: Final = struct.Struct(">BBH4sBBBIB")
_UNSETTLED_TAIL: Final = b"\x43\x42\x42\x40\x40\x42\x42\x42"
_SETTLED_TAIL: Final = b"\x43\x41\x42\x40\x40\x42\x42\x42"
_FULL_UINT: Final = 0x70

TRANSFER_BYTES: Final = _TRANSFER.size

JOINED_BYTES: Final = 16 << 10
"""Payloads up to this size on average are copied into one buffer with their frames; larger ones are
copied once, when they are written. Our choice."""

LinkFrames: TypeAlias = Callable[
    [int, list[bytes], list[tuple[bytes, ...]], list[int], bool], list[bytes]
]


def link_frames(channel: int, handle: int) -> LinkFrames:
    """Return the packer of a link's single-frame transfers, whose result are the buffers to write.

    Its arguments: first of consecutive delivery ids; 16-octet tags; the payloads, each in parts;
    their sizes; whether they are settled.
    """
    length = TRANSFER_BYTES - 8 - 5  # what follows the size octet of the list
    head = _TRANSFER_HEAD.pack(2, 0, channel, b"\x00\x53\x14\xc0", length, 11, 0x70, handle, 0x70)

    def pack_transfers(
        first: int,
        tags: list[bytes],
        parts: list[tuple[bytes, ...]],
        payload_bytes: list[int],
        is_settled: bool,
    ) -> list[bytes]:
        tail = _SETTLED_TAIL if is_settled else _UNSETTLED_TAIL
        if IS_ACCELERATED and sum(payload_bytes) <= JOINED_BYTES * len(tags):
            return [_runs.pack_transfers(head, tail, first, tags, parts, payload_bytes)]
        return pack_frames(head, tail, first, tags, parts, payload_bytes)

    return pack_transfers


def pack_frames(
    head: bytes,
    tail: bytes,
    first: int,
    tags: list[bytes],
    parts: list[tuple[bytes, ...]],
    payload_bytes: list[int],
) -> list[bytes]:
    """Return the buffers of whole frames between whose tags and ids `head` and `tail` are."""
    pack = _TRANSFER.pack
    out: list[bytes] = []
    for delivery_id, (tag, payload, size) in enumerate(
        zip(tags, parts, payload_bytes, strict=True), first
    ):
        out.append(pack(TRANSFER_BYTES + size, head, delivery_id, b"\xa0\x10", tag, tail))
        out += payload
    return out


def scan_transfers(
    form: TransferForm, data: bytes, pos: int, most_bytes: int
) -> tuple[list[int], list[bytes], list[bytes], int]:
    """Return ids, tags and payloads of the whole frames of a form at `pos`, and where they end.

    It stops before the first frame of another form, of more than `most_bytes` or not yet complete.
    """
    if IS_ACCELERATED:
        return _runs.scan_transfers(form, data, pos, most_bytes)
    return scan_transfer_frames(form, data, pos, most_bytes)


def scan_transfer_frames(
    form: TransferForm, data: bytes, pos: int, most_bytes: int
) -> tuple[list[int], list[bytes], list[bytes], int]:
    """Scan like `scan_transfers`, in Python."""
    unpack, head, tag_kind, tail, least_bytes, _ = form
    ids: list[int] = []
    tags: list[bytes] = []
    payloads: list[bytes] = []
    size = len(data)
    while pos + least_bytes <= size:
        frame_bytes, its_head, delivery_id, its_kind, tag, its_tail = unpack(data, pos)
        end = pos + frame_bytes
        if (
            its_head != head
            or its_kind != tag_kind
            or its_tail != tail
            or end > size
            or not least_bytes <= frame_bytes <= most_bytes
        ):
            break
        ids.append(delivery_id)
        tags.append(tag)
        payloads.append(data[pos + least_bytes : end])
        pos = end
    return ids, tags, payloads, pos


def scan_outcomes(form: OutcomeForm, data: bytes, pos: int) -> tuple[list[int], int]:
    """Return the ids of the whole frames of a form at `pos`, and where they end.

    It stops before the first frame of another form, of several deliveries or not yet complete.
    """
    if IS_ACCELERATED:
        return _runs.scan_outcomes(form, data, pos)
    return scan_outcome_frames(form, data, pos)


def scan_outcome_frames(form: OutcomeForm, data: bytes, pos: int) -> tuple[list[int], int]:
    """Scan like `scan_outcomes`, in Python."""
    unpack, head, tail, frame_bytes, _ = form
    ids: list[int] = []
    latest = len(data) - frame_bytes
    while pos <= latest:
        its_bytes, its_head, first, last_kind, last, its_tail = unpack(data, pos)
        if (
            first != last
            or its_head != head
            or its_tail != tail
            or its_bytes != frame_bytes
            or last_kind != _FULL_UINT
        ):
            break
        ids.append(first)
        pos += frame_bytes
    return ids, pos
