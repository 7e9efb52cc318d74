"""The parts of a message, sliced once on arrival and never re-encoded.

The edge makes an `Envelope` of each transfer (and of each member of a batch); entity, store and
delivery pass it on unchanged. Only a patch (dead-letter reason, modified properties) replaces
`application_properties`. Source: AMQP 1.0 part 3, 3.2.
"""

from __future__ import annotations

from typing import Final

LEAST_BYTES: Final = 100
"""Minimum size counted for a message: an empty one takes a row and memory too. Our choice, half of
what they cost."""


class SharedBody:
    """A body that the copies of a publish share.

    `holders`: number of loaded copies; the window counts the bytes for one of them.
    """

    __slots__ = ("holders", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.holders = 0


class Envelope:
    """A message at rest: fields that the broker uses, and the raw sections that it forwards.

    `size_bytes` is the size counted for limits: its length, at least `LEAST_BYTES`. Shape:
    `properties`, `application_properties` and `body` are whole encoded sections as received (b""
    when absent); `body` is all body sections followed by the footer. `annotations` are encoded
    key/value pairs of the client's message annotations without a map header and without the keys
    the broker owns; `annotation_count` counts pairs. `message_id` is the encoded AMQP value with
    its type. `session_id` and the keys are UTF-8. `delivery_annotations` are the client's without a
    lock token: the count of keys and values in four octets, then the encoded pairs; b"" when there
    are none. `hop_count` counts forwards; `origin_sequence` is its number in the topic or entity
    where it was sent first, `dead_letter_source` the name of the entity whose dead letters were
    forwarded; both None for a message that was not forwarded. `shared` exists in memory only.
    """

    __slots__ = (
        "annotation_count",
        "annotations",
        "application_properties",
        "body",
        "dead_letter_source",
        "delivery_annotations",
        "hop_count",
        "is_durable",
        "message_id",
        "origin_sequence",
        "partition_key",
        "priority",
        "properties",
        "scheduled_ms",
        "session_id",
        "shared",
        "size_bytes",
        "ttl_ms",
        "via_partition_key",
    )

    def __init__(  # positional on purpose: defaults of keyword-only arguments bind slower
        self,
        size_bytes: int = 0,
        is_durable: bool = False,
        priority: int | None = None,
        ttl_ms: int | None = None,
        annotations: bytes = b"",
        annotation_count: int = 0,
        scheduled_ms: int | None = None,
        partition_key: bytes | None = None,
        via_partition_key: bytes | None = None,
        message_id: bytes | None = None,
        session_id: bytes | None = None,
        hop_count: int = 0,
        properties: bytes = b"",
        application_properties: bytes = b"",
        body: bytes = b"",
        origin_sequence: int | None = None,
        dead_letter_source: bytes | None = None,
        shared: SharedBody | None = None,
        delivery_annotations: bytes = b"",
    ) -> None:
        self.is_durable = is_durable
        self.priority = priority
        self.ttl_ms = ttl_ms
        self.annotations = annotations
        self.annotation_count = annotation_count
        self.scheduled_ms = scheduled_ms
        self.partition_key = partition_key
        self.via_partition_key = via_partition_key
        self.message_id = message_id
        self.session_id = session_id
        self.hop_count = hop_count
        self.properties = properties
        self.application_properties = application_properties
        self.body = body
        self.size_bytes = size_bytes
        self.origin_sequence = origin_sequence
        self.dead_letter_source = dead_letter_source
        self.shared = shared
        self.delivery_annotations = delivery_annotations
