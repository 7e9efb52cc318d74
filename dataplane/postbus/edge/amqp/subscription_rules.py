"""Rules of subscriptions as AMQP clients list and change them, by the right to listen.

Administration changes them, as for all protocols. A request of a link is answered by callback, so
that each change runs in a task of the bus.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from postbus.broker.administration import Administration, PutMode, RuleDescription
from postbus.broker.audit import Audit, AuditedChange, AuditResult
from postbus.broker.catalog.change_tasks import explained
from postbus.contract.entities import RuleProperties
from postbus.entity.commands import Done, Refusal, Refused

logger = logging.getLogger(__name__)


class SubscriptionRules:
    """The rules of one bus. `path` is the name of a subscription in the catalog."""

    def __init__(
        self,
        administration: Administration,
        audit: Audit,
        start: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        """`start` runs a coroutine in a task of the bus."""
        self._administration = administration
        self._audit = audit
        self._start = start

    def listed(self, path: str) -> Sequence[RuleDescription] | Refused:
        """Return the rules of a subscription in order of their creation."""
        found = self._administration.find(path)
        if found is None:
            return Refused(Refusal.ENTITY_NOT_FOUND, f"there is no subscription {path}")
        return found.rules

    def add(
        self,
        path: str,
        rule: RuleProperties,
        change: AuditedChange,
        on_reply: Callable[[Done | Refused], None],
    ) -> None:
        """Add a new rule. `change`: verb and caller, for the audit."""
        work = self._administration.put_rule(path, rule, mode=PutMode.CREATE)
        self._start(self._change(work, rule.name, change, on_reply))

    def remove(
        self,
        path: str,
        name: str,
        change: AuditedChange,
        on_reply: Callable[[Done | Refused], None],
    ) -> None:
        """Remove a rule. `change`: verb and caller, for the audit."""
        work = self._administration.delete_rule(path, name)
        self._start(self._change(work, name, change, on_reply))

    async def _change(
        self,
        work: Awaitable[object],
        rule: str,
        change: AuditedChange,
        on_reply: Callable[[Done | Refused], None],
    ) -> None:
        """Make a change with an audit entry, and answer.

        Every client with the right to listen may change rules, at any rate: such calls share
        entries.
        """
        reply: Done | Refused = Done()
        try:
            await self._audit.recorded(
                change, work, lambda _: AuditResult(rules=(rule,)), may_repeat=True
            )
        except Exception as error:  # noqa: BLE001 - a client's definition may not end the bus
            reply = explained(error).refused
        try:
            on_reply(reply)
        except Exception:
            logger.exception("a receiver of a reply broke")
