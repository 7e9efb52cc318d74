"""Whether an object has to be applied: only if it differs from what it shall be.

An annotation has a digest of what was applied last, so that a field that is no longer wanted is
seen. What somebody else changed is seen by comparing each wanted field; fields that the API server
or others add do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from postbus_operator.kube.slimming import value_digest

APPLIED: Final = "postbus.dev/applied"


def with_digest(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the annotation; values of a Secret are no part of the digest."""
    counted = dict(wanted)
    if "data" in wanted and wanted["kind"] == "Secret":
        counted["data"] = sorted(wanted["data"])
    text = json.dumps(counted, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    metadata = dict(wanted["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED: digest}
    return {**wanted, "metadata": metadata}


def is_current(observed: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether an object of the cache is as wanted; `wanted` has its digest."""
    if wanted["kind"] != "Secret":
        return _covers(observed, wanted)
    digests = {name: value_digest(value) for name, value in wanted["data"].items()}
    return observed.get("data", {}) == digests and _covers(observed, {**wanted, "data": digests})


def _covers(observed: Any, wanted: Any, field: str = "") -> bool:
    if observed == wanted:
        return True
    if isinstance(wanted, dict):
        return isinstance(observed, dict) and all(
            name in observed and _covers(observed[name], each, name)
            for name, each in wanted.items()
        )
    if isinstance(wanted, list):
        if not isinstance(observed, list):
            return False
        if field == "ownerReferences":  # others may add theirs
            return all(any(_covers(there, each) for there in observed) for each in wanted)
        return len(observed) == len(wanted) and all(map(_covers, observed, wanted))
    return False
