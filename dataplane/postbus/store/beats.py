"""One beat a second for each broker and store, as a sign of life by each observer's clock (ADR 12).

A broker beats on a connection of its own, also while it loads, migrates or commits. A beat is a
commit with the durability of message commits; a completed beat proves that this broker owned its
partitions when the beat began. Another broker is silent if its beat has not changed for a time on
our clock: no two clocks are compared. A broker that takes over from a silent one ends the other's
incarnation first, so that its next beat fails and names the successor. Called by the store, its
journals and claims.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple
from uuid import UUID, uuid4

import asyncpg

from postbus.store.connections import SharedConnection
from postbus.store.errors import (
    CONNECTION_ERRORS,
    Connection,
    Fenced,
    StoreError,
    StoreUnavailable,
)
from postbus.store.incarnation import Broker, Process, boottime_s, is_provably_gone
from postbus.store.migrate import all_migrations
from postbus.store.outage import Outage

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
ANSWER_S: Final = 4.0
"""Time without an answer to a beat after which the database counts as gone, and work that waits for
it ends. Our choice: below the 5 s after which other brokers may take over."""
SILENCE_S: Final = 5.0
"""Silence after which another broker may take over (ADR 12)."""
CONFIRMATION_S: Final = 3.0
"""Time for which a beat confirms ownership (ADR 12). A broker of our own name that is silent for
longer releases no replies any more."""
GAP_S: Final = 2.5
"""Largest gap between looks that still proves silence; otherwise we or the store were paused."""
FORGET_S: Final = 60.0
"""Silence after which any broker ends the incarnation."""

_living: set[UUID] = set()
"""Incarnations of this process that have not ended."""


class _Seen(NamedTuple):
    """Another broker as we see it: its beat, and since when it has that beat."""

    name: str
    beat: int
    since: float


class Beats:
    """Our incarnation in one store, and the other brokers as we see them.

    `confirmed_at`: start of the last completed beat on `clock`; our partitions in the store were
    ours at least until then. `persisted_ms`: the highest entity time that was committed.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        broker: Broker,
        on_dead: Callable[[], None],
        clock: Callable[[], float] = boottime_s,
        outage: Outage | None = None,
    ) -> None:
        """`on_dead` is called when the database stops answering; each beat updates `outage`."""
        self.broker = broker
        self.identity: UUID | None = None
        self.confirmed_at = float("-inf")
        self.persisted_ms = 0
        self.round_trip_s: float | None = None
        """Duration of the last completed beat, a commit of one row."""
        self.on_asked: Callable[[str], None] = lambda _by: None
        """Called once with the requester when another process of our name asks us to end."""
        self._on_dead = on_dead
        self._clock = clock
        self._outage = outage or Outage("")
        self._shared = SharedConnection(connect)
        self._beginning = asyncio.Lock()
        self._entering: UUID | None = None
        """Identity of an INSERT with unknown result; the next attempt reuses it."""
        self._followers: set[Callable[[Exception], None]] = set()
        self._others: dict[UUID, _Seen] = {}
        self._earlier: dict[int, _Seen] = {}
        self._looked_at = 0.0
        self._is_asked = False
        self._task: asyncio.Task[None] | None = None

    # --- our own life -----------------------------------------------------------------------------

    async def begin(self) -> UUID:
        """Start to beat unless we do already; return our identity. Raises StoreUnavailable."""
        identity = await self._enter_once()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="beats")
        return identity

    def follow(self, on_end: Callable[[Exception], None]) -> None:
        """Call `on_end` when this incarnation ends or the database is gone."""
        self._followers.add(on_end)

    def unfollow(self, on_end: Callable[[Exception], None]) -> None:
        self._followers.discard(on_end)

    def abandon(self, error: Exception) -> None:
        """End the work that waits for the database: it is at another address now."""
        self._shared.drop()
        self._end_followers(error)

    async def stop(self) -> None:
        """End this incarnation, so that others need not wait for our silence."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        identity = self._forget() or self._entering
        if identity is not None:
            try:
                async with asyncio.timeout(ANSWER_S), self._shared.use() as connection:
                    await connection.execute(LEAVE, identity, self.persisted_ms, LEFT)
            except (*CONNECTION_ERRORS, StoreError, asyncpg.PostgresError) as error:
                logger.warning(
                    "the end of this broker was not recorded", extra={"error": repr(error)}
                )
                self._shared.drop()
        await self._shared.close()

    def _forget(self) -> UUID | None:
        identity, self.identity = self.identity, None
        self.confirmed_at = float("-inf")
        if identity is not None:
            _living.discard(identity)
        return identity

    async def _enter_once(self) -> UUID:
        """Return our identity; enter if there is none. The entry is the first beat."""
        async with self._beginning:
            if self.identity is not None:
                return self.identity
            identity = self._entering = self._entering or uuid4()
            process = self.broker.process
            started = self._clock()
            newest = all_migrations()[-1].number
            async with self._shared.use() as connection:
                entry = identity, self.broker.name, *process, newest
                is_ours = await connection.fetchval(ENTER, *entry) is not None
            self._entering = None
            if not is_ours:
                raise StoreUnavailable("the entry of this broker was ended before it was answered")
            _living.add(identity)
            self.identity, self.confirmed_at = identity, started
            self.round_trip_s = self._clock() - started
            return identity

    async def _run(self) -> None:
        """Beat until stopped."""
        while True:
            started = self._clock()
            try:
                await self._enter_once()
                await self._beat(started)
            except Fenced as error:
                logger.warning("our place was taken", extra={"error": str(error)})
                self._forget()
                self._end_followers(error)
            except (StoreError, asyncpg.PostgresError) as error:
                self._fail(error)
            await asyncio.sleep(max(BEAT_S - (self._clock() - started), 0.05))

    async def _beat(self, started: float) -> None:
        async with self._shared.use() as connection:
            rows = await connection.fetch(BEAT, self.identity, self.persisted_ms)
            self._look(rows)
            for identity, seen in list(self._others.items()):
                if self._clock() - seen.since >= FORGET_S:
                    text = self._reason(FORGET_S)
                    await connection.execute(END, identity, text, seen.beat)
        ours = next((row for row in rows if row["incarnation"] == self.identity), None)
        if ours is not None and ours["asked_by"] and not self._is_asked:
            self._is_asked = True
            logger.warning("asked to end", extra={"by": ours["asked_by"]})
            self.on_asked(ours["asked_by"])
        if ours is None or not ours["has_beaten"]:
            raise Fenced(f"taken over by {(ours and ours['ended_by']) or 'an unknown broker'}")
        self.confirmed_at = started
        self.round_trip_s = self._clock() - started
        self._outage.ended()

    def _fail(self, error: Exception) -> None:
        """Record a failed beat; without any answer all work that waits for the database is
        ended.
        """
        self._outage.failed(error)
        if isinstance(error.__cause__, TimeoutError):
            self._on_dead()
            self._end_followers(StoreUnavailable(f"the store did not answer for {ANSWER_S:.0f} s"))

    def _end_followers(self, error: Exception) -> None:
        for follower in list(self._followers):
            follower(error)

    # --- the others -------------------------------------------------------------------------------

    def _look(self, rows: list[asyncpg.Record]) -> None:
        now, before = self._clock(), self._others
        is_gap = now - self._looked_at > GAP_S
        self._looked_at = now
        self._others = {}
        for row in rows:
            if row["incarnation"] != self.identity and row["ended_by"] is None:
                seen = before.get(row["incarnation"])
                if seen is None or seen.beat != row["beat"] or is_gap:
                    seen = _Seen(row["broker_name"], row["beat"], now)
                self._others[row["incarnation"]] = seen

    def holds_on(self, identity: UUID) -> bool:
        """Return whether another broker counts as alive; if not, it may be taken over."""
        seen, now = self._others.get(identity), self._clock()
        if now - self._looked_at > GAP_S:
            return True
        return seen is not None and now - seen.since < self._limit_s(seen.name)

    def _limit_s(self, name: str) -> float:
        return CONFIRMATION_S if name == self.broker.name else SILENCE_S

    async def take_place_of(self, owner: Incarnation, epoch: int, connection: Connection) -> None:
        """End the incarnation of another broker that is gone or silent; raises Fenced otherwise.

        `epoch`: its epoch in the partition that is to be claimed.
        """
        held = Fenced(f"owned by {owner} in epoch {epoch}", owner.identity)
        if owner.name == self.broker.name and is_provably_gone(
            owner.process, owner.identity, self.broker.process, _living
        ):
            reason, beat = f"{self.broker} (its process has ended)", None
        else:
            seen, limit_s = self._others.get(owner.identity), self._limit_s(owner.name)
            if seen is None or seen.beat != owner.beat or self.holds_on(owner.identity):
                raise held
            reason, beat = self._reason(limit_s), owner.beat
        if await connection.fetchval(END, owner.identity, reason, beat) is None:
            raise held
        logger.warning("place of another broker taken", extra={"former": str(owner), "why": reason})

    def outwait(self, partition_id: int, heartbeat_ms: int, name: str) -> None:
        """Raise Fenced while a broker of an earlier version, which has no beats, may be alive."""
        now, seen = self._clock(), self._earlier.get(partition_id)
        if seen is None or seen.beat != heartbeat_ms:
            seen = self._earlier[partition_id] = _Seen(name, heartbeat_ms, now)
        if now - seen.since < SILENCE_S:
            raise Fenced(f"owned by {name}, of an earlier version")

    def _reason(self, silence_s: float) -> str:
        return f"{self.broker} (it was silent for {silence_s:.0f} s)"


class Incarnation(NamedTuple):
    """The incarnation of a broker in a store, read from its row. `since`: its start."""

    identity: UUID
    name: str
    process: Process
    beat: int
    since: str

    @classmethod
    def from_row(cls, row: asyncpg.Record) -> Incarnation:
        """Return the incarnation in a row with `incarnation`, `broker_name` and
        `INCARNATION_COLUMNS`.
        """
        process = Process(*(row[name] for name in Process._fields))
        return cls(row["incarnation"], row["broker_name"], process, row["beat"], row["started_at"])

    def __str__(self) -> str:
        return f"{self.name}, {self.process}, running since {self.since}"


INCARNATION_COLUMNS: Final = """
b.beat, b.host, b.pid, b.boot_id, b.pid_namespace, b.started_ticks, b.data_lock,
to_char(b.started_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as started_at
"""
ENTER: Final = """
with forgotten as (
    delete from postbus.broker
    where ended_by is not null and started_at < now() - interval '1 day'
)
insert into postbus.broker (
    incarnation, broker_name, host, pid, boot_id, pid_namespace, started_ticks, data_lock,
    schema_version, persisted_ms
)
select $1, $2, $3, $4, $5, $6, $7, $8, $9, coalesce(max(persisted_ms), 0) from postbus.broker
on conflict (incarnation) do update set beat = broker.beat + 1 where broker.ended_by is null
returning incarnation
"""
"""Of ended brokers only the highest time is kept."""
BEAT: Final = """
with ours as (
    update postbus.broker
    set beat = beat + 1, persisted_ms = greatest(persisted_ms, $2)
    where incarnation = $1 and ended_by is null
    returning incarnation
)
select b.incarnation, b.broker_name, b.beat, b.ended_by, b.asked_by,
       o.incarnation is not null as has_beaten
from postbus.broker b left join ours o on o.incarnation = b.incarnation
"""
END: Final = """
update postbus.broker set ended_by = $2
where incarnation = $1 and ended_by is null and ($3::bigint is null or beat = $3)
returning incarnation
"""
"""Conditional on the observed beat; a newer one proves the broker alive."""
LEFT: Final = "itself"
LEAVE: Final = """
with earlier as (
    delete from postbus.broker
    where ended_by = $3 and incarnation <> $1
      and exists (select from postbus.broker where incarnation = $1)
    returning persisted_ms
)
update postbus.broker
set ended_by = $3,
    persisted_ms = greatest(persisted_ms, $2, (select max(persisted_ms) from earlier))
where incarnation = $1
"""
"""The row of the last broker that left stays, because a partition that was not released has no time
of its own. If our entry was never stored, the earlier rows stay."""
