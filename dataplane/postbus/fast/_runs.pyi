from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

R = TypeVar("R")

SOURCE: str

class Layout:
    def __init__(
        self, octets: bytes, places: tuple[int, ...], most_annotation_bytes: int
    ) -> None: ...

class MessageRuns:
    def __init__(self, envelope: type, least_bytes: int, heads: bytes) -> None: ...
    def slice_messages(self, payloads: list[bytes]) -> list[Any]: ...
    def name_messages(
        self, envelopes: list[Any], head: bytes, section: bytes, numbers: Iterator[int]
    ) -> int: ...
    def unpack_rows(self, found: Sequence[Any], row_type: type[R]) -> list[R]: ...
    def pack_deliveries(
        self,
        deliveries: Sequence[Any],
        layout: Layout,
        parts: list[tuple[bytes, ...]],
        payload_bytes: list[int],
    ) -> int: ...
    def pack_rows(self, rows: list[Any]) -> tuple[bytes, int]: ...

class QueueRuns:
    def __init__(self, envelope: type, queued: type, insert: type, delivery: type) -> None: ...
    def check(
        self,
        envelopes: list[Any],
        most_bytes: int,
        most_property_bytes: int,
        most_application_bytes: int,
    ) -> tuple[int, int]: ...
    def arrive(
        self,
        envelopes: list[Any],
        row_key: int,
        offset: int,
        enqueued_ms: int,
        inserts: list[Any],
    ) -> list[Any]: ...
    def load(self, rows: Iterable[Any], offset: int) -> list[Any]: ...
    def lock(
        self,
        batch: list[Any],
        held: dict[bytes, Any],
        receiver: Any,
        until_ms: int,
        first_key: int,
        random_bytes: bytes,
        suffix: bytes,
    ) -> list[Any]: ...
    def complete(
        self, tokens: list[bytes], held: dict[bytes, Any], now_ms: int, gone: list[int]
    ) -> tuple[int, int]: ...

def scan_transfers(
    form: Any, data: bytes, pos: int, most_bytes: int
) -> tuple[list[int], list[bytes], list[bytes], int]: ...
def scan_outcomes(form: Any, data: bytes, pos: int) -> tuple[list[int], int]: ...
def pack_transfers(
    head: bytes,
    tail: bytes,
    first: int,
    tags: list[bytes],
    parts: list[tuple[bytes, ...]],
    payload_bytes: list[int],
) -> bytes: ...
