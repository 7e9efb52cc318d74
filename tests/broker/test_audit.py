"""Every administrative change has an entry in the audit, despite failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from postbus.broker import audit as audit_module
from postbus.broker.audit import Audit, AuditedChange, AuditEntry, AuditResult
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.entity.commands import Refusal, Refused
from postbus.store.audit import AuditEnd, AuditStore
from postbus.store.errors import StoreFull, StoreUnavailable
from postbus.store.postgres import Store

CHANGE = AuditedChange("token ci", "127.0.0.1", "control API", "put", "orders", {})
PURGE = replace(CHANGE, verb="purge messages", detail={"where": "a = 1"})
ALL = 2**63 - 1


class FailingStore(AuditStore):
    """Fails a configured number of times before it writes."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.failures: list[Exception] = []
        self.failed = asyncio.Event()

    async def begin(self, begun_ms: int, changes: Sequence[AuditedChange]) -> list[int]:
        self._fail()
        return await super().begin(begun_ms, changes)

    async def end(self, ends: Sequence[AuditEnd]) -> None:
        self._fail()
        await super().end(ends)

    def _fail(self) -> None:
        if self.failures:
            self.failed.set()
            raise self.failures.pop(0)


class Rig:
    """An audit on a real store, with a clock and a catalog version set by the test."""

    def __init__(self, store: Store, tasks: asyncio.TaskGroup) -> None:
        self.store = FailingStore(store)
        self.version = 1
        self.now_ms = 1_800_000_000_000
        self.audit = Audit(self.store, tasks.create_task, lambda: self.version, lambda: self.now_ms)
        self.writing = tasks.create_task(self.audit.keep_writing())

    async def entries(self, **filters: str) -> list[AuditEntry]:
        return await self.audit.page(ALL, 1_000, **filters)

    async def outcomes(self) -> list[str | None]:
        return [entry.outcome for entry in await self.entries()]


@pytest.fixture
async def rig(store: Store) -> AsyncIterator[Rig]:
    async with asyncio.TaskGroup() as tasks:
        made = Rig(store, tasks)
        yield made
        made.store.failures.clear()
        made.audit.stop()


async def returning(value: int = 7) -> int:
    return value


async def refusing(refusal: Refusal) -> None:
    raise DirectoryRefusal(Refused(refusal, "for a reason"))


async def test_line_is_durable_before_its_change_begins(rig: Rig) -> None:
    async def work() -> list[AuditEntry]:
        return await rig.store.page(ALL, 10)

    (seen,) = await rig.audit.recorded(CHANGE, work())
    assert (seen.change, seen.begun_ms) == (CHANGE, rig.now_ms)
    assert (seen.outcome, seen.ended_ms) == (None, None)
    (entry,) = await rig.entries()
    assert (entry.number, entry.outcome, entry.ended_ms) == (seen.number, "done", rig.now_ms)


async def test_result_of_a_change_in_the_audit_is_that_of_its_caller(rig: Rig) -> None:
    assert await rig.audit.recorded(CHANGE, returning()) == 7
    for refusal, outcome in (
        (Refusal.NOT_EMPTY, "refused: for a reason"),
        (Refusal.UNKNOWN, "unknown"),
    ):
        with pytest.raises(DirectoryRefusal, match="for a reason"):
            await rig.audit.recorded(CHANGE, refusing(refusal))
        assert (await rig.outcomes())[0] == outcome

    async def broken() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await rig.audit.recorded(CHANGE, broken())
    assert (await rig.outcomes())[0] == "unknown"


async def test_definition_that_stays_as_it_is_leaves_no_line(rig: Rig) -> None:
    async def changing() -> None:
        rig.version += 1

    await rig.audit.recorded(CHANGE, returning(), may_change_nothing=True)
    assert await rig.entries() == []
    await rig.audit.recorded(CHANGE, changing(), may_change_nothing=True)
    assert await rig.outcomes() == ["done"]


async def test_change_is_completed_though_its_caller_hangs_up(rig: Rig) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        begun.set()
        await go_on.wait()

    calling = asyncio.create_task(rig.audit.recorded(CHANGE, slow()))
    await begun.wait()
    calling.cancel()
    await asyncio.wait({calling})
    assert await rig.outcomes() == [None]
    go_on.set()
    while await rig.outcomes() != ["done"]:
        await asyncio.sleep(0)


async def test_calls_that_follow_each_other_are_one_line(rig: Rig) -> None:
    def result_of(count: int) -> AuditResult:
        return AuditResult({"deleted": count}, range(count))

    for count in (250, 250, 40):
        await rig.audit.recorded(PURGE, returning(count), result_of, may_repeat=True)
        rig.now_ms += audit_module.TOGETHER_MS
    (entry,) = await rig.entries()
    assert (entry.calls, entry.outcome) == (3, "done")
    assert entry.change.detail["where"] == "a = 1"
    assert entry.change.detail["counts"] == {"deleted": 540}
    assert len(entry.change.detail["numbers"]) == audit_module.MOST_NAMED
    rig.now_ms += 1
    for other in (PURGE, replace(PURGE, caller="token b"), replace(PURGE, detail={"where": "b"})):
        await rig.audit.recorded(other, returning(1), result_of, may_repeat=True)
    await rig.audit.recorded(PURGE, returning(1), result_of)
    assert len(await rig.entries()) == 5


async def test_further_call_is_under_way_until_it_ends(rig: Rig) -> None:
    """A broker that dies meanwhile leaves no entry of a completed change."""
    await rig.audit.recorded(PURGE, returning(), may_repeat=True)
    seen: list[AuditEntry] = []

    async def second() -> None:
        seen.extend(await rig.store.page(ALL, 10))
        await rig.audit.recorded(PURGE, returning(), may_repeat=True)  # beside it: its own entry

    await rig.audit.recorded(PURGE, second(), may_repeat=True)
    assert [(entry.outcome, entry.calls) for entry in seen] == [(None, 2)]
    assert [entry.calls for entry in await rig.entries()] == [1, 2]


async def test_a_change_without_an_audit_line_is_refused(rig: Rig) -> None:
    changed = []

    async def change() -> None:
        changed.append(1)

    rig.store.failures = [StoreUnavailable("gone")]
    with pytest.raises(DirectoryRefusal, match=r"cannot be audited.*: gone") as caught:
        await rig.audit.recorded(CHANGE, change())
    assert caught.value.refused.refusal is Refusal.NOT_APPLIED
    assert not changed
    assert await rig.entries() == []


async def test_full_store_does_not_prevent_freeing_space(rig: Rig) -> None:
    rig.store.failures = [StoreFull(), StoreFull()]
    assert await rig.audit.recorded(PURGE, returning(), may_repeat=True) == 7
    while not await rig.entries():
        await asyncio.sleep(0)
    (entry,) = await rig.entries()
    assert (entry.change.verb, entry.outcome) == ("purge messages", "done")


async def test_end_is_written_again_until_the_store_accepts_it(rig: Rig) -> None:
    async def change() -> None:
        rig.store.failures = [StoreUnavailable()] * 3

    await rig.audit.recorded(CHANGE, change())
    while rig.store.failures:
        await asyncio.sleep(0)
    while not (outcomes := await rig.outcomes()) or None in outcomes:
        await asyncio.sleep(0)
    assert outcomes == ["done"]


async def test_stop_writes_ended_changes_and_does_not_wait_for_a_store(rig: Rig) -> None:
    await rig.audit.recorded(CHANGE, returning())
    rig.audit.stop()
    await rig.writing
    assert [entry.outcome for entry in await rig.store.page(ALL, 10)] == ["done"]
    (entry,) = await rig.audit.begin_all([CHANGE])
    rig.audit.end(entry, "done")
    rig.store.failures = [StoreUnavailable()] * 9
    await rig.audit.keep_writing()
    assert len(rig.store.failures) == 8


async def test_old_lines_and_too_many_are_forgotten(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "FORGET_AFTER", 1)
    monkeypatch.setattr(audit_module, "MOST_ENTRIES", 4)
    for number in range(6):
        await rig.audit.recorded(replace(CHANGE, entity=f"q{number}"), returning())
        rig.now_ms += audit_module.KEPT_MS // 4
    while len(entries := await rig.entries()) > 4:
        await asyncio.sleep(0)
    assert [entry.change.entity for entry in entries] == ["q5", "q4", "q3", "q2"]
    monkeypatch.setattr(audit_module, "MOST_ENTRIES", 100)
    rig.now_ms += audit_module.KEPT_MS // 2
    await rig.audit.recorded(CHANGE, returning())
    while len(entries := await rig.entries()) > 3:
        await asyncio.sleep(0)
    assert [entry.change.entity for entry in entries] == ["orders", "q5", "q4"]


async def test_audit_lines_contain_escaped_bounded_texts(rig: Rig) -> None:
    odd = "a\0b\ud800\n" + "x" * 9_000
    change = replace(CHANGE, caller=odd, entity=odd, detail={"where": odd, odd: [odd]})
    with pytest.raises(DirectoryRefusal):
        await rig.audit.recorded(change, refusing(Refusal.ARGUMENT_OUT_OF_RANGE))
    (entry,) = await rig.entries()
    shown = "a\\x00b\\ud800\n"
    for text in (entry.change.caller, entry.change.entity, entry.change.detail["where"]):
        assert text.startswith(shown)
        assert len(text) < 3_000
    assert await rig.entries(entity=odd) == [entry]


async def test_lines_are_found_by_entity_and_caller_page_by_page(rig: Rig) -> None:
    for number in range(6):
        caller, entity = f"token {number % 2}", f"Queue-{number % 3}"
        await rig.audit.recorded(replace(CHANGE, caller=caller, entity=entity), returning())
    numbers = [entry.number for entry in await rig.entries()]
    assert numbers == sorted(numbers, reverse=True)
    assert [each.number for each in await rig.audit.page(numbers[1], 2)] == numbers[2:4]
    assert len(await rig.entries(entity="queue-1")) == 2
    assert len(await rig.entries(caller="token 0")) == 3
    assert len(await rig.entries(entity="QUEUE-1", caller="token 1")) == 1
