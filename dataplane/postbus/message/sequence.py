"""Sequences of messages in one body: each a length in four octets, then the encoded message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from postbus.message.codec import DecodeError
from postbus.message.envelope import Envelope
from postbus.message.sections import slice_message
from postbus.message.value_check import MAX_VALUES

MEDIA_TYPE: Final = "application/vnd.postbus.messages"
LENGTH_BYTES: Final = 4


class BadSequence(ValueError):
    """A sequence is cut off, or one of its messages is invalid; the text names which."""


def split_sequence(data: bytes) -> Iterator[bytes]:
    """Yield the encoded messages of a sequence. Raises `BadSequence`."""
    at, index, end = 0, 0, len(data)
    while at < end:
        first = at + LENGTH_BYTES
        at = first + int.from_bytes(data[at:first], "big")
        if at > end:
            raise BadSequence(f"message {index}: the sequence ends before it")
        yield data[first:at]
        index += 1


def read_sequence(data: bytes) -> Iterator[Envelope]:
    """Yield the messages of a sequence. Raises `BadSequence`."""
    room = [MAX_VALUES]
    for index, encoded in enumerate(split_sequence(data)):
        try:
            yield slice_message(encoded, room)
        except DecodeError as error:
            raise BadSequence(f"message {index}: {error}") from None
