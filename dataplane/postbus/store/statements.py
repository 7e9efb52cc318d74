"""The SQL of commits: one data-modifying statement each, the smallest that suffices.

`INSERT` to `MIXED` serve the hot path of queues, `CHANGES` adds blocks and acquisitions, `PUBLISH`
adds bodies, seen ids and arrivals, `TAKE` deletes rows that may share bodies. `GENERAL` does all of
it and moves, `FULL` everything. For settled rows that stay, `KEEP` serves the hot path,
`KEEP_PUBLISH` adds the parts of `PUBLISH`, `RETAIN` does everything. The larger statements name
their arguments, which are the columns of `changes.py`. Up to `KEEP_PUBLISH` there is a form whose
rows go beside it as a COPY (ADR 49).
Sub-statements share a snapshot: none sees the writes of another.

Arrays are taken apart one by one in the list of columns: all in one `unnest` of the `from` clause
would be copied into a tuplestore each. Both pad the shorter of two arrays with nulls: the columns
of a table are made from one list (`changes.py`).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

INSERT_ONE: Final = """
insert into message (row_key, enqueued_ms, envelope, application_properties, body)
values ($1, $2, $3, $4, $5)
"""
DELETE_ONE: Final = "delete from message where row_key = $1"
INSERT: Final = """
insert into message (row_key, enqueued_ms, envelope, application_properties, body)
select unnest($1::bigint[]), unnest($2::bigint[]), unnest($3::bytea[]), unnest($4::bytea[]),
       unnest($5::bytea[])
"""
DELETE: Final = "delete from message where row_key = any ($1::bigint[])"
MIXED: Final = """
with gone as (
    delete from message where row_key = any ($6::bigint[])
)
insert into message (row_key, enqueued_ms, envelope, application_properties, body)
select unnest($1::bigint[]), unnest($2::bigint[]), unnest($3::bytea[]), unnest($4::bytea[]),
       unnest($5::bytea[])
"""
TAKE: Final = """
with gone as (
    delete from message where row_key = any ($1::bigint[]) returning body_id
), disembodied as (
    delete from body where body_id = any ($2::bigint[])
), unshared as (
    delete from shared where body_id = any ($2::bigint[])
)
select string_agg(int8send(body_id), ''::bytea) as released from gone where body_id is not null
"""
"""Arguments: row keys, small unreferenced shared bodies. Like all statements below it returns the
ids of shared bodies of deleted rows, eight bytes each, big-endian; or null."""

SWEEP: Final = """
with disembodied as (
    delete from body where body_id = any ($1::bigint[])
)
delete from shared where body_id = any ($1::bigint[])
"""


class Named(NamedTuple):
    """A statement and the names of its arguments in their order."""

    sql: str
    names: tuple[str, ...]


class Commit(NamedTuple):
    """A statement with its rows, and the same without those that a COPY beside it writes."""

    whole: Named
    beside: Named


def _named(*parts: str) -> Named:
    """Join sub-statements and the final one; `{name}` is an argument."""
    *subs, final = (part.strip() for part in parts)
    text = "with " + ", ".join(subs) + "\n" + final
    names = tuple(dict.fromkeys(re.findall(r"\{(\w+)\}", text)))
    sql = re.sub(r"\{(\w+)\}", lambda match: f"${names.index(match[1]) + 1}", text)
    return Named(sql, names)


PLAIN_GONE: Final = """
gone as (
    delete from message where row_key = any ({deletes}::bigint[])
)
"""
GONE: Final = """
gone as (
    delete from message where row_key = any ({deletes}::bigint[]) returning body_id
)
"""
RESERVED: Final = """
reserved as (
    insert into block (first_key, size, entity_no, sub_queue, first_sequence)
    select unnest({block_keys}::bigint[]), unnest({block_sizes}::int[]), unnest({block_nos}::int[]),
           unnest({block_queues}::smallint[]), unnest({block_sequences}::bigint[])
)
"""
ATTEMPTED: Final = """
attempted as (
    insert into acquired (row_keys, attempts)
    select {attempt_keys}::bigint[], {attempts}::int[]
    where cardinality({attempt_keys}::bigint[]) > 0
)
"""
EMBODIED: Final = """
embodied as (
    insert into body (body_id, chunk, data)
    select unnest({inline_ids}::bigint[]), 0, unnest({inline_bodies}::bytea[])
)
"""
SHARING: Final = """
sharing as (
    insert into shared (body_id, row_keys)
    select unnest({shared_ids}::bigint[]), unnest({shared_keys}::bytea[])
)
"""
UNSHARED: Final = """
unshared as (
    delete from shared where body_id = any ({dead_bodies}::bigint[])
)
"""
DISEMBODIED: Final = """
disembodied as (
    delete from body where body_id = any ({dead_bodies}::bigint[])
)
"""
SEEING: Final = """
seeing as (
    insert into seen (entity_no, first_ms, last_ms, digests)
    select unnest({seen_nos}::int[]), unnest({seen_first_ms}::bigint[]),
           unnest({seen_last_ms}::bigint[]), unnest({digests}::bytea[])
)
"""
ARRIVED: Final = """
arrived as (
    insert into inbound as i (source_partition, entity_no, last_number)
    select unnest({in_sources}::int[]), unnest({in_nos}::int[]), unnest({in_numbers}::bigint[])
    on conflict (entity_no, source_partition) do update
    set last_number = greatest(excluded.last_number, i.last_number)
)
"""
INSERTED: Final = """
inserted as (
    insert into message (
        row_key, enqueued_ms, envelope, application_properties, body, body_id
    )
    select unnest({keys}::bigint[]), unnest({enqueued}::bigint[]), unnest({envelopes}::bytea[]),
           unnest({properties}::bytea[]), unnest({bodies}::bytea[]), unnest({body_ids}::bigint[])
)
"""
PLAIN_ROWS: Final = """
insert into message (row_key, enqueued_ms, envelope, application_properties, body)
select unnest({keys}::bigint[]), unnest({enqueued}::bigint[]), unnest({envelopes}::bytea[]),
       unnest({properties}::bytea[]), unnest({bodies}::bytea[])
"""
BODIES_GONE: Final = """
select string_agg(int8send(body_id), ''::bytea) as released from gone where body_id is not null
"""

PUBLISH_PARTS: Final = (
    GONE,
    RESERVED,
    ATTEMPTED,
    EMBODIED,
    SHARING,
    UNSHARED,
    DISEMBODIED,
    SEEING,
    ARRIVED,
)


def _plain(*parts: str) -> Commit:
    return Commit(_named(*parts, PLAIN_ROWS), _named(*parts, "select"))


CHANGES: Final = _plain(PLAIN_GONE, RESERVED, ATTEMPTED)
SEEN: Final = _plain(PLAIN_GONE, SEEING)
PUBLISH: Final = Commit(
    _named(*PUBLISH_PARTS, INSERTED, BODIES_GONE), _named(*PUBLISH_PARTS, BODIES_GONE)
)

SETTLING: Final = """
settling as (
    insert into settled (row_key, entity_no, how, settled_ms)
    select k.row_key, s.entity_no, s.how, s.settled_ms
    from (
        select unnest({settle_nos}::int[]), unnest({settle_hows}::smallint[]),
               unnest({settle_ms}::bigint[]), unnest({settle_firsts}::int[]),
               unnest({settle_lasts}::int[])
    ) as s (entity_no, how, settled_ms, first, last)
    cross join lateral unnest(({settle_keys}::bigint[])[s.first:s.last]) as k (row_key)
)
"""
KEEP: Final = _plain(PLAIN_GONE, RESERVED, ATTEMPTED, SEEING, SETTLING)
KEEP_PUBLISH: Final = Commit(
    _named(*PUBLISH_PARTS, SETTLING, INSERTED, BODIES_GONE),
    _named(*PUBLISH_PARTS, SETTLING, BODIES_GONE),
)

MOVES: Final = """
move as (
    select unnest({move_keys}::bigint[]) as row_key,
           unnest({move_new_keys}::bigint[]) as new_row_key,
           unnest({move_enqueued}::bigint[]) as enqueued_ms,
           unnest({move_properties}::bytea[]) as application_properties
)
"""
MOVED: Final = """
moved as (
    insert into message (row_key, enqueued_ms, envelope, application_properties, body, body_id)
    select move.new_row_key, coalesce(move.enqueued_ms, taken.enqueued_ms), taken.envelope,
           coalesce(
               move.application_properties,
               patch.application_properties,
               taken.application_properties
           ),
           taken.body, taken.body_id
    from move
    join taken on taken.row_key = move.row_key
    left join patch on patch.row_key = move.row_key
    order by move.new_row_key
)
"""
"""Uses `taken`, the rows that are moved."""
MOVING: Final = """
taken as (
    delete from message where row_key = any ({move_keys}::bigint[])
    returning row_key, enqueued_ms, envelope, application_properties, body, body_id
), carried as (
    insert into embodied (row_key, body_id)
    select move.new_row_key, taken.body_id
    from move join taken on taken.row_key = move.row_key
    where taken.body_id is not null
)
"""
SIDES: Final = """
uncarried as (
    delete from embodied where row_key = any ({deletes}::bigint[] || {move_keys}::bigint[])
), unpatched as (
    delete from patch where row_key = any ({deletes}::bigint[] || {move_keys}::bigint[])
), patched as (
    insert into patch as p (row_key, is_deferred, delivery_count, application_properties)
    select unnest({patch_keys}::bigint[]), unnest({patch_deferred}::boolean[]),
           unnest({patch_counts}::int[]), unnest({patch_properties}::bytea[])
    on conflict (row_key) do update
    set is_deferred = coalesce(excluded.is_deferred, p.is_deferred),
        delivery_count = coalesce(excluded.delivery_count, p.delivery_count),
        application_properties
            = coalesce(excluded.application_properties, p.application_properties)
), unkept as (
    delete from kept where row_key = any ({deletes}::bigint[] || {move_keys}::bigint[])
), keeping as (
    insert into kept (
        row_key, entity_no, sub_queue, sequence, delivery_count,
        died_ms, deliveries, link, client
    )
    select unnest({kept_keys}::bigint[]), unnest({kept_nos}::int[]),
           unnest({kept_queues}::smallint[]), unnest({kept_sequences}::bigint[]),
           unnest({kept_counts}::int[]), unnest({death_ms}::bigint[]),
           unnest({death_deliveries}::int[]), unnest({death_links}::bytea[]),
           unnest({death_clients}::text[])
), undue as (
    delete from due where row_key = any ({deletes}::bigint[] || {move_keys}::bigint[])
), scheduled as (
    insert into due (row_key, entity_no, due_ms, sequence)
    select unnest({due_keys}::bigint[]), unnest({due_nos}::int[]), unnest({due_ms}::bigint[]),
           unnest({due_sequences}::bigint[])
    on conflict (row_key) do update
    set due_ms = excluded.due_ms, sequence = excluded.sequence
), unbound as (
    delete from outbound where row_key = any ({deletes}::bigint[] || {move_keys}::bigint[])
), outgoing as (
    insert into outbound (row_key, source_no, target, sequence, is_dead_letter, is_resent)
    select unnest({out_keys}::bigint[]), unnest({out_nos}::int[]), unnest({out_targets}::text[]),
           unnest({out_sequences}::bigint[]), unnest({out_dead}::boolean[]),
           unnest({out_resent}::boolean[])
), unstaged as (
    delete from staged where body_id = any ({staged_ids}::bigint[])
)
"""
LEFT_BEHIND: Final = """
left_behind as materialized (
    select body_id, exists (select from shared s where s.body_id = gone.body_id) as is_shared
    from gone where body_id is not null
)
"""
RELEASED: Final = """
(
    select string_agg(int8send(body_id), ''::bytea) from left_behind where is_shared
) as released, (
    select string_agg(int8send(body_id), ''::bytea) from left_behind where not is_shared
) as orphaned
"""
"""The second column has the unshared bodies of deleted rows. No commit waits for their removal,
since their size is unknown (`sweep.py`)."""
SHARED_GONE: Final = f"select {RELEASED}"

OTHER_PARTS: Final = (
    RESERVED,
    ATTEMPTED,
    EMBODIED,
    SHARING,
    UNSHARED,
    DISEMBODIED,
    LEFT_BEHIND,
    SEEING,
    ARRIVED,
)
GENERAL_PARTS: Final = (GONE, MOVES, MOVING, MOVED, SIDES, *OTHER_PARTS)
GENERAL: Final = _named(*GENERAL_PARTS, INSERTED, SHARED_GONE)

DEFINED: Final = """
defined as (
    insert into entity as e (
        entity_no, name, kind, definition, next_sequence, catalog_version, topic_no, rules,
        is_partitioned, size_bytes, message_count, last_used_ms
    )
    select d.entity_no, d.name, d.kind, d.definition, d.next_sequence, d.catalog_version,
           d.topic_no, d.rules, d.is_partitioned, coalesce(d.size_bytes, known.size_bytes, 0),
           coalesce(d.message_count, known.message_count, 0), coalesce(d.last_used_ms, 0)
    from unnest(
        {definition_nos}::int[], {names}::text[], {kinds}::text[], {definitions}::jsonb[],
        {next_sequences}::bigint[], {versions}::bigint[], {topic_nos}::int[], {rules}::jsonb[],
        {partitioned}::boolean[], {definition_sizes}::bigint[], {definition_counts}::bigint[],
        {definition_uses}::bigint[]
    ) as d (
        entity_no, name, kind, definition, next_sequence, catalog_version, topic_no, rules,
        is_partitioned, size_bytes, message_count, last_used_ms
    )
    left join entity known on known.entity_no = d.entity_no
    on conflict (entity_no) do update
    set name = excluded.name, kind = excluded.kind, definition = excluded.definition,
        next_sequence = greatest(excluded.next_sequence, e.next_sequence),
        catalog_version = excluded.catalog_version, topic_no = excluded.topic_no,
        rules = excluded.rules, is_partitioned = excluded.is_partitioned,
        size_bytes = excluded.size_bytes, message_count = excluded.message_count,
        last_used_ms = greatest(excluded.last_used_ms, e.last_used_ms)
), dropped as (
    delete from entity where entity_no = any ({drops}::int[])
), measured as (
    update entity
    set size_bytes = coalesce(m.size_bytes, entity.size_bytes),
        message_count = coalesce(m.message_count, entity.message_count),
        last_used_ms = greatest(m.last_used_ms, entity.last_used_ms)
    from unnest(
        {measured_nos}::int[], {sizes}::bigint[], {counts}::bigint[], {uses}::bigint[]
    ) as m (entity_no, size_bytes, message_count, last_used_ms)
    where entity.entity_no = m.entity_no
), versioned as (
    update owner set catalog_version = greatest(catalog_version, {catalog_version}::bigint)
    where catalog_version < {catalog_version}::bigint
)
"""
REMEMBERING: Final = """
stating as (
    insert into session as s (entity_no, session_id, state, updated_ms)
    select * from unnest(
        {state_nos}::int[], {state_sessions}::bytea[], {states}::bytea[], {state_ms}::bigint[]
    )
    on conflict (entity_no, session_id) do update
    set state = excluded.state, updated_ms = excluded.updated_ms
), unstated as (
    delete from session
    where (entity_no, session_id) in (
        select * from unnest({stateless_nos}::int[], {stateless_sessions}::bytea[])
    )
), forgotten as (
    delete from seen where ctid = any (array(
        select old.ctid
        from unnest({forget_nos}::int[], {forget_ms}::bigint[]) as f (entity_no, before_ms)
        cross join lateral (
            select s.ctid from seen s
            where s.entity_no = f.entity_no and s.first_ms < f.before_ms
              and s.last_ms < f.before_ms
            limit 1000
        ) as old
    ))
), gateless as (
    delete from inbound where entity_no = any ({drops}::int[])
)
"""
"""A commit deletes a limited number of rows of ids, up to 6 KB each; the rest, and the session
states of a dropped entity, are deleted outside the commits (`upkeep.py`)."""
GROUPED: Final = """
grouped as (
    insert into reader_group as g (
        entity_no, sub_queue, name, kind, epoch, reader, settled, plan, planned, placed_ms, limits,
        base
    )
    select entity_no, sub_queue, name, kind, epoch, reader, settled, plan, planned, placed_ms,
           limits,
           case when is_placed then coalesce(
               (select m.low from low_mark m
                where m.entity_no = put.entity_no and m.sub_queue = put.sub_queue), 0
           ) else 0 end
    from unnest(
        {group_nos}::int[], {group_queues}::smallint[], {group_names}::text[],
        {group_kinds}::smallint[], {group_epochs}::bigint[], {group_readers}::text[],
        {group_settled}::bigint[], {group_plans}::jsonb[], {group_planned}::bigint[],
        {group_placed_ms}::bigint[], {group_limits}::jsonb[], {group_placed}::boolean[]
    ) as put (
        entity_no, sub_queue, name, kind, epoch, reader, settled, plan, planned, placed_ms, limits,
        is_placed
    )
    on conflict (entity_no, sub_queue, name) do update
    set epoch = excluded.epoch, reader = excluded.reader, settled = excluded.settled,
        plan = excluded.plan, planned = excluded.planned, placed_ms = excluded.placed_ms,
        limits = excluded.limits,
        base = greatest(g.base, excluded.base)
), ungrouped as (
    delete from reader_group
    where entity_no = any ({drops}::int[])
       or (entity_no, sub_queue, name) in (
           select * from unnest(
               {groupless_nos}::int[], {groupless_queues}::smallint[], {groupless_names}::text[]
           )
       )
), unmarked as (
    delete from low_mark where entity_no = any ({drops}::int[])
)
"""
FULL: Final = _named(*GENERAL_PARTS, DEFINED, REMEMBERING, GROUPED, INSERTED, SHARED_GONE)

COPYING: Final = """
lifted as (
    delete from message where row_key = any ({lifted_keys}::bigint[])
    returning row_key, enqueued_ms, envelope, application_properties, body, body_id
), copied as (
    select row_key, enqueued_ms, envelope, application_properties, body, body_id,
           exists (select from shared s where s.body_id = m.body_id) as is_shared
    from message m where row_key = any ({copied_keys}::bigint[])
), taken as (
    select * from lifted
    union all
    select row_key, enqueued_ms, envelope, application_properties, body, body_id from copied
), carried as (
    insert into embodied (row_key, body_id)
    select move.new_row_key, taken.body_id
    from move join taken on taken.row_key = move.row_key
    where taken.body_id is not null
    union all
    select row_key, body_id from copied where body_id is not null and not is_shared
    on conflict (row_key) do nothing
), sharing_copied as (
    insert into shared (body_id, row_keys)
    select body_id, ''::bytea from copied where body_id is not null and not is_shared
)
"""
"""A copy refers to the body of its row. The row's own body is shared from then on, by two rows in
`embodied`."""
SHARED_GONE_AND_COPIED: Final = f"""
select {RELEASED}, (
    select string_agg(int8send(body_id), ''::bytea) from copied where body_id is not null
) as retained
"""
"""The third column has the bodies of copied rows, one id for each copy."""
RETAIN: Final = _named(
    GONE,
    MOVES,
    COPYING,
    MOVED,
    SIDES.replace("{move_keys}", "{lifted_keys}"),
    *OTHER_PARTS,
    DEFINED,
    REMEMBERING,
    GROUPED,
    SETTLING,
    INSERTED,
    SHARED_GONE_AND_COPIED,
)
