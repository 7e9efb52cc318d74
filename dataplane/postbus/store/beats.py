"""One beat a second for each broker and store: who is alive, by each observer's clock (ADR 12).

A broker beats on a connection of its own, also while it loads, migrates or commits. The beat is a
commit that waits as commits of messages do, so that one that is done proves that nobody has taken
our place up to when it began. Others are silent when their beat did not change for so long while we
looked: no two clocks are compared. Whoever takes over from a silent broker ends its incarnation
first, so that its next beat fails and says by whom. Called by the store, its journals and claims.
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
"""A beat without an answer for so long: the database is gone, and whatever waits for it is ended.
Our choice: below the 5 s after which others may take us for dead."""
SILENCE_S: Final = 5.0
"""A broker whose beat did not change for so long may be taken over from (ADR 12)."""
CONFIRMATION_S: Final = 3.0
"""How long a beat confirms ownership (ADR 12). A broker of our own name that is
silent for so long tells nobody anything any more."""
GAP_S: Final = 2.5
"""Looks further apart prove no silence: we were paused ourselves, or the store was."""
FORGET_S: Final = 60.0
"""A broker that is silent for so long is ended by whoever sees it."""

_living: set[UUID] = set()
"""Incarnations of this process: what is not here any more has ended."""


class _Seen(NamedTuple):
    """What we know of another broker: its beat, and since when it has that one."""

    name: str
    beat: int
    since: float


class Beats:
    """Our life in one store, and what we see of the others.

    `confirmed_at`: when the last beat began that was done, on `clock`; what we own in the store is
    ours at least until then. `persisted_ms`: the highest time of an entity in what was committed.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        broker: Broker,
        on_dead: Callable[[], None],
        clock: Callable[[], float] = boottime_s,
        outage: Outage | None = None,
    ) -> None:
        """`on_dead` is told when the database does not answer any more, `outage` of each beat."""
        self.broker = broker
        self.identity: UUID | None = None
        self.confirmed_at = float("-inf")
        self.persisted_ms = 0
        self.round_trip_s: float | None = None
        """How long the last beat took that was done, the commit of one row."""
        self.on_asked: Callable[[str], None] = lambda _by: None
        """Told once, by whom, when another process of our name asks us to end."""
        self._on_dead = on_dead
        self._clock = clock
        self._outage = outage or Outage("")
        self._shared = SharedConnection(connect)
        self._beginning = asyncio.Lock()
        self._entering: UUID | None = None
        """A life whose entry got no answer, so that it is perhaps there: the next one is it."""
        self._followers: set[Callable[[Exception], None]] = set()
        self._others: dict[UUID, _Seen] = {}
        self._earlier: dict[int, _Seen] = {}
        self._looked_at = 0.0
        self._is_asked = False
        self._task: asyncio.Task[None] | None = None

    # --- our own life -----------------------------------------------------------------------------

    async def begin(self) -> UUID:
        """Beat from now on unless that is so; return who we are. Raises StoreUnavailable."""
        identity = await self._enter_once()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="beats")
        return identity

    def follow(self, on_end: Callable[[Exception], None]) -> None:
        """Tell `on_end` when this life ends or the database is gone."""
        self._followers.add(on_end)

    def unfollow(self, on_end: Callable[[Exception], None]) -> None:
        self._followers.discard(on_end)

    async def stop(self) -> None:
        """End this life in order: nobody has to wait for our silence."""
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
                logger.warning("the end was not told", extra={"error": repr(error)})
                self._shared.drop()
        await self._shared.close()

    def _forget(self) -> UUID | None:
        identity, self.identity = self.identity, None
        self.confirmed_at = float("-inf")
        if identity is not None:
            _living.discard(identity)
        return identity

    async def _enter_once(self) -> UUID:
        """Return who we are; a life begins where there is none, its entry is its first beat."""
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
        """Beat until we are stopped."""
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
            raise Fenced(f"taken over by {(ours and ours['ended_by']) or 'nobody we know'}")
        self.confirmed_at = started
        self.round_trip_s = self._clock() - started
        self._outage.ended()

    def _fail(self, error: Exception) -> None:
        """A beat failed; when the database said nothing at all, nothing else has to wait for it."""
        self._outage.failed(error)
        if isinstance(error.__cause__, TimeoutError):
            self._on_dead()
            self._end_followers(StoreUnavailable(f"the store said nothing for {ANSWER_S:.0f} s"))

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
        """Say whether another broker is alive as far as we see; it may be taken over from else."""
        seen, now = self._others.get(identity), self._clock()
        if now - self._looked_at > GAP_S:
            return True
        return seen is not None and now - seen.since < self._limit_s(seen.name)

    def _limit_s(self, name: str) -> float:
        return CONFIRMATION_S if name == self.broker.name else SILENCE_S

    async def take_place_of(self, owner: Incarnation, epoch: int, connection: Connection) -> None:
        """End the life of another broker that is gone or silent; raises Fenced while it is not.

        `epoch`: in which it owns the partition that is to be claimed.
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
        """Raise Fenced while a broker of an earlier version, which does not beat here, may live."""
        now, seen = self._clock(), self._earlier.get(partition_id)
        if seen is None or seen.beat != heartbeat_ms:
            seen = self._earlier[partition_id] = _Seen(name, heartbeat_ms, now)
        if now - seen.since < SILENCE_S:
            raise Fenced(f"owned by {name}, of an earlier version")

    def _reason(self, silence_s: float) -> str:
        return f"{self.broker} (it was silent for {silence_s:.0f} s)"


class Incarnation(NamedTuple):
    """The life of a broker in a store, as its row says it. `since`: when it began."""

    identity: UUID
    name: str
    process: Process
    beat: int
    since: str

    @classmethod
    def from_row(cls, row: asyncpg.Record) -> Incarnation:
        """Return the one of a row with `incarnation`, `broker_name` and `INCARNATION_COLUMNS`."""
        process = Process(*(row[name] for name in Process._fields))
        return cls(row["incarnation"], row["broker_name"], process, row["beat"], row["started_at"])

    def __str__(self) -> str:
        return f"{self.name}, {self.process}, there since {self.since}"


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
"""Of an ended broker only the highest time is kept for good."""
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
"""Only at the beat that was seen: one that came meanwhile shows that it lives."""
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
"""The last one that left stays: a partition that could not be released does not know the time. An
entry that got no answer perhaps never came: then those before stay."""
