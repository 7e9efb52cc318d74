"""What a session remembers of the keys of a resource, so that nothing is asked again at rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from postbus_operator.conditions import ConditionStatus
from postbus_operator.outcome import Event
from postbus_operator.status import Binding


@dataclass(frozen=True, slots=True)
class KeysResult:
    """What to show of the keys. `condition`: SecretsSynced; None: there are no keys.

    `retry_s`: seconds until the next step of a rotation.
    """

    condition: tuple[ConditionStatus, str, str] | None = None
    binding: Binding | None = None
    observed_secret_version: str | None = None
    events: tuple[Event, ...] = ()
    retry_s: float | None = None


@dataclass(frozen=True, slots=True)
class SyncedKeys:
    """The last complete result for a resource, valid `until` then for the same `inputs`.

    `digests`: those of the values of its Secrets, by name.
    """

    inputs: tuple[object, ...]
    digests: Mapping[str, Mapping[str, str]]
    until: datetime
    result: KeysResult
