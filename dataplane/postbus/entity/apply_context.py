"""Time, randomness, row keys and the outcome of the command that is being applied.

`PartitionState` begins an outcome for each command; entities write their mutations and effects into
`outcome`. Time, randomness and row keys come from here and from nowhere else. What else the
entities of a partition share is in `partition_context`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from random import Random
from typing import Final, Protocol, TypeAlias

from postbus.contract.entities import NamespaceLimits
from postbus.entity.commands import Done
from postbus.entity.outcomes import Outcome, RecordAcquired, SettleRows, Settling
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.entity.traffic import Traffic
from postbus.entity.window import Window
from postbus.message.envelope import Envelope
from postbus.message.patch import with_properties
from postbus.rules.steps import APPLY_STEPS, StepPool

OnTime: TypeAlias = Callable[[], None]

Acquired: TypeAlias = tuple[int, dict[bytes, QueuedMessage], list[bytes]]
"""Time of an acquisition (ms), the locks among which it is, its tokens."""

MAINTENANCE_LIMIT: Final = 1_000
"""Maximum number of messages that an apply may expire, activate or delete beside its command (ADR
20)."""

OUTSTANDING_MS: Final = 100
"""After this time an acquisition that is neither settled nor returned is journalled (ADR 19)."""

READING_MS: Final = 10_000
"""Upper bound on the duration of a store read. Our choice: twice the silence after which a store
counts as away."""

DONE: Final = Done()


class SubQueueMemory(Protocol):
    """The memory of a sub-queue, as others in its partition see it."""

    def make_room(self, wanted_bytes: int) -> None:
        """Unload messages without a waiting receiver, unless there is enough room."""

    def unrecorded(self) -> Iterator[tuple[QueuedMessage, int]]:
        """Yield messages with unrecorded attempts, and the attempts."""


class ApplyContext:
    """See the module's docstring."""

    __slots__ = (
        "_changed",
        "_is_watching_changes",
        "_timer_count",
        "_traffic",
        "allowance",
        "backdated_ms",
        "committed_ms",
        "first_key",
        "is_checked",
        "limits",
        "next_key",
        "now_ms",
        "outcome",
        "outstanding",
        "random",
        "resumed",
        "settled",
        "steps",
        "sub_queues",
        "timers",
        "token_suffix",
        "window",
    )

    def __init__(
        self,
        *,
        random: Random,
        token_suffix: bytes,
        first_key: int,
        window: Window,
        limits: NamespaceLimits,
        traffic: dict[int, Traffic],
    ) -> None:
        self.random = random
        self.token_suffix = token_suffix
        self.first_key = first_key  # keys from here on were assigned in this life of the partition
        self.next_key = first_key
        self.window = window
        self.limits = limits
        self._traffic = traffic
        self.now_ms = 0
        self.committed_ms = 0
        self.backdated_ms = 0  # time of the last store of a message that counts as enqueued earlier
        self.allowance = MAINTENANCE_LIMIT
        self.is_checked = False  # what is enqueued passed the quota with its transaction
        self.steps = StepPool()
        self.outcome = Outcome(DONE)
        self.outstanding: deque[Acquired] = deque()
        self.resumed: dict[OnTime, None] = {}
        self.timers: list[tuple[int, int, OnTime]] = []
        self.sub_queues: dict[SubQueueMemory, None] = {}
        self.settled: dict[tuple[int, Settling], list[int]] = {}
        self._changed: dict[int, tuple[int, bytes]] = {}
        self._is_watching_changes = False
        self._timer_count = 0

    def begin(self, now_ms: int) -> Outcome:
        """Start the outcome of one command."""
        self.now_ms = now_ms
        self.allowance = MAINTENANCE_LIMIT
        self.steps.left = APPLY_STEPS
        self.outcome = outcome = Outcome(DONE)
        outcome.applied_ms = now_ms
        if self.settled:
            self.settled = {}
        return outcome

    def traffic_of(self, entity_no: int) -> Traffic:
        """Return the counters of an entity."""
        return self._traffic.setdefault(entity_no, Traffic())

    def forget_traffic(self, entity_no: int) -> None:
        self._traffic.pop(entity_no, None)

    def settle(self, entity_no: int, row_keys: list[int], how: Settling) -> None:
        """Keep rows of an entity with a history; one mutation for each reason."""
        known = self.settled.get((entity_no, how))
        if known is None:
            known = self.settled[entity_no, how] = []
            self.outcome.mutations.append(SettleRows(entity_no, known, how, self.now_ms))
        known += row_keys

    def may_be_uncommitted(self, row_key: int, enqueued_ms: int) -> bool:
        """Return whether the commit that stores a row may be in flight; True when in doubt."""
        return row_key >= self.first_key and (
            enqueued_ms >= self.committed_ms or self.backdated_ms >= self.committed_ms
        )

    def note_change(self, row_key: int, section: bytes) -> None:
        """Keep changed application properties until their commit, and reads that began before it,
        have ended: rows that are read meanwhile do not have them.
        """
        changed = self._changed
        changed.pop(row_key, None)
        self._forget_changes()
        changed[row_key] = (self.now_ms, section)
        self._watch_changes()

    def _forget_changes(self) -> None:
        changed = self._changed
        until_ms = min(self.committed_ms, self.now_ms - READING_MS)
        while changed and next(iter(changed.values()))[0] < until_ms:
            del changed[next(iter(changed))]

    def _look_at_changes(self) -> None:
        """Forget changes if no others follow: they may have 64 KiB each."""
        self._is_watching_changes = False
        self._forget_changes()
        if self._changed:
            self._watch_changes()

    def _watch_changes(self) -> None:
        if not self._is_watching_changes:
            self._is_watching_changes = True
            self.set_timer(self.now_ms + READING_MS + 1, self._look_at_changes)

    def as_changed(self, row_key: int, envelope: Envelope) -> Envelope:
        """Return a message as read, with changed properties that its row may not have yet."""
        found = self._changed.get(row_key) if self._changed else None
        return envelope if found is None else with_properties(envelope, found[1])

    def is_unchanged(self, row_keys: Iterable[int]) -> bool:
        """Return whether `as_changed` returns these messages as they are."""
        return not self._changed or self._changed.keys().isdisjoint(row_keys)

    # --- time -----------------------------------------------------------------------------------

    def set_timer(self, when_ms: int, on_time: OnTime) -> None:
        """Call back in the first Tick at or after `when_ms`. Timers are not withdrawn."""
        self._timer_count += 1
        heappush(self.timers, (when_ms, self._timer_count, on_time))

    def run_timers(self) -> None:
        """Call what is due, then what an earlier command left unfinished."""
        timers, now_ms = self.timers, self.now_ms
        while timers and timers[0][0] <= now_ms:
            heappop(timers)[2]()
        if self.resumed:
            resumed, self.resumed = self.resumed, {}
            for on_time in resumed:
                on_time()

    @property
    def next_deadline_ms(self) -> int | None:
        """Time of the next Tick with work to do."""
        if self.resumed:
            return self.now_ms
        deadline_ms = self.timers[0][0] if self.timers else None
        if self.outstanding:
            journal_ms = self.outstanding[0][0] + OUTSTANDING_MS
            if deadline_ms is None or journal_ms < deadline_ms:
                return journal_ms
        return deadline_ms

    # --- delivery counts --------------------------------------------------------------------------

    def record_outstanding(self) -> None:
        """Journal first deliveries that are outstanding (ADR 19).

        When the oldest is due, those that have waited half as long are journalled too: at most one
        commit every 50 ms, and none waits longer than promised.
        """
        outstanding, now_ms = self.outstanding, self.now_ms
        if not outstanding or now_ms - outstanding[0][0] < OUTSTANDING_MS:
            return
        row_keys: list[int] = []
        attempts: list[int] = []
        while outstanding and now_ms - outstanding[0][0] >= OUTSTANDING_MS // 2:
            _, held, tokens = outstanding.popleft()
            for message in map(held.get, tokens):
                if message is not None and message.recorded <= message.failures:
                    message.recorded = message.failures + 1
                    row_keys.append(message.row_key)
                    attempts.append(message.recorded)
        if row_keys:
            self.outcome.mutations.append(RecordAcquired(row_keys, attempts))

    def record(self, message: QueuedMessage, attempts: int) -> None:
        """Journal the attempts of a message unless the tables have them."""
        if message.recorded != attempts:
            message.recorded = attempts
            self.outcome.mutations.append(RecordAcquired([message.row_key], [attempts]))
