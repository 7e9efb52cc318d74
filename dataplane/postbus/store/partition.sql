-- The tables of one partition; run with search_path set to its schema. Complete and current.
-- Comments name the owner of a fact; shapes are explained in entity/outcomes.py.

-- Wide rows: insert and delete only. Keys come in blocks, so no second index is needed. The broker
-- runs VACUUM itself. What is large is compressed by lz4 where the server has it, else not at all:
-- pglz costs more CPU than all the rest of an insert.
create table message (
    row_key bigint not null,
    enqueued_ms bigint not null,
    envelope bytea not null,
    application_properties bytea,
    body bytea,
    body_id bigint,
    constraint message_pkey primary key (row_key)
) with (
    autovacuum_enabled = off,
    vacuum_truncate = off,
    toast_tuple_target = 8160,
    toast.autovacuum_enabled = off,
    toast.vacuum_truncate = off
);

-- Bodies that are shared or above 8 KiB, in chunks; `body_id` is the row key under which the
-- message first appeared.
create table body (
    body_id bigint not null,
    chunk integer not null,
    data bytea not null,
    constraint body_pkey primary key (body_id, chunk)
) with (toast_tuple_target = 8160);

-- Rows that stay in `message` for the retention of their entity, but are not live (ADR 18).
create table settled (
    row_key bigint not null,
    entity_no integer not null,
    how smallint not null,
    settled_ms bigint not null,
    constraint settled_pkey primary key (row_key)
) with (autovacuum_enabled = off, vacuum_truncate = off);

create index settled_time on settled (entity_no, settled_ms);

-- Bodies that several rows refer to; `row_keys` are those of the commit that made the body, eight
-- bytes each, little-endian. Current references are counted in memory.
create table shared (
    body_id bigint not null,
    row_keys bytea not null,
    constraint shared_pkey primary key (body_id)
);

-- Moved rows whose body lies under another key.
create table embodied (
    row_key bigint not null,
    body_id bigint not null,
    constraint embodied_pkey primary key (row_key)
);

create index embodied_body on embodied (body_id);

-- Bodies written before the commit that refers to them; what is left here at a load is an orphan.
create table staged (
    body_id bigint not null,
    constraint staged_pkey primary key (body_id)
);

-- `settled_parts`: a bit for each part in which everything is settled; the load skips it (ADR 44).
create table block (
    first_key bigint not null,
    size integer not null,
    entity_no integer not null,
    sub_queue smallint not null,
    first_sequence bigint not null,
    settled_parts bigint not null default 0,
    constraint block_pkey primary key (first_key)
);

create table patch (
    row_key bigint not null,
    is_deferred boolean,
    delivery_count integer,
    application_properties bytea,
    constraint patch_pkey primary key (row_key)
);

create table kept (
    row_key bigint not null,
    entity_no integer not null,
    sub_queue smallint not null,
    sequence bigint not null,
    delivery_count integer not null,
    died_ms bigint,
    deliveries integer,
    link bytea,
    client text,
    constraint kept_pkey primary key (row_key)
);

create index kept_sequence on kept (entity_no, sub_queue, sequence);

create table due (
    row_key bigint not null,
    entity_no integer not null,
    due_ms bigint not null,
    sequence bigint not null,
    constraint due_pkey primary key (row_key)
);

-- Attempts made on rows; the record with the greatest id wins.
create table acquired (
    id bigint generated always as identity,
    row_keys bigint[] not null,
    attempts integer[] not null,
    constraint acquired_pkey primary key (id)
);

create table entity (
    entity_no integer not null,
    name text not null,
    definition jsonb not null,
    next_sequence bigint not null,
    catalog_version bigint not null,
    size_bytes bigint not null default 0,
    message_count bigint not null default 0,
    kind text not null default 'queue',
    topic_no integer,
    rules jsonb not null default '[]',
    is_partitioned boolean not null default false,
    last_used_ms bigint not null default 0,
    constraint entity_pkey primary key (entity_no)
);

create table session (
    entity_no integer not null,
    session_id bytea not null,
    state bytea not null,
    updated_ms bigint not null,
    constraint session_pkey primary key (entity_no, session_id)
);

-- Digests of 16 bytes that duplicate detection saw between two times; one row a commit. They look
-- random: no compression, no toast where a page can hold them.
create table seen (
    entity_no integer not null,
    first_ms bigint not null,
    last_ms bigint not null,
    digests bytea not null
) with (toast_tuple_target = 8160);

create index seen_time on seen (entity_no, first_ms);

alter table seen alter column digests set storage external;

create table outbound (
    row_key bigint not null,
    source_no integer not null,
    target text not null,
    sequence bigint not null,
    is_dead_letter boolean not null,
    is_resent boolean not null default false,
    constraint outbound_pkey primary key (row_key)
);

create table inbound (
    entity_no integer not null,
    source_partition integer not null,
    last_number bigint not null,
    constraint inbound_pkey primary key (entity_no, source_partition)
) with (fillfactor = 50);

-- Cursors of reader groups. `plan` is that of the group, in its home partition only.
create table reader_group (
    entity_no integer not null,
    sub_queue smallint not null,
    name text not null,
    kind smallint not null,
    epoch bigint not null,
    reader text not null,
    settled bigint not null,
    plan jsonb,
    base bigint not null default 0,
    planned bigint not null default 0,
    placed_ms bigint not null default 0,
    limits jsonb,
    constraint reader_group_pkey primary key (entity_no, sub_queue, name)
) with (fillfactor = 50);

-- The row key from which on a sub-queue is complete: settled rows below it were deleted.
create table low_mark (
    entity_no integer not null,
    sub_queue smallint not null,
    low bigint not null,
    constraint low_mark_pkey primary key (entity_no, sub_queue)
) with (fillfactor = 50);

-- What each writer of the bulk API published last (ADR 45). `slot` is set while messages of that
-- batch are still to arrive: they come from partition -slot, see `inbound`.
create table writer (
    entity_no integer not null,
    name text not null,
    batch bigint not null,
    message_count bigint not null,
    rate integer,
    slot smallint,
    next_number bigint not null,
    constraint writer_pkey primary key (entity_no, name)
) with (fillfactor = 50);

-- Messages of writers, invisible. `first_number`: their numbers as arrivals, once published.
create table stage (
    stage_no bigint not null,
    entity_no integer not null,
    writer text not null,
    staged_ms bigint not null,
    message_count integer not null,
    size_bytes bigint not null,
    first_number bigint,
    constraint stage_pkey primary key (stage_no)
) with (fillfactor = 50);

create index stage_writer on stage (entity_no, writer);

create table stage_part (
    stage_no bigint not null,
    part integer not null,
    data bytea not null,
    constraint stage_part_pkey primary key (stage_no, part)
) with (toast_tuple_target = 8160);

alter table stage_part alter column data set storage external;

-- The writer of this partition. `incarnation` is that of postbus.broker; null: a broker of an
-- earlier version, which writes `heartbeat_ms` (database time) itself. `persisted_ms` is entity
-- time.
create table owner (
    is_only boolean not null default true,
    epoch bigint not null default 0,
    broker_name text not null default '',
    heartbeat_ms bigint not null default 0,
    is_released boolean not null default true,
    schema_version integer not null,
    protocol_version integer not null default 0,
    persisted_ms bigint not null default 0,
    catalog_version bigint not null default 0,
    incarnation uuid,
    taken_steps integer[] not null default '{}',
    constraint owner_pkey primary key (is_only),
    constraint owner_is_only check (is_only)
) with (fillfactor = 50);

do $$
begin
    if exists (
        select from pg_settings
        where name = 'default_toast_compression' and 'lz4' = any (enumvals)
    ) then
        alter table message
            alter column envelope set compression lz4,
            alter column application_properties set compression lz4,
            alter column body set compression lz4;
        alter table body alter column data set compression lz4;
        alter table session alter column state set compression lz4;
    else
        alter table message
            alter column envelope set storage external,
            alter column application_properties set storage external,
            alter column body set storage external;
        alter table body alter column data set storage external;
        alter table session alter column state set storage external;
    end if;
end
$$;
