"""Thresholds of a partition's upkeep, and limits of its steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpkeepLimits:
    """Rows, bytes and seconds of `Upkeep` and `SettledRows`. Defaults are ours."""

    vacuum_rows: int = 100_000
    vacuum_share: float = 0.05
    """VACUUM after this many deletes or inserts, or this share of the rows if that is more.
    Source: measured; each 100 k deletes take 50 ms and keep the heap flat."""

    side_rows: int = 20_000
    """Changes of the tables beside the messages before VACUUM."""

    fold_rows: int = 1_000
    fold_keys: int = 20_000
    """Records of acquisitions before folding, the number that a commit folds, and the limit of
    their rows: a record has the rows delivered within 50 ms."""

    reap_ids: int = 5_000
    """Rows of ids, up to 6 KB each, that one statement deletes: 32 MB of log."""

    reap_states: int = 1_000
    reap_state_bytes: int = 8 << 20
    """Maximum number of session states that a statement deletes, and bytes; one may be larger."""

    reap_rows: int = 1_000
    """Settled rows that one statement deletes."""

    look_keys: int = 16_384
    """Keys of the parts that one statement checks for marks: 30 ms (ADR 44)."""

    look_s: float = 2.0
    """Time limit of one run of marking, and of one look at taps: a fifth of the usual pause."""

    reap_s: float = 5.0
    """Time limit of one run of reaping, after which other upkeep runs: half of the usual pause."""

    age_check_s: float = 600.0
    """Time between two checks of the age of transaction ids."""

    freeze_age: int = 100_000_000
    """Half of autovacuum_freeze_max_age, so that we freeze before autovacuum does."""
