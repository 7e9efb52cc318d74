"""Messages that writers of the bulk API stage and publish, in the home partition of an entity.

Stages are invisible. Publishing numbers the messages of a batch in one transaction: from then on
they are accepted, and arrive like those of an outbox, each number once (ADR 45). Numbers of an
entity rise, also over a restore of the store: they follow the clock. Called by
`broker/partition/publisher.py` and `broker/writers.py`; everything may raise StoreUnavailable, and
what changes the tables Fenced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from postbus.store.errors import Connection
from postbus.store.fenced import fenced
from postbus.store.migrate import schema_of
from postbus.store.postgres import Store

PART_BYTES: Final = 1 << 20
MAX_STAGES: Final = 65_536
"""Stages of an entity at once, of all its writers. Our choice: 64 GiB of full ones."""
MAX_WRITERS: Final = 10_000
"""Writers of an entity: each is kept, since it knows which batch it published last."""
SLOTS: Final = 64
"""Batches of an entity that are sent at the same time."""
NUMBERS_OF_A_MS: Final = 1 << 20
"""Numbers that a millisecond of the clock is ahead of the one before."""
STAGE_MS: Final = 86_400_000
"""Time after which a stage that is not published is removed."""
SWEPT_STAGES: Final = 16
"""Stages removed in one transaction: 64 MiB. Our choice."""


class WriterState(NamedTuple):
    """The last batch of a writer. `left`: messages of stages that have not arrived completely."""

    batch: int
    message_count: int
    left: int


class Publication(NamedTuple):
    """A batch whose messages are to arrive. `rate`: messages per second, None without a limit."""

    entity_no: int
    writer: str
    slot: int
    rate: int | None


class Stage(NamedTuple):
    """A published stage. `first_number`: the number of its first message; the others follow."""

    stage_no: int
    first_number: int
    message_count: int


class Stale(NamedTuple):
    """The writer has published a later batch, of which `left` messages have not arrived."""

    batch: int
    left: int


class Gone(NamedTuple):
    """Some stages do not exist."""

    stages: list[int]


class Sending(NamedTuple):
    """The batch before is not sent completely."""

    batch: int
    left: int


class Exhausted(NamedTuple):
    """The entity has as many of something as it may have."""

    what: str


class PublishingStore:
    """Stages and writers of one partition."""

    def __init__(self, store: Store, partition_id: int) -> None:
        self._store = store
        self._partition_id = partition_id
        self._schema = schema_of(partition_id)

    async def held_bytes(self, entity_no: int) -> tuple[int, int]:
        """Return number and size of the stages of an entity."""
        async with self._store.aside() as connection:
            row = await connection.fetchrow(self._sql(HELD), entity_no)
        assert row is not None
        return row["stages"], row["bytes"]

    async def add(
        self, epoch: int, stage_no: int, entity_no: int, writer: str, now_ms: int,
        *, message_count: int, size_bytes: int, data: bytes,
    ) -> None:  # fmt: skip
        """Store a stage. `size_bytes`: that of its messages for quotas."""
        async with fenced(self._store, self._partition_id, epoch) as connection:
            await connection.execute(
                ADD_STAGE, stage_no, entity_no, writer, now_ms, message_count, size_bytes
            )
            for part, start in enumerate(range(0, len(data), PART_BYTES)):
                piece = data[start : start + PART_BYTES]
                await connection.execute(ADD_PART, stage_no, part, piece)

    async def publish(
        self, epoch: int, entity_no: int, writer: str, batch: int, stages: Sequence[int],
        rate: int | None, now_ms: int,
    ) -> WriterState | Stale | Gone | Sending | Exhausted:  # fmt: skip
        """Decide that the messages of these stages, in this order, are a writer's batch.

        A repeated call changes nothing, whatever stages it names.
        """
        async with fenced(self._store, self._partition_id, epoch) as connection:
            known = await _state(connection, WRITER, entity_no, writer)
            if known is not None and batch <= known.batch:
                return known if batch == known.batch else Stale(known.batch, known.left)
            if known is not None and known.left:
                return Sending(known.batch, known.left)
            rows = await connection.fetch(UNPUBLISHED, entity_no, writer, list(stages))
            counts = {row["stage_no"]: row["message_count"] for row in rows}
            if missing := [number for number in stages if number not in counts]:
                return Gone(missing)
            row = await connection.fetchrow(WRITERS, entity_no)
            assert row is not None
            if known is None and row["writers"] >= MAX_WRITERS:
                return Exhausted(f"{MAX_WRITERS} writers")
            slot = _free_slot(row["slots"] or []) if stages else None
            if stages and slot is None:
                return Exhausted(f"{SLOTS} batches that are being sent")
            number = max(row["next_number"] or 0, now_ms * NUMBERS_OF_A_MS)
            firsts: list[int] = []
            for stage_no in stages:
                firsts.append(number)
                number += counts[stage_no]
            await connection.execute(NUMBER_STAGES, list(stages), firsts)
            total = sum(counts.values())
            await connection.execute(
                PUT_WRITER, entity_no, writer, batch, total, rate, slot, number
            )
        return WriterState(batch, total, total)

    async def writer(self, entity_no: int, name: str) -> WriterState | None:
        """Return the last batch of a writer, None if there is no such writer."""
        async with self._store.aside() as connection:
            return await _state(connection, self._sql(WRITER), entity_no, name)

    async def publications(self) -> list[Publication]:
        """Return the batches whose messages are to arrive."""
        async with self._store.aside() as connection:
            rows = await connection.fetch(self._sql(PUBLICATIONS))
        return [Publication(*row.values()) for row in rows]

    async def stages(self, entity_no: int, writer: str) -> list[Stage]:
        """Return the published stages of a writer in order."""
        async with self._store.aside() as connection:
            rows = await connection.fetch(self._sql(STAGES), entity_no, writer)
        return [Stage(*row.values()) for row in rows]

    async def data(self, stage_no: int) -> bytes:
        """Return the messages of a stage as they were sent."""
        async with self._store.aside() as connection:
            rows = await connection.fetch(self._sql(PARTS), stage_no)
        return b"".join(row["data"] for row in rows)

    async def arrived(self, epoch: int, stage_no: int) -> None:
        """Remove a stage whose messages are stored in the entity."""
        async with fenced(self._store, self._partition_id, epoch) as connection:
            await connection.execute(REMOVE_PARTS, [stage_no])
            await connection.execute(REMOVE_STAGE, stage_no)

    async def abort(self, epoch: int, entity_no: int, writer: str, stages: Sequence[int]) -> int:
        """Remove stages of a writer that are not published; return their number."""
        async with fenced(self._store, self._partition_id, epoch) as connection:
            rows = await connection.fetch(ABORT, entity_no, writer, list(stages))
            await connection.execute(REMOVE_PARTS, [row["stage_no"] for row in rows])
        return len(rows)

    async def forget(self, epoch: int, entity_no: int, writer: str) -> bool:
        """Remove a writer whose messages have arrived, with its stages; False if there is none."""
        async with fenced(self._store, self._partition_id, epoch) as connection:
            if not await connection.fetchval(FORGET, entity_no, writer):
                return False
            rows = await connection.fetch(REMOVE_UNPUBLISHED, entity_no, writer)
            await connection.execute(REMOVE_PARTS, [row["stage_no"] for row in rows])
        return True

    async def sweep(self, epoch: int, now_ms: int) -> int:
        """Remove some stages that are too old or whose entity is gone; return their number."""
        async with fenced(self._store, self._partition_id, epoch) as connection:
            rows = await connection.fetch(SWEEP, now_ms - STAGE_MS, SWEPT_STAGES)
            await connection.execute(REMOVE_PARTS, [row["stage_no"] for row in rows])
            await connection.execute(REMOVE_WRITERS)
        return len(rows)

    def _sql(self, statement: str) -> str:
        return statement.replace("{schema}", f"{self._schema}.")


async def _state(
    connection: Connection, statement: str, entity_no: int, writer: str
) -> WriterState | None:
    row = await connection.fetchrow(statement.replace("{schema}", ""), entity_no, writer)
    return None if row is None else WriterState(*row.values())


def _free_slot(used: Sequence[int]) -> int | None:
    return next((slot for slot in range(1, SLOTS + 1) if slot not in used), None)


HELD: Final = """
select count(*) as stages, coalesce(sum(size_bytes), 0)::bigint as bytes
from {schema}stage where entity_no = $1
"""
ADD_STAGE: Final = """
insert into stage (stage_no, entity_no, writer, staged_ms, message_count, size_bytes)
values ($1, $2, $3, $4, $5, $6)
"""
ADD_PART: Final = "insert into stage_part (stage_no, part, data) values ($1, $2, $3)"
WRITER: Final = """
select w.batch, w.message_count, coalesce((
    select sum(s.message_count) from {schema}stage s
    where s.entity_no = $1 and s.writer = $2 and s.first_number is not null
), 0)::bigint as "left"
from {schema}writer w where w.entity_no = $1 and w.name = $2
"""
UNPUBLISHED: Final = """
select stage_no, message_count from stage
where entity_no = $1 and writer = $2 and stage_no = any ($3::bigint[]) and first_number is null
"""
WRITERS: Final = """
select count(*) as writers, max(next_number) as next_number,
       array_agg(slot) filter (where slot is not null) as slots
from writer where entity_no = $1
"""
NUMBER_STAGES: Final = """
update stage s set first_number = n.first_number
from unnest($1::bigint[], $2::bigint[]) as n (stage_no, first_number)
where s.stage_no = n.stage_no
"""
PUT_WRITER: Final = """
insert into writer (entity_no, name, batch, message_count, rate, slot, next_number)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (entity_no, name) do update set
    batch = excluded.batch, message_count = excluded.message_count, rate = excluded.rate,
    slot = excluded.slot, next_number = excluded.next_number
"""
PUBLICATIONS: Final = """
select entity_no, name, slot::integer, rate from {schema}writer where slot is not null
order by next_number
"""
STAGES: Final = """
select stage_no, first_number, message_count from {schema}stage
where entity_no = $1 and writer = $2 and first_number is not null order by first_number
"""
PARTS: Final = "select data from {schema}stage_part where stage_no = $1 order by part"
REMOVE_PARTS: Final = "delete from stage_part where stage_no = any ($1::bigint[])"
REMOVE_STAGE: Final = """
with gone as (
    delete from stage where stage_no = $1 returning entity_no, writer
)
update writer w set slot = null from gone g
where w.entity_no = g.entity_no and w.name = g.writer and not exists (
    select from stage s
    where s.entity_no = g.entity_no and s.writer = g.writer and s.first_number is not null
      and s.stage_no <> $1
)
"""
ABORT: Final = """
delete from stage
where entity_no = $1 and writer = $2 and stage_no = any ($3::bigint[]) and first_number is null
returning stage_no
"""
FORGET: Final = """
delete from writer where entity_no = $1 and name = $2 and slot is null returning true
"""
REMOVE_UNPUBLISHED: Final = """
delete from stage where entity_no = $1 and writer = $2 and first_number is null returning stage_no
"""
SWEEP: Final = """
delete from stage where stage_no = any (array(
    select s.stage_no from stage s
    where (s.first_number is null and s.staged_ms < $1)
       or not exists (select from entity e where e.entity_no = s.entity_no)
    limit $2
))
returning stage_no
"""
REMOVE_WRITERS: Final = """
delete from writer w where not exists (select from entity e where e.entity_no = w.entity_no)
"""
