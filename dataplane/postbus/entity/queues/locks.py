"""Message locks: acquisition, settlement, renewal and expiry.

`SubQueueState.locks` maps token to message in the order the locks expire: every new or renewed lock
lasts the same time and goes to the end. Only a shorter lock duration breaks that order; until the
last longer lock is gone (`unsorted_until_ms`) expiry then looks at all of them.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from postbus.entity.commands import (
    Death,
    Delivery,
    Disposition,
    LocksRenewed,
    Receiver,
    Refusal,
    Refused,
    RenewLocks,
    Settle,
    Settled,
    StoredRow,
)
from postbus.entity.outcomes import Needs, PatchMessage, RecordAcquired, Settling
from postbus.entity.queues import expiry, paging, runs
from postbus.entity.queues.dead_letter_reasons import (
    DESCRIPTION,
    HEADER_TOO_LARGE,
    REASON,
    SYSTEM_PROPERTY_BYTES,
)
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.message.codec import DecodeError
from postbus.message.patch import PropertiesTooLarge, merge_properties, with_properties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.entity.queues.sub_queue import SubQueueState

REASON_CHARS: Final = 4_096
"""Maximum length of a reason or description. Source: Azure's page on dead-letter queues."""


_new = tuple.__new__


class SettlePlan(NamedTuple):
    """Changes of a settlement, and the merged application properties of each token."""

    changes: dict[str, object]
    sections: dict[bytes, bytes]


# --- acquisition ----------------------------------------------------------------------------------


def lock(
    sub: SubQueueState, batch: list[QueuedMessage], receiver: Receiver | None
) -> list[Delivery]:
    """Lock a batch under new tokens (ADR 23); journal attempts that must precede a transfer (ADR
    19).
    """
    context, entity, held, is_main = sub.context, sub.entity, sub.locks, sub.is_main
    now_ms = context.now_ms
    first_key = context.first_key
    suffix = context.token_suffix
    default_ttl_ms = entity.default_ttl_ms if is_main else None
    until_ms = sub.session_until_ms or now_ms + entity.lock_duration_ms
    random_bytes = context.random.randbytes(8 * len(batch))
    deliveries: list[Delivery] = []
    if is_main and default_ttl_ms is None:
        deliveries = runs.lock_usual(
            batch, held, receiver, until_ms, first_key, random_bytes, suffix
        )
    position = 8 * len(deliveries)
    row_keys: list[int] = []
    attempts: list[int] = []
    for message in islice(batch, len(deliveries), None):
        envelope = message.envelope
        assert envelope is not None
        failures = message.failures
        ttl_ms = envelope.ttl_ms
        if ttl_ms is None:
            ttl_ms = default_ttl_ms
        if is_main:
            if ttl_ms is not None and message.enqueued_ms + ttl_ms <= now_ms:
                expiry.expire(sub, message)
                continue
            if failures or message.row_key < first_key:
                if failures >= entity.max_delivery_count:
                    expiry.exhaust(sub, message)
                    continue
                message.recorded = failures + 1
                row_keys.append(message.row_key)
                attempts.append(failures + 1)
        token = random_bytes[position : position + 8] + suffix
        position += 8
        message.token = token
        message.receiver = receiver
        message.locked_until_ms = until_ms
        held[token] = message
        deliveries.append(
            _new(
                Delivery,
                (
                    token,
                    until_ms,
                    message.sequence,
                    message.enqueued_ms,
                    failures,
                    ttl_ms,
                    envelope,
                ),
            )
        )
    if row_keys:
        context.outcome.mutations.append(RecordAcquired(row_keys, attempts))
    if is_main and len(row_keys) < len(deliveries):
        context.outstanding.append((now_ms, held, [each[0] for each in deliveries]))
    if deliveries:
        watch(sub, until_ms)
    return deliveries


def receive_and_delete(sub: SubQueueState, batch: list[QueuedMessage]) -> list[Delivery]:
    """Receive and delete a batch: the delete commits before the transfer is sent (S25)."""
    now_ms = sub.context.now_ms
    deliveries: list[Delivery] = []
    for message in batch:
        envelope = message.envelope
        assert envelope is not None
        ttl_ms = envelope.ttl_ms
        if sub.is_main:
            ttl_ms = expiry.effective_ttl_ms(sub.entity, ttl_ms)
            if ttl_ms is not None and message.enqueued_ms + ttl_ms <= now_ms:
                expiry.expire(sub, message)
                continue
            if message.failures >= sub.entity.max_delivery_count:
                expiry.exhaust(sub, message)
                continue
        sub.remove(message, Settling.RECEIVED)
        sub.entity.traffic.completed += sub.is_main
        deliveries.append(
            Delivery(
                b"",
                0,
                message.sequence,
                message.enqueued_ms,
                message.failures,
                ttl_ms,
                envelope,
            )
        )
    return deliveries


# --- settlement -----------------------------------------------------------------------------------


def settle(
    sub: SubQueueState, command: Settle, found: Sequence[StoredRow] | None
) -> Settled | Refused | Needs:
    """Settle a vector of tokens; the reply names those that are no longer held."""
    if command.disposition is Disposition.COMPLETE:
        return complete(sub, command.lock_tokens)
    plan = prepare(sub, command, found)
    if isinstance(plan, Refused | Needs):
        return plan
    return carry_out(sub, command, plan)


def prepare(
    sub: SubQueueState, command: Settle, found: Sequence[StoredRow] | None
) -> SettlePlan | Refused | Needs:
    """Plan the writes of a settlement other than complete; settle nothing yet (ADR 21)."""
    if command.disposition is Disposition.DEAD_LETTER and not sub.is_main:
        return Refused(
            Refusal.NOT_ALLOWED, "a message in a dead-letter queue cannot be dead-lettered"
        )
    changes = _changes(command)
    if isinstance(changes, Refused):
        return changes
    needs_envelope = bool(changes) or command.disposition is Disposition.DEAD_LETTER
    if needs_envelope and not _load_locked(sub, command.lock_tokens, found):
        return Needs(row_keys=_stub_keys(sub, command.lock_tokens))
    if not changes:
        return SettlePlan(changes, {})
    sections = _merge_all(sub, command, changes)
    return sections if isinstance(sections, Refused) else SettlePlan(changes, sections)


def carry_out(sub: SubQueueState, command: Settle, plan: SettlePlan) -> Settled:
    """Settle as planned; the reply names tokens that are no longer held."""
    changes, sections = plan
    lost: list[int] = []
    for index, token in enumerate(command.lock_tokens):
        message = _unlock(sub, token)
        if message is None:
            lost.append(index)
        else:
            _settle_one(sub, message, command.disposition, changes, sections.get(token))
    if sub.waiting:
        sub.pump()
    if sub.context.window.is_over:
        paging.shed(sub)
    return Settled(lost or None)


def complete(sub: SubQueueState, tokens: list[bytes]) -> Settled:
    """Complete messages; the reply names tokens that are no longer held."""
    context = sub.context
    now_ms = context.now_ms
    keeps = sub.entity.keeps_settled
    gone: list[int] = [] if keeps else context.outcome.deletes
    pop = sub.locks.pop
    lost: list[int] | None = None
    stub_bytes = stubs = 0
    done, size_bytes = runs.complete_usual(tokens, sub.locks, now_ms, gone)
    for index, token in enumerate(tokens[done:], done):
        message = pop(token, None)
        if message is None or message.locked_until_ms <= now_ms:
            if lost is None:
                lost = []
            lost.append(index)
            if message is not None:
                _expire_one(sub, message)
            continue
        message.token = None
        gone.append(message.row_key)
        envelope = message.envelope
        if envelope is None:
            stubs += 1
            stub_bytes += message.size_bytes
        else:
            size_bytes += envelope.size_bytes
            if envelope.shared is not None:
                sub.ledger.release(envelope.shared)
    if keeps and gone:
        context.settle(sub.entity.entity_no, gone, Settling.COMPLETED)
    count = len(tokens) - (0 if lost is None else len(lost))
    if sub.is_main:
        sub.entity.traffic.completed += count
    sub.ledger.leave_all(count - stubs, size_bytes, stubs, stub_bytes)
    if sub.waiting:
        sub.pump()
    return Settled(lost)


def _settle_one(
    sub: SubQueueState,
    message: QueuedMessage,
    disposition: Disposition,
    changes: dict[str, object],
    section: bytes | None,
) -> None:
    if section is None and changes and disposition is not Disposition.DEAD_LETTER:
        expiry.dead_letter(sub, message, HEADER_TOO_LARGE, _death(sub, message))
    elif disposition is Disposition.DEAD_LETTER:
        assert message.envelope is not None
        old = message.envelope.application_properties
        section = old if section is None else section
        expiry.move(sub, message, section, _death(sub, message), changes.get(REASON))
    elif disposition is Disposition.DEFER:
        _defer(sub, message, section)
    else:
        if section is not None:
            _replace_properties(sub, message, section)
        if disposition is Disposition.RELEASE:
            stays = _give_back(sub, message)
        else:
            stays = _fail(sub, message)
        if stays and section is not None:
            sub.context.outcome.mutations.append(PatchMessage(message.row_key, None, None, section))


def _death(sub: SubQueueState, message: QueuedMessage) -> Death:
    """Return the death of a message that its receiver dead-lettered: this delivery counts."""
    return Death(sub.context.now_ms, message.failures + 1, expiry.receiver_of(message))


def _unlock(sub: SubQueueState, token: bytes) -> QueuedMessage | None:
    """End the lock of a token and return its message; None if it is not held."""
    message = sub.locks.pop(token, None)
    if message is None:
        return None
    if message.locked_until_ms <= sub.context.now_ms:
        _expire_one(sub, message)
        return None
    message.token = None
    return message


# --- messages without their lock ------------------------------------------------------------------


def _expire_one(sub: SubQueueState, message: QueuedMessage) -> None:
    message.token = None
    _fail(sub, message)


def _fail(sub: SubQueueState, message: QueuedMessage) -> bool:
    """Count a failed delivery; return whether the message stays in its sub-queue.

    A dead letter keeps its delivery count, and its deliveries are not limited.
    """
    if not sub.is_main:
        return _give_back(sub, message)
    message.failures += 1
    if message.failures >= sub.entity.max_delivery_count:
        expiry.exhaust(sub, message)
        return False
    return put_back(sub, message)


def _give_back(sub: SubQueueState, message: QueuedMessage) -> bool:
    """Return a message as if it had not been delivered; the attempt is taken back (ADR 19)."""
    if message.recorded > message.failures:
        sub.context.record(message, message.failures)
    return put_back(sub, message)


def put_back(sub: SubQueueState, message: QueuedMessage) -> bool:
    """Put an unlocked message back; return whether it stays in its sub-queue."""
    if message.is_deferred:
        _park_deferred(sub, message)
    elif expiry.is_expired(sub, message):
        expiry.expire(sub, message)
        return False
    else:
        sub.put_back(message)
    return True


def _defer(sub: SubQueueState, message: QueuedMessage, section: bytes | None) -> None:
    if section is not None:
        _replace_properties(sub, message, section)
    if section is not None or not message.is_deferred:
        sub.context.outcome.mutations.append(PatchMessage(message.row_key, True, None, section))
    message.is_deferred = True
    _park_deferred(sub, message)
    if section is not None:
        sub.deferred_sections[message.row_key] = section


def _park_deferred(sub: SubQueueState, message: QueuedMessage) -> None:
    """Keep only number and key of a deferred message in memory, and its count in the tables.

    The count is stored even if it is 0: the row may have an attempt that was taken back since.
    """
    sub.context.record(message, message.failures)
    sub.attempts[message.row_key] = message.failures
    if message.envelope is not None:
        paging.unload(sub, message)
    sub.deferred[message.sequence] = message.row_key


# --- changed properties ---------------------------------------------------------------------------


def _changes(command: Settle) -> dict[str, object] | Refused:
    """Return the application properties that a settlement sets."""
    if command.disposition is not Disposition.DEAD_LETTER:
        return {} if command.disposition is Disposition.RELEASE else command.properties or {}
    changes = dict(command.properties or {})
    for name, text in (
        (REASON, command.reason),
        (DESCRIPTION, command.description),
    ):
        if text is not None:
            if len(text) > REASON_CHARS:
                return Refused(
                    Refusal.ARGUMENT_OUT_OF_RANGE, f"{name} is longer than 4096 characters"
                )
            changes[name] = text
    return changes


def _merge_all(
    sub: SubQueueState, command: Settle, changes: dict[str, object]
) -> dict[bytes, bytes] | Refused:
    """Merge before anything is settled: the command is refused as a whole or not at all (ADR 21).

    A message that cannot hold the properties of an abandon or a defer is left out: it is
    dead-lettered. For a message that is already a dead letter the command is refused, so that it
    keeps its reason.
    """
    own = command.properties or {}
    texts: dict[str, object] = {}
    if command.disposition is Disposition.DEAD_LETTER:
        given = {REASON: command.reason, DESCRIPTION: command.description}
        texts = {name: changes[name] for name, text in given.items() if text is not None}
    limit_bytes = sub.context.limits.max_header_bytes
    sections: dict[bytes, bytes] = {}
    for token in command.lock_tokens:
        message = sub.locks.get(token)
        if message is None or message.envelope is None:
            continue
        section = message.envelope.application_properties
        try:
            if own:
                section = merge_properties(section, own, limit_bytes)
            if texts:
                room_bytes = limit_bytes + SYSTEM_PROPERTY_BYTES
                section = merge_properties(section, texts, room_bytes)
            sections[token] = section
        except PropertiesTooLarge as error:
            if command.disposition is Disposition.DEAD_LETTER or not sub.is_main:
                return Refused(Refusal.PROPERTIES_TOO_LARGE, str(error))
        except (DecodeError, TypeError) as error:
            return Refused(Refusal.MESSAGE_MALFORMED, str(error))
    return sections


def _load_locked(
    sub: SubQueueState, tokens: list[bytes], found: Sequence[StoredRow] | None
) -> bool:
    """Load the locked stubs among `tokens` from the rows found; return whether none is left."""
    rows = {row.row_key: row for row in found or ()}
    missing = False
    for token in tokens:
        message = sub.locks.get(token)
        if message is not None and message.envelope is None:
            row = rows.get(message.row_key)
            if row is None:
                missing = True
            else:
                paging.load(sub, message, row)
    return not missing


def _stub_keys(sub: SubQueueState, tokens: list[bytes]) -> list[int]:
    held = (sub.locks.get(token) for token in tokens)
    return [message.row_key for message in held if message is not None and not message.envelope]


def _replace_properties(sub: SubQueueState, message: QueuedMessage, section: bytes) -> None:
    old = message.envelope
    assert old is not None
    grown_bytes = len(section) - len(old.application_properties)
    message.envelope = with_properties(old, section)
    sub.context.note_change(message.row_key, section)
    sub.ledger.resize(grown_bytes)


# --- time -----------------------------------------------------------------------------------------


def watch(sub: SubQueueState, until_ms: int) -> None:
    """Set a timer for the expiry of a lock; a session has one for all its locks."""
    if sub.lock_timer_ms is None or until_ms < sub.lock_timer_ms:
        sub.lock_timer_ms = until_ms
        sub.context.set_timer(until_ms, sub.expire_locks)


def renew(sub: SubQueueState, command: RenewLocks) -> LocksRenewed | Refused:
    """Extend all locks or none."""
    now_ms = sub.context.now_ms
    held = sub.locks
    for token in command.lock_tokens:
        message = held.get(token)
        if message is None or message.locked_until_ms <= now_ms:
            return Refused(Refusal.LOCK_LOST)
    until_ms = now_ms + sub.entity.lock_duration_ms
    for token in command.lock_tokens:
        message = held.pop(token)
        message.locked_until_ms = until_ms
        held[token] = message
    if command.lock_tokens:
        watch(sub, until_ms)
    return LocksRenewed([until_ms] * len(command.lock_tokens))


def lose_all(sub: SubQueueState) -> None:
    """End all locks as if they expired; those above the limit of one command follow in the next."""
    now_ms = sub.context.now_ms
    for message in sub.locks.values():
        message.locked_until_ms = now_ms
    if sub.locks:
        sub.lock_timer_ms = now_ms
        expire(sub)


def return_all(sub: SubQueueState, *, is_failed: bool) -> None:
    """End all locks of a session, as failed deliveries or as undelivered (ADR 19)."""
    held = list(sub.locks.values())
    sub.locks.clear()
    if is_failed:
        for message in held:
            _expire_one(sub, message)
        return
    row_keys: list[int] = []
    attempts: list[int] = []
    for message in held:
        message.token = None
        if message.recorded > message.failures:
            message.recorded = message.failures
            row_keys.append(message.row_key)
            attempts.append(message.failures)
        put_back(sub, message)
    if row_keys:
        sub.context.outcome.mutations.append(RecordAcquired(row_keys, attempts))


def expire_first(sub: SubQueueState, count: int) -> None:
    """End the first locks of a session, as failed deliveries."""
    for token in list(islice(sub.locks, count)):
        _expire_one(sub, sub.locks.pop(token))


def expire(sub: SubQueueState) -> None:
    """Remove expired locks, up to the limit of one command; set the timer for the others."""
    context = sub.context
    now_ms = context.now_ms
    if sub.lock_timer_ms is None or sub.lock_timer_ms > now_ms:
        return  # an earlier timer has done this work
    sub.lock_timer_ms = None
    is_sorted = now_ms >= sub.unsorted_until_ms
    expired: list[bytes] = []
    next_ms: int | None = None
    for token, message in sub.locks.items():
        until_ms = message.locked_until_ms
        if until_ms <= now_ms:
            if len(expired) == context.allowance:
                sub.lock_timer_ms = now_ms
                context.resumed[sub.expire_locks] = None
                break
            expired.append(token)
        elif next_ms is None or until_ms < next_ms:
            next_ms = until_ms
            if is_sorted:
                break
    context.allowance -= len(expired)
    for token in expired:
        _expire_one(sub, sub.locks.pop(token))
    if next_ms is not None:
        watch(sub, next_ms)
    if expired:
        sub.pump()
