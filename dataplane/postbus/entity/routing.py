"""The rules of all subscriptions of a topic: which of them get a published message, and as what.

A subscription gets one copy, the message as published, when any of its rules without an action
fits, and one more for each rule with an action that fits. When a rule that has to be asked cannot
be evaluated, the subscription gets no copy and the error instead, as its dead-letter queue would:
the first error counts. Rules without an action are asked until one fits, those that take every
message and correlation filters first, so a rule whose answer does not matter cannot fail.

Correlation filters are not asked one by one. Those that name the same fields form a group, which
looks their values up together; a group is looked at when the message has one field of the group,
its pivot. SQL filters are asked one by one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from operator import itemgetter
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from postbus.contract import RuleProperties
from postbus.entity.rules import (
    CompiledRule,
    Criteria,
    EvaluationError,
    compile_rule,
    correlated,
)
from postbus.message.codec import DecodeError
from postbus.message.envelope import Envelope
from postbus.message.fields import Field, MessageFields


class Copies(NamedTuple):
    """What one subscription gets of one message; no envelopes only when there is an error."""

    subscription_no: int
    envelopes: list[Envelope]
    error: EvaluationError | None


Place: TypeAlias = Field | str
"""A field of the properties section, or the name of an application property."""

Member: TypeAlias = tuple[int, int]
"""A subscription and the position of one of its rules."""


class Routing:
    """The rules of a topic's subscriptions."""

    def __init__(self, random: Random) -> None:
        """Start without subscriptions; `random` is what newid() draws from."""
        self._random = random
        self._subscriptions: dict[int, _Subscription] = {}
        self._plain: list[int] = []
        self._asked: dict[int, _Subscription] = {}
        self._index = _CorrelationIndex()

    def put(self, subscription_no: int, rules: Sequence[RuleProperties]) -> None:
        """Add a subscription or replace its rules; raises `RuleError` before anything changes."""
        compiled = [compile_rule(properties, self._random) for properties in rules]
        self.remove(subscription_no)
        subscription = _Subscription(subscription_no, compiled)
        self._subscriptions[subscription_no] = subscription
        if subscription.is_plain:
            insort(self._plain, subscription_no)
        elif subscription.is_asked:
            self._asked[subscription_no] = subscription
        for position, criteria in subscription.criteria():
            self._index.add(criteria, (subscription_no, position))

    def remove(self, subscription_no: int) -> None:
        """Forget a subscription; one that is not there is fine."""
        subscription = self._subscriptions.pop(subscription_no, None)
        if subscription is None:
            return
        if subscription.is_plain:
            del self._plain[bisect_left(self._plain, subscription_no)]
        self._asked.pop(subscription_no, None)
        for position, criteria in subscription.criteria():
            self._index.remove(criteria, (subscription_no, position))

    def route(self, envelope: Envelope, now_ms: int) -> list[Copies]:
        """Return what each subscription gets, in rising order of their numbers.

        Subscriptions that get nothing are absent. Nothing of the message is decoded when no rule
        needs it.
        """
        copies = [Copies(number, [envelope], None) for number in self._plain]
        if len(copies) == len(self._subscriptions):
            return copies
        fields = MessageFields(envelope, now_ms)
        hits: dict[int, list[int]] | None
        try:
            hits = self._index.find(fields)
        except DecodeError:  # each subscription says for itself which of its rules cannot be asked
            hits = None
            asked = [found for found in self._subscriptions.values() if not found.is_plain]
        else:
            asked = list(self._asked.values())
            asked += [self._subscriptions[number] for number in hits if number not in self._asked]
        for subscription in asked:
            got = subscription.copies(
                fields, None if hits is None else hits.get(subscription.number, ())
            )
            if got is not None:
                copies.append(got)
        copies.sort(key=_NUMBER)
        return copies


_NUMBER: Final = itemgetter(0)


class _Subscription:
    """The rules of one subscription, by what has to be done to ask them."""

    __slots__ = ("acting", "is_always", "is_asked", "is_plain", "number", "passing")

    def __init__(self, number: int, rules: Sequence[CompiledRule]) -> None:
        self.number = number
        able = [(at, rule) for at, rule in enumerate(rules) if not rule.is_never]
        passing = [(at, rule) for at, rule in able if rule.action is None]
        self.is_always = any(rule.is_always for _, rule in passing)
        # Correlation filters first: the index has answered them already.
        self.passing = [] if self.is_always else sorted(passing, key=_is_sql)
        self.acting = [(at, rule) for at, rule in able if rule.action is not None]
        self.is_plain = self.is_always and not self.acting
        self.is_asked = (self.is_always and not self.is_plain) or any(
            rule.criteria is None for _, rule in (*self.passing, *self.acting)
        )

    def criteria(self) -> Iterator[tuple[int, Criteria]]:
        """Yield position and criteria of the correlation filters that have to be asked."""
        for position, rule in (*self.passing, *self.acting):
            if rule.criteria is not None:
                yield position, rule.criteria

    def copies(self, fields: MessageFields, hits: Collection[int] | None) -> Copies | None:
        """Return what it gets; `hits` are positions of correlation filters, None: not known."""
        envelopes: list[Envelope] = []
        try:
            if self.is_always or any(_fits(at, rule, fields, hits) for at, rule in self.passing):
                envelopes.append(fields.envelope)
            for at, rule in self.acting:
                if _fits(at, rule, fields, hits):
                    envelopes.append(rule.act(fields))
        except EvaluationError as error:
            return Copies(self.number, [], error)
        return Copies(self.number, envelopes, None) if envelopes else None


def _is_sql(numbered: tuple[int, CompiledRule]) -> bool:
    return numbered[1].criteria is None


def _fits(at: int, rule: CompiledRule, fields: MessageFields, hits: Collection[int] | None) -> bool:
    if hits is not None and rule.criteria is not None:
        return at in hits
    return rule.matches(fields)


# --- the index of correlation filters -------------------------------------------------------------


class _Group:
    """The correlation filters that name the same places, by the values they ask for."""

    __slots__ = ("members", "pivot", "places")

    def __init__(self, places: tuple[Place, ...], pivot: Place) -> None:
        self.places = places
        self.pivot = pivot
        self.members: dict[tuple[Hashable, ...], list[Member]] = {}


class _CorrelationIndex:
    """Finds the correlation filters that a message fits without asking each."""

    def __init__(self) -> None:
        self._groups: dict[frozenset[Place], _Group] = {}
        self._by_pivot: dict[Place, list[_Group]] = {}
        # How many groups name a field or a property; no other ones of a message are looked at.
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
        """Return subscription -> positions of its rules that fit; raises `DecodeError`."""
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
