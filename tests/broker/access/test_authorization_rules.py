"""Authorization rules made at run time: sealed, bound to an entity, in force at once (ADR 31)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import asyncpg
import pytest

from postbus.broker.access.authorization_rules import (
    MAX_RULES,
    MAX_RULES_OF_ALL,
    AuthorizationRules,
    Keys,
    KeysUnreadable,
    WantedRule,
)
from postbus.broker.access.authz import Authorizer, KeyRule, TokenRefused
from postbus.broker.access.sealing import KeySeal, SealBroken
from postbus.broker.catalog.change_tasks import ChangeTasks
from postbus.broker.catalog.directory import DirectoryRefusal
from postbus.contract.entities import QueueProperties, Right
from postbus.entity.commands import Refusal
from postbus.store.authorization import AuthorizationStore, SealedRule
from postbus.store.catalog import CatalogStore
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from postbus.store.tombstones import TombstoneStore
from tests.broker.owner import directory_of
from tests.broker.putting import put_queue

pytestmark = pytest.mark.slow

SEAL = KeySeal(b"k" * 32)
SEND, LISTEN = frozenset({Right.SEND}), frozenset({Right.LISTEN})
ONE, TWO, THREE, GIVEN = (f"{word} of twenty and more" for word in ("one", "two", "three", "given"))
ROOT = KeyRule("root", frozenset(Right), Keys("root-1", "root-2"))
FIRST = KeyRule("first", LISTEN, Keys("first-1", "first-2"), "Orders")


class LossyStore(AuthorizationStore):
    """The real store; on request it loses a write or the answer to it."""

    loses_answer = loses_write = False
    failing_loads = 0

    async def load(self) -> list[SealedRule]:
        if self.failing_loads:
            self.failing_loads -= 1
            raise StoreUnavailable
        return await super().load()

    async def replace(self, *given: Any) -> tuple[int, list[SealedRule]]:
        if self.loses_write:
            raise StoreUnavailable
        written = await super().replace(*given)
        if self.loses_answer:
            raise StoreUnavailable
        return written


class Rig:
    """Rules over a directory with one queue, `Orders`."""

    def __init__(self, store: Store) -> None:
        self.directory = directory_of(CatalogStore(store), 1)
        self.store = LossyStore(store)
        self.tombstones = TombstoneStore(store)
        self.authorizer = Authorizer()
        self.numbers = itertools.count(1)
        self.tasks: list[asyncio.Task[None]] = []
        self.kept: dict[str, Keys] = {}
        self.rules = self.made(SEAL)
        self.directory.catalog.on_read.append(self.rules.load)

    def made(self, seal: KeySeal) -> AuthorizationRules:
        return AuthorizationRules(
            self.store,
            seal,
            self.directory,
            self.authorizer,
            (ROOT, FIRST),
            lambda: f"made-{next(self.numbers)}",
            ChangeTasks(self.start),
            self.keep_keys,
        )

    async def keep_keys(self, rule: KeyRule, keys: Keys) -> bool:
        self.kept[rule.name] = keys
        return rule is ROOT

    def start(self, work: Coroutine[object, object, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    def may(self, name: str, key: str) -> frozenset[Right]:
        """Return the rights that a password grants."""
        try:
            grants = self.authorizer.check_password(name, key)
            return frozenset(right for grant in grants for right in grant.rights)
        except TokenRefused:
            return frozenset()


@pytest.fixture
async def rig(store: Store) -> Rig:
    made = Rig(store)
    await made.directory.load()
    await put_queue(made.directory, "Orders", QueueProperties())
    await made.rules.load()
    made.directory.on_deletion(lambda _: made.rules.refresh())
    return made


async def refused(work: object) -> Refusal:
    with pytest.raises(DirectoryRefusal) as caught:
        await work  # type: ignore[misc]
    return caught.value.refused.refusal


async def test_a_caller_that_leaves_while_a_rule_is_deleted_does_not_keep_it_in_force(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.rules.put(None, WantedRule("robot", SEND))
    replace, begun, goes_on = rig.store.replace, asyncio.Event(), asyncio.Event()

    async def written_late(*arguments: Any) -> list[SealedRule]:
        written = await replace(*arguments)
        begun.set()
        await goes_on.wait()
        return written

    monkeypatch.setattr(rig.store, "replace", written_late)
    deleting = asyncio.create_task(rig.rules.delete(None, "robot"))
    await begun.wait()
    deleting.cancel()
    await asyncio.wait([deleting])
    goes_on.set()
    await rig.rules.put("orders", WantedRule("other", LISTEN))  # changes come one at a time still
    assert deleting.cancelled()
    assert not rig.may("robot", "made-1")


async def test_rule_counts_at_once_and_after_a_restart(rig: Rig) -> None:
    made = await rig.rules.put(None, WantedRule("robot", SEND))
    assert (made.keys.primary, made.keys.secondary) == ("made-1", "made-2")
    assert rig.may("robot", "made-1") == rig.may("robot", "made-2") == SEND
    await rig.rules.put("orders", WantedRule("reader", LISTEN, GIVEN))
    (grant,) = rig.authorizer.check_password("reader", GIVEN)
    assert (grant.path, grant.rights) == ("orders", LISTEN)

    rig.authorizer.replace(())
    again = rig.made(SEAL)
    await again.load()
    assert rig.may("robot", "made-1") == SEND
    assert [rule.name for rule in again.listed("ORDERS")] == ["first", "reader"]
    assert [rule.is_declared for rule in again.listed(None)] == [False, True]


async def test_manage_implies_the_others(rig: Rig) -> None:
    made = await rig.rules.put(None, WantedRule("boss", frozenset({Right.MANAGE})))
    assert made.rights == frozenset(Right)


async def test_keys_stay_unless_others_are_given(rig: Rig) -> None:
    await rig.rules.put("orders", WantedRule("robot", SEND, ONE, TWO))
    await rig.rules.put("orders", WantedRule("robot", LISTEN, secondary=THREE))
    assert rig.may("robot", ONE) == rig.may("robot", THREE) == LISTEN
    assert not rig.may("robot", TWO)


async def test_grants_follow_their_rule(rig: Rig) -> None:
    await rig.rules.put(None, WantedRule("robot", SEND, ONE, TWO))
    (by_first,) = rig.authorizer.check_password("robot", ONE)
    (by_second,) = rig.authorizer.check_password("robot", TWO)
    reviews: list[None] = []

    class Holder:
        def review_grants(self) -> None:
            reviews.append(None)

    holder = Holder()
    rig.authorizer.add_holder(holder)
    await rig.rules.put(None, WantedRule("robot", LISTEN, secondary=THREE))
    renewed = rig.authorizer.renewed(by_first)
    assert renewed is not None
    assert renewed.rights == LISTEN
    assert rig.authorizer.renewed(by_second) is None
    await rig.rules.delete(None, "robot")
    assert rig.authorizer.renewed(by_first) is None
    assert len(reviews) == 2
    rig.authorizer.remove_holder(holder)
    await rig.rules.put(None, WantedRule("robot", LISTEN))
    assert len(reviews) == 2


async def test_rules_go_with_their_entity(rig: Rig) -> None:
    await rig.rules.put("orders", WantedRule("robot", SEND, ONE, TWO))
    await rig.directory.delete("orders")
    assert not rig.may("robot", ONE)
    await put_queue(rig.directory, "orders", QueueProperties())
    rig.rules.refresh()
    assert not rig.may("robot", ONE), "another entity of that name"
    assert [rule.name for rule in rig.rules.listed("orders")] == ["first"]


async def test_rules_of_the_long_deleted_are_removed(rig: Rig, database: str) -> None:
    await rig.rules.put("orders", WantedRule("robot", SEND))
    await rig.rules.put(None, WantedRule("boss", SEND))
    await rig.directory.delete("orders")
    look = await asyncpg.connect(database)
    count = "select count(*) from postbus.authorization_rule"
    assert await look.fetchval(count) == 2, "it may be restored"
    await look.execute("update postbus.catalog set updated_ms = 1")
    await rig.tombstones.forget(2, 0)
    assert await look.fetchval(count) == 1
    await look.close()


async def test_replacing_all_keeps_repeated_rules(rig: Rig) -> None:
    await rig.rules.put("orders", WantedRule("old", SEND, ONE))
    await rig.rules.put("orders", WantedRule("kept", SEND, TWO))
    before = {rule.name: rule for rule in rig.rules.listed("orders")}
    repeated = WantedRule("first", LISTEN, "first-1", "first-2")
    wanted = [repeated, WantedRule("kept", SEND), WantedRule("new", LISTEN)]
    await rig.rules.replace("orders", wanted)
    after = {rule.name: rule for rule in rig.rules.listed("orders")}
    assert set(after) == {"first", "kept", "new"}
    assert after["kept"] == before["kept"]
    assert not rig.may("old", ONE)


async def test_invalid_rules_are_refused(rig: Rig) -> None:
    rules = rig.rules
    put, wrong = rules.put, Refusal.ARGUMENT_OUT_OF_RANGE
    assert await refused(put("gone", WantedRule("a", SEND))) is Refusal.ENTITY_NOT_FOUND
    assert await refused(rules.delete(None, "a")) is Refusal.ENTITY_NOT_FOUND
    assert await refused(rules.delete(None, "root")) is Refusal.NOT_ALLOWED
    assert await refused(put("orders", WantedRule("first", SEND))) is Refusal.NOT_ALLOWED
    assert await refused(put(None, WantedRule("a/b", SEND))) is wrong
    assert await refused(put(None, WantedRule("a", frozenset()))) is wrong
    assert await refused(put(None, WantedRule("a", SEND, ""))) is wrong
    assert await refused(put(None, WantedRule("a", SEND, "x" * 19))) is wrong
    assert await refused(put(None, WantedRule("a", SEND, None, "SAS_KEY_VALUE"))) is wrong
    assert await refused(put(None, WantedRule("a", SEND, "x" * 257))) is wrong
    assert await refused(rules.replace(None, [WantedRule("a", SEND)] * 2)) is wrong
    many = [WantedRule(f"r{number}", SEND) for number in range(MAX_RULES)]
    assert await refused(rules.replace(None, many)) is Refusal.QUOTA_EXCEEDED
    await rules.replace(None, many[1:])
    assert [rule.name for rule in rules.listed(None) if rule.is_declared] == ["root"]


async def test_rules_that_programs_keep_are_counted_for_each_program(rig: Rig) -> None:
    def kept(program: int, count: int) -> list[WantedRule]:
        mark = f"Pipeline/{program}"
        return [WantedRule(f"p{program}-{each}", SEND, managed_by=mark) for each in range(count)]

    rules = rig.rules
    own = [WantedRule(f"r{number}", SEND) for number in range(MAX_RULES - 1)]
    await rules.replace(None, [*own, *kept(1, MAX_RULES)])
    assert await refused(rules.put(None, WantedRule("more", SEND))) is Refusal.QUOTA_EXCEEDED
    more = WantedRule("more", SEND, managed_by="Pipeline/1")
    assert await refused(rules.put(None, more)) is Refusal.QUOTA_EXCEEDED
    await rules.put(None, WantedRule("p1-0", LISTEN))
    programs = [rule for number in range(1, 8) for rule in kept(number, MAX_RULES)]
    await rules.replace(None, [*programs, *kept(8, 4), *own])
    assert len(rules.listed(None)) == MAX_RULES_OF_ALL
    other = WantedRule("more", SEND, managed_by="Pipeline/9")
    assert await refused(rules.put(None, other)) is Refusal.QUOTA_EXCEEDED


async def test_shorter_keys_that_are_there_may_stay(rig: Rig) -> None:
    """The keys of this rig are short, as given keys of earlier versions could be."""
    made = await rig.rules.put("orders", WantedRule("robot", SEND))
    assert made.keys.primary == "made-1"
    await rig.rules.put("orders", WantedRule("beside", SEND))
    repeated = WantedRule("robot", LISTEN, "made-1")
    rig.rules.check("orders", [repeated])
    await rig.rules.replace("orders", [repeated])
    assert rig.may("robot", "made-1") == LISTEN
    assert await refused(rig.rules.put("orders", WantedRule("robot", SEND, "made-9"))) is (
        Refusal.ARGUMENT_OUT_OF_RANGE
    )


async def test_lost_answer_is_looked_up(rig: Rig) -> None:
    rig.store.loses_answer, rig.store.failing_loads = True, 1
    await rig.rules.put(None, WantedRule("robot", SEND, ONE))
    assert rig.may("robot", ONE) == SEND
    rig.store.loses_answer, rig.store.loses_write = False, True
    assert await refused(rig.rules.delete(None, "robot")) is Refusal.NOT_APPLIED
    assert rig.may("robot", ONE) == SEND


async def test_keys_are_not_readable_in_the_store(rig: Rig, database: str) -> None:
    await rig.rules.put(
        None,
        WantedRule("robot", SEND, "very-secret-and-long-enough", "more-secret-and-long-enough"),
    )
    look = await asyncpg.connect(database)
    (row,) = await look.fetch("select * from postbus.authorization_rule")
    assert b"secret" not in row["primary_sealed"] + row["secondary_sealed"]
    with pytest.raises(KeysUnreadable, match="sealing key"):
        await rig.made(KeySeal(b"x" * 32)).load()
    await look.execute("update postbus.authorization_rule set secondary_sealed = primary_sealed")
    with pytest.raises(KeysUnreadable):
        await rig.rules.load()
    await look.close()


def test_seal_opens_with_its_key_and_place_only() -> None:
    sealed = SEAL.seal("text", "here")
    assert SEAL.open(sealed, "here") == "text"
    assert SEAL.seal("text", "here") != sealed
    for seal, place, content in (
        (KeySeal(b"x" * 32), "here", sealed),
        (SEAL, "there", sealed),
        (SEAL, "here", sealed[:-1]),
        (SEAL, "here", b""),
    ):
        with pytest.raises(SealBroken):
            seal.open(content, place)
    for text in ("short", "=", "a" * 44):
        with pytest.raises(ValueError, match="sealing key"):
            KeySeal.from_text(text)


async def test_a_declared_rule_with_generated_keys_gets_other_keys(rig: Rig) -> None:
    put = await rig.rules.put(None, WantedRule(ROOT.name, ROOT.rights, ONE, ROOT.keys.primary))
    assert (put.is_declared, put.keys.primary) == (True, ONE)
    assert rig.kept[ROOT.name] == Keys(ONE, ROOT.keys.primary)
    assert rig.may(ROOT.name, ONE) == rig.may(ROOT.name, ROOT.keys.primary) == frozenset(Right)
    with pytest.raises(DirectoryRefusal, match="change it there"):
        await rig.rules.put("Orders", WantedRule(FIRST.name, FIRST.rights, ONE))
    with pytest.raises(DirectoryRefusal, match="change it there"):
        await rig.rules.put(None, WantedRule(ROOT.name, SEND, TWO))
    rig.rules.declare([FIRST])
    assert not rig.may(ROOT.name, ONE)
