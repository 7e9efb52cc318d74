"""Objects as the cache keeps them: without what nobody reads, and with shared parts."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from postbus_operator.certificates import CERTIFICATE, CertificateInvalid, parse_chain

LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
CERTIFICATE_END: Final = "certificateEnd"
"""Field that a slim Secret has beside its data: end of its certificate, seconds since 1970."""

SHORT_TEXT: Final = 64
"""Longer texts are seldom equal, and not worth a place in the table of shared ones."""

MAX_BLOCKS: Final = 4_096
"""Bound on the table of shared blocks, which is emptied then: most are never seen again."""


def value_digest(value: str) -> str:
    """Return what the cache shows in place of a value of a Secret (its text in base64)."""
    return hashlib.blake2b(value.encode(), digest_size=16).hexdigest()


def slim(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without managed fields and kubectl's copy.

    Values of a Secret are replaced by digests: what the operator holds in memory for long cannot
    leak, and a changed value is still seen. The end of a certificate is kept beside them.
    """
    kept = dict(found)
    metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations and LAST_APPLIED in annotations:
        metadata["annotations"] = {
            name: value for name, value in annotations.items() if name != LAST_APPLIED
        }
    kept["metadata"] = metadata
    if found.get("kind") == "Secret":
        data = found.get("data") or {}
        kept["data"] = {name: value_digest(value) for name, value in data.items()}
        kept.pop("stringData", None)
        kept.pop(CERTIFICATE_END, None)
        end = _certificate_end(data.get(CERTIFICATE))
        if end is not None:
            kept[CERTIFICATE_END] = end
    return kept


def _certificate_end(text: str | None) -> float | None:
    """Return the end of the first certificate in a value of a Secret; None: there is none."""
    try:
        found = parse_chain(base64.b64decode(text or ""), CERTIFICATE)
    except (ValueError, CertificateInvalid):
        return None
    return found[0].not_valid_after_utc.timestamp()


class Sharing:
    """Equal parts of objects are kept once: names of fields, short texts, whole default blocks."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[Any, ...], Any] = {}

    def share(self, value: Any) -> Any:
        """Return an equal value that shares its parts. Nobody may change it afterwards."""
        match value:
            case str():
                return sys.intern(value) if len(value) <= SHORT_TEXT else value
            case dict():
                made = {sys.intern(name): self.share(each) for name, each in value.items()}
                return self._one(("dict", *((name, id(each)) for name, each in made.items())), made)
            case list():
                items = [self.share(each) for each in value]
                return self._one(("list", *(id(each) for each in items)), items)
            case _:
                return value

    def _one(self, name: tuple[Any, ...], made: Any) -> Any:
        # A name holds ids of parts, which live as long as the block beside it.
        if len(self._blocks) >= MAX_BLOCKS:
            self._blocks.clear()
        return self._blocks.setdefault(name, made)
