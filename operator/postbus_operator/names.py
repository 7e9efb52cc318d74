"""Names of the objects that belong to a bus or a pipeline.

A resource may have 253 characters with dots, its Services 63 without, a StatefulSet 52: a pod's
label adds a hyphen and a hash of ten characters to its name. A name that does not fit, or that
another bus could have for one of its own objects, is cut and gets a hash of the whole. So no two
objects of one kind in a cluster namespace have the same name: a name without a hash can be read
back, and one with a hash differs by it.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final

MAX_STATEFUL_SET: Final = 52
MAX_BUS: Final = MAX_STATEFUL_SET - len("-broker")

HASH_CHARS: Final = 10
HASHED: Final = re.compile(rf"-[0-9a-f]{{{HASH_CHARS}}}$")
LABEL: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
"""Name of a Service (RFC 1035)."""

SUFFIXES: Final = (
    "broker",
    "brokers",
    "manifest",
    "ca",
    "tls",
    "issued-tls",
    "sealing-key",
    "control-token",
    "stores",
)
STORE: Final = "-store-"
PIPELINE: Final = "-pipeline"


@lru_cache(maxsize=4_096)
def child_name(name: str) -> str:
    """Return the name of a bus as its objects have it, from the name of its resource."""
    is_clear = (
        len(name) <= MAX_BUS
        and LABEL.fullmatch(name) is not None
        and HASHED.search(name) is None
        and STORE not in f"{name}-"
        and not name.endswith(tuple(f"-{each}" for each in SUFFIXES))
    )
    if is_clear:
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    if not readable[:1].isalpha():
        readable = f"bus-{readable}"
    # Only a store's name contains this word.
    return re.sub(r"-store(?=-)", "", _cut(readable, name, MAX_BUS))


def store_name(bus: str, store: str) -> str:
    """Return the name of a store's StatefulSet and Service; `bus`: see `child_name`."""
    name = f"{bus}{STORE}{store}"
    if len(name) <= MAX_STATEFUL_SET and HASHED.search(name) is None and STORE not in f"-{store}":
        return name
    return _cut(name, f"{bus}/{store}", MAX_STATEFUL_SET)


def pipeline_name(pipeline: str) -> str:
    """Return the name of a pipeline's objects: Secret, ConfigMap, StatefulSet, CronJob.

    A Job adds a hyphen and eight characters; no bus has an object of such a name.
    """
    name = f"{pipeline}{PIPELINE}"
    is_clear = LABEL.fullmatch(name) is not None and HASHED.search(pipeline) is None
    if len(name) <= MAX_STATEFUL_SET and is_clear and STORE not in name:
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", pipeline).strip("-").replace(STORE, "-")
    if not readable[:1].isalpha():
        readable = f"pipeline-{readable}"
    return f"{_cut(readable, pipeline, MAX_STATEFUL_SET - len(PIPELINE))}{PIPELINE}"


def _cut(readable: str, whole: str, limit: int) -> str:
    """Return the beginning of a readable name with the hash of the whole one."""
    digest = hashlib.sha256(whole.encode()).hexdigest()[:HASH_CHARS]
    return f"{readable[: limit - HASH_CHARS - 1].rstrip('-')}-{digest}"
