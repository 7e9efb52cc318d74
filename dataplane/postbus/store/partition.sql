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

-- Bodies above 8 KiB, in chunks; `body_id` is the row key under which the message first appeared.
create table body (
    body_id bigint not null,
    chunk integer not null,
    data bytea not null,
    constraint body_pkey primary key (body_id, chunk)
) with (toast_tuple_target = 8160);

-- Moved rows whose body lies under another key.
create table embodied (
    row_key bigint not null,
    body_id bigint not null,
    constraint embodied_pkey primary key (row_key)
);

-- Bodies written before the commit that refers to them; what is left here at a load is an orphan.
create table staged (
    body_id bigint not null,
    constraint staged_pkey primary key (body_id)
);

create table block (
    first_key bigint not null,
    size integer not null,
    entity_no integer not null,
    sub_queue smallint not null,
    first_sequence bigint not null,
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
    constraint entity_pkey primary key (entity_no)
);

-- Who writes this partition. `heartbeat_ms` is database time, `persisted_ms` entity time.
create table owner (
    is_only boolean not null default true,
    epoch bigint not null default 0,
    broker_name text not null default '',
    heartbeat_ms bigint not null default 0,
    is_released boolean not null default true,
    is_clean boolean not null default true,
    schema_version integer not null,
    protocol_version integer not null default 0,
    persisted_ms bigint not null default 0,
    catalog_version bigint not null default 0,
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
    else
        alter table message
            alter column envelope set storage external,
            alter column application_properties set storage external,
            alter column body set storage external;
        alter table body alter column data set storage external;
    end if;
end
$$;
