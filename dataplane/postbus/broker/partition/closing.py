"""Closing of a namespace that holds no messages, in step with traffic.

From one moment on all partitions refuse commands that bring messages. Those applied before are then
committed or known to have failed: each partition answers a command after all its earlier ones, and
a partition that was reloaded meanwhile ends the attempt. Messages only move or go from then on, so
that one count over all partitions, made without a pause, is exact; that they went is waited for,
too. Without any message the catalog records that the namespace is closed, and sends stay refused,
by later brokers too; otherwise, and after a crash before the record, they are accepted again.

If a partition was lost to another broker at the same time, the answer is "try again" although the
record may exist. The next attempt counts again, and opens a closed namespace that is not empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from postbus.broker.catalog.namespace import Namespace
from postbus.broker.catalog.preconditions import DirectoryRefusal, refusal
from postbus.broker.partition.host import Host
from postbus.entity.commands import Refusal, Refused, Tick

ANSWER_S: Final = 5.0
"""Bound on the commit of commands that were applied before sends were refused. Our choice: the time
after which the result of a commit is reported as unknown."""

MAX_NAMED: Final = 10
"""Entities named in a refusal. Our choice."""

RELOADED: Final = "a partition was reloaded meanwhile; try again"


class Holding(NamedTuple):
    """An entity that holds messages."""

    name: str
    message_count: int


class NamespaceNotEmpty(DirectoryRefusal):
    """Entities hold messages; `first` are at most ten of them by name."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self.first = sorted(holdings)[:MAX_NAMED]
        messages = sum(each.message_count for each in holdings)
        shown = ", ".join(f"{each.name} ({each.message_count})" for each in self.first)
        more = ", …" if len(holdings) > len(self.first) else ""
        entities = "1 entity holds" if len(holdings) == 1 else f"{len(holdings)} entities hold"
        count = "1 message" if messages == 1 else f"{messages} messages"
        detail = f"{entities} {count}: {shown}{more}"
        super().__init__(Refused(Refusal.NOT_EMPTY, detail))


class Closing:
    """Closes one namespace; see the module's docstring. `load` returns why it failed, or None."""

    def __init__(
        self,
        namespace: Namespace,
        hosts: Sequence[Host],
        load: Callable[[Sequence[Host]], Awaitable[str | None]],
    ) -> None:
        self._namespace = namespace
        self._hosts = hosts
        self._load = load
        self._one_at_a_time = asyncio.Lock()

    async def close(self) -> None:
        """Close the namespace, also for later brokers; do nothing if it is closed and empty.

        Raises `NamespaceNotEmpty`, and other refusals if that could not be found out.
        """
        async with self._one_at_a_time:
            problem = await self._load(self._hosts)
            if problem is not None:
                raise refusal(Refusal.NOT_APPLIED, problem)
            with self._namespace.refusing_sends():
                lives = self._lives()
                await self._settle(lives)
                holdings = self._holdings()
                if not holdings:
                    await self._settle(lives)  # the removal of the last messages is durable

                def is_empty() -> bool:
                    self._check(lives)
                    return not holdings

                await self._namespace.put_closed(is_empty)
                if holdings:
                    raise NamespaceNotEmpty(holdings)
                await self._settle(lives)  # nobody else had a partition when it was recorded

    async def open(self) -> None:
        """Open a closed namespace; do nothing if it is open.

        Raises `DirectoryRefusal`, and `NotWritten`.
        """
        async with self._one_at_a_time:
            await self._namespace.put_closed(lambda: False)

    def _lives(self) -> list[int | None]:
        return [host.epoch for host in self._hosts]

    def _check(self, lives: Sequence[int | None]) -> None:
        if None in lives or self._lives() != lives:
            raise refusal(Refusal.NOT_APPLIED, RELOADED)

    async def _settle(self, lives: Sequence[int | None]) -> None:
        """Return when the result of each command that was applied before is known."""
        try:
            async with asyncio.timeout(ANSWER_S):
                replies = await asyncio.gather(*(host.call(Tick()) for host in self._hosts))
        except TimeoutError:
            detail = "a partition did not answer in time; try again"
            raise refusal(Refusal.NOT_APPLIED, detail) from None
        if any(isinstance(reply, Refused) for reply in replies):
            raise refusal(Refusal.NOT_APPLIED, RELOADED)
        self._check(lives)

    def _holdings(self) -> list[Holding]:
        """Count the messages of all entities, retained ones too."""
        counts: dict[str, int] = {}
        for host in self._hosts:
            if host.state is not None:
                for entity in host.state.entities.values():
                    if count := entity.message_count:
                        counts[entity.name] = counts.get(entity.name, 0) + count
        return [Holding(name, count) for name, count in counts.items()]
