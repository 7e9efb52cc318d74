"""The rules of all subscriptions of a topic, which select and change published messages.

A subscription gets one copy, the message as published, if any of its rules without an action
matches, and one more for each matching rule with an action. If a rule cannot be evaluated, the
subscription gets the first error instead of copies, for its dead-letter queue. Rules without an
action are evaluated until one matches, those that match every message and correlation filters
first, so a rule whose result is not needed cannot fail.

Correlation filters are not evaluated one by one. Those with the same fields form a group, which
looks up their values together; a group is used if the message has one field of the group, its
pivot. SQL filters are evaluated one by one.

Evaluation costs steps. Each subscription may spend some on each message; beyond them it spends at
most half of what is left of the apply's budget. One that needs more gets an error, so a
subscription with expensive rules harms neither the others nor the partition (`steps`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from operator import itemgetter
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from postbus.contract.entities import RuleProperties
from postbus.message.codec import DecodeError
from postbus.message.envelope import Envelope
from postbus.message.fields import Field, MessageFields
from postbus.rules.compiled import (
    CompiledRule,
    Criteria,
    EvaluationError,
    compile_rule,
    correlated,
    malformed,
)
from postbus.rules.steps import (
    MESSAGE_STEPS,
    SUBSCRIPTION_STEPS,
    StepPool,
    spend,
)


class Copies(NamedTuple):
    """Copies of one message for one subscription; without envelopes only on an error."""

    subscription_no: int
    envelopes: list[Envelope]
    error: EvaluationError | None


Place: TypeAlias = Field | str
"""A field of the properties section, or the name of an application property."""

Member: TypeAlias = tuple[int, int]
"""A subscription and the number of one of its rules."""

INDEXED_GROUPS: Final = 64
INDEXED_PLACES: Final = 32
"""Maximum number of places in a filter, and of groups of a subscription, in the index; other
filters are evaluated one by one: each message visits every group that its properties lead to."""


class Routing:
    """The rules of a topic's subscriptions.

    `steps`: budget of evaluation, shared with the other topics of a partition.
    """

    def __init__(self, random: Random, steps: StepPool | None = None) -> None:
        """Start without subscriptions; `random` supplies randomness for newid()."""
        self._random = random
        self._steps = StepPool() if steps is None else steps
        self._subscriptions: dict[int, _Subscription] = {}
        self._plain: list[int] = []
        self._asked: dict[int, _Subscription] = {}
        self._index = _CorrelationIndex()
        self._rule_count = 0

    def put(self, subscription_no: int, rules: Sequence[RuleProperties]) -> None:
        """Add a subscription or replace its rules; raises `RuleError` before anything changes.

        Unchanged rules, by identity, are neither compiled nor indexed again.
        """
        before = self._subscriptions.get(subscription_no)
        known = {} if before is None else {id(rule.properties): rule for rule in before.rules}
        numbered: list[_Rule] = []
        for properties in rules:
            rule = known.pop(id(properties), None)
            if rule is None:
                self._rule_count += 1
                rule = _Rule(self._rule_count, compile_rule(properties, self._random))
            numbered.append(rule)
        subscription = _Subscription(subscription_no, numbered)
        had = {} if before is None else before.indexed
        for number, rule in had.items():
            if number not in subscription.indexed:
                self._index.remove(rule.criteria, (subscription_no, number))
        for number, rule in subscription.indexed.items():
            if number not in had:
                self._index.add(rule.criteria, (subscription_no, number))
        if before is not None:
            self._forget(before)
        self._subscriptions[subscription_no] = subscription
        if subscription.is_plain:
            insort(self._plain, subscription_no)
        elif subscription.is_asked:
            self._asked[subscription_no] = subscription

    def remove(self, subscription_no: int) -> None:
        """Forget a subscription, if it exists."""
        subscription = self._subscriptions.get(subscription_no)
        if subscription is None:
            return
        self._forget(subscription)
        for number, rule in subscription.indexed.items():
            self._index.remove(rule.criteria, (subscription_no, number))

    def _forget(self, subscription: _Subscription) -> None:
        number = subscription.number
        del self._subscriptions[number]
        if subscription.is_plain:
            del self._plain[bisect_left(self._plain, number)]
        self._asked.pop(number, None)

    def route(self, envelope: Envelope, now_ms: int) -> list[Copies]:
        """Return the copies of each subscription, in rising order of their numbers.

        Subscriptions without copies are absent. The message is decoded only if a rule needs it. A
        subscription whose rules exceed its steps gets an error.
        """
        copies = [Copies(number, [envelope], None) for number in self._plain]
        if len(copies) == len(self._subscriptions):
            return copies
        fields = MessageFields(envelope, now_ms)
        hits: dict[int, list[int]] | None
        try:
            hits = self._index.find(fields)
        except DecodeError:  # each subscription reports its own errors
            hits = None
            asked = [found for found in self._subscriptions.values() if not found.is_plain]
        else:
            asked = list(self._asked.values())
            asked += [self._subscriptions[number] for number in hits if number not in self._asked]
        steps = self._steps
        steps.left += MESSAGE_STEPS
        share = steps.left // 2
        for subscription in asked:
            fields.steps_left = share + SUBSCRIPTION_STEPS
            got = subscription.copies(
                fields, None if hits is None else hits.get(subscription.number, ())
            )
            if got is not None:
                copies.append(got)
            if fields.steps_left < share:
                steps.left -= share - max(fields.steps_left, 0)
                share = steps.left // 2
        copies.sort(key=_NUMBER)
        return copies


_NUMBER: Final = itemgetter(0)


class _Rule:
    """A rule and its number in the index."""

    __slots__ = ("compiled", "number")

    def __init__(self, number: int, compiled: CompiledRule) -> None:
        self.number = number
        self.compiled = compiled

    @property
    def properties(self) -> RuleProperties:
        return self.compiled.properties

    @property
    def criteria(self) -> Criteria:
        assert self.compiled.criteria is not None
        return self.compiled.criteria


class _Subscription:
    """The rules of one subscription, by the way of their evaluation.

    `indexed`: number -> rule of those that the index looks up. `passing` and `acting` are asked one
    by one, the latter with their places among all rules.
    """

    __slots__ = (
        "acting",
        "indexed",
        "is_always",
        "is_asked",
        "is_plain",
        "number",
        "passing",
        "passing_steps",
        "places",
        "rules",
    )

    def __init__(self, number: int, rules: Sequence[_Rule]) -> None:
        self.number = number
        self.rules = rules
        able = [(at, rule) for at, rule in enumerate(rules) if not rule.compiled.is_never]
        self.is_always = any(
            rule.compiled.is_always and rule.compiled.action is None for _, rule in able
        )
        groups: set[frozenset[Place]] = set()
        self.indexed: dict[int, _Rule] = {}
        self.places: dict[int, int] = {}
        self.passing: list[CompiledRule] = []
        self.acting: list[tuple[int, CompiledRule]] = []
        has_actions = False
        for at, rule in able:
            compiled = rule.compiled
            has_actions = has_actions or compiled.action is not None
            if compiled.action is None and self.is_always:
                continue
            if compiled.criteria is not None and _is_indexed(compiled.criteria, groups):
                self.indexed[rule.number] = rule
                self.places[rule.number] = at
            elif compiled.action is None:
                self.passing.append(compiled)
            else:
                self.acting.append((at, compiled))
        # Correlation filters first: they are cheap.
        self.passing.sort(key=_is_sql)
        self.passing_steps = sum(compiled.steps for compiled in self.passing)
        self.is_plain = self.is_always and not has_actions
        self.is_asked = (self.is_always and has_actions) or bool(self.passing or self.acting)

    def copies(self, fields: MessageFields, hits: Sequence[int] | None) -> Copies | None:
        """Return the copies; `hits` are the matching indexed rules, None: unknown."""
        envelopes: list[Envelope] = []
        try:
            if self.is_always or self._passes(fields, hits):
                envelopes.append(fields.envelope)
            for compiled, is_known in self._acting(hits):
                if is_known or _fits(compiled, fields):
                    envelopes.append(compiled.act(fields))
        except EvaluationError as error:
            return Copies(self.number, [], error)
        except DecodeError as error:
            return Copies(self.number, [], malformed(error))
        return Copies(self.number, envelopes, None) if envelopes else None

    def _passes(self, fields: MessageFields, hits: Sequence[int] | None) -> bool:
        """Return whether any rule without an action matches."""
        indexed = self.indexed
        if hits is None:
            for rule in indexed.values():
                if rule.compiled.action is None and _fits(rule.compiled, fields):
                    return True
        else:
            for number in hits:
                if indexed[number].compiled.action is None:
                    return True
        is_counted = fields.steps_left >= self.passing_steps  # all at once, which is faster
        if is_counted:
            fields.steps_left -= self.passing_steps
        for compiled in self.passing:
            if not is_counted:
                spend(fields, compiled.steps)
            if compiled.test(fields) is True:
                return True
        return False

    def _acting(self, hits: Sequence[int] | None) -> Iterable[tuple[CompiledRule, bool]]:
        """Return the rules with an action that may match, in order, and whether they do."""
        if not hits and hits is not None:
            return [(compiled, False) for _, compiled in self.acting] if self.acting else ()
        found = [(at, compiled, False) for at, compiled in self.acting]
        for number in self.indexed if hits is None else hits:
            compiled = self.indexed[number].compiled
            if compiled.action is not None:
                found.append((self.places[number], compiled, hits is not None))
        found.sort(key=_NUMBER)
        return [(compiled, is_known) for _, compiled, is_known in found]


def _is_indexed(criteria: Criteria, groups: set[frozenset[Place]]) -> bool:
    """Return whether the index has room for a filter of a subscription that has `groups`."""
    if len(criteria) > INDEXED_PLACES:
        return False
    places = frozenset(criteria)
    if places not in groups:
        if len(groups) == INDEXED_GROUPS:
            return False
        groups.add(places)
    return True


def _is_sql(compiled: CompiledRule) -> bool:
    return compiled.criteria is None


def _fits(compiled: CompiledRule, fields: MessageFields) -> bool:
    spend(fields, compiled.steps)
    return compiled.test(fields) is True


# --- the index of correlation filters -------------------------------------------------------------


class _Group:
    """The correlation filters with the same places, by their values."""

    __slots__ = ("members", "pivot", "places")

    def __init__(self, places: tuple[Place, ...], pivot: Place) -> None:
        self.places = places
        self.pivot = pivot
        self.members: dict[tuple[Hashable, ...], list[Member]] = {}


class _CorrelationIndex:
    """Finds the matching correlation filters of a message without evaluating each."""

    def __init__(self) -> None:
        self._groups: dict[frozenset[Place], _Group] = {}
        self._by_pivot: dict[Place, list[_Group]] = {}
        # Number of groups with a field or a property; others of a message are ignored.
        self._fields: Counter[Field] = Counter()
        self._names: Counter[str] = Counter()

    def add(self, criteria: Criteria, member: Member) -> None:
        places = frozenset(criteria)
        group = self._groups.get(places)
        if group is None:
            pivot = min(criteria, key=lambda place: len(self._by_pivot.get(place, ())))
            group = self._groups[places] = _Group(tuple(criteria), pivot)
            self._by_pivot.setdefault(pivot, []).append(group)
            self._count(group, 1)
        asked = tuple(criteria[place] for place in group.places)
        group.members.setdefault(asked, []).append(member)

    def remove(self, criteria: Criteria, member: Member) -> None:
        group = self._groups[frozenset(criteria)]
        asked = tuple(criteria[place] for place in group.places)
        members = group.members[asked]
        members.remove(member)
        if members:
            return
        del group.members[asked]
        if group.members:
            return
        del self._groups[frozenset(criteria)]
        self._by_pivot[group.pivot].remove(group)
        if not self._by_pivot[group.pivot]:
            del self._by_pivot[group.pivot]
        self._count(group, -1)

    def _count(self, group: _Group, change: int) -> None:
        for place in group.places:
            counts: Counter[Any] = self._fields if isinstance(place, Field) else self._names
            counts[place] += change
            if not counts[place]:
                del counts[place]

    def find(self, fields: MessageFields) -> dict[int, list[int]]:
        """Return subscription -> positions of its matching rules; raises `DecodeError`."""
        values: dict[Place, Hashable] = {}
        if self._fields:
            for field in self._fields:
                value = fields.system[field]
                if value is not None:
                    values[field] = correlated(value)
        if self._names:
            for name, value in fields.application.items():
                if name in self._names:
                    values[name] = correlated(value)
        found: dict[int, list[int]] = {}
        for place in values:
            for group in self._by_pivot.get(place, ()):
                for number, position in group.members.get(tuple(map(values.get, group.places)), ()):
                    found.setdefault(number, []).append(position)
        return found
