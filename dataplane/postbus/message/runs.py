"""Messages of a burst: sliced, named, packed as deliveries and as rows.

The usual first ones are done by `postbus.fast` in C, where it is used (ADR 50); the functions here
do the rest, and define what it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from postbus.fast import IS_ACCELERATED
from postbus.message.delivery import (
    MOST_ANNOTATION_BYTES,
    SEQUENCE_NUMBER,
    encode_prefix,
    with_times,
)
from postbus.message.envelope import LEAST_BYTES, Envelope
from postbus.message.rows import PLAIN_HEADS, pack_rows
from postbus.message.sections import slice_message

if TYPE_CHECKING or IS_ACCELERATED:
    from postbus.fast._runs import Layout, MessageRuns

R = TypeVar("R")

Delivered: TypeAlias = tuple[bytes, int, int, int, int, int | None, Envelope]
"""Lock token, end of the lock (ms), number, enqueued time (ms), failures, TTL (ms), envelope."""


def slice_messages(payloads: list[bytes]) -> list[Envelope]:
    """Return the parts of encoded messages. Raises `DecodeError` for the first malformed one."""
    envelopes = [] if in_c is None else in_c.slice_messages(payloads)
    envelopes += [slice_message(payload) for payload in payloads[len(envelopes) :]]
    return envelopes


def name_usual_messages(
    envelopes: list[Envelope], head: bytes, section: bytes, numbers: Iterator[int]
) -> int:
    """Name the first messages that have an id or only a body; return how many were looked at."""
    return 0 if in_c is None else in_c.name_messages(envelopes, head, section, numbers)


def unpack_usual_rows(found: Sequence[Any], row_type: type[R]) -> list[R]:
    """Return the first rows of active messages without a patch, with properties alone.

    `found` has the columns of `store.reads`; `row_type`: a class of tuples of key, enqueued time,
    sequence, failures, whether it is deferred, envelope and death.
    """
    return [] if in_c is None else in_c.unpack_rows(found, row_type)


def pack_deliveries(
    deliveries: Sequence[Delivered], *, is_locked: bool
) -> tuple[list[tuple[bytes, ...]], list[int], int]:
    """Return the encoded messages of deliveries in parts, their sizes, and the envelopes' sizes.

    `is_locked`: False if they are received and deleted.
    """
    parts: list[tuple[bytes, ...]] = []
    payload_bytes: list[int] = []
    size_bytes = 0
    if in_c is not None:
        layout = LOCKED if is_locked else UNLOCKED
        size_bytes = in_c.pack_deliveries(deliveries, layout, parts, payload_bytes)
    for token, until_ms, sequence, enqueued_ms, count, ttl_ms, envelope in islice(
        deliveries, len(parts), None
    ):
        locked_until_ms = until_ms if is_locked else None
        prefix = encode_prefix(
            envelope, sequence, enqueued_ms, count, ttl_ms, locked_until_ms, token
        )
        size_bytes += envelope.size_bytes
        properties, body = envelope.properties, envelope.body
        application = envelope.application_properties
        if ttl_ms is not None:
            properties = with_times(properties, enqueued_ms, ttl_ms)
        parts.append((prefix, properties, application, body))
        payload_bytes.append(len(prefix) + len(properties) + len(application) + len(body))
    return parts, payload_bytes, size_bytes


def pack_copy_rows(rows: Sequence[tuple[int, int, Envelope]]) -> bytes:
    """Return rows for COPY, as `rows.pack_rows` does."""
    if in_c is None:
        return pack_rows(rows)
    octets, count = in_c.pack_rows(list(rows))
    return octets if count == len(rows) else octets + pack_rows(rows[count:])


def _layout(*, is_locked: bool) -> Layout:
    """Return where the parts of a usual prefix are, found in an example of recognisable ones."""
    count, number, enqueued, until, token = (
        0x11,
        b"\x22" * 8,
        b"\x33" * 8,
        b"\x44" * 8,
        b"\x55" * 16,
    )

    def example(*, is_durable: bool) -> bytes:
        return encode_prefix(
            Envelope(is_durable=is_durable),
            int.from_bytes(number, "big"),
            int.from_bytes(enqueued, "big"),
            count,
            None,
            int.from_bytes(until, "big") if is_locked else None,
            token if is_locked else b"",
        )

    octets, durable = example(is_durable=False), example(is_durable=True)
    places = (
        next(at for at, octet in enumerate(octets) if octet != durable[at]),
        octets.index(count),
        octets.find(token),
        octets.index(SEQUENCE_NUMBER) - 2,
        octets.index(number),
        octets.index(enqueued),
        octets.find(until),
    )
    return Layout(octets, places, MOST_ANNOTATION_BYTES)


in_c: Final = (
    MessageRuns(Envelope, LEAST_BYTES, PLAIN_HEADS[False] + PLAIN_HEADS[True])
    if IS_ACCELERATED
    else None
)
if IS_ACCELERATED:
    LOCKED: Final = _layout(is_locked=True)
    UNLOCKED: Final = _layout(is_locked=False)
